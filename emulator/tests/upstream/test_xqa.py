# SPDX-License-Identifier: Apache-2.0
"""Upstream's XQA decode kernel, from the wheel: silent under the watcher of GB10's ordering rule, whose remedy it carries for
sm_121a."""

from __future__ import annotations

import random

import numpy as np
import pytest

HEADS, GROUP, ELEMENTS, PAGE = 2, 8, 64, 16
# As upstream's generator compiles it for bf16, one token of a query each.
FLAGS = ("-DBEAM_WIDTH=1", "-DUSE_INPUT_KV=0", "-DUSE_CUSTOM_BARRIER=1", f"-DTOKENS_PER_PAGE={PAGE}", f"-DHEAD_ELEMS={ELEMENTS}",
         "-DINPUT_FP16=0", "-DDTYPE=__nv_bfloat16", "-DCACHE_ELEM_ENUM=0", f"-DHEAD_GRP_SIZE={GROUP}", "-DSLIDING_WINDOW=0",
         "-DLOW_PREC_OUTPUT=0", "-DSPEC_DEC=0", "-DMLA_WRAPPER=0", "-DUSE_SM90_MHA=0")  # fmt: skip


@pytest.fixture(scope="module")
def program(compile_upstream, wheel, request):
    source = request.path.with_name("xqa.cu")
    return compile_upstream("xqa", source, wheel / "csrc/xqa/mha.cu", flags=(*FLAGS, f"-I{wheel / 'csrc/xqa'}"))


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize(("lengths", "limit"), [((300, 256), 512), ((48,), 64)])
def test_decode(program, run_watched, tmp_path, lengths, limit):
    """Softmax(q k / sqrt(d)) v against float64; sequences of several blocks, whose last one combines. Behind a length of less than
    a block's tile, such as 77, the result is wrong here, and the watcher of races reports: not understood yet."""
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    q = bf16(rng.standard_normal((batch, HEADS * GROUP, ELEMENTS)))
    k, v = (bf16(rng.standard_normal((batch, limit, HEADS, ELEMENTS))) for _ in range(2))
    data = np.array(lengths, np.uint32).tobytes() + q.tobytes() + k.tobytes() + v.tobytes()
    (tmp_path / "in").write_bytes(data)
    _, launches = run_watched(program, batch, HEADS, limit, tmp_path / "in", tmp_path / "out", watch="fences,arrivals")
    assert max(launches[0]["grid"]) > 1
    got = widened(np.fromfile(tmp_path / "out", np.uint16)).reshape(q.shape)
    for b, length in enumerate(lengths):
        for head in range(HEADS * GROUP):
            keys, values = (widened(x[b, :length, head // GROUP]) for x in (k, v))
            scores = keys @ widened(q[b, head]) / np.sqrt(ELEMENTS)
            weights = np.exp(scores - scores.max())
            expected = weights @ values / weights.sum()
            # Weights and result are rounded to bf16 (2^-8 each, half a unit down), sums and exponentials are float32's.
            bound = 2.0**-7 * (weights @ np.abs(values) / weights.sum()) + 2.0**-8 * np.abs(expected) + 1e-5
            assert np.all(np.abs(got[b, head] - expected) <= bound), (b, head)
