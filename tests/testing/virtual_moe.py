# SPDX-License-Identifier: Apache-2.0
"""The MoE layer's kernels on a virtual device, from inputs that :func:`flashinfer.testing.make_moe_inputs` makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashinfer.fused_moe.sm12x_validation import Mode, MoEProblem
from flashinfer.testing import MoEInputs, virtual_operators
from flashinfer.testing.virtual_device import VirtualDevice


def problem_of(inputs: MoEInputs, mode: int) -> MoEProblem:
    """The sizes of a layer."""
    tokens, top_k = inputs.token_selected_experts.shape
    experts, hidden, half = inputs.fc2_weights.shape
    first, total = inputs.ep_rank * experts, inputs.ep_size * experts
    return MoEProblem(Mode(mode), tokens, hidden, 2 * half, experts, top_k, first, total)


def arguments_of(inputs: MoEInputs, output: torch.Tensor) -> tuple[Any, ...]:
    """What ``sm12x_moe_run`` takes before the workspace."""
    return (
        output,
        inputs.input,
        inputs.input_sf,
        inputs.token_selected_experts,
        inputs.token_final_scales,
        inputs.fc1_weights.view(torch.uint8),
        inputs.fc1_scales.view(torch.uint8),
        inputs.fc1_global,
        inputs.fc1_bias,
        inputs.fc2_weights.view(torch.uint8),
        inputs.fc2_scales.view(torch.uint8),
        inputs.fc2_global,
        inputs.fc2_bias,
        inputs.swiglu_alpha,
        inputs.swiglu_beta,
        inputs.swiglu_limit,
    )


def run_moe(
    device: VirtualDevice, inputs: MoEInputs, mode: int, profile_ids: Sequence[int] | None = None
) -> torch.Tensor:
    """The layer's output, ``[tokens, hidden]``, in memory that held NaN before."""
    problem = problem_of(inputs, mode)
    output = torch.full((problem.num_tokens, problem.hidden), float("nan"), dtype=inputs.output_dtype)
    virtual_operators.run_moe(device, problem, arguments_of(inputs, output), inputs.swizzled_input_sf, profile_ids)
    return output
