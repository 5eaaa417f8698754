# SPDX-License-Identifier: Apache-2.0
"""Expert ids, padding and workspaces, and what may be an integer. Other bad calls:
``tests/sm12x/test_bad_calls.py``."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer.tllm_enums import ActivationType
from moe_recording import WORKSPACE, RecordingModule, layer_arguments
from operator_calls import workspace_sizes

from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size
from flashinfer.fused_moe.sm12x_validation import MoECall, validate
from flashinfer.testing import MoECase, check_within_bound, make_moe_inputs, moe_reference
from flashinfer_sm12x.doctor.probe.mma import accumulation_on

Arguments = dict[str, Any]
CASE = MoECase(6, 160, 96, 8, 3, 0)


@pytest.fixture(autouse=True)
def _values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too, where a call looks at none otherwise."""
    monkeypatch.setenv("FLASHINFER_SM12X_CHECK", "1")


def _arguments(mode: int, device: torch.device) -> Arguments:
    return make_moe_inputs(dataclasses.replace(CASE, mode=mode), 0, device).arguments()


@pytest.mark.parametrize("bad_id", [-2, -(2**31), 8, 2**31 - 1])
def test_expert_id_out_of_range(bad_id: int, device: torch.device) -> None:
    arguments = _arguments(1, device)
    arguments["token_selected_experts"][4, 1] = bad_id
    with pytest.raises(
        ValueError,
        match=rf"^token_selected_experts\[4, 1\] is {bad_id}; expert ids must be in \[0, 8\), or -1 for padding",
    ):
        cutlass_fused_moe(**arguments)
    # Padding of an all-to-all is no error and contributes nothing.
    padded = cutlass_fused_moe(**arguments, enable_alltoall=True)
    arguments["token_selected_experts"][4, 1] = arguments["token_selected_experts"][4, 0]
    arguments["token_final_scales"][4, 1] = 0.0
    assert torch.equal(padded, cutlass_fused_moe(**arguments))


@pytest.mark.parametrize(("ep_size", "ep_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_padding_contributes_nothing(mode: int, ep_size: int, ep_rank: int, device: torch.device) -> None:
    """Expert id -1, which vLLM gives padding tokens, whole batches of them while a graph is captured."""
    inputs = make_moe_inputs(dataclasses.replace(CASE, mode=mode, ep_size=ep_size, ep_rank=ep_rank), 7, device)
    arguments = inputs.arguments()
    ids = arguments["token_selected_experts"]
    ids[[1, 4]] = -1
    ids[2, 0] = ids[3, 2] = -1
    output = cutlass_fused_moe(**arguments)
    assert output.any()
    assert not output[[1, 4]].any()
    accumulation = accumulation_on(device)
    check_within_bound(
        output, *moe_reference(inputs, accumulation), f"mode {mode}, rank {ep_rank} of {ep_size}, seed 7"
    )
    assert torch.equal(cutlass_fused_moe(**arguments, enable_alltoall=True), output)
    ids.fill_(-1)
    written = torch.full_like(output, torch.nan)
    cutlass_fused_moe(**arguments, output=written)
    assert torch.equal(written, torch.zeros_like(output))
    reference, bound = moe_reference(inputs, accumulation)
    assert not reference.any()
    assert not bound.any()


def test_expert_ids_are_global(device: torch.device) -> None:
    arguments = _arguments(1, device)
    arguments["token_selected_experts"][:] = torch.tensor([15, 0, 9], device=device)
    arguments.update(ep_size=2, ep_rank=1)
    cutlass_fused_moe(**arguments)
    arguments["token_selected_experts"][5, 2] = 16
    with pytest.raises(ValueError, match=r"\[5, 2\] is 16; expert ids must be in \[0, 16\), or -1"):
        cutlass_fused_moe(**arguments)


@pytest.mark.parametrize("activation", [ActivationType.Swiglu, ActivationType.SwigluStep])
@pytest.mark.parametrize("alltoall", [False, True])
def test_a_limit_below_zero_is_no_limit(activation: ActivationType, alltoall: bool, device: torch.device) -> None:
    """``[-limit, limit]`` is empty, and what clamps to it is the order of a minimum and a maximum."""
    arguments = _arguments(1, device)
    arguments.update(activation_type=activation, enable_alltoall=alltoall, swiglu_alpha=None, swiglu_beta=None)
    limits = arguments["swiglu_limit"] = torch.full((8,), torch.inf, device=device)
    for allowed in (0.0, -0.0, 1e-45, torch.inf, torch.nan):
        limits[3] = allowed
        cutlass_fused_moe(**arguments)
    for refused, shown in ((-1e-45, "-1.4013e-45"), (-7.0, "-7"), (-torch.inf, "-inf")):
        limits[3] = refused
        message = rf"^swiglu_limit\[3\] is {shown}; it must not be below 0, and infinity is no limit \(1 of 8 are\)$"
        with pytest.raises(ValueError, match=message):
            cutlass_fused_moe(**arguments)


@pytest.mark.parametrize(("given", "seen"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_workspace_size_of_a_device_that_is_not_there(given: str, seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    message = f"^device is {given}; it must be the CPU or one of the {seen} CUDA devices here$"
    with pytest.raises(ValueError, match=message):
        cutlass_fused_moe_workspace_size(**workspace_sizes() | {"device": given})


def test_workspace_size(device: torch.device) -> None:
    size = cutlass_fused_moe_workspace_size(**workspace_sizes() | {"device": device})
    assert size == 0 if device.type == "cpu" else size > 0


@pytest.mark.parametrize("one", [True, np.int64(1)], ids=["True", "numpy"])
@pytest.mark.parametrize("name", ["tp_size", "ep_size", "cluster_size", "tune_max_num_tokens"])
def test_what_python_takes_as_an_index_is_an_integer(name: str, one: Any, module: RecordingModule) -> None:
    arguments = layer_arguments(1)
    cutlass_fused_moe(**{**arguments, name: one})
    (launch,) = module.launches
    assert (launch["first_expert"], launch["num_experts_total"]) == (0, 8)
    assert type(launch["first_expert"]) is type(launch["num_experts_total"]) is int


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [_on_meta(item) for item in value] if isinstance(value, list) else value


def test_a_layer_on_no_device_that_computes() -> None:
    arguments = {name: _on_meta(value) for name, value in layer_arguments(0).items()}
    with pytest.raises(ValueError, match=r"^input is .* on meta; it must be on a CUDA device or the CPU"):
        cutlass_fused_moe(**arguments)


def test_more_pairs_than_the_kernels_count() -> None:
    rows = 2**31 // 6 + 1
    given = inspect.signature(cutlass_fused_moe).bind(**layer_arguments(2))
    given.apply_defaults()
    named = {name: _on_meta(value) for name, value in given.arguments.items() if name in MoECall._fields}
    call = MoECall(**named, moe_mode=2)
    call = call._replace(
        input=torch.empty(rows, 160, dtype=torch.bfloat16, device="meta"),
        token_selected_experts=torch.empty(rows, 3, dtype=torch.int32, device="meta"),
    )
    with pytest.raises(
        ValueError, match=rf"^num_tokens \(input.shape\[0\]\) is {rows}; with top_k 3 it must be at most"
    ):
        validate(call)


def test_a_workspace_that_is_a_byte_too_small(module: RecordingModule) -> None:
    space = torch.empty(WORKSPACE + 128, dtype=torch.uint8)
    space = space[-space.data_ptr() % 128 :][: WORKSPACE - 1]
    with pytest.raises(ValueError, match=r"^workspace_buffer holds 4095 bytes; this call needs 4096"):
        cutlass_fused_moe(**layer_arguments(0), workspace_buffer=space)
    assert module.launches == []
