"""cutlass_fused_moe(backend="sm12x") in memory that holds NaN, and what each check of it compares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

import torch

from flashinfer import fused_moe
from flashinfer.fused_moe.sm12x_moe_checks import Mode
from flashinfer.jit.sm12x.instances import INSTANCES, Instance
from tests.test_helpers.mx_error_bounds import accumulation_on, check_within_bound
from tests.test_helpers.sm12x_moe import MoECase, make_moe_inputs, same_bits
from tests.test_helpers.sm12x_moe_reference import MoEInputs, moe_reference

cutlass_fused_moe = functools.partial(fused_moe.cutlass_fused_moe, backend="sm12x")
cutlass_fused_moe_workspace_size = functools.partial(fused_moe.cutlass_fused_moe_workspace_size, backend="sm12x")

SM12X = INSTANCES

# take tests/moe/moe_harness.py: tactics_to_force workspace_bytes POISON poisoned run replayed
# take flashinfer_sm12x/doctor/probe/timing.py: captured


def check_case(
    case: MoECase, seed: int, device: torch.device, tactics: Sequence[Optional[list[int]]] = (None,)
) -> None:
    """A layer within its bound, and the same bits when it is repeated, with each pair of ``tactics`` (None: the default)."""
    inputs = make_moe_inputs(case, seed, device)
    expected = moe_reference(inputs, accumulation_on(device))
    for profile_ids in tactics:
        output = run(inputs, device, 0xFF, profile_ids)
        check_within_bound(output, *expected, f"{case}, seed {seed}, profile_ids {profile_ids}")
        assert same_bits(output, run(inputs, device, 0x00, profile_ids)), "a second run differs"
