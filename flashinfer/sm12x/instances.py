# SPDX-License-Identifier: Apache-2.0
"""The SM12x family's tables of kernel instances: for MoE layers on SM12x and on Hopper, and for dense layers.

The generator renders one CUDA source per row, planner and autotuner choose among the rows of a device's table, and the
docs print them.  A row fixes every compile-time choice.  The autotuner's cache files hold its name; interfaces that
take an int (``profile_ids``) take its number.  Neither ever changes.  The compiled modules know a row by its index in
its table, which may differ between versions.

The layout of shared memory is C++'s (``tile/storage.cuh``, ``split_k/params.h``).  A row's
``stages`` and ``shared_bytes`` repeat its result; the rendered sources assert at compile time that they agree.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

BLOCK_M = 128
MAX_EXPERTS = 512  # kMaxLocalExperts: their routing tables fit the block's shared memory
IN_KERNEL_ROUTED_ROWS = 256  # routed rows that the kernels route by themselves

FUSED_MOE_ROUTED_ROWS = 1536  # routed rows that a fused MoE kernel takes

Format = Literal["mxfp4", "mxfp8", "bf16"]
"""Formats of tokens: those that activations may be rounded to and MMAs multiply."""


class ElementFormat(NamedTuple):
    """One element format: its layout in memory, and the MMA that takes it. Weights have any of them but bf16."""

    element: str
    """The name in ``sm12x/types.h``."""
    bits: int
    elements_per_scale: int | None
    """16 or 32; None: no scales."""
    mma: str | None = None
    """The kind of SM12x's MMA that takes tokens of the format with their scales."""

    @property
    def bits_with_scales(self) -> float:
        """Bits of an element and its share of a scale, which is a byte."""
        return self.bits + (8 / self.elements_per_scale if self.elements_per_scale else 0)

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of ``k`` elements, padded to a multiple of 16, which copies need."""
        return -(-k * self.bits // 8 // 16) * 16


FORMATS: dict[str, ElementFormat] = {
    "bf16": ElementFormat("kBf16", 16, None),
    "mxfp8": ElementFormat("kE4m3", 8, 32, "mxf8f6f4"),
    "mxfp4": ElementFormat("kE2m1", 4, 32, "mxf4"),
    "mxfp6": ElementFormat("kE2m3", 6, 32),
    "mxint8": ElementFormat("kInt8", 8, 32),
    "nvfp4": ElementFormat("kNvE2m1", 4, 16),
}

Layer = Literal["moe", "dense"]
_COMPUTE = ("mxfp8", "mxfp8_as_bf16", "bf16")
MOE_WEIGHTS = ("mxfp4", "nvfp4")
"""Formats of experts."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """One compiled member of the family: the tiled FC1 and FC2 kernels, a dense layer's tiled GEMM, or a split-K
    kernel.

    Attributes
    ----------
    activation : str
        Format to which a MoE layer rounds activations, ``"mxfp8"`` (W4A8) or ``"bf16"`` (W4A16). A dense layer takes
        tokens of any format that its compute_dtype holds.
    compute_dtype : str
        Operand type in which activations are multiplied: ``"mxfp8"`` or ``"mxfp4"`` by MMAs that take block scales (in
        half precision where there are none), or ``"bf16"``, which holds the values of every format exactly.
    block_n : int
        Tokens of one tile: the N side of the MMA.
    block_k : int
        K elements of one pipeline stage; in a split-K kernel, those that one MMA warp takes.
    stages : int
        Depth of the pipeline of stages in shared memory. A fused MoE kernel's pipeline takes all that the device
        grants; the number is then a gpt-oss layer's on a GB10. A split-K dense kernel has 0 here.
    blocks_per_sm : int
        Blocks that must fit one SM of a GB10 together; ``__launch_bounds__``' second argument is this or more.
    shared_bytes : int
        Dynamic shared memory of a MoE layer's block on SM12x: FC1's with 128 local experts; a split-K kernel's with the
        pipeline above.
    mma_warps : int
        Warps that share K in a split-K kernel, which has one block per SM; a fused MoE kernel computes FC1 and FC2
        in one launch. 0: tiled GEMMs.
    weights : str
        ``"mxfp4"`` or ``"nvfp4"`` for a MoE layer; for a dense layer one of
        ``quantization.block_scaled.WEIGHT_FORMATS``.
    layer : str
        ``"moe"`` or ``"dense"``.
    """

    activation: Format
    compute_dtype: Format
    block_n: int
    block_k: int
    stages: int = 0
    blocks_per_sm: int = 1
    shared_bytes: int = 0
    mma_warps: int = 0
    weights: str = "mxfp4"
    layer: Layer = "moe"

    @functools.cached_property
    def compute(self) -> str:
        """``"mxfp8_as_bf16"`` if activations are rounded to MXFP8 and multiplied as bfloat16, else the
        compute_dtype."""
        return (
            self.compute_dtype
            if self.compute_dtype == self.activation
            else f"{self.activation}_as_{self.compute_dtype}"
        )

    @functools.cached_property
    def name(self) -> str:
        """The tactic's name, a C identifier: ``bf16_m64_k128``, ``stream_bf16_m8``, ``nvfp4_stream_bf16_m8``,
        ``dense_mxfp4_m8_w3``.

        It does not depend on the pipeline's depth, so it stays as long as the row has this tile.
        """
        if self.layer == "dense":
            gemm = "gemm" if self.compute_dtype == "bf16" else f"gemm_{self.compute_dtype}"
            return f"dense_{self.weights}_m{self.block_n}_{f'w{self.block_k // 128}' if self.split_k else gemm}"
        weights = "" if self.weights == "mxfp4" else f"{self.weights}_"
        if self.split_k:
            longer = "" if self.block_k == 256 else f"_w{self.block_k // 128}"
            return f"{weights}stream_{self.compute}_m{self.block_n}{longer}"
        return f"{weights}{self.compute}_m{self.block_n}_k{self.block_k}"

    @property
    def profile_id(self) -> int:
        """The tactic's integer in ``profile_ids``. Its digits are: 1 for NVFP4 weights; 1, 2 or 3 for :attr:`compute`
        (4, 5 or 6 if fused); N tile; BLOCK_K.

        ``bf16_m64_k128`` is 3064128, ``nvfp4_bf16_m64_k128`` 13064128. A dense layer's number is its place in the
        table.
        """
        if self.layer == "dense":
            return self.index
        kind = 10 * MOE_WEIGHTS.index(self.weights) + _COMPUTE.index(self.compute) + (4 if self.split_k else 1)
        return 1_000_000 * kind + 1_000 * self.block_n + self.block_k

    @functools.cached_property
    def index(self) -> int:
        """The row's index in :data:`INSTANCES` or :data:`DENSE_INSTANCES`."""
        return _INDICES[self.name]

    def element(self, matrix: Literal["activation", "compute_dtype", "weights"]) -> str:
        """The C++ name of one of its formats."""
        return f"Element::{FORMATS[getattr(self, matrix)].element}"

    @functools.cached_property
    def split_k(self) -> bool:
        """Whether the row is a split-K kernel (``include/flashinfer/sm12x/split_k``) and not tiled GEMMs
        (``tile``)."""
        return self.mma_warps > 0

    @property
    def longest_k(self) -> int:
        """The longest K that the row takes."""
        return self.mma_warps * self.block_k if self.split_k else 2**30

    def takes(self, num_rows: int, hidden: int, inter: int) -> bool:
        """Whether the row computes a MoE layer of these sizes; ``num_rows`` is tokens x top_k."""
        return not self.split_k or (num_rows <= FUSED_MOE_ROUTED_ROWS and max(hidden, inter) <= self.longest_k)


_BF16 = (
    Instance("bf16", "bf16", 8, 128, 3, 2, 39240),
    Instance("bf16", "bf16", 16, 128, 2, 2, 32824),
    Instance("bf16", "bf16", 24, 128, 2, 2, 38200),
    Instance("bf16", "bf16", 32, 128, 3, 1, 61512),
    Instance("bf16", "bf16", 40, 128, 3, 1, 68936),
    Instance("bf16", "bf16", 64, 128, 3, 1, 91208),
)
_MXFP8_M8 = (
    Instance("mxfp8", "mxfp8", 8, 128, 4, 2, 47576),
    Instance("mxfp8", "mxfp8", 8, 256, 2, 2, 47032),
)
_FUSED_M8 = (
    Instance("mxfp8", "bf16", 8, 256, 3, 1, 94720, mma_warps=12),
    Instance("bf16", "bf16", 8, 256, 3, 1, 94720, mma_warps=12),
)

# For a K of 3,104 to 4,608, at which a GB10 holds two stages. Stages and bytes here are a gpt-oss layer's, as above.
_FUSED_M8_W3 = (
    Instance("mxfp8", "bf16", 8, 384, 3, 1, 94720, mma_warps=12),
    Instance("bf16", "bf16", 8, 384, 3, 1, 94720, mma_warps=12),
)

# Two GEMM kernels a layer.
TWO_KERNEL: tuple[Instance, ...] = (
    *_MXFP8_M8,
    Instance("mxfp8", "mxfp8", 16, 128, 3, 2, 41224),
    Instance("mxfp8", "mxfp8", 16, 256, 3, 1, 76744),
    Instance("mxfp8", "mxfp8", 32, 128, 3, 1, 50632),
    Instance("mxfp8", "mxfp8", 32, 256, 3, 1, 92488),
    Instance("mxfp8", "mxfp8", 64, 128, 4, 1, 89688),
    Instance("mxfp8", "mxfp8", 128, 128, 2, 1, 76344),
    *_BF16,
)

# The rows of ``fused_moe_120``.
MAIN_MODULE: tuple[Instance, ...] = (*TWO_KERNEL, *_FUSED_M8)

NVFP4_TWO_KERNEL: tuple[Instance, ...] = (
    Instance("bf16", "bf16", 8, 128, 3, 2, 43848, weights="nvfp4"),
    Instance("bf16", "bf16", 16, 128, 2, 2, 35896, weights="nvfp4"),
    Instance("bf16", "bf16", 32, 128, 3, 1, 66120, weights="nvfp4"),
    Instance("bf16", "bf16", 64, 128, 3, 1, 95816, weights="nvfp4"),
)

# NVFP4's scales are twice the bytes of MXFP4's: a GB10 holds two stages of a gpt-oss layer's fused MoE kernel, and only
# one if K exceeds 3,968, so a row with a BLOCK_K of 384 would have no use.
NVFP4_FUSED = Instance("bf16", "bf16", 8, 256, 2, 1, 76416, mma_warps=12, weights="nvfp4")

NVFP4: tuple[Instance, ...] = (*NVFP4_TWO_KERNEL, NVFP4_FUSED)
"""The rows of ``fused_moe_120_nvfp4``."""

MOE_MODULES: dict[str, tuple[Instance, ...]] = {"mxfp4": MAIN_MODULE, "nvfp4": NVFP4}
"""The rows that the module for experts of a format holds."""


def is_alone(row: Instance) -> bool:
    """Whether a MoE layer's row has a small module of its own, which is built when a layer first uses it."""
    return row not in MOE_MODULES[row.weights]


SM12X: tuple[Instance, ...] = (*MAIN_MODULE, *_FUSED_M8_W3, *NVFP4)

# Hopper's MMA takes no block scales.
HOPPER: tuple[Instance, ...] = (
    *_MXFP8_M8,
    Instance("mxfp8", "bf16", 16, 128, 2, 2, 32824),
    Instance("mxfp8", "bf16", 24, 128, 2, 2, 38200),
    Instance("mxfp8", "bf16", 32, 128, 3, 1, 61512),
    Instance("mxfp8", "bf16", 40, 128, 3, 1, 68936),
    Instance("mxfp8", "bf16", 64, 128, 3, 1, 91208),
    *_BF16,
    *_FUSED_M8,
    *_FUSED_M8_W3,
    Instance("mxfp8", "bf16", 16, 256, 3, 1, 96256, mma_warps=12),
    Instance("bf16", "bf16", 16, 256, 3, 1, 96256, mma_warps=12),
    *NVFP4,
)

INSTANCES: tuple[Instance, ...] = (*SM12X, *(row for row in HOPPER if row not in SM12X))
"""Every row; Hopper runs all of them."""

GEMM_INSTANCES: tuple[Instance, ...] = tuple(row for row in TWO_KERNEL if row.compute_dtype == "mxfp8")
"""The rows for which the grouped GEMM is compiled."""


def _dense(weights: str, block_n: int, block_k: int = 128, compute_dtype: Format = "bf16", **more: int) -> Instance:
    return Instance(compute_dtype, compute_dtype, block_n, block_k, weights=weights, layer="dense", **more)


def _split_k_dense(weights: str) -> tuple[Instance, ...]:
    return tuple(_dense(weights, tile, block_k, mma_warps=12) for tile, block_k in ((8, 256), (8, 384), (16, 256)))


MX_DENSE_INSTANCES: tuple[Instance, ...] = (
    *_split_k_dense("mxfp4"),
    *_split_k_dense("mxfp8"),
    _dense("mxfp4", 32, stages=3),
    _dense("mxfp4", 64, stages=3),
    _dense("mxfp8", 32, stages=3),
    _dense("mxfp8", 48, stages=3),
    _dense("mxfp4", 64, compute_dtype="mxfp8", stages=4),
    _dense("mxfp4", 128, compute_dtype="mxfp8", stages=2),
    _dense("mxfp8", 64, compute_dtype="mxfp8", stages=3),
    _dense("mxfp8", 128, compute_dtype="mxfp8", stages=2),
    _dense("mxfp4", 64, compute_dtype="mxfp4", stages=6),
    _dense("mxfp4", 128, compute_dtype="mxfp4", stages=4),
)
"""Rows of the dense layer whose weights SM12x's MMA takes with their scales: those of upstream's ``mm_*``."""

DENSE_INSTANCES: tuple[Instance, ...] = (
    *MX_DENSE_INSTANCES,
    *_split_k_dense("mxint8"),
    _dense("mxint8", 32, stages=3),
    _dense("mxint8", 48, stages=3),
    *_split_k_dense("mxfp6"),
    _dense("mxfp6", 32, stages=3),
    _dense("mxfp6", 48, stages=3),
    _dense("mxfp6", 64, compute_dtype="mxfp8", stages=3),
    _dense("mxfp6", 128, compute_dtype="mxfp8", stages=2),
    *_split_k_dense("nvfp4"),
    _dense("nvfp4", 32, stages=3),
    _dense("nvfp4", 64, stages=3),
)
"""Every row of the dense layer. Its numbers are places: new rows come last."""

_INDICES = {row.name: index for rows in (INSTANCES, DENSE_INSTANCES) for index, row in enumerate(rows)}
_NAMES = tuple(row.name for row in INSTANCES)
assert len(_INDICES) == len(INSTANCES) + len(DENSE_INSTANCES)
assert len({row.profile_id for row in INSTANCES}) == len(INSTANCES)


def tactic(name: str) -> int:
    """The number for ``profile_ids`` of the row called ``name``; ``ValueError`` with the names there are otherwise."""
    return INSTANCES[index_of(name)].profile_id


def index_of(name: str) -> int:
    """The place in :data:`INSTANCES` of the row called ``name``; ``ValueError`` with the names there are otherwise."""
    if name not in _NAMES:
        raise ValueError(f"there is no tactic {name!r}; there are {', '.join(_NAMES)}")
    return _INDICES[name]


def instance(index: int) -> Instance:
    """The row whose place is ``index``; ``ValueError`` with the allowed ones otherwise."""
    if not 0 <= index < len(INSTANCES):
        raise ValueError(f"instance {index} does not exist: the tables hold 0..{len(INSTANCES) - 1}")
    return INSTANCES[index]
