# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM's kernels on a virtual device, from inputs that ``make_group_gemm_inputs`` makes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashinfer.gemm import sm12x_group_gemm
from flashinfer.gemm.sm12x_group_gemm import GroupGemmCall, GroupGemmProblem
from flashinfer.testing.virtual_device import VirtualDevice


def launch_group_gemm(
    device: VirtualDevice,
    operands: Mapping[str, torch.Tensor],
    tactic: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernels alone, into memory that held NaN before unless ``out`` is given; nothing is validated."""
    (rows, k), (groups, n, _) = operands["a"].shape, operands["b"].shape
    if out is None:
        out = torch.full((rows, n), torch.nan, dtype=torch.bfloat16)
    problem = GroupGemmProblem(rows, groups, n, k, out.dtype)
    options = {"out_dtype": out.dtype, "tiles": [1, 128, 128, 128], "swap_ab": True, "tactic": None}
    call = GroupGemmCall(**operands, **options, out=out)  # type: ignore[arg-type]
    planned = sm12x_group_gemm.planned_tactic(device, problem)
    sm12x_group_gemm.launch(device, call, planned if tactic is None else tactic)
    return out
