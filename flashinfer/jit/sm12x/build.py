# SPDX-License-Identifier: Apache-2.0
"""The build engine: from a plan to a shared library in the cache.

What lies in a module's folder::

    fused_moe_120.so     the library; put there by a rename when it is complete
    manifest.json        what it and the objects were made from, see freshness.Manifest
    machine_code.json    what its machine code holds, see report
    obj/                 the objects, so that an edit rebuilds only what it touches
    build.log            commands and full compiler output of the last build
    tmp-*/               files of a build under way; of a killed one until the next build

Ninja runs the commands; what is to be run is decided here, by contents and not by times. Everything is made in a
``tmp-*`` folder and renamed when it is complete. The manifest records each object when it is in place, so a build that
is killed loses only what was being compiled; and since the manifest holds the hashes of all files, whatever else a crash
leaves behind is not taken for what it is not.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from tqdm import tqdm

from .diagnosis import JitBuildError, explain_os_error, first_error_line, hint_for
from .executor import Job, JobResult, run_jobs
from .freshness import ABSENT, Manifest, ObjectRecord, Roots, hash_file, hash_strings, parse_depfile, search_of
from .jobs import DEFAULT_JOB_MEMORY, GIB, JobLimit, job_limit
from .toolchain import ToolchainError, compiler_banner
from .trust import make_folder, new_text_file, own_folder

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

_Count = Callable[[JobResult], None]
_NO_LOCKS_HERE = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@dataclass(frozen=True)
class CompileStep:
    """One source and the command that compiles it.

    Attributes:
        name: File name of the object; unique within a module.
        source: The source file.
        compiler: The program, after any launcher such as ``ccache``.
        launcher: Program and arguments before the compiler.
        flags: All flags but for input and outputs.
    """

    name: str
    source: Path
    compiler: str
    flags: tuple[str, ...]
    launcher: tuple[str, ...] = ()

    def command(self, output: Path, depfile: Path, source: Path | None = None) -> tuple[str, ...]:
        """Program and arguments that compile into ``output`` and write ``depfile``.

        Args:
            output, depfile: What to write.
            source: The source file as the working folder has it; its absolute path when omitted.
        """
        outputs = ("-MD", "-MF", str(depfile), "-c", str(source or self.source), "-o", str(output))
        return (*self.launcher, self.compiler, *self.flags, *outputs)

    @property
    def include_dirs(self) -> list[tuple[str, str]]:
        """``(flag, folder)`` in the order in which headers are looked for: ``-I``, then ``-isystem``."""
        return self._split_flags[0]

    @cached_property
    def _split_flags(self) -> tuple[list[tuple[str, str]], list[str]]:
        """:attr:`include_dirs`, and the flags that say nothing of where headers are."""
        dirs, others, flags = [], [], iter(self.flags)
        for flag in flags:
            if flag in ("-I", "-isystem"):
                dirs.append((flag, next(flags, "")))
            elif flag.startswith("-I"):
                dirs.append(("-I", flag[2:]))
            else:
                others.append(flag)
        return sorted(dirs, key=lambda item: item[0] == "-isystem"), others

    @property
    def command_hash(self) -> str:
        """Of the flags, of what the compilers are, and of what their environment adds now."""
        # Include folders are left out: they count by what was read from them. Line tables hold their paths.
        flags = self.flags if {"-g", "-lineinfo"} & set(self.flags) else self._split_flags[1]
        environment = [f"{name}={os.environ.get(name, '')}" for name in COMPILER_ENVIRONMENT]
        host = os.environ.get("NVCC_CCBIN") or "gcc"  # does the host's part for nvcc
        if "-ccbin" in flags[:-1]:
            host = flags[flags.index("-ccbin") + 1]
        identities = [compiler_identity(self.compiler), compiler_identity(host)]
        return hash_strings([*self.launcher, *flags, *identities, *environment])


@dataclass(frozen=True)
class ModulePlan:
    """All that is needed to build a module.

    Attributes:
        name: The module's name.
        folder: Its folder in the cache.
        lock_path: The file that is locked while it is built.
        steps: Its sources.
        linker: Program and arguments that come before the objects.
        link_flags: Arguments that come after them.
        roots: Names of the folders that may lie elsewhere next time.
        watched: Folders whose files may be edited while a build runs.
        job_memory: What a compiler is assumed to need until it has been measured, bytes.
        description: Lines for the head of the log.
    """

    name: str
    folder: Path
    lock_path: Path
    steps: tuple[CompileStep, ...]
    linker: tuple[str, ...]
    link_flags: tuple[str, ...]
    roots: Roots
    watched: tuple[Path, ...]
    job_memory: int = DEFAULT_JOB_MEMORY
    description: str = ""

    @property
    def library(self) -> Path:
        return self.folder / f"{self.name}.so"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    def object_path(self, step: CompileStep) -> Path:
        return self.folder / "obj" / step.name


@dataclass
class BuildReport:
    """What a call of :func:`build` did.

    Attributes:
        compiled: Names of the objects that were compiled.
        linked: Whether the library was linked.
        cpu_seconds: Of all compilers together.
        wall_seconds: From the lock to the finished library.
        peak_memory: Of the largest compiler process, bytes.
    """

    compiled: list[str] = field(default_factory=list)
    linked: bool = False
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    peak_memory: int = 0


@cache
def compiler_identity(compiler: str) -> str:
    """What tells one compiler from another: its version banner, and the sizes of the programs beside it.

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


def is_fresh(plan: ModulePlan) -> bool:
    """Whether the library in the cache is what a build would make now. Takes no lock and writes nothing."""
    return not why_stale(plan)


def why_stale(plan: ModulePlan) -> list[str]:
    """What a build would have to do, as lines such as ``a.o: not built yet``; none when the library is fresh."""
    module = _Module(plan)
    reasons = [f"{name}: {reason}" for name, reason in module.stale_objects().items()]
    if not reasons and not module.library_is_fresh():
        reasons = [f"{plan.library.name}: not linked, damaged, or to be linked otherwise"]
    return reasons


def build(plan: ModulePlan, verbose: bool = False, max_jobs: int | None = None) -> BuildReport:
    """Bring the library up to date. The caller holds :func:`module_lock`.

    Args:
        plan: What to build.
        verbose: Show commands and compiler output.
        max_jobs: Compilers at once; chosen from memory, cores and ``MAX_JOBS`` when omitted.

    Returns:
        What was done; nothing when all was fresh.

    Raises:
        JitBuildError: a compiler failed, or the cache cannot be written.
        ToolchainError: ninja is not installed.
        KeyboardInterrupt: with a line that says what stays.
    """
    started = time.monotonic()
    module = _Module(plan)
    try:
        module.build(verbose, max_jobs)
    except OSError as error:
        raise explain_os_error(plan.name, plan.folder, error) from error
    module.report.wall_seconds = time.monotonic() - started
    return module.report


@contextmanager
def module_lock(plan: ModulePlan) -> Iterator[None]:
    """Hold the lock under which a module is built.

    The kernel frees it when its holder ends, however it ends. Where the file system knows no such locks, a file that
    names its holder takes their place; it counts as free when that process is gone.

    Raises:
        JitBuildError: the lock's folder cannot be written.
    """
    path = str(plan.lock_path)
    try:
        make_folder(plan.lock_path.parent)
        try:
            lock = _acquire(FileLock(path, thread_local=False), plan.name)
        except (NotImplementedError, OSError) as error:  # the former: filelock before 4
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS_HERE:
                raise
            lock = _acquire(SoftFileLock(f"{path}.soft", thread_local=False), plan.name)
    except OSError as error:
        raise explain_os_error(plan.name, plan.lock_path.parent, error) from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: BaseFileLock, module: str) -> BaseFileLock:
    try:
        lock.acquire(timeout=1.0)
    except Timeout:
        _logger.info("%s: another process is building it (lock %s); waiting", module, lock.lock_file)
        lock.acquire()
    return lock


class _Module:
    """A module in the cache: what of it is stale, and what has been done about that."""

    def __init__(self, plan: ModulePlan) -> None:
        self.plan = plan
        self.report = BuildReport()
        self._manifest = Manifest.read(plan.manifest, plan.name)
        # Each file is read once in a build, and looked for once.
        self._hash = cache(hash_file)
        self._exists = cache(os.path.lexists)

    def stale_objects(self) -> dict[str, str]:
        """The objects that are to be compiled, each with why."""
        reasons = {step.name: self._why_stale(step) for step in self.plan.steps}
        return {name: reason for name, reason in reasons.items() if reason}

    def _why_stale(self, step: CompileStep) -> str | None:
        roots, record = self.plan.roots, self._manifest.objects.get(step.name)
        if record is None:
            return "not built yet"
        if record.command != step.command_hash:
            return "flags or compiler changed"
        if next(iter(record.files), None) != roots.name(str(step.source)):
            return "another source"
        for name, digest in record.files.items():
            if self._hash(roots.path(name)) != digest or digest == ABSENT:
                return f"{roots.path(name)} changed"
        if record.search != self._search_hash(step, record.files):
            return "a header of the same name appeared or went in another include folder"
        return None

    def _search_hash(self, step: CompileStep, names: Iterable[str]) -> str:
        roots = self.plan.roots
        return hash_strings(search_of(map(roots.path, names), step.include_dirs, roots, self._exists))

    def library_is_fresh(self) -> bool:
        """Whether the library is what would be linked, all objects being fresh."""
        recorded = self._manifest.library
        linked = recorded != "" and self._manifest.link == self._link_hash()
        return linked and hash_file(self.plan.library) == recorded

    def _link_hash(self) -> str:
        linker, *arguments = self.plan.linker
        objects = [self._manifest.objects[step.name].content for step in self.plan.steps]
        flags = self.plan.link_flags
        return hash_strings([*arguments, "objects", *objects, "flags", *flags, compiler_identity(linker)])

    def build(self, verbose: bool, max_jobs: int | None) -> None:
        """Compile and link what is stale."""
        plan, reasons = self.plan, self.stale_objects()
        if not reasons and self.library_is_fresh():
            return
        for step in [step for step in plan.steps if step.name not in reasons]:
            # Only a build needs the object files, so only here do they have to be there and be whole.
            if hash_file(plan.object_path(step)) != self._manifest.objects[step.name].content:
                reasons[step.name] = "its object file is missing or damaged"
        self._clear_leftovers()
        limit = job_limit(max_jobs=max_jobs)
        summary = f"{len(reasons)} of {len(plan.steps)} sources to compile ({limit.reason})"
        _logger.info("building %s: %s", plan.name, summary)
        header = [summary, *(f"{name}: {reason}" for name, reason in reasons.items())]
        with (
            tempfile.TemporaryDirectory(dir=plan.folder, prefix="tmp-", ignore_cleanup_errors=True) as scratch,
            self._progress(header, len(reasons) + 1, verbose) as count,
        ):
            try:
                self._compile([step for step in plan.steps if step.name in reasons], limit, Path(scratch), count)
                self._link(Path(scratch), count)
            except KeyboardInterrupt:
                done = len(plan.steps) - len(reasons) + len(self.report.compiled)
                raise KeyboardInterrupt(
                    f"building {plan.name} was interrupted: {done} of {len(plan.steps)} objects are built and stay, and "
                    "a new run resumes from there"
                ) from None
        cost = f"{self.report.cpu_seconds:.1f} s of CPU, at most {self.report.peak_memory / GIB:.2f} GiB a job"
        _logger.info("%s is built: %s", plan.name, cost)

    def _clear_leftovers(self) -> None:
        """Make the folders; remove what killed builds left, and objects that the module no longer has."""
        plan, objects = self.plan, self.plan.folder / "obj"
        own_folder(plan.folder)
        own_folder(objects)
        for leftover in plan.folder.glob("tmp-*"):  # nobody uses them: the lock is ours
            shutil.rmtree(leftover, ignore_errors=True)
        names = {step.name for step in plan.steps}
        self._manifest.objects = {name: record for name, record in self._manifest.objects.items() if name in names}
        for path in objects.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _compile(self, steps: Sequence[CompileStep], limit: JobLimit, scratch: Path, count: _Count) -> None:
        """Compile, and put each object in its place as soon as it is made."""
        # What may be edited while compilers run is hashed before they start, so that an object made from an older or
        # newer text is not recorded as made from the present one.
        watched = [path for folder in self.plan.watched for path in folder.rglob("*") if path.is_file()]
        for path in [*watched, *(step.source for step in steps)]:
            self._hash(str(path))
        jobs = {self._job(step, scratch): step for step in steps}

        def finished(result: JobResult) -> None:
            count(result)
            self._publish(jobs[result.job], scratch, result)

        run_jobs(jobs, limit, scratch, finished)

    def _job(self, step: CompileStep, scratch: Path) -> Job:
        # Relative to the scratch folder, where the compiler runs: nvcc has a shell expand a $ in a path.
        source = step.source
        if self.plan.roots.name(str(source)).startswith("generated:"):
            source = Path(os.path.relpath(source.resolve(), scratch.resolve()))
        command = step.command(Path(step.name), Path(f"{step.name}.d"), source)
        before = self._manifest.objects.get(step.name)
        if before is None:
            return Job(step.name, command, self.plan.job_memory)
        return Job(step.name, command, before.peak_memory, before.wall_seconds)

    def _publish(self, step: CompileStep, scratch: Path, result: JobResult) -> None:
        """Put an object in its place, and record how it came to be."""
        content, files = self._content_of(scratch / step.name), self._files_read(step, scratch)
        os.replace(scratch / step.name, self.plan.object_path(step))
        self._manifest.objects[step.name] = ObjectRecord(
            command=step.command_hash,
            files=files,
            search=self._search_hash(step, files),
            content=content,
            peak_memory=result.peak_memory,
            wall_seconds=round(result.wall_seconds, 3),
        )
        self._manifest.write(self.plan.manifest)
        self.report.compiled.append(step.name)

    def _link(self, scratch: Path, count: _Count) -> None:
        """Link all objects, and put the library in its place."""
        plan, output = self.plan, scratch / self.plan.library.name
        objects = [str(plan.object_path(step)) for step in plan.steps]
        job = Job(output.name, (*plan.linker, *objects, *plan.link_flags, "-o", str(output)))
        run_jobs([job], job_limit(max_jobs=1), scratch, count)
        self._manifest.library, self._manifest.link = self._content_of(output), self._link_hash()
        os.replace(output, plan.library)
        self._manifest.write(plan.manifest)
        self.report.linked = True

    def _content_of(self, made: Path) -> str:
        digest = hash_file(made)
        if digest == ABSENT or made.stat().st_size == 0:
            what = f"the compiler reported success but did not write {made.name}"
            raise JitBuildError(self.plan.name, what, self.plan.log)
        return digest

    def _files_read(self, step: CompileStep, scratch: Path) -> dict[str, str]:
        """Every file that the compiler read, the source first, by its name in the plan's roots, with its hash."""
        try:
            paths = parse_depfile((scratch / f"{step.name}.d").read_text())
        except FileNotFoundError:
            what = f"{step.compiler} wrote no dependency file for {step.source}"
            raise JitBuildError(self.plan.name, what, self.plan.log) from None
        watched = tuple(f"{folder}/" for folder in self.plan.watched)
        files = {}
        for path in [str(step.source), *paths]:
            absolute = os.path.join(scratch, path)
            if ".." in Path(path).parts:
                absolute = os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(path))
            digest = self._hash(absolute)
            edited = absolute == str(step.source) or absolute.startswith(watched)
            if edited and hash_file(absolute) != digest:
                _logger.warning("%s was edited while %s was built; build again", absolute, self.plan.name)
                digest = ABSENT
            files[self.plan.roots.name(absolute)] = digest
        return files

    @contextmanager
    def _progress(self, header: Iterable[str], total: int, verbose: bool) -> Iterator[_Count]:
        """Counts jobs that ended and shows them: a bar on a terminal, lines elsewhere, everything in ``build.log``.

        Raises:
            JitBuildError: the job that is counted failed.
        """
        plan, report, numbers, started = self.plan, self.report, itertools.count(1), time.monotonic()
        hidden = verbose or not sys.stderr.isatty()
        bar = tqdm(total=total, desc=plan.name, unit="file", dynamic_ncols=True, disable=hidden)
        with new_text_file(plan.log) as log, bar:
            about = f"{plan.name}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}, {platform.platform()}"
            log.writelines(f"# {line}\n" for line in (about, *plan.description.splitlines(), *header))

            def count(result: JobResult) -> None:
                number, name, status = next(numbers), result.job.name, f"exit status {result.returncode}"
                took = f"{result.wall_seconds:.1f} s, {result.peak_memory / GIB:.2f} GiB"
                took += f", {status}" * (result.returncode != 0)
                text = f"{shlex.join(result.job.command)}\n{result.output}"
                log.write(f"\n# [{number}/{total}] {name}: {took}\n{text}")
                log.flush()
                if verbose:
                    print(text, end="", file=sys.stderr, flush=True)
                if hidden:
                    _logger.info("%s [%d/%d] %s: %s", plan.name, number, total, name, took)
                bar.set_postfix_str(f"{name} {took}", refresh=False)
                bar.update()
                report.cpu_seconds += result.cpu_seconds
                report.peak_memory = max(report.peak_memory, result.peak_memory)
                if result.returncode != 0:
                    what = f"{name}: {first_error_line(result.output) or status}"
                    raise JitBuildError(plan.name, what, plan.log, hint_for(result.returncode, result.output))

            outcome = "interrupted or failed"
            try:
                yield count
                outcome = "done"
            finally:
                log.write(f"\n# {outcome} after {time.monotonic() - started:.1f} s\n")
