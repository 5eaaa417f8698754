# take flashinfer/testing/moe_reference.py: __doc__

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashinfer.tllm_enums import ActivationType
from tests.test_helpers.mx_error_bounds import (
    ANY_ORDER,
    FLOAT32_ROUNDOFF,
    Accumulation,
    affine_error,
    dot_error,
    relu2,
    requantize_mxfp8,
    round_to_bfloat16,
    swiglu,
    swiglu_step,
)
from tests.test_helpers.mx_formats import (
    BLOCK,
    NVFP4_BLOCK,
    Operand,
    quantize_mxfp8,
    unswizzle_scales,
)

# take flashinfer/testing/moe_reference.py: WEIGHTS MoEInputs _activations _entry _bias _gemm expert_reference moe_reference
