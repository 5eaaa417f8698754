# SPDX-License-Identifier: Apache-2.0
"""Formats of 4 to 8 bits: every code decoded, every rounding boundary encoded.

The reference is written from the format's definition (OCP Microscaling v1.0) as a table of exact values; encoding is
a search in that table. Nothing here follows the implementation's bit arithmetic.
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass

import numpy as np
import pure_functions as vsm
import pytest


@dataclass(frozen=True)
class Format:
    exponent: int
    mantissa: int
    nan: tuple[int, ...] = ()  # magnitude codes
    infinity: int | None = None
    canonical_nan: int | None = None

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)

    def value(self, code: int) -> float:
        magnitude = code & (self.sign - 1)
        sign = -1.0 if code & self.sign else 1.0
        if magnitude in self.nan:
            return math.nan
        if magnitude == self.infinity:
            return sign * math.inf
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa)
        bias = 2 ** (self.exponent - 1) - 1
        if exponent == 0:
            return sign * math.ldexp(mantissa, 1 - bias - self.mantissa)
        return sign * math.ldexp((1 << self.mantissa) + mantissa, exponent - bias - self.mantissa)

    def finite(self) -> list[float]:
        """Non-negative finite values; index = code."""
        return [v for v in map(self.value, range(self.sign)) if math.isfinite(v)]

    def nearest(self, x: float, relu: bool = False) -> int:
        """cvt.rn.satfinite{.relu} of a float32 value."""
        table = finite_values(self)
        if math.isnan(x):
            return len(table) - 1 if self.canonical_nan is None else self.canonical_nan
        if relu and math.copysign(1, x) < 0:
            return 0
        sign = self.sign if math.copysign(1, x) < 0 else 0
        magnitude = abs(x)
        if magnitude >= table[-1]:
            return sign | len(table) - 1
        above = bisect.bisect_right(table, magnitude)
        below = above - 1
        down, up = magnitude - table[below], table[above] - magnitude  # exact: few bits apart
        if down == up:
            return sign | (below if below % 2 == 0 else above)
        return sign | (below if down < up else above)


@functools.cache
def finite_values(form: Format) -> list[float]:
    return form.finite()


FORMATS = {
    "e4m3": Format(4, 3, nan=(0x7F,), canonical_nan=0x7F),
    "e5m2": Format(5, 2, nan=(0x7D, 0x7E, 0x7F), infinity=0x7C, canonical_nan=0x7F),
    "e3m2": Format(3, 2),
    "e2m3": Format(2, 3),
    "e2m1": Format(2, 1),
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e3m2": 28.0, "e2m3": 7.5, "e2m1": 6.0}
names = pytest.mark.parametrize("name", FORMATS)


def boundary_values(form: Format) -> np.ndarray:
    """Every value, every midpoint between neighbours, the float32s on both sides of each, and the extremes."""
    table = form.finite()
    points = table + [(a + b) / 2 for a, b in zip(table, table[1:])]
    points += [table[-1] + (table[-1] - table[-2]) / 2, 2 * table[-1], 3.0e38, 1e-30, 1e-45, 1.17549435e-38]
    exact = np.array(points, np.float32)
    assert (exact.astype(np.float64)[: len(points) - 6] == np.array(points[:-6])).all()
    around = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))])
    return np.concatenate([around, -around, np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0], np.float32)])


@names
def test_every_code_decodes_to_its_value(name: str) -> None:
    form = FORMATS[name]
    codes = np.arange(2 * form.sign)
    expected = np.array([form.value(int(c)) for c in codes], np.float32)
    actual = vsm.to_float(name, codes)
    assert np.array_equal(actual, expected, equal_nan=True)
    assert (np.signbit(actual) == np.signbit(expected))[~np.isnan(expected)].all()
    assert max(form.finite()) == LARGEST[name]


@pytest.mark.parametrize("name", ["e3m2", "e2m3", "e2m1"])
def test_padding_bits_above_the_element_do_not_count(name: str) -> None:
    codes = np.arange(256)
    assert np.array_equal(vsm.to_float(name, codes), vsm.to_float(name, codes % (2 * FORMATS[name].sign)))


def test_scale_formats_decode() -> None:
    codes = np.arange(256)
    ue8m0 = np.array([math.ldexp(1, c - 127) for c in range(255)] + [math.nan])
    assert np.array_equal(vsm.to_float("ue8m0", codes), ue8m0.astype(np.float32), equal_nan=True)
    unsigned = np.array([FORMATS["e4m3"].value(c & 0x7F) for c in range(256)], np.float32)
    assert np.array_equal(vsm.to_float("ue4m3", codes), unsigned, equal_nan=True)


@names
@pytest.mark.parametrize("relu", [False, True])
def test_encoding_at_every_boundary(name: str, relu: bool) -> None:
    form = FORMATS[name]
    values = boundary_values(form)
    expected = np.array([form.nearest(float(v), relu) for v in values])
    shift = 4 if name == "e2m1" else 8
    # `a` lands in the upper half, `b` in the lower.
    as_high = vsm.cvt_f32x2_to_narrow(name, values, np.zeros_like(values), relu=relu)
    as_low = vsm.cvt_f32x2_to_narrow(name, np.zeros_like(values), values, relu=relu)
    wrong = [(float(v), hex(int(a)), hex(int(e))) for v, a, e in zip(values, as_low, expected) if a != e]
    assert not wrong, wrong[:8]
    assert np.array_equal(as_high, expected << shift)


@names
def test_encoding_of_random_float32(name: str) -> None:
    print("seed", 20)
    rng = np.random.default_rng(20)
    exponents = rng.integers(-12, 18, 4000)
    values = (rng.uniform(-2, 2, 4000) * 2.0**exponents).astype(np.float32)
    expected = [FORMATS[name].nearest(float(v)) for v in values]
    assert np.array_equal(vsm.cvt_f32x2_to_narrow(name, np.zeros_like(values), values), expected)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("relu", [False, True])
def test_every_float16_to_8_bits(name: str, relu: bool) -> None:
    codes = np.arange(65536, dtype=np.uint32)
    values = codes.astype(np.uint16).view(np.float16).astype(np.float64)
    unique = {float(v): FORMATS[name].nearest(float(v), relu) for v in values[~np.isnan(values)] if v != 0}
    expected = np.array(
        [FORMATS[name].nearest(float(v), relu) if v == 0 or math.isnan(v) else unique[float(v)] for v in values]
    )
    actual = vsm.cvt_f16x2_to_narrow(name, "f16", codes, relu=relu)
    assert np.array_equal(actual & 0xFF, expected)
    swapped = vsm.cvt_f16x2_to_narrow(name, "f16", codes << np.uint32(16), relu=relu)
    assert np.array_equal(swapped >> 8, expected)


@names
@pytest.mark.parametrize("relu", [False, True])
def test_every_code_to_float16(name: str, relu: bool) -> None:
    form = FORMATS[name]
    codes = np.arange(2 * form.sign, dtype=np.uint32)
    shift = np.uint32(4 if name == "e2m1" else 8)
    values = np.array([form.value(int(c)) for c in codes])
    if relu:
        values = np.where(np.signbit(values) & ~np.isnan(values), 0.0, values)
    bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)  # all these values are float16s
    bits[np.isnan(values)] = 0x7FFF
    packed = codes | (np.roll(codes, 1) << shift)
    assert np.array_equal(vsm.cvt_narrow_to_f16x2(name, packed, relu=relu), bits | (np.roll(bits, 1) << np.uint32(16)))


def test_ue8m0_to_bfloat16() -> None:
    codes = np.arange(256, dtype=np.uint32)
    values = np.array([math.ldexp(1, c - 127) for c in range(255)] + [0.0], np.float32)
    bits = values.view(np.uint32) >> 16
    bits[255] = 0x7FFF
    packed = codes | (codes[::-1] << np.uint32(8))
    assert np.array_equal(vsm.cvt_narrow_to_f16x2("ue8m0", packed, "bf16"), bits | (bits[::-1] << np.uint32(16)))


@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("round_", ["rz", "rp"])
@pytest.mark.parametrize("source", ["f32", "bf16"])
def test_float_to_ue8m0(source: str, round_: str, satfinite: bool) -> None:
    powers = np.array([math.ldexp(1, e) for e in range(-149, 128)], np.float32)
    values = np.concatenate(
        [
            powers,
            np.nextafter(powers, np.float32(np.inf)),
            np.nextafter(powers, np.float32(0)),
            powers * np.float32(1.5),
        ]
    )
    values = np.concatenate([values, np.array([0.0, np.inf, np.nan], np.float32)])
    values = np.concatenate([values, -values])
    if source == "bf16":
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    def reference(x: float) -> int:
        x = abs(x)  # the format has no sign
        if math.isnan(x):
            return 0xFF
        largest = 0xFE if satfinite else 0xFF
        if math.isinf(x):
            return largest
        if x <= math.ldexp(1, -127):
            return 0
        mantissa, exponent = math.frexp(x)  # x = mantissa * 2^exponent, 0.5 <= mantissa < 1
        power = exponent - 1 if round_ == "rz" or mantissa == 0.5 else exponent
        return largest if power > 127 else power + 127

    expected = np.array([reference(float(v)) for v in values])
    if source == "f32":
        actual = vsm.cvt_f32x2_to_narrow("ue8m0", values[::-1], values, round_, satfinite)
    else:
        bits = values.view(np.uint32) >> 16
        actual = vsm.cvt_f16x2_to_narrow("ue8m0", "bf16", bits | (bits[::-1] << 16), round_, satfinite)
    assert np.array_equal(actual, expected | (expected[::-1] << 8))


def test_scale_of_the_mx_quantizer() -> None:
    """amax / 448 rounded up to a power of two: the conversion that MXFP8 quantizers use (cvt.rp.satfinite.ue8m0x2)."""
    amax = np.array([448.0, 449.0, 447.0, 1.0, 0.0], np.float32)
    scale = vsm.cvt_f32x2_to_narrow("ue8m0", amax * 0, amax / np.float32(448.0), "rp", True)
    assert scale.tolist() == [127, 128, 127, 119, 0]


def test_supported_forms() -> None:
    """The forms are those that ptxas 13.0 takes for sm_121a."""
    for name in FORMATS:
        assert vsm.cvt_supported(name, "f32", "rn", satfinite=True)
        assert vsm.cvt_supported(name, "f32", "rn", satfinite=True, relu=True)
        assert not vsm.cvt_supported(name, "f32", "rn"), ".satfinite is mandatory"
        assert not vsm.cvt_supported(name, "f32", "rs", satfinite=True), "no stochastic rounding"
        assert not vsm.cvt_supported(name, "f32", "rz", satfinite=True)
        assert not vsm.cvt_supported(name, "bf16", "rn", satfinite=True)
        assert vsm.cvt_supported(name, "f16", "rn", satfinite=True) == (name in ("e4m3", "e5m2"))
        assert vsm.cvt_supported("f16", name, "rn", relu=True)
        assert not vsm.cvt_supported("bf16", name, "rn")
    for source in ("f32", "bf16"):
        for satfinite in (False, True):
            assert vsm.cvt_supported("ue8m0", source, "rp", satfinite) and vsm.cvt_supported(
                "ue8m0", source, "rz", satfinite
            )
            assert not vsm.cvt_supported("ue8m0", source, "rn", satfinite)
            assert not vsm.cvt_supported("ue8m0", source, "rp", satfinite, relu=True)
    assert vsm.cvt_supported("bf16", "ue8m0", "rn") and not vsm.cvt_supported("f16", "ue8m0", "rn")
