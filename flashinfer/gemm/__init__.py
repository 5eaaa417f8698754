# SPDX-License-Identifier: Apache-2.0
"""GEMM operators: upstream's, with those of block-scaled weights on SM12x's own kernels and on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from .sm12x_dense import dense_block_scaled as dense_block_scaled
from .sm12x_dense import dense_mx as dense_mx
from .sm12x_dense_layer import DenseLayer as DenseLayer
from .sm12x_dense_norm import rmsnorm_dense_block_scaled as rmsnorm_dense_block_scaled
from .sm12x_dense_rescored import RescoredLayer as RescoredLayer
from .sm12x_dense_rescored import dense_block_scaled_rescored as dense_block_scaled_rescored
from .sm12x_dense_rescored import dense_block_scaled_rescored_top_k as dense_block_scaled_rescored_top_k
from .sm12x_dense_top_k import dense_block_scaled_top_k as dense_block_scaled_top_k
from .sm12x_dense_top_k import dense_mx_top_k as dense_mx_top_k
from .sm12x_mm import mm_bf16_mxfp8 as mm_bf16_mxfp8
