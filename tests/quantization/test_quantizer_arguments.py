# SPDX-License-Identifier: Apache-2.0
"""Arguments of the quantizers on the CPU: an error names what is wrong, and strides, dtypes and layouts may vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashinfer.tllm_enums import SfLayout
from operator_calls import NUMBERS, WRONG, Arguments

import flashinfer

FOREIGN = ("None", "list", "numpy array", "float", "on meta", "torch.complex64", "sparse")


def _check(call: Callable[[], Any], name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}.* is .*; ") as caught:
        call()
    assert len(str(caught.value)) < 400


QUANTIZERS = {"input": flashinfer.mxfp8_quantize, "a": flashinfer.mxfp4_quantize}
UNQUANTIZABLE = {
    **{name: WRONG[name] for name in FOREIGN},
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
    _check(lambda: QUANTIZERS[name](UNQUANTIZABLE[wrong](values)), name)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_a_storage_that_was_resized_is_not_read(strided: bool) -> None:
    """torch's own operations read beyond it."""

    def resized(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)
        tensor = whole[..., ::2] if strided else whole[..., : shape[-1]].contiguous()
        tensor.untyped_storage().resize_(tensor.element_size())
        return tensor

    scales = torch.zeros(512, dtype=torch.uint8)
    packed = torch.zeros(4, 32, dtype=torch.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "input": lambda: flashinfer.mxfp8_quantize(resized(4, 64, dtype=torch.bfloat16)),
        "a": lambda: flashinfer.mxfp4_quantize(resized(4, 64, dtype=torch.bfloat16)),
        "a_fp4": lambda: flashinfer.mxfp4_dequantize(resized(4, 32, dtype=torch.uint8), scales),
        "a_sf": lambda: flashinfer.mxfp4_dequantize(packed, resized(512, dtype=torch.uint8)),
        "unswizzled_sf": lambda: flashinfer.block_scale_interleave(resized(4, 8, dtype=torch.uint8)),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name} is .*, of which its storage holds \d bytes; it was resized$"):
            call()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers_take_any_strides_and_float32(name: str) -> None:
    print("seed 1")
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    expected = QUANTIZERS[name](values)
    strided = torch.empty(4, 64, 2)[..., 0].copy_(values)
    assert not strided.is_contiguous()
    for given, wanted in zip(QUANTIZERS[name](strided), expected, strict=True):
        assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("bad", [bad for bad in (*NUMBERS, 48) if bad is not True], ids=str)
def test_alignment_of_mxfp8_quantize(bad: Any) -> None:
    _check(lambda: flashinfer.mxfp8_quantize(torch.zeros(4, 64), alignment=bad), "alignment")


@pytest.mark.parametrize("bad", ["swizzled", 7, 2.5, [0], SfLayout.layout_8x4], ids=str)
@pytest.mark.parametrize(
    ("function", "name"), [(flashinfer.mxfp8_quantize, "sf_swizzle_layout"), (flashinfer.mxfp4_quantize, "sfLayout")]
)
def test_layouts_of_quantizers(function: Callable[..., Any], name: str, bad: Any) -> None:
    if torch.cuda.is_available() and bad is SfLayout.layout_8x4:
        pytest.skip("upstream computes it through the GPU")
    _check(lambda: function(torch.zeros(4, 64), **{name: bad}), name)


@pytest.mark.parametrize("layout", [SfLayout.layout_128x4, SfLayout.layout_linear])
def test_a_layout_may_be_its_number(layout: SfLayout) -> None:
    print("seed", 2)
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    for function, name in ((flashinfer.mxfp8_quantize, "sf_swizzle_layout"), (flashinfer.mxfp4_quantize, "sfLayout")):
        for given, wanted in zip(
            function(values, **{name: int(layout)}), function(values, **{name: layout}), strict=True
        ):
            assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("wrong", FOREIGN)
@pytest.mark.parametrize("name", ["a_fp4", "a_sf", "unswizzled_sf", "out"])
def test_tensors_of_what_rearranges_and_dequantizes(name: str, wrong: str) -> None:
    if (name, wrong) in (("out", "None"), ("a_sf", "torch.complex64")):
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
    _check(lambda: function(**arguments), name)
