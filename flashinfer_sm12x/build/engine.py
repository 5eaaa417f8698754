# SPDX-License-Identifier: Apache-2.0
"""Building a module: ninja runs the compilers, in the module's folder of the cache.

::

    build.ninja                          the commands
    fused_moe_120-<hash>-<digest>.so     the library of a build hash, and the digest by which damage is seen
    fused_moe_120-<hash>-<digest>.json   the inputs that the hash is the hash of (``record``)
    fused_moe_120.so                     a link to the library that was built last
    obj/<hash>-<digest>/                 an object, so that an edit compiles only what it touches
    spills.json                          objects whose kernels spill registers, and how many bytes
    digests.json                         the memo of ``build_hash``
    build.log                            what the last build printed
    tmp/                                 the compilers' TMPDIR, removed after a build

A file gets its name only when it is complete, and the name is a hash of its inputs (``build_hash``). So ninja compares
no file times: it makes the files that are missing. An object or a library whose content is not of the digest in its
name is damaged, by a full disk or a loss of power: a build replaces it. An object that another module of the cache has,
such as the binding of several formats, is linked from there. A successful build removes files of other hashes; a
process that has loaded such a library keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import glob
import json
import logging
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from .. import variables
from .build_hash import Files, digest_of, hash_file, hash_of, host_compilers, linked_by, namer, searched_by, words_of
from .diagnosis import (
    WITHOUT_A_WORD,
    JitBuildError,
    explained_os_errors,
    first_error_line,
    hint_for,
    local_memory,
    spill_warning,
    was_killed,
)
from .jobs import DEFAULT_JOB_MEMORY, parallel_jobs
from .record import changes_since, write_record
from .toolchain import ToolchainError, compiler_banner, find_ninja
from .trust import UntrustedCacheError, make_folder, read_file, require_trusted, require_trusted_tree, write_atomically

_logger = logging.getLogger("flashinfer.jit.sm12x")

FLAG_VARIABLES = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    # nvcc.profile, which lies beside nvcc, adds to these.
    "INCLUDES",
    "SYSTEM_INCLUDES",
    "LIBRARIES",
    "CUDAFE_FLAGS",
    "PTXAS_FLAGS",
)
"""Variables whose words are flags of nvcc's or of a program that it runs."""

FOLDER_VARIABLES = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
"""Variables whose folders, with a colon between them, GCC and Clang search for headers."""

COMPILER_ENVIRONMENT = (
    *FLAG_VARIABLES,
    *FOLDER_VARIABLES,
    "NVCC_CCBIN",
    # Where GCC finds its own programs and libraries, and flags that Clang adds.
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
    "LIBRARY_PATH",
    "CCC_OVERRIDE_OPTIONS",
    # A launcher's: another compiler, and what it may pass over when it compares.
    "CCACHE_COMPILER",
    "CCACHE_IGNOREHEADERS",
    "CCACHE_IGNOREOPTIONS",
    "CCACHE_SLOPPINESS",
)
"""Variables that change what a compiler makes of the same command. Not those of dates: no source has ``__DATE__``."""

WITHOUT_EFFECT = ("--threads=",)
"""Beginnings of flags that change nothing in what is made."""

NINJA_STATUS = "[%f/%t] "
"""Ninja's variable, for :func:`finished_step`."""

_DONE = r"\[(\d+)/(\d+)\] .* -o (\S*/)?(\S+?)(?:\.new(?: && mv .*)?)?\s*$"
"""A line of ninja's: how many steps are done and how many there are, the folder of what has been made, and its name."""

_SECONDS_BETWEEN_LINES = 10
"""Least time between lines of a build's progress at level INFO of the log; each line is in ``build.log``, and here at
level DEBUG."""


class Progress:
    """How far a build is, in the log: each step at level DEBUG, at most one in ten seconds at level INFO. Several
    ninjas may tell theirs."""

    def __init__(self, what: str) -> None:
        self._what, self._logged_at, self._lock = what, time.monotonic(), threading.Lock()

    def tell(self, done: int, total: int, name: str) -> None:
        """``name`` is made, as the ``done``-th of ``total``."""
        with self._lock:
            now = time.monotonic()
            news = now - self._logged_at >= _SECONDS_BETWEEN_LINES
            self._logged_at = now if news else self._logged_at
            _logger.log(logging.INFO if news else logging.DEBUG, "%s [%d/%d] %s", self._what, done, total, name)


def finished_step(line: str) -> tuple[int, int, str] | None:
    """Read a line that ninja prints when a step is done: how many are done, how many there are, and what it made."""
    done = re.match(_DONE, line)
    return (int(done[1]), int(done[2]), done[4]) if done else None


_NINJA_ENDS_WITH_ITS_STARTER = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that builds has ended")
os.umask(os.umask(0o022) | 0o022)
os.execv(sys.argv[2], sys.argv[2:])
"""


def ninja_command(*words: str) -> list[str]:
    """The command that runs ninja with ``words``.

    However the thread that starts it ends (a signal, a crash, the kernel's want of memory), ninja gets SIGTERM then,
    and ends its compilers. Nobody else may write to the files that they make, whatever the umask.

    Raises:
        ToolchainError: ninja is not installed.
    """
    starter = [sys.executable, "-I", "-S", "-c", _NINJA_ENDS_WITH_ITS_STARTER, str(os.getpid())]
    return [*starter, find_ninja(), *words]


_RULES = """\
rule make
  command = $command
  generator = 1
"""
"""``generator`` has ninja make an output only if it is missing, whatever its command and file times."""


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
        """Program and arguments that compile ``source`` into ``output``."""
        return (*self.launcher, self.compiler, *self.flags, "-c", source, "-o", output)


def host_compiler() -> str:
    """The compiler that compiles C++ and links."""
    return str(variables.read("CXX") or "c++")


def compile_step(name: str, source: Path, nvcc: Path, flags: Sequence[str]) -> CompileStep:
    """One source, by the toolkit's ``nvcc`` or the host compiler that variables name, behind the launchers that they
    name."""
    if source.suffix == ".cu":
        compiler, launcher = str(nvcc), "FLASHINFER_NVCC_LAUNCHER"
        host = variables.read("CC")
        flags = [*(["-ccbin", host] if host else []), *flags]
    else:
        compiler, launcher = host_compiler(), "FLASHINFER_CXX_LAUNCHER"
    return CompileStep(name, source.resolve(), compiler, tuple(flags), variables.read(launcher))


@dataclass(frozen=True)
class ModulePlan:
    """Everything needed to build a module.

    Attributes:
        name: The module's name.
        folder: Its folder in the cache. Commands run there.
        lock_path: The file that is locked while it is built.
        steps: Its sources.
        linker: The program that links.
        link_flags: The linker's arguments after the objects.
        job_memory: Bytes that a compiler may need.
        description: A line for the head of the log.
        roots: Name -> folder whose content counts and whose place does not.
        read_only: The module's folder in a cache that can only be read.
    """

    name: str
    folder: Path
    lock_path: Path
    steps: tuple[CompileStep, ...]
    linker: str
    link_flags: tuple[str, ...]
    job_memory: int = DEFAULT_JOB_MEMORY
    description: str = ""
    roots: Mapping[str, str] = field(default_factory=dict)
    read_only: Path | None = None

    @property
    def library(self) -> Path:
        """A link to the library that was built last. It may be out of date; :func:`find_library` gives the current
        one."""
        return self.folder / f"{self.name}.so"

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @property
    def ninja_path(self) -> Path:
        return self.folder / "build.ninja"

    def object_path(self, step: CompileStep) -> Path:
        """The object that was built of the files as they are now.

        Raises:
            FileNotFoundError: there is none.
        """
        path = BuildHashes(self).objects[step.name]
        for folder in filter(None, (self.folder, self.read_only)):
            for made in _objects_of(folder, path):
                return made
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder / "obj" / path))


def _objects_of(folder: Path, path: str, modules: str = "") -> list[Path]:
    """The files of an object in a module's folder, or with ``*/`` in those of all modules in a folder.

    Args:
        folder: The folder.
        path: The object's hash and name, as in :attr:`BuildHashes.objects`.
        modules: What lies between the folder and ``obj``.
    """
    key, _, name = path.partition("/")
    return sorted(folder.glob(f"{modules}obj/{key}-*/{glob.escape(name)}"))


def _bears(name: str, digest: str | None) -> bool:
    """Whether a file's name, without its suffix, states that digest."""
    return digest is not None and name.endswith(f"-{digest[:16]}")


class _Inputs:
    """The flags and the files that commands read, as hashes hold them: paths by the names of their roots, digests for
    contents.

    Args:
        roots: Name -> folder whose content counts and whose place does not.
        folder: The folder in which commands run.
        memo: The file of digests that are known.
        environment: The variables that change what compilers make.
    """

    def __init__(
        self, roots: Mapping[str, str], folder: Path, memo: Path | None, environment: Mapping[str, str]
    ) -> None:
        self.name = functools.cache(namer(roots))
        self.files, self._folder, self._environment = Files(memo), folder, environment
        self._searched = functools.cache(self._search)

    def words(self, words: Sequence[str]) -> list[str]:
        return [self.name(word) for word in words if not word.startswith(WITHOUT_EFFECT)]

    def contents(self, files: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
        return sorted((self.name(path), digest) for path, digest in files.items())

    def flags(self, flags: Sequence[str]) -> list[str]:
        """The flags of a command, and those that variables add."""
        return [*flags, *(word for name in FLAG_VARIABLES for word in words_of(self._environment.get(name, "")))]

    def read(self, flags: tuple[str, ...], sources: Sequence[str]) -> dict[str, str | None]:
        """Path -> digest of all files that are read when ``sources`` are compiled with ``flags``."""
        folders, files = self._searched(flags)
        return self.files.read_by([*sources, *files], folders)

    def read_by_all(self, commands: Iterable[tuple[tuple[str, ...], str]]) -> dict[str, str | None]:
        """:meth:`read` of commands, each its flags and its source."""
        sources: dict[tuple[str, ...], list[str]] = {}
        for flags, source in commands:
            sources.setdefault(flags, []).append(source)
        read: dict[str, str | None] = {}
        for flags, paths in sources.items():
            read |= self.read(flags, paths)
        return read

    def _search(self, flags: tuple[str, ...]) -> tuple[list[str], list[str]]:
        folders, files = searched_by(self.flags(flags), self._folder)
        for value in map(self._environment.get, FOLDER_VARIABLES):
            # An empty one is the folder in which the compiler runs.
            folders += [os.path.join(self._folder, folder) for folder in value.split(":")] if value else []
        return folders, files


def portable_key(
    roots: Mapping[str, str], sources: Iterable[tuple[Path, Sequence[str]]], link_flags: Sequence[str]
) -> str:
    """The hash of a library without what is of one machine: its compilers, their environment, files outside the flags'
    folders.

    Args:
        roots: Name -> folder whose content counts and whose place does not.
        sources: Each source, and its flags.
        link_flags: The linker's flags.
    """
    inputs = _Inputs(roots, Path(os.curdir), None, {})
    commands = [(tuple(flags), os.path.realpath(source)) for source, flags in sources]
    return hash_of(
        [(inputs.words(flags), inputs.name(source)) for flags, source in commands],
        inputs.words(link_flags),
        inputs.contents(inputs.read_by_all(commands)),
    )


class BuildHashes:
    """The build hashes of a plan's objects and library, by the files as they are now.

    Attributes:
        files: Digests of the files.
        sources: Name of a step -> paths and digests of all files that it reads.
        objects: Name of a step -> its object's hash and file name, with a slash between them.
        parts: The library's inputs, by name.
        library: The library's hash, the hash of :attr:`parts`.
    """

    def __init__(self, plan: ModulePlan) -> None:
        self._plan = plan
        self._environment = {name: os.environ[name] for name in COMPILER_ENVIRONMENT if name in os.environ}
        self._inputs = inputs = _Inputs(plan.roots, plan.folder, plan.folder / "digests.json", self._environment)
        self.files = inputs.files
        # The library's hash takes all files at once: the files of one source matter only if it is compiled.
        read = inputs.read_by_all((step.flags, str(step.source)) for step in plan.steps)
        commands = [self._commands(step) for step in plan.steps]
        link = inputs.words((plan.linker, *plan.link_flags)), compiler_identity(plan.linker)
        places = [f"-L{folder}" for folder in self._environment.get("LIBRARY_PATH", "").split(":") if folder]
        linked = {path: self.files.digest(path) for path in linked_by([*plan.link_flags, *places], plan.folder)}
        self.parts = {
            "commands": commands,
            "link": link,
            "files": inputs.contents(read),
            "linked": inputs.contents(linked),
        }
        self.library = hash_of(*self.parts.values())

    @cached_property
    def sources(self) -> dict[str, dict[str, str | None]]:
        return {step.name: self._inputs.read(step.flags, [str(step.source)]) for step in self._plan.steps}

    @cached_property
    def objects(self) -> dict[str, str]:
        return {
            step.name: f"{hash_of(self._commands(step), self._inputs.contents(self.sources[step.name]))}/{step.name}"
            for step in self._plan.steps
        }

    def _commands(self, step: CompileStep) -> list[Any]:
        """A step's command, its compilers' identities and their environment: the part of its hash in addition to the
        files."""
        words = self._inputs.flags(step.flags)
        unnamed = ["-ccbin", self._environment.get("NVCC_CCBIN") or "gcc"]
        hosts = host_compilers(words, self._plan.folder) or host_compilers(unnamed, self._plan.folder)
        identities = [compiler_identity(program) for program in (step.compiler, *hosts)]
        launcher = [_facts(program) for program in filter(None, map(shutil.which, step.launcher))]
        return [self._inputs.words(step.command(str(step.source), "")), identities, launcher, self._environment]

    def find(self, digest_of: Callable[[Path], str | None] | None = None) -> Path | None:
        """The library that bears the hash, in the module's folder or the one that can only be read, and is whole.

        Args:
            digest_of: Gives a file's digest; the memo's when omitted.
        """
        digest_of = digest_of or self.files.digest
        for folder in filter(None, (self._plan.folder, self._plan.read_only)):
            for path in folder.glob(f"{glob.escape(self._plan.name)}-{self.library}-*.so"):
                if _bears(path.stem, digest_of(path)):
                    return path
                _logger.warning("%s is damaged; a build links it again", path)
        return None

    def ninja_text(self, objects: Mapping[str, Path]) -> str:
        """The build file. Its paths but those of sources and headers are relative to the module's folder.

        Args:
            objects: The objects that are there: :attr:`objects` -> file. The library is linked when all are.
        """
        plan, lines = self._plan, [_RULES]
        for step in plan.steps:
            # nvcc has a shell expand a $ in the path of a source, which the path of a cache may hold.
            source = str(step.source)
            if "$" in source:
                source = os.path.relpath(os.path.realpath(source), os.path.realpath(plan.folder))
            lines.append(_build_lines(self.objects[step.name], functools.partial(step.command, source)))
        if objects.keys() >= {*self.objects.values()}:
            files = [str(objects[path].relative_to(plan.folder)) for path in self.objects.values()]
            link = (plan.linker, *files, *plan.link_flags)
            lines.append(_build_lines(plan.library.name, lambda output: (*link, "-o", output)))
        return "".join(lines)


def _build_lines(path: str, command: Callable[[str], Sequence[str]]) -> str:
    """The lines by which ninja makes ``tmp/<path>``, which is there when it is whole."""
    output = f"tmp/{path}"
    shell = f"{shlex.join(command(f'{output}.new'))} && mv -f {output}.new {output}"
    return f"build {output}: make\n  command = {shell.replace('$', '$$')}\n"


def find_library(plan: ModulePlan) -> Path | None:
    """The library that a build of the files as they are now would make; None if it is missing. Writes only the memo."""
    hashes = BuildHashes(plan)
    library = hashes.find()
    if library is not None:
        hashes.files.remember()
    return library


@dataclass(frozen=True)
class BuildReport:
    """The result of a call of :func:`build`.

    Attributes:
        library: The library, found or built.
        compiled: Names of the objects that were compiled.
        linked: Whether the library was linked.
        cpu_seconds: CPU time of all compilers together.
        wall_seconds: Time from the lock to the finished library.
    """

    library: Path
    compiled: list[str]
    linked: bool
    cpu_seconds: float
    wall_seconds: float


@functools.cache
def compiler_identity(compiler: str) -> str:
    """Facts that tell one compiler from another: its version banner, and the programs beside it.

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
    names = ("ptxas", "cudafe++", "fatbinary", "nvcc.profile", "../nvvm/bin/cicc")
    others = (program.parent / name for name in names)
    return "\n".join([banner, *(_facts(tool) for tool in (program, *others) if tool.is_file())])


_LARGE = 1 << 16
"""Bytes of a program from which on its size stands for its content. Scripts and ``nvcc.profile`` are smaller."""


def _facts(program: str | Path) -> str:
    size = os.path.getsize(program)
    return f"{os.path.basename(program)}:{hash_file(program) if size < _LARGE else size}"


@contextmanager
def module_lock(path: Path, wait: bool = True) -> Iterator[int]:
    """Hold the lock of a module while it is built or removed; gives its descriptor.

    Whoever inherits the descriptor holds the lock, too: compilers of a builder that was killed, which do not end at
    once, so that nobody builds beside them.

    Raises:
        BlockingIOError: another process holds it, and ``wait`` is False.
        UntrustedCacheError: another user can write to its folder.
        JitBuildError: the lock's folder cannot be written, or its file system knows no locks.
    """
    with explained_os_errors(path.stem, path.parent):
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
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def build(plan: ModulePlan, verbose: bool = False, max_jobs: int | None = None, lock: int | None = None) -> BuildReport:
    """Make the library, if it is not there. The caller holds :func:`module_lock`.

    A compiler that was killed, most likely for memory, is run again alone. Objects whose files were edited during the
    build are compiled again. A warning names kernels that spill registers, even if nothing had to be built.

    Args:
        plan: The plan of the library to build.
        verbose: Show commands and compiler output.
        max_jobs: Compilers at once; chosen from memory, cores and ``MAX_JOBS`` when omitted.
        lock: The lock's descriptor.

    Returns:
        The report of the build; it is empty if the library was there.

    Raises:
        UntrustedCacheError: another user can write to the module's folder, or has.
        JitBuildError: a compiler failed, or the cache cannot be written.
        ToolchainError: ninja is not installed.
        KeyboardInterrupt: with a line that says what stays.
    """
    started, cpu = time.monotonic(), _compilers_cpu()
    try:
        with explained_os_errors(plan.name, plan.folder):
            require_trusted_tree(plan.folder)
            compiled: dict[str, None] = {}
            linked = False
            # The library is read: a load that its damage ended believed the memo.
            while (library := (hashes := BuildHashes(plan)).find(hash_file)) is None:
                attempt = _Attempt(plan, hashes, verbose, max_jobs, lock)
                linked = attempt.make()
                compiled |= dict.fromkeys(attempt.compiled)
            _point(plan, library)
            _tell_of_spills(plan, hashes)
    except KeyboardInterrupt:
        message = f"building {plan.name} was interrupted: objects that are built stay, and a new run resumes from there"
        raise KeyboardInterrupt(message) from None
    return BuildReport(library, [*compiled], linked, _compilers_cpu() - cpu, time.monotonic() - started)


def _compilers_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class _Attempt:
    """Compiles the objects of some hashes that are missing, and links them.

    Commands write into ``tmp``. A result is moved to its hash's name only if the files are still those of the hash. So
    neither a builder that is killed nor its compilers leave a file under a wrong name.

    Attributes:
        compiled: Names of the objects that were compiled.
    """

    def __init__(
        self, plan: ModulePlan, hashes: BuildHashes, verbose: bool, max_jobs: int | None, lock: int | None
    ) -> None:
        self._plan, self._hashes, self._verbose, self._lock = plan, hashes, verbose, lock
        self._jobs, self._decided_by = parallel_jobs(plan.job_memory, max_jobs)
        self._scratch = plan.folder / "tmp"
        self._wanted = list(hashes.objects.values())
        self._objects: dict[str, Path] = {}  # those of them that are there and whole
        self._edited: dict[str, None] = {}
        self._progress, self._steps = Progress(plan.name), 0
        self.compiled: list[str] = []

    def _missing(self) -> list[str]:
        return [path for path in self._wanted if path not in self._objects]

    def _find_objects(self) -> None:
        """Find the objects that are there; a damaged one is removed."""
        for path in self._wanted:
            for made in _objects_of(self._plan.folder, path):
                if _bears(made.parent.name, hash_file(made)):
                    self._objects[path] = made
                else:
                    _logger.warning("%s is damaged; it is compiled again", made)
                    shutil.rmtree(made.parent)

    def _take_from_other_modules(self) -> None:
        """Link what is missing and another module has: by its hash, compiling would make the same."""
        for path in self._missing():
            for made in _objects_of(self._plan.folder.parent, path, "*/"):
                try:
                    require_trusted(made)
                except UntrustedCacheError as error:  # of another module: this one needs it no more than a compiler
                    _logger.warning("%s is not taken for %s: %s", made, self._plan.name, error)
                    continue
                # It is compiled where it is gone meanwhile, and where the file system has no hard links.
                with contextlib.suppress(OSError):
                    if _bears(made.parent.name, digest_of(made)):
                        place = self._place(made.parent.name, made.name)
                        os.link(made, place)
                        self._objects[path] = place
                        if spilled := _spilling(made.parents[2]).get(path):
                            _note_spills(self._plan, {path: spilled})
                        break
                    _logger.warning("%s is damaged; it is not taken for %s", made, self._plan.name)

    def _place(self, folder: str, name: str) -> Path:
        place = self._plan.folder / "obj" / folder / name
        make_folder(place.parent)
        return place

    def make(self) -> bool:
        """Build; return whether the library is complete. False: a file was edited meanwhile, so the hashes have
        changed."""
        plan = self._plan
        shutil.rmtree(self._scratch, ignore_errors=True)  # of a build that was killed
        make_folder(plan.folder / "obj")
        for path in self._wanted:
            make_folder((self._scratch / path).parent)
        self._find_objects()
        self._take_from_other_modules()
        missing = self._missing()
        self._steps = len(missing) + 1
        try:
            _note_spills(plan, {})  # those of a build that was killed
            plan.log.unlink(missing_ok=True)
            plan.log.touch(mode=0o644)
            with open(plan.log, "w", encoding="utf-8", errors="replace") as log:
                about = f"{plan.name}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}, {platform.platform()}"
                head = (
                    f"{len(missing)} of {len(self._wanted)} objects are missing; "
                    f"{self._jobs} compilers at once ({self._decided_by})"
                )
                log.write(f"# {about}\n# {plan.description}\n# {head}\n")
                _logger.info("building %s: %s", plan.name, head)
                if changes := self._changes():
                    log.write(f"# since the library that is there was built: {changes}\n")
                    _logger.info("%s was built before; since then: %s", plan.name, changes)
                self._run(self._missing, log)
                if not self._edited:
                    self._run(lambda: [plan.library.name], log)
            if not self._edited:
                _install(plan, self._hashes, {made.parent.name for made in self._objects.values()})
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        for path in self._edited:
            _logger.warning("%s was edited while %s was built; it is built again", path, plan.name)
        _note_spills(plan, {})
        return not self._edited

    def _changes(self) -> str:
        """The inputs that differ from those of the library that was built last, if there is one."""
        for folder in filter(None, (self._plan.folder, self._plan.read_only)):
            older = sorted(folder.glob(f"{glob.escape(self._plan.name)}-*.so"), key=os.path.getmtime)
            if older:
                return changes_since(older[-1], self._hashes.parts)
        return ""

    def _run(self, paths: Callable[[], list[str]], log: IO[str]) -> None:
        """Have ninja make ``paths()``. If a compiler is killed, make the missing ones again, one at a time."""
        plan = self._plan
        for jobs in dict.fromkeys((self._jobs, 1)):
            write_atomically(plan.ninja_path, self._hashes.ninja_text(self._objects))
            left = [f"tmp/{path}" for path in paths()]
            status, output = (
                _run_ninja(plan, left, jobs, self._verbose, self._lock, log, self._keep) if left else (0, "")
            )
            if status == 0:
                return
            name, status, message = _failure(status, output)
            if jobs == 1 or not was_killed(status, message):
                what = f"{name}: {first_error_line(message) or f'exit status {status}'}"
                raise JitBuildError(plan.name, what, plan.log, hint_for(status, message))

    def _keep(self, path: str) -> None:
        """Move what a step made to its place, if it is an object, and of the files that its hash says."""
        name, made = path.rpartition("/")[2], self._scratch / path
        if path in self._wanted and made.is_file():
            self.compiled.append(name)
            if edited := self._hashes.files.changed(self._hashes.sources[name]):
                self._edited |= dict.fromkeys(edited)
            else:
                key, digest = path.partition("/")[0], digest_of(made)
                self._objects[path] = made.replace(self._place(f"{key}-{digest[:16]}", name))
        self._progress.tell(self._steps - len(self._missing()) - (path in self._wanted), self._steps, name)


def _spilling(folder: Path) -> dict[str, int]:
    """Path of an object in a module's ``obj`` -> bytes: what ``spills.json`` holds and the log adds, which tells of the
    objects that were compiled last. What is missing or damaged tells nothing."""
    try:
        data = json.loads(read_file(folder / "spills.json"))
    except (OSError, ValueError, RecursionError):
        data = {}
    noted = {path: size for path, size in data.items() if isinstance(size, int)} if isinstance(data, dict) else {}
    try:
        log = read_file(folder / "build.log").decode(errors="replace")
    except OSError:
        log = ""
    # A compiler's output follows the line of its command.
    _, *message = re.split(_DONE, log, flags=re.MULTILINE)
    made = [f"{where}{name}".removeprefix("tmp/") for where, name in zip(message[2::5], message[3::5], strict=True)]
    noted.update(zip(made, map(local_memory, message[4::5]), strict=True))
    return {path: size for path, size in noted.items() if size}


def _note_spills(plan: ModulePlan, more: Mapping[str, int]) -> None:
    """Bring ``spills.json`` up to date, before the log is written anew or a build ends."""
    spilling = {**_spilling(plan.folder), **more}
    there = {f"{made.parent.name.rpartition('-')[0]}/{made.name}" for made in plan.folder.glob("obj/*-*/*.o")}
    spilling = {path: size for path, size in spilling.items() if path in there}
    write_atomically(plan.folder / "spills.json", json.dumps(spilling, indent=1))


def _tell_of_spills(plan: ModulePlan, hashes: BuildHashes) -> None:
    recorded = _spilling(plan.folder)
    spilling = {name: recorded[path] for name, path in hashes.objects.items() if path in recorded}
    if spilling:
        compiler = next(step.compiler for step in plan.steps if step.name in spilling)
        _logger.warning("%s", spill_warning(plan.name, compiler_identity(compiler), spilling))


def _install(plan: ModulePlan, hashes: BuildHashes, objects: Collection[str]) -> None:
    """Give the library that was linked its name, and remove all but it and the folders of ``objects`` in ``obj``."""
    linked = plan.folder / "tmp" / plan.library.name
    digest = hash_file(linked)
    if digest is None:
        raise JitBuildError(plan.name, f"ninja made no {linked.name}", plan.log)
    library = plan.folder / f"{plan.name}-{hashes.library}-{digest[:16]}.so"
    write_record(library, hashes.parts)
    linked.replace(library)
    for suffix in (".so", ".json"):
        for path in plan.folder.glob(f"{glob.escape(plan.name)}-*{suffix}"):
            if path.stem != library.stem:
                path.unlink()
    for path in (plan.folder / "obj").iterdir():
        if path.name not in objects:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    _logger.info("%s is built", plan.name)


def _point(plan: ModulePlan, library: Path) -> None:
    """Let the module's link lead to its library."""
    if library.parent == plan.folder and plan.library.resolve() != library.resolve():
        scratch = plan.folder / f".{plan.name}.so"
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(library.name)
        scratch.replace(plan.library)


def _run_ninja(
    plan: ModulePlan,
    paths: Sequence[str],
    jobs: int,
    verbose: bool,
    lock: int | None,
    log: IO[str],
    keep: Callable[[str], None],
) -> tuple[int, str]:
    """Have ninja make ``paths``; its exit status, and its output, which also goes to the log.

    ``keep`` gets the path in ``tmp`` of each step that ended, well or not.
    """
    # Relative: nvcc has a shell expand a $ in TMPDIR.
    environment = {**os.environ, "TMPDIR": "tmp", "NINJA_STATUS": NINJA_STATUS}
    process = subprocess.Popen(
        ninja_command("--verbose", "-j", str(jobs), *paths),
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
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            log.write(line)
            log.flush()
            if verbose:
                print(line, end="", file=sys.stderr, flush=True)
            if done := re.match(_DONE, line):
                keep(f"{done[3]}{done[4]}".removeprefix("tmp/"))
        process.wait()
    finally:
        process.terminate()
        process.wait()
    return process.returncode, "".join(lines)


def _failure(status: int, output: str) -> tuple[str, int, str]:
    """Read ninja's output: the step that failed first, its exit status, and what its command printed."""
    block = re.search(
        r"^FAILED: (?:\[code=(\d+)\] )?(?:\S*/)?(\S+).*\n.*\n((?:(?!\[\d+/|ninja: |FAILED: ).*\n)*)", output, re.M
    )
    if block is None:
        return "ninja", status, output
    code, name, message = block.groups()
    if code or message:
        return name, int(code) if code else 1, message
    return name, 128 + signal.SIGKILL, WITHOUT_A_WORD  # as if it was killed, which is tried again alone
