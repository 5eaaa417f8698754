# SPDX-License-Identifier: Apache-2.0
"""Small PTX kernels around single tensor, conversion and tensor-copy instructions, with their inputs.

Everything here runs on a GPU of compute capability 9.0, whose results the golden file keeps.
"""

from __future__ import annotations

import numpy as np
from runner_file import Buffer, Case, TensorMap, Value

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
SEED = 20260121


def _rng(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([SEED, *name.encode()]))


# --- cvt ------------------------------------------------------------------------------------------------------------
# form -> (sources, destination bits); a source "f" is float32, "r" 32 bits, "h" 16 bits.
CVT_FORMS: dict[str, tuple[str, int]] = {}
for _type in ("e4m3x2", "e5m2x2"):
    for _relu in ("", ".relu"):
        CVT_FORMS[f"rn{_relu}.f16x2.{_type}"] = ("h", 32)
        CVT_FORMS[f"rn.satfinite{_relu}.{_type}.f32"] = ("ff", 16)
        CVT_FORMS[f"rn.satfinite{_relu}.{_type}.f16x2"] = ("r", 16)
for _type in ("f16x2", "bf16x2"):
    for _round in ("rn", "rz"):
        for _modifiers in ("", ".relu", ".satfinite", ".relu.satfinite"):
            CVT_FORMS[f"{_round}{_modifiers}.{_type}.f32"] = ("ff", 32)
for _type in ("f16", "bf16"):
    for _round in ("rn", "rz", "rm", "rp"):
        CVT_FORMS[f"{_round}.{_type}.f32"] = ("f", 16)
for _form in ("rna", "rna.satfinite", "rn", "rz", "rn.relu", "rz.relu"):
    CVT_FORMS[f"{_form}.tf32.f32"] = ("f", 32)


def float32_edges() -> np.ndarray:
    """Bit patterns around every rounding boundary of the 8- and 16-bit formats, both signs, NaNs, infinities."""
    exponents = np.arange(0, 256, dtype=np.uint32) << 23
    mantissas = [0, 1, 2, 0x7FFFFF, 0x400000, 0x400001]
    for bits in (1, 2, 3, 4, 7, 10):  # halfway cases of formats with that many mantissa bits, and their neighbours
        half = 1 << (22 - bits)
        mantissas += [half - 1, half, half + 1, 3 * half - 1, 3 * half, 3 * half + 1]
        mantissas += [0x800000 - half - 1, 0x800000 - half, 0x800000 - half + 1]
    patterns = (exponents[:, None] | np.unique(mantissas).astype(np.uint32)[None, :]).ravel()
    return np.concatenate([patterns, patterns | np.uint32(1 << 31)])


def cvt_cases() -> list[Case]:
    cases = []
    for form, (sources, bits) in CVT_FORMS.items():
        if sources == "h":
            a = np.arange(65536, dtype=np.uint32)[:: 1 if "x2" not in form else 257]  # both elements the same code
        elif sources == "r":
            codes = np.arange(65536, dtype=np.uint32)
            a = codes | (np.roll(codes, 1) << 16)
        else:
            a = float32_edges()
        a = np.resize(a, -(-a.size // 32) * 32).astype(np.uint32)
        b = np.roll(a, 7)
        load_b = "ld.global.b32 y, [pb];" if len(sources) == 2 else ""
        source = {"h": "cvt.u16.u32 hx, x;", "r": "", "f": "", "ff": ""}[sources]
        operand = "hx" if sources == "h" else "x"
        second = ", y" if len(sources) == 2 else ""
        dst, widen = ("hd", "cvt.u32.u16 d, hd;") if bits == 16 else ("d", "")
        ptx = (
            f"{HEADER}.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 o) {{\n"
            ".reg .b64 pa, pb, po, at; .reg .b32 x, y, d, t, n, c; .reg .b16 hx, hd;\n"
            "ld.param.u64 pa, [a]; ld.param.u64 pb, [b]; ld.param.u64 po, [o];\n"
            "mov.u32 t, %tid.x; mov.u32 n, %ntid.x; mov.u32 c, %ctaid.x; mad.lo.u32 t, c, n, t; mul.wide.u32 at, t, 4;\n"
            "add.u64 pa, pa, at; add.u64 pb, pb, at; add.u64 po, po, at;\n"
            f"ld.global.b32 x, [pa]; {load_b} {source}\n"
            f"cvt.{form} {dst}, {operand}{second};\n"
            f"{widen} st.global.b32 [po], d;\nret;\n}}\n"
        )
        cases.append(
            Case(
                f"cvt.{form}",
                ptx,
                "k",
                [Buffer(a.tobytes()), Buffer(b.tobytes()), Buffer(bytes(a.nbytes))],
                grid=(a.size // 32, 1, 1),
                meta={"op": "cvt", "form": form, "sources": sources, "bits": bits},
            )
        )
    return cases


# --- mma ------------------------------------------------------------------------------------------------------------
WARPS = 6  # sets of operands per form, see _mma_operands


def mma_forms() -> list[dict]:
    forms = []

    def add(k: int, a: str, b: str, acc: str, suffix: str = "") -> None:
        forms.append({"op": "mma", "k": k, "a": a, "b": b, "acc": acc, "satfinite": bool(suffix)})

    for acc in ("f32", "f16"):
        for k in (8, 16):
            add(k, "f16", "f16", acc)
    for k in (8, 16):
        add(k, "bf16", "bf16", "f32")
    for k in (4, 8):
        add(k, "tf32", "tf32", "f32")
    for a in ("e4m3", "e5m2"):
        for b in ("e4m3", "e5m2"):
            for acc in ("f32", "f16"):
                for k in (16, 32):
                    add(k, a, b, acc)
    for a in ("s8", "u8"):
        for b in ("s8", "u8"):
            for k in (16, 32):
                add(k, a, b, "s32")
    add(32, "s8", "s8", "s32", ".satfinite")
    return forms


_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


def _encode(kind: str, values: np.ndarray) -> np.ndarray:
    """Element codes of values that the type holds exactly (or nearly: then truncated), as uint32."""
    values = np.asarray(values, np.float32)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    if kind == "bf16":
        return values.view(np.uint32) >> 16
    if kind == "tf32":
        return values.view(np.uint32)
    if kind in ("s8", "u8"):
        return values.astype(np.int64).astype(np.uint32) & 0xFF
    # e4m3 and e5m2: nearest of the table of non-negative codes
    mantissa, bias, last = (3, 7, 0x7E) if kind == "e4m3" else (2, 15, 0x7B)
    codes = np.arange(last + 1)
    exponent = codes >> mantissa
    table = np.where(
        exponent > 0,
        (1 + (codes & ((1 << mantissa) - 1)) / (1 << mantissa)) * 2.0 ** (exponent - bias),
        (codes & ((1 << mantissa) - 1)) * 2.0 ** (1 - bias - mantissa),
    )
    nearest = np.abs(np.abs(values)[..., None] - table).argmin(-1).astype(np.uint32)
    return nearest | (np.signbit(values).astype(np.uint32) << 7)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., 32 // bits] to 32-bit registers, element 0 lowest."""
    shifts = (np.arange(codes.shape[-1]) * bits).astype(np.uint32)
    return np.bitwise_or.reduce(codes.astype(np.uint32) << shifts, axis=-1).astype(np.uint32)


def _specials(kind: str) -> list[int]:
    return {
        "f16": [0x7C00, 0xFC00, 0x7E01, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0x8000],
        "bf16": [0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x8001, 0x007F, 0x7F7F, 0x8000],
        "tf32": [0x7F800000, 0xFF800000, 0x7FC00001, 0x00002000, 0x80002000, 0x3F801FFF, 0x7F7FE000, 0x80000000],
        "e4m3": [0x7F, 0xFF, 0x01, 0x81, 0x07, 0x7E, 0xFE, 0x80],
        "e5m2": [0x7C, 0xFC, 0x7D, 0x01, 0x81, 0x03, 0x7B, 0x80],
        "s8": [0x80, 0x7F, 0xFF],
        "u8": [0x80, 0x7F, 0xFF],
    }[kind]


def _mma_operands(form: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Registers [WARPS, registers, 32]: small integers, normals, wide exponents, specials in A, in B, and a large C."""
    rng = _rng(str(sorted(form.items())))
    acc_bits = 16 if form["acc"] == "f16" else 32

    def operand(kind: str, rows: int, special_warp: int) -> np.ndarray:
        bits = _BITS[kind]
        shape = (rows * form["k"] // (32 * 32 // bits), 32, 32 // bits)
        sets = []
        for warp in range(WARPS):
            if kind in ("s8", "u8"):
                codes = rng.integers(0, 256, shape).astype(np.uint32)
            elif warp == 0:
                codes = _encode(kind, rng.integers(-3, 4, shape))
            elif warp == 2:
                codes = _encode(kind, rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape))
            else:
                codes = _encode(kind, rng.standard_normal(shape))
            if warp == special_warp:
                where = rng.random(shape) < 0.02
                codes = np.where(where, rng.choice(_specials(kind), shape), codes)
            sets.append(_pack(codes, bits))
        return np.stack(sets)

    a, b = operand(form["a"], 16, 3), operand(form["b"], 8, 4)
    c_shape = (WARPS, 2 if acc_bits == 16 else 4, 32, 32 // acc_bits)
    if form["acc"] == "s32":
        c = rng.integers(-1000, 1000, c_shape).astype(np.int32)
        c[1] = rng.integers(-(2**31), 2**31, c_shape[1:], dtype=np.int64).astype(np.int32)
        c[2] = np.where(rng.random(c_shape[1:]) < 0.5, 2**31 - 1000, -(2**31) + 1000).astype(np.int32)
        c_codes = c.view(np.uint32)
    else:
        values = rng.integers(-8, 9, c_shape).astype(np.float32)
        values[1:] = rng.standard_normal(c_shape)[1:]
        values[5] *= 1000.0
        c_codes = _encode(form["acc"] if acc_bits == 16 else "tf32", values)
    return a, b, _pack(c_codes, acc_bits)


def mma_instruction(form: dict) -> str:
    satfinite = ".satfinite" if form["satfinite"] else ""
    acc, shape = form["acc"], f"m16n8k{form['k']}"
    return f"mma.sync.aligned.{shape}.row.col{satfinite}.{acc}.{form['a']}.{form['b']}.{acc}"


def mma_cases() -> list[Case]:
    cases = []
    for form in mma_forms():
        a, b, c = _mma_operands(form)
        counts = {"a": a.shape[1], "b": b.shape[1], "c": c.shape[1]}
        regs = {name: "{" + ", ".join(f"{name}{i}" for i in range(n)) + "}" for name, n in counts.items()}
        loads = "".join(
            f"ld.global.b32 {name}{i}, [p{name}+{128 * i}];\n" for name, n in counts.items() for i in range(n)
        )
        pointers = "".join(
            f"ld.param.u64 p{name}, [{name}]; mad.wide.u32 p{name}, w, {128 * counts[name]}, p{name}; "
            f"add.u64 p{name}, p{name}, at;\n"
            for name in counts
        )
        stores = "".join(f"st.global.b32 [pc+{128 * i}], c{i};\n" for i in range(counts["c"]))
        declare = " ".join(f".reg .b32 {name}<{n}>;" for name, n in counts.items())
        ptx = (
            f"{HEADER}.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c) {{\n"
            f".reg .b64 pa, pb, pc, at; .reg .b32 t, w; {declare}\n"
            "mov.u32 t, %tid.x; mov.u32 w, %ctaid.x; mul.wide.u32 at, t, 4;\n"
            f"{pointers}{loads}{mma_instruction(form)} {regs['c']}, {regs['a']}, {regs['b']}, {regs['c']};\n"
            f"{stores}ret;\n}}\n"
        )
        cases.append(
            Case(
                mma_instruction(form),
                ptx,
                "k",
                [Buffer(a.tobytes()), Buffer(b.tobytes()), Buffer(c.tobytes())],
                grid=(WARPS, 1, 1),
                meta=form,
            )
        )
    return cases


# --- ldmatrix, stmatrix, movmatrix ----------------------------------------------------------------------------------
SHARED_BYTES = 1024


def matrix_cases() -> list[Case]:
    cases = []
    for num in (1, 2, 4):
        for trans in ("", ".trans"):
            rng = _rng(f"matrix{num}{trans}")
            addresses = (rng.permutation(SHARED_BYTES // 16)[:32] * 16).astype(np.uint32)
            regs = "{" + ", ".join(f"r{i}" for i in range(num)) + "}"
            for op in ("ldmatrix", "stmatrix"):
                load = op == "ldmatrix"
                shared = rng.integers(0, 256, SHARED_BYTES).astype(np.uint8)
                registers = rng.integers(0, 2**32, (num, 32), dtype=np.uint64).astype(np.uint32)
                body = (
                    f"ldmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 {regs}, [x];\n"
                    if load
                    else f"stmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 [x], {regs};\n"
                )
                copy_in = "".join(
                    f"ld.global.b32 y, [ps+{128 * i}]; st.shared.b32 [s+{128 * i}], y;\n"
                    for i in range(SHARED_BYTES // 128)
                )
                copy_out = "".join(
                    f"ld.shared.b32 y, [s+{128 * i}]; st.global.b32 [ps+{128 * i}], y;\n"
                    for i in range(SHARED_BYTES // 128)
                )
                load_regs = "".join(f"ld.global.b32 r{i}, [pr+{128 * i}];\n" for i in range(num))
                store_regs = "".join(f"st.global.b32 [pr+{128 * i}], r{i};\n" for i in range(num))
                ptx = (
                    f"{HEADER}.visible .entry k(.param .u64 shared_, .param .u64 regs, .param .u64 where) {{\n"
                    f".shared .align 16 .b8 area[{SHARED_BYTES}];\n"
                    ".reg .b64 ps, pr, pw, at; .reg .b32 t, s, x, y, r<4>;\n"
                    "ld.param.u64 ps, [shared_]; ld.param.u64 pr, [regs]; ld.param.u64 pw, [where];\n"
                    "mov.u32 t, %tid.x; mul.wide.u32 at, t, 4; add.u64 ps, ps, at; add.u64 pr, pr, at; add.u64 pw, pw, at;\n"
                    "mov.u32 x, area; shl.b32 s, t, 2; add.u32 s, s, x; ld.global.b32 y, [pw]; add.u32 x, x, y;\n"
                    f"{copy_in}{load_regs}bar.sync 0;\n{body}bar.sync 0;\n"
                    f"{store_regs if load else copy_out}ret;\n}}\n"
                )
                cases.append(
                    Case(
                        f"{op}.x{num}{trans}",
                        ptx,
                        "k",
                        [Buffer(shared.tobytes()), Buffer(registers.tobytes()), Buffer(addresses.tobytes())],
                        meta={"op": op, "num": num, "trans": bool(trans)},
                    )
                )
    registers = _rng("movmatrix").integers(0, 2**32, 32, dtype=np.uint64).astype(np.uint32)
    ptx = (
        f"{HEADER}.visible .entry k(.param .u64 regs) {{\n"
        ".reg .b64 pr, at; .reg .b32 t, x, y;\n"
        "ld.param.u64 pr, [regs]; mov.u32 t, %tid.x; mul.wide.u32 at, t, 4; add.u64 pr, pr, at;\n"
        "ld.global.b32 x, [pr]; movmatrix.sync.aligned.m8n8.trans.b16 y, x; st.global.b32 [pr], y;\nret;\n}\n"
    )
    cases.append(Case("movmatrix", ptx, "k", [Buffer(registers.tobytes())], meta={"op": "movmatrix"}))
    return cases


__all__ = ["CVT_FORMS", "Case", "TensorMap", "Value", "cvt_cases", "matrix_cases", "mma_cases", "mma_forms"]
