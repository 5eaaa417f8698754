# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` with MXFP4 weights: a call is validated, gets its tactics and a workspace, and is computed.

``torch.compile`` sees the opaque operator ``flashinfer::sm12x_cutlass_fused_moe``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..jit.fused_moe import gen_cutlass_fused_moe_sm120_instance_module, gen_cutlass_fused_moe_sm120_module
from ..jit.sm12x.instances import INSTANCES, MAIN_MODULE, candidates
from ..sm12x import tune
from ..sm12x.backend import Backend, kernels, plain_torch
from ..sm12x.devices import checks_values
from ..sm12x.operator import define, is_traced, validated
from .sm12x_cpu import moe_cpu
from .sm12x_planner import plan_moe, resolved_pair, wanted_tactics
from .sm12x_validation import SWIGLU_STEP, MoECall, MoEProblem, check_expert_ids, validate


def moe_module(backend: Backend) -> Any:
    """The loaded ``fused_moe_120``; built on first use."""
    return backend.module(gen_cutlass_fused_moe_sm120_module)


def ensure_instance(backend: Backend, tactic: int) -> None:
    """Make a tactic runnable: rows that are modules of their own are built and registered when first asked for."""
    if ("instance", tactic) in backend.memo:
        return
    if INSTANCES[tactic] not in MAIN_MODULE:
        module = backend.module(gen_cutlass_fused_moe_sm120_instance_module, tactic)
        moe_module(backend).sm12x_register_instance(tactic, module.sm12x_instance_address())
    backend.memo["instance", tactic] = True


def prepare(hidden: int, inter: int, device: torch.device | None = None) -> None:
    """Build the kernels that the planner may choose for layers of these sizes, or find them built.

    ``device`` is a CUDA device, by default the current one.
    """
    backend = kernels(torch.device("cuda", torch.cuda.current_device()) if device is None else device)
    assert backend is not None
    moe_module(backend)
    for row in candidates(backend.block_scaled_mma, 1, hidden, inter):  # a request would wait for modules of their own
        ensure_instance(backend, row.index)


def workspace_bytes(backend: Backend, problem: MoEProblem, in_bf16: bool) -> int:
    """Bytes of workspace; ``in_bf16`` where quantized activations may be kept as bfloat16, as other GPUs' MMAs want them."""
    size: int | None = backend.memo.get((problem, in_bf16))
    if size is None:
        sizes = problem.num_tokens, problem.hidden, problem.inter, problem.num_local_experts, problem.top_k
        ask = moe_module(backend).sm12x_moe_workspace_size
        size = max(1, int(backend.call(ask, *sizes, int(problem.mode), in_bf16, writes=())))
        backend.memo[problem, in_bf16] = size
    return size


@functools.lru_cache(maxsize=4096)
def default_tactics(
    problem: MoEProblem, block_scaled_mma: bool, unified_memory: bool, all_sms: bool = True
) -> tuple[int, int]:
    """The planner's choice; without ``all_sms`` of the device a pair of GEMMs, whose blocks do not wait for each other."""
    sizes = (problem.num_tokens, problem.top_k, problem.num_local_experts, problem.hidden, problem.inter)
    return plan_moe(*sizes, int(problem.mode), block_scaled_mma, all_sms, unified_memory)


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
    fc1_scales, fc1_global, fc2_scales, fc2_global = call.weight_scales
    launched: bool = backend.call(
        moe_module(backend).sm12x_moe_run,
        output,
        call.input,
        None if call.input_sf is None else as_bytes(call.input_sf),
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
        call.activation_type == SWIGLU_STEP,
        workspace,
        int(problem.mode),
        call.swizzled_input_sf,
        problem.first_expert,
        problem.num_experts_total,
        *tactics,
        backend.pdl(call.enable_pdl),
        writes=(output, workspace),
    )
    return launched


def compute(call: MoECall, problem: MoEProblem) -> None:
    """Compute a valid call that has its output."""
    device = call.input.device
    backend = kernels(device)
    if not call.enable_alltoall and checks_values(device):
        check_expert_ids(call.token_selected_experts, problem.num_experts_total)
    wanted = None
    if call.profile_ids is not None:
        wanted = wanted_tactics(call.profile_ids, problem.mode, INSTANCES if backend is None else backend.tactics)
    if problem.num_tokens == 0:
        return
    if backend is None:
        with plain_torch(device):
            moe_cpu(problem, call)
        return
    default = default_tactics(problem, backend.block_scaled_mma, backend.unified_memory)
    tactics = default if wanted is None else resolved_pair(wanted, default)
    first = INSTANCES[tactics[0]]
    dequantizes = first.multiplies == "mxfp8_as_bf16" and not first.streamed
    needed = workspace_bytes(backend, problem, dequantizes or not backend.block_scaled_mma)
    workspace = call.workspace_buffer
    if workspace is None:
        workspace = backend.empty(needed)
    elif workspace.numel() < needed:
        raise ValueError(
            f"workspace_buffer holds {workspace.numel()} bytes; this call needs {needed} "
            "(cutlass_fused_moe_workspace_size() tells it)"
        )
    if wanted is None and backend.is_cuda and not tune.is_idle():
        from .sm12x_autotuner import tuned_tactics

        tactics = tuned_tactics(backend, problem, call, default)
    if launch(backend, problem, call, workspace, tactics):
        return
    if wanted is not None:
        raise ValueError(
            f"profile_ids asks for {INSTANCES[tactics[0]].name}, which computes the layer in one launch that "
            "needs all SMs of the device, and this stream has fewer (a green context, or MPS with a limited "
            "share): pass tactics of a pair of GEMMs, or None"
        )
    pair = default_tactics(problem, backend.block_scaled_mma, backend.unified_memory, False)
    launch(backend, problem, call, workspace, pair)


def _run(call: MoECall) -> None:
    compute(call, validate(call))


_operator = define("sm12x_cutlass_fused_moe", MoECall, _run, mutates=("output", "workspace_buffer"))


_known: dict[Any, MoEProblem] = {}


def fused_moe(call: MoECall) -> torch.Tensor:
    """The output of a call, which is allocated where the call brings none.

    Raises
    ------
    TypeError, ValueError
        Before any launch, naming the argument, what it was and what it may be.
    """
    traced = is_traced((*call, *call.quant_scales) if isinstance(call.quant_scales, (list, tuple)) else call)
    problem = None if traced else validated(validate, call, _known)
    output = call.output
    if output is None:
        shape = call.input.shape[0], call.fc2_expert_weights.shape[1]
        output = torch.empty(shape, dtype=call.output_dtype, device=call.input.device)
        call = call._replace(output=output)
    if problem is None:
        _operator(call)
    else:
        compute(call, problem)
    return output
