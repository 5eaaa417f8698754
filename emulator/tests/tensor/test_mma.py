# SPDX-License-Identifier: Apache-2.0
"""mma.sync against exact rational arithmetic: fragments, element types, containers, block scales, rounding."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pure_functions as vsm
import pytest
from fragments import a_place, b_place, c_place, scale_a_lane, scale_b_lane
from pure_functions import Mma

BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "e3m2": 8,
    "e2m3": 8,
    "e2m1": 8,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
}
F8F6F4 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")

PLAIN = [
    *(Mma(k, "f16", "f16", acc) for k in (8, 16) for acc in ("f32", "f16")),
    *(Mma(k, "bf16", "bf16") for k in (8, 16)),
    *(Mma(k, "tf32", "tf32") for k in (4, 8)),
    *(
        Mma(k, a, b, acc)
        for k in (16, 32)
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
        for acc in ("f32", "f16")
    ),
    *(
        Mma(k, a, b, "s32", satfinite=s)
        for k in (16, 32)
        for a in ("s8", "u8")
        for b in ("s8", "u8")
        for s in (False, True)
    ),
    *(
        Mma(k, a, b, "s32", satfinite=s)
        for k in (32, 64)
        for a in ("s4", "u4")
        for b in ("s4", "u4")
        for s in (False, True)
    ),
    *(Mma(32, a, b, acc, "f8f6f4") for a in F8F6F4 for b in F8F6F4 for acc in ("f32", "f16")),
]
SCALED = [
    *(Mma(32, a, b, "f32", "mxf8f6f4", "ue8m0", 1) for a in F8F6F4 for b in F8F6F4),
    Mma(64, "e2m1", "e2m1", "f32", "mxf4", "ue8m0", 2),
    Mma(64, "e2m1", "e2m1", "f32", "mxf4nvf4", "ue8m0", 2),
    Mma(64, "e2m1", "e2m1", "f32", "mxf4nvf4", "ue4m3", 4),
]


def name(form: Mma) -> str:
    return ".".join(
        filter(
            None,
            [form.kind, f"k{form.k}", form.a, form.b, form.acc, form.scale.replace("none", ""), "sat" * form.satfinite],
        )
    )


def bits_of(form: Mma, kind: str) -> int:
    return 4 if form.kind.startswith("mxf4") else BITS[kind]


def unpack(registers: np.ndarray, bits: int) -> np.ndarray:
    """Registers [count, 32] to element codes [32, elements], element 0 the lowest bits of register 0."""
    per = 32 // bits
    mask = np.uint32((1 << bits) - 1)
    shifts = (np.arange(per) * bits).astype(np.uint32)
    codes = (registers[:, :, None] >> shifts) & mask  # [register, lane, element]
    return codes.transpose(1, 0, 2).reshape(32, -1)


def element_value(form: Mma, kind: str, code: int) -> float:
    if kind == "e2m1" and not form.kind.startswith("mxf4"):
        code = (code >> 2) & 0xF  # the middle four bits of the container
    return float(vsm.to_float(kind, [code])[0])


def matrix(form: Mma, kind: str, registers: np.ndarray, place, shape: tuple[int, int]) -> np.ndarray:
    codes = unpack(registers, bits_of(form, kind))
    values = {int(c): element_value(form, kind, int(c)) for c in np.unique(codes)}
    out = np.full(shape, np.nan)
    seen = set()
    for lane in range(32):
        for i in range(codes.shape[1]):
            at = place(lane, i)
            assert at not in seen
            seen.add(at)
            out[at] = values[int(codes[lane, i])]
    assert len(seen) == shape[0] * shape[1]
    return out


def round_float(x: Fraction, exponent_bits: int, mantissa_bits: int) -> float:
    """Round to nearest even; handles subnormals and overflow."""
    if x == 0:
        return 0.0
    least = 2 - 2 ** (exponent_bits - 1)
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, least) - mantissa_bits)
    whole, rest = divmod(magnitude / unit, 1)
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    limit = (2 - Fraction(1, 2**mantissa_bits)) * Fraction(2) ** (2 ** (exponent_bits - 1) - 1)
    value = whole * unit
    result = math.inf if value > limit else float(value)
    return -result if x < 0 else result


def exact_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A times B as Fractions; all elements finite."""
    as_fractions = np.vectorize(Fraction, otypes=[object])
    return as_fractions(a) @ as_fractions(b)


def addends(form: Mma, registers: np.ndarray) -> np.ndarray:
    """C [16, 8]."""
    out = np.zeros((16, 8), np.int64 if form.acc == "s32" else np.float64)
    if form.acc == "s32":
        values = registers.view(np.int32)
    elif form.acc == "f32":
        values = registers.view(np.float32)
    else:
        values = unpack(registers, 16).astype(np.uint16).view(np.float16).T
    for lane, i in itertools.product(range(32), range(4)):
        out[c_place(lane, i)] = values[i, lane]
    return out


def expected_results(form: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    products = exact_products(a, b)
    if form.acc == "s32":
        sums = products.astype(object) + c
        if form.satfinite:
            return np.vectorize(lambda s: min(max(int(s), -(2**31)), 2**31 - 1), otypes=[np.int64])(sums)
        return np.vectorize(lambda s: (int(s) + 2**31) % 2**32 - 2**31, otypes=[np.int64])(sums)
    layout = (8, 23) if form.acc == "f32" else (5, 10)
    return np.vectorize(lambda p, x: round_float(p + Fraction(x), *layout), otypes=[np.float64])(products, c)


def random_codes(rng: np.random.Generator, form: Mma, kind: str, count: int) -> np.ndarray:
    """Registers of random finite elements; narrow types take every code, padding bits included."""
    bits = bits_of(form, kind)
    codes = rng.integers(0, 2**32, (count, 32), dtype=np.uint64).astype(np.uint32)
    if kind in ("f16", "bf16", "tf32"):
        values = rng.standard_normal((count, 32, 32 // bits)) * 2.0 ** rng.integers(-4, 4, (count, 32, 32 // bits))
        values = values.astype(np.float32)
        elements = (
            values.astype(np.float16).view(np.uint16)
            if kind == "f16"
            else values.view(np.uint32) >> (16 if kind == "bf16" else 0)
        )
        shifts = (np.arange(32 // bits) * bits).astype(np.uint32)
        return np.bitwise_or.reduce(elements.astype(np.uint32) << shifts, axis=-1)
    if kind in ("e4m3", "e5m2"):  # no NaN, no infinity
        for byte in range(0, 32, 8):
            code = (codes >> np.uint32(byte)) & np.uint32(0x7F)
            special = code == 0x7F if kind == "e4m3" else code >= 0x7C
            codes = np.where(special, codes ^ np.uint32(0x40 << byte), codes)
    return codes.astype(np.uint32)


def random_addends(rng: np.random.Generator, form: Mma, count: int) -> np.ndarray:
    if form.acc == "s32":
        near = rng.choice([0, 2**31 - 2000, -(2**31) + 2000], (count, 32))
        return (near + rng.integers(-2000, 2000, (count, 32))).astype(np.int64).astype(np.int32).view(np.uint32)
    values = (rng.standard_normal((count, 32, 2)) * 8.0 ** rng.integers(-3, 4, (count, 32, 2))).astype(np.float32)
    if form.acc == "f32":
        return values[:, :, 0].copy().view(np.uint32)
    halves = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return halves[:, :, 0] | (halves[:, :, 1] << np.uint32(16))


def results(form: Mma, d: np.ndarray) -> np.ndarray:
    return addends(form, d)


def scale_matrices(
    form: Mma, scale_a: np.ndarray, scale_b: np.ndarray, ids: tuple[int, int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """scale_A [16, chunks] and scale_B [chunks, 8] as the selectors pick them."""
    chunks = range(form.scale_vec)
    byte = lambda word, i: float(vsm.to_float(form.scale, [(int(word) >> (8 * i)) & 0xFF])[0])  # noqa: E731
    sa = np.array([[byte(scale_a[scale_a_lane(m, ids[1])], ids[0] + j) for j in chunks] for m in range(16)])
    sb = np.array([[byte(scale_b[scale_b_lane(n, ids[3])], ids[2] + j) for n in range(8)] for j in chunks])
    return sa, sb


def operands(form: Mma, seed: str) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
    print("seed", seed)
    rng = np.random.default_rng(list(f"{seed}{name(form)}".encode()))
    na, nb, nc, _ = form.registers()
    return rng, random_codes(rng, form, form.a, na), random_codes(rng, form, form.b, nb), random_addends(rng, form, nc)


def as_matrices(form: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        matrix(form, form.a, a, a_place(form.k, bits_of(form, form.a)), (16, form.k)),
        matrix(form, form.b, b, b_place(form.k, bits_of(form, form.b)), (form.k, 8)),
        addends(form, c),
    )


@pytest.mark.parametrize("form", PLAIN, ids=name)
def test_plain(form: Mma) -> None:
    _, a, b, c = operands(form, "plain")
    d = form(a, b, c)
    expected = expected_results(form, *as_matrices(form, a, b, c))
    # If products do not sum exactly in 53 bits, the model may differ from the exact sum by a part in 2^50.
    assert np.array_equal(results(form, d), expected)
    assert np.array_equal(form(a, b, c, in_place=True), d), "D may be C"


SELECTORS = {
    1: [(0, 0, 0, 0), (3, 1, 1, 2), (1, 0, 2, 3), (2, 1, 3, 1)],
    2: [(0, 0, 0, 0), (2, 1, 0, 3), (0, 1, 2, 1), (2, 0, 2, 2)],
    4: [(0, 0, 0, 0), (0, 1, 0, 3), (0, 1, 0, 1), (0, 0, 0, 2)],
}


@pytest.mark.parametrize("form", SCALED, ids=name)
def test_block_scaled(form: Mma) -> None:
    rng, a, b, c = operands(form, "scaled")
    low, high = (0x60, 0x90) if form.scale == "ue8m0" else (0, 0x7F)
    scale_a, scale_b = (
        rng.integers(low, high, (32, 4)).astype(np.uint8).view(np.uint32).ravel() for _ in range(2)
    )  # every lane and byte differs, so that a wrong choice shows
    ma, mb, mc = as_matrices(form, a, b, c)
    for ids in SELECTORS[form.scale_vec]:
        assert form.check_scale(ids) == ""
        sa, sb = scale_matrices(form, scale_a, scale_b, ids)
        chunk = form.k // form.scale_vec
        expected = expected_results(form, ma * np.repeat(sa, chunk, axis=1), mb * np.repeat(sb, chunk, axis=0), mc)
        actual = results(form, form(a, b, c, scale_a, scale_b, ids))
        assert np.array_equal(actual, expected), ids


ALL_SELECTORS = [
    *(("ue8m0", 1, i) for i in itertools.product(range(4), range(2), range(4), range(4))),
    *(("ue8m0", 2, i) for i in itertools.product((0, 2), range(2), (0, 2), range(4))),
    *(("ue4m3", 4, i) for i in itertools.product((0,), range(2), (0,), range(4))),
]


@pytest.mark.parametrize("scale,vec", [("ue8m0", 1), ("ue8m0", 2), ("ue4m3", 4)])
def test_every_selector_reads_its_own_lane_and_byte(scale: str, vec: int) -> None:
    """A and B all ones: D[m, n] is the sum over chunks of chunk size * scale_A * scale_B."""
    kind = {1: "mxf8f6f4", 2: "mxf4", 4: "mxf4nvf4"}[vec]
    form = Mma(32 if vec == 1 else 64, *(("e4m3", "e4m3") if vec == 1 else ("e2m1", "e2m1")), "f32", kind, scale, vec)
    one = np.uint32(0x38383838 if vec == 1 else 0x22222222)
    a, b, c = np.full((4, 32), one), np.full((2, 32), one), np.zeros((4, 32), np.uint32)
    print("seed", vec)
    rng = np.random.default_rng(vec)
    words = [
        rng.integers(0x70, 0x8E, (32, 4)) if scale == "ue8m0" else rng.integers(1, 0x7F, (32, 4)) for _ in range(2)
    ]
    scale_a, scale_b = (w.astype(np.uint8).view(np.uint32).ravel() for w in words)
    chosen = [ids for s, v, ids in ALL_SELECTORS if v == vec]
    for ids in chosen:
        sa, sb = scale_matrices(form, scale_a, scale_b, ids)
        expected = np.vectorize(lambda x: round_float(x, 8, 23), otypes=[float])(
            exact_products(sa * (form.k // vec), sb)
        )
        assert np.array_equal(results(form, form(a, b, c, scale_a, scale_b, ids)), expected), ids


@pytest.mark.parametrize(
    "ids,text",
    [
        ((4, 0, 0, 0), "a byte-id must be 0, 1, 2 or 3 with .scale_vec::1X"),
        ((0, 2, 0, 0), "thread-id-a must be 0 or 1"),
        ((0, 0, 0, 4), "thread-id-b must be 0, 1, 2 or 3"),
        ((0, 0, 65535, 0), "a byte-id must be 0, 1, 2 or 3 with .scale_vec::1X"),
    ],
)
def test_bad_selectors(ids: tuple[int, int, int, int], text: str) -> None:
    assert SCALED[0].check_scale(ids) == text


def test_bad_selectors_of_the_wider_scale_vectors() -> None:
    two, four = SCALED[-3], SCALED[-1]
    assert (
        two.check_scale((1, 0, 0, 0)) == two.check_scale((0, 0, 3, 0)) == "a byte-id must be 0 or 2 with .scale_vec::2X"
    )
    assert four.check_scale((1, 0, 0, 0)) == four.check_scale((0, 0, 2, 0)) == "a byte-id must be 0 with .scale_vec::4X"


SCALE_EDGES = {0x00: 2.0**-127, 0x01: 2.0**-126, 0x7F: 1.0, 0x80: 2.0, 0xFE: 2.0**127, 0xFF: math.nan}


@pytest.mark.parametrize("code", SCALE_EDGES)
@pytest.mark.parametrize("which", ["a", "b"])
def test_scale_edges(code: int, which: str) -> None:
    """One row (column) scaled by each edge, the others by 1."""
    form = SCALED[0]
    one = np.uint32(0x38383838)
    a, b, c = np.full((4, 32), one), np.full((2, 32), one), np.zeros((4, 32), np.uint32)
    scales = {"a": np.full(32, 0x7F7F7F7F, np.uint32), "b": np.full(32, 0x7F7F7F7F, np.uint32)}
    scales[which][scale_a_lane(9, 0) if which == "a" else scale_b_lane(5, 0)] = code * 0x01010101
    d = form(a, b, c, scales["a"], scales["b"])
    expected = np.full((16, 8), 32.0)
    with np.errstate(over="ignore"):
        scaled = float(np.float32(32 * SCALE_EDGES[code])) if code != 0xFE else math.inf
    expected[(9, slice(None)) if which == "a" else (slice(None), 5)] = scaled
    assert np.array_equal(results(form, d), expected, equal_nan=True)
    if code == 0xFF:
        assert (d.view(np.float32)[np.isnan(d.view(np.float32))].view(np.uint32) == 0x7FFFFFFF).all(), (
            "the canonical NaN"
        )


def test_largest_and_smallest_scales_meet() -> None:
    """2^127 on one side and 2^-127 on the other give back the unscaled product."""
    form = SCALED[0]
    rng, a, b, c = operands(form, "cancel")
    plain = form(a, b, c, np.full(32, 0x7F7F7F7F, np.uint32), np.full(32, 0x7F7F7F7F, np.uint32))
    assert np.array_equal(form(a, b, c, np.full(32, 0xFEFEFEFE, np.uint32), np.zeros(32, np.uint32)), plain)


@pytest.mark.parametrize("acc", ["f32", "f16"])
def test_padding_of_the_containers_is_ignored(acc: str) -> None:
    """e2m1 lies in bits 5..2, e2m3 and e3m2 in bits 5..0; the ISA calls the rest padding."""
    for kind, used in (("e2m1", 0x3C3C3C3C), ("e2m3", 0x3F3F3F3F), ("e3m2", 0x3F3F3F3F)):
        form = Mma(32, kind, kind, acc, "f8f6f4")
        _, a, b, c = operands(form, "padding")
        assert np.array_equal(form(a, b, c), form(a & np.uint32(used), b & np.uint32(used), c))


def test_e2m1_container_is_not_the_low_nibble() -> None:
    form = Mma(32, "e2m1", "e4m3", "f32", "f8f6f4")
    b, c = np.full((2, 32), 0x38383838, np.uint32), np.zeros((4, 32), np.uint32)
    in_place = form(np.full((4, 32), 0x1C1C1C1C, np.uint32), b, c)  # 00 0111 00: 6
    too_low = form(np.full((4, 32), 0x07070707, np.uint32), b, c)  # 00 0001 11: 0.5
    assert (in_place.view(np.float32) == 192.0).all() and (too_low.view(np.float32) == 16.0).all()


@pytest.mark.parametrize(
    "form",
    [Mma(16, "f16", "f16"), Mma(16, "bf16", "bf16"), Mma(16, "f16", "f16", "f16"), Mma(32, "e5m2", "e5m2")],
    ids=name,
)
def test_infinities_and_nans(form: Mma) -> None:
    """Row 0 of A meets inf * 1, row 1 inf * 0, row 2 inf - inf, row 3 a NaN; the others stay finite."""
    bits = BITS[form.a]
    one, inf, nan = {"f16": (0x3C00, 0x7C00, 0x7E00), "bf16": (0x3F80, 0x7F80, 0x7FC0), "e5m2": (0x3C, 0x7C, 0x7D)}[
        form.a
    ]
    a = np.full((16, form.k), one)
    b = np.full((form.k, 8), one)
    a[0, 3] = inf
    a[1, 5], b[5, :] = inf, 0
    a[2, 3], a[2, 4] = inf, inf | 1 << (bits - 1)
    a[3, 0] = nan

    c = np.zeros((form.registers()[2], 32), np.uint32)
    d = form(registers_of(a, a_place(form.k, bits), bits), registers_of(b, b_place(form.k, bits), bits), c)
    values = results(form, d)
    assert (values[0] == np.inf).all()
    assert np.isnan(values[1:4]).all()
    assert (values[4:] == form.k - 1).all()
    canonical = 0x7FFFFFFF if form.acc == "f32" else 0x7FFF
    codes = d if form.acc == "f32" else unpack(d, 16)
    assert set(np.unique(codes[np.isnan(d.view(np.float32))] if form.acc == "f32" else codes[codes > 0x7C00])) == {
        canonical
    }


def registers_of(codes: np.ndarray, place, bits: int) -> np.ndarray:
    """Registers of a matrix of element codes."""
    per = 32 // bits
    count = codes.size // (32 * per)
    out = np.zeros((count, 32), np.uint32)
    for lane, i in itertools.product(range(32), range(count * per)):
        out[i // per, lane] |= np.uint32(int(codes[place(lane, i)]) << (i % per * bits))
    return out


ROUNDINGS = [  # C, products as pairs of e4m3, D: ties go to even, what lies beside them does not
    (2.0**24, [(1, 1)], 2.0**24),
    (2.0**24, [(3, 1)], 2.0**24 + 4),
    (2.0**24, [(1, 1), (2**-9, 2**-9)], 2.0**24 + 2),
    (2.0**24, [(1, 1), (2**-9, -(2**-9))], 2.0**24),
    (2.0**24, [(-1, 1)], 2.0**24 - 1),
    (2.0**24, [(-0.5, 1)], 2.0**24),
    (2.0**24, [(-0.5, 1), (2**-9, -(2**-9))], 2.0**24 - 1),
    # These sums need 59 bits: rounding to float64 first would make a tie of them.
    (2.0**40, [(256, 256)], 2.0**40),
    (2.0**40, [(256, 256), (2**-9, 2**-9)], 2.0**40 + 2.0**17),
    (2.0**40, [(256, 256), (2**-9, -(2**-9))], 2.0**40),
    (-(2.0**40), [(-256, 256), (2**-9, -(2**-9))], -(2.0**40) - 2.0**17),
    (-(2.0**40) - 2.0**17, [(256, -256), (2**-9, 2**-9)], -(2.0**40) - 2.0**17),
    (-(2.0**40) - 2.0**17, [(256, -256), (2**-9, -(2**-9))], -(2.0**40) - 2.0**18),
]


@pytest.mark.parametrize("c,pairs,expected", ROUNDINGS)
def test_float32_sum_is_rounded_once(c: float, pairs: list[tuple[float, float]], expected: float) -> None:
    form = Mma(32, "e4m3", "e4m3")
    a, b = np.zeros((16, 32)), np.zeros((32, 8))
    for k, (x, y) in enumerate(pairs):
        a[:, 31 - k], b[31 - k, :] = x, y
    codes = [vsm.cvt_f32x2_to_narrow("e4m3", np.zeros(m.size), m.ravel()).reshape(m.shape) for m in (a, b)]
    ra, rb = registers_of(codes[0], a_place(32, 8), 8), registers_of(codes[1], b_place(32, 8), 8)
    d = form(ra, rb, np.full((4, 32), np.float32(c)).view(np.uint32))
    assert (d.view(np.float32) == expected).all()


@pytest.mark.parametrize(
    "c,tiny,expected",
    [(1024, 0, 1024), (1024, 2**-9, 1025), (1025, 0, 1026), (1025, -(2**-9), 1025), (-1025, 2**-9, -1025)],
)
def test_float16_sum_is_rounded_once(c: int, tiny: float, expected: int) -> None:
    """C and one half are a tie of float16; with 2^-18 more or less they are none, though float32 cannot tell."""
    form = Mma(32, "e4m3", "e4m3", "f16")
    a, b = np.zeros((16, 32)), np.zeros((32, 8))
    a[:, 0], b[0, :] = math.copysign(0.5, c), 1
    a[:, 1], b[1, :] = tiny, 2**-9
    codes = [vsm.cvt_f32x2_to_narrow("e4m3", np.zeros(m.size), m.ravel()).reshape(m.shape) for m in (a, b)]
    addend = int(np.float16(c).view(np.uint16)) * 0x10001
    d = form(
        registers_of(codes[0], a_place(32, 8), 8), registers_of(codes[1], b_place(32, 8), 8), np.full((2, 32), addend)
    )
    assert (d.view(np.float16) == expected).all()


def test_float32_subnormal_results() -> None:
    """2^-149 survives; half of it rounds to even, zero."""
    form = Mma(16, "bf16", "bf16")
    a, b = np.zeros((4, 32), np.uint32), np.zeros((2, 32), np.uint32)
    a[0, 0], b[0, 0] = 0x0001, 0x3F80  # A[0, 0] = 2^-133, B[0, 0] = 1
    d = results(form, form(a, b, np.zeros((4, 32), np.uint32)))
    assert d[0, 0] == 2.0**-133 and np.count_nonzero(d) == 1
    b[0, 0] = 0x3780  # 2^-16: the product is 2^-149
    assert results(form, form(a, b, np.zeros((4, 32), np.uint32)))[0, 0] == 2.0**-149
    b[0, 0] = 0x3700  # 2^-17
    assert results(form, form(a, b, np.zeros((4, 32), np.uint32)))[0, 0] == 0.0


def test_forms_that_do_not_exist() -> None:
    """ptxas 13.0 refuses each of these for sm_121a."""
    missing = [
        Mma(16, "f16", "bf16"), Mma(16, "bf16", "bf16", "f16"), Mma(4, "f16", "f16"), Mma(32, "f16", "f16"), Mma(16, "tf32", "tf32"),
        Mma(16, "f16", "f16", "f32", c="f16"), Mma(16, "f16", "f16", "f16", c="f32"), Mma(16, "f16", "f16", satfinite=True),
        Mma(64, "e4m3", "e4m3"), Mma(32, "e2m1", "e4m3"), Mma(16, "e4m3", "e4m3", "f32", "f8f6f4"),
        Mma(32, "s8", "e4m3"), Mma(32, "s8", "s8", "f32"), Mma(64, "s8", "s8", "s32"),
        Mma(32, "e4m3", "e4m3", "f16", "mxf8f6f4", "ue8m0", 1), Mma(32, "e4m3", "e4m3", "f32", "mxf8f6f4", "ue4m3", 1),
        Mma(32, "e4m3", "e4m3", "f32", "mxf8f6f4", "ue8m0", 2), Mma(32, "e4m3", "e4m3", "f32", "mxf8f6f4"),
        Mma(64, "e2m1", "e2m1", "f32", "mxf4", "ue4m3", 4), Mma(64, "e2m1", "e2m1", "f32", "mxf4nvf4", "ue8m0", 4),
        Mma(64, "e2m1", "e2m1", "f32", "mxf4nvf4", "ue4m3", 2), Mma(32, "e2m1", "e2m1", "f32", "mxf4", "ue8m0", 2),
        Mma(32, "e4m3", "e4m3", "f32", "f8f6f4", "ue8m0", 1),
    ]  # fmt: skip
    for form in missing:
        assert form.registers() is None, form


@pytest.mark.parametrize("form", [*PLAIN, *SCALED], ids=name)
def test_register_counts(form: Mma) -> None:
    na, nb, nc, nd = form.registers()
    assert na * 32 * 32 == 16 * form.k * bits_of(form, form.a) and nb * 32 * 32 == 8 * form.k * bits_of(form, form.b)
    assert nc == nd == (2 if form.acc == "f16" else 4)
