# SPDX-License-Identifier: Apache-2.0
"""Floating point arithmetic, comparisons and approximations: PTX ISA 9.0, 9.7.3, 9.7.4, 9.7.6, 9.7.7."""

from __future__ import annotations

import math

import pytest
from bits import INF32, NAN32, bf16, f16, f32, f64, to_f32

NEG = 0x80000000
TINY = 1  # the least positive f32 subnormal
H_NAN, H_INF = 0x7FFF, 0x7C00
ONE, TWO, THREE = f32(1), f32(2), f32(3)
UP = ONE + 1  # 1 + 2^-23
TWO64, ONE64 = f64(2), f64(1)


def pair(low: int, high: int) -> int:
    return low | high << 16


FORMS = [
    # add, sub, mul: rounding, subnormals, NaN, infinities, saturation
    (
        "9.7.3.3",
        "add.f32 %d, %a, %b;",
        32,
        (32, 32),
        [(ONE, TWO, THREE), (INF32, INF32 | NEG, NAN32), (TINY, TINY, 2), (0xFF812345, ONE, NAN32)],
    ),
    ("9.7.3.3", "add.ftz.f32 %d, %a, %b;", 32, (32, 32), [(TINY, TINY, 0), (TINY | NEG, TINY | NEG, NEG)]),
    ("9.7.3.3", "add.sat.f32 %d, %a, %b;", 32, (32, 32), [(ONE, ONE, ONE), (f32(-3), ONE, 0), (NAN32, ONE, 0)]),
    (
        "9.7.3.3",
        "add.rz.f32 %d, %a, %b;",
        32,
        (32, 32),
        [(ONE, f32(2**-24) + 1, ONE), (ONE | NEG, f32(-(2**-23) * 0.75), ONE | NEG)],
    ),
    (
        "9.7.3.3",
        "add.rp.f32 %d, %a, %b;",
        32,
        (32, 32),
        [(ONE, f32(2**-80), UP), (ONE | NEG, f32(-(2**-80)), ONE | NEG)],
    ),
    (
        "9.7.3.3",
        "add.rm.f32 %d, %a, %b;",
        32,
        (32, 32),
        [(ONE, f32(2**-80), ONE), (ONE | NEG, f32(-(2**-80)), UP | NEG)],
    ),
    ("9.7.3.3", "add.rn.f32 %d, %a, %b;", 32, (32, 32), [(ONE, f32(2**-24), ONE), (UP, f32(2**-24), ONE + 2)]),
    ("9.7.3.3", "add.f64 %d, %a, %b;", 64, (64, 64), [(ONE64, f64(2**-52), ONE64 + 1), (ONE64, f64(2**-53), ONE64)]),
    ("9.7.3.4", "sub.f32 %d, %a, %b;", 32, (32, 32), [(ONE, ONE, 0), (0, 0, 0), (INF32, INF32, NAN32)]),
    ("9.7.3.5", "mul.f32 %d, %a, %b;", 32, (32, 32), [(THREE, f32(0.5), f32(1.5)), (0, INF32, NAN32), (NEG, ONE, NEG)]),
    ("9.7.3.5", "mul.rz.f32 %d, %a, %b;", 32, (32, 32), [(UP, UP, ONE + 2), (0x7F7FFFFF, TWO, 0x7F7FFFFF)]),
    ("9.7.3.5", "mul.rp.f32 %d, %a, %b;", 32, (32, 32), [(UP, UP, ONE + 3), (TINY, f32(0.25), TINY)]),
    ("9.7.3.5", "mul.ftz.f32 %d, %a, %b;", 32, (32, 32), [(f32(2**-100), f32(2**-40), 0)]),
    ("9.7.3.5", "mul.f64 %d, %a, %b;", 64, (64, 64), [(f64(3), f64(0.5), f64(1.5))]),
    # fma: one rounding
    (
        "9.7.3.6",
        "fma.rn.f32 %d, %a, %b, %c;",
        32,
        (32, 32, 32),
        [(UP, UP, f32(-1), f32(2**-22 + 2**-46)), (INF32, 0, ONE, NAN32)],
    ),
    (
        "9.7.3.6",
        "fma.rz.f32 %d, %a, %b, %c;",
        32,
        (32, 32, 32),
        [(UP, UP, 0, ONE + 2), (ONE, ONE, f32(-(2**-80)), ONE - 1)],
    ),
    ("9.7.3.6", "fma.rn.sat.f32 %d, %a, %b, %c;", 32, (32, 32, 32), [(TWO, TWO, ONE, ONE), (TWO, f32(-2), ONE, 0)]),
    (
        "9.7.3.6",
        "fma.rn.f64 %d, %a, %b, %c;",
        64,
        (64, 64, 64),
        [(ONE64 + 1, ONE64 + 1, f64(-1), f64(2**-51 + 2**-104))],
    ),
    ("9.7.3.7", "mad.rn.f32 %d, %a, %b, %c;", 32, (32, 32, 32), [(TWO, THREE, ONE, f32(7))]),
    # div, rcp, sqrt with IEEE rounding
    (
        "9.7.3.8",
        "div.rn.f32 %d, %a, %b;",
        32,
        (32, 32),
        [(ONE, THREE, 0x3EAAAAAB), (ONE, 0, INF32), (0, 0, NAN32), (ONE, NEG, INF32 | NEG)],
    ),
    ("9.7.3.8", "div.rz.f32 %d, %a, %b;", 32, (32, 32), [(ONE, THREE, 0x3EAAAAAA)]),
    ("9.7.3.8", "div.rp.f32 %d, %a, %b;", 32, (32, 32), [(ONE, THREE, 0x3EAAAAAB), (f32(-1), THREE, 0xBEAAAAAA)]),
    ("9.7.3.8", "div.rn.f64 %d, %a, %b;", 64, (64, 64), [(ONE64, f64(3), f64(1 / 3))]),
    ("9.7.3.13", "rcp.rn.f32 %d, %a;", 32, (32,), [(THREE, 0x3EAAAAAB), (0, INF32), (NEG, INF32 | NEG), (INF32, 0)]),
    ("9.7.3.15", "sqrt.rn.f32 %d, %a;", 32, (32,), [(f32(4), TWO), (TWO, 0x3FB504F3), (f32(-1), NAN32), (NEG, NEG)]),
    ("9.7.3.15", "sqrt.rp.f32 %d, %a;", 32, (32,), [(TWO, 0x3FB504F4), (f32(4), TWO)]),
    ("9.7.3.15", "sqrt.rn.f64 %d, %a;", 64, (64,), [(f64(2), f64(math.sqrt(2)))]),
    # abs, neg, min, max, copysign, testp
    ("9.7.3.9", "abs.f32 %d, %a;", 32, (32,), [(f32(-2), TWO), (NEG, 0)]),
    ("9.7.3.9", "abs.ftz.f32 %d, %a;", 32, (32,), [(TINY | NEG, 0)]),
    ("9.7.3.10", "neg.f32 %d, %a;", 32, (32,), [(0, NEG), (f32(-2), TWO)]),
    ("9.7.3.10", "neg.f64 %d, %a;", 64, (64,), [(f64(1), f64(-1))]),
    (
        "9.7.3.11",
        "min.f32 %d, %a, %b;",
        32,
        (32, 32),
        [(NAN32, ONE, ONE), (NAN32, NAN32, NAN32), (0, NEG, NEG), (TWO, ONE, ONE)],
    ),
    ("9.7.3.11", "min.NaN.f32 %d, %a, %b;", 32, (32, 32), [(NAN32, ONE, NAN32), (TWO, ONE, ONE)]),
    ("9.7.3.12", "max.f32 %d, %a, %b;", 32, (32, 32), [(NAN32, ONE, ONE), (0, NEG, 0), (NEG, 0, 0), (TWO, ONE, TWO)]),
    ("9.7.3.12", "max.ftz.f32 %d, %a, %b;", 32, (32, 32), [(TINY, TINY | NEG, 0)]),
    ("9.7.3.12", "max.xorsign.abs.f32 %d, %a, %b;", 32, (32, 32), [(f32(-3), TWO, f32(-3)), (f32(-3), f32(-2), THREE)]),
    ("9.7.3.12", "max.f64 %d, %a, %b;", 64, (64, 64), [(ONE64, TWO64, TWO64)]),
    ("9.7.3.2", "copysign.f32 %d, %a, %b;", 32, (32, 32), [(NEG, TWO, f32(-2)), (ONE, f32(-2), TWO)]),
    ("9.7.3.1", "testp.subnormal.f32 %d, %a;", 1, (32,), [(TINY, 1), (ONE, 0), (0, 0)]),
    ("9.7.3.1", "testp.notanumber.f32 %d, %a;", 1, (32,), [(NAN32, 1), (INF32, 0)]),
    # f16, bf16
    (
        "9.7.4.1",
        "add.f16 %d, %a, %b;",
        16,
        (16, 16),
        [(f16(1), f16(2), f16(3)), (f16(2048), f16(1), f16(2048)), (f16(65504), f16(65504), H_INF)],
    ),
    (
        "9.7.4.1",
        "add.f16x2 %d, %a, %b;",
        32,
        (32, 32),
        [(pair(f16(1), f16(2)), pair(f16(0.5), f16(-2)), pair(f16(1.5), 0))],
    ),
    ("9.7.4.1", "add.sat.f16 %d, %a, %b;", 16, (16, 16), [(f16(1), f16(2), f16(1)), (H_NAN, f16(1), 0)]),
    ("9.7.4.3", "mul.f16 %d, %a, %b;", 16, (16, 16), [(f16(2**-14), f16(0.5), f16(2**-15)), (H_INF, 0, H_NAN)]),
    ("9.7.4.3", "mul.ftz.f16 %d, %a, %b;", 16, (16, 16), [(f16(2**-14), f16(0.5), 0)]),
    # 2049 * 1 + 2^-24: just above the halfway case 2049 -> 2050 instead of the even 2048
    (
        "9.7.4.4",
        "fma.rn.f16 %d, %a, %b, %c;",
        16,
        (16, 16, 16),
        [(f16(683), f16(3), f16(2**-24), f16(2050)), (f16(683), f16(3), 0, f16(2048))],
    ),
    (
        "9.7.4.4",
        "fma.rn.relu.f16x2 %d, %a, %b, %c;",
        32,
        (32, 32, 32),
        [(pair(f16(1), f16(1)), pair(f16(-2), f16(2)), 0, pair(0, f16(2)))],
    ),
    (
        "9.7.4.4",
        "fma.rn.bf16 %d, %a, %b, %c;",
        16,
        (16, 16, 16),
        [(bf16(1.5), bf16(2), bf16(1), bf16(4)), (bf16(1), bf16(1), bf16(2**-100), bf16(1))],
    ),
    (
        "9.7.4.4",
        "fma.rn.bf16x2 %d, %a, %b, %c;",
        32,
        (32, 32, 32),
        [(pair(bf16(2), bf16(3)), pair(bf16(2), bf16(-1)), 0, pair(bf16(4), bf16(-3)))],
    ),
    (
        "9.7.4.1",
        "add.rn.bf16x2 %d, %a, %b;",
        32,
        (32, 32),
        [(pair(bf16(256), bf16(1)), pair(bf16(1), bf16(1)), pair(bf16(256), bf16(2)))],
    ),
    ("9.7.4.5", "neg.f16x2 %d, %a;", 32, (32,), [(pair(f16(1), f16(-2)), pair(f16(-1), f16(2)))]),
    ("9.7.4.6", "abs.bf16 %d, %a;", 16, (16,), [(bf16(-2), bf16(2))]),
    ("9.7.4.7", "min.f16 %d, %a, %b;", 16, (16, 16), [(H_NAN, f16(1), f16(1)), (0, 0x8000, 0x8000)]),
    (
        "9.7.4.8",
        "max.NaN.bf16x2 %d, %a, %b;",
        32,
        (32, 32),
        [(pair(bf16(1), H_NAN), pair(bf16(2), bf16(1)), pair(bf16(2), H_NAN))],
    ),
    # comparisons: ordered ones are false with a NaN, unordered ones true
    ("9.7.6.2", "setp.lt.f32 %d, %a, %b;", 1, (32, 32), [(ONE, TWO, 1), (NAN32, TWO, 0), (TINY, TWO, 1)]),
    ("9.7.6.2", "setp.ltu.f32 %d, %a, %b;", 1, (32, 32), [(NAN32, TWO, 1), (TWO, ONE, 0)]),
    ("9.7.6.2", "setp.neu.f32 %d, %a, %b;", 1, (32, 32), [(NAN32, NAN32, 1), (ONE, ONE, 0), (0, NEG, 0)]),
    ("9.7.6.2", "setp.ne.f32 %d, %a, %b;", 1, (32, 32), [(NAN32, ONE, 0), (TWO, ONE, 1)]),
    ("9.7.6.2", "setp.eq.ftz.f32 %d, %a, %b;", 1, (32, 32), [(TINY, 0, 1)]),
    ("9.7.6.2", "setp.nan.f32 %d, %a, %b;", 1, (32, 32), [(NAN32, ONE, 1), (ONE, ONE, 0)]),
    ("9.7.6.2", "setp.num.f32 %d, %a, %b;", 1, (32, 32), [(NAN32, ONE, 0), (ONE, ONE, 1)]),
    ("9.7.6.2", "setp.gt.s32 %d, %a, %b;", 1, (32, 32), [(1, 0xFFFFFFFF, 1)]),
    ("9.7.6.2", "setp.hi.u32 %d, %a, %b;", 1, (32, 32), [(1, 0xFFFFFFFF, 0)]),
    ("9.7.6.2", "setp.le.s64 %d, %a, %b;", 1, (64, 64), [(2**63, 0, 1)]),
    ("9.7.6.2", "setp.eq.b16 %d, %a, %b;", 1, (16, 16), [(5, 5, 1)]),
    ("9.7.6.2", "setp.lt.and.s32 %d, %a, %b, %c;", 1, (32, 32, 1), [(1, 2, 1, 1), (1, 2, 0, 0)]),
    ("9.7.6.2", "setp.lt.or.s32 %d, %a, %b, !%c;", 1, (32, 32, 1), [(3, 2, 0, 1), (3, 2, 1, 0)]),
    ("9.7.6.2", "setp.lt.s32 %p|%d, %a, %b;", 1, (32, 32), [(1, 2, 0), (3, 2, 1)]),
    ("9.7.7.1", "setp.ge.f16 %d, %a, %b;", 1, (16, 16), [(f16(1), f16(1), 1), (H_NAN, f16(1), 0)]),
    ("9.7.7.1", "setp.gt.bf16x2 %p|%d, %a, %b;", 1, (32, 32), [(pair(bf16(1), bf16(3)), pair(bf16(2), bf16(2)), 1)]),
    ("9.7.6.1", "set.lt.u32.f32 %d, %a, %b;", 32, (32, 32), [(ONE, TWO, 0xFFFFFFFF), (TWO, ONE, 0)]),
    ("9.7.6.1", "set.lt.f32.s32 %d, %a, %b;", 32, (32, 32), [(1, 2, ONE), (2, 1, 0)]),
    ("9.7.6.3", "selp.b32 %d, %a, %b, %c;", 32, (32, 32, 1), [(1, 2, 1, 1), (1, 2, 0, 2)]),
    ("9.7.6.3", "selp.b64 %d, %a, %b, %c;", 64, (64, 64, 1), [(1, 2**40, 0, 2**40)]),
    ("9.7.6.4", "slct.u32.s32 %d, %a, %b, %c;", 32, (32, 32, 32), [(1, 2, 0, 1), (1, 2, 0xFFFFFFFF, 2)]),
    (
        "9.7.6.4",
        "slct.u32.f32 %d, %a, %b, %c;",
        32,
        (32, 32, 32),
        [(1, 2, NEG, 1), (1, 2, NAN32, 2), (1, 2, TINY | NEG, 2)],
    ),
    ("9.7.6.4", "slct.ftz.u32.f32 %d, %a, %b, %c;", 32, (32, 32, 32), [(1, 2, TINY | NEG, 1)]),
]


@pytest.mark.parametrize(("section", "body", "result", "sources", "rows"), FORMS, ids=[f[1] for f in FORMS])
def test_form(evaluate, section, body, result, sources, rows):
    got = evaluate(body, result, sources, [row[:-1] for row in rows])
    assert [hex(v) for v in got] == [hex(row[-1]) for row in rows], section


# The special values that each approximation's section lists, and its error bound on ordinary values.
APPROXIMATIONS = [
    ("rcp.approx.ftz.f32", lambda x: 1 / x, 2**-23, {0: INF32, NEG: INF32 | NEG, INF32: 0, NAN32: NAN32, TINY: INF32}),
    ("rsqrt.approx.f32", lambda x: 1 / math.sqrt(x), 2**-22.9, {0: INF32, NEG: INF32 | NEG, INF32: 0, f32(-1): NAN32}),
    ("sqrt.approx.f32", math.sqrt, 2**-23, {0: 0, NEG: NEG, INF32: INF32, f32(-1): NAN32}),
    (
        "ex2.approx.ftz.f32",
        lambda x: 2**x,
        2**-22,
        {0: ONE, NEG: ONE, INF32: INF32, INF32 | NEG: 0, NAN32: NAN32, f32(-127): 0},
    ),
    ("ex2.approx.f32", lambda x: 2**x, 2**-22, {f32(-127): 0x00400000}),
    ("lg2.approx.f32", math.log2, 2**-22, {0: INF32 | NEG, NEG: INF32 | NEG, INF32: INF32, f32(-1): NAN32, ONE: 0}),
    ("tanh.approx.f32", math.tanh, 2**-11, {0: 0, NEG: NEG, INF32: ONE, INF32 | NEG: f32(-1)}),
    ("sin.approx.f32", math.sin, 2**-20, {0: 0, NEG: NEG, INF32: NAN32}),
    ("cos.approx.f32", math.cos, 2**-20, {0: ONE, INF32: NAN32}),
]


@pytest.mark.parametrize(("name", "function", "bound", "special"), APPROXIMATIONS, ids=[a[0] for a in APPROXIMATIONS])
def test_approximation(evaluate, name, function, bound, special):
    values = [0.125 * k + 0.0625 for k in range(1, 24)]
    rows = [(f32(v),) for v in values] + [(v,) for v in special]
    got = evaluate(f"{name} %d, %a;", 32, (32,), rows)
    for value, bits in zip(values, got, strict=False):
        exact = function(value)
        assert abs(to_f32(bits) - exact) <= bound * max(abs(exact), 2**-2), value
    assert [hex(v) for v in got[len(values) :]] == [hex(v) for v in special.values()]


def test_rcp_f64_low_word_is_zero(evaluate):
    (got,) = evaluate("rcp.approx.ftz.f64 %d, %a;", 64, (64,), [(f64(3),)])
    assert got & 0xFFFFFFFF == 0
    assert abs((got - f64(1 / 3)) / 2**52) < 2**-20
