# SPDX-License-Identifier: Apache-2.0
"""Upstream's benchmarking helpers, and a float64 reference of the MXFP4/MXFP8 operators with its error bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from . import virtual_device as virtual_device
from .checked import check_within_bound as check_within_bound
from .checked import dense_reference as dense_reference
from .checked import dequantize_mxfp4 as dequantize_mxfp4
from .checked import dequantize_mxfp8 as dequantize_mxfp8
from .checked import group_gemm_reference as group_gemm_reference
from .checked import make_dense_inputs as make_dense_inputs
from .checked import make_group_gemm_inputs as make_group_gemm_inputs
from .checked import make_moe_inputs as make_moe_inputs
from .checked import make_norm_inputs as make_norm_inputs
from .checked import moe_reference as moe_reference
from .checked import normed_dense_reference as normed_dense_reference
from .checked import quantize_mxfp4 as quantize_mxfp4
from .checked import quantize_mxfp8 as quantize_mxfp8
from .checked import swizzle_scales as swizzle_scales
from .checked import unswizzle_scales as unswizzle_scales
from .dense_reference import DenseCase as DenseCase
from .dense_reference import DenseInputs as DenseInputs
from .error_bounds import ANY_ORDER as ANY_ORDER
from .error_bounds import SM120_SUM_BITS as SM120_SUM_BITS
from .error_bounds import TENSOR_CORE as TENSOR_CORE
from .error_bounds import Accumulation as Accumulation
from .error_bounds import BoundViolation as BoundViolation
from .moe_inputs import MoECase as MoECase
from .moe_reference import MoEInputs as MoEInputs
