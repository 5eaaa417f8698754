"""The bounds hold for float32 in any order and for the adders of tensor cores, and none is wider than it has to be."""

from __future__ import annotations

import math

import pytest
import torch

from tests.test_helpers.mx_error_bounds import (
    ANY_ORDER,
    SM120_SUM_BITS,
    STEP,
    TENSOR_CORE,
    Accumulation,
    BoundViolation,
    check_within_bound,
    dot_error,
    relu2,
    requantize_mxfp8,
    round_to_bfloat16,
    swiglu,
    swiglu_step,
)
from tests.test_helpers.mx_formats import (
    BLOCK,
    Operand,
    decode_scales,
    lowest_bits,
    quantize_mxfp8,
)
from tests.test_helpers.sm12x_moe import MoECase, make_moe_inputs
from tests.test_helpers.sm12x_moe_reference import moe_reference
from tests.test_helpers.tensor_core_sums import add_up, operand

# take tests/testing/test_error_bounds.py: _rng test_dot_error_covers_float32_sums_in_every_order
# take tests/testing/test_error_bounds.py: test_lattice_sums_are_exact test_lowest_bits
# take tests/testing/test_error_bounds.py: test_lowest_bits_by_tables_are_those_of_the_values
# take tests/testing/test_error_bounds.py: test_swiglu_error_covers_perturbed_float32
# take tests/testing/test_error_bounds.py: test_swiglu_error_vanishes_beyond_the_limit
# take tests/testing/test_error_bounds.py: test_requantization_interval_holds_every_outcome
# take tests/testing/test_error_bounds.py: test_bfloat16_interval_holds_every_outcome
# take tests/testing/test_error_bounds.py: test_check_within_bound_compares_rounded_ends
# take tests/testing/test_error_bounds.py: test_bound_is_a_small_part_of_the_result
# take tests/moe/test_activations.py: test_relu2s_bound_holds_for_what_lies_within_the_errors_and_is_reached
# take tests/moe/test_activations.py: test_swiglu_steps_bound_holds_for_what_lies_within_the_errors


# --- sums of tensor cores -------------------------------------------------------------

# take tests/testing/test_narrow_sums.py: HOPPER operands test_it_covers_every_order
# take tests/testing/test_narrow_sums.py: test_along_k_it_covers_ranges_and_any_order_within_a_block
# take tests/testing/test_narrow_sums.py: test_it_covers_what_is_only_known_to_within_an_interval
# take tests/testing/test_narrow_sums.py: test_it_covers_products_that_are_just_too_small
# take tests/testing/test_narrow_sums.py: test_it_covers_sums_that_float32_cuts
# take tests/testing/test_narrow_sums.py: test_subnormal_elements_count_with_their_formats_exponent
# take tests/testing/test_narrow_sums.py: test_it_is_not_loose_by_orders test_a_lattice_is_exact
