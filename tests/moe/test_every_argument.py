# SPDX-License-Identifier: Apache-2.0
"""Each argument of each public operator, wrong in each way: an error that names it, before anything is launched."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer.tllm_enums import SfLayout
from moe_recording import WORKSPACE, RecordingModule, layer_arguments

import flashinfer
from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size
from flashinfer.fused_moe.sm12x_validation import MoECall, validate
from flashinfer.gemm import group_gemm_mxfp4_nt_groupwise, sm12x_group_gemm
from flashinfer.testing import make_group_gemm_inputs

Arguments = dict[str, Any]


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)[..., 0]


def _sparse(tensor: torch.Tensor) -> torch.Tensor:
    indices = torch.zeros((tensor.ndim, 0), dtype=torch.int64, device=tensor.device)
    values = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "None": lambda tensor: None,
    "list": lambda tensor: [1.0, 2.0],
    "numpy array": lambda tensor: np.ones(tuple(tensor.shape), np.uint8),
    "float": lambda tensor: 2.5,
    "another device": _elsewhere,
    "strided": _strided,
    "complex64": lambda tensor: torch.empty(tensor.shape, dtype=torch.complex64, device=tensor.device),
    "float32": lambda tensor: torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device),
    "sparse": _sparse,
    "one dimension more": lambda tensor: tensor[None],
    "a row less": lambda tensor: tensor[1:].clone(),
}
# What a message says of the value.
SAID = {
    "None": "None", "list": "a list of 2", "numpy array": r"a numpy\.ndarray, uint8 \(", "float": r"2\.5",
    "strided": "strides", "complex64": r"torch\.complex64", "float32": r"torch\.float32",
    "sparse": r"layout torch\.sparse_coo",
}  # fmt: skip
BAD_INTS: dict[str, Any] = {"str": "2", "float": 2.5, "None": None, "2**40": 2**40, "-1": -1, "list": [1]}
INT_SAID = {"str": "'2'", "float": r"2\.5", "None": "None", "2**40": "1099511627776", "-1": "-1", "list": "a list of 1"}


def _check(call: Callable[[], Any], name: str, said: str) -> None:
    """``call`` raises, and the message's first words are the argument's name and what was given."""
    with pytest.raises((TypeError, ValueError), match=rf"^{name}.* is .*{said}.*; ") as caught:
        call()
    print(caught.value)
    assert len(str(caught.value)) < 400


# --- cutlass_fused_moe ------------------------------------------------------------------------------------------------

MOE_TENSORS = (
    "input", "input_sf", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc2_expert_weights",
    "fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "output",
    "workspace_buffer", "quant_scales[0]", "quant_scales[1]", "quant_scales[2]", "quant_scales[3]",
)  # fmt: skip
OPTIONAL = {
    "token_final_scales", "fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit",
    "output", "workspace_buffer",
}  # fmt: skip
FLOAT32 = {"token_final_scales", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "quant_scales[1]", "quant_scales[3]"}
NOT_MXFP4 = {"complex64", "float32"}
PATHS = ("CPU", "kernels")


def _moe(mode: int = 0) -> Arguments:
    arguments = layer_arguments(mode)
    arguments["output"] = torch.empty(6, 160, dtype=torch.bfloat16)
    arguments["workspace_buffer"] = _aligned(WORKSPACE)
    return arguments


def _aligned(size: int) -> torch.Tensor:
    memory = torch.empty(size + 128, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 128 :][:size]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """The CPU backend, or the path to a launch, which is recorded."""
    if request.param != "CPU":
        request.getfixturevalue("module")
    return request.param


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", MOE_TENSORS)
def test_tensors_of_the_moe_layer(path: str, name: str, wrong: str, request: pytest.FixtureRequest) -> None:
    if (wrong == "None" and name in OPTIONAL) or (wrong == "float32" and name in FLOAT32):
        pytest.skip("that is right")
    if path == "CPU" and (name, wrong) == ("workspace_buffer", "a row less"):
        pytest.skip("the CPU needs no workspace")
    arguments = _moe()
    held = name.partition("[")[0]
    if held == name:
        arguments[name] = WRONG[wrong](arguments[name])
    else:
        position = int(name[-2])
        arguments[held] = list(arguments[held])
        arguments[held][position] = WRONG[wrong](arguments[held][position])
    if name == "fc1_expert_weights" and wrong in NOT_MXFP4:
        with pytest.raises(NotImplementedError, match=f"got weights of torch.{wrong}"):
            cutlass_fused_moe(**arguments)
        return
    launches = [] if path == "CPU" else request.getfixturevalue("module").launches
    before = len(launches)
    # A wrong size, or an input elsewhere, may be told by what disagrees with it.
    told_by_another = wrong in ("a row less", "one dimension more") or (name, wrong) == ("input", "another device")
    named, said = r"\w+" if told_by_another else re.escape(name), SAID.get(wrong, "")
    if (name, wrong) == ("workspace_buffer", "a row less"):
        with pytest.raises(ValueError, match=r"^workspace_buffer holds 4095 bytes; this call needs 4096"):
            cutlass_fused_moe(**arguments)
    else:
        _check(lambda: cutlass_fused_moe(**arguments), named, said)
    assert len(launches) == before


@pytest.mark.parametrize("bad", BAD_INTS)
@pytest.mark.parametrize(
    "name", ["tp_size", "tp_rank", "ep_size", "ep_rank", "cluster_size", "cluster_rank", "tune_max_num_tokens"]
)
def test_integers_of_the_moe_layer(path: str, name: str, bad: str, request: pytest.FixtureRequest) -> None:
    arguments = _moe()
    launches = [] if path == "CPU" else request.getfixturevalue("module").launches
    before = len(launches)
    if name.startswith("cluster"):  # one message for the two
        named, said = "cluster_size", re.escape(repr(BAD_INTS[bad]))
    else:
        named, said = name, INT_SAID[bad]
    _check(lambda: cutlass_fused_moe(**{**arguments, name: BAD_INTS[bad]}), named, said)
    assert len(launches) == before


@pytest.mark.parametrize("one", [True, np.int64(1)], ids=["True", "numpy"])
@pytest.mark.parametrize("name", ["tp_size", "ep_size", "cluster_size", "tune_max_num_tokens"])
def test_what_python_takes_as_an_index_is_an_integer(name: str, one: Any, module: RecordingModule) -> None:
    arguments = layer_arguments(1)
    cutlass_fused_moe(**{**arguments, name: one})
    (launch,) = module.launches
    assert (launch["first_expert"], launch["num_experts_total"]) == (0, 8)
    assert type(launch["first_expert"]) is type(launch["num_experts_total"]) is int


@pytest.mark.parametrize("bad", [5, 2.5, torch.tensor(3)], ids=str)
def test_profile_ids_that_are_no_sequence(path: str, bad: Any) -> None:
    with pytest.raises(TypeError, match=r"^profile_ids is .*; it must be \[fc1_tactic, fc2_tactic\]"):
        cutlass_fused_moe(**_moe(), profile_ids=bad)


@pytest.mark.parametrize("bad", [None, "bfloat16", np.float16, torch.float32], ids=str)
def test_output_dtypes(path: str, bad: Any) -> None:
    _check(lambda: cutlass_fused_moe(**{**_moe(), "output_dtype": bad}), "output_dtype", "")


@pytest.mark.parametrize("bad", [None, 2.5, "scales", np.ones(4)], ids=["None", "float", "str", "numpy array"])
def test_quant_scales_that_are_no_list(path: str, bad: Any) -> None:
    _check(lambda: cutlass_fused_moe(**{**_moe(), "quant_scales": bad}), "quant_scales", "")


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


# --- cutlass_fused_moe_workspace_size ---------------------------------------------------------------------------------

SIZES = {
    "max_num_tokens": 8, "hidden_size": 160, "intermediate_size": 96, "num_experts_total": 8, "top_k": 3,
    "x_dtype": torch.bfloat16, "weight_dtype": torch.uint8, "use_mxfp8_act_scaling": True, "device": "cpu",
}  # fmt: skip
SIZE_INTS = [
    "max_num_tokens", "hidden_size", "intermediate_size", "num_experts_total", "top_k", "tp_size", "tp_rank", "ep_size",
    "ep_rank",
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_INTS)
@pytest.mark.parametrize("name", SIZE_INTS)
def test_integers_of_the_workspace_size(name: str, bad: str) -> None:
    _check(lambda: cutlass_fused_moe_workspace_size(**{**SIZES, name: BAD_INTS[bad]}), name, INT_SAID[bad])


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("x_dtype", None), ("x_dtype", "bfloat16"), ("x_dtype", torch.float32), ("output_dtype", None),
        ("output_dtype", torch.float32), ("device", 2.5), ("device", "cudax"), ("device", "meta"), ("device", [0]),
    ],
    ids=str,
)  # fmt: skip
def test_dtypes_and_devices_of_the_workspace_size(name: str, bad: Any) -> None:
    _check(lambda: cutlass_fused_moe_workspace_size(**{**SIZES, name: bad}), name, "")


# --- group_gemm_mxfp4_nt_groupwise ------------------------------------------------------------------------------------


def _gemm() -> Arguments:
    inputs: Arguments = dict(make_group_gemm_inputs([3, 5], 64, 96, 6))
    return {**inputs, "out": torch.empty(8, 64, dtype=torch.bfloat16)}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale", "m_indptr", "out"])
def test_tensors_of_the_grouped_gemm(name: str, wrong: str) -> None:
    if (name, wrong) == ("out", "None"):
        pytest.skip("that is right")
    arguments = _gemm()
    arguments[name] = WRONG[wrong](arguments[name])
    named = r"\w+" if wrong in ("a row less", "one dimension more") else name
    if (name, wrong) == ("out", "float32") or (name, wrong) == ("out", "complex64"):
        named = "out_dtype"  # which is out's, where none is given
    _check(lambda: group_gemm_mxfp4_nt_groupwise(**arguments), named, SAID.get(wrong, ""))


@pytest.mark.parametrize("bad", BAD_INTS)
@pytest.mark.parametrize("name", ["mma_sm", "tile_m", "tile_n", "tile_k", "swap_ab"])
def test_integers_of_the_grouped_gemm(name: str, bad: str) -> None:
    _check(lambda: group_gemm_mxfp4_nt_groupwise(**_gemm(), **{name: BAD_INTS[bad]}), name, INT_SAID[bad])


@pytest.mark.parametrize("bad", ["float16", torch.float32, np.float16], ids=str)
def test_dtypes_of_the_grouped_gemm(bad: Any) -> None:
    _check(lambda: group_gemm_mxfp4_nt_groupwise(**_gemm(), out_dtype=bad), "out_dtype", "")


@pytest.mark.parametrize(
    ("groups", "rows", "fits"), [(1, 2**31 - 128, True), (1, 2**31 - 127, False), (4, 2**31, False)]
)
def test_rows_of_the_grouped_gemm_fit_int32(groups: int, rows: int, fits: bool) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    call = sm12x_group_gemm.GroupGemmCall(
        None,
        empty(rows, 32, dtype=torch.float8_e4m3fn),
        empty(groups, 8, 16),
        empty(sm12x_group_gemm.scale_rows(rows, groups), 4),
        empty(groups, 128, 4),
        empty(groups + 1, dtype=torch.int32),
        None,
        [1, 128, 128, 128],
        True,
        None,
    )
    if fits:
        assert sm12x_group_gemm.validate(call).cum_m == rows
        return
    with pytest.raises(ValueError, match=rf"^cum_m \(a.shape\[0\]\) is {rows}; it must be an integer in \[0, "):
        sm12x_group_gemm.validate(call)


# --- quantization on the CPU ------------------------------------------------------------------------------------------

QUANTIZERS = {"input": flashinfer.mxfp8_quantize, "a": flashinfer.mxfp4_quantize}
UNQUANTIZABLE = {
    **{name: WRONG[name] for name in ("None", "list", "numpy array", "float", "another device", "complex64", "sparse")},
    "int32": lambda tensor: tensor.int(),
    "0-D": lambda tensor: tensor[0, 0],
    "K of 40": lambda tensor: tensor[:, :40],
    "K of 0": lambda tensor: tensor[:, :0],
}  # fmt: skip


@pytest.mark.parametrize("wrong", UNQUANTIZABLE)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_tensors_of_quantizers(name: str, wrong: str) -> None:
    print("seed", 0)
    values = torch.randn(4, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    _check(lambda: QUANTIZERS[name](UNQUANTIZABLE[wrong](values)), name, SAID.get(wrong, ""))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers_take_any_strides_and_float32(name: str) -> None:
    print("seed 1")
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    expected = QUANTIZERS[name](values)
    strided = torch.empty(4, 64, 2)[..., 0].copy_(values)
    assert not strided.is_contiguous()
    for given, wanted in zip(QUANTIZERS[name](strided), expected, strict=True):
        assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("bad", [*BAD_INTS, "48"])
def test_alignment_of_mxfp8_quantize(bad: str) -> None:
    value, said = BAD_INTS.get(bad, 48), INT_SAID.get(bad, "48")
    _check(lambda: flashinfer.mxfp8_quantize(torch.zeros(4, 64), alignment=value), "alignment", said)


@pytest.mark.parametrize("bad", ["swizzled", 7, 2.5, [0], SfLayout.layout_8x4], ids=str)
@pytest.mark.parametrize(
    ("function", "name"), [(flashinfer.mxfp8_quantize, "sf_swizzle_layout"), (flashinfer.mxfp4_quantize, "sfLayout")]
)
def test_layouts_of_quantizers(function: Callable[..., Any], name: str, bad: Any) -> None:
    if torch.cuda.is_available() and bad is SfLayout.layout_8x4:
        pytest.skip("upstream computes it through the GPU")
    _check(lambda: function(torch.zeros(4, 64), **{name: bad}), name, "")


@pytest.mark.parametrize("layout", [SfLayout.layout_128x4, SfLayout.layout_linear])
def test_a_layout_may_be_its_number(layout: SfLayout) -> None:
    print("seed", 2)
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    for function, name in ((flashinfer.mxfp8_quantize, "sf_swizzle_layout"), (flashinfer.mxfp4_quantize, "sfLayout")):
        for given, wanted in zip(
            function(values, **{name: int(layout)}), function(values, **{name: layout}), strict=True
        ):
            assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("wrong", ["None", "list", "numpy array", "float", "another device", "complex64", "sparse"])
@pytest.mark.parametrize("name", ["a_fp4", "a_sf", "unswizzled_sf", "out"])
def test_tensors_of_what_rearranges_and_dequantizes(name: str, wrong: str) -> None:
    if (name, wrong) in (("out", "None"), ("a_sf", "complex64")):
        pytest.skip("right, or another number of bytes")
    packed, scales = flashinfer.mxfp4_quantize(torch.zeros(4, 64))
    calls: dict[str, tuple[Callable[..., Any], Arguments]] = {
        "a_fp4": (flashinfer.mxfp4_dequantize, {"a_fp4": packed, "a_sf": scales}),
        "unswizzled_sf": (
            flashinfer.block_scale_interleave,
            {"unswizzled_sf": packed, "out": torch.empty(4096).byte()},
        ),
    }
    function, arguments = calls["a_fp4" if name.startswith("a_") else "unswizzled_sf"]
    arguments[name] = WRONG[wrong](arguments[name])
    _check(lambda: function(**arguments), name, SAID.get(wrong, ""))


def test_every_tensor_and_integer_is_listed() -> None:
    """An argument that upstream adds is one to add here."""
    parameters = inspect.signature(cutlass_fused_moe).parameters
    typed = {name for name, parameter in parameters.items() if "Tensor" in str(parameter.annotation)}
    foreign = {"clamped_relu2_limit", "situ_beta", "situ_linear_beta"}
    assert typed - foreign == {name.partition("[")[0] for name in MOE_TENSORS}
