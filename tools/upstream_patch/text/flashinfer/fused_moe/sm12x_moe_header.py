"""MoE layers with MXFP4 weights on SM120 and SM121 (``backend="sm12x"``).

Two GEMM kernels a layer: FC1 with bias and SwiGLU in its epilogue, FC2 with bias,
routing weights and the sum over a token's experts, whose order is fixed. The kernels
route by themselves; nothing waits on the host.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..autotuner import AutoTuner, DynamicTensorSpec, TunableRunner, TuningConfig
from ..jit.sm12x.heuristics import choose_moe
from ..jit.sm12x.instances import INSTANCES, index_of
from ..jit.sm12x.moe import gen_sm12x_moe_module
from ..utils import BackendSupportedError, device_support_pdl, get_compute_capability
from .sm12x_moe_checks import (
    BLOCK_SIZE,
    Mode,
    MoECall,
    MoEProblem,
    require_k_alignment,
    require_pairs,
    round_up,
    select_mode,
    validate,
)
from .utils import get_hybrid_num_tokens_buckets, make_hybrid_bucket_mapper


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


def _default_tactics(problem: MoEProblem) -> tuple[int, int]:
    row = choose_moe(
        problem.mode.activation,
        problem.num_tokens * problem.top_k,
        problem.num_local_experts,
    )
    return row.index, row.index


def _valid_rows(problem: MoEProblem) -> list[Any]:
    return [row for row in INSTANCES if row.activation == problem.mode.activation]
