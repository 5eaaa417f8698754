# SPDX-License-Identifier: Apache-2.0
"""Upstream's benchmarking helpers, and a float64 reference of the MXFP4/MXFP8 operators with its error bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from . import virtual_device
from .dense_reference import DenseCase, DenseInputs, dense_reference, make_dense_inputs
from .error_bounds import (
    ANY_ORDER,
    SM120_SUM_BITS,
    TENSOR_CORE,
    Accumulation,
    BoundViolation,
    check_within_bound,
)
from .gemm_reference import group_gemm_reference
from .moe_inputs import MoECase, make_group_gemm_inputs, make_moe_inputs
from .moe_reference import MoEInputs, moe_reference
from .mxfp_formats import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_mxfp4,
    quantize_mxfp8,
    swizzle_scales,
    unswizzle_scales,
)

__all__ = [
    *(name for name in vars(_upstream) if not name.startswith("_")),
    "ANY_ORDER",
    "SM120_SUM_BITS",
    "TENSOR_CORE",
    "Accumulation",
    "BoundViolation",
    "DenseCase",
    "DenseInputs",
    "MoECase",
    "MoEInputs",
    "check_within_bound",
    "dense_reference",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "group_gemm_reference",
    "make_dense_inputs",
    "make_group_gemm_inputs",
    "make_moe_inputs",
    "moe_reference",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "swizzle_scales",
    "unswizzle_scales",
    "virtual_device",
]
