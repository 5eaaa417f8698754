"""Scales of weights and tokens: any that their formats have, uneven ones, and such as no float32 holds."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from flashinfer.jit.sm12x.instances import INSTANCES, Instance
from tests.test_helpers.mx_error_bounds import (
    TENSOR_CORE,
    Accumulation,
    check_within_bound,
)
from tests.test_helpers.mx_formats import (
    sm12x_device,
    swizzle_scales,
    unswizzle_scales,
)
from tests.test_helpers.sm12x_moe import MoECase, make_moe_inputs
from tests.test_helpers.sm12x_moe_module import MODES, run_moe
from tests.test_helpers.sm12x_moe_reference import MoEInputs, moe_reference

device = pytest.fixture(sm12x_device, name="device")
MAIN_MODULE = [row for row in INSTANCES if row.weights == "mxfp4"]
NVFP4 = [row for row in INSTANCES if row.weights == "nvfp4"]
# Those whose weights are scaled while they are expanded, and those whose MMAs take the scales.
FOLDING = [row for row in MAIN_MODULE if row.compute_dtype == "bf16"] + MAIN_MODULE[:1]


# take tests/moe/test_virtual_instances.py: test_any_weight_scale test_any_scale_of_nvfp4


# --- halves ---------------------------------------------------------------------------

# A half is all rows, or blocks of K, in whose number a bit is set, or clear. Bits 0 to 2
# divide an MMA's lanes, bit 3 its two groups of rows, higher bits the two MMAs of a warp,
# and warps; along K they divide the blocks of a scale word, and words. A kernel decides
# some things for a group and not for a row, for example whether all scales are small
# enough to be multiplied while weights are expanded; with one half much larger than the
# other such decisions differ between groups.

# take tests/sm12x/test_virtual_halves.py: SEED BLOCK Half One exponents_of ROWS BLOCKS ONES TOKENS halves stretch
# take tests/sm12x/test_virtual_halves.py: e4m3_of test_a_layer


# --- beyond float32 -------------------------------------------------------------------

# take tests/sm12x/test_virtual_large_scales.py: _with_bytes check_experts_beyond_float32


@pytest.mark.parametrize("tokens", [3, 60])
@pytest.mark.parametrize("row", MAIN_MODULE, ids=lambda row: row.name)
def test_an_expert_with_weights_beyond_float32_spoils_its_own_outputs_alone(
    row: Instance, tokens: int, device: torch.device
) -> None:
    """An output that is not spoilt is right, one that is spoilt is infinite, NaN or right."""
    for mode in MODES[row.activation]:

        def layer(inputs: MoEInputs, mode: int = mode) -> torch.Tensor:
            return run_moe(device, inputs, mode, [row.index] * 2)

        check_experts_beyond_float32(layer, mode, tokens, TENSOR_CORE)
