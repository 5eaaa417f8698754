# SPDX-License-Identifier: Apache-2.0
"""Libraries of an installed wheel of kernels, which ``tools/kernels_wheel.py`` makes, in place of a build.

What the wheel puts on ``sys.path``::

    flashinfer_sm12x_kernels/manifest.json            what each library was made from, and its digest
    flashinfer_sm12x_kernels/fused_moe_120-121a.so    a module, compiled for one list of architectures

A library is used if a build would compile the same: flags, architectures, sources, and the headers of this tree and of
the pinned wheel are what they were. The compiler, CUDA's headers and the system's are the wheel's own affair, since the
machine that loads it may have none of them.

Owner and mode do not count here, as they do in a cache (``trust``): the package lies where Python takes its code from,
so whoever may write there has code run without it. The digest guards against damage, not against them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tvm_ffi

from flashinfer._layer import fork_root, wheel_root
from flashinfer._version import __fork_version__

from .. import core, cpp_ext
from .. import env as jit_env
from .build import hash_file

PACKAGE = "flashinfer_sm12x_kernels"
MANIFEST = "manifest.json"
FORMAT = 2


class Spec(Protocol):
    """What is asked of a module's JIT spec."""

    name: str
    sources: list[Path]
    extra_cuda_cflags: list[str] | None
    architectures: tuple[tuple[int, str], ...]


class _Unfit(Exception):
    """Why a library cannot be used."""


def ffi_series() -> str:
    """``0.1`` of an apache-tvm-ffi such as ``0.1.15``: its C interface stays compatible within such a series."""
    return ".".join(tvm_ffi.__version__.split(".")[:2])


def architecture_list(architectures: Iterable[tuple[int, str]]) -> str:
    """Such as ``12.0f 12.1a``, as ``FLASHINFER_CUDA_ARCH_LIST`` has it."""
    return " ".join(f"{major}.{minor}" for major, minor in sorted(architectures))


@functools.cache
def _folders(generated: Path) -> dict[str, str]:
    named = {"tree": fork_root(), "generated": generated, "wheel": wheel_root()}
    return {name: os.path.realpath(folder) for name, folder in named.items()}


def folders() -> dict[str, str]:
    """Name -> folder, of what is compiled and lies elsewhere in another checkout, environment or cache."""
    return _folders(jit_env.FLASHINFER_GEN_SRC_DIR)


def name_of(path: str | Path) -> str:
    """``<name>:<path in it>`` of a file in the innermost of :func:`folders` that holds it; else its path."""
    path = os.path.realpath(path)
    holding = {folder: name for name, folder in folders().items() if path.startswith(f"{folder}/")}
    inner = max(holding, key=len, default="")
    return f"{holding[inner]}:{path[len(inner) + 1 :]}" if holding else path


def path_of(name: str) -> str:
    """The file here that :func:`name_of` gave this name to there.

    Raises:
        KeyError: there is no such folder.
    """
    folder, _, rest = name.partition(":")
    return os.path.join(folders()[folder], rest)


def inputs_of(spec: Spec, files: Iterable[str]) -> dict[str, Any]:
    """The inputs that decide a module's code, as they are here and now.

    Args:
        spec: The module.
        files: The files of :func:`folders` that compilers read, by name.

    Returns:
        ``flags``, ``sources`` and ``files`` (name -> SHA-256, None of one that is not there), comparable between machines.
    """
    flags = [*core.common_nvcc_flags, *(spec.extra_cuda_cflags or ())]
    for variable in ("FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS"):
        flags += cpp_ext.parse_env_flags(variable)
    return {
        "flags": [flag for flag in flags if not flag.startswith("--threads=")],
        "sources": [name_of(source) for source in spec.sources],
        "files": {name: hash_file(path_of(name)) for name in files},
    }


def find(spec: Spec) -> tuple[Path | None, str]:
    """The library of an installed wheel that is what a build of the module would make.

    Returns:
        The library and ``""``; or None and why the wheel's is passed over, ``""`` where no wheel with that module is
        installed.
    """
    try:
        package = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        package = None
    if package is None or not package.submodule_search_locations:  # a module of that name is no such wheel
        return None, ""
    folder = Path(next(iter(package.submodule_search_locations)))
    try:
        manifest = _manifest_for_this_machine(folder)
        built = {each["architectures"]: each for each in manifest["modules"] if each["name"] == spec.name}
        return (_library_for(spec, folder, built) if built else None), ""
    except _Unfit as error:
        return None, str(error)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return None, f"{folder / MANIFEST} is missing or damaged ({type(error).__name__}: {error})"


def _manifest_for_this_machine(folder: Path) -> Any:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    expected = {
        "format": FORMAT,
        "fork": __fork_version__,
        "platform": sysconfig.get_platform(),  # such as linux-aarch64
        "tvm_ffi": ffi_series(),
    }
    for what, here in expected.items():
        if manifest[what] != here:
            raise _Unfit(f"{folder} has {what} {manifest[what]}, this is {what} {here}")
    return manifest


def _library_for(spec: Spec, folder: Path, built: dict[str, Any]) -> Path:
    wanted = architecture_list(spec.architectures)
    if wanted not in built:
        raise _Unfit(f"{folder} has it for {', '.join(built)}, and {wanted or 'no architecture'} is compiled for")
    recorded = built[wanted]
    here = inputs_of(spec, recorded["files"])
    for file, content in recorded["files"].items():
        if here["files"][file] is None or here["files"][file] != content:
            raise _Unfit(f"{path_of(file)} is not what it was built from")
    for what in ("flags", "sources"):
        if here[what] != recorded[what]:
            raise _Unfit(f"it was built with other {what}: {_difference(recorded[what], here[what])}")
    library = folder / recorded["library"]
    digest = hash_file(library)
    if digest is None or digest != recorded["sha256"]:
        raise _Unfit(f"{library} is missing, truncated or altered: its digest is not that of {MANIFEST}")
    return library


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    """The entries that only one of the two lists has; or the words that the order differs, where that is all."""
    changes = [f"-{each}" for each in before if each not in now] + [f"+{each}" for each in now if each not in before]
    return ", ".join(changes) or "their order"
