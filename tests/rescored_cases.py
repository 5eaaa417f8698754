# SPDX-License-Identifier: Apache-2.0
"""Rescored LM heads: a random weight in bf16 or MXINT8, with its coarse copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashinfer.quantization.block_scaled import quantize_weight
from flashinfer.testing import quantize_mxfp4, swizzle_scales, unswizzle_scales
from flashinfer.testing.mxfp_formats import Operand

UNUSUAL = ("equal", "nan", "first nan", "last nan", "-inf", "inf", "zeros", "nan in a fine row")


class Head(NamedTuple):
    """Arguments of ``dense_block_scaled_rescored``, but for groups and rescored."""

    x: torch.Tensor
    coarse: tuple[torch.Tensor, torch.Tensor]
    fine: tuple[torch.Tensor, torch.Tensor | None]
    bias: torch.Tensor | None
    named: dict[str, Any]
    fine_format: str = "bf16"

    def operand(self) -> Operand:
        values, scales = self.fine
        if scales is None:
            return Operand.of_bf16(values)
        return Operand.of_mxint8(values, unswizzle_scales(scales, len(values), values.shape[1] // 32))

    def expected_fine(self) -> torch.Tensor:
        """Fine logits of a head whose products are all zero or NaN, as its logits' dtype holds them."""
        assert self.bias is not None
        products = self.x.float() @ self.fine[0].float().T
        return (products + self.bias.float()).to(self.named["out_dtype"])

    def to(self, device: torch.device) -> Head:
        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        named = {name: moved(value) for name, value in self.named.items()}
        pairs = tuple(map(moved, self.coarse)), tuple(map(moved, self.fine))
        return Head(moved(self.x), *pairs, moved(self.bias), named, self.fine_format)

    def __str__(self) -> str:
        return f"{tuple(self.x.shape)} x {tuple(self.fine[0].shape)}, {self.named['weight_format']}, {self.fine_format}"


def make_head(
    m: int,
    n: int,
    k: int,
    seed: int,
    weights: str = "mxfp4",
    fine: str = "bf16",
    bias: torch.dtype | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Head:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    x, rows = (torch.randn(count, k, generator=generator).bfloat16() for count in (m, n))
    coarse = quantize_weight(rows, weights)
    alpha = coarse.global_scale if weights == "nvfp4" else torch.tensor([0.75])
    kept = quantize_weight(rows, "mxint8") if fine == "mxint8" else None
    return Head(
        x,
        (coarse.values, coarse.scales),
        (rows, None) if kept is None else (kept.values, kept.scales),
        None if bias is None else torch.randn(n, generator=generator).to(bias),
        {"weight_format": weights, "alpha": alpha, "out_dtype": out_dtype},
        fine,
    )


def unusual_head(kind: str, m: int, n: int, out_dtype: torch.dtype) -> tuple[Head, torch.Tensor]:
    """A head whose coarse logits are its bias, and these logits; the fine ones are, too, or NaN."""
    weight, linear = quantize_mxfp4(torch.zeros(n, 64))
    bias = torch.linspace(-5, 5, n)
    fine = torch.zeros(n, 64, dtype=torch.bfloat16)
    if kind == "equal":
        bias.fill_(-3.0)
    elif kind == "nan":
        bias[n // 3 :: 7] = torch.nan
        bias[n // 2] = torch.inf
    elif kind == "first nan":
        bias[0] = torch.nan
    elif kind == "last nan":
        bias[-40:] = torch.nan
    elif kind == "-inf":
        bias[:-1] = -torch.inf
    elif kind == "inf":
        bias[n // 2 :: 5] = torch.inf
    elif kind == "zeros":
        bias.fill_(-0.0)
        bias[n // 2 :] = 0.0
    else:
        fine[n - 3 :, 5] = torch.nan
    x = torch.ones(m, 64, dtype=torch.bfloat16)
    named = {"weight_format": "mxfp4", "out_dtype": out_dtype}
    coarse = (weight, swizzle_scales(linear))
    return Head(x, coarse, (fine, None), bias, named), bias.to(out_dtype).expand(m, n).contiguous()
