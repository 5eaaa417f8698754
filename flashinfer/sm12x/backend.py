# SPDX-License-Identifier: Apache-2.0
"""The backend that runs the kernels of a call: a CUDA device, a virtual one, or none.

An operator validates its call, asks :func:`kernels` of the tensors' device, and launches what it got, or computes on
the CPU where that is None::

    backend = kernels(x.device)
    if backend is None:
        with plain_torch(): ...
    else:
        module = backend.module(gen_router_module)
        backend.call(module.sm12x_router_run, *arguments, writes=outputs)

Environment
-----------
``FLASHINFER_VIRTUAL_DEVICE``
    ``sm_121a``: operators on CPU tensors run on the virtual SM121 of ``flashinfer.testing``, for the whole process.
``FLASHINFER_SM12X_CHECK``
    ``1``: expert ids, ``swiglu_limit``, ``m_indptr``, sequence lengths and pages are read back and checked before each
    launch.  This synchronizes with the device, and is skipped while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from flashinfer_sm12x import variables

from ..utils import device_support_pdl, get_device_sm_count
from . import devices
from .device_class import DeviceClass
from .instances import Instance

VIRTUAL = "flashinfer.testing.virtual_device"
"""The virtual device's module, imported only if one is asked for."""


class Backend(Protocol):
    """A device, real or virtual, that runs compiled modules.

    Attributes
    ----------
    device_class : DeviceClass
        The device's class, by which the planners choose.
    sm_count : int
        The device's multiprocessors, by which the planner of dense layers chooses.
    tactics : tuple
        Rows of the instance table that a layer may be forced to, or tuned with.
    is_cuda : bool
        Whether it is a CUDA device, with graphs, timed tactics and cuBLAS.
    memo : dict
        Facts about the device that operators remember, such as sizes of workspaces.
    """

    device_class: DeviceClass
    sm_count: int
    tactics: tuple[Instance, ...]
    is_cuda: bool
    memo: dict[Any, Any]

    def module(self, generate: Callable[..., Any], *arguments: Any) -> Any:
        """The loaded module of the JIT spec ``generate(*arguments)``, built on first use."""

    def empty(self, size: int) -> torch.Tensor:
        """``size`` bytes of workspace."""

    def call(self, function: Callable[..., Any], *arguments: Any, writes: Sequence[torch.Tensor]) -> Any:
        """``function(*arguments)``, which launches kernels that write no other tensors than ``writes``."""

    def pdl(self, wanted: bool | None) -> bool:
        """Whether kernels are launched as programmatic dependents: ``wanted``, by default where the device can."""


@functools.cache
def _loaded(generate: Callable[..., Any], *arguments: Any) -> Any:
    return generate(*arguments).build_and_load()


class Cuda:
    """The kernels of one CUDA device."""

    is_cuda = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.device_class = devices.require_device_class(device.index)
        self.sm_count = get_device_sm_count(device)
        self.tactics = self.device_class.tactics
        self.memo: dict[Any, Any] = {}
        self._supports_pdl = bool(device_support_pdl(device))

    def module(self, generate: Callable[..., Any], *arguments: Any) -> Any:
        """One module serves all devices."""
        return _loaded(generate, *arguments)

    def empty(self, size: int) -> torch.Tensor:
        """``size`` bytes from torch's allocator."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def call(self, function: Callable[..., Any], *arguments: Any, writes: Sequence[torch.Tensor] = ()) -> Any:
        """``function(*arguments)`` with this device as the current one."""
        if torch.cuda.current_device() == self.device.index:
            return function(*arguments)
        with torch.cuda.device(self.device):
            return function(*arguments)

    def pdl(self, wanted: bool | None) -> bool:
        """``wanted``; None: whether the device supports programmatic dependent launch."""
        return self._supports_pdl if wanted is None else wanted


@functools.cache
def _cuda(device: torch.device) -> Cuda:
    return Cuda(device)


def kernels(device: torch.device) -> Backend | None:
    """The backend that runs kernels on tensors of ``device``; None: the CPU, where operators compute with torch.

    Raises
    ------
    ValueError
        ``FLASHINFER_VIRTUAL_DEVICE`` names no architecture.
    """
    if device.type == "cuda":
        return _cuda(device)
    if VIRTUAL not in sys.modules and not variables.read("FLASHINFER_VIRTUAL_DEVICE"):
        return None
    # Not as it stands in sys.modules, where another thread may be importing it.
    virtual: Backend | None = importlib.import_module(VIRTUAL).active()
    return virtual


def checks_values(device: torch.device) -> bool:
    """Whether tensors' contents are checked: on the CPU always, elsewhere with ``FLASHINFER_SM12X_CHECK=1``."""
    if device.type == "cpu":
        return True
    # Each call asks, and hardly one finds it set: C answers without Python.
    if not variables.getenv(b"FLASHINFER_SM12X_CHECK"):
        return False
    return variables.read("FLASHINFER_SM12X_CHECK") and not torch.cuda.is_current_stream_capturing()


def workspace_size(backend: Backend, module: Any, function: str, *sizes: int) -> int:
    """The size in bytes that a function of a loaded module returns, at least 1; remembered by the function's name."""
    size: int | None = backend.memo.get((function, sizes))
    if size is None:
        ask = getattr(module, function)
        size = backend.memo[function, sizes] = max(1, int(backend.call(ask, *sizes, writes=())))
    return size


@contextlib.contextmanager
def plain_torch(device: torch.device) -> Iterator[None]:
    """A context without autograd and autocast in which ``device`` is torch's default device."""
    with torch.inference_mode(), torch.autocast(device.type, enabled=False), device:
        yield
