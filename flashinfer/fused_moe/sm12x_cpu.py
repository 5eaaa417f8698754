# SPDX-License-Identifier: Apache-2.0
"""The MXFP4 and NVFP4 MoE layer on CPU tensors: the kernels' contract in float32, one expert at a time.

It multiplies dequantized values, which is exact, and accumulates in float32, so it differs from the GPU only in the
order of the sums.  An expert of gpt-oss-120b takes 150 MB while it is worked on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..quantization.block_scaled import LAYOUTS
from ..quantization.mx_cpu import (
    dequantize_mxfp8_linear,
    round_to_mxfp8,
    unswizzle_128x4,
)
from ..sm12x.checks import BLOCK_SIZE
from .sm12x_launch import weight_scales
from .sm12x_validation import ACTIVATIONS, Activation, Mode, MoECall, MoEProblem


def _activations(
    problem: MoEProblem,
    input: torch.Tensor,
    input_sf: torch.Tensor | None,
    swizzled: bool,
) -> torch.Tensor:
    """The values that FC1 multiplies, float32 ``[M, H]``."""
    if problem.mode is Mode.W4A16:
        return input.float()
    if problem.mode is Mode.BF16_INPUT:
        return round_to_mxfp8(input)
    assert input_sf is not None
    blocks = problem.hidden // BLOCK_SIZE
    if swizzled:
        scales = unswizzle_128x4(input_sf, problem.num_tokens, blocks)
    else:
        scales = input_sf.view(torch.uint8).view(problem.num_tokens, blocks)
    return dequantize_mxfp8_linear(input, scales)


def _gemm(x: torch.Tensor, weights: str, packed: torch.Tensor, swizzled_scales: torch.Tensor) -> torch.Tensor:
    """``x @ w.T`` for one expert's packed weights ``[rows, K / 2]`` of a format."""
    rows, k, layout = packed.shape[0], 2 * packed.shape[1], LAYOUTS[weights]
    scales = unswizzle_128x4(swizzled_scales, rows, k // layout.scales.block)
    return x @ layout.dequantize(packed, scales).T


def swiglu(up: torch.Tensor, gate: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    """``g sigmoid(alpha g) (u + beta)`` of the clamped projections; NaN passes through the clamps."""
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def swiglu_step(up: torch.Tensor, gate: torch.Tensor, limit: float) -> torch.Tensor:
    """``min(silu(g), limit) clamp(u, -limit, limit)``; NaN passes through the clamps."""
    return (gate * torch.sigmoid(gate)).clamp(max=limit) * up.clamp(-limit, limit)


def relu2(up: torch.Tensor) -> torch.Tensor:
    """``max(u, 0)^2``; NaN passes."""
    return up.clamp(min=0.0).square()


FORMULAS: dict[str, Callable[..., torch.Tensor]] = {"Swiglu": swiglu, "SwigluStep": swiglu_step, "Relu2": relu2}
"""An activation's name -> a function of up, gate if it has one, and a number for each of
:attr:`.sm12x_validation.Activation.defaults`, by its name."""


def activate(activation: Activation, parameters: Any, expert: int, projections: torch.Tensor) -> torch.Tensor:
    """An expert's activation of FC1's results ``[m, parts I]``; ``parameters`` has the tensors of
    :attr:`Activation.defaults`, or None, as attributes."""
    given = {name: getattr(parameters, name) for name in activation.defaults}
    numbers = (activation.defaults[name] if each is None else float(each[expert]) for name, each in given.items())
    return FORMULAS[activation.name](*projections.chunk(activation.parts, dim=-1), *numbers)


def moe_cpu(problem: MoEProblem, call: MoECall) -> None:
    """Write the layer's result into the output of a valid call.

    A token's experts are summed in ascending order of their ids.
    """
    experts = problem.num_local_experts
    fc1, fc2 = call.fc1_expert_weights.view(torch.uint8), call.fc2_expert_weights.view(torch.uint8)
    fc1_scales, fc1_global, fc2_scales, fc2_global = weight_scales(call)
    fc1_scales, fc2_scales = (scales.view(torch.uint8).view(experts, -1) for scales in (fc1_scales, fc2_scales))
    x = _activations(problem, call.input, call.input_sf, call.swizzled_input_sf)
    total = torch.zeros((problem.num_tokens, problem.hidden), dtype=torch.float32)
    assert call.token_selected_experts is not None
    local_ids = call.token_selected_experts - problem.first_expert
    used = torch.unique(local_ids)
    for expert in used[(used >= 0) & (used < experts)].tolist():
        token, slot = (local_ids == expert).nonzero(as_tuple=True)
        hidden = _gemm(x[token], problem.weights, fc1[expert], fc1_scales[expert])
        if fc1_global is not None:
            hidden *= fc1_global[expert]
        if call.fc1_expert_biases is not None:
            hidden += call.fc1_expert_biases[expert].float()
        activation = activate(ACTIVATIONS[call.activation_type], call, expert, hidden)
        if problem.mode is Mode.W4A16:
            activation = activation.bfloat16().float()
        else:
            activation = round_to_mxfp8(activation)
        result = _gemm(activation, problem.weights, fc2[expert], fc2_scales[expert])
        if fc2_global is not None:
            result *= fc2_global[expert]
        if call.fc2_expert_biases is not None:
            result += call.fc2_expert_biases[expert].float()
        if call.token_final_scales is not None:
            result *= call.token_final_scales[token, slot].unsqueeze(1)
        total.index_add_(0, token, result)
    assert call.output is not None
    call.output.copy_(total)
