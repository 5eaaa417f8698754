# SPDX-License-Identifier: Apache-2.0
"""The MXFP4 MoE layer on CPU tensors: the kernels' contract in float32, one expert at a time.

It multiplies dequantized values, which is exact, and accumulates in float32, so it differs from the GPU only in the order of
the sums.  An expert of gpt-oss-120b takes 150 MB while it is worked on.
"""

from __future__ import annotations

import torch

from ..quantization.mx_cpu import (
    dequantize_mxfp4_linear,
    dequantize_mxfp8_linear,
    quantize_mxfp8_linear,
    unswizzle_128x4,
)
from ..sm12x.checks import BLOCK_SIZE
from .sm12x_activations import ACTIVATIONS
from .sm12x_validation import Mode, MoECall, MoEProblem


def _activations(
    problem: MoEProblem,
    input: torch.Tensor,
    input_sf: torch.Tensor | None,
    swizzled: bool,
) -> torch.Tensor:
    """The values that FC1 multiplies, float32 ``[M, H]``."""
    if problem.mode is Mode.W4A16:
        return input.float()
    if problem.mode is Mode.HALF_INPUT:
        return dequantize_mxfp8_linear(*quantize_mxfp8_linear(input))
    assert input_sf is not None
    blocks = problem.hidden // BLOCK_SIZE
    if swizzled:
        scales = unswizzle_128x4(input_sf, problem.num_tokens, blocks)
    else:
        scales = input_sf.view(torch.uint8).view(problem.num_tokens, blocks)
    return dequantize_mxfp8_linear(input, scales)


def _gemm(x: torch.Tensor, packed: torch.Tensor, swizzled_scales: torch.Tensor) -> torch.Tensor:
    """``x @ w.T`` for one expert's packed weights ``[rows, K / 2]``."""
    rows, k = packed.shape[0], 2 * packed.shape[1]
    scales = unswizzle_128x4(swizzled_scales, rows, k // BLOCK_SIZE)
    return x @ dequantize_mxfp4_linear(packed, scales).T


def moe_cpu(problem: MoEProblem, call: MoECall) -> None:
    """Write the layer's result into the output of a valid call.

    A token's experts are summed in ascending order of their ids.
    """
    experts = problem.num_local_experts
    fc1, fc2 = call.fc1_expert_weights.view(torch.uint8), call.fc2_expert_weights.view(torch.uint8)
    fc1_scales, fc1_global, fc2_scales, fc2_global = call.weight_scales
    fc1_scales, fc2_scales = (scales.view(torch.uint8).view(experts, -1) for scales in (fc1_scales, fc2_scales))
    x = _activations(problem, call.input, call.input_sf, call.swizzled_input_sf)
    _, compute, defaults = ACTIVATIONS[call.activation_type]
    total = torch.zeros((problem.num_tokens, problem.hidden), dtype=torch.float32)
    local_ids = call.token_selected_experts - problem.first_expert
    used = torch.unique(local_ids)
    for expert in used[(used >= 0) & (used < experts)].tolist():
        token, slot = (local_ids == expert).nonzero(as_tuple=True)
        hidden = _gemm(x[token], fc1[expert], fc1_scales[expert])
        if fc1_global is not None:
            hidden *= fc1_global[expert]
        if call.fc1_expert_biases is not None:
            hidden += call.fc1_expert_biases[expert].float()
        up, gate = hidden.chunk(2, dim=1)
        given = {name: getattr(call, name) for name in defaults}
        numbers = [defaults[name] if each is None else float(each[expert]) for name, each in given.items()]
        activation = compute(up, gate, *numbers)
        if problem.mode is Mode.W4A16:
            activation = activation.bfloat16().float()
        else:
            activation = dequantize_mxfp8_linear(*quantize_mxfp8_linear(activation))
        result = _gemm(activation, fc2[expert], fc2_scales[expert])
        if fc2_global is not None:
            result *= fc2_global[expert]
        if call.fc2_expert_biases is not None:
            result += call.fc2_expert_biases[expert].float()
        if call.token_final_scales is not None:
            result *= call.token_final_scales[token, slot].unsqueeze(1)
        total.index_add_(0, token, result)
    assert call.output is not None
    call.output.copy_(total)
