# SPDX-License-Identifier: Apache-2.0
"""Decode attention: upstream's module, and this fork's ``decode_attention`` beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

from .sm12x_decode import decode_attention as decode_attention
from .sm12x_decode import decode_workspace_size as decode_workspace_size
from .sm12x_decode import prepare_decode_attention as prepare_decode_attention
from .sm12x_decode_layer import DecodeAttentionLayer as DecodeAttentionLayer

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
