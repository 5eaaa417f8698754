# SPDX-License-Identifier: Apache-2.0
"""Upstream's FA2 attention over a paged KV cache with attention sinks, decode and prefill, from the wheel: gpt-oss's
heads, bf16 and e4m3 KV, full attention and a window of 128."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from bf16 import from_bf16, to_bf16

pytestmark = pytest.mark.slow

HEAD_DIM, GROUP, KV_HEADS, PAGE = 64, 8, 2, 16
HEADS = GROUP * KV_HEADS
CACHE_TYPES = {"bf16": "__nv_bfloat16", "e4m3": "__nv_fp8_e4m3"}


class Sequence(NamedTuple):
    """Tokens of the query, which are the last ones of the KV cache's."""

    queries: int
    tokens: int


class Case(NamedTuple):
    """Sequences for which upstream takes this query tile; ``part``: the most pages that a block goes through."""

    tile: int
    part: int
    sequences: tuple[Sequence, ...]


CASES = {
    "decode": Case(16, 100, tuple(Sequence(1, tokens) for tokens in (1, 16, 77, 300))),
    "decode in parts": Case(16, 4, tuple(Sequence(1, tokens) for tokens in (5, 200, 300))),
    "short prefill": Case(64, 100, (Sequence(3, 3), Sequence(7, 150), Sequence(1, 40))),
    "prefill": Case(128, 100, (Sequence(60, 60), Sequence(37, 290))),
    "prefill in parts": Case(128, 8, (Sequence(60, 60), Sequence(37, 290))),
}
# The checkers' findings, which do not affect the stored results. The kernel reads tile rows without a query or token,
# and slots of the merge's ring without a part, uninitialized. Each warp stages its output with stmatrix over memory
# that its lanes have read, and reads it back in other lanes without __syncwarp: only lockstep execution orders these.
KNOWN = {"uninitialized read": ("ldmatrix.", "ld.shared.v4"), "race": ("stmatrix.", "ld.shared.v4")}


@pytest.fixture(scope="module")
def build(compile_upstream, wheel, request, tmp_path_factory):
    """Programs by KV type and query tile: one takes nvcc 15 s."""
    jinja2 = pytest.importorskip("jinja2")
    variants = runpy.run_path(str(wheel.parent / "jit/attention/variants.py"))
    template = jinja2.Template(
        (wheel / "csrc/batch_prefill_customize_config.jinja").read_text(), undefined=jinja2.StrictUndefined
    )
    programs: dict[tuple[str, int], Path] = {}

    def program(cache: str, tile: int) -> Path:
        if (cache, tile) not in programs:
            folder = tmp_path_factory.mktemp(f"fa2_{cache}_{tile}")
            # The values are those of upstream's generator for the module with sinks.
            text = template.render(
                variant_decl=variants["attention_sink_decl"]["fa2"], variant_name="AttentionSink",
                dtype_q="__nv_bfloat16", dtype_kv=CACHE_TYPES[cache], dtype_o="__nv_bfloat16", idtype="int32_t",
                head_dim_qk=HEAD_DIM, head_dim_vo=HEAD_DIM, pos_encoding_mode="PosEncodingMode::kNone",
                use_sliding_window="true", use_logits_soft_cap="false", use_fp16_qk_reduction="false",
                require_fp4_kv_cache=False, paged_kv_stride_mode="independent",
                additional_params_decl="float* sink;\ndouble sm_scale;\n", additional_func_params="",
                additional_params_setter="",
            )  # fmt: skip
            (folder / "batch_prefill_config.inc").write_text(text)
            programs[cache, tile] = compile_upstream(
                f"fa2_{cache}_{tile}",
                request.path.with_name("fa2_sinks.cu"),
                flags=("-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_FP8_E4M3", f"-DTILE={tile}", f"-I{folder}"),
            )
        return programs[cache, tile]

    return program


def from_e4m3(bits: np.ndarray) -> np.ndarray:
    exponent, fraction = (bits >> 3 & 15).astype(np.int64), (bits & 7).astype(np.float64)
    value = np.where(exponent > 0, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    return np.where(bits & 0x7F == 0x7F, np.nan, np.where(bits & 0x80, -value, value))


def draw_cache(rng: np.random.Generator, cache: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A random cache as it is stored, and its values."""
    if cache == "bf16":
        stored = to_bf16(rng.standard_normal(shape))
        return stored, from_bf16(stored)
    # Magnitudes of 2^-7 to under 2.
    stored = (rng.integers(0, 64, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7).astype(np.uint8)
    return stored, from_e4m3(stored)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, sink: float, partial_rounding: float
) -> tuple[np.ndarray, np.ndarray]:
    """One query [d] over the tokens [n, d] that it sees: the output [d], and a bound on a kernel's error.

    Rounding to bf16 has a relative error of 2^-8 at most. Each weight is rounded before its product with V, and also in
    the denominator's sum; the output is rounded once, and so are partial outputs, if there are some. Errors of float32
    are small beside these: a dot product of 64 terms in a few additions, the exponent's argument, the approximate
    functions (2^-22), sums of weights. `slack` bounds them relative to a weight.
    """
    u = 2.0**-8
    scores = k @ q / np.sqrt(HEAD_DIM)
    top = max(scores.max(), sink)
    weights = np.exp(scores - top)
    total = weights.sum() + np.exp(sink - top)
    output = weights @ v / total
    magnitude = weights @ np.abs(v) / total
    largest = (np.abs(k) @ np.abs(q)).max() / np.sqrt(HEAD_DIM) + abs(sink)
    slack = 2.0**-24 * (16 * largest + 64)
    bound = (u + slack) * (magnitude + np.abs(output)) + (u + partial_rounding) * np.abs(output)
    bound += partial_rounding * magnitude
    return output, bound * (1 + 8 * u) + 2.0**-126


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cache", CACHE_TYPES)
def test_attention(build, run_checked, tmp_path, cache, case, window):
    """Every row within its bound of float64. The pages lie in random order; behind a sequence's last token they hold
    NaN."""
    tile, part, sequences = CASES[case]
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    used = [-(-sequence.tokens // PAGE) for sequence in sequences]
    pages = sum(used) + 3
    table = rng.permutation(pages)[: sum(used)].astype(np.int32)
    page_offsets = np.cumsum([0, *used], dtype=np.int32)
    q_offsets = np.cumsum([0, *(sequence.queries for sequence in sequences)], dtype=np.int32)
    last = np.array([(sequence.tokens - 1) % PAGE + 1 for sequence in sequences], np.int32)
    sinks = rng.normal(1, 2, HEADS).astype(np.float32)
    q = to_bf16(rng.standard_normal((q_offsets[-1], HEADS, HEAD_DIM)))
    stored, values = zip(*(draw_cache(rng, cache, (pages, PAGE, KV_HEADS, HEAD_DIM)) for _ in range(2)), strict=True)
    for i, count in enumerate(last):
        for array in stored:
            array[table[page_offsets[i + 1] - 1], count:] = 0x7FFF if cache == "bf16" else 0x7F
    arrays = (q_offsets, page_offsets, last, table, sinks, q, *stored)
    (tmp_path / "in").write_bytes(b"".join(array.tobytes() for array in arrays))
    window_left = -1 if window is None else window - 1
    split = "in parts" in case
    out, launches = run_checked(
        build(cache, tile), window_left, part, len(sequences), HEADS, KV_HEADS, pages, PAGE,
        tmp_path / "in", tmp_path / "out", known=KNOWN,
    )  # fmt: skip
    assert out.split() == [str(tile), str(int(split))]
    assert len(launches) == 1 + split
    for report in (report for launch in launches for report in launch["reports"]):
        assert report["kind"] != "race" or "of the same warp" in report["text"], report["summary"]
    got = from_bf16(np.fromfile(tmp_path / "out", np.uint16)).reshape(q.shape)
    worst = 0.0
    for i, (queries, tokens) in enumerate(sequences):
        mine = table[page_offsets[i] : page_offsets[i + 1]]
        k, v = (x[mine].reshape(-1, KV_HEADS, HEAD_DIM)[:tokens] for x in values)
        for row in range(queries):
            end = tokens - queries + row + 1
            begin = 0 if window is None else max(0, end - window)
            for head in range(HEADS):
                seen = slice(begin, end), head // GROUP
                at = q_offsets[i] + row, head
                expected, bound = attend(from_bf16(q[at]), k[seen], v[seen], sinks[head], 2.0**-8 if split else 0.0)
                share = np.max(np.abs(got[at] - expected) / bound)
                assert share <= 1, (i, row, head)
                worst = max(worst, share)
    print(f"{worst:.2f} of the bound")
