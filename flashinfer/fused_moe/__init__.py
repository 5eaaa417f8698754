# SPDX-License-Identifier: Apache-2.0
"""Fused MoE operators: upstream's, with ``cutlass_fused_moe`` for MXFP4 weights on SM12x and on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
