# SPDX-License-Identifier: Apache-2.0
"""Operators on CPU tensors run their compiled kernels on a virtual SM121, instruction by instruction.

::

    with flashinfer.testing.virtual_device("sm_121a") as device:
        out = flashinfer.fused_moe.cutlass_fused_moe(...)   # CPU tensors
        for launch in device.launches:
            print(launch.kernel, launch.counters.warp_instructions, launch.predicted.seconds)

``FLASHINFER_VIRTUAL_DEVICE=sm_121a`` does the same for a whole process. The module is built for 12.1a with its PTX
embedded, and loaded over the emulator's CUDA runtime: launcher, workspace arithmetic and kernels are those that ship.
Kernels may touch exactly the bytes of the tensors of the call. Out-of-bounds accesses, reads of memory that nothing
wrote, missing proxy fences, deadlocks and the driver's refusals raise :class:`VirtualDeviceError`.

It is a backend, which :mod:`flashinfer.sm12x.backend` loads by its name: operators find it there, and know nothing of
it. The emulator itself (``emulator/``) knows nothing of this package.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import importlib
import multiprocessing
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flashinfer._layer import fork_root
from flashinfer.sm12x.device_class import GB10
from flashinfer.sm12x.instances import INSTANCES
from flashinfer_sm12x import variables

from .error_bounds import SM120_SUM_BITS

ARCHITECTURES = {"sm_121a": (12, "1a")}
_EMBED_PTX = "FLASHINFER_SM12X_EMBED_PTX"
_ACCUMULATION_BITS = "VSM_ACCUMULATION_BITS"

_lock = threading.RLock()
_stack: list[VirtualDevice] = []
_sm_counts: list[int] = []  # of the last device
_modules: dict[Any, Any] = {}  # they stay loaded: their PTX is parsed once per process


class VirtualDeviceError(RuntimeError):
    """A launch on the virtual device was refused, failed, or a checker reported on it.

    Attributes:
        launches: The call's launches, the failed one included; their ``reports`` name kernel, PTX line, block, warp,
            lane and address.
    """

    def __init__(self, text: str, launches: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.launches = tuple(launches)


@functools.cache
def _vsm() -> Any:
    """The emulator's Python face, from the checkout."""
    folder = fork_root() / "emulator" / "python"
    if not (folder / "vsm" / "__init__.py").is_file():
        raise RuntimeError(
            f"the virtual device needs the emulator's sources, which are not in {folder.parent}: run from a checkout "
            "(PYTHONPATH or pip install -e)"
        )
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module("vsm")


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` in a process that can use the virtual device, with or without CUDA in torch.

    A torch with CUDA has loaded its runtime before anyone can ask for the virtual one. The function then runs in a new
    process that starts with the virtual one; function, arguments and result are pickled. A torch without CUDA needs no
    new process.
    """
    _vsm()
    preload = importlib.import_module("vsm.preload").preload()
    if not preload:
        return function(*arguments)
    context = multiprocessing.get_context("spawn")
    with (
        _environment("LD_PRELOAD", preload),
        _environment(*_known_gpus()),
        concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool,
    ):
        try:
            return pool.submit(function, *arguments).result()
        except KeyboardInterrupt:  # of this process alone, it may be
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _known_gpus() -> tuple[str, str]:
    """A variable and its value that spare a process the question for its GPUs, and give it this one's cache: there
    torch counts the virtual runtime's and cannot use it."""
    from flashinfer.jit import core

    known = core.current_compilation_context.TARGET_CUDA_ARCHS
    if not known:
        return "CUDA_VISIBLE_DEVICES", ""
    return "FLASHINFER_CUDA_ARCH_LIST", " ".join(f"{major}.{minor}" for major, minor in sorted(known))


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Within it, a variable of the environment has that value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _check_architecture(name: str) -> None:
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture is {name!r}; the virtual device can be {', '.join(ARCHITECTURES)}")


@contextlib.contextmanager
def compiling_for(architecture: str = "sm_121a") -> Iterator[None]:
    """A context in which JIT specs are the virtual device's: for ``architecture``, with PTX in the library."""
    from flashinfer.jit import core

    _check_architecture(architecture)
    context = core.current_compilation_context
    before = set(context.TARGET_CUDA_ARCHS)
    context.TARGET_CUDA_ARCHS = {ARCHITECTURES[architecture]}
    try:
        with _environment(_EMBED_PTX, "1"):
            yield
    finally:
        context.TARGET_CUDA_ARCHS = before


class VirtualDevice:
    """A virtual GB10 (SM121), made by :func:`virtual_device`.

    Attributes:
        architecture: ``"sm_121a"``.
        launches: Launches that ran so far, oldest first (``vsm.Launch``: counters, predicted time, reports).
        strict: Whether a checker's report raises, as a fault does.
    """

    device_class = GB10
    tactics = INSTANCES  # it runs whatever it is given, Hopper's rows too
    is_cuda = False

    compute_capability = (12, 1)
    shared_memory_per_block_optin = 101376

    def __init__(
        self,
        architecture: str,
        strict: bool,
        watch: int | None,
        threads: int,
        accumulation_bits: int | Mapping[str, int] | None = None,
        weak_memory: int = 0,
        late_copies: int = 0,
        planted: Mapping[str, str] | None = None,
        sm_count: int = GB10.sm_count,
        stream_sms: int = 0,
    ) -> None:
        vsm = _vsm()
        if _modules and sm_count != _sm_counts[-1]:
            raise RuntimeError(
                f"sm_count is {sm_count}, and compiled modules of this process know {_sm_counts[-1]}: use a new process"
            )
        self.architecture = architecture
        self.strict = strict
        self.sm_count = sm_count
        self.launches: list[Any] = []
        self.memo: dict[Any, Any] = {}
        self._runtime = vsm.activate_runtime()
        if accumulation_bits is None:
            given = _ACCUMULATION_BITS in os.environ
            accumulation_bits = self._runtime.initial.accumulation_bits if given else SM120_SUM_BITS
        self._runtime.configure(
            architecture=architecture,
            threads=threads,
            watch=vsm.Watch.DEFAULT if watch is None else vsm.Watch(watch),
            accumulation_bits=accumulation_bits,
        )
        self._runtime.weak_memory(weak_memory)
        self._runtime.late_copies(late_copies)
        self._runtime.multiprocessors(sm_count, stream_sms)
        _sm_counts[:] = [sm_count]
        self._plants = bool(planted)
        if planted:
            self._runtime.plant(planted)
        else:
            self._runtime.reset()
        self._runtime.take_launches()
        self._runtime.take_message()
        self._owned: set[int] = set()
        self._failure = ""

    def module(self, generate: Callable[..., Any], *arguments: Any) -> Any:
        """The loaded module of the JIT spec that ``generate(*arguments)`` gives, built for this device on first use.

        Raises:
            The errors of building.
        """
        from flashinfer.jit.sm12x.modules import computes_in_fp16

        key = (self.architecture, generate, arguments, computes_in_fp16(), computes_in_fp16("mxf4"))
        if key not in _modules:
            with compiling_for(self.architecture):
                _modules[key] = generate(*arguments).build_and_load()
        return _modules[key]

    def empty(self, size: int) -> torch.Tensor:
        """``size`` bytes (uint8) of the device's own memory, watched: reading a byte that nothing wrote is reported.

        The tensor must not outlive the device's context.
        """
        self._require_no_failure()
        runtime = ctypes.CDLL("libcudart.so.13")  # the shim: it is loaded already
        address = ctypes.c_void_p()
        if size <= 0 or runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) != 0:
            raise VirtualDeviceError(f"{size} bytes of the virtual device's memory: {self._runtime.take_message()}")
        start = int(address.value or 0)
        buffer = (ctypes.c_uint8 * size).from_address(start)
        self._owned.add(start)
        # The tensor keeps the buffer alive; when both are gone, the memory goes.
        weakref.finalize(buffer, self._release, runtime, start)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _require_no_failure(self) -> None:
        if self._failure:
            raise VirtualDeviceError(f"the virtual device stopped at an earlier fault: {self._failure}")

    def pdl(self, wanted: bool | None) -> bool:
        """Whether kernels are launched as programmatic dependents: unless ``wanted`` is False."""
        return wanted is not False

    def discard(self, tensor: torch.Tensor, seed: int) -> None:
        """Make memory of :meth:`empty` look as a later call might find it: full of random bytes. A kernel that reads
        one before it is written is reported.
        """
        generator = torch.Generator().manual_seed(seed)
        flat = tensor.view(torch.uint8).reshape(-1)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))
        self._runtime.discard(flat.data_ptr(), flat.numel())

    @property
    def planted(self) -> int:
        """The number of places in the PTX loaded so far into which faults were planted."""
        count: int = self._runtime.planted
        return count

    def _release(self, runtime: ctypes.CDLL, address: int) -> None:
        if address in self._owned:
            self._owned.discard(address)
            runtime.cudaFree(ctypes.c_void_p(address))

    def call(self, function: Callable[..., Any], *arguments: Any, writes: Sequence[torch.Tensor] | None = None) -> Any:
        """Call a module's function with CPU tensors as its device memory.

        Args:
            function: Takes ``arguments``; launches kernels.
            writes: The tensors among ``arguments`` that kernels may write; all, when omitted.

        Returns:
            The result of ``function``. The launches are appended to :attr:`launches`.

        Raises:
            VirtualDeviceError: a launch was refused or failed; with ``strict``, a checker reported. After a fault every
                further call fails, as it does in a GPU's context; enter a new device.
        """
        self._require_no_failure()
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor) and argument.numel()]
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(f"a tensor is on {tensor.device}; the virtual device takes CPU tensors")
        writable = None if writes is None else {tensor.data_ptr() for tensor in writes}
        ranges: list[tuple[int, int, bool]] = []
        for start, size in sorted({_byte_range(tensor) for tensor in tensors if tensor.data_ptr() not in self._owned}):
            end, writes_it = start + size, writable is None or start in writable
            # Keys and values of one cache, or parts of rows, lie in between each other.
            if ranges and start < ranges[-1][1]:
                start, last, before = ranges.pop()
                end, writes_it = max(end, last), writes_it or before
            ranges.append((start, end, writes_it))
        failure: Exception | None = None
        result = None
        with contextlib.ExitStack() as registered:
            for start, end, writes_it in ranges:
                self._runtime.register(start, end - start, read_only=not writes_it)
                registered.callback(self._runtime.unregister, start)
            try:
                result = function(*arguments)
            except RuntimeError as error:
                failure = error
        launches = self._runtime.take_launches()
        self.launches.extend(launches)
        self._check(launches, failure)
        return result

    def _check(self, launches: Sequence[Any], failure: Exception | None) -> None:
        failed = [launch for launch in launches if launch.status not in ("ok", "refused")]
        if failed:
            self._failure = str(failed[0])
            raise VirtualDeviceError(self._failure, launches) from failure
        if failure is not None:
            message = self._runtime.take_message()
            raise VirtualDeviceError(f"{failure}" + (f" ({message})" if message else ""), launches) from failure
        reported = [launch for launch in launches if not launch.clean]
        if reported and self.strict:
            raise VirtualDeviceError("\n".join(map(str, reported)), launches)

    def close(self) -> None:
        """Free what :meth:`empty` gave and forget a fault."""
        self._owned.clear()
        self._runtime.weak_memory(0)
        self._runtime.late_copies(0)
        self._runtime.multiprocessors()
        if self._plants:
            self._runtime.plant({})
        else:
            self._runtime.reset()


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and number of bytes that a strided tensor spans."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


@contextlib.contextmanager
def virtual_device(
    architecture: str = "sm_121a",
    *,
    strict: bool = True,
    watch: int | None = None,
    threads: int = 0,
    accumulation_bits: int | Mapping[str, int] | None = None,
    weak_memory: int = 0,
    late_copies: int = 0,
    planted: Mapping[str, str] | None = None,
    sm_count: int = GB10.sm_count,
    stream_sms: int = 0,
) -> Iterator[VirtualDevice]:
    """A context in which operators on CPU tensors run their compiled kernels on a virtual GPU.

    Args:
        architecture: ``"sm_121a"``: GB10 (DGX Spark).
        strict: A checker's report raises :class:`VirtualDeviceError`, as a fault does; else it is only recorded.
        watch: Flags of ``vsm.Watch``; its default is all but races and arrivals.
        threads: Host threads that execute blocks; 0: one per core.
        accumulation_bits: Fraction bits that MMAs keep of their sums, of all kinds or by name
            (``vsm.ACCUMULATION_KINDS``); 0: all of them. By default the bits of ``VSM_ACCUMULATION_BITS``, else those
            that an SM120 was measured to keep (``flashinfer.testing.SM120_SUM_BITS``).
        weak_memory: A seed. A block's writes reach other blocks when the program orders them, or earlier at random; a
            read that is not ordered after the write is reported. 0: writes are visible at once.
        late_copies: One asynchronous copy in 50 lands this many scheduler rounds (a step of each warp) late, after
            copies that were issued later. 0: none.
        planted: Faults for a test of the tests: text of the PTX -> text that replaces it.
        sm_count: SMs of the device; a GB10 has 48. Compiled modules ask once, so all devices of a process with modules
            have as many.
        stream_sms: SMs that each stream may use, as in a green context; 0: all.

    Yields:
        The device, with what it executed.

    Raises:
        ValueError: no such architecture, or number of SMs.
        RuntimeError: modules of the process know another number of SMs, the emulator cannot be built, or the process
            has a real CUDA 13 runtime loaded (the text says what to do).
    """
    _check_architecture(architecture)
    with _lock:
        if _stack:
            raise RuntimeError("a virtual device is active in this process already; there can be one at a time")
        device = VirtualDevice(
            architecture,
            strict,
            watch,
            threads,
            accumulation_bits,
            weak_memory,
            late_copies,
            planted,
            sm_count,
            stream_sms,
        )
        _stack.append(device)
    try:
        yield device
    finally:
        with _lock:
            _stack.remove(device)
            device.close()


def active() -> VirtualDevice | None:
    """The virtual device that operators on CPU tensors use now, or None: what :func:`virtual_device` made, else the one
    that ``FLASHINFER_VIRTUAL_DEVICE`` asks for, for the whole process.

    Raises:
        ValueError: There is no such architecture.
    """
    if _stack:
        return _stack[-1]
    name = variables.read("FLASHINFER_VIRTUAL_DEVICE")
    return _process_device(name) if name else None


@functools.cache
def _process_device(name: str) -> VirtualDevice:
    with _lock:
        return VirtualDevice(name, strict=True, watch=None, threads=0)


class _CallableModule(types.ModuleType):
    """``flashinfer.testing.virtual_device`` names this module and its main function: importing the module binds the
    name in the package, whoever does it first."""

    def __call__(self, *arguments: Any, **keywords: Any) -> contextlib.AbstractContextManager[VirtualDevice]:
        return virtual_device(*arguments, **keywords)


sys.modules[__name__].__class__ = _CallableModule
