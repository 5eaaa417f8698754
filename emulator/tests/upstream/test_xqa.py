# SPDX-License-Identifier: Apache-2.0
"""Upstream's XQA decode kernel, from the wheel: silent under the checker of GB10's ordering rule, whose fix it
carries for sm_121a."""

from __future__ import annotations

import random

import numpy as np
import pytest

HEADS, GROUP, ELEMENTS, PAGE = 2, 8, 64, 16
# The flags of upstream's generator for bf16 with one query token per sequence.
FLAGS = ("-DBEAM_WIDTH=1", "-DUSE_INPUT_KV=0", "-DUSE_CUSTOM_BARRIER=1", f"-DTOKENS_PER_PAGE={PAGE}",
         f"-DHEAD_ELEMS={ELEMENTS}", "-DINPUT_FP16=0", "-DDTYPE=__nv_bfloat16", "-DCACHE_ELEM_ENUM=0",
         f"-DHEAD_GRP_SIZE={GROUP}", "-DSLIDING_WINDOW=0", "-DLOW_PREC_OUTPUT=0", "-DSPEC_DEC=0", "-DMLA_WRAPPER=0",
         "-DUSE_SM90_MHA=0")  # fmt: skip


@pytest.fixture(scope="module")
def program(compile_upstream, wheel, request):
    source = request.path.with_name("xqa.cu")
    return compile_upstream("xqa", source, wheel / "csrc/xqa/mha.cu", flags=(*FLAGS, f"-I{wheel / 'csrc/xqa'}"))


@pytest.fixture(scope="module")
def waiting_program(compile_upstream, wheel, request, tmp_path_factory):
    """The same kernel, whose warps wait for their copies behind the loops of either GEMM."""
    text = (wheel / "csrc/xqa/mha.cu").read_text()
    for behind in ("  } else {\n    assert(warpIdx.z == 1);", "    auto const fullRescaleMask ="):
        assert text.count(behind) == 1
        text = text.replace(behind, "    ldgsts::waitGroup<0>();\n" + behind)
    kernel = tmp_path_factory.mktemp("xqa") / "mha.cu"
    kernel.write_text(text)
    source = request.path.with_name("xqa.cu")
    return compile_upstream("xqa_waits", source, kernel, flags=(*FLAGS, f"-I{wheel / 'csrc/xqa'}"))


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.fixture
def decode(run_checked, tmp_path):
    """Softmax(q k / sqrt(d)) v of random bf16: the launches, and the largest error as a share of its bound."""

    def run(program, lengths, limit, watch, known=None):
        seed = random.randrange(2**31)
        print("seed", seed)
        rng = np.random.default_rng(seed)
        batch = len(lengths)
        q = bf16(rng.standard_normal((batch, HEADS * GROUP, ELEMENTS)))
        k, v = (bf16(rng.standard_normal((batch, limit, HEADS, ELEMENTS))) for _ in range(2))
        (tmp_path / "in").write_bytes(np.array(lengths, np.uint32).tobytes() + q.tobytes() + k.tobytes() + v.tobytes())
        command = (program, batch, HEADS, limit, tmp_path / "in", tmp_path / "out")
        _, launches = run_checked(*command, watch=watch, known=known)
        got = widened(np.fromfile(tmp_path / "out", np.uint16)).reshape(q.shape)
        worst = 0.0
        for b, length in enumerate(lengths):
            for head in range(HEADS * GROUP):
                keys, values = (widened(x[b, :length, head // GROUP]) for x in (k, v))
                scores = keys @ widened(q[b, head]) / np.sqrt(ELEMENTS)
                weights = np.exp(scores - scores.max())
                expected = weights @ values / weights.sum()
                # Weights and result are rounded to bf16 (2^-8 each), sums and exponentials are float32's.
                bound = 2.0**-7 * (weights @ np.abs(values) / weights.sum()) + 2.0**-8 * np.abs(expected) + 1e-5
                worst = max(worst, np.max(np.abs(got[b, head] - expected) / bound))
        print(f"{worst:.2f} of the bound")
        return launches, worst

    return run


# A finding: warps fetch a tile of K or V beyond the sequence (as zeros), and nothing waits for it.
LATE = {"undefined behaviour": ("cp.async.",)}


@pytest.mark.parametrize(("lengths", "limit"), [((300, 256), 512), ((48,), 64)])
def test_decode(program, decode, lengths, limit):
    """Compared with float64. Sequences take several blocks, and the last block combines their results."""
    launches, worst = decode(program, lengths, limit, "fences,arrivals", LATE)
    assert max(launches[0]["grid"]) > 1
    assert worst <= 1


# When several blocks are combined, warps without a block's part to fetch issue copies, too, and do not wait for them.
@pytest.mark.parametrize(("lengths", "limit", "known"), [
    ((77,), 128, None), ((128,), 128, None), ((65, 1, 300), 512, LATE)
])  # fmt: skip
def test_decode_that_waits(waiting_program, decode, lengths, limit, known):
    """At these lengths the copies would land in time to spoil the result if the kernel did not wait for them."""
    _, worst = decode(waiting_program, lengths, limit, "fences,arrivals", known)
    assert worst <= 1


def test_late_copies_meet_the_output(program, waiting_program, decode):
    """The output is staged in the memory that those copies write. With 65 to 128 tokens it is staged early enough here
    for K's zeros to land in it. (Another finding: lanes read with ldmatrix data that other lanes' cp.async wrote, after
    wait_group but without __syncwarp. It has no effect if a warp runs in lockstep.)"""
    lanes, late = ("ldmatrix.",), "the copy's store of a byte that"
    launches, _ = decode(program, (77,), 128, "all", {"race": (*lanes, "cp.async."), **LATE})
    assert any(late in report["text"] for report in launches[0]["reports"])
    launches, worst = decode(waiting_program, (77,), 128, "all", {"race": lanes})
    assert not any(late in report["text"] for report in launches[0]["reports"])
    assert worst <= 1


def test_flag_of_the_last_block_is_overwritten(waiting_program, decode, monkeypatch):
    """A finding: after the block barrier each warp reads a flag that tells whether its block is the last one, and the
    first warp goes on to write row maxima to the same byte."""
    monkeypatch.setenv("VSM_THREADS", "1")
    # Other findings: shared memory of warps that have ended is overwritten (a barrier orders only the warps that reach
    # it), and lanes read data that other lanes' cp.async wrote.
    others = ("ldmatrix.", "stmatrix.", "ld.shared.f32", "st.shared.f32", "cp.async.")
    launches, _ = decode(waiting_program, (300,), 512, "races", {"race": ("ld.shared.u8", *others), **LATE})
    assert any(report["instruction"].startswith("ld.shared.u8") for report in launches[0]["reports"])
