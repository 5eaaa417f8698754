# SPDX-License-Identifier: Apache-2.0
"""Races between threads in shared memory, lanes of one warp included: each fault is named, its corrected twin is silent."""

from __future__ import annotations

import struct

import pytest

# %r0: thread; %r1: lane; %r2: &s[thread]; %r3: &s[31 - lane] of the same warp; %p: thread 0, %q: thread 32.
PRELUDE = """.reg .pred %p, %q, %half, %done; .reg .b32 %r<10>, %m<4>; .reg .b64 %w<4>; .reg .b16 %h;
.shared .align 128 .b8 s[512]; .shared .align 8 .b64 bar; .shared .align 4 .b32 flag;
ld.param.u64 %w0, [out]; ld.param.u64 %w1, [in]; mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; shl.b32 %r3, %r0, 2;
mov.u32 %r2, s; add.u32 %r2, %r2, %r3; xor.b32 %r3, %r0, 31; shl.b32 %r3, %r3, 2; mov.u32 %r4, s; add.u32 %r3, %r3, %r4;
setp.eq.u32 %p, %r0, 0; setp.eq.u32 %q, %r0, 32; setp.lt.u32 %half, %r1, 16; mov.u32 %r5, 0; mov.u32 %r6, 0;
@%p mbarrier.init.shared::cta.b64 [bar], 1; @%p st.shared.u32 [flag], 0; bar.sync 0;
"""
PUT, GET = "st.shared.u32 [%r2], %r0;", "ld.shared.u32 %r5, [%r3];"
SYNC = "bar.warp.sync 0xffffffff;"
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %done, [bar], 0; @!%done bra W;"
ARRIVE = "@%p mbarrier.arrive.shared::cta.b64 _, [bar];"
COPY = """@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
@%p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%w1], 128, [bar];
"""


def handed_over(send: str, receive: str, after: str = "") -> str:
    """Thread 0 leaves 7 in s and says so in the flag; thread 32 polls the flag and takes it."""
    return f"""@%q bra R; @!%p bra E; st.shared.u32 [s], 7; {send} bra E;
R: {receive} setp.eq.u32 %done, %r6, 0; @%done bra R; {after}
ld.shared.u32 %r5, [s]; E:"""


SEND, RECEIVE = "st.release.cta.shared.u32 [flag], 1;", "ld.acquire.cta.shared.u32 %r6, [flag];"
ONLY_WARP_0 = "setp.ge.u32 %done, %r0, 32; @%done exit;"
RELAXED_SEND, RELAXED_RECEIVE = "st.relaxed.cta.shared.u32 [flag], 1;", "ld.relaxed.cta.shared.u32 %r6, [flag];"
FENCE = "fence.acq_rel.cta;"
VOLATILE_PUT, VOLATILE_GET = PUT.replace("st", "st.volatile", 1), GET.replace("ld", "ld.volatile", 1)
VOLATILE_SEND, VOLATILE_RECEIVE = "st.volatile.shared.u32 [flag], 1;", "ld.volatile.shared.u32 %r6, [flag];"

# The fault, a text of its report, the faulty body, the corrected body.
CASES = {
    "lanes exchange without bar.warp.sync": ("load of a byte that lane 31 of the same warp wrote", PUT + GET, PUT + SYNC + GET),
    "shfl.sync orders no memory": (
        "of the same warp wrote", PUT + "shfl.sync.idx.b32 %r6, %r0, 0, 31, -1;" + GET, PUT + "shfl.sync.idx.b32 %r6, %r0, 0, 31, -1;" + SYNC + GET,
    ),
    "vote.sync orders no memory": ("of the same warp wrote", PUT + "vote.sync.any.pred %done, %p, -1;" + GET, PUT + SYNC + GET),
    "overwritten while another lane reads": (
        "store of a byte that lane 31 of the same warp read", PUT + SYNC + GET + PUT, PUT + SYNC + GET + SYNC + PUT,
    ),
    "halves that wait each for itself": (
        "of the same warp wrote",
        PUT + "@%half bra A; bar.warp.sync 0xffff0000; bra B; A: bar.warp.sync 0x0000ffff; B:" + GET,
        PUT + "@%half bra A; bar.warp.sync 0xffff0000; bra B; A: bar.warp.sync 0x0000ffff; B:"
        "xor.b32 %r6, %r0, 1; shl.b32 %r6, %r6, 2; mov.u32 %r4, s; add.u32 %r6, %r6, %r4; ld.shared.u32 %r5, [%r6];",
    ),
    "two masks at one instruction": (
        "of the same warp wrote",
        PUT + "selp.b32 %r6, 0xffff, 0xffff0000, %half; bar.warp.sync %r6;" + GET,
        PUT + "selp.b32 %r6, 0xffff, 0xffff0000, %half; bar.warp.sync %r6;"
        "xor.b32 %r6, %r0, 1; shl.b32 %r6, %r6, 2; mov.u32 %r4, s; add.u32 %r6, %r6, %r4; ld.shared.u32 %r5, [%r6];",
    ),
    "branches that come one after the other": (
        "of the same warp read", ONLY_WARP_0 + "@%half bra A; ld.shared.u32 %r5, [flag]; bra B; A: st.shared.u32 [flag], 1; B:",
        ONLY_WARP_0 + "@%half st.shared.u32 [flag], 1;" + SYNC + "ld.shared.u32 %r5, [flag];",
    ),
    "one lane arrives for all, the others not ordered before it": (
        "of warp 0 wrote",
        "setp.lt.u32 %done, %r0, 32; @!%done bra R;" + PUT + ARRIVE + "bra E; R:" + WAIT + "ld.shared.u32 %r5, [%r2+-128]; E:",
        "setp.lt.u32 %done, %r0, 32; @!%done bra R;" + PUT + SYNC + ARRIVE + "bra E; R:" + WAIT + "ld.shared.u32 %r5, [%r2+-128]; E:",
    ),
    "one lane refills what the others read": (
        "the copy's store of a byte that lane 1 of the same warp read",
        ONLY_WARP_0 + "mov.u32 %r5, 1; st.shared.u32 [%r2], %r5;" + SYNC + "ld.shared.u32 %r5, [%r2]; fence.proxy.async;" + COPY + WAIT,
        ONLY_WARP_0 + "mov.u32 %r5, 1; st.shared.u32 [%r2], %r5;" + SYNC + "ld.shared.u32 %r5, [%r2]; fence.proxy.async;" + SYNC + COPY + WAIT,
    ),
    "ldmatrix of rows that lanes just wrote": (
        "of the same warp wrote",
        ONLY_WARP_0 + PUT + "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [s];", ONLY_WARP_0 + PUT + SYNC + "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [s];",
    ),
    "a matrix stored, read by lanes": (
        "of the same warp wrote",
        ONLY_WARP_0 + "and.b32 %m0, %r0, 7; shl.b32 %m0, %m0, 4; mov.u32 %r4, s; add.u32 %m0, %m0, %r4; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%m0], {%r0};" + GET,
        ONLY_WARP_0 + "and.b32 %m0, %r0, 7; shl.b32 %m0, %m0, 4; mov.u32 %r4, s; add.u32 %m0, %m0, %r4; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%m0], {%r0};" + SYNC + GET,
    ),
    "a flag stored plainly": ("byte that lane 0 of warp", handed_over("st.shared.u32 [flag], 1;", RECEIVE), handed_over(SEND, RECEIVE)),
    "a flag read plainly": ("byte that lane 0 of warp", handed_over(SEND, "ld.shared.u32 %r6, [flag];"), handed_over(SEND, RECEIVE)),
    "a relaxed store of the flag": ("load of a byte that lane 0 of warp 0 wrote", handed_over(RELAXED_SEND, RECEIVE), handed_over(FENCE + RELAXED_SEND, RECEIVE)),
    "a relaxed load of the flag": ("load of a byte that lane 0 of warp 0 wrote", handed_over(SEND, RELAXED_RECEIVE), handed_over(SEND, RELAXED_RECEIVE, FENCE)),
    "a fence behind the flag": (
        "load of a byte that lane 0 of warp 0 wrote",
        handed_over(RELAXED_SEND + FENCE, RELAXED_RECEIVE, FENCE), handed_over(FENCE + RELAXED_SEND, RELAXED_RECEIVE, FENCE),
    ),
    "a volatile flag without fences": (
        "load of a byte that lane 0 of warp 0 wrote", handed_over(VOLATILE_SEND, VOLATILE_RECEIVE), handed_over("membar.cta;" + VOLATILE_SEND, VOLATILE_RECEIVE, "membar.cta;"),
    ),
    "volatile in place of bar.warp.sync": ("volatile load of a byte that lane 31 of the same warp wrote", VOLATILE_PUT + VOLATILE_GET, VOLATILE_PUT + SYNC + VOLATILE_GET),
    "volatile in place of a block barrier": (
        "volatile load of a byte that lane 0 of warp 1 wrote",
        VOLATILE_PUT + "@%p ld.volatile.shared.u32 %r5, [s+128];", VOLATILE_PUT + "bar.sync 0; @%p ld.volatile.shared.u32 %r5, [s+128];",
    ),
    "volatile values overwritten while another lane reads": (
        "volatile store of a byte that lane 31 of the same warp read",
        VOLATILE_PUT + SYNC + VOLATILE_GET + VOLATILE_PUT, VOLATILE_PUT + SYNC + VOLATILE_GET + SYNC + VOLATILE_PUT,
    ),
    "volatile values behind a flag that nobody acquires": (
        "volatile load of a byte that lane 0 of warp 0 wrote",
        handed_over(FENCE + VOLATILE_SEND, VOLATILE_RECEIVE).replace("st.shared.u32 [s]", "st.volatile.shared.u32 [s]").replace("ld.shared.u32 %r5, [s]", "ld.volatile.shared.u32 %r5, [s]"),
        handed_over(FENCE + VOLATILE_SEND, VOLATILE_RECEIVE, FENCE).replace("st.shared.u32 [s]", "st.volatile.shared.u32 [s]").replace("ld.shared.u32 %r5, [s]", "ld.volatile.shared.u32 %r5, [s]"),
    ),
    "a volatile flag raised again without a fence": (
        "volatile store of a byte that lane 0 of warp 1 read",
        handed_over(FENCE + VOLATILE_SEND, VOLATILE_RECEIVE, FENCE) + "bar.sync 0; @%p st.volatile.shared.u32 [flag], 2; @%q ld.volatile.shared.u32 %r5, [flag];",
        handed_over(FENCE + VOLATILE_SEND, VOLATILE_RECEIVE, FENCE) + "bar.sync 0;" + FENCE + "@%p st.volatile.shared.u32 [flag], 2; @%q ld.volatile.shared.u32 %r5, [flag];",
    ),
    "a relaxed atomic raises the flag": (
        "load of a byte that lane 0 of warp 0 wrote",
        handed_over("red.relaxed.cta.shared.add.u32 [flag], 1;", "atom.acquire.cta.shared.add.u32 %r6, [flag], 0;"),
        handed_over("red.release.cta.shared.add.u32 [flag], 1;", "atom.acquire.cta.shared.add.u32 %r6, [flag], 0;"),
    ),
    "a count read before all have added": (
        "with nothing ordering the two", "atom.shared.add.u32 %r5, [flag], 1; ld.shared.u32 %r5, [flag];", "atom.shared.add.u32 %r5, [flag], 1; bar.sync 0; ld.shared.u32 %r5, [flag];",
    ),
}  # fmt: skip


def run(run_kernel, body):
    source = f".visible .entry k(.param .u64 out, .param .u64 in) {{ {PRELUDE}\n{body}\nret; }}"
    return run_kernel(source, block=64, inputs=[struct.pack("64I", *range(64))])[0]


@pytest.mark.parametrize("case", CASES)
def test_a_race_is_named(run_kernel, case):
    text, faulty, _ = CASES[case]
    launch = run(run_kernel, faulty)
    assert launch.reports and {report.kind for report in launch.reports} == {"race"}, str(launch)
    assert any(text in report.text for report in launch.reports), str(launch)


@pytest.mark.parametrize("case", CASES)
def test_its_corrected_twin_is_silent(run_kernel, case):
    launch = run(run_kernel, CASES[case][2])
    assert launch.clean, str(launch)


@pytest.mark.parametrize(
    "body",
    [
        "st.shared.u32 [s], 5; ld.shared.u32 %r5, [s];".replace("st", "setp.lt.u32 %done, %r0, 32; @%done st", 1).replace("ld", "@%done ld", 1),
        "add.u32 %r6, %r4, %r0; cvt.u16.u32 %h, %r0; st.shared.u8 [%r6], %h; ld.shared.u8 %h, [%r6];",
        "atom.shared.add.u32 %r5, [flag], 1; atom.shared.max.u32 %r5, [flag], 7;",
        "st.relaxed.cta.shared.u32 [flag], %r0; ld.relaxed.cta.shared.u32 %r5, [flag];",
        "st.volatile.shared.u32 [flag], %r0; bar.sync 0; atom.shared.add.u32 %r5, [flag], 1; ld.volatile.shared.u32 %r5, [flag];",
        "ld.shared.u32 %r5, [flag]; bar.sync 0; @%p st.shared.u32 [flag], 3; bar.sync 0; ld.shared.u32 %r5, [flag];",
        "ld.shared.u32 %r5, [flag]; bar.warp.sync -1; ld.shared.u32 %r5, [flag]; bar.sync 0; @%q st.shared.u32 [flag], 3;",
    ],
    ids=["one instruction of all lanes", "bytes of a word", "atomics", "relaxed accesses", "volatile loads of atomics", "in turns", "read twice"],
)  # fmt: skip
def test_silent(run_kernel, body):
    launch = run(run_kernel, body)
    assert launch.clean, str(launch)


def test_reads_before_the_last_one_are_not_forgotten(run_kernel):
    """Lane 5 reads; lane 0 arrives, which makes a new version; lane 6 reads; then lane 6 writes."""
    body = """setp.eq.u32 %done, %r0, 5; @%done ld.shared.u32 %r5, [flag];
@%p mbarrier.arrive.shared::cta.b64 _, [bar];
setp.eq.u32 %done, %r0, 6; @%done ld.shared.u32 %r5, [flag];
@%done st.shared.u32 [flag], 1;"""
    (report,) = run(run_kernel, body).reports
    assert "store of a byte that lane 5 of the same warp read" in report.text
    assert run(run_kernel, body.replace("@%done st", SYNC + "@%done st")).clean
