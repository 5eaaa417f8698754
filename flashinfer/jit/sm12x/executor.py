# SPDX-License-Identifier: Apache-2.0
"""Runs compilers by ninja: several at once, within a limit of memory, each one measured.

What ninja makes of a file's times counts for nothing here: it is told of jobs that are to run, in a folder where
nothing is made yet.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import _launch
from ._launch import JOBS_FILE
from .diagnosis import was_killed
from .jobs import DEFAULT_JOB_MEMORY, MEMORY_MARGIN, JobLimit
from .toolchain import ToolchainError


@dataclass(frozen=True)
class Job:
    """One command to run.

    Attributes:
        name: What it makes; unique among the jobs of a run.
        command: Program and arguments.
        peak_memory: What it needed when it was last measured, or is assumed to need, bytes.
        wall_seconds: How long it took then; 0 when it never was measured.
    """

    name: str
    command: tuple[str, ...]
    peak_memory: int = DEFAULT_JOB_MEMORY
    wall_seconds: float = 0.0


@dataclass(frozen=True)
class JobResult:
    """What came of a job: exit status (negative: the signal), all it printed, and what it took."""

    job: Job
    returncode: int
    output: str = ""
    peak_memory: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


def run_jobs(
    jobs: Iterable[Job],
    limit: JobLimit,
    folder: Path,
    finished: Callable[[JobResult], None],
    machine: Path = Path("/"),
) -> list[JobResult]:
    """Run all jobs, the longest first, and stop at the first that fails.

    Unless ``MAX_JOBS`` decides, as many run together as ``limit.memory`` has room for the largest of them, and one starts
    only when what it needs is free or no other runs. A job that was killed is run once more by itself, since it was most
    likely killed for memory.

    Args:
        jobs: What to run; the order of the unmeasured ones is kept.
        limit: How many at once.
        folder: Where they run; ninja's files are made there.
        finished: Called in this thread for each job that ends well, and for the one that fails.
        machine: Where ``proc`` and ``sys`` are, which tell of free memory; for tests.

    Returns:
        The results, in the order in which jobs ended. The last one may have failed; all others ended well.

    Raises:
        ToolchainError: ninja is not installed.
    """
    results: list[JobResult] = []
    batches = [sorted(jobs, key=lambda job: -job.wall_seconds)]
    for batch in filter(None, batches):  # which grows meanwhile
        with _ninja(batch, limit, folder, machine) as ended:
            for result in ended:
                killed = was_killed(result.returncode, result.output)
                if killed and limit.jobs > 1 and batch is batches[0]:
                    batches.append([result.job])
                    continue
                results.append(result)
                finished(result)
                if result.returncode != 0:
                    return results
    return results


@contextmanager
def _ninja(jobs: Sequence[Job], limit: JobLimit, folder: Path, machine: Path) -> Iterator[Iterator[JobResult]]:
    """Start jobs; gives their results as they end. What still runs when the context is left is killed."""
    needs = [max(1, int(job.peak_memory * MEMORY_MARGIN)) for job in jobs]
    together = limit.jobs
    if limit.memory is not None:
        together = max(1, min(together, limit.memory // max(needs, default=1)))
    described = [
        {"command": job.command, "need": None if limit.memory is None else need, "machine": str(machine)}
        for job, need in zip(jobs, needs, strict=True)
    ]
    ends_with_us, held_by_us = os.pipe()
    with open(ends_with_us), open(held_by_us, "w") as held:
        (folder / JOBS_FILE).write_text(json.dumps(described))
        # Commands stay out of the build file, which has a syntax of its own and goes through a shell.
        launch = shlex.join([sys.executable, "-I", "-S", _launch.__file__, str(ends_with_us)]).replace("$", "$$")
        builds = "".join(f"build {number}: job\n" for number in range(len(jobs)))
        (folder / "build.ninja").write_text(f"rule job\n  command = exec {launch} $out\n{builds}")
        process = subprocess.Popen(
            # -k 0: what one failure means for the others is decided by the reader of the results.
            [find_ninja(), "-k", "0", "-j", str(together)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
            pass_fds=[ends_with_us],
            text=True,
            errors="replace",
        )
        try:
            yield _results(process, jobs)
        finally:
            held.close()
            process.terminate()
            process.communicate()


def _results(process: subprocess.Popen[str], jobs: Sequence[Job]) -> Iterator[JobResult]:
    missing = dict(enumerate(jobs))
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            measured = json.loads(line)
        except ValueError:  # what ninja says itself
            said += line
        else:
            yield JobResult(missing.pop(measured.pop("job")), **measured)
    # Jobs without a result: ninja could not start them or was ended, or what runs a job was killed.
    status = process.wait() or 1
    for job in missing.values():
        yield JobResult(job, -signal.SIGKILL if "FAILED: " in said and status > 0 else status, said)


def find_ninja() -> str:
    """The program: of this Python environment, else on ``PATH``.

    Raises:
        ToolchainError: it is not installed.
    """
    found = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if found is None:
        raise ToolchainError("ninja, which runs the compilers, is not installed. Install it: pip install ninja")
    return found
