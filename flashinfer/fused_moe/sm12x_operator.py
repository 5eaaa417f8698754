# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` with MXFP4 weights: a call is validated, gets its tactics and a workspace, and is computed.

``torch.compile`` sees the opaque operator ``flashinfer::sm12x_cutlass_fused_moe``.
"""

from __future__ import annotations

import functools

import torch

from ..sm12x import tune
from ..sm12x.backend import kernels, plain_torch
from ..sm12x.device_class import GB10, DeviceClass
from ..sm12x.devices import checks_values
from ..sm12x.instances import INSTANCES
from ..sm12x.operator import OutputOperator
from .sm12x_autotuner import tuned_tactics
from .sm12x_cpu import moe_cpu
from .sm12x_launch import default_tactics, launch, plan_of
from .sm12x_planner import plan_mode, wanted_tactics
from .sm12x_router import choose_experts
from .sm12x_validation import Mode, MoECall, MoEProblem, check_expert_ids, check_limits, validate

FEW_PAIRS = 32
"""(token, slot) pairs whose experts a streamed layer can choose itself: kFewPairs."""

CHOOSING_TOKENS = 1
"""Callers give the layer logits up to so many tokens and ids from ``router_top_k`` beyond: on an H100 a step of one stream
gets 1.3 % shorter by it, one of four 0.5 % longer, since every block chooses."""


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
    tactics, needed, streamed = plan_of(backend, problem, wanted)
    workspace = call.workspace_buffer
    if workspace is None:
        workspace = backend.empty(needed)
    elif workspace.numel() < needed:
        raise ValueError(
            f"workspace_buffer holds {workspace.numel()} bytes; this call needs {needed} "
            "(cutlass_fused_moe_workspace_size() tells it)"
        )
    asks_tuner = wanted is None and backend.is_cuda and not tune.is_idle()
    if asks_tuner or not streamed or problem.num_tokens * problem.top_k > FEW_PAIRS:
        call = routed(call)
    if asks_tuner:
        if call.moe_mode == Mode.AUTO and tune.is_tuning():
            other = Mode.HALF_INPUT if problem.mode is Mode.W4A16 else Mode.W4A16
            tuned_tactics(backend, problem._replace(mode=other), call, tactics)  # for calls of other sizes
        tactics = tuned_tactics(backend, problem, call, tactics)
    if launch(backend, problem, call, workspace, tactics):
        return
    if wanted is not None:
        raise ValueError(
            f"profile_ids asks for {INSTANCES[tactics[0]].name}, which computes the layer in one launch that "
            "needs all SMs of the device, and this stream has fewer (a green context, or MPS with a limited "
            "share): pass tactics of a pair of GEMMs, or None"
        )
    # Not chosen by the module itself: a pair takes experts, not logits, and may be a module of its own, which a stream with
    # all SMs would build for nothing.
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
