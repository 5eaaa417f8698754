# SPDX-License-Identifier: Apache-2.0
"""Quantization: upstream's, with MXFP4 and MXFP8 on CPU tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
