# SPDX-License-Identifier: Apache-2.0
"""The table of instances as built: registers, shared memory, stages and counts of machine instructions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from flashinfer_sm12x.build import engine
from flashinfer_sm12x.build.inspect_sass import KernelCode, inspect

from ...sm12x.instances import BLOCK_M, INSTANCES, Instance
from .spec import JitSpecSm12x

EPILOGUE_WARPS = 4  # kEpilogueWarps in split_k/params.h
_RESERVED_SHARED = 1024  # the driver reserves so much in each block and counts it as static shared memory


@dataclass(frozen=True)
class InstanceRow:
    """One kernel of one instance, as compiled for one architecture.

    Attributes:
        tactic: Its number, as in ``profile_ids``.
        instance: Its name, as in the autotuner's cache files.
        gemm: ``fc1``, ``fc2``, ``layer`` (both in one launch) or ``group`` (the public grouped GEMM).
        architecture: For example ``sm_121a``.
        block_n, block_m, block_k, stages: Columns of the table; a fused MoE kernel's stages are a gpt-oss layer's on
            a GB10.
        schedule: ``multi-block``: four consumer warps, and the SM's blocks alternate; ``8-warp``: eight share a tile;
            ``split-K``: all MMA warps share K of whole weight rows, one block per SM, both GEMMs.
        blocks_per_sm: Blocks that must fit an SM of a GB10 together.
        threads: Threads of a block: one producer warp beside the consumers, or epilogue warps beside the MMA warps.
        registers: Registers per thread.
        shared_bytes: Shared memory of a block, less the driver's own: FC1's with 128 local experts, a fused MoE
            kernel's with the stages above.
        local_accesses: Spilled loads and stores in the machine code.
        tensor_instructions: Matrix instructions in the machine code.
        block_scaled_mmas: Those of them that are ``QMMA.SF`` with an E2M1 operand.
    """

    tactic: int
    instance: str
    gemm: str
    architecture: str
    block_n: int
    block_m: int
    block_k: int
    stages: int
    schedule: str
    blocks_per_sm: int
    threads: int
    registers: int
    shared_bytes: int
    local_accesses: int
    tensor_instructions: int
    block_scaled_mmas: int


def instance_rows(spec: JitSpecSm12x, instances: Iterable[Instance] = INSTANCES) -> list[InstanceRow]:
    """One row per instance, GEMM and architecture of a module that has been built in the cache.

    Args:
        spec: The module; instances that are not part of it have no row.
        instances: The table.

    Raises:
        ToolchainError: ``cuobjdump`` is missing.
        RuntimeError: the module is not built.
    """
    if engine.find_library(spec.plan) is None:
        raise RuntimeError(f"{spec.name} is not built for this toolkit and these sources; build it first")
    steps = {step.source.stem: step for step in spec.plan.steps}
    return [
        _row(instance, kernel)
        for instance in instances
        if instance.name in steps
        for kernel in inspect(spec.plan.object_path(steps[instance.name]))
        if kernel.tensor_instructions
    ]


def _row(instance: Instance, kernel: KernelCode) -> InstanceRow:
    if instance.split_k:
        schedule, threads = "split-K", 32 * (instance.mma_warps + EPILOGUE_WARPS)
    else:
        schedule, threads = ("8-warp", 288) if instance.block_n == 128 else ("multi-block", 160)
    return InstanceRow(
        tactic=instance.profile_id,
        instance=instance.name,
        gemm=_gemm_of(kernel.name),
        architecture=kernel.architecture,
        block_n=instance.block_n,
        block_m=BLOCK_M,
        block_k=instance.block_k,
        stages=instance.stages,
        schedule=schedule,
        blocks_per_sm=instance.blocks_per_sm,
        threads=threads,
        registers=kernel.registers,
        shared_bytes=instance.shared_bytes + max(0, kernel.static_shared - _RESERVED_SHARED),
        local_accesses=kernel.local_accesses,
        tensor_instructions=kernel.tensor_instructions,
        block_scaled_mmas=kernel.block_scaled_mmas,
    )


def _gemm_of(kernel: str) -> str:
    """The GEMM of the layer that a kernel computes, by the ``Role`` among its template arguments (``types.h``)."""
    if "fused_moe_kernel" in kernel:
        return "layer"
    match = re.search(r"Role\)(\d)", kernel) or re.search(r"4RoleE(\d)", kernel)
    return {"0": "fc1", "1": "fc2", "2": "group"}.get(match.group(1), "?") if match is not None else "?"


HEADERS = {
    "tactic": "tactic",
    "instance": "instance",
    "gemm": "GEMM",
    "architecture": "arch",
    "schedule": "schedule",
    "stages": "stages",
    "threads": "threads",
    "registers": "regs",
    "shared_bytes": "smem B",
    "blocks_per_sm": "blocks/SM",
    "local_accesses": "LDL+STL",
    "tensor_instructions": "MMA",
    "block_scaled_mmas": "QMMA.SF E2M1",
}
"""The columns of the printed table, and their titles."""


def as_table(rows: Iterable[InstanceRow]) -> tuple[list[str], list[list[Any]]]:
    """Titles and cells for ``tabulate``."""
    return list(HEADERS.values()), [[asdict(row)[column] for column in HEADERS] for row in rows]
