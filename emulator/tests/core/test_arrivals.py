# SPDX-License-Identifier: Apache-2.0
"""The checker of GB10's ordering rule: a fence before each arrival, and before each signal to other blocks."""

from __future__ import annotations

import struct

import pytest
from vsm.device import Watch

KIND = "missing arrival fence"
WATCH = Watch.ALL | Watch.ARRIVALS

# Two warps. Everybody has written shared memory (its own word, at %r2), and has fenced that.
PRELUDE = """.reg .pred %p, %q, %z; .reg .b32 %r<10>; .reg .b64 %w<10>;
.shared .align 128 .b8 s[512]; .shared .align 8 .b64 bar; .shared .align 8 .b64 lone; .shared .align 4 .b32 flag;
ld.param.u64 %w0, [out]; ld.param.u64 %w3, [in]; mov.u32 %r0, %tid.x; mul.wide.u32 %w1, %r0, 4; add.u64 %w2, %w0, %w1; mov.u32 %r9, %ctaid.x;
shl.b32 %r3, %r0, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r3; setp.eq.u32 %p, %r0, 0; setp.lt.u32 %q, %r0, 32;
@%p mbarrier.init.shared::cta.b64 [bar], 64; @%p mbarrier.init.shared::cta.b64 [lone], 1; @%p st.shared.u32 [flag], 0;
fence.mbarrier_init.release.cluster; st.shared.u32 [%r2], %r0; bar.sync 0; fence.acq_rel.cta; fence.proxy.async;
"""
WAIT = " W: mbarrier.try_wait.parity.shared::cta.b64 %z, [bar], 0; @!%z bra W;"
ARRIVE = "\n mbarrier.arrive.shared::cta.b64 _, [bar];" + WAIT
LOAD = "ld.shared.u32 %r1, [%r2]; "
FENCE = "fence.acq_rel.cta; "
# Thread 0 raises a counter once all have written their words; block 1 looks at it.
OUT = "st.global.u32 [%w2], %r0; "
COUNTER = "[%w0+1024]"
POLL = f" setp.eq.u32 %z, %r9, 0; @%z bra E; L: ld.acquire.gpu.global.u32 %r4, {COUNTER}; setp.eq.u32 %z, %r4, 0; @%z bra L; E:"
ONE = "setp.ne.u32 %z, %r9, 0; @%z bra WAITS; "  # block 0 writes, block 1 waits
POLL_ONE = POLL.replace("setp.eq.u32 %z, %r9, 0; @%z bra E; L:", "bra E; WAITS: @!%p bra E; L:")

# what goes wrong on a GB10, and what does not
PAIRS = {
    "a load": (LOAD + ARRIVE, LOAD + FENCE + ARRIVE),
    "a store": ("st.shared.u32 [%r2], 1;" + ARRIVE, "st.shared.u32 [%r2], 1; membar.cta;" + ARRIVE),
    "an atomic": ("atom.shared.add.u32 %r1, [%r2], 1;" + ARRIVE, "atom.shared.add.u32 %r1, [%r2], 1; fence.sc.cta;" + ARRIVE),
    "a generic load": ("cvt.u64.u32 %w4, %r2; cvta.shared.u64 %w4, %w4; ld.u32 %r1, [%w4];" + ARRIVE,
                       "cvt.u64.u32 %w4, %r2; cvta.shared.u64 %w4, %w4; ld.u32 %r1, [%w4]; fence.acq_rel.gpu;" + ARRIVE),
    "cp.async": ("cp.async.ca.shared.global [%r2], [%w3], 4; cp.async.wait_all;" + ARRIVE,
                 "cp.async.ca.shared.global [%r2], [%w3], 4; cp.async.wait_all; membar.gl;" + ARRIVE),
    "a matrix load, then another lane": (
        "mov.u32 %r4, s; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r4];\n setp.eq.u32 %z, %r0, 31; @%z mbarrier.arrive.shared::cta.b64 _, [lone];",
        "mov.u32 %r4, s; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r4]; membar.cta;\n setp.eq.u32 %z, %r0, 31; @%z mbarrier.arrive.shared::cta.b64 _, [lone];"),
    "a fence too early": (FENCE + LOAD + ARRIVE, LOAD + FENCE + ARRIVE),
    "a fence of other lanes": (LOAD + "@!%p fence.acq_rel.cta; bar.warp.sync -1;\n @%p mbarrier.arrive.shared::cta.b64 _, [lone];",
                               LOAD + "bar.warp.sync -1; @%p fence.acq_rel.cta;\n @%p mbarrier.arrive.shared::cta.b64 _, [lone];"),
    "what the other lanes did": ("@!%p ld.shared.u32 %r1, [%r2]; bar.warp.sync -1;\n @%p mbarrier.arrive.shared::cta.b64 _, [lone];",
                                 "@!%p ld.shared.u32 %r1, [%r2]; bar.warp.sync -1; @%p membar.cta;\n @%p mbarrier.arrive.shared::cta.b64 _, [lone];"),
    "a proxy fence": (LOAD + "fence.proxy.async; fence.mbarrier_init.release.cluster;" + ARRIVE, LOAD + "fence.proxy.async; membar.cta;" + ARRIVE),
    "a barrier of some warps": (LOAD + "selp.b32 %r4, 1, 2, %q; bar.sync %r4, 32;" + ARRIVE, LOAD + "bar.sync 0;" + ARRIVE),
    "arrive.expect_tx": (LOAD + "\n mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 0;" + WAIT, LOAD + FENCE + "\n mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 0;" + WAIT),
    "arrive.noComplete": (LOAD + "\n @%q mbarrier.arrive.noComplete.shared::cta.b64 %w5, [bar], 1;", LOAD + FENCE + "\n @%q mbarrier.arrive.noComplete.shared::cta.b64 %w5, [bar], 1;"),
    "arrive_drop": (LOAD + "\n mbarrier.arrive_drop.shared::cta.b64 _, [bar];" + WAIT, LOAD + FENCE + "\n mbarrier.arrive_drop.shared::cta.b64 _, [bar];" + WAIT),
    "cp.async.mbarrier.arrive.noinc": (LOAD + "cp.async.ca.shared.global [%r2], [%w3], 4;\n cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];" + WAIT,
                                       LOAD + "membar.cta; cp.async.ca.shared.global [%r2], [%w3], 4;\n cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];" + WAIT),
    "cp.async.mbarrier.arrive": (LOAD + "cp.async.ca.shared.global [%r2], [%w3], 4;\n cp.async.mbarrier.arrive.shared::cta.b64 [bar]; membar.cta;" + ARRIVE.strip(),
                                 LOAD + "membar.cta; cp.async.ca.shared.global [%r2], [%w3], 4;\n cp.async.mbarrier.arrive.shared::cta.b64 [bar]; membar.cta;" + ARRIVE.strip()),
    "a releasing counter": (LOAD + "\n red.release.cta.shared.add.u32 [flag], 1;", LOAD + FENCE + "\n red.release.cta.shared.add.u32 [flag], 1;"),
    "a relaxed counter that is looked at": (
        "@!%q bra P; @!%p bra E; ld.shared.u32 %r1, [%r2];\n red.relaxed.cta.shared.add.u32 [flag], 1; bra E; P: ld.acquire.cta.shared.u32 %r4, [flag]; setp.eq.u32 %z, %r4, 0; @%z bra P; E:",
        "@!%q bra P; @!%p bra E; ld.shared.u32 %r1, [%r2]; membar.cta;\n red.relaxed.cta.shared.add.u32 [flag], 1; bra E; P: ld.acquire.cta.shared.u32 %r4, [flag]; setp.eq.u32 %z, %r4, 0; @%z bra P; E:"),
    "a counter of blocks": (ONE + OUT + f"bar.sync 0;\n @%p red.release.gpu.global.add.u32 {COUNTER}, 1;" + POLL_ONE,
                            ONE + OUT + f"bar.sync 0; @%p fence.acq_rel.gpu;\n @%p red.release.gpu.global.add.u32 {COUNTER}, 1;" + POLL_ONE),
    "a block-level fence": (ONE + OUT + f"bar.sync 0; membar.cta;\n @%p atom.acq_rel.gpu.global.add.u32 %r1, {COUNTER}, 1;" + POLL_ONE,
                            ONE + OUT + f"bar.sync 0; membar.gl;\n @%p atom.acq_rel.gpu.global.add.u32 %r1, {COUNTER}, 1;" + POLL_ONE),
    "writes of another warp": (ONE + f"@!%q st.global.u32 [%w2], %r0; bar.sync 0;\n @%p st.release.gpu.global.u32 {COUNTER}, 1;" + POLL_ONE,
                               ONE + f"@!%q st.global.u32 [%w2], %r0; bar.sync 0; membar.sys;\n @%p st.release.gpu.global.u32 {COUNTER}, 1;" + POLL_ONE),
    "a fence before the barrier": (ONE + f"@!%q st.global.u32 [%w2], %r0; membar.gl; bar.sync 0;\n @%p st.release.gpu.global.u32 {COUNTER}, 1;" + POLL_ONE,
                                   ONE + f"@!%q st.global.u32 [%w2], %r0; bar.sync 0; membar.gl;\n @%p st.release.gpu.global.u32 {COUNTER}, 1;" + POLL_ONE),
    "a relaxed counter of blocks": (ONE + OUT + f"bar.sync 0;\n @%p red.relaxed.gpu.global.add.u32 {COUNTER}, 1;" + POLL_ONE,
                                    ONE + OUT + f"bar.sync 0; membar.gl;\n @%p red.relaxed.gpu.global.add.u32 {COUNTER}, 1;" + POLL_ONE),
    "a volatile flag": (ONE + OUT + f"bar.sync 0;\n @%p st.volatile.global.u32 {COUNTER}, 1;" + POLL_ONE.replace("ld.acquire.gpu", "ld.volatile"),
                        ONE + OUT + f"bar.sync 0; membar.gl;\n @%p st.volatile.global.u32 {COUNTER}, 1;" + POLL_ONE.replace("ld.acquire.gpu", "ld.volatile")),
    "sums by atomics": (ONE + f"red.global.add.f32 [%w2], 0f3f800000; bar.sync 0;\n @%p red.release.gpu.global.add.u32 {COUNTER}, 1;" + POLL_ONE,
                        ONE + f"red.global.add.f32 [%w2], 0f3f800000; bar.sync 0; membar.gl;\n @%p red.release.gpu.global.add.u32 {COUNTER}, 1;" + POLL_ONE),
}  # fmt: skip

# Nothing of this tells anybody that something else is done.
SILENT = {
    "nothing touched since": ARRIVE,
    "a histogram": LOAD + "red.shared.add.u32 [flag], 1; bar.sync 0; ld.shared.u32 %r1, [flag];",
    "a queue": OUT
    + f"@%p atom.global.add.u32 %r1, {COUNTER}, 1; bar.sync 0; @%p atom.global.add.u32 %r1, {COUNTER}, 1;",
    "a look at one's own": OUT
    + "@%p red.relaxed.gpu.global.add.u32 [%w2+2048], 1; @%p ld.acquire.gpu.global.u32 %r1, [%w2+2048];",
    "two counters behind one fence": OUT
    + f"membar.gl; @%p red.release.gpu.global.add.u32 {COUNTER}, 1; @%p red.release.gpu.global.add.u32 [%w0+1028], 1;",
    "of the block": OUT + f"@%p red.release.cta.global.add.u32 {COUNTER}, 1;",
}


def run(run_kernel, body, watch=WATCH):
    source = f".visible .entry k(.param .u64 out, .param .u64 in) {{ {PRELUDE}\n{body}\nret; }}"
    return run_kernel(source, block=64, grid=2, inputs=[struct.pack("64I", *range(64))], watch=watch)[0]


@pytest.mark.parametrize("name", PAIRS)
def test_an_arrival_without_its_fence(run_kernel, name):
    launch = run(run_kernel, PAIRS[name][0])
    assert launch.status == "ok", str(launch)
    assert {r.kind for r in launch.reports} == {KIND}, str(launch)
    lines = PAIRS[name][0].split("\n")
    assert {r.line for r in launch.reports} == {launch.reports[0].line}
    assert launch.reports[0].instruction.strip() == lines[-1].strip()
    level = "block-level" if any(place in lines[-1] for place in ("[bar]", "[lone]", "[flag]")) else "device-level"
    assert level in launch.reports[0].text


@pytest.mark.parametrize("name", PAIRS)
def test_behind_a_fence(run_kernel, name):
    launch = run(run_kernel, PAIRS[name][1])
    assert launch.clean, str(launch)


@pytest.mark.parametrize("name", SILENT)
def test_not_an_arrival(run_kernel, name):
    launch = run(run_kernel, SILENT[name])
    assert launch.clean, str(launch)


@pytest.mark.parametrize("watch", [Watch.ALL, Watch.DEFAULT])
def test_nothing_is_reported_unasked(run_kernel, watch):
    """Without the checker there is no report, because the PTX ISA asks for no fence."""
    for name in ("a load", "a counter of blocks"):
        assert run(run_kernel, PAIRS[name][0], watch).clean
