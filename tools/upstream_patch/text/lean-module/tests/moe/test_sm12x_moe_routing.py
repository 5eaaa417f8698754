"""Tokens' ways to their experts: padding, shards, and the numbers at which routing changes its way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
import torch

from flashinfer.jit.sm12x.instances import INSTANCES, MAX_EXPERTS, Instance
from tests.test_helpers.mx_error_bounds import TENSOR_CORE, check_within_bound
from tests.test_helpers.mx_formats import sm12x_device
from tests.test_helpers.sm12x_moe import MoECase, make_moe_inputs, same_bits
from tests.test_helpers.sm12x_moe_module import MODES, check_moe, run_moe
from tests.test_helpers.sm12x_moe_reference import MoEInputs, moe_reference

device = pytest.fixture(sm12x_device, name="device")
WIDE = TENSOR_CORE
_PAIRS = [row for row in INSTANCES if not row.split_k]
EIGHT_BIT = [row for row in _PAIRS if row.activation == "mxfp8"]
SIXTEEN_BIT = [row for row in _PAIRS if row.activation == "bf16"]
ROWS = INSTANCES
# The narrowest of what routes, packs and adds up in ways of its own.
EACH_KIND = list({(row.split_k, row.compute, row.weights): row for row in reversed(INSTANCES)}.values())
EACH_MODE = pytest.mark.parametrize(
    "mode,instance",
    [(0, EIGHT_BIT[0]), (1, EIGHT_BIT[0]), (2, SIXTEEN_BIT[0])],
    ids=["MXFP8 input", "bf16 input", "W4A16"],
)
WITHOUT_ROWS = pytest.mark.parametrize(
    "mode,instance",
    [(0, EIGHT_BIT[0]), (0, EIGHT_BIT[-1]), (2, SIXTEEN_BIT[0])],
    ids=lambda value: getattr(value, "name", str(value)),
)
PACKING = pytest.mark.parametrize(
    "instance", [row for row in SIXTEEN_BIT if row.block_n == 64], ids=lambda row: row.name
)


def tactics() -> list[object]:
    """Each mode with the rows that are the narrowest of their kind."""
    found = []
    for row in EACH_KIND:
        for mode in MODES[row.activation]:
            found.append(pytest.param(mode, row.index, id=f"mode {mode}, {row.name}"))
    return found


def layer(device: torch.device, inputs: MoEInputs, tactic: int) -> torch.Tensor:
    mode = 2 if inputs.w4a16 else 1 if inputs.input_sf is None else 0
    return run_moe(device, inputs, mode, [tactic] * 2)


def check(device: torch.device, case: MoECase, tactic: int, seed: int) -> None:
    check_moe(device, case, seed, [tactic] * 2)


# take flashinfer/sm12x/instances.py: IN_KERNEL_ROUTED_ROWS
# take tests/moe/test_virtual_padding.py: HIDDEN EXPERTS FEW test_a_batch_of_padding_is_zeros test_padding_between_tokens
# take tests/moe/test_virtual_instances.py: test_packed_rows_of_a_shard test_a_shard_without_any_row_is_zeros
# take tests/moe/test_virtual_instances.py: test_every_token_on_one_expert test_more_pairs_than_the_kernels_route
# take tests/sm12x/test_virtual_switches.py: around mode_of test_rows_of_an_expert_around_a_tile
# take tests/sm12x/test_virtual_switches.py: test_experts_around_the_lanes_of_a_warp


@pytest.mark.parametrize("row", EACH_KIND, ids=lambda row: row.name)
def test_pairs_around_what_a_warp_and_the_kernels_route(row: Instance, device: torch.device) -> None:
    """Few experts for the many, so that each has several tiles; many for the few."""
    for pairs in around({32, IN_KERNEL_ROUTED_ROWS}):
        case = MoECase(pairs, 96, 64, 5 if pairs > 64 else 40, 1, mode_of(row))
        check(device, case, row.index, pairs)


@pytest.mark.parametrize("mode,tactic", tactics())
def test_ids_of_other_ranks_and_negative_ones_contribute_nothing(mode: int, tactic: int, device: torch.device) -> None:
    weights = INSTANCES[tactic].weights
    inputs = make_moe_inputs(MoECase(12, 96, 64, 4, 2, mode, weights=weights), 13, device)
    inputs.token_selected_experts[2] = torch.tensor([-1, 4])
    inputs.token_selected_experts[5] = torch.tensor([2**31 - 1, -(2**31)])
    inputs.token_selected_experts[7, 1] = 4
    output = run_moe(device, inputs, mode, [tactic] * 2)
    assert not output[[2, 5]].any()
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), "seed 13")


@pytest.mark.parametrize("mode,tactic", tactics())
def test_ranks_outputs_are_those_of_their_experts(mode: int, tactic: int, device: torch.device) -> None:
    """With a token's experts all on one rank, that rank's output has the whole layer's bits; the other's is zero."""
    weights = INSTANCES[tactic].weights
    whole = make_moe_inputs(MoECase(10, 96, 64, 8, 2, mode, weights=weights), 18, device)
    ids = whole.token_selected_experts
    rank_of = torch.arange(10, device=ids.device) % 2
    ids.copy_((torch.stack([ids[:, 0] % 4, (ids[:, 0] + 1) % 4], 1) + 4 * rank_of[:, None]).int())
    expected = run_moe(device, whole, mode, [tactic] * 2)
    names = ("fc1_weights", "fc1_scales", "fc1_global", "fc1_bias", "fc2_weights", "fc2_scales", "fc2_global")
    names += ("fc2_bias", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    tensors = {name: getattr(whole, name) for name in names if getattr(whole, name) is not None}
    for rank in (0, 1):
        parts = {name: tensor[4 * rank : 4 * rank + 4] for name, tensor in tensors.items()}
        shard = dataclasses.replace(whole, **parts, ep_size=2, ep_rank=rank)
        output = run_moe(device, shard, mode, [tactic] * 2)
        assert same_bits(output[rank::2], expected[rank::2])
        assert not output[1 - rank :: 2].any()


@pytest.mark.parametrize("mode,tactic", tactics())
def test_an_expert_that_is_named_twice_counts_twice(mode: int, tactic: int, device: torch.device) -> None:
    weights = INSTANCES[tactic].weights
    inputs = make_moe_inputs(MoECase(9, 96, 64, 4, 2, mode, weights=weights), 19, device)
    inputs.token_selected_experts[:, 1] = inputs.token_selected_experts[:, 0]
    output = run_moe(device, inputs, mode, [tactic] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), "seed 19")


@pytest.mark.parametrize("mode,tactic", tactics())
def test_absent_routing_weights_count_one(mode: int, tactic: int, device: torch.device) -> None:
    weights = INSTANCES[tactic].weights
    inputs = make_moe_inputs(MoECase(5, 128, 96, 4, 2, mode, weights=weights), 20, device)
    ones = dataclasses.replace(inputs, token_final_scales=torch.ones_like(inputs.token_final_scales))
    output = run_moe(device, dataclasses.replace(inputs, token_final_scales=None), mode, [tactic] * 2)
    check_within_bound(output, *moe_reference(ones, TENSOR_CORE), "seed 20")
