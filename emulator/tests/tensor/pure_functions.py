# SPDX-License-Identifier: Apache-2.0
"""``src/tensor`` and ``src/tma`` as Python functions on numpy arrays, compiled on first use.

``VSM_TEST_SANITIZE=1`` compiles with AddressSanitizer and UndefinedBehaviorSanitizer; preload the former::

    VSM_TEST_SANITIZE=1 LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 pytest ...
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
EMULATOR = HERE.parents[1]

TYPES = {
    name: i
    for i, name in enumerate(
        "f16 bf16 tf32 f32 f64 e4m3 e5m2 e3m2 e2m3 e2m1 ue8m0 ue4m3 s8 u8 s4 u4 s32 b1 none".split()
    )
}
KINDS = {name: i for i, name in enumerate(("", "f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4"))}
ROUNDS = {name: i for i, name in enumerate(("rn", "rz", "rm", "rp", "rna", "rs"))}
SHAPES = {name: i for i, name in enumerate(("m8n8", "m16n16", "m8n16", "m16n8"))}
MATRIX_TYPES = {name: i for i, name in enumerate(("b16", "b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64"))}
REDUCTIONS = {name: i for i, name in enumerate("add min max inc dec and or xor".split())}
U32, U64, I32, U8, F32, U16 = np.uint32, np.uint64, np.int32, np.uint8, np.float32, np.uint16


@functools.cache
def library() -> ctypes.CDLL:
    sanitize = os.environ.get("VSM_TEST_SANITIZE") == "1"
    sources = [
        *sorted((EMULATOR / "src/tensor").glob("*.cpp")),
        *sorted((EMULATOR / "src/tma").glob("*.cpp")),
        HERE / "pure_functions.cpp",
    ]
    headers = [
        p
        for folder in ("src", "src/tensor", "src/tma", "src/numerics")
        for p in sorted((EMULATOR / folder).glob("*.h"))
    ]
    flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-math-errno"]
    if sanitize:
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    compiler = os.environ.get("CXX", "g++")
    digest = hashlib.sha256(" ".join([compiler, *flags]).encode())
    for path in [*sources, *headers]:
        digest.update(path.read_bytes())
    target = EMULATOR / "build" / "tests" / f"pure_functions_{digest.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, *flags, "-shared", "-I", str(EMULATOR / "src"), "-o", str(partial), *map(str, sources)],
            check=True,
        )
        partial.replace(target)
    lib = ctypes.CDLL(str(target))
    lib.test_mma_check_scale.restype = ctypes.c_char_p
    lib.test_tma_box_bytes.restype = lib.test_tma_swizzle.restype = ctypes.c_uint32
    return lib


def _array(values: object, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=dtype)


def _p(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


# --- mma ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mma:
    """``mma.sync.aligned.m16n8k<k>.row.col{.kind::<kind>}....<acc>.<a>.<b>.<acc>{.<scale>}``."""

    k: int
    a: str
    b: str
    acc: str = "f32"
    kind: str = ""
    scale: str = "none"
    scale_vec: int = 0
    satfinite: bool = False
    c: str | None = None  # C's type where it differs from D's (no form allows it)

    def fields(self) -> np.ndarray:
        c = TYPES[self.c or self.acc]
        return _array(
            [
                KINDS[self.kind],
                self.k,
                TYPES[self.a],
                TYPES[self.b],
                c,
                TYPES[self.acc],
                TYPES[self.scale],
                self.scale_vec,
                self.satfinite,
            ],
            I32,
        )

    def registers(self) -> tuple[int, ...] | None:
        """Registers of A, B, C, D; None if there is no such form."""
        counts = np.zeros(4, I32)
        return tuple(counts.tolist()) if library().test_mma_registers(_p(self.fields()), _p(counts)) else None

    def check_scale(self, ids: tuple[int, int, int, int]) -> str:
        return library().test_mma_check_scale(_p(self.fields()), _p(_array(ids, U16))).decode()

    def __call__(
        self, a, b, c, scale_a=None, scale_b=None, ids=(0, 0, 0, 0), in_place=False, accumulation_bits=0
    ) -> np.ndarray:
        """D's registers [registers, 32], from those of the other operands."""
        a, b, c = (_array(x, U32) for x in (a, b, c))
        counts = self.registers()
        assert counts and (len(a), len(b), len(c)) == counts[:3], (counts, len(a), len(b), len(c))
        zero = np.zeros(32, U32)
        sa, sb = (_array(zero if s is None else s, U32) for s in (scale_a, scale_b))
        d = c.copy() if in_place else np.full((counts[3], 32), 0xDEADBEEF, U32)
        addends = d if in_place else c
        arrays = (self.fields(), d, a, b, addends, sa, sb, _array(ids, U16))
        library().test_mma(*map(_p, arrays), accumulation_bits)
        return d


# --- ldmatrix, stmatrix, movmatrix ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Matrix:
    shape: str = "m8n8"
    type: str = "b16"
    num: int = 1
    trans: bool = False

    def fields(self) -> np.ndarray:
        return _array([SHAPES[self.shape], MATRIX_TYPES[self.type], self.num, self.trans], I32)

    def registers(self, store: bool = False) -> int:
        """0 if there is no such form."""
        return library().test_matrix_registers(_p(self.fields()), int(store))

    def rows(self) -> tuple[int, int, int, list[int]]:
        """Rows, bytes of a row, bytes of it that matter, lanes that give the rows' addresses."""
        out = np.zeros(3 + 64, I32)
        library().test_matrix_rows(_p(self.fields()), _p(out))
        return int(out[0]), int(out[1]), int(out[2]), out[3 : 3 + out[0]].tolist()

    def load(self, rows: np.ndarray) -> np.ndarray:
        d = np.zeros((self.registers(), 32), U32)
        library().test_ldmatrix(_p(self.fields()), _p(d), _p(_array(rows, U8)))
        return d

    def store(self, registers: np.ndarray) -> np.ndarray:
        count, size, _, _ = self.rows()
        rows = np.full((count, size), 0xEE, U8)
        library().test_stmatrix(_p(self.fields()), _p(_array(registers, U32)), _p(rows))
        return rows


def movmatrix(registers: np.ndarray) -> np.ndarray:
    d = np.zeros(32, U32)
    library().test_movmatrix(_p(d), _p(_array(registers, U32)))
    return d


# --- cvt ------------------------------------------------------------------------------------------------------------
def cvt_supported(dst: str, src: str, round_: str = "rn", satfinite: bool = False, relu: bool = False) -> bool:
    return bool(library().test_cvt_supported(TYPES[dst], TYPES[src], ROUNDS[round_], satfinite, relu))


def cvt_f32x2_to_narrow(dst: str, hi, lo, round_: str = "rn", satfinite: bool = True, relu: bool = False) -> np.ndarray:
    hi, lo = _array(hi, F32), _array(lo, F32)
    out = np.zeros(hi.size, U32)
    library().test_cvt_f32x2_to_narrow(TYPES[dst], ROUNDS[round_], satfinite, relu, _p(hi), _p(lo), _p(out), out.size)
    return out


def cvt_f16x2_to_narrow(
    dst: str, src: str, packed, round_: str = "rn", satfinite: bool = True, relu: bool = False
) -> np.ndarray:
    packed = _array(packed, U32)
    out = np.zeros(packed.size, U32)
    library().test_cvt_f16x2_to_narrow(
        TYPES[dst], TYPES[src], ROUNDS[round_], satfinite, relu, _p(packed), _p(out), out.size
    )
    return out


def cvt_narrow_to_f16x2(src: str, packed, dst: str = "f16", relu: bool = False) -> np.ndarray:
    packed = _array(packed, U32)
    out = np.zeros(packed.size, U32)
    library().test_cvt_narrow_to_f16x2(TYPES[src], TYPES[dst], relu, _p(packed), _p(out), out.size)
    return out


def cvt_f32_to(dst: str, values, round_: str = "rn", satfinite: bool = False, relu: bool = False) -> np.ndarray:
    values = _array(values, F32)
    out = np.zeros(values.size, U32)
    library().test_cvt_f32_to(TYPES[dst], ROUNDS[round_], satfinite, relu, _p(values), _p(out), out.size)
    return out


def to_float(type_: str, bits) -> np.ndarray:
    bits = _array(bits, U32)
    out = np.zeros(bits.size, F32)
    library().test_to_float(TYPES[type_], _p(bits), _p(out), out.size)
    return out


# --- tensor maps ----------------------------------------------------------------------------------------------------
@dataclass
class Descriptor:
    """``vsm::tma::Descriptor``; enums by the driver's values."""

    address: int = 0x10000
    type: int = 0
    dims: list[int] = field(default_factory=lambda: [64])
    strides: list[int] = field(default_factory=list)
    box: list[int] = field(default_factory=lambda: [16])
    element_strides: list[int] | None = None
    interleave: int = 0
    swizzle: int = 0
    fill: int = 0
    promotion: int = 0
    rank: int | None = None

    def fields(self) -> np.ndarray:
        def padded(values: list[int], length: int, value: int) -> list[int]:
            return list(values) + [value] * (length - len(values))

        head = [
            self.address,
            len(self.dims) if self.rank is None else self.rank,
            self.type,
            self.interleave,
            self.swizzle,
            self.fill,
            self.promotion,
        ]
        dims, strides = padded(self.dims, 5, 1), padded(self.strides, 4, 0)
        return _array(head + dims + strides + padded(self.box, 5, 1) + padded(self.element_strides or [], 5, 1), U64)

    def check(self) -> str:
        return _text(lambda buffer, size: library().test_tma_check(_p(self.fields()), buffer, size))

    def encode(self) -> np.ndarray:
        image = np.zeros(128, U8)
        library().test_tma_encode(_p(self.fields()), _p(image))
        return image

    def box_bytes(self, shared: bool = False) -> int:
        return library().test_tma_box_bytes(_p(self.fields()), int(shared))

    def runs(self, coords: list[int], shared: int = 0, store: bool = False) -> list[tuple[int, int, int, str]]:
        """(global, shared, bytes, kind) of each run; ValueError with the text if the copy breaks a rule."""
        runs = np.zeros((65536, 4), U64)
        buffer = ctypes.create_string_buffer(512)
        count = library().test_tma_runs(
            _p(self.fields()),
            _p(_array(coords + [0] * (5 - len(coords)), I32)),
            shared,
            int(store),
            _p(runs),
            len(runs),
            buffer,
            512,
        )
        if buffer.value:
            raise ValueError(buffer.value.decode())
        assert count <= len(runs)
        kinds = ("copy", "fill", "skip")
        return [(int(g), int(s), int(n), kinds[int(k)]) for g, s, n, k in runs[:count]]

    def fill_bytes(self, count: int) -> np.ndarray:
        out = np.full(count, 0xEE, U8)
        library().test_tma_fill(_p(self.fields()), _p(out), count)
        return out


def _text(call) -> str:
    buffer = ctypes.create_string_buffer(512)
    call(buffer, 512)
    return buffer.value.decode()


def tma_decode(image: np.ndarray) -> np.ndarray | None:
    fields = np.zeros(26, U64)
    return fields if library().test_tma_decode(_p(_array(image, U8)), _p(fields)) else None


def tma_replace(image: np.ndarray, field_: str, ordinal: int, value: int) -> str:
    """Changes ``image`` in place."""
    return _text(
        lambda buffer, size: library().test_tma_replace(
            _p(image), field_.encode(), ordinal, ctypes.c_uint64(value), buffer, size
        )
    )


def tma_swizzle(swizzle: int, address: int) -> int:
    return library().test_tma_swizzle(swizzle, address)


def tma_convert(type_: int, data: np.ndarray) -> np.ndarray:
    out = _array(data, U8).copy()
    library().test_tma_convert(type_, _p(out), out.size)
    return out


def tma_reduce(type_: int, op: str, dst: np.ndarray, src: np.ndarray) -> np.ndarray | None:
    out = _array(dst, U8).copy()
    return out if library().test_tma_reduce(type_, REDUCTIONS[op], _p(out), _p(_array(src, U8)), out.size) else None
