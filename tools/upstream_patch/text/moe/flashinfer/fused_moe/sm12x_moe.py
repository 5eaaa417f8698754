"""MoE layers with MXFP4 or NVFP4 weights on SM120 and SM121 (``backend="sm12x"``).

Two GEMM kernels a layer: FC1 with bias and activation in its epilogue, FC2 with bias, routing weights and the sum over
a token's experts, whose order is fixed. A streamed row of the tables is one launch for both. The kernels route by
themselves; nothing waits on the host.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ..autotuner import AutoTuner, DynamicTensorSpec, TunableRunner, TuningConfig
from ..jit.sm12x.heuristics import expected_rows, narrowest_that_holds
from ..jit.sm12x.instances import INSTANCES, MAX_EXPERTS, FUSED_MOE_ROUTED_ROWS, Format, Instance, index_of
from ..jit.sm12x.moe import gen_sm12x_moe_module
from ..utils import BackendSupportedError, device_support_pdl, get_compute_capability
from .sm12x_moe_checks import (
    BLOCK_SIZE,
    INPUT_DTYPES,
    Mode,
    MoECall,
    MoEProblem,
    describe,
    padded_scales,
    require_activation_bytes,
    require_int,
    require_k_alignment,
    require_output_dtype,
    require_pairs,
    require_parallel_sizes,
    select_mode,
    validate,
)


@functools.cache
def get_sm12x_moe_module():
    return gen_sm12x_moe_module().build_and_load()


def workspace_bytes(problem: MoEProblem) -> int:
    sizes = problem.num_tokens, problem.hidden, problem.inter, problem.num_local_experts, problem.top_k
    return get_sm12x_moe_module().sm12x_moe_workspace_size(*sizes, int(problem.mode), False)


# The fused MoE kernel reads every weight once for each tile of 8 tokens: it is chosen as long as an expert that is hit
# can expect no more rows than this.
FUSED_MOE_ROWS = 4.5


def choose_moe(
    activation: Format, weights: str, num_rows: int, num_experts: int, hidden: int, inter: int, all_sms: bool = True
) -> Instance:
    """The row for a layer; ``num_rows`` is tokens times top_k.

    Blocks of a fused MoE kernel wait for each other, so that without ``all_sms`` of the device only two-kernel tactics
    are chosen from.
    """
    rows = expected_rows(num_rows, num_experts)
    fitting = [row for row in INSTANCES if (row.activation, row.weights) == (activation, weights)]
    if all_sms and rows <= FUSED_MOE_ROWS:
        for row in fitting:
            if row.split_k and row.takes(num_rows, hidden, inter):
                return row
    return narrowest_that_holds(rows, [row for row in fitting if not row.split_k])


def default_tactics(problem: MoEProblem, all_sms: bool = True) -> tuple[int, int]:
    rows = problem.num_tokens * problem.top_k
    sizes = problem.routed_experts, problem.hidden, problem.inter
    row = choose_moe(problem.mode.activation, problem.weights, rows, *sizes, all_sms)
    return row.index, row.index


# take flashinfer/fused_moe/sm12x_planner.py: computes_layer go_together resolved_pair wanted_tactics
# take flashinfer/fused_moe/sm12x_launch.py: as_bytes weight_scales launch
# take flashinfer/sm12x/tune.py: Runner unit_scales config
# take flashinfer/fused_moe/sm12x_autotuner.py: OPERATORS _ROUTING_SEED SM12xMoERunner tuned_tactics
# take flashinfer/fused_moe/core.py: _reject_foreign_options _selected _workspace_problem
_MODE_PARAMETERS = tuple(inspect.signature(select_mode).parameters)[2:]


def _mode(given: dict[str, Any], device: torch.device, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> Mode:
    major, minor = get_compute_capability(device)
    if major != 12:
        raise BackendSupportedError(f"backend='sm12x' is for SM120 and SM121, not SM{major}{minor}")
    mode = select_mode(x_dtype, weight_dtype, **_selected(given, _MODE_PARAMETERS))
    if mode in (None, Mode.AUTO):
        raise ValueError(
            "backend='sm12x' takes packed e2m1 weights (uint8 or int64), SwiGLU or Relu2, "
            "and use_mxfp8_act_scaling (W4A8) or use_w4_group_scaling (W4A16)"
        )
    return mode


def sm12x_fused_moe(given: dict[str, Any]) -> torch.Tensor:
    """:func:`flashinfer.fused_moe.cutlass_fused_moe` with MXFP4 weights, from its arguments.

    Hidden and intermediate size are multiples of 32, weights are packed e2m1
    ``(E, 2 * inter, hidden / 2)`` (stacked ``[up; gate]``, with ``Relu2`` ``(E, inter, hidden / 2)``)
    and ``(E, hidden, inter / 2)``, block scales UE8M0 in the 128x4 layout of each expert.
    ``quant_scales`` are ``[fc1_sf, fc1_global, fc2_sf, fc2_global]`` for W4A8 and
    ``[fc1_sf, fc2_sf]`` for W4A16. NVFP4 weights (W4A16) take all four, with block
    scales of ``float8_e4m3fn``. Expert ids of other ranks and -1 contribute
    nothing.
    """
    foreign = "clamped_relu2_limit", "situ_beta", "situ_linear_beta"
    _reject_foreign_options(**_selected(given, ("min_latency_mode", "cluster_size", "cluster_rank", *foreign)))
    device = given["input"].device
    mode = _mode(given, device, given["input"].dtype, given["fc1_expert_weights"].dtype)
    given = {**given, "moe_mode": int(mode), "activation_type": int(given["activation_type"])}
    call = MoECall(**{name: given[name] for name in MoECall._fields if name in given})
    problem = validate(call)
    output = call.output
    if output is None:
        output = torch.empty((problem.num_tokens, problem.hidden), dtype=call.output_dtype, device=device)
    if problem.num_tokens == 0:
        return output

    needed, workspace = workspace_bytes(problem), call.workspace_buffer
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=device)
    elif workspace.numel() < needed:
        raise ValueError(
            f"workspace_buffer holds {workspace.numel()} bytes; this call "
            f"needs {needed} (cutlass_fused_moe_workspace_size() tells it)"
        )
    enable_pdl = device_support_pdl(device) if call.enable_pdl is None else call.enable_pdl
    call = call._replace(output=output, enable_pdl=enable_pdl)
    default = default_tactics(problem)
    if call.profile_ids is None:
        tactics = tuned_tactics(problem, call, default)
    else:
        tactics = resolved_pair(wanted_tactics(call.profile_ids, problem), default)
    if not launch(problem, call, workspace, tactics):
        launch(problem, call, workspace, default_tactics(problem, all_sms=False))
    return output


def sm12x_fused_moe_workspace_size(given: dict[str, Any]) -> int:
    """:func:`flashinfer.fused_moe.cutlass_fused_moe_workspace_size` with MXFP4 weights, from its arguments."""
    mode = _mode(given, given["device"], given["x_dtype"], given["weight_dtype"])
    return workspace_bytes(_workspace_problem(mode, given))
