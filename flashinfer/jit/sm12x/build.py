# SPDX-License-Identifier: Apache-2.0
"""Building a module: ninja runs the compilers, in the module's folder of the cache.

::

    build.ninja          the commands
    fused_moe_120.so     the library; linked under another name, then renamed
    inputs.json          hashes of the library and of every file that it was made from; written last
    obj/                 the objects, so that an edit compiles only what it touches
    spills.json          objects whose kernels spill registers, and how many bytes
    build.log            what the last build printed
    tmp/                 the compilers' TMPDIR, removed behind a build

Ninja compares times and commands; each command holds what the compilers are and what their environment adds. Hashes
serve where times do not: a library is loaded, without ninja, where ``build.ninja`` is what would be written now and no
hash has changed, and a build begins by removing the objects of files that changed, even to ones with older times.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

from ...sm12x import variables
from .diagnosis import (
    WITHOUT_A_WORD,
    JitBuildError,
    explain_os_error,
    first_error_line,
    hint_for,
    local_memory,
    spill_warning,
    was_killed,
)
from .jobs import DEFAULT_JOB_MEMORY, parallel_jobs
from .toolchain import ToolchainError, compiler_banner, find_ninja
from .trust import PRIVATE, make_folder, read_file, require_trusted, require_trusted_tree, write_atomically

_logger = logging.getLogger("flashinfer.jit.sm12x")

COMPILER_ENVIRONMENT = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
)
"""Variables that change what a compiler makes of the same command."""

NINJA_STATUS = "[%f/%t] "
"""Ninja's variable, for :func:`finished_step`."""

_DONE = r"\[(\d+)/(\d+)\] .* -o (?:\S*/)?(\S+?)(?:\.new && mv .*)?\s*$"
"""A line of ninja's: how many steps are done and how many there are, and what has been made."""

_SECONDS_BETWEEN_LINES = 10
"""Least time between lines of a build's progress at level INFO of the log; each line is in ``build.log``, and here at
level DEBUG."""


class Progress:
    """How far a build is, in the log: each step at level DEBUG, at most one in ten seconds at level INFO. Several ninjas may
    tell theirs."""

    def __init__(self, what: str) -> None:
        self._what, self._said, self._lock = what, time.monotonic(), threading.Lock()

    def tell(self, done: int, total: int, name: str) -> None:
        """``name`` is made, as the ``done``-th of ``total``."""
        with self._lock:
            now = time.monotonic()
            news = now - self._said >= _SECONDS_BETWEEN_LINES
            self._said = now if news else self._said
            _logger.log(logging.INFO if news else logging.DEBUG, "%s [%d/%d] %s", self._what, done, total, name)


def finished_step(line: str) -> tuple[int, int, str] | None:
    """Read a line that ninja prints when a step is done: how many are done, how many there are, and what it made."""
    done = re.match(_DONE, line)
    return (int(done[1]), int(done[2]), done[3]) if done else None


_RULES = """\
rule compile
  command = $command
  depfile = $out.d
  deps = gcc
rule link
  command = $command
"""


@dataclass(frozen=True)
class CompileStep:
    """One source and the command that compiles it.

    Attributes:
        name: File name of the object; unique within a module.
        source: The source file.
        compiler: The program, after any launcher such as ``ccache``.
        flags: All flags but for input and outputs.
        launcher: Program and arguments before the compiler.
    """

    name: str
    source: Path
    compiler: str
    flags: tuple[str, ...]
    launcher: tuple[str, ...] = ()

    def command(self, source: str, output: str) -> tuple[str, ...]:
        """Program and arguments that compile ``source`` into ``output`` and write ``output.d``."""
        return (*self.launcher, self.compiler, *self.flags, "-MD", "-MF", f"{output}.d", "-c", source, "-o", output)

    @property
    def host_compiler(self) -> str:
        """The compiler that nvcc runs for the host's part."""
        if "-ccbin" in self.flags[:-1]:
            return self.flags[self.flags.index("-ccbin") + 1]
        return str(variables.read("NVCC_CCBIN") or "gcc")


def host_compiler() -> str:
    """The compiler that compiles C++ and links."""
    return str(variables.read("CXX") or "c++")


def compile_step(name: str, source: Path, nvcc: Path, flags: Sequence[str]) -> CompileStep:
    """One source, by the toolkit's ``nvcc`` or the host compiler that variables name, behind the launchers that they name."""
    if source.suffix == ".cu":
        compiler, launcher = str(nvcc), "FLASHINFER_NVCC_LAUNCHER"
        host = variables.read("CC")
        flags = [*(["-ccbin", host] if host else []), *flags]
    else:
        compiler, launcher = host_compiler(), "FLASHINFER_CXX_LAUNCHER"
    words = tuple(variables.read(launcher).split())
    return CompileStep(name, source.resolve(), compiler, tuple(flags), words)


@dataclass(frozen=True)
class ModulePlan:
    """All that is needed to build a module.

    Attributes:
        name: The module's name.
        folder: Its folder in the cache.
        lock_path: The file that is locked while it is built.
        steps: Its sources.
        linker: The program that links.
        link_flags: Its arguments behind the objects.
        job_memory: Bytes that a compiler may need.
        description: A line for the head of the log.
    """

    name: str
    folder: Path
    lock_path: Path
    steps: tuple[CompileStep, ...]
    linker: str
    link_flags: tuple[str, ...]
    job_memory: int = DEFAULT_JOB_MEMORY
    description: str = ""

    @property
    def library(self) -> Path:
        return self.folder / f"{self.name}.so"

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @property
    def ninja_path(self) -> Path:
        return self.folder / "build.ninja"

    def object_path(self, step: CompileStep) -> Path:
        return self.folder / "obj" / step.name

    @cached_property
    def ninja_text(self) -> str:
        """The build file. Its paths but those of sources and headers are relative to the module's folder."""
        lines = [_RULES]
        for step in self.steps:
            # nvcc has a shell expand a $ in the path of a source, which the path of a cache may hold.
            source = str(step.source)
            if "$" in source:
                source = os.path.relpath(os.path.realpath(source), os.path.realpath(self.folder))
            output = f"obj/{step.name}"
            tools = [step.compiler, step.host_compiler]
            lines.append(_build_lines("compile", [source], output, tools, step.command(source, output)))
        library, objects = self.library.name, [f"obj/{step.name}" for step in self.steps]
        link = (self.linker, *objects, *self.link_flags, "-o", f"{library}.new")
        lines.append(_build_lines("link", objects, library, [self.linker], link, f"mv -f {library}.new {library}"))
        return "".join(lines)


def _build_lines(
    rule: str, inputs: Sequence[str], output: str, tools: Sequence[str], command: Sequence[str], then: str = ""
) -> str:
    identity = [*map(compiler_identity, tools), *(f"{name}={os.environ.get(name)}" for name in COMPILER_ENVIRONMENT)]
    shell = f"made_by={hashlib.sha256(repr(identity).encode()).hexdigest()[:16]} {shlex.join(command)}"
    shell = " && ".join(filter(None, (shell, then))).replace("$", "$$")
    paths = " ".join(re.sub(r"([$ :])", r"$\1", path) for path in inputs)
    return f"build {output}: {rule} {paths}\n  command = {shell}\n"


@dataclass(frozen=True)
class BuildReport:
    """The result of a call of :func:`build`.

    Attributes:
        compiled: Names of the objects that were compiled.
        linked: Whether the library was linked.
        cpu_seconds: CPU time of all compilers together.
        wall_seconds: Time from the lock to the finished library.
    """

    compiled: list[str]
    linked: bool
    cpu_seconds: float
    wall_seconds: float


@functools.cache
def compiler_identity(compiler: str) -> str:
    """Facts that tell one compiler from another: its version banner, and the sizes of the programs beside it.

    Upgrades in place change the banner; the sizes tell apart what a banner may not (a replaced ``ptxas``).
    """
    found = shutil.which(compiler)
    if found is None:
        return f"{compiler}: not found"
    try:
        banner = compiler_banner(found)
    except ToolchainError as error:
        banner = str(error)
    program = Path(found).resolve()
    others = (program.parent / name for name in ("ptxas", "cudafe++", "fatbinary", "../nvvm/bin/cicc"))
    return "\n".join([banner, *(f"{tool.name}:{tool.stat().st_size}" for tool in (program, *others) if tool.is_file())])


def hash_file(path: str | Path) -> str | None:
    """Hex SHA-256 of a regular file's content; None when it is none or cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, ValueError):  # the latter: no path at all
        return None
    return digest.hexdigest()


def _read_record(plan: ModulePlan) -> dict[str, str] | None:
    """``inputs.json``: path -> hash of the library and of each file that a compiler read for it; None if it is no such thing.

    The library's path is relative to the module's folder.
    """
    try:
        data = json.loads(read_file(plan.folder / "inputs.json"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and all(isinstance(digest, str) for digest in data.values()) else None


def _write_record(plan: ModulePlan, record: dict[str, str]) -> None:
    write_atomically(plan.folder / "inputs.json", json.dumps(record, indent=1))


def _changed(plan: ModulePlan, record: dict[str, str]) -> Iterator[str]:
    """The recorded paths whose content is another one now."""
    return (path for path, digest in record.items() if not digest or hash_file(plan.folder / path) != digest)


def files_read(plan: ModulePlan) -> list[str]:
    """Every file that compilers read for a library that is fresh."""
    return sorted((_read_record(plan) or {}).keys() - {plan.library.name})


def why_stale(plan: ModulePlan) -> str:
    """Why a build would have something to do; empty when the library is what it would make. Writes nothing."""
    record = _read_record(plan)
    if record is None or plan.library.name not in record or not plan.library.is_file():
        return "it is not built yet"
    try:
        if read_file(plan.ninja_path) != plan.ninja_text.encode():
            return "sources, flags, compiler or its variables changed"
    except OSError as error:
        return f"{plan.ninja_path}: {error.strerror}"
    return next((f"{path} changed" for path in _changed(plan, record)), "")


@contextmanager
def module_lock(path: Path, wait: bool = True) -> Iterator[int]:
    """Hold the lock of a module while it is built or removed; gives its descriptor.

    Whoever inherits the descriptor holds the lock, too: ninja and the compilers of a builder that was killed, so that
    nobody builds beside them.

    Raises:
        BlockingIOError: another process holds it, and ``wait`` is False.
        UntrustedCacheError: another user can write to its folder.
        JitBuildError: the lock's folder cannot be written, or its file system knows no locks.
    """
    try:
        make_folder(path.parent)
        require_trusted(path)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                with contextlib.suppress(PermissionError):
                    os.fchmod(descriptor, 0o600)  # who may read it could hold it
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not wait:
                        raise
                    _logger.info("%s: another process is building it (lock %s); waiting", path.stem, path)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its last holder removed it
    except BlockingIOError:
        raise
    except OSError as error:
        raise explain_os_error(path.stem, path.parent, error) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def build(plan: ModulePlan, verbose: bool = False, max_jobs: int | None = None, lock: int | None = None) -> BuildReport:
    """Bring the library up to date. The caller holds :func:`module_lock`.

    A compiler that was killed, most likely for memory, is run again with no other beside it. A line tells of kernels that
    spill registers, also where all was fresh.

    Args:
        plan: The plan of the library to build.
        verbose: Show commands and compiler output.
        max_jobs: Compilers at once; chosen from memory, cores and ``MAX_JOBS`` when omitted.
        lock: The lock's descriptor.

    Returns:
        The report of what was done; empty when all was fresh.

    Raises:
        UntrustedCacheError: another user can write to the module's folder, or has.
        JitBuildError: a compiler failed, or the cache cannot be written.
        ToolchainError: ninja is not installed.
        KeyboardInterrupt: with a line that says what stays.
    """
    started, cpu = time.monotonic(), _compilers_cpu()
    try:
        require_trusted_tree(plan.folder)
        reason = why_stale(plan)
        made = _bring_up_to_date(plan, reason, verbose, max_jobs, lock) if reason else []
        _tell_of_spills(plan)
    except KeyboardInterrupt:
        said = f"building {plan.name} was interrupted: objects that are built stay, and a new run resumes from there"
        raise KeyboardInterrupt(said) from None
    except OSError as error:
        raise explain_os_error(plan.name, plan.folder, error) from error
    compiled = [name for name in made if name != plan.library.name]
    return BuildReport(compiled, compiled != made, _compilers_cpu() - cpu, time.monotonic() - started)


def _compilers_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _bring_up_to_date(
    plan: ModulePlan, reason: str, verbose: bool, max_jobs: int | None, lock: int | None
) -> list[str]:
    """Run ninja; the names of what it made, objects and library."""
    make_folder(plan.folder / "obj")
    write_atomically(plan.ninja_path, plan.ninja_text)
    _remove_stale(plan)
    jobs, decided_by = parallel_jobs(plan.job_memory, max_jobs)
    began = time.time()
    scratch = plan.folder / "tmp"
    shutil.rmtree(scratch, ignore_errors=True)  # of a build that was killed
    make_folder(scratch)
    try:
        _note_spills(plan)  # of a build that was killed
        plan.log.unlink(missing_ok=True)
        plan.log.touch(mode=0o644)
        with open(plan.log, "w", encoding="utf-8", errors="replace") as log:
            about = f"{plan.name}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}, {platform.platform()}"
            head = f"{reason}; {jobs} compilers at once ({decided_by})"
            log.write(f"# {about}\n# {plan.description}\n# {head}\n")
            _logger.info("building %s: %s", plan.name, head)
            made: list[str] = []
            for together in dict.fromkeys((jobs, 1)):
                status, output = _run_ninja(plan, together, verbose, lock, log)
                made += [name for _, _, name in re.findall(_DONE, output, re.MULTILINE)]
                if status == 0:
                    break
                name, status, said = _failure(status, output)
                if together > 1 and was_killed(status, said):
                    continue
                what = f"{name}: {first_error_line(said) or f'exit status {status}'}"
                raise JitBuildError(plan.name, what, plan.log, hint_for(status, said))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _record_inputs(plan, began)
    _note_spills(plan)
    _logger.info("%s is built", plan.name)
    return list(dict.fromkeys(made))  # a compiler that was killed has a line as well


def _spilling(plan: ModulePlan) -> dict[str, int]:
    """``spills.json``: name of an object -> bytes; empty if it is not there, or no such thing."""
    try:
        data = json.loads(read_file(plan.folder / "spills.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: size for name, size in data.items() if isinstance(size, int)} if isinstance(data, dict) else {}


def _note_spills(plan: ModulePlan) -> None:
    """Bring ``spills.json`` up to date with the log, which tells of the objects that were compiled last."""
    try:
        log = read_file(plan.log).decode(errors="replace")
    except OSError:
        return
    spilling = _spilling(plan)
    # A compiler's output follows the line of its command.
    _, *said = re.split(_DONE, log, flags=re.MULTILINE)
    spilling.update(zip(said[2::4], map(local_memory, said[3::4]), strict=True))
    names = {step.name for step in plan.steps}
    spilling = {name: size for name, size in spilling.items() if size and name in names}
    write_atomically(plan.folder / "spills.json", json.dumps(spilling, indent=1))


def _tell_of_spills(plan: ModulePlan) -> None:
    spilling = _spilling(plan)
    if spilling:
        compiler = next(step.compiler for step in plan.steps if step.name in spilling)
        _logger.warning("%s", spill_warning(plan.name, compiler_identity(compiler), spilling))


def _remove_stale(plan: ModulePlan) -> None:
    """Remove the objects whose files have other contents than when they were made, and a damaged library."""
    record = _read_record(plan)
    if record is None:  # nobody knows what the objects were made of
        shutil.rmtree(plan.folder / "obj", ignore_errors=True)
        make_folder(plan.folder / "obj")
        record = {}
    changed = set(_changed(plan, record))
    if changed:
        for output, files in {**_dependencies(plan), plan.library.name: [plan.library.name]}.items():
            if not changed.isdisjoint(files):
                (plan.folder / output).unlink(missing_ok=True)
    # Steps that are compiled from now on read these files as they are now: record that, in case this build is killed.
    record.update((path, hash_file(plan.folder / path) or "") for path in changed)
    record.pop(plan.library.name, None)
    _write_record(plan, record)


def _record_inputs(plan: ModulePlan, began: float) -> None:
    """Write down what a library was made from that ninja has just brought up to date."""
    files = {path for read in _dependencies(plan).values() for path in read}
    record = {path: hash_file(plan.folder / path) or "" for path in sorted({plan.library.name, *files})}
    now = time.time()
    for path in files:
        with contextlib.suppress(OSError):
            if began <= os.stat(path).st_mtime <= now:
                _logger.warning("%s was edited while %s was built; build again", path, plan.name)
                record[path] = ""
    _write_record(plan, record)


def _dependencies(plan: ModulePlan) -> dict[str, list[str]]:
    """For each object the absolute paths of the files that it was compiled from, as ninja keeps them."""
    listing = subprocess.run([find_ninja(), "-t", "deps"], cwd=plan.folder, capture_output=True, text=True).stdout
    found: dict[str, list[str]] = {}
    folder, read = os.path.realpath(plan.folder), []
    for line in listing.splitlines():
        if line.startswith("    "):
            read.append(os.path.normpath(os.path.join(folder, line[4:])))
        elif line:
            read = found.setdefault(line.split(": #deps")[0], [])
    return found


def _run_ninja(plan: ModulePlan, jobs: int, verbose: bool, lock: int | None, log: IO[str]) -> tuple[int, str]:
    """Run ninja; its exit status, and its output, which also goes to the log."""
    # Relative: nvcc has a shell expand a $ in TMPDIR.
    environment = {**os.environ, "TMPDIR": "tmp", "NINJA_STATUS": NINJA_STATUS}
    process = subprocess.Popen(
        [*PRIVATE, find_ninja(), "--verbose", "-j", str(jobs)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=plan.folder,
        env=environment,
        start_new_session=True,  # Ctrl-C comes to this process, which ends ninja
        pass_fds=[lock] if lock is not None else [],
        text=True,
        errors="replace",
    )
    lines, progress = [], Progress(plan.name)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            log.write(line)
            log.flush()
            if verbose:
                print(line, end="", file=sys.stderr, flush=True)
            if step := finished_step(line):
                progress.tell(*step)
        process.wait()
    finally:
        process.terminate()
        process.wait()
    return process.returncode, "".join(lines)


def _failure(status: int, output: str) -> tuple[str, int, str]:
    """Read ninja's output: the step that failed first, its exit status, and what its command printed."""
    block = re.search(
        r"^FAILED: (?:\[code=(\d+)\] )?(?:obj/)?(\S+).*\n.*\n((?:(?!\[\d+/|ninja: |FAILED: ).*\n)*)", output, re.M
    )
    if block is None:
        return "ninja", status, output
    code, name, said = block.groups()
    if code or said:
        return name, int(code) if code else 1, said
    return name, 128 + signal.SIGKILL, WITHOUT_A_WORD  # as if it was killed, which is tried again alone
