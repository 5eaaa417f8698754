# SPDX-License-Identifier: Apache-2.0
"""Loads, stores, atomics, named barriers, mbarriers, cp.async and bulk copies: PTX ISA 9.0, 9.7.9, 9.7.13, 9.7.13.15."""

from __future__ import annotations

import ctypes
import struct

import pytest
from bits import HEADER, f16, f32, f64, u
from vsm.device import Watch, pack

PRELUDE = """.reg .pred %p, %q; .reg .b16 %h<4>; .reg .b32 %r<10>; .reg .b64 %w<10>; .reg .f32 %f<4>; .reg .b128 %x;
ld.param.u64 %w0, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %w1, %r0, 4; add.u64 %w2, %w0, %w1;
"""
IN = tuple(range(0x100, 0x100 + 64))
DATA = struct.pack("64I", *IN)


def kernel(body: str, declared: str = "") -> str:
    return f"{declared} .visible .entry k(.param .u64 out, .param .u64 in) {{ {PRELUDE} ld.param.u64 %w3, [in]; {body} ret; }}"


def words(out: bytes, count: int = 32) -> tuple[int, ...]:
    return struct.unpack(f"{count}I", out[: 4 * count])


def clean(launch):
    assert launch.clean, str(launch)


LANES = range(32)
STORE = " st.global.u32 [%w2], %r1;"

LOADS = [
    ("ld.global.u8 %r1, [%w3+1];", [1] * 32),
    ("ld.global.s8 %r1, [%w3+252];", [0x3F] * 32),
    ("ld.global.nc.L1::no_allocate.L2::128B.u32 %r1, [%w3+8];", [IN[2]] * 32),
    ("ld.global.v2.u32 {%r2, %r1}, [%w3+8];", [IN[3]] * 32),
    ("ld.global.v4.u32 {_, %r2, _, %r1}, [%w3+16];", [IN[7]] * 32),
    ("ld.global.v8.b32 {%r2, %r3, %r4, %r5, %r6, %r7, %r8, %r1}, [%w3+32];", [IN[15]] * 32),
    ("ld.global.v2.u16 {%h0, %h1}, [%w3+4]; mov.b32 %r1, {%h1, %h0};", [IN[1] << 16] * 32),
    ("ld.global.u64 %w4, [%w3+8]; shr.u64 %w4, %w4, 32; cvt.u32.u64 %r1, %w4;", [IN[3]] * 32),
    ("ld.global.b128 %x, [%w3+16]; mov.b128 {%w4, %w5}, %x; cvt.u32.u64 %r1, %w5;", [IN[6]] * 32),
    ("ld.u32 %r1, [%w3];", [IN[0]] * 32),
    ("ld.acquire.gpu.global.u32 %r1, [%w3];", [IN[0]] * 32),
    ("ld.relaxed.sys.global.u32 %r1, [%w3];", [IN[0]] * 32),
    ("ld.volatile.global.u32 %r1, [%w3];", [IN[0]] * 32),
    ("ld.global.L2::cache_hint.u32 %r1, [%w3], %w3;", [IN[0]] * 32),
    ("add.u64 %w4, %w3, %w1; ld.global.u32 %r1, [%w4+-0];", list(IN[:32])),
    ("st.shared.u32 [s+4], 7; ld.shared.u32 %r1, [s+4];", [7] * 32),
    ("mov.u32 %r2, s; st.shared.v2.u32 [%r2+8], {1, 9}; ld.shared.u32 %r1, [%r2+12];", [9] * 32),
    ("mov.u64 %w4, s; cvta.shared.u64 %w5, %w4; st.u32 [%w5], 5; ld.shared.u32 %r1, [s];", [5] * 32),
    ("st.local.u32 [l+4], %r0; ld.local.u32 %r1, [l+4];", list(LANES)),
    ("mov.u64 %w4, l; cvta.local.u64 %w5, %w4; st.u32 [%w5+8], %r0; ld.local.u32 %r1, [l+8];", list(LANES)),
    ("st.local.s8 [l], %r0; sub.u32 %r2, 0, %r0; st.local.u8 [l], %r2; ld.local.s8 %r1, [l];", [u(-k) for k in LANES]),
    ("ld.const.u32 %r1, [table+4];", [22] * 32),
    ("mov.u64 %w4, variable; ld.global.u32 %r1, [%w4];", [77] * 32),
    ("ld.global.u64 %w4, [pointer]; ld.u32 %r1, [%w4+4];", [22] * 32),
    (
        "prefetch.global.L2 [%w3]; createpolicy.fractional.L2::evict_first.b64 %w4, 0f3F800000; mov.u32 %r1, 1;",
        [1] * 32,
    ),
]
DECLARED = """.const .align 4 .b32 table[3] = {11, 22, 33}; .global .align 4 .b32 variable = 77;
.global .align 8 .u64 pointer = generic(table);"""


@pytest.mark.parametrize(("body", "expected"), LOADS, ids=[x[0] for x in LOADS])
def test_load(run_kernel, body, expected):
    body = ".shared .align 16 .b8 s[64]; .local .align 16 .b8 l[64]; " + body + STORE
    launch, out = run_kernel(kernel(body, DECLARED), inputs=[DATA])
    clean(launch)
    assert words(out) == tuple(expected)


def test_store_is_truncated_to_its_type(run_kernel):
    launch, out = run_kernel(
        kernel("mov.u32 %r1, 0x12345678; st.global.u8 [%w2], %r1; st.global.u16 [%w2+2], %r1;"), inputs=[DATA]
    )
    clean(launch)
    assert words(out) == (0x56780078,) * 32


def atomic_rows():
    total = sum(LANES)
    return [
        ("atom.global.add.u32 %r1, [%w0+512], %r0;", 0, total, None),
        ("red.global.add.u32 [%w0+512], %r0;", 0, total, None),
        ("red.relaxed.gpu.global.max.s32 [%w0+512], %r0;", u(-5), 31, None),
        ("red.global.min.u32 [%w0+512], %r0;", 100, 0, None),
        ("atom.global.inc.u32 %r1, [%w0+512], 9;", 0, 32 % 10, None),
        ("atom.global.dec.u32 %r1, [%w0+512], 9;", 0, 8, None),
        ("atom.global.or.b32 %r1, [%w0+512], %r0;", 64, 95, None),
        ("atom.global.and.b32 %r1, [%w0+512], 12;", 10, 8, None),
        ("red.global.xor.b32 [%w0+512], %r0;", 1, 1, None),
        ("atom.acq_rel.gpu.global.exch.b32 %r1, [%w0+512], 5;", 9, 5, None),
        ("atom.global.cas.b32 %r1, [%w0+512], 9, %r0;", 9, 0, None),
        ("cvt.rn.f32.u32 %f0, %r0; atom.global.add.f32 %f1, [%w0+512], %f0;", f32(0.5), f32(total + 0.5), None),
        ("mov.b32 %r2, 0x3C003C00; red.global.add.noftz.f16x2 [%w0+512], %r2;", 0, f16(32) << 16 | f16(32), None),
        ("mov.b32 %r2, 0x3F803F80; red.global.add.noftz.bf16x2 [%w0+512], %r2;", 0, 0x42004200, None),
    ]


@pytest.mark.parametrize(("body", "initial", "final", "_"), atomic_rows(), ids=[a[0] for a in atomic_rows()])
def test_atomic(run_kernel, body, initial, final, _):
    launch, out = run_kernel(
        kernel(f"setp.eq.u32 %p, %r0, 0; @%p st.global.u32 [%w0+512], {initial}; bar.warp.sync -1; {body}"),
        inputs=[DATA],
    )
    clean(launch)
    assert hex(struct.unpack_from("I", out, 512)[0]) == hex(final)


def test_atomic_64_bits_and_vectors(run_kernel):
    body = """cvt.u64.u32 %w4, %r0; atom.global.add.u64 %w5, [%w0+512], %w4; mov.f32 %f0, 0f3F800000;
    red.global.add.v2.f32 [%w0+528], {%f0, %f0}; cvt.rn.f64.u32 %w6, %r0; red.global.add.f64 [%w0+544], %w6;"""
    launch, out = run_kernel(kernel(body), inputs=[DATA])
    clean(launch)
    assert struct.unpack_from("Q", out, 512)[0] == 496
    assert struct.unpack_from("2I", out, 528) == (f32(32), f32(32))
    assert struct.unpack_from("Q", out, 544)[0] == f64(496)


def test_atomics_of_many_blocks(run_kernel):
    launch, out = run_kernel(kernel("atom.global.add.u32 %r1, [%w0+512], 1;"), grid=64, block=128, inputs=[DATA])
    clean(launch)
    assert struct.unpack_from("I", out, 512)[0] == 64 * 128


def test_blocks_may_wait_for_one_another(run_kernel):
    """Every block waits until all 40 have arrived: they have to be resident together."""
    body = """setp.ne.u32 %p, %r0, 0; @%p exit; atom.global.add.u32 %r1, [%w0], 1;
    SPIN: ld.acquire.gpu.global.u32 %r2, [%w0]; setp.lt.u32 %q, %r2, 40; @%q bra SPIN; red.global.add.u32 [%w0+4], 1;"""
    launch, out = run_kernel(kernel(body), grid=40, inputs=[DATA], max_warp_instructions=100_000_000)
    clean(launch)
    assert words(out, 2) == (40, 40)


# --- named barriers ---------------------------------------------------------------------------------------------------


def test_bar_sync_orders_shared_memory(run_kernel):
    body = (
        """.shared .align 4 .b32 s[128]; mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r3, %r2, %r3; st.shared.u32 [%r3], %r0;
    bar.sync 0; sub.u32 %r4, 127, %r0; shl.b32 %r4, %r4, 2; add.u32 %r4, %r4, %r2; ld.shared.u32 %r1, [%r4];"""
        + STORE
    )
    launch, out = run_kernel(kernel(body), block=128, inputs=[DATA])
    clean(launch)
    assert words(out, 128) == tuple(127 - k for k in range(128))


def test_bar_arrive_and_sync_with_counts(run_kernel):
    """Warp 0 produces and arrives, warp 1 waits; two other warps use another barrier."""
    body = """.shared .align 4 .b32 s[2]; setp.ge.u32 %p, %r0, 32; @%p bra OTHERS; st.shared.u32 [s], 42; bar.arrive 1, 64; bra END;
    OTHERS: setp.ge.u32 %p, %r0, 64; @%p bra MORE; bar.sync 1, 64; ld.shared.u32 %r1, [s]; st.global.u32 [%w2], %r1; bra END;
    MORE: bar.sync 2, 64; mov.u32 %r1, 7; st.global.u32 [%w2], %r1; END:"""
    launch, out = run_kernel(kernel(body), block=128, inputs=[DATA])
    clean(launch)
    assert words(out, 128) == (0,) * 32 + (42,) * 32 + (7,) * 64


def test_bar_red(run_kernel):
    body = (
        """setp.lt.u32 %p, %r0, 40; bar.red.popc.u32 %r1, 0, %p; bar.red.and.pred %q, 1, %p; selp.u32 %r2, 100, 0, %q; add.u32 %r1, %r1, %r2;
    bar.red.or.pred %q, 2, 64, %p; selp.u32 %r2, 1000, 0, %q; add.u32 %r1, %r1, %r2;"""
        + STORE
    )
    launch, out = run_kernel(kernel(body), block=64, inputs=[DATA])
    clean(launch)
    assert words(out, 64) == (1040,) * 64


def test_cluster_barrier_of_one_block(run_kernel):
    body = (
        """.shared .align 4 .b32 s; setp.eq.u32 %p, %r0, 0; @%p st.shared.u32 [s], 3; barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned; ld.shared.u32 %r1, [s];"""
        + STORE
    )
    launch, out = run_kernel(kernel(body), block=64, inputs=[DATA])
    clean(launch)
    assert words(out, 64) == (3,) * 64


# --- mbarriers and asynchronous copies --------------------------------------------------------------------------------

INIT = """setp.eq.u32 %p, %r0, 0; @%p mbarrier.init.shared::cta.b64 [bar], COUNT; fence.mbarrier_init.release.cluster; bar.sync 0;"""


def test_mbarrier_phases(run_kernel):
    """Two phases of 64 arrivals; parity waits; the phase before the first counts as complete."""
    body = (
        ".shared .align 8 .b64 bar; .shared .align 4 .b32 s[64]; "
        + INIT.replace("COUNT", "64")
        + """
    mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 1; selp.u32 %r1, 1, 0, %q;
    mbarrier.test_wait.parity.shared::cta.b64 %q, [bar], 0; selp.u32 %r2, 2, 0, %q; bar.sync 0; add.u32 %r1, %r1, %r2;
    mbarrier.arrive.shared::cta.b64 %w4, [bar];
    W0: mbarrier.try_wait.shared::cta.b64 %q, [bar], %w4; @!%q bra W0;
    mbarrier.arrive.shared::cta.b64 _, [bar];
    W1: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 1, 1000; @!%q bra W1;
    mbarrier.pending_count.b64 %r3, %w4; setp.gt.u32 %q, %r3, 0; selp.u32 %r3, 100, 0, %q; add.u32 %r1, %r1, %r3;
    bar.sync 0; setp.eq.u32 %p, %r0, 0; @%p mbarrier.inval.shared::cta.b64 [bar];"""
        + STORE
    )
    launch, out = run_kernel(kernel(body), block=64, inputs=[DATA])
    clean(launch)
    assert words(out, 64) == (101,) * 64


def test_bulk_copy_in_and_out(run_kernel):
    """256 bytes in by a bulk copy that an mbarrier tracks, doubled, and out again after a proxy fence."""
    body = (
        ".shared .align 128 .b8 s[256]; .shared .align 8 .b64 bar; "
        + INIT.replace("COUNT", "1")
        + """
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    @%p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%w3], 256, [bar];
    W: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 0; @!%q bra W;
    mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r2, %r2, %r3; ld.shared.u32 %r1, [%r2]; add.u32 %r1, %r1, %r1; st.shared.u32 [%r2], %r1;
    fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p, %r0, 0; @!%p exit;
    cp.async.bulk.global.shared::cta.bulk_group [%w0], [s], 256; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    )
    launch, out = run_kernel(kernel(body), block=64, inputs=[DATA])
    clean(launch)
    assert words(out, 64) == tuple(2 * v for v in IN)
    assert launch.counters.async_load_bytes == launch.counters.async_store_bytes == 256


def test_bulk_copy_with_a_byte_mask(run_kernel):
    """``.cp_mask``: of each 16 bytes those whose bit is set are copied; the others need not even be memory of the kernel."""
    body = """mul.lo.u32 %r2, %r0, 0x01010101; mov.u32 %r3, s; mad.lo.u32 %r3, %r0, 4, %r3; add.u32 %r2, %r2, 0x80808080;
    st.shared.u32 [%r3], %r2; bar.sync 0; fence.proxy.async.shared::cta; setp.eq.u32 %p, %r0, 0; mov.u16 %h0, MASK;
    @%p cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%w0+BEGIN], [s], 48, %h0;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    declared = ".shared .align 16 .b8 s[128];"
    for mask in (0x0000, 0x8001, 0x7FFF, 0x0FF0, 0xFFFF):
        launch, out = run_kernel(kernel(body.replace("MASK", str(mask)).replace("BEGIN", "0"), declared), inputs=[DATA])
        clean(launch)
        expected = [0x80 + i // 4 if mask >> i % 16 & 1 else 0 for i in range(48)]
        assert list(out[:64]) == expected + [0] * 16
        assert launch.counters.async_store_bytes == 3 * bin(mask).count("1")
    # The first 12 bytes lie before the allocation.
    text = kernel(body.replace("MASK", str(0xF000)).replace("BEGIN", "-16"), declared).replace(
        "], [s], 48", "], [s], 16"
    )
    launch, _ = run_kernel(text, inputs=[DATA])
    assert (launch.status, launch.reports[0].kind) == ("fault", "out of bounds")


def test_bulk_reduction(run_kernel):
    body = """.shared .align 128 .b8 s[256]; shl.b32 %r3, %r0, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r3; st.shared.u32 [%r2], %r0;
    st.global.u32 [%w2], 1000; fence.proxy.async; bar.sync 0; setp.eq.u32 %p, %r0, 0; @!%p exit;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%w0], [s], 256; cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"""
    launch, out = run_kernel(kernel(body), block=64, inputs=[DATA])
    clean(launch)
    assert words(out, 64) == tuple(1000 + k for k in range(64))


def test_cp_async_groups(run_kernel):
    """Two groups; the second copies 4 of 16 bytes and fills the rest with zeros."""
    body = (
        """.shared .align 16 .b8 s[1024]; shl.b32 %r3, %r0, 4; mov.u32 %r2, s; add.u32 %r2, %r2, %r3; cvt.u64.u32 %w4, %r3; and.b64 %w4, %w4, 240; add.u64 %w4, %w3, %w4;
    cp.async.cg.shared.global [%r2], [%w4], 16; cp.async.commit_group; cp.async.cg.shared.global [%r2+512], [%w4], 16, 4; cp.async.commit_group;
    cp.async.wait_group 1; ld.shared.u32 %r1, [%r2+4]; cp.async.wait_all; ld.shared.v2.u32 {%r4, %r5}, [%r2+512]; add.u32 %r1, %r1, %r4; add.u32 %r1, %r1, %r5;"""
        + STORE
    )
    launch, out = run_kernel(kernel(body), inputs=[DATA])
    clean(launch)
    assert words(out) == tuple(IN[4 * (k % 16) + 1] + IN[4 * (k % 16)] for k in LANES)


def test_cp_async_mbarrier_arrive(run_kernel):
    body = (
        ".shared .align 16 .b8 s[512]; .shared .align 8 .b64 bar; "
        + INIT.replace("COUNT", "32")
        + """
    shl.b32 %r3, %r0, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r3; add.u64 %w4, %w3, %w1; cp.async.ca.shared.global [%r2], [%w4], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [bar];
    W: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 0; @!%q bra W; ld.shared.u32 %r1, [%r2];"""
        + STORE
    )
    launch, out = run_kernel(kernel(body), inputs=[DATA])
    clean(launch)
    assert words(out) == IN[:32]


def test_a_block_that_polls_leaves_the_others_their_time(run_kernel):
    """And its polls do not fill the counters: they depend on how fast the host's threads are."""
    body = """
    mov.u32 %r1, %ctaid.x; setp.ne.u32 %p, %r1, 0; @%p bra WORK;
    POLL: nanosleep.u32 32; ld.acquire.gpu.global.u32 %r1, [%w0]; setp.eq.u32 %p, %r1, 0; @%p bra POLL;
    bra END;
    WORK: mov.u32 %r1, 0;
    LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %q, %r1, 50000; @%q bra LOOP;
    mov.u32 %r1, 1; st.release.gpu.global.u32 [%w0], %r1;
    END:"""
    launch, out = run_kernel(kernel(body), grid=2, inputs=[DATA])
    clean(launch)
    assert words(out, 1) == (1,)
    work = 3 * 50000
    assert work < launch.counters.warp_instructions < work + 20000


def test_a_copy_takes_its_time(run_kernel):
    """A bulk copy's data is not there when the instruction has been issued, and reading it then is reported."""
    body = (
        ".shared .align 128 .b8 s[256]; .shared .align 8 .b64 bar; "
        + INIT.replace("COUNT", "1")
        + """
    @!%p exit; st.shared.u32 [s], 1; fence.proxy.async; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%w3], 256, [bar]; ld.shared.u32 %r1, [s];
    W: mbarrier.try_wait.parity.shared::cta.b64 %q, [bar], 0; @!%q bra W;"""
        + STORE
    )
    launch, out = run_kernel(kernel(body), inputs=[DATA])
    assert launch.status == "ok"
    assert [r.kind for r in launch.reports] == ["missing wait"], str(launch)
    assert words(out, 1) == (1,)


# --- prefetches -------------------------------------------------------------------------------------------------------

BULK_PREFETCH = "cp.async.bulk.prefetch.L2.global"
PREFETCH_FORMS = [
    "prefetch.global.L1",
    "prefetch.global.L2",
    "prefetch.global.L2::evict_last",
    "prefetch.global.L2::evict_normal",
]


@pytest.fixture
def prefetch_at(device):
    """``prefetch_at(instruction, *sizes)``: one thread runs it with %w3 256 bytes into 1024 bytes of the host, of which
    the device knows only neighbouring allocations of these sizes, from %w3 on; the launch and %w3."""

    def run(instruction: str, *sizes: int):
        host = ctypes.create_string_buffer(1024 + 256)
        address = -(-ctypes.addressof(host) // 256) * 256 + 256
        module = device.load(
            HEADER + kernel(f"setp.eq.u32 %p, %r0, 0; mov.u32 %r1, 32;\n@%p {instruction}"), "prefetch"
        )
        out, at = device.upload(bytes(256)), address
        for size in sizes:
            device.register(at, size)
            at += size
        try:
            return module.kernel("k").launch(1, 32, pack(out, address), watch=Watch.ALL), address
        finally:
            for size in reversed(sizes):
                at -= size
                device.unregister(at)
            device.release(out)
            module.unload()

    return run


@pytest.mark.parametrize(
    ("operands", "counted"),
    [
        ("[%w3], 256", 256),
        ("[%w3], 16", 16),
        ("[%w3+240], 16", 16),
        ("[%w3+16], %r1", 32),
        # Of no bytes, wherever: nothing to check.
        ("[%w3+256], 0", 0),
        ("[%w3-256], 0", 0),
    ],
)
def test_a_bulk_prefetch_inside_an_allocation_is_counted(prefetch_at, operands, counted):
    launch, _ = prefetch_at(f"{BULK_PREFETCH} {operands};", 256)
    clean(launch)
    n = launch.counters
    assert n.prefetched_bytes == counted
    assert (n.async_load_bytes, n.global_load_bytes, n.global_sectors, n.global_distinct_bytes) == (0, 0, 0, 0)


def test_bulk_prefetches_are_counted_by_lane_and_summed_over_blocks(run_kernel):
    launch, _ = run_kernel(
        kernel(f"and.b64 %w4, %w1, 112; add.u64 %w4, %w3, %w4; {BULK_PREFETCH}.L2::cache_hint [%w4], 48, %w3;"),
        grid=3,
        inputs=[DATA],
    )
    clean(launch)
    assert launch.counters.prefetched_bytes == 3 * 32 * 48


@pytest.mark.parametrize(
    ("offset", "size", "where"),
    [
        (-16, 32, "16 bytes before an allocation of 256 bytes"),
        (-16, 16, "16 bytes before an allocation of 256 bytes"),
        (0, 272, "an allocation of 256 bytes"),
        (240, 32, "an allocation of 256 bytes"),
        (256, 16, "0 bytes behind the end of an allocation of 256 bytes"),
        (0, 0xFFFFFFF0, "an allocation of 256 bytes"),
    ],
)
def test_a_bulk_prefetch_beyond_an_allocation_is_reported(prefetch_at, offset, size, where):
    launch, address = prefetch_at(f"{BULK_PREFETCH} [%w3+{offset}], {size};", 256)
    (report,) = launch.reports
    assert (launch.status, report.kind) == ("fault", "out of bounds"), str(launch)
    assert f"the prefetch of {size} bytes of global memory" in report.text and where in report.text
    assert (report.space, report.address, report.lane) == ("global", address + offset, 0)
    assert BULK_PREFETCH in report.instruction
    assert launch.counters.prefetched_bytes == 0


def test_a_bulk_prefetch_across_two_allocations_is_reported(prefetch_at):
    """The bytes are all there, as of two tensors that happen to lie side by side."""
    launch, address = prefetch_at(f"{BULK_PREFETCH} [%w3+240], 32;", 256, 256)
    (report,) = launch.reports
    assert (launch.status, report.kind, report.address) == ("fault", "out of bounds", address + 240), str(launch)
    assert "the prefetch of 32 bytes" in report.text
    for offset, sizes in ((224, (256, 256)), (256, (256, 256)), (240, (512,))):
        launch, _ = prefetch_at(f"{BULK_PREFETCH} [%w3+{offset}], 32;", *sizes)
        clean(launch)
        assert launch.counters.prefetched_bytes == 32


@pytest.mark.parametrize("form", PREFETCH_FORMS)
def test_a_plain_prefetch_names_an_address_of_an_allocation(prefetch_at, form):
    """Any address, of whatever alignment. The line around it may hang over; no bytes of it are counted."""
    for offset in (0, 1, 255):
        launch, _ = prefetch_at(f"{form} [%w3+{offset}];", 256)
        clean(launch)
        assert (launch.counters.prefetched_bytes, launch.counters.global_distinct_bytes) == (0, 0)
    for offset, where in (
        (-1, "1 bytes before"),
        (256, "0 bytes behind the end of"),
        (300, "44 bytes behind the end of"),
    ):
        launch, address = prefetch_at(f"{form} [%w3+{offset}];", 256)
        (report,) = launch.reports
        assert (launch.status, report.kind) == ("fault", "out of bounds"), str(launch)
        assert report.text == f"the prefetch of a line of global memory: {where} an allocation of 256 bytes"
        assert (report.space, report.address, report.lane) == ("global", address + offset, 0)


@pytest.mark.parametrize(
    ("operands", "text"),
    [
        ("[%w3+8], 16", "the global address must be 16-byte aligned"),
        ("[%w3+8], 0", "the global address must be 16-byte aligned"),
        ("[%w3], 24", "the size 24 is not a multiple of 16"),
    ],
)
def test_a_misaligned_bulk_prefetch_is_reported(prefetch_at, operands, text):
    launch, _ = prefetch_at(f"{BULK_PREFETCH} {operands};", 256)
    (report,) = launch.reports
    assert (launch.status, report.kind, report.text) == ("fault", "misaligned", text)


@pytest.mark.parametrize("instruction", [f"{BULK_PREFETCH} [%w3], 256;", "prefetch.global.L2 [%w3];"])
def test_a_prefetch_does_not_read(device, instruction):
    """Memory that nothing wrote is no fault of a prefetch. A load of it is one."""
    for body, kinds in ((instruction, []), (instruction + " ld.global.u32 %r1, [%w3];", ["uninitialized read"])):
        module = device.load(HEADER + kernel(body), "prefetch")
        out, nothing = device.upload(bytes(256)), device.allocate(256)
        launch = module.kernel("k").launch(1, 32, pack(out, nothing), watch=Watch.ALL)
        assert [report.kind for report in launch.reports] == kinds, str(launch)
        device.release(nothing)
        device.release(out)
        module.unload()


# --- counters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "sectors", "conflicts"), [(4, 4, 0), (8, 8, 1), (32, 32, 7), (128, 32, 31)], ids=lambda v: str(v)
)
def test_sectors_and_bank_conflicts(run_kernel, stride, sectors, conflicts):
    body = f""".shared .align 128 .b8 s[4096]; mul.lo.u32 %r2, %r0, {stride}; mov.u32 %r3, s; add.u32 %r3, %r3, %r2; st.shared.u32 [%r3], %r0;
    cvt.u64.u32 %w4, %r2; add.u64 %w4, %w0, %w4; st.global.u32 [%w4], %r0;"""
    launch, _ = run_kernel(kernel(body), inputs=[DATA])
    clean(launch)
    n = launch.counters
    assert (n.global_sectors, n.global_distinct_bytes, n.shared_bank_conflicts) == (sectors, 32 * sectors, conflicts)
    assert (n.global_store_bytes, n.shared_accesses, n.shared_wavefronts) == (128, 1, conflicts + 1)


def wavefronts(addresses: list[int], width: int) -> int:
    """Passes over 32 banks of 4 bytes: 32, 16 or 8 lanes at a time for accesses of up to 4, 8 and 16 bytes a lane."""
    lanes = {8: 16, 16: 8}.get(width, 32)
    total = 0
    for first in range(0, len(addresses), lanes):
        words = {a // 4 + i for a in addresses[first : first + lanes] for i in range(max(1, width // 4))}
        total += max(sum(word % 32 == bank for word in words) for bank in range(32))
    return total


# width, address of a lane as an expression of `l`, wavefronts counted by hand
@pytest.mark.parametrize(
    ("width", "address", "expected"),
    [
        (1, "l", 1),  # lanes that share a word share a pass
        (2, "2 * l", 1),
        (4, "4 * (l % 2)", 1),
        (4, "4 * (31 - l)", 1),
        (4, "132 * l", 1),
        (4, "128 * (l // 2)", 16),
        (4, "16 * (l // 4) + 128 * (l % 2)", 2),  # words of 16 rows, 16 bytes apart
        (8, "8 * l", 2),
        (8, "16 * l", 4),
        (8, "0", 2),
        (8, "128 * l", 32),
        (16, "16 * l", 4),
        (16, "32 * l", 8),
        (16, "128 * l", 32),
        (16, "144 * l", 4),
        (16, "128 * (l % 8) + 16 * ((l // 8) ^ (l % 8))", 4),  # a swizzle of 128 bytes: eight chunks of a column
        (16, "16 * (l // 4) + 128 * (l % 4)", 16),
    ],
)
@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
def test_wavefronts_by_width(run_kernel, width, address, expected, store):
    addresses = [eval(address, {"l": lane}) for lane in range(32)]
    assert wavefronts(addresses, width) == expected
    registers = {8: "{%r4, %r5}", 16: "{%r4, %r5, %r6, %r7}"}.get(width, "%r4")
    form = {1: "u8", 2: "u16", 4: "u32", 8: "v2.u32", 16: "v4.u32"}[width]
    table = ", ".join(map(str, addresses))
    access = f"st.shared.{form} [%r2], {registers};" if store else f"ld.shared.{form} {registers}, [%r2];"
    body = f""".shared .align 128 .b8 s[8192]; mov.u32 %r3, s; mov.u32 %r4, 0; mov.u32 %r5, 0; mov.u32 %r6, 0; mov.u32 %r7, 0;
    mul.lo.u32 %r2, %r0, 4; cvt.u64.u32 %w4, %r2; mov.u64 %w5, at; add.u64 %w4, %w4, %w5; ld.global.u32 %r2, [%w4];
    add.u32 %r2, %r2, %r3; {access}"""
    declared = f".global .align 4 .u32 at[32] = {{{table}}};"
    launch, _ = run_kernel(kernel(body, declared), inputs=[DATA], watch=Watch.NONE)
    clean(launch)
    n = launch.counters
    least = {8: 2, 16: 4}.get(width, 1)
    assert (n.shared_accesses, n.shared_wavefronts, n.shared_bank_conflicts) == (1, expected, expected - least)


@pytest.mark.parametrize(
    ("matrices", "pitch", "expected"),
    [(1, 16, 1), (1, 128, 8), (2, 16, 2), (4, 16, 4), (4, 32, 8), (4, 128, 32), (4, 144, 4)],
)
def test_wavefronts_of_ldmatrix(run_kernel, matrices, pitch, expected):
    """Eight rows of 16 bytes to a pass; lanes whose addresses the form does not use do not count."""
    rows = 8 * matrices
    assert wavefronts([pitch * row for row in range(rows)], 16) == expected
    registers = ", ".join(f"%r{4 + i}" for i in range(matrices))
    body = f""".shared .align 128 .b8 s[8192]; mov.u32 %r3, s; and.b32 %r2, %r0, {rows - 1}; mad.lo.u32 %r2, %r2, {pitch}, %r3;
    ldmatrix.sync.aligned.m8n8.x{matrices}.shared.b16 {{{registers}}}, [%r2];"""
    launch, _ = run_kernel(kernel(body), inputs=[DATA], watch=Watch.NONE)
    clean(launch)
    n = launch.counters
    assert (n.shared_accesses, n.shared_wavefronts, n.shared_bank_conflicts) == (1, expected, expected - matrices)
