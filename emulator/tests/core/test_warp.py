# SPDX-License-Identifier: Apache-2.0
"""Lanes among themselves, and where they part: PTX ISA 9.0, 9.7.9.6, 9.7.12, 9.7.13.10 to 9.7.13.14."""

from __future__ import annotations

import struct

import pytest

M32 = 2**32 - 1


def lanes(function):
    return [function(k) & M32 for k in range(32)]


ALL = [()] * 32
LANE = "mov.u32 %t0, %laneid; "

FORMS = [
    ("shfl.sync.up.b32 %d, %t0, 4, 0, -1;", lanes(lambda k: k - 4 if k >= 4 else k)),
    ("shfl.sync.down.b32 %d, %t0, 4, 31, -1;", lanes(lambda k: k + 4 if k < 28 else k)),
    ("shfl.sync.bfly.b32 %d, %t0, 5, 31, -1;", lanes(lambda k: k ^ 5)),
    ("shfl.sync.idx.b32 %d, %t0, 7, 31, -1;", lanes(lambda k: 7)),
    # c = 0x1807: segments of 8 lanes
    ("shfl.sync.idx.b32 %d, %t0, 2, 0x1807, -1;", lanes(lambda k: (k & 24) + 2)),
    ("shfl.sync.down.b32 %d, %t0, 3, 0x1807, -1;", lanes(lambda k: k + 3 if k % 8 < 5 else k)),
    ("shfl.sync.up.b32 %t1|%p, %t0, 4, 0, -1; selp.b32 %d, 1, 0, %p;", lanes(lambda k: int(k >= 4))),
    ("setp.lt.u32 %p, %t0, 5; vote.sync.ballot.b32 %d, %p, -1;", [31] * 32),
    ("setp.lt.u32 %p, %t0, 5; vote.sync.any.pred %q, %p, -1; selp.b32 %d, 1, 0, %q;", [1] * 32),
    ("setp.lt.u32 %p, %t0, 5; vote.sync.all.pred %q, %p, -1; selp.b32 %d, 1, 0, %q;", [0] * 32),
    ("setp.lt.u32 %p, %t0, 32; vote.sync.uni.pred %q, !%p, -1; selp.b32 %d, 1, 0, %q;", [1] * 32),
    ("and.b32 %t1, %t0, 3; match.any.sync.b32 %d, %t1, -1;", lanes(lambda k: 0x11111111 << (k % 4))),
    ("shr.u32 %t1, %t0, 5; match.all.sync.b32 %d|%p, %t1, -1;", [M32] * 32),
    ("match.all.sync.b32 %d|%p, %t0, -1;", [0] * 32),
    ("redux.sync.add.u32 %d, %t0, -1;", [496] * 32),
    ("redux.sync.max.s32 %d, %t0, -1;", [31] * 32),
    ("sub.s32 %t1, 3, %t0; redux.sync.min.s32 %d, %t1, -1;", [(3 - 31) & M32] * 32),
    ("sub.s32 %t1, 3, %t0; redux.sync.min.u32 %d, %t1, -1;", [0] * 32),
    ("redux.sync.xor.b32 %d, %t0, -1;", [0] * 32),
    ("redux.sync.or.b32 %d, %t0, -1;", [31] * 32),
    ("elect.sync %d|%p, -1;", [0] * 32),
    ("elect.sync %t1|%p, -1; selp.b32 %d, 1, 0, %p;", lanes(lambda k: int(k == 0))),
    ("activemask.b32 %d;", [M32] * 32),
    # Half warps with a member mask each
    ("setp.lt.u32 %p, %t0, 16; selp.b32 %t1, 0xFFFF, 0xFFFF0000, %p; redux.sync.add.u32 %d, 1, %t1;", [16] * 32),
]


@pytest.mark.parametrize(("body", "expected"), FORMS, ids=[f[0] for f in FORMS])
def test_form(evaluate, body, expected):
    assert evaluate(LANE + body, 32, (), ALL) == expected


def test_lanes_meet_again_after_a_branch(evaluate):
    body = """setp.lt.u32 %p, %t0, 10; @%p bra LOW; mov.u32 %t1, 100; activemask.b32 %t2; bra JOIN;
    LOW: mov.u32 %t1, 200; activemask.b32 %t2; JOIN: activemask.b32 %t3; and.b32 %t3, %t3, 1;
    vote.sync.ballot.b32 %t4, %p, -1; add.u32 %d, %t1, %t3; add.u32 %d, %d, %t4; add.u32 %d, %d, %t2;"""
    low = (1 << 10) - 1
    want = lanes(lambda k: 1 + low + (200 + low if k < 10 else 100 + (M32 & ~low)))
    assert evaluate(LANE + body, 32, (), ALL) == want


def test_a_loop_of_different_lengths_per_lane(evaluate):
    body = """mov.u32 %d, 0; mov.u32 %t1, %t0; LOOP: setp.eq.u32 %p, %t1, 0; @%p bra DONE;
    add.u32 %d, %d, %t1; sub.u32 %t1, %t1, 1; bra LOOP; DONE: shfl.sync.bfly.b32 %t2, %d, 1, 31, -1; sub.u32 %d, %t2, %d;"""

    def triangle(k):
        return k * (k + 1) // 2

    assert evaluate(LANE + body, 32, (), ALL) == lanes(lambda k: triangle(k ^ 1) - triangle(k))


def test_code_that_lies_behind_its_join(evaluate):
    """A branch to a block at the kernel's end, which jumps back: the lanes still meet at the join."""
    body = """and.b32 %t1, %t0, 1; setp.eq.u32 %p, %t1, 1; mov.u32 %d, 0; @%p bra FAR;
    BACK: vote.sync.ballot.b32 %t2, %p, -1; add.u32 %d, %d, %t2; bra OUT; FAR: mov.u32 %d, 1; bra BACK; OUT:"""
    assert evaluate(LANE + body, 32, (), ALL) == lanes(lambda k: 0xAAAAAAAA + k % 2)


def test_lanes_that_exit_do_not_hold_up_the_others(evaluate):
    body = """setp.gt.u32 %p, %t0, 20; @%p exit; activemask.b32 %d; and.b32 %t1, %t0, 1; setp.eq.u32 %q, %t1, 0;
    @%q bra EVEN; setp.eq.u32 %p, %t0, 3; @%p exit; EVEN: vote.sync.ballot.b32 %d, 1, 0x1FFFF7; """
    got = evaluate(LANE + body, 32, (), ALL)
    live = (1 << 21) - 1 & ~8
    assert got == lanes(lambda k: live if live >> k & 1 else 0)


def test_independent_progress_of_lanes(run_kernel):
    """Lane 0 spins on a flag that lane 1 of the same warp sets only after the branch at which they parted."""
    launch, out = run_kernel(""".visible .entry k(.param .u64 out) { .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %w<2>;
      .shared .align 4 .b32 flag; ld.param.u64 %w0, [out]; mov.u32 %r0, %laneid; st.shared.u32 [flag], 0; bar.warp.sync -1;
      setp.ne.u32 %p, %r0, 0; @%p bra SET;
      SPIN: ld.relaxed.cta.shared.u32 %r1, [flag]; setp.eq.u32 %p, %r1, 0; @%p bra SPIN; bra JOIN;
      SET: st.relaxed.cta.shared.u32 [flag], 9; mov.u32 %r1, 7;
      JOIN: mul.wide.u32 %w1, %r0, 4; add.u64 %w0, %w0, %w1; st.global.u32 [%w0], %r1; ret; }""")
    assert launch.clean, str(launch)
    assert struct.unpack("32I", out[:128]) == (9,) + (7,) * 31


# Lane 0 and lanes 1 to 31 of warp 0 come by different ways to one barrier: either way may lead to an exit, so no point
# before the kernel's end is common to both. Warp 1 writes what they read after it, and is late.
PARTED = """.visible .entry k(.param .u64 out) {{ .reg .pred %p, %q; .reg .b32 %r<9>; .reg .b64 %w<2>; .shared .align 4 .b8 s[256];
  ld.param.u64 %w0, [out]; mov.u32 %r0, %tid.x; shl.b32 %r3, %r0, 2; mov.u32 %r4, s; add.u32 %r4, %r4, %r3; setp.gt.u32 %q, %r0, 999;
  setp.gt.u32 %p, %r0, 31; @%p bra LATE; setp.eq.u32 %p, %r0, 0; @%p bra FIRST;
  @%q bra OUT; mov.u32 %r2, 2; {rest} FIRST: @%q bra OUT; mov.u32 %r2, 1; {first}
  LATE: mov.u32 %r5, 2000; SPIN: sub.u32 %r5, %r5, 1; setp.ne.u32 %p, %r5, 0; @%p bra SPIN; mov.u32 %r2, 3;
  MEET: st.shared.u32 [%r4], %r2; setp.gt.u32 %p, %r2, 1; {barrier} mul.wide.u32 %w1, %r0, 4; add.u64 %w0, %w0, %w1;
  xor.b32 %r3, %r3, 128; mov.u32 %r4, s; add.u32 %r4, %r4, %r3; ld.shared.u32 %r1, [%r4]; mad.lo.u32 %r1, %r1, 1000, %r6;
  st.global.u32 [%w0], %r1; ret; OUT: exit; }}"""  # fmt: skip
BARRIERS = [
    ("bar.sync 0;", 0),
    ("bar.sync 3, 64;", 0),
    ("barrier.sync 0;", 0),
    ("bar.red.popc.u32 %r6, 0, %p;", 63),
    ("bar.red.and.pred %q, 0, %p; selp.b32 %r6, 1, 2, %q;", 2),
    ("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", 0),
]


@pytest.mark.parametrize(("barrier", "reduction"), BARRIERS, ids=[b[0] for b in BARRIERS])
def test_parts_of_a_warp_wait_at_a_barrier(run_kernel, barrier, reduction):
    source = PARTED.format(rest="bra MEET;", first="bra MEET;", barrier="mov.u32 %r6, 0; " + barrier)
    launch, out = run_kernel(source, block=64)
    assert launch.clean, str(launch)
    values = [3] * 32 + [1] + [2] * 31
    assert struct.unpack("64I", out[:256]) == tuple(1000 * v + reduction for v in values)


def test_parts_of_a_warp_at_barriers_of_their_own(run_kernel):
    """9.7.13.1: only .aligned asks for the same instruction; the warp arrives once all of its threads have."""
    own = "st.shared.u32 [%r4], %r2; mov.u32 %r6, 0; barrier.sync 0; bra READ;"
    source = PARTED.format(rest=own, first=own, barrier="mov.u32 %r6, 0; barrier.sync 0; READ:")
    launch, out = run_kernel(source, block=64)
    assert launch.clean, str(launch)
    assert struct.unpack("64I", out[:256]) == tuple(1000 * v for v in [3] * 32 + [1] + [2] * 31)


def test_warps_exit_while_others_wait(run_kernel):
    """Warp 1 waits for all threads of the block; warp 0 exits before warp 2 comes."""
    launch, out = run_kernel(
        """.visible .entry k(.param .u64 out) { .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %w<2>;
      ld.param.u64 %w0, [out]; mov.u32 %r0, %tid.x; shr.u32 %r2, %r0, 5; mov.u32 %r3, 1000; setp.eq.u32 %p, %r2, 1; @%p bra MEET;
      SPIN: sub.u32 %r3, %r3, 1; setp.ne.u32 %p, %r3, 0; @%p bra SPIN; setp.eq.u32 %p, %r2, 0; @%p exit;
      MEET: bar.sync 0; mul.wide.u32 %w1, %r0, 4; add.u64 %w0, %w0, %w1; st.global.u32 [%w0], 1; ret; }""",
        block=96,
    )
    assert launch.clean, str(launch)
    assert struct.unpack("96I", out[:384]) == (0,) * 32 + (1,) * 64


def test_the_result_of_a_barrier_that_is_used_again_at_once(run_kernel):
    """Warps 0 and 3 reduce; warps 1 and 2 then do at the same barrier, before warp 3 has looked at its result."""
    launch, out = run_kernel(
        """.visible .entry k(.param .u64 out) { .reg .pred %p, %q; .reg .b32 %r<4>; .reg .b64 %w<2>;
      ld.param.u64 %w0, [out]; mov.u32 %r0, %tid.x; shr.u32 %r2, %r0, 5; setp.lt.u32 %p, %r0, 5; mov.u32 %r3, 2000;
      setp.eq.u32 %q, %r2, 3; @%q bra RED; setp.ne.u32 %q, %r2, 0; @%q bra AGAIN;
      SPIN: sub.u32 %r3, %r3, 1; setp.ne.u32 %q, %r3, 0; @%q bra SPIN;
      bar.red.popc.u32 %r1, 1, 64, %p; bar.arrive 2, 96; bra OUT;
      AGAIN: bar.sync 2, 96; setp.lt.u32 %p, %r0, 999;
      RED: bar.red.popc.u32 %r1, 1, 64, %p;
      OUT: mul.wide.u32 %w1, %r0, 4; add.u64 %w0, %w0, %w1; st.global.u32 [%w0], %r1; ret; }""",
        block=128,
    )
    assert launch.clean, str(launch)
    assert struct.unpack("128I", out[:512]) == (5,) * 32 + (64,) * 64 + (5,) * 32


def test_warp_barriers_in_both_branches(run_kernel):
    """9.7.13.2: bar.warp.sync waits for one with the same mask, wherever the lanes execute it. Disjoint masks do not
    wait for each other, at one instruction neither."""
    launch, out = (
        run_kernel(""".visible .entry k(.param .u64 out) { .reg .pred %p, %q; .reg .b32 %r<8>; .reg .b64 %w<2>;
      .shared .align 4 .b8 s[128]; ld.param.u64 %w0, [out]; mov.u32 %r0, %laneid; shl.b32 %r3, %r0, 2; mov.u32 %r4, s;
      add.u32 %r4, %r4, %r3; setp.lt.u32 %p, %r0, 16; @%p bra LOW;
      add.u32 %r2, %r0, 100; st.shared.u32 [%r4], %r2; bar.warp.sync -1; bra READ;
      LOW: add.u32 %r2, %r0, 200; st.shared.u32 [%r4], %r2; bar.warp.sync -1;
      READ: xor.b32 %r3, %r3, 124; mov.u32 %r4, s; add.u32 %r4, %r4, %r3; ld.shared.u32 %r1, [%r4];
      selp.b32 %r5, 0xffff, 0xffff0000, %p; and.b32 %r6, %r0, 15; setp.lt.u32 %q, %r6, 8; @!%q bra HALF; @%p bra HALF;
      // lanes 16 to 23 come after lanes 8 to 15 and 24 to 31, in whose fragment two masks are waiting
      mov.u32 %r7, 300; SPIN: sub.u32 %r7, %r7, 1; setp.ne.u32 %q, %r7, 0; @%q bra SPIN;
      HALF: redux.sync.add.u32 %r5, 1, %r5; mad.lo.u32 %r1, %r5, 1000, %r1;
      mul.wide.u32 %w1, %r0, 4; add.u64 %w0, %w0, %w1; st.global.u32 [%w0], %r1; ret; }""")
    )
    assert launch.clean, str(launch)
    assert struct.unpack("32I", out[:128]) == tuple(16000 + (31 - k) + (100 if k < 16 else 200) for k in range(32))


def test_exited_lanes_are_not_waited_for(run_kernel):
    """9.7.9.6: shfl.sync waits for the non-exited threads of its mask. Lanes 20 to 31 left the loop and only exit."""
    launch, out = run_kernel(""".visible .entry k(.param .u64 out) { .reg .pred %p; .reg .b32 %r<6>; .reg .b64 %w<2>;
      ld.param.u64 %w0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r2, 0;
      ROW: mov.u32 %r1, %r0; setp.ge.u32 %p, %r1, 52; @%p bra NEXT;
      COLUMN: shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1; mul.wide.u32 %w1, %r1, 4; add.u64 %w1, %w0, %w1;
      st.global.u32 [%w1], %r4; add.u32 %r1, %r1, 32; setp.lt.u32 %p, %r1, 52; @%p bra COLUMN;
      NEXT: add.u32 %r2, %r2, 1; setp.lt.u32 %p, %r2, 2; @%p bra ROW; ret; }""")
    assert launch.clean, str(launch)
    assert struct.unpack("52I", out[:208]) == tuple(k ^ 1 for k in range(52))


def test_branch_table(run_kernel):
    launch, out = run_kernel(""".visible .entry k(.param .u64 out) { .reg .b32 %r<4>; .reg .b64 %w<2>;
      ld.param.u64 %w0, [out]; mov.u32 %r0, %laneid; and.b32 %r1, %r0, 3;
      T: .branchtargets A, B, C, A;
      brx.idx %r1, T; A: mov.u32 %r2, 10; bra J; B: mov.u32 %r2, 20; bra J; C: mov.u32 %r2, 30;
      J: bar.warp.sync -1; mul.wide.u32 %w1, %r0, 4; add.u64 %w0, %w0, %w1; st.global.u32 [%w0], %r2; ret; }""")
    assert launch.clean, str(launch)
    assert struct.unpack("32I", out[:128]) == (10, 20, 30, 10) * 8


def test_call_of_a_function(run_kernel):
    launch, out = (
        run_kernel(""".func (.param .b32 r) twice_plus(.param .b32 x, .param .b32 y) { .reg .b32 %r<3>; .reg .pred %p;
      ld.param.b32 %r0, [x]; ld.param.b32 %r1, [y]; setp.gt.u32 %p, %r0, 15; @%p bra BIG;
      add.u32 %r0, %r0, %r0; add.u32 %r0, %r0, %r1; st.param.b32 [r], %r0; ret; BIG: st.param.b32 [r], 0; ret; }
      .visible .entry k(.param .u64 out) { .reg .b32 %r<4>; .reg .b64 %w<2>; .reg .pred %p;
      ld.param.u64 %w0, [out]; mov.u32 %r0, %laneid; mov.u32 %r2, 5; setp.ne.u32 %p, %r0, 2;
      { .param .b32 a; .param .b32 b; .param .b32 v; st.param.b32 [a], %r0; st.param.b32 [b], 1; st.param.b32 [v], 99;
        @%p call (v), twice_plus, (a, b); ld.param.b32 %r2, [v]; }
      mul.wide.u32 %w1, %r0, 4; add.u64 %w0, %w0, %w1; st.global.u32 [%w0], %r2; ret; }""")
    )
    assert launch.clean, str(launch)
    assert struct.unpack("32I", out[:128]) == tuple(99 if k == 2 else 0 if k > 15 else 2 * k + 1 for k in range(32))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("shfl.sync.idx.b32 %r1, %r0, 0, 31, 0xFFFE;", "not in its own member mask"),
        ("setp.lt.u32 %p, %r0, 4; @%p bar.sync 0;", "other lanes"),
        ("setp.lt.u32 %p, %r0, 4; @%p vote.sync.ballot.b32 %r1, %p, -1;", "other lanes"),
        (
            "setp.lt.u32 %p, %r0, 4; @%p exit; mov.b32 %r1, 0; movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r1;",
            "all 32 lanes",
        ),
        ("T: .branchtargets A; brx.idx %r0, T; A:", "branch index 1"),
    ],
)
def test_misuse_is_reported(run_kernel, body, text):
    launch, _ = run_kernel(
        f".visible .entry k(.param .u64 out) {{ .reg .pred %p; .reg .b32 %r<4>; mov.u32 %r0, %laneid;\n {body} ret; }}"
    )
    assert launch.status != "ok"
    assert text in str(launch)
    assert launch.reports[0].line == 5
