# SPDX-License-Identifier: Apache-2.0
"""Decode attention: upstream's, and with ``FLASHINFER_SM12X_DECODE=1`` this fork's kernel in place of XQA's.

XQA is what vLLM's FlashInfer backend decodes with on SM12x. The switch is off by default: no GPU has timed the kernel yet.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashinfer._layer import extend

_upstream = extend(globals())

from .fused_moe import sm12x_dispatch
from .sm12x_decode import CACHE_DTYPES, CHUNK, GROUP, HEAD
from .sm12x_decode import decode_attention as decode_attention
from .sm12x_decode import decode_workspace_size as decode_workspace_size

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


DECODE_VARIABLE = "FLASHINFER_SM12X_DECODE"
"""1: :func:`xqa_batch_decode_with_kv_cache` runs ``decode_attention`` where that can compute the call; 0 or unset: never."""

_signature = inspect.signature(_upstream.xqa_batch_decode_with_kv_cache)


@functools.wraps(_upstream.xqa_batch_decode_with_kv_cache)
def xqa_batch_decode_with_kv_cache(*arguments: Any, **named: Any) -> torch.Tensor:
    if _asked_for():
        call = _signature.bind(*arguments, **named)
        call.apply_defaults()
        refusal = _refusal(call.arguments)
        if refusal is None:
            return _ours(**call.arguments)
        warnings.warn(f"{DECODE_VARIABLE}=1: upstream's XQA computes this call, since {refusal}", stacklevel=2)
    computed: torch.Tensor = _upstream.xqa_batch_decode_with_kv_cache(*arguments, **named)
    return computed


def _asked_for() -> bool:
    value = os.environ.get(DECODE_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{DECODE_VARIABLE} is {value!r}; it may be 0, 1 or unset")
    return value == "1"


def _refusal(call: Mapping[str, Any]) -> str | None:
    """Why ``decode_attention`` cannot compute a call, or None."""
    query, cache = call["query"], call["kv_cache"]
    parts = cache if isinstance(cache, tuple) else cache.unbind(1)
    positions, heads = (1, 2) if call["kv_layout"] == "NHD" else (2, 1)
    page_size, kv_heads = parts[0].shape[positions], parts[0].shape[heads]
    for name, usual in (("mask", None), ("kv_cache_sf", None), ("q_cu_seq_lens", None), ("q_len_per_req", 1)):
        if call[name] is not usual and call[name] != usual:
            return f"{name} is given"
    if call["o_scale"] not in (None, 1.0):
        return "o_scale is given"
    if any(isinstance(call[name], torch.Tensor) for name in ("bmm1_scale", "bmm2_scale")):
        return "scales are tensors"
    if not sm12x_dispatch.serves(query.device):
        return f"it has no kernel for {query.device}"
    if query.dtype != torch.bfloat16 or (call["out"] is not None and call["out"].dtype != torch.bfloat16):
        return "query or out is not bfloat16"
    if len(parts) != 2 or parts[0].dtype not in CACHE_DTYPES:
        return f"the cache is of {parts[0].dtype}"
    if query.shape[-1] != HEAD or query.shape[-2] != GROUP * kv_heads:
        return f"heads are not of {HEAD}, {GROUP} to a KV head"
    if page_size < CHUNK or page_size & (page_size - 1):
        return f"pages have {page_size} positions"
    return None


def _ours(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    out: torch.Tensor | None,
    sinks: torch.Tensor | None,
    kv_layout: str,
    enable_pdl: bool | None,
    **_: Any,
) -> torch.Tensor:
    attended: torch.Tensor = decode_attention(
        query,
        kv_cache,
        block_tables.view(torch.int32),
        seq_lens.view(torch.int32),
        sinks=sinks,
        sm_scale=bmm1_scale,  # the cache's scale in it
        v_scale=bmm2_scale,
        window_left=window_left,
        kv_layout=kv_layout,
        out=out,
        enable_pdl=enable_pdl,
    )
    return attended
