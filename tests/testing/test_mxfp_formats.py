# SPDX-License-Identifier: Apache-2.0
"""The float64 formats against the specification's own tables and formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.testing import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_mxfp4,
    quantize_mxfp8,
    swizzle_scales,
    unswizzle_scales,
)
from flashinfer.testing.mxfp_formats import decode_e2m1, decode_scales, power_of_two, round_to_e4m3, scale_exponents


def _seeded(seed: int) -> torch.Generator:
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def test_e2m1_values_follow_sign_exponent_mantissa() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    decoded = decode_e2m1(packed)
    for byte in range(256):
        for position, nibble in enumerate((byte & 15, byte >> 4)):
            exponent, mantissa = (nibble >> 1) & 3, nibble & 1
            magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
            expected = -magnitude if nibble & 8 else magnitude
            assert float(decoded[2 * byte + position]) == expected


def test_scales_are_powers_of_two_and_255_is_nan() -> None:
    decoded = decode_scales(torch.arange(256, dtype=torch.uint8))
    assert [float(v) for v in decoded[:255]] == [2.0 ** (s - 127) for s in range(255)]
    assert math.isnan(decoded[255])


def test_power_of_two_is_exact_over_its_range() -> None:
    exponents = torch.arange(-1022, 1024)
    assert [float(v) for v in power_of_two(exponents)] == [2.0**e for e in range(-1022, 1024)]


def test_round_to_e4m3_equals_nearest_of_all_values() -> None:
    """Compared with a search through all finite e4m3 values, ties to the even code."""
    codes = torch.arange(127, dtype=torch.uint8)
    table = codes.view(torch.float8_e4m3fn).double()
    generator = _seeded(0)
    values = torch.rand(20_000, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(
        -12, 10, (20_000,), generator=generator
    )
    midpoints = (table[1:] + table[:-1]) / 2
    values = torch.cat((values, midpoints, table, torch.tensor([500.0, 1e30, math.inf], dtype=torch.float64)))
    distance = (values.clamp(max=448.0)[:, None] - table).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = nearest & (codes % 2 == 0)
    choice = torch.where(nearest.sum(1) > 1, even.float().argmax(1), nearest.float().argmax(1))
    assert torch.equal(round_to_e4m3(values), table[choice])
    assert torch.equal(round_to_e4m3(-values), -table[choice])
    assert torch.isnan(round_to_e4m3(torch.tensor([math.nan], dtype=torch.float64))).all()


@given(st.floats(min_value=2.0**-140, max_value=2.0**127, width=32), st.sampled_from((448.0, 6.0)))
def test_scale_is_the_smallest_that_saturates_nothing(amax: float, element_max: float) -> None:
    exponent = int(scale_exponents(torch.tensor([amax], dtype=torch.float64), element_max)[0])
    assert -127 <= exponent <= 127
    assert amax <= element_max * 2.0**exponent
    if exponent > -127:
        assert amax > element_max * 2.0 ** (exponent - 1)


def test_scale_of_zero_and_infinity() -> None:
    exponents = scale_exponents(torch.tensor([0.0, math.inf], dtype=torch.float64), 448.0)
    assert exponents.tolist() == [-127, 127]
    for element_max, largest in ((448.0, 119), (6.0, 125)):  # with the next scale it is no float32
        amax = torch.tensor(
            [0.0, 2.0**126, element_max * 2.0**largest, 2.0**128, 2.0**300, math.inf], dtype=torch.float64
        )
        exponents = scale_exponents(amax, element_max, saturates=True)
        assert exponents.tolist() == [-127, largest - 1, *[largest] * 4]
        assert element_max * 2.0**largest <= torch.finfo(torch.float32).max < element_max * 2.0 ** (largest + 1)


@pytest.mark.parametrize(
    ("quantize", "dequantize", "element_max", "half_spacing"),
    [(quantize_mxfp8, dequantize_mxfp8, 448.0, 16.0), (quantize_mxfp4, dequantize_mxfp4, 6.0, 1.0)],
)
def test_quantization_error_is_at_most_half_the_widest_spacing(quantize, dequantize, element_max, half_spacing) -> None:
    values = torch.randn(64, 96, generator=_seeded(1), dtype=torch.float64)
    quantized, scales = quantize(values)
    error = (dequantize(quantized, scales) - values).abs()
    allowed = decode_scales(scales).repeat_interleave(32, dim=-1) * half_spacing
    assert (error <= allowed).all()
    amax = values.abs().unflatten(1, (-1, 32)).amax(-1)
    assert (amax / decode_scales(scales) > element_max / 2).all()
    # Dequantized values are fixed points of quantization.
    again, scales_again = quantize(dequantize(quantized, scales))
    assert torch.equal(dequantize(again, scales_again), dequantize(quantized, scales))


def test_special_values() -> None:
    values = torch.ones(5, 32)
    values[0] = 0.0
    values[1, 3] = math.inf
    values[2, 4] = -math.inf
    values[3, 5] = math.nan
    values[4] = math.nan
    quantized, scales = quantize_mxfp8(values)
    assert scales.flatten().tolist() == [0, 254, 254, 119, 0]
    assert (quantized[0].float() == 0).all()
    assert float(quantized[1, 3]) == 448.0
    assert float(quantized[2, 4]) == -448.0
    assert torch.isnan(quantized[3].float()).nonzero().flatten().tolist() == [5]
    assert torch.isnan(quantized[4].float()).all()
    packed, scales = quantize_mxfp4(values)
    assert scales.flatten().tolist() == [0, 254, 254, 255, 255]
    assert packed[1].tolist() == [0, 0x70, *[0] * 14]
    assert quantize_mxfp8(values, saturates=True)[1].flatten().tolist() == [0, 246, 246, 119, 0]
    assert quantize_mxfp4(values, saturates=True)[1].flatten().tolist() == [0, 252, 252, 255, 255]


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (5, 90), (129, 5), (300, 23)])
def test_swizzle_is_the_documented_byte_order(shape: tuple[int, int]) -> None:
    rows, blocks = shape
    linear = torch.randint(1, 255, shape, dtype=torch.uint8, generator=_seeded(2))
    swizzled = swizzle_scales(linear)
    padded_blocks = -(-blocks // 4) * 4
    assert swizzled.shape == (-(-rows // 128) * 128, padded_blocks)
    flat = swizzled.flatten().tolist()
    for m in range(rows):
        for k in range(blocks):
            offset = m // 128 * (padded_blocks // 4) * 512 + k // 4 * 512
            offset += m % 32 * 16 + m % 128 // 32 * 4 + k % 4
            assert flat[offset] == int(linear[m, k])
            flat[offset] = 0
    assert not any(flat), "padding is zero"
    assert torch.equal(unswizzle_scales(swizzled, rows, blocks), linear)
    assert torch.equal(unswizzle_scales(swizzled.view(torch.int32), rows, blocks), linear)


def test_swizzle_of_a_stack_is_the_stack_of_swizzles() -> None:
    linear = torch.randint(0, 255, (3, 130, 6), dtype=torch.uint8, generator=_seeded(3))
    expected = torch.stack([swizzle_scales(matrix) for matrix in linear])
    assert torch.equal(swizzle_scales(linear), expected)
    assert torch.equal(unswizzle_scales(expected, 130, 6), linear)
