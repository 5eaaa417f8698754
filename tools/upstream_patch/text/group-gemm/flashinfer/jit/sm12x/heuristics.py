"""The default row of the tables for a problem."""

from __future__ import annotations

from collections.abc import Sequence

from .instances import GEMM_INSTANCES, Instance

# take flashinfer/sm12x/device_class.py: _END _SM12X_TWO_KERNEL
# take flashinfer/fused_moe/sm12x_planner.py: expected_rows


def narrowest_that_holds(rows: float, candidates: Sequence[Instance]) -> Instance:
    wanted = next(tile for limit, tile in _SM12X_TWO_KERNEL if rows <= limit)
    tiles = sorted({row.block_n for row in candidates})
    tile = next((tile for tile in tiles if tile >= wanted), tiles[-1])
    # Of equal token tiles the longer K tile: whole 128-byte pieces of a weight row.
    return max((row for row in candidates if row.block_n == tile), key=lambda row: row.block_k)


def choose_group_gemm(cum_m: int, num_groups: int) -> Instance:
    """The row for ``cum_m`` rows in ``num_groups`` groups of unknown sizes."""
    return narrowest_that_holds(expected_rows(cum_m, num_groups), GEMM_INSTANCES)
