# SPDX-License-Identifier: Apache-2.0
"""Experts with uneven numbers of rows, by each instance of the MoE layer, on the virtual SM121.

The numbers of routed rows are those at which kernels route in another way: 32 and 33 for a stream, 256 and 257
for the two-kernel path, and the most that a stream takes.
"""

from __future__ import annotations

import pytest
import torch
from virtual_devices import virtual_fixture
from virtual_moe import run_moe

from flashinfer.sm12x.instances import FUSED_MOE_ROUTED_ROWS, IN_KERNEL_ROUTED_ROWS, INSTANCES, MAX_EXPERTS, Instance
from flashinfer.testing import TENSOR_CORE, MoECase, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.moe_inputs import uneven_rows
from flashinfer.testing.virtual_device import VirtualDevice

device = virtual_fixture()
STREAMS = [row for row in INSTANCES if row.split_k and row.block_k == 256]
PAIRS = [row for row in INSTANCES if not row.split_k]
FEW_ROUTED_ROWS = 32
ROUTINGS = list(uneven_rows(64, 8, 8))


def check(
    device: VirtualDevice, row: Instance, pairs: int, experts: int, routing: str, sizes: tuple[int, int] = (64, 32)
) -> None:
    """With one slot, and with two where no expert has more rows than there are tokens."""
    rows = uneven_rows(pairs, experts, row.block_n)[routing]
    assert (len(rows), sum(rows)) == (experts, pairs)
    top_k = 2 if pairs % 2 == 0 and max(rows) <= pairs // 2 else 1
    mode = 2 if row.activation == "bf16" else pairs % 2
    case = MoECase(
        pairs // top_k, *sizes, experts, top_k, mode, routing=rows, biases=pairs % 2 == 0, weights=row.weights
    )
    print("seed", pairs)
    inputs = make_moe_inputs(case, pairs)
    found = torch.bincount(inputs.token_selected_experts.flatten(), minlength=experts)
    assert tuple(found.tolist()) == rows
    output = run_moe(device, inputs, mode, [row.index] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{routing}, {row.name}, {pairs} pairs")
    assert all(launch.clean for launch in device.launches), device.launches


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("row", STREAMS, ids=lambda row: row.name)
def test_a_stream(device: VirtualDevice, row: Instance, routing: str) -> None:
    for pairs, experts in ((FEW_ROUTED_ROWS, 6), (FEW_ROUTED_ROWS + 1, 40), (IN_KERNEL_ROUTED_ROWS, 33)):
        check(device, row, pairs, experts, routing)


@pytest.mark.parametrize("tokens", range(1, 18))
@pytest.mark.parametrize("row", [row for row in STREAMS if row.block_n > 8], ids=lambda row: row.name)
def test_each_number_of_tokens_in_a_wide_tile(device: VirtualDevice, row: Instance, tokens: int) -> None:
    """Routed in registers, and in shared memory."""
    for others in (3, FEW_ROUTED_ROWS):
        case = MoECase(tokens + others, 64, 32, 3, 1, 2 if row.activation == "bf16" else 0, routing=(others, tokens, 0))
        inputs = make_moe_inputs(case, tokens)
        output = run_moe(device, inputs, case.mode, [row.index] * 2)
        check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{case}, {row.name}")


@pytest.mark.parametrize("routing", ["half on the last", "ascending", "gaps, around a tile", "narrow, then full"])
@pytest.mark.parametrize("row", STREAMS, ids=lambda row: row.name)
def test_the_most_pairs_of_a_stream(device: VirtualDevice, row: Instance, routing: str) -> None:
    check(device, row, FUSED_MOE_ROUTED_ROWS, MAX_EXPERTS if routing == "ascending" else 96, routing)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("row", PAIRS, ids=lambda row: row.name)
def test_a_pair_of_gemms(device: VirtualDevice, row: Instance, routing: str) -> None:
    for pairs in (IN_KERNEL_ROUTED_ROWS, IN_KERNEL_ROUTED_ROWS + 1):
        check(device, row, pairs, 40, routing)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "row", [row for row in INSTANCES if row.block_n == 8 and row.block_k <= 256], ids=lambda row: row.name
)
def test_more_slots_of_a_token_than_lanes(device: VirtualDevice, row: Instance, rank: int) -> None:
    """Some of a token's experts are another rank's, and so may all be."""
    mode = 2 if row.activation == "bf16" else rank
    for tokens, top_k in ((1, 33), (5, 70)):
        case = MoECase(tokens, 96, 64, 96, top_k, mode, weights=row.weights, ep_size=2, ep_rank=rank)
        inputs = make_moe_inputs(case, top_k)
        if tokens > 1:
            inputs.token_selected_experts[0] = -1
        output = run_moe(device, inputs, mode, [row.index] * 2)
        check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{case}, {row.name}")


@pytest.mark.parametrize("routing", ["half on the last", "half on the first"])
@pytest.mark.parametrize("row", PAIRS, ids=lambda row: row.name)
def test_panels_of_an_expert(device: VirtualDevice, row: Instance, routing: str) -> None:
    """An expert with more than a panel of 512 tokens, before others and after them, and several M tiles."""
    check(device, row, 2 * 600, 5, routing, (160, 96))
