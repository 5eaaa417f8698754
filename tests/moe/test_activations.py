# SPDX-License-Identifier: Apache-2.0
"""Activations: SwigluStep and Relu2 beside Swiglu, what each takes, and that nothing given is dropped."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from flashinfer.tllm_enums import ActivationType
from moe_harness import check_case, run, same_bits, tactics_to_force

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.testing import MoECase, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.error_bounds import relu2, swiglu, swiglu_step
from flashinfer.testing.moe_inputs import moe_inputs_with_not_numbers
from flashinfer.testing.mxfp_formats import Operand, unswizzle_scales

MODES = (0, 1, 2)
STEP = MoECase(9, 160, 96, 4, 2, 0, swiglu_step=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_swiglu_step_against_its_reference(mode: int, tokens: int, device: torch.device) -> None:
    case = dataclasses.replace(STEP, mode=mode, num_tokens=tokens, hidden=288, inter=352)
    check_case(case, 40 + tokens, device, tactics_to_force(case, device))


KINDS = [(0, "mxfp4"), (1, "mxfp4"), (2, "mxfp4"), (2, "nvfp4")]


@pytest.mark.parametrize(("mode", "weights"), KINDS, ids=str)
@pytest.mark.parametrize("number", range(4))
def test_relu2_against_its_reference(mode: int, weights: str, number: int, device: torch.device) -> None:
    """Random layers without gate rows, with and without biases; 22 of an odd number of experts among them."""
    seed = 100 * number + mode
    rng = random.Random(seed)
    top_k = rng.choice((1, 6, 22))
    case = MoECase(
        num_tokens=rng.choice((1, 2, 9, rng.randint(1, 90))),
        hidden=32 * rng.randint(1, 24),
        inter=32 * rng.randint(1, 24),
        num_experts=top_k + rng.randint(0, 9),
        top_k=top_k,
        mode=mode,
        data=rng.choice(("normal", "lattice")),
        swizzled_input_sf=rng.random() < 0.5,
        biases=rng.random() < 0.5,
        relu2=True,
        weights=weights,
    )
    print(case, "seed", seed)
    check_case(case, seed, device, tactics_to_force(case, device))


def test_relu2_is_the_square_of_what_is_above_zero(device: torch.device) -> None:
    """By the formula alone: one expert of one token, the products in float64."""
    case = MoECase(5, 64, 96, 1, 1, 2, global_scales=False, relu2=True)
    inputs = make_moe_inputs(case, 47, device)
    print("seed", 47)
    fc1, fc2 = (
        Operand.of_mxfp4(weights[0], unswizzle_scales(scales[0], weights.shape[1], weights.shape[2] // 16)).values
        for weights, scales in ((inputs.fc1_weights, inputs.fc1_scales), (inputs.fc2_weights, inputs.fc2_scales))
    )
    up = inputs.input.double() @ fc1.T + inputs.fc1_bias[0].double()
    assert (up < -1).any() and (up > 1).any()
    act = torch.where(up > 0, up * up, 0.0).bfloat16().double()
    expected = (act @ fc2.T + inputs.fc2_bias[0].double()) * inputs.token_final_scales.double()
    result = run(inputs, device, 0xFF, None).double()
    assert ((result - expected).norm() / expected.norm()) < 2.0**-8  # bfloat16's rounding of the output
    torch.testing.assert_close(moe_reference(inputs)[0], expected, rtol=2.0**-20, atol=2.0**-20)


@pytest.mark.parametrize(("mode", "weights"), KINDS, ids=str)
def test_what_is_no_number_passes_relu2(mode: int, weights: str, device: torch.device) -> None:
    """A NaN of an up row is NaN after it, and changes no other output."""
    case = MoECase(7, 160, 96, 4, 2, mode, relu2=True, weights=weights)
    print("seeds", 48, 49)
    made = moe_inputs_with_not_numbers(make_moe_inputs(case, 48, device), 49)
    _, numbers = next(made)
    before, output_before = moe_reference(numbers)[0], run(numbers, device, 0xFF, None)
    names = set()
    for what, changed in made:
        reference, bound = moe_reference(changed)
        output = run(changed, device, 0xFF, None)
        check_within_bound(output, reference, bound, what)
        kept = reference == before
        assert same_bits(output[kept], output_before[kept]), what
        names.add(what.split(" as ")[1])
        if what.startswith("nan as a bias of up"):
            assert torch.isnan(output).any() and not kept.all()
    assert "a scale of up" in names and "a bias of up" in names and not any("gate" in name for name in names)


@pytest.mark.parametrize("mode", MODES)
def test_an_absent_limit_is_upstreams_seven(mode: int, device: torch.device) -> None:
    inputs = make_moe_inputs(dataclasses.replace(STEP, mode=mode, swiglu_parameters=False), 41, device)
    inputs.fc1_bias = 8 * torch.randn_like(inputs.fc1_bias)  # beyond it
    sevens = dataclasses.replace(inputs, swiglu_limit=torch.full((4,), 7.0, device=device))
    eights = dataclasses.replace(inputs, swiglu_limit=torch.full((4,), 8.0, device=device))
    result = run(inputs, device, 0xFF, None)
    assert same_bits(result, run(sevens, device, 0xFF, None))
    assert not same_bits(result, run(eights, device, 0xFF, None))


def test_each_parameter_counts_and_each_activation_has_its_own_formula(device: torch.device) -> None:
    """A layer whose every parameter is dropped in turn gives another result, beyond its bound."""
    inputs = make_moe_inputs(dataclasses.replace(STEP, swiglu_step=False), 42, device)
    step = dataclasses.replace(inputs, swiglu_step=True, swiglu_alpha=None, swiglu_beta=None)
    for layer, dropped in (
        *((inputs, {name: None}) for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")),
        (step, {"swiglu_limit": None}),
        (step, {"swiglu_step": False}),
    ):
        result = run(layer, device, 0xFF, None)
        check_within_bound(result, *moe_reference(layer))
        with pytest.raises(AssertionError):
            check_within_bound(result, *moe_reference(dataclasses.replace(layer, **dropped)))


def test_swiglu_bias_is_another_name_of_swiglu(device: torch.device) -> None:
    arguments = make_moe_inputs(MoECase(9, 160, 96, 4, 2, 1), 43, device).arguments()
    expected = cutlass_fused_moe(**arguments)
    named = arguments | {"activation_type": ActivationType.SwigluBias}
    assert same_bits(cutlass_fused_moe(**named), expected)
    assert same_bits(cutlass_fused_moe(**arguments | {"activation_type": 3}), expected)


def test_relu2s_bound_holds_for_what_lies_within_the_errors_and_is_reached() -> None:
    generator = torch.Generator().manual_seed(50)
    print("seed", 50)
    up = 4 * torch.randn(20_000, generator=generator, dtype=torch.float64)
    error = torch.exp2(-16 * torch.rand(20_000, generator=generator, dtype=torch.float64))
    value, bound = relu2(up, error)
    assert torch.equal(value, torch.where(up > 0, up * up, 0.0))
    used = torch.zeros_like(up)
    for a in (-0.96, -0.5, 0.0, 0.7, 0.96):  # and a rounding to float32, of at most 2^-21
        u = (up + a * error).float()
        off = (u.clamp(min=0.0).square().double() - value).abs()
        assert (off <= bound).all()
        used = torch.maximum(used, off / bound)
    positive = (up > 0) & (error > 2.0**-10)
    assert used[positive].min() > 0.9  # no wider than it has to be
    far = torch.tensor([torch.nan, 1e30, -torch.inf], dtype=torch.float64)
    value, bound = relu2(far, torch.ones(3, dtype=torch.float64))
    assert torch.isnan(value[0]) and value[2] == 0.0
    assert bound[1] == torch.inf  # 1e60 is no float32


def test_swiglu_steps_bound_holds_for_what_lies_within_the_errors() -> None:
    generator = torch.Generator().manual_seed(46)
    print("seed", 46)
    gate, up = (4 * torch.randn(20_000, generator=generator, dtype=torch.float64) for _ in range(2))
    gate_error, up_error = (
        torch.exp2(-20 * torch.rand(20_000, generator=generator, dtype=torch.float64)) for _ in range(2)
    )
    limit = 1.75
    value, bound = swiglu_step(up, gate, up_error, gate_error, limit)
    exact = (gate * torch.sigmoid(gate)).clamp(max=limit) * up.clamp(-limit, limit)
    assert torch.equal(value, exact)
    for a in (-1.0, -0.5, 0.0, 1.0):
        for b in (-1.0, 0.0, 0.7, 1.0):
            g, u = (gate + a * gate_error).float(), (up + b * up_error).float()
            off = ((g * torch.sigmoid(g)).clamp(max=limit) * u.clamp(-limit, limit)).double() - exact
            assert (off.abs() <= bound).all()
    # It is no wider than Swiglu's where neither clamps.
    small = gate.abs().maximum(up.abs()) < 1
    other, wide = swiglu(up, gate, up_error, gate_error, 1.0, 0.0, limit)
    tiny = small & (gate_error < 1e-3) & (up_error < 1e-3)
    assert (value[tiny] == other[tiny]).all()
    assert (bound[tiny] <= 1.1 * wide[tiny] + 1e-30).all()
