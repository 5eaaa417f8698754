# SPDX-License-Identifier: Apache-2.0
"""Rules for kernels' machine code, read back from objects.

A GB10 does not reliably honour the release ordering of ``mbarrier.arrive`` (``include/flashinfer/sm12x/ptx/sync.cuh``),
so every arrival needs a fence before it. No kernel spills, each uses the tensor instructions that it is written for,
and blocks fit an SM as planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jit_processes import named_barriers

from flashinfer.jit.sm12x import modules, report
from flashinfer.jit.sm12x.spec import JitSpecSm12x
from flashinfer.sm12x.instances import (
    DENSE_INSTANCES,
    FORMATS,
    GEMM_INSTANCES,
    INSTANCES,
    MAIN_MODULE,
    NVFP4,
    Instance,
)
from flashinfer_sm12x.build import inspect_sass

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
ARRIVAL = re.compile(r"SYNCS\.ARRIVE|ARRIVES\.")
FENCE = re.compile(r"MEMBAR\.(SC|ALL)\.(CTA|GPU|SYS)")
# None of these may stand between a fence and its arrival: a warp's memory accesses, places at which control may join,
# and a proxy fence, whose own code begins with such a fence.
BETWEEN = re.compile(r"LD|ST|ATOM|RED|UBLKCP|UTMALDG|CCTL|BRA|BRX|CALL|RET|EXIT|WARPSYNC|BAR|BSYNC|FENCE\.VIEW\.ASYNC")
REGISTERS = 65536  # of an SM
MOST_BARRIERS = 3
"""Named barriers of a block. An SM has 24, so three allow eight blocks, more than fit for other reasons. A kernel of
others with 13 had a GB10's SM to itself, which made its cooperative launch too large (b12x#363)."""


def arrivals(sass: str) -> tuple[int, int]:
    """The number of arrivals at mbarriers, and of those that directly follow a fence."""
    found = fenced = 0
    behind_fence = False
    for line in sass.splitlines():
        if line.lstrip().startswith(".L_"):  # a label
            behind_fence = False
        if (match := INSTRUCTION.match(line)) is None:
            continue
        opcode = match[1]
        if ARRIVAL.match(opcode):
            found += 1
            fenced += behind_fence
            behind_fence = False
        elif FENCE.match(opcode):
            behind_fence = True
        elif BETWEEN.match(opcode):
            behind_fence = False
    return found, fenced


def grid_counters(sass: str) -> tuple[int, int]:
    """The same of reductions and atomics that count blocks in global memory, for fences of the device."""
    found = fenced = 0
    behind_fence = False
    for line in sass.splitlines():
        if (match := INSTRUCTION.match(line)) is None:
            continue
        opcode = match[1]
        if re.match(r"(REDG?|ATOMG?)\.E\.ADD", opcode):
            found += 1
            fenced += behind_fence
        elif re.match(r"MEMBAR\.\w+\.GPU", opcode):
            behind_fence = True
        elif re.match(r"STG|BAR", opcode):
            behind_fence = False
    return found, fenced


def dumped(what: str, path: Path) -> str:
    """The output of ``cuobjdump`` about a file, such as its ``sass``."""
    return inspect_sass._run(inspect_sass.find_tool(), [f"--dump-{what}", str(path)])


class Unit(NamedTuple):
    """One source with kernels: ``generate`` gives the spec of its module, ``stem`` is its file's name without a
    suffix."""

    module: str
    generate: Callable[[], JitSpecSm12x]
    stem: str
    row: Instance | None

    def __str__(self) -> str:
        kind = "other" if self.row is None else "streamed" if self.row.split_k else "tiles"
        return f"{self.module}-{self.stem}-{kind}"

    @property
    def tensor_instructions(self) -> str:
        """A pattern of all that it may have on SM12x."""
        if self.row is None:
            return {
                modules.ROUTER: r"HMMA\.16816\.F32\.BF16",
                modules.DECODE: r"HMMA\.16816\.F32\.BF16",
                modules.PROBE: r"HMMA\.16816\.F32(\.BF16)?|[QO]MMA\.SF\..*",
            }.get(self.module, "none")
        kind = FORMATS[self.row.compute_dtype].mma
        if kind is None:
            return r"HMMA\.16816\.F32\.BF16"
        weights = {"mxfp4": "E2M1", "mxfp6": "E2M3", "mxfp8": "E4M3"}[self.row.weights]
        if kind == "mxf4":
            return rf"OMMA\.SF\.16864\.F32\.{weights}\.E2M1\.E8"
        return rf"QMMA\.SF\.16832\.F32\.{weights}\.{'E[45]M[32]' if self.module == modules.GROUP_GEMM else 'E4M3'}\.E8"


def units() -> Iterator[Unit]:
    """Every source with kernels."""
    dense = {modules.DENSE.format(row.weights): row.weights for row in DENSE_INSTANCES}
    tables = {module: [row for row in DENSE_INSTANCES if row.weights == each] for module, each in dense.items()}
    tables |= {modules.FUSED_MOE: MAIN_MODULE, modules.FUSED_MOE_NVFP4: NVFP4, modules.GROUP_GEMM: GEMM_INSTANCES}
    for module, generate in modules.MODULES.items():
        moe = dict.fromkeys((modules.FUSED_MOE, modules.FUSED_MOE_NVFP4), modules._LAUNCHER)
        others = {**moe, modules.GROUP_GEMM: modules._GEMM_BINDING}
        binding = dict.fromkeys(dense, modules._DENSE_BINDING) | {modules.ROUTER: "sm12x_router_binding.cu"}
        more = {modules.DECODE: "sm12x_decode_attention_binding.cu", modules.PROBE: "sm12x_probe_binding.cu"}
        yield Unit(module, generate, Path((others | binding | more)[module]).stem, None)
        for row in tables.get(module, ()):
            yield Unit(module, generate, row.name, row)
    for row in INSTANCES:
        if row not in (*MAIN_MODULE, *NVFP4):
            yield Unit(modules.FUSED_MOE, partial(modules.gen_fused_moe_instance_module, row), row.name, row)


def faults(path: Path, unit: Unit, architecture: str) -> list[str]:
    """Faults of machine code, a line each; empty if there is none.

    Args:
        path: An object or a fatbin, compiled for one architecture.
        unit: The unit from which it was compiled.
        architecture: For example ``sm_121a``. Hopper's blocks, MMAs and fences are not checked.
    """
    sass = dumped("sass", path)
    kernels = inspect_sass.kernels_of(dumped("resource-usage", path), sass)
    found = [] if kernels else ["it holds no kernel"]
    for kernel in kernels:
        name = re.sub(r"flashinfer::sm12x::", "", kernel.name)
        assert kernel.architecture == architecture
        if kernel.stack or kernel.local_accesses:
            found.append(f"{name} spills: a stack of {kernel.stack} bytes, {kernel.local_accesses} LDL and STL")
        if architecture == "sm_90a":
            continue
        used = {opcode for opcode in kernel.instructions if re.match(r"[A-Z]*MMA\b", opcode)}
        if wrong := {opcode for opcode in used if not re.fullmatch(unit.tensor_instructions, opcode)}:
            found.append(f"{name} has {', '.join(sorted(wrong))}, not {unit.tensor_instructions}")
        if unit.row is not None:
            if not used:
                found.append(f"{name} has no tensor instruction")
            row = report._row(unit.row, kernel)
            if row.registers * row.threads * row.blocks_per_sm > REGISTERS:
                found.append(
                    f"{name}: {row.blocks_per_sm} blocks of {row.threads} do not fit with {row.registers} registers"
                )
    if architecture == "sm_90a":
        return found
    if (most := max(named_barriers(path), default=0)) > MOST_BARRIERS:
        found.append(f"{most} named barriers")
    if unit.module == modules.PROBE:  # which has fences before arrivals, or none, by its own choice
        return found
    for what, (all_of_them, fenced) in (("arrivals", arrivals(sass)), ("counters of blocks", grid_counters(sass))):
        wanted = 0 if architecture == "sm_120a" and what == "arrivals" else all_of_them
        if fenced != wanted:
            found.append(f"{fenced} of {all_of_them} {what} have their fence, not {wanted}")
    return found
