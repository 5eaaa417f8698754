# SPDX-License-Identifier: Apache-2.0
"""``mma`` with sums of limited width, against a model of its own in integers, and against what an H200 did.

The model (arXiv 2512.07004): products and C are cut toward zero to ``width`` bits below the largest exponent among them,
added exactly, and the sum is cut to at most 23 fraction bits.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from fragments import a_place, b_place, c_place
from pure_functions import Mma
from test_golden import buffers, golden
from test_mma import (
    PLAIN,
    SCALED,
    SELECTORS,
    addends,
    as_matrices,
    bits_of,
    matrix,
    name,
    operands,
    results,
    scale_matrices,
)

FORMS = [form for form in PLAIN if form.acc == "f32"] + SCALED
LEAST = {"f16": -14, "e5m2": -14, "e4m3": -6, "ue4m3": -6, "e3m2": -2, "e2m3": 0, "e2m1": 0, "ue8m0": -127}
TERMS = {16: 16, 32: 8}  # of a step, by the bits of an element
FLOOR = -133  # of the exponent that a step aligns to
POINT = 400  # numbers of the model are integers in units of 2^-POINT


def exponent(value: float, least: int) -> int:
    """Of the number as it is encoded: a subnormal one has the format's least exponent."""
    return max(math.frexp(value)[1] - 1, least)


def fixed(value: float) -> int:
    scaled = Fraction(value) * 2**POINT
    assert scaled.denominator == 1
    return scaled.numerator


def cut(value: int, unit_exponent: int) -> int:
    """Toward zero to a multiple of 2^unit_exponent."""
    shift = unit_exponent + POINT
    if shift <= 0:
        return value
    magnitude = abs(value) >> shift << shift
    return -magnitude if value < 0 else magnitude


def step(products: list[tuple[float, int]], c: float, width: int, fraction: int) -> float:
    """``products`` are (value, exponent); only finite numbers."""
    there = [(value, e) for value, e in products if value]
    if c:
        there.append((c, exponent(c, -126)))
    if not there:
        return 0.0
    largest = max(FLOOR, *(e for _, e in there))
    total = sum(cut(fixed(value), largest - width) for value, _ in there)
    if total == 0:
        return 0.0
    leading = abs(total).bit_length() - 1 - POINT
    kept = cut(total, max(leading, -126) - fraction)
    return math.copysign(math.inf, total) if abs(kept) >= 2 ** (128 + POINT) else float(Fraction(kept, 2**POINT))


def model(form: Mma, a, b, c, sa=None, sb=None, *, width: int) -> np.ndarray:
    """D [16, 8]; ``sa`` [16, chunks] and ``sb`` [chunks, 8] are the block scales."""
    terms = TERMS.get(bits_of(form, form.a), 32)
    d = np.array(c, np.float64)
    for m, n in itertools.product(range(16), range(8)):
        products = []
        for k in range(form.k):
            x, y = a[m, k], b[k, n]
            e = exponent(x, LEAST.get(form.a, -126)) + exponent(y, LEAST.get(form.b, -126))
            if sa is not None:
                chunk = k // (form.k // form.scale_vec)
                e += sum(exponent(s, LEAST[form.scale]) for s in (sa[m, chunk], sb[chunk, n]))
                x, y = x * sa[m, chunk], y * sb[chunk, n]
            products.append((x * y, e))
        numbers = [value for value, _ in products] + [d[m, n]]
        if not np.isfinite(numbers).all():
            d[m, n] = sum(numbers)  # of infinities and NaNs nothing is cut
            continue
        for first in range(0, form.k, terms):
            d[m, n] = step(products[first : first + terms], d[m, n], width, min(width, 23))
    return d


def agree(form: Mma, registers, scales=(), ids=(0, 0, 0, 0), *, width: int) -> np.ndarray:
    """D of the implementation, asserted to be the model's."""
    actual = results(form, form(*registers, *scales, ids=ids, accumulation_bits=width))
    given = scale_matrices(form, *scales, ids) if scales else ()
    with np.errstate(invalid="ignore"):
        expected = model(form, *as_matrices(form, *registers), *given, width=width)
    assert np.array_equal(actual, expected, equal_nan=True)
    assert np.array_equal(np.signbit(actual[actual == 0]), np.signbit(expected[expected == 0]))
    return actual


@pytest.mark.parametrize("width", [13, 20, 21, 25])
@pytest.mark.parametrize("form", FORMS, ids=name)
def test_random_operands(form: Mma, width: int) -> None:
    rng, a, b, c = operands(form, f"limited {width}")
    if not form.scale_vec:
        agree(form, (a, b, c), width=width)
        return
    low, high = (0x70, 0x90) if form.scale == "ue8m0" else (0, 0x7F)
    scales = tuple(rng.integers(low, high, (32, 4)).astype(np.uint8).view(np.uint32).ravel() for _ in range(2))
    agree(form, (a, b, c), scales, SELECTORS[form.scale_vec][1], width=width)


# --- hard cases -----------------------------------------------------------------------------------------------------
def registers_of(codes: np.ndarray, place, bits: int, count: int) -> np.ndarray:
    """The registers [count, 32] that hold a matrix of element codes."""
    per = 32 // bits
    out = np.zeros((count, 32), np.uint32)
    for lane, i in itertools.product(range(32), range(count * per)):
        out[i // per, lane] |= np.uint32(int(codes[place(lane, i)]) << (i % per * bits))
    return out


def spread(form: Mma, row: list[int], column: list[int], c: list[float]):
    """Registers of A, B and C: ``row`` times ``column`` is the product of every element, whose C is that of ``c`` in turn."""
    na, nb, nc, _ = form.registers()
    a = np.tile(np.array(row + [0] * (form.k - len(row))), (16, 1))
    b = np.tile(np.array(column + [0] * (form.k - len(column)))[:, None], (1, 8))
    addend = np.zeros((nc, 32), np.float32)
    for lane, i in itertools.product(range(32), range(4)):
        m, n = c_place(lane, i)
        addend[i, lane] = c[(8 * m + n) % len(c)]
    bits = bits_of(form, form.a)
    return (
        registers_of(a, a_place(form.k, bits), bits, na),
        registers_of(b, b_place(form.k, bits), bits, nb),
        addend.view(np.uint32),
    )


ONE, MINUS, LARGE, TINY = 0x38, 0xB8, 0x7E, 0x01  # e4m3: 1, -1, 448, 2^-9
E4M3 = Mma(32, "e4m3", "e4m3")
MX = Mma(32, "e4m3", "e4m3", "f32", "mxf8f6f4", "ue8m0", 1)
HARD = {
    # C far above, at and below the products, of either sign: what is cut is cut toward zero.
    "addends": ([ONE] * 3, [ONE] * 3, [s * 2.0**e * 1.7 for e in range(-40, 41, 4) for s in (1, -1)]),
    "cancels": ([LARGE] * 2, [LARGE, 0xFE], [2.0**-e for e in range(30)]),
    "cancels C": ([LARGE], [LARGE], [-(448.0**2), -(448.0**2) + 1 / 64, np.nextafter(np.float32(-(448.0**2)), 0)]),
    # 448 * 448 = 1.53125 * 2^17, its exponent counts as 16: both sides of the last bit that a width keeps.
    "last bit": ([LARGE] + [TINY] * 31, [LARGE] + [ONE] * 31, [2.0**e for e in range(-20, 20)]),
    "carries": ([LARGE] * 32, [LARGE] * 32, [0.0, 2.0**17, 2.0**22, 2.0**30]),
    "subnormal elements": ([TINY] * 32, [TINY] * 32, [2.0**e for e in range(-40, 0)]),
    "zeros": ([0x80] * 4, [ONE] * 4, [0.0, -0.0]),
    "zeros, all negative": ([0x80] * 32, [ONE] * 32, [0.0, -0.0]),
    "subnormal C": ([0], [0], [2.0**-149, -(2.0**-149), 2.0**-140, 2.0**-127 + 2.0**-149, 2.0**-133, 1.75 * 2.0**-126]),
    "largest C": ([LARGE], [LARGE], [3.4028234663852886e38, -3.4028234663852886e38]),
    "NaN": ([0x7F, ONE], [ONE, ONE], [1.0, np.inf]),
    "infinities": ([ONE], [ONE], [np.inf, -np.inf, np.nan]),
    "alternating": ([ONE, MINUS] * 16, [LARGE, 0x7D] * 16, [1e5, -1e5, 1 / 3]),
}  # fmt: skip


@pytest.mark.parametrize("width", [9, 13, 24, 25, 30])
@pytest.mark.parametrize("case", HARD)
def test_hard_cases(case: str, width: int) -> None:
    registers = spread(E4M3, *HARD[case])
    plain = agree(E4M3, registers, width=width)
    ones = np.full(32, 0x7F7F7F7F, np.uint32)
    assert np.array_equal(agree(MX, registers, (ones, ones), width=width), plain, equal_nan=True)
    # Scales move the products against C: 2^-127 * 2^-127 to 2^127 * 2^127, and NaN.
    for scale_a, scale_b in ((0, 0), (0, 127), (127, 2), (60, 60), (200, 127), (254, 254), (255, 127)):
        scales = (np.full(32, scale_a, np.uint32), np.full(32, scale_b, np.uint32))
        agree(MX, registers, scales, width=width)


@pytest.mark.parametrize("width", [13, 25])
@pytest.mark.parametrize("first", [6, -6])
def test_a_step_beyond_float32_stays_infinite(first: int, width: int) -> None:
    """32 products of 36 * 2^118 are more than float32 holds; the next 32 would bring the sum back to 0."""
    form = Mma(64, "e2m1", "e2m1", "f32", "mxf4", "ue8m0", 2)
    row = [0x7] * 32 + [0xF] * 32 if first > 0 else [0xF] * 32 + [0x7] * 32
    scales = tuple(np.full(32, 0x01010101 * byte, np.uint32) for byte in (127 + 118, 127))
    actual = results(form, form(*spread(form, row, [0x7] * 64, [0.0]), *scales, accumulation_bits=width))
    assert (actual == np.copysign(np.inf, first)).all()


def test_what_a_width_keeps() -> None:
    """By hand: 13 bits below the exponent 0 of C lies 2^-13. 1 + 2^-13 is kept, half of it is cut, either sign."""
    form = MX
    row, column = [ONE], [ONE]
    one = np.full(32, 127, np.uint32)
    for e, kept in ((-13, True), (-14, False)):
        for sign in (1.0, -1.0):
            registers = spread(form, [ONE if sign > 0 else MINUS], column, [sign])
            d = results(form, form(*registers, one, np.full(32, 127 + e, np.uint32), accumulation_bits=13))
            assert (d == sign * (1 + kept * 2.0**e)).all()
    # Thirty-two halves of the last bit: each is cut before they are added, though together they are sixteen bits.
    registers = spread(form, row * 32, column * 32, [1.0])
    d = results(form, form(*registers, one, np.full(32, 127 - 14, np.uint32), accumulation_bits=13))
    assert (d == 1).all()
    assert (results(form, form(*registers, one, np.full(32, 127 - 14, np.uint32))) == 1 + 2.0**-9).all()


# --- an H200 --------------------------------------------------------------------------------------------------------
def golden_warps(case: dict, number: int):
    """The form, and A, B, C, D of each warp."""
    form = Mma(case["k"], case["a"], case["b"], case["acc"])
    counts = form.registers()
    (a, b, c), (_, _, d) = buffers(number)
    warps = a.size // (32 * counts[0])
    shaped = [x.reshape(warps, n, 32) for x, n in zip((a, b, c, d), counts)]
    return form, list(zip(*shaped))


def golden_cases(*types: str, acc: tuple[str, ...] = ("f32",)) -> list:
    return [
        pytest.param(i, case, id=case["name"])
        for i, case in enumerate(golden()[0])
        if case["op"] == "mma" and case["a"] in types and case["acc"] in acc
    ]


@pytest.mark.parametrize("number,case", golden_cases("f16", "bf16", "tf32", acc=("f32", "f16")))
def test_an_h200_bit_for_bit(number: int, case: dict) -> None:
    """The published model of 16-bit and tf32 elements, on operands that an exact sum gets wrong (but for f16 results)."""
    form, warps = golden_warps(case, number)
    differ = 0
    for a, b, c, d in warps:
        assert np.array_equal(form(a, b, c, accumulation_bits=25), d)
        differ += int((form(a, b, c) != d).sum())
    print(f"{differ} of {128 * len(warps)} elements of an exact sum differ")
    assert differ > 0 or case["acc"] == "f16"


@pytest.mark.parametrize("number,case", golden_cases("bf16"))
def test_the_h200_tells_widths_apart(number: int, case: dict) -> None:
    """The golden operands are hard enough: with 24 or 26 bits the model disagrees with the GPU."""
    form, warps = golden_warps(case, number)
    wrong = dict.fromkeys((24, 25, 26), 0)
    for a, b, c, d in warps:
        matrices = as_matrices(form, a, b, c)
        for wide in wrong:
            with np.errstate(invalid="ignore"):
                expected = model(form, *matrices, width=wide)
            wrong[wide] += int((~np.isclose(expected, results(form, d), rtol=0, atol=0, equal_nan=True)).sum())
    print(wrong)
    assert wrong[25] == 0
    assert wrong[24] > 0
    assert wrong[26] > 0


@pytest.mark.parametrize("number,case", golden_cases("e4m3", "e5m2"))
def test_fp8_of_an_h200_is_f16(number: int, case: dict) -> None:
    """Hopper has no ``mma.sync`` of FP8 in hardware: elements become f16, and the sum of the steps (elements 0 and 1 of each
    register, then 2 and 3) is added to C with one rounding. So these data say nothing about FP8 sums."""
    form, warps = golden_warps(case, number)
    half = Mma(form.k // 2, "f16", "f16")
    size = np.arange(form.k)
    for a, b, c, d in warps:
        ma = matrix(form, form.a, a, a_place(form.k, 8), (16, form.k))
        mb = matrix(form, form.b, b, b_place(form.k, 8), (form.k, 8))
        total = np.zeros((4, 32), np.uint32)
        na, nb, _, _ = half.registers()
        for part in (size[size % 4 < 2], size[size % 4 >= 2]):
            codes = [x.astype(np.float16).view(np.uint16) for x in (ma[:, part], mb[part])]
            total = half(
                registers_of(codes[0], a_place(half.k, 16), 16, na),
                registers_of(codes[1], b_place(half.k, 16), 16, nb),
                total,
                accumulation_bits=25,
            )
        with np.errstate(over="ignore", invalid="ignore"):
            expected = addends(form, c).astype(np.float32) + addends(form, total).astype(np.float32)
        assert np.array_equal(results(form, d).astype(np.float32), expected, equal_nan=True)
