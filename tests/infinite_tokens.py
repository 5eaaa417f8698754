# SPDX-License-Identifier: Apache-2.0
"""Calls that round infinite tokens, for tests on the CPU, on a GPU and on the virtual SM121."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashinfer.testing import (
    Accumulation,
    DenseCase,
    DenseInputs,
    MoECase,
    MoEInputs,
    check_within_bound,
    dense_reference,
    make_dense_inputs,
    make_moe_inputs,
    moe_reference,
    swizzle_scales,
)
from flashinfer.testing.dense_reference import WEIGHTS

LARGEST = {"mxfp8": 448 * 2.0**119, "mxfp4": 6 * 2.0**125}
ROUNDED = {"quantize_bf16": "mxfp8", "quantize_f16": "mxfp8", "bf16_to_mxfp4": "mxfp4", "f16_to_mxfp4": "mxfp4"}
"""Tokens that a dense layer's call rounds, and to what."""


def beyond(dtype: torch.dtype, num_tokens: int, generator: torch.Generator) -> Iterator[dict[int, float]]:
    """For each of some calls, values by the token that has them: infinity and, of bfloat16, the largest finite
    number."""
    values = [-math.inf, math.inf] + (
        [torch.finfo(dtype).max, torch.finfo(dtype).min] if dtype is torch.bfloat16 else []
    )
    order = torch.randperm(num_tokens, generator=generator).tolist()
    for first in range(0, len(values), num_tokens):
        yield dict(zip(order, values[first:], strict=False))


def check_dense(
    layer: Callable[[DenseInputs], torch.Tensor],
    weights: str,
    tokens: str,
    num_tokens: int,
    accumulation: Accumulation,
    device: torch.device,
) -> None:
    """Half of the weight's rows are 0, the others small enough for a float32 sum."""
    n, k = 40, 160
    case = DenseCase(num_tokens, n, k, weights, tokens, out_dtype=torch.float32)
    seed = int(torch.randint(2**31, ()))
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = make_dense_inputs(case, seed).arguments[0].dtype
    for values in beyond(dtype, num_tokens, generator):
        inputs = make_dense_inputs(case, seed)
        weight, linear = WEIGHTS[weights].quantize(2.0**-4 * torch.randn(n, k, generator=generator))
        weight[: n // 2].zero_()
        x = inputs.arguments[0]
        for token, value in values.items():  # the sum's parts have both signs
            x[token, 3], x[token, 70], x[token, 159] = value, -value, value
        arguments = (x, weight, swizzle_scales(linear))
        inputs.arguments = tuple(each.to(device) for each in arguments)  # type: ignore[assignment]
        for token, value in values.items():
            largest = math.copysign(LARGEST[ROUNDED[tokens]], value)
            assert inputs.multiplied().values[token, [3, 70, 159]].tolist() == [largest, -largest, largest]
        out = layer(inputs)
        reference, bound = dense_reference(inputs, accumulation)
        what = f"{values} of {num_tokens} tokens, {weights}, {tokens}"
        assert torch.isfinite(bound).all()
        check_within_bound(out.cpu(), reference.cpu(), bound.cpu(), what)
        assert (reference[list(values), n // 2 :].abs() > 2.0**110).any(-1).all()
        assert torch.equal(out[:, : n // 2].cpu(), torch.zeros(num_tokens, n // 2)), what


def check_moe(
    layer: Callable[[MoEInputs], torch.Tensor],
    dtype: torch.dtype,
    num_tokens: int,
    accumulation: Accumulation,
    device: torch.device,
) -> None:
    hidden, inter, experts = 160, 96, 4
    case = MoECase(num_tokens, hidden, inter, experts, 2, 1, biases=False, swiglu_parameters=False, global_scales=False)
    case = dataclasses.replace(case, input_dtype=dtype)
    seed = int(torch.randint(2**31, ()))
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    for values in beyond(dtype, num_tokens, generator):
        inputs = make_moe_inputs(case, seed)
        for token, value in values.items():
            inputs.input[token, 5], inputs.input[token, 150] = value, -value
        fc1_scales = inputs.fc1_scales.view(torch.uint8).int()
        # FC1's weights divide the largest number to about 2^7.
        small = on(device, dataclasses.replace(inputs, fc1_scales=(fc1_scales - 119).clamp(1).byte()))
        out = layer(small)
        reference, bound = moe_reference(small, accumulation)
        assert torch.isfinite(bound).all()
        assert (reference[list(values)].abs() > 1).any(-1).all()
        check_within_bound(out.cpu(), reference.cpu(), bound.cpu(), f"{values} of {num_tokens} tokens")
        # Of FC1 with weights below 1/8 the sums are float32 numbers, but activations may be infinite.
        large = dataclasses.replace(inputs, fc1_scales=(fc1_scales - 3).clamp(1).byte())
        for name in ("fc1_weights", "fc2_weights"):
            zeros: dict[str, Any] = {name: torch.zeros_like(getattr(large, name))}
            out = layer(on(device, dataclasses.replace(large, **zeros)))
            expected = torch.zeros(num_tokens, hidden, dtype=out.dtype)
            assert torch.equal(out.cpu(), expected), f"{values} of {num_tokens} tokens, {name}"


def check_infinite_activations(
    layer: Callable[[MoEInputs], torch.Tensor], num_tokens: int, device: torch.device
) -> None:
    """FC1's results are 2^100 or minus that, so each activation is infinite in float32, or 0; FC2's weights are
    2^-12."""
    hidden, inter = 32, 64
    case = MoECase(num_tokens, hidden, inter, 2, 1, 1, biases=False, swiglu_parameters=False, global_scales=False)
    inputs = make_moe_inputs(case, 3)
    inputs.input.fill_(1.0)
    up = torch.where(torch.arange(inter) % 2 == 0, 0x22, 0xAA)[:, None]  # 1 and -1
    fc1 = torch.cat([up, torch.full_like(up, 0x22)]).to(torch.uint8).expand(2, 2 * inter, hidden // 2)
    fc2 = torch.full_like(inputs.fc2_weights, 0x22)
    fc2[:, ::2] = 0xA2  # -1 for the odd ones, which are negative
    inputs = dataclasses.replace(
        inputs,
        token_final_scales=None,
        fc1_weights=fc1.contiguous(),
        fc2_weights=fc2,
        fc1_scales=torch.full_like(inputs.fc1_scales.view(torch.uint8), 127 + 95),
        fc2_scales=torch.full_like(inputs.fc2_scales.view(torch.uint8), 127 - 12),
    )
    out = layer(on(device, inputs)).cpu()
    expected = torch.zeros(num_tokens, hidden, dtype=out.dtype)
    expected[:, ::2] = inter * 2.0**-12 * LARGEST["mxfp8"]
    assert torch.equal(out, expected)


def on(device: torch.device, inputs: MoEInputs) -> MoEInputs:
    """The tensors of a call on a device."""
    tensors = {name: each for name, each in vars(inputs).items() if isinstance(each, torch.Tensor)}
    moved: dict[str, Any] = {name: each.to(device) for name, each in tensors.items()}
    return dataclasses.replace(inputs, **moved)
