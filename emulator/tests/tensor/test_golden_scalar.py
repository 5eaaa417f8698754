# SPDX-License-Identifier: Apache-2.0
"""Scalar and warp-wide instructions as an H200 does them: 500 forms, 384 operands each, edge values among them.

Bitwise, but for what the ISA leaves open: a NaN's payload where the ISA names none, and approximate functions, which
are held to the ISA's error bounds (9.7.3) against exact values instead.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from runner_file import Case
from scalar_cases import APPROXIMATE, scalar_cases

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from vsm.device import Device, pack

GOLDEN = Path(__file__).parent / "golden" / "golden_scalar.npz"

# Not modelled, and refused with these words when the PTX is loaded.
REFUSED = [
    (re.compile(r"cvt\.pack"), "cvt.pack is not modelled"),
    (re.compile(r"\.r[zmp]\.f64 "), "only .rn is modelled for .f64"),
    (re.compile(r"cvt\.r[zmp]\.f64\.[su]64"), "only .rn is modelled from 64-bit integers to f64"),
]
# The ISA does not say which NaN these give.
ANY_NAN = re.compile(
    r"^((add|sub|mul|div|fma|rcp|sqrt)\.r.\.f64|(min|max)\.f64|cvt\.r.\.f32\.f64|cvt\.rn\.bf16\.f32|(abs|neg)\.)"
)


@functools.cache
def golden() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Results by instruction text, operands by class."""
    with np.load(GOLDEN) as file:
        names = json.loads(file["index"].tobytes())["cases"]
        results = {name: file[str(i)] for i, name in enumerate(names)}
        operands = {key.split(".")[1]: file[key] for key in file.files if key.startswith("operands.")}
    return results, operands


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device("sm_90a", threads=1) as value:
        yield value


def run(device: Device, case: Case, refused: str = "") -> np.ndarray:
    """The results; or, where the kernel must be ``refused`` with this text, none."""
    operands = golden()[1][case.meta["kind"]]
    expected = golden()[0][case.name]
    module = device.load(case.ptx, "kernel")
    out, source = device.upload(bytes(expected.nbytes)), device.upload(operands.tobytes())
    launch = module.kernel("k").launch(case.grid, case.block, pack(out, source))
    result = np.frombuffer(device.download(out, expected.nbytes), expected.dtype)
    module.unload()
    device.release(out)
    device.release(source)
    assert (launch.status == "refused" and refused in launch.message) if refused else launch.clean, str(launch)
    return result


def is_nan(kind: str, bits: np.ndarray) -> np.ndarray:
    """Elements that are NaNs, for packed pairs per 16-bit half."""
    if kind in ("f16x2", "bf16x2"):
        infinity = 0x7C00 if kind == "f16x2" else 0x7F80
        return (bits.view(np.uint16) & 0x7FFF) > infinity
    return np.isnan(bits.view(np.float32 if bits.dtype == np.uint32 else np.float64))


EXACT = [case for case in scalar_cases() if case.name not in APPROXIMATE]


@pytest.mark.parametrize("case", EXACT, ids=lambda c: c.name.split(";")[0][:60])
def test_instruction(device: Device, case: Case) -> None:
    for pattern, text in REFUSED:
        if pattern.search(case.name):
            run(device, case, refused=text)
            return
    actual, expected = run(device, case), golden()[0][case.name]
    kind = case.meta["kind"]
    if "cvt.r" in case.name and ".f32.f64" in case.name:  # a float32 in 64 bits
        actual, expected = actual.astype(np.uint32), expected.astype(np.uint32)
        kind = "f32"
    wide = kind if kind in ("f16x2", "bf16x2") else ""
    a, e = (x.view(np.uint16) if wide else x for x in (actual, expected))
    wrong = a != e
    if ANY_NAN.match(case.name):
        wrong &= ~(is_nan(kind, actual) & is_nan(kind, expected))
    operands = golden()[1][case.meta["kind"]]
    at = np.flatnonzero(wrong) // (2 if wide else 1)
    assert at.size == 0, [
        (*(hex(int(x[i])) for x in operands), hex(int(actual[i])), hex(int(expected[i]))) for i in at[:4]
    ]


# --- approximate functions ------------------------------------------------------------------------------------------
def _exact(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return {
            "ex2": lambda: np.exp2(x), "lg2": lambda: np.log2(x), "rcp": lambda: 1 / x, "rsqrt": lambda: 1 / np.sqrt(x), "sqrt": lambda: np.sqrt(x),
            "div": lambda: x / y, "tanh": lambda: np.tanh(x), "sin": lambda: np.sin(x), "cos": lambda: np.cos(x),
        }[name]()  # fmt: skip


# Largest error by the ISA's text: (relative, absolute), over the operands for which it states one.
BOUNDS = {
    "ex2": (2.0**-22, 0), "lg2": (2.0**-22, 2.0**-22), "rcp": (2.0**-23, 0), "rsqrt": (2.0**-22.9, 0), "sqrt": (2.0**-23, 0), "div": (2.0**-22, 0),
    "tanh": (2.0**-11, 0), "sin": (0, 2.0**-20.5), "cos": (0, 2.0**-20.5),
}  # fmt: skip


@pytest.mark.parametrize("text", [t for t, kind in APPROXIMATE.items() if kind == "f32"], ids=lambda t: t.split()[0])
def test_approximate_float32(device: Device, text: str) -> None:
    case = next(c for c in scalar_cases() if c.name == text)
    name = text.split(".")[0]
    with np.errstate(all="ignore"):
        x, y = (operand.view(np.float32).astype(np.float64) for operand in golden()[1]["f32"][:2])
        exact = _exact(name, x, y)
        # Normal operands and results, within the ranges that the ISA's bounds name.
        stated = (
            np.isfinite(exact)
            & np.isfinite(x)
            & (np.abs(x) >= 2.0**-126)
            & ((np.abs(exact) >= 2.0**-126) | (exact == 0))
            & (np.abs(exact) < 2.0**127.9)
        )
        if name in ("sin", "cos"):
            stated &= np.abs(x) <= np.pi
        if name == "div":
            stated &= (np.abs(y) >= 2.0**-126) & (np.abs(y) <= 2.0**126)
    relative, absolute = BOUNDS[name]
    for who, bits in (("this machine", run(device, case)), ("the H200", golden()[0][text])):
        result = bits.view(np.float32).astype(np.float64)
        with np.errstate(all="ignore"):
            error = np.abs(result - exact)
            within = error <= relative * np.abs(exact) * 1.0001 + absolute
        assert stated.sum() > 50
        assert within[stated].all(), (
            who,
            [(x[i], y[i], result[i], exact[i]) for i in np.flatnonzero(stated & ~within)[:4]],
        )


@pytest.mark.parametrize("text", [t for t, kind in APPROXIMATE.items() if kind != "f32"], ids=lambda t: t.split()[0])
def test_approximate_pairs(device: Device, text: str) -> None:
    """Within two units in the last place of the H200's results (each is within about one of the exact value)."""
    case = next(c for c in scalar_cases() if c.name == text)
    actual, expected = run(device, case).view(np.uint16).astype(int), golden()[0][text].view(np.uint16).astype(int)
    assert (np.abs(actual - expected) <= 2).all()
    kind = APPROXIMATE[text]
    infinity = 0x7C00 if kind == "f16x2" else 0x7F80
    special = (expected & 0x7FFF) >= infinity
    assert np.array_equal(actual[special], expected[special])
