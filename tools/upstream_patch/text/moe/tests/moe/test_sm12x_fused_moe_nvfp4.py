"""``backend="sm12x"`` of cutlass_fused_moe, NVFP4 weights and bfloat16 tokens, against a float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashinfer.jit.sm12x.instances import INSTANCES
from tests.test_helpers.mx_error_bounds import accumulation_on, check_within_bound
from tests.test_helpers.mx_formats import sm12x_device
from tests.test_helpers.sm12x_fused_moe import check_case, cutlass_fused_moe, run
from tests.test_helpers.sm12x_moe import (
    MoECase,
    make_moe_inputs,
    moe_inputs_with_not_numbers,
    same_bits,
)
from tests.test_helpers.sm12x_moe_reference import moe_reference

device = pytest.fixture(sm12x_device, name="device")
_check = check_case

# take tests/moe/test_cutlass_fused_moe_nvfp4.py: test_a_layer _case test_token_counts CORNERS test_corners
# take tests/moe/test_cutlass_fused_moe_nvfp4.py: test_what_is_no_number_stays_where_it_is
# take tests/moe/test_cutlass_fused_moe_nvfp4.py: test_a_sign_of_a_scale_is_not_read
# take tests/moe/test_cutlass_fused_moe_nvfp4.py: test_flat_scales_and_views_of_weights_give_the_same_bits


def test_every_tactic_is_forced_by_its_number(device: torch.device) -> None:
    case = _case(33, 160, 96, 4, 2)
    rows = [row for row in INSTANCES if row.weights == "nvfp4" and row.takes(66, 160, 96)]
    assert len(rows) >= 3
    check_case(case, 55, device, [[row.profile_id] * 2 for row in rows])
