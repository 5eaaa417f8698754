"""Mistakes that a kernel can make, planted in its operands: each takes the result of the module beyond its bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.test_helpers.mx_error_bounds import BoundViolation, check_within_bound
from tests.test_helpers.mx_formats import sm12x_device
from tests.test_helpers.sm12x_moe import MoECase, make_moe_inputs
from tests.test_helpers.sm12x_moe_module import run_moe
from tests.test_helpers.sm12x_moe_reference import MoEInputs, moe_reference


@pytest.fixture(autouse=True)
def _device() -> None:
    sm12x_device()


def layer(inputs: MoEInputs) -> torch.Tensor:
    mode = 2 if inputs.w4a16 else 1 if inputs.input_sf is None else 0
    return run_moe(torch.device("cuda"), inputs, mode)


# take tests/testing/test_error_bounds.py: _swap_nibbles FAULTS _copy test_planted_fault_leaves_the_bound
# take tests/testing/test_error_bounds.py: test_wrong_tile_of_ordinary_data_leaves_the_bound
# take tests/testing/test_error_bounds.py: test_where_float32_can_overflow_nothing_is_asked
