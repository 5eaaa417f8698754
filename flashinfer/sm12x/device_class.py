# SPDX-License-Identifier: Apache-2.0
"""The classes of GPUs that the kernels serve, one row each: every fact by which the family's Python tells devices
apart.

A backend carries its class. The kernels' own limits of an architecture stand in ``include/flashinfer/sm12x/types.h``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .instances import HOPPER as HOPPER_TABLE
from .instances import INSTANCES, SM12X, Instance

Limits = tuple[tuple[float, int], ...]
_END = float("inf")


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceClass:
    """One class of GPUs and its thresholds. A field of limits chooses by an expert's expected rows: the first entry
    whose limit they do not exceed.

    Attributes
    ----------
    key, gpu, sm_count : str, str, int
        The name for ``sm12x-plan --device``; a GPU of the class; that GPU's multiprocessors.
    capability : tuple
        Compute capability, major and minor; None as minor stands for all minors that no other row has.
    mma_kinds : tuple
        Kinds of MMA that take block scales. If a probe found the sums of one too narrow, modules are built without it.
    table : tuple
        Rows of the instance table among which planner and autotuner choose.
    tactics : tuple
        Rows that a layer may be forced to.
    fused_moe : tuple
        Limits and N tiles of the fused MoE kernel; past the last limit it is not used.
    two_kernel : tuple
        The same for pairs of GEMM kernels in W4A8.
    two_kernel_w4a16 : tuple
        The same in W4A16.
    gemms : tuple
        The same for the grouped GEMM.
    w4a16_rows : float
        The limit up to which W4A16 takes at most ``sm12x_planner.AS_FAST`` times as long as W4A8 from bfloat16.
    cublas_tokens : int
        The least number of bfloat16 tokens for which cuBLAS multiplies a dense layer's dequantized weights.
    cublas_tokens_in_pieces : Mapping
        The same, by the weights' format, for weights that are dequantized in pieces; a format without an entry:
        ``cublas_tokens``.
    rescored_bytes : float
        Bytes that a rescored LM head may read, as a multiple of its fine weight's; beyond, that weight computes all
        logits (``sm12x_dense_rescored.rescores``).
    dense_tiles_per_sm : int
        Tiles of a dense layer's output per SM up to which its tiles are small (``sm12x_dense_launch.choose_instance``).
    unified_memory : bool
        Whether CPU and GPU share DRAM.
    opt_in : bool
        Whether the class is served only with ``FLASHINFER_SM12X_MOE=1``.
    """

    key: str
    gpu: str
    sm_count: int
    capability: tuple[int, int | None]
    mma_kinds: tuple[str, ...]
    table: tuple[Instance, ...]
    tactics: tuple[Instance, ...]
    fused_moe: Limits
    two_kernel: Limits
    two_kernel_w4a16: Limits
    gemms: Limits
    w4a16_rows: float
    cublas_tokens: int
    cublas_tokens_in_pieces: Mapping[str, int]
    dense_tiles_per_sm: int
    rescored_bytes: float
    unified_memory: bool = False
    opt_in: bool = False

    def facts(self) -> dict[str, Any]:
        """The device's entry in the output of ``sm12x-plan --json``."""
        mma = {"block_scaled_mma": bool(self.mma_kinds), "unified_memory": self.unified_memory}
        return {"name": self.gpu, "sm_count": self.sm_count, **mma}

    def candidates(self, num_rows: int, hidden: int, inter: int, weights: str = "mxfp4") -> tuple[Instance, ...]:
        """The rows among which planner and autotuner choose for a MoE layer; ``num_rows`` is tokens x top_k.

        These are the table's rows that take the layer; among split-K kernels of one N tile only the one with the
        smallest BLOCK_K.
        """
        rows = [row for row in self.table if row.weights == weights and row.takes(num_rows, hidden, inter)]
        split_k = sorted((row for row in rows if row.split_k), key=lambda row: -row.block_k)
        least = {(row.compute, row.block_n): row for row in split_k}
        return tuple(row for row in rows if not row.split_k or row in least.values())


# An expert's rows take ceil(rows / tile) tiles. On an H200 a tile costs, relative to the fused MoE kernel's of 8
# (docs/log.md): fused 16, 1.26; pairs of 8, 16, 24, 32, 40, 64: 1.33, 1.39, 1.54, 1.77, 1.95, 2.63. Limits lie where
# the cheapest tile changes if an expert's rows are Poisson distributed: a mean of 64 rows takes 1.5 tiles of 64, and
# two of 40 cost less.
_HOPPER_TWO_KERNEL = ((4.8, 8), (12.0, 16), (20.0, 24), (26.0, 32), (38.0, 40), (63.5, 64), (84.0, 40), (_END, 64))
_SM12X_TWO_KERNEL = ((6.0, 8), (14.0, 16), (20.0, 24), (28.0, 32), (36.0, 40), (64.0, 64), (_END, 128))
# A card reads 1.6 to 2.3 times as many bytes per SM and clock as a GB10, so MMAs of padded rows become its bottleneck:
# at 64 to 256 rows a half-empty tile of 128 costs up to 20 % more than tiles of 64, by the virtual GPU's counts
# (docs/hindcast.md).
_CARD_TWO_KERNEL = (*_SM12X_TWO_KERNEL[:-2], (256.0, 64), (_END, 128))

GB10 = DeviceClass(
    key="gb10",
    gpu="GB10",
    sm_count=48,
    capability=(12, 1),
    mma_kinds=("mxf8f6f4", "mxf4"),
    table=SM12X,
    tactics=SM12X,
    # Too narrow a tile reads weights twice, and a GB10 is bound by memory: its limit of the fused MoE kernel is lower.
    fused_moe=((4.5, 8),),
    two_kernel=_SM12X_TWO_KERNEL,
    # Left out: W4A16's tiles of 16 and 24, which have two blocks on an SM. Their weights and tokens compete for L2, and
    # they read up to 5 % more bytes.
    two_kernel_w4a16=((6.0, 8), (28.0, 32), (36.0, 40), (_END, 64)),
    gemms=_SM12X_TWO_KERNEL,
    w4a16_rows=24.0,  # tokens in bf16 are twice the bytes of MXFP8 ones, 3 % of a layer's at 24 rows
    cublas_tokens=4096,
    cublas_tokens_in_pieces={},
    dense_tiles_per_sm=1,  # a prediction
    rescored_bytes=1.0,  # memory binds both, by arithmetic
    unified_memory=True,
)
CARD = dataclasses.replace(
    GB10,
    key="rtx5090",
    gpu="RTX 5090",
    sm_count=170,
    capability=(12, None),
    two_kernel=_CARD_TWO_KERNEL,
    gemms=_CARD_TWO_KERNEL,
    rescored_bytes=0.6,  # a prediction: its MMAs bind the coarse weight from some 40 tokens on
    unified_memory=False,
)
HOPPER = DeviceClass(
    key="h200",
    gpu="H200",
    sm_count=132,
    capability=(9, 0),
    mma_kinds=(),
    table=HOPPER_TABLE,
    tactics=INSTANCES,
    fused_moe=((5.9, 8), (14.5, 16)),
    two_kernel=_HOPPER_TWO_KERNEL,
    two_kernel_w4a16=_HOPPER_TWO_KERNEL,
    gemms=((8.5, 8), (_END, 16)),
    w4a16_rows=_END,  # MXFP8 tokens are multiplied as bfloat16 there, after they were quantized
    cublas_tokens=256,  # its cuBLAS has wgmma
    # As of an LM head: measured for MXFP4 and MXFP8, and taken to be alike for formats of about as many bits.
    cublas_tokens_in_pieces={"mxfp4": 1024, "nvfp4": 1024, "mxfp6": 512, "mxint8": 512, "mxfp8": 512},
    dense_tiles_per_sm=2,  # measured on an H200
    rescored_bytes=0.405,  # measured on an H200 with gpt-oss-120b's head: 32 tokens
    opt_in=True,
)
CLASSES = (GB10, CARD, HOPPER)


def class_of(capability: tuple[int, int]) -> DeviceClass | None:
    """The class of GPUs of a compute capability; None: the family has no kernels for them."""
    major, minor = capability
    known = {each.capability: each for each in CLASSES}
    return known.get((major, minor), known.get((major, None)))
