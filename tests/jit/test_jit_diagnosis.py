# SPDX-License-Identifier: Apache-2.0
"""Compiler output becomes one line and a hint. The outputs are those of nvcc 13.0, GCC and GNU ld."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from flashinfer_sm12x.build import engine
from flashinfer_sm12x.build.diagnosis import (
    WITHOUT_A_WORD,
    JitBuildError,
    explain_os_error,
    first_error_line,
    hint_for,
    was_killed,
)

CASES = [
    (
        1,
        1,
        "In file included from a.cu:1:\n"
        "x.h:16:10: fatal error: cublasLt.h: No such file or directory\n"
        "   16 | #include",
        "pip install nvidia-cublas",
    ),
    (1, 0, 'a.cu(3): catastrophic error: cannot open source file "nope.h"', None),
    (1, 0, "a.cu:1:10: fatal error: nope.h: No such file or directory", "no include folder holds nope.h"),
    (1, 0, "a.cu:1:10: fatal error: cuda_runtime.h: No such file or directory", "belongs to the CUDA toolkit"),
    (255, 0, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "memory ran out"),
    (137, 0, "Killed", "MAX_JOBS=1"),
    (1, 0, "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.", "MAX_JOBS=1"),
    (
        1,
        0,
        "g++: fatal error: Terminated signal terminated program cc1plus\ncompilation terminated.",
        "ended the compiler with SIGTERM",
    ),
    (-15, 0, "", "ended the compiler with SIGTERM"),
    (4, 0, "Compilation terminated.", "ended the compiler with SIGTERM"),
    (
        1,
        0,
        "a.cpp:171:14: internal compiler error: Segmentation fault\nPlease submit a full bug report",
        "the compiler crashed with SIGSEGV",
    ),
    (139, 0, "Segmentation fault", "the compiler crashed with SIGSEGV"),
    (
        255,
        0,
        "nvcc error   : 'ptxas' died due to signal 11 (Invalid memory reference)",
        "the compiler crashed with SIGSEGV",
    ),
    (
        1,
        0,
        "collect2: fatal error: ld terminated with signal 7 [Bus error], core dumped",
        "the compiler crashed with SIGBUS",
    ),
    (
        1,
        0,
        "/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status",
        "is full",
    ),
    (2, 0, "a.cu(7): error: Aborted", None),
    (-9, 0, "", "MAX_JOBS=1"),
    (
        255,
        0,
        "ptxas /tmp/t.ptx, line 31; error   : Feature 'cvt.e2m1x2.f32' not supported on .target 'sm_121'\n"
        "ptxas fatal   : Ptx assembly aborted due to errors",
        "FLASHINFER_CUDA_ARCH_LIST=12.1a",
    ),
    (1, 0, "nvcc fatal   : Unsupported gpu architecture 'compute_121a'", "this nvcc does not know compute_121a"),
    (1, 0, "nvcc fatal   : Unsupported gpu architecture 'compute_122a'", "no GPU of this family is that"),
    (
        1,
        0,
        "host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later than 15 are not supported!",
        "older one",
    ),
    (1, 0, "gcc: fatal error: cannot execute 'cc1plus': execvp: No such file or directory", "apt-get install g++"),
    (
        1,
        0,
        "/usr/bin/ld: cannot find -lcudart: No such file or directory\ncollect2: error: ld returned 1 exit status",
        "no libcudart",
    ),
    (
        1,
        0,
        'cuda_toolkit.h:41:8: error: #error "CUDA compiler and CUDA toolkit headers are incompatible, please check"',
        "different CUDA releases",
    ),
    (
        255,
        0,
        "ptxas /tmp/z.ptx, line 9; fatal   : Unsupported .version 9.5; current version is '9.0'\n"
        "ptxas fatal   : Ptx assembly aborted due to errors",
        "different CUDA releases",
    ),
    (
        1,
        0,
        "Command-line error: invalid option: --simt-only\n\n1 catastrophic error detected in this compilation.\n"
        "Compilation terminated.",
        "different CUDA releases",
    ),
    (
        1,
        0,
        '/tmp/z.cudafe1.stub.c:13:188: error: macro "__cudaLaunch" passed 2 arguments, but takes just 1',
        "[cuda]",
    ),
    (1, 0, "/usr/bin/ld: error: x.cuda.o: file too short\ncollect2: error: ld returned 1 exit status", "is damaged"),
    (
        1,
        0,
        "/usr/bin/ld: x.cuda.o: file not recognized: file format not recognized\n"
        "collect2: error: ld returned 1 exit status",
        "sm12x-cache clear --module NAME",
    ),
    (
        1,
        0,
        "/home/a b/bin/ld: unrecognized option '--bogus'\ncollect2: error: ld returned 1 exit status",
        None,
    ),
    (1, 0, "/tmp/x.s: Fatal error: can't create /tmp/x.o: Disk quota exceeded", "is full"),
    (1, 0, "/tmp/x.s: Fatal error: can't write 4096 bytes to section: 'No space left on device'", "is full"),
    (
        2,
        1,
        'a.cu(2): warning #177-D: variable "error" was declared but never referenced\n'
        'a.cu(7): error: identifier "foo" is undefined\n'
        "\n"
        '1 error detected in the compilation of "a.cu".',
        None,
    ),
    (1, 1, "something odd\nand its end", None),
]
"""Exit status, which line of the output tells the error, the output, and a part of the hint."""


@pytest.mark.parametrize(("returncode", "place", "output", "hint"), CASES)
def test_error_line_and_hint(returncode: int, place: int, output: str, hint: str | None) -> None:
    assert first_error_line(f"\n{output}\n") == [*output.splitlines(), ""][place]
    found = hint_for(returncode, f"\n{output}\n")
    assert hint in found if hint and found else found is hint


def test_an_error_is_not_taken_for_a_kill() -> None:
    assert not was_killed(1, "a.cu(7): error: the variable Killed is unused")
    assert not was_killed(255, "nvcc error : 'ptxas' died due to signal 11 (Invalid memory reference)")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EACCES, "the cache cannot be written: Permission denied"),
        (errno.EROFS, "the cache cannot be written: Read-only file system"),
        (errno.ENOSPC, "No space left on device"),
        (errno.EDQUOT, "MiB free"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_system_errors(number: int, expected: str, tmp_path: Path) -> None:
    error = explain_os_error("demo", tmp_path / "not" / "yet", OSError(number, "text", str(tmp_path / "f")))
    assert isinstance(error, JitBuildError)
    assert str(error).startswith("building demo failed: ")
    assert expected in str(error)
    assert str(tmp_path) in str(error)


def test_an_end_without_a_word_is_no_proof_that_memory_ran_out() -> None:
    """ninja before 1.12 does not tell the status, so a compiler that does nothing looks like one that was killed."""
    output = "FAILED: {}obj/a.o \nnvcc -c a.cu -o obj/a.o\nninja: build stopped: subcommand failed.\n"
    name, status, message = engine._failure(1, output.format(""))
    assert (name, message) == ("a.o", WITHOUT_A_WORD)
    assert was_killed(status, message), "it is tried again alone"
    hint = hint_for(status, message) or ""
    assert "memory ran out" in hint
    assert "--version" in hint
    assert engine._failure(1, output.format("[code=1] ")) == ("a.o", 1, "")
