# SPDX-License-Identifier: Apache-2.0
"""float32 to float16, bfloat16 and tf32 with each rounding, .satfinite and .relu (PTX ISA 9.7.9.21)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pure_functions as vsm
import pytest

# type -> (exponent bits, mantissa bits, bits of its container below the sign, bits below the mantissa)
FORMATS = {"f16": (5, 10, 15, 0), "bf16": (8, 7, 15, 0), "tf32": (8, 10, 31, 13)}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "tf32": 0x7FFFE000}


def reference(name: str, x: float, round_: str, satfinite: bool, relu: bool) -> int:
    exponent_bits, mantissa_bits, container, low = FORMATS[name]
    if math.isnan(x):
        return NAN[name]
    negative = math.copysign(1, x) < 0
    if negative and relu:
        return 0
    sign = int(negative) << container
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    if math.isinf(x):
        return sign | (infinity - satfinite) << low
    least = 2 - 2 ** (exponent_bits - 1)  # exponent of the smallest normal
    exponent = max(math.frexp(x)[1] - 1, least) if x else least
    steps = abs(Fraction(x)) / Fraction(2) ** (exponent - mantissa_bits)
    whole, rest = divmod(steps, 1)
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[round_]
    whole += up
    code = int(whole) + ((exponent - least) << mantissa_bits)
    if code >= infinity:  # overflow
        away = round_ in ("rn", "rna") or (round_ == "rm" and negative) or (round_ == "rp" and not negative)
        code = infinity if away and not satfinite else infinity - 1
    return sign | code << low


def inputs(name: str) -> np.ndarray:
    """Values and midpoints of the format at interesting exponents, with their float32 neighbours, and extremes."""
    exponent_bits, mantissa_bits, _, _ = FORMATS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    points = []
    for exponent in (
        -149,
        -127,
        -bias - mantissa_bits - 1,
        -bias - mantissa_bits,
        -bias - 1,
        -bias,
        1 - bias,
        2 - bias,
        -1,
        0,
        1,
        7,
        bias - 1,
        bias,
    ):
        for mantissa in (0, 1, 2, 3, (1 << mantissa_bits) - 2, (1 << mantissa_bits) - 1):
            for half in (0, 0.5, 1):
                value = math.ldexp(1 + (mantissa + half) / (1 << mantissa_bits), exponent)
                points += [value] if 2.0**-149 <= value < 2.0**128 else []
    array = np.array(points, np.float32)
    array = np.concatenate([array, np.nextafter(array, np.float32(np.inf)), np.nextafter(array, np.float32(0))])
    array = np.concatenate(
        [array, np.array([0.0, np.inf, np.nan, 3.4028235e38, 1e-45, 65519.996, 65520.0, 65504.0], np.float32)]
    )
    return np.concatenate([array, -array])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("round_", ["rn", "rz", "rm", "rp", "rna"])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding(name: str, round_: str, satfinite: bool, relu: bool) -> None:
    values = inputs(name)
    expected = np.array([reference(name, float(v), round_, satfinite, relu) for v in values], np.uint32)
    actual = vsm.cvt_f32_to(name, values, round_, satfinite, relu)
    wrong = [(float(v), hex(a), hex(e)) for v, a, e in zip(values, actual, expected) if a != e]
    assert not wrong, wrong[:8]


def test_float16_agrees_with_numpy() -> None:
    print("seed", 3)
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).view(np.uint16)
    assert np.array_equal(vsm.cvt_f32_to("f16", values), expected)


@pytest.mark.parametrize("name", ["f16", "bf16", "tf32"])
def test_decoding_every_code(name: str) -> None:
    codes = np.arange(65536, dtype=np.uint32)
    if name == "f16":
        expected = codes.astype(np.uint16).view(np.float16).astype(np.float32)
    else:
        codes = codes << np.uint32(16) if name == "tf32" else codes
        expected = (codes << np.uint32(16) if name == "bf16" else codes).view(np.float32)
    assert np.array_equal(vsm.to_float(name, codes), expected, equal_nan=True)


def test_tf32_takes_the_upper_19_bits() -> None:
    assert vsm.to_float("tf32", [0x3F801FFF, 0x3F802000]).tolist() == [1.0, 1.0009765625]


def test_integers_decode() -> None:
    codes = np.arange(256)
    assert np.array_equal(vsm.to_float("s8", codes), codes.astype(np.int8).astype(np.float32))
    assert np.array_equal(vsm.to_float("u8", codes), codes.astype(np.float32))
    assert vsm.to_float("s4", [0, 7, 8, 15]).tolist() == [0, 7, -8, -1]
    assert vsm.to_float("u4", [0, 7, 8, 15]).tolist() == [0, 7, 8, 15]
