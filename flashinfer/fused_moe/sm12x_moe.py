# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` with MXFP4 weights: from a call to the kernel module, or to the CPU backend.

A call of known shapes costs one dictionary look-up: its :class:`~.sm12x_plan.Plan` holds the validated sizes, the default
tactics and the workspace's size.  ``torch.compile`` sees the opaque operator ``flashinfer::sm12x_cutlass_fused_moe``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..autotuner import AutoTuner
from ..testing import virtual_device, virtual_operators
from ..utils import device_support_pdl
from . import sm12x_dispatch as dispatch
from .sm12x_cpu import moe_cpu
from .sm12x_plan import Plan, check_profile_ids, forced_tactics, launch, make_plan
from .sm12x_tuning import tuned_tactics
from .sm12x_validation import (
    POINTER_ALIGNMENT,
    Mode,
    check_expert_ids,
    check_workspace,
    require_alignment,
    validate_moe,
)

_MAX_PLANS = 4096  # distinct shapes remembered before the memory starts anew
_WORKSPACE_HINT = "cutlass_fused_moe_workspace_size() tells it"


class MoECall(NamedTuple):
    """Arguments of one call, named as in ``cutlass_fused_moe``; ``parallel`` is ``(tp_size, tp_rank, ep_size, ep_rank)``."""

    mode: Mode
    output_dtype: torch.dtype
    swizzled_input_sf: bool
    parallel: tuple[int, int, int, int]
    # From here to output: tensors whose metadata, with the options above, decides what a plan depends on.
    input: torch.Tensor
    token_selected_experts: torch.Tensor
    token_final_scales: torch.Tensor | None
    fc1_expert_weights: torch.Tensor
    fc2_expert_weights: torch.Tensor
    fc1_expert_biases: torch.Tensor | None
    fc2_expert_biases: torch.Tensor | None
    input_sf: torch.Tensor | None
    swiglu_alpha: torch.Tensor | None
    swiglu_beta: torch.Tensor | None
    swiglu_limit: torch.Tensor | None
    output: torch.Tensor | None
    quant_scales: Sequence[torch.Tensor]
    enable_alltoall: bool
    tune_max_num_tokens: int
    enable_pdl: bool | None
    profile_ids: Sequence[int] | None
    workspace_buffer: torch.Tensor | None


_OPTIONS = slice(0, MoECall._fields.index("input"))
_TENSORS = slice(MoECall._fields.index("input"), MoECall._fields.index("quant_scales"))
_plans: dict[Any, Plan] = {}


def _key(call: MoECall) -> Any:
    """What tells plans apart; ``None`` when an argument is no tensor, which validation then reports."""
    tensors: Any = call[_TENSORS]
    try:
        return call[_OPTIONS], tuple(
            [
                None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous())
                for t in (*tensors, *call.quant_scales)
            ]
        )
    except (AttributeError, TypeError):
        return None


def _new_plan(key: Any, call: MoECall) -> Plan:
    """Validate a call of unknown shapes, plan it and remember the plan."""
    tp_size, tp_rank, ep_size, ep_rank = call.parallel
    problem = validate_moe(
        call.mode,
        input=call.input,
        input_sf=call.input_sf,
        token_selected_experts=call.token_selected_experts,
        token_final_scales=call.token_final_scales,
        fc1_expert_weights=call.fc1_expert_weights,
        fc1_expert_biases=call.fc1_expert_biases,
        fc2_expert_weights=call.fc2_expert_weights,
        fc2_expert_biases=call.fc2_expert_biases,
        quant_scales=call.quant_scales,
        swiglu_alpha=call.swiglu_alpha,
        swiglu_beta=call.swiglu_beta,
        swiglu_limit=call.swiglu_limit,
        output=call.output,
        output_dtype=call.output_dtype,
        swizzled_input_sf=call.swizzled_input_sf,
        tp_size=tp_size,
        tp_rank=tp_rank,
        ep_size=ep_size,
        ep_rank=ep_rank,
    )
    plan = make_plan(problem, call.input.device)
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _reads_values(device: torch.device) -> bool:
    """Whether expert ids are to be checked: always on the CPU, on CUDA when asked and no graph is captured."""
    if device.type == "cpu":
        return True
    return dispatch.checks_values() and not torch.cuda.is_current_stream_capturing()


def run_moe(call: MoECall) -> torch.Tensor:
    """Validate, plan, compute; returns the output, which is allocated when the call brings none."""
    key = _key(call)
    plan = _plans.get(key)
    if plan is None:
        plan = _new_plan(key, call)
    problem, device = plan.problem, call.input.device
    if not call.enable_alltoall and _reads_values(device):
        check_expert_ids(call.token_selected_experts, problem.num_experts_total)
    if call.profile_ids is not None:
        check_profile_ids(call.profile_ids, call.mode)
    if call.workspace_buffer is not None:
        check_workspace(call.workspace_buffer, plan.workspace_bytes, device, _WORKSPACE_HINT)
    output = call.output
    if output is None:
        output = torch.empty((problem.num_tokens, problem.hidden), dtype=call.output_dtype, device=device)
    if problem.num_tokens == 0:
        return output
    if device.type != "cpu":
        _run_cuda(plan, call, output, device)
    elif (virtual := virtual_device.active()) is None:
        _run_cpu(plan, call, output)
    else:
        arguments = _kernel_arguments(plan, call, output, device)
        enable_pdl = True if call.enable_pdl is None else call.enable_pdl
        virtual_operators.run_moe(virtual, problem, arguments, call.swizzled_input_sf, call.profile_ids, enable_pdl)
    return output


def _run_cpu(plan: Plan, call: MoECall, output: torch.Tensor) -> None:
    moe_cpu(
        plan.problem,
        output,
        call.input,
        call.input_sf,
        call.token_selected_experts,
        call.token_final_scales,
        call.fc1_expert_weights,
        call.fc1_expert_biases,
        call.fc2_expert_weights,
        call.fc2_expert_biases,
        call.quant_scales,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        call.swizzled_input_sf,
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


def _kernel_arguments(plan: Plan, call: MoECall, output: torch.Tensor, device: torch.device) -> tuple[Any, ...]:
    """What ``sm12x_moe_run`` takes before the workspace, on the device of the call."""
    final_scales = call.token_final_scales
    if final_scales is None:
        if plan.unit_scales is None:
            shape = call.token_selected_experts.shape
            plan.unit_scales = torch.ones(shape, dtype=torch.float32, device=device)
        final_scales = plan.unit_scales
    if call.mode is Mode.W4A16:
        fc1_sf, fc2_sf = call.quant_scales
        fc1_global = fc2_global = None
    else:
        fc1_sf, fc1_global, fc2_sf, fc2_global = call.quant_scales
    fc1, fc2 = call.fc1_expert_weights, call.fc2_expert_weights
    if (
        call.input.data_ptr()
        | output.data_ptr()
        | fc1.data_ptr()
        | fc2.data_ptr()
        | fc1_sf.data_ptr()
        | fc2_sf.data_ptr()
    ) % POINTER_ALIGNMENT:
        require_alignment(
            {
                "input": call.input,
                "output": output,
                "fc1_expert_weights": fc1,
                "fc2_expert_weights": fc2,
                "fc1's block scales (quant_scales)": fc1_sf,
                "fc2's block scales (quant_scales)": fc2_sf,
            }
        )
    return (
        output,
        call.input,
        None if call.input_sf is None else _bytes(call.input_sf),
        call.token_selected_experts,
        final_scales,
        _bytes(fc1),
        _bytes(fc1_sf),
        fc1_global,
        call.fc1_expert_biases,
        _bytes(fc2),
        _bytes(fc2_sf),
        fc2_global,
        call.fc2_expert_biases,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
    )


def _run_cuda(plan: Plan, call: MoECall, output: torch.Tensor, device: torch.device) -> None:
    workspace = call.workspace_buffer
    if workspace is None:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    enable_pdl = call.enable_pdl
    if enable_pdl is None:
        enable_pdl = device_support_pdl(device)
    arguments = _kernel_arguments(plan, call, output, device)
    tactics = plan.tactics
    if call.profile_ids is not None:
        tactics = forced_tactics(call.profile_ids, tactics)
    elif AutoTuner._instance is not None:
        tactics = tuned_tactics(plan, arguments, call.swizzled_input_sf, call.tune_max_num_tokens, enable_pdl)
    launch(plan.problem, arguments, workspace, call.swizzled_input_sf, tactics, enable_pdl)


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
    tp_size, tp_rank, ep_size, ep_rank = parallel
    run_moe(
        MoECall(
            Mode(activation_mode),
            output.dtype,
            swizzled_input_sf,
            (tp_size, tp_rank, ep_size, ep_rank),
            input,
            token_selected_experts,
            token_final_scales,
            fc1_expert_weights,
            fc2_expert_weights,
            fc1_expert_biases,
            fc2_expert_biases,
            input_sf,
            swiglu_alpha,
            swiglu_beta,
            swiglu_limit,
            output,
            quant_scales,
            enable_alltoall,
            tune_max_num_tokens,
            enable_pdl,
            profile_ids,
            workspace_buffer,
        )
    )


@_moe_operator.register_fake
def _moe_operator_fake(*_arguments: Any, **_named: Any) -> None:
    """Nothing is returned: the output is an argument, so its shape is known to whoever traces."""


def run_moe_compiled(call: MoECall) -> torch.Tensor:
    """:func:`run_moe` as ``torch.compile`` traces it: one opaque operator that writes the output."""
    output = call.output
    if output is None:
        output = torch.empty(
            (call.input.shape[0], call.fc2_expert_weights.shape[1]),
            dtype=call.output_dtype,
            device=call.input.device,
        )
    torch.ops.flashinfer.sm12x_cutlass_fused_moe(
        output,
        call.workspace_buffer,
        call.input,
        call.input_sf,
        call.token_selected_experts,
        call.token_final_scales,
        call.fc1_expert_weights,
        call.fc1_expert_biases,
        call.fc2_expert_weights,
        call.fc2_expert_biases,
        call.quant_scales,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        int(call.mode),
        call.swizzled_input_sf,
        call.parallel,
        call.enable_alltoall,
        call.tune_max_num_tokens,
        call.enable_pdl,
        call.profile_ids,
    )
    return output
