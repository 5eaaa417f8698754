# SPDX-License-Identifier: Apache-2.0
"""The virtual GPU without CUDA's runtime: PTX text in, launches out."""

from __future__ import annotations

import ctypes
import enum
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ._library import VsmError, load, take_text
from .results import Launch


class Watch(enum.IntFlag):
    """Flags for what a launch watches; bounds and alignment of accesses are always checked."""

    NONE = 0
    UNINITIALIZED = 1  # reads of shared and allocated memory that nothing wrote
    RACES = 2  # between the warps of a block, in shared memory; slow
    FENCES = (
        4  # generic writes that the async proxy reads or overwrites without a fence; grids that overlap without a wait
    )
    DISTINCT = 8  # count distinct global sectors
    ARRIVALS = 16  # arrivals and releases without the fence that GB10 needs before them; the PTX ISA asks for none
    DEFAULT = UNINITIALIZED | FENCES | DISTINCT
    ALL = UNINITIALIZED | RACES | FENCES | DISTINCT  # all that the PTX ISA justifies, so without ARRIVALS


ACCUMULATION_KINDS = ("bf16", "f16", "tf32", "f8", "mxf8f6f4", "mxf4")
"""Kinds of ``mma`` by their operands; ``f8`` covers e4m3, e5m2 and ``kind::f8f6f4``; ``mxf4`` covers
``kind::mxf4nvf4``."""


def accumulation_widths(bits: int | Mapping[str, int]) -> Any:
    """``accumulation_bits`` as the C interface takes them: a byte for each of :data:`ACCUMULATION_KINDS`.

    Raises:
        ValueError: there is no such kind, or a width is not from 0 to 30.
    """
    by_kind = dict.fromkeys(ACCUMULATION_KINDS, bits) if isinstance(bits, int) else bits
    if unknown := set(by_kind) - set(ACCUMULATION_KINDS):
        raise ValueError(f"accumulation_bits has {sorted(unknown)}; kinds are {', '.join(ACCUMULATION_KINDS)}")
    if not all(0 <= width <= 30 for width in by_kind.values()):
        raise ValueError(f"accumulation_bits is {bits}; a width is from 1 to 30, or 0 for exact sums")
    return (ctypes.c_uint8 * 6)(*(by_kind.get(kind, 0) for kind in ACCUMULATION_KINDS))


class _LaunchStruct(ctypes.Structure):
    """``vsm_launch`` of capi.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32),
        ("registers", ctypes.c_uint32),
        ("max_dynamic_shared", ctypes.c_uint32),
        ("watch", ctypes.c_uint32),
        ("max_reports", ctypes.c_uint32),
        ("programmatic", ctypes.c_uint32),
        ("cooperative", ctypes.c_uint32),
        ("accumulation_bits", ctypes.c_uint8 * 6),
        ("max_warp_instructions", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("weak_memory", ctypes.c_uint64),
    )


def pack(*arguments: Any) -> bytes:
    """A parameter buffer as the PTX lays it out: each argument at its natural alignment.

    An argument is a ``ctypes`` scalar, a ``ctypes`` structure (aligned as it says), ``bytes`` (an opaque struct of
    64-byte alignment, such as a tensor map), or an ``int``: a 64-bit device address.
    """
    buffer = bytearray()
    for argument in arguments:
        if isinstance(argument, int):
            argument = ctypes.c_uint64(argument)
        if isinstance(argument, (bytes, bytearray)):
            alignment, raw = 64, bytes(argument)
        else:
            alignment, raw = ctypes.alignment(argument), bytes(argument)
        buffer.extend(bytes(-len(buffer) % alignment))
        buffer.extend(raw)
    return bytes(buffer)


def _three(values: int | Sequence[int]) -> tuple[int, int, int]:
    given = (values,) if isinstance(values, int) else tuple(values)
    if not 1 <= len(given) <= 3:
        raise ValueError(f"grid and block have one to three dimensions, not {len(given)}")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


class Device:
    """One virtual GPU with memory of its own.

    Args:
        architecture: ``"sm_121a"`` (GB10) or ``"sm_90a"`` (H200).
        threads: Host threads that execute blocks; 0: one per core.

    Raises:
        VsmError: no such architecture.
    """

    def __init__(self, architecture: str = "sm_121a", threads: int = 0) -> None:
        self._library = load()
        self._handle: int | None = self._library.vsm_device_create(architecture.encode(), threads)
        if not self._handle:
            raise VsmError(self._error())
        self.architecture = architecture

    def _error(self) -> str:
        text: bytes = self._library.vsm_last_error()
        return text.decode("utf-8", "replace")

    def close(self) -> None:
        """Give back the device and all that was allocated on it."""
        if self._handle:
            self._library.vsm_device_destroy(self._handle)
            self._handle = None

    def __enter__(self) -> Device:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def allocate(self, size: int) -> int:
        """The address of ``size`` bytes, aligned to 256, watched as uninitialized."""
        address: int = self._library.vsm_allocate(self._handle, size)
        if not address:
            raise MemoryError(f"{size} bytes of device memory: {self._error()}")
        return address

    def release(self, address: int) -> None:
        """Free what :meth:`allocate` gave."""
        if self._library.vsm_release(self._handle, address) != 0:
            raise ValueError(f"{address:#x} is not the start of an allocation")

    def upload(self, data: bytes | bytearray | memoryview, address: int | None = None) -> int:
        """Copy bytes to ``address``, or to memory allocated for them; returns the address."""
        raw = bytes(data)
        if address is None:
            address = self.allocate(max(1, len(raw)))
        ctypes.memmove(address, raw, len(raw))
        self._library.vsm_mark_initialized(self._handle, address, len(raw))
        return address

    def download(self, address: int, size: int) -> bytes:
        """The ``size`` bytes at ``address``."""
        return ctypes.string_at(address, size)

    def discard(self, address: int, size: int) -> None:
        """Mark allocated memory as uninitialized: a kernel that reads it before it is written is reported. For a
        workspace that is handed over again and holds an earlier call's data.
        """
        self._library.vsm_discard(self._handle, address, size)

    def register(self, address: int, size: int, read_only: bool = False) -> None:
        """Let kernels access memory that somebody else owns, a CPU tensor for example. Counted per address."""
        self._library.vsm_register_memory(self._handle, address, size, int(read_only))

    def unregister(self, address: int) -> None:
        """Undo one :meth:`register`."""
        if self._library.vsm_unregister_memory(self._handle, address) != 0:
            raise ValueError(f"{address:#x} is not registered")

    def load(self, ptx: str | bytes, name: str = "module") -> Module:
        """Parse PTX text and place its variables.

        Raises:
            VsmError: an instruction, modifier or operand form that is not known; the text names it and its line.
        """
        text = ptx.encode() if isinstance(ptx, str) else ptx
        handle = self._library.vsm_module_load(self._handle, text, len(text), name.encode())
        if not handle:
            raise VsmError(self._error())
        return Module(self, handle, name)


class Module:
    """PTX that was loaded on a device."""

    def __init__(self, device: Device, handle: int, name: str) -> None:
        self._device, self._handle, self.name = device, handle, name

    def unload(self) -> None:
        """Take it from the device."""
        self._device._library.vsm_module_unload(self._device._handle, self._handle)

    def kernel(self, name: str) -> Kernel:
        """The kernel of this (mangled) name. Raises ``KeyError`` if the module has none."""
        index = self._device._library.vsm_module_kernel(self._device._handle, self._handle, name.encode())
        if index < 0:
            raise KeyError(f"module {self.name} has no kernel {name}")
        return Kernel(self._device, self._handle, index, name)

    def variable(self, name: str) -> tuple[int, int]:
        """Address and size of a ``.global`` or ``.const`` variable. Raises ``KeyError`` if there is none."""
        size = ctypes.c_uint64()
        address = self._device._library.vsm_module_variable(
            self._device._handle, self._handle, name.encode(), ctypes.byref(size)
        )
        if not address:
            raise KeyError(f"module {self.name} has no variable {name}")
        return address, size.value


class Kernel:
    """A kernel of a module."""

    def __init__(self, device: Device, module: int, index: int, name: str) -> None:
        self._device, self._module, self._index, self.name = device, module, index, name

    @property
    def param_bytes(self) -> int:
        """Size of its parameter buffer."""
        size: int = self._device._library.vsm_kernel_param_bytes(self._device._handle, self._module, self._index)
        return size

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        params: bytes = b"",
        *,
        dynamic_shared: int = 0,
        registers: int = 0,
        watch: Watch = Watch.DEFAULT,
        max_reports: int = 64,
        max_warp_instructions: int = 0,
        programmatic: bool = False,
        cooperative: bool = False,
        accumulation_bits: int | Mapping[str, int] = 0,
        stream: int = 0,
        weak_memory: int = 0,
    ) -> Launch:
        """Run it to its end; the result holds any failure and the checkers' findings.

        Args:
            grid, block: One to three dimensions.
            params: The parameter buffer, see :func:`pack`.
            dynamic_shared: Bytes; granted as if ``cudaFuncSetAttribute`` had been called with them.
            registers: Registers per thread; 0 leaves the register file unchecked.
            watch: The checkers to run.
            max_reports: Findings kept of each kind.
            max_warp_instructions: The most warp instructions of the launch; 0 takes the device's default.
            programmatic: Use programmatic stream serialization: on a GPU it could start before the launch ahead ends.
            cooperative: All blocks are resident at once; a grid that is too large for that is refused.
            accumulation_bits: Fraction bits that ``mma`` keeps of its sums, of all kinds or by name
                (:data:`ACCUMULATION_KINDS`); 0: exact sums.
            stream: Any number; launches with the same number are ordered.
            weak_memory: A seed. Other blocks see a block's writes when the program orders them, or earlier at random,
                and unordered reads are reported. One host thread runs the launch. 0: writes are visible at once.
        """
        library = self._device._library
        config = _LaunchStruct(
            (ctypes.c_uint32 * 3)(*_three(grid)),
            (ctypes.c_uint32 * 3)(*_three(block)),
            dynamic_shared,
            registers,
            dynamic_shared,
            int(watch),
            max_reports,
            int(programmatic),
            int(cooperative),
            accumulation_widths(accumulation_bits),
            max_warp_instructions,
            stream,
            weak_memory,
        )
        answer = ctypes.c_void_p()
        library.vsm_run(
            self._device._handle,
            self._module,
            self._index,
            ctypes.byref(config),
            ctypes.c_char_p(params),
            len(params),
            ctypes.byref(answer),
        )
        values = json.loads(take_text(library, "vsm_free", answer.value))
        values.setdefault("kernel", self.name)
        values.setdefault("grid", _three(grid))
        values.setdefault("block", _three(block))
        values.setdefault("dynamic_shared", dynamic_shared)
        values.setdefault("registers", registers)
        return Launch.from_json(values)
