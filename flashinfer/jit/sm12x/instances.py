# SPDX-License-Identifier: Apache-2.0
"""The tables of kernel instances of the SM12x MXFP4 family: SM12x's and Hopper's.

The generator renders one CUDA source per row, the planner and the autotuner choose among the rows of a device's table,
and the docs print them.  A row fixes everything that is fixed at compile time.  Its name is what the autotuner's cache
files hold; interfaces that take an int (``profile_ids``) take its number, which says the same in digits.  Both stay; its
place in :data:`INSTANCES`, by which the compiled modules know it, differs between versions.

The layout of shared memory is C++'s (``tile/storage.cuh``, ``stream/params.h``).  A row's
``stages`` and ``shared_bytes`` repeat its result; the rendered sources assert at compile time that they agree.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

ROW_TILE = 128
MAX_EXPERTS = 512  # local experts whose routing tables fit the block's shared memory
IN_KERNEL_ENTRIES = 256  # (token, slot) pairs that the kernels route by themselves

# The streamed layer (include/flashinfer/sm12x/stream/params.h).
STREAM_EPILOGUE_WARPS = 4
STREAM_ENTRIES = 1024  # (token, slot) pairs that a streamed layer takes

Activation = Literal["mxfp8", "bf16"]
Multiplies = Literal["mxfp8", "mxfp8_as_bf16", "bf16"]
Schedule = Literal["multi-block", "8-warp", "streamed"]


@dataclasses.dataclass(frozen=True)
class Instance:
    """One compiled member of the family.

    Attributes
    ----------
    multiplies : str
        As what activations meet the weights: ``"mxfp8"`` (W4A8: e4m3 + UE8M0 per 32, by MMAs that take block scales, or
        in half precision where there are none), ``"mxfp8_as_bf16"`` (W4A8 too: dequantized to bfloat16, which holds
        each value exactly) or ``"bf16"`` (W4A16).
    token_tile : int
        Tokens of one tile: the N side of the MMA.
    k_tile : int
        K elements of one pipeline stage; of a streamed row, those that one MMA warp takes.
    stages : int
        Depth of the ring of stages in shared memory; of a streamed row, whose ring takes what the device grants, that of a
        gpt-oss layer on a GB10.
    blocks_per_sm : int
        Blocks that must fit one SM of a GB10 together; ``__launch_bounds__``' second argument is this or more.
    shared_bytes : int
        Dynamic shared memory of a block on SM12x: of FC1 with 128 local experts; of a streamed row, with that ring.
    mma_warps : int
        0: a pair of GEMM kernels, FC1 and FC2.  Else the row is the whole layer in one launch of one block per SM (the
        streamed layer), and this many warps share K.
    """

    multiplies: Multiplies
    token_tile: int
    k_tile: int
    stages: int
    blocks_per_sm: int
    shared_bytes: int
    mma_warps: int = 0

    @property
    def name(self) -> str:
        """The tactic's name, a C identifier: ``bf16_m64_k128``, ``stream_bf16_m8``.

        It stays as long as the row is this tile, however deep its ring is.
        """
        if self.streamed:
            return f"stream_{self.multiplies}_m{self.token_tile}"
        return f"{self.multiplies}_m{self.token_tile}_k{self.k_tile}"

    @property
    def number(self) -> int:
        """The tactic's number: 1, 2 or 3 for what is multiplied, 4, 5 or 6 for streamed; token tile; K tile.

        ``bf16_m64_k128`` is 3064128.
        """
        kind = get_args(Multiplies).index(self.multiplies) + (4 if self.streamed else 1)
        return 1_000_000 * kind + 1_000 * self.token_tile + self.k_tile

    @property
    def index(self) -> int:
        """The row's place in :data:`INSTANCES`."""
        return index_of(self.name)

    @property
    def activation(self) -> Activation:
        """What activations are rounded to."""
        return "bf16" if self.multiplies == "bf16" else "mxfp8"

    @property
    def streamed(self) -> bool:
        """Whether the row computes FC1 and FC2 in one launch."""
        return self.mma_warps > 0

    @property
    def schedule(self) -> Schedule:
        """How a block's warps work together.

        ``multi-block``: four consumer warps, and the SM's blocks alternate; ``8-warp``: eight share a tile;
        ``streamed``: all MMA warps share K of whole weight rows, one block per SM, both GEMMs.
        """
        if self.streamed:
            return "streamed"
        return "8-warp" if self.token_tile == 128 else "multi-block"

    @property
    def threads(self) -> int:
        """Of a block: one producer warp beside the consumers, or epilogue warps beside the MMA warps."""
        if self.streamed:
            return 32 * (self.mma_warps + STREAM_EPILOGUE_WARPS)
        return 288 if self.schedule == "8-warp" else 160

    def takes(self, num_rows: int, hidden: int, inter: int) -> bool:
        """Whether the row computes a layer of these sizes; ``num_rows`` is tokens x top_k."""
        longest_k = self.mma_warps * self.k_tile
        return not self.streamed or (num_rows <= STREAM_ENTRIES and max(hidden, inter) <= longest_k)


_BF16 = (
    Instance("bf16", 8, 128, 3, 2, 39240),
    Instance("bf16", 16, 128, 2, 2, 32824),
    Instance("bf16", 24, 128, 2, 2, 38200),
    Instance("bf16", 32, 128, 3, 1, 61512),
    Instance("bf16", 40, 128, 3, 1, 68936),
    Instance("bf16", 64, 128, 3, 1, 91208),
)
_MXFP8_M8 = (
    Instance("mxfp8", 8, 128, 4, 2, 47576),
    Instance("mxfp8", 8, 256, 2, 2, 47032),
)
_STREAM_M8 = (
    Instance("mxfp8_as_bf16", 8, 256, 3, 1, 95232, mma_warps=12),
    Instance("bf16", 8, 256, 3, 1, 95232, mma_warps=12),
)

# Two GEMM kernels a layer.
PAIRS: tuple[Instance, ...] = (
    *_MXFP8_M8,
    Instance("mxfp8", 16, 128, 3, 2, 41224),
    Instance("mxfp8", 16, 256, 3, 1, 76744),
    Instance("mxfp8", 32, 128, 3, 1, 50632),
    Instance("mxfp8", 32, 256, 3, 1, 92488),
    Instance("mxfp8", 64, 128, 4, 1, 89688),
    Instance("mxfp8", 128, 128, 2, 1, 76344),
    *_BF16,
)

# ``fused_moe_120`` holds these.
SM12X: tuple[Instance, ...] = (*PAIRS, *_STREAM_M8)

# Its MMA takes no scales. Rows that SM12x has not are small modules, built when asked for.
HOPPER: tuple[Instance, ...] = (
    *_MXFP8_M8,
    Instance("mxfp8_as_bf16", 16, 128, 2, 2, 32824),
    Instance("mxfp8_as_bf16", 24, 128, 2, 2, 38200),
    Instance("mxfp8_as_bf16", 32, 128, 3, 1, 61512),
    Instance("mxfp8_as_bf16", 40, 128, 3, 1, 68936),
    Instance("mxfp8_as_bf16", 64, 128, 3, 1, 91208),
    *_BF16,
    *_STREAM_M8,
    Instance("mxfp8_as_bf16", 16, 256, 3, 1, 96768, mma_warps=12),
    Instance("bf16", 16, 256, 3, 1, 96768, mma_warps=12),
)

INSTANCES: tuple[Instance, ...] = (*SM12X, *(row for row in HOPPER if row not in SM12X))
"""Every row; Hopper runs all of them."""

GEMM_INSTANCES: tuple[Instance, ...] = tuple(row for row in PAIRS if row.multiplies == "mxfp8")
"""What the grouped GEMM is compiled for."""

_PLACES = {row.name: place for place, row in enumerate(INSTANCES)}
assert len(_PLACES) == len({row.number for row in INSTANCES}) == len(INSTANCES)


Weights = Literal["mxfp4", "mxfp8"]
Operand = Literal["mxfp4", "mxfp8", "bf16"]


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
        As what tokens are multiplied: ``"bf16"``, which holds every format's values, or, by MMAs that take block scales (on
        compute capability 9.0 in half precision, exactly), ``"mxfp8"`` or, of MXFP4 tokens and weights alone,
        ``"mxfp4"``.
    """

    index: int
    weights: Weights
    token_tile: int
    words: int = 0
    stages: int = 0
    mma_warps: int = 12
    operand: Operand = "bf16"

    @property
    def streamed(self) -> bool:
        """A stream of weights (``include/flashinfer/sm12x/stream/dense.cuh``), else a GEMM (``tile/gemm.cuh``)."""
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
    DenseInstance(14, "mxfp4", 64, stages=6, operand="mxfp4"),
    DenseInstance(15, "mxfp4", 128, stages=4, operand="mxfp4"),
)


def table(block_scaled_mma: bool) -> tuple[Instance, ...]:
    """The rows among which a device's planner and autotuner choose: whether its MMA takes block scales tells which it is."""
    return SM12X if block_scaled_mma else HOPPER


def tactic(name: str) -> int:
    """The number for ``profile_ids`` of the row called ``name``; ``ValueError`` with the names there are otherwise."""
    return INSTANCES[index_of(name)].number


def index_of(name: str) -> int:
    """The place in :data:`INSTANCES` of the row called ``name``; ``ValueError`` with the names there are otherwise."""
    if name not in _PLACES:
        raise ValueError(f"there is no tactic {name!r}; there are {', '.join(_PLACES)}")
    return _PLACES[name]


def instance(index: int) -> Instance:
    """The row whose place is ``index``; ``ValueError`` with the allowed ones otherwise."""
    if not 0 <= index < len(INSTANCES):
        raise ValueError(f"instance {index} does not exist: the tables hold 0..{len(INSTANCES) - 1}")
    return INSTANCES[index]
