# SPDX-License-Identifier: Apache-2.0
"""How many compilers run at once."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from flashinfer.jit.sm12x import executor
from flashinfer.jit.sm12x.executor import Job, run_jobs
from flashinfer.jit.sm12x.jobs import (
    DEFAULT_JOB_MEMORY,
    GIB,
    MEMORY_MARGIN,
    MEMORY_SHARE,
    JobLimit,
    available_memory,
    job_limit,
    usable_cores,
)
from flashinfer.jit.sm12x.toolchain import ToolchainError

MIB = 1 << 20


def test_max_jobs_wins() -> None:
    limit = job_limit({"MAX_JOBS": "7"}, available=1, cores=2)
    assert (limit.jobs, limit.memory, limit.reason) == (7, None, "MAX_JOBS=7")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_unusable_max_jobs_is_ignored_and_said(value: str, jit_log: pytest.LogCaptureFixture) -> None:
    assert job_limit({"MAX_JOBS": value}, available=8 * GIB, cores=2).jobs == 2
    assert f"ignoring MAX_JOBS={value!r}: it must be a positive whole number" in jit_log.text


def test_memory_and_cores_otherwise() -> None:
    limit = job_limit({}, available=10 * GIB, cores=20)
    assert (limit.jobs, limit.memory) == (20, int(10 * GIB * MEMORY_SHARE))
    assert limit.reason == "20 cores, 10.0 GiB of memory free"


def _machine(root: Path, available_kib: int) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc" / "self" / "cgroup").write_text("0::/slice/job\n")
    return root


def _group(root: Path, path: str, **files: object) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{content}\n")


def test_available_memory_of_the_machine(tmp_path: Path) -> None:
    assert available_memory(_machine(tmp_path, 4096)) == 4096 * 1024


def test_available_memory_within_a_control_group(tmp_path: Path) -> None:
    root = _machine(tmp_path, 8 * MIB)  # 8 GiB
    _group(root, "slice/job", memory_max="max", memory_current=5, memory_stat="inactive_file 0")
    _group(
        root, "slice", memory_max=3 * GIB, memory_current=2 * GIB, memory_stat=f"anon 1\ninactive_file {GIB}\nfile 3"
    )
    assert available_memory(root) == 2 * GIB


def test_available_memory_with_version_1_groups(tmp_path: Path) -> None:
    root = _machine(tmp_path, 8 * MIB)
    (root / "proc/self/cgroup").write_text("4:memory:/docker/x\n")
    folder = root / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(GIB))
    (folder / "memory.usage_in_bytes").write_text(str(GIB // 4))
    (folder / "memory.stat").write_text("total_inactive_file 0\n")
    assert available_memory(root) == GIB - GIB // 4


def test_overcommitted_group_leaves_nothing(tmp_path: Path) -> None:
    root = _machine(tmp_path, 8 * MIB)
    _group(root, "slice/job", memory_max=GIB, memory_current=2 * GIB, memory_stat="inactive_file 0")
    assert available_memory(root) == 0


def test_unknown_machine_allows_one_job(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == DEFAULT_JOB_MEMORY


def test_cpu_quota(tmp_path: Path) -> None:
    root = _machine(tmp_path, 1)
    _group(root, "slice", cpu_max="50000 100000")
    assert usable_cores(root) == 1
    _group(root, "slice", cpu_max="max 100000")
    assert usable_cores(root) == usable_cores(tmp_path / "nowhere")


MEET = """
import pathlib, os, sys, time
folder, wanted, end = pathlib.Path(sys.argv[1]), int(sys.argv[2]), time.monotonic() + 30
count = lambda: len(list(folder.glob("job-*")))
mine = folder / f"job-{os.getpid()}"
mine.touch()
while count() < wanted and not (folder / "met").exists() and time.monotonic() < end:
    time.sleep(0.02)
if count() >= wanted:
    (folder / "met").touch()
time.sleep(0.3)
print(count())
mine.unlink()
"""
"""Waits until so many are alive, however slow the machine is, then whether more come."""


def _most_at_once(
    folder: Path, count: int, wanted: int, limit: JobLimit, left: int = 1 << 50, **measured: object
) -> int:
    """The most of ``count`` jobs that were alive together, where ``wanted`` are expected."""
    command = (sys.executable, "-ISc", MEET, str(folder), str(wanted))
    jobs = [Job(f"job{i}", command, **measured) for i in range(count)]  # type: ignore[arg-type]
    results = run_jobs(jobs, limit, folder, lambda result: None, _machine(folder / "machine", left // 1024))
    assert [result.returncode for result in results] == [0] * count, results
    return max(int(result.output) for result in results)


@pytest.mark.parametrize("allowed", [1, 2, 4])
def test_cores_bound_the_jobs(tmp_path: Path, allowed: int) -> None:
    assert _most_at_once(tmp_path, 4, allowed, JobLimit(allowed, GIB, ""), peak_memory=MIB) == allowed


@pytest.mark.parametrize(("memory", "expected"), [(50, 1), (119, 1), (235, 2), (10_000, 4)])
def test_measured_need_bounds_the_jobs(tmp_path: Path, memory: int, expected: int) -> None:
    assert MEMORY_MARGIN == 1.15
    limit = JobLimit(4, memory * MIB, "")
    assert _most_at_once(tmp_path, 4, expected, limit, peak_memory=100 * MIB) == expected


def test_memory_that_others_took_meanwhile_bounds_the_jobs(tmp_path: Path) -> None:
    assert _most_at_once(tmp_path, 3, 1, JobLimit(3, GIB, ""), left=50 * MIB, peak_memory=100 * MIB) == 1


def test_unmeasured_jobs_are_taken_for_large(tmp_path: Path) -> None:
    limit = JobLimit(4, int(DEFAULT_JOB_MEMORY * MEMORY_MARGIN * 2.5), "")
    assert _most_at_once(tmp_path, 4, 2, limit) == 2


def test_max_jobs_ignores_memory(tmp_path: Path) -> None:
    limit = JobLimit(3, None, "MAX_JOBS=3")
    assert _most_at_once(tmp_path, 3, 3, limit, left=0, peak_memory=100 * GIB) == 3


def test_longest_first(tmp_path: Path) -> None:
    times = {"short": 1.0, "long": 9.0, "middle": 5.0}
    jobs = [Job(name, ("true",), MIB, seconds) for name, seconds in times.items()]
    order: list[str] = []
    run_jobs(jobs, JobLimit(1, GIB, ""), tmp_path, lambda result: order.append(result.job.name))
    assert order == ["long", "middle", "short"]


def test_first_failure_ends_the_run_and_what_still_runs(tmp_path: Path) -> None:
    marker = tmp_path / "survived"
    slow = f"import time; time.sleep(3); open({str(marker)!r}, 'w')"
    jobs = [Job("slow", (sys.executable, "-ISc", slow)), Job("bad", ("false",)), Job("never", ("true",))]
    started = time.monotonic()
    results = run_jobs(jobs, JobLimit(2, None, ""), tmp_path, lambda result: None)
    assert time.monotonic() - started < 2.5
    assert [(result.job.name, result.returncode) for result in results] == [("bad", 1)]
    time.sleep(0.2)
    assert threading.active_count() < 20
    assert not marker.exists()


def test_measures_cpu_and_memory_of_grandchildren(tmp_path: Path) -> None:
    burn = "import time; b = bytearray(90 << 20); b[::4096] = b'x' * len(b[::4096]); t = time.process_time()\n"
    burn += "while time.process_time() - t < 0.3: pass"
    jobs = [Job("tree", ("sh", "-c", f'"{sys.executable}" -ISc "$0"; exit $?', burn))]
    results = run_jobs(jobs, JobLimit(1, None, ""), tmp_path, lambda result: None)
    assert results[0].returncode == 0, results[0].output
    assert results[0].peak_memory >= 90 << 20
    assert results[0].cpu_seconds >= 0.3


def _killing(level: int, folder: Path) -> str:
    """A program that once kills its parent, or the parent of that."""
    return (
        "import os, pathlib, signal, time; pid = os.getppid()\n"
        f"for _ in range({level}): pid = int(pathlib.Path(f'/proc/{{pid}}/stat').read_text().rpartition(')')[2].split()[1])\n"
        f"marker = pathlib.Path({str(folder / 'killed')!r})\n"
        "if not marker.exists(): marker.touch(); os.kill(pid, signal.SIGKILL); time.sleep(60)\n"
    )


@pytest.mark.parametrize("level", [0, 1], ids=["what measures a job", "ninja"])
def test_what_runs_a_job_may_be_killed(tmp_path: Path, level: int) -> None:
    """No job is lost: those without a result are run again, by themselves."""
    jobs = [Job("killer", (sys.executable, "-ISc", _killing(level, tmp_path))), Job("other", ("sleep", "0.5"))]
    results = run_jobs(jobs, JobLimit(2, None, ""), tmp_path, lambda result: None)
    assert sorted((result.job.name, result.returncode) for result in results) == [("killer", 0), ("other", 0)]


def test_ninja_that_does_not_work_is_an_error_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "ninja"
    broken.write_text("#!/bin/sh\necho this ninja is broken; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(executor, "find_ninja", lambda: str(broken))
    results = run_jobs([Job("x", ("true",)), Job("y", ("true",))], JobLimit(2, None, ""), tmp_path, lambda result: None)
    assert [(result.returncode, result.output) for result in results] == [(3, "this ninja is broken\n")]


def test_ninja_is_found_where_it_is_not_on_path_and_missed_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert Path(executor.find_ninja()).is_file()
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    with pytest.raises(ToolchainError, match=r"ninja, .*, is not installed\. Install it: pip install ninja"):
        executor.find_ninja()


def test_daemon_that_a_compiler_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    """It holds the output open, as a compiler cache's server may."""
    started = time.monotonic()
    job = Job("x", ("sh", "-c", "echo said; sleep 60 &"))
    (result,) = run_jobs([job], JobLimit(1, None, ""), tmp_path, lambda result: None)
    assert (result.returncode, result.output) == (0, "said\n")
    assert time.monotonic() - started < 30


def test_commands_reach_the_program_as_they_are(tmp_path: Path) -> None:
    """Ninja's syntax, a shell's, lines, and more of it than a shell takes in one string."""
    words = ["$x $$ ${y}", "a  b\n c", "'\"`:|", "*", "", "x" * 100_000, "y" * 100_000]
    print_arguments = "import json, sys; print(json.dumps(sys.argv[1:]))"
    job = Job("odd $ name", (sys.executable, "-ISc", print_arguments, *words))
    folder = tmp_path / "a $b 'c"
    folder.mkdir()
    (result,) = run_jobs([job], JobLimit(1, None, ""), folder, lambda result: None)
    assert json.loads(result.output) == words
