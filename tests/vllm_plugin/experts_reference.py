# SPDX-License-Identifier: Apache-2.0
"""Experts of transformers' gpt-oss with MXFP8 activations, as W4A8 has them: in float32, quantized where the
contract says. And random weights."""

from __future__ import annotations

from typing import Any

import torch


def _mxfp8(values: torch.Tensor) -> torch.Tensor:
    """To MXFP8 and back: e4m3 with a power-of-two scale per 32, ``amax / 448`` rounded up."""
    blocks = values.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax / 448))), 1.0)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def forward(
    experts: Any, hidden: torch.Tensor, router_indices: Any = None, routing_weights: Any = None
) -> torch.Tensor:
    """``GptOssExperts.forward`` of ``[tokens, hidden]``; ids and weights are ``[tokens, top_k]``."""
    given = _mxfp8(hidden.to(torch.bfloat16).float())
    output = torch.zeros_like(given)
    gate_up_proj, down_proj = experts.gate_up_proj.float(), experts.down_proj.float()
    for token, (ids, weights) in enumerate(zip(router_indices, routing_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate_up = given[token] @ gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
            gate, up = gate_up[0::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
            inner = _mxfp8(gate * torch.sigmoid(1.702 * gate) * (up + 1))
            output[token] += weight * (inner @ down_proj[expert] + experts.down_proj_bias[expert])
    return output.to(hidden.dtype)


def random_mxfp4(
    generator: torch.Generator, experts: int, rows: int, k: int, low: int = 121
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed values of experts' matrices ``[rows, k]``, and linear scale bytes of three octaves from ``low`` on."""
    values = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, generator=generator)
    return values, torch.randint(low, low + 3, (experts, rows, k // 32), dtype=torch.uint8, generator=generator)
