# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of a token's experts, as one Triton kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _kernel(parts, weights, output, hidden, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        part = tl.load(parts + (row * TOP_K + slot) * hidden + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + row * TOP_K + slot)
    tl.store(output + row * hidden + column, total.to(output.dtype.element_ty), mask=inside)


def weighted_sum(parts: torch.Tensor, weights: torch.Tensor, output: torch.Tensor) -> None:
    """``output[M, H]`` from ``parts[M, top_k, H]`` and float32 ``weights[M, top_k]``; all contiguous, sums in float32."""
    tokens, top_k, hidden = parts.shape
    kernel: Any = _kernel
    kernel[(tokens, triton.cdiv(hidden, _COLUMNS))](parts, weights, output, hidden, TOP_K=top_k, COLUMNS=_COLUMNS)
