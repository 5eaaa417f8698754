# SPDX-License-Identifier: Apache-2.0
"""The planner's limits on Hopper follow from what a tile was measured to cost: no other tile is much cheaper."""

from __future__ import annotations

import math

import pytest

from flashinfer.fused_moe import sm12x_planner
from flashinfer.jit.sm12x.instances import STREAM_ENTRIES, Format

# Time of a token tile of one expert on an H200, relative to a streamed tile of 8 (docs/log.md, "Grid of tactics").
STREAMED, PAIR = True, False
COST = {
    (STREAMED, 8): 1.0,
    (STREAMED, 16): 1.26,
    (PAIR, 16): 1.39,
    (PAIR, 24): 1.54,
    (PAIR, 32): 1.77,
    (PAIR, 40): 1.95,
    (PAIR, 64): 2.63,
}
NARROW = 1.07 / 1.26  # of a streamed tile of 16, where it holds eight tokens or fewer


def expected_cost(kind: tuple[bool, int], mean: float) -> float:
    """Of an expert whose rows are Poisson distributed."""
    streamed, tile = kind
    narrow = NARROW if streamed and tile == 16 else 1.0
    probability, total = math.exp(-mean), 0.0
    for rows in range(int(mean + 12 * math.sqrt(mean) + 20)):
        full, last = divmod(rows, tile)
        total += probability * (full + (0.0 if last == 0 else narrow if last <= 8 else 1.0))
        probability *= mean / (rows + 1)
    return COST[kind] * total


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
@pytest.mark.parametrize("experts", [32, 128])
def test_hopper_takes_a_tile_within_five_percent_of_the_cheapest(experts: int, activation: Format) -> None:
    top_k = 4
    for tokens in [*range(1, 256), *range(256, 8192, 16)]:
        rows = tokens * top_k
        chosen = sm12x_planner.choose(activation, rows, experts, False, (2880, 2880)).instance
        costs = {
            kind: expected_cost(kind, rows / experts) for kind in COST if kind[0] == PAIR or rows <= STREAM_ENTRIES
        }
        assert costs[chosen.streamed, chosen.token_tile] <= 1.05 * min(costs.values()), (tokens, chosen.name)


@pytest.mark.parametrize("block_scaled", [True, False])
@pytest.mark.parametrize(("hidden", "inter"), [(3104, 96), (96, 3104), (3072, 3072)])
def test_a_long_k_is_for_pairs_of_gemms(hidden: int, inter: int, block_scaled: bool) -> None:
    """Twelve warps of 256 elements share a K of 3,072."""
    row = sm12x_planner.choose("bf16", 4, 32, block_scaled, (hidden, inter)).instance
    assert row.streamed == (max(hidden, inter) <= 3072)
