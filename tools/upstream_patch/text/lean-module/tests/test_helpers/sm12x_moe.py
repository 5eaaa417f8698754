"""Random inputs of MXFP4 and NVFP4 MoE layers, made on the device they are for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch

from tests.test_helpers.mx_formats import (
    BLOCK,
    NVFP4_NAN_SCALE,
    power_of_two,
    quantize_mxfp8,
    swizzle_scales,
    swizzled_place,
    with_nan_padding,
    with_not_numbers,
)
from tests.test_helpers.sm12x_moe_reference import WEIGHTS, MoEInputs

# take flashinfer/testing/moe_inputs.py: Data Routing MoECase _Source _weights _mxfp4_weights _nvfp4_weights _expert_ids
# take flashinfer/testing/moe_inputs.py: _activations make_moe_inputs moe_inputs_with_not_numbers
# take tests/moe/moe_harness.py: same_bits
