# SPDX-License-Identifier: Apache-2.0
"""GEMM operators: upstream's, with the MXFP8 x MXFP4 grouped GEMM on SM12x's own kernels and on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
