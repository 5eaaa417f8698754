# SPDX-License-Identifier: Apache-2.0
"""The machine built for aarch64 and run by an emulator of that: the same bits as on this host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EMULATOR = Path(__file__).parents[2]
sys.path.insert(0, str(EMULATOR / "python"))

from vsm._library import library_path  # noqa: E402

pytestmark = pytest.mark.slow
COMPILER, RUNNER = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSTEM_ROOT = "/usr/aarch64-linux-gnu"

PRELUDE = """.reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %w<6>; .reg .pred %p;
.shared .align 128 .b8 s[512]; .shared .align 8 .b64 bar; mov.u32 %r15, s;
ld.param.u64 %w0, [out]; ld.param.u64 %w1, [in]; mov.u32 %r0, %tid.x; mul.wide.u32 %w2, %r0, 16;
add.u64 %w3, %w0, %w2; add.u64 %w1, %w1, %w2; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%w1]; ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%w1+512];
mov.u32 %r9, 0; mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r12, 0;
"""
MMA = "{%r9, %r10, %r11, %r12}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r9, %r10, %r11, %r12}"
BODIES = {
    "integer": "mul.hi.s32 %r9, %r1, %r2; div.u32 %r10, %r3, %r4; prmt.b32 %r11, %r1, %r2, %r3; shf.r.wrap.b32 %r12, %r1, %r2, %r3;",
    "float": "fma.rm.f32 %r9, %r1, %r2, %r3; div.rn.f32 %r10, %r1, %r2; sqrt.rp.ftz.f32 %r11, %r5; ex2.approx.ftz.f32 %r12, %r6;",
    "conversions": "cvt.rzi.s32.f32 %r9, %r1; cvt.rni.sat.u8.f32 %r10, %r2; cvt.rn.f32.s32 %r11, %r3; cvt.rn.satfinite.e4m3x2.f32 %h0, %r4, %r5; cvt.u32.u16 %r12, %h0;",
    "pairs": "fma.rn.f16x2 %r9, %r1, %r2, %r3; max.NaN.bf16x2 %r10, %r1, %r2; ex2.approx.f16x2 %r11, %r3; tanh.approx.bf16x2 %r12, %r4;",
    "mma_bf16": f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {MMA};",
    "mma_scaled": f"mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0 {MMA}, {{%r7}}, {{1, 0}}, {{%r8}}, {{2, 1}};",
    "warp": "shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1; redux.sync.max.u32 %r10, %r2, -1; match.any.sync.b32 %r11, %r0, -1; and.b32 %r3, %r3, 1; setp.eq.u32 %p, %r3, 1; vote.sync.ballot.b32 %r12, %p, -1;",
    "atomics": "atom.global.add.f32 %r9, [%w0+2048], 0f3F800000; atom.global.cas.b32 %r10, [%w0+2052], 0, 1; red.global.add.u32 [%w0+2056], %r1; atom.shared.exch.b32 %r11, [s], %r1;".replace("atom.shared.exch", "st.shared.u32 [s], %r0; bar.sync 0; atom.shared.exch"),
    "bulk_copy": """setp.eq.u32 %p, %r0, 0; @%p mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0;
@%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512;
@%p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%w1], 512, [bar];
W: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;
mad.lo.u32 %r14, %r0, 16, %r15; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r9, %r10, %r11, %r12}, [%r14];""",
    "fault": "ld.shared.u32 %r9, [%r15+256]; ld.global.u32 %r10, [%w0+4096];",
}  # fmt: skip
PTX = ".version 9.0\n.target sm_121a\n.address_size 64\n" + "".join(
    f".visible .entry {name}(.param .u64 out, .param .u64 in) {{ {PRELUDE}\n{body}\n"
    "st.global.v4.u32 [%w3], {%r9, %r10, %r11, %r12}; ret; }\n"
    for name, body in BODIES.items()
)


def run(*command: object, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def link(compiler: str, library: Path, program: Path) -> Path:
    run(compiler, "-std=c++17", "-O1", f"-I{EMULATOR / 'src'}", Path(__file__).with_name("smoke.cpp"), library,
        "-pthread", f"-Wl,-rpath,{library.parent}", "-o", program)  # fmt: skip
    return program


@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(RUNNER)), reason=f"needs {COMPILER} and {RUNNER}")
def test_the_same_bits_on_aarch64(tmp_path):
    source = tmp_path / "smoke.ptx"
    source.write_text(PTX)
    library = tmp_path / "aarch64" / "libvsm.so"
    run("make", "-C", EMULATOR, "-j2", f"CXX={COMPILER}", f"BUILD={library.parent}", library)
    here = run(link(os.environ.get("CXX", "g++"), library_path(), tmp_path / "here"), source)
    there = run(RUNNER, "-L", SYSTEM_ROOT, link(COMPILER, library, tmp_path / "there"), source)
    addresses = re.compile("0x[0-9a-f]{8,}")  # of the host
    assert addresses.sub("*", here).splitlines() == addresses.sub("*", there).splitlines()
    lines = [line for line in here.splitlines() if line.split(" ")[0] in BODIES]
    status = {line.split(" ")[0]: int(line.split(" ")[1]) for line in lines}
    assert status == {name: 0 if name != "fault" else 2 for name in BODIES}, here
