# SPDX-License-Identifier: Apache-2.0
"""MXFP4 and NVFP4 experts: a call is validated, gets its tactics and a workspace, and is computed.

Calls come from ``cutlass_fused_moe`` and ``moe_step`` by :data:`fused_moe`, whose experts come with each call, and from
:class:`SM12xMoELayer`, which keeps them.  ``torch.compile`` sees the opaque operator
``flashinfer::sm12x_cutlass_fused_moe``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..api_logging import flashinfer_api
from ..sm12x import tune
from ..sm12x.backend import checks_values, kernels, plain_torch
from ..sm12x.checks import Unchanged, describe, is_traced, require_computing_device, require_tensor_type
from ..sm12x.device_class import GB10, DeviceClass
from ..sm12x.devices import require_served
from ..sm12x.instances import INSTANCES
from ..sm12x.operator import OutputOperator
from ..tllm_enums import ActivationType
from .sm12x_autotuner import tuned_tactics
from .sm12x_cpu import moe_cpu
from .sm12x_launch import default_tactics, launch, plan_of
from .sm12x_planner import plan_mode, wanted_tactics
from .sm12x_router import choose_experts
from .sm12x_validation import (
    WEIGHT_DTYPES,
    Mode,
    MoECall,
    MoEProblem,
    check_expert_ids,
    check_limits,
    expert_tensors,
    options_of,
    require_experts,
    select_mode,
    tensors_of,
    validate,
)

FEW_ROUTED_ROWS = 32
"""routed rows whose experts a fused MoE kernel can choose itself: kFewRoutedRows."""

CHOOSING_TOKENS = 1
"""Callers give the layer logits up to so many tokens and ids from ``router_top_k`` beyond: on an H100 a step of one
stream gets 1.3 % shorter by it, one of four 0.5 % longer, since every block chooses."""


def compute(call: MoECall, problem: MoEProblem) -> None:
    """Compute a valid call that has its output."""
    device = call.input.device
    backend = kernels(device)
    if checks_values(device):
        check_limits(call.swiglu_limit)
        if not call.enable_alltoall and call.token_selected_experts is not None:
            check_expert_ids(call.token_selected_experts, problem.num_experts_total)
    device_class = GB10 if backend is None else backend.device_class  # the CPU computes what a GB10 would
    if problem.mode is Mode.AUTO:
        problem = in_planned_mode(problem, device_class)
    wanted = None
    if call.profile_ids is not None:
        rows = INSTANCES if backend is None else backend.tactics
        wanted = wanted_tactics(call.profile_ids, problem, rows)
    if problem.num_tokens == 0:
        return
    if backend is None:
        with plain_torch(device):
            moe_cpu(problem, routed(call))
        return
    tactics, needed, fused_moe = plan_of(backend, problem, wanted)
    workspace = call.workspace_buffer
    if workspace is None:
        workspace = backend.empty(needed)
    elif workspace.numel() < needed:
        raise ValueError(
            f"workspace_buffer holds {workspace.numel()} bytes; this call needs {needed} "
            "(cutlass_fused_moe_workspace_size() tells it)"
        )
    asks_tuner = wanted is None and backend.is_cuda and not tune.is_idle()
    if asks_tuner or not fused_moe or problem.num_tokens * problem.top_k > FEW_ROUTED_ROWS:
        call = routed(call)
    if asks_tuner:
        if call.moe_mode == Mode.AUTO and tune.is_tuning():
            other = Mode.BF16_INPUT if problem.mode is Mode.W4A16 else Mode.W4A16
            tuned_tactics(backend, problem._replace(mode=other), call, tactics)  # for calls of other sizes
        tactics = tuned_tactics(backend, problem, call, tactics)
    if launch(backend, problem, call, workspace, tactics):
        return
    if wanted is not None:
        raise ValueError(
            f"profile_ids asks for {INSTANCES[tactics[0]].name}, which computes the layer in one launch that "
            "needs all SMs of the device, and this stream has fewer (a green context, or MPS with a limited "
            "share): pass tactics of the two-kernel path, or None"
        )
    # Not chosen by the module itself: a pair takes experts, not logits, and may be a module of its own, which a stream
    # with all SMs would build for nothing.
    pair = default_tactics(problem, device_class, False)
    launch(backend, problem, routed(call), workspace, pair)


@functools.lru_cache(maxsize=4096)
def in_planned_mode(problem: MoEProblem, device: DeviceClass) -> MoEProblem:
    """The problem with :attr:`Mode.AUTO` resolved."""
    sizes = problem.num_tokens, problem.top_k, problem.routed_experts
    return problem._replace(mode=plan_mode(problem.mode, *sizes, device))


def routed(call: MoECall) -> MoECall:
    """The same call with its experts chosen, for what takes no logits."""
    if call.router_logits is None:
        return call
    with plain_torch(call.input.device):
        weights, ids = choose_experts(call.router_logits, call.top_k, call.is_padding)
    return call._replace(
        token_selected_experts=ids, token_final_scales=weights, router_logits=None, top_k=0, is_padding=None
    )


def _new_output(call: MoECall) -> torch.Tensor:
    # The extents as arguments of their own: in a tuple they take 0.7 us longer.
    rows, hidden = call.input.shape[0], call.fc2_expert_weights.shape[1]
    return torch.empty(rows, hidden, dtype=call.output_dtype, device=call.input.device)


fused_moe = OutputOperator(
    "sm12x_cutlass_fused_moe", MoECall, validate, compute, _new_output, ("output", "workspace_buffer", "barrier")
)


# --- the layer as an object -------------------------------------------------------------------------------------------

_TOKENS = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)


def _require_weights(weights: torch.Tensor) -> None:
    if weights.dtype not in WEIGHT_DTYPES:
        allowed = " or ".join(map(str, WEIGHT_DTYPES))
        raise ValueError(f"fc1_expert_weights is {describe(weights)}; it must be {allowed}")


class SM12xMoELayer:
    """The experts of :func:`~flashinfer.fused_moe.cutlass_fused_moe` with MXFP4 weights, made once from these.

    Weights, scales, biases and the activation's parameters are checked here, and again by the first call after one of
    them changed: the layer keeps the tensors, so that ``weight.data = other``, vLLM's sleep levels and a reload of
    weights are seen. A call checks its own tensors. Results and errors are those of the functions.

    Parameters
    ----------
    fc1_expert_weights, fc2_expert_weights, output_dtype, quant_scales, fc1_expert_biases, fc2_expert_biases, \
swiglu_alpha, swiglu_beta, swiglu_limit, tp_size, tp_rank, ep_size, ep_rank, enable_alltoall, use_w4_group_scaling, \
use_mxfp8_act_scaling, tune_max_num_tokens, activation_type, swizzled_input_sf
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
                f"use_w4_group_scaling {use_w4_group_scaling!r}; it must be Swiglu, SwigluBias, SwigluStep or Relu2, "
                "and a flag name the mode: use_w4_group_scaling (bfloat16), use_mxfp8_act_scaling (float8_e4m3fn, "
                "bfloat16 or float16), or both"
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
        """The layer's output ``[M, H]``; parameters and errors are those of ``cutlass_fused_moe``, and of ``moe_step``
        from ``router_logits`` on."""
        require_tensor_type("input", input)
        mode = self._modes.get(input.dtype, self._modes[_TOKENS[0]])  # validate() says which dtypes it takes
        tokens = output, workspace_buffer, input, input_sf, token_selected_experts, token_final_scales
        more = enable_pdl, profile_ids, next_weights, router_logits, top_k, is_padding, barrier
        call = self._call(mode, tokens, more)
        if not self._checks or is_traced((*tokens, *more)):
            return fused_moe(call)
        if not self._unchanged.holds(*self._tensors):
            self._require_experts()
        problem = self._checked.calls.find(tensors_of(call), *options_of(call)) or validate(call, self._checked)
        if output is None:
            output = _new_output(call)
            call = MoECall._make((output, *call[1:]))
        compute(call, problem)
        return output
