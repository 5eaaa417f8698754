# SPDX-License-Identifier: Apache-2.0
"""Upstream's small kernels of a decode step from the wheel, in gpt-oss's sizes: RMSNorm with the residual added, rope,
and the append to a paged KV cache."""

from __future__ import annotations

import random

import numpy as np
import pytest
from bf16 import from_bf16, to_bf16

pytestmark = pytest.mark.slow

HIDDEN, HEADS, KV_HEADS, HEAD, PAGE = 2880, 64, 8, 64, 16
EPSILON = 1e-5
# What the checkers find, with no effect on what is stored: the norm's first warp writes its sum where its lane 0 has
# read, with no __syncwarp.
KNOWN = {"race": ("st.shared.f32",)}


@pytest.fixture(scope="module")
def program(compile_upstream, request):
    flags = ("-DFLASHINFER_ENABLE_BF16", f"-I{request.path.with_name('absent_headers')}")
    return compile_upstream("small_parts", request.path.with_name("small_parts.cu"), flags=flags)


def rotated(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Halves of a head turned by the row's angles: [sequence, head, 64], [sequence, 64]."""
    half = HEAD // 2
    cosine, sine = table[:, None, :half], table[:, None, half:]
    first, second = values[..., :half], values[..., half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


@pytest.mark.parametrize("sequences", [1, 5])
def test_a_step(program, run_checked, tmp_path, sequences: int) -> None:
    """Results within their roundings of float64, the cache untouched but for the new rows; and what a step takes."""
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 60, sequences)  # in the cache with the new one
    used = -(-tokens // PAGE)
    pages = int(used.sum()) + 2
    page_table = rng.permutation(pages)[: used.sum()].astype(np.int32)
    offsets = np.cumsum([0, *used], dtype=np.int32)
    last = ((tokens - 1) % PAGE + 1).astype(np.int32)
    positions = (tokens - 1).astype(np.int32)
    angles = np.arange(pages * PAGE)[:, None] * 150_000.0 ** (-np.arange(HEAD // 2) / (HEAD // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    x, residual = (to_bf16(rng.standard_normal((sequences, HIDDEN))) for _ in range(2))
    weight = to_bf16(rng.standard_normal(HIDDEN))
    q = to_bf16(rng.standard_normal((sequences, HEADS, HEAD)))
    k, v = (to_bf16(rng.standard_normal((sequences, KV_HEADS, HEAD))) for _ in range(2))
    caches = [rng.integers(0, 2**15, (pages, KV_HEADS, PAGE, HEAD), np.uint16) for _ in range(2)]
    arrays = (x, residual, weight, q, k, v, table, positions, offsets, last, page_table, *caches)
    (tmp_path / "in").write_bytes(b"".join(array.tobytes() for array in arrays))
    _, launches = run_checked(
        program, sequences, HIDDEN, HEADS, KV_HEADS, pages, PAGE, tmp_path / "in", tmp_path / "out", known=KNOWN
    )
    assert len(launches) == 3
    assert all("of the same warp" in report["text"] for launch in launches for report in launch["reports"])
    got, found, at = np.fromfile(tmp_path / "out", np.uint16), [], 0
    for like in (x, residual, q, k, *caches):
        found.append(got[at : at + like.size].reshape(like.shape))
        at += like.size
    assert at == got.size
    normed, total, turned_q, turned_k, *after = found

    rounding = 2.0**-8  # of bf16, relatively; float32's own are below a hundredth of it
    summed = from_bf16(x) + from_bf16(residual)
    assert np.all(np.abs(from_bf16(total) - summed) <= rounding * np.abs(summed))
    # Upstream norms the sum before it is rounded.
    scale = 1 / np.sqrt(np.mean(summed**2, axis=1, keepdims=True) + EPSILON)
    expected = summed * scale * from_bf16(weight)
    assert np.all(np.abs(from_bf16(normed) - expected) <= 1.01 * rounding * np.abs(expected) + 2.0**-126)
    for turned, before in ((turned_q, q), (turned_k, k)):
        expected = rotated(from_bf16(before), table[positions].astype(np.float64))
        largest = np.abs(from_bf16(before)).max()
        assert np.all(np.abs(from_bf16(turned) - expected) <= rounding * np.abs(expected) + 2.0**-20 * largest)
    for cache, before, new in zip(after, caches, (turned_k, v), strict=True):
        wanted = before.copy()
        for i, page in enumerate(page_table[offsets[1:] - 1]):
            wanted[page, :, last[i] - 1] = new[i]
        assert np.array_equal(cache, wanted)

    for launch in launches:
        counters = launch["counters"]
        print(launch["kernel"][:40], counters["warp_instructions"], counters["global_distinct_bytes"])
