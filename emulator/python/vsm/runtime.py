# SPDX-License-Identifier: Apache-2.0
"""The virtual GPU behind CUDA's runtime interface, in this process."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ._library import VsmError, shim_directory, take_text
from .device import ACCUMULATION_KINDS, Watch, accumulation_widths
from .results import Launch

_LIBRARIES = ("libcudart.so.13", "libcuda.so.1")
_active: Runtime | None = None


class Settings(NamedTuple):
    """See :meth:`Runtime.configure`."""

    architecture: str
    threads: int
    watch: Watch
    max_warp_instructions: int
    strict: bool
    log: bool
    accumulation_bits: dict[str, int]


class Runtime:
    """Controls of the shim. There is one per process: :func:`activate_runtime` gives it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        u32, u64, i32, text, handle = (
            ctypes.c_uint32,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_void_p,
        )
        pointer, u8 = ctypes.POINTER, ctypes.c_uint8
        signatures: dict[str, tuple[object, tuple[object, ...]]] = {
            "vsm_runtime_configure": (i32, (text, i32, u32, u64, i32, i32, pointer(u8))),
            "vsm_runtime_settings": (
                None,
                (pointer(text), pointer(i32), pointer(u32), pointer(u64), pointer(i32), pointer(i32), pointer(u8)),
            ),
            "vsm_runtime_register": (None, (u64, u64, i32)),
            "vsm_runtime_unregister": (i32, (u64,)),
            "vsm_runtime_discard": (None, (u64, u64)),
            "vsm_runtime_weak_memory": (None, (u64,)),
            "vsm_runtime_late_copies": (None, (u64,)),
            "vsm_runtime_plant": (None, (pointer(text), pointer(text), i32)),
            "vsm_runtime_planted": (u64, ()),
            "vsm_runtime_take_launches": (handle, (pointer(u64),)),
            "vsm_runtime_take_message": (handle, ()),
            "vsm_runtime_free": (None, (handle,)),
            "vsm_runtime_clock": (ctypes.c_double, ()),
            "vsm_runtime_reset": (None, ()),
            "vsm_runtime_multiprocessors": (ctypes.c_int, (ctypes.c_int, ctypes.c_int)),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        self.initial = self.settings
        """The settings by the environment."""

    @property
    def settings(self) -> Settings:
        """The current settings."""
        architecture = ctypes.c_char_p()
        threads, strict, log = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        watch, bound, bits = ctypes.c_uint32(), ctypes.c_uint64(), (ctypes.c_uint8 * 6)()
        references = map(ctypes.byref, (architecture, threads, watch, bound, strict, log))
        self._library.vsm_runtime_settings(*references, bits)
        name = (architecture.value or b"").decode()
        flags = bool(strict.value), bool(log.value)
        widths = dict(zip(ACCUMULATION_KINDS, bits, strict=True))
        return Settings(name, threads.value, Watch(watch.value), bound.value, *flags, widths)

    def configure(
        self,
        *,
        architecture: str | None = None,
        threads: int | None = None,
        watch: Watch | None = None,
        max_warp_instructions: int | None = None,
        strict: bool | None = None,
        log: bool | None = None,
        accumulation_bits: int | Mapping[str, int] | None = None,
    ) -> None:
        """Change the settings that are given, and keep the others.

        Args:
            architecture: ``"sm_121a"`` or ``"sm_90a"``; a change resets the device.
            threads: Host threads, 0: one per core. Takes effect at the next :meth:`reset`.
            watch: The checkers to run.
            max_warp_instructions: The most warp instructions of a launch; 0: the device's default.
            strict: A checker's report fails its launch.
            log: Explanations of refused calls and reports go to stderr too.
            accumulation_bits: Fraction bits that ``mma`` keeps of its sums, at most 30: of all kinds, or by name
                (``vsm.ACCUMULATION_KINDS``). 0 means exact sums, as do kinds that are not named.

        Raises:
            VsmError: no such architecture.
            ValueError: no such kind, or width.
        """
        now = self.settings
        chosen = Settings(
            now.architecture if architecture is None else architecture,
            now.threads if threads is None else threads,
            now.watch if watch is None else watch,
            now.max_warp_instructions if max_warp_instructions is None else max_warp_instructions,
            now.strict if strict is None else strict,
            now.log if log is None else log,
            now.accumulation_bits,
        )
        answer = self._library.vsm_runtime_configure(
            chosen.architecture.encode(),
            chosen.threads,
            int(chosen.watch),
            chosen.max_warp_instructions,
            int(chosen.strict),
            int(chosen.log),
            accumulation_widths(chosen.accumulation_bits if accumulation_bits is None else accumulation_bits),
        )
        if answer != 0:
            raise VsmError(f"architecture is {chosen.architecture!r}; the virtual GPU can be 'sm_121a' or 'sm_90a'")

    def multiprocessors(self, device: int = 0, stream: int = 0) -> None:
        """Set the SMs of the device (0: as many as its model has) and of every stream (0: all; fewer: each stream is of
        a green context). Resets the device. A library may remember what it was told before.

        Raises:
            ValueError: there are no such numbers.
        """
        if self._library.vsm_runtime_multiprocessors(device, stream) != 0:
            raise ValueError(
                f"{device} SMs, of which a stream has {stream}: neither may be negative, a stream's no more"
            )

    def register(self, address: int, size: int, read_only: bool = False) -> None:
        """Let kernels access memory that somebody else owns, a CPU tensor for example. Counted per address."""
        self._library.vsm_runtime_register(address, size, int(read_only))

    def unregister(self, address: int) -> None:
        """Undo one :meth:`register`."""
        if self._library.vsm_runtime_unregister(address) != 0:
            raise ValueError(f"{address:#x} is not registered")

    def discard(self, address: int, size: int) -> None:
        """Mark allocated memory as uninitialized: a kernel that reads it before it is written is reported."""
        self._library.vsm_runtime_discard(address, size)

    def weak_memory(self, seed: int) -> None:
        """In launches from now on, other blocks see a block's writes only when the program orders them, or earlier at
        random by the seed (see the emulator's README). 0: at once."""
        self._library.vsm_runtime_weak_memory(seed)

    def late_copies(self, rounds: int) -> None:
        """In launches from now on, one asynchronous copy in 50 lands this many scheduler rounds late. 0: none."""
        self._library.vsm_runtime_late_copies(rounds)

    def plant(self, replacements: Mapping[str, str]) -> None:
        """Plant faults: read all PTX anew and replace each key by its value. An empty mapping reads it unchanged.
        Resets the device.
        """
        texts = ctypes.c_char_p * len(replacements)
        original = texts(*(text.encode() for text in replacements))
        planted = texts(*(text.encode() for text in replacements.values()))
        self._library.vsm_runtime_plant(original, planted, len(replacements))

    @property
    def planted(self) -> int:
        """The number of faults of :meth:`plant` that were put into PTX loaded since then."""
        count: int = self._library.vsm_runtime_planted()
        return count

    def take_launches(self) -> list[Launch]:
        """The launches since the last call, oldest first.

        Raises:
            VsmError: more ran than are kept (65,536), so that the oldest are lost.
        """
        dropped = ctypes.c_uint64()
        answer = self._library.vsm_runtime_take_launches(ctypes.byref(dropped))
        launches = [
            Launch.from_json(values) for values in json.loads(take_text(self._library, "vsm_runtime_free", answer))
        ]
        if dropped.value:
            raise VsmError(f"{dropped.value} launches were not kept: call take_launches more often")
        return launches

    def take_message(self) -> str:
        """Why the last refused call was refused, then forgotten; empty if none was."""
        return take_text(self._library, "vsm_runtime_free", self._library.vsm_runtime_take_message())

    @property
    def clock(self) -> float:
        """Seconds that all launches since the last reset would take on the modelled GPU (predicted)."""
        seconds: float = self._library.vsm_runtime_clock()
        return seconds

    def reset(self) -> None:
        """Forget a fault, all device memory and what ``cudaFuncSetAttribute`` granted."""
        self._library.vsm_runtime_reset()


def loaded_libraries(name: str) -> list[Path]:
    """Files of this name that the process has mapped, other than the shim's."""
    found = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if path and Path(path[0]).name.startswith(name):
                found.add(Path(path[0]))
    return sorted(found)


def _handle(name: str) -> int | None:
    """The dynamic linker's handle of a library that is loaded: of a bare name, the one that who needs it is given."""
    try:
        return int(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle)
    except OSError:
        return None


def activate_runtime() -> Runtime:
    """Make the shim this process's CUDA runtime: libraries that need ``libcudart.so.13`` (or ``libcuda.so.1``) and are
    loaded from now on run on the virtual GPU. The first call does it, later ones give the same object.

    A library that was loaded before stays with the runtime it has, and the dynamic linker would give later ones the
    same. So this refuses to work in a process that has a real CUDA 13 runtime, unless the shim was there first.

    Raises:
        VsmError: such a runtime is loaded, or the shim cannot be built.
    """
    global _active
    if _active is not None:
        return _active
    directory = shim_directory()
    for name in _LIBRARIES:
        others = [path for path in loaded_libraries(name) if path.parent.resolve() != directory.resolve()]
        if others and _handle(name) != _handle(str(directory / name)):
            raise VsmError(
                f"{others[0]} is loaded in this process already, so a library that needs {name} would use it and not "
                "the virtual GPU. Activate the virtual GPU before anything loads CUDA, or start the process with "
                f"LD_PRELOAD={directory / _LIBRARIES[0]}"
            )
    libraries = [ctypes.CDLL(str(directory / name), mode=os.RTLD_GLOBAL | os.RTLD_NOW) for name in _LIBRARIES]
    _active = Runtime(libraries[0])
    _active.configure(log=False)
    return _active
