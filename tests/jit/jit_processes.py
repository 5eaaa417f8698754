# SPDX-License-Identifier: Apache-2.0
"""Run a process of its own on a cache or a library."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import forked_python

from flashinfer_sm12x.build import inspect_sass


def run_python(
    words: Sequence[str], base: Path | str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """``python WORDS`` with a cache of its own, compiling for 12.1a."""
    environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(base), "FLASHINFER_CUDA_ARCH_LIST": "12.1a"}
    return forked_python.run(words, env={**environment, **variables}, cwd=cwd)


def answer_of(library: Path) -> str:
    """The answer of the module of :func:`small_spec` at a path to another process, which has no other one loaded."""
    code = "import sys, tvm_ffi; print(tvm_ffi.load_module(sys.argv[1]).answer())"
    done = forked_python.run(["-c", code, str(library)])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def named_barriers(library: Path) -> list[int]:
    """For each kernel that has any barriers: the highest one's number and one."""
    number = r"EIATTR_NUM_BARRIERS\s+Format:\s+EIFMT_BVAL\s+Value:\s+(0x\w+)"
    elf = inspect_sass._run(inspect_sass.find_tool(), ["--dump-elf", str(library)])
    return [int(found, 16) for found in re.findall(number, elf)]


def printed_by(code: str, folder: Path, base: str, **variables: str) -> str:
    """The output of ``code``, run in ``folder`` with a cache of its own."""
    result = run_python(["-c", code], base, cwd=folder, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout
