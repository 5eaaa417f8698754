"""Checks of calls with ``backend="sm12x"``.

No check reads an element. Errors name the argument, what it was and what it
may be.
"""

from __future__ import annotations

import enum
import functools
import operator
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedTensorMixin

from ..jit.sm12x.instances import MAX_EXPERTS, Format

# take flashinfer/sm12x/checks.py: INT32_MAX UE8M0_DTYPES BlockScales BLOCK_SIZE UE8M0 NVFP4_SCALES K_ALIGNMENT POINTER_ALIGNMENT SCALE_WORD ELEMENT OUTPUT_DTYPES
# take flashinfer/sm12x/checks.py: round_up padded_scales has_no_shape describe require_int require_switches
# take flashinfer/sm12x/checks.py: MOST_ACTIVATION_BYTES require_activation_bytes require_k_alignment require_output_dtype is_tensor require_tensor_type require_rank
# take flashinfer/sm12x/checks.py: require_storage require_memory Span place_of require_tensor _tensor_fields require_apart
# take flashinfer/fused_moe/sm12x_validation.py: WEIGHT_DTYPES LINEAR_SCALE_DTYPES Activation _SWIGLU ACTIVATIONS _ACTIVATION_TYPES Mode MODES HALF_DTYPES INPUT_DTYPES BIAS_DTYPES _QUANT_SCALES NVFP4
# take flashinfer/fused_moe/sm12x_validation.py: MoECall MoEProblem select_mode weights_of swizzled_scale_shapes
# take flashinfer/fused_moe/sm12x_validation.py: require_swizzled_scales require_parallel_sizes require_pairs
# take flashinfer/fused_moe/sm12x_validation.py: FLOAT32 CheckedExperts _weight_sizes _check_quant_scales _check_input_sf _require_expert_ids
# take flashinfer/fused_moe/sm12x_validation.py: _check_weights _check_parameters validate
