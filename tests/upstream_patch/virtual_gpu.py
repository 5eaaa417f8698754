# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin (``-p virtual_gpu``) for an exported tree: its torch-style tests run on the virtual SM121.

For the process, ``"cuda"`` is the CPU's memory, on which the virtual GPU works: torch's functions are given the CPU
where they ask for a CUDA device, upstream's question for a compute capability is answered 12.1, and what a JIT module's
function is called with becomes the device's memory for that call. Of this fork only ``emulator/python`` is on the path.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import vsm
from torch.overrides import TorchFunctionMode

CAPABILITY = (12, 1)
SMS = 48

_runtime = vsm.activate_runtime()
_runtime.configure(architecture="sm_121a", watch=vsm.Watch.DEFAULT)
launches: list[Any] = []
# Kinds of reports that do not fail a test: what is known of upstream's own kernels.
KNOWN = os.environ.get("VIRTUAL_GPU_KNOWN", "").split(",")


class _CudaIsTheCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        if function is torch.Tensor.cuda:
            return arguments[0]
        if "device" in named:
            asked, named["device"] = named["device"], _here(named["device"])
            if function is torch.empty and asked is not named["device"]:
                return _aligned(function(*arguments, **named))
        if function is torch.Tensor.to:
            arguments = tuple(_here(each) for each in arguments)
        return function(*arguments, **named)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Memory in the place of ``tensor``'s that starts as CUDA's does, at a multiple of 256 bytes; the CPU's, of 64."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.empty(size + 256, dtype=torch.uint8)
    first = -memory.data_ptr() % 256
    return memory[first : first + size].view(tensor.dtype).view(tensor.shape)


def _here(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


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
                result = function(*arguments)
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
            raise RuntimeError("\n".join([*wrong, _runtime.take_message()])) from failure
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


class _Finder(importlib.abc.MetaPathFinder):
    patches: ClassVar[dict[str, Callable[[Any], None]]] = {
        "flashinfer.utils": _answer_for_the_capability,
        "flashinfer.jit.core": _load_onto_the_device,
        "flashinfer.jit.sm12x.common": _build_few_instances,
    }

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Patched(spec.loader, self.patches[name])
        return spec


@contextlib.contextmanager
def _nothing(*arguments: Any, **named: Any) -> Iterator[None]:
    yield


sys.meta_path.insert(0, _Finder())
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: CAPABILITY
torch.cuda.synchronize = lambda device=None: None
torch.cuda.device = _nothing  # type: ignore[assignment, misc]
_CudaIsTheCpu().__enter__()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    kernels = sorted({launch.kernel for launch in launches})
    terminalreporter.write_line(f"{len(launches)} launches on the virtual SM121, of {len(kernels)} kernels")
