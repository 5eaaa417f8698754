# SPDX-License-Identifier: Apache-2.0
"""The counters of a launch that repeat exactly, with one host thread and with several."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import pytest
from bits import HEADER
from vsm.device import Device, pack
from vsm.results import Counters

BLOCKS, THREADS, RUNS = 24, 64, 12
PRELUDE = f""".reg .pred %p, %done; .reg .b32 %r<12>; .reg .f32 %f<8>; .reg .b64 %w<8>; .shared .align 16 .b8 s[256]; .shared .b32 last;
ld.param.u64 %w0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, {THREADS}, %r0; setp.eq.u32 %p, %r0, 0;
mul.wide.u32 %w1, %r2, 4; add.u64 %w1, %w0, %w1; add.u64 %w3, %w0, {4 * BLOCKS * THREADS}; mov.u32 %r4, 0;
shl.b32 %r5, %r0, 2; mov.u32 %r6, s; add.u32 %r6, %r6, %r5;
"""
# Work that differs from block to block: a loop of as many rounds as its number, through shared and global memory, with an MMA.
WORK = """mov.u32 %r7, %r1; mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
L: st.shared.u32 [%r6], %r7; bar.sync 0; ld.shared.u32 %r8, [s+4]; add.u32 %r4, %r4, %r8; bar.sync 0;
mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r8, %r8}, {%r8}, {%f0, %f1, %f2, %f3};
setp.ne.u32 %done, %r7, 0; add.u32 %r7, %r7, -1; @%done bra L; st.global.u32 [%w1], %r4;
"""
MEET = f"""bar.sync 0; @!%p bra M; red.release.gpu.global.add.u32 [%w3], 1;
P: ld.acquire.gpu.global.u32 %r9, [%w3]; setp.ne.u32 %done, %r9, {BLOCKS}; @%done bra P; M: bar.sync 0;
"""
LAST = f"""bar.sync 0; @%p atom.acq_rel.gpu.global.add.u32 %r9, [%w3], 1; @%p st.shared.u32 [last], %r9; bar.sync 0;
ld.shared.u32 %r9, [last]; setp.ne.u32 %done, %r9, {BLOCKS - 1}; @%done exit; ld.global.u32 %r9, [%w1]; st.global.u32 [%w1], %r9;
"""
POLLED = {
    "warp_instructions",
    "thread_instructions",
    "by_class",
    "global_load_bytes",
    "global_sectors",
    "barrier_waits",
}


@pytest.fixture(params=[1, 4], ids=["one host thread", "four host threads"])
def counters_of(request: pytest.FixtureRequest) -> Callable[[str], list[Counters]]:
    def runs(body: str) -> list[Counters]:
        with Device("sm_121a", threads=request.param) as device:
            kernel = device.load(
                f"{HEADER}.visible .entry k(.param .u64 out) {{ {PRELUDE}{body} ret; }}", "counts"
            ).kernel("k")
            found = []
            for _ in range(RUNS):
                out = device.upload(bytes(4 * BLOCKS * THREADS + 4))
                launch = kernel.launch(BLOCKS, THREADS, pack(out))
                assert launch.clean, str(launch)
                (first,) = struct.unpack("I", device.download(out + 4 * THREADS, 4))
                assert first == 1  # 1 + 0 rounds of block 1
                device.release(out)
                found.append(launch.counters)
            return found

    runs.threads = request.param
    return runs


def test_blocks_that_do_not_look_at_each_other(counters_of: Callable[[str], list[Counters]]) -> None:
    first, *rest = counters_of(WORK)
    assert all(counters == first for counters in rest)
    assert first.by_class["mma"] == 2 * sum(range(1, BLOCKS + 1))


def test_who_comes_last(counters_of: Callable[[str], list[Counters]]) -> None:
    """Work that falls to the last block: that block has the same shape as the others, so the sums stay."""
    first, *rest = counters_of(WORK + LAST)
    assert all(counters == first for counters in rest)


def test_blocks_that_poll(counters_of: Callable[[str], list[Counters]]) -> None:
    first, *rest = counters_of(WORK + MEET)
    for counters in rest:
        for field in dataclasses.fields(Counters):
            if counters_of.threads > 1 and field.name in POLLED:
                continue
            assert getattr(counters, field.name) == getattr(first, field.name), field.name
        classes = {"control", "predicate", "load_global"} if counters_of.threads > 1 else set()
        for name, count in counters.by_class.items():
            assert name in classes or count == first.by_class[name], name
