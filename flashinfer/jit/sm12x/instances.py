# SPDX-License-Identifier: Apache-2.0
"""The one table of kernel instances of the SM12x MXFP4 family.

The generator renders one CUDA source per row, the planner and ``profile_ids`` choose among the rows, and the docs
print them.  A row fixes everything that is fixed at compile time; what the numbers mean for a GB10 (blocks per SM, bytes
in flight) is computed here too, so that a row that cannot run as planned fails on import and not on somebody's Spark.

The shared-memory layout below mirrors ``include/flashinfer/sm12x/impls/grouped_gemm.cuh`` (``SharedStorage``), which
asserts at compile time that it needs no more than the row says.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

# GB10 (compute capability 12.1), from the CUDA programming guide's table of technical specifications.
GB10_SMEM_PER_SM = 102_400
GB10_SMEM_PER_BLOCK = 101_376
GB10_SMEM_RESERVED_PER_BLOCK = 1_024
GB10_REGISTERS_PER_SM = 65_536

ROW_TILE = 128
SCALE_CHUNK_BYTES = 512  # 128 rows x 128 K elements of the 128x4 scale layout
MAX_EXPERTS = 512  # local experts whose routing tables fit the block's shared memory
IN_KERNEL_ENTRIES = 256  # (token, slot) pairs that the kernels route by themselves

Activation = Literal["mxfp8", "bf16"]
Schedule = Literal["pingpong", "cooperative"]


@dataclasses.dataclass(frozen=True)
class Instance:
    """One compiled member of the family.

    Attributes
    ----------
    index : int
        The tactic number: what ``profile_ids`` and the autotuner's cache hold.
    name : str
        C identifier, part of the generated source's and the kernels' names.
    activation : str
        ``"mxfp8"`` (e4m3 + UE8M0 per 32, W4A8) or ``"bf16"`` (W4A16).
    token_tile : int
        Tokens of one tile: the N side of the MMA.
    k_tile : int
        K elements of one pipeline stage.
    stages : int
        Depth of the ring of stages in shared memory.
    blocks_per_sm : int
        Blocks that must fit one SM of a GB10 together; also ``__launch_bounds__``' second argument.
    default : bool
        Part of ``fused_moe_120`` itself; other rows are small modules built when asked for.
    """

    index: int
    activation: Activation
    token_tile: int
    k_tile: int
    stages: int
    blocks_per_sm: int
    default: bool = True

    @property
    def name(self) -> str:
        return f"moe_{self.activation}_t{self.token_tile}_k{self.k_tile}_s{self.stages}"

    @property
    def row_tile(self) -> int:
        return ROW_TILE

    @property
    def schedule(self) -> Schedule:
        """``cooperative``: eight consumer warps share a tile; ``pingpong``: four, and the SM's blocks alternate."""
        return "cooperative" if self.token_tile == 128 else "pingpong"

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element."""
        return 1 if self.activation == "mxfp8" else 2

    @property
    def consumer_warps(self) -> int:
        return 8 if self.schedule == "cooperative" else 4

    @property
    def threads(self) -> int:
        return 32 * (self.consumer_warps + 1)

    @property
    def token_pitch(self) -> int:
        """Bytes between the token rows of a stage: padded so that fragment loads meet no bank twice."""
        return self.k_tile + 32 if self.activation == "mxfp8" else 2 * self.k_tile + 64

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of FC1, the larger of the two GEMMs (three scale chunks instead of one)."""
        words = self.k_tile // 128
        weights = ROW_TILE * self.k_tile // 2
        scales = 3 * words * SCALE_CHUNK_BYTES
        tokens = self.token_tile * self.token_pitch
        token_scales = 4 * words * self.token_tile if self.activation == "mxfp8" else 0
        return weights + scales + tokens + token_scales

    def smem_bytes(self, num_experts: int = 128) -> int:
        """Dynamic shared memory of an FC1 block on SM12x, bytes, for ``num_experts`` local experts."""
        staging = self.token_tile * (64 * self.element_bytes + 16)
        scratch = 16 * self.token_tile
        factors = 0 if self.activation == "mxfp8" else 512 * self.consumer_warps
        barriers_and_flag = 2 * 8 * self.stages + 16
        routing = 2 * IN_KERNEL_ENTRIES + 2 * 4 * (num_experts + 1)
        ring = self.stages * self.stage_bytes
        return 1024 + ring + staging + factors + scratch + barriers_and_flag + routing

    def weight_bytes_in_flight_per_sm(self) -> int:
        """Weight bytes that the rings of one SM's blocks can have outstanding on a GB10."""
        return self.blocks_per_sm * self.stages * ROW_TILE * self.k_tile // 2


INSTANCES: tuple[Instance, ...] = (
    Instance(0, "mxfp8", 8, 128, 4, 2),
    Instance(1, "mxfp8", 16, 128, 3, 2),
    Instance(2, "mxfp8", 32, 128, 3, 1),
    Instance(3, "mxfp8", 64, 128, 4, 1),
    Instance(4, "mxfp8", 128, 128, 2, 1),
    Instance(5, "mxfp8", 8, 256, 2, 2),
    Instance(6, "mxfp8", 16, 256, 3, 1),
    Instance(7, "mxfp8", 32, 256, 3, 1),
    Instance(8, "bf16", 8, 128, 3, 2),
    Instance(9, "bf16", 16, 128, 2, 2),
    Instance(10, "bf16", 32, 128, 3, 1),
    Instance(11, "mxfp8", 64, 256, 2, 1, default=False),
)

GEMM_INSTANCES: tuple[Instance, ...] = tuple(row for row in INSTANCES if row.activation == "mxfp8" and row.default)


def instance(index: int) -> Instance:
    """The row whose tactic number is ``index``; ``ValueError`` with the allowed numbers otherwise."""
    if not 0 <= index < len(INSTANCES):
        raise ValueError(
            f"tactic {index} does not exist: the instance table holds 0..{len(INSTANCES) - 1} "
            "(python -m flashinfer sm12x-instances lists them)"
        )
    return INSTANCES[index]


def _check_table() -> None:
    for position, row in enumerate(INSTANCES):
        assert row.index == position, row
        need = row.smem_bytes()
        assert need <= GB10_SMEM_PER_BLOCK, (row.name, need)
        together = row.blocks_per_sm * (need + GB10_SMEM_RESERVED_PER_BLOCK)
        assert together <= GB10_SMEM_PER_SM, (row.name, together)


_check_table()
