# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``golden/`` as PTX text, run by the executor: memory afterwards as the H200 left it.

``test_golden.py`` compares the instructions' functions; this compares the whole path from the PTX: parsing, operands,
addresses, the async proxy and its mbarrier, tensor maps in parameters.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pure_functions
import pytest
from ptx_cases import cvt_cases, matrix_cases, mma_cases
from runner_file import Buffer, Case, TensorMap
from test_golden import EXACT_WARP, golden
from tma_cases import load_cases, store_cases

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from vsm.device import Device, pack


@functools.cache
def cases() -> list[Case]:
    return cvt_cases() + mma_cases() + matrix_cases() + load_cases() + store_cases()


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device("sm_90a", threads=1) as value:
        yield value


def run(device: Device, case: Case, inputs: list[bytes]) -> list[bytes]:
    """The buffers after the kernel; no checker may say anything."""
    contents = iter(inputs)
    addresses: list[int] = []
    arguments: list[object] = []
    for parameter in case.parameters:
        if isinstance(parameter, Buffer):
            addresses.append(device.upload(next(contents)))
            arguments.append(addresses[-1])
        elif isinstance(parameter, TensorMap):
            descriptor = pure_functions.Descriptor(
                addresses[parameter.buffer],
                parameter.type,
                parameter.dims,
                parameter.strides,
                parameter.box,
                parameter.element_strides,
                swizzle=parameter.swizzle,
                fill=parameter.fill,
            )
            assert descriptor.check() == ""
            arguments.append(descriptor.encode().tobytes())
        else:
            arguments.append((ctypes.c_uint32).from_buffer_copy(parameter.data))
    module = device.load(case.ptx, case.name)
    launch = module.kernel(case.kernel).launch(case.grid, case.block, pack(*arguments))
    after = [device.download(at, len(data)) for at, data in zip(addresses, inputs)]
    module.unload()
    for address in addresses:
        device.release(address)
    assert launch.clean, str(launch)
    return after


def of_ops(*ops: str) -> list:
    return [pytest.param(i, id=case.name) for i, case in enumerate(cases()) if case.meta["op"] in ops]


def stored(number: int) -> tuple[list[bytes], list[bytes]]:
    arrays = golden()[1]
    before = [arrays[f"{number}.{i}.in"].tobytes() for i in range(4) if f"{number}.{i}.in" in arrays]
    after = [
        arrays[f"{number}.{i}.out"].tobytes() if f"{number}.{i}.out" in arrays else b for i, b in enumerate(before)
    ]
    return before, after


def test_the_cases_are_those_of_the_golden_file() -> None:
    assert [case.name for case in cases()] == [entry["name"] for entry in golden()[0]]


@pytest.mark.parametrize("number", of_ops("cvt"))
def test_cvt(device: Device, number: int) -> None:
    case, entry = cases()[number], golden()[0][number]
    inputs = case.buffers()
    actual = np.frombuffer(run(device, case, inputs)[2], np.uint32)
    a = np.frombuffer(inputs[0], np.uint32)
    keep = ~np.isnan(a.view(np.float32)) if "rna" in case.name else np.ones(a.size, bool)  # see test_golden.py
    sample = golden()[1][f"{number}.sample"]
    wrong = np.flatnonzero((actual[::16] != sample) & keep[::16])
    assert wrong.size == 0, [(hex(a[16 * i]), hex(actual[16 * i]), hex(sample[i])) for i in wrong[:8]]
    assert hashlib.sha256(actual[keep].tobytes()).hexdigest() == entry["sha256"]


@pytest.mark.parametrize("number", of_ops("mma"))
def test_mma(device: Device, number: int) -> None:
    """Bitwise where the order of accumulation cannot show, else as ``tensor::mma`` itself, which test_golden bounds."""
    case = cases()[number]
    before, after = stored(number)
    form = pure_functions.Mma(
        case.meta["k"], case.meta["a"], case.meta["b"], case.meta["acc"], satfinite=case.meta["satfinite"]
    )
    actual = np.frombuffer(run(device, case, before)[2], np.uint32).reshape(case.grid[0], -1, 32)
    operands = [np.frombuffer(x, np.uint32).reshape(case.grid[0], -1, 32) for x in before]
    assert np.array_equal(actual[EXACT_WARP], np.frombuffer(after[2], np.uint32).reshape(actual.shape)[EXACT_WARP])
    for warp in range(case.grid[0]):
        assert np.array_equal(actual[warp], form(*(x[warp] for x in operands)))


@pytest.mark.parametrize(
    "number", of_ops("ldmatrix", "stmatrix", "movmatrix", "load", "store", *pure_functions.REDUCTIONS)
)
def test_memory(device: Device, number: int) -> None:
    before, after = stored(number)
    for i, (actual, expected) in enumerate(zip(run(device, cases()[number], before), after)):
        wrong = np.flatnonzero(np.frombuffer(actual, np.uint8) != np.frombuffer(expected, np.uint8))
        assert wrong.size == 0, f"buffer {i}: {wrong.size} bytes differ, the first at {wrong[0]}"
