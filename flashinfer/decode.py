# SPDX-License-Identifier: Apache-2.0
"""Decode attention: upstream's, and with ``FLASHINFER_SM12X_DECODE=1`` this fork's kernel in place of XQA's.

XQA is what vLLM's FlashInfer backend decodes with on SM12x. The switch is off by default: the kernel has run in vLLM's
engine on an H200, but on no GB10.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashinfer._layer import extend

_upstream = extend(globals())

from .sm12x import variables
from .sm12x_decode import DecodeCall, lacks_workspace, split_cache, validate
from .sm12x_decode import decode_attention as decode_attention
from .sm12x_decode import decode_workspace_size as decode_workspace_size
from .sm12x_decode import prepare_decode_attention as prepare_decode_attention

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


DECODE_VARIABLE = "FLASHINFER_SM12X_DECODE"
"""1: :func:`xqa_batch_decode_with_kv_cache` runs ``decode_attention`` where that can compute the call; 0 or unset: never."""

_signature = inspect.signature(_upstream.xqa_batch_decode_with_kv_cache)


@functools.wraps(_upstream.xqa_batch_decode_with_kv_cache)
def xqa_batch_decode_with_kv_cache(*arguments: Any, **named: Any) -> torch.Tensor:
    if takes_xqas_calls():
        call = _signature.bind(*arguments, **named)
        call.apply_defaults()
        refusal = _refusal(call.arguments)
        if refusal is None:
            return _ours(**call.arguments)
        _tell(refusal)
    computed: torch.Tensor = _upstream.xqa_batch_decode_with_kv_cache(*arguments, **named)
    return computed


def takes_xqas_calls() -> bool:
    """Whether :data:`DECODE_VARIABLE` gives XQA's calls to ``decode_attention``; ``ValueError`` if it says neither."""
    return bool(variables.read(DECODE_VARIABLE))


@functools.cache  # once a process for each reason
def _tell(refusal: str) -> None:
    warnings.warn(f"{DECODE_VARIABLE}=1: upstream's XQA computes this call, since {refusal}", stacklevel=3)


def _as_int32(tensor: torch.Tensor) -> torch.Tensor:
    """Upstream's documentation has uint32, its callers give int32."""
    return tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor


def _refusal(call: Mapping[str, Any]) -> str | None:
    """Why ``decode_attention`` cannot compute a call, or None."""
    for name in ("mask", "kv_cache_sf", "q_cu_seq_lens"):
        if call[name] is not None:
            return f"{name} is given"
    if call["q_len_per_req"] not in (None, 1):
        return f"q_len_per_req is {call['q_len_per_req']}"  # what a draft sees, XQA is told by its mask
    if call["o_scale"] not in (None, 1.0):
        return f"o_scale is {call['o_scale']}"
    if lacks_workspace(call["query"].device):
        return (
            "it is captured before decode_attention was ever called; prepare_decode_attention() before that lets it go"
        )
    tables, lengths = _as_int32(call["block_tables"]), _as_int32(call["seq_lens"])
    none: dict[str, Any] = dict.fromkeys(DecodeCall._fields)
    try:
        keys, values = split_cache(call["kv_cache"], call["kv_layout"])
        validate(
            DecodeCall(**none)._replace(
                **{name: call[name] for name in ("out", "query", "sinks", "window_left")},
                keys=keys,
                values=values,
                block_tables=tables,
                seq_lens=lengths,
                q_len_per_req=1,
                sm_scale=call["bmm1_scale"],
                k_scale=1.0,
                v_scale=call["bmm2_scale"],
                constant_cache=False,
            ),
            {"sm_scale": "bmm1_scale", "v_scale": "bmm2_scale"},
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
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
        _as_int32(block_tables),
        _as_int32(seq_lens),
        sinks=sinks,
        sm_scale=bmm1_scale,  # the cache's scale in it
        v_scale=bmm2_scale,
        window_left=window_left,
        kv_layout=kv_layout,
        out=out,
        enable_pdl=enable_pdl,
    )
    return attended
