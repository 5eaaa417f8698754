# SPDX-License-Identifier: Apache-2.0
"""Which instance a shape gets, and why.

The choice follows the number of token rows that an expert can expect, since that is the N side of its GEMMs: the
narrowest token tile that holds them wastes least of an MMA, and a wider one reads the weights fewer times.  Thresholds
come from the tactic sweep on an H200 in ``docs/performance.md``; those of SM12x, where the MMA is block-scaled and wide
tiles cost no scale arithmetic, are predictions until somebody has measured them on a GB10.
"""

from __future__ import annotations

import dataclasses

from ..jit.sm12x.instances import (
    GB10_SMEM_PER_BLOCK,
    HOPPER_SMEM_PER_BLOCK,
    INSTANCES,
    Activation,
    Instance,
)

MODE_BF16_ACTIVATIONS = 2


@dataclasses.dataclass(frozen=True)
class Choice:
    """An instance and the reason for it, for people."""

    instance: Instance
    reason: str


Limits = tuple[tuple[float, int], ...]
_END = float("inf")


@dataclasses.dataclass(frozen=True)
class DeviceClass:
    """How a class of devices chooses by the expected rows of an expert: the first entry whose limit is not exceeded.

    Attributes
    ----------
    shared_bytes : int
        Shared memory that a block may have.
    widens : bool
        Pairs of GEMMs keep MXFP8 activations as bfloat16 where such a row has the token tile: the MMA takes no scales.
    streamed : tuple
        Limits and token tiles of the streamed layer; past the last limit it is not used.
    pairs : tuple
        The same for pairs of GEMM kernels.
    gemms : tuple
        The same for the grouped GEMM.
    """

    shared_bytes: int
    widens: bool
    streamed: Limits
    pairs: Limits
    gemms: Limits


# An expert's rows take ceil(rows / tile) tiles. On an H200 a tile costs, relative to a streamed one of 8 (docs/performance.md):
# streamed 16, 1.26; pairs of 8, 16, 24, 32, 40, 64: 1.33, 1.39, 1.54, 1.77, 1.95, 2.63. Limits are where the cheapest
# changes if an expert's rows are Poisson distributed: at 64 rows two tiles of 40 cost less than the 1.5 of 64 that it takes.
_HOPPER = DeviceClass(
    HOPPER_SMEM_PER_BLOCK,
    True,
    ((5.9, 8), (14.5, 16)),
    ((4.8, 8), (12.0, 16), (20.0, 24), (26.0, 32), (38.0, 40), (63.5, 64), (84.0, 40), (_END, 64)),
    ((8.5, 8), (_END, 16)),
)
# A tile that is too narrow reads weights twice, and a GB10 waits for memory: the streamed layer ends earlier there.
_SM12X_PAIRS = ((6.0, 8), (14.0, 16), (20.0, 24), (28.0, 32), (36.0, 40), (64.0, 64), (_END, 128))
_SM12X = DeviceClass(GB10_SMEM_PER_BLOCK, False, ((4.5, 8),), _SM12X_PAIRS, _SM12X_PAIRS)


def expected_rows(num_rows: int, num_experts: int) -> float:
    """Rows of a busy expert when ``num_rows`` rows fall on ``num_experts`` experts at random: the mean over the experts that are hit."""
    hit = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** num_rows)
    return num_rows / hit if hit else 0.0


def choose(
    activation: Activation,
    num_rows: int,
    num_experts: int,
    block_scaled_mma: bool,
    layer: tuple[int, int] | None = None,
    all_sms: bool = True,
) -> Choice:
    """The default instance for ``num_rows`` token rows (tokens x top_k) on ``num_experts`` local experts.

    ``layer`` is hidden and intermediate size of an MoE layer; without it only single GEMMs are chosen from.  Without
    ``all_sms`` of the device only pairs of GEMMs are: blocks of a streamed layer wait for each other.
    """
    rows = expected_rows(num_rows, num_experts)
    device = _SM12X if block_scaled_mma else _HOPPER
    busy = f"{rows:.1f} rows for an expert that is hit"
    tile = next((tile for limit, tile in device.streamed if rows <= limit), 0)
    for row in INSTANCES:
        if layer is None or not all_sms or not row.streamed or row.activation != activation or row.token_tile != tile:
            continue
        if row.takes(num_rows, *layer, device.shared_bytes):
            return Choice(row, f"{busy}: the layer as one stream of weights, token tile {tile}")
    wanted = next(tile for limit, tile in (device.gemms if layer is None else device.pairs) if rows <= limit)
    widens = device.widens and layer is not None
    candidates = [
        row
        for row in INSTANCES
        if not row.streamed and row.activation == activation and (row.default or (widens and row.widens))
    ]
    tiles = sorted({row.token_tile for row in candidates})
    tile = next((tile for tile in tiles if tile >= wanted), tiles[-1])
    # Of equal tiles the one made for such a device, then the longer K tile: whole 128-byte pieces of a weight row.
    best = max((row for row in candidates if row.token_tile == tile), key=lambda row: (row.widens, row.k_tile))
    kept = ", activations kept as bfloat16" if best.widens else ""
    return Choice(best, f"{busy}: token tile {tile}, K tile {best.k_tile}{kept}")


def plan_moe(
    num_tokens: int,
    top_k: int,
    num_local_experts: int,
    hidden: int,
    inter: int,
    mode: int,
    block_scaled_mma: bool = True,
    all_sms: bool = True,
) -> tuple[int, int]:
    """Default tactics of FC1 and FC2: one that computes the whole layer, twice, or a pair.

    Shares of work are cut to the number of SMs inside the kernels (``scheduler/tile_scheduler.cuh``,
    ``impls/streamed_walk.cuh``), so that it does not change the choice, unless the layer may not use all of them.
    """
    activation: Activation = "bf16" if mode == MODE_BF16_ACTIVATIONS else "mxfp8"
    rows = num_tokens * top_k
    index = choose(activation, rows, num_local_experts, block_scaled_mma, (hidden, inter), all_sms).instance.index
    return index, index


def plan_group_gemm(cum_m: int, num_groups: int, block_scaled_mma: bool = True) -> int:
    """Default tactic of the grouped GEMM."""
    return choose("mxfp8", cum_m, num_groups, block_scaled_mma).instance.index
