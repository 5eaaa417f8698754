# SPDX-License-Identifier: Apache-2.0
"""Dot products as tensor cores add them up: the model whose error ``error_bounds`` bounds.

A step aligns its products and the sum so far to the largest exponent among them, cuts each toward zero to ``bits``
fraction bits below that, adds, and cuts the result to at most 23 fraction bits (arXiv 2512.07004).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .mxfp_formats import BLOCK, Operand, quantize_mxfp4, quantize_mxfp8

_LEAST_ALIGNMENT = 2.0**-133


def operand(values: torch.Tensor, form: str) -> Operand:
    """``values`` ``[rows, K]`` rounded to a format; ``K`` is a multiple of 32."""
    if form == "bf16":
        return Operand.of_bf16(values.bfloat16())
    return Operand.of_mxfp8(*quantize_mxfp8(values)) if form == "mxfp8" else Operand.of_mxfp4(*quantize_mxfp4(values))


def _powers(x: Operand) -> torch.Tensor:
    """2 to the exponent with which each element counts; 0 for 0."""
    least = x.least.repeat_interleave(BLOCK, -1)[:, : x.values.shape[1]]
    return torch.where(x.values == 0, 0.0, torch.maximum(_power_below(x.values.abs()), least))


def _cut(values: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return torch.trunc(values / unit) * unit


def _power_below(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 0.0, torch.ldexp(torch.ones_like(values), torch.frexp(values)[1] - 1))


def add_up(x: Operand, w: Operand, bits: int, elements: int, order: Iterable[int] | None = None) -> torch.Tensor:
    """``x @ w.T`` in steps of ``elements`` elements of K, float64 ``[m, n]``; takes memory for ``m n elements``
    products.

    ``order``: the order of the steps; ascending when omitted.
    """
    total = torch.zeros(len(x.values), len(w.values), dtype=torch.float64)
    x_powers, w_powers = _powers(x), _powers(w)
    for step in order if order is not None else range(-(-x.values.shape[1] // elements)):
        part = slice(step * elements, (step + 1) * elements)
        products = x.values[:, None, part] * w.values[:, part]
        largest = (x_powers[:, None, part] * w_powers[:, part]).amax(-1)
        unit = torch.maximum(largest, _power_below(total.abs())).clamp(min=_LEAST_ALIGNMENT) * 2.0**-bits
        total = _cut(products, unit.unsqueeze(-1)).sum(-1) + _cut(total, unit)
        total = _cut(total, _power_below(total.abs()).clamp(min=2.0**-126) * 2.0 ** -min(bits, 23))
    return total
