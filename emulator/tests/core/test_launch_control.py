# SPDX-License-Identifier: Apache-2.0
"""Blocks that take over the work of others (``clusterlaunchcontrol``), and cooperative grids."""

from __future__ import annotations

import struct

import pytest
from bits import HEADER
from vsm.device import Device, Watch, pack

# A block adds 1 to out[its index], then takes blocks over one by one and adds 0x100 to the entry of each.
WORKER = """
.visible .entry k(.param .u64 out, .param .u64 taken) {
 .reg .pred %p, %lead; .reg .b32 %r<12>; .reg .b64 %w<8>; .reg .b128 %q;
 .shared .align 16 .b8 response[16]; .shared .align 8 .b64 bar;
 ld.param.u64 %w0, [out]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ctaid.y; mov.u32 %r2, %ctaid.z; mov.u32 %r9, 1;
 mov.u32 %r3, %tid.x; setp.eq.u32 %lead, %r3, 0; mov.u32 %r8, 0;
 @%lead mbarrier.init.shared.b64 [bar], 1; fence.proxy.async.shared::cta; bar.sync 0;
NEXT:
 mov.u32 %r4, %nctaid.x; mov.u32 %r5, %nctaid.y; mad.lo.u32 %r6, %r2, %r5, %r1; mad.lo.u32 %r6, %r6, %r4, %r0;
 mul.wide.u32 %w1, %r6, 4; add.u64 %w1, %w0, %w1;
 @%lead red.global.add.u32 [%w1], %r9; mov.u32 %r9, 256;
 bar.sync 0; fence.proxy.async.shared::cta;
 @%lead mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
 mov.u32 %r10, response; mov.u32 %r11, bar;
 @%lead clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r10], [%r11];
WAIT:
 mbarrier.try_wait.parity.shared.b64 %p, [bar], %r8; @!%p bra WAIT;
 xor.b32 %r8, %r8, 1;
 ld.shared.v2.b64 {%w2, %w3}, [response]; mov.b128 %q, {%w2, %w3};
 clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, %q;
 @!%p bra DONE;
 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r0, %r1, %r2, _}, %q;
 clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r7, %q; sub.u32 %r7, %r7, %r1; add.u32 %r1, %r1, %r7;
 bra NEXT;
DONE:
 ASK_AGAIN
 ret; }
"""


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_block_is_done_once(threads):
    grid = (5, 3, 4)
    n = 60
    with Device("sm_121a", threads=threads) as device:
        module = device.load(HEADER + WORKER.replace("ASK_AGAIN", ""))
        out = device.upload(bytes(4 * n))
        launch = module.kernel("k").launch(grid, 64, pack(out, out), watch=Watch.ALL)
        assert launch.clean, str(launch)
        values = struct.unpack(f"<{n}I", device.download(out, 4 * n))
    assert set(values) <= {1, 0x100}
    started = values.count(1)
    assert 1 <= started == launch.counters.blocks
    if threads == 1:  # a block that never waits for another takes all that is left
        assert values == (1, *[0x100] * (n - 1))


def test_a_refused_request_names_no_block(device):
    ask = "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r0, %q;"
    module = device.load(HEADER + WORKER.replace("ASK_AGAIN", ask))
    out = device.upload(bytes(4))
    launch = module.kernel("k").launch(1, 32, pack(out, out))
    assert launch.status == "fault"
    assert "names no block" in launch.message
    device.release(out)


def test_a_response_that_nobody_waits_for_is_reported(device):
    source = WORKER[: WORKER.index("WAIT:")].replace("NEXT:", "") + " ret; }"
    out = device.upload(bytes(4))
    launch = device.load(HEADER + source).kernel("k").launch(1, 32, pack(out, out))
    assert [r.kind for r in launch.reports] == ["undefined behaviour"]
    assert "not waited for" in launch.reports[0].text
    device.release(out)


GRID = ".visible .entry k(.param .u64 out) { .reg .b32 %r<2>; .reg .b64 %w; ld.param.u64 %w, [out]; "
GRID += "mov.u32 %r0, %envreg2; mov.u32 %r1, %envreg1; st.global.v2.u32 [%w], {%r0, %r1}; ret; }"


def test_the_address_of_the_grid_barrier(device):
    """``%envreg1:%envreg2``: 0 without the cooperative attribute."""
    kernel = device.load(HEADER + GRID).kernel("k")
    out = device.upload(bytes(8))
    for cooperative in (True, False):
        assert kernel.launch(1, 1, pack(out), cooperative=cooperative).clean
        assert (device.download(out, 8) != bytes(8)) == cooperative
    refused = kernel.launch(48 * 24 + 1, 1, pack(out), cooperative=True)
    assert (refused.status, "1152 are resident" in refused.message) == ("refused", True)
    device.release(out)
