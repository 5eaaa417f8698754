# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` with MXFP4 weights: from a call to the kernel module, or to the CPU backend.

The first call of a signature is validated and planned here; later ones are in :mod:`~.sm12x_signature_cache`.
``torch.compile`` sees the opaque operator ``flashinfer::sm12x_cutlass_fused_moe``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..sm12x_arguments import require_int
from ..testing import virtual_device, virtual_operators
from ..utils import device_support_pdl
from . import sm12x_dispatch as dispatch
from .sm12x_cpu import moe_cpu
from .sm12x_launch import Plan, forced_tactics, make_plan, wanted_tactics
from .sm12x_signature_cache import (
    MoETensors,
    ValidatedCall,
    kernel_arguments,
    remember,
    repeat,
    require_element_alignment,
)
from .sm12x_validation import Mode, MoEProblem, check_expert_ids, check_workspace, validate_moe

_MAX_PLANS = 4096  # distinct problems remembered before the memory starts anew
_WORKSPACE_HINT = "cutlass_fused_moe_workspace_size() tells it"


class MoECall(NamedTuple):
    """Arguments of one call, named as in ``cutlass_fused_moe``; ``parallel`` is ``(tp_size, tp_rank, ep_size, ep_rank)``."""

    mode: Mode
    output_dtype: torch.dtype
    swizzled_input_sf: bool
    parallel: tuple[int, int, int, int]
    tensors: MoETensors
    quant_scales: Sequence[torch.Tensor]
    enable_alltoall: bool
    tune_max_num_tokens: int
    enable_pdl: bool | None
    profile_ids: Sequence[int] | None


_plans: dict[tuple[MoEProblem, torch.device], Plan] = {}


def _validated_problem(call: MoECall) -> MoEProblem:
    tp_size, tp_rank, ep_size, ep_rank = call.parallel
    tensors = call.tensors._asdict()
    del tensors["workspace_buffer"]
    return validate_moe(
        call.mode,
        **tensors,
        quant_scales=call.quant_scales,
        output_dtype=call.output_dtype,
        swizzled_input_sf=call.swizzled_input_sf,
        tp_size=tp_size,
        tp_rank=tp_rank,
        ep_size=ep_size,
        ep_rank=ep_rank,
    )


def _plan(problem: MoEProblem, device: torch.device) -> Plan:
    """The one plan of ``problem``: it holds what the autotuner said."""
    plan = _plans.get((problem, device))
    if plan is None:
        plan = make_plan(problem, device)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[problem, device] = plan
    return plan


def _reads_values(device: torch.device) -> bool:
    """Whether expert ids are to be checked: always on the CPU, on CUDA when asked and no graph is captured."""
    if device.type == "cpu":
        return True
    return dispatch.checks_values() and not torch.cuda.is_current_stream_capturing()


def run_moe(call: MoECall, options: Hashable = None) -> torch.Tensor:
    """Validate, plan, compute; returns the output, which is allocated when the call brings none.

    With ``options`` a call on CUDA is remembered under them (:func:`~.sm12x_signature_cache.remember`).
    """
    problem = _validated_problem(call)
    require_int("tune_max_num_tokens", call.tune_max_num_tokens, 1)
    device = call.tensors.input.device
    plan = _plan(problem, device)
    if not call.enable_alltoall and _reads_values(device):
        check_expert_ids(call.tensors.token_selected_experts, problem.num_experts_total)
    wanted = None
    if call.profile_ids is not None:
        wanted = wanted_tactics(call.profile_ids, call.mode, dispatch.is_block_scaled(device))
    if call.tensors.workspace_buffer is not None:
        check_workspace(call.tensors.workspace_buffer, plan.workspace_bytes, device, _WORKSPACE_HINT)
    if device.type == "cpu" or problem.num_tokens == 0:
        return _run_here(call, plan, device, wanted)
    validated = ValidatedCall(
        plan,
        device,
        call.output_dtype,
        call.swizzled_input_sf,
        device_support_pdl(device) if call.enable_pdl is None else call.enable_pdl,
        None if wanted is None else forced_tactics(wanted, plan.tactics),
    )
    require_element_alignment(call.tensors, call.quant_scales)
    output = validated.run(call.tensors, call.quant_scales, call.tune_max_num_tokens)
    if options is not None and not dispatch.checks_values():
        remember(options, call.tensors, call.quant_scales, validated)
    return output


def _run_here(call: MoECall, plan: Plan, device: torch.device, wanted: tuple[int, int] | None) -> torch.Tensor:
    """A call on the CPU, by the CPU backend or on a virtual device; or one without tokens."""
    problem, output = plan.problem, call.tensors.output
    if output is None:
        output = torch.empty((problem.num_tokens, problem.hidden), dtype=call.output_dtype, device=device)
    if problem.num_tokens == 0:
        return output
    if (virtual := virtual_device.active()) is None:
        _run_cpu(problem, call, output)
        return output
    require_element_alignment(call.tensors, call.quant_scales)
    arguments = kernel_arguments(call.tensors, output, call.quant_scales, call.swizzled_input_sf)
    enable_pdl = True if call.enable_pdl is None else call.enable_pdl
    virtual_operators.run_moe(virtual, problem, arguments, call.swizzled_input_sf, wanted, enable_pdl)
    return output


def _run_cpu(problem: MoEProblem, call: MoECall, output: torch.Tensor) -> None:
    tensors = call.tensors
    moe_cpu(
        problem,
        output,
        tensors.input,
        tensors.input_sf,
        tensors.token_selected_experts,
        tensors.token_final_scales,
        tensors.fc1_expert_weights,
        tensors.fc1_expert_biases,
        tensors.fc2_expert_weights,
        tensors.fc2_expert_biases,
        call.quant_scales,
        tensors.swiglu_alpha,
        tensors.swiglu_beta,
        tensors.swiglu_limit,
        call.swizzled_input_sf,
    )


@torch.library.custom_op("flashinfer::sm12x_cutlass_fused_moe", mutates_args=("output", "workspace_buffer"))
def _moe_operator(
    output: torch.Tensor,
    workspace_buffer: torch.Tensor | None,
    input: torch.Tensor,
    input_sf: torch.Tensor | None,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc1_expert_biases: torch.Tensor | None,
    fc2_expert_weights: torch.Tensor,
    fc2_expert_biases: torch.Tensor | None,
    quant_scales: list[torch.Tensor],
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    activation_mode: int,  # "mode" is taken by torch.compile's own dispatch
    swizzled_input_sf: bool,
    parallel: list[int],
    enable_alltoall: bool,
    tune_max_num_tokens: int,
    enable_pdl: bool | None,
    profile_ids: list[int] | None,
) -> None:
    routing = token_selected_experts, token_final_scales
    weights = fc1_expert_weights, fc1_expert_biases, fc2_expert_weights, fc2_expert_biases
    activation = swiglu_alpha, swiglu_beta, swiglu_limit
    tensors = MoETensors(output, input, input_sf, *routing, *weights, *activation, workspace_buffer)
    tp_size, tp_rank, ep_size, ep_rank = parallel
    options = (
        "operator",
        input.shape,
        activation_mode,
        swizzled_input_sf,
        tp_size,
        tp_rank,
        ep_size,
        ep_rank,
        enable_alltoall,
        tune_max_num_tokens,
        enable_pdl,
        None if profile_ids is None else tuple(profile_ids),
        tuple([tensor is None for tensor in tensors]),
        dispatch.switches(),
    )
    if repeat(options, tensors, quant_scales, tune_max_num_tokens) is not None:
        return
    run_moe(
        MoECall(
            Mode(activation_mode),
            output.dtype,
            swizzled_input_sf,
            (tp_size, tp_rank, ep_size, ep_rank),
            tensors,
            quant_scales,
            enable_alltoall,
            tune_max_num_tokens,
            enable_pdl,
            profile_ids,
        ),
        options,
    )


@_moe_operator.register_fake
def _moe_operator_fake(*_arguments: Any, **_named: Any) -> None:
    """Nothing is returned: the output is an argument, so its shape is known to whoever traces."""


def run_moe_compiled(call: MoECall) -> torch.Tensor:
    """:func:`run_moe` as ``torch.compile`` traces it: one opaque operator that writes the output."""
    tensors = call.tensors
    output = tensors.output
    if output is None:
        output = torch.empty(
            (tensors.input.shape[0], tensors.fc2_expert_weights.shape[1]),
            dtype=call.output_dtype,
            device=tensors.input.device,
        )
    torch.ops.flashinfer.sm12x_cutlass_fused_moe(
        output,
        tensors.workspace_buffer,
        tensors.input,
        tensors.input_sf,
        tensors.token_selected_experts,
        tensors.token_final_scales,
        tensors.fc1_expert_weights,
        tensors.fc1_expert_biases,
        tensors.fc2_expert_weights,
        tensors.fc2_expert_biases,
        call.quant_scales,
        tensors.swiglu_alpha,
        tensors.swiglu_beta,
        tensors.swiglu_limit,
        int(call.mode),
        call.swizzled_input_sf,
        call.parallel,
        call.enable_alltoall,
        call.tune_max_num_tokens,
        call.enable_pdl,
        call.profile_ids,
    )
    return output
