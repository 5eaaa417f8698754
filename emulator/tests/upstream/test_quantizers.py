# SPDX-License-Identifier: Apache-2.0
"""Upstream's MXFP8 and MXFP4 quantizers, their launchers included, bit for bit.

The reference computes in float32 what their PTX does: compiled as upstream compiles them (-use_fast_math), float32
subnormals are zeros, so that a block below 2^-126 of full scale becomes zeros with scale byte 0. ``rcp.approx`` is
rounded to nearest here, as in the emulator.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([np.ldexp(1 + (c & 7) / 8, (c >> 3) - 7) if c >> 3 else np.ldexp(c / 8, -6) for c in range(127)])
TINY = np.float32(2.0**-126)  # the least normal


@pytest.fixture(scope="module")
def quantize(compile_upstream, wheel) -> Path:
    sources = [wheel / "csrc/nv_internal/cpp" / f"{path}.cpp" for path in
               ("common/envUtils", "common/logger", "common/stringUtils", "common/tllmException")]  # fmt: skip
    sources += [wheel / "csrc/nv_internal/cpp/kernels/quantization.cu", HERE / "quantize.cu"]
    return compile_upstream("quantize", *sources, flags=("-x", "cu", f"-I{HERE / 'absent_headers'}"))


def flushed(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float32)
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``mul.ftz.f32``"""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return flushed(flushed(a) * flushed(b))


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry, ties to the even one, beyond the last one the last."""
    middles = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(middles, values)
    tie = middles[np.minimum(below, len(middles) - 1)] == values
    return below + (tie & (below % 2 == 1))


def reference(values: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[rows, columns]`` of e4m3 or e2m1 with the sign on top, and scale bytes ``[rows, columns / 32]``."""
    blocks = values.astype(np.float32).reshape(len(values), -1, 32)
    amax = np.fmax.reduce(np.abs(blocks), axis=-1, keepdims=True)
    full_scale = times(amax, np.float32(1) / np.float32(largest))
    fraction, exponent = np.frexp(np.where(np.isfinite(full_scale), full_scale, 1))
    rounded_up = np.where(fraction == 0.5, exponent - 1, exponent) + 127
    scale = np.where(full_scale == 0, 0, np.where(np.isinf(full_scale), 254, np.minimum(rounded_up, 254)))
    factor = np.where(scale == 0, np.float32(0), flushed(np.ldexp(np.float32(1), 127 - scale)))
    scaled = times(blocks, factor)
    if largest == 448:
        # fmaxf(fminf(x, 448), -448) makes 448 of NaN.
        code = np.where(np.isnan(scaled), 126, nearest(np.abs(scaled), E4M3) | np.signbit(scaled) << 7)
    else:
        # The conversion's own rule: NaN becomes the largest positive value.
        code = np.where(np.isnan(scaled), 7, nearest(np.abs(scaled), E2M1) | np.signbit(scaled) << 3)
    return code.reshape(values.shape).astype(np.uint8), scale.squeeze(-1).astype(np.uint8)


def arranged(scales: np.ndarray, layout: str) -> np.ndarray:
    """The bytes as upstream lays them out; padding is 0."""
    if layout == "linear":
        return scales.ravel()
    rows, blocks = scales.shape
    tile = 128 if layout == "128x4" else 8
    padded = np.zeros((-(-rows // tile) * tile, -(-blocks // 4) * 4), np.uint8)
    padded[:rows, :blocks] = scales
    tiles = padded.reshape(-1, tile, padded.shape[1] // 4, 4).swapaxes(1, 2)
    if layout == "8x4":
        return tiles.ravel()
    return tiles.reshape(*tiles.shape[:2], 4, 32, 4).swapaxes(2, 3).ravel()


def random_bits(dtype: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Rows at scales from the smallest to the largest, blocks at a power of two's edge, zeros, subnormals, infinities, NaN."""
    mantissa, bias = (7, 127) if dtype == "bf16" else (10, 15)
    top = 2 * bias + 1  # the exponent field of infinity
    center = rng.integers(0, top, (rows, 1))
    exponent = np.clip(center + rng.integers(-9, 1, (rows, columns)), 0, top - 1)
    bits = exponent << mantissa | rng.integers(0, 1 << mantissa, (rows, columns))
    seven_fourths = 3 << (mantissa - 2)  # 448 and 6 are 7/4 and 3/2 of a power of two
    three_halves = 1 << (mantissa - 1)
    for edge in (seven_fourths - 1, seven_fourths, seven_fourths + 1, three_halves, three_halves + 1):
        row = rng.integers(0, rows, rows // 16 + 1)
        bits[row, ::32] = np.minimum(center[row] + 1, top - 1) << mantissa | edge
    bits[rng.integers(0, rows), :] = 0
    bits[rng.integers(0, rows), :] &= (1 << mantissa) - 1
    bits[rng.integers(0, rows), rng.integers(0, columns)] = top << mantissa
    bits[rng.integers(0, rows), rng.integers(0, columns)] = top << mantissa | 1 << (mantissa - 1)
    return (bits | rng.integers(0, 2, bits.shape) << 15).astype(np.uint16)


# 2880 and 256 columns leave lanes of a warp without work; 1,000 rows are more than blocks of a launch.
@pytest.mark.parametrize(("rows", "columns"), [(37, 2880), (200, 256), (130, 1056), (1000, 64), (3, 32)])
@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
@pytest.mark.parametrize("dtype", ["bf16", "half"])
@pytest.mark.parametrize("target", ["mxfp8", "mxfp4"])
def test_bit_for_bit(quantize, run_checked, tmp_path, target, dtype, layout, rows, columns):
    seed = rows * columns
    print("seed", seed)
    bits = random_bits(dtype, rows, columns, np.random.default_rng(seed))
    values = (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else bits.view(np.float16)
    bits.tofile(tmp_path / "input")
    _, launches = run_checked(quantize, target, dtype, rows, columns, layout, tmp_path / "input", tmp_path / "output")
    assert len(launches) == 1
    output = np.fromfile(tmp_path / "output", np.uint8)
    codes, scales = reference(values, 448 if target == "mxfp8" else 6)
    packed = codes if target == "mxfp8" else codes[:, ::2] | codes[:, 1::2] << 4
    actual, actual_scales = np.split(output, [packed.size])
    wrong = np.flatnonzero(actual_scales != arranged(scales, layout))
    assert wrong.size == 0, f"{wrong.size} scales differ, the first at {wrong[0]}"
    wrong = np.flatnonzero(actual != packed.ravel())
    where = [divmod(i if target == "mxfp8" else 2 * i, columns) for i in wrong[:4]]
    assert wrong.size == 0, f"{wrong.size} bytes differ: " + str(
        [(at, hex(bits[at]), hex(actual[i]), hex(packed.ravel()[i])) for at, i in zip(where, wrong)]
    )
