# SPDX-License-Identifier: Apache-2.0
"""The bounds hold for float32 in any order, and are tight enough that planted faults leave them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing import (
    ANY_ORDER,
    TENSOR_CORE,
    BoundViolation,
    MoECase,
    MoEInputs,
    check_within_bound,
    make_moe_inputs,
    moe_reference,
)
from flashinfer.testing.error_bounds import dot_error, requantize_mxfp8, round_to_bfloat16, swiglu
from flashinfer.testing.mxfp_formats import Operand, decode_scales, lowest_bits, quantize_mxfp8


def _rng(seed: int) -> torch.Generator:
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("k", [64, 512])
@pytest.mark.parametrize("order", ["forward", "backward", "sorted"])
def test_dot_error_covers_float32_sums_in_every_order(order: str, k: int) -> None:
    generator = _rng(4)
    operands = [Operand.of_bf16(torch.randn(rows, k, generator=generator).bfloat16()) for rows in (16, 24)]
    x, w = (operand.values for operand in operands)
    terms = x[:, None, :] * w
    total = torch.zeros(16, 24, dtype=torch.float32)
    if order == "backward":
        terms = terms.flip(-1)
    elif order == "sorted":  # all positive terms first: the largest partial sums
        terms = terms.sort(dim=-1, descending=True).values
    for index in range(k):
        total = total + terms[..., index].float()
    error = (total.double() - x @ w.T).abs()
    bound = dot_error(*operands, ANY_ORDER)
    assert (error <= bound).all()
    assert error.max() > 0


def test_lattice_sums_are_exact() -> None:
    generator = _rng(5)
    x = Operand.of_bf16(torch.randint(-3, 4, (8, 640), generator=generator))
    w = Operand.of_bf16(torch.randint(-12, 13, (8, 640), generator=generator) / 2)
    assert (dot_error(x, w, ANY_ORDER) == 0).all()
    assert torch.equal((x.values.float() @ w.values.float().T).double(), x.values @ w.values.T)
    assert (dot_error(Operand.of_bf16(x.values * (1 + 2.0**-20)), w, ANY_ORDER) > 0).all()


def test_lowest_bits() -> None:
    values = torch.tensor([0.0, 6.0, 0.75, -2.0, math.nan, -math.inf, 2.0**-140, 7 * 2.0**-130], dtype=torch.float64)
    assert lowest_bits(values).tolist() == [math.inf, 2.0, 0.25, 2.0, 0.0, 0.0, 2.0**-140, 2.0**-130]


@pytest.mark.parametrize("k", [64, 80])
@pytest.mark.parametrize("form", ["mxfp4", "e4m3", "e5m2"])
def test_lowest_bits_by_tables_are_those_of_the_values(form: str, k: int) -> None:
    """All bytes with all scales; a scale of NaN leaves no element a number."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(k, 1)
    packed = codes.flatten().view(-1, k // 2 if form == "mxfp4" else k)
    scales = torch.arange(len(packed) * -(-k // 32)).remainder(256).to(torch.uint8).view(len(packed), -1)
    if form == "mxfp4":
        operand = Operand.of_mxfp4(packed, scales)
    else:
        operand = Operand.of_mxfp8(packed.view(getattr(torch, f"float8_{form}" + "fn" * (form == "e4m3"))), scales)
    assert torch.equal(operand.lowest, lowest_bits(operand.values))
    assert torch.equal(operand[3:9].lowest, operand.lowest[3:9])


@pytest.mark.parametrize("alpha", [1.0, 1.702, -1.3])
def test_swiglu_error_covers_perturbed_float32(alpha: float) -> None:
    generator = _rng(6)
    up, gate = 6 * torch.randn(2, 400, 64, generator=generator, dtype=torch.float64)
    size = 2.0 ** torch.randint(-24, -6, (2, 400, 64), generator=generator)
    push = torch.rand(2, 400, 64, generator=generator, dtype=torch.float64).mul(2).sub(1).sign()
    value, error = swiglu(up, gate, size[0].double(), size[1].double(), alpha, 1.0, 7.0)
    u, g = (up + push[0] * size[0]).float(), (gate + push[1] * size[1]).float()
    # One rounding of the inputs to float32, which callers hold within their own error.
    value, error = swiglu(up, gate, size[0] + up.abs() * 2**-24, size[1] + gate.abs() * 2**-24, alpha, 1.0, 7.0)
    g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
    computed = g * torch.sigmoid(alpha * g) * (u + 1.0)
    difference = (computed.double() - value).abs()
    assert (difference <= error).all()
    assert (difference / error).max() > 0.3, "a bound that is never approached is no test"


def test_swiglu_error_vanishes_beyond_the_limit() -> None:
    ten, delta = torch.tensor([10.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    _, error = swiglu(ten, ten, delta, delta, 1.0, 0.0, 7.0)
    assert float(error) < 1e-3


@pytest.mark.parametrize("relative", [2.0**-20, 2.0**-10, 2.0**-4])
def test_requantization_interval_holds_every_outcome(relative: float) -> None:
    generator = _rng(7)
    values = torch.randn(300, 64, generator=generator, dtype=torch.float64)
    values[:20] = 448 * 2.0 ** torch.randint(-5, 5, (20, 1), generator=generator)  # scale steps
    error = values.abs() * relative
    rounded, radius = requantize_mxfp8(values, error)
    reference = rounded.values
    exact, scales = quantize_mxfp8(values)
    assert torch.equal(reference, exact.double() * decode_scales(scales).repeat_interleave(32, dim=-1))
    for _ in range(40):
        push = torch.rand(values.shape, generator=generator, dtype=torch.float64) * 2 - 1
        if _ % 2:
            push = push.sign()
        quantized, scales = quantize_mxfp8(values + push * error)
        outcome = quantized.double() * decode_scales(scales).repeat_interleave(32, dim=-1)
        assert ((outcome - reference).abs() <= radius).all()
    if relative < 2.0**-19:
        assert (radius[20:] == 0).double().mean() > 0.99, "nearly all elements cannot flip"


def test_requantization_saturates_within_float32() -> None:
    values = torch.zeros(3, 64, dtype=torch.float64)
    values[:, 0] = torch.tensor([math.inf, -(2.0**200), 1.9 * 2.0**127])
    values[:, 1] = 2.0**120
    rounded, radius = requantize_mxfp8(values, values.abs().nan_to_num(posinf=0.0) * 2.0**-20)
    assert rounded.values[:, 0].tolist() == [448 * 2.0**119, -448 * 2.0**119, 448 * 2.0**119]
    assert (rounded.values[:, 1] == 2.0**120).all()
    assert not radius.any()


def test_bfloat16_interval_holds_every_outcome() -> None:
    generator = _rng(8)
    values = torch.randn(4, 1000, generator=generator, dtype=torch.float64)
    error = values.abs() * 2.0**-12
    rounded, radius = round_to_bfloat16(values, error)
    for push in (-1.0, 1.0, 0.3):
        assert (((values + push * error).bfloat16().double() - rounded.values).abs() <= radius).all()
    assert (radius == 0).double().mean() > 0.8


def test_check_within_bound_compares_rounded_ends() -> None:
    reference = torch.tensor([1.0, 2.0, math.nan, 70000.0, 5.0], dtype=torch.float64)
    bound = torch.tensor([0.0, 0.01, 1.0, 10.0, math.inf], dtype=torch.float64)
    good = torch.tensor([1.0, 2.008, math.nan, math.inf, math.nan]).half()
    assert check_within_bound(good, reference, bound) <= 1.01
    for position, wrong in ((0, 1.001), (1, 2.02), (2, 0.0), (3, 60000.0)):
        bad = good.clone()
        bad[position] = wrong
        with pytest.raises(BoundViolation, match=rf"1 of 5 elements outside their bound; worst at \({position},\)"):
            check_within_bound(bad, reference, bound)
    with pytest.raises(BoundViolation, match="shape"):
        check_within_bound(good[:2], reference, bound)


def layer(inputs: MoEInputs) -> torch.Tensor:
    return flashinfer.cutlass_fused_moe(**inputs.arguments())


# Planted faults: each is a mistake that a kernel can make.  Lattice data makes FC1 exact, so that one wrong block
# shows.
def _swap_nibbles(inputs: MoEInputs) -> None:
    byte = inputs.fc2_weights[0, 5, 3].item()
    inputs.fc2_weights[0, 5, 3] = (byte >> 4) | (byte & 15) << 4 if byte >> 4 != byte & 15 else byte ^ 0x31


FAULTS: dict[str, Callable[[MoEInputs], Any]] = {
    "signs of one block of one row": lambda inputs: inputs.fc1_weights[1, 77, 16:32].bitwise_xor_(0x88),
    "a block of FC2": lambda inputs: inputs.fc2_weights[2, 200, 48:64].copy_(inputs.fc2_weights[2, 200, 64:80]),
    "a scale of FC1": lambda inputs: inputs.fc1_scales.view(4, -1)[1, 700].add_(1),
    "a scale of FC2": lambda inputs: inputs.fc2_scales.view(4, -1)[3, 1030].add_(1),
    "swapped nibbles": _swap_nibbles,
    "a tile": lambda inputs: inputs.fc2_weights[:, 128:256].copy_(inputs.fc2_weights[:, :128]),
    "a bias": lambda inputs: inputs.fc2_bias[2, 17].add_(0.25),
    "an expert": lambda inputs: inputs.token_selected_experts[3, 0].copy_(6 - inputs.token_selected_experts[3].sum()),
    "swapped gate and up": lambda inputs: inputs.fc1_weights.copy_(inputs.fc1_weights.roll(416, dims=1)),
}


def _copy(inputs: MoEInputs) -> MoEInputs:
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return MoEInputs(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_leaves_the_bound(fault: str, mode: int) -> None:
    case = MoECase(24, 352, 416, 4, 2, mode, data="lattice", output_dtype=torch.float16)
    inputs = make_moe_inputs(case, 9)
    reference, bound = moe_reference(inputs)
    check_within_bound(layer(inputs), reference, bound)
    faulty = _copy(inputs)
    FAULTS[fault](faulty)
    with pytest.raises(BoundViolation):
        check_within_bound(layer(faulty), reference, bound)


@pytest.mark.parametrize("mode", [0, 2])
def test_wrong_tile_of_ordinary_data_leaves_the_bound(mode: int) -> None:
    inputs = make_moe_inputs(MoECase(8, 736, 736, 4, 2, mode), 10)
    reference, bound = moe_reference(inputs)
    faulty = _copy(inputs)
    FAULTS["a tile"](faulty)
    with pytest.raises(BoundViolation):
        check_within_bound(layer(faulty), reference, bound)


def test_bound_is_a_small_part_of_the_result() -> None:
    """A regression guard for tightness: what a bound may be worth, relative to the outputs' size."""
    for data, share in (("lattice", 2e-3), ("normal", 5e-2)):
        case = MoECase(16, 736, 736, 4, 2, 0, data=data)  # type: ignore[arg-type]
        reference, bound = moe_reference(make_moe_inputs(case, 11), TENSOR_CORE)
        assert bound.mean() < share * reference.pow(2).mean().sqrt()


def test_where_float32_can_overflow_nothing_is_asked() -> None:
    """An infinite input saturates to 448 * 2^127, whose products float32 does not hold: only that token is free."""
    inputs = make_moe_inputs(MoECase(6, 160, 96, 4, 2, 1), 12)
    inputs.input[2, 5] = torch.inf
    reference, bound = moe_reference(inputs)
    assert torch.isinf(bound[2]).all()
    others = [0, 1, 3, 4, 5]
    assert torch.isfinite(bound[others]).all()
    check_within_bound(layer(inputs), reference, bound)
