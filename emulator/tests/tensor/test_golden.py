# SPDX-License-Identifier: Apache-2.0
"""The golden file: what an H200 did with the kernels of ``golden/``, against the same instructions here.

Bitwise, but for the order and width in which a tensor core accumulates (bounds below) and for NaN operands of
``cvt.rna.tf32``: there the H200 truncates the NaN's payload, which may leave an infinity or, with .satfinite, a finite
number, against the ISA's text; the model gives the canonical NaN.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import numpy as np
import pure_functions as vsm
import pytest
from ptx_cases import cvt_cases

GOLDEN = Path(__file__).parent / "golden" / "golden.npz"


@functools.cache
def golden() -> tuple[list[dict], dict[str, np.ndarray]]:
    with np.load(GOLDEN) as file:
        arrays = {key: file[key] for key in file.files}
    return json.loads(arrays.pop("index").tobytes())["cases"], arrays


def entries(*ops: str) -> list:
    return [
        pytest.param(i, case, id=case["name"]) for i, case in enumerate(golden()[0]) if not ops or case["op"] in ops
    ]


def buffers(number: int, dtype: type = np.uint32) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Every buffer before and after the kernel."""
    arrays = golden()[1]
    before, after = [], []
    for i in range(4):
        if f"{number}.{i}.in" not in arrays:
            break
        before.append(arrays[f"{number}.{i}.in"].view(dtype))
        after.append(arrays.get(f"{number}.{i}.out", arrays[f"{number}.{i}.in"]).view(dtype))
    return before, after


# --- cvt ------------------------------------------------------------------------------------------------------------
def convert(form: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    *modifiers, dst, src = form.split(".")
    options = {"round_": modifiers[0], "satfinite": "satfinite" in modifiers, "relu": "relu" in modifiers}
    x, y = a.view(np.float32), b.view(np.float32)
    if src.endswith("x2") and src != "f16x2":
        return vsm.cvt_narrow_to_f16x2(src[:-2], a, "f16", options["relu"])
    if src == "f16x2":
        return vsm.cvt_f16x2_to_narrow(dst[:-2], "f16", a, **options)
    if dst in ("f16x2", "bf16x2"):
        return (vsm.cvt_f32_to(dst[:-2], x, **options) << np.uint32(16)) | vsm.cvt_f32_to(dst[:-2], y, **options)
    if dst in ("f16", "bf16", "tf32"):
        return vsm.cvt_f32_to(dst, x, **options)
    return vsm.cvt_f32x2_to_narrow(dst[:-2], x, y, **options)


CVT = {case.name: case for case in cvt_cases()}


@pytest.mark.parametrize("number,case", entries("cvt"))
def test_cvt(number: int, case: dict) -> None:
    a, b = (np.frombuffer(data, np.uint32) for data in CVT[case["name"]].buffers()[:2])
    actual = convert(case["form"], a, b)
    keep = ~np.isnan(a.view(np.float32)) if "rna" in case["form"] else np.ones(a.size, bool)
    sample = golden()[1][f"{number}.sample"]
    wrong = np.flatnonzero((actual[::16] != sample) & keep[::16])
    assert wrong.size == 0, [(hex(a[16 * i]), hex(actual[16 * i]), hex(sample[i])) for i in wrong[:8]]
    assert hashlib.sha256(actual[keep].tobytes()).hexdigest() == case["sha256"]


# --- mma ------------------------------------------------------------------------------------------------------------
EXACT_WARP = 0  # small integers: every order and width of accumulation gives the same bits


def accumulation_bound(case: dict, form: vsm.Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Per register of D: units in the last place of |C| + sum |a*b|, the largest that any partial sum can be.

    float32: an addend that is aligned to the largest one and cut off at 24 bits loses less than 2^-23 of it; k products
    and C lose less than (k + 1) * 2^-23, and the result is rounded or truncated, 2^-23 more. float16: the partial sums
    of 16 products (of 8 with k = 8) are rounded to float16 each, 2^-11 apiece, the last one truncated at worst.
    """
    magnitude = {"f16": 0x7FFF7FFF, "bf16": 0x7FFF7FFF, "tf32": 0x7FFFFFFF, "e4m3": 0x7F7F7F7F, "e5m2": 0x7F7F7F7F}
    bits = 0x7FFFFFFF if case["acc"] == "f32" else 0x7FFF7FFF
    total = form(a & np.uint32(magnitude[form.a]), b & np.uint32(magnitude[form.b]), c & np.uint32(bits))
    if case["acc"] == "f32":
        return total.view(np.float32).astype(np.float64) * (form.k + 2) * 2.0**-23
    return total.view(np.float16).astype(np.float64) * (max(form.k // 16, 1) + 1) * 2.0**-10


@pytest.mark.parametrize("number,case", entries("mma"))
def test_mma(number: int, case: dict) -> None:
    form = vsm.Mma(case["k"], case["a"], case["b"], case["acc"], satfinite=case["satfinite"])
    na, nb, nc, _ = form.registers()
    (a, b, c), (_, _, d) = buffers(number)
    warps = a.size // (32 * na)
    for warp in range(warps):
        wa, wb, wc, wd = (x.reshape(warps, n, 32)[warp] for x, n in ((a, na), (b, nb), (c, nc), (d, nc)))
        actual = form(wa, wb, wc)
        if warp == EXACT_WARP or case["acc"] == "s32":
            assert np.array_equal(actual, wd), f"warp {warp}"
            continue
        dtype, bits = (np.float32, np.uint32) if case["acc"] == "f32" else (np.float16, np.uint16)
        mine, theirs = actual.view(dtype), wd.view(dtype)
        finite = np.isfinite(mine) & np.isfinite(theirs)
        assert np.array_equal(mine.view(bits)[~finite], theirs.view(bits)[~finite]), "infinities and NaNs, bit for bit"
        assert finite.sum() > finite.size // 4
        with np.errstate(invalid="ignore"):
            error = np.abs(mine.astype(np.float64) - theirs.astype(np.float64))
            bound = accumulation_bound(case, form, wa, wb, wc)
        assert (error[finite] <= bound[finite]).all(), f"warp {warp}"


# --- ldmatrix, stmatrix, movmatrix ----------------------------------------------------------------------------------
@pytest.mark.parametrize("number,case", entries("ldmatrix", "stmatrix"))
def test_matrix(number: int, case: dict) -> None:
    form = vsm.Matrix(num=case["num"], trans=case["trans"])
    (shared, registers, addresses), (shared_after, registers_after, _) = buffers(number, np.uint8)
    addresses = addresses.view(np.uint32)
    count, size, _, lanes = form.rows()
    at = [int(addresses[lane]) for lane in lanes]
    if case["op"] == "ldmatrix":
        rows = np.stack([shared[x : x + size] for x in at])
        assert np.array_equal(form.load(rows), registers_after.view(np.uint32).reshape(-1, 32))
        return
    memory = shared.copy()
    for x, row in zip(at, form.store(registers.view(np.uint32).reshape(-1, 32))):
        memory[x : x + size] = row
    assert np.array_equal(memory, shared_after)


@pytest.mark.parametrize("number,case", entries("movmatrix"))
def test_movmatrix(number: int, case: dict) -> None:
    (before,), (after,) = buffers(number)
    assert np.array_equal(vsm.movmatrix(before), after)


# --- tensor copies --------------------------------------------------------------------------------------------------
TENSOR_OPS = ("load", "store", *vsm.REDUCTIONS)


@pytest.mark.parametrize("number,case", entries(*TENSOR_OPS))
def test_tensor_copy(number: int, case: dict) -> None:
    base = 0x100000
    (tensor, image, _), (tensor_after, image_after, status) = buffers(number, np.uint8)
    tensor, image = tensor.copy(), image.copy()
    assert not status.any(), "the mbarrier got the bytes that were expected"
    descriptor = vsm.Descriptor(
        base,
        case["type"],
        case["dims"],
        case["strides"],
        case["box"],
        case["steps"],
        swizzle=case["swizzle"],
        fill=case["fill"],
    )
    assert descriptor.check() == ""
    for where, at, count, kind in descriptor.runs(case["coords"], case["offset"], store=case["op"] != "load"):
        memory = tensor[where - base : where - base + count]
        if kind == "fill":
            image[at : at + count] = descriptor.fill_bytes(count)
        elif kind == "copy" and case["op"] == "load":
            image[at : at + count] = vsm.tma_convert(case["type"], memory)
        elif kind == "copy" and case["op"] == "store":
            memory[:] = image[at : at + count]
        elif kind == "copy":
            memory[:] = vsm.tma_reduce(case["type"], case["op"], memory, image[at : at + count])
    assert np.array_equal(image, image_after)
    assert np.array_equal(tensor, tensor_after)


def test_the_golden_file_covers_what_it_should() -> None:
    ops = [case["op"] for case in golden()[0]]
    counts = {op: ops.count(op) for op in set(ops)}
    assert counts["cvt"] == len(CVT) and counts["mma"] >= 30 and counts["ldmatrix"] == counts["stmatrix"] == 6
    assert counts["load"] >= 80 and counts["store"] >= 20 and set(vsm.REDUCTIONS) <= set(ops)
