# SPDX-License-Identifier: Apache-2.0
"""Bulk copies among ordinary accesses: what must be waited for or fenced, each with its twin that does."""

from __future__ import annotations

import struct

import pytest

# Two warps; 4 bytes a thread of `s`, written and fenced for the async proxy; two mbarriers.
PRELUDE = """.reg .pred %p, %q, %z, %one; .reg .b32 %r<10>; .reg .b64 %w<10>;
.shared .align 128 .b8 s[512]; .shared .align 8 .b64 bar; .shared .align 8 .b64 other;
ld.param.u64 %w0, [out]; ld.param.u64 %w3, [in]; mov.u32 %r0, %tid.x; mul.wide.u32 %w1, %r0, 4; add.u64 %w2, %w0, %w1; mov.u32 %r9, %ctaid.x;
shl.b32 %r3, %r0, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r3; setp.eq.u32 %p, %r0, 0; setp.lt.u32 %q, %r0, 32; setp.eq.u32 %one, %r0, 32;
"""
PUBLISHED = "@%p mbarrier.init.shared::cta.b64 [bar], 1; @%p mbarrier.init.shared::cta.b64 [other], 1; fence.mbarrier_init.release.cluster;\n"
FILLED = "st.shared.u32 [%r2], %r0; st.shared.u32 [%r2+256], %r0; fence.proxy.async.shared::cta; bar.sync 0;\n"
START = PUBLISHED + FILLED
PUT = "@%p cp.async.bulk.global.shared::cta.bulk_group [%w0], [s], 256; @%p cp.async.bulk.commit_group; "
PUT_SECOND = "@%p cp.async.bulk.global.shared::cta.bulk_group [%w0+256], [s+256], 256; @%p cp.async.bulk.commit_group; "
READ, ALL = "@%p cp.async.bulk.wait_group.read 0; ", "@%p cp.async.bulk.wait_group 0; "
EXPECT = "@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256; "
GET = EXPECT + "@%p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [{0}], 256, [bar]; "
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %z, [bar], 0; @!%z bra W; "
SYNC = "bar.sync 0; "
LOAD, STORE = "ld.shared.u32 %r1, [%r2]; ", "st.shared.u32 [%r2], 7; "
FROM_IN = GET.format("%w3")
SPIN = "mov.u32 %r5, 3000; L: sub.u32 %r5, %r5, 1; setp.ne.u32 %z, %r5, 0; @%z bra L; "
FENCE = "fence.proxy.async; "
WRITE = "st.global.u32 [%w2], %r0; "
# Blocks: 0 writes and signals, 1 waits and reads.
SIGNAL = "@%p red.release.gpu.global.add.u32 [%w0+1024], 1; "
LATE_SIGNAL = "@%p fence.acq_rel.gpu; @%p red.relaxed.gpu.global.add.u32 [%w0+1024], 1; "
FIRST = "setp.ne.u32 %z, %r9, 0; @%z bra SECOND; "
SECOND = (
    "exit; SECOND: @!%p bra ON; L: ld.acquire.gpu.global.u32 %r4, [%w0+1024]; setp.eq.u32 %z, %r4, 0; @%z bra L; ON: "
)
FROM_OUT = GET.format("%w0")

WAITS, FENCES, BARRIER = "missing wait", "missing proxy fence", "barrier misuse"
# name: kind, text, wrong program, right program, blocks. The instruction at fault begins a line.
PAIRS = {
    "source overwritten": (WAITS, "reads, not ordered behind", START + PUT + SYNC + "\n" + STORE + ALL, START + PUT + READ + SYNC + "\n" + STORE + ALL, 1),
    "source overwritten by the thread itself": (WAITS, "reads, not", START + PUT + "\n@%p " + STORE + ALL, START + PUT + ALL + "\n@%p " + STORE, 1),
    "source overwritten, long done": (WAITS, "reads, not", START + PUT + SPIN + SYNC + "\n" + STORE + ALL,
                                      START + PUT + READ + SPIN + SYNC + "\n" + STORE + ALL, 1),
    "source waited for, but no barrier": (WAITS, "reads, not", START + PUT + SYNC + READ + SPIN + "\n@!%q " + STORE + ALL, START + PUT + READ + SYNC + SPIN + "\n@!%q " + STORE + ALL, 1),
    "the newer group": (WAITS, "reads, not", START + PUT + PUT_SECOND + "@%p cp.async.bulk.wait_group.read 1; " + SYNC + "\nst.shared.u32 [%r2+256], 7; " + ALL,
                        START + PUT + PUT_SECOND + "@%p cp.async.bulk.wait_group.read 1; " + SYNC + "\nst.shared.u32 [%r2], 7; " + ALL, 1),
    "source overwritten by a copy": (WAITS, "reads, not", START + PUT + "\n" + FROM_IN + WAIT + ALL, START + PUT + READ + "\n" + FROM_IN + WAIT + ALL, 1),
    "read while it is filled": (WAITS, "that a bulk copy fills", START + SYNC + FROM_IN + "\n@%p " + LOAD + WAIT, START + SYNC + FROM_IN + WAIT + "\n@%p " + LOAD, 1),
    "filled, but nobody waited": (WAITS, "that a bulk copy fills", START + FROM_IN + SPIN + SYNC + "\n" + LOAD,
                                  START + FROM_IN + WAIT + SPIN + SYNC + "\n" + LOAD, 1),
    "the other warp waited": (WAITS, "that a bulk copy fills", START + FROM_IN + SYNC + "@!%q bra E; " + WAIT + "E: " + SPIN + "\n" + LOAD, START + FROM_IN + "@!%q bra E; " + WAIT + "E: " + SYNC + "\n" + LOAD, 1),
    "written while it is filled": (WAITS, "writes shared memory that a bulk copy fills", START + FROM_IN + "\n@%p " + STORE + WAIT, START + FROM_IN + WAIT + "\n@%p " + STORE, 1),
    "filled twice at a time": (WAITS, "writes shared memory that a bulk copy fills",
                               START + FROM_IN + "@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [other], 256;\n@%p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%w3], 256, [other];" + WAIT + WAIT.replace("W", "V").replace("bar]", "other]"),
                               START + FROM_IN + WAIT + "@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [other], 256;\n@%p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%w3], 256, [other];" + WAIT.replace("W", "V").replace("bar]", "other]"), 1),
    "mbarrier not published": (FENCES, "initialized, with no fence.mbarrier_init", "@%p mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0; " + EXPECT + "\n" + FROM_IN.replace(EXPECT, "") + WAIT,
                               "@%p mbarrier.init.shared::cta.b64 [bar], 1; fence.proxy.async.shared::cta; bar.sync 0; " + EXPECT + "\n" + FROM_IN.replace(EXPECT, "") + WAIT, 1),
    "mbarrier published by another warp": (FENCES, "initialized, with no", "@%p mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0; @!%q fence.mbarrier_init.release.cluster; bar.sync 0; " + EXPECT + "\n" + FROM_IN.replace(EXPECT, "") + WAIT,
                                           "@%p mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0; @!%q fence.proxy.async; bar.sync 0; " + EXPECT + "\n" + FROM_IN.replace(EXPECT, "") + WAIT, 1),
    "mbarrier published too early": (FENCES, "initialized, with no", "fence.mbarrier_init.release.cluster; @%p mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0; " + EXPECT + "\n" + FROM_IN.replace(EXPECT, "") + WAIT,
                                     "@%p mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; bar.sync 0; " + EXPECT + "\n" + FROM_IN.replace(EXPECT, "") + WAIT, 1),
    "mbarrier used at once": (BARRIER, "initialized, with nothing ordering the two", PUBLISHED + "\n@%one mbarrier.arrive.shared::cta.b64 _, [bar];", PUBLISHED + SYNC + "\n@%one mbarrier.arrive.shared::cta.b64 _, [bar];", 1),
    "mbarrier waited for at once": (BARRIER, "initialized, with nothing", PUBLISHED + "@%p mbarrier.arrive.shared::cta.b64 _, [bar]; @%q exit;\n" + WAIT, PUBLISHED + SYNC + "@%p mbarrier.arrive.shared::cta.b64 _, [bar]; @%q exit;\n" + WAIT, 1),
    "global memory not fenced": (FENCES, "the async proxy reads what warp 0 wrote", START + WRITE + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, START + WRITE + FENCE + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, 1),
    "global memory fenced too early": (FENCES, "the async proxy reads", START + FENCE + WRITE + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, START + WRITE + SYNC + FENCE + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, 1),
    "a fence for shared memory": (FENCES, "the async proxy reads", START + WRITE + "fence.proxy.async.shared::cta; " + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, START + WRITE + "fence.proxy.async.global; " + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, 1),
    "atomics not fenced": (FENCES, "the async proxy reads", START + "red.global.add.u32 [%w2], 1; " + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, START + "red.global.add.u32 [%w2], 1; " + FENCE + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, 1),
    "another block's, not fenced": (FENCES, "of block 0 wrote", START + FIRST + WRITE + SYNC + SIGNAL + SECOND + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT,
                                    START + FIRST + WRITE + FENCE + SYNC + SIGNAL + SECOND + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, 2),
    "another block's, fenced too late there": (FENCES, "of block 0 wrote", START + FIRST + WRITE + SYNC + SIGNAL + FENCE + SECOND + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT,
                                               START + FIRST + WRITE + SYNC + FENCE + SIGNAL + SECOND + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, 2),
    "another block's, fenced too early here": (FENCES, "of block 0 wrote", START + FIRST + WRITE + SYNC + LATE_SIGNAL + SECOND.replace("@!%p bra ON", FENCE + "@!%p bra ON") + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT,
                                               START + FIRST + WRITE + SYNC + LATE_SIGNAL + SECOND + FENCE + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, 2),
    "read, but only the source was waited for": (WAITS, "writes, not ordered behind a cp.async.bulk.wait_group", START + PUT + READ + SYNC + "\nld.global.u32 %r1, [%w2]; " + ALL, START + PUT + ALL + SYNC + "\nld.global.u32 %r1, [%w2];", 1),
    "read by a copy, but only the source was waited for": (WAITS, "writes, not ordered behind", START + PUT + READ + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT + ALL, START + PUT + ALL + SYNC + EXPECT + "\n" + FROM_OUT.replace(EXPECT, "") + WAIT, 1),
    "signalled, but only the source was waited for": (WAITS, "in block 0 writes", START + FIRST + PUT + READ + SIGNAL + ALL + SECOND + SYNC + "\nld.global.u32 %r1, [%w2];", START + FIRST + PUT + ALL + SIGNAL + SECOND + SYNC + "\nld.global.u32 %r1, [%w2];", 2),
    "signalled behind a fence, but never waited for": (WAITS, "in block 0 writes", START + FIRST + PUT + READ + LATE_SIGNAL + SECOND + SYNC + "\nld.global.u32 %r1, [%w2];", START + FIRST + PUT + ALL + LATE_SIGNAL + SECOND + SYNC + "\nld.global.u32 %r1, [%w2];", 2),
}  # fmt: skip


def run(run_kernel, body, blocks):
    source = f".visible .entry k(.param .u64 out, .param .u64 in) {{ {PRELUDE}\n{body}\nret; }}"
    return run_kernel(source, block=64, grid=blocks, inputs=[struct.pack("64I", *range(64))])[0]


@pytest.mark.parametrize("name", PAIRS)
def test_planted_fault_is_named(run_kernel, name):
    kind, text, wrong, _, blocks = PAIRS[name]
    launch = run(run_kernel, wrong, blocks)
    assert launch.status == "ok", str(launch)
    found = [r for r in launch.reports if r.kind == kind]  # some of it is a race too, or lacks a fence
    assert found, str(launch)
    assert text in found[0].text
    assert found[0].line == 9 + wrong.count("\n")


@pytest.mark.parametrize("name", PAIRS)
def test_clean_twin_is_silent(run_kernel, name):
    _, _, _, right, blocks = PAIRS[name]
    launch = run(run_kernel, right, blocks)
    assert launch.clean, str(launch)


def test_stages_are_refilled(run_kernel):
    """A ring: consumers wait, read and arrive; the producer waits for them and refills. And a ring of stores behind it."""
    body = """@%p mbarrier.init.shared::cta.b64 [bar], 1; @%p mbarrier.init.shared::cta.b64 [other], 64; fence.mbarrier_init.release.cluster; bar.sync 0;
    mov.u32 %r5, 0;
    NEXT: and.b32 %r6, %r5, 1; @!%p bra CONSUME;
    xor.b32 %r7, %r6, 1; F: mbarrier.try_wait.parity.shared::cta.b64 %z, [other], %r7; @!%z bra F;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%w3], 256, [bar];
    CONSUME: W: mbarrier.try_wait.parity.shared::cta.b64 %z, [bar], %r6; @!%z bra W;
    ld.shared.u32 %r1, [%r2]; mbarrier.arrive.shared::cta.b64 _, [other];
    @%p cp.async.bulk.wait_group.read 0; bar.sync 0; st.shared.u32 [%r2+256], %r1; fence.proxy.async.shared::cta; bar.sync 0;
    @%p cp.async.bulk.global.shared::cta.bulk_group [%w0], [s+256], 256; @%p cp.async.bulk.commit_group;
    add.u32 %r5, %r5, 1; setp.lt.u32 %z, %r5, 20; @%z bra NEXT; @%p cp.async.bulk.wait_group 0;"""
    launch = run(run_kernel, body, 1)
    assert launch.clean, str(launch)
