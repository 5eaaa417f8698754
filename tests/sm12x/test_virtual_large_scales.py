# SPDX-License-Identifier: Apache-2.0
"""Scales so large that a scaled weight is no float32, on the CPU and on the virtual SM121.

Backends differ in what such a weight gives: one multiplies infinity, another the weight itself, and sums overflow where
their order has it. All keep what ``docs/kernels.md`` says: an output is then infinite, NaN or right, and others are
untouched.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.gemm import dense_block_scaled
from flashinfer.testing import (
    ANY_ORDER,
    TENSOR_CORE,
    Accumulation,
    DenseCase,
    MoECase,
    MoEInputs,
    check_within_bound,
    dense_reference,
    make_dense_inputs,
    make_moe_inputs,
    moe_reference,
    swizzle_scales,
    unswizzle_scales,
)
from flashinfer.testing.virtual_device import virtual_device

SEED = 5
backends = pytest.mark.parametrize("virtual", [False, True], ids=["CPU", "virtual"])


def _on(virtual: bool) -> contextlib.AbstractContextManager[Any]:
    return virtual_device("sm_121a") if virtual else contextlib.nullcontext()


def _with_bytes(swizzled: torch.Tensor, rows: int, blocks: int, changed: dict[tuple[int, int], int]) -> torch.Tensor:
    linear = unswizzle_scales(swizzled, rows, blocks).clone()
    for place, byte in changed.items():
        linear[place] = byte
    return swizzle_scales(linear).view(swizzled.shape)


# The least byte with which an element of the format is beyond float32, one below, and the largest.
LEAST = {"mxfp4": 253, "mxfp6": 253, "mxint8": 254, "mxfp8": 247}


@backends
@pytest.mark.parametrize("tokens", [3, 40], ids=["few tokens", "many"])
@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
@pytest.mark.parametrize("weights", LEAST)
def test_an_output_of_weights_beyond_float32_is_infinite_nan_or_right(
    weights: str, form: str, tokens: int, virtual: bool
) -> None:
    n, k, places = 72, 96, {10: 254, 11: LEAST[weights], 70: LEAST[weights] - 1}
    print("seed", SEED)
    inputs = make_dense_inputs(DenseCase(tokens, n, k, weights, form), SEED)
    x, weight, scales = inputs.arguments
    scales = _with_bytes(scales, n, k // 32, {(row, row % 3): byte for row, byte in places.items()})
    inputs.arguments = x, weight, scales
    with _on(virtual):
        out = dense_block_scaled(*inputs.arguments, **inputs.named).double()
    exact = inputs.multiplied().values @ inputs.weights().values.T
    room = 2.0**-7 * (inputs.multiplied().values.abs() @ inputs.weights().values.abs().T)
    wrong = torch.isfinite(out) & ((out - exact).abs() > room)
    assert not wrong.any(), wrong.nonzero()
    reference, bound = dense_reference(inputs, TENSOR_CORE if virtual else ANY_ORDER)
    fixed = [row for row in range(n) if row not in places]
    assert torch.isfinite(bound[:, fixed]).all()
    check_within_bound(out[:, fixed].bfloat16(), reference[:, fixed], bound[:, fixed], f"{weights}, {form}")
    assert not torch.isfinite(out[:, 10]).all(), "the largest scale gives nothing beyond float32"


@backends
@pytest.mark.parametrize("tokens", [3, 60], ids=["streamed", "pair"])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["MXFP8 input", "bf16 input", "W4A16"])
def test_an_expert_with_weights_beyond_float32_spoils_its_own_outputs_alone(
    mode: int, tokens: int, virtual: bool
) -> None:
    def layer(inputs: MoEInputs) -> torch.Tensor:
        with _on(virtual):
            return flashinfer.cutlass_fused_moe(**inputs.arguments())

    check_experts_beyond_float32(layer, mode, tokens, TENSOR_CORE if virtual else ANY_ORDER)


def check_experts_beyond_float32(
    layer: Callable[[MoEInputs], torch.Tensor], mode: int, tokens: int, accumulation: Accumulation
) -> None:
    """Expert 1 has such weights in FC1, expert 2 in a row of FC2."""
    hidden, inter, experts = 96, 64, 4
    print("seed", SEED)
    inputs = copy.copy(make_moe_inputs(MoECase(tokens, hidden, inter, experts, 1, mode), SEED))
    inputs.token_selected_experts = (torch.arange(tokens) % experts).int()[:, None].contiguous()
    fc1, fc2 = inputs.fc1_scales.clone().view(torch.uint8), inputs.fc2_scales.clone().view(torch.uint8)
    fc1[1] = _with_bytes(fc1[1], 2 * inter, hidden // 32, {(5, 1): 254, (70, 0): 253})
    fc2[2] = _with_bytes(fc2[2], hidden, inter // 32, {(9, 0): 254})
    inputs.fc1_scales, inputs.fc2_scales = fc1.view(inputs.fc1_scales.dtype), fc2.view(inputs.fc2_scales.dtype)
    out = layer(inputs)
    reference, bound = moe_reference(inputs, accumulation)
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[1::experts], spoilt[2::experts, 9] = True, True
    assert torch.isfinite(bound[~spoilt]).all()
    check_within_bound(out[~spoilt], reference[~spoilt], bound[~spoilt], f"mode {mode}")
    finite = torch.isfinite(out[2::experts, 9])
    right = (out.double() - reference).abs()[2::experts, 9] <= 2.0**-6 * reference.abs()[2::experts, 9]
    assert (right | ~finite).all()
