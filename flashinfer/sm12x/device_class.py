# SPDX-License-Identifier: Apache-2.0
"""The classes of GPUs that the kernels serve: all that the family's Python asks of a device, one row a class.

A backend carries its class; nothing else tells GPUs apart. The kernels' own limits of an architecture are
``include/flashinfer/sm12x/types.h``'s.
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
    """What one class of GPUs is, and how it chooses by the expected rows of an expert: the first entry whose limit is not
    exceeded.

    Attributes
    ----------
    key, gpu, sm_count : str, str, int
        What ``sm12x-plan --device`` calls it, and a GPU of the class with its multiprocessors.
    capability : tuple
        Compute capability, major and minor; a minor of None stands for all that no other row has.
    mma_kinds : tuple
        Kinds of MMA that take block scales. Where a probe found the sums of one too narrow, modules are built without it.
    table : tuple
        Rows of the instance table among which planner and autotuner choose.
    tactics : tuple
        Rows that a layer may be forced to.
    streamed : tuple
        Limits and token tiles of the streamed layer; past the last limit it is not used.
    pairs : tuple
        The same for pairs of GEMM kernels in W4A8.
    exact_pairs : tuple
        The same in W4A16.
    gemms : tuple
        The same for the grouped GEMM.
    exact : float
        The limit up to which W4A16 takes at most ``sm12x_planner.AS_FAST`` times as long as W4A8 from bfloat16.
    cublas_tokens : int
        From so many bfloat16 tokens on cuBLAS multiplies a dense layer's dequantized weights.
    cublas_tokens_in_pieces : Mapping
        The same by the weights' format, where the weight is dequantized in pieces; empty: as whole ones.
    dense_tiles_per_sm : int
        Tiles of a dense layer's output for each SM up to which they are small (``sm12x_dense_launch.choose_instance``).
    unified_memory : bool
        Its DRAM is the CPU's.
    opt_in : bool
        Served with ``FLASHINFER_SM12X_MOE=1`` alone.
    """

    key: str
    gpu: str
    sm_count: int
    capability: tuple[int, int | None]
    mma_kinds: tuple[str, ...]
    table: tuple[Instance, ...]
    tactics: tuple[Instance, ...]
    streamed: Limits
    pairs: Limits
    exact_pairs: Limits
    gemms: Limits
    exact: float
    cublas_tokens: int
    cublas_tokens_in_pieces: Mapping[str, int]
    dense_tiles_per_sm: int
    unified_memory: bool = False
    opt_in: bool = False

    def facts(self) -> dict[str, Any]:
        """What ``sm12x-plan --json`` tells of it."""
        mma = {"block_scaled_mma": bool(self.mma_kinds), "unified_memory": self.unified_memory}
        return {"name": self.gpu, "sm_count": self.sm_count, **mma}

    def candidates(self, num_rows: int, hidden: int, inter: int, weights: str = "mxfp4") -> tuple[Instance, ...]:
        """The rows among which planner and autotuner choose for a MoE layer; ``num_rows`` is tokens x top_k.

        Those of the table that take it, but of streams of one token tile only the one whose warps take least of K.
        """
        rows = [row for row in self.table if row.weights == weights and row.takes(num_rows, hidden, inter)]
        streams = sorted((row for row in rows if row.streamed), key=lambda row: -row.k_tile)
        least = {(row.multiplies, row.token_tile): row for row in streams}
        return tuple(row for row in rows if not row.streamed or row in least.values())


# An expert's rows take ceil(rows / tile) tiles. On an H200 a tile costs, relative to a streamed one of 8 (docs/log.md):
# streamed 16, 1.26; pairs of 8, 16, 24, 32, 40, 64: 1.33, 1.39, 1.54, 1.77, 1.95, 2.63. Limits are where the cheapest
# changes if an expert's rows are Poisson distributed: at 64 rows two tiles of 40 cost less than the 1.5 of 64 that it takes.
_HOPPER_PAIRS = ((4.8, 8), (12.0, 16), (20.0, 24), (26.0, 32), (38.0, 40), (63.5, 64), (84.0, 40), (_END, 64))
_SM12X_PAIRS = ((6.0, 8), (14.0, 16), (20.0, 24), (28.0, 32), (36.0, 40), (64.0, 64), (_END, 128))
# A card reads 1.6 to 2.3 times a GB10's bytes for each clock of an SM, so that MMAs of padded rows bind it: at 64 to 256
# rows a half-empty tile of 128 costs up to 20 % more than tiles of 64 by the counts of the virtual GPU (docs/hindcast.md).
_CARD_PAIRS = (*_SM12X_PAIRS[:-2], (256.0, 64), (_END, 128))

GB10 = DeviceClass(
    key="gb10",
    gpu="GB10",
    sm_count=48,
    capability=(12, 1),
    mma_kinds=("mxf8f6f4", "mxf4"),
    table=SM12X,
    tactics=SM12X,
    # A tile that is too narrow reads weights twice, and a GB10 waits for memory: the streamed layer ends earlier there.
    streamed=((4.5, 8),),
    pairs=_SM12X_PAIRS,
    # In W4A16 tiles of 16 and 24 have two blocks on an SM, whose weights and tokens share its L2: up to 5 % more bytes.
    exact_pairs=((6.0, 8), (28.0, 32), (36.0, 40), (_END, 64)),
    gemms=_SM12X_PAIRS,
    exact=24.0,  # tokens in bf16 are twice the bytes of MXFP8 ones, 3 % of a layer's at 24 rows
    cublas_tokens=4096,
    cublas_tokens_in_pieces={},
    dense_tiles_per_sm=1,  # a prediction
    unified_memory=True,
)
CARD = dataclasses.replace(
    GB10,
    key="rtx5090",
    gpu="RTX 5090",
    sm_count=170,
    capability=(12, None),
    pairs=_CARD_PAIRS,
    gemms=_CARD_PAIRS,
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
    streamed=((5.9, 8), (14.5, 16)),
    pairs=_HOPPER_PAIRS,
    exact_pairs=_HOPPER_PAIRS,
    gemms=((8.5, 8), (_END, 16)),
    exact=_END,  # MXFP8 tokens are multiplied as bfloat16 there, after they were quantized
    cublas_tokens=256,  # its cuBLAS has wgmma
    # As of an LM head: measured for MXFP4 and MXFP8, and taken to be alike for formats of about as many bits.
    cublas_tokens_in_pieces={"mxfp4": 1024, "nvfp4": 1024, "mxfp6": 512, "mxint8": 512, "mxfp8": 512},
    dense_tiles_per_sm=2,  # measured on an H200
    opt_in=True,
)
CLASSES = (GB10, CARD, HOPPER)


def class_of(capability: tuple[int, int]) -> DeviceClass | None:
    """The class of GPUs of a compute capability; None: the family has no kernels for them."""
    major, minor = capability
    known = {each.capability: each for each in CLASSES}
    return known.get((major, minor), known.get((major, None)))
