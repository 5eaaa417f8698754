# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM's kernels on a virtual device, from inputs that ``make_group_gemm_inputs`` makes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashinfer.gemm import sm12x_group_gemm
from flashinfer.gemm.sm12x_group_gemm import GroupGemmCall
from flashinfer.testing.virtual_device import VirtualDevice


def launch_group_gemm(
    device: VirtualDevice,
    operands: Mapping[str, torch.Tensor],
    tactic: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernels alone, into memory that held NaN before unless ``out`` is given; nothing is validated."""
    if out is None:
        out = torch.full((operands["a"].shape[0], operands["b"].shape[1]), torch.nan, dtype=torch.bfloat16)
    call = GroupGemmCall(**operands, out=out, out_dtype=out.dtype, tiles=[1, 128, 128, 128], swap_ab=True)
    planned = sm12x_group_gemm.planned_tactic(device, call)
    sm12x_group_gemm.launch(device, call, planned if tactic is None else tactic)
    return out
