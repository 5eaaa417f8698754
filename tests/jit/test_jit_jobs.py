# SPDX-License-Identifier: Apache-2.0
"""The number of compilers that run at once, and ninja."""

from __future__ import annotations

from pathlib import Path

import pytest
from jit_fakes import Project

from flashinfer_sm12x.build import engine, jobs, toolchain
from flashinfer_sm12x.build.diagnosis import JitBuildError
from flashinfer_sm12x.build.jobs import DEFAULT_JOB_MEMORY, GIB, available_memory, parallel_jobs, usable_cores
from flashinfer_sm12x.build.toolchain import ToolchainError

MIB = 1 << 20


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 cores, 10 GiB free."""
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(jobs, "available_memory", lambda: 10 * GIB)
    monkeypatch.setattr(jobs, "usable_cores", lambda: 20)


@pytest.mark.parametrize(("need", "expected"), [(GIB // 4, 20), (GIB, 9), (6 * GIB, 1), (100 * GIB, 1)])
def test_memory_and_cores_decide(machine: None, need: int, expected: int) -> None:
    assert parallel_jobs(need) == (expected, "20 cores, 10.0 GiB of memory free")


@pytest.mark.parametrize("need", [GIB // 4, GIB, 6 * GIB])
@pytest.mark.parametrize("number", [1, 2, 3, 19, 20, 21])
def test_one_more_compiler_runs_from_the_byte_on_that_it_needs(
    number: int, need: int, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tenths of the free memory count, to two bytes; there are 20 cores, and one runs in any case."""
    edge = -(-number * need * 10 // 9)
    for free, expected in ((edge + 2, min(number, 20)), (edge - 2, max(1, number - 1))):
        monkeypatch.setattr(jobs, "available_memory", lambda free=free: free)
        assert parallel_jobs(need)[0] == expected


def test_max_jobs_wins(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "70")
    assert parallel_jobs(100 * GIB) == (70, "MAX_JOBS=70")
    assert parallel_jobs(100 * GIB, 3) == (3, "3 asked for")


def test_one_job_may_be_asked_for(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "1")
    assert parallel_jobs(1) == (1, "MAX_JOBS=1")
    assert parallel_jobs(1, 1) == (1, "1 asked for")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_unusable_max_jobs_is_ignored_and_reported(
    value: str, machine: None, monkeypatch: pytest.MonkeyPatch, jit_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MAX_JOBS", value)
    assert parallel_jobs(GIB)[0] == 9
    assert f"MAX_JOBS is {value!r}; it may be a positive whole number or unset; it is ignored" in jit_log.text


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


def test_available_memory_of_the_machine_and_of_its_control_groups(tmp_path: Path) -> None:
    root = _machine(tmp_path, 8 * MIB)  # 8 GiB
    assert available_memory(root) == 8 * GIB
    _group(root, "slice/job", memory_max="max", memory_current=5, memory_stat="inactive_file 0")
    _group(
        root, "slice", memory_max=3 * GIB, memory_current=2 * GIB, memory_stat=f"anon 1\ninactive_file {GIB}\nfile 3"
    )
    assert available_memory(root) == 2 * GIB
    _group(root, "slice/job", memory_max=GIB, memory_current=2 * GIB)
    assert available_memory(root) == 0


def test_available_memory_with_version_1_groups(tmp_path: Path) -> None:
    root = _machine(tmp_path, 8 * MIB)
    (root / "proc/self/cgroup").write_text("4:memory:/docker/x\n")
    folder = root / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(GIB))
    (folder / "memory.usage_in_bytes").write_text(str(GIB // 4))
    assert available_memory(root) == GIB - GIB // 4


def test_unknown_machine_allows_one_job(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == DEFAULT_JOB_MEMORY


@pytest.mark.parametrize(
    ("used", "cached", "left"),
    [(GIB, 0, 0), (GIB - 1, 0, 1), (GIB + 1, 0, 0), (GIB + 1, 2, 1), (5, 6, GIB), (5, 5, GIB), (5, 4, GIB - 1)],
)
def test_memory_of_a_group_around_its_limit(tmp_path: Path, used: int, cached: int, left: int) -> None:
    """What can be reclaimed is free; there may be more of it than is used, and more used than is allowed."""
    root = _machine(tmp_path, 8 * MIB)
    _group(root, "slice", memory_max=GIB, memory_current=used, memory_stat=f"inactive_file {cached}")
    assert available_memory(root) == left


@pytest.mark.parametrize(
    ("quota", "cores"),
    [(1, 1), (99_999, 1), (100_000, 1), (100_001, 2), (200_000, 2), (799_999, 8), (800_000, 8), (800_001, 8)],
)
def test_cores_of_a_quota_at_its_edges(quota: int, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda _: set(range(8)))
    root = _machine(tmp_path, 1)
    _group(root, "slice", cpu_max=f"{quota} 100000")
    assert usable_cores(root) == cores


def test_cpu_quota(tmp_path: Path) -> None:
    root = _machine(tmp_path, 1)
    _group(root, "slice", cpu_max="50000 100000")
    assert usable_cores(root) == 1
    _group(root, "slice", cpu_max="max 100000")
    assert usable_cores(root) == usable_cores(tmp_path / "nowhere")


@pytest.mark.parametrize("together", [1, 3])
def test_so_many_compilers_run_at_once(project: Project, together: int) -> None:
    meeting = (  # each waits for the others that may run beside it, and then whether more come
        "open(home + '/alive-' + os.path.basename(source), 'w').close()\n"
        "alive = lambda: len([name for name in os.listdir(home) if name.startswith('alive-')])\n"
        f"for _ in range(500):\n    time.sleep(0.01 * (alive() < {together}))\n"
        "time.sleep(0.3)\nopen(home + '/most', 'a').write(str(alive()))\n"
    )
    project.change_compiler("text = open(source).read()", meeting)
    with open(project.compiler, "a") as compiler:
        compiler.write("os.unlink(home + '/alive-' + os.path.basename(source))\n")
    project.build(max_jobs=together)
    assert max((project.compiler.parent / "most").read_text()) == str(together)


def test_ninja_that_does_not_work_is_an_error_with_what_it_printed(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "ninja"
    broken.write_text("#!/bin/sh\necho this ninja is broken; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(engine, "find_ninja", lambda: str(broken))
    with pytest.raises(JitBuildError, match="building demo failed: ninja: this ninja is broken"):
        project.build()


def test_ninja_is_found_where_it_is_not_on_path_and_missed_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert Path(toolchain.find_ninja()).is_file()
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    with pytest.raises(ToolchainError, match=r"ninja, .*, is not installed\. Install it: pip install ninja"):
        toolchain.find_ninja()


def test_flags_and_paths_reach_the_compiler_as_they_are(project: Project) -> None:
    """Ninja's syntax, and a shell's."""
    odd = project.root / "a $b 'c: #d"
    moved = Project(odd, flags=("-DA=$x $$ ${y}", "-DB=a  b", "-DC='\"`|&;*"))
    project.root.joinpath("src").rename(project.root / "moved")
    odd.mkdir()
    project.root.joinpath("moved").rename(odd / "src")
    project.root.joinpath("toolkit").rename(odd / "toolkit")
    moved.build()
    assert moved.fresh
    assert " ".join(moved.flags) in moved.plan().library.read_text()
    moved.write("two.h", "int other;\n")
    assert moved.build().compiled == ["b.o"]
