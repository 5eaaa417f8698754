# SPDX-License-Identifier: Apache-2.0
"""Activations on the virtual SM121 by their numbers: SwigluStep by each kind of kernel, and what is none."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flashinfer.tllm_enums import ActivationType
from virtual_moe import run_moe

from flashinfer.fused_moe.sm12x_validation import ACTIVATIONS
from flashinfer.sm12x.instances import index_of
from flashinfer.testing import TENSOR_CORE, MoECase, MoEInputs, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.virtual_device import virtual_device

TACTICS = {0: ("stream_mxfp8_as_bf16_m8", "mxfp8_m16_k128"), 2: ("stream_bf16_m8", "bf16_m16_k128")}


@pytest.mark.parametrize("mode", TACTICS)
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "pair"])
def test_swiglu_step(mode: int, streamed: bool) -> None:
    seed = 50 + mode
    print("seed", seed)
    inputs = make_moe_inputs(MoECase(9, 288, 160, 4, 2, mode, swiglu_step=True), seed)
    default = dataclasses.replace(inputs, swiglu_limit=None, fc1_bias=6 * inputs.fc1_bias)  # 7, and often beyond it
    tactic = index_of(TACTICS[mode][not streamed])
    with virtual_device("sm_121a") as device:
        for each in (inputs, default):
            output = run_moe(device, each, mode, [tactic, tactic])
            check_within_bound(output, *moe_reference(each, TENSOR_CORE), f"mode {mode}, seed {seed}")
        assert all(launch.clean for launch in device.launches)


class _Inputs(MoEInputs):
    number: int

    @property
    def activation_type(self) -> int:  # type: ignore[override]
        return self.number


def test_kernels_know_the_activations_of_the_table_and_no_others() -> None:
    inputs = make_moe_inputs(MoECase(3, 96, 64, 4, 2, 0), 60)
    given = _Inputs(**vars(inputs))
    with virtual_device("sm_121a") as device:
        tactics = [index_of(TACTICS[0][0])] * 2
        expected = run_moe(device, inputs, 0, tactics)
        for number in ActivationType:
            given.number = number
            if number not in ACTIVATIONS:
                with pytest.raises(ValueError, match=f"activation_type {int(number)} is none"):
                    run_moe(device, given, 0, tactics)
            elif ACTIVATIONS[number].name == "Swiglu":
                assert torch.equal(run_moe(device, given, 0, tactics), expected)
