# SPDX-License-Identifier: Apache-2.0
"""Fixtures for CUDA programs: nvcc compiles them once per session, and they run on the virtual GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

EMULATOR = Path(__file__).parents[1]
sys.path.insert(0, str(EMULATOR / "python"))

import vsm  # noqa: E402

# sm_90a for the golden files' machine; the cubin and the PTX of sm_121a are what the virtual GPU takes.
ARCHITECTURES = (
    "-gencode",
    "arch=compute_90a,code=sm_90a",
    "-gencode",
    "arch=compute_121a,code=[sm_121a,compute_121a]",
)


def find_toolkit() -> Path | None:
    """A CUDA toolkit: $CUDA_HOME, the one of nvcc on the PATH, or the pip wheels'."""
    candidates = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    if nvcc := shutil.which("nvcc"):
        candidates.append(Path(nvcc).resolve().parents[1])
    candidates.append(Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13")
    needed = ("bin/nvcc", "include/cuda_runtime.h")
    return next((path for path in candidates if all((path / file).is_file() for file in needed)), None)


@pytest.fixture(scope="session")
def toolkit() -> Path:
    found = find_toolkit()
    if found is None:
        pytest.skip("no nvcc: set CUDA_HOME, or pip install nvidia-cuda-nvcc nvidia-cuda-runtime")
    return found


@pytest.fixture(scope="session")
def shim() -> Path:
    """The folder of the shim's libraries, built."""
    return vsm.shim_directory()


Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def compile_cuda(toolkit: Path, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compile .cu files with nvcc and link them against the real libcudart.so.13's name."""
    folder = tmp_path_factory.mktemp("cuda")

    def run(*command: str | Path) -> None:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def build(name: str, *sources: Path, shared: bool = False, flags: tuple[str, ...] = ()) -> Path:
        target = folder / name
        objects = []
        for source in sources:
            objects.append(folder / f"{name}.{source.stem}.o")
            options = ("-std=c++17", "-O1", "-Wno-deprecated-declarations", "-Xcompiler", "-fPIC")
            compress = () if any("compress" in flag for flag in flags) else ("-no-compress",)
            gencode = () if any("gencode" in flag or "arch" in flag for flag in flags) else ARCHITECTURES
            run(toolkit / "bin" / "nvcc", *options, *compress, *gencode, *flags, "-c", source, "-o", objects[-1])
        libraries = toolkit / ("lib" if (toolkit / "lib").is_dir() else "lib64")
        run("g++", *(["-shared"] if shared else []), *objects, "-o", target, f"-L{libraries}", "-l:libcudart.so.13")
        return target

    return build


@pytest.fixture(scope="session")
def run_on_shim(shim: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program that knows nothing of the virtual GPU on it."""

    def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "LD_LIBRARY_PATH": str(shim), "VSM_QUIET": "1", **environment}
        return subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, check=False, env=variables, timeout=300
        )

    return run
