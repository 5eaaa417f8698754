# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` with NVFP4 weights and bfloat16 activations against the float64 reference, on the CPU and on a
GPU.

On a GPU every instance that takes the layer is forced as well.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_harness import check_case, run, same_bits
from moe_recording import RecordingModule

from flashinfer.fused_moe import core, cutlass_fused_moe, moe_step
from flashinfer.fused_moe.sm12x_planner import plan_moe
from flashinfer.sm12x.device_class import CLASSES, DeviceClass
from flashinfer.sm12x.instances import FUSED_MOE_ROUTED_ROWS, INSTANCES, NVFP4
from flashinfer.sm12x.models import MOE_LAYERS
from flashinfer.testing import MoECase, MoEInputs, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.moe_inputs import moe_inputs_with_not_numbers
from flashinfer_sm12x.doctor.probe.mma import accumulation_on


def test_a_layer(device: torch.device) -> None:
    """Nine tokens, each of which goes to two of four experts."""
    inputs = make_moe_inputs(MoECase(9, 160, 96, 4, 2, mode=2, weights="nvfp4"), seed=3, device=device)
    output = cutlass_fused_moe(**inputs.arguments())
    check_within_bound(output, *moe_reference(inputs, accumulation_on(device)), "seed 3")


def _check(case: MoECase, seed: int, device: torch.device) -> None:
    print("seed", seed)
    rows = [row for row in NVFP4 if row.takes(case.num_tokens * case.top_k, case.hidden, case.inter)]
    forced = [] if device.type == "cpu" else [[row.profile_id] * 2 for row in rows]
    check_case(case, seed, device, [None, *forced])


def _case(num_tokens: int, hidden: int, inter: int, experts: int, top_k: int, **more: Any) -> MoECase:
    return MoECase(num_tokens, hidden, inter, experts, top_k, mode=2, weights="nvfp4", **more)


@pytest.mark.parametrize("data", ["normal", "lattice"])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 130])
def test_token_counts(data: str, num_tokens: int, device: torch.device) -> None:
    _check(_case(num_tokens, 288, 352, 8, 3, data=data, output_dtype=torch.float16), 100 + num_tokens, device)


CORNERS: dict[str, MoECase] = {
    # Words of four scales hold 64 elements: K of half a word, of whole ones, and of one and a half.
    **{f"hidden {hidden}": _case(6, hidden, 96, 4, 2) for hidden in (32, 64, 96)},
    **{f"inter {inter}": _case(9, 160, inter, 4, 2, data="lattice") for inter in (32, 64, 512)},
    **{
        f"top {top_k} of {experts}": _case(5, 96, 64, experts, top_k)
        for experts, top_k in ((256, 8), (512, 10), (1, 1))
    },
    **{
        f"{tokens} tokens, {routing}": _case(tokens, 160, 96, 16, 2, routing=routing)
        for tokens in (5, 200)
        for routing in ("one_expert", "few_experts")
    },
    "plain SwiGLU": _case(10, 96, 64, 4, 2, biases=False, swiglu_parameters=False),
    "SwigluStep": _case(10, 96, 64, 4, 2, biases=False, swiglu_step=True),
    "one of two ranks": _case(10, 96, 64, 8, 2, ep_size=2, ep_rank=1),
    "fp16 output and biases": _case(10, 96, 64, 4, 2, output_dtype=torch.float16, bias_dtype=torch.float16),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_corners(corner: str, device: torch.device) -> None:
    _check(CORNERS[corner], 26, device)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_random_layers(device: torch.device, seed: int) -> None:
    from gpu_sweep import random_case

    case = random_case(random.Random(seed), quick=True)
    case = dataclasses.replace(case, mode=2, weights="nvfp4", num_tokens=case.num_tokens % 90 + 1)
    _check(dataclasses.replace(case, input_dtype=torch.bfloat16), seed % 2**31, device)


def test_what_is_no_number_stays_where_it_is(device: torch.device) -> None:
    """As with MXFP4: outputs that the reference has as numbers are what they were, to the bit."""
    inputs = make_moe_inputs(_case(12, 160, 96, 6, 2), 30, device)
    print("seeds", 30, 31)
    made = moe_inputs_with_not_numbers(inputs, 31)
    _, numbers = next(made)
    before, output_before = moe_reference(numbers, accumulation_on(device))[0], run(numbers, device, 0xFF, None)
    scales = 0
    for what, changed in made:
        reference, bound = moe_reference(changed, accumulation_on(device))
        output = run(changed, device, 0xFF, None)
        check_within_bound(output, reference, bound, what)
        kept = reference == before
        assert not kept.all() or "scale" not in what, what
        scales += "scale of" in what
        assert same_bits(output[kept], output_before[kept]), what
    assert scales == 6  # of up, gate and FC2, with either sign


def test_a_sign_of_a_scale_is_not_read(device: torch.device) -> None:
    inputs = make_moe_inputs(_case(5, 96, 64, 4, 2), 32, device)
    signed = dataclasses.replace(inputs, fc1_scales=inputs.fc1_scales | 0x80, fc2_scales=inputs.fc2_scales | 0x80)
    assert same_bits(run(signed, device, 0xFF, None), run(inputs, device, 0xFF, None))


def test_flat_scales_and_views_of_weights_give_the_same_bits(device: torch.device) -> None:
    arguments = make_moe_inputs(_case(12, 288, 352, 4, 2), 16, device).arguments()
    expected = cutlass_fused_moe(**arguments)
    viewed = dict(arguments)
    for name in ("fc1_expert_weights", "fc2_expert_weights"):
        viewed[name] = arguments[name].view(torch.int64)
    viewed["quant_scales"] = [scales.flatten() for scales in arguments["quant_scales"]]
    assert same_bits(cutlass_fused_moe(**viewed), expected)


def test_the_step_of_a_decoder_gives_the_same_bits(device: torch.device) -> None:
    """Experts chosen by logits, as router_top_k chooses them."""
    inputs = make_moe_inputs(_case(1, 96, 64, 16, 4), 17, device)
    print("seed", 17)
    logits = torch.randn(1, 16, device=device, generator=torch.Generator(device).manual_seed(17))
    weights, ids = logits.topk(4, dim=1)
    inputs = dataclasses.replace(inputs, token_selected_experts=ids.int(), token_final_scales=weights.softmax(dim=1))
    arguments = inputs.arguments()
    expected = cutlass_fused_moe(**arguments)
    arguments |= {"token_selected_experts": None, "token_final_scales": None}
    chosen = moe_step(**arguments, router_logits=logits, top_k=4)
    torch.testing.assert_close(chosen, expected, rtol=2**-7, atol=0.0)


def _launch(module: RecordingModule, inputs: MoEInputs, **options: Any) -> dict[str, Any]:
    cutlass_fused_moe(**inputs.arguments(), **options)
    return module.launches[-1]


def test_a_launch_gets_nvfp4s_tactics_and_tensors_as_they_are(module: RecordingModule) -> None:
    inputs = make_moe_inputs(_case(6, 160, 96, 8, 3), 33)
    launch = _launch(module, inputs)
    assert launch["tactic_fc1"] == launch["tactic_fc2"] == NVFP4[-1].index
    assert launch["mode"] == 2
    for stage in ("fc1", "fc2"):
        assert launch[f"{stage}_sf"].data_ptr() == getattr(inputs, f"{stage}_scales").data_ptr()
        assert launch[f"{stage}_sf"].dtype == torch.uint8
        assert launch[f"{stage}_global"] is getattr(inputs, f"{stage}_global")
    for row in NVFP4:
        launch = _launch(module, inputs, profile_ids=[row.profile_id] * 2)
        assert (launch["tactic_fc1"], launch["tactic_fc2"]) == (row.index, row.index)
    module.few_sms = True
    launch = _launch(module, inputs)
    assert not INSTANCES[launch["tactic_fc1"]].split_k and INSTANCES[launch["tactic_fc1"]].weights == "nvfp4"
    assert module.registered == [] and module.backend.built == []


@pytest.mark.parametrize("known", CLASSES, ids=lambda known: known.key)
def test_the_planner_has_a_tactic_for_every_batch_of_every_layer(known: DeviceClass) -> None:
    for layer in MOE_LAYERS.values():
        for tokens in (1, 2, 8, 33, 128, 129, 1000, 8192):
            for all_sms in (True, False):
                planned = plan_moe(tokens, layer.top_k, layer.experts, *layer[:2], 2, known, all_sms, "nvfp4")
                fc1, fc2 = (INSTANCES[place] for place in planned)
                assert fc1 is fc2 and fc1 in NVFP4
                assert fc1.takes(tokens * layer.top_k, *layer[:2])
                assert all_sms or not fc1.split_k


def test_a_stream_takes_what_the_launcher_takes() -> None:
    """2 stages fit up to its K, and 1,536 pairs."""
    (stream,) = [row for row in NVFP4 if row.split_k]
    assert stream.longest_k == 3072
    assert stream.takes(FUSED_MOE_ROUTED_ROWS, 3072, 3072) and not stream.takes(FUSED_MOE_ROUTED_ROWS + 1, 32, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bfloat16 input", "packed input"])
@pytest.mark.parametrize("flags", [{}, {"use_mxfp8_act_scaling": False, "use_w4_group_scaling": False}], ids=str)
def test_upstreams_nvfp4_mode_stays_upstreams(
    dtype: torch.dtype, flags: dict[str, bool], module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W4A4: six scales, activations quantized by the caller or inside."""
    monkeypatch.setattr(core._upstream, "cutlass_fused_moe", lambda **given: given)
    monkeypatch.setattr(core.devices, "serves", lambda device: True)
    arguments = make_moe_inputs(_case(6, 160, 96, 8, 3), 34).arguments()
    one = torch.ones(8)
    fc1, fc1_global, fc2, fc2_global = arguments["quant_scales"]
    arguments["quant_scales"] = [one, fc1.view(torch.int32), fc1_global, one, fc2.view(torch.int32), fc2_global]
    arguments["fc1_expert_weights"] = arguments["fc1_expert_weights"].view(torch.int64)
    arguments["input"] = torch.zeros(6, 160 if dtype is torch.bfloat16 else 80, dtype=dtype, device="meta")
    del arguments["use_mxfp8_act_scaling"], arguments["use_w4_group_scaling"]
    passed = cutlass_fused_moe(**arguments, **flags)
    assert passed["quant_scales"] is arguments["quant_scales"]
    assert module.launches == []
