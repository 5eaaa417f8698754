# SPDX-License-Identifier: Apache-2.0
"""What peers leave to others, one Triton kernel each: gpt-oss' gated activation, and the weighted sum of experts."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _swiglu_kernel(hidden, activated, bias, owners, inter, alpha, limit, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inter
    gate = tl.load(hidden + row * 2 * inter + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(hidden + row * 2 * inter + inter + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        of_expert = bias + tl.load(owners + row) * 2 * inter
        gate += tl.load(of_expert + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(of_expert + inter + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    value = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    tl.store(activated + row * inter + column, value.to(activated.dtype.element_ty), mask=inside)


def swiglu(
    hidden: torch.Tensor,
    activated: torch.Tensor,
    alpha: float,
    limit: float,
    bias: torch.Tensor | None = None,
    owners: torch.Tensor | None = None,
) -> None:
    """``activated[M, I] = g sigmoid(alpha g) (u + 1)`` of the clamped halves of ``hidden[M, 2 I] = [gate, up]``.

    ``bias[E, 2 I]`` is added to ``hidden`` first, that of expert ``owners[row]`` (int32 ``[M]``) to each row.
    """
    rows, inter = activated.shape
    kernel: Any = _swiglu_kernel
    grid = (rows, triton.cdiv(inter, _COLUMNS))
    kernel[grid](hidden, activated, bias, owners, inter, alpha, limit, HAS_BIAS=bias is not None, COLUMNS=_COLUMNS)


@triton.jit
def _sum_kernel(
    parts, weights, output, bias, ids, hidden, TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        part = tl.load(parts + (row * TOP_K + slot) * hidden + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            of_expert = bias + tl.load(ids + row * TOP_K + slot) * hidden
            part += tl.load(of_expert + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + row * TOP_K + slot)
    tl.store(output + row * hidden + column, total.to(output.dtype.element_ty), mask=inside)


def weighted_sum(
    parts: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    bias: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> None:
    """``output[M, H]`` from ``parts[M, top_k, H]`` and float32 ``weights[M, top_k]``; all contiguous, sums in float32.

    ``bias[E, H]`` is added to the parts first, that of expert ``ids[token, slot]`` (int32 ``[M, top_k]``) to each.
    """
    tokens, top_k, hidden = parts.shape
    kernel: Any = _sum_kernel
    grid = (tokens, triton.cdiv(hidden, _COLUMNS))
    given = {"TOP_K": top_k, "HAS_BIAS": bias is not None, "COLUMNS": _COLUMNS}
    kernel[grid](parts, weights, output, bias, ids, hidden, **given)
