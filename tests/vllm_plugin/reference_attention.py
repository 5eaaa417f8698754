# SPDX-License-Identifier: Apache-2.0
"""Causal attention with sinks and a window in PyTorch, in place of vLLM's attention kernel on the GPU."""

from __future__ import annotations

from typing import Any

import torch


def attended(layer: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The attention of the newest tokens ``[new, heads, size]`` over a sequence ``[tokens, kv_heads, size]``, in
    float32."""
    group, tokens, new = layer.num_heads // layer.num_kv_heads, len(keys), len(query)
    k, v = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * layer.impl.scale
    distance = torch.arange(tokens - new, tokens)[:, None] - torch.arange(tokens)
    scores.masked_fill_((distance < 0) | (distance >= (layer.sliding_window or tokens)), float("-inf"))
    sinks = layer.impl.sinks  # a draft model's layers have none
    sinks = torch.full((layer.num_heads,), float("-inf")) if sinks is None else sinks.float()
    weights = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, new, 1)], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v)


def forward(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """``vllm.model_executor.layers.attention.Attention.forward`` of a prefill that starts at position 0."""
    rows = (x.view(len(query), -1, layer.head_size) for x in (query, key, value))
    return attended(layer, *rows).flatten(1).to(query.dtype)
