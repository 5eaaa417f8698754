# SPDX-License-Identifier: Apache-2.0
"""Tensor copies (``cp.async.bulk.tensor``, ``cp.reduce.async.bulk.tensor``) with their tensor maps and memories."""

from __future__ import annotations

import struct

import numpy as np
from ptx_cases import HEADER, _rng
from runner_file import Buffer, Case, TensorMap, Value

IMAGE_BYTES = 8192  # of shared memory, 1,024-byte aligned, filled from a buffer first
UNTOUCHED = 0xEE
TYPES = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz"]
SIZES = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4]


def _ptx(rank: int, instruction: str) -> str:
    """The kernel around a copy; in ``instruction``, ``@C`` stands for the coordinates."""
    coordinates = "{" + ", ".join(f"c{i}" for i in range(rank)) + "}"
    load = "mbarrier" in instruction
    finish = (
        "mov.u32 n, 0;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [bar], 0;\n@p bra DONE;\n"
        "add.u32 n, n, 1; setp.lt.u32 p, n, 4096; @p bra WAIT;\nst.global.b32 [ps], n;\nDONE:\n"
        if load
        else "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"
    )
    return (
        f"{HEADER}.visible .entry k(.param .align 64 .b8 map[128], .param .u64 tensor, .param .u64 image, .param .u64 status,\n"
        "  .param .s32 k0, .param .s32 k1, .param .s32 k2, .param .s32 k3, .param .s32 k4, .param .u32 off, .param .u32 tx) {\n"
        f".shared .align 1024 .b8 area[{IMAGE_BYTES}];\n.shared .align 8 .b64 bar;\n"
        ".reg .b64 m, pi, ps, at; .reg .b32 t, s, x, n, d, bytes, c<5>; .reg .pred p, q;\n"
        "mov.b64 m, map; cvta.param.u64 m, m; ld.param.u64 pi, [image]; ld.param.u64 ps, [status];\n"
        + "".join(f"ld.param.s32 c{i}, [k{i}];\n" for i in range(5))
        + "ld.param.u32 d, [off]; ld.param.u32 bytes, [tx]; mov.u32 x, area; add.u32 d, d, x;\n"
        "mov.u32 t, %tid.x; setp.eq.u32 q, t, 0; mul.wide.u32 at, t, 4; add.u64 pi, pi, at; shl.b32 s, t, 2; add.u32 s, s, x;\n"
        + "".join(f"ld.global.b32 x, [pi+{i}]; st.shared.b32 [s+{i}], x;\n" for i in range(0, IMAGE_BYTES, 128))
        + "@q mbarrier.init.shared::cta.b64 [bar], 1;\n"
        "fence.proxy.async; bar.sync 0;\n@!q bra JOIN;\n"
        + ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], bytes;\n" if load else "")
        + instruction.replace("@C", coordinates)
        + f"\n{finish}JOIN: bar.sync 0;\n"
        + "".join(f"ld.shared.b32 x, [s+{i}]; st.global.b32 [pi+{i}], x;\n" for i in range(0, IMAGE_BYTES, 128))
        + "ret;\n}\n"
    )


def _instruction(op: str, rank: int) -> str:
    if op == "load":
        return f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [d], [m, @C], [bar];"
    if op == "store":
        return f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [m, @C], [d];"
    return f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{op}.tile.bulk_group [m, @C], [d];"


def _case(
    name: str, op: str, tensor_map: TensorMap, coords: list[int], tensor: np.ndarray, image: np.ndarray, offset: int
) -> Case:
    rank = len(tensor_map.dims)
    steps = tensor_map.element_strides or [1] * rank
    size = SIZES[tensor_map.type]
    tx = size * tensor_map.box[0]
    for box, step in zip(tensor_map.box[1:], steps[1:]):
        tx *= -(-box // step)
    values = [Value(struct.pack("<i", c)) for c in (coords + [0] * 5)[:5]] + [
        Value(struct.pack("<I", v)) for v in (offset, tx)
    ]
    # The map comes first in the kernel's parameters, but its buffer must exist: the runner takes them in order.
    return Case(
        name,
        _ptx(rank, _instruction(op, rank)).replace(
            "(.param .align 64 .b8 map[128], .param .u64 tensor,", "(.param .u64 tensor, .param .align 64 .b8 map[128],"
        ),
        "k",
        [Buffer(tensor.tobytes()), tensor_map, Buffer(image.tobytes()), Buffer(bytes(4)), *values],
        meta={
            "op": op,
            "type": tensor_map.type,
            "dims": tensor_map.dims,
            "strides": tensor_map.strides,
            "box": tensor_map.box,
            "steps": steps,
            "swizzle": tensor_map.swizzle,
            "fill": tensor_map.fill,
            "coords": coords,
            "offset": offset,
        },
    )


def _bytes(name: str, count: int) -> np.ndarray:
    return _rng(name).integers(0, 256, count).astype(np.uint8)


def _interesting(element: str, name: str, count: int) -> np.ndarray:
    """Elements of a type, edge values among them, as bytes."""
    rng = _rng(name)
    if element in ("f32", "f32.ftz", "tf32", "tf32.ftz"):
        edges = np.array(
            [
                0,
                1,
                0x7FFFFF,
                0x800000,
                0x7F800000,
                0xFF800000,
                0x7FC00000,
                0x7F800001,
                0x80000000,
                0x80000001,
                0x3F801000,
                0x3F800FFF,
                0x3F801001,
                0x3F803000,
                0xBF801000,
                0x7F7FFFFF,
                0x00001000,
            ],
            np.uint32,
        )
        normals = rng.standard_normal(count).astype(np.float32).view(np.uint32)
        return np.where(rng.random(count) < 0.4, rng.choice(edges, count), normals).astype(np.uint32).view(np.uint8)
    if element in ("f16", "bf16"):
        infinity = 0x7C00 if element == "f16" else 0x7F80
        edges = np.array(
            [0, 1, infinity - 1, infinity, infinity | 0x8000, infinity + 1, 0x7FFF, 0xFFFF, 0x8000, 0x8001, 3],
            np.uint16,
        )
        normals = rng.integers(0, 65536, count).astype(np.uint16) & np.uint16(0xBFFF)
        return np.where(rng.random(count) < 0.4, rng.choice(edges, count), normals).astype(np.uint16).view(np.uint8)
    size = SIZES[TYPES.index(element)]
    edges = [0, 1, 2, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1]
    small = rng.integers(0, 7, count)
    values = [
        edges[i] if pick < 0.4 else int(s)
        for i, pick, s in zip(rng.integers(0, len(edges), count), rng.random(count), small)
    ]
    return np.array(values, dtype=f"<u{size}").view(np.uint8)


def _strides(dims: list[int], size: int) -> list[int]:
    strides, stride = [], -(-dims[0] * size // 16) * 16 + 16  # rows padded, so that a wrong stride shows
    for dim in dims[1:]:
        strides.append(stride)
        stride *= dim
    return strides


def load_cases() -> list[Case]:
    cases = []
    blank = np.full(IMAGE_BYTES, UNTOUCHED, np.uint8)

    def add(
        name: str,
        type_: int,
        dims: list[int],
        box: list[int],
        coords: list[int],
        steps: list[int] | None = None,
        swizzle: int = 0,
        fill: int = 0,
        offset: int = 0,
    ) -> None:
        size = SIZES[type_]
        strides = _strides(dims, size)
        count = (strides[-1] * dims[-1] if strides else dims[0] * size) // size
        tensor = _interesting(TYPES[type_], name, count)
        tensor_map = TensorMap(0, type_, dims, strides, box, steps, swizzle=swizzle, fill=fill)
        cases.append(_case(f"load.{name}", "load", tensor_map, coords, tensor, blank, offset))

    for type_, element in enumerate(TYPES):  # all types, the box beyond the tensor at both ends
        chunk = 16 // SIZES[type_]  # the box must start at a multiple of 16 bytes
        dims = [3 * chunk - (1 if SIZES[type_] == 8 else 3), 5]
        add(f"{element}.low", type_, dims, [2 * chunk, 4], [-chunk, -1])
        fill = 1 if element[0] in "fbt" else 0
        add(f"{element}.high", type_, dims, [2 * chunk, 4], [2 * chunk, 3], fill=fill)
    for swizzle, span in ((1, 32), (2, 64), (3, 128)):  # full rows, short rows, and bases off the pattern's start
        for width in (16, 32, 48, 64, 96, 128):
            if width > span:
                continue
            for offset in (0, 128, 384, 640):
                add(
                    f"swizzle{span}.width{width}.at{offset}",
                    0,
                    [160, 40],
                    [width, 20],
                    [16, 3],
                    swizzle=swizzle,
                    offset=offset,
                )
    add("rank1", 1, [300], [64], [8])
    add("rank1.ends", 1, [300], [64], [280])
    add("rank3", 1, [40, 6, 5], [24, 3, 4], [8, 1, 2])
    add("rank3.out", 1, [40, 6, 5], [24, 3, 4], [24, -1, 3])
    add("rank4", 2, [12, 5, 4, 3], [8, 3, 2, 2], [4, 1, 1, 1])
    add("rank4.out", 2, [12, 5, 4, 3], [8, 3, 2, 2], [-4, 4, -1, 2], swizzle=1)
    add("rank5", 0, [48, 4, 3, 4, 3], [32, 2, 3, 2, 2], [16, 2, 0, 1, 1], swizzle=3)
    add("rank5.out", 0, [48, 4, 3, 4, 3], [32, 2, 3, 2, 2], [32, 3, -1, 3, -1])
    add("steps2", 1, [40, 20], [24, 9], [8, 4], steps=[1, 2])
    add("steps3.out", 1, [40, 20, 7], [24, 9, 5], [-8, 14, -2], steps=[1, 3, 2], swizzle=2)
    add("steps8", 1, [40, 50], [24, 17], [0, -5], steps=[1, 8])
    add("step0.ignored", 1, [64, 8], [24, 4], [8, 1], steps=[2, 1])
    add("outside", 0, [64, 8], [32, 4], [96, 2])
    add("outside.below", 6, [64, 8], [16, 4], [8, -9], fill=1)
    return cases


def store_cases() -> list[Case]:
    cases = []

    def add(
        name: str,
        op: str,
        type_: int,
        dims: list[int],
        box: list[int],
        coords: list[int],
        steps: list[int] | None = None,
        swizzle: int = 0,
        offset: int = 0,
    ) -> None:
        size = SIZES[type_]
        strides = _strides(dims, size)
        count = (strides[-1] * dims[-1] if strides else dims[0] * size) // size
        full = f"{op}.{name}"
        tensor = _interesting(TYPES[type_], full, count)
        image = _interesting(TYPES[type_], full + ".image", IMAGE_BYTES // size)
        cases.append(
            _case(
                full, op, TensorMap(0, type_, dims, strides, box, steps, swizzle=swizzle), coords, tensor, image, offset
            )
        )

    for type_, element in enumerate(TYPES):
        row = 32 // SIZES[type_]
        add(element, "store", type_, [row + row // 2 - 1, 5], [row, 4], [row // 2, 2])
    for swizzle, span in ((1, 32), (2, 64), (3, 128)):
        add(f"swizzle{span}", "store", 0, [160, 24], [span, 20], [48, 3], swizzle=swizzle, offset=256)
        add(f"swizzle{span}.short", "store", 0, [160, 24], [span // 2, 20], [48, 3], swizzle=swizzle, offset=128)
    add("rank3.out", "store", 1, [40, 6, 5], [24, 3, 4], [24, 4, 3])
    add("steps", "store", 1, [40, 20], [24, 9], [8, 4], steps=[1, 2])
    reductions = {
        "add": ("u32", "s32", "u64", "f32", "f16", "bf16", "f32.ftz"),
        "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
        "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
        "inc": ("u32",),
        "dec": ("u32",),
        "and": ("u32", "u64", "s32"),
        "or": ("u32", "u64"),
        "xor": ("u32", "u64"),
    }
    for op, elements in reductions.items():
        for element in elements:
            type_ = TYPES.index(element)
            row = 128 // SIZES[type_]
            add(element, op, type_, [row + row // 8, 12], [row, 10], [row // 8, 3], swizzle=3)
    add("u32.partial", "add", TYPES.index("u32"), [43, 12], [32, 10], [16, 3])  # the tensor ends inside 16 bytes
    add("bf16.partial", "max", TYPES.index("bf16"), [43, 12], [32, 10], [16, 3])
    add("u64.partial", "xor", TYPES.index("u64"), [11, 12], [8, 10], [4, 3])
    return cases


__all__ = ["IMAGE_BYTES", "SIZES", "TYPES", "UNTOUCHED", "load_cases", "store_cases", "_bytes"]
