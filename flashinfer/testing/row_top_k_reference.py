# SPDX-License-Identifier: Apache-2.0
"""The results that ``dense_mx_top_k`` must find in given logits, and layers whose logits are unusual."""

from __future__ import annotations

from typing import Any

import torch

from .mxfp_formats import quantize_mxfp4, swizzle_scales

_HUGE = 1e300  # above every finite float32


def largest_of_rows(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 values and int64 places of the largest of each row: NaN first, then by size, then by place."""
    ordered = torch.where(logits.isnan(), torch.inf, logits.double().clamp(-torch.inf, _HUGE))
    places = ordered.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    return logits.float().gather(1, places), places


def with_unusual_outputs(kind: str, m: int, n: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of ``dense_block_scaled_top_k``, CPU tensors, whose logits are all zero but for their bias, and these
    logits.

    ``kind``: ``equal`` (all), ``nan`` (many), ``first nan``, ``-inf`` (all but the last), ``inf`` (some), ``zeros`` (-0
    before 0).
    """
    weight, linear = quantize_mxfp4(torch.zeros(n, 64))
    bias = torch.linspace(-5, 5, n)
    if kind == "equal":
        bias.fill_(-3.0)
    elif kind == "nan":
        bias[n // 3 :: 7] = torch.nan
        bias[n // 2] = torch.inf
    elif kind == "first nan":
        bias[0] = torch.nan
    elif kind == "-inf":
        bias[:-1] = -torch.inf
    elif kind == "inf":
        bias[n // 2 :: 5] = torch.inf
    else:
        bias.fill_(-0.0)
        bias[n // 2 :] = 0.0
    arguments = {
        "x": torch.zeros(m, 64, dtype=torch.bfloat16),
        "weight": weight,
        "weight_scale": swizzle_scales(linear),
        "bias": bias,
        "weight_format": "mxfp4",
    }
    return arguments, bias.bfloat16().expand(m, n).contiguous()
