# SPDX-License-Identifier: Apache-2.0
"""Libraries of an installed wheel of kernels, which ``tools/kernels_wheel.py`` makes, in place of a build.

The wheel installs on ``sys.path``::

    flashinfer_sm12x_kernels/manifest.json            the build hash of each library, and its digest
    flashinfer_sm12x_kernels/fused_moe_120-121a.so    a module, compiled for one list of architectures

A library is used if its hash equals the module's hash here: flags, architectures, sources, and the headers of this tree
and of the pinned wheel are the same. The hash leaves out the compiler and the headers of CUDA and the system, since the
machine that loads the wheel may have none of them.

Owner and mode are not checked as they are in a cache (``trust``): the package lies among Python's own code, and whoever
may write there can run code anyway. The digest guards against damage, not against such a user.
"""

from __future__ import annotations

import importlib.util
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import tvm_ffi

from flashinfer_sm12x.build.build_hash import hash_file
from flashinfer_sm12x.versions import KERNELS_PACKAGE as PACKAGE
from flashinfer_sm12x.versions import __fork_version__

MANIFEST = "manifest.json"
FORMAT = 3


class Spec(Protocol):
    """The part of a module's JIT spec that :func:`find` reads."""

    name: str
    architectures: tuple[tuple[int, str], ...]

    @property
    def build_hash(self) -> str: ...


class _Unfit(Exception):
    """A library cannot be used; the text says why."""


def ffi_series() -> str:
    """``0.1`` of an apache-tvm-ffi such as ``0.1.15``: its C interface stays compatible within such a series."""
    return ".".join(tvm_ffi.__version__.split(".")[:2])


def architecture_list(architectures: Iterable[tuple[int, str]]) -> str:
    """The architectures in the form of ``FLASHINFER_CUDA_ARCH_LIST``, for example ``12.0f 12.1a``."""
    return " ".join(f"{major}.{minor}" for major, minor in sorted(architectures))


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
    key = spec.build_hash
    if recorded["key"] != key:
        raise _Unfit(
            f"it was built from other sources, headers or flags: its build hash is {recorded['key']}, here it is {key}"
        )
    library = folder / recorded["library"]
    digest = hash_file(library)
    if digest is None or digest != recorded["sha256"]:
        raise _Unfit(f"{library} is missing, truncated or altered: its digest is not that of {MANIFEST}")
    return library
