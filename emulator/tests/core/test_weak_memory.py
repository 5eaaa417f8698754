# SPDX-License-Identifier: Apache-2.0
"""Writes of a block that reach other blocks late: what is not ordered for them is reported and, mostly, wrong."""

from __future__ import annotations

import struct

import pytest
from bits import HEADER
from vsm.device import Watch, pack

SEEDS = (1, 2, 3, 4, 5)
BLOCKS, THREADS = 4, 64
DATA, RESULT, FLAG = 4 * BLOCKS * THREADS, 4 * BLOCKS * THREADS, 256  # bytes, in this order

# %w1: this thread's place in the data; %w2: in the results; %w3: the flag; %p: thread 0 of a block; %first: block 0.
PRELUDE = f""".reg .pred %p, %first, %done, %one; .reg .b32 %r<12>; .reg .b64 %w<10>; .shared .align 128 .b8 s[256];
.shared .align 8 .b64 bar; .shared .b32 last;
ld.param.u64 %w0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, {THREADS}, %r0;
mul.wide.u32 %w1, %r2, 4; add.u64 %w1, %w0, %w1; add.u64 %w2, %w1, {DATA}; add.u64 %w3, %w0, {DATA + RESULT};
setp.eq.u32 %p, %r0, 0; setp.eq.u32 %first, %r1, 0; add.u32 %r3, %r2, 1; mov.u32 %r4, 0; mov.u32 %r5, 0;
"""
PUT, SYNC = "st.global.u32 [%w1], %r3;", "bar.sync 0;"
ARRIVE, POLL = "red.release.gpu.global.add.u32 [%w3], 1;", "ld.acquire.gpu.global.u32 %r4, [%w3];"
FENCE, RELAXED = "fence.acq_rel.gpu;", "red.relaxed.gpu.global.add.u32 [%w3], 1;"
RELAXED_POLL = "ld.relaxed.gpu.global.u32 %r4, [%w3];"


def grid_barrier(
    arrive: str = ARRIVE, poll: str = POLL, before: str = SYNC, after: str = SYNC, put: str = PUT, early: str = ""
) -> str:
    """Each block writes its part, all meet, each thread reads the next block's."""
    return f"""{early} {put} {before}
@!%p bra M; {arrive} L: {poll} setp.ne.u32 %done, %r4, {BLOCKS}; @%done nanosleep.u32 20; @%done bra L;
M: {after} add.u32 %r6, %r2, {THREADS}; rem.u32 %r6, %r6, {BLOCKS * THREADS}; mul.wide.u32 %w4, %r6, 4; add.u64 %w4, %w0, %w4;
ld.global.u32 %r5, [%w4]; st.global.u32 [%w2], %r5;"""


def last_block_sums(
    fence: str = FENCE,
    order: str = "bar.sync 0; {fence} {count}",
    acquire: str = FENCE,
    late: str = "",
    scope: str = "relaxed.gpu",
) -> str:
    """Each block writes its part and counts; the last to do so adds up all parts, in the first block's results."""
    count = f"@%p atom.{scope}.global.add.u32 %r4, [%w3], 1; @%p st.shared.u32 [last], %r4;"
    reads = "".join(f"ld.global.u32 %r7, [%w4+{4 * THREADS * b}]; add.u32 %r5, %r5, %r7;" for b in range(BLOCKS))
    return f"""{PUT} {order.format(fence=fence, count=count)} {acquire} bar.sync 0; ld.shared.u32 %r4, [last];
setp.ne.u32 %done, %r4, {BLOCKS - 1}; @%done exit; {late} mul.wide.u32 %w4, %r0, 4; add.u64 %w4, %w0, %w4; {reads}
add.u64 %w4, %w4, {DATA}; st.global.u32 [%w4], %r5;"""


EXCHANGED = [(i + THREADS) % (BLOCKS * THREADS) + 1 for i in range(BLOCKS * THREADS)]
SUMMED = [sum(t + 1 + THREADS * b for b in range(BLOCKS)) for t in range(THREADS)]
# A block reads the data, then meets the others: what it read before must not be what it reads then.
EARLY = "ld.relaxed.gpu.global.u32 %r8, [%w3]; setp.eq.u32 %done, %r8, 99; @%done st.global.u32 [%w2], %r8;"
# The bulk copy that writes a block's part, and the one that reads another's.
BULK_PUT = f"""mul.wide.u32 %w5, %r1, {4 * THREADS}; add.u64 %w5, %w0, %w5; mov.u32 %r9, s; shl.b32 %r10, %r0, 2; add.u32 %r10, %r10, %r9;
st.shared.u32 [%r10], %r3; fence.proxy.async; bar.sync 0;
@%p cp.async.bulk.global.shared::cta.bulk_group [%w5], [s], {4 * THREADS};
@%p cp.async.bulk.commit_group; @%p cp.async.bulk.wait_group 0;"""
GROUPS = [
    ("grid barrier", grid_barrier(), EXCHANGED),
    ("grid barrier, fences", grid_barrier(FENCE + RELAXED, RELAXED_POLL, after=FENCE + SYNC), EXCHANGED),
    ("grid barrier, membar", grid_barrier("membar.gl;" + RELAXED, RELAXED_POLL, after="membar.gl;" + SYNC), EXCHANGED),
    ("grid barrier, volatile poll", grid_barrier(FENCE + RELAXED, "ld.volatile.global.u32 %r4, [%w3];", after=FENCE + SYNC), EXCHANGED),
    ("atomic poll", grid_barrier(poll="atom.acquire.gpu.global.add.u32 %r4, [%w3], 0;"), EXCHANGED),
    ("strong accesses before", grid_barrier(early=EARLY), EXCHANGED),
    ("written by bulk copies", grid_barrier(put=BULK_PUT), EXCHANGED),
    ("last block sums", last_block_sums(), SUMMED),
    ("last block sums, membar", last_block_sums("membar.gl;", acquire="membar.gl;"), SUMMED),
    ("last block sums, acq_rel", last_block_sums("", acquire="", scope="acq_rel.gpu"), SUMMED),
]  # fmt: skip
FAULTS = {
    "relaxed arrival": grid_barrier(RELAXED),
    "arrival at block scope": grid_barrier("red.release.cta.global.add.u32 [%w3], 1;"),
    "relaxed poll": grid_barrier(poll=RELAXED_POLL),
    "poll at block scope": grid_barrier(poll="ld.acquire.cta.global.u32 %r4, [%w3];"),
    "fence at block scope": grid_barrier("fence.acq_rel.cta;" + RELAXED, RELAXED_POLL, after=FENCE + SYNC),
    "fence behind the arrival": grid_barrier(RELAXED + FENCE, RELAXED_POLL, after=FENCE + SYNC),
    "no fence behind the poll": grid_barrier(FENCE + RELAXED, RELAXED_POLL),
    "membar.cta": grid_barrier("membar.cta;" + RELAXED, RELAXED_POLL, after="membar.gl;" + SYNC),
    "arrival not behind the other warp's stores": grid_barrier(before="bar.warp.sync -1;"),
    "arrival not behind any other thread's stores": grid_barrier(before=""),
    # A fence makes a release with a write after it in its own thread, an acquire with a read before it in its own.
    "each thread fences, another arrives": grid_barrier(RELAXED, before=FENCE + SYNC),
    "the others fence behind the barrier": grid_barrier(RELAXED, before=SYNC + "@!%p " + FENCE),
    "last block sums without the fence": last_block_sums(""),
    "last block sums, fence at block scope": last_block_sums("membar.cta;"),
    "last block sums, each thread fences before the barrier": last_block_sums(order="{fence} bar.sync 0; {count}"),
    "last block sums, each thread fences behind the second barrier": last_block_sums(acquire="", late=FENCE),
    "last block sums, no acquire": last_block_sums(acquire=""),
}  # fmt: skip


@pytest.fixture
def run(device):
    """Run a body with a seed: the launch and its results."""

    def launch_one(body, seed, watch=Watch.ALL):
        module = device.load(f"{HEADER}.visible .entry k(.param .u64 out) {{ {PRELUDE}\n{body}\nret; }}", "weak")
        out = device.upload(bytes(DATA + RESULT + FLAG))
        launch = module.kernel("k").launch(
            BLOCKS, THREADS, pack(out), watch=watch, weak_memory=seed, max_warp_instructions=3_000_000
        )
        results = device.download(out, DATA + RESULT)[DATA:]
        device.release(out)
        module.unload()
        return launch, list(struct.unpack(f"{BLOCKS * THREADS}I", results))

    return launch_one


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("_", "body", "expected"), GROUPS, ids=[group[0] for group in GROUPS])
def test_what_is_ordered_is_seen(run, _, body, expected, seed):
    launch, results = run(body, seed)
    assert launch.clean, str(launch)
    assert results[: len(expected)] == expected


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_ordered_is_loud(run, fault):
    """Every seed reports the fault, and most give a wrong result; without the weak-memory mode it stays hidden."""
    expected = SUMMED if "sums" in fault else EXCHANGED
    wrong = 0
    for seed in SEEDS:
        launch, results = run(FAULTS[fault], seed)
        assert launch.reports and {report.kind for report in launch.reports} == {"race"}, (seed, str(launch))
        assert "load of bytes that block" in launch.reports[0].text and launch.reports[0].space == "global"
        wrong += results[: len(expected)] != expected
    assert wrong > len(SEEDS) // 2, wrong
    launch, results = run(FAULTS[fault], 0)
    assert launch.clean and results[: len(expected)] == expected


@pytest.mark.parametrize("fault", ["relaxed arrival", "last block sums without the fence"])
def test_a_seed_repeats(run, fault):
    for seed in SEEDS:
        (one, first), (two, second) = run(FAULTS[fault], seed), run(FAULTS[fault], seed)
        assert first == second
        assert one.counters == two.counters
    assert len({tuple(run(FAULTS[fault], seed)[1]) for seed in SEEDS}) > 1


def test_a_prefetch_is_a_hint(run):
    """Of bytes that another block stores to, nothing ordering the two: no race. Loading them is one."""
    load = "ld.global.u32 %r5, [%w4];"
    prefetch = "and.b64 %w4, %w4, -16; cp.async.bulk.prefetch.L2.global [%w4], 16; prefetch.global.L2 [%w4];"
    body = grid_barrier(RELAXED, RELAXED_POLL)
    assert load in body
    for seed in SEEDS:
        launch, _ = run(body.replace(load, prefetch), seed)
        assert launch.clean, str(launch)
        assert launch.counters.prefetched_bytes == 16 * BLOCKS * THREADS
        assert {report.kind for report in run(body, seed)[0].reports} == {"race"}


def test_two_blocks_write_the_same_bytes(run):
    body = "st.global.u32 [%w0], %r1;"
    for seed in SEEDS:
        (report,) = run(body, seed)[0].reports
        assert "store of bytes that block" in report.text
    assert run("red.global.add.u32 [%w0], %r1;", 1)[0].clean


def test_a_block_sees_its_own_writes(run):
    """After its own barrier it sees them, even bytes of one word that several threads wrote."""
    body = f""".reg .b16 %h; {PUT} bar.sync 0; xor.b32 %r6, %r2, 63; mul.wide.u32 %w4, %r6, 4; add.u64 %w4, %w0, %w4;
ld.global.u32 %r5, [%w4]; cvt.u16.u32 %h, %r5; cvt.u64.u32 %w5, %r2; add.u64 %w5, %w3, %w5; st.global.u8 [%w5], %h; bar.sync 0;
cvt.u64.u32 %w5, %r6; add.u64 %w5, %w3, %w5; ld.global.u8 %r5, [%w5]; st.global.u32 [%w2], %r5;"""
    for seed in SEEDS:
        launch, results = run(body, seed)
        assert launch.clean, str(launch)
        assert results == [(i + 1) % 256 for i in range(BLOCKS * THREADS)]
