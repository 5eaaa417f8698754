# take tests/testing/test_mxfp_formats.py: __doc__

from __future__ import annotations

import math

import pytest
import torch

from tests.test_helpers.mx_formats import (
    decode_e2m1,
    decode_scales,
    dequantize_mxfp4,
    dequantize_mxfp8,
    power_of_two,
    quantize_mxfp4,
    quantize_mxfp8,
    round_to_e4m3,
    scale_exponents,
    swizzle_scales,
    unswizzle_scales,
)

# take tests/testing/test_mxfp_formats.py: _seeded test_e2m1_values_follow_sign_exponent_mantissa
# take tests/testing/test_mxfp_formats.py: test_scales_are_powers_of_two_and_255_is_nan
# take tests/testing/test_mxfp_formats.py: test_power_of_two_is_exact_over_its_range
# take tests/testing/test_mxfp_formats.py: test_round_to_e4m3_equals_nearest_of_all_values
# take tests/testing/test_mxfp_formats.py: test_scale_of_zero_and_infinity
# take tests/testing/test_mxfp_formats.py: test_quantization_error_is_at_most_half_the_widest_spacing
# take tests/testing/test_mxfp_formats.py: test_special_values test_swizzle_is_the_documented_byte_order
# take tests/testing/test_mxfp_formats.py: test_swizzle_of_a_stack_is_the_stack_of_swizzles
