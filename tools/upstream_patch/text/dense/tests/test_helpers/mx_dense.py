"""Dense GEMMs with MXFP4 or MXFP8 weights: random operands, and the product in float64 with its bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tests.test_helpers.mx_error_bounds import (
    FLOAT32_ROUNDOFF,
    TENSOR_CORE,
    Accumulation,
    affine_error,
    dot_error,
)
from tests.test_helpers.mx_formats import (
    BLOCK,
    NVFP4_NAN_SCALE,
    Operand,
    quantize_mxfp4,
    quantize_mxfp8,
    swizzle_scales,
    swizzled_place,
    unswizzle_scales,
    with_nan_padding,
    with_not_numbers,
)

# take flashinfer/testing/dense_reference.py: Weights
WEIGHTS = {
    "mxfp4": Weights(quantize_mxfp4, Operand.of_mxfp4),
    "mxfp8": Weights(quantize_mxfp8, Operand.of_mxfp8),
}
# take flashinfer/testing/dense_reference.py: DenseCase DenseInputs _random_matrix make_dense_inputs
# take flashinfer/testing/dense_reference.py: dense_inputs_with_not_numbers dense_reference _overflows
# take tests/operator_calls.py: Arguments on


def moved(device: torch.device, inputs: DenseInputs) -> DenseInputs:
    arguments = tuple(tensor.to(device) for tensor in inputs.arguments)
    return DenseInputs(inputs.tokens, arguments, on(device, inputs.named))
