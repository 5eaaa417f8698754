# SPDX-License-Identifier: Apache-2.0
"""The one table of kernel instances of the SM12x MXFP4 family.

The generator renders one CUDA source per row, the planner and ``profile_ids`` choose among the rows, and the docs
print them.  A row fixes everything that is fixed at compile time; what the numbers mean for a GB10 (blocks per SM, bytes
in flight) is computed here too, so that a row that cannot run as planned fails on import and not on somebody's Spark.

The shared-memory layout below mirrors ``include/flashinfer/sm12x/impls/shared_storage.cuh`` (``SharedStorage``), which
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
HOPPER_SMEM_PER_BLOCK = 232_448  # compute capability 9.0, the same table

ROW_TILE = 128
SCALE_CHUNK_BYTES = 512  # 128 rows x 128 K elements of the 128x4 scale layout
MAX_EXPERTS = 512  # local experts whose routing tables fit the block's shared memory
IN_KERNEL_ENTRIES = 256  # (token, slot) pairs that the kernels route by themselves

# The streamed layer (include/flashinfer/sm12x/impls/streamed_params.cuh).
STREAM_KEEPER_WARPS = 4
STREAM_MAX_STAGES = 16
STREAM_ENTRIES = 1024  # (token, slot) pairs that a streamed layer takes

Activation = Literal["mxfp8", "bf16"]
Schedule = Literal["pingpong", "cooperative", "streamed"]


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
        Blocks that must fit one SM of a GB10 together; ``__launch_bounds__``' second argument is this or more.
    default : bool
        Part of ``fused_moe_120`` itself; other rows are small modules built when asked for.
    mma_warps : int
        0: a pair of GEMM kernels, FC1 and FC2.  Else the row is the whole layer in one launch of one block per SM (the
        streamed layer), this many warps share K, ``k_tile`` elements each, and the ring of stages takes what shared
        memory the device grants.
    widens : bool
        A pair of GEMMs keeps and multiplies MXFP8 activations as bfloat16, which holds each exactly: twice the bytes, for
        devices whose MMA takes no block scales.
    """

    index: int
    activation: Activation
    token_tile: int
    k_tile: int
    stages: int
    blocks_per_sm: int
    default: bool = True
    mma_warps: int = 0
    widens: bool = False

    @property
    def operand(self) -> Activation:
        """As what activations lie in shared memory or registers and are multiplied."""
        return "bf16" if self.widens or self.streamed else self.activation

    @property
    def streamed(self) -> bool:
        """Whether the row computes FC1 and FC2 in one launch."""
        return self.mma_warps > 0

    @property
    def name(self) -> str:
        if self.streamed:
            return f"moe_{self.activation}_t{self.token_tile}_k{self.k_tile}_w{self.mma_warps}"
        kept = self.activation if self.operand == self.activation else f"{self.activation}_as_{self.operand}"
        return f"moe_{kept}_t{self.token_tile}_k{self.k_tile}_s{self.stages}"

    @property
    def row_tile(self) -> int:
        return ROW_TILE

    @property
    def schedule(self) -> Schedule:
        """How a block's warps work together.

        ``cooperative``: eight consumer warps share a tile; ``pingpong``: four, and the SM's blocks alternate;
        ``streamed``: all MMA warps share K of whole weight rows, one block per SM, both GEMMs.
        """
        if self.streamed:
            return "streamed"
        return "cooperative" if self.token_tile == 128 else "pingpong"

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element in a stage."""
        return 1 if self.operand == "mxfp8" else 2

    @property
    def consumer_warps(self) -> int:
        return 8 if self.schedule == "cooperative" else 4

    @property
    def threads(self) -> int:
        if self.streamed:
            return 32 * (self.mma_warps + STREAM_KEEPER_WARPS)
        return 32 * (self.consumer_warps + 1)

    @property
    def token_pitch(self) -> int:
        """Bytes of a token row of a stage; MXFP8 rows are padded so that fragment loads meet no bank twice."""
        return self.k_tile + 32 if self.operand == "mxfp8" else 2 * self.k_tile

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of FC1, the larger of the two GEMMs (three scale chunks instead of one)."""
        words = self.k_tile // 128
        weights = ROW_TILE * self.k_tile // 2
        scales = 3 * words * SCALE_CHUNK_BYTES
        tokens = self.token_tile * self.token_pitch
        token_scales = 4 * words * self.token_tile if self.operand == "mxfp8" else 0
        return weights + scales + tokens + token_scales

    def smem_bytes(self, num_experts: int = 128) -> int:
        """Dynamic shared memory of an FC1 block on SM12x, bytes, for ``num_experts`` local experts.

        A streamed row: what it needs beside its ring, whose size follows the layer's and the device's.
        """
        if self.streamed:
            barriers = 8 * (2 * STREAM_MAX_STAGES + 2)
            routing = (4 + 2) * STREAM_ENTRIES + 2 * 12
            return -(-(barriers + routing) // 128) * 128
        staging = self.token_tile * (64 * self.element_bytes + 16)
        scratch = 16 * self.token_tile
        barriers_and_flag = 2 * 8 * self.stages + 16
        routing = 2 * IN_KERNEL_ENTRIES + 2 * 4 * (num_experts + 1)
        ring = self.stages * self.stage_bytes
        return 1024 + ring + staging + scratch + barriers_and_flag + routing

    def stage_bytes_of(self, hidden: int, inter: int) -> int:
        """Bytes of one stage of a streamed row's ring for such a layer, or 0 where K is too long for its warps.

        Mirrors ``StreamedGemmPlan`` (``streamed_gemm_params.cuh``): 16 weight rows for each group of warps, the scales of
        all of their K, biases, and partial sums of lanes beyond K.
        """
        largest = 0
        for outputs, out, k in ((8, inter, hidden), (16, hidden, inter)):
            words = -(-k // 128)
            group_warps = -(-words * 128 // self.k_tile)
            groups = next((n for n in (4, 2, 1) if n * group_warps <= self.mma_warps and out % (n * outputs) == 0), 0)
            if groups == 0:
                return 0
            parts = 16 // outputs
            scales = parts * words * min(outputs * groups, 32) * 16
            need = -(-16 * groups * (k // 2) // 128) * 128 + scales + 64 * groups
            need += groups * (self.token_tile // 8) * 512 if k % 128 else 0
            largest = max(largest, -(-need // 128) * 128)
        return largest

    def takes(self, num_rows: int, hidden: int, inter: int, shared_bytes: int) -> bool:
        """Whether the row computes a layer of these sizes with so much shared memory a block; ``num_rows`` is tokens x top_k."""
        if not self.streamed:
            return True
        stage = self.stage_bytes_of(hidden, inter)
        return 0 < stage <= (shared_bytes - self.smem_bytes()) // 2 and num_rows <= STREAM_ENTRIES

    @property
    def gpt_oss_stages(self) -> int:
        """Stages on a GB10, of a gpt-oss layer where the ring takes what shared memory there is."""
        if not self.streamed:
            return self.stages
        return (GB10_SMEM_PER_BLOCK - self.smem_bytes()) // self.stage_bytes_of(2880, 2880)

    def weight_bytes_in_flight_per_sm(self) -> int:
        """Weight bytes that the rings of one SM's blocks can have outstanding on a GB10."""
        if self.streamed:
            return self.gpt_oss_stages * 16 * 2880 // 2
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
    Instance(12, "mxfp8", 8, 256, 0, 1, mma_warps=12),
    Instance(13, "bf16", 8, 256, 0, 1, mma_warps=12),
    Instance(14, "mxfp8", 16, 256, 0, 1, default=False, mma_warps=12),
    Instance(15, "bf16", 16, 256, 0, 1, default=False, mma_warps=12),
    Instance(16, "bf16", 40, 128, 3, 1),
    Instance(17, "bf16", 64, 128, 3, 1),
    Instance(18, "mxfp8", 32, 128, 3, 1, default=False, widens=True),
    Instance(19, "mxfp8", 40, 128, 3, 1, default=False, widens=True),
    Instance(20, "mxfp8", 64, 128, 3, 1, default=False, widens=True),
    Instance(21, "bf16", 24, 128, 2, 2),
    Instance(22, "mxfp8", 24, 128, 2, 2, default=False, widens=True),
    Instance(23, "mxfp8", 16, 128, 2, 2, default=False, widens=True),
)

GEMM_INSTANCES: tuple[Instance, ...] = tuple(
    row for row in INSTANCES if row.activation == "mxfp8" and row.default and not row.streamed
)


Weights = Literal["mxfp4", "mxfp8"]


@dataclasses.dataclass(frozen=True)
class DenseInstance:
    """One compiled kernel of the dense layer.

    Attributes
    ----------
    index : int
        The tactic number.
    weights : str
        ``"mxfp4"`` or ``"mxfp8"``.
    token_tile : int
        Tokens of one pass over the weights, or of a GEMM's tile.
    words : int
        Of a stream of weights: of 128 along K, that one MMA warp takes; 0 for a GEMM.
    stages : int
        Of a GEMM: depth of its ring.
    mma_warps : int
        Of a stream of weights: warps that share K.
    operand : str
        As what tokens are multiplied: ``"bf16"``, which holds every format's values, or ``"mxfp8"`` by MMAs that take
        block scales (on compute capability 9.0 in half precision, exactly).
    """

    index: int
    weights: Weights
    token_tile: int
    words: int = 0
    stages: int = 0
    mma_warps: int = 12
    operand: Activation = "bf16"

    @property
    def streamed(self) -> bool:
        """A stream of weights (``include/flashinfer/sm12x/impls/dense_layer.cuh``), else a GEMM (``grouped_gemm.cuh``)."""
        return self.words > 0

    @property
    def name(self) -> str:
        """C identifier, part of the generated source's name; what tests and logs say."""
        shape = f"w{self.words}" if self.streamed else "gemm" if self.operand == "bf16" else f"gemm_{self.operand}"
        return f"dense_{self.weights}_m{self.token_tile}_{shape}"

    @property
    def longest_k(self) -> int:
        """K that the instance takes."""
        return self.mma_warps * self.words * 128 if self.streamed else 2**30


DENSE_INSTANCES: tuple[DenseInstance, ...] = (
    DenseInstance(0, "mxfp4", 8, words=2),
    DenseInstance(1, "mxfp4", 8, words=3),
    DenseInstance(2, "mxfp4", 16, words=2),
    DenseInstance(3, "mxfp8", 8, words=2),
    DenseInstance(4, "mxfp8", 8, words=3),
    DenseInstance(5, "mxfp8", 16, words=2),
    DenseInstance(6, "mxfp4", 32, stages=3),
    DenseInstance(7, "mxfp4", 64, stages=3),
    DenseInstance(8, "mxfp8", 32, stages=3),
    DenseInstance(9, "mxfp8", 48, stages=3),
    DenseInstance(10, "mxfp4", 64, stages=4, operand="mxfp8"),
    DenseInstance(11, "mxfp4", 128, stages=2, operand="mxfp8"),
    DenseInstance(12, "mxfp8", 64, stages=3, operand="mxfp8"),
    DenseInstance(13, "mxfp8", 128, stages=2, operand="mxfp8"),
)


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
