# SPDX-License-Identifier: Apache-2.0
"""The build engine: from a plan to a shared library in the cache.

What lies in a module's folder::

    fused_moe_120.so     the library; put there by a rename when it is complete
    manifest.json        what it and the objects were made from, see freshness.Manifest
    machine_code.json    what its machine code holds, see report
    obj/                 the objects, so that an edit rebuilds only what it touches
    build.log            commands and full compiler output of the last build
    tmp-*/               files of a build under way; of a killed one until the next build

Everything is made in a ``tmp-*`` folder and renamed when it is complete. The manifest records each object when it is in
place, so a build that is killed loses only what was being compiled; and since the manifest holds the hashes of all
files, whatever else a crash leaves behind is not taken for what it is not.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from .diagnosis import JitBuildError, explain_os_error, first_error_line, hint_for
from .executor import Job, JobResult, run_jobs
from .freshness import (
    ABSENT,
    ContentHashes,
    Manifest,
    ObjectRecord,
    Roots,
    hash_file,
    hash_strings,
    parse_depfile,
    search_of,
)
from .jobs import DEFAULT_JOB_MEMORY, GIB, JobLimit, job_limit
from .progress import Progress
from .toolchain import ToolchainError, compiler_banner
from .trust import make_folder, own_folder

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


@dataclass(frozen=True)
class CompileStep:
    """One source and the command that compiles it.

    Attributes:
        name: File name of the object; unique within a module.
        source: The source file.
        compiler: The program, after any launcher such as ``ccache``.
        launcher: Program and arguments before the compiler.
        flags: All flags but for input and outputs.
        depfile_flags: What makes the compiler write the files it read, the file's name being added after them.
    """

    name: str
    source: Path
    compiler: str
    flags: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    depfile_flags: tuple[str, ...] = ("-MD", "-MF")

    def command(self, output: Path, depfile: Path, source: Path | None = None) -> tuple[str, ...]:
        """Program and arguments that compile into ``output`` and write ``depfile``.

        Args:
            output, depfile: What to write.
            source: The source file as the working folder has it; its absolute path when omitted.
        """
        outputs = (*self.depfile_flags, str(depfile), "-c", str(source or self.source), "-o", str(output))
        return (*self.launcher, self.compiler, *self.flags, *outputs)

    @cached_property
    def include_dirs(self) -> list[tuple[str, str]]:
        """``(flag, folder)`` in the order in which headers are looked for: ``-I``, then ``-isystem``."""
        found = [(flag, folder) for flag, folder in self._split_flags() if folder]
        return sorted(found, key=lambda item: ("-I", "-isystem").index(item[0]))

    @cached_property
    def other_flags(self) -> list[str]:
        """The flags that say nothing of where headers are."""
        return [flag for flag, folder in self._split_flags() if not folder]

    def _split_flags(self) -> Iterator[tuple[str, str]]:
        flags = iter(self.flags)
        for flag in flags:
            if flag in ("-I", "-isystem"):
                yield flag, next(flags, "")
            elif flag.startswith("-I"):
                yield "-I", flag[2:]
            else:
                yield flag, ""


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
    roots: Roots = field(default_factory=lambda: Roots({}))
    watched: tuple[Path, ...] = ()
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
    tools = []
    folder = Path(found).resolve().parent
    for tool in (
        folder / "ptxas",
        folder / "cudafe++",
        folder / "fatbinary",
        folder.parent / "nvvm/bin/cicc",
        Path(found).resolve(),
    ):
        try:
            tools.append(f"{tool.name}:{tool.stat().st_size}")
        except OSError:
            continue
    return "\n".join([banner, *tools])


def _host_compiler(step: CompileStep) -> str:
    """The compiler that does the host's part for nvcc."""
    flags = list(step.flags)
    if "-ccbin" in flags[:-1]:
        return flags[flags.index("-ccbin") + 1]
    return os.environ.get("NVCC_CCBIN") or "gcc"


def _command_hash(step: CompileStep) -> str:
    # Include folders are left out: they count by what was read from them. Line tables hold their paths.
    flags = step.flags if {"-g", "-lineinfo"} & set(step.flags) else step.other_flags
    environment = [f"{name}={os.environ.get(name, '')}" for name in COMPILER_ENVIRONMENT]
    identities = [compiler_identity(step.compiler), compiler_identity(_host_compiler(step))]
    return hash_strings([*step.launcher, *flags, *identities, *environment])


def _search_hash(files: Iterable[str], step: CompileStep, roots: Roots) -> str:
    return hash_strings(search_of(map(roots.path, files), step.include_dirs, roots))


def _link_hash(plan: ModulePlan, manifest: Manifest) -> str:
    objects = [manifest.objects[step.name].content for step in plan.steps]
    identity = compiler_identity(plan.linker[0])
    return hash_strings([*plan.linker[1:], "objects", *objects, "flags", *plan.link_flags, identity])


def _stale_reason(step: CompileStep, record: ObjectRecord | None, hashes: ContentHashes, roots: Roots) -> str | None:
    """Why the object must be compiled; None when it need not."""
    if record is None:
        return "not built yet"
    if record.command != _command_hash(step):
        return "flags or compiler changed"
    if next(iter(record.files), None) != roots.name(str(step.source)):
        return "another source"
    for name, digest in record.files.items():
        if hashes.of(roots.path(name)) != digest or digest == ABSENT:
            return f"{roots.path(name)} changed"
    if record.search != _search_hash(record.files, step, roots):
        return "a header of the same name appeared or went in another include folder"
    return None


def is_fresh(plan: ModulePlan) -> bool:
    """Whether the library in the cache is what a build would make now. Takes no lock and writes nothing."""
    return not why_stale(plan)


def why_stale(plan: ModulePlan) -> list[str]:
    """What a build would have to do, as lines such as ``a.o: not built yet``; none when the library is fresh."""
    manifest = Manifest.read(plan.manifest, plan.name)
    steps = _stale_steps(plan, manifest, ContentHashes())
    reasons = [f"{name}: {reason}" for name, reason in steps.items()]
    if not reasons and not _library_is_fresh(plan, manifest):
        reasons = [f"{plan.library.name}: not linked, damaged, or to be linked otherwise"]
    return reasons


def _stale_steps(plan: ModulePlan, manifest: Manifest, hashes: ContentHashes) -> dict[str, str]:
    reasons = {}
    for step in plan.steps:
        reason = _stale_reason(step, manifest.objects.get(step.name), hashes, plan.roots)
        if reason is not None:
            reasons[step.name] = reason
    return reasons


def _library_is_fresh(plan: ModulePlan, manifest: Manifest) -> bool:
    if not manifest.library or any(step.name not in manifest.objects for step in plan.steps):
        return False
    return manifest.link == _link_hash(plan, manifest) and hash_file(plan.library) == manifest.library


@contextmanager
def module_lock(plan: ModulePlan) -> Iterator[None]:
    """Hold the lock under which a module is built.

    The kernel frees it when its holder ends, however it ends. Where the file system knows no such locks, a file that
    names its holder takes their place; it counts as free when that process is gone.

    Raises:
        JitBuildError: the lock's folder cannot be written.
    """
    try:
        make_folder(plan.lock_path.parent)
        lock = _acquire(plan)
    except OSError as error:
        raise explain_os_error(plan.name, plan.lock_path.parent, error) from error
    try:
        yield
    finally:
        lock.release()


def _acquire(plan: ModulePlan) -> BaseFileLock:
    path = str(plan.lock_path)
    try:
        return _acquire_saying_so(FileLock(path, thread_local=False), plan)
    except NotImplementedError:  # filelock before 4: no flock here
        pass
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
    return _acquire_saying_so(SoftFileLock(path + ".soft", thread_local=False), plan)


def _acquire_saying_so(lock: BaseFileLock, plan: ModulePlan) -> BaseFileLock:
    try:
        lock.acquire(timeout=1.0)
    except Timeout:
        _logger.info("%s: another process is building it (lock %s); waiting", plan.name, lock.lock_file)
        lock.acquire()
    return lock


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
        KeyboardInterrupt: with a line that says what stays.
    """
    started = time.monotonic()
    try:
        report = _build(plan, verbose, max_jobs)
    except OSError as error:
        raise explain_os_error(plan.name, plan.folder, error) from error
    report.wall_seconds = time.monotonic() - started
    return report


def _build(plan: ModulePlan, verbose: bool, max_jobs: int | None) -> BuildReport:
    manifest = Manifest.read(plan.manifest, plan.name)
    hashes = ContentHashes()
    reasons = _stale_steps(plan, manifest, hashes)
    if not reasons and _library_is_fresh(plan, manifest):
        return BuildReport()
    for step in plan.steps:
        # Only a build needs the object files, so only here do they have to be there and be whole.
        if step.name not in reasons and hash_file(plan.object_path(step)) != manifest.objects[step.name].content:
            reasons[step.name] = "its object file is missing or damaged"

    _clear_leftovers(plan, manifest)
    limit = job_limit(max_jobs=max_jobs)
    summary = f"{len(reasons)} of {len(plan.steps)} sources to compile ({limit.reason})"
    _logger.info("building %s: %s", plan.name, summary)
    header = _log_header(plan, summary, reasons)
    with (
        tempfile.TemporaryDirectory(dir=plan.folder, prefix="tmp-", ignore_cleanup_errors=True) as scratch,
        Progress(plan.name, len(reasons) + 1, plan.log, header, _logger, verbose) as progress,
    ):
        work = _Work(plan, manifest, hashes, Path(scratch), progress)
        try:
            work.compile([step for step in plan.steps if step.name in reasons], limit)
            work.link()
        except KeyboardInterrupt:
            done = len(plan.steps) - len(reasons) + len(work.report.compiled)
            raise KeyboardInterrupt(
                f"building {plan.name} was interrupted: {done} of {len(plan.steps)} objects are built and stay, and a "
                "new run resumes from there"
            ) from None
    report = work.report
    _logger.info(
        "%s is built: %.1f s of CPU, at most %.2f GiB a job", plan.name, report.cpu_seconds, report.peak_memory / GIB
    )
    return report


def _clear_leftovers(plan: ModulePlan, manifest: Manifest) -> None:
    """Make the folders; remove what killed builds left, and objects that the module no longer has."""
    objects = plan.folder / "obj"
    own_folder(plan.folder)
    own_folder(objects)
    for leftover in plan.folder.glob("tmp-*"):  # nobody uses them: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    names = {step.name for step in plan.steps}
    manifest.objects = {name: record for name, record in manifest.objects.items() if name in names}
    for path in objects.iterdir():
        if path.name not in names:
            path.unlink(missing_ok=True)


def _log_header(plan: ModulePlan, summary: str, reasons: dict[str, str]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    lines = [f"{plan.name}, {when}, {platform.platform()}", *plan.description.splitlines(), summary]
    lines += [f"{name}: {reason}" for name, reason in reasons.items()]
    return "\n".join(f"# {line}" for line in lines)


class _Work:
    """One build under way: its files, and what it has done so far."""

    def __init__(
        self, plan: ModulePlan, manifest: Manifest, hashes: ContentHashes, scratch: Path, progress: Progress
    ) -> None:
        self.report = BuildReport()
        self._plan = plan
        self._manifest = manifest
        self._hashes = hashes
        self._scratch = scratch
        self._progress = progress
        self._watched = tuple(f"{folder}/" for folder in plan.watched)
        # What may be edited while compilers run is hashed before they start, so that an object made from an older or
        # newer text is not recorded as made from the present one.
        for folder in plan.watched:
            for path in folder.rglob("*"):
                if path.is_file():
                    hashes.of(path)

    def compile(self, steps: Sequence[CompileStep], limit: JobLimit) -> None:
        """Compile, and put each object in its place as soon as it is made."""
        by_name = {step.name: step for step in steps}
        for step in steps:
            self._hashes.of(step.source)
        jobs = [self._job(step) for step in steps]

        def finished(result: JobResult) -> None:
            self._count(result)
            if result.returncode == 0:
                self._publish(by_name[result.job.name], result)

        self._raise_failure(run_jobs(jobs, limit, self._scratch, finished))

    def link(self) -> None:
        """Link all objects, and put the library in its place."""
        plan, manifest = self._plan, self._manifest
        output = self._scratch / plan.library.name
        objects = [str(plan.object_path(step)) for step in plan.steps]
        job = Job(plan.library.name, (*plan.linker, *objects, *plan.link_flags, "-o", str(output)))
        one = job_limit(max_jobs=1)
        self._raise_failure(run_jobs([job], one, self._scratch, self._count))
        digest = self._made(output)
        os.replace(output, plan.library)
        manifest.library, manifest.link = digest, _link_hash(plan, manifest)
        manifest.write(plan.manifest)
        self.report.linked = True

    def _job(self, step: CompileStep) -> Job:
        before = self._manifest.objects.get(step.name)
        # Relative to the scratch folder, where the compiler runs: nvcc has a shell expand a $ in a path.
        source = step.source
        if self._plan.roots.name(str(source)).startswith("generated:"):
            source = Path(os.path.relpath(source.resolve(), self._scratch.resolve()))
        command = step.command(Path(step.name), Path(self._depfile(step).name), source)
        if before is None:
            return Job(step.name, command, self._plan.job_memory)
        return Job(step.name, command, before.peak_memory, before.wall_seconds)

    def _depfile(self, step: CompileStep) -> Path:
        return self._scratch / f"{step.name}.d"

    def _count(self, result: JobResult) -> None:
        self._progress.step(result)
        self.report.cpu_seconds += result.cpu_seconds
        self.report.peak_memory = max(self.report.peak_memory, result.peak_memory)

    def _publish(self, step: CompileStep, result: JobResult) -> None:
        made = self._scratch / step.name
        content = self._made(made)
        files = self._files_read(step)
        os.replace(made, self._plan.object_path(step))
        self._manifest.objects[step.name] = ObjectRecord(
            command=_command_hash(step),
            files=files,
            search=_search_hash(files, step, self._plan.roots),
            content=content,
            peak_memory=result.peak_memory,
            wall_seconds=round(result.wall_seconds, 3),
        )
        self._manifest.write(self._plan.manifest)
        self.report.compiled.append(step.name)

    def _files_read(self, step: CompileStep) -> dict[str, str]:
        """Every file that the compiler read, the source first, by its name in the plan's roots, with its hash."""
        try:
            paths = parse_depfile(self._depfile(step).read_text())
        except FileNotFoundError:
            raise JitBuildError(
                self._plan.name, f"{step.compiler} wrote no dependency file for {step.source}", self._plan.log
            ) from None
        files = {}
        for path in [str(step.source), *paths]:
            absolute = os.path.join(self._scratch, path)
            if ".." in Path(path).parts:
                absolute = os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(path))
            digest = self._hashes.of(absolute)
            edited = absolute == str(step.source) or absolute.startswith(self._watched)
            if edited and hash_file(absolute) != digest:
                _logger.warning("%s was edited while %s was built; build again", absolute, self._plan.name)
                digest = ABSENT
            files[self._plan.roots.name(absolute)] = digest
        return files

    def _made(self, path: Path) -> str:
        digest = hash_file(path)
        if digest == ABSENT or path.stat().st_size == 0:
            raise JitBuildError(
                self._plan.name, f"the compiler reported success but did not write {path.name}", self._plan.log
            )
        return digest

    def _raise_failure(self, results: Sequence[JobResult]) -> None:
        failed = next((result for result in results if result.returncode != 0), None)
        if failed is None:
            return
        line = first_error_line(failed.output) or f"exit status {failed.returncode}"
        hint = hint_for(failed.returncode, failed.output)
        raise JitBuildError(self._plan.name, f"{failed.job.name}: {line}", self._plan.log, hint)
