# SPDX-License-Identifier: Apache-2.0
"""The MXFP4 and NVFP4 MoE layer in float64, written to be read, with the bound on any float32 implementation of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..tllm_enums import ActivationType
from .error_bounds import (
    ANY_ORDER,
    FLOAT32_ROUNDOFF,
    Accumulation,
    affine_error,
    dot_error,
    relu2,
    requantize_mxfp8,
    round_to_bfloat16,
    swiglu,
    swiglu_step,
)
from .mxfp_formats import (
    BLOCK,
    NVFP4_BLOCK,
    Operand,
    quantize_mxfp8,
    unswizzle_scales,
)

WEIGHTS = {"mxfp4": (Operand.of_mxfp4, BLOCK), "nvfp4": (Operand.of_nvfp4, NVFP4_BLOCK)}
"""A format of experts -> a matrix from its bytes and linear scales, and the elements that share one."""


@dataclasses.dataclass
class MoEInputs:
    """Tensors of one call of ``cutlass_fused_moe`` with MXFP4 or NVFP4 weights.

    Shapes as that function documents them: M tokens, hidden H, intermediate I, E local experts; FC1 has up rows alone
    with ``relu2``.  Weights are bytes, block
    scales 128x4 bytes ``[E, pad128(rows), pad4(K / 32)]``, or ``K / 16`` of NVFP4.  ``fc1_global`` and ``fc2_global``
    are ``None`` for W4A16 with MXFP4.
    Expert ids that are not this rank's, -1 among them, contribute nothing.
    """

    input: torch.Tensor
    token_selected_experts: torch.Tensor
    token_final_scales: torch.Tensor | None
    fc1_weights: torch.Tensor
    fc1_scales: torch.Tensor
    fc2_weights: torch.Tensor
    fc2_scales: torch.Tensor
    fc1_global: torch.Tensor | None = None
    fc2_global: torch.Tensor | None = None
    fc1_bias: torch.Tensor | None = None
    fc2_bias: torch.Tensor | None = None
    input_sf: torch.Tensor | None = None
    swizzled_input_sf: bool = True
    swiglu_alpha: torch.Tensor | None = None
    swiglu_beta: torch.Tensor | None = None
    swiglu_limit: torch.Tensor | None = None
    swiglu_step: bool = False
    relu2: bool = False
    output_dtype: torch.dtype = torch.bfloat16
    ep_size: int = 1
    ep_rank: int = 0
    weights: str = "mxfp4"

    @property
    def w4a16(self) -> bool:
        """Whether activations stay bfloat16; otherwise they are MXFP8."""
        return self.weights == "nvfp4" or self.fc1_global is None

    @property
    def activation_type(self) -> ActivationType:
        """The activation as an ActivationType, whose numbers the kernels take."""
        if self.relu2:
            return ActivationType.Relu2
        return ActivationType.SwigluStep if self.swiglu_step else ActivationType.Swiglu

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``cutlass_fused_moe``."""
        fc1, fc2 = self.fc1_scales, self.fc2_scales
        if self.weights == "nvfp4":
            fc1, fc2 = fc1.view(torch.float8_e4m3fn), fc2.view(torch.float8_e4m3fn)
        scales = [fc1, fc2] if self.fc1_global is None else [fc1, self.fc1_global, fc2, self.fc2_global]
        return {
            "input": self.input,
            "token_selected_experts": self.token_selected_experts,
            "token_final_scales": self.token_final_scales,
            "fc1_expert_weights": self.fc1_weights,
            "fc2_expert_weights": self.fc2_weights,
            "output_dtype": self.output_dtype,
            "quant_scales": scales,
            "fc1_expert_biases": self.fc1_bias,
            "fc2_expert_biases": self.fc2_bias,
            "input_sf": self.input_sf,
            "swizzled_input_sf": self.swizzled_input_sf,
            "swiglu_alpha": self.swiglu_alpha,
            "swiglu_beta": self.swiglu_beta,
            "swiglu_limit": self.swiglu_limit,
            "activation_type": self.activation_type,
            "ep_size": self.ep_size,
            "ep_rank": self.ep_rank,
            "use_mxfp8_act_scaling": not self.w4a16,
            "use_w4_group_scaling": self.w4a16,
        }


def _activations(inputs: MoEInputs) -> Operand:
    """The tokens that FC1 multiplies, ``[M, H]``."""
    tokens, hidden = inputs.input.shape
    if inputs.w4a16:
        return Operand.of_bf16(inputs.input)
    if inputs.input.dtype != torch.float8_e4m3fn:
        return Operand.of_mxfp8(*quantize_mxfp8(inputs.input, saturates=True))
    assert inputs.input_sf is not None
    if inputs.swizzled_input_sf:
        flat = inputs.input_sf.view(torch.uint8).flatten()
        rows = tokens + -tokens % 128
        scales = unswizzle_scales(flat.view(rows, -1), tokens, hidden // BLOCK)
    else:
        scales = inputs.input_sf.view(tokens, hidden // BLOCK)
    return Operand.of_mxfp8(inputs.input, scales)


def _entry(values: torch.Tensor | None, expert: int, absent: float) -> float:
    return absent if values is None else float(values[expert])


def _bias(bias: torch.Tensor | None, expert: int) -> torch.Tensor | float:
    return 0.0 if bias is None else bias[expert].double()


def _gemm(
    x: Operand,
    x_error: torch.Tensor | None,
    weights: str,
    packed: torch.Tensor,
    swizzled: torch.Tensor,
    accumulation: Accumulation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x @ w.T`` of one expert's packed weights, and its bound when ``x`` itself is known to within ``x_error``."""
    rows, k, (operand, block) = packed.shape[0], 2 * packed.shape[1], WEIGHTS[weights]
    w = operand(packed, unswizzle_scales(swizzled, rows, -(-k // block)))
    error = dot_error(x, w, accumulation, x_error=x_error)
    return x.values @ w.values.T, error if x_error is None else error + x_error @ w.values.abs().T


def expert_reference(
    inputs: MoEInputs, x: Operand, expert: int, accumulation: Accumulation
) -> tuple[torch.Tensor, torch.Tensor]:
    """One local expert applied to the rows ``x``: float64 ``[m, H]`` before the routing weight, and its bound."""
    alpha = _entry(inputs.swiglu_alpha, expert, 1.0)
    beta = _entry(inputs.swiglu_beta, expert, 0.0)
    limit = _entry(inputs.swiglu_limit, expert, 7.0 if inputs.swiglu_step else torch.inf)

    form = inputs.weights
    product, error = _gemm(x, None, form, inputs.fc1_weights[expert], inputs.fc1_scales[expert], accumulation)
    factor = _entry(inputs.fc1_global, expert, 1.0)
    hidden = product * factor + _bias(inputs.fc1_bias, expert)
    error = affine_error(product, error, factor, hidden)
    if inputs.relu2:
        activation, error = relu2(hidden, error)
    else:
        up, gate = hidden.chunk(2, dim=-1)
        up_error, gate_error = error.chunk(2, dim=-1)
        if inputs.swiglu_step:
            activation, error = swiglu_step(up, gate, up_error, gate_error, limit)
        else:
            activation, error = swiglu(up, gate, up_error, gate_error, alpha, beta, limit)

    requantize = round_to_bfloat16 if inputs.w4a16 else requantize_mxfp8
    intermediate, error = requantize(activation, error)
    product, error = _gemm(
        intermediate, error, form, inputs.fc2_weights[expert], inputs.fc2_scales[expert], accumulation
    )
    factor = _entry(inputs.fc2_global, expert, 1.0)
    result = product * factor + _bias(inputs.fc2_bias, expert)
    return result, affine_error(product, error, factor, result)


def moe_reference(inputs: MoEInputs, accumulation: Accumulation = ANY_ORDER) -> tuple[torch.Tensor, torch.Tensor]:
    """The MoE layer of ``cutlass_fused_moe`` in float64, and how far float32 may lie from it.

    Works on the device of the inputs and dequantizes one expert at a time.

    Parameters
    ----------
    inputs : MoEInputs
        The call.
    accumulation : Accumulation
        The way the implementation under test sums; by default float32 additions in any order.

    Returns
    -------
    reference : torch.Tensor
        float64 ``[M, H]``.
    bound : torch.Tensor
        float64 ``[M, H]``: the implementation's float32 result, before it is rounded to the output dtype, lies within
        ``bound`` of ``reference``.  :func:`~flashinfer.testing.check_within_bound` compares.

    Notes
    -----

    ``error_bounds`` derives the parts.  The sum over a token's experts adds ``top_k`` roundings of partial sums, each
    at most ``u`` times the sum of the magnitudes.
    """
    x = _activations(inputs)
    tokens, hidden = x.values.shape
    experts = inputs.fc1_weights.shape[0]
    reference = torch.zeros((tokens, hidden), dtype=torch.float64, device=x.values.device)
    bound, magnitude = torch.zeros_like(reference), torch.zeros_like(reference)
    ids = inputs.token_selected_experts.long() - inputs.ep_rank * experts
    top_k = ids.shape[1]
    weights = inputs.token_final_scales
    weights = torch.ones(ids.shape, device=x.values.device).double() if weights is None else weights.double()
    for expert in range(experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        result, error = expert_reference(inputs, x[token], expert, accumulation)
        weight = weights[token, slot].unsqueeze(-1)
        weighted = result * weight
        reference.index_add_(0, token, weighted)
        magnitude.index_add_(0, token, weighted.abs())
        bound.index_add_(0, token, affine_error(result, error, weight, torch.zeros_like(result)))
    bound = bound + top_k * FLOAT32_ROUNDOFF * (magnitude + bound)
    # An infinite bound of an intermediate, times a weight of zero, is still a result that the contract does not fix.
    return reference, torch.where(torch.isnan(bound) & ~torch.isnan(reference), torch.inf, bound)
