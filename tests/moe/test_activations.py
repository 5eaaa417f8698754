# SPDX-License-Identifier: Apache-2.0
"""Gated activations: SwigluStep beside Swiglu, what each takes, and that nothing given is dropped."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flashinfer.tllm_enums import ActivationType
from moe_harness import check_case, run, same_bits

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.sm12x.instances import SM12X
from flashinfer.testing import MoECase, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.error_bounds import swiglu, swiglu_step

MODES = (0, 1, 2)
STEP = MoECase(9, 160, 96, 4, 2, 0, swiglu_step=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_swiglu_step_against_its_reference(mode: int, tokens: int, device: torch.device) -> None:
    case = dataclasses.replace(STEP, mode=mode, num_tokens=tokens, hidden=288, inter=352)
    sizes = case.num_tokens * case.top_k, case.hidden, case.inter
    rows = [row for row in SM12X if row.activation == Mode(mode).activation and row.takes(*sizes)]
    tactics = [None, *([row.number] * 2 for row in rows)] if device.type == "cuda" else [None]
    check_case(case, 40 + tokens, device, tactics)


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


def test_the_bound_holds_for_what_lies_within_the_errors() -> None:
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
