# SPDX-License-Identifier: Apache-2.0
"""``make demo``: shows this fork at work on a machine without a GPU.

1. Compiles ``fused_moe_120`` for a DGX Spark (``12.1a``) with the JIT, and keeps its PTX in the library: the binding,
   the launcher, and of its instances those that the layer below runs and one with block-scaled MMAs. A second demo and
   ``make test`` find it compiled.
2. Reads the machine code back: registers, shared memory, spills, and the block-scaled tensor instructions that only
   this architecture has.
3. Runs one gpt-oss-120b MoE layer (hidden = intermediate = 2880, 128 experts, top-4) through ``cutlass_fused_moe`` on
   CPU tensors, in each mode, and holds every output element against a float64 reference and its error bound.
4. Runs these kernels, for one token of that layer, on the virtual SM121 of ``emulator/``: each launch's work and
   checkers' reports are listed.
5. If there is a GPU of the family, or a Hopper, runs the layer there (``scripts/verify_gpu.py``).

The exit status is 0 only if every check in the tables holds. Nothing is timed on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from progress import Progress

if TYPE_CHECKING:
    import torch

    from flashinfer.jit.sm12x.report import InstanceRow
    from flashinfer.testing import MoEInputs

MODES = {
    0: "W4A8, MXFP8 input",
    1: "W4A8, bf16 input",
    2: "W4A16, bf16 input",
}
VIRTUAL_MODES = (0, 2)
ROOT = Path(__file__).resolve().parent.parent
NEXT = """
Next
  on a Spark      in the environment of vLLM 0.33.0, in a checkout there: pip install .
                  python -m flashinfer sm12x-build --vllm bf16
                  vllm serve openai/gpt-oss-120b --host 127.0.0.1 --gpu-memory-utilization 0.7 \\
                    --additional-config '{{"sm12x": "spark"}}'
  here            {python} -m flashinfer sm12x-doctor    what this machine has, and what it lacks
                  make test      the tests that find most; docs/evidence.md has the others"""

Check = tuple[str, bool]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2, help="tokens through the layer on the CPU (default: 2)")
    parser.add_argument("--seed", type=int, default=2880, help="of the layer's random weights and inputs")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}; it must be at least 1")
    introduce()
    checks = [*compile_and_inspect(), *run_layer(options.tokens, options.seed)]
    from flashinfer.testing.virtual_device import in_own_process

    checks += in_own_process(run_on_virtual_device, options.tokens, options.seed)
    checks += run_on_gpu(gpu())
    failed = [what for what, holds in checks if not holds]
    print(f"\n{len(checks) - len(failed)} of {len(checks)} checks hold" + "".join(f"\n  FAILED: {f}" for f in failed))
    python = Path(sys.executable)
    print(NEXT.format(python=python.relative_to(ROOT) if python.is_relative_to(ROOT) else python))
    return 1 if failed else 0


def introduce() -> None:
    import torch

    import flashinfer

    print(
        f"flashinfer {flashinfer.__version__} + SM12x fork {flashinfer.__fork_version__} in "
        f"{Path(str(flashinfer.__file__)).parent.parent}\n"
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, "
        f"GPU: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'}"
    )


def tell(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]], checks: Sequence[Check] = ()) -> None:
    """Print a table, and what was checked of it."""
    from tabulate import tabulate

    print(f"\n{title}\n\n{tabulate(rows, headers=headers, tablefmt='simple')}")
    for what, holds in checks:
        print(f"{'ok  ' if holds else 'FAIL'} {what}")
    sys.stdout.flush()


def compile_and_inspect() -> list[Check]:
    from flashinfer.jit.sm12x import modules, report
    from flashinfer.sm12x.instances import MAIN_MODULE
    from flashinfer.testing.virtual_device import compiling_for

    leave_instances_out()
    with compiling_for("sm_121a"):
        spec = modules.gen_fused_moe_module()
    print()
    what = f"compiling {modules.FUSED_MOE} with its PTX, {len(spec.plan.steps)} sources, {spec.plan.description}"
    with Progress(what) as progress, build_notes(progress):
        built = spec.build(need_lock=True)
    size = f"{spec.plan.library.stat().st_size / (1 << 20):.1f}"
    figures = [len(spec.plan.steps), len(built.compiled), f"{built.wall_seconds:.1f}", f"{built.cpu_seconds:.1f}", size]
    rows = report.instance_rows(spec)
    names = {row.instance for row in rows}
    title = f"1. {spec.name}, {len(names)} of its {len(MAIN_MODULE)} instances: {', '.join(sorted(names))}"
    tell(title, ["sources", "compiled now", "seconds", "CPU seconds", "library MiB"], [figures])
    checks = machine_code_checks(rows)
    tell("2. Its machine code; shared memory of FC1 with 128 experts", *report.as_table(rows), checks)
    return checks


def leave_instances_out() -> None:
    """Compile few instances: all 16 take nvcc two minutes more."""
    sys.path.insert(0, str(ROOT / "tests"))
    importlib.import_module("few_instances").install()


@contextlib.contextmanager
def build_notes(progress: Progress) -> Iterator[None]:
    """The build's own lines (``fused_moe_120 [3/19] ...``) as ``progress.note``, and none of them on the terminal."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if done := re.search(r"\[(\d+)/(\d+)\]", record.getMessage()):
                progress.note = f"step {done[1]} of {done[2]}"

    logger = logging.getLogger("flashinfer.jit.sm12x")
    handlers, level = logger.handlers, logger.level
    logger.handlers = [Notes()]
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.handlers = handlers
        logger.setLevel(level)


def machine_code_checks(rows: Sequence[InstanceRow]) -> list[Check]:
    # The fused MoE kernel multiplies both formats in bfloat16, which holds scaled MXFP8 and MXFP4 values exactly.
    block_scaled = [row for row in rows if "mxfp8" in row.instance and row.gemm != "layer"]
    others = [row for row in rows if row not in block_scaled]
    spilling = [f"{row.instance} {row.gemm}: {row.local_accesses}" for row in rows if row.local_accesses]
    total = sum(row.block_scaled_mmas for row in block_scaled)
    return [
        (f"{len(rows)} kernels have matrix instructions", bool(rows) and all(r.tensor_instructions for r in rows)),
        (
            f"no kernel spills or uses local memory (LDL, STL){' but ' if spilling else ''}{', '.join(spilling)}",
            not spilling,
        ),
        (
            f"{len(block_scaled)} W4A8 GEMM kernels use the block-scaled FP4 MMA: {total} QMMA.SF with E2M1 in all",
            bool(block_scaled) and all(row.block_scaled_mmas > 0 for row in block_scaled),
        ),
        (f"{len(others)} other kernels use none", all(row.block_scaled_mmas == 0 for row in others)),
    ]


@functools.lru_cache(maxsize=1)
def drawn(tokens: int, seed: int) -> MoEInputs:
    """A layer with bf16 input; drawing its 128 experts takes longer than computing with them."""
    from flashinfer.testing import MoECase, make_moe_inputs

    return make_moe_inputs(MoECase(tokens, hidden=2880, inter=2880, num_experts=128, top_k=4, mode=1), seed)


def inputs_of(mode: int, inputs: MoEInputs) -> MoEInputs:
    """The inputs of :func:`drawn` in each mode: the same weights and tokens."""
    from flashinfer.testing import quantize_mxfp8, swizzle_scales

    if mode == 0:
        values, scales = quantize_mxfp8(inputs.input.double())
        return dataclasses.replace(inputs, input=values, input_sf=swizzle_scales(scales).flatten())
    return inputs if mode == 1 else dataclasses.replace(inputs, fc1_global=None, fc2_global=None)


def compute_layer(mode: int, inputs: MoEInputs, **reference: Any) -> tuple[torch.Tensor, float, str, Check]:
    """The layer's output, seconds, the share of its error bound that is used, and whether that is less than all."""
    from flashinfer.fused_moe import cutlass_fused_moe
    from flashinfer.testing import BoundViolation, check_within_bound, moe_reference

    inputs = inputs_of(mode, inputs)
    started = time.perf_counter()
    output = cutlass_fused_moe(**inputs.arguments())
    seconds = time.perf_counter() - started
    (output,) = output if isinstance(output, list | tuple) else (output,)
    what = f"{MODES[mode]}: every one of {output.numel()} elements within its bound"
    try:
        used = check_within_bound(output, *moe_reference(inputs, **reference), MODES[mode])
    except BoundViolation as violation:
        print(violation)
        return output, seconds, "exceeded", (what, False)
    return output, seconds, f"{used:.2f}", (what, True)


def run_layer(num_tokens: int, seed: int) -> list[Check]:
    print()
    rows, checks = [], []
    with Progress(f"a gpt-oss-120b layer on {num_tokens} tokens, seed {seed}, on the CPU") as progress:
        inputs = drawn(num_tokens, seed)
        for mode, name in MODES.items():
            progress.note = name
            output, seconds, used, check = compute_layer(mode, inputs)
            rows.append([name, f"{seconds:.2f}", f"{float(output.abs().max()):.3g}", used])
            checks.append(check)
    title = "3. cutlass_fused_moe on CPU tensors against float64, gpt-oss-120b layer (2880 x 2880, 128 experts, top-4)"
    tell(title, ["mode", "seconds", "largest |output|", "share of bound used"], rows, checks)
    return checks


def run_on_virtual_device(num_tokens: int, seed: int) -> list[Check]:
    """The first of the tokens through the layer, by the kernels as compiled for SM121."""
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module
    from flashinfer.testing import TENSOR_CORE
    from flashinfer.testing.virtual_device import virtual_device

    leave_instances_out()
    print()
    rows: list[list[object]] = []
    checks: list[Check] = []
    with (
        Progress("one token of the layer by these kernels on the virtual SM121") as progress,
        virtual_device("sm_121a", strict=False) as device,
    ):
        device.module(gen_cutlass_fused_moe_sm120_module)
        per_token = ("input", "token_selected_experts", "token_final_scales")
        inputs = drawn(num_tokens, seed)
        inputs = dataclasses.replace(inputs, **{name: getattr(inputs, name)[:1] for name in per_token})
        for mode in VIRTUAL_MODES:
            progress.note = MODES[mode]
            before = len(device.launches)
            checks.append(compute_layer(mode, inputs, accumulation=TENSOR_CORE)[-1])
            launches = device.launches[before:]
            rows += launch_rows(MODES[mode], launches)
            checks += launch_checks(MODES[mode], launches)
    headers = ["mode", "launch", "warp instr.", "MMAs", "global MB", "bank conflicts", "predicted us", "by"]
    headers += ["reports", "host s"]
    title = "4. The shipped kernels on the virtual SM121, gpt-oss-120b layer, one token: each launch"
    tell(title, headers, rows, checks)
    print(
        "predicted: a roofline for GB10 from these counters, a lower bound and no measurement "
        "(emulator/src/model/model.h)"
        "\nglobal MB: distinct 32-byte sectors touched; warp instr.: loops that wait are among them, so it varies"
    )
    return checks


def gpu() -> tuple[str, tuple[int, int]] | None:
    """Name and compute capability of the current GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability()


def run_on_gpu(found: tuple[str, tuple[int, int]] | None) -> list[Check]:
    """The layer on this machine's GPU, by kernels compiled for it, if the fork has any."""
    if found is None:
        return []
    name, capability = found
    if capability[0] != 12 and capability != (9, 0):
        print(f"\n5. Not on the {name}: the kernels are for compute capability 12.x, and for tests 9.0")
        return []
    print(f"\n5. gpt-oss-20b's layer on the {name}, first compiled for it: scripts/verify_gpu.py --quick", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "FLASHINFER_CUDA_ARCH_LIST"}
    if capability == (9, 0):
        environment["FLASHINFER_SM12X_MOE"] = "1"
    command = [sys.executable, str(ROOT / "scripts" / "verify_gpu.py"), "--quick", "--only", "moe"]
    return [(f"the layer on the {name}", subprocess.run(command, env=environment).returncode == 0)]


def launch_title(kernel: str) -> str:
    """The role of a launch in the layer, from its kernel's mangled name."""
    if "fused_moe_kernel" in kernel:
        return "layer"
    if "moe_pack_kernel" in kernel:
        return "tokens"
    role = re.search(r"4RoleE(\d)", kernel)
    return {"0": "FC1", "1": "FC2"}.get(role[1], "GEMM") if role else "prologue"


def launch_rows(mode: str, launches: Sequence[Any]) -> list[list[object]]:
    """One line per launch: what it executed."""
    return [
        [
            mode,
            launch_title(launch.kernel),
            launch.counters.warp_instructions,
            launch.counters.by_class.get("mma", 0),
            f"{launch.counters.global_distinct_bytes / 1e6:.2f}",
            launch.counters.shared_bank_conflicts,
            f"{launch.predicted.seconds * 1e6:.1f}",
            launch.predicted.bound,
            len(launch.reports),
            f"{launch.host_seconds:.1f}",
        ]
        for launch in launches
    ]


def launch_checks(mode: str, launches: Sequence[Any]) -> list[Check]:
    """Both GEMMs ran on tensor cores, in two launches or one, and no checker has anything to report."""
    gemms = [launch for launch in launches if launch_title(launch.kernel) not in ("prologue", "tokens")]
    titles = [launch_title(launch.kernel) for launch in gemms]
    multiplied = all(launch.counters.by_class.get("mma", 0) for launch in gemms)
    reports = [str(report) for launch in launches for report in launch.reports]
    silent = all(launch.clean for launch in launches)
    return [
        (f"{mode}: FC1 and FC2 ran, with MMAs", titles in (["FC1", "FC2"], ["layer"]) and multiplied),
        (f"{mode}: {len(launches)} launches, all checkers silent{''.join(chr(10) + r for r in reports)}", silent),
    ]


if __name__ == "__main__":
    sys.exit(main())
