# SPDX-License-Identifier: Apache-2.0
"""Block-scaled formats on CPU tensors equal the float64 reference bit for bit."""

from __future__ import annotations

import contextlib
import math
import re

import pytest
import torch
from flashinfer.tllm_enums import SfLayout
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.quantization import block_scale_interleave, mx_cpu, mxfp4_dequantize, mxfp4_quantize, mxfp8_quantize
from flashinfer.quantization.mx_cpu import dequantize_mxfp4_linear, dequantize_mxfp8_linear, swizzled_size
from flashinfer.testing import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    mxfp_formats,
    quantize_mxfp4,
    quantize_mxfp8,
    swizzle_scales,
)

LINEAR = SfLayout.layout_linear
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _seeded(seed: int) -> torch.Generator:
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def _every_value(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """All 65,536 values of a 16-bit dtype, NaN and infinity included, shuffled into blocks eight times."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = _seeded(seed)
    return torch.stack([values[torch.randperm(65536, generator=generator)] for _ in range(8)]).view(-1, 64)


def _wide_range(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Gaussian blocks over the exponents of ``dtype``, with zero blocks and exact powers of two among them."""
    generator = _seeded(seed)
    low, high = (-20, 12) if dtype is torch.float16 else (-145, 118)
    scale = torch.exp2(torch.randint(low, high, (4000, 1), generator=generator).double())
    values = torch.randn(4000, 96, generator=generator, dtype=torch.float64) * scale
    values[::7, 32:64] = 0.0
    values[3::11] = 1.75 * scale[3::11]
    return values.to(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _check_bitwise(values: torch.Tensor) -> None:
    """Both quantizers against the reference."""
    quantized, scales = mxfp8_quantize(values, is_sf_swizzled_layout=False)
    expected, expected_scales = quantize_mxfp8(values)
    assert torch.equal(scales, expected_scales.flatten())
    assert torch.equal(_bits(quantized), _bits(expected))
    packed, scales = mxfp4_quantize(values, sfLayout=LINEAR)
    expected, expected_scales = quantize_mxfp4(values)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(packed, expected)
    for quantize, reference in (
        (mx_cpu.quantize_mxint8_linear, mxfp_formats.quantize_mxint8),
        (mx_cpu.quantize_mxfp6_linear, mxfp_formats.quantize_mxfp6),
        (lambda values: mx_cpu.quantize_nvfp4_linear(values, torch.ones(1)), mxfp_formats.quantize_nvfp4),
    ):
        packed, scales = quantize(values)
        expected, expected_scales = reference(values)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(packed, expected)


@pytest.mark.parametrize("make", [_every_value, _wide_range])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantizers_equal_the_reference_bitwise(make, dtype: torch.dtype) -> None:
    _check_bitwise(
        make(torch.bfloat16, 0).to(dtype) if dtype is torch.float32 and make is _every_value else make(dtype, 0)
    )


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True), min_size=32, max_size=32)
)
def test_any_float32_block_equals_the_reference(block: list[float]) -> None:
    _check_bitwise(torch.tensor([block], dtype=torch.float32))


@pytest.mark.parametrize("rows", [0, 1, 127, 130])
@pytest.mark.parametrize("k", [32, 160, 256])
def test_swizzled_scales_are_the_linear_ones_rearranged(rows: int, k: int) -> None:
    values = torch.randn(rows, k, generator=_seeded(1)).bfloat16()
    _, linear = mxfp8_quantize(values, is_sf_swizzled_layout=False)
    _, swizzled = mxfp8_quantize(values)
    assert torch.equal(swizzled, swizzle_scales(linear.view(rows, k // 32)).flatten())
    _, linear = mxfp4_quantize(values, sfLayout=LINEAR)
    _, swizzled = mxfp4_quantize(values)
    assert torch.equal(swizzled, swizzle_scales(linear))
    assert swizzled.shape[1] == -(-k // 128) * 4


def test_alignment_pads_with_zeros() -> None:
    values = torch.randn(3, 96, generator=_seeded(2)).half()
    padded, scales = mxfp8_quantize(values, False, alignment=128)
    plain, plain_scales = mxfp8_quantize(values, False)
    assert padded.shape == (3, 128)
    assert torch.equal(_bits(padded[:, :96]), _bits(plain))
    assert (padded[:, 96:].float() == 0).all()
    assert torch.equal(scales.view(3, 4)[:, :3].flatten(), plain_scales)
    assert (scales.view(3, 4)[:, 3] == 0).all()


@pytest.mark.parametrize(("k", "alignment"), [(96, 128), (32, 160), (256, 32), (288, 256)])
@pytest.mark.parametrize("rows", [3, 130])
def test_results_are_as_large_as_the_docstring_says(rows: int, k: int, alignment: int) -> None:
    """Its formulas are evaluated; all scales that belong to no block of the input are zero."""
    swizzled_size, linear_size = re.findall(r"``([^`]*\brows\b[^`]*/ 32\)?)``", mxfp8_quantize.__doc__ or "")
    names = {
        "rows": rows,
        "K": k,
        "padded_K": -(-k // alignment) * alignment,
        "pad128": lambda n: math.ceil(n / 128) * 128,
        "pad4": lambda n: math.ceil(n / 4) * 4,
    }
    values = torch.randn(rows, k, generator=_seeded(k)).bfloat16()
    for swizzled, size in ((True, swizzled_size), (False, linear_size)):
        padded, scales = mxfp8_quantize(values, swizzled, alignment)
        assert padded.shape == (rows, names["padded_K"])
        assert scales.shape == (eval(size, names),)
        # No block of normally distributed numbers has a scale byte of 0.
        assert scales.count_nonzero() == rows * k // 32
    assert not _bits(padded[:, k:]).any()


def test_leading_dimensions_are_rows() -> None:
    values = torch.randn(2, 3, 64, generator=_seeded(3)).bfloat16()
    quantized, scales = mxfp8_quantize(values)
    flat, flat_scales = mxfp8_quantize(values.view(6, 64))
    assert quantized.shape == values.shape
    assert torch.equal(_bits(quantized).view(6, 64), _bits(flat))
    assert torch.equal(scales, flat_scales)


@pytest.mark.parametrize("layout", [SfLayout.layout_128x4, LINEAR])
def test_mxfp4_dequantize_equals_the_reference(layout: SfLayout) -> None:
    generator = _seeded(4)
    packed = torch.randint(0, 256, (200, 80), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 252, (200, 5), dtype=torch.uint8, generator=generator)
    scales[3, 2] = 255
    arranged = swizzle_scales(scales) if layout is SfLayout.layout_128x4 else scales
    values = mxfp4_dequantize(packed, arranged, layout)
    expected = dequantize_mxfp4(packed, scales)
    assert values.dtype == torch.float32
    assert torch.equal(values.double().nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))
    assert torch.isnan(values).nonzero().tolist() == [[3, column] for column in range(64, 96)]


def test_dequantizers_hold_the_largest_scales() -> None:
    packed = torch.full((1, 16), 0x11, dtype=torch.uint8)  # all 0.5
    scales = torch.tensor([[254]], dtype=torch.uint8)
    assert (dequantize_mxfp4_linear(packed, scales) == 2.0**126).all()
    values = torch.full((1, 32), 0.5).to(torch.float8_e5m2)
    assert torch.equal(dequantize_mxfp8_linear(values, scales).double(), dequantize_mxfp8(values, scales))


@pytest.mark.parametrize("shape", [(5, 7), (2, 129, 3)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_block_scale_interleave(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    linear = torch.randint(0, 255, shape, generator=_seeded(5)).to(dtype)
    swizzled = block_scale_interleave(linear)
    if dtype is torch.uint8:
        assert torch.equal(swizzled, swizzle_scales(linear).flatten())
    out = torch.empty_like(swizzled)
    assert block_scale_interleave(linear, out=out) is out
    assert torch.equal(out, swizzled)
    assert flashinfer.nvfp4_block_scale_interleave is flashinfer.block_scale_interleave
    with pytest.raises(ValueError, match="out is"):
        block_scale_interleave(linear, out=out[:-1])


def test_old_module_names_hold_the_same_functions() -> None:
    import flashinfer.fp4_quantization
    import flashinfer.fp8_quantization

    assert flashinfer.fp4_quantization.mxfp4_quantize is mxfp4_quantize is flashinfer.mxfp4_quantize
    assert flashinfer.fp8_quantization.mxfp8_quantize is mxfp8_quantize is flashinfer.mxfp8_quantize


def test_what_is_quantized_needs_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 64))
    for quantize in (mxfp8_quantize, mxfp4_quantize):
        assert not any(part.requires_grad for part in quantize(weight))


def test_fake_tensors_leave_nothing_behind() -> None:
    """A table that was made of them would be every later call's."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mx_cpu._cached_table.cache_clear()
    values, scales = torch.full((2, 16), 0x22, dtype=torch.uint8), torch.full((512,), 127, dtype=torch.uint8)
    with FakeTensorMode() as mode, contextlib.suppress(Exception):  # torch's: a number of theirs is asked for
        mxfp4_dequantize(mode.from_tensor(values), mode.from_tensor(scales))
    assert torch.equal(mxfp4_dequantize(values, scales), torch.ones(2, 32))


def _values_of(element: str) -> torch.Tensor:
    """All magnitudes of the format, in float64."""
    if element == "mxfp8":
        return torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@pytest.mark.parametrize("element", ["mxfp4", "mxfp8"])
def test_the_mse_rule_takes_the_best_of_neighbouring_scales(element: str) -> None:
    quantize, dequantize = (
        (mxfp4_quantize, dequantize_mxfp4) if element == "mxfp4" else (mxfp8_quantize, dequantize_mxfp8)
    )
    layout = {"sfLayout": LINEAR} if element == "mxfp4" else {"is_sf_swizzled_layout": False}
    generator = _seeded(31)
    x = torch.randn(400, 64, generator=generator) ** 3 * torch.exp2(
        torch.randint(-130, 100, (400, 1), generator=generator).float()
    )
    x[7, :32] = 0.0
    x[8, :32] = 6.0  # exact, by the scale that amax gives
    (_, by_amax), (values, scales) = quantize(x, **layout), quantize(x, **layout, scale_rule="mse")
    by_amax, scales = by_amax.view(400, 2), scales.view(400, 2)
    table = _values_of(element)
    blocks = x.double().view(400, 2, 32)
    errors = []
    for step in (0, -1, 1):
        unit = torch.exp2(by_amax.double() + step - 127).unsqueeze(-1)
        nearest = (blocks.abs().unsqueeze(-1) / unit.unsqueeze(-1) - table).abs().amin(-1) * unit
        allowed = (by_amax.int() + step >= 0) & (by_amax.int() + step <= 254)
        errors.append(torch.where(allowed, nearest.square().sum(-1), torch.inf))
    found = (dequantize(values, scales).view(400, 2, 32) - blocks).square().sum(-1)
    best = torch.stack(errors).amin(0)
    assert (found <= best * (1 + 1e-5)).all()
    assert (scales[7:9] == by_amax[7:9])[:, 0].all()
    assert ((scales != by_amax) & (best < errors[0])).any()
    assert ((scales.int() - by_amax.int()) <= 0).all()  # the double is never better


def test_a_block_without_finite_error_keeps_the_scale_of_its_amax() -> None:
    x = torch.randn(2, 64, generator=_seeded(32))
    x[0, 3], x[0, 40] = torch.inf, torch.nan
    for rule in ("amax", "mse"):
        assert mxfp4_quantize(x, sfLayout=LINEAR, scale_rule=rule)[1][0].tolist() == [254, 255]
    values, scales = mxfp8_quantize(x, False, scale_rule="mse")
    expected, by_amax = mxfp8_quantize(x, False)
    assert torch.equal(_bits(values[0]), _bits(expected[0]))
    assert torch.equal(scales[:2], by_amax[:2])


def test_packed_values_may_start_at_any_byte() -> None:
    """Weights that are part of a larger buffer."""
    packed, scales = quantize_mxfp4(torch.randn(5, 96, generator=_seeded(6)))
    buffer = torch.zeros(packed.numel() + 3, dtype=torch.uint8)
    expected = dequantize_mxfp4(packed, scales)
    for offset in (1, 2, 3):
        view = buffer[offset : offset + packed.numel()].view(packed.shape)
        view.copy_(packed)
        assert torch.equal(dequantize_mxfp4_linear(view, scales).double(), expected)


@pytest.mark.parametrize(("rows", "k"), [(0, 96), (5, 0), (0, 0)])
def test_a_matrix_of_no_elements_has_results_of_none(rows: int, k: int) -> None:
    packed = torch.empty(rows, k // 2, dtype=torch.uint8)
    for layout in (LINEAR, SfLayout.layout_128x4):
        swizzled = layout is SfLayout.layout_128x4
        size = swizzled_size(rows, k // 32) if swizzled else rows * k // 32
        assert mxfp4_dequantize(packed, torch.empty(size, dtype=torch.uint8), layout).shape == (rows, k)
    for experts in ((), (0,), (3,)):
        linear = torch.empty(*experts, rows, k // 32, dtype=torch.uint8)
        scales = block_scale_interleave(linear)
        assert scales.shape == (math.prod(experts) * swizzled_size(rows, k // 32),)
        assert not scales.any()
    if k:
        assert mxfp8_quantize(torch.empty(rows, k))[0].shape == (rows, k)
        assert mxfp4_quantize(torch.empty(rows, k))[0].shape == (rows, k // 2)


def test_a_strided_storage_that_was_resized_is_not_read() -> None:
    """torch's own operations read beyond it."""

    def resized(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
        tensor.untyped_storage().resize_(tensor.element_size())
        return tensor

    scales, packed = torch.zeros(512, dtype=torch.uint8), torch.zeros(4, 32, dtype=torch.uint8)
    calls = {
        "input": lambda: mxfp8_quantize(resized(4, 64, dtype=torch.bfloat16)),
        "a": lambda: mxfp4_quantize(resized(4, 64, dtype=torch.bfloat16)),
        "a_fp4": lambda: mxfp4_dequantize(resized(4, 32, dtype=torch.uint8), scales),
        "a_sf": lambda: mxfp4_dequantize(packed, resized(512, dtype=torch.uint8)),
        "unswizzled_sf": lambda: block_scale_interleave(resized(4, 8, dtype=torch.uint8)),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name} is .*, of which its storage holds \d bytes; it was resized$"):
            call()


@pytest.mark.parametrize(("quantize", "name"), [(mxfp8_quantize, "sf_swizzle_layout"), (mxfp4_quantize, "sfLayout")])
def test_quantizers_take_any_strides_and_a_layouts_number(quantize, name: str) -> None:
    values = torch.randn(4, 64, generator=_seeded(1))
    strided = torch.empty(4, 64, 2)[..., 0].copy_(values)
    assert not strided.is_contiguous()
    for layout in (SfLayout.layout_128x4, LINEAR):
        expected = quantize(values, **{name: layout})
        for found in (quantize(values, **{name: int(layout)}), quantize(strided, **{name: layout})):
            assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("round_to", "quantize", "dequantize", "largest"),
    [
        (mx_cpu.round_to_mxfp8, quantize_mxfp8, dequantize_mxfp8, 448 * 2.0**119),
        (mx_cpu.round_to_mxfp4, quantize_mxfp4, dequantize_mxfp4, 6 * 2.0**125),
    ],
    ids=["mxfp8", "mxfp4"],
)
def test_rounding_inside_a_call_saturates_within_float32(
    dtype: torch.dtype, round_to, quantize, dequantize, largest: float
) -> None:
    """It equals the reference's, and that of public quantizers in blocks without anything larger."""
    wide = _every_value(torch.bfloat16 if dtype is torch.float32 else dtype, 12).to(dtype)
    for values in (_wide_range(dtype, 11), wide):
        rounded = round_to(values).double()
        torch.testing.assert_close(
            rounded, dequantize(*quantize(values, saturates=True)), rtol=0, atol=0, equal_nan=True
        )
        assert not rounded.isinf().any()
        public = dequantize(*quantize(values))
        larger = (values.double().abs() > largest).unflatten(-1, (-1, 32)).any(-1).repeat_interleave(32, -1)
        torch.testing.assert_close(rounded[~larger], public[~larger], rtol=0, atol=0, equal_nan=True)
    assert larger.any() and not larger.all()
    if dtype is not torch.bfloat16:
        return
    x = torch.zeros(6, 32, dtype=dtype)
    x[:, 0] = torch.tensor([torch.inf, -torch.inf, 2.0**127, largest, 255 * 2.0**120, -255 * 2.0**120])
    x[0, 1], x[1, 1] = 1.0, largest  # beside infinity
    rounded = round_to(x)
    assert rounded[:, 0].tolist() == [largest, -largest, 2.0**127, largest, largest, -largest]
    assert rounded[:2, 1].tolist() == [0.0, largest]
    assert torch.equal(rounded, rounded.bfloat16().float())
