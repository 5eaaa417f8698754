# SPDX-License-Identifier: Apache-2.0
"""mov, cvt and cvta: PTX ISA 9.0, 9.7.9.1, 9.7.9.20, 9.7.9.21. The narrow formats are tested in tests/tensor."""

from __future__ import annotations

import pytest
from bits import INF32, NAN32, bf16, f16, f32, f64, u

M32, M64, NEG = 2**32 - 1, 2**64 - 1, 0x80000000

FORMS = [
    # integer to integer: truncation, sign extension, saturation
    ("cvt.u32.u64 %d, %a;", 32, (64,), [(2**40 + 5, 5)]),
    ("cvt.s64.s32 %d, %a;", 64, (32,), [(M32, M64), (7, 7)]),
    ("cvt.u64.u32 %d, %a;", 64, (32,), [(M32, M32)]),
    ("cvt.u16.u32 %d, %a;", 16, (32,), [(0x12345678, 0x5678)]),
    ("cvt.s32.s16 %d, %a;", 32, (16,), [(0x8000, 0xFFFF8000)]),
    ("cvt.u32.u16 %d, %a;", 32, (16,), [(0x8000, 0x8000)]),
    ("cvt.s32.s8 %d, %a;", 32, (32,), [(0x1FF, M32), (0x7F, 0x7F)]),
    ("cvt.u32.u8 %d, %a;", 32, (32,), [(0x1FF, 0xFF)]),
    ("cvt.u16.u8 %d, %a;", 16, (16,), [(0x1FF, 0xFF)]),
    ("cvt.s16.s8 %d, %a;", 16, (16,), [(0x80, 0xFF80)]),
    ("cvt.sat.u8.s32 %d, %a;", 32, (32,), [(300, 255), (u(-4), 0)]),
    ("cvt.sat.s8.s32 %d, %a;", 32, (32,), [(300, 127), (u(-300), 0xFFFFFF80)]),
    ("cvt.sat.s32.u32 %d, %a;", 32, (32,), [(M32, 0x7FFFFFFF)]),
    ("cvt.sat.u32.s64 %d, %a;", 32, (64,), [(2**40, M32), (M64, 0)]),
    # float to integer: rounding, clamping, NaN
    (
        "cvt.rni.s32.f32 %d, %a;",
        32,
        (32,),
        [(f32(2.5), 2), (f32(3.5), 4), (f32(-2.5), u(-2)), (NAN32, 0), (INF32, 0x7FFFFFFF)],
    ),
    ("cvt.rzi.s32.f32 %d, %a;", 32, (32,), [(f32(-2.9), u(-2)), (f32(-1e20), NEG)]),
    ("cvt.rmi.s32.f32 %d, %a;", 32, (32,), [(f32(-2.1), u(-3))]),
    ("cvt.rpi.s32.f32 %d, %a;", 32, (32,), [(f32(2.1), 3)]),
    ("cvt.rzi.u32.f32 %d, %a;", 32, (32,), [(f32(-1), 0), (f32(4e9), 4000000000), (f32(1e20), M32)]),
    ("cvt.rzi.u64.f64 %d, %a;", 64, (64,), [(f64(1e19), 10**19), (f64(-5), 0)]),
    ("cvt.rzi.s64.f32 %d, %a;", 64, (32,), [(f32(-3.7), u(-3, 64))]),
    ("cvt.rzi.s16.f32 %d, %a;", 16, (32,), [(f32(1e6), 0x7FFF), (f32(-1e6), 0x8000)]),
    ("cvt.rzi.s32.f16 %d, %a;", 32, (16,), [(f16(-7.5), u(-7))]),
    # integer to float
    ("cvt.rn.f32.s32 %d, %a;", 32, (32,), [(u(-7), f32(-7)), (16777217, f32(16777216)), (16777219, f32(16777220))]),
    ("cvt.rz.f32.u32 %d, %a;", 32, (32,), [(M32, f32(4294967040))]),
    ("cvt.rp.f32.u32 %d, %a;", 32, (32,), [(M32, f32(4294967296))]),
    ("cvt.rn.f32.u64 %d, %a;", 32, (64,), [(M64, f32(2**64)), (2**53 + 2**29 + 1, f32(2**53 + 2**30))]),
    ("cvt.rn.f64.s64 %d, %a;", 64, (64,), [(M64, f64(-1)), (2**53 + 1, f64(2**53))]),
    ("cvt.rn.f16.s32 %d, %a;", 16, (32,), [(2049, f16(2048)), (u(-3), f16(-3)), (100000, 0x7C00)]),
    ("cvt.rn.bf16.u32 %d, %a;", 16, (32,), [(257, bf16(256)), (259, bf16(260))]),
    # float to float
    ("cvt.f64.f32 %d, %a;", 64, (32,), [(f32(0.1), 0x3FB99999A0000000)]),
    ("cvt.rn.f32.f64 %d, %a;", 32, (64,), [(f64(0.1), f32(0.1)), (f64(1e300), INF32)]),
    ("cvt.rz.f32.f64 %d, %a;", 32, (64,), [(f64(0.1), 0x3DCCCCCC), (f64(1e300), 0x7F7FFFFF)]),
    (
        "cvt.rn.f16.f32 %d, %a;",
        16,
        (32,),
        [(f32(65519), f16(65504)), (f32(65520), 0x7C00), (NAN32, 0x7FFF), (f32(2**-25), 0), (f32(2**-24 * 0.75), 1)],
    ),
    ("cvt.rz.f16.f32 %d, %a;", 16, (32,), [(f32(1e9), 0x7BFF), (f32(2**-24 * 0.99), 0)]),
    ("cvt.f32.f16 %d, %a;", 32, (16,), [(1, f32(2**-24)), (0xFC00, INF32 | NEG), (0x7FFF, NAN32)]),
    ("cvt.f32.bf16 %d, %a;", 32, (16,), [(bf16(1.5), f32(1.5))]),
    (
        "cvt.rn.bf16.f32 %d, %a;",
        16,
        (32,),
        [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x7F7FFFFF, 0x7F80), (NAN32, 0x7FFF)],
    ),
    ("cvt.rz.bf16.f32 %d, %a;", 16, (32,), [(0x3F81FFFF, 0x3F81)]),
    ("cvt.rn.relu.f16.f32 %d, %a;", 16, (32,), [(f32(-1), 0), (f32(2), f16(2)), (NAN32, 0x7FFF)]),
    ("cvt.rn.bf16x2.f32 %d, %a, %b;", 32, (32, 32), [(f32(2), f32(1), bf16(2) << 16 | bf16(1))]),
    ("cvt.rn.f16x2.f32 %d, %a, %b;", 32, (32, 32), [(f32(2), f32(-1), f16(2) << 16 | f16(-1))]),
    ("cvt.rn.relu.bf16x2.f32 %d, %a, %b;", 32, (32, 32), [(f32(-2), f32(1), bf16(1))]),
    ("cvt.rna.tf32.f32 %d, %a;", 32, (32,), [(0x3F801000, 0x3F802000), (0x3F800FFF, 0x3F800000)]),
    ("cvt.rn.tf32.f32 %d, %a;", 32, (32,), [(0x3F801000, 0x3F800000), (0x3F803000, 0x3F804000)]),
    ("cvt.rni.f32.f32 %d, %a;", 32, (32,), [(f32(2.5), f32(2)), (f32(-0.2), NEG)]),
    ("cvt.rpi.f64.f64 %d, %a;", 64, (64,), [(f64(2.1), f64(3))]),
    ("cvt.sat.f32.f32 %d, %a;", 32, (32,), [(f32(3), f32(1)), (f32(-3), 0), (NAN32, 0)]),
    ("cvt.ftz.f64.f32 %d, %a;", 64, (32,), [(1, 0)]),
    ("cvt.rn.ftz.f32.f64 %d, %a;", 32, (64,), [(f64(1e-40), 0)]),
    # mov
    ("mov.b32 %d, {%a, %b};", 32, (16, 16), [(1, 2, 0x20001)]),
    ("mov.b64 %d, {%a, %b};", 64, (32, 32), [(1, 2, 0x200000001)]),
    ("mov.b32 {%h0, %d}, %a;", 16, (32,), [(0x12345678, 0x1234)]),
    ("mov.b64 {_, %d}, %a;", 32, (64,), [(0x1234567800000000, 0x12345678)]),
    ("mov.b64 {%h0, %h1, %d, %h2}, %a;", 16, (64,), [(0x1111222233334444, 0x2222)]),
    ("mov.b64 %d, {%a, %b, %c, %e};", 64, (16, 16, 16, 16), [(1, 2, 3, 4, 0x4000300020001)]),
    ("mov.f32 %d, 0f3F800000;", 32, (), [(f32(1),)]),
    ("mov.f64 %d, 0d3FF0000000000000;", 64, (), [(f64(1),)]),
    ("mov.b32 %d, -5;", 32, (), [(u(-5),)]),
    ("mov.u32 %d, WARP_SZ;", 32, (), [(32,)]),
    ("mov.pred %d, %a;", 1, (1,), [(1, 1), (0, 0)]),
    # addresses
    ("cvta.shared.u64 %w0, %a; cvta.to.shared.u64 %d, %w0;", 64, (64,), [(1024, 1024)]),
    ("cvta.shared.u64 %w0, %a; isspacep.shared %d, %w0;", 1, (64,), [(1024, 1)]),
    ("cvta.local.u64 %w0, %a; isspacep.shared %d, %w0;", 1, (64,), [(16, 0)]),
    ("isspacep.global %d, %a;", 1, (64,), [(4096, 1)]),
    ("mapa.shared::cluster.u32 %d, %a, 0;", 32, (32,), [(1040, 1040)]),
]


@pytest.mark.parametrize(("body", "result", "sources", "rows"), FORMS, ids=[f[0] for f in FORMS])
def test_form(evaluate, body, result, sources, rows):
    got = evaluate(body, result, sources, [row[:-1] for row in rows])
    assert [hex(v) for v in got] == [hex(row[-1]) for row in rows]


SPECIAL = {"%laneid": list(range(32)), "%lanemask_eq": [1 << k for k in range(32)], "%lanemask_lt": [(1 << k) - 1 for k in range(32)],
           "%lanemask_le": [(2 << k) - 1 for k in range(32)], "%lanemask_gt": [M32 & ~((2 << k) - 1) for k in range(32)],
           "%lanemask_ge": [M32 & ~((1 << k) - 1) for k in range(32)], "%ntid.x": [32] * 32, "%nctaid.x": [1] * 32,
           "%cluster_ctarank": [0] * 32, "%cluster_nctarank": [1] * 32, "%warpid": [0] * 32, "%tid.y": [0] * 32}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_special_register(evaluate, name):
    assert evaluate(f"mov.u32 %d, {name};", 32, (), [()] * 32) == SPECIAL[name]


def test_clock_does_not_run_backwards(evaluate):
    body = "mov.u64 %w0, %clock64; mov.u64 %w1, %clock64; sub.u64 %d, %w1, %w0;"
    assert all(0 < v < 100 for v in evaluate(body, 64, (), [()] * 4))
