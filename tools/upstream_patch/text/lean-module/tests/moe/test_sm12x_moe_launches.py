"""Launches of the module: their order, workspaces, where tensors may lie, and calls that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashinfer.jit.sm12x.instances import INSTANCES, MAX_EXPERTS, index_of
from tests.test_helpers.mx_error_bounds import TENSOR_CORE, check_within_bound
from tests.test_helpers.mx_formats import sm12x_device
from tests.test_helpers.sm12x_moe import MoECase, make_moe_inputs, same_bits
from tests.test_helpers.sm12x_moe_module import (
    MODES as MODES_OF,
    LayerCall,
    arguments_of,
    blocks_of_gemms,
    launch,
    moe_module,
    run_layers,
    run_moe,
    sm_count,
    workspace_bytes,
)
from tests.test_helpers.sm12x_moe_reference import moe_reference

device = pytest.fixture(sm12x_device, name="device")
MODES = (0, 1, 2)
# The first of each kind, with a mode whose input is bfloat16: what a layer leaves for the
# next one.
KINDS = {
    "pair mxfp8": (index_of("mxfp8_m8_k128"), 1),
    "pair bf16": (index_of("bf16_m8_k128"), 2),
}
EACH_KIND = pytest.mark.parametrize("tactic,mode", KINDS.values(), ids=list(KINDS))
EACH_PAIR = pytest.mark.parametrize("kind", KINDS)
EVERY_ROW = pytest.mark.parametrize("row", INSTANCES, ids=lambda row: row.name)


# --- order ----------------------------------------------------------------------------

# Layers stand one behind the other, because much of what a launch must wait for is what
# the launch before it still does.

# take tests/moe/test_virtual_ordering.py: test_a_layer_reads_what_the_one_before_it_writes
# take tests/moe/test_virtual_ordering.py: test_a_layer_is_routed_by_what_the_launch_before_it_writes
# take tests/moe/test_virtual_ordering.py: test_a_shard_without_rows_does_not_outrun_its_prologue
# take tests/moe/test_virtual_ordering.py: test_a_unit_is_staged_when_the_one_before_it_has_left
# take tests/moe/test_virtual_ordering.py: test_a_tokens_sum_is_made_before_the_next_unit_takes_its_place


# --- workspaces -----------------------------------------------------------------------

# take tests/moe/test_virtual_launcher.py: test_a_workspace_serves_fewer_tokens_too


@EVERY_ROW
def test_one_workspace_for_calls_of_all_shapes(row, device):
    """Each shape has its counters in another place, where the call before left arbitrary data."""
    mode = MODES_OF[row.activation][0]
    workspace = torch.full((1 << 24,), 255, dtype=torch.uint8, device=device)
    for seed, sizes in enumerate([(9, 256, 128, 4, 2), (2, 512, 96, 3, 1), (9, 256, 128, 4, 2)], start=50):
        inputs = make_moe_inputs(MoECase(*sizes, mode, weights=row.weights), seed, device)
        assert workspace_bytes(inputs, mode) <= workspace.numel()
        output = launch(arguments_of(inputs, mode, [row.index] * 2) | {"workspace": workspace})
        check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{sizes}, seed {seed}")


@EVERY_ROW
def test_nothing_is_written_behind_a_workspace_or_to_an_input(row, device):
    """The bytes in front of the workspace and behind it, and all operands, are what they were."""
    for mode in MODES_OF[row.activation]:
        inputs = make_moe_inputs(MoECase(21, 160, 96, 4, 2, mode, weights=row.weights), 55, device)
        arguments = arguments_of(inputs, mode, [row.index] * 2)
        size = arguments["workspace"].numel()
        memory = torch.full((256 + size + 256,), 0x5A, dtype=torch.uint8, device=device)
        written = {"workspace": memory[256 : 256 + size]}
        tensors = {
            name: each for name, each in arguments.items() if isinstance(each, torch.Tensor) and name != "output"
        }
        before = {name: each.clone() for name, each in tensors.items() if name != "workspace"}
        launch(arguments | written)
        assert (memory[:256] == 0x5A).all() and (memory[256 + size :] == 0x5A).all()
        for name, each in before.items():
            assert same_bits(tensors[name], each), name


# --- where tensors may lie ------------------------------------------------------------


def moved_by(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The tensor's values ``offset`` bytes behind an address that is a multiple of 256."""
    memory = torch.zeros(tensor.nbytes + 512, dtype=torch.uint8, device=tensor.device)
    first = -memory.data_ptr() % 256 + offset
    place = memory[first : first + tensor.nbytes]
    place.copy_(tensor.contiguous().view(torch.uint8).flatten())
    return place.view(tensor.dtype).view(tensor.shape)


@EVERY_ROW
def test_a_workspace_at_a_multiple_of_16_bytes(row, device):
    for mode in MODES_OF[row.activation]:
        inputs = make_moe_inputs(MoECase(5, 160, 96, 4, 2, mode, weights=row.weights), 56, device)
        expected = run_moe(device, inputs, mode, [row.index] * 2)
        arguments = arguments_of(inputs, mode, [row.index] * 2)
        arguments["workspace"] = moved_by(arguments["workspace"], 16)
        assert same_bits(launch(arguments), expected)


@pytest.mark.parametrize(
    "swizzled,hidden,offset",
    [(True, 160, 4), (False, 256, 4), (False, 160, 5), (False, 160, 2), (False, 192, 6)],
)
@pytest.mark.parametrize("row", [row for row in INSTANCES if row.activation == "mxfp8"], ids=lambda row: row.name)
def test_scales_of_tokens_that_start_where_they_may(row, swizzled, hidden, offset, device):
    """Linear scales of a K that is no multiple of 128 are read by bytes: a view from another row on is right."""
    inputs = make_moe_inputs(MoECase(5, hidden, 96, 4, 2, 0, swizzled_input_sf=swizzled), 57, device)
    expected = run_moe(device, inputs, 0, [row.index] * 2)
    arguments = arguments_of(inputs, 0, [row.index] * 2)
    arguments["input_sf"] = moved_by(arguments["input_sf"], offset)
    assert same_bits(launch(arguments), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fc1_bias", "fc2_bias", "token_final_scales", "swiglu_limit", "output"])
def test_what_is_read_by_elements_may_start_at_any(kind, name, device):
    tactic, mode = KINDS[kind]
    for bias_dtype in (torch.bfloat16, torch.float32):
        case = MoECase(5, 160, 96, 4, 2, mode, bias_dtype=bias_dtype)
        inputs = make_moe_inputs(case, 58, device)
        expected = run_moe(device, inputs, mode, [tactic] * 2)
        arguments = arguments_of(inputs, mode, [tactic] * 2)
        arguments[name] = moved_by(arguments[name], arguments[name].element_size())
        assert same_bits(launch(arguments), expected)


# --- refusals -------------------------------------------------------------------------

A8, A16, NV = (index_of(name) for name in ("mxfp8_m8_k128", "bf16_m8_k128", "nvfp4_bf16_m8_k128"))


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: len(tensor) // 2].contiguous()


# What is changed of a layer with six tokens, K of 160 and 96, four experts, two a token.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such mode": ({"mode": 3}, r"mode is 3; it may be 0 .*, 1 .* or 2"),
    "no such row": ({"tactic_fc1": len(INSTANCES)}, f"tactic {len(INSTANCES)} is not among the instances"),
    "a negative row": ({"tactic_fc2": -1}, "tactic -1 is not among the instances"),
    "another activation": ({"tactic_fc1": A16}, f"tactic {A16} was compiled for other activations"),
    "another activation of FC2": ({"tactic_fc2": A16}, f"tactic {A16} was compiled for other activations"),
    "no experts": ({"top_k": 0}, "top_k is 0"),
    "ids of another top_k": ({"top_k": 3}, r"token_selected_experts must be \[tokens, top_k\]"),
    "fewer ids": ({"token_selected_experts": _halved}, r"token_selected_experts must be \[tokens, top_k\]"),
    "no ids": ({"token_selected_experts": None}, "experts are chosen by token_selected_experts or by router_logits"),
    "no scales of tokens": ({"input_sf": None}, r"MXFP8 input needs its scales \(input_sf\)"),
    "scales at an odd address": (
        {"input_sf": lambda scales: moved_by(scales, 1)}, "input_sf must start at a multiple of 4 bytes",
    ),
    "a narrower input": ({"input": lambda x: x[:, :128].contiguous()}, "disagree about hidden or intermediate size"),
    "fewer rows of FC1": ({"fc1_w": lambda w: w[:, :96].contiguous()}, "disagree about hidden or intermediate size"),
    "fewer experts of FC1": ({"fc1_w": _halved}, "disagree about hidden or intermediate size"),
    "half a block of K": (
        {"input": lambda x: x[:, :144].contiguous(), "fc1_w": lambda w: w[:, :, :72].contiguous(),
         "fc2_w": lambda w: w[:, :144].contiguous()},
        "hidden size 144 and intermediate size 96 must be multiples of 32",
    ),
    "fewer scales of FC1": ({"fc1_sf": _halved}, "fc1_sf has 4096 scales; the tactic's weights have 8192"),
    "fewer scales of FC2": ({"fc2_sf": _halved}, "fc2_sf has 2048 scales; the tactic's weights have 4096"),
    "experts before the first": ({"first_expert": -1}, r"local experts \[-1, 3\) of 4"),
    "experts behind the last": ({"first_expert": 1}, r"local experts \[1, 5\) of 4"),
    "float64 biases": ({"fc2_bias": lambda bias: bias.double()}, "fc2_expert_biases must be bfloat16, float16 or"),
    "a float64 output": ({"output": lambda output: output.double()}, "output must be bfloat16, float16 or float32"),
    "a workspace that lacks a byte": ({"workspace": lambda space: space[:-1]}, "the workspace is too small"),
    "barriers of one element": (
        {"barrier": lambda _: torch.zeros(1, dtype=torch.int32, device="cuda")}, "barrier must have two elements",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_call_is_refused(what, device):
    """And nothing of the output is written, so nothing was launched."""
    changes, message = BAD[what]
    inputs = make_moe_inputs(MoECase(6, 160, 96, 4, 2, 0), 59, device)
    arguments = arguments_of(inputs, 0, [A8, A8])
    for name, change in changes.items():
        arguments[name] = change(arguments.get(name)) if callable(change) else change
    with pytest.raises((ValueError, RuntimeError), match=message):
        launch(arguments)
    torch.cuda.synchronize()
    assert arguments["output"].isnan().all()


@pytest.mark.parametrize("given,taken", [("mxfp4", NV), ("nvfp4", A16)], ids=["too few", "too many"])
def test_scales_of_another_format_are_refused(given, taken, device):
    """NVFP4's are twice as many: its kernels would read beyond MXFP4's."""
    inputs = make_moe_inputs(MoECase(2, 160, 96, 4, 2, 2, weights=given), 60, device)
    counts = {"mxfp4": 4 * 256 * 8, "nvfp4": 4 * 256 * 12}
    needed = counts["nvfp4" if taken == NV else "mxfp4"]
    with pytest.raises(ValueError, match=f"fc1_sf has {counts[given]} scales; the tactic's weights have {needed}"):
        launch(arguments_of(inputs, 2, [taken] * 2))


def test_more_experts_than_the_kernels_route_are_refused(device):
    inputs = make_moe_inputs(MoECase(2, 32, 32, MAX_EXPERTS + 1, 1, 0), 61, device)
    with pytest.raises(ValueError, match=f"{MAX_EXPERTS + 1} local experts; the kernels route at most {MAX_EXPERTS}"):
        launch(arguments_of(inputs, 0, [A8, A8]))


def test_sizes_of_a_workspace_that_are_none_are_refused(device):
    size_of = moe_module(device).sm12x_moe_workspace_size
    for changed, message in (
        ((-1, 64, 64, 4, 2, 0), "num_tokens is -1"),
        ((8, 1 << 31, 64, 4, 2, 0), "hidden_size is 2147483648"),
        ((8, 64, -32, 4, 2, 0), "intermediate_size is -32"),
        ((8, 64, 64, -4, 2, 0), "num_local_experts is -4"),
        ((8, 64, 64, 4, 0, 0), "top_k is 0; it must be at least 1"),
        ((8, 64, 64, 4, 2, -1), "mode is -1; it may be 0"),
    ):
        with pytest.raises(ValueError, match=message):
            size_of(*changed, False)


def test_no_tokens_are_no_launch(device):
    inputs = make_moe_inputs(MoECase(6, 160, 96, 4, 2, 2), 62, device)
    empty = dataclasses.replace(
        inputs,
        input=inputs.input[:0],
        token_selected_experts=inputs.token_selected_experts[:0],
        token_final_scales=inputs.token_final_scales[:0],
    )
    assert launch(arguments_of(empty, 2, [A16, A16])).shape == (0, 160)
