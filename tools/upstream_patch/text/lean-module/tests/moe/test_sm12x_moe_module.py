"""Every instance of the module against a float64 reference, within the bound of its roundings."""

import dataclasses
import functools

import pytest
import torch

from flashinfer.jit.sm12x.instances import INSTANCES
from flashinfer.jit.sm12x.moe import gen_sm12x_moe_module
from flashinfer.utils import device_support_pdl
from tests.test_helpers.mx_error_bounds import accumulation_on, check_within_bound
from tests.test_helpers.mx_formats import sm12x_device
from tests.test_helpers.sm12x_moe import (
    MoECase,
    make_moe_inputs,
    moe_inputs_with_not_numbers,
    same_bits,
)
from tests.test_helpers.sm12x_moe_reference import moe_reference

device = pytest.fixture(sm12x_device, name="device")
# The modes that a row's activations serve: MXFP8 tokens, bfloat16 ones that are
# quantized inside, and bfloat16 ones.
MODES = {"mxfp8": (0, 1), "bf16": (2,)}
EVERY_ROW = pytest.mark.parametrize("row", INSTANCES, ids=lambda row: row.name)


@functools.cache
def _module():
    return gen_sm12x_moe_module().build_and_load()


def _run(row, inputs, mode):
    """The layer by ``row`` in memory that holds NaN."""
    module, given = _module(), inputs.arguments()
    (tokens, hidden), (experts, _, half_inter) = inputs.input.shape, inputs.fc2_weights.shape
    top_k = inputs.token_selected_experts.shape[1]
    size = module.sm12x_moe_workspace_size(tokens, hidden, 2 * half_inter, experts, top_k, mode, False)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=inputs.input.device)
    output = torch.full((tokens, hidden), torch.nan, dtype=inputs.output_dtype, device=inputs.input.device)
    module.sm12x_moe_run(
        output,
        inputs.input,
        None if inputs.input_sf is None else inputs.input_sf.view(torch.uint8),
        top_k,
        inputs.token_selected_experts,
        inputs.token_final_scales,
        inputs.fc1_weights,
        inputs.fc1_scales,
        inputs.fc1_global,
        inputs.fc1_bias,
        inputs.fc2_weights,
        inputs.fc2_scales,
        inputs.fc2_global,
        inputs.fc2_bias,
        inputs.swiglu_alpha,
        inputs.swiglu_beta,
        inputs.swiglu_limit,
        int(given["activation_type"]),
        workspace,
        mode,
        inputs.swizzled_input_sf,
        inputs.ep_rank * experts,
        experts * inputs.ep_size,
        row.index,
        row.index,
        *[None] * 4,  # what only a decode step's call has
        device_support_pdl(output.device),
    )
    return output


def _check(row, case, seed, device):
    """Within the bound, and the same bits when it is repeated."""
    print("seed", seed)
    inputs = make_moe_inputs(dataclasses.replace(case, weights=row.weights), seed, device)
    output = _run(row, inputs, case.mode)
    check_within_bound(output, *moe_reference(inputs, accumulation_on(device)), f"{row.name}, {case}")
    assert same_bits(output, _run(row, inputs, case.mode))


@EVERY_ROW
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_every_row(row, tokens, device):
    for mode in MODES[row.activation]:
        _check(row, MoECase(tokens, 256, 160, 4, 2, mode), tokens, device)


# K of FC1 and FC2 of one block, of half a scale word, of a step of the K loop and of
# some more; rows of weights up to and beyond the 128 of a tile.
SHAPES = [(32, 32), (64, 288), (288, 96), (544, 32)]


@EVERY_ROW
@pytest.mark.parametrize("hidden,inter", SHAPES)
def test_shapes(row, hidden, inter, device):
    """On a lattice of small integers FC1's sums are exact: one wrong product shows."""
    mode = MODES[row.activation][0]
    _check(row, MoECase(5, hidden, inter, 3, 2, mode, data="lattice"), hidden, device)


# The narrowest and the widest tokens' tile of each operand and format of weights.
_ENDS = [
    end(rows, key=lambda row: row.token_tile)
    for kind in dict.fromkeys((row.activation, row.weights) for row in INSTANCES)
    for rows in [[row for row in INSTANCES if (row.activation, row.weights) == kind]]
    for end in (min, max)
]
FEW_ROWS = pytest.mark.parametrize("row", _ENDS, ids=lambda row: row.name)
CASES = {
    "linear input scales": {"swizzled_input_sf": False},
    "no biases": {"biases": False},
    "plain SwiGLU": {"biases": False, "swiglu_parameters": False},
    "a limit alone": {"swiglu_limit_alone": True},
    "SwigluStep": {"swiglu_step": True},
    "Relu2": {"relu2": True},
    "no global scales": {"global_scales": False},
    "fp16 output and biases": {"output_dtype": torch.float16, "bias_dtype": torch.float16},
    "one expert": {"routing": "one_expert"},
    "every expert": {"top_k": 8},
    "rank 0 of 2": {"ep_size": 2},
    "rank 1 of 2": {"ep_size": 2, "ep_rank": 1},
}


@FEW_ROWS
@pytest.mark.parametrize("case", CASES)
def test_options(row, case, device):
    options = {"num_experts": 8, "top_k": 3, "mode": MODES[row.activation][0], **CASES[case]}
    _check(row, MoECase(9, 160, 96, **options), 11, device)


@pytest.mark.parametrize("row", [row for row in _ENDS if row.activation == "mxfp8"], ids=lambda row: row.name)
def test_fp16_input_is_quantized_inside(row, device):
    _check(row, MoECase(9, 160, 96, 4, 2, 1, input_dtype=torch.float16), 12, device)


@FEW_ROWS
def test_padding_and_other_ranks_ids_contribute_nothing(row, device):
    mode = MODES[row.activation][0]
    inputs = make_moe_inputs(MoECase(12, 96, 64, 4, 2, mode, weights=row.weights), 13, device)
    inputs.token_selected_experts[2] = -1
    inputs.token_selected_experts[5, 0] = -1
    inputs.token_selected_experts[7, 1] = 4
    output = _run(row, inputs, mode)
    assert not output[2].any()
    check_within_bound(output, *moe_reference(inputs, accumulation_on(device)), "seed 13")


@FEW_ROWS
def test_what_is_no_number_stays_where_it_is(row, device):
    """NaN and infinity in each operand in turn: no other token's outputs change."""
    mode = MODES[row.activation][0]
    inputs = make_moe_inputs(MoECase(6, 96, 64, 3, 2, mode, weights=row.weights), 14, device)
    made = moe_inputs_with_not_numbers(inputs, 15)
    _, numbers = next(made)
    before = moe_reference(numbers, accumulation_on(device))[0]
    output_before = _run(row, numbers, mode)
    for what, changed in made:
        reference, bound = moe_reference(changed, accumulation_on(device))
        output = _run(row, changed, mode)
        check_within_bound(output, reference, bound, what)
        kept = reference == before
        assert same_bits(output[kept], output_before[kept]), what


def test_rows_are_told_apart_by_name_and_number():
    assert len({row.name for row in INSTANCES}) == len(INSTANCES)
    assert len({row.number for row in INSTANCES}) == len(INSTANCES)
