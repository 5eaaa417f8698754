# SPDX-License-Identifier: Apache-2.0
"""Texts that the front end refuses, with the place of the error; random and mutated text."""

from __future__ import annotations

import random

import pytest
from vsm._library import VsmError
from vsm.device import Device, pack

HEADER = ".version 9.0\n.target sm_121a\n.address_size 64\n"
DECLARED = ".reg .pred %p; .reg .b16 %h; .reg .b32 %r<3>; .reg .b64 %w; .reg .f32 %f;"


def refusal(device: Device, text: str, name: str = "unit") -> str:
    """Why the module, or its kernel ``k``, cannot be run; empty if it can."""
    try:
        module = device.load(text, name)
    except VsmError as error:
        return str(error)
    launch = module.kernel("k").launch(1, 32, bytes(8), max_warp_instructions=1)
    module.unload()
    return launch.message if launch.status == "refused" else ""


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
    message = refusal(device, kernel(body))
    assert message.startswith("unit:5")
    assert text in message
    if "character" not in text and "number" not in text:  # the text as such, before there are kernels
        assert "in k: " in message


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
    assert text in refusal(device, source)


ADD_ONE = ".visible .entry {}(.param .u64 out) {{ .reg .b64 %w; .reg .b32 %r; ld.param.u64 %w, [out]; {} }}\n"
WORKS = "ld.global.u32 %r, [%w]; add.u32 %r, %r, 1; st.global.u32 [%w], %r; ret;"


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (ADD_ONE.format("k", "\n frobnicate.b32 %r, %r; ret;"), "unit:6: in k: `frobnicate.b32`: this instruction"),
        (ADD_ONE.format("k", "\n mov.b32 %r, %envreg7; ret;"), "unit:6: in k: `mov.b32`: special register '%envreg7'"),
        (ADD_ONE.format("k", "\n mov.b32 %r, %undeclared + {1}; ret;"), "unit:6: in k: expected"),
        (ADD_ONE.format("k", "\n .callprototype _; ret;"), "unit:6: in k: unknown directive '.callprototype'"),
        (
            ADD_ONE.format("k", "ret;").replace(") {", ")\n .reqnctapercluster 2 {"),
            "unit:6: in k: clusters of more than",
        ),
        (".func f() {\n frobnicate; ret; }\n" + ADD_ONE.format("k", "call f, (); ret;"), "in k: `frobnicate`"),
        (".func f() {\n .nothing 3; ret; }\n" + ADD_ONE.format("k", "call f, (); ret;"), "in k: call of 'f', which"),
    ],
    ids=["instruction", "special register", "operand", "directive", "cluster", "called function", "called directive"],
)
@pytest.mark.parametrize("order", ["first", "last"])
def test_an_unknown_form_refuses_its_own_kernel_alone(device, broken, text, order):
    works = ADD_ONE.format("works", WORKS)
    source = HEADER + ("// \n" + broken + works if order == "first" else works + broken)
    module = device.load(source, "unit")
    out = device.upload(bytes(4))
    for calls in (1, 2):  # an error of every launch
        refused = module.kernel("k").launch(1, 1, pack(out))
        assert refused.status == "refused"
        assert text in refused.message
        launch = module.kernel("works").launch(1, 1, pack(out))
        assert launch.clean, str(launch)
        assert device.download(out, 4) == bytes([calls, 0, 0, 0])
    device.release(out)
    module.unload()


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
