# SPDX-License-Identifier: Apache-2.0
"""``make demo``: what this fork does, on a machine without a GPU.

1. Compiles ``fused_moe_120`` for a DGX Spark (``12.1a``) with the JIT, from nothing, in a cache of its own.
2. Reads the machine code back: registers, shared memory, spills, and the block-scaled tensor instructions that only
   this architecture has.
3. Runs one gpt-oss-120b MoE layer (hidden = intermediate = 2880, 128 experts, top-4) through ``cutlass_fused_moe`` on
   CPU tensors, in each mode, and holds every output element against a float64 reference and its error bound.
4. Runs the shipped kernels themselves, for one token of that layer, on the virtual SM121 of ``emulator/``: the module
   is built once more with its PTX embedded, and each launch's work and watchers' reports are listed.

The exit status is 0 only if every check in the tables holds. No part of it needs a GPU, and none measures one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashinfer.jit.sm12x.report import InstanceRow

MODES = {
    0: "W4A8, MXFP8 input",
    1: "W4A8, bf16 input",
    2: "W4A16, bf16 input",
}
VIRTUAL_MODES = (0, 2)
GIB = 1 << 30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="12.1a", help="as FLASHINFER_CUDA_ARCH_LIST has it (default: 12.1a)")
    parser.add_argument("--tokens", type=int, default=8, help="tokens through the layer (default: 8)")
    parser.add_argument("--seed", type=int, default=2880, help="of the layer's random weights and inputs")
    parser.add_argument("--cache", type=Path, help="build in this cache, and keep it, instead of a temporary one")
    parser.add_argument("--skip-build", action="store_true", help="only run the layer")
    parser.add_argument("--skip-layer", action="store_true", help="only compile and look into the machine code")
    parser.add_argument("--skip-virtual", action="store_true", help="run no kernel on the virtual SM121")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}; it must be at least 1")
    return options


def main() -> int:
    options = arguments()
    with workspace(options.cache) as cache:
        # Read when flashinfer is imported, hence before it is.
        os.environ["FLASHINFER_WORKSPACE_BASE"] = str(cache)
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = options.arch
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        introduce()
        checks: list[tuple[str, bool]] = []
        if not options.skip_build:
            checks += compile_and_inspect()
        if not options.skip_layer:
            checks += run_layer(options.tokens, options.seed)
        if not options.skip_virtual:
            from flashinfer.testing.virtual_device import in_own_process

            checks += in_own_process(run_on_virtual_device, options.seed)
    failed = [what for what, holds in checks if not holds]
    print(f"\n{len(checks) - len(failed)} of {len(checks)} checks hold" + "".join(f"\n  FAILED: {f}" for f in failed))
    return 1 if failed else 0


@contextlib.contextmanager
def workspace(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="flashinfer-demo-") as folder:
        yield Path(folder)


def introduce() -> None:
    import torch

    import flashinfer

    print(
        f"flashinfer {flashinfer.__version__} + SM12x fork {flashinfer.__fork_version__} in "
        f"{Path(str(flashinfer.__file__)).parent.parent}\n"
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, "
        f"GPU: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'}"
    )


def table(title: str, headers: list[str], rows: list[list[object]]) -> None:
    from tabulate import tabulate

    print(f"\n{title}\n")
    print(tabulate(rows, headers=headers, tablefmt="simple"), flush=True)


def compile_and_inspect() -> list[tuple[str, bool]]:
    from flashinfer.jit.sm12x import modules, report

    spec = modules.gen_fused_moe_module()
    print(f"\ncompiling {spec.name}: {len(spec.plan.steps)} sources, {spec.plan.description}", flush=True)
    built = spec.build(need_lock=True)
    rows = sorted(report.instance_rows(spec), key=lambda row: (row.architecture, row.tactic, row.gemm))
    table(
        f"1. {spec.name}",
        ["sources", "compiled now", "seconds", "CPU seconds", "library MiB"],
        [
            [
                len(spec.plan.steps),
                len(built.compiled),
                f"{built.wall_seconds:.1f}",
                f"{built.cpu_seconds:.1f}",
                f"{spec.plan.library.stat().st_size / (1 << 20):.1f}",
            ]
        ],
    )
    print_instances(rows)
    return machine_code_checks(rows)


def print_instances(rows: list[InstanceRow]) -> None:
    """One line per instance; where a figure has two values, they are those of FC1 and FC2."""
    cells: list[list[object]] = []
    for _, group in itertools.groupby(rows, key=lambda row: (row.architecture, row.tactic)):
        gemms = sorted(group, key=lambda row: row.gemm)
        row = gemms[0]

        def each(column: str, gemms: list[InstanceRow] = gemms) -> str:
            return " ".join(str(getattr(gemm, column)) for gemm in gemms)

        cells.append(
            [row.tactic, row.instance, row.architecture, row.schedule, row.stages, row.threads, row.blocks_per_sm]
            + [f"{row.shared_bytes / 1024:.1f}"]
            + [each(column) for column in ("registers", "tensor_instructions", "block_scaled_mmas", "local_accesses")]
        )
    headers = ["tactic", "instance", "arch", "schedule", "stages", "threads", "blocks/SM"]
    headers += ["smem KiB", "registers", "MMAs", "QMMA.SF E2M1", "spills"]
    table("2. Its machine code: FC1 and FC2 of each instance; shared memory with 128 experts", headers, cells)


def machine_code_checks(rows: list[InstanceRow]) -> list[tuple[str, bool]]:
    # The streamed layer multiplies both formats in bfloat16, which holds scaled MXFP8 and MXFP4 values exactly.
    block_scaled = [
        row for row in rows if "mxfp8" in row.instance and row.architecture.startswith("sm_12") and row.gemm != "layer"
    ]
    others = [row for row in rows if row not in block_scaled]
    spilling = [f"{row.instance} {row.gemm}: {row.local_accesses}" for row in rows if row.local_accesses]
    checks = [
        (f"{len(rows)} kernels have matrix instructions", bool(rows) and all(r.tensor_instructions for r in rows)),
        (
            f"no kernel spills or uses local memory (LDL, STL){' but ' if spilling else ''}{', '.join(spilling)}",
            not spilling,
        ),
    ]
    if block_scaled:
        total = sum(row.block_scaled_mmas for row in block_scaled)
        checks.append(
            (
                f"{len(block_scaled)} W4A8 GEMM kernels use the block-scaled FP4 MMA: {total} QMMA.SF with E2M1 in all",
                all(row.block_scaled_mmas > 0 for row in block_scaled),
            )
        )
    if others:
        checks.append((f"{len(others)} other kernels use none", all(row.block_scaled_mmas == 0 for row in others)))
    for what, holds in checks:
        print(f"{'ok  ' if holds else 'FAIL'} {what}")
    return checks


def run_layer(num_tokens: int, seed: int) -> list[tuple[str, bool]]:
    import torch

    from flashinfer.fused_moe import cutlass_fused_moe
    from flashinfer.testing import BoundViolation, MoECase, check_within_bound, make_moe_inputs, moe_reference

    print(f"\nrunning a gpt-oss-120b layer on {num_tokens} tokens, seed {seed}", flush=True)
    rows: list[list[object]] = []
    checks: list[tuple[str, bool]] = []
    for mode, name in MODES.items():
        case = MoECase(num_tokens, hidden=2880, inter=2880, num_experts=128, top_k=4, mode=mode)
        inputs = make_moe_inputs(case, seed)
        started = time.perf_counter()
        output = cutlass_fused_moe(**inputs.arguments())
        seconds = time.perf_counter() - started
        (output,) = output if isinstance(output, list | tuple) else (output,)
        reference, bound = moe_reference(inputs)
        touched = len(torch.unique(inputs.token_selected_experts))
        difference = float((output.double() - reference).abs().max())
        try:
            used = f"{check_within_bound(output, reference, bound, name):.2f}"
            holds = True
        except BoundViolation as violation:
            used, holds = "exceeded", False
            print(violation)
        largest = float(reference.abs().max())
        rows.append([name, touched, f"{seconds:.2f}", f"{largest:.3g}", f"{difference:.2g}", used])
        checks.append((f"{name}: every one of {output.numel()} elements within its bound", holds))
        del inputs, reference, bound
    table(
        "3. cutlass_fused_moe on CPU tensors against float64, gpt-oss-120b layer (2880 x 2880, 128 experts, top-4)",
        ["mode", "experts touched", "seconds", "largest |output|", "largest difference", "share of bound used"],
        rows,
    )
    for what, holds in checks:
        print(f"{'ok  ' if holds else 'FAIL'} {what}")
    return checks


def run_on_virtual_device(seed: int) -> list[tuple[str, bool]]:
    """One token through the layer, by the kernels as compiled for SM121."""
    from flashinfer.fused_moe import cutlass_fused_moe
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module
    from flashinfer.testing import (
        TENSOR_CORE,
        BoundViolation,
        MoECase,
        check_within_bound,
        make_moe_inputs,
        moe_reference,
    )
    from flashinfer.testing.virtual_device import virtual_device

    print("\nbuilding emulator/ and, with its PTX embedded, fused_moe_120_ptx for 12.1a", flush=True)
    rows: list[list[object]] = []
    checks: list[tuple[str, bool]] = []
    started = time.perf_counter()
    with virtual_device("sm_121a", strict=False) as device:
        device.module(gen_cutlass_fused_moe_sm120_module)
        print(f"built in {time.perf_counter() - started:.1f} s; running one token on the virtual SM121", flush=True)
        for mode in VIRTUAL_MODES:
            name = MODES[mode]
            inputs = make_moe_inputs(MoECase(1, hidden=2880, inter=2880, num_experts=128, top_k=4, mode=mode), seed)
            before = len(device.launches)
            output = cutlass_fused_moe(**inputs.arguments())
            (output,) = output if isinstance(output, list | tuple) else (output,)
            launches = device.launches[before:]
            rows += launch_rows(name, launches)
            try:
                used = check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), name)
                checks.append((f"{name}: {output.numel()} elements within the bound, {used:.2f} of it used", True))
            except BoundViolation as violation:
                print(violation)
                checks.append((f"{name}: {output.numel()} elements within the bound", False))
            checks += launch_checks(name, launches)
            del inputs
    headers = ["mode", "launch", "warp instr.", "MMAs", "global MB", "bank conflicts", "predicted us", "by"]
    headers += ["reports", "host s"]
    table("4. The shipped kernels on the virtual SM121, gpt-oss-120b layer, one token: each launch", headers, rows)
    print(
        "predicted: a roofline for GB10 from these counters, a lower bound and no measurement (emulator/src/model/model.h)"
        "\nglobal MB: distinct 32-byte sectors touched"
    )
    for what, holds in checks:
        print(f"{'ok  ' if holds else 'FAIL'} {what}")
    return checks


def launch_title(kernel: str) -> str:
    """What a launch is to the layer, from its kernel's mangled name."""
    if "streamed_layer_kernel" in kernel:
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


def launch_checks(mode: str, launches: Sequence[Any]) -> list[tuple[str, bool]]:
    """Both GEMMs ran on tensor cores, in two launches or one, and no watcher has anything to report."""
    gemms = [launch for launch in launches if launch_title(launch.kernel) not in ("prologue", "tokens")]
    titles = [launch_title(launch.kernel) for launch in gemms]
    multiplied = all(launch.counters.by_class.get("mma", 0) for launch in gemms)
    reports = [str(report) for launch in launches for report in launch.reports]
    silent = all(launch.clean for launch in launches)
    return [
        (f"{mode}: FC1 and FC2 ran, with MMAs", titles in (["FC1", "FC2"], ["layer"]) and multiplied),
        (f"{mode}: {len(launches)} launches, all watchers silent{''.join(chr(10) + r for r in reports)}", silent),
    ]


if __name__ == "__main__":
    sys.exit(main())
