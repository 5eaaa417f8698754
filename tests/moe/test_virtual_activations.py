# SPDX-License-Identifier: Apache-2.0
"""Activations on the virtual SM121 by their numbers: SwigluStep and Relu2 by each kind of kernel, and what is none."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flashinfer.tllm_enums import ActivationType
from virtual_devices import virtual_fixture
from virtual_moe import run_moe

from flashinfer.fused_moe.sm12x_validation import ACTIVATIONS
from flashinfer.sm12x.instances import index_of
from flashinfer.sm12x.models import NVFP4_LAYERS
from flashinfer.testing import TENSOR_CORE, MoECase, MoEInputs, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.moe_inputs import moe_inputs_with_not_numbers
from flashinfer.testing.moe_layers import case_of
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

device = virtual_fixture()
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


# Outputs of FC1 without gate rows: of a tile's halves the second is not there (160, 32), partly there (352, 224) or
# whole (384); a split-K kernel's work tiles have one, two and four M16 fragments (hidden 2,688, 1,248 and the others,
# multiples of 64).
RELU2 = {
    "160 rows": MoECase(9, 288, 160, 4, 2, 0, relu2=True),
    "32 rows": MoECase(40, 96, 32, 4, 2, 0, biases=False, relu2=True),
    "352 rows": MoECase(70, 1248, 352, 4, 2, 0, swizzled_input_sf=False, relu2=True),
    "384 rows": MoECase(21, 256, 384, 4, 2, 0, relu2=True),
    "one fragment a work tile": MoECase(3, 2688, 96, 3, 2, 0, biases=False, relu2=True),
    "top 22, routed in registers": MoECase(1, 160, 224, 25, 22, 0, relu2=True),
    "top 22, routed in shared memory": MoECase(3, 160, 224, 25, 22, 0, biases=False, relu2=True),
    "a shard": MoECase(9, 352, 416, 16, 2, 0, ep_size=2, ep_rank=1, relu2=True),
}
RELU2_TACTICS = {
    **dict.fromkeys(("stream_mxfp8_as_bf16_m8", "mxfp8_m16_k128", "mxfp8_m128_k128"), (0, "mxfp4")),
    **dict.fromkeys(("stream_bf16_m8", "bf16_m16_k128"), (2, "mxfp4")),
    **dict.fromkeys(("nvfp4_stream_bf16_m8", "nvfp4_bf16_m8_k128", "nvfp4_bf16_m64_k128"), (2, "nvfp4")),
}


@pytest.mark.parametrize("case", RELU2)
@pytest.mark.parametrize("tactic", RELU2_TACTICS)
def test_relu2(device: VirtualDevice, tactic: str, case: str) -> None:
    mode, weights = RELU2_TACTICS[tactic]
    place = index_of(tactic)
    layer = dataclasses.replace(RELU2[case], mode=mode, weights=weights)
    seed = 80 + place
    print("seed", seed)
    inputs = make_moe_inputs(layer, seed)
    output = run_moe(device, inputs, mode, [place, place])
    used = check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{tactic}, {layer}, seed {seed}")
    print(f"{used:.1%} of the bound")


@pytest.mark.parametrize("tactic", ["mxfp8_as_bf16_m16_k128", "stream_bf16_m16"])
def test_relu2_by_hoppers_rows(tactic: str) -> None:
    """MXFP8 act as bfloat16, and a stream's tiles with more than eight tokens."""
    mode, place = 1 if "mxfp8" in tactic else 2, index_of(tactic)
    layer = dataclasses.replace(RELU2["352 rows"], mode=mode)
    print("seed", 90)
    inputs = make_moe_inputs(layer, 90)
    with virtual_device("sm_121a") as device:
        output = run_moe(device, inputs, mode, [place, place])
        check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{tactic}, seed 90")
        assert all(launch.clean for launch in device.launches)


@pytest.mark.parametrize(("model", "tokens"), [("nemotron-3-nano", 1), ("nemotron-3-nano", 2), ("nemotron-3-super", 1)])
def test_a_nemotron_layer_in_full_dimensions(model: str, tokens: int) -> None:
    """As many experts as a token takes: what the planner chooses, a stream."""
    layer = NVFP4_LAYERS[model]
    case = case_of(layer, tokens, 2, num_experts=layer.top_k)
    assert case.relu2 and case.weights == "nvfp4" and not case.biases
    print("seed", 91)
    inputs = make_moe_inputs(case, 91)
    with virtual_device("sm_121a") as device:
        output = run_moe(device, inputs, 2)
        check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{model}, seed 91")
        assert all(launch.clean for launch in device.launches)
        assert any("fused_moe_kernel" in launch.kernel for launch in device.launches)


@pytest.mark.parametrize("tactic", ["stream_bf16_m8", "mxfp8_m16_k128"])
def test_what_is_no_number_passes_relu2(tactic: str) -> None:
    mode, place = RELU2_TACTICS[tactic][0], index_of(tactic)
    print("seeds", 93, 94)
    inputs = make_moe_inputs(MoECase(3, 96, 64, 3, 2, mode, relu2=True), 93)
    with virtual_device("sm_121a") as device:
        for what, changed in moe_inputs_with_not_numbers(inputs, 94):
            if "up" in what:
                output = run_moe(device, changed, mode, [place, place])
                check_within_bound(output, *moe_reference(changed, TENSOR_CORE), f"{what}, {tactic}")


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
            elif ACTIVATIONS[number].parts == 1:
                with pytest.raises(ValueError, match="disagree about hidden or intermediate size"):
                    run_moe(device, given, 0, tactics)
            elif ACTIVATIONS[number].name == "Swiglu":
                assert torch.equal(run_moe(device, given, 0, tactics), expected)
