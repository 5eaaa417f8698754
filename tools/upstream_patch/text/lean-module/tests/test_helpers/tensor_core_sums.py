# take flashinfer/testing/tensor_core_sums.py: __doc__

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.test_helpers.mx_formats import (
    BLOCK,
    Operand,
    quantize_mxfp4,
    quantize_mxfp8,
)

# take flashinfer/testing/tensor_core_sums.py: _LEAST_ALIGNMENT operand _powers _cut _power_below add_up
