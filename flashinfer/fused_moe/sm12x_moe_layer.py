# SPDX-License-Identifier: Apache-2.0
"""A MoE layer as an object: its experts are checked when it is made, a call checks its tokens."""

from __future__ import annotations

from typing import Any

import torch

from ..api_logging import flashinfer_api
from ..sm12x.checks import Unchanged, describe, is_traced, require_computing_device, require_tensor_type
from ..sm12x.devices import require_served
from ..tllm_enums import ActivationType
from .sm12x_operator import compute, fused_moe
from .sm12x_validation import WEIGHT_DTYPES, Mode, MoECall, expert_tensors, require_experts, select_mode, validate

_TOKENS = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)


def _require_weights(weights: torch.Tensor) -> None:
    if weights.dtype not in WEIGHT_DTYPES:
        allowed = " or ".join(map(str, WEIGHT_DTYPES))
        raise ValueError(f"fc1_expert_weights is {describe(weights)}; it must be {allowed}")


class SM12xMoELayer:
    """The experts of :func:`~flashinfer.fused_moe.cutlass_fused_moe` with MXFP4 weights, made once from these.

    Weights, scales, biases and the activation's parameters are checked here, and again by the first call after one of them
    changed: the layer keeps the tensors, so that ``weight.data = other``, vLLM's sleep levels and a reload of weights
    are seen. A call checks its own tensors. Results and errors are those of the functions.

    Parameters
    ----------
    fc1_expert_weights, fc2_expert_weights, output_dtype, quant_scales, fc1_expert_biases, fc2_expert_biases, swiglu_alpha, \
swiglu_beta, swiglu_limit, tp_size, tp_rank, ep_size, ep_rank, enable_alltoall, use_w4_group_scaling, use_mxfp8_act_scaling, \
tune_max_num_tokens, activation_type, swizzled_input_sf
        The same as in ``cutlass_fused_moe``.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    NotImplementedError
        The weights are on a GPU that has no kernels of this family.
    """

    @flashinfer_api
    def __init__(
        self,
        fc1_expert_weights: torch.Tensor,
        fc2_expert_weights: torch.Tensor,
        output_dtype: torch.dtype,
        quant_scales: list[torch.Tensor],
        fc1_expert_biases: torch.Tensor | None = None,
        fc2_expert_biases: torch.Tensor | None = None,
        swiglu_alpha: torch.Tensor | None = None,
        swiglu_beta: torch.Tensor | None = None,
        swiglu_limit: torch.Tensor | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        ep_size: int = 1,
        ep_rank: int = 0,
        enable_alltoall: bool = False,
        use_w4_group_scaling: bool = False,
        use_mxfp8_act_scaling: bool = False,
        tune_max_num_tokens: int = 8192,
        activation_type: ActivationType = ActivationType.Swiglu,
        swizzled_input_sf: bool = True,
    ) -> None:
        require_tensor_type("fc1_expert_weights", fc1_expert_weights)
        flags = use_mxfp8_act_scaling, use_w4_group_scaling, False, False, False, activation_type
        _require_weights(fc1_expert_weights)
        modes = {dtype: select_mode(dtype, fc1_expert_weights.dtype, *flags) for dtype in _TOKENS}
        self._modes = {dtype: mode for dtype, mode in modes.items() if mode is not None}
        if not self._modes:
            raise ValueError(
                f"activation_type is {activation_type!r}, use_mxfp8_act_scaling {use_mxfp8_act_scaling!r}, "
                f"use_w4_group_scaling {use_w4_group_scaling!r}; it must be Swiglu, SwigluBias, SwigluStep or Relu2, and a "
                "flag name the mode: use_w4_group_scaling (bfloat16), use_mxfp8_act_scaling (float8_e4m3fn, bfloat16 or float16), or both"
            )
        # In the order of MoECall's fields.
        self._experts: Any = (
            fc1_expert_weights,
            fc1_expert_biases,
            fc2_expert_weights,
            fc2_expert_biases,
            list(quant_scales) if isinstance(quant_scales, list) else quant_scales,
            swiglu_alpha,
            swiglu_beta,
            swiglu_limit,
        )
        self._types: Any = int(activation_type), output_dtype
        ranks = tp_size, tp_rank, ep_size, ep_rank
        self._options: Any = swizzled_input_sf, *ranks, enable_alltoall, tune_max_num_tokens
        # Traced tensors have no addresses that could be checked; traced calls go to the operator, which checks when it
        # runs.
        self._checks = not is_traced(self._experts)
        if self._checks:
            self._require_experts()

    def _require_experts(self) -> None:
        weights = self._experts[0]
        _require_weights(weights)
        require_computing_device("fc1_expert_weights", weights)
        require_served("SM12xMoELayer", weights.device)
        mode = next(iter(self._modes.values()))
        call = self._call(mode, (None, None, weights, None, None, None), (None,) * 7)  # no routing is looked at
        self._checked = require_experts(call, weights.device)
        self._tensors = expert_tensors(call)
        self._unchanged = Unchanged(*self._tensors)

    def _call(self, mode: Mode, tokens: tuple[Any, ...], more: tuple[Any, ...]) -> MoECall:
        return MoECall._make((*tokens, *self._experts, *self._types, mode.value, *self._options, *more))

    @flashinfer_api
    def run(
        self,
        input: torch.Tensor,
        token_selected_experts: torch.Tensor | None = None,
        token_final_scales: torch.Tensor | None = None,
        *,
        input_sf: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        workspace_buffer: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        profile_ids: list[int] | None = None,
        router_logits: torch.Tensor | None = None,
        top_k: int = 0,
        is_padding: torch.Tensor | None = None,
        barrier: torch.Tensor | None = None,
        next_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output ``[M, H]``; parameters and errors are those of ``cutlass_fused_moe``, and of ``moe_step`` from
        ``router_logits`` on."""
        require_tensor_type("input", input)
        mode = self._modes.get(input.dtype, self._modes[_TOKENS[0]])  # validate() says which dtypes it takes
        tokens = output, workspace_buffer, input, input_sf, token_selected_experts, token_final_scales
        more = enable_pdl, profile_ids, next_weights, router_logits, top_k, is_padding, barrier
        call = self._call(mode, tokens, more)
        if not self._checks or is_traced(tokens) or is_traced(more):
            return fused_moe(call)
        if not self._unchanged.holds(*self._tensors):
            self._require_experts()
        problem = validate(call, self._checked)
        if output is None:
            output = fused_moe.new_output(call)
            call = MoECall._make((output, *call[1:]))
        compute(call, problem)
        return output
