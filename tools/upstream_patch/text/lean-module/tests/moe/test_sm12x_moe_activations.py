"""Activations of the module: their formulas, the limits of each, and the numbers that they have."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashinfer.jit.sm12x.instances import INSTANCES, index_of
from flashinfer.tllm_enums import ActivationType
from tests.test_helpers.mx_error_bounds import TENSOR_CORE, check_within_bound
from tests.test_helpers.mx_formats import Operand, sm12x_device, unswizzle_scales
from tests.test_helpers.sm12x_moe import MoECase, make_moe_inputs, same_bits
from tests.test_helpers.sm12x_moe_module import MODES, arguments_of, launch, moved, run_moe
from tests.test_helpers.sm12x_moe_reference import MoEInputs, moe_reference

device = pytest.fixture(sm12x_device, name="device")
# A row of each operand and format of weights, and the widest of the first.
RELU2_TACTICS = {
    "mxfp8_m16_k128": (0, "mxfp4"),
    "mxfp8_m128_k128": (0, "mxfp4"),
    "bf16_m16_k128": (2, "mxfp4"),
    "nvfp4_bf16_m8_k128": (2, "nvfp4"),
    "nvfp4_bf16_m64_k128": (2, "nvfp4"),
}
EACH_KIND = pytest.mark.parametrize(
    "row",
    [INSTANCES[index_of(name)] for name in ("mxfp8_m16_k128", "bf16_m16_k128", "nvfp4_bf16_m8_k128")],
    ids=lambda row: row.name,
)


def run(inputs: MoEInputs, device: torch.device, fill: int, tactics: None) -> torch.Tensor:
    mode = 2 if inputs.w4a16 else 1 if inputs.input_sf is None else 0
    return run_moe(device, inputs, mode, tactics, fill)


# take tests/moe/test_virtual_activations.py: RELU2 test_relu2
# take tests/moe/test_activations.py: test_relu2_is_the_square_of_what_is_above_zero


@EACH_KIND
@pytest.mark.parametrize("step", [False, True], ids=["Swiglu", "SwigluStep"])
def test_each_parameter_counts(row, step, device):
    """The output with a parameter is beyond the bound of a layer without it."""
    mode = MODES[row.activation][0]
    inputs = make_moe_inputs(MoECase(9, 160, 96, 4, 2, mode, weights=row.weights, swiglu_step=step), 21, device)
    output = run_moe(device, inputs, mode, [row.index] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), "seed 21")
    names = ["swiglu_limit", *(() if step else ("swiglu_alpha", "swiglu_beta"))]
    for changed in [{name: None} for name in names] + [{"swiglu_step": not step}]:
        without = dataclasses.replace(inputs, **changed)
        with pytest.raises(AssertionError, match="outside their bound"):
            check_within_bound(output, *moe_reference(without, TENSOR_CORE), "seed 21")


@EACH_KIND
def test_without_a_limit_swiglu_step_has_one_of_seven(row, device):
    mode = MODES[row.activation][0]
    case = MoECase(9, 160, 96, 4, 2, mode, weights=row.weights, swiglu_step=True, swiglu_parameters=False)
    inputs = make_moe_inputs(case, 22, device)
    inputs.fc1_bias = 8 * inputs.fc1_bias  # beyond it
    outputs = [run_moe(device, inputs, mode, [row.index] * 2)]
    for limit in (7.0, 8.0):
        limits = torch.full((4,), limit, device=device)
        given = dataclasses.replace(inputs, swiglu_limit=limits)
        outputs.append(run_moe(device, given, mode, [row.index] * 2))
    assert same_bits(outputs[0], outputs[1])
    assert not same_bits(outputs[0], outputs[2])


@EACH_KIND
def test_other_activations_are_refused(row, device):
    mode = MODES[row.activation][0]
    inputs = moved(make_moe_inputs(MoECase(3, 96, 64, 4, 2, mode, weights=row.weights), 23), device)
    expected = run_moe(device, inputs, mode, [row.index] * 2)
    given = arguments_of(inputs, mode, [row.index] * 2)
    taken = set()
    for number in ActivationType:
        try:
            output = launch(given | {"activation_type": int(number)})
        except ValueError as error:
            # Relu2 has no gate rows: half of FC1's.
            disagree = "disagree about hidden or intermediate size"
            refused = disagree if number == ActivationType.Relu2 else f"activation_type {int(number)} is none of"
            assert refused in str(error)
        else:
            taken.add(number)
            assert same_bits(output, expected) == (number != ActivationType.SwigluStep)
    assert taken == {ActivationType.Swiglu, ActivationType.SwigluBias, ActivationType.SwigluStep}
