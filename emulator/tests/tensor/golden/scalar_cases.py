# SPDX-License-Identifier: Apache-2.0
"""Scalar and warp-wide instructions, each over a few hundred operands with edge values among them.

A kernel loads ``%a``, ``%b``, ``%c`` of one width, runs the instruction, stores ``%d``.
"""

from __future__ import annotations

import numpy as np
from runner_file import Buffer, Case

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
COUNT = 384

_INT32 = [
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFF,
    0xFFFFFFFE,
    0x55555555,
    0xFF,
    0x8000,
    0x10000,
]
_F32 = [
    0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0xBF800000, 0x3F000000, 0x40490FDB, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
    0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x4B000000, 0x4B800001, 0x3F7FFFFF, 0x3F800001, 0x34000000, 0xC2FC0000, 0x42FE0000,
    0x4F000000, 0xCF000000, 0x5F000000, 0x00800001, 0x3FC00000, 0x40200000,
]  # fmt: skip
_F16 = [
    0,
    0x8000,
    1,
    0x8001,
    0x3FF,
    0x400,
    0x3C00,
    0xBC00,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0xFE01,
    0x7C01,
    0x3800,
    0x6400,
    0x5800,
    0x3C01,
    0x4200,
]
_BF16 = [
    0,
    0x8000,
    1,
    0x8001,
    0x7F,
    0x80,
    0x3F80,
    0xBF80,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0xFF80,
    0x7FC0,
    0xFFC1,
    0x7F81,
    0x3F00,
    0x4380,
    0x4B00,
    0x3F81,
    0x4040,
]


def _mix(edges: list[int], random: np.ndarray, seed: int, dtype: type) -> np.ndarray:
    """Three operands [3, COUNT]: all edges against all, as far as they go, then random values with edges among them."""
    rng = np.random.Generator(np.random.PCG64([20260121, seed]))
    table = np.array(edges, dtype)
    out = random.astype(dtype)
    where = rng.random(out.shape) < 0.5
    out[where] = table[rng.integers(0, table.size, int(where.sum()))]
    first = np.arange(COUNT // 2)
    out[0, : COUNT // 2], out[1, : COUNT // 2] = table[first % table.size], table[first // table.size % table.size]
    return out


def operands(kind: str) -> np.ndarray:
    """[3, COUNT] operands of a class, as uint32 or uint64."""
    rng = np.random.Generator(np.random.PCG64([20260122, *kind.encode()]))
    if kind == "i32":
        return _mix(_INT32, rng.integers(0, 2**32, (3, COUNT), dtype=np.uint64), 1, np.uint32)
    if kind == "f32":
        values = (rng.standard_normal((3, COUNT)) * 2.0 ** rng.integers(-20, 20, (3, COUNT))).astype(np.float32)
        return _mix(_F32, values.view(np.uint32), 2, np.uint32)
    if kind in ("f16x2", "bf16x2"):
        edges = _F16 if kind == "f16x2" else _BF16
        random = rng.integers(0x3000, 0x4C00, (2, 3, COUNT), dtype=np.uint64) | (
            rng.integers(0, 2, (2, 3, COUNT), dtype=np.uint64) << 15
        )
        lo, hi = _mix(edges, random[0], 3, np.uint32), _mix(edges[::-1], random[1], 4, np.uint32)
        return lo | hi << np.uint32(16)
    if kind == "i64":
        edges = [*_INT32, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2, 2**32, 63, 64, 65]
        return _mix(edges, rng.integers(0, 2**64, (3, COUNT), dtype=np.uint64), 5, np.uint64)
    values = rng.standard_normal((3, COUNT)) * 2.0 ** rng.integers(-60, 60, (3, COUNT))
    with np.errstate(all="ignore"):
        edges64 = [int(x) for x in np.array(_F32, np.uint32).view(np.float32).astype(np.float64).view(np.uint64)]
    return _mix(
        [*edges64, 1, 0x7FEFFFFFFFFFFFFF, 0x000FFFFFFFFFFFFF, 0x43F0000000000000], values.view(np.uint64), 6, np.uint64
    )


def _forms() -> list[tuple[str, str, int]]:
    """(operand class, text, bits of %d)"""
    out: list[tuple[str, str, int]] = []

    def add(kind: str, *texts: str, bits: int | None = None) -> None:
        out.extend((kind, text, bits or (64 if kind in ("i64", "f64") else 32)) for text in texts)

    for op in ("add.s32", "sub.s32", "mul.lo.s32", "mul.hi.s32", "mul.hi.u32", "mul24.lo.s32", "mul24.hi.u32", "min.s32", "max.s32",
               "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32", "shl.b32", "shr.u32", "shr.s32", "add.sat.s32", "sub.sat.s32",
               "div.s32", "div.u32", "rem.s32", "rem.u32", "bmsk.clamp.b32", "bmsk.wrap.b32", "szext.clamp.s32", "szext.wrap.u32"):  # fmt: skip
        guard = "setp.eq.u32 %p, %b, 0; @%p mov.b32 %b, 3; " if op[:3] in ("div", "rem") else ""
        add("i32", f"{guard}{op} %d, %a, %b;")
    add(
        "i32",
        *(
            f"{op} %d, %a;"
            for op in (
                "abs.s32",
                "neg.s32",
                "not.b32",
                "cnot.b32",
                "popc.b32",
                "clz.b32",
                "brev.b32",
                "bfind.u32",
                "bfind.s32",
                "bfind.shiftamt.u32",
                "bfind.shiftamt.s32",
            )
        ),
    )
    add("i32", *(f"{op} %d, %a, %b, %c;" for op in ("mad.lo.s32", "mad.hi.s32", "mad.hi.u32", "mad.hi.sat.s32", "sad.s32", "sad.u32", "prmt.b32",
        "prmt.b32.f4e", "prmt.b32.b4e", "prmt.b32.rc8", "prmt.b32.ecl", "prmt.b32.ecr", "prmt.b32.rc16", "shf.l.wrap.b32", "shf.l.clamp.b32",
        "shf.r.wrap.b32", "shf.r.clamp.b32", "dp4a.s32.s32", "dp4a.u32.u32", "dp4a.s32.u32", "dp2a.lo.s32.s32", "dp2a.hi.u32.s32",
        "bfe.u32", "bfe.s32", "slct.s32.s32", "slct.u32.s32")))  # fmt: skip
    add("i32", *(f"lop3.b32 %d, %a, %b, %c, {lut};" for lut in (0x00, 0x1B, 0x80, 0x96, 0xE8, 0xCA, 0xFE, 0x2D)))
    add("i32", "bfi.b32 %d, %a, %b, %c, 7;", "bfi.b32 %d, %a, %b, 5, %c;", "mul.wide.s32 %l, %a, %b; mov.b64 {%d, %t}, %l;", "mul.wide.s32 %l, %a, %b; mov.b64 {%t, %d}, %l;",
        "mul.wide.u32 %l, %a, %b; mov.b64 {%t, %d}, %l;", "add.cc.u32 %t, %a, %b; addc.u32 %d, %c, 0;", "sub.cc.u32 %t, %a, %b; subc.u32 %d, %c, 1;",
        "mad.lo.cc.u32 %t, %a, %b, %c; madc.hi.u32 %d, %a, %b, %c;", "cvt.s32.s8 %d, %a;", "cvt.u32.u16 %d, %a;", "cvt.sat.s8.s32 %d, %a;", "cvt.sat.u8.s32 %d, %a;",
        "cvt.sat.u16.u32 %d, %a;", "cvt.sat.s16.s32 %d, %a;", "cvt.sat.s32.u32 %d, %a;", "cvt.pack.sat.s8.s32.b32 %d, %a, %b, %c;", "cvt.pack.sat.u16.s32 %d, %a, %b;")  # fmt: skip
    for r in ("rn", "rz", "rm", "rp"):
        add("i32", f"cvt.{r}.f32.s32 %d, %a;", f"cvt.{r}.f32.u32 %d, %a;")
        add(
            "i64",
            f"cvt.{r}.f32.s64 %e, %a; cvt.u64.u32 %d, %e;",
            f"cvt.{r}.f32.u64 %e, %a; cvt.u64.u32 %d, %e;",
            f"cvt.{r}.f64.s64 %d, %a;",
            f"cvt.{r}.f64.u64 %d, %a;",
        )
        for ftz in ("", ".ftz"):
            add("f32", *(f"{op}.{r}{ftz}.f32 %d, %a, %b;" for op in ("add", "sub", "mul", "div")), f"fma.{r}{ftz}.f32 %d, %a, %b, %c;",
                f"rcp.{r}{ftz}.f32 %d, %a;", f"sqrt.{r}{ftz}.f32 %d, %a;")  # fmt: skip
        add("f64", *(f"{op}.{r}.f64 %d, %a, %b;" for op in ("add", "sub", "mul", "div")), f"fma.{r}.f64 %d, %a, %b, %c;", f"rcp.{r}.f64 %d, %a;", f"sqrt.{r}.f64 %d, %a;",
            f"cvt.{r}.f32.f64 %e, %a; cvt.u64.u32 %d, %e;")  # fmt: skip
    for r in ("rni", "rzi", "rmi", "rpi"):
        add("f32", f"cvt.{r}.f32.f32 %d, %a;", f"cvt.{r}.s32.f32 %d, %a;", f"cvt.{r}.u32.f32 %d, %a;", f"cvt.{r}.ftz.s32.f32 %d, %a;", f"cvt.{r}.s64.f32 %l, %a; mov.b64 {{%t, %d}}, %l;",
            f"cvt.{r}.u64.f32 %l, %a; mov.b64 {{%d, %t}}, %l;", f"cvt.{r}.u8.f32 %d, %a;", f"cvt.{r}.s16.f32 %d, %a;")  # fmt: skip
        add(
            "f64",
            f"cvt.{r}.f64.f64 %d, %a;",
            f"cvt.{r}.s32.f64 %e, %a; cvt.u64.u32 %d, %e;",
            f"cvt.{r}.u32.f64 %e, %a; cvt.u64.u32 %d, %e;",
            f"cvt.{r}.s64.f64 %d, %a;",
            f"cvt.{r}.u64.f64 %d, %a;",
        )
    add("f32", "add.rn.sat.f32 %d, %a, %b;", "mul.rn.ftz.sat.f32 %d, %a, %b;", "fma.rn.sat.f32 %d, %a, %b, %c;", "abs.f32 %d, %a;", "abs.ftz.f32 %d, %a;", "neg.f32 %d, %a;",
        "neg.ftz.f32 %d, %a;", "copysign.f32 %d, %a, %b;", "cvt.sat.f32.f32 %d, %a;", "cvt.ftz.f32.f32 %d, %a;", "slct.f32.f32 %d, %a, %b, %c;", "slct.ftz.u32.f32 %d, %a, %b, %c;",
        "cvt.rn.f16.f32 %h, %a; cvt.f32.f16 %d, %h;", "cvt.rn.bf16.f32 %h, %a; cvt.f32.bf16 %d, %h;", "cvt.f64.f32 %l, %a; mov.b64 {%t, %d}, %l;")  # fmt: skip
    for op in ("min", "max"):
        add(
            "f32",
            *(f"{op}{m}.f32 %d, %a, %b;" for m in ("", ".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs")),
            f"{op}.f32 %d, %b, %c;",
        )
        add("f64", f"{op}.f64 %d, %a, %b;")
        for t in ("f16x2", "bf16x2"):
            add(t, f"{op}.{t} %d, %a, %b;", f"{op}.NaN.{t} %d, %a, %b;", f"{op}.xorsign.abs.{t} %d, %a, %b;")
    for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        add("f32", f"testp.{test}.f32 %p, %a; selp.b32 %d, 1, 0, %p;")
        add("f64", f"testp.{test}.f64 %p, %a; selp.b64 %d, 1, 0, %p;")
    for compare in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
        add(
            "f32",
            f"setp.{compare}.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;",
            f"setp.{compare}.ftz.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;",
            f"set.{compare}.f32.f32 %d, %a, %b;",
        )
        add("f16x2", f"setp.{compare}.f16x2 %p|%q, %a, %b; selp.b32 %d, 1, 0, %p; @%q or.b32 %d, %d, 2;")
        add("bf16x2", f"setp.{compare}.bf16x2 %p|%q, %a, %b; selp.b32 %d, 1, 0, %p; @%q or.b32 %d, %d, 2;")
        add("f64", f"setp.{compare}.f64 %p, %a, %b; selp.b64 %d, 1, 0, %p;")
    for compare in ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"):
        unsigned = compare in ("lo", "ls", "hi", "hs")
        add(
            "i32",
            *(
                f"setp.{compare}.{t} %p, %a, %b; selp.b32 %d, 1, 0, %p;"
                for t in (["u32"] if unsigned else ["s32", "u32"])
            ),
        )
        add(
            "i64",
            *(
                f"setp.{compare}.{t} %p, %a, %b; selp.b64 %d, 1, 0, %p;"
                for t in (["u64"] if unsigned else ["s64", "u64"])
            ),
        )
    add("i32", "setp.lt.s32 %q, %b, %c; setp.lt.and.s32 %p, %a, %b, %q; selp.b32 %d, 1, 0, %p;", "setp.lt.s32 %q, %b, %c; setp.lt.xor.s32 %p, %a, %b, !%q; selp.b32 %d, 1, 0, %p;",
        "setp.lt.s32 %p|%q, %a, %b; selp.b32 %d, 1, 0, %q;", "set.lt.u32.s32 %d, %a, %b;", "set.ge.f32.u32 %d, %a, %b;")  # fmt: skip
    for t in ("f16x2", "bf16x2"):
        add(t, f"fma.rn.{t} %d, %a, %b, %c;", f"fma.rn.relu.{t} %d, %a, %b, %c;", f"neg.{t} %d, %a;", f"abs.{t} %d, %a;", f"add.{'rn.' if t == 'bf16x2' else ''}{t} %d, %a, %b;",
            f"sub.{'rn.' if t == 'bf16x2' else ''}{t} %d, %a, %b;", f"mul.{'rn.' if t == 'bf16x2' else ''}{t} %d, %a, %b;")  # fmt: skip
    add(
        "f16x2",
        "add.sat.f16x2 %d, %a, %b;",
        "mul.ftz.f16x2 %d, %a, %b;",
        "fma.rn.ftz.f16x2 %d, %a, %b, %c;",
        "fma.rn.sat.f16x2 %d, %a, %b, %c;",
    )
    for op in (
        "add.s64",
        "sub.s64",
        "mul.lo.s64",
        "mul.hi.s64",
        "mul.hi.u64",
        "min.s64",
        "max.u64",
        "and.b64",
        "or.b64",
        "xor.b64",
        "div.s64",
        "div.u64",
        "rem.s64",
        "rem.u64",
    ):
        guard = "setp.eq.u64 %p, %b, 0; @%p mov.b64 %b, 3; " if op[:3] in ("div", "rem") else ""
        add("i64", f"{guard}{op} %d, %a, %b;")
    add("i64", "cvt.u32.u64 %e, %b; shl.b64 %d, %a, %e;", "cvt.u32.u64 %e, %b; shr.u64 %d, %a, %e;", "cvt.u32.u64 %e, %b; shr.s64 %d, %a, %e;", "abs.s64 %d, %a;", "neg.s64 %d, %a;", "not.b64 %d, %a;",
        "brev.b64 %d, %a;", "popc.b64 %e, %a; cvt.u64.u32 %d, %e;", "clz.b64 %e, %a; cvt.u64.u32 %d, %e;", "bfind.s64 %e, %a; cvt.u64.u32 %d, %e;", "mad.lo.s64 %d, %a, %b, %c;",
        "cvt.sat.s32.s64 %e, %a; cvt.u64.u32 %d, %e;", "cvt.sat.u32.s64 %e, %a; cvt.u64.u32 %d, %e;", "cvt.u32.u8 %e, %b; bfe.u64 %d, %a, %e, 9;", "cvt.u32.u8 %e, %b; bfe.s64 %d, %a, 3, %e;",
        "cvt.u32.u8 %e, %c; bfi.b64 %d, %a, %b, %e, 11;")  # fmt: skip
    for mode in ("up", "down", "bfly", "idx"):
        for clamp in (0, 31, 0x1C1F, 0x181F, 0x1800):
            add(
                "i32",
                f"and.b32 %t, %b, 31; shfl.sync.{mode}.b32 %d|%p, %a, %t, {clamp}, -1; @%p xor.b32 %d, %d, 0x5a5a5a5a;",
            )
    for vote in ("any", "all", "uni"):
        add("i32", f"setp.lt.s32 %q, %a, %b; vote.sync.{vote}.pred %p, %q, -1; selp.b32 %d, 1, 0, %p;")
    add("i32", "setp.lt.s32 %q, %a, %b; vote.sync.ballot.b32 %d, %q, -1;", "and.b32 %t, %a, 3; match.any.sync.b32 %d, %t, -1;", "and.b32 %t, %a, 1; match.all.sync.b32 %d|%p, %t, -1; @%p add.u32 %d, %d, 7;",
        *(f"redux.sync.{op} %d, %a, -1;" for op in ("add.s32", "min.s32", "max.s32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32")))  # fmt: skip
    return out


APPROXIMATE = {  # text -> operand class
    "ex2.approx.f32 %d, %a;": "f32", "ex2.approx.ftz.f32 %d, %a;": "f32", "lg2.approx.f32 %d, %a;": "f32", "lg2.approx.ftz.f32 %d, %a;": "f32",
    "rcp.approx.f32 %d, %a;": "f32", "rcp.approx.ftz.f32 %d, %a;": "f32", "rsqrt.approx.f32 %d, %a;": "f32", "rsqrt.approx.ftz.f32 %d, %a;": "f32",
    "sqrt.approx.f32 %d, %a;": "f32", "sqrt.approx.ftz.f32 %d, %a;": "f32", "div.approx.f32 %d, %a, %b;": "f32", "div.full.f32 %d, %a, %b;": "f32",
    "tanh.approx.f32 %d, %a;": "f32", "sin.approx.f32 %d, %a;": "f32", "cos.approx.f32 %d, %a;": "f32",
    "tanh.approx.f16x2 %d, %a;": "f16x2", "ex2.approx.f16x2 %d, %a;": "f16x2", "tanh.approx.bf16x2 %d, %a;": "bf16x2", "ex2.approx.ftz.bf16x2 %d, %a;": "bf16x2",
}  # fmt: skip


def _case(kind: str, text: str, bits: int) -> Case:
    values = operands(kind)
    width = values.dtype.itemsize * 8
    size = width // 8
    ptx = (
        f"{HEADER}.visible .entry k(.param .u64 out, .param .u64 in) {{\n"
        f".reg .b64 %out, %in, %at, %l; .reg .b{width} %a, %b, %c; .reg .b{bits} %d; .reg .b32 %t, %e, %n, %x; .reg .b16 %h; .reg .pred %p, %q;\n"
        "ld.param.u64 %out, [out]; ld.param.u64 %in, [in]; mov.u32 %t, %tid.x; mov.u32 %x, %ctaid.x; mov.u32 %n, %ntid.x;\n"
        f"mad.lo.u32 %t, %x, %n, %t; mul.wide.u32 %at, %t, {size}; add.u64 %in, %in, %at; mul.wide.u32 %at, %t, {bits // 8}; add.u64 %out, %out, %at;\n"
        f"ld.global.b{width} %a, [%in]; ld.global.b{width} %b, [%in+{COUNT * size}]; ld.global.b{width} %c, [%in+{2 * COUNT * size}];\n"
        f"{text}\nst.global.b{bits} [%out], %d;\nret;\n}}\n"
    )
    parameters = [Buffer(bytes(COUNT * bits // 8)), Buffer(values.tobytes())]
    return Case(text, ptx, "k", parameters, grid=(COUNT // 32, 1, 1), meta={"kind": kind, "bits": bits})


def scalar_cases() -> list[Case]:
    return [_case(*form) for form in _forms()] + [_case(kind, text, 32) for text, kind in APPROXIMATE.items()]
