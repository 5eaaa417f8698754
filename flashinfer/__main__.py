# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m flashinfer``.

Adds to upstream: ``sm12x-instances``, ``sm12x-plan``, and the modules of this fork in all commands that list modules.
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


def _token_counts(_context: Any, _option: Any, text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,4,64") from None


@_group.command("sm12x-plan")
@click.option("--tokens", default="1,4,16,64,256,1024,4096", show_default=True, callback=_token_counts)
@click.option(
    "--model", default="gpt-oss-120b", show_default=True, help="Sizes of the layer: gpt-oss-120b, gpt-oss-20b"
)
@click.option("--mode", default="w4a8-bf16", show_default=True, help="w4a8 (MXFP8 input), w4a8-bf16 or w4a16")
@click.option("--device", default="gb10", show_default=True, help="gb10 or h200")
@click.option("--sm-count", type=int, help="Multiprocessors, instead of the device's")
@click.option("--hidden", type=int, help="Hidden size, instead of the model's")
@click.option("--inter", type=int, help="Intermediate size of a rank, instead of the model's")
@click.option("--experts", type=int, help="Experts of a rank, instead of the model's")
@click.option("--top-k", type=int, help="Experts per token, instead of the model's")
@click.option("--json", "as_json", is_flag=True, help="Emit JSON instead of a table")
def sm12x_plan_cmd(
    tokens: list[int], model: str, mode: str, device: str, sm_count: int | None, as_json: bool, **sizes: int | None
) -> None:
    """Show which kernel instances a layer gets by default, and why"""
    from dataclasses import replace

    from .fused_moe import sm12x_explain

    for name, value, table in (
        ("--model", model, sm12x_explain.MODELS),
        ("--mode", mode, sm12x_explain.MODES),
        ("--device", device, sm12x_explain.DEVICES),
    ):
        if value not in table:
            raise click.BadParameter(f"{name} is {value!r}; it may be {', '.join(table)}")
    layer = replace(sm12x_explain.MODELS[model], **{name: size for name, size in sizes.items() if size is not None})
    gpu = sm12x_explain.DEVICES[device]
    if sm_count is not None:
        gpu = replace(gpu, sm_count=sm_count)
    try:
        rows = sm12x_explain.explain(layer, sm12x_explain.MODES[mode], tokens, gpu)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        about = {"layer": asdict(layer), "mode": mode, "device": asdict(gpu)}
        click.echo(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    click.echo(
        f"hidden {layer.hidden}, inter {layer.inter}, {layer.experts} experts, top-{layer.top_k}, {mode}; "
        f"{gpu.name}, {gpu.sm_count} SMs, MMA {'with' if gpu.block_scaled_mma else 'without'} block scales"
    )
    headers, cells = sm12x_explain.as_table(rows)
    click.echo(tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    _group()
