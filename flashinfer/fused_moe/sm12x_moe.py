# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` with MXFP4 weights: from a call to the kernel module, or to the CPU backend.

A call of known shapes costs one dictionary look-up: its :class:`Plan` holds the validated sizes, the default tactics and
the workspace's size.  :func:`run_moe` is the whole way; ``torch.compile`` sees it as the opaque operator
``flashinfer::sm12x_cutlass_fused_moe``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..autotuner import AutoTuner
from ..utils import device_support_pdl
from . import sm12x_dispatch as dispatch
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


_plans: dict[Any, Plan] = {}


def _checks_now() -> bool:
    return dispatch.checks_values() and not torch.cuda.is_current_stream_capturing()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


def run_moe(
    mode: Mode,
    output: torch.Tensor | None,
    output_dtype: torch.dtype,
    input: torch.Tensor,
    input_sf: torch.Tensor | None,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc1_expert_biases: torch.Tensor | None,
    fc2_expert_weights: torch.Tensor,
    fc2_expert_biases: torch.Tensor | None,
    quant_scales: Sequence[torch.Tensor],
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    swizzled_input_sf: bool,
    parallel: tuple[int, int, int, int],
    enable_alltoall: bool,
    tune_max_num_tokens: int,
    enable_pdl: bool | None,
    profile_ids: Sequence[int] | None,
    workspace_buffer: torch.Tensor | None,
) -> torch.Tensor:
    """Validate, plan, launch; returns the output, which is allocated when ``output`` is None.

    ``parallel`` is ``(tp_size, tp_rank, ep_size, ep_rank)``; the rest is named as in ``cutlass_fused_moe``.
    """
    device = input.device
    tensors = (
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
        *(quant_scales if isinstance(quant_scales, (list, tuple)) else ()),
    )
    try:
        signature = tuple([None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors])
        key = (mode, output_dtype, swizzled_input_sf, parallel, signature)
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # something is no tensor: validation says what
        key = plan = None
    if plan is None:
        tp_size, tp_rank, ep_size, ep_rank = parallel
        problem = validate_moe(
            mode,
            input=input,
            input_sf=input_sf,
            token_selected_experts=token_selected_experts,
            token_final_scales=token_final_scales,
            fc1_expert_weights=fc1_expert_weights,
            fc1_expert_biases=fc1_expert_biases,
            fc2_expert_weights=fc2_expert_weights,
            fc2_expert_biases=fc2_expert_biases,
            quant_scales=quant_scales,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            swiglu_limit=swiglu_limit,
            output=output,
            output_dtype=output_dtype,
            swizzled_input_sf=swizzled_input_sf,
            tp_size=tp_size,
            tp_rank=tp_rank,
            ep_size=ep_size,
            ep_rank=ep_rank,
        )
        plan = make_plan(problem, device)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan

    problem = plan.problem
    on_cpu = device.type == "cpu"
    if not enable_alltoall and (on_cpu or _checks_now()):
        check_expert_ids(token_selected_experts, problem.num_experts_total)
    if profile_ids is not None:
        check_profile_ids(profile_ids, mode)
    if workspace_buffer is not None:
        check_workspace(workspace_buffer, plan.workspace_bytes, device, "cutlass_fused_moe_workspace_size() tells it")
    if output is None:
        output = torch.empty((problem.num_tokens, problem.hidden), dtype=output_dtype, device=device)
    if problem.num_tokens == 0:
        return output

    if on_cpu:
        from .sm12x_cpu import moe_cpu

        moe_cpu(
            problem,
            output,
            input,
            input_sf,
            token_selected_experts,
            token_final_scales,
            fc1_expert_weights,
            fc1_expert_biases,
            fc2_expert_weights,
            fc2_expert_biases,
            quant_scales,
            swiglu_alpha,
            swiglu_beta,
            swiglu_limit,
            swizzled_input_sf,
        )
        return output

    if token_final_scales is None:
        if plan.unit_scales is None:
            plan.unit_scales = torch.ones(token_selected_experts.shape, dtype=torch.float32, device=device)
        token_final_scales = plan.unit_scales
    if workspace_buffer is None:
        workspace_buffer = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    if enable_pdl is None:
        enable_pdl = device_support_pdl(device)
    fc1_sf, fc2_sf = quant_scales[0], quant_scales[-1 if mode is Mode.W4A16 else 2]
    misaligned = (
        input.data_ptr()
        | output.data_ptr()
        | fc1_expert_weights.data_ptr()
        | fc2_expert_weights.data_ptr()
        | fc1_sf.data_ptr()
        | fc2_sf.data_ptr()
    ) % POINTER_ALIGNMENT
    if misaligned:
        require_alignment(
            {
                "input": input,
                "output": output,
                "fc1_expert_weights": fc1_expert_weights,
                "fc2_expert_weights": fc2_expert_weights,
                "fc1's block scales (quant_scales)": fc1_sf,
                "fc2's block scales (quant_scales)": fc2_sf,
            }
        )
    arguments = (
        output,
        input,
        input_sf,
        token_selected_experts,
        token_final_scales,
        _bytes(fc1_expert_weights),
        _bytes(fc1_sf),
        None if mode is Mode.W4A16 else quant_scales[1],
        fc1_expert_biases,
        _bytes(fc2_expert_weights),
        _bytes(fc2_sf),
        None if mode is Mode.W4A16 else quant_scales[3],
        fc2_expert_biases,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
    )
    tactics = plan.tactics
    if profile_ids is not None:
        tactics = forced_tactics(profile_ids, tactics)
    elif AutoTuner._instance is not None:
        tactics = tuned_tactics(plan, arguments, swizzled_input_sf, tune_max_num_tokens, enable_pdl)
    launch(problem, arguments, workspace_buffer, swizzled_input_sf, tactics, enable_pdl)
    return output


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
    mode: int,
    swizzled_input_sf: bool,
    parallel: list[int],
    enable_alltoall: bool,
    tune_max_num_tokens: int,
    enable_pdl: bool | None,
    profile_ids: list[int] | None,
) -> None:
    tp_size, tp_rank, ep_size, ep_rank = parallel
    run_moe(
        Mode(mode),
        output,
        output.dtype,
        input,
        input_sf,
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights,
        fc1_expert_biases,
        fc2_expert_weights,
        fc2_expert_biases,
        quant_scales,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        swizzled_input_sf,
        (tp_size, tp_rank, ep_size, ep_rank),
        enable_alltoall,
        tune_max_num_tokens,
        enable_pdl,
        profile_ids,
        workspace_buffer,
    )


@_moe_operator.register_fake
def _moe_operator_fake(*_arguments: Any, **_named: Any) -> None:
    """Nothing is returned: the output is an argument, so its shape is known to whoever traces."""


def run_moe_compiled(
    mode: Mode,
    output: torch.Tensor | None,
    output_dtype: torch.dtype,
    input: torch.Tensor,
    input_sf: torch.Tensor | None,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc1_expert_biases: torch.Tensor | None,
    fc2_expert_weights: torch.Tensor,
    fc2_expert_biases: torch.Tensor | None,
    quant_scales: Sequence[torch.Tensor],
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    swizzled_input_sf: bool,
    parallel: tuple[int, int, int, int],
    enable_alltoall: bool,
    tune_max_num_tokens: int,
    enable_pdl: bool | None,
    profile_ids: Sequence[int] | None,
    workspace_buffer: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`run_moe` as ``torch.compile`` traces it: one opaque operator that writes ``output``."""
    if output is None:
        output = torch.empty(
            (input.shape[0], fc2_expert_weights.shape[1]),
            dtype=output_dtype,
            device=input.device,
        )
    torch.ops.flashinfer.sm12x_cutlass_fused_moe(
        output,
        workspace_buffer,
        input,
        input_sf,
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights,
        fc1_expert_biases,
        fc2_expert_weights,
        fc2_expert_biases,
        quant_scales,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        int(mode),
        swizzled_input_sf,
        parallel,
        enable_alltoall,
        tune_max_num_tokens,
        enable_pdl,
        profile_ids,
    )
    return output
