# SPDX-License-Identifier: Apache-2.0
"""``group_gemm_mxfp4_nt_groupwise`` in float64, with the bound on any float32 implementation of it."""

from __future__ import annotations

import torch

from .error_bounds import ANY_ORDER, Accumulation, dot_error
from .mxfp_formats import BLOCK, Operand, unswizzle_scales


def padded_group_offsets(m_indptr: torch.Tensor) -> list[int]:
    """First row of each group's scales in ``a_scale``: each starts at a multiple of 128 rows.

    Group ``g`` of rows ``[m_indptr[g], m_indptr[g + 1])`` starts at ``(m_indptr[g] + 127 g) // 128 * 128``.
    """
    return [(int(first) + 127 * group) // 128 * 128 for group, first in enumerate(m_indptr.tolist())]


def group_gemm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    accumulation: Accumulation = ANY_ORDER,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped MXFP8 x MXFP4 GEMM: rows of group ``g`` times ``b[g]`` transposed.

    Parameters
    ----------
    a : torch.Tensor
        e4m3 or e5m2 ``[cum_m, k]``.
    b : torch.Tensor
        Packed e2m1 ``[groups, n, k / 2]``.
    a_scale, b_scale : torch.Tensor
        128x4 UE8M0 bytes: ``[rows, pad4(k / 32)]`` with each group padded to 128 rows (see
        :func:`padded_group_offsets`), and ``[groups, pad128(n), pad4(k / 32)]``.
    m_indptr : torch.Tensor
        int32 ``[groups + 1]``.
    accumulation : Accumulation
        The way the implementation under test sums.

    Returns
    -------
    reference, bound : torch.Tensor
        float64 ``[cum_m, n]``, as :func:`~flashinfer.testing.moe_reference` returns them.
    """
    groups, n, half = b.shape
    k, blocks = 2 * half, -(-2 * half // BLOCK)
    reference = torch.zeros((a.shape[0], n), dtype=torch.float64, device=a.device)
    bound = torch.zeros_like(reference)
    ends = m_indptr.tolist()
    rows_of_scales = a_scale.view(torch.uint8).view(-1, blocks + -blocks % 4)
    for group, offset in enumerate(padded_group_offsets(m_indptr)[:groups]):
        first, last = ends[group], ends[group + 1]
        rows = last - first
        if rows == 0:
            continue
        padded = rows + -rows % 128
        sf = unswizzle_scales(rows_of_scales[offset : offset + padded], rows, blocks)
        x = Operand.of_mxfp8(a[first:last], sf)
        w = Operand.of_mxfp4(b[group], unswizzle_scales(b_scale[group], n, blocks))
        assert w.values.shape == (n, k)
        reference[first:last] = x.values @ w.values.T
        bound[first:last] = dot_error(x, w, accumulation)
    return reference, bound
