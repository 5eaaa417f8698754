# SPDX-License-Identifier: Apache-2.0
"""add, sub, mul and fma of bf16 and f32 over many operands, against exact sums rounded once."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from bits import HEADER
from vsm.device import Device, pack

COUNT = 1 << 17


def kernel(instruction: str) -> str:
    """Element i of three arrays of words, 16 of the 128 threads of a block idle."""
    return (
        HEADER
        + f""".visible .entry k(.param .u64 out, .param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n) {{
 .reg .pred %p; .reg .b16 %ha, %hb, %hc, %hd; .reg .b32 %a, %b, %c, %d, %r<4>, %n; .reg .b64 %w<6>;
 mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; mad.lo.u32 %r2, %r0, 112, %r1; ld.param.u32 %n, [n];
 setp.ge.u32 %p, %r1, 112; @%p ret; setp.ge.u32 %p, %r2, %n; @%p ret;
 ld.param.u64 %w0, [out]; ld.param.u64 %w1, [a]; ld.param.u64 %w2, [b]; ld.param.u64 %w3, [c];
 mul.wide.u32 %w4, %r2, 4; add.u64 %w0, %w0, %w4; add.u64 %w1, %w1, %w4; add.u64 %w2, %w2, %w4; add.u64 %w3, %w3, %w4;
 ld.global.u32 %a, [%w1]; ld.global.u32 %b, [%w2]; ld.global.u32 %c, [%w3];
 cvt.u16.u32 %ha, %a; cvt.u16.u32 %hb, %b; cvt.u16.u32 %hc, %c;
 {instruction}
 st.global.u32 [%w0], %d; ret; }}"""
    )


def run(device: Device, instruction: str, *operands: np.ndarray) -> np.ndarray:
    module = device.load(kernel(instruction))
    count = len(operands[0])
    addresses = [device.upload(x.astype(np.uint32).tobytes()) for x in (np.zeros(count), *operands)]
    launch = module.kernel("k").launch((count + 111) // 112, 128, pack(*addresses, ctypes.c_uint32(count)))
    assert launch.clean, str(launch)
    out = np.frombuffer(device.download(addresses[0], 4 * count), np.uint32).copy()
    for address in addresses:
        device.release(address)
    module.unload()
    return out


def sum_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The sum of float64 numbers, rounded to odd: what is rounded to fewer bits after that is rounded once."""
    with np.errstate(invalid="ignore"):
        total = x + y
        part = total - x
        rest = (x - (total - part)) + (y - part)
    bits = total.view(np.int64)
    step = np.where((rest > 0) == (total > 0), 1, -1)
    move = (rest != 0) & (bits & 1 == 0) & np.isfinite(total)
    return np.where(move, bits + step, bits).view(np.float64)


def to_bfloat(x: np.ndarray) -> np.ndarray:
    """float64 to bf16 codes, to nearest even."""
    magnitude = np.abs(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        exponent = np.where(magnitude == 0, -126, np.clip(np.frexp(magnitude)[1] - 1, -126, 127))
        scaled = np.ldexp(np.where(np.isfinite(magnitude), magnitude, 0), 7 - exponent)
        units = np.minimum(np.rint(scaled), 1 << 20)  # to even
    codes = units.astype(np.int64) + ((exponent + 126).astype(np.int64) << 7)
    codes = np.where(np.isinf(x), 0x7F80, np.minimum(codes, 0x7F80)) | np.where(np.signbit(x), 0x8000, 0)
    return np.where(np.isnan(x), 0x7FFF, codes).astype(np.uint32)


def bfloat(codes: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def exact(op: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        if op == "fma":
            return sum_to_odd(a * b, c)
        return a * b if op == "mul" else sum_to_odd(a, -b if op == "sub" else b)


def operands(kind: str, rng: np.random.Generator) -> list[np.ndarray]:
    """bf16 codes of a, b, c."""
    if kind == "any":
        return [rng.integers(0, 1 << 16, COUNT) for _ in range(3)]
    if kind == "special":
        edges = np.array([0, 1, 2, 0x7F, 0x80, 0x81, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x7F00, 0x0100])
        edges = np.concatenate([edges, edges | 0x8000])
        return [x.ravel() for x in np.meshgrid(edges, edges, edges)]
    a, b, c = (rng.integers(0, 128, COUNT) | rng.integers(0, 2, COUNT) << 15 for _ in range(3))
    if kind == "subnormal":  # products and sums around 2^-126 and below
        ea = rng.integers(1, 126, COUNT)
        eb, ec = 127 - ea + rng.integers(-12, 6, COUNT), rng.integers(0, 4, COUNT)
        return [a | ea << 7, b | np.clip(eb, 0, 254) << 7, c | ec << 7]
    # Near one another: C from 2^-40 to 2^40 times the product, so that ties and sums next to ties are many.
    ea, eb = rng.integers(100, 150, (2, COUNT))
    ec = ea + eb - 127 + rng.integers(-40, 41, COUNT)
    if kind == "ties":  # products whose low half is 0x80: halfway between two bf16 values
        pairs = np.array(
            [(x, y) for x in range(128, 256) for y in range(128, 256) if x * y % 256 == 128 and x * y >= 32768]
        )
        chosen = pairs[rng.integers(0, len(pairs), COUNT)] - 128
        a, b = a & 0x8000 | chosen[:, 0], b & 0x8000 | chosen[:, 1]
    else:  # sums of operands as far apart
        eb = np.where(rng.integers(0, 2, COUNT), np.clip(ea + rng.integers(-20, 21, COUNT), 1, 254), eb)
    return [a | ea << 7, b | eb << 7, c | np.clip(ec, 1, 254) << 7]


@pytest.mark.parametrize("kind", ["any", "special", "subnormal", "near", "ties"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "bf16x2"])
def test_bfloat16_is_rounded_once(device, op, kind, packed):
    seed = 16
    print("seed", seed)
    rng = np.random.default_rng(seed)
    low, high = operands(kind, rng), [x[::-1] for x in operands(kind, rng)]
    suffix = ", %c" if op == "fma" else ""
    if packed:
        instruction = f"{op}.rn.bf16x2 %d, %a, %b{suffix};"
        given = [x | y << 16 for x, y in zip(low, high, strict=True)]
    else:
        instruction = f"{op}.rn.bf16 %hd, %ha, %hb{suffix.replace('c', 'hc')}; cvt.u32.u16 %d, %hd;"
        given = low
    actual = run(device, instruction, *given)
    expected = to_bfloat(exact(op, *map(bfloat, low)))
    if packed:
        expected |= to_bfloat(exact(op, *map(bfloat, high))) << np.uint32(16)
    wrong = np.flatnonzero(actual != expected)
    assert wrong.size == 0, [[hex(x[i]) for x in (*given, actual, expected)] for i in wrong[:4]]
    if kind == "ties" and op == "fma" and not packed:  # through f32 alone it would be wrong
        with np.errstate(over="ignore"):
            twice = to_bfloat((bfloat(low[0]) * bfloat(low[1]) + bfloat(low[2])).astype(np.float32).astype(np.float64))
        print(f"{(twice != expected).sum()} of {len(expected)} are rounded wrongly through f32")
        assert (twice != expected).any()


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_float32(device, op):
    seed = 32
    print("seed", seed)
    rng = np.random.default_rng(seed)
    a, b, c = (rng.integers(0, 1 << 32, COUNT, dtype=np.uint32) for _ in range(3))
    # Half of them near one another.
    near = rng.integers(0, 2, COUNT) == 0
    exponents = rng.integers(100, 150, (2, COUNT))
    third = np.clip(exponents.sum(0) - 127 + rng.integers(-30, 31, COUNT), 0, 254)
    for x, exponent in ((a, exponents[0]), (b, exponents[1]), (c, third)):
        x[near] = x[near] & 0x807FFFFF | (exponent[near] << 23).astype(np.uint32)
    actual = run(device, f"{op}.rn.f32 %d, %a, %b{', %c' if op == 'fma' else ''};", a, b, c)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        values = [x.view(np.float32).astype(np.float64) for x in (a, b, c)]
        expected = exact(op, *values).astype(np.float32)
    expected = np.where(np.isnan(expected), np.uint32(0x7FFFFFFF), expected.view(np.uint32))
    wrong = np.flatnonzero(actual != expected)
    assert wrong.size == 0, [[hex(x[i]) for x in (a, b, c, actual, expected)] for i in wrong[:4]]
