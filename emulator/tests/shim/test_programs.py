# SPDX-License-Identifier: Apache-2.0
"""A shared library that nvcc built, loaded into this process and run on the virtual GPU through its own launchers."""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import vsm

HERE = Path(__file__).parent
INVALID_PTX = 218
SUCCESS, INVALID_VALUE, NO_IMAGE, ILLEGAL_ADDRESS, LAUNCH_FAILURE = 0, 1, 209, 700, 719
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901


@pytest.fixture(scope="module")
def runtime() -> vsm.Runtime:
    return vsm.activate_runtime()


@pytest.fixture(scope="module")
def programs(runtime, compile_cuda) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_cuda("programs.so", HERE / "programs.cu", shared=True)))


@pytest.fixture(autouse=True)
def fresh(runtime) -> None:
    runtime.configure(architecture="sm_121a", strict=False, watch=vsm.Watch.DEFAULT)
    runtime.reset()
    runtime.take_launches()
    runtime.take_message()


@contextmanager
def device_memory(runtime: vsm.Runtime, *buffers: ctypes.Array, read_only: bool = False) -> Iterator[None]:
    for buffer in buffers:
        runtime.register(ctypes.addressof(buffer), ctypes.sizeof(buffer), read_only)
    try:
        yield
    finally:
        for buffer in buffers:
            runtime.unregister(ctypes.addressof(buffer))


def test_vector_add_with_a_constant_table(runtime, programs):
    n = 1000
    a = (ctypes.c_float * n)(*range(n))
    b = (ctypes.c_float * n)(*(i % 7 for i in range(n)))
    c = (ctypes.c_float * n)()
    with device_memory(runtime, a, b, c):
        assert programs.add(a, b, c, n) == SUCCESS
    assert list(c) == [i + (i % 7) * (1, 2, 4, 8)[i & 3] for i in range(n)]
    (launch,) = runtime.take_launches()
    assert launch.clean, str(launch)
    assert "add_kernel" in launch.kernel
    assert (launch.grid, launch.block) == ((8, 1, 1), (128, 1, 1))
    assert launch.counters.blocks == 8
    assert launch.counters.global_load_bytes == 2 * 4 * n
    assert launch.counters.global_store_bytes == 4 * n
    assert launch.registers > 0


def test_dynamic_shared_memory_and_a_device_variable(runtime, programs):
    seed = 20261121
    print("seed", seed)
    values = [random.Random(seed).randrange(-1000, 1000) for _ in range(4 * 256)]
    data = (ctypes.c_int * len(values))(*values)
    out = (ctypes.c_int * 4)()
    visits = ctypes.c_int()
    with device_memory(runtime, data, out):
        assert programs.sum(data, out, 4, 256, 1024) == SUCCESS
        assert programs.read_visits(ctypes.byref(visits)) == SUCCESS
    assert list(out) == [sum(values[i * 256 : (i + 1) * 256]) for i in range(4)]
    assert visits.value == 104
    (launch,) = runtime.take_launches()
    assert launch.clean, str(launch)
    assert launch.dynamic_shared == 1024


def test_too_much_dynamic_shared_memory_is_refused_and_nothing_runs(runtime, programs):
    out = (ctypes.c_int * 1)()
    with device_memory(runtime, out):
        assert programs.sum(out, out, 1, 1, 49153) == INVALID_VALUE
    assert "49153 bytes of dynamic shared memory; 49152 are granted" in runtime.take_message()
    assert runtime.take_launches() == []


def test_a_shared_memory_overrun_is_a_fault_with_its_place(runtime, programs):
    data = (ctypes.c_int * 64)()
    out = (ctypes.c_int * 1)()
    with device_memory(runtime, data, out):
        # 64 threads of 4 bytes, 128 bytes granted
        assert programs.sum(data, out, 1, 64, 128) == ILLEGAL_ADDRESS
    (launch,) = runtime.take_launches()
    assert launch.status == "fault"
    assert launch.reports[0].kind == "out of bounds"
    assert launch.reports[0].space == "shared"
    assert launch.reports[0].line > 0


def test_parameters_of_every_size_and_alignment(runtime, programs):
    out = (ctypes.c_double * 8)()
    with device_memory(runtime, out):
        assert programs.params(out) == SUCCESS
    assert list(out) == [1, ord("x"), ord("m"), 0.375, -3, 1.5, 2.0**40, -7]


def test_programmatic_dependents_run_in_order(runtime, programs):
    value = (ctypes.c_int * 1)(3)
    with device_memory(runtime, value):
        assert programs.chain(value, 4, None) == SUCCESS
    assert value[0] == ((((3 * 2 + 1) * 2 + 1) * 2 + 1) * 2 + 1)
    assert [launch.programmatic for launch in runtime.take_launches()] == [True] * 4


def test_a_dependent_that_does_not_wait_is_reported(runtime, programs):
    value = (ctypes.c_int * 1)(3)
    with device_memory(runtime, value):
        assert programs.chain_that_waits(value, 2, None, False) == SUCCESS
        first, second = runtime.take_launches()
        assert first.clean, str(first)
        kinds = [report.kind for report in second.reports]
        assert kinds == ["missing grid wait"] * 2, str(second)  # read, then written
        # Whatever orders the two in another way does: the host's wait.
        for _ in range(2):
            assert programs.synchronize() == SUCCESS
            assert programs.chain_that_waits(value, 1, None, False) == SUCCESS
            assert runtime.take_launches()[0].clean


def test_a_stream_keeps_its_order(runtime, programs):
    value = (ctypes.c_int * 1)(99)
    host = ctypes.c_int(-1)
    with device_memory(runtime, value):
        assert programs.in_order(value, ctypes.byref(host)) == SUCCESS
    assert host.value == 7


def test_a_captured_graph_replays(runtime, programs):
    value = (ctypes.c_int * 1)(0)
    before, nodes = ctypes.c_int(-1), ctypes.c_int(-1)
    with device_memory(runtime, value):
        assert programs.graph(value, ctypes.byref(before), ctypes.byref(nodes)) == SUCCESS
    assert (before.value, nodes.value) == (0, 3)
    assert value[0] == 63
    assert len(runtime.take_launches()) == 6


def test_synchronizing_in_a_capture_is_refused(runtime, programs):
    value = (ctypes.c_int * 1)(0)
    end = ctypes.c_int()
    with device_memory(runtime, value):
        assert programs.synchronize_in_capture(value, ctypes.byref(end)) == CAPTURE_UNSUPPORTED
    assert end.value == CAPTURE_INVALIDATED
    assert value[0] == 0
    assert "cudaStreamSynchronize is not allowed while a stream captures" in runtime.take_message()


def tile(matrix: list[int], width: int, height: int, x: int, y: int) -> list[int]:
    rows = range(y, y + 16)
    return [matrix[r * width + c] if r < height and c < width else 0 for r in rows for c in range(x, x + 64)]


@pytest.mark.parametrize(("x", "y"), [(0, 0), (64, 8), (96, 40)], ids=["corner", "middle", "over both edges"])
def test_a_tensor_copy_through_the_driver_entry_point(runtime, programs, x, y):
    width, height = 136, 48
    matrix = [(i * 37 + 11) & 0xFFFF for i in range(width * height)]
    # A tensor's address must be a multiple of 16.
    raw = (ctypes.c_uint16 * (width * height + 8))()
    skip = -ctypes.addressof(raw) % 16 // 2
    data = (ctypes.c_uint16 * (width * height)).from_buffer(raw, skip * 2)
    data[:] = matrix
    out = (ctypes.c_uint16 * 1024)()
    with device_memory(runtime, data, out):
        assert programs.tensor_copy(data, width, height, x, y, 0, out) == SUCCESS
        assert list(out) == tile(matrix, width, height, x, y)
        assert programs.tensor_copy(data, width, height, x, y, 3, out) == SUCCESS
    # 128-byte swizzle: the 16-byte chunk c of row r lies at chunk c ^ (r & 7).
    plain = tile(matrix, width, height, x, y)
    swizzled = [0] * 1024
    for row in range(16):
        for chunk in range(8):
            to, source = row * 64 + (chunk ^ (row & 7)) * 8, row * 64 + chunk * 8
            swizzled[to : to + 8] = plain[source : source + 8]
    assert list(out) == swizzled
    launches = runtime.take_launches()
    assert [launch.clean for launch in launches] == [True, True], "\n".join(map(str, launches))
    inside = min(64, width - x) * min(16, height - y)
    assert launches[0].counters.async_load_bytes == 2 * inside


def test_a_bad_tensor_map_is_refused_with_its_rule(runtime, programs):
    data = (ctypes.c_uint16 * 64)()
    out = (ctypes.c_uint16 * 1024)()
    with device_memory(runtime, data, out):
        # a row of 36 bytes is no multiple of 16
        assert programs.tensor_copy(data, 18, 1, 0, 0, 0, out) == INVALID_VALUE
    message = runtime.take_message()
    assert "cuTensorMapEncodeTiled refused: " in message
    assert "globalStrides[0] is 36, must be a multiple of 16" in message or "globalAddress" in message


def test_a_fault_is_sticky_until_a_reset(runtime, programs):
    out = (ctypes.c_int * 4)()
    with device_memory(runtime, out):
        assert programs.bad_store(out, 4) == ILLEGAL_ADDRESS
        assert programs.bad_store(out, 0) == ILLEGAL_ADDRESS
    (launch,) = runtime.take_launches()
    report = launch.reports[0]
    assert (report.kind, report.address) == ("out of bounds", ctypes.addressof(out) + 16)
    assert "st.global" in report.instruction
    runtime.reset()
    with device_memory(runtime, out):
        assert programs.bad_store(out, 0) == SUCCESS
    assert out[0] == 1


def test_read_only_memory_is_not_written(runtime, programs):
    out = (ctypes.c_int * 4)()
    with device_memory(runtime, out, read_only=True):
        assert programs.bad_store(out, 0) == ILLEGAL_ADDRESS
    assert out[0] == 0


def test_a_report_fails_a_launch_only_when_strict(runtime, programs):
    out = (ctypes.c_int * 32)()
    with device_memory(runtime, out):
        assert programs.uninitialized(out) == SUCCESS
    (launch,) = runtime.take_launches()
    assert launch.status == "ok"
    assert {report.kind for report in launch.reports} == {"uninitialized read"}
    runtime.configure(strict=True)
    runtime.reset()
    with device_memory(runtime, out):
        assert programs.uninitialized(out) == LAUNCH_FAILURE
    runtime.configure(strict=False, watch=vsm.Watch.NONE)
    runtime.reset()
    runtime.take_launches()
    with device_memory(runtime, out):
        assert programs.uninitialized(out) == SUCCESS
    (launch,) = runtime.take_launches()
    assert launch.clean


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--compress-mode=size",), "the PTX embedded in this library is compressed"),
        (("-gencode", "arch=compute_121a,code=sm_121a"), "this library embeds no PTX that sm_121a can run"),
        (("-gencode", "arch=compute_90a,code=compute_90a"), "this library embeds no PTX that sm_121a can run"),
    ],
    ids=["compressed", "no PTX", "PTX of another architecture"],
)
def test_a_library_without_readable_ptx_is_refused(runtime, compile_cuda, flags, text):
    library = ctypes.CDLL(
        str(compile_cuda(f"refused{abs(hash(flags))}.so", HERE / "programs.cu", shared=True, flags=flags))
    )
    out = (ctypes.c_int * 1)()
    with device_memory(runtime, out):
        assert library.bad_store(out, 0) == NO_IMAGE
    message = runtime.take_message()
    assert text in message
    assert "-no-compress" in message


def test_ptx_without_a_cubin_runs_with_unknown_registers(runtime, compile_cuda):
    flags = ("-gencode", "arch=compute_90,code=compute_90")  # older than the device, and not for one GPU alone
    library = ctypes.CDLL(str(compile_cuda("ptx_only.so", HERE / "programs.cu", shared=True, flags=flags)))
    out = (ctypes.c_int * 1)()
    with device_memory(runtime, out):
        assert library.bad_store(out, 0) == SUCCESS
    (launch,) = runtime.take_launches()
    assert (out[0], launch.registers) == (1, 0)


def test_predicted_time_follows_its_model(runtime, programs):
    n = 4096
    a, b, c = ((ctypes.c_float * n)() for _ in range(3))
    start = runtime.clock
    with device_memory(runtime, a, b, c):
        assert programs.add(a, b, c, n) == SUCCESS
    (launch,) = runtime.take_launches()
    counters, predicted = launch.counters, launch.predicted
    cycles = 48 * 2.418e9
    assert predicted.dram == pytest.approx(counters.global_distinct_bytes / 233e9, rel=1e-6)
    # 32 blocks on 48 SMs: one block on the busiest, two thirds of a block on average
    assert predicted.issue == pytest.approx(counters.warp_instructions / (4 * cycles) * 48 / 32, rel=1e-6)
    assert predicted.mma == 0
    assert predicted.seconds == max(predicted.dram, predicted.issue, predicted.mma, predicted.shared)
    assert getattr(predicted, predicted.bound) == predicted.seconds
    assert runtime.clock - start == pytest.approx(predicted.seconds, rel=1e-6)


def test_a_trace_file_gets_a_line_per_launch(compile_cuda, run_on_shim, tmp_path):
    program = compile_cuda("traced", HERE / "conformance.cu", HERE / "conformance_tensor_map.cu")
    trace = tmp_path / "trace.jsonl"
    run_on_shim(program, "fault", "null", VSM_TRACE=str(trace))
    (line,) = trace.read_text().splitlines()
    launch = vsm.Launch.from_json(json.loads(line))
    assert "store_kernel" in launch.kernel
    assert launch.status == "fault"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20", dict.fromkeys(vsm.ACCUMULATION_KINDS, 20)),
        ("bf16=21,mxf4=20", dict.fromkeys(vsm.ACCUMULATION_KINDS, 0) | {"bf16": 21, "mxf4": 20}),
        ("fp8=20", None),
        ("31", None),
        ("bf16=", None),
        ("-1", None),
    ],
)
def test_widths_of_sums_come_from_the_environment(text, expected):
    ask = "import vsm; runtime = vsm.activate_runtime(); print(runtime.settings.accumulation_bits, runtime.take_message())"
    variables = {**os.environ, "VSM_ACCUMULATION_BITS": text, "PYTHONPATH": str(HERE.parents[1] / "python")}
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=variables, check=True)
    if expected is None:
        exact = dict.fromkeys(vsm.ACCUMULATION_KINDS, 0)
        assert done.stdout.startswith(f"{exact} VSM_ACCUMULATION_BITS is '{text}'; it is a number from 0 to 30"), done
    else:
        assert done.stdout.strip() == str(expected)


def test_a_channel_description_is_made_but_no_texture(runtime):
    """This is the one function that returns a plain struct and no error code. Functions that would use it are refused
    by name."""

    class Description(ctypes.Structure):
        _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "z", "w", "kind")]

    library = ctypes.CDLL("libcudart.so.13")
    library.cudaCreateChannelDesc.restype = Description
    made = library.cudaCreateChannelDesc(8, 16, 0, 0, 2)
    assert [getattr(made, name) for name, _ in Description._fields_] == [8, 16, 0, 0, 2]
    not_supported = 801
    assert library.cudaCreateTextureObject() == not_supported
    assert "cudaCreateTextureObject is not modelled" in runtime.take_message()


def test_a_kernel_that_is_not_understood_refuses_itself_alone(runtime, programs):
    out, one = (ctypes.c_float * 1)(), (ctypes.c_float * 1)(1)
    with device_memory(runtime, out, one):
        for _ in range(2):
            assert programs.unknown_register(out) == INVALID_PTX
            message = runtime.take_message()
            assert "unknown_register_kernel" in message
            assert "special register '%envreg31' is not modelled" in message
            assert runtime.take_launches() == []
            assert programs.add(one, one, out, 1) == SUCCESS
            (launch,) = runtime.take_launches()
            assert launch.clean, str(launch)


def test_packing_follows_alignment():
    packed = vsm.pack(ctypes.c_uint8(1), ctypes.c_uint32(2), 3, ctypes.c_uint16(4), bytes([5] * 128))
    assert packed == struct.pack("<B3xIQH46x", 1, 2, 3, 4) + bytes([5] * 128)
