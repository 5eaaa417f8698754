# SPDX-License-Identifier: Apache-2.0
"""Random grouped GEMMs on the CPU, for the virtual device."""

from __future__ import annotations

import dataclasses

import torch

from flashinfer.gemm import sm12x_group_gemm
from flashinfer.gemm.sm12x_group_gemm import GroupGemmProblem, scale_rows
from flashinfer.testing import quantize_mxfp4, quantize_mxfp8, swizzle_scales
from flashinfer.testing.virtual_device import VirtualDevice


def run_group_gemm(
    device: VirtualDevice,
    problem: GroupGemmProblem,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    tactic: int | None = None,
) -> None:
    """The kernels alone, into ``out``; nothing is validated."""
    call = sm12x_group_gemm.GroupGemmCall(
        out, a, b, a_scale, b_scale, m_indptr, problem.out_dtype, [1, 128, 128, 128], True, None
    )
    planned = sm12x_group_gemm.planned_tactic(device, problem)
    sm12x_group_gemm.launch(device, call, planned if tactic is None else tactic)


@dataclasses.dataclass
class CpuGroupGemm:
    """Arguments of a grouped GEMM on the CPU."""

    problem: GroupGemmProblem
    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    m_indptr: torch.Tensor

    def run(self, device: VirtualDevice, tactic: int | None = None) -> torch.Tensor:
        out = torch.full((self.problem.cum_m, self.problem.n), float("nan"), dtype=torch.bfloat16)
        operands = (self.a, self.b, self.a_scale, self.b_scale, self.m_indptr)
        run_group_gemm(device, self.problem, out, *operands, tactic)
        return out


def make_group_gemm(rows: list[int], n: int, k: int, seed: int) -> CpuGroupGemm:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    total, groups = sum(rows), len(rows)
    a, a_linear = quantize_mxfp8(torch.randn((total, k), generator=generator))
    b, b_linear = quantize_mxfp4(torch.randn((groups, n, k), generator=generator))
    ends = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    a_scale = torch.zeros((scale_rows(total, groups), a_linear.shape[1] + -a_linear.shape[1] % 4), dtype=torch.uint8)
    for group, (first, last) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        swizzled = swizzle_scales(a_linear[first:last])
        offset = (first + 127 * group) // 128 * 128
        a_scale[offset : offset + len(swizzled)] = swizzled
    problem = GroupGemmProblem(total, groups, n, k, torch.bfloat16)
    return CpuGroupGemm(problem, a, b.view(torch.uint8), a_scale, swizzle_scales(b_linear), ends)
