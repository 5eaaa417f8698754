# SPDX-License-Identifier: Apache-2.0
"""The operators' compiled kernels, executed on the virtual SM121, against the float64 reference."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from virtual_group_gemm import launch_group_gemm

import flashinfer.testing
from flashinfer.testing import (
    TENSOR_CORE,
    MoECase,
    check_within_bound,
    group_gemm_reference,
    make_group_gemm_inputs,
    make_moe_inputs,
    moe_reference,
)
from flashinfer.testing.virtual_device import VirtualDevice, VirtualDeviceError, active, in_own_process, virtual_device

ROOT = Path(__file__).parents[2]
RUNTIME = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "lib" / "libcudart.so.13"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    with virtual_device("sm_121a") as made:
        yield made


def test_the_name_is_a_function_and_a_module_whoever_imports_first():
    code = (
        "from flashinfer.testing.virtual_device import active; import flashinfer.testing as t; t.virtual_device('sm_1')"
    )
    later = "import flashinfer.testing as t; from flashinfer.testing import virtual_device; t.virtual_device('sm_1')"
    for program in (code, later):
        done = run_python(f"{program}.__enter__()")
        assert "architecture is 'sm_1'; the virtual device can be sm_121a" in done.stderr, done.stderr


def test_one_device_is_active_within_its_context():
    assert active() is None
    with flashinfer.testing.virtual_device("sm_121a") as device:
        assert active() is device
        assert (device.sm_count, device.compute_capability) == (48, (12, 1))
        with pytest.raises(RuntimeError, match="one at a time"), virtual_device():
            pass
        assert active() is device
    assert active() is None


def test_the_environment_variable_is_checked(monkeypatch):
    monkeypatch.setenv("FLASHINFER_VIRTUAL_DEVICE", "gb10")
    with pytest.raises(ValueError, match="FLASHINFER_VIRTUAL_DEVICE is 'gb10'; it may be sm_121a or unset"):
        active()


def test_the_environment_variable_makes_a_device_for_the_process():
    code = "from flashinfer.testing.virtual_device import active; a = active(); print(a is active(), a.architecture)"
    done = run_python(code, FLASHINFER_VIRTUAL_DEVICE="sm_121a")
    assert done.stdout.split() == ["True", "sm_121a"], done.stderr


def test_a_torch_with_cuda_gets_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert in_own_process(os.getpid) == os.getpid()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert in_own_process(os.getpid) != os.getpid()
    assert in_own_process(os.getenv, "LD_PRELOAD").endswith("/shim/libcudart.so.13")
    assert os.environ["LD_PRELOAD"] == ""


@pytest.mark.parametrize(
    ("known", "variable", "value"),
    [
        (set(), "CUDA_VISIBLE_DEVICES", ""),
        ({(12, "1a"), (9, "0a")}, "FLASHINFER_CUDA_ARCH_LIST", "9.0a 12.1a"),
    ],
)
def test_that_process_does_not_ask_torch_for_gpus_and_has_the_same_cache(monkeypatch, known, variable, value):
    """torch would count the virtual runtime's and complain that it fails, each time that it is asked."""
    from flashinfer.jit import core

    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", known)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv(variable, raising=False)
    assert in_own_process(os.getenv, variable) == value
    assert variable not in os.environ


def behind_a_real_runtime(preload: str) -> subprocess.CompletedProcess:
    """A process that loads a real runtime by its path, as a torch with CUDA does, and then asks for a device."""
    code = (
        f"import ctypes; ctypes.CDLL({str(RUNTIME)!r})\n"
        "from flashinfer.testing.virtual_device import virtual_device\n"
        "with virtual_device() as device:\n    print(device.empty(3).shape)"
    )
    return run_python(code, LD_PRELOAD=preload)


@pytest.mark.skipif(not RUNTIME.is_file(), reason="no CUDA runtime wheel is installed")
def test_a_process_with_a_real_runtime_is_refused():
    done = behind_a_real_runtime("")
    assert "is loaded in this process already" in done.stderr
    assert "LD_PRELOAD=" in done.stderr


@pytest.mark.skipif(not RUNTIME.is_file(), reason="no CUDA runtime wheel is installed")
def test_a_real_runtime_behind_the_preloaded_one_does_no_harm(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    shim = importlib.import_module("vsm.preload").preload()
    done = behind_a_real_runtime(shim)
    assert done.stdout.strip() == "torch.Size([3])", done.stderr


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [([5, 3], 128, 256), ([0, 17, 1, 0], 256, 512), ([130], 384, 128)],
    ids=["two groups", "empty groups", "more rows than a tile"],
)
def test_group_gemm_kernels_keep_the_bound(device, rows, n, k):
    call = make_group_gemm_inputs(rows, n, k, 11)
    check_within_bound(launch_group_gemm(device, call), *group_gemm_reference(**call, accumulation=TENSOR_CORE))
    assert all(launch.clean for launch in device.launches)
    assert any("grouped_gemm_kernel" in launch.kernel for launch in device.launches)
    macs = sum(rows) * n * k
    assert sum(launch.counters.mma_flops for launch in device.launches) >= 2 * macs
    assert sum(launch.predicted.seconds for launch in device.launches) > 0


def test_the_public_operators_use_the_active_device():
    call = make_group_gemm_inputs([5, 3], 128, 256, 15)
    with flashinfer.testing.virtual_device("sm_121a") as device:
        out = flashinfer.gemm.group_gemm_mxfp4_nt_groupwise(**call)
        assert any("grouped_gemm_kernel" in launch.kernel for launch in device.launches)
    check_within_bound(out, *group_gemm_reference(**call, accumulation=TENSOR_CORE))
    launched = len(device.launches)
    flashinfer.gemm.group_gemm_mxfp4_nt_groupwise(**call)  # the CPU backend again
    assert len(device.launches) == launched

    inputs = make_moe_inputs(MoECase(num_tokens=3, hidden=256, inter=128, num_experts=4, top_k=2, mode=1), seed=16)
    with flashinfer.testing.virtual_device("sm_121a") as device:
        output = flashinfer.cutlass_fused_moe(**inputs.arguments())
        assert sum("fused_moe_kernel" in launch.kernel for launch in device.launches) == 1
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE))


def test_rows_outside_the_tensors_are_a_fault_with_its_place(device):
    call = make_group_gemm_inputs([5, 3], 128, 256, 13)
    good = launch_group_gemm(device, call)
    call["m_indptr"][2] = 4000  # rows that a does not have
    with pytest.raises(VirtualDeviceError, match=r"out of bounds in .*PTX line [0-9]+") as caught:
        launch_group_gemm(device, call)
    failed = [launch for launch in caught.value.launches if launch.status == "fault"]
    assert failed[0].reports[0].address
    call["m_indptr"][2] = 8
    with pytest.raises(VirtualDeviceError, match="the virtual device stopped at an earlier fault: "):
        launch_group_gemm(device, call)
    device.close()
    assert not good.isnan().any()


def test_a_device_works_after_another_one_faulted():
    call = make_group_gemm_inputs([5, 3], 128, 256, 14)
    call["m_indptr"][2] = 4000
    with virtual_device() as device, pytest.raises(VirtualDeviceError):
        launch_group_gemm(device, call)
    call["m_indptr"][2] = 8
    with virtual_device() as device:
        assert not launch_group_gemm(device, call).isnan().any()


def test_tensors_of_other_devices_are_refused(device):
    with pytest.raises(ValueError, match="a tensor is on meta; the virtual device takes CPU tensors"):
        device.call(print, torch.empty(4, device="meta"))


def test_memory_of_the_device_is_given_back(device):
    tensor = device.empty(1000)
    assert (tensor.dtype, tensor.numel(), tensor.data_ptr() % 256) == (torch.uint8, 1000, 0)
    tensor.fill_(7)
    assert int(tensor.sum()) == 7000
    with pytest.raises(VirtualDeviceError, match="bytes of the virtual device's memory"):
        device.empty(1 << 60)


def test_a_new_device_does_not_answer_with_an_old_error():
    with virtual_device("sm_121a"):
        runtime = ctypes.CDLL("libcudart.so.13")
        assert runtime.cudaFree(ctypes.c_void_p(0x1234)) != 0
        assert runtime.cudaPeekAtLastError() != 0
    with virtual_device("sm_121a"):
        assert runtime.cudaPeekAtLastError() == 0
