# SPDX-License-Identifier: Apache-2.0
"""Experts of transformers' gpt-oss with MXFP8 activations, as W4A8 has them: in float32, quantized where the
contract says. Experts of other models, and random weights."""

from __future__ import annotations

from collections.abc import Callable
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


def mixture(
    given: torch.Tensor,
    chances: torch.Tensor,
    ids: torch.Tensor,
    experts: list[dict[str, torch.Tensor]],
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rounded: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Experts with matrices of gate (w1), up (w3) and down (w2) in float32; ``rounded`` rounds an activation."""
    output = torch.zeros(given.shape)
    for token in range(len(given)):
        for chance, number in zip(chances[token], ids[token].tolist(), strict=True):
            matrices = experts[number]
            inner = activate(matrices["w1"] @ given[token], matrices["w3"] @ given[token])
            output[token] += chance * (matrices["w2"] @ rounded(inner))
    return output


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float = float("inf")
) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + beta)


def swiglu_step(gate: torch.Tensor, up: torch.Tensor, limit: float = 7.0) -> torch.Tensor:
    return torch.minimum(gate / (1 + torch.exp(-gate)), torch.tensor(limit)) * up.clamp(-limit, limit)
