# SPDX-License-Identifier: Apache-2.0
"""One launch of the MoE layer's kernels: their module, a workspace's size, the planner's tactics.

Arguments cross to C++ by their places, in the order of ``moe_run``'s parameters: named, in a tuple or a map, they would
take 2 or 8 us longer.  ``tests/sm12x/test_bindings.py`` compares the names.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ..jit.fused_moe import (
    gen_cutlass_fused_moe_sm120_instance_module,
    gen_cutlass_fused_moe_sm120_module,
    gen_cutlass_fused_moe_sm120_nvfp4_module,
)
from ..sm12x.backend import Backend, kernels, workspace_size
from ..sm12x.device_class import DeviceClass
from ..sm12x.instances import INSTANCES, is_alone
from .sm12x_planner import plan_moe, resolved_pair
from .sm12x_validation import MoECall, MoEProblem


def moe_module(backend: Backend, weights: str) -> Any:
    """The loaded ``fused_moe_120``, or that of NVFP4 weights; built on first use."""
    if weights == "nvfp4":
        return backend.module(gen_cutlass_fused_moe_sm120_nvfp4_module)
    return backend.module(gen_cutlass_fused_moe_sm120_module)


def ensure_instance(backend: Backend, tactic: int) -> None:
    """Make a tactic runnable: rows that are modules of their own are built and registered when first asked for."""
    if ("instance", tactic) in backend.memo:
        return
    row = INSTANCES[tactic]
    if is_alone(row):
        module = backend.module(gen_cutlass_fused_moe_sm120_instance_module, tactic)
        moe_module(backend, row.weights).sm12x_register_instance(tactic, module.sm12x_instance_address())
    backend.memo["instance", tactic] = True


def prepare(hidden: int, inter: int, device: torch.device | None = None, weights: str = "mxfp4") -> None:
    """Build the kernels that the planner may choose for layers of these sizes and weights, or find them built.

    ``device`` is a CUDA device, by default the current one.
    """
    backend = kernels(torch.device("cuda", torch.cuda.current_device()) if device is None else device)
    assert backend is not None
    moe_module(backend, weights)
    rows = backend.device_class.candidates(1, hidden, inter, weights)
    for row in rows:  # a request would wait for modules of their own
        ensure_instance(backend, row.index)


def workspace_bytes(backend: Backend, problem: MoEProblem, in_bf16: bool) -> int:
    """Bytes of workspace; ``in_bf16`` where quantized activations may be kept as bfloat16, as other GPUs' MMAs want
    them.

    The module is asked, which calls build anyway: its launcher lays the parts out, and nothing else knows them.
    """
    sizes = problem.num_tokens, problem.hidden, problem.inter, problem.num_local_experts, problem.top_k
    return workspace_size(
        backend, moe_module(backend, problem.weights), "sm12x_moe_workspace_size", *sizes, int(problem.mode), in_bf16
    )


@functools.lru_cache(maxsize=4096)
def default_tactics(problem: MoEProblem, device: DeviceClass, all_sms: bool = True) -> tuple[int, int]:
    """The planner's choice; without ``all_sms`` of the device the two-kernel path, whose blocks do not wait for each
    other."""
    sizes = (problem.num_tokens, problem.top_k, problem.routed_experts, problem.hidden, problem.inter)
    return plan_moe(*sizes, int(problem.mode), device, all_sms, problem.weights)


class Plan(NamedTuple):
    """The tactics and workspace of calls of one problem.

    Attributes
    ----------
    tactics : tuple
        Tactics of FC1 and FC2: the planner's, unless others are wanted.
    workspace : int
        Bytes of workspace.
    fused_moe : bool
        Whether the layer is one fused MoE kernel.
    """

    tactics: tuple[int, int]
    workspace: int
    fused_moe: bool


def plan_of(backend: Backend, problem: MoEProblem, wanted: tuple[int, int] | None = None) -> Plan:
    """The plan of ``problem``, which the backend remembers; or, without a memo, the plan of ``wanted`` tactics
    (:func:`resolved_pair`)."""
    key = "moe plan", problem
    plan: Plan | None = backend.memo.get(key) if wanted is None else None
    if plan is None:
        device = backend.device_class
        default = default_tactics(problem, device)
        tactics = default if wanted is None else resolved_pair(wanted, default)
        first = INSTANCES[tactics[0]]
        dequantizes = first.compute == "mxfp8_as_bf16" and not first.split_k
        size = workspace_bytes(backend, problem, dequantizes or not device.mma_kinds)
        plan = Plan(tactics, size, first.split_k)
        if wanted is None:
            backend.memo[key] = plan
    return plan


def weight_scales(call: MoECall) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Block scales and global scale of FC1, then of FC2, of a valid call."""
    if len(call.quant_scales) == 2:
        return call.quant_scales[0], None, call.quant_scales[1], None
    fc1, fc1_global, fc2, fc2_global = call.quant_scales
    return fc1, fc1_global, fc2, fc2_global


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as the kernels' module takes packed weights and scales."""
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


def launch(
    backend: Backend, problem: MoEProblem, call: MoECall, workspace: torch.Tensor, tactics: tuple[int, int]
) -> bool:
    """Run the layer of a valid call that has an output.

    Returns ``False``, and has launched nothing, where ``tactics`` need all SMs of the device and the current stream has
    fewer (a green context, or MPS with a limited share).
    """
    for tactic in tactics:
        ensure_instance(backend, tactic)
    output = call.output
    assert output is not None
    fc1_scales, fc1_global, fc2_scales, fc2_global = weight_scales(call)
    launched: bool = backend.call(
        moe_module(backend, problem.weights).sm12x_moe_run,
        output,
        call.input,
        None if call.input_sf is None else as_bytes(call.input_sf),
        problem.top_k,
        call.token_selected_experts,
        call.token_final_scales,
        as_bytes(call.fc1_expert_weights),
        as_bytes(fc1_scales),
        fc1_global,
        call.fc1_expert_biases,
        as_bytes(call.fc2_expert_weights),
        as_bytes(fc2_scales),
        fc2_global,
        call.fc2_expert_biases,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        call.activation_type,
        workspace,
        int(problem.mode),
        call.swizzled_input_sf,
        problem.first_expert,
        problem.num_experts_total,
        *tactics,
        call.next_weights,
        call.router_logits,
        call.is_padding,
        call.barrier,
        backend.pdl(call.enable_pdl),
        writes=(output, workspace) if call.barrier is None else (output, workspace, call.barrier),
    )
    return launched
