"""Every instance of the module against a float64 reference, within the bound of its roundings."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from flashinfer.jit.sm12x.instances import INSTANCES, Instance, index_of
from tests.test_helpers.mx_error_bounds import accumulation_on, check_within_bound
from tests.test_helpers.mx_formats import sm12x_device
from tests.test_helpers.sm12x_moe import (
    MoECase,
    make_moe_inputs,
    moe_inputs_with_not_numbers,
    same_bits,
)
from tests.test_helpers.sm12x_moe_module import (
    MODES,
    blocks_of_gemms,
    check_moe,
    run_moe,
    sm_count,
)
from tests.test_helpers.sm12x_moe_reference import MoEInputs, moe_reference

device = pytest.fixture(sm12x_device, name="device")
EVERY_ROW = pytest.mark.parametrize("row", INSTANCES, ids=lambda row: row.name)


def _check(row: Instance, case: MoECase, seed: int, device: torch.device) -> None:
    check_moe(device, case, seed, [row.index] * 2)


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
    end(rows, key=lambda row: row.block_n)
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
    "float32 biases": {"bias_dtype": torch.float32},
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
def test_what_is_no_number_stays_where_it_is(row, device):
    """NaN and infinity in each operand in turn: no other token's outputs change."""
    mode = MODES[row.activation][0]
    inputs = make_moe_inputs(MoECase(6, 96, 64, 3, 2, mode, weights=row.weights), 14, device)
    made = moe_inputs_with_not_numbers(inputs, 15)
    _, numbers = next(made)
    before = moe_reference(numbers, accumulation_on(device))[0]
    output_before = run_moe(device, numbers, mode, [row.index] * 2)
    for what, changed in made:
        reference, bound = moe_reference(changed, accumulation_on(device))
        output = run_moe(device, changed, mode, [row.index] * 2)
        check_within_bound(output, reference, bound, what)
        kept = reference == before
        assert same_bits(output[kept], output_before[kept]), what


def test_rows_are_told_apart_by_name_and_number():
    assert len({row.name for row in INSTANCES}) == len(INSTANCES)
    assert len({row.profile_id for row in INSTANCES}) == len(INSTANCES)


# --- what blocks share ----------------------------------------------------------------

BLOCK_M = 128
_PAIRS = [row for row in INSTANCES if not row.split_k]
EIGHT_BIT = [row for row in _PAIRS if row.activation == "mxfp8"]
SIXTEEN_BIT = [row for row in _PAIRS if row.activation == "bf16"]
EACH_EIGHT_BIT = pytest.mark.parametrize("instance", EIGHT_BIT, ids=lambda row: row.name)
EACH_SIXTEEN_BIT = pytest.mark.parametrize("instance", SIXTEEN_BIT, ids=lambda row: row.name)
WHOLE_UNITS = pytest.mark.parametrize(
    "instance",
    [EIGHT_BIT[0], EIGHT_BIT[-1], INSTANCES[index_of("bf16_m64_k128")]],
    ids=lambda row: row.name,
)


# take tests/moe/test_virtual_instances.py: HIDDEN TOKENS SMS_OF_TOKENS layer assert_shares


def assert_moe_shares(device: torch.device, case: MoECase, inputs: MoEInputs, instance: Instance) -> None:
    fc1, fc2 = blocks_of_gemms(device, instance)
    rows = torch.bincount(inputs.token_selected_experts.flatten(), minlength=case.num_experts).tolist()
    assert max(rows) > instance.block_n
    assert_shares(fc1, instance, rows, -(-case.inter // (BLOCK_M // 2)), case.hidden)
    assert_shares(fc2, instance, rows, -(-case.hidden // BLOCK_M), case.inter)


# take tests/moe/test_virtual_instances.py: test_an_instance_with_8_bit_activations
# take tests/moe/test_virtual_instances.py: test_an_instance_with_16_bit_activations
# take tests/moe/test_virtual_instances.py: test_blocks_take_whole_units_in_turn


PAIRS_OF_ROWS = [
    ("mxfp8_m8_k128", "mxfp8_m32_k256"),
    ("mxfp8_m128_k128", "mxfp8_m8_k256"),
    ("mxfp8_m64_k128", "mxfp8_m16_k256"),
    ("bf16_m8_k128", "bf16_m64_k128"),
    ("bf16_m40_k128", "bf16_m24_k128"),
    ("nvfp4_bf16_m64_k128", "nvfp4_bf16_m8_k128"),
]


@pytest.mark.parametrize("pair", PAIRS_OF_ROWS, ids=" then ".join)
def test_gemms_of_a_layer_by_different_rows(pair, device):
    tactics = [index_of(name) for name in pair]
    mode = MODES[INSTANCES[tactics[0]].activation][0]
    check_moe(device, MoECase(20, 352, 416, 3, 2, mode), 16, tactics)


@pytest.mark.parametrize("row", [row for row in _ENDS if row.activation == "bf16"], ids=lambda row: row.name)
@pytest.mark.parametrize("hidden", [416, 608])
def test_more_tokens_than_the_grid_packs_at_once(row, hidden, device):
    """Threads go on to other tokens; with rows of 608 elements a pass of the grid ends within one."""
    check_moe(device, MoECase(34 * sm_count(device), hidden, 32, 4, 1, 2), 17, [row.index] * 2)


# --- random layers --------------------------------------------------------------------

# take tests/moe/gpu_sweep.py: KINDS INTER_SIZES EXPERT_COUNTS random_case


@pytest.mark.parametrize("seed", range(24))
def test_random_layers(seed, device):
    """Sizes, routing, shards, layouts, dtypes and the rows of both GEMMs drawn independently."""
    rng = random.Random(seed)
    case = random_case(rng, quick=True)
    case = dataclasses.replace(case, num_tokens=case.num_tokens % 90 + 1)
    rows = [row for row in _PAIRS if case.mode in MODES[row.activation] and row.weights == case.weights]
    check_moe(device, case, seed, [rng.choice(rows).index, rng.choice(rows).index])
