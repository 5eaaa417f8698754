# SPDX-License-Identifier: Apache-2.0
"""The CUDA toolkit that upstream's own modules are built with.

Upstream knows toolkits laid out as NVIDIA's installers do it. Here its functions learn of every toolkit that
``flashinfer_sm12x.build.toolchain`` finds, the one from PyPI included, on machines with and without a driver.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

import torch
from packaging.version import Version

from flashinfer_sm12x import variables
from flashinfer_sm12x.build import toolchain
from flashinfer_sm12x.build.diagnosis import JitBuildError, explained_os_errors, first_error_line, hint_for
from flashinfer_sm12x.build.engine import NINJA_STATUS, Progress, finished_step, ninja_command
from flashinfer_sm12x.build.trust import make_folder, require_trusted_tree

from . import env as jit_env

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_log = logging.getLogger("flashinfer.jit.sm12x")


@functools.cache
def find_toolkit() -> toolchain.Toolkit:
    """The CUDA toolkit in use; looked for once per process.

    Raises:
        ToolchainError: none is found; see :func:`flashinfer_sm12x.build.toolchain.discover`.
    """
    toolkit = toolchain.discover()
    for reason in toolkit.passed_over:
        _log.warning("a CUDA compiler is passed over: %s", reason)
    _log.debug("CUDA toolkit %s (found through %s)", toolkit.root, toolkit.origin)
    return toolkit


@functools.cache
def get_cuda_path() -> str:
    """The toolkit's root folder; without a compiler, a folder named for it that has its headers at least.

    Some of upstream's modules are compiled by NVRTC and need no more than those.

    Raises:
        ToolchainError: there is neither.
    """
    try:
        return str(find_toolkit().root)
    except toolchain.ToolchainError:
        named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), str(toolchain.DEFAULT_ROOT)]
        for root in filter(None, named):
            if (Path(root) / "include" / "cuda_runtime.h").is_file():
                return root
        raise


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


def parse_env_flags(env_var_name: str) -> list[str]:
    """The flags that a variable holds.

    Raises:
        VariableError: its quotes do not close. Upstream parts it at each space then, and each compiler's error is
            another.
    """
    return list(variables.read(env_var_name))


def upstreams_includes() -> list[Path]:
    """Upstream's include folders; finding them needs no compiler."""
    return [*_upstream.get_cccl_includes(), *map(Path, _upstream.get_system_includes(""))]


def get_system_includes(cuda_home: str) -> list[Any]:
    """Upstream's include folders, then those of wheels with headers that the toolkit lacks (cuRAND, cuBLAS, ...)."""
    includes: list[Any] = _upstream.get_system_includes(cuda_home)
    return includes + [str(folder) for folder in find_toolkit().include_dirs[1:]]


def toolkit_link_flags() -> list[str]:
    """Linker flags with which ``-lcudart -lcuda`` resolve, and the libraries are found when a module is loaded.

    They suit the host compiler and ``nvcc`` alike.

    Raises:
        ToolchainError: there is no toolkit, or no host compiler that links.
        UntrustedCacheError: another user can write to the folder of links in the cache.
    """
    toolkit, folder = find_toolkit(), jit_env.FLASHINFER_WORKSPACE_DIR / "toolchain"
    require_trusted_tree(folder)
    shim = toolchain.link_shim(toolkit, folder, os.environ.get("CXX", "c++"))
    flags = [f"-L{folder}" for folder in (*toolkit.library_dirs, shim)]
    for folder in toolkit.library_dirs:
        flags += ["-Xlinker", "-rpath", "-Xlinker", str(folder)]
    return flags


@functools.wraps(_upstream.generate_ninja_build_for_op)
def generate_ninja_build_for_op(
    name: str,
    sources: list[Path],
    extra_cflags: list[str] | None,
    extra_cuda_cflags: list[str] | None,
    extra_ldflags: list[str] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    ldflags = toolkit_link_flags() + (extra_ldflags or [])
    return _upstream.generate_ninja_build_for_op(
        name, sources, extra_cflags, extra_cuda_cflags, ldflags, *args, **kwargs
    )


def run_ninja(
    workdir: Path,
    ninja_file: Path,
    verbose: bool,
    max_jobs: int | None = None,
    tell: Callable[[int, int, str], object] | None = None,
) -> None:
    """Build a module of upstream's, in a folder that ``write_ninja`` found trusted.

    Args:
        workdir: The module's folder; the full output of a failed build goes to ``build.log`` in it.
        ninja_file: The build file.
        verbose: Show the output while it is made.
        max_jobs: Compilers at once. When omitted, ``MAX_JOBS``, else ninja's own choice.
        tell: Gets how many steps are done, how many there are, and what the last one made; the log does when omitted.

    Raises:
        JitBuildError: the build failed; with the first real error, a hint where the cause is a known one, and the log.
        ToolchainError: ninja is not installed.
    """
    _require_plain_paths(workdir)
    if max_jobs is None:
        max_jobs = _upstream._get_num_workers()
    with explained_os_errors(workdir.name, workdir):
        make_folder(workdir)
        status, output = _ninja(workdir, ninja_file, verbose, max_jobs, tell or Progress(workdir.name).tell)
        if status == 0:
            return
        log = workdir / "build.log"
        log.write_text(output, encoding="utf-8")
    raise JitBuildError(workdir.name, first_error_line(output), log, hint_for(status, output))


def _require_plain_paths(workdir: Path) -> None:
    """Raise :class:`JitBuildError` where a path of upstream's build files holds what they do not quote."""
    paths = [
        ("the cache path", workdir, "set FLASHINFER_WORKSPACE_BASE to a folder without one"),
        ("FlashInfer's path", jit_env.FLASHINFER_INCLUDE_DIR, "install FlashInfer in an environment without one"),
    ]
    with contextlib.suppress(toolchain.ToolchainError):  # which a build file of a compiler's needs not
        paths.append(("the CUDA toolkit's path", find_toolkit().root, "set CUDA_HOME to a link without one"))
    for what, path, hint in paths:
        if odd := re.search("[$ ]", str(path)):
            character = odd[0].replace(" ", "space")
            message = f"{what} holds a {character}, which upstream's build files do not quote: {path}"
            raise JitBuildError(workdir.name, message, hint=hint)


def _ninja(
    workdir: Path, ninja_file: Path, verbose: bool, max_jobs: int | None, tell: Callable[[int, int, str], object]
) -> tuple[int, str]:
    """Run ninja; its exit status and output."""
    jobs = ["-j", str(max_jobs)] if max_jobs else []
    output = []
    # nvcc's files have names that others could guess, and take in /tmp.
    with (
        tempfile.TemporaryDirectory(dir=workdir, prefix=".compilers-") as scratch,
        subprocess.Popen(
            ninja_command("-v", "-f", str(ninja_file.resolve()), *jobs),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=workdir.resolve(),
            env={**os.environ, "TMPDIR": scratch, "NINJA_STATUS": NINJA_STATUS},
            text=True,
            errors="replace",
        ) as ninja,
    ):
        assert ninja.stdout is not None
        for line in ninja.stdout:
            output.append(line)
            if verbose:
                print(line, end="", flush=True)
            if step := finished_step(line):
                tell(*step)
        status = ninja.wait()
    return status, "".join(output)
