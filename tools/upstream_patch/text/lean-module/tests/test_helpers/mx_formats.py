"""Block-scaled formats in float64 (OCP Microscaling Formats v1.0, and NVFP4), for references in tests.

Values are exact: e2m1, e4m3, e5m2 and UE8M0 all fit float64, and so do their products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashinfer.utils import get_compute_capability

# take flashinfer/testing/mxfp_formats.py: BLOCK NAN_SCALE SCALE_BIAS E2M1_MAX E4M3_MAX E2M1_VALUES power_of_two
# take flashinfer/testing/mxfp_formats.py: decode_scales lowest_bits _e2m1_table _look_up_nibbles
# take flashinfer/testing/mxfp_formats.py: decode_e2m1 _scale_ _per_element dequantize_mxfp4 dequantize_mxfp8
# take flashinfer/testing/mxfp_formats.py: NVFP4_BLOCK NVFP4_NAN_SCALE decode_nvfp4_scales dequantize_nvfp4
# take flashinfer/testing/mxfp_formats.py: scale_exponents round_to_e4m3 block_amax _scales_of
# take flashinfer/testing/mxfp_formats.py: quantize_mxfp8 _nan_scales _nearest_codes quantize_mxfp4
# take flashinfer/testing/mxfp_formats.py: swizzle_scales unswizzle_scales with_nan_padding swizzled_place
# take flashinfer/testing/mxfp_formats.py: _NOT_NUMBERS with_not_numbers _scaled_lowest _LEAST_EXPONENTS Operand


def sm12x_device() -> torch.device:
    """The GPU, or a reason to skip."""
    if get_compute_capability(torch.device("cuda"))[0] != 12:
        pytest.skip("these kernels are for SM120 and SM121")
    return torch.device("cuda")
