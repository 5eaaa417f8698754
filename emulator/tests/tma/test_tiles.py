# SPDX-License-Identifier: Apache-2.0
"""The addresses of tiled copies, element by element, against the ISA's text (5.5.3, 5.5.7, 9.7.9.25.5.1).

``tests/tensor/test_golden.py`` compares Hopper's features with an H200 bit for bit. Here are the properties, the ISA's
swizzle tables, and features of newer GPUs only: packed types and wider swizzle atoms.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pure_functions as vsm
import pytest
from pure_functions import Descriptor

SIZES = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4]
NONE, B32, B64, B128, B128_ATOM32, B128_ATOM32_FLIP8, B128_ATOM64 = range(7)
U4, U4P, U6P = 13, 14, 15

# The ISA's tables: row = line of 128 bytes, entry = the 16-byte chunk that is found in this column.
TABLES = {
    NONE: ["01234567"],
    B32: ["01234567", "10325476"],
    B64: ["01234567", "10325476", "23016745", "32107654"],
    B128: ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
    B128_ATOM32: ["01234567", "23016745", "45670123", "67452301"],
    B128_ATOM64: ["01234567", "45670123"],
}


@pytest.mark.parametrize("swizzle", TABLES)
def test_swizzle_tables(swizzle: int) -> None:
    table = TABLES[swizzle]
    for line in range(24):
        for column, chunk in enumerate(table[line % len(table)]):
            for byte in (0, 7, 15):
                assert vsm.tma_swizzle(swizzle, 128 * line + 16 * int(chunk) + byte) == 128 * line + 16 * column + byte


def test_flip_of_8_bytes_on_every_other_line() -> None:
    """The 32-byte atoms, and the halves of every 16 bytes change places on odd lines."""
    for line, chunk, byte in itertools.product(range(16), range(8), range(16)):
        plain = vsm.tma_swizzle(B128_ATOM32, 128 * line + 16 * chunk + byte)
        flipped = vsm.tma_swizzle(B128_ATOM32_FLIP8, 128 * line + 16 * chunk + byte)
        assert flipped == (plain ^ 8 if line % 2 else plain)


def elements(d: Descriptor, coords: list[int], shared: int, store: bool = False) -> dict[int, int | str]:
    """Shared byte -> global byte, "fill" or "skip"."""
    out: dict[int, int | str] = {}
    for where, at, count, kind in d.runs(coords, shared, store):
        for i in range(count):
            assert at + i not in out, "no byte twice"
            out[at + i] = where + i if kind == "copy" else kind
    return out


def reference(d: Descriptor, coords: list[int], shared: int) -> dict[int, int | str]:
    """A load, one element at a time, swizzles from the ISA's tables."""
    size = SIZES[d.type]
    steps = d.element_strides or [1] * len(d.dims)
    counts = [d.box[0]] + [-(-box // step) for box, step in zip(d.box[1:], steps[1:])]
    span = {NONE: 0, B32: 32, B64: 64}.get(d.swizzle, 128)
    pitch = max(d.box[0] * size, span)
    table = TABLES[d.swizzle]
    out: dict[int, int | str] = {}
    for row, outer in enumerate(itertools.product(*(range(n) for n in reversed(counts[1:])))):
        index = [c + i * s for c, i, s in zip(coords[1:], reversed(outer), steps[1:])]
        inside_row = all(0 <= x < n for x, n in zip(index, d.dims[1:]))
        for i in range(counts[0]):
            x = coords[0] + i
            inside = inside_row and 0 <= x < d.dims[0]
            place = d.address + x * size + sum(j * s for j, s in zip(index, d.strides))
            for byte in range(size):
                offset = shared + row * pitch + i * size + byte
                line, in_line = divmod(offset, 128)
                column = table[line % len(table)].index(str(in_line // 16))
                out[128 * line + 16 * column + in_line % 16] = place + byte if inside else "fill"
    return out


CASES = {
    "u8, no swizzle": (Descriptor(1 << 20, 0, [100, 9], [112], [32, 4]), [16, 2], 128),
    "out of bounds below": (Descriptor(1 << 20, 1, [100, 9], [208], [16, 4]), [-8, -2], 0),
    "out of bounds above": (Descriptor(1 << 20, 1, [101, 9], [208], [16, 4]), [96, 7], 0),
    "all outside": (Descriptor(1 << 20, 1, [64, 9], [128], [16, 4]), [0, 9], 0),
    "32B swizzle": (Descriptor(1 << 20, 9, [64, 40], [144], [16, 20], swizzle=B32), [8, 3], 128),
    "64B swizzle, short rows": (Descriptor(1 << 20, 9, [64, 40], [144], [16, 20], swizzle=B64), [8, 3], 384),
    "128B swizzle": (Descriptor(1 << 20, 9, [128, 40], [272], [64, 24], swizzle=B128), [0, -3], 1024),
    "128B swizzle, float32 rows of 48 bytes": (
        Descriptor(1 << 20, 7, [64, 40], [272], [12, 10], swizzle=B128),
        [4, 3],
        640,
    ),
    "atoms of 32 bytes": (Descriptor(1 << 20, 9, [128, 40], [272], [64, 24], swizzle=B128_ATOM32), [72, 3], 256),
    "atoms of 64 bytes": (Descriptor(1 << 20, 9, [128, 40], [272], [64, 24], swizzle=B128_ATOM64), [72, 3], 128),
    "rank 1": (Descriptor(1 << 20, 8, [37], [], [16]), [28], 0),
    "rank 3 with steps": (Descriptor(1 << 20, 2, [20, 30, 9], [80, 2400], [8, 7, 5], [1, 3, 2]), [4, -2, 3], 0),
    "rank 4": (Descriptor(1 << 20, 4, [6, 5, 4, 3], [64, 320, 1280], [4, 3, 2, 2], swizzle=B32), [-2, 3, 1, 2], 128),
    "rank 5": (
        Descriptor(1 << 20, 0, [40, 3, 4, 3, 2], [48, 144, 576, 1728], [16, 2, 3, 2, 2], swizzle=B64),
        [32, 1, -1, 2, 1],
        512,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loads_element_by_element(case: str) -> None:
    d, coords, shared = CASES[case]
    assert d.check() == ""
    expected = reference(d, coords, shared)
    assert elements(d, coords, shared) == expected
    assert d.box_bytes() == len(expected), "the mbarrier counts the whole box, out of bounds or not"
    assert d.box_bytes(shared=True) >= d.box_bytes()


@pytest.mark.parametrize("seed", range(60))
def test_random_loads(seed: int) -> None:
    rng = np.random.default_rng([7, seed])
    rank, swizzle, type_ = int(rng.integers(1, 6)), int(rng.choice(list(TABLES))), int(rng.integers(0, 13))
    size = SIZES[type_]
    chunk = 16 // size  # elements in 16 bytes
    span = {NONE: 256, B32: 32, B64: 64}.get(swizzle, 128)
    box = [int(rng.integers(1, min(span // 16, 256 // chunk) + 1)) * chunk]
    box += [int(n) for n in rng.integers(1, (5, 40, 12, 6, 5)[rank - 1], rank - 1)]
    steps = [1] + [int(n) for n in rng.choice([1, 1, 2, 3], rank - 1)]
    dims = [int(rng.integers(1, 3 * box[0])), *(int(rng.integers(1, 3 * n + 1)) for n in box[1:])]
    strides, stride = [], -(-dims[0] * size // 16) * 16
    for dim in dims[1:]:
        strides.append(stride + 16 * int(rng.integers(0, 3)))
        stride = strides[-1] * dim
    coords = [int(rng.integers(-box[0] // chunk - 1, dims[0] // chunk + 2)) * chunk]
    coords += [int(rng.integers(-n, d + 1)) for n, d in zip(box[1:], dims[1:])]
    d = Descriptor(1 << 24, type_, dims, strides, box, steps, swizzle=swizzle)
    assert d.check() == "", d
    shared = 128 * int(rng.integers(0, 12))
    assert elements(d, coords, shared) == reference(d, coords, shared), (d, coords, shared)


@pytest.mark.parametrize("case", CASES)
def test_stores_are_loads_turned_round(case: str) -> None:
    """A store writes what a load reads; beyond the tensor, nothing but the rest of a row's last 16 bytes."""
    d, coords, shared = CASES[case]
    coords = [max(c, 0) for c in coords]
    loaded, stored = elements(d, coords, shared), elements(d, coords, shared, store=True)
    assert loaded.keys() == stored.keys()
    for byte, place in loaded.items():
        if place != "fill":
            assert stored[byte] == place
        elif stored[byte] != "skip":
            inner = (stored[byte] - d.address) % (d.strides[0] if d.strides else 1 << 40)
            row = d.dims[0] * SIZES[d.type]
            assert row <= inner < -(-row // 16) * 16


def test_runs_are_joined() -> None:
    """Rows that follow each other in both memories make one run; a swizzle cuts it into its atoms."""
    d = Descriptor(1 << 20, 0, [128, 64], [128], [128, 16])
    assert d.runs([0, 0], 1024) == [(1 << 20, 1024, 2048, "copy")]
    assert [n for _, _, n, _ in replace(d, dims=[128, 64], strides=[256]).runs([0, 0], 0)] == [128] * 16
    swizzled = replace(d, swizzle=B128).runs([0, 0], 1024)
    assert swizzled[0] == (1 << 20, 1024, 128, "copy"), "line 0 is not swizzled"
    assert swizzled[1] == ((1 << 20) + 128, 1024 + 128 + 16, 16, "copy")
    assert sum(n for _, _, n, _ in swizzled) == 2048


# --- packed types ---------------------------------------------------------------------------------------------------
def test_16u4_align16b_spreads_8_bytes_over_16() -> None:
    """A row of 128 elements: 64 bytes in global memory, eight slots of 8 bytes data and 8 bytes padding in shared."""
    d = Descriptor(1 << 20, U4P, [256, 64], [128], [128, 4])
    assert d.check() == ""
    found = elements(d, [128, 3], 512)
    assert len(found) == 4 * 128
    for row, group, byte in itertools.product(range(4), range(8), range(16)):
        expected = (1 << 20) + 128 * (3 + row) + 64 + 8 * group + byte if byte < 8 else "skip"
        assert found[512 + 128 * row + 16 * group + byte] == expected
    assert d.box_bytes() == 4 * 64, "the mbarrier counts the packed bytes"
    assert d.box_bytes(shared=True) == 4 * 128


def test_16u4_align16b_swizzled_and_out_of_bounds() -> None:
    d = Descriptor(1 << 20, U4P, [128, 6], [64], [128, 8], swizzle=B128)
    found = elements(d, [0, 2], 1024)
    for row, group in itertools.product(range(8), range(8)):
        column = TABLES[B128][row].index(str(group))
        expected = (1 << 20) + 64 * (2 + row) + 8 * group if row < 4 else "fill"
        assert found[1024 + 128 * row + 16 * column] == expected
        assert found[1024 + 128 * row + 16 * column + 8] == "skip"
    beyond = elements(d, [128, 0], 1024)
    assert {v for k, v in beyond.items() if k % 16 < 8} == {"fill"}


def test_16u4_align8b_is_packed_in_both_memories() -> None:
    d = Descriptor(1 << 20, U4, [64, 6], [48], [32, 4])
    found = elements(d, [32, 1], 0)
    assert found == {16 * row + byte: (1 << 20) + 48 * (1 + row) + 16 + byte for row in range(4) for byte in range(16)}
    assert d.box_bytes() == d.box_bytes(shared=True) == 64


def test_16u6_align16b_spreads_12_bytes_over_16() -> None:
    d = Descriptor(1 << 20, U6P, [256, 4], [192], [128, 2])
    found = elements(d, [128, 1], 128)
    for row, group, byte in itertools.product(range(2), range(8), range(16)):
        expected = (1 << 20) + 192 * (1 + row) + 96 + 12 * group + byte if byte < 12 else "skip"
        assert found[128 + 128 * row + 16 * group + byte] == expected
    assert d.box_bytes() == 192 and d.box_bytes(shared=True) == 256


# --- what is refused ------------------------------------------------------------------------------------------------
PLAIN = Descriptor(1 << 20, 0, [256, 16], [256], [64, 4])


@pytest.mark.parametrize(
    "d,coords,shared,store,text",
    [
        (PLAIN, [0, 0], 64, False, "the shared-memory address is 64, must be a multiple of 128"),
        (PLAIN, [8, 0], 0, False, "coordinate 0 is 8: the box must start at a multiple of 16 bytes along dimension 0"),
        (PLAIN, [-16, 0], 0, True, "coordinate 0 of a store is -16, must not be negative"),
        (PLAIN, [0, -1], 0, True, "coordinate 1 of a store is -1, must not be negative"),
        (
            replace(PLAIN, address=8),
            [0, 0],
            0,
            False,
            "the tensor map breaks a rule: globalAddress is 8, must be a multiple of 16",
        ),
        (
            replace(PLAIN, dims=[256, 16, 2], strides=[256, 4096], box=[64, 4, 1], interleave=1),
            [0, 0, 0],
            0,
            False,
            "interleaved tensor maps are not modelled",
        ),
        (
            Descriptor(1 << 20, U4P, [256, 4], [128], [128, 4]),
            [32, 0],
            0,
            False,
            "coordinate 0 is 32, must be a multiple of 128 with this packed type",
        ),
        (
            Descriptor(1 << 20, U4P, [256, 4], [128], [128, 4]),
            [0, 0],
            0,
            True,
            "a packed type with padding cannot be stored from shared memory",
        ),
        (
            Descriptor(1 << 20, U4, [66, 4], [48], [32, 4]),
            [0, 0],
            0,
            False,
            "a packed tensor whose rows are not whole groups of 16 elements is not modelled",
        ),
    ],
)
def test_refusals(d: Descriptor, coords: list[int], shared: int, store: bool, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        d.runs(coords, shared, store)


# --- elements -------------------------------------------------------------------------------------------------------
def test_fill() -> None:
    zero = Descriptor(1 << 20, 9, [64], [], [16])
    assert zero.fill_bytes(16).tolist() == [0] * 16
    assert replace(zero, fill=1).fill_bytes(8).tobytes() == bytes.fromhex("f77f" * 4)


def test_reductions_that_do_not_exist() -> None:
    data = np.zeros(16, np.uint8)
    u8, u32, s32, u64, s64, f16, f64 = 0, 2, 3, 4, 5, 6, 8
    for type_, op in (
        (u8, "add"),
        (f64, "add"),
        (s64, "add"),
        (s64, "and"),
        (f16, "and"),
        (s32, "inc"),
        (u64, "dec"),
        (U4, "add"),
        (7, "min"),
    ):
        assert vsm.tma_reduce(type_, op, data, data) is None, (type_, op)
    assert vsm.tma_reduce(u32, "inc", data, data) is not None


def test_inc_and_dec_wrap() -> None:
    def run(op: str, old: int, limit: int) -> int:
        return int(
            vsm.tma_reduce(2, op, np.uint32([old]).view(np.uint8), np.uint32([limit]).view(np.uint8)).view(np.uint32)[0]
        )

    assert [run("inc", *x) for x in ((4, 5), (5, 5), (9, 5), (0, 0))] == [5, 0, 0, 0]
    assert [run("dec", *x) for x in ((4, 5), (0, 5), (6, 5), (5, 5))] == [3, 5, 5, 4]
