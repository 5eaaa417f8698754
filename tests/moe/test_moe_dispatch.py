# SPDX-License-Identifier: Apache-2.0
"""Where a call goes and what reaches the kernel module: with a backend that records."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer.tllm_enums import ActivationType
from moe_recording import WORKSPACE, RecordingModule, layer_arguments

import flashinfer
from flashinfer.fused_moe import core, sm12x_launch, sm12x_planner
from flashinfer.fused_moe.sm12x_planner import computes_layer
from flashinfer.fused_moe.sm12x_validation import Mode, MoECall
from flashinfer.sm12x import device_class, devices
from flashinfer.sm12x.backend import checks_values
from flashinfer.sm12x.instances import HOPPER, INSTANCES, MAIN_MODULE, SM12X, Instance, index_of, is_alone, tactic


def numbers(tactics: Iterable[int]) -> list[int]:
    """The tactics' numbers, in the form of ``profile_ids``."""
    return [-1 if tactic == -1 else INSTANCES[tactic].profile_id for tactic in tactics]


def test_signatures_are_upstreams() -> None:
    for name in ("cutlass_fused_moe", "cutlass_fused_moe_workspace_size"):
        ours = inspect.signature(getattr(flashinfer.fused_moe, name))
        theirs = inspect.signature(getattr(core._upstream, name))
        assert list(ours.parameters) == list(theirs.parameters)
        for parameter, other in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
            assert (parameter.name, parameter.kind, parameter.default) == (other.name, other.kind, other.default)


def test_one_function_under_all_names() -> None:
    assert flashinfer.cutlass_fused_moe is flashinfer.fused_moe.cutlass_fused_moe is core.cutlass_fused_moe
    assert flashinfer.fused_moe.cutlass_fused_moe_workspace_size is core.cutlass_fused_moe_workspace_size


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_launch_gets_the_planners_tactics_and_tensors_as_they_are(mode: int, module: RecordingModule) -> None:
    """No tensor is copied; weights and scales are only viewed as bytes. Tests on the virtual SM121 check their
    places."""
    arguments = layer_arguments(mode)
    result = flashinfer.cutlass_fused_moe(**arguments, enable_pdl=False)
    flashinfer.cutlass_fused_moe(**arguments, enable_pdl=True)
    launch, other = module.launches
    assert (launch["enable_pdl"], other["enable_pdl"]) == (False, True)
    given = {each.data_ptr() for each in (*arguments.values(), *arguments["quant_scales"]) if torch.is_tensor(each)}
    taken = {each.data_ptr() for each in launch.values() if torch.is_tensor(each)}
    assert taken - given == {result.data_ptr(), launch["workspace"].data_ptr()}
    assert launch["workspace"].shape == (WORKSPACE,)
    assert (launch["tactic_fc1"], launch["tactic_fc2"]) == sm12x_planner.plan_moe(
        6, 3, 8, 160, 96, mode, device_class.GB10
    )
    assert module.sizes == [(6, 160, 96, 8, 3, mode, False)]  # no room for bfloat16: the MMA takes block scales


def test_the_activation_reaches_the_launch(module: RecordingModule) -> None:
    arguments = layer_arguments(0) | {"swiglu_alpha": None, "swiglu_beta": None}
    for activation in (ActivationType.SwigluStep, 7, ActivationType.SwigluBias, 3):
        flashinfer.cutlass_fused_moe(**arguments | {"activation_type": activation})
        assert module.launches[-1]["activation_type"] == activation


def test_an_activation_is_compared_with_the_kernels(module: RecordingModule) -> None:
    arguments = layer_arguments(0)
    for activation in (torch.tensor(3), np.array(3)):
        flashinfer.cutlass_fused_moe(**arguments | {"activation_type": activation})
        assert module.launches[-1]["activation_type"] == 3
    for activation in ([3], np.array(1), None):
        with pytest.raises(NotImplementedError, match="activation_type"):
            flashinfer.cutlass_fused_moe(**arguments | {"activation_type": activation})


def test_absent_routing_weights_reach_the_kernels_as_such(module: RecordingModule) -> None:
    # Not as a tensor of ones: filled at first use, it would be filled by a graph that is being captured, at its replay.
    flashinfer.cutlass_fused_moe(**{**layer_arguments(1), "token_final_scales": None})
    assert module.launches[0]["token_final_scales"] is None


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_stream_with_fewer_sms_gets_a_pair_of_gemms(mode: int, module: RecordingModule) -> None:
    streamed = sm12x_planner.plan_moe(6, 3, 8, 160, 96, mode)
    pair = sm12x_planner.plan_moe(6, 3, 8, 160, 96, mode, all_sms=False)
    assert computes_layer(streamed[0])
    assert not computes_layer(pair[0])
    arguments = layer_arguments(mode)
    for few_sms in (False, True, True, False):  # the streams of one process differ
        module.few_sms = few_sms
        flashinfer.cutlass_fused_moe(**arguments)
    tactics = [(launch["tactic_fc1"], launch["tactic_fc2"]) for launch in module.launches]
    assert tactics == [streamed, pair, pair, streamed]
    module.few_sms = True
    with pytest.raises(
        ValueError, match=f"{INSTANCES[streamed[0]].name}, .* needs all SMs of the device, and this stream has fewer"
    ):
        flashinfer.cutlass_fused_moe(**arguments, profile_ids=numbers(streamed))


def test_no_tokens_launch_nothing(module: RecordingModule) -> None:
    arguments = layer_arguments(1, num_tokens=0)
    assert flashinfer.cutlass_fused_moe(**arguments).shape == (0, 160)
    assert module.launches == []


def test_tactics_of_different_operands_are_refused(module: RecordingModule) -> None:
    as_bf16, native = tactic("mxfp8_as_bf16_m32_k128"), tactic("mxfp8_m32_k256")
    place = index_of("mxfp8_as_bf16_m32_k128")
    names = ", ".join(f"{row.profile_id} ({row.name})" for row in SM12X if row.activation == "mxfp8")
    with pytest.raises(ValueError, match=re.escape(f"in mode MXFP8_INPUT, one of {names}") + "$"):
        flashinfer.cutlass_fused_moe(**layer_arguments(0), profile_ids=[as_bf16, as_bf16])
    module.backend.device_class, module.backend.tactics = device_class.HOPPER, INSTANCES
    flashinfer.cutlass_fused_moe(**layer_arguments(0), profile_ids=[as_bf16, -1])
    assert (module.launches[-1]["tactic_fc1"], module.launches[-1]["tactic_fc2"]) == (place, place)
    assert module.sizes[-1][-1] is True, "room for bfloat16"
    for profile_ids in ([as_bf16, native], [native, as_bf16]):
        with pytest.raises(
            ValueError, match=r"must keep activations in the same type, but these are mxfp8_.* and mxfp8_"
        ):
            flashinfer.cutlass_fused_moe(**layer_arguments(0), profile_ids=profile_ids)
    assert len(module.launches) == 1


@pytest.mark.parametrize("table", [SM12X, HOPPER], ids=["SM12x", "Hopper"])
def test_an_instance_of_its_own_module_is_built_and_registered_once(
    table: tuple[Instance, ...], module: RecordingModule
) -> None:
    extra = next(row.index for row in table if is_alone(row))
    for _ in range(2):
        sm12x_launch.ensure_instance(module.backend, extra)
        sm12x_launch.ensure_instance(module.backend, 0)
    assert module.backend.built == [extra]
    assert module.registered == [(extra, 4711)]


@pytest.mark.parametrize(
    ("capability", "switch", "served"),
    [
        ((12, 1), None, True),
        ((12, 0), "1", True),
        ((12, 1), "0", False),
        ((9, 0), None, False),
        ((9, 0), "1", True),
        ((9, 0), "0", False),
        ((10, 0), None, False),
    ],
)
def test_switch_and_capability_choose_the_backend(
    capability: tuple[int, int], switch: str | None, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_capability", lambda index: capability)
    if switch is None:
        monkeypatch.delenv("FLASHINFER_SM12X_MOE", raising=False)
    else:
        monkeypatch.setenv("FLASHINFER_SM12X_MOE", switch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert devices.serves(torch.device("cuda", 0)) is served
    assert devices.serves(torch.device("cpu"))
    assert not devices.serves(torch.device("meta"))


def test_opting_in_where_there_are_no_kernels_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_capability", lambda index: (10, 3))
    monkeypatch.setenv("FLASHINFER_SM12X_MOE", "1")
    devices._serves.cache_clear()
    with pytest.warns(UserWarning, match=r"no kernels for compute capability 10\.3"):
        assert not devices.serves_cuda(0)


@pytest.mark.parametrize("name", ["FLASHINFER_SM12X_MOE", "FLASHINFER_SM12X_CHECK"])
def test_switch_with_another_value_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_capability", lambda index: (12, 1))
    monkeypatch.setenv(name, "yes")
    read = checks_values if name.endswith("CHECK") else devices.serves
    with pytest.raises(ValueError, match=f"^{name} is 'yes'; it may be 0, 1 or unset"):
        read(torch.device("cuda", 0))


def test_value_check_follows_its_switch_and_not_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert not checks_values(cuda)
    monkeypatch.setenv("FLASHINFER_SM12X_CHECK", "1")
    assert checks_values(cuda)
    capturing = True
    assert not checks_values(cuda)
    assert checks_values(torch.device("cpu"))


def test_a_call_holds_every_argument_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields are given by their places, so that a swap would be silent."""
    calls: list[Any] = []
    monkeypatch.setattr(core, "fused_moe", calls.append)
    known = {name: layer_arguments(2)[name] for name in ("input", "fc1_expert_weights", "use_w4_group_scaling")}
    parameters = inspect.signature(core.cutlass_fused_moe).parameters
    given = {name: object() for name in MoECall._fields if name in parameters} | known | {"activation_type": 7}
    core.cutlass_fused_moe(**given)
    (call,) = calls
    assert call.moe_mode == Mode.W4A16
    del given["use_w4_group_scaling"]
    assert {name: getattr(call, name) for name in given} == given


def test_other_kinds_go_to_upstream_with_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument is passed on under its own name, none dropped and none swapped."""
    seen: dict[str, Any] = {}
    signature = inspect.signature(core._upstream.cutlass_fused_moe)

    def record(*args: Any, **kwargs: Any) -> str:
        seen.update(signature.bind(*args, **kwargs).arguments)
        return "upstream"

    monkeypatch.setattr(core._upstream, "cutlass_fused_moe", record)
    given: dict[str, Any] = {name: f"value of {name}" for name in signature.parameters}
    given["input"] = torch.empty(2, 4, device="meta")
    given["fc1_expert_weights"] = torch.empty(2, 4, device="meta")
    assert flashinfer.cutlass_fused_moe(**given) == "upstream"
    assert seen.keys() == given.keys()
    assert all(seen[name] is given[name] for name in given)


def test_upstreams_sm12x_module_has_its_own_name_and_is_built_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer.jit.fused_moe as generators

    class Stop(Exception):
        pass

    def upstream_generator(use_fast_build: bool = False) -> Any:
        raise Stop(f"upstream module asked for, fast build {use_fast_build}")

    monkeypatch.setattr(generators, "gen_cutlass_fused_moe_sm120_upstream_module", upstream_generator)
    for backend in ("120", "121"):
        module = core.get_cutlass_fused_moe_module(backend, True)
        with pytest.raises(Stop, match="upstream module asked for, fast build True"):
            _ = module.cutlass_fused_moe
    with pytest.raises(ValueError, match="Invalid backend"):
        core.get_cutlass_fused_moe_module("75")


RUNNER_OPTIONS = {
    "x_dtype": torch.float8_e4m3fn, "weight_dtype": torch.int64, "output_dtype": torch.bfloat16, "top_k": 3,
    "tp_size": 1, "tp_rank": 0, "ep_size": 1, "ep_rank": 0, "cluster_size": 1, "cluster_rank": 0,
    "enable_alltoall": False, "use_deepseek_fp8_block_scale": False, "use_w4_group_scaling": False,
    "use_mxfp8_act_scaling": True, "min_latency_mode": False, "enable_pdl": True,
    "activation_type": ActivationType.Swiglu, "use_packed_weights": False, "use_fused_finalize": True,
    "use_wfp4afp8_humming": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "options", "relu2"),
    [
        (0, {}, False),
        (1, {"x_dtype": torch.bfloat16}, False),
        (2, {"x_dtype": torch.bfloat16, "use_mxfp8_act_scaling": False, "use_w4_group_scaling": True}, False),
        (0, {"activation_type": ActivationType.Relu2}, True),
    ],
)
def test_unified_layer_tunes_this_forks_tactics(
    mode: int, options: dict[str, Any], relu2: bool, module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``MoELayer`` ranks both GEMMs' tactics with the inner runner and passes the pair on as ``profile_ids``."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "serves", lambda device: True)
    runner = core.get_cutlass_fused_moe_module("121").MoERunner(**{**RUNNER_OPTIONS, **options})
    arguments = layer_arguments(mode, relu2=relu2)
    weights = [arguments[name].view(torch.int64) for name in ("fc1_expert_weights", "fc2_expert_weights")]
    inputs = [arguments["input"], weights[0], None, weights[1], None]
    for stage in (1, 2):
        runner.gemm_idx_for_tuning = stage
        tactics = runner.get_valid_tactics(inputs, None)
        expected = [
            row.profile_id
            for row in MAIN_MODULE
            if row.activation == ("bf16" if mode == 2 else "mxfp8") and not (stage == 2 and computes_layer(row.index))
        ]
        assert tactics == expected
        assert runner.validate_tactic(inputs, tactics[0]) and not runner.validate_tactic(inputs, 5), "a place is none"
        runner.forward(inputs, tactic=tactics[-1], do_preparation=True, gemm_idx=stage)
        launch = module.launches[-1]
        assert INSTANCES[launch[f"tactic_fc{stage}"]].profile_id == tactics[-1]
        assert launch["input"] is inputs[0]
        assert launch["fc1_w"].shape == (8, 96 if relu2 else 192, 80)
        assert launch["fc1_sf"].shape == (8, 128 if relu2 else 256, 8)
        assert launch["activation_type"] == (6 if relu2 else 3)
        assert launch["fc2_sf"].shape == (8, 256, 4)
        assert (launch["input_sf"] is None) == (mode != 0)
    hash(runner)
    flashinfer.cutlass_fused_moe(**arguments, profile_ids=[tactics[0], tactics[-1]])
    launched = module.launches[-1]["tactic_fc1"], module.launches[-1]["tactic_fc2"]
    assert numbers(launched) == [tactics[0], tactics[-1]]
