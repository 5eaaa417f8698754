# SPDX-License-Identifier: Apache-2.0
"""The parts that peers leave to others, one Triton kernel each: gpt-oss' gated activation, the squared ReLU, and the
weighted sum of experts."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _swiglu_kernel(hidden, activated, inter, alpha, limit, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inter
    gate = tl.load(hidden + row * 2 * inter + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(hidden + row * 2 * inter + inter + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    value = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    tl.store(activated + row * inter + column, value.to(activated.dtype.element_ty), mask=inside)


def swiglu(hidden: torch.Tensor, activated: torch.Tensor, alpha: float, limit: float) -> None:
    """``activated[M, I] = g sigmoid(alpha g) (u + 1)`` of the clamped halves of ``hidden[M, 2 I] = [gate, up]``."""
    rows, inter = activated.shape
    kernel: Any = _swiglu_kernel
    kernel[rows, triton.cdiv(inter, _COLUMNS)](hidden, activated, inter, alpha, limit, COLUMNS=_COLUMNS)


@triton.jit
def _relu2_kernel(hidden, activated, inter, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inter
    value = tl.maximum(tl.load(hidden + row * inter + column, mask=inside, other=0.0).to(tl.float32), 0.0)
    tl.store(activated + row * inter + column, (value * value).to(activated.dtype.element_ty), mask=inside)


def relu2(hidden: torch.Tensor, activated: torch.Tensor) -> None:
    """``activated[M, I] = max(hidden[M, I], 0) ** 2``."""
    rows, inter = activated.shape
    kernel: Any = _relu2_kernel
    kernel[rows, triton.cdiv(inter, _COLUMNS)](hidden, activated, inter, COLUMNS=_COLUMNS)


@triton.jit
def _sum_kernel(parts, weights, output, hidden, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        part = tl.load(parts + (row * TOP_K + slot) * hidden + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + row * TOP_K + slot)
    tl.store(output + row * hidden + column, total.to(output.dtype.element_ty), mask=inside)


def weighted_sum(parts: torch.Tensor, weights: torch.Tensor, output: torch.Tensor) -> None:
    """``output[M, H]`` from ``parts[M, top_k, H]`` and float32 ``weights[M, top_k]``; all contiguous, sums in
    float32."""
    tokens, top_k, hidden = parts.shape
    kernel: Any = _sum_kernel
    kernel[tokens, triton.cdiv(hidden, _COLUMNS)](parts, weights, output, hidden, TOP_K=top_k, COLUMNS=_COLUMNS)
