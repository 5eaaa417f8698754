# take flashinfer/testing/error_bounds.py: __doc__

from __future__ import annotations

import dataclasses
import math

import torch

from tests.test_helpers.mx_formats import (
    BLOCK,
    E4M3_MAX,
    Operand,
    block_amax,
    power_of_two,
    round_to_e4m3,
    scale_exponents,
)

# take flashinfer/testing/error_bounds.py: FLOAT32_ROUNDOFF _FLOAT32_MAX _UNDERFLOW _MAX_SCALE_STEPS STEP SM120_SUM_BITS
# take flashinfer/testing/error_bounds.py: _FRACTION_BITS _MOST_ROUNDS Accumulation ANY_ORDER TENSOR_CORE _power_below
# take flashinfer/testing/error_bounds.py: _reach _largest_power _adder_error dot_error affine_error _clamped swiglu
# take flashinfer/testing/error_bounds.py: swiglu_step relu2 requantize_mxfp8 round_to_bfloat16 BoundViolation
# take flashinfer/testing/error_bounds.py: check_within_bound


def accumulation_on(device: torch.device) -> Accumulation:
    """How the MMAs of ``device``, an SM120 or SM121, add up."""
    return TENSOR_CORE
