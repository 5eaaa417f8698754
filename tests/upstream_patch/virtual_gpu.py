# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin (``-p virtual_gpu``) for an exported tree: its torch-style tests run on the virtual SM121.

In this process ``"cuda"`` means the CPU's memory, on which the virtual GPU works. torch's functions get the CPU in
place of a CUDA device, upstream is told compute capability 12.1, and the tensors of a call to a JIT module become the
device's memory for that call. Only ``emulator/python`` of this fork is on the path.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import tvm_ffi
import vsm
from torch.overrides import TorchFunctionMode

CAPABILITY = (12, 1)
SMS = 48

_runtime = vsm.activate_runtime()
_runtime.configure(architecture="sm_121a", watch=vsm.Watch.DEFAULT)
launches: list[Any] = []
# Kinds of reports that do not fail a test: what is known of upstream's own kernels.
KNOWN = os.environ.get("VIRTUAL_GPU_KNOWN", "").split(",")
# The operators' ``backend`` where a call names none; upstream's own default when it is not set.
BACKEND = os.environ.get("VIRTUAL_GPU_BACKEND", "")


class _CudaIsTheCpu(TorchFunctionMode):
    """Tensors "on cuda" are the CPU's, marked; what is computed of one is marked too."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        if function is torch.device:
            return function(*arguments, **named)
        marked = any(map(_is_marked, [*arguments, *named.values()]))
        if getattr(function, "__name__", "") == "__get__" and marked:
            if function.__self__ is torch.Tensor.device:
                return torch.device("cuda", 0)
            if function.__self__ is torch.Tensor.is_cuda:
                return True
        if function is torch.Tensor.get_device and marked:
            return 0
        if function is torch.Tensor.cuda:
            return arguments[0] if marked else _on_cuda(arguments[0])
        if function is torch.Tensor.cpu:
            return arguments[0].detach()
        asked = named.get("device")
        if function is torch.Tensor.to:
            asked = next((each for each in (*arguments[1:], asked) if isinstance(each, (str, torch.device))), None)
            arguments = tuple(map(_here, arguments))
        if "device" in named:
            named["device"] = _here(asked)
        result = function(*arguments, **named)
        if asked is not None and _here(asked) is asked:
            return result.detach() if marked else result
        if asked is not None and not marked:
            return _on_cuda(result)
        return _mark(result) if marked else result


def _here(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _is_marked(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_marked, value))
    return isinstance(value, torch.Tensor) and hasattr(value, "on_cuda")


def _mark(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        result.on_cuda = True  # type: ignore[attr-defined]
    elif isinstance(result, (list, tuple)):
        for each in result:
            _mark(each)
    return result


def _on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that starts as CUDA's memory does, at a multiple of 256 bytes; the CPU's, of 64."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.empty(size + 256, dtype=torch.uint8)
    first = -memory.data_ptr() % 256
    strides = torch.empty_like(tensor, device="meta").stride()  # those of a matrix that is transposed stay
    copy = memory[first : first + size].view(tensor.dtype).as_strided(tensor.shape, strides)
    return _mark(copy.copy_(tensor))


class _Exchanged:
    """A marked tensor for a module's function, which is to see a CUDA tensor (DLPack's device type 2)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_named: Any) -> Any:
        capsule = torch.utils.dlpack.to_dlpack(self._tensor)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLManagedTensor begins with the data's address and the device's type.
        ctypes.c_int.from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)).value = 2
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _exchanged(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_exchanged(each) for each in value]
    return tvm_ffi.from_dlpack(_Exchanged(value)) if _is_marked(value) else value


def _on_the_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor) and each.numel()]
        with contextlib.ExitStack() as registered:
            for start, size in map(_span, tensors):
                _runtime.register(start, size)
                registered.callback(_runtime.unregister, start)
            failure = None
            try:
                result = function(*map(_exchanged, arguments))
            except RuntimeError as error:
                failure = error
        made = _runtime.take_launches()
        launches.extend(made)
        wrong = [
            str(launch)
            for launch in made
            if launch.status != "ok" or any(report.kind not in KNOWN for report in launch.reports)
        ]
        if wrong or failure is not None:
            messages = [] if failure is None else [str(failure)]
            raise RuntimeError("\n".join([*messages, *wrong, _runtime.take_message()])) from failure
        return result

    return call


class _Module:
    """A JIT module whose functions run on the virtual GPU."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        return _on_the_device(function) if callable(function) else function


class _Patched(importlib.abc.Loader):
    def __init__(self, loader: Any, patch: Callable[[types.ModuleType], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


def _answer_for_the_capability(utils: Any) -> None:
    utils.get_compute_capability = lambda device: CAPABILITY
    utils.get_device_sm_count = lambda device: SMS


def _load_onto_the_device(core: Any) -> None:
    load = core.JitSpecNvcc.load
    core.JitSpecNvcc.load = lambda self, *arguments: _Module(load(self, *arguments))


def _build_few_instances(common: Any) -> None:
    """``VIRTUAL_GPU_INSTANCES``: names, of those instances of which a module is to be built; all when it is not set."""
    names = os.environ.get("VIRTUAL_GPU_INSTANCES", "").split()
    generate = common.gen_sm12x_jit_spec

    def generate_few(name: str, sources: Any, template: str, instances: Any) -> Any:
        return generate(name, sources, template, [row for row in instances if not names or row.name in names])

    common.gen_sm12x_jit_spec = generate_few


def _default_to(backend: str, *names: str) -> Callable[[Any], None]:
    """Calls that name no backend get ``backend``: for upstream's own tests, which leave it at its default."""

    def patch(module: Any) -> None:
        for name in names:
            function = getattr(module, name)

            @functools.wraps(function)
            def call(*arguments: Any, function: Any = function, **named: Any) -> Any:
                return function(*arguments, **{"backend": backend, **named})

            setattr(module, name, call)

    return patch


def _time_nothing(utilities: Any) -> None:
    """A benchmark runs once: whether it runs, and is right, is all that this GPU tells."""

    def bench_gpu_time(fn: Any, *arguments: Any, input_args: Any = (), **named: Any) -> list[float]:
        fn(*input_args)
        return [1.0]

    utilities.bench_gpu_time = bench_gpu_time


def _time_no_tactics(autotuner: Any) -> None:
    """The autotuner profiles nothing, and finds all tactics alike: it then takes the first one that it was offered."""
    autotuner.AutoTuner._profile_single_kernel = lambda *arguments, **named: 1.0
    autotuner.TunableRunner.precompile_tactics = lambda *arguments, **named: True
    autotuner.AutoTuner._get_l2_cache_size_in_bytes = lambda *arguments, **named: 24 << 20


class _Finder(importlib.abc.MetaPathFinder):
    patches: ClassVar[dict[str, Callable[[Any], None]]] = {
        "flashinfer.utils": _answer_for_the_capability,
        "flashinfer.jit.core": _load_onto_the_device,
        "flashinfer.jit.sm12x.common": _build_few_instances,
        "flashinfer.testing.utils": _time_nothing,
        "flashinfer.autotuner.autotuner": _time_no_tactics,
    }
    if BACKEND:
        patches["flashinfer.gemm.gemm_base"] = _default_to(
            BACKEND, "group_gemm_mxfp8_mxfp4_nt_groupwise", "group_gemm_mxfp4_nt_groupwise"
        )
        patches["flashinfer.fused_moe.core"] = _default_to(BACKEND, "cutlass_fused_moe")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Patched(spec.loader, self.patches[name])
        return spec


class _Generator(torch.Generator):
    """One of "cuda" is the CPU's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, _here(device))


@contextlib.contextmanager
def _nothing(*arguments: Any, **named: Any) -> Iterator[None]:
    yield


sys.meta_path.insert(0, _Finder())
torch.version.cuda = "13.0"
torch.Generator = _Generator  # type: ignore[misc]
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: CAPABILITY
torch.cuda.get_device_name = lambda device=None: "virtual SM121"
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.synchronize = lambda device=None: None
torch.cuda.device = _nothing  # type: ignore[assignment, misc]
_CudaIsTheCpu().__enter__()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    kernels = {launch.kernel for launch in launches}
    ours = sum("N10flashinfer5sm12x" in launch.kernel for launch in launches)
    messages = f"{len(launches)} launches on the virtual SM121, of {len(kernels)} kernels"
    terminalreporter.write_line(f"{messages}; {ours} of flashinfer::sm12x's")
