# SPDX-License-Identifier: Apache-2.0
"""The bound on sums of few bits covers the published model, in any order of the steps."""

from __future__ import annotations

import pytest
import torch

from flashinfer.testing import (
    narrow_tensor_core,
)
from flashinfer.testing.error_bounds import dot_error
from flashinfer.testing.mxfp_formats import BLOCK, dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp4, quantize_mxfp8
from flashinfer.testing.narrow_sums import step_elements

HOPPER, B200 = 13, 25


def _cut(values: torch.Tensor, unit: torch.Tensor | float) -> torch.Tensor:
    return torch.trunc(values / unit) * unit


def _floor_power(values: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones_like(values), torch.frexp(values)[1] - 1)


def narrow_sum(x: torch.Tensor, w: torch.Tensor, bits: int, order: list[int], elements: int = BLOCK) -> torch.Tensor:
    """``x @ w.T`` step by step. Exponents are those of the values: MXFP8 and MXFP4 data without subnormal elements."""
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for step in order:
        taken = slice(step * elements, (step + 1) * elements)
        products = x[:, None, taken] * w[:, taken]
        factors = _floor_power(x[:, None, taken].abs()) * _floor_power(w[:, taken].abs())
        largest = torch.maximum(torch.where(products == 0, 0, factors).amax(-1), _floor_power(total.abs()))
        unit = (largest * 2.0**-bits).clamp(min=2.0**-1000)
        total = _cut(products, unit.unsqueeze(-1)).sum(-1) + _cut(total, unit)
        total = _cut(total, (_floor_power(total.abs()) * 2.0 ** -min(bits, 23)).clamp(min=2.0**-1000))
    return total


def _operands(data: str, k: int, seed: int, tokens: str = "mxfp8") -> tuple[torch.Tensor, torch.Tensor]:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (12, 20))
    if data == "one sign":
        x, w = x.abs(), w.abs()
    elif data == "wide":  # blocks at scales from 2^-12 to 2^12
        exponents = torch.randint(-12, 13, (1, k // BLOCK), generator=generator).repeat_interleave(BLOCK, -1)
        x = torch.ldexp(x, exponents)
    elif data == "cancelling":  # large sums that the last block takes away again
        x[:, -BLOCK:], w[:, -BLOCK:] = 100 * x[:, :BLOCK], -100 * w[:, :BLOCK]
        x[:, :BLOCK], w[:, :BLOCK] = x[:, -BLOCK:], -w[:, -BLOCK:]
    packed = dequantize_mxfp4(*quantize_mxfp4(x)) if tokens == "mxfp4" else dequantize_mxfp8(*quantize_mxfp8(x))
    return packed, dequantize_mxfp4(*quantize_mxfp4(w))


@pytest.mark.parametrize("bits", [9, HOPPER, B200])
@pytest.mark.parametrize("k", [32, 512, 544])
@pytest.mark.parametrize("data", ["normal", "one sign", "wide", "cancelling"])
@pytest.mark.parametrize("tokens", ["mxfp8", "mxfp4"])
def test_it_covers_every_order(tokens: str, data: str, k: int, bits: int) -> None:
    seed = k + bits
    print("seed", seed)
    x, w = _operands(data, k, seed, tokens)
    elements = step_elements(tokens, "mxfp4")
    assert elements == {"mxfp8": 32, "mxfp4": 64}[tokens]
    steps = -(-k // elements)
    generator = torch.Generator().manual_seed(seed)
    sums = torch.stack([x[:, i : i + elements] @ w[:, i : i + elements].T for i in range(0, k, elements)])
    orders = {
        "forward": list(range(steps)),
        "backward": list(range(steps))[::-1],
        "random": torch.randperm(steps, generator=generator).tolist(),
        "positive first": sums.mean((1, 2)).argsort(descending=True).tolist(),
    }
    exact = x @ w.T
    narrow, nothing = narrow_tensor_core(bits, tokens=tokens), torch.zeros(len(w), dtype=torch.float64)
    bound = dot_error(x, w, nothing, narrow)
    unsigned = dot_error(x, w, nothing, narrow, signs_known=False)
    assert (bound <= unsigned * (1 + 1e-9)).all()
    used = {}
    for name, order in orders.items():
        distance = (narrow_sum(x, w, bits, order, elements) - exact).abs()
        used[name] = float((distance / bound.clamp(min=1e-300)).max())
    print(used, "of the bound; the bound is at most", float((bound / (x.abs() @ w.abs().T)).max()), "of the magnitudes")
    assert max(used.values()) <= 1


def test_it_is_not_loose_by_orders() -> None:
    """At a layer's K the largest error is a good part of the bound, which is a small part of the results."""
    x, w = _operands("normal", 2880, 1)
    bound = dot_error(x, w, torch.zeros(len(w), dtype=torch.float64), narrow_tensor_core(HOPPER))
    exact = x @ w.T
    distance = (narrow_sum(x, w, HOPPER, list(range(2880 // BLOCK))) - exact).abs()
    print(
        f"{float((distance / bound).max()):.1%} of the bound used, {float(bound.mean() / exact.abs().mean()):.1%} of a result"
    )
    assert float((distance / bound).max()) > 0.02
    assert float(bound.mean() / exact.abs().mean()) < 0.3


def test_a_lattice_is_exact() -> None:
    """Small integers whose sums stay below 2^9 lose nothing in 13 bits; one more bit of them may."""
    print("seed", 3)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-2, 3, (5, 32), generator=generator).double()
    w = torch.randint(-1, 2, (7, 32), generator=generator).double()
    unit = torch.ones(7, dtype=torch.float64)
    assert (dot_error(x, w, unit, narrow_tensor_core(HOPPER)) == 0).all()
    assert torch.equal(narrow_sum(x, w, HOPPER, [0]), x @ w.T)
    assert (dot_error(64 * x + 1, w, unit, narrow_tensor_core(HOPPER)) > 0).any()
