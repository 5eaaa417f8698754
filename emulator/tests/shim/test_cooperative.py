# SPDX-License-Identifier: Apache-2.0
"""``cooperative_groups::grid_group`` as nvcc compiles it: its barrier is where a cooperative launch says it is."""

from __future__ import annotations

import ctypes
import sysconfig
from pathlib import Path

import pytest
import vsm

SUCCESS, LAUNCH_FAILURE, TOO_LARGE = 0, 719, 720
THREADS = 64
# nv/target, which cooperative_groups.h includes: pip's compiler comes without it, a wheel that CUDA programs build with has it.
CCCL = Path(sysconfig.get_path("purelib")) / "flashinfer" / "data" / "cccl" / "libcudacxx" / "include"


@pytest.fixture(scope="module")
def runtime() -> vsm.Runtime:
    return vsm.activate_runtime()


@pytest.fixture(scope="module")
def program(runtime, compile_cuda) -> ctypes.CDLL:
    source = Path(__file__).with_name("cooperative.cu")
    flags = ("-gencode", "arch=compute_121a,code=[sm_121a,compute_121a]", *([f"-I{CCCL}"] if CCCL.is_dir() else []))
    return ctypes.CDLL(str(compile_cuda("cooperative.so", source, shared=True, flags=flags)))


def rotate(runtime, program, *, blocks: int, rounds: int, cooperative: bool, threads: int = 1) -> tuple[int, list, int]:
    """The call's answer, the values it left, and what ``is_valid()`` said."""
    runtime.configure(architecture="sm_121a", threads=threads, strict=False, watch=vsm.Watch.ALL)
    runtime.reset()
    runtime.take_launches()
    n = blocks * THREADS
    values, valid = (ctypes.c_uint * n)(*range(n)), ctypes.c_uint(7)
    for buffer in (values, valid):
        runtime.register(ctypes.addressof(buffer), ctypes.sizeof(buffer))
    answer = program.rotate(values, ctypes.byref(valid), rounds, blocks, THREADS, int(cooperative))
    if answer == SUCCESS:
        for buffer in (values, valid):
            runtime.unregister(ctypes.addressof(buffer))
    return answer, list(values), valid.value


def expected(blocks: int, rounds: int) -> list[int]:
    n = blocks * THREADS
    values = list(range(n))
    for r in range(rounds):
        values = [values[(i + 1 + THREADS) % n] + r for i in range(n)]
    return values


# 48 blocks are one for each SM; one host thread has to keep all of them resident.
@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (5, 1), (48, 1), (48, 2), (48, 7)])
def test_grid_sync(runtime, program, blocks, threads):
    answer, values, valid = rotate(runtime, program, blocks=blocks, rounds=3, cooperative=True, threads=threads)
    assert answer == SUCCESS, runtime.take_message()
    (launch,) = runtime.take_launches()
    assert launch.clean, str(launch)
    assert valid == 1
    assert values == expected(blocks, rounds=3)


def test_without_the_cooperative_attribute_there_is_no_barrier(runtime, program):
    """The grid is not valid, and its ``sync`` traps, as on a GPU."""
    answer, _, valid = rotate(runtime, program, blocks=2, rounds=0, cooperative=False)
    assert (answer, valid) == (SUCCESS, 0)
    answer, _, _ = rotate(runtime, program, blocks=2, rounds=1, cooperative=False)
    assert answer == LAUNCH_FAILURE
    assert runtime.take_launches()[-1].reports[0].kind == "trap"
    runtime.reset()


def test_a_grid_that_is_not_resident_is_refused(runtime, program):
    answer, _, _ = rotate(runtime, program, blocks=24 * 48 + 1, rounds=1, cooperative=True)
    assert answer == TOO_LARGE
    assert "resident at a time" in runtime.take_message()


@pytest.mark.parametrize(("barriers", "per_sm", "answer"), [("eleven", 2, SUCCESS), ("thirteen", 1, TOO_LARGE)])
def test_named_barriers_limit_what_is_resident(runtime, program, barriers, per_sm, answer):
    """An SM of a GB10 has 24: what others saw there (b12x#363) of a grid of two blocks for each of 48 SMs."""
    runtime.configure(architecture="sm_121a", threads=1, strict=False, watch=vsm.Watch.ALL)
    runtime.reset()
    runtime.take_launches()
    held = ctypes.c_int()
    assert program[f"{barriers}_barriers"](2 * 48, ctypes.byref(held)) == answer
    assert held.value == per_sm
    assert [launch.blocks_per_sm for launch in runtime.take_launches()] == [per_sm] * (answer == SUCCESS)
