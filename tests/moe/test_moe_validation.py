# SPDX-License-Identifier: Apache-2.0
"""Every bad call raises before anything runs, and names the argument, what it was and what it may be."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer.tllm_enums import ActivationType
from moe_recording import WORKSPACE, RecordingModule, layer_arguments

import flashinfer
from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size
from flashinfer.fused_moe.sm12x_validation import MoECall, validate
from flashinfer.sm12x.probe.mma import accumulation_on
from flashinfer.testing import (
    MoECase,
    check_within_bound,
    make_moe_inputs,
    moe_reference,
)

Arguments = dict[str, Any]
CASE = MoECase(6, 160, 96, 8, 3, 0)


def _arguments(mode: int, device: torch.device) -> Arguments:
    return make_moe_inputs(dataclasses.replace(CASE, mode=mode), 0, device).arguments()


def _replace(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        arguments[name] = change(arguments[name])

    return apply


def _scale(index: int, change: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        arguments["quant_scales"] = list(arguments["quant_scales"])
        arguments["quant_scales"][index] = change(arguments["quant_scales"][index])

    return apply


def _set(**values: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update(values)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and shape, every other element of a larger buffer."""
    wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


# (mode, change, pattern that the message must match)
BAD: list[tuple[int, Callable[[Arguments], None], str]] = [
    # input
    (0, _replace("input", lambda x: x.to(torch.float8_e5m2)), r"^input is torch.float8_e5m2 \(6, 160\).*float8_e4m3fn"),
    (0, _replace("input", lambda x: x.float()), r"^input is torch.float32 \(6, 160\).*torch.float8_e4m3fn"),
    (2, _replace("input", lambda x: x.half()), r"^input is torch.float16.*torch.bfloat16"),
    (1, _replace("input", lambda x: x[0]), r"^input is torch.bfloat16 \(160,\).*2-D"),
    (1, _replace("input", lambda x: x[:, :128].contiguous()), r"^input is torch.bfloat16 \(6, 128\).*\(6, 160\)"),
    (1, _replace("input", _strided), r"^input is .*strides \(320, 2\); it must be a contiguous tensor"),
    # input_sf
    (0, _set(input_sf=None), "^input_sf is None; a float8_e4m3fn input needs its UE8M0 block scales"),
    (
        0,
        _replace("input_sf", lambda s: s[:-1]),
        r"^input_sf \(swizzled_input_sf=True\) is torch.uint8 \(1023,\).*\(1024,\)",
    ),
    (0, _set(swizzled_input_sf=False), r"^input_sf \(swizzled_input_sf=False\) is .*\(1024,\).*\(6, 5\) or \(30,\)"),
    (0, _replace("input_sf", lambda s: s.to(torch.int32)), r"^input_sf .*torch.int32 \(1024,\)"),
    (0, _replace("input_sf", _elsewhere), "^input_sf .* on meta"),
    (
        1,
        _set(input_sf=torch.zeros(1024, dtype=torch.uint8)),
        "^input_sf is .*mode HALF_INPUT takes an unquantized input",
    ),
    (2, _set(input_sf=torch.zeros(1024, dtype=torch.uint8)), "^input_sf is .*mode W4A16 takes an unquantized input"),
    # routing
    (
        0,
        _replace("token_selected_experts", lambda i: i.long()),
        r"^token_selected_experts is torch.int64 \(6, 3\).*torch.int32",
    ),
    (0, _replace("token_selected_experts", lambda i: i[:5]), r"^token_selected_experts is .*\(5, 3\).*\(6, 3\)"),
    (0, _replace("token_selected_experts", lambda i: i.flatten()), r"^token_selected_experts is .*\(18,\).*2-D"),
    (0, _replace("token_selected_experts", _strided), "^token_selected_experts is .*strides"),
    (0, _replace("token_selected_experts", _elsewhere), "^token_selected_experts is .* on meta"),
    (0, _replace("token_selected_experts", lambda i: i[:, :0]), r"^top_k .* is 0; it must be in \[1, 8\]"),
    (
        0,
        _replace("token_selected_experts", lambda i: i.repeat(1, 3)),
        r"^top_k \(token_selected_experts.shape\[1\]\) is 9; it must be in \[1, 8\], the number of experts",
    ),
    (0, _replace("token_final_scales", lambda s: s.bfloat16()), "^token_final_scales is torch.bfloat16.*torch.float32"),
    (
        0,
        _replace("token_final_scales", lambda s: s[:, :2].contiguous()),
        r"^token_final_scales is .*\(6, 2\).*\(6, 3\)",
    ),
    (0, _replace("token_final_scales", lambda s: s.T.contiguous().T), "^token_final_scales is .*strides"),
    # weights
    (0, _replace("fc1_expert_weights", lambda w: w[0]), r"^fc1_expert_weights is .*\(192, 80\).*3-D"),
    (0, _replace("fc2_expert_weights", lambda w: w[0]), "^fc2_expert_weights is .*3-D"),
    (
        0,
        _replace("fc2_expert_weights", lambda w: w.to(torch.int32)),
        "^fc2_expert_weights is torch.int32.*torch.int64 view",
    ),
    (0, _replace("fc1_expert_weights", lambda w: w[:7]), r"^fc1_expert_weights is .*\(7, 192, 80\).*\(8, 192, 80\)"),
    (
        0,
        _replace("fc1_expert_weights", lambda w: w[:, :96].contiguous()),
        r"^fc1_expert_weights is .*\(8, 96, 80\).*\(8, 192, 80\)",
    ),
    (0, _replace("fc1_expert_weights", _strided), "^fc1_expert_weights is .*strides"),
    (0, _replace("fc2_expert_weights", _strided), "^fc2_expert_weights is .*strides"),
    (0, _replace("fc1_expert_weights", _elsewhere), "^fc1_expert_weights is .* on meta"),
    (0, _replace("fc2_expert_weights", _elsewhere), "^fc2_expert_weights is .* on meta"),
    (0, _replace("fc2_expert_weights", lambda w: w[:0]), "^fc2_expert_weights is .*1 to 512 experts"),
    (
        0,
        _replace("fc2_expert_weights", lambda w: w[..., :40].contiguous()),
        r"^intermediate size .* is 80; it must be a positive multiple of 32 \(pad the weights with zeros to 96\)",
    ),
    (0, _replace("fc2_expert_weights", lambda w: w[:, :150].contiguous()), r"^hidden size .* is 150; .*multiple of 32"),
    # quant_scales
    (
        0,
        _replace("quant_scales", lambda s: s[:3]),
        r"^quant_scales is a list of 3; mode MXFP8_INPUT takes the 4 tensors",
    ),
    (
        1,
        _replace("quant_scales", lambda s: s[::2]),
        "^quant_scales is a list of 2; mode HALF_INPUT takes the 4 tensors",
    ),
    (2, _replace("quant_scales", lambda s: [*s, *s]), "^quant_scales is a list of 4; mode W4A16 takes the 2 tensors"),
    (0, _set(quant_scales=None), "^quant_scales is None"),
    (0, _scale(0, lambda s: None), r"^quant_scales\[0\] is None; it must be contiguous 128x4 block scales"),
    (
        0,
        _scale(0, lambda s: s[:, :128].contiguous()),
        r"^quant_scales\[0\] is torch.uint8 \(8, 128, 8\).*\(8, 256, 8\)",
    ),
    (0, _scale(2, lambda s: s[..., :3].contiguous()), r"^quant_scales\[2\] is .*\(8, 256, 3\).*\(8, 256, 4\)"),
    (0, _scale(2, lambda s: s.float()), r"^quant_scales\[2\] is torch.float32"),
    (0, _scale(0, _strided), r"^quant_scales\[0\] is .*strides"),
    (0, _scale(0, _elsewhere), r"^quant_scales\[0\] is .* on meta"),
    (2, _scale(1, lambda s: s[:7]), r"^quant_scales\[1\] is .*\(7, 256, 4\)"),
    (0, _scale(1, lambda g: g[:7]), r"^quant_scales\[1\] is torch.float32 \(7,\).*\(8,\).*one factor per local expert"),
    (0, _scale(3, lambda g: g.half()), r"^quant_scales\[3\] is torch.float16 \(8,\).*torch.float32"),
    # biases and activation parameters
    (
        0,
        _replace("fc1_expert_biases", lambda b: b[:, :96].contiguous()),
        r"^fc1_expert_biases is .*\(8, 96\).*\(8, 192\)",
    ),
    (0, _replace("fc2_expert_biases", lambda b: b[:7]), r"^fc2_expert_biases is .*\(7, 160\).*\(8, 160\)"),
    (0, _replace("fc1_expert_biases", lambda b: b.float()), "^fc1_expert_biases is torch.float32.*torch.bfloat16"),
    (0, _replace("fc2_expert_biases", lambda b: b.half()), "^fc2_expert_biases is torch.float16.*torch.bfloat16"),
    (0, _replace("fc2_expert_biases", _strided), "^fc2_expert_biases is .*strides"),
    (0, _replace("swiglu_alpha", lambda a: a[:1]), r"^swiglu_alpha is torch.float32 \(1,\).*\(8,\)"),
    (0, _replace("swiglu_beta", lambda b: b.bfloat16()), "^swiglu_beta is torch.bfloat16.*torch.float32"),
    (0, _replace("swiglu_limit", _strided), "^swiglu_limit is .*strides"),
    (0, _set(swiglu_limit=7.0), "^swiglu_limit is 7.0; it must be a contiguous tensor"),
    # output and workspace
    (0, _set(output_dtype=torch.float32), "^output_dtype is torch.float32; it must be torch.bfloat16 or torch.float16"),
    (0, _set(output=torch.empty(6, 128, dtype=torch.bfloat16)), r"^output is .*\(6, 128\).*\(6, 160\)"),
    (0, _set(output=torch.empty(6, 160, dtype=torch.float16)), "^output is torch.float16.*torch.bfloat16"),
    (0, _set(output=torch.empty(160, 6, dtype=torch.bfloat16).T), "^output is .*strides"),
    (0, _set(workspace_buffer=torch.empty(2, 8, dtype=torch.uint8)), r"^workspace_buffer is torch.uint8 \(2, 8\).*1-D"),
    (0, _set(workspace_buffer=torch.empty(64)), "^workspace_buffer is torch.float32.*torch.uint8 or torch.int8"),
    (0, _set(workspace_buffer=torch.empty(64, dtype=torch.uint8, device="meta")), "^workspace_buffer is .* on meta"),
    (0, _set(workspace_buffer=17), "^workspace_buffer is 17; it must be a 1-D"),
    # parallel sizes
    (0, _set(ep_size=0), r"^ep_size is 0; it must be an integer in \[1, 2147483647\]"),
    (0, _set(ep_size=2, ep_rank=2), r"^ep_rank is 2; it must be an integer in \[0, 1\], below ep_size"),
    (0, _set(ep_size=2, ep_rank=-1), r"^ep_rank is -1; it must be an integer in \[0, 1\]"),
    (0, _set(tp_size=-1), "^tp_size is -1"),
    (0, _set(tp_size=2, tp_rank=5), r"^tp_rank is 5; it must be an integer in \[0, 1\], below tp_size"),
    (0, _set(cluster_size=2), "^cluster_size is 2, cluster_rank 0; they must be 1 and 0"),
    # options
    (0, _set(use_w4_group_scaling=True), "^use_mxfp8_act_scaling and use_w4_group_scaling are both True"),
    (0, _set(profile_ids=[0]), r"^profile_ids is \[0\]; it must be \[fc1_tactic, fc2_tactic\]"),
    (
        0,
        _set(profile_ids=[0, 99]),
        r"^profile_ids is \[0, 99\].*mode MXFP8_INPUT, one of 1008128 \(mxfp8_m8_k128\), 1008256 \(mxfp8_m8_k256\)",
    ),
    (0, _set(profile_ids=[-2, 0]), r"^profile_ids is \[-2, 0\]"),
    (2, _set(profile_ids=[0, -1]), r"^profile_ids is \[0, -1\].*mode W4A16, one of 3008128 \(bf16_m8_k128\), 3016128 "),
    (0, _set(situ_beta=torch.ones(8)), "^situ_beta is given; it belongs to another activation_type"),
    (0, _set(situ_linear_beta=torch.ones(8)), "^situ_linear_beta is given"),
    (0, _set(clamped_relu2_limit=torch.ones(1)), "^clamped_relu2_limit is given"),
]


@pytest.mark.parametrize(("mode", "change", "message"), BAD, ids=[entry[2][:60] for entry in BAD])
def test_bad_argument_is_named(
    mode: int, change: Callable[[Arguments], None], message: str, device: torch.device
) -> None:
    arguments = _arguments(mode, device)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            assert value.device == device, name
    change(arguments)
    for name in ("input_sf", "output", "workspace_buffer"):  # tensors that a change made on the CPU
        value = arguments.get(name)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            arguments[name] = value.to(device)
    with pytest.raises((ValueError, TypeError), match=message):
        flashinfer.cutlass_fused_moe(**arguments)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_good_arguments_pass_after_bad_ones(mode: int, device: torch.device) -> None:
    """A refused call leaves nothing behind that a good one would trip over, nor the other way round."""
    good = _arguments(mode, device)
    bad = {**good, "token_final_scales": good["token_final_scales"][:, :2].contiguous()}
    for _ in range(2):
        with pytest.raises(ValueError, match="token_final_scales"):
            flashinfer.cutlass_fused_moe(**bad)
        assert flashinfer.cutlass_fused_moe(**good).shape == (6, 160)


@pytest.mark.parametrize("bad_id", [-2, -(2**31), 8, 2**31 - 1])
def test_expert_id_out_of_range(bad_id: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments(1, device)
    arguments["token_selected_experts"][4, 1] = bad_id
    if device.type == "cuda":
        monkeypatch.setenv("FLASHINFER_SM12X_CHECK", "1")
    with pytest.raises(
        ValueError,
        match=rf"^token_selected_experts\[4, 1\] is {bad_id}; expert ids must be in \[0, 8\), or -1 for padding",
    ):
        flashinfer.cutlass_fused_moe(**arguments)
    # Padding of an all-to-all is no error and contributes nothing.
    padded = flashinfer.cutlass_fused_moe(**arguments, enable_alltoall=True)
    arguments["token_selected_experts"][4, 1] = arguments["token_selected_experts"][4, 0]
    arguments["token_final_scales"][4, 1] = 0.0
    assert torch.equal(padded, flashinfer.cutlass_fused_moe(**arguments))


@pytest.mark.parametrize(("ep_size", "ep_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_padding_contributes_nothing(
    mode: int, ep_size: int, ep_rank: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert id -1, which vLLM gives padding tokens, whole batches of them while a graph is captured."""
    if device.type == "cuda":
        monkeypatch.setenv("FLASHINFER_SM12X_CHECK", "1")
    inputs = make_moe_inputs(dataclasses.replace(CASE, mode=mode, ep_size=ep_size, ep_rank=ep_rank), 7, device)
    arguments = inputs.arguments()
    ids = arguments["token_selected_experts"]
    ids[[1, 4]] = -1
    ids[2, 0] = ids[3, 2] = -1
    output = flashinfer.cutlass_fused_moe(**arguments)
    assert output.any()
    assert not output[[1, 4]].any()
    accumulation = accumulation_on(device)
    check_within_bound(
        output, *moe_reference(inputs, accumulation), f"mode {mode}, rank {ep_rank} of {ep_size}, seed 7"
    )
    assert torch.equal(flashinfer.cutlass_fused_moe(**arguments, enable_alltoall=True), output)
    ids.fill_(-1)
    written = torch.full_like(output, torch.nan)
    flashinfer.cutlass_fused_moe(**arguments, output=written)
    assert torch.equal(written, torch.zeros_like(output))
    reference, bound = moe_reference(inputs, accumulation)
    assert not reference.any()
    assert not bound.any()


def test_expert_ids_are_global(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments(1, device)
    if device.type == "cuda":
        monkeypatch.setenv("FLASHINFER_SM12X_CHECK", "1")
    arguments["token_selected_experts"][:] = torch.tensor([15, 0, 9], device=device)
    arguments.update(ep_size=2, ep_rank=1)
    flashinfer.cutlass_fused_moe(**arguments)
    arguments["token_selected_experts"][5, 2] = 16
    with pytest.raises(ValueError, match=r"\[5, 2\] is 16; expert ids must be in \[0, 16\), or -1"):
        flashinfer.cutlass_fused_moe(**arguments)


def test_latency_mode_is_refused(device: torch.device) -> None:
    with pytest.raises(NotImplementedError, match=r"^min_latency_mode is True"):
        flashinfer.cutlass_fused_moe(**_arguments(0, device), min_latency_mode=True)


@pytest.mark.parametrize(
    "change",
    [
        _set(activation_type=ActivationType.Geglu),
        _set(use_mxfp8_act_scaling=False),
        _set(use_packed_weights=True),
        _set(use_wfp4afp8_humming=True),
        _set(use_deepseek_fp8_block_scale=True),
        _replace("fc1_expert_weights", lambda w: w.bfloat16()),
    ],
)
def test_other_kinds_are_not_served_on_the_cpu(change: Callable[[Arguments], None]) -> None:
    arguments = _arguments(0, torch.device("cpu"))
    change(arguments)
    with pytest.raises(NotImplementedError, match=r"^cutlass_fused_moe on CPU tensors serves MXFP4 weights"):
        flashinfer.cutlass_fused_moe(**arguments)


def test_unknown_backend_is_upstreams_error() -> None:
    with pytest.raises(ValueError, match="unsupported fused MoE backend"):
        flashinfer.cutlass_fused_moe(**_arguments(0, torch.device("cpu")), backend="nonsense")


SIZE = {
    "max_num_tokens": 8,
    "hidden_size": 160,
    "intermediate_size": 96,
    "num_experts_total": 8,
    "top_k": 3,
    "x_dtype": torch.bfloat16,
    "weight_dtype": torch.int64,
    "use_mxfp8_act_scaling": True,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_tokens": 0}, r"^max_num_tokens is 0; it must be an integer in \[1, 2147483647\]"),
        ({"max_num_tokens": 2**29}, "^max_num_tokens is 536870912; with top_k 3 it must be at most 357913941"),
        ({"hidden_size": 150}, "^hidden_size is 150; it must be a positive multiple of 32"),
        ({"intermediate_size": -32}, "^intermediate_size is -32"),
        ({"num_experts_total": 0}, "^num_experts_total is 0"),
        ({"top_k": 0}, "^top_k is 0"),
        ({"top_k": 9}, r"^top_k is 9; it must be an integer in \[1, 8\], num_experts_total"),
        ({"ep_size": 3}, "^num_experts_total is 8; it must be a multiple of ep_size, 3"),
        ({"ep_size": 2, "ep_rank": 2}, "^ep_rank is 2"),
        ({"tp_size": 0}, "^tp_size is 0"),
    ],
)
def test_workspace_size_names_what_is_wrong(change: dict[str, Any], message: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=message):
        cutlass_fused_moe_workspace_size(**{**SIZE, **change}, device=device)


@pytest.mark.parametrize(("given", "seen"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_workspace_size_of_a_device_that_is_not_there(given: str, seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    message = f"^device is {given}; it must be the CPU or one of the {seen} CUDA devices here$"
    with pytest.raises(ValueError, match=message):
        cutlass_fused_moe_workspace_size(**SIZE, device=given)  # type: ignore[arg-type]


def test_workspace_size(device: torch.device) -> None:
    size = cutlass_fused_moe_workspace_size(**SIZE, device=device)
    assert size == 0 if device.type == "cpu" else size > 0
    if device.type == "cuda":
        arguments = _arguments(1, device)
        with pytest.raises(ValueError, match=r"^workspace_buffer holds 10 bytes; this call needs \d+"):
            flashinfer.cutlass_fused_moe(
                **arguments, workspace_buffer=torch.empty(10, dtype=torch.uint8, device=device)
            )


def test_workspace_size_of_other_kinds_on_the_cpu() -> None:
    with pytest.raises(NotImplementedError, match="on the CPU only MXFP4 weights are served"):
        cutlass_fused_moe_workspace_size(**{**SIZE, "weight_dtype": torch.bfloat16}, device=torch.device("cpu"))


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


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("x_dtype", None), ("x_dtype", "bfloat16"), ("x_dtype", torch.float32), ("output_dtype", None),
        ("output_dtype", torch.float32), ("device", 2.5), ("device", "cudax"), ("device", "meta"), ("device", [0]),
    ],
    ids=str,
)  # fmt: skip
def test_dtypes_and_devices_of_the_workspace_size(name: str, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}.* is .*; "):
        cutlass_fused_moe_workspace_size(**{**SIZE, "device": "cpu", name: bad})


def test_a_workspace_that_is_a_byte_too_small(module: RecordingModule) -> None:
    space = torch.empty(WORKSPACE + 128, dtype=torch.uint8)
    space = space[-space.data_ptr() % 128 :][: WORKSPACE - 1]
    with pytest.raises(ValueError, match=r"^workspace_buffer holds 4095 bytes; this call needs 4096"):
        cutlass_fused_moe(**layer_arguments(0), workspace_buffer=space)
    assert module.launches == []
