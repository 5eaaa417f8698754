# SPDX-License-Identifier: Apache-2.0
"""The CUDA toolkit that upstream's own modules are built with.

Upstream knows toolkits laid out as NVIDIA's installers do it. Here its functions learn of every toolkit that
``flashinfer.jit.sm12x.toolchain`` finds, the one from PyPI included, on machines with and without a driver.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

import torch
from packaging.version import Version

from . import env as jit_env
from .sm12x import toolchain

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_log = logging.getLogger("flashinfer.jit.sm12x")


@functools.cache
def find_toolkit() -> toolchain.Toolkit:
    """The CUDA toolkit in use; looked for once per process.

    Raises:
        ToolchainError: none is found; see :func:`flashinfer.jit.sm12x.toolchain.discover`.
    """
    toolkit = toolchain.discover()
    _log.debug("CUDA toolkit %s (found through %s)", toolkit.root, toolkit.origin)
    return toolkit


@functools.cache
def get_cuda_path() -> str:
    """The toolkit's root folder, as upstream's sources of this name return it."""
    return str(find_toolkit().root)


@functools.cache
def get_cuda_version() -> Version:
    """The version of the CUDA compiler; without one, of the CUDA that PyTorch was built with.

    Raises:
        ToolchainError: there is neither.
    """
    try:
        return find_toolkit().version
    except toolchain.ToolchainError:
        if torch.version.cuda is None:
            raise
        return Version(torch.version.cuda)


def get_system_includes(cuda_home: str) -> list[Any]:
    """Upstream's include folders, then those of wheels with headers that the toolkit lacks (cuRAND, cuBLAS, ...)."""
    includes: list[Any] = _upstream.get_system_includes(cuda_home)
    return includes + [str(folder) for folder in find_toolkit().extra_include_dirs]


def toolkit_link_flags() -> list[str]:
    """Linker flags with which ``-lcudart -lcuda`` resolve, and the libraries are found when a module is loaded.

    They suit the host compiler and ``nvcc`` alike.
    """
    toolkit = find_toolkit()
    shim = toolchain.link_shim(
        toolkit,
        jit_env.FLASHINFER_WORKSPACE_DIR / "toolchain",
        os.environ.get("CXX", "c++"),
    )
    flags = [f"-L{folder}" for folder in (*toolkit.library_dirs, shim)]
    for folder in toolkit.library_dirs:
        flags += ["-Xlinker", "-rpath", "-Xlinker", str(folder)]
    return flags


def _with_toolkit_link_flags(generate: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(generate)
    def generate_with_flags(
        name: str,
        sources: list[Path],
        extra_cflags: list[str] | None,
        extra_cuda_cflags: list[str] | None,
        extra_ldflags: list[str] | None,
        *args: Any,
        **kwargs: Any,
    ) -> str:
        ldflags = toolkit_link_flags() + (extra_ldflags or [])
        return generate(name, sources, extra_cflags, extra_cuda_cflags, ldflags, *args, **kwargs)

    return generate_with_flags


generate_ninja_build_for_op = _with_toolkit_link_flags(_upstream.generate_ninja_build_for_op)
