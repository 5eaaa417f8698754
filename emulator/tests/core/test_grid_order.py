# SPDX-License-Identifier: Apache-2.0
"""Launches with programmatic stream serialization: what the launch ahead touches is waited for (PTX ISA 9.0, 9.7.13.13)."""

from __future__ import annotations

import pytest
from bits import HEADER
from vsm.device import Watch, pack

TRIGGER, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
# Each kernel gets two buffers of 256 bytes, 4 bytes a thread of 64.
PRELUDE = """.reg .pred %p; .reg .b32 %r<4>; .reg .b64 %w<4>; .shared .align 128 .b8 s[256]; .shared .align 8 .b64 bar;
ld.param.u64 %w0, [a]; ld.param.u64 %w1, [b]; mov.u32 %r0, %tid.x; mul.wide.u32 %w2, %r0, 4; mov.u32 %r1, 0;
add.u64 %w0, %w0, %w2; add.u64 %w1, %w1, %w2; setp.eq.u32 %p, %r0, 0;
"""
LOAD_A, LOAD_B = "ld.global.u32 %r1, [%w0];", "ld.global.u32 %r1, [%w1];"
STORE_A, STORE_B = "st.global.u32 [%w0], %r0;", "st.global.u32 [%w1], %r0;"
ADD_A = "red.global.add.u32 [%w0], 1;"
COPY_A = """@%p mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
@%p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%w0], 256, [bar];
"""
PREFETCH_A = "@%p cp.async.bulk.prefetch.L2.global [%w0], 256; prefetch.global.L2 [%w0];"
DONE = "L: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra L;"
STORE_ASYNC = """add.u32 %r2, %r0, %r0; add.u32 %r2, %r2, %r2; mov.u32 %r3, s; add.u32 %r2, %r2, %r3; st.shared.u32 [%r2], %r0;
fence.proxy.async.shared::cta; bar.sync 0;
@%p cp.async.bulk.global.shared::cta.bulk_group [%w0], [s], 256; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""


@pytest.fixture
def run(device):
    """Launch the bodies in order, each programmatic but the first; the launches."""
    made = []

    def launch_all(*bodies, programmatic=True, streams=None, watch=Watch.ALL, between=lambda a: None):
        a, b = device.upload(bytes(256)), device.upload(bytes(256))
        launches = []
        for i, body in enumerate(bodies):
            text = f"{HEADER}.visible .entry k{i}(.param .u64 a, .param .u64 b) {{ {PRELUDE}\n{body}\nret; }}"
            module = device.load(text, "grid order")
            kernel = module.kernel(f"k{i}")
            stream = streams[i] if streams else 7
            launches.append(
                kernel.launch(1, 64, pack(a, b), watch=watch, programmatic=programmatic and i > 0, stream=stream)
            )
            module.unload()
            between(a)
        device.release(a)
        device.release(b)
        made.extend(launches)
        return launches

    yield launch_all
    assert made


FAULTS = {
    "read": (STORE_A + TRIGGER, LOAD_A, "reads what the kernel before it in the stream, k0, writes"),
    "read, triggered before it was written": (TRIGGER + STORE_A, LOAD_A, "reads what"),
    "overwritten": (STORE_A + TRIGGER, STORE_A, "writes what the kernel before it in the stream, k0, writes"),
    "overwritten while it is read": (LOAD_A + TRIGGER, STORE_A, "writes what the kernel before it in the stream, k0, reads"),
    "atomic": (STORE_A + TRIGGER, ADD_A, "writes what"),
    "bulk copy": (STORE_A + TRIGGER, COPY_A + DONE, "reads what"),
    "written by a bulk copy": (STORE_ASYNC + TRIGGER, LOAD_A, "reads what"),
    "overwritten by a bulk copy": (LOAD_A + TRIGGER, STORE_ASYNC, "writes what"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named(run, fault):
    first, second, text = FAULTS[fault]
    one, two = run(first, second)
    assert one.clean, str(one)
    report = two.reports[0]
    assert report.kind == "missing grid wait", str(two)
    assert text in report.text and "griddepcontrol.wait" in report.text
    assert report.kernel == "k1" and report.space == "global"
    assert 8 <= report.line <= 8 + second.count("\n"), str(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_clean_twin_is_silent(run, fault):
    first, second, _ = FAULTS[fault]
    for launch in run(first, WAIT + second):
        assert launch.clean, str(launch)


def test_a_copy_that_is_done_after_the_wait_was_issued_before_it(run):
    one, two = run(STORE_A + TRIGGER, COPY_A + WAIT + DONE)
    assert one.clean
    assert [report.kind for report in two.reports] == ["missing grid wait"], str(two)


def test_one_warp_waits_for_the_others(run):
    """A barrier carries the wait to the other warp; before it, that warp is not ordered."""
    only_warp_0 = "setp.lt.u32 %p, %r0, 32; @!%p bra N; griddepcontrol.wait; N:"
    assert run(STORE_A + TRIGGER, only_warp_0 + "bar.sync 0;" + LOAD_A)[1].clean
    (report,) = run(STORE_A + TRIGGER, only_warp_0 + LOAD_A)[1].reports
    assert (report.kind, report.warp) == ("missing grid wait", 1)


@pytest.mark.parametrize(
    "case",
    [
        {"bodies": (STORE_A + TRIGGER, LOAD_B + STORE_B), "why": "other bytes"},
        {"bodies": (LOAD_A + TRIGGER, LOAD_A), "why": "both read"},
        {"bodies": (STORE_A, LOAD_A), "why": "the first lets nobody start before its end"},
        {"bodies": (STORE_A + TRIGGER, PREFETCH_A), "why": "a prefetch is a hint"},
        {"bodies": (PREFETCH_A + TRIGGER, STORE_A), "why": "nor is it overtaken by a write"},
        {"bodies": (STORE_A + TRIGGER, LOAD_A), "programmatic": False, "why": "stream order"},
        {"bodies": (STORE_A + TRIGGER, LOAD_A), "streams": (1, 2), "why": "another stream: no order to lose"},
        {"bodies": (STORE_A + TRIGGER, LOAD_A), "watch": Watch.ALL & ~Watch.FENCES, "why": "not watched"},
        {"bodies": (STORE_A + TRIGGER, WAIT + TRIGGER, LOAD_A), "why": "the second started behind the first's end"},
        {"bodies": (STORE_A + TRIGGER, WAIT, LOAD_A), "why": "the second ended behind the first"},
    ],
    ids=lambda case: case["why"],
)
def test_silent(run, case):
    for launch in run(*case["bodies"], **{k: v for k, v in case.items() if k not in ("bodies", "why")}):
        assert launch.clean, str(launch)


def test_a_grid_two_ahead(run):
    """The second lets the third start before it waited for the first itself."""
    for middle in (TRIGGER, TRIGGER + WAIT, TRIGGER + WAIT + TRIGGER, ""):
        third = run(STORE_A + TRIGGER, middle, LOAD_A)[2]
        assert [report.kind for report in third.reports] == ["missing grid wait"], (middle, str(third))
        assert "k0" in third.reports[0].text


@pytest.mark.parametrize(
    ("middle", "waits"),
    [(TRIGGER, TRIGGER + WAIT), ("", WAIT), (TRIGGER + STORE_B, TRIGGER + "@%p " + WAIT + STORE_B)],
    ids=["triggers", "ends", "one of its threads waits"],
)
@pytest.mark.parametrize("third", [WAIT + LOAD_A, WAIT + STORE_A, WAIT + COPY_A + DONE], ids=["read", "write", "copy"])
def test_a_middle_grid_that_never_waits(run, middle, waits, third):
    """The third waits for the second; that the first is complete follows only if the second waited for it."""
    one, two, last = run(STORE_A + TRIGGER, middle, third)
    assert one.clean and two.clean
    assert [report.kind for report in last.reports] == ["missing grid wait"], str(last)
    assert "k0" in last.reports[0].text and "as the grid between them did not" in last.reports[0].text
    for launch in run(STORE_A + TRIGGER, waits, third):
        assert launch.clean, str(launch)


def test_a_grid_that_nobody_waited_for_stays_in_flight(run):
    """Nor is the first complete for the fourth, whose wait reaches the second through the third's."""
    bodies = [STORE_A + TRIGGER, TRIGGER, WAIT + TRIGGER, WAIT + LOAD_A]
    assert [report.kind for report in run(*bodies)[3].reports] == ["missing grid wait"]
    bodies[1] = TRIGGER + WAIT
    assert all(launch.clean for launch in run(*bodies))


def test_the_host_between_them(run, device):
    """Whoever uploads has waited: the next launch may read that."""
    for launch in run(STORE_A + TRIGGER, LOAD_A, between=lambda a: device.upload(bytes(256), a)):
        assert launch.clean, str(launch)


def test_only_the_bytes_that_were_written(run):
    other_half = "xor.b64 %w0, %w0, 128;"  # the buffers are 256-byte aligned
    half = "setp.lt.u32 %p, %r0, 32; @%p "
    assert run(half + STORE_A + TRIGGER, other_half + half + LOAD_A)[1].clean
    assert not run(half + STORE_A + TRIGGER, half + LOAD_A)[1].clean


def test_a_second_wait_does_not_undo_the_first(run):
    """A copy that was issued behind the first lands behind the second."""
    one, two = run(STORE_A + TRIGGER, WAIT + COPY_A + WAIT + DONE)
    assert one.clean and two.clean, str(two)
