# SPDX-License-Identifier: Apache-2.0
"""Both flags of ``cutlass_fused_moe``: by its number of tokens a call is W4A16 or W4A8, and nothing else differs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune
from moe_recording import RecordingModule, layer_arguments

import flashinfer
from flashinfer.fused_moe import core
from flashinfer.fused_moe.sm12x_planner import expected_rows, plan_mode, plan_moe
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.sm12x import devices
from flashinfer.sm12x.device_class import CLASSES, GB10, HOPPER, DeviceClass
from flashinfer.sm12x.models import MOE_LAYERS
from flashinfer.testing import MoECase, make_moe_inputs

EXPERTS, TOP_K = 8, 3
BOTH = {"use_mxfp8_act_scaling": True, "use_w4_group_scaling": True}
NEVER = 1 << 14


def switch(top_k: int, experts: int, device: DeviceClass = GB10) -> int:
    """The fewest tokens in W4A8, or :data:`NEVER`."""
    modes = (plan_mode(Mode.AUTO, tokens, top_k, experts, device) for tokens in range(NEVER))
    return next((tokens for tokens, mode in enumerate(modes) if mode is Mode.BF16_INPUT), NEVER)


def arguments(tokens: int, mode: int, **changes: Any) -> dict[str, Any]:
    """A call's arguments. W4A16 takes no global scales, so the other modes get scales of 1."""
    case = MoECase(tokens, 64, 32, EXPERTS, TOP_K, mode, **changes)
    given = make_moe_inputs(dataclasses.replace(case, global_scales=False), tokens).arguments()
    if mode != Mode.W4A16:
        given["quant_scales"][1::2] = [torch.ones(EXPERTS)] * 2
    return given


@pytest.mark.parametrize("known", CLASSES, ids=lambda known: known.key)
@pytest.mark.parametrize("model", MOE_LAYERS)
def test_one_switch_divides_all_numbers_of_tokens(model: str, known: DeviceClass) -> None:
    layer = MOE_LAYERS[model]
    at = switch(layer.top_k, layer.experts, known)
    assert at > 64, "every decode step of a Spark is exact"
    assert (at == NEVER) == (known is HOPPER), "Hopper multiplies in bfloat16 either way"
    for tokens in (1, at - 1, at, at + 1, 4 * at):
        exact = tokens < at or at == NEVER
        expected = Mode.W4A16 if exact else Mode.BF16_INPUT
        assert plan_mode(Mode.AUTO, tokens, layer.top_k, layer.experts, known) is expected
    for mode in set(Mode) - {Mode.AUTO}:
        assert plan_mode(mode, at, layer.top_k, layer.experts, known) is mode


def test_the_cpu_computes_either_mode_bit_for_bit() -> None:
    at = switch(TOP_K, EXPERTS)
    for tokens in (1, 16, at - 1, at, at + 1):
        given = arguments(tokens, Mode.W4A16)
        got = flashinfer.cutlass_fused_moe(**given | BOTH)
        results = {
            mode: flashinfer.cutlass_fused_moe(**arguments(tokens, mode)) for mode in (Mode.W4A16, Mode.BF16_INPUT)
        }
        assert not results[Mode.W4A16].equal(results[Mode.BF16_INPUT]), "the two round differently"
        assert got.equal(results[Mode.W4A16 if tokens < at else Mode.BF16_INPUT])


@pytest.mark.parametrize("known", CLASSES, ids=lambda known: known.key)
def test_a_launch_has_the_mode_of_its_tokens_and_no_global_scales(known: DeviceClass, module: RecordingModule) -> None:
    module.backend.device_class = known
    at = switch(TOP_K, EXPERTS, known)
    for tokens in (1, 16, 4096) if at == NEVER else (1, at - 1, at, at + 1):
        flashinfer.cutlass_fused_moe(**arguments(tokens, Mode.W4A16) | BOTH)
        launch = module.launches[-1]
        assert launch["mode"] == int(Mode.W4A16 if tokens < at else Mode.BF16_INPUT)
        assert launch["fc1_global"] is launch["fc2_global"] is None


@pytest.mark.parametrize("enable_alltoall", [False, True])
def test_slots_of_all_tokens_are_spread_over_the_experts_of_all_ranks(
    enable_alltoall: bool, module: RecordingModule
) -> None:
    """A rank that has half of the experts gets half of the rows; all-to-all brings it tokens that are its own alone."""
    ranks = 2
    at = switch(TOP_K, EXPERTS if enable_alltoall else ranks * EXPERTS)
    assert at != switch(TOP_K, ranks * EXPERTS if enable_alltoall else EXPERTS)
    named = {"ep_size": ranks, "ep_rank": 1, "enable_alltoall": enable_alltoall}
    for tokens in (at - 1, at):
        flashinfer.cutlass_fused_moe(**arguments(tokens, Mode.W4A16) | BOTH | named)
        assert module.launches[-1]["mode"] == int(Mode.W4A16 if tokens < at else Mode.BF16_INPUT)
    spread = EXPERTS if enable_alltoall else ranks * EXPERTS
    tactics = []
    for tokens in range(1, at, 5):
        flashinfer.cutlass_fused_moe(**arguments(tokens, Mode.W4A16) | named)
        tactics.append((module.launches[-1]["tactic_fc1"], module.launches[-1]["tactic_fc2"]))
    assert tactics == [plan_moe(tokens, TOP_K, spread, 64, 32, int(Mode.W4A16)) for tokens in range(1, at, 5)]
    assert len(set(tactics)) > 1


def test_a_workspace_holds_either_mode(module: RecordingModule) -> None:
    sizes = 4096, 64, 32, EXPERTS, TOP_K
    flags = {"x_dtype": torch.bfloat16, "weight_dtype": torch.uint8, "device": torch.device("cpu"), **BOTH}
    assert flashinfer.fused_moe.cutlass_fused_moe_workspace_size(*sizes, **flags) > 0
    assert {size[5] for size in module.sizes} == {int(Mode.BF16_INPUT), int(Mode.W4A16)}


def test_tuning_times_both_modes(module: RecordingModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server tunes with a batch of many tokens, and serves few."""
    module.backend.is_cuda = True
    asked: list[int] = []

    def choose_one(operator: str, runners: list[Any], *_: Any, **named: Any) -> tuple[Any, int]:
        asked.append(int(runners[0].problem.mode))
        return runners[0], -1

    monkeypatch.setattr(AutoTuner.get(), "choose_one", choose_one)
    with autotune(True):
        flashinfer.cutlass_fused_moe(**layer_arguments(Mode.W4A16) | BOTH)
    assert set(asked) == {int(Mode.BF16_INPUT), int(Mode.W4A16)}
    assert len(asked) == 4, "FC1 and FC2 of each"


def test_upstreams_kernels_are_not_asked_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "serves", lambda device: False)
    given = layer_arguments(Mode.W4A16) | BOTH
    given["input"] = given["input"].to("meta")
    with pytest.raises(ValueError, match=r"^use_mxfp8_act_scaling and use_w4_group_scaling are both True; on meta"):
        core._reject_auto(Mode.AUTO, given["input"].device)


def test_rows_of_an_expert_rise_with_tokens() -> None:
    """Else the two modes would take turns."""
    for experts in (1, 8, 32, 128, 256):
        rows = [expected_rows(n, experts) for n in range(1, 4096)]
        assert rows == sorted(rows)
