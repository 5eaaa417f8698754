# SPDX-License-Identifier: Apache-2.0
"""Finds the compiled libraries, and builds them if need be."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_MAKE_TARGETS = ("all",)


class VsmError(RuntimeError):
    """The virtual GPU could not be built, loaded or used as asked. The text says what to do."""


def build_directory() -> Path:
    """``$VSM_BUILD_DIR``, or ``build/`` beside the sources."""
    return Path(os.environ.get("VSM_BUILD_DIR", _ROOT / "build")).resolve()


@functools.cache
def build() -> Path:
    """Bring the libraries up to date with their sources, once per process; returns the folder that holds them.

    Raises:
        VsmError: there is no compiler or no ``make``, or a source does not compile. The text ends with the
            compiler's own.
    """
    directory = build_directory()
    library = directory / "libvsm.so"
    make = shutil.which("make")
    if make is None:
        if library.is_file():
            return directory
        raise VsmError(f"{library} is not built and there is no make: install make and a C++17 compiler")
    directory.mkdir(parents=True, exist_ok=True)
    jobs = str(min(4, os.cpu_count() or 1))
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Relative, as `make` there has it: an object's headers are recorded under the object's name.
        target = os.path.relpath(directory, _ROOT)
        command = [make, "-s", "-C", str(_ROOT), "-j", jobs, f"BUILD={target}", *_MAKE_TARGETS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise VsmError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}".rstrip())
    return directory


def library_path() -> Path:
    """``libvsm.so``, built if need be."""
    return build() / "libvsm.so"


def shim_directory() -> Path:
    """The folder with ``libcudart.so.13`` and ``libcuda.so.1``, for ``LD_LIBRARY_PATH`` of a program that runs on the
    virtual GPU without knowing of it."""
    return build() / "shim"


@functools.cache
def load() -> ctypes.CDLL:
    """``libvsm.so`` with the C face's signatures (src/capi.h)."""
    library = ctypes.CDLL(str(library_path()))
    u32, u64, i32, size, text, handle = (
        ctypes.c_uint32,
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_void_p,
    )
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "vsm_last_error": (text, ()),
        "vsm_device_create": (handle, (text, i32)),
        "vsm_device_destroy": (None, (handle,)),
        "vsm_allocate": (u64, (handle, u64)),
        "vsm_release": (i32, (handle, u64)),
        "vsm_register_memory": (None, (handle, u64, u64, i32)),
        "vsm_unregister_memory": (i32, (handle, u64)),
        "vsm_mark_initialized": (None, (handle, u64, u64)),
        "vsm_discard": (None, (handle, u64, u64)),
        "vsm_module_load": (handle, (handle, ctypes.c_char_p, size, text)),
        "vsm_module_unload": (None, (handle, handle)),
        "vsm_module_kernel": (i32, (handle, handle, text)),
        "vsm_module_variable": (u64, (handle, handle, text, ctypes.POINTER(u64))),
        "vsm_kernel_param_bytes": (u32, (handle, handle, i32)),
        "vsm_run": (i32, (handle, handle, i32, handle, handle, size, ctypes.POINTER(handle))),
        "vsm_free": (None, (handle,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def take_text(library: ctypes.CDLL, free: str, pointer: int | None) -> str:
    """The string at ``pointer``, which is then given back to the library."""
    if not pointer:
        raise VsmError("the virtual GPU's library had no memory for its answer")
    value = ctypes.string_at(pointer).decode("utf-8", "replace")
    getattr(library, free)(ctypes.c_void_p(pointer))
    return value
