# SPDX-License-Identifier: Apache-2.0
"""Upstream's benchmarking helpers, and a float64 reference of the MXFP4/MXFP8 operators with its error bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from . import virtual_device as virtual_device
from .dense_reference import DenseCase as DenseCase
from .dense_reference import DenseInputs as DenseInputs
from .dense_reference import dense_reference as dense_reference
from .dense_reference import make_dense_inputs as make_dense_inputs
from .dense_reference import make_norm_inputs as make_norm_inputs
from .dense_reference import normed_dense_reference as normed_dense_reference
from .error_bounds import ANY_ORDER as ANY_ORDER
from .error_bounds import SM120_SUM_BITS as SM120_SUM_BITS
from .error_bounds import TENSOR_CORE as TENSOR_CORE
from .error_bounds import Accumulation as Accumulation
from .error_bounds import BoundViolation as BoundViolation
from .error_bounds import check_within_bound as check_within_bound
from .gemm_reference import group_gemm_reference as group_gemm_reference
from .moe_inputs import MoECase as MoECase
from .moe_inputs import make_group_gemm_inputs as make_group_gemm_inputs
from .moe_inputs import make_moe_inputs as make_moe_inputs
from .moe_reference import MoEInputs as MoEInputs
from .moe_reference import moe_reference as moe_reference
from .mxfp_formats import dequantize_mxfp4 as dequantize_mxfp4
from .mxfp_formats import dequantize_mxfp8 as dequantize_mxfp8
from .mxfp_formats import quantize_mxfp4 as quantize_mxfp4
from .mxfp_formats import quantize_mxfp8 as quantize_mxfp8
from .mxfp_formats import swizzle_scales as swizzle_scales
from .mxfp_formats import unswizzle_scales as unswizzle_scales
