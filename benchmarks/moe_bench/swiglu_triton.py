# SPDX-License-Identifier: Apache-2.0
"""gpt-oss' gated activation between two GEMMs, as one Triton kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _kernel(hidden, activated, inter, alpha, limit, COLUMNS: tl.constexpr):
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
    kernel: Any = _kernel
    kernel[(rows, triton.cdiv(inter, _COLUMNS))](hidden, activated, inter, alpha, limit, COLUMNS=_COLUMNS)
