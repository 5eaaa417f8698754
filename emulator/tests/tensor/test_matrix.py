# SPDX-License-Identifier: Apache-2.0
"""ldmatrix, stmatrix, movmatrix (PTX ISA 9.0, 9.7.14.5.15 to .17)."""

from __future__ import annotations

import numpy as np
import pure_functions as vsm
import pytest
from fragments import c_place
from pure_functions import Matrix


def random(seed: int = 11) -> np.random.Generator:
    print("seed", seed)
    return np.random.default_rng(seed)


def load_rows(form: Matrix) -> np.ndarray:
    count, size, _, _ = form.rows()
    return random().integers(0, 256, (count, size)).astype(np.uint8)


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_b16(num: int, trans: bool) -> None:
    form = Matrix(num=num, trans=trans)
    rows = load_rows(form)
    matrices = rows.view(np.uint16).reshape(num, 8, 8)
    if trans:
        matrices = matrices.transpose(0, 2, 1)
    d = form.load(rows)
    for matrix in range(num):
        for lane in range(32):
            row, column = lane // 4, 2 * (lane % 4)  # figure 104
            low, high = int(matrices[matrix, row, column]), int(matrices[matrix, row, column + 1])
            assert d[matrix, lane] == high << 16 | low


def nibbles(row: np.ndarray) -> np.ndarray:
    """The 16 packed 4-bit elements at the front of a row."""
    return np.stack([row[..., :8] & 15, row[..., :8] >> 4], axis=-1).reshape(*row.shape[:-1], 16)


def sixes(row: np.ndarray) -> np.ndarray:
    """The 16 packed 6-bit elements at the front of a row."""
    bits = np.unpackbits(row[..., :12], axis=-1, bitorder="little").reshape(*row.shape[:-1], 16, 6)
    return (bits * (1 << np.arange(6))).sum(-1).astype(np.uint8)


ELEMENTS = {"b8": lambda row: row, "b8x16.b4x16_p64": nibbles, "b8x16.b6x16_p32": sixes}


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("type_", ["b8x16.b4x16_p64", "b8x16.b6x16_p32"])
def test_ldmatrix_m8n16(type_: str, num: int) -> None:
    form = Matrix("m8n16", type_, num)
    rows = load_rows(form)
    elements = ELEMENTS[type_](rows).reshape(num, 8, 16)
    d = form.load(rows)
    for matrix in range(num):
        for lane in range(32):
            four = elements[matrix, lane // 4, 4 * (lane % 4) :][:4]  # figure 106: four neighbours of a row
            assert d[matrix, lane] == int.from_bytes(four.tobytes(), "little")


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("type_", ["b8", "b8x16.b4x16_p64", "b8x16.b6x16_p32"])
def test_ldmatrix_m16n16_transposed(type_: str, num: int) -> None:
    """Figure 105 on the transpose: lane 4*r + t gets columns 4t..4t+3 of row r, then of row r + 8."""
    form = Matrix("m16n16", type_, num, trans=True)
    rows = load_rows(form)
    assert form.rows()[3] == list(range(16 * num)), "sixteen addresses a matrix"
    transposed = ELEMENTS[type_](rows).reshape(num, 16, 16).transpose(0, 2, 1)
    d = form.load(rows)
    for matrix in range(num):
        for half in range(2):
            for lane in range(32):
                four = np.ascontiguousarray(transposed[matrix, lane // 4 + 8 * half, 4 * (lane % 4) :][:4])
                assert d[2 * matrix + half, lane] == int.from_bytes(four.tobytes(), "little")


def test_widened_elements_have_zero_padding_and_the_rows_padding_does_not_matter() -> None:
    for type_, mask in (("b8x16.b4x16_p64", 0x0F0F0F0F), ("b8x16.b6x16_p32", 0x3F3F3F3F)):
        form = Matrix("m8n16", type_, 4)
        rows = load_rows(form)
        data = form.rows()[2]
        assert data == (8 if "b4" in type_ else 12)
        d = form.load(rows)
        assert not (d & ~np.uint32(mask)).any()
        rows[:, data:] ^= 0xFF
        assert np.array_equal(form.load(rows), d)


def test_e2m1_of_a_padded_row_feeds_an_mma_after_a_shift() -> None:
    """b4x16_p64 leaves elements in bits 3..0, kind::f8f6f4 wants them in bits 5..2: `<< 2`, as upstream kernels do."""
    row = np.zeros((8, 16), np.uint8)
    row[:, :8] = 0x22  # e2m1 1.0, sixteen of them
    loaded = Matrix("m8n16", "b8x16.b4x16_p64", 1).load(row)[0]
    form = vsm.Mma(32, "e2m1", "e4m3", "f32", "f8f6f4")
    d = form(np.stack([loaded << np.uint32(2)] * 4), np.full((2, 32), 0x38383838), np.zeros((4, 32)))
    assert (d.view(np.float32) == 32.0).all()


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_b16_undoes_ldmatrix(num: int, trans: bool) -> None:
    form = Matrix(num=num, trans=trans)
    rows = load_rows(form)
    assert np.array_equal(form.store(form.load(rows)), rows)
    registers = np.arange(32 * num, dtype=np.uint32).reshape(num, 32) * 0x01000193
    stored = form.store(registers).view(np.uint16).reshape(num, 8, 8)
    stored = stored.transpose(0, 2, 1) if trans else stored
    for matrix in range(num):
        for lane in range(32):
            assert stored[matrix, lane // 4, 2 * (lane % 4)] == registers[matrix, lane] & 0xFFFF
            assert stored[matrix, lane // 4, 2 * (lane % 4) + 1] == registers[matrix, lane] >> 16


@pytest.mark.parametrize("num", [1, 2, 4])
def test_stmatrix_m16n8_b8(num: int) -> None:
    """Figure 108: a lane's bytes lie as an accumulator's elements; .trans stores columns of 16 bytes."""
    form = Matrix("m16n8", "b8", num, trans=True)
    registers = random().integers(0, 2**32, (num, 32), dtype=np.uint64).astype(np.uint32)
    columns = form.store(registers).reshape(num, 8, 16)
    for matrix in range(num):
        for lane in range(32):
            for i in range(4):
                row, column = c_place(lane, i)
                assert columns[matrix, column, row] == (int(registers[matrix, lane]) >> (8 * i)) & 0xFF


def test_movmatrix() -> None:
    registers = random().integers(0, 2**32, 32, dtype=np.uint64).astype(np.uint32)
    matrix = registers.view(np.uint16).reshape(8, 8)
    assert np.array_equal(vsm.movmatrix(registers), np.ascontiguousarray(matrix.T).view(np.uint32).ravel())
    in_place = registers.copy()
    vsm.library().test_movmatrix(vsm._p(in_place), vsm._p(in_place))
    assert np.array_equal(in_place, vsm.movmatrix(registers)), "d may be s"


def test_addresses_come_from_consecutive_lanes() -> None:
    for num in (1, 2, 4):
        assert Matrix(num=num).rows() == (8 * num, 16, 16, list(range(8 * num)))


def test_forms() -> None:
    """The forms that ptxas 13.0 takes for sm_121a, and those that it refuses."""
    assert [Matrix(num=n).registers() for n in (1, 2, 4)] == [1, 2, 4]
    assert [Matrix("m16n16", "b8", n, True).registers() for n in (1, 2)] == [2, 4]
    assert [Matrix("m16n8", "b8", n, True).registers(store=True) for n in (1, 2, 4)] == [1, 2, 4]
    refused_loads = [
        Matrix(num=3), Matrix("m8n8", "b8"), Matrix("m16n16", "b8", 4, True), Matrix("m16n16", "b8", 1, False), Matrix("m8n16", "b8", 1),
        Matrix("m8n16", "b8x16.b4x16_p64", 1, True), Matrix("m16n16", "b16", 1, True), Matrix("m16n8", "b8", 1, True),
    ]  # fmt: skip
    assert [form.registers() for form in refused_loads] == [0] * len(refused_loads)
    refused_stores = [
        Matrix("m16n8", "b8", 1, False),
        Matrix("m16n16", "b8", 1, True),
        Matrix("m8n8", "b8"),
        Matrix("m8n16", "b8x16.b4x16_p64", 1),
    ]
    assert [form.registers(store=True) for form in refused_stores] == [0] * len(refused_stores)
