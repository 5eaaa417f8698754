# SPDX-License-Identifier: Apache-2.0
"""The order of a layer's launches, blocks and warps, on the virtual SM121 with every checker on.

Layers stand one after the other, because much of what a launch must wait for is what the launch before it still does.
"""

from __future__ import annotations

import pytest
import torch
from virtual_devices import ALL_CHECKERS, virtual_fixture
from virtual_moe import LayerCall, blocks_of_gemms, run_layers, run_moe, sm_count

from flashinfer.sm12x.instances import INSTANCES
from flashinfer.testing import TENSOR_CORE, MoECase, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.virtual_device import VirtualDevice

# The first of each kind, with a mode whose input is bfloat16: what a layer leaves for the next one.
KINDS = {
    f"{'streamed' if streamed else 'pair'} {activation}": (row.index, 2 if activation == "bf16" else 1)
    for streamed in (False, True)
    for activation in ("mxfp8", "bf16")
    for row in [next(row for row in INSTANCES if row.split_k == streamed and row.activation == activation)]
}
EACH_KIND = pytest.mark.parametrize(("tactic", "mode"), KINDS.values(), ids=list(KINDS))
EACH_PAIR = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("pair")])

device = virtual_fixture(watch=ALL_CHECKERS)


@EACH_KIND
def test_a_layer_reads_what_the_one_before_it_writes(device: VirtualDevice, tactic: int, mode: int) -> None:
    """And works in the memory that the other one still uses."""
    print("seed", 700 + tactic)
    case = MoECase(5, 160, 96, 4, 2, mode)
    first = LayerCall(make_moe_inputs(case, 700 + tactic), mode, tactic)
    second = LayerCall(make_moe_inputs(case, 800 + tactic), mode, tactic)
    second.inputs.input = first.output
    run_layers(device, [first, second])
    for call in (first, second):
        check_within_bound(call.output, *moe_reference(call.inputs, TENSOR_CORE), f"tactic {tactic}")


@EACH_KIND
def test_a_launch_may_begin_before_the_one_in_front_of_it_ends(device: VirtualDevice, tactic: int, mode: int) -> None:
    run_moe(device, make_moe_inputs(MoECase(5, 160, 96, 4, 2, mode), 705), mode, [tactic, tactic])
    assert device.launches and all(launch.programmatic for launch in device.launches)


@pytest.mark.parametrize("tokens", [5, 40])
@EACH_KIND
def test_a_layer_is_routed_by_what_the_launch_before_it_writes(
    device: VirtualDevice, tactic: int, mode: int, tokens: int
) -> None:
    """Expert ids come from a router: here from a layer whose output, read as integers, names no expert of the next."""
    case = MoECase(tokens, 160, 96, 4, 2, mode)
    first = LayerCall(make_moe_inputs(case, 710 + tactic), mode, tactic)
    second = LayerCall(make_moe_inputs(case, 810 + tactic), mode, tactic)
    second.inputs.token_selected_experts = first.output.view(torch.int32).flatten()[: 2 * tokens].view(tokens, 2)
    run_layers(device, [first, second])
    ids = second.inputs.token_selected_experts
    assert not ((ids >= 0) & (ids < 4)).any()
    assert torch.equal(second.output, torch.zeros_like(second.output))


@EACH_KIND
def test_a_shard_without_rows_does_not_outrun_its_prologue(device: VirtualDevice, tactic: int, mode: int) -> None:
    """No block of its GEMMs has work. Unless they wait, they are complete at once, and the layer behind begins while
    the first one's prologue is still writing."""
    case = MoECase(5, 160, 96, 16, 2, mode, routing="few_experts", ep_size=2, ep_rank=0)
    calls = [LayerCall(make_moe_inputs(case, seed), mode, tactic) for seed in (720 + tactic, 820 + tactic)]
    assert all(int(call.inputs.token_selected_experts.min()) >= 8 for call in calls)
    run_layers(device, calls)
    for call in calls:
        assert torch.equal(call.output, torch.zeros_like(call.output))


@pytest.mark.parametrize("kind", ["streamed mxfp8", "streamed bf16"])
def test_blocks_that_wait_for_each_other_are_launched_together(device: VirtualDevice, kind: str) -> None:
    """Without a cooperative launch a GPU may start some blocks only after others have ended, and these would wait
    forever."""
    tactic, mode = KINDS[kind]
    run_moe(device, make_moe_inputs(MoECase(2, 160, 96, 4, 2, mode), 730), mode, [tactic, tactic])
    found = {"fused_moe_kernel" in launch.kernel: launch.cooperative for launch in device.launches}
    assert found == {True: True, False: False}


@EACH_PAIR
def test_a_unit_is_staged_when_the_one_before_it_has_left(device: VirtualDevice, kind: str) -> None:
    """K is no longer than the ring, so that no warp waits for a stage that another one is reading; and a block has
    several units, so that a fast warp can be an epilogue ahead."""
    tactic, mode = KINDS[kind]
    row_tiles = sm_count(device) // 2 + 1
    inputs = make_moe_inputs(MoECase(35, 256, 64 * row_tiles, 4, 2, mode), 740)
    output = run_moe(device, inputs, mode, [tactic, tactic])
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), kind)
    blocks, _ = blocks_of_gemms(device, INSTANCES[tactic])
    rows = torch.bincount(inputs.token_selected_experts.flatten(), minlength=4).tolist()
    assert sum(-(-count // INSTANCES[tactic].block_n) for count in rows) * row_tiles >= 2 * blocks
    assert INSTANCES[tactic].stages * INSTANCES[tactic].block_k >= 256


@EACH_PAIR
def test_a_tokens_sum_is_made_before_the_next_unit_takes_its_place(device: VirtualDevice, kind: str) -> None:
    """FC2 has short, whole units, some blocks two of them: nothing else keeps a fast warp from the next one's
    tokens."""
    tactic, mode = KINDS[kind]
    row_tiles = sm_count(device) // 4 + 1
    inputs = make_moe_inputs(MoECase(35, 128 * row_tiles - 64, 96, 4, 2, mode), 750)
    output = run_moe(device, inputs, mode, [tactic, tactic])
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), kind)
    _, blocks = blocks_of_gemms(device, INSTANCES[tactic])
    rows = torch.bincount(inputs.token_selected_experts.flatten(), minlength=4).tolist()
    assert sum(-(-count // INSTANCES[tactic].block_n) for count in rows) * row_tiles > blocks
