# SPDX-License-Identifier: Apache-2.0
"""What the front end refuses, and that it says where; random and mutated text."""

from __future__ import annotations

import random
import re

import pytest
from vsm._library import VsmError
from vsm.device import pack

HEADER = ".version 9.0\n.target sm_121a\n.address_size 64\n"
DECLARED = ".reg .pred %p; .reg .b16 %h; .reg .b32 %r<3>; .reg .b64 %w; .reg .f32 %f;"


def kernel(body: str) -> str:
    return HEADER + f".visible .entry k(.param .u64 out) {{ {DECLARED}\n{body}\nret; }}"


REFUSED = [
    ("frobnicate.b32 %r0, %r1;", "this instruction is not modelled"),
    ("add.wrong.s32 %r0, %r1, %r2;", "modifier '.wrong' is not modelled"),
    ("add.s32 %r0, %r1;", "has 2 operands; the form takes 3"),
    ("add.s32 %r0, %r1, %w;", "register '%w' has 64 bits; the form takes 32"),
    ("add.s32 %r0, %r1, %r9;", "special register '%r9' is not modelled"),
    ("add.f32 %f, %f, 3;", "an integer constant cannot be an operand of type .f32"),
    ("mov.u32 %r0, %nosuch;", "special register '%nosuch' is not modelled"),
    ("bra NOWHERE;", "label 'NOWHERE' is not defined"),
    ("ld.global.u32 %r0, [%r1];", "a 32-bit register cannot address .global memory"),
    ("st.const.u32 [%w], %r0;", ".const memory cannot be written"),
    ("shl.f32 %f, %f, 1;", "that type"),
    ("setp.ltu.s32 %p, %r0, %r1;", "an unordered comparison needs a floating point type"),
    ("setp.lt.b32 %p, %r0, %r1;", "a .b type can only be compared"),
    ("cvt.s32.f32 %r0, %f;", "float to integer needs .rni"),
    ("cvt.f32.s32 %f, %r0;", "integer to float needs a rounding"),
    ("shfl.idx.b32 %r0, %r1, 0, 31;", "shfl without .sync"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.e4m3.e4m3.f32 {%r0}, {%r0}, {%r0}, {%r0};", "not modelled"),
    ("atom.global.inc.s32 %r0, [%w], 1;", ".inc and .dec need .u32"),
    ("lop3.b32 %r0, %r1, %r2, %r0, 256;", "the look-up table must be 0 to 255"),
    ("cp.async.cg.shared.global [%r0], [%w], 8;", "a copy of 8 bytes is not possible"),
    ("call nofunction, ();", "call of 'nofunction', which has no body"),
    ("wgmma.fence.sync.aligned;", "this instruction is not modelled"),
    ("@%r0 mov.b32 %r1, %r2;", "guard '%r0' is not a predicate"),
    ("mov.b32 %r0, 0x;", "malformed number"),
    ("ld.param.u32 %r0, [nothing];", "'nothing' is not declared"),
    (".shared .b32 a; .shared .b32 a;", "'a' is declared twice"),
    (".reg .b32 %r0;", "register '%r0' is declared twice"),
    ("mov.b32 %r0, `;", "unexpected character"),
]


@pytest.mark.parametrize(("body", "text"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused_with_line_and_kernel(device, body, text):
    with pytest.raises(VsmError, match="unit:5") as caught:
        device.load(kernel(body), "unit")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("", "the module has no .target"),
        (HEADER + ".visible .entry k() { ret;", "expected '}'"),
        (HEADER + ".global .b32 x = {1, 2};", "larger than the variable"),
        (HEADER + ".global .align 3 .b32 x;", "power of two"),
        (HEADER + ".global .b64 x = nothing;", "symbol 'nothing' is not defined"),
        (HEADER + ".func f() { call f, (); ret; } .visible .entry k() { call f, (); ret; }", "recursive call"),
        (HEADER + "/* never closed", "comment is not closed"),
        (HEADER + "{" * 100000, "unknown directive"),
        (HEADER + ".visible .entry k() { mov.b32 " + "{" * 100000, "nested too deeply"),
        (HEADER + ".global .b32 x[2] = " + "{" * 100000, "nested too deeply"),
        (".version 9.0\n.target sm_121a\n.address_size 32\n", "only .address_size 64"),
    ],
)
def test_refused_module(device, source, text):
    with pytest.raises(VsmError, match=re.escape(text)):
        device.load(source, "unit")


SAMPLE = kernel("""
 .shared .align 8 .b64 bar; .local .align 4 .b32 depot[4];
 ld.param.u64 %w, [out]; mov.u32 %r0, %tid.x; LOOP: add.s32 %r1, %r0, 3; setp.lt.s32 %p, %r1, 40; @%p bra NEXT;
 mul.lo.s32 %r1, %r1, %r0; NEXT: st.local.u32 [depot+4], %r1; ld.local.u32 %r2, [depot+4];
 setp.eq.u32 %p, %r0, 0; @%p mbarrier.init.shared.b64 [bar], 32; bar.sync 0; mbarrier.arrive.shared.b64 _, [bar];
 shfl.sync.bfly.b32 %r1|%p, %r2, 1, 31, -1; cvt.rn.f32.s32 %f, %r1; fma.rn.f32 %f, %f, 0f3F800000, %f;
 atom.global.add.u32 %r1, [%w], %r2; st.global.f32 [%w+8], %f;""")


@pytest.mark.parametrize("seed", range(8))
def test_mutated_text_neither_crashes_nor_hangs(device, seed):
    """Text with a few characters or tokens changed is refused or runs within its bounds."""
    print("seed", seed)
    rng = random.Random(seed)
    tokens = [
        "%r0",
        "%w",
        "%p",
        "0",
        "-1",
        "[",
        "]",
        "{",
        "}",
        ";",
        ",",
        ".u32",
        ".b64",
        ".shared",
        "bra",
        "LOOP",
        "@%p",
        "st",
        "ld",
    ]
    out = device.upload(bytes(4096))
    loaded = 0
    refusals: list[str] = []
    for _ in range(150):
        text = SAMPLE
        for _ in range(rng.choice((1, 1, 1, 2))):
            at = rng.randrange(len(HEADER), len(text))
            kind = rng.randrange(4)
            if kind == 0:
                text = text[:at] + text[at + rng.randint(1, 8) :]
            elif kind == 1:
                text = text[:at] + chr(rng.randint(32, 126)) + text[at + 1 :]
            elif kind == 2:
                at = rng.choice([i for i, c in enumerate(text) if c.isdigit() and i > len(HEADER)])
                text = text[:at] + rng.choice("0123456789") + text[at + 1 :]
            else:
                text = text[:at] + " " + rng.choice(tokens) + " " + text[at:]
        try:
            module = device.load(text, "mutant")
        except VsmError as error:
            refusals.append(str(error))
            continue
        loaded += 1
        try:
            kernel_found = module.kernel("k")
        except KeyError:  # the mutation renamed it
            module.unload()
            continue
        launch = kernel_found.launch(1, 32, pack(out), max_warp_instructions=20_000)
        assert launch.status in ("ok", "fault", "deadlock", "step limit", "trap", "refused")
        module.unload()
    device.release(out)
    assert loaded > 0
    assert all(text.startswith("mutant") for text in refusals)
