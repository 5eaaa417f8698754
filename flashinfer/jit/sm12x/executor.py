# SPDX-License-Identifier: Apache-2.0
"""Runs compilers: several at once, within a limit of memory, each one measured."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .diagnosis import was_killed
from .jobs import DEFAULT_JOB_MEMORY, MEMORY_MARGIN, JobLimit, available_memory

_LAUNCHER = Path(__file__).with_name("_launch.py")


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
    output: str
    peak_memory: int
    cpu_seconds: float
    wall_seconds: float


class _Running:
    """A started job, and the thread that waits for it."""

    def __init__(self, job: Job, folder: Path, done: queue.Queue[_Running]) -> None:
        self.job = job
        self.started = time.monotonic()
        # In memory: on a disk that is full, what the compiler says of it would be lost.
        self._report = os.fdopen(os.memfd_create("report"), "r+b")
        self._output = os.fdopen(os.memfd_create("output"), "r+b")
        report = self._report.fileno()
        launch = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), str(report)]
        self.process = subprocess.Popen(
            [*launch, *job.command],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
            pass_fds=[report],
        )
        threading.Thread(target=self._wait, args=(done,), daemon=True).start()

    def _wait(self, done: queue.Queue[_Running]) -> None:
        self.process.wait()
        done.put(self)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def result(self) -> JobResult:
        wall = time.monotonic() - self.started
        with self._output, self._report:
            for file in (self._output, self._report):
                file.seek(0)
            output = self._output.read().decode(errors="replace")
            measured = json.loads(self._report.read() or b"{}")
        return JobResult(
            self.job,
            int(measured.get("returncode", self.process.returncode or 127)),
            output,
            int(measured.get("peak_memory", 0)),
            float(measured.get("cpu_seconds", 0.0)),
            wall,
        )


def run_jobs(
    jobs: Iterable[Job],
    limit: JobLimit,
    folder: Path,
    finished: Callable[[JobResult], None],
    memory_left: Callable[[], int] = available_memory,
) -> list[JobResult]:
    """Run all jobs, the longest first, and stop at the first that fails.

    A job starts when fewer than ``limit.jobs`` run and, unless ``MAX_JOBS`` decides, the needs of those that run and
    its own stay within ``limit.memory`` and what is free now. One job may always run. A job that was killed while
    others ran is run once more by itself, since it was most likely killed for memory.

    Args:
        jobs: What to run; the order of the unmeasured ones is kept.
        limit: How many at once.
        folder: Where they run, and where their output goes meanwhile.
        finished: Called in this thread for each job that ends well, and for the one that fails.
        memory_left: Free memory, bytes.

    Returns:
        The results, in the order in which jobs ended. The last one may have failed; all others ended well.
    """
    waiting = sorted(jobs, key=lambda job: -job.wall_seconds)
    alone: list[Job] = []
    again: set[str] = set()
    running: list[_Running] = []
    results: list[JobResult] = []
    done: queue.Queue[_Running] = queue.Queue()
    try:
        while waiting or running or alone:
            if not waiting and not running:
                waiting.append(alone.pop(0))
            _start_what_fits(waiting, running, limit, folder, done, memory_left)
            ended = done.get()
            running.remove(ended)
            result = ended.result()
            killed = was_killed(result.returncode, result.output)
            if killed and limit.jobs > 1 and ended.job.name not in again:
                again.add(ended.job.name)
                alone.append(ended.job)
                continue
            results.append(result)
            finished(result)
            if result.returncode != 0:
                break
    finally:
        for each in running:
            each.kill()
        for each in running:
            each.process.wait()
    return results


def _start_what_fits(
    waiting: list[Job],
    running: list[_Running],
    limit: JobLimit,
    folder: Path,
    done: queue.Queue[_Running],
    memory_left: Callable[[], int],
) -> None:
    def need(job: Job) -> int:
        return int(job.peak_memory * MEMORY_MARGIN)

    while waiting and len(running) < limit.jobs:
        if running and limit.memory is not None:
            planned = sum(need(each.job) for each in running) + need(waiting[0])
            if planned > limit.memory or need(waiting[0]) > memory_left():
                return
        running.append(_Running(waiting.pop(0), folder, done))
