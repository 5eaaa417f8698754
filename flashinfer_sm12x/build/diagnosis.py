# SPDX-License-Identifier: Apache-2.0
"""Turns a compiler's or the system's output into an error that says what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import toolchain


class JitBuildError(RuntimeError):
    """A module could not be built.

    Attributes:
        module: The module's name.
        log_path: The file with the compiler's full output, or None when there is none.
        hint: The fix, or None when the cause is not a known one.
    """

    def __init__(self, module: str, what: str, log_path: Path | None = None, hint: str | None = None) -> None:
        self.module, self.log_path, self.hint = module, log_path, hint
        lines = [f"building {module} failed: {what}"]
        if hint:
            lines.append(f"Hint: {hint}")
        if log_path is not None:
            lines.append(f"Log: {log_path}")
        super().__init__("\n".join(lines))


_SIGNAL_NAMES = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Illegal instruction": signal.SIGILL,
}
"""Names that shells and GCC give to signals (``strsignal``)."""

_ERROR_LINES = (
    r"\S.*:\d+:(?:\d+:)? (?:fatal )?error: .*",  # GCC, Clang
    r"\S.*\(\d+\): (?:catastrophic )?error\b.*",  # cudafe++
    r"ptxas (?:fatal|error|.*; (?:error|fatal))\b.*",
    r"(?:nvcc|nvlink|fatbinary) (?:fatal|error)\b.*",
    r".*\bundefined reference to\b.*",
    r"(?:/.*/)?\S*ld(?:\.\w+)?: .*",  # by its path, which may hold spaces
    r"(?:Fatal |Command-line )?[Ee]rror: .*",
    r".*No space left on device.*",
    rf".*\b(?:{'|'.join(_SIGNAL_NAMES)})\b.*",
)

_PIECES_THAT_DISAGREE = (
    r"CUDA toolkit headers are incompatible|Unsupported \.version \d|Command-line error: invalid option: --|"
    r'macro "__cudaLaunch" (?:passed|requires) '
)
"""Each alternative is one mismatch: the runtime's headers; a code generator newer than the assembler; one older than
the driver; crt's headers."""


WITHOUT_A_WORD = "it ended without a word"
"""Stands for the output of a compiler that printed nothing, if ninja (before 1.12) does not tell its exit status."""

KNOWN = ("12.0", "12.0a", "12.0f", "12.1", "12.1a", "12.1f")


def first_error_line(output: str) -> str:
    """The first line of a compiler's output that reports an error; else its last line; else an empty string."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if any(re.match(pattern, line) for pattern in _ERROR_LINES) and "warning" not in line.split(":")[0]:
            return line
    return lines[-1] if lines else ""


def ending_signal(returncode: int, output: str) -> signal.Signals | None:
    """The signal that ended a process of the compiler: from the status, a shell's, or what its driver says of it."""
    number = -returncode if returncode < 0 else returncode - 128
    if number in set(signal.Signals):
        return signal.Signals(number)
    numbered = re.search(r"\b(?:died due to|terminated with) signal (\d+)\b", output)
    if numbered is not None and int(numbered.group(1)) in set(signal.Signals):
        return signal.Signals(int(numbered.group(1)))
    name = "|".join(_SIGNAL_NAMES)
    named = re.search(
        rf"\b({name}) signal terminated|internal compiler error: ({name})|^(?!.*\berror: )(?:.*\W)?({name})(?: "
        r"\(core dumped\))?$",
        output,
        re.MULTILINE,
    )
    if named is not None:
        return _SIGNAL_NAMES[next(filter(None, named.groups()))]
    # All that nvcc prints when its compiler was sent SIGTERM; after an error there is more.
    return signal.SIGTERM if output.strip() == "Compilation terminated." else None


def was_killed(returncode: int, output: str) -> bool:
    """Whether SIGKILL ended a process of the compiler; the kernel sends it when memory runs out."""
    return ending_signal(returncode, output) == signal.SIGKILL


def hint_for(returncode: int, output: str) -> str | None:
    """The fix for a failed compilation whose cause is a known one, else None."""
    missing = re.search(
        r"fatal error: (\S+): No such file or directory|could not open source file \"([^\"]+)\"", output
    )
    if missing is not None:
        return _missing_header(missing.group(1) or missing.group(2))
    if re.search("No space left on device|Disk quota exceeded", output):
        return _disk_full("the file system of the cache or of TMPDIR")
    if output == WITHOUT_A_WORD:
        return (
            "either the compiler was killed because memory ran out (dmesg says so): free some, or set MAX_JOBS=1; or "
            "it does not work at all: run it with --version, and the host compiler that it runs, c++ --version"
        )
    ended_by = ending_signal(returncode, output)
    if ended_by is not None:
        return _ended_by(ended_by)
    if re.search(_PIECES_THAT_DISAGREE, output):
        return (
            "the compiler and its headers or its code generator are of different CUDA releases: the toolkit is of "
            "several, or CPATH, NVCC_PREPEND_FLAGS or FLASHINFER_EXTRA_CUDAFLAGS puts another's headers in front. "
            f"One whole: {toolchain.PIP_COMMAND}"
        )
    suffix = re.search(r"not supported on \.target '(sm_(\d+))'", output)
    if suffix is not None:
        number = suffix.group(2)
        return (
            f"{suffix.group(1)} without a suffix has no FP4 conversion and no block-scaled MMA. "
            f"Set FLASHINFER_CUDA_ARCH_LIST={number[:-1]}.{number[-1]}a"
        )
    unknown = re.search(r"(?:Unsupported gpu architecture|Value) '(\w+)'", output)
    if unknown is not None and "gpu" in output.lower():
        number = re.sub(r"\D*(\d+)(\d)([af]?)", r"\1.\2\3", unknown.group(1))
        if number not in KNOWN:
            return (
                f"this nvcc does not know {unknown.group(1)}, and no GPU of this family is that. "
                "FLASHINFER_CUDA_ARCH_LIST is 12.1a for a DGX Spark, 12.0a for RTX 50 and RTX PRO Blackwell"
            )
        return (
            f"this nvcc does not know {unknown.group(1)}: 12.0a needs CUDA 12.8, 12.1a and the suffix f need 12.9. "
            f"Install a newer one: {toolchain.PIP_COMMAND}"
        )
    if "unsupported GNU version" in output:
        return "nvcc does not support this version of GCC. Set CC and CXX to an older one, e.g. CC=gcc-13 CXX=g++-13"
    if re.search(
        r"cannot execute .?cc1plus|gcc: (?:command )?not found|Failed to (?:preprocess|run) host compiler", output
    ):
        return "the host C++ compiler is missing or broken. Debian, Ubuntu: apt-get install g++"
    if re.search(r"\.o: (?:error: )?file (?:not recognized|too short|truncated|is empty)", output):
        return (
            "an object in the cache is damaged, by a full disk or a loss of power. Remove the module and build it "
            "again: python -m flashinfer sm12x-cache clear --module NAME, with the name above"
        )
    library = re.search(r"cannot find -l(\w+)", output)
    if library is not None:
        return f"the toolkit has no lib{library.group(1)}; install all of it: {toolchain.PIP_COMMAND}"
    if re.search(r"Permission denied|Read-only file system", output):
        return "a folder that the compiler writes to is not writable: the cache, or TMPDIR"
    return None


COMPILERS_WITHOUT_SPILLS = ("13.0", "13.5")
"""The oldest and the newest release of nvcc of which ``make test-compilers`` has shown that no kernel for SM12x
spills."""

WARN_OF_LOCAL_MEMORY = "-Xptxas=--warn-on-local-memory-usage"
"""The compiler's flag with which :func:`local_memory` finds something."""


def local_memory(output: str) -> int:
    """Bytes of each thread's local memory, of the kernel that takes most: what does not fit its registers. 0: of none.

    Args:
        said: The output of a compiler that was given :data:`WARN_OF_LOCAL_MEMORY`.
    """
    return max(
        map(int, re.findall(r"Local memory used for function .*, size of stack frame: (\d+) bytes", output)), default=0
    )


def spill_warning(module: str, banner: str, spilling: Mapping[str, int]) -> str:
    """A line on kernels that are slower than they should be, and what to do about it.

    Args:
        module: The module's name.
        banner: The compiler's version banner.
        spilling: Names of objects -> what :func:`local_memory` found.
    """
    version = re.search(r"\bV(\d+[.\d]*)", banner)
    objects = ", ".join(f"{name} ({size} bytes a thread)" for name, size in sorted(spilling.items()))
    return (
        f"{module} works, but more slowly than it should: nvcc {version[1] if version else 'of unknown version'} "
        f"spills registers to memory in {objects}. nvcc {' to '.join(COMPILERS_WITHOUT_SPILLS)}, without flags of "
        "your own, does not for SM12x (of Hopper's kernels some always do). Name one in CUDA_HOME, or install one: "
        f"{toolchain.PIP_COMMAND}"
    )


def _ended_by(number: signal.Signals) -> str:
    if number == signal.SIGKILL:
        return (
            "the compiler was killed, most likely because memory ran out. Free some, or set MAX_JOBS=1 "
            "to run one compiler at a time"
        )
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return (
            f"something else ended the compiler with {number.name}: a time limit, a shutdown, a user. What is built "
            "stays, and a new run resumes from there"
        )
    return (
        f"the compiler crashed with {number.name}. What is built stays, and a new run resumes from there. If it "
        "crashes again at the same source, try another version of the compiler; if at different ones, suspect memory "
        "or disk"
    )


def _missing_header(header: str) -> str:
    wheel = toolchain.COMPANION_HEADERS.get(header)
    if wheel is not None:
        return f"{header} is not part of this CUDA toolkit. Install it: pip install {wheel}"
    if header.startswith(("cuda", "crt/", "cooperative_groups")):
        return f"{header} belongs to the CUDA toolkit, which is not complete. Install it: {toolchain.PIP_COMMAND}"
    if header == "Python.h":
        return "Python's headers are missing. Debian, Ubuntu: apt-get install python3-dev"
    return f"no include folder holds {header}; the log shows the folders that were searched"


def _disk_full(file_system: str) -> str:
    return (
        f"{file_system} is full. Make room, or set FLASHINFER_WORKSPACE_BASE to a folder on another one. "
        "'python -m flashinfer clear-cache' removes all built modules"
    )


def explain_os_error(module: str, folder: Path, error: OSError) -> JitBuildError:
    """The error to raise when the cache itself cannot be used."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    at = error.filename or folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        where = f"the file system of {existing}"
        with contextlib.suppress(OSError):
            where += f" ({shutil.disk_usage(existing).free >> 20} MiB free)"
        return JitBuildError(module, f"{reason}: {at}", hint=_disk_full(where))
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return JitBuildError(
            module,
            f"the cache cannot be written: {reason}: {at}",
            hint="set FLASHINFER_WORKSPACE_BASE to a folder that you may write to (default: the home folder), "
            "or correct its owner and mode",
        )
    return JitBuildError(module, f"{reason}: {at}")


@contextlib.contextmanager
def explained_os_errors(module: str, folder: Path) -> Iterator[None]:
    """Raise :func:`explain_os_error` of an error of the system; each write of a build stands in such a block.

    A lock that another process holds (``BlockingIOError``) stays as it is, and so does an error without a number, which
    is not the system's but of a library that does not load.
    """
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno is None:
            raise
        raise explain_os_error(module, folder, error) from error
