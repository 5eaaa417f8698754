"""MoE layers with MXFP4 weights on SM120 and SM121 (``backend="sm12x"``).

Two GEMM kernels a layer: FC1 with bias and SwiGLU in its epilogue, FC2 with bias, routing weights and the sum over a
token's experts, whose order is fixed. A streamed row of the tables is one launch for both. The kernels route by
themselves; nothing waits on the host.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..autotuner import AutoTuner, DynamicTensorSpec, TunableRunner, TuningConfig
from ..jit.sm12x.heuristics import expected_rows, narrowest_that_holds
from ..jit.sm12x.instances import INSTANCES, Format, Instance, index_of
from ..jit.sm12x.moe import gen_sm12x_moe_module
from ..utils import BackendSupportedError, device_support_pdl, get_compute_capability
from .sm12x_moe_checks import (
    BLOCK_SIZE,
    SWIGLU_STEP,
    Mode,
    MoECall,
    MoEProblem,
    describe,
    require_k_alignment,
    require_pairs,
    round_up,
    select_mode,
    validate,
)


@functools.cache
def get_sm12x_moe_module():
    return gen_sm12x_moe_module().build_and_load()


def _workspace_bytes(problem: MoEProblem) -> int:
    return get_sm12x_moe_module().sm12x_moe_workspace_size(
        problem.num_tokens,
        problem.hidden,
        problem.inter,
        problem.num_local_experts,
        problem.top_k,
        int(problem.mode),
        False,
    )


# The streamed layer reads every weight once for each tile of 8 tokens: it is chosen as long as an expert that is hit
# can expect no more rows than this.
STREAMED_ROWS = 4.5


def choose_moe(
    activation: Format, num_rows: int, num_experts: int, hidden: int, inter: int, all_sms: bool = True
) -> Instance:
    """The row for a layer; ``num_rows`` is tokens times top_k.

    Blocks of a streamed layer wait for each other, so that without ``all_sms`` of the device only pairs of GEMMs are
    chosen from.
    """
    rows = expected_rows(num_rows, num_experts)
    fitting = [row for row in INSTANCES if row.activation == activation]
    if all_sms and rows <= STREAMED_ROWS:
        for row in fitting:
            if row.streamed and row.takes(num_rows, hidden, inter):
                return row
    return narrowest_that_holds(rows, [row for row in fitting if not row.streamed])


def _default_tactics(problem: MoEProblem, all_sms: bool = True) -> tuple[int, int]:
    rows = problem.num_tokens * problem.top_k
    sizes = problem.num_local_experts, problem.hidden, problem.inter
    row = choose_moe(problem.mode.activation, rows, *sizes, all_sms)
    return row.index, row.index


# take flashinfer/fused_moe/sm12x_planner.py: computes_layer go_together resolved_pair wanted_tactics
# take flashinfer/sm12x/tune.py: config
# take flashinfer/fused_moe/sm12x_launch.py: as_bytes


def _launch(problem: MoEProblem, call: MoECall, tactics: tuple[int, int]) -> bool:
    """Run a valid call that has an output and a workspace."""
    fc1_scales, fc1_global, fc2_scales, fc2_global = call.weight_scales
    return get_sm12x_moe_module().sm12x_moe_run(
        call.output,
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
        call.workspace_buffer,
        int(problem.mode),
        call.swizzled_input_sf,
        problem.first_expert,
        problem.num_experts_total,
        *tactics,
        call.enable_pdl,
    )


def _run(problem: MoEProblem, call: MoECall, tactics: tuple[int, int]) -> None:
    if not _launch(problem, call, tactics):
        # The stream has fewer SMs than the device (a green context, or MPS), and blocks of a streamed layer wait for
        # each other.
        _launch(problem, call, _default_tactics(problem, all_sms=False))


class Sm12xMoERunner(TunableRunner):
    """Times one layer with a given tactic for FC1 (``gemm_idx`` 1) or FC2 (2).

    FC2 starts to read its weights while FC1 still runs, so that only the time of the
    layer tells anything. Inputs are the activations and the two weights.
    """

    def __init__(self, problem: MoEProblem, call: MoECall, gemm_idx: int) -> None:
        self.problem = problem._replace(num_tokens=0)
        self.output_dtype = call.output_dtype
        self.swizzled_input_sf = call.swizzled_input_sf
        self.enable_pdl = call.enable_pdl
        self.gemm_idx = gemm_idx
        self._call_cache = call

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return (
            int(self.problem.mode),
            str(inputs[0].dtype),
            str(self.output_dtype),
            self.problem.top_k,
            self.problem.num_experts_total,
            self.swizzled_input_sf,
            self.enable_pdl,
        )

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[str]:
        problem = self.problem
        sizes = inputs[0].shape[0] * problem.top_k, problem.hidden, problem.inter
        return [
            row.name
            for row in INSTANCES
            if row.activation == problem.mode.activation
            and row.takes(*sizes)
            and not (row.streamed and self.gemm_idx == 2)
        ]

    def _profile(self, activations: torch.Tensor) -> tuple[MoEProblem, MoECall]:
        num_tokens, device = activations.shape[0], activations.device
        problem = self.problem._replace(num_tokens=num_tokens)
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand((num_tokens, problem.num_experts_total), generator=generator)
        ids = scores.topk(problem.top_k, dim=1).indices
        input_sf = None
        if problem.mode is Mode.MXFP8_INPUT:
            shape = (num_tokens, problem.hidden // BLOCK_SIZE)
            if self.swizzled_input_sf:
                shape = (round_up(num_tokens, 128), round_up(shape[1], 4))
            input_sf = torch.full(shape, 0x7F, dtype=torch.uint8, device=device)
        return problem, self._call_cache._replace(
            output=torch.empty((num_tokens, problem.hidden), dtype=self.output_dtype, device=device),
            workspace_buffer=torch.empty(_workspace_bytes(problem), dtype=torch.uint8, device=device),
            input=activations,
            input_sf=input_sf,
            token_selected_experts=ids.to(device=device, dtype=torch.int32),
            token_final_scales=torch.full((num_tokens, problem.top_k), 1 / problem.top_k, device=device),
        )

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs
    ) -> torch.Tensor:
        problem, call = self._profile(inputs[0])
        own = -1 if tactic == -1 else index_of(tactic)
        wanted = (own, -1) if self.gemm_idx == 1 else (-1, own)
        _run(problem, call, resolved_pair(wanted, _default_tactics(problem)))
        return call.output


def _tuned(problem: MoEProblem, call: MoECall) -> tuple[int, int]:
    tuner = AutoTuner.get()
    inputs = [call.input, call.fc1_expert_weights.view(torch.uint8), call.fc2_expert_weights.view(torch.uint8)]
    chosen = []
    for gemm_idx in (1, 2):
        _, tactic = tuner.choose_one(
            f"flashinfer::sm12x_moe::fc{gemm_idx}",
            [Sm12xMoERunner(problem, call, gemm_idx)],
            config(call.tune_max_num_tokens),
            inputs,
        )
        chosen.append(-1 if tactic == -1 else index_of(tactic))
    return resolved_pair(chosen, _default_tactics(problem))


def sm12x_mode(device: torch.device, input_dtype: torch.dtype, weight_dtype: torch.dtype, **flags) -> Mode:
    """The mode of a call; ``flags`` are the ``use_*`` flags and ``activation_type``."""
    major, minor = get_compute_capability(device)
    if major != 12:
        raise BackendSupportedError(f"backend='sm12x' is for SM120 and SM121, not SM{major}{minor}")
    mode = select_mode(input_dtype, weight_dtype, **flags)
    if mode is None:
        raise ValueError(
            "backend='sm12x' takes MXFP4 weights (uint8 or int64), SwiGLU, and "
            "use_mxfp8_act_scaling (W4A8) or use_w4_group_scaling (W4A16)"
        )
    return mode


def sm12x_fused_moe(call: MoECall) -> torch.Tensor:
    """:func:`flashinfer.fused_moe.cutlass_fused_moe` with MXFP4 weights.

    Hidden and intermediate size are multiples of 32, weights are packed e2m1
    ``(E, 2 * inter, hidden / 2)`` (stacked ``[up; gate]``) and
    ``(E, hidden, inter / 2)``, block scales UE8M0 in the 128x4 layout of each expert.
    ``quant_scales`` are ``[fc1_sf, fc1_global, fc2_sf, fc2_global]`` for W4A8 and
    ``[fc1_sf, fc2_sf]`` for W4A16. Expert ids of other ranks and -1 contribute
    nothing.
    """
    problem, device = validate(call), call.input.device
    if call.output is None:
        output = torch.empty((problem.num_tokens, problem.hidden), dtype=call.output_dtype, device=device)
        call = call._replace(output=output)
    if problem.num_tokens == 0:
        return call.output

    needed = _workspace_bytes(problem)
    if call.workspace_buffer is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=device)
        call = call._replace(workspace_buffer=workspace)
    elif call.workspace_buffer.numel() < needed:
        raise ValueError(
            f"workspace_buffer holds {call.workspace_buffer.numel()} bytes; this call "
            f"needs {needed} (cutlass_fused_moe_workspace_size() tells it)"
        )
    if call.enable_pdl is None:
        call = call._replace(enable_pdl=device_support_pdl(device))
    if call.profile_ids is not None:
        tactics = resolved_pair(wanted_tactics(call.profile_ids, problem.mode), _default_tactics(problem))
    else:
        tactics = _tuned(problem, call)
    _run(problem, call, tactics)
    return call.output


def sm12x_fused_moe_workspace_size(
    *,
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    ep_size: int,
    ep_rank: int,
    device: torch.device,
    **flags,
) -> int:
    """Bytes of ``workspace_buffer`` for up to ``max_num_tokens`` tokens, of sizes that
    :func:`flashinfer.fused_moe.cutlass_fused_moe_workspace_size` has checked.
    """
    mode = sm12x_mode(device, x_dtype, weight_dtype, **flags)
    require_k_alignment("hidden_size", hidden_size)
    require_k_alignment("intermediate_size", intermediate_size)
    require_pairs("max_num_tokens", max_num_tokens, top_k)
    experts = num_experts_total // ep_size
    return _workspace_bytes(
        MoEProblem(
            mode, max_num_tokens, hidden_size, intermediate_size, experts, top_k, ep_rank * experts, num_experts_total
        )
    )
