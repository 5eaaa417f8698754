# SPDX-License-Identifier: Apache-2.0
"""Just-in-time compilation of CUDA modules.

Adds to upstream the lean modules of the SM12x family (``flashinfer.jit.sm12x``) and the engine that builds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
