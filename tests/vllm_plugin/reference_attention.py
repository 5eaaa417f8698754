# SPDX-License-Identifier: Apache-2.0
"""Causal attention with sinks and a window over one whole sequence, in place of vLLM's attention kernel on the GPU."""

from __future__ import annotations

from typing import Any

import torch


def forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """``vllm.model_executor.layers.attention.Attention.forward`` of a prefill that starts at position 0."""
    tokens = query.shape[0]
    group = layer.num_heads // layer.num_kv_heads
    q = query.view(tokens, layer.num_heads, layer.head_size).float()
    k, v = (
        x.view(tokens, layer.num_kv_heads, layer.head_size).float().repeat_interleave(group, 1) for x in (key, value)
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.impl.scale
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    window = layer.sliding_window or tokens
    scores.masked_fill_((distance < 0) | (distance >= window), float("-inf"))
    sinks = layer.impl.sinks  # a draft model's layers have none
    sinks = torch.full((layer.num_heads,), float("-inf")) if sinks is None else sinks.float()
    sinks = sinks.view(-1, 1, 1).expand(-1, tokens, 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(tokens, -1).to(query.dtype)
