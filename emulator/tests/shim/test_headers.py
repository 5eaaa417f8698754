# SPDX-License-Identifier: Apache-2.0
"""The shim's declarations and its occupancy rules against the CUDA toolkit's own headers."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def compile_cpp(toolkit: Path, source: Path, target: Path, *flags: str) -> None:
    sources = HERE.parents[1] / "src"
    command = ["g++", "-std=c++17", *flags, f"-I{sources}", f"-I{toolkit / 'include'}", str(source)]
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_declarations_have_cudas_layout_and_values(toolkit, tmp_path):
    compile_cpp(toolkit, HERE / "abi_check.cpp", tmp_path / "abi.o", "-c")


def test_occupancy_is_that_of_cuda_occupancy_h(toolkit, tmp_path):
    program = tmp_path / "occupancy"
    compile_cpp(toolkit, HERE / "occupancy_check.cpp", program, "-w")
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert min(map(int, done.stdout.split())) > 10000
