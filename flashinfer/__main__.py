# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m flashinfer``.

Adds to upstream: ``sm12x-instances``, and the modules of this fork in all commands that list modules.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

import click
from tabulate import tabulate

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_group: Any = _upstream.cli


def _ensure_modules_registered() -> list[Any]:
    """The status of every module; those of this fork also where upstream's own registration fails."""
    statuses: list[Any] = _upstream._ensure_modules_registered()
    return statuses or _upstream.jit_spec_registry.get_all_statuses()


@_group.command("sm12x-instances")
@click.option("--build", is_flag=True, help="Build fused_moe_120 first if it is not fresh")
@click.option("--all", "everything", is_flag=True, help="Instances outside the default set too (implies --build)")
@click.option("--json", "as_json", is_flag=True, help="Emit JSON instead of a table")
def sm12x_instances_cmd(build: bool, everything: bool, as_json: bool) -> None:
    """Show the kernel instances of fused_moe_120: registers, shared memory, stages, machine code"""
    from .jit.sm12x import modules, report
    from .jit.sm12x.instances import INSTANCES

    try:
        specs = [modules.gen_fused_moe_module()]
        if everything:
            specs += [modules.gen_fused_moe_instance_module(row) for row in INSTANCES if not row.default]
        rows = []
        for spec in specs:
            if build or everything:
                spec.build(need_lock=True)
            rows += report.instance_rows(spec)
    except RuntimeError as error:
        hint = "" if build or everything else "\n'python -m flashinfer sm12x-instances --build' builds it."
        raise click.ClickException(f"{error}{hint if 'build it first' in str(error) else ''}") from error
    rows.sort(key=lambda row: (row.architecture, row.tactic, row.gemm))
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    headers, cells = report.as_table(rows)
    click.echo(tabulate(cells, headers=headers, tablefmt="github"))


if __name__ == "__main__":
    _group()
