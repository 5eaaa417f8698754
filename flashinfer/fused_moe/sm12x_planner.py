# SPDX-License-Identifier: Apache-2.0
"""Which instance a shape gets, and why.

The choice follows the number of token rows that an expert can expect, since that is the N side of its GEMMs: the
narrowest token tile that holds them wastes least of an MMA, and a wider one reads the weights fewer times.  Thresholds
come from the tactic sweep on an H200 in ``docs/performance.md``; those of SM12x, where the MMA is block-scaled and wide
tiles cost no scale arithmetic, are predictions until somebody has measured them on a GB10.
"""

from __future__ import annotations

import dataclasses

from ..jit.sm12x.instances import INSTANCES, Activation, Instance

MODE_BF16_ACTIVATIONS = 2


@dataclasses.dataclass(frozen=True)
class Choice:
    """An instance and the reason for it, for people."""

    instance: Instance
    reason: str


# Token tile by the expected rows of an expert: the first entry whose limit is not exceeded.
_TILES_HOPPER = ((8.5, 8), (float("inf"), 16))
_TILES_SM12X = ((6.0, 8), (14.0, 16), (28.0, 32), (64.0, 64), (float("inf"), 128))


def expected_rows(num_rows: int, num_experts: int) -> float:
    """Rows of a busy expert when ``num_rows`` rows fall on ``num_experts`` experts at random: the mean over the experts that are hit."""
    hit = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** num_rows)
    return num_rows / hit if hit else 0.0


def choose(activation: Activation, num_rows: int, num_experts: int, block_scaled_mma: bool) -> Choice:
    """The default instance for ``num_rows`` token rows (tokens x top_k) on ``num_experts`` local experts."""
    rows = expected_rows(num_rows, num_experts)
    tiles = _TILES_SM12X if block_scaled_mma else _TILES_HOPPER
    wanted = next(tile for limit, tile in tiles if rows <= limit)
    candidates = [row for row in INSTANCES if row.default and row.activation == activation]
    tile = max(row.token_tile for row in candidates if row.token_tile <= wanted)
    # Of equal tiles the longer K tile: whole 128-byte pieces of a weight row.
    best = max((row for row in candidates if row.token_tile == tile), key=lambda row: row.k_tile)
    return Choice(best, f"{rows:.1f} rows for an expert that is hit: token tile {tile}, K tile {best.k_tile}")


def plan_moe(
    num_tokens: int,
    top_k: int,
    num_local_experts: int,
    hidden: int,
    inter: int,
    mode: int,
    sm_count: int,
    block_scaled_mma: bool = True,
) -> tuple[int, int]:
    """Default tactics of FC1 and FC2.

    Shares of work are cut to the SM count inside the kernels (``scheduler/tile_scheduler.cuh``), so neither N, K nor
    ``sm_count`` changes the choice of a tile.
    """
    del hidden, inter, sm_count
    activation: Activation = "bf16" if mode == MODE_BF16_ACTIVATIONS else "mxfp8"
    index = choose(activation, num_tokens * top_k, num_local_experts, block_scaled_mma).instance.index
    return index, index


def plan_group_gemm(cum_m: int, num_groups: int, n: int, k: int, sm_count: int, block_scaled_mma: bool = True) -> int:
    """Default tactic of the grouped GEMM."""
    del n, k, sm_count
    return choose("mxfp8", cum_m, num_groups, block_scaled_mma).instance.index
