# SPDX-License-Identifier: Apache-2.0
"""FlashInfer with MXFP4 mixture-of-experts kernels for SM120 and SM121 (RTX Blackwell, DGX Spark).

A layer over the wheel ``flashinfer-python``: everything that is not here comes from there (``flashinfer._layer``).
``__version__`` is the wheel's, ``__fork_version__`` is this layer's.
"""

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

from flashinfer._version import __fork_version__ as __fork_version__

if TYPE_CHECKING:
    __version__: str

    def __getattr__(name: str) -> Any: ...
