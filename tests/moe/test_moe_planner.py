# SPDX-License-Identifier: Apache-2.0
"""The planner's limits on Hopper follow from what a tile was measured to cost: no other tile is much cheaper."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from perfmodel import gb10, moe, step

from flashinfer.fused_moe import sm12x_planner
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.sm12x.device_class import CARD, CLASSES, GB10, HOPPER, DeviceClass
from flashinfer.sm12x.instances import FUSED_MOE_ROUTED_ROWS, INSTANCES, Format, Instance
from flashinfer.sm12x.models import MOE_LAYERS, MoELayer

# Time of a N tile of one expert on an H200, relative to a fused MoE tile of 8 (docs/log.md, "Grid of tactics").
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
NARROW = 1.07 / 1.26  # of a fused MoE tile of 16, where it holds eight tokens or fewer


def expected_cost(kind: tuple[bool, int], mean: float) -> float:
    """The cost of an expert whose rows are Poisson distributed."""
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
        chosen = sm12x_planner.choose(activation, rows, experts, HOPPER, (2880, 2880)).instance
        costs = {
            kind: expected_cost(kind, rows / experts)
            for kind in COST
            if kind[0] == PAIR or rows <= FUSED_MOE_ROUTED_ROWS
        }
        assert costs[chosen.split_k, chosen.block_n] <= 1.05 * min(costs.values()), (tokens, chosen.name)


@pytest.mark.parametrize("known", CLASSES, ids=lambda known: known.key)
@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
@pytest.mark.parametrize(
    ("hidden", "inter"), [(3072, 3072), (3104, 96), (96, 3104), (96, 4608), (4640, 96), (96, 4640)]
)
def test_a_long_k_takes_wider_warps_and_a_longer_one_pairs_of_gemms(
    hidden: int, inter: int, activation: Format, known: DeviceClass
) -> None:
    """Twelve warps of 256 elements share a K of 3,072, of 384 one of 4,608."""
    row = sm12x_planner.choose(activation, 4, 32, known, (hidden, inter)).instance
    longest = max(hidden, inter)
    assert row.split_k == (longest <= 4608)
    assert not row.split_k or row.block_k == (256 if longest <= 3072 else 384)


@pytest.mark.parametrize("known", CLASSES, ids=lambda known: known.key)
def test_of_streams_that_take_a_layer_only_the_shortest_is_tried(known: DeviceClass) -> None:
    """Else a gpt-oss layer's tuning would build the others."""
    for longest, widths in ((2880, {256}), (4096, {384}), (5120, set())):
        rows = known.candidates(4, 2880, longest)
        assert {row.block_k for row in rows if row.split_k} == widths


GRID = (1, 4, 16, 48, 64, 192, 512, 768, 1024)
GPUS = [(48, 2.418, True)] + [
    (sms, gigahertz, False) for sms, gigahertz in ((24, 2.4), (36, 2.6), (70, 2.452), (132, 2.4), (188, 2.617))
]


def modelled(layer: MoELayer, tokens: int, row: Instance, gpu: tuple[int, float, bool], bf16_flops: int = 512) -> float:
    """Microseconds by a tactic's counts on the virtual SM121; a card has 9.5 GB/s of sustained DRAM reads for each SM,
    as sold."""
    sms, gigahertz, unified = gpu
    rates = gb10.Rates(gb10.MIDDLE.dram_gb_per_second if unified else 9.5 * sms, bf16_flops)
    others = gb10.CYCLES / (1e3 * gigahertz * sms)
    pair = (row.index, row.index)
    fits = moe.known_fits(step.FITTED_MODES[row.activation], pair, (layer.hidden, layer.inter))
    assert fits, f"{row.name} was not emulated"
    busy = [launch.busy(row.compute_dtype, rates) for launch in moe.launches_of(layer, tokens, pair, fits)]
    times = [max(us * (1 if name == "dram" else others) for name, us in each.items()) for each in busy]
    return sum(times) + sum(gb10.FIXED_US["MoE"]) / 2 + (0 if row.split_k else gb10.SECOND_GEMM_US)


def planned(layer: MoELayer, tokens: int, mode: Mode, unified: bool) -> Instance:
    known = GB10 if unified else CARD
    chosen, _ = sm12x_planner.plan_moe(tokens, layer.top_k, layer.experts, *layer[:2], mode, known)
    return INSTANCES[chosen]


@pytest.mark.parametrize(("mode", "gpus"), [(Mode.MXFP8_INPUT, GPUS), (Mode.W4A16, GPUS[:1])], ids=["W4A8", "W4A16"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b"])
def test_sm12x_takes_a_tactic_within_ten_percent_of_the_models_best(model: str, mode: Mode, gpus: list[Any]) -> None:
    layer = MOE_LAYERS[model]
    for tokens, gpu in itertools.product(GRID, gpus):
        rows = GB10.candidates(tokens * layer.top_k, layer.hidden, layer.inter)
        costs = {row: modelled(layer, tokens, row, gpu, 768) for row in rows if row.activation == mode.activation}
        chosen = planned(layer, tokens, mode, gpu[2])
        assert costs[chosen] <= 1.1 * min(costs.values()), (gpu, tokens, chosen.name, costs)


@pytest.mark.parametrize("bf16_flops", [512, 1024])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b"])
def test_auto_takes_no_longer_than_w4a8_beyond_three_percent(
    model: str, gpu: tuple[int, float, bool], bf16_flops: int
) -> None:
    """And half as many more would: the switch is neither too late nor much too early."""
    layer = MOE_LAYERS[model]
    most = int(sm12x_planner.most_exact_tokens(layer.top_k, layer.experts, GB10 if gpu[2] else CARD))

    def ratio(tokens: int) -> float:
        exact, rounded = (
            modelled(layer, tokens, planned(layer, tokens, mode, gpu[2]), gpu, bf16_flops)
            for mode in (Mode.W4A16, Mode.MXFP8_INPUT)
        )
        return exact / rounded

    for tokens in sorted({*(count for count in GRID if count < most), most // 3, most // 2, most}):
        assert ratio(tokens) <= sm12x_planner.AS_FAST, tokens
    assert ratio(most + most // 2) > sm12x_planner.AS_FAST


def test_a_gb10s_choices_are_those_of_before_cards_had_their_own() -> None:
    """Limits and tiles of a pair by the rows of a busy expert; the layer is streamed up to 4.5."""
    limits = ((6.0, 8), (14.0, 16), (20.0, 32), (28.0, 32), (36.0, 64), (64.0, 64), (float("inf"), 128))
    for experts, tokens in itertools.product((32, 64, 128), (*range(1, 600), *range(600, 9000, 200))):
        rows = sm12x_planner.expected_rows(tokens * 4, experts)
        gb10s, card = (
            INSTANCES[sm12x_planner.plan_moe(tokens, 4, experts, 2880, 2880, 0, known)[0]] for known in (GB10, CARD)
        )
        wanted = next(tile for limit, tile in limits if rows <= limit)
        assert gb10s.split_k == (rows <= 4.5)
        assert gb10s.block_n == (8 if gb10s.split_k else wanted)
        assert card == gb10s if rows <= 64 or rows > 256 else card.block_n == 64
