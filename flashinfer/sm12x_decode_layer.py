# SPDX-License-Identifier: Apache-2.0
"""A layer's decode attention as an object: its cache is checked when it is made, a call checks its tokens."""

from __future__ import annotations

from typing import Any

import torch

from .api_logging import flashinfer_api
from .sm12x.checks import (
    Unchanged,
    is_traced,
    require_computing_device,
    require_int,
    require_switches,
    require_tensor_type,
    span,
    spans_meet,
)
from .sm12x.devices import require_served
from .sm12x_decode import (
    HEAD,
    MAX_Q_LEN,
    DecodeCall,
    compute,
    require_cache,
    require_disjoint,
    require_tokens,
    split_cache,
    traced_decode,
)


class DecodeAttentionLayer:
    """A layer of :func:`~flashinfer.decode.decode_attention`, made once from its part of the KV cache.

    The cache, ``rope_table``, ``sinks`` and ``workspace_buffer`` are checked here, and again by the first call after
    one of them changed: the object keeps the tensors, so that ``kv_cache.data = other`` is seen. A call checks its own
    tensors. Results and errors are the function's.

    Parameters
    ----------
    kv_cache, rope_table, sinks, sm_scale, window_left, k_scale, v_scale, kv_layout, constant_cache, workspace_buffer
        The same as in ``decode_attention``.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    NotImplementedError
        The cache is on a GPU that has no kernels of this family.
    """

    @flashinfer_api
    def __init__(
        self,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        rope_table: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        sm_scale: float | None = None,
        window_left: int = -1,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        kv_layout: str = "HND",
        constant_cache: bool = False,
        workspace_buffer: torch.Tensor | None = None,
    ) -> None:
        self._kv_cache = list(kv_cache) if isinstance(kv_cache, list) else kv_cache  # the caller's may change
        self._kv_layout = kv_layout
        self._tensors = workspace_buffer, rope_table, sinks
        self._numbers = window_left, HEAD**-0.5 if sm_scale is None else sm_scale, k_scale, v_scale, constant_cache
        # Traced tensors have no addresses that could be checked; traced calls go to the operator, which checks when it
        # runs.
        self._checks = not is_traced((*split_cache(kv_cache, kv_layout), *self._tensors))
        if self._checks:
            self._require_cache()

    def _require_cache(self) -> None:
        cache = self._kv_cache
        keys, values = parts = split_cache(cache, self._kv_layout)
        require_computing_device("kv_cache", keys)
        require_served("DecodeAttentionLayer", keys.device)
        call = require_cache(self._call(parts, keys, keys, keys), keys.device)  # which looks at no tokens
        self._numbers = call.window_left, call.sm_scale, call.k_scale, call.v_scale, call.constant_cache
        self._spans = [span(each) for each in (keys, values, *self._tensors) if each is not None]
        self._disjoint: set[bool] = set()
        self._kept = *((cache,) if isinstance(cache, torch.Tensor) else cache), *self._tensors
        self._parts, self._device, self._cache = parts, keys.device, Unchanged(*self._kept)

    def _call(
        self,
        parts: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        q_len_per_req: int = 1,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> DecodeCall:
        workspace, rope_table, sinks = self._tensors
        tensors: Any = (*parts, workspace, query, key, value, block_tables, seq_lens, rope_table, sinks)
        numbers: Any = (q_len_per_req, *self._numbers)
        return DecodeCall._make((out, *tensors, *numbers, enable_pdl))

    @flashinfer_api
    def run(
        self,
        query: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        q_len_per_req: int = 1,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        """Attention of new tokens over the layer's cache; parameters, result and errors are ``decode_attention``'s."""
        require_tensor_type("query", query)
        traced = not self._checks or is_traced((query, block_tables, seq_lens, key, value, out))
        if not traced and not self._cache.holds(*self._kept):
            self._require_cache()
        parts = split_cache(self._kv_cache, self._kv_layout) if traced else self._parts
        call = self._call(parts, query, block_tables, seq_lens, key, value, q_len_per_req, out, enable_pdl)
        if not traced:
            call = self._valid(call)
        if out is None:
            out = torch.empty(query.shape, dtype=torch.bfloat16, device=query.device)
            call = DecodeCall._make((out, *call[1:]))
        if traced:
            traced_decode(call)
        else:
            compute(call)
        return out

    def _valid(self, call: DecodeCall) -> DecodeCall:
        """The call, checked, with its number of tokens as Python's."""
        q_len = require_int("q_len_per_req", call.q_len_per_req, 1, MAX_Q_LEN)
        if q_len is not call.q_len_per_req:
            call = call._replace(q_len_per_req=q_len)
        if call.enable_pdl is not None:
            require_switches(call)
        own, writes = require_tokens(call, self._device), call.key is not None
        # The layer's own tensors are compared once where the cache is read, and once where it is written.
        meets = spans_meet(own, self._spans) or (call.out is not None and spans_meet(own[:1], own[1:]))
        if meets or writes not in self._disjoint:
            require_disjoint(call)
            self._disjoint.add(writes)
        return call
