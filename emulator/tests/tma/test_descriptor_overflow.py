# SPDX-License-Identifier: Apache-2.0
"""A tensor map that claims more than its allocation holds: the copy that uses it is out of bounds and says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pure_functions import Descriptor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from vsm.device import Device, Watch, pack
from vsm.results import Launch

ROWS, PITCH = 40, 128  # of the allocation: bytes
BOX = 8  # rows
F32, U4P = 7, 14
HEADER = ".version 9.0\n.target sm_121a\n.address_size 64\n"
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [s], [%m, {%x, %y}], [bar];",
    "W: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;",
)
STORE = (
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%m, {%x, %y}], [s];",
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
)
ADD = (STORE[0].replace("cp.async", "cp.reduce.async").replace(".tile", ".add.tile"), STORE[1])
COPIES = {"load": LOAD, "store": STORE, "reduction": ADD}
COPY_LINE = 9


def kernel(copy: tuple[str, str]) -> str:
    """One thread fills 4 KiB of shared memory, copies a box at row ``y`` and waits for it."""
    expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %n;" if "mbarrier" in copy[0] else ""
    return f"""{HEADER}.visible .entry k(.param .align 64 .b8 map[128], .param .u64 y, .param .u64 bytes) {{
.reg .b64 %m, %q; .reg .b32 %a, %i, %n, %x, %y; .reg .pred %p; .shared .align 1024 .b8 s[4096]; .shared .align 8 .b64 bar;
ld.param.u64 %q, [y]; cvt.u32.u64 %y, %q; ld.param.u64 %q, [bytes]; cvt.u32.u64 %n, %q; mov.u32 %x, 0; mov.u32 %a, s; mov.u32 %i, 0;
F: st.shared.u32 [%a], 0; add.u32 %a, %a, 4; add.u32 %i, %i, 4; setp.lt.u32 %p, %i, 4096; @%p bra F;
mbarrier.init.shared::cta.b64 [bar], 1; fence.proxy.async; mov.b64 %m, map; cvta.param.u64 %m, %m; {expect}
{copy[0]}
{copy[1]} ret; }}"""


@pytest.fixture
def device() -> Iterator[Device]:
    with Device("sm_121a", threads=1) as value:
        yield value


def run(device: Device, copy: tuple[str, str], y: int, rows: int, **changes) -> Launch:
    """The copy of ``BOX`` rows from row ``y`` of a map that claims ``rows`` of them."""
    fields = {"type": F32, "dims": [PITCH // 4, rows], "strides": [PITCH], "box": [PITCH // 4, BOX], **changes}
    memory = device.upload(bytes(ROWS * PITCH))
    descriptor = Descriptor(memory, **fields)
    assert descriptor.check() == "", "the map itself breaks no rule: only its size is wrong"
    module = device.load(kernel(copy), "descriptor overflow")
    parameters = pack(descriptor.encode().tobytes(), y, descriptor.box_bytes())
    launch = module.kernel("k").launch(1, 1, parameters, watch=Watch.ALL)
    module.unload()
    device.release(memory)
    return launch


@pytest.mark.parametrize("rows", [ROWS + 1, 2 * ROWS, 1 << 20])
@pytest.mark.parametrize("copy", COPIES)
def test_planted_fault_is_named(device: Device, copy: str, rows: int) -> None:
    """The box lies across the end of the allocation, or one byte row after it."""
    for y in (ROWS - BOX + 1, ROWS):
        launch = run(device, COPIES[copy], y, rows)
        (report,) = launch.reports
        assert report.kind == "out of bounds", str(launch)
        assert "behind the end of an allocation of 5120 bytes" in report.text
        assert ("reads" if copy == "load" else "writes") in report.text
        assert (report.kernel, report.line, report.lane, report.space) == ("k", COPY_LINE, 0, "global")
        assert launch.status == "fault"


@pytest.mark.parametrize("copy", COPIES)
def test_clean_twin_is_silent(device: Device, copy: str) -> None:
    """The same boxes with a map of the allocation's size: what lies beyond is filled or skipped, not touched."""
    for y in (0, ROWS - BOX, ROWS - BOX + 1, ROWS):
        launch = run(device, COPIES[copy], y, ROWS)
        assert launch.clean, str(launch)


@pytest.mark.parametrize("copy", COPIES)
def test_a_box_that_stays_inside_is_silent(device: Device, copy: str) -> None:
    """A map that claims too much does no harm to a copy that keeps to what is there."""
    for y in (0, ROWS - BOX):
        launch = run(device, COPIES[copy], y, 2 * ROWS)
        assert launch.clean, str(launch)


def test_too_long_a_pitch(device: Device) -> None:
    """As many rows as there are, but farther apart: the last ones lie behind the end."""
    launch = run(device, LOAD, ROWS - BOX, ROWS, strides=[PITCH + 16])
    assert [report.kind for report in launch.reports] == ["out of bounds"], str(launch)


def test_packed_4_bit_rows(device: Device) -> None:
    """128 elements of 4 bits are 64 bytes of global memory: 80 rows are the allocation, 81 are not."""
    fields = {"type": U4P, "dims": [128, 81], "strides": [64], "box": [128, BOX]}
    launch = run(device, LOAD, 73, 81, **fields)
    assert [report.kind for report in launch.reports] == ["out of bounds"], str(launch)
    assert run(device, LOAD, 73, 80, **{**fields, "dims": [128, 80]}).clean
