"""MXFP4 and MXFP8 (OCP Microscaling Formats v1.0) in float64, for references in tests."""

from __future__ import annotations

import torch

# take flashinfer/testing/mxfp_formats.py: BLOCK NAN_SCALE SCALE_BIAS E2M1_MAX E4M3_MAX E2M1_VALUES power_of_two
# take flashinfer/testing/mxfp_formats.py: decode_scales _e2m1_table _look_up_nibbles
# take flashinfer/testing/mxfp_formats.py: decode_e2m1 _scale_ _per_element dequantize_mxfp4 dequantize_mxfp8
# take flashinfer/testing/mxfp_formats.py: scale_exponents round_to_e4m3 block_amax quantize_mxfp8 quantize_mxfp4
# take flashinfer/testing/mxfp_formats.py: swizzle_scales
