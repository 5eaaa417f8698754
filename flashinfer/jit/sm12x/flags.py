# SPDX-License-Identifier: Apache-2.0
"""The flags of a module: what its generator asks for, what each source is compiled with, what a library is linked with.

A library of the cache, one in a wheel of kernels and the build hash by which a prebuilt library is recognized have
their flags from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flashinfer_sm12x import variables
from flashinfer_sm12x.build import toolchain

from .. import core, cpp_ext


def debug() -> bool:
    return bool(variables.read("FLASHINFER_JIT_DEBUG"))


def cxx_flags() -> list[str]:
    """The flags that this fork's modules ask for their C++ sources."""
    return ["-std=c++17", *(["-O0", "-g"] if debug() else ["-O3", "-DNDEBUG"])]


def cuda_flags(architectures: Iterable[tuple[int, str]], embed_ptx: bool) -> list[str]:
    """The flags that this fork's modules ask for their CUDA sources."""
    # No -use_fast_math: the quantizers promise exact results.
    flags = ["-std=c++17", *cpp_ext.get_nvcc_parallelism_flags()]
    flags += ["-O0", "-g", "--device-debug"] if debug() else ["-O3", "-DNDEBUG"]
    if variables.read("FLASHINFER_JIT_LINEINFO") and not debug():
        flags.append("-lineinfo")
    flags.append(f"--compress-mode={'none' if embed_ptx else 'size'}")
    for major, minor in architectures:
        code = f"{major}{minor}"
        flags.append(f"-gencode=arch=compute_{code},code=sm_{code}")
        if embed_ptx and major == 12:
            flags.append(f"-gencode=arch=compute_{code},code=compute_{code}")
    return flags


def of_source(spec: Any, suffix: str, common: Sequence[str]) -> list[str]:
    """The flags of a module's sources with a suffix: the ``common`` ones, the module's, and those that users add by
    variables.

    Args:
        spec: The module's JIT spec.
        suffix: ``.cu``, or another for C++.
        common: The flags that name include folders, and others of upstream's that both languages have.
    """
    # Both variables: quotes that do not close are an error whatever the module's sources.
    cxx, cuda = map(cpp_ext.parse_env_flags, ("FLASHINFER_EXTRA_CFLAGS", "FLASHINFER_EXTRA_CUDAFLAGS"))
    if suffix != ".cu":
        return [*common, "-fPIC", *(spec.extra_cflags or ()), *cxx]
    # Not upstream's build_cuda_cflags: it reads the environment's architectures even for a module that brings its own,
    # and fails if the environment names none.
    return [
        *common,
        "--compiler-options=-fPIC",
        "--expt-relaxed-constexpr",
        "-static-global-template-stub=false",
        *core.common_nvcc_flags,
        *(spec.extra_cuda_cflags or ()),
        *cuda,
    ]


def as_arguments(flags: Iterable[str], cuda_home: Path) -> list[str]:
    """Upstream's flags, which are text for a build file, as the arguments of a command."""
    arguments = []
    for flag in flags:
        mark, separator, folder = flag.partition(" ")
        words = [mark, folder] if separator and mark == "-isystem" else [flag]
        arguments += [word.replace("$cuda_home", str(cuda_home)) for word in words if word]
    return arguments


def users_link_flags(spec: Any) -> list[str]:
    return [*cpp_ext.parse_env_flags("FLASHINFER_EXTRA_LDFLAGS"), *(spec.extra_ldflags or ())]


def link_flags(spec: Any, toolkit: toolchain.Toolkit) -> list[str]:
    """The linker's flags after the objects.

    A library for a wheel (``spec.for_wheel``) looks for CUDA's runtime in NVIDIA's wheel beside its own, then in the
    folder of NVIDIA's installers. Its local symbols, which hold the number of nvcc's process, are stripped, so that the
    same sources make the same bytes.
    """
    if spec.links_driver:
        return ["-shared", *cpp_ext.toolkit_link_flags(), "-lcudart", "-lcuda", *users_link_flags(spec)]
    # The runtime by its file: the wheels have no link name for it. Not the driver: entry points come from
    # cudaGetDriverEntryPoint, so that the module loads on a machine without one.
    # -z now: a name that nobody defines fails the load, rather than the process at the first call.
    runtime = toolkit.find_library("cudart")
    beside = f"$ORIGIN/../nvidia/cu{toolkit.version.major}/lib:/usr/local/cuda/lib64"
    folders, strip = (beside, ["-Wl,--strip-all"]) if spec.for_wheel else (runtime.parent, [])
    return ["-shared", str(runtime), f"-Wl,-rpath,{folders}", "-Wl,-z,now", *users_link_flags(spec), *strip]
