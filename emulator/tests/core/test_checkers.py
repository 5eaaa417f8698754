# SPDX-License-Identifier: Apache-2.0
"""Each checker catches one planted fault and names it; the same kernel without the fault is silent."""

from __future__ import annotations

import struct

import pytest
from bits import HEADER

PRELUDE = """.reg .pred %p, %q; .reg .b32 %r<10>; .reg .b64 %w<10>;
ld.param.u64 %w0, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %w1, %r0, 4; add.u64 %w2, %w0, %w1; ld.param.u64 %w3, [in];
.shared .align 128 .b8 s[512]; .shared .align 8 .b64 bar; shl.b32 %r3, %r0, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r3; setp.eq.u32 %p, %r0, 0;
"""
INIT = "@%p mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"
LOAD = "@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {expect};\n @%p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%w3], 256, [bar];"
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 0; @!%q bra W;"
ARRIVE = "@%p mbarrier.arrive.shared::cta.b64 _, [bar];\n"
PUT = "st.shared.u32 [%r2], %r0;"
# Each thread for itself; to the second half of s if it says so.
COPY = "cp.async.ca.shared.global [%r2+{to}], [%w3], 4;\n cp.async.commit_group;"
LANDS = "mov.u32 %r5, 3000; L: sub.u32 %r5, %r5, 1; setp.ne.u32 %q, %r5, 0; @%q bra L;"
TRACK = "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];\n"
OUT = "@%p cp.async.bulk.global.shared::cta.bulk_group [%w0], [s], 256;\n cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"

# kind, text, faulty body, clean body. The faulty instruction is on a line of its own that contains FAULT's marker.
FAULTS = [
    ("out of bounds", "behind the end of an allocation of 4096", "st.global.u32 [%w2+4096], 1;", "st.global.u32 [%w2+3840], 1;"),
    ("out of bounds", "shared address", "ld.shared.u32 %r1, [%r2+4096];", "st.shared.u32 [%r2], 1; ld.shared.u32 %r1, [%r2];"),
    ("out of bounds", "before an allocation", "ld.global.u32 %r1, [%w3-4];", "ld.global.u32 %r1, [%w3];"),
    ("misaligned", "load of 8 bytes", "ld.global.v2.u32 {%r4, %r5}, [%w3+4];", "ld.global.v2.u32 {%r4, %r5}, [%w3+8];"),
    ("misaligned", "store of 4 bytes", "st.shared.u32 [%r2+2], 1;", "st.shared.u32 [%r2+4], 1;"),
    ("uninitialized read", "that nothing wrote", "ld.shared.u32 %r1, [%r2];", PUT + "ld.shared.u32 %r1, [%r2];"),
    ("write to read-only memory", "parameters", "mov.b64 %w4, out; cvta.param.u64 %w4, %w4;\n st.u32 [%w4], 1;", "mov.b64 %w4, out; cvta.param.u64 %w4, %w4;\n ld.u32 %r1, [%w4];"),
    ("race", "with nothing ordering the two", PUT + "sub.u32 %r4, 252, %r3; mov.u32 %r5, s; add.u32 %r4, %r4, %r5;\n st.shared.u32 [%r4], 1;",
     PUT + "sub.u32 %r4, 252, %r3; mov.u32 %r5, s; add.u32 %r4, %r4, %r5; bar.sync 0;\n st.shared.u32 [%r4], 1;"),
    ("race", "wrote", "@%p st.shared.u32 [s+256], 1;\n setp.eq.u32 %q, %r0, 32; @%q st.shared.u32 [s+256], 1;", "@%p st.shared.u32 [s+256], 1;\n setp.eq.u32 %q, %r0, 32; bar.sync 1; @%q st.shared.u32 [s+256], 1;"),
    ("missing proxy fence", "no fence.proxy.async", PUT + "bar.sync 0;\n" + OUT, PUT + "fence.proxy.async.shared::cta; bar.sync 0;\n" + OUT),
    ("missing proxy fence", "no fence.proxy.async", "fence.proxy.async;" + PUT + "bar.sync 0;\n" + OUT, PUT + "bar.sync 0; fence.proxy.async;\n" + OUT),
    ("missing proxy fence", "async proxy overwrites what warp", INIT + PUT + "bar.sync 0;\n" + LOAD.format(expect=256) + WAIT,
     INIT + PUT + "bar.sync 0; fence.proxy.async;\n" + LOAD.format(expect=256) + WAIT),
    ("barrier misuse", "arrivals where the phase expects", INIT + "mbarrier.arrive.shared::cta.b64 _, [bar], 2;", INIT + "@%p mbarrier.arrive.shared::cta.b64 _, [bar];"),
    ("barrier misuse", "no mbarrier was initialized", "@%p mbarrier.arrive.shared::cta.b64 _, [bar];", INIT + "@%p mbarrier.arrive.shared::cta.b64 _, [bar];"),
    ("barrier misuse", "touches a live mbarrier", INIT + "st.shared.u32 [bar], 1;", INIT + "st.shared.u32 [%r2], 1;"),
    ("barrier misuse", "an mbarrier already lives there", INIT + "@%p mbarrier.init.shared::cta.b64 [bar], 1;", INIT + "@%p mbarrier.inval.shared::cta.b64 [bar];\n @%p mbarrier.init.shared::cta.b64 [bar], 1;"),
    ("barrier misuse", "not a positive multiple of 32", "bar.sync 1, 33;", "bar.sync 1, 64;"),
    ("barrier misuse", "while others wait", "setp.lt.u32 %q, %r0, 32; @%q bra A; bar.sync 1, 128; bra E; A: bar.sync 1, 96; E:", "setp.lt.u32 %q, %r0, 32; @%q bra A; bar.sync 1, 64; bra E; A: bar.sync 1, 64; E:"),
    ("deadlock", "mbarrier at", INIT + LOAD.format(expect=272) + WAIT, INIT + LOAD.format(expect=256) + WAIT),
    ("deadlock", "wait for mbarrier", INIT + "W: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 0; @!%q bra W;", INIT + "W: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 1; @!%q bra W;"),
    # A phase lost: two complete before anybody waits for the first.
    ("deadlock", "(phase 2", INIT + ARRIVE + ARRIVE + "bar.sync 0;\n" + WAIT, INIT + ARRIVE + WAIT + "bar.sync 0;" + ARRIVE),
    ("deadlock", "wait for barrier", "setp.lt.u32 %q, %r0, 32; @%q bra E; bar.sync 1, 64; E:", "bar.sync 1, 64;"),
    ("undefined behaviour", "was not waited for", INIT + LOAD.format(expect=256), INIT + LOAD.format(expect=256) + WAIT),
    # Ending without a wait is reported whether or not the copies have landed by then.
    ("undefined behaviour", "the thread ended without waiting", COPY.format(to=0), COPY.format(to=0) + "cp.async.wait_group 0;"),
    ("undefined behaviour", "the thread ended without", COPY.format(to=0) + LANDS, COPY.format(to=0) + LANDS + "cp.async.wait_all;"),
    ("undefined behaviour", "the thread ended without", COPY.format(to=0) + COPY.format(to=256) + "cp.async.wait_group 1;",
     COPY.format(to=0) + "cp.async.commit_group; cp.async.wait_group 1;"),
    ("undefined behaviour", "the thread ended without", COPY.format(to=0) + "@%p exit; cp.async.wait_group 0;",
     COPY.format(to=0) + "cp.async.wait_group 0; @%p exit;"),
    ("undefined behaviour", "the thread ended without", INIT.replace("1;", "64;") + TRACK + COPY.format(to=0) + WAIT,
     INIT.replace("1;", "64;") + COPY.format(to=0) + TRACK + "setp.lt.u32 %q, %r0, 32; @%q exit;" + WAIT),
    ("trap", "trap", "@%p trap;", "@!%p bra E; E:"),
    ("misaligned", "not a multiple of 16", INIT + LOAD.format(expect=256).replace("256, [bar]", "250, [bar]") + WAIT, INIT + LOAD.format(expect=256) + WAIT),
    ("bad tensor map", "not a tensor map", INIT + "@%p cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [s], [%w3, {%r0}], [bar];", INIT),
    ("race", "the copy's store of a byte that lane 1 of the same warp read",
     INIT + PUT + "bar.sync 0; ld.shared.u32 %r1, [%r2]; fence.proxy.async;\n" + LOAD.format(expect=256) + WAIT,
     INIT + PUT + "bar.sync 0; ld.shared.u32 %r1, [%r2]; fence.proxy.async; bar.sync 0;\n" + LOAD.format(expect=256) + WAIT),
]  # fmt: skip


def run(run_kernel, body):
    source = f".visible .entry k(.param .u64 out, .param .u64 in) {{ {PRELUDE}\n{body}\nret; }}"
    return run_kernel(source, block=64, inputs=[struct.pack("64I", *range(64))])[0]


@pytest.mark.parametrize(("kind", "text", "faulty", "_"), FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)])
def test_planted_fault_is_named(run_kernel, kind, text, faulty, _):
    launch = run(run_kernel, faulty)
    assert kind in [r.kind for r in launch.reports], str(launch)
    report = next(r for r in launch.reports if r.kind == kind)
    assert text in report.text
    assert report.kernel == "k"
    assert 8 <= report.line <= 8 + faulty.count("\n")
    assert 0 <= report.warp < 2
    assert f"PTX line {report.line}" in str(report)


@pytest.mark.parametrize(("kind", "_", "__", "body"), FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)])
def test_clean_twin_is_silent(run_kernel, kind, _, __, body):
    launch = run(run_kernel, body)
    assert launch.clean, str(launch)


def test_uninitialized_global_memory(device):
    from vsm.device import pack

    module = device.load(
        HEADER
        + ".visible .entry k(.param .u64 a) { .reg .b64 %w; .reg .b32 %r; ld.param.u64 %w, [a];\n ld.global.u32 %r, [%w+4]; ret; }",
        "u",
    )
    address = device.allocate(64)
    launch = module.kernel("k").launch(1, 32, pack(address))
    assert [r.kind for r in launch.reports] == ["uninitialized read"]
    device.upload(bytes(64), address)
    assert module.kernel("k").launch(1, 32, pack(address)).clean
    device.release(address)


COUNT = """.visible .entry k(.param .u64 a) { .reg .pred %p; .reg .b64 %w; .reg .b32 %r, %n; ld.param.u64 %w, [a];
mov.u32 %n, %nctaid.x; red.release.gpu.global.add.u32 [%w], 1;
L: ld.acquire.gpu.global.u32 %r, [%w]; setp.lt.u32 %p, %r, %n; @%p bra L; ret; }"""


def test_a_counter_left_from_an_earlier_call(device):
    """The second call passes its barrier at once. Nothing tells that from a counter that somebody has set, until the
    host says that the workspace is handed over anew."""
    from vsm.device import pack

    kernel = device.load(HEADER + COUNT, "count").kernel("k")
    workspace = device.upload(bytes(256))
    assert kernel.launch(4, 32, pack(workspace)).clean
    assert kernel.launch(4, 32, pack(workspace)).clean
    device.discard(workspace, 256)
    reports = kernel.launch(4, 32, pack(workspace)).reports
    assert [report.kind for report in reports] == ["uninitialized read"]
    assert "atomic of 4 bytes of global memory that nothing wrote" in reports[0].text
    device.discard(workspace, 256)
    device.upload(bytes(4), workspace)
    assert kernel.launch(4, 32, pack(workspace)).clean
    device.discard(workspace + 4, 3)  # other bytes
    device.upload(bytes(4), workspace)
    assert kernel.launch(4, 32, pack(workspace)).clean
    device.release(workspace)


def test_step_limit(run_kernel):
    launch, _ = run_kernel(".visible .entry k(.param .u64 out) { L: bra L; }", max_warp_instructions=100_000)
    assert launch.status == "step limit"
    assert launch.reports[0].kind == "step limit"


@pytest.mark.parametrize(
    ("grid", "block", "shared", "text"),
    [
        (1, 1025, 0, "a block dimension is 1025; at most 1024"),
        (1, (32, 64), 0, "threads per block is 2048; at most 1024"),
        ((1, 65536), 32, 0, "a grid dimension is 65536; at most 65535"),
        (1, 32, 101377, "shared memory per block is 101377; at most 101376"),
        (1, 0, 0, "is 0"),
    ],
)
def test_refused_launches(device, grid, block, shared, text):

    module = device.load(HEADER + ".visible .entry k() { ret; }", "r")
    launch = module.kernel("k").launch(grid, block, b"", dynamic_shared=shared)
    assert launch.status == "refused"
    assert text in launch.message
    assert module.kernel("k").launch(1, 32, b"", dynamic_shared=101376).clean
    module.unload()


def test_too_many_registers_are_refused(device):

    module = device.load(HEADER + ".visible .entry k() { ret; }", "r")
    assert module.kernel("k").launch(1, 512, b"", registers=129).status == "refused"
    assert module.kernel("k").launch(1, 512, b"", registers=128).clean
    module.unload()


def test_many_reports_of_one_kind_do_not_hide_another(run_kernel):
    """64 of a kind are kept."""
    reads = "\n".join(f"ld.shared.u32 %r1, [s+{4 * i + 256}];" for i in range(70))
    source = f""".visible .entry k(.param .u64 out) {{ .reg .b32 %r<3>; .shared .align 16 .b8 s[1024];
    mov.u32 %r0, %tid.x;
    {reads}
    st.shared.u32 [s], %r0;
    ret; }}"""
    launch, _ = run_kernel(source, block=64)
    kinds = [report.kind for report in launch.reports]
    assert kinds.count("uninitialized read") == 64
    assert kinds.count("race") == 1
