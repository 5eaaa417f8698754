# SPDX-License-Identifier: Apache-2.0
"""The build engine, with a compiler that takes no time: what is rebuilt, what survives, what errors say."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import Project

from flashinfer.jit.sm12x import build as engine
from flashinfer.jit.sm12x.diagnosis import JitBuildError
from flashinfer.jit.sm12x.executor import Job, JobResult
from flashinfer.jit.sm12x.freshness import hash_file

pytestmark = pytest.mark.privileges

ALL = ["a.cu", "b.cu", "c.cu"]


def test_builds_once_then_nothing(project: Project) -> None:
    report = project.build()
    assert sorted(report.compiled) == ["a.o", "b.o", "c.o"]
    assert report.linked
    assert project.calls() == ALL
    assert "int two;" in project.plan().library.read_text()
    assert engine.is_fresh(project.plan())
    again = project.build()
    assert (again.compiled, again.linked) == ([], False)
    assert project.calls() == []


def test_file_times_do_not_count(project: Project) -> None:
    project.build()
    project.calls()
    future = time.time() + 1e6
    for path in [*(project.root / "src").rglob("*"), project.compiler, *project.plan().folder.rglob("*")]:
        os.utime(path, (future, future))
    assert engine.is_fresh(project.plan())
    assert project.build().compiled == []
    assert project.calls() == []


@pytest.mark.parametrize(
    ("edited", "rebuilt"),
    [("one.h", ["a.cu", "b.cu"]), ("two.h", ["b.cu"]), ("c.cu", ["c.cu"])],
)
def test_edit_rebuilds_exactly_what_depends_on_it(project: Project, edited: str, rebuilt: list[str]) -> None:
    project.build()
    project.calls()
    path = project.root / "src" / edited
    before = path.stat()
    path.write_text(path.read_text() + "int more;\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as old as ever
    assert not engine.is_fresh(project.plan())
    project.build()
    assert project.calls() == rebuilt
    assert "int more;" in project.plan().library.read_text()


def test_change_and_back_is_built_again_both_times(project: Project) -> None:
    project.build()
    header = project.root / "src" / "two.h"
    first = header.read_text()
    library = hash_file(project.plan().library)
    header.write_text("int other;\n")
    project.build()
    assert hash_file(project.plan().library) != library
    header.write_text(first)
    project.build()
    assert hash_file(project.plan().library) == library


def test_flag_compiler_and_environment_rebuild_all(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.build()
    project.calls()
    project.with_flags("-DX=2").build()
    assert project.calls() == ALL
    (project.compiler.parent / "banner").write_text("Fake compiler, release 13.1, V13.1.0")
    project.with_flags("-DX=2").build()
    assert project.calls() == ALL
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    project.with_flags("-DX=2").build()
    assert project.calls() == ALL


def test_replaced_tool_beside_the_compiler_rebuilds(project: Project) -> None:
    project.build()
    project.calls()
    (project.compiler.parent / "ptxas").write_text("another assembler")
    project.build()
    assert project.calls() == ALL


def test_header_that_appears_in_an_earlier_folder_rebuilds(project: Project) -> None:
    project.build()
    project.calls()
    project.write("first/two.h", "int shadow;\n")
    assert not engine.is_fresh(project.plan())
    project.build()
    assert project.calls() == ["b.cu"]
    assert "int shadow;" in project.plan().library.read_text()
    project.build()
    assert project.calls() == []


def test_removed_source_leaves_the_library(project: Project) -> None:
    project.build()
    project.calls()
    project.names = ["a", "b"]
    assert not engine.is_fresh(project.plan())
    report = project.build()
    assert (project.calls(), report.linked) == ([], True)
    assert "int c;" not in project.plan().library.read_text()
    assert not (project.plan().folder / "obj" / "c.o").exists()


def test_damaged_library_is_linked_again_and_damaged_object_compiled_again(project: Project) -> None:
    project.build()
    project.calls()
    plan = project.plan()
    good = plan.library.read_bytes()
    plan.library.write_bytes(good[: len(good) // 2])
    (plan.folder / "obj" / "b.o").write_bytes(b"")
    assert not engine.is_fresh(plan)
    project.build()
    assert project.calls() == ["b.cu"]
    assert plan.library.read_bytes() == good


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 0}', '{"format": 2, "module": "demo", "files": [[1]]}'])
def test_damaged_manifest_means_a_new_build(project: Project, damage: str) -> None:
    project.build()
    project.calls()
    project.plan().manifest.write_text(damage)
    assert not engine.is_fresh(project.plan())
    project.build()
    assert project.calls() == ALL


def test_manifest_of_wrong_types_counts_as_absent(project: Project) -> None:
    """Each value of a good manifest in turn is replaced by values of other types: stale or fresh, never an error."""
    project.build()
    plan = project.plan()
    good = json.loads(plan.manifest.read_text())
    record = good["objects"]["a.o"]
    others = (None, True, 5, -1, 1.5, "text", [], [None], [[]], {}, {"a": None}, float("nan"), float("inf"))
    places = [(good, key) for key in good] + [(good["objects"], "a.o")] + [(record, key) for key in record]
    for container, key in places:
        kept = container[key]
        for other in others:
            container[key] = other
            plan.manifest.write_text(json.dumps(good))
            fresh = engine.is_fresh(plan)
            if fresh:  # a number is as good as another for what was only measured
                assert key in ("peak_memory", "wall_seconds"), (key, other)
        del container[key]
        plan.manifest.write_text(json.dumps(good))
        assert not engine.is_fresh(plan), key
        container[key] = kept
    plan.manifest.write_text(json.dumps({**good, "objects": {"a.o": []}, "link": 3}))
    assert sorted(project.build().compiled) == ["a.o", "b.o", "c.o"]


def test_any_bit_of_the_manifest_counts(project: Project) -> None:
    """Also in what was only measured: a flipped digit must not have the next build wait for memory that nobody has."""
    project.build()
    plan = project.plan()
    good = plan.manifest.read_bytes()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    for place in random.Random(seed).sample(range(len(good)), 200):
        bad = bytearray(good)
        bad[place] ^= 1 << random.Random(seed + place).randrange(8)
        same = False
        with suppress(ValueError):
            same = json.loads(bad) == json.loads(good)
        plan.manifest.write_bytes(bad)
        assert engine.is_fresh(plan) == same, f"byte {place}"  # a blank may become another one


def test_manifest_records_what_compilers_took(project: Project) -> None:
    project.write("c.cu", "// fake: allocate 120\n// fake: sleep 0.2\n")
    project.build()
    record = json.loads(project.plan().manifest.read_text())["objects"]["c.o"]
    assert 120 << 20 <= record["peak_memory"] < 200 << 20
    assert 0.2 <= record["wall_seconds"] < 5


def test_memory_of_this_process_does_not_count(project: Project) -> None:
    ballast = bytearray(300 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    project.build()
    records = json.loads(project.plan().manifest.read_text())["objects"].values()
    assert max(record["peak_memory"] for record in records) < 100 << 20
    assert len(ballast) == 300 << 20


def test_source_edited_while_it_is_compiled_is_compiled_again(project: Project) -> None:
    source = project.write("c.cu", "// fake: sleep 0.8\nint before;\n")
    child = _build_in_process(project)
    _wait_for(lambda: "c.cu" in _calls_so_far(project))
    source.write_text("int after;\n")
    assert child.wait(timeout=30) == 0
    assert not engine.is_fresh(project.plan())
    project.build()
    assert "int after;" in project.plan().library.read_text()


def _build_in_process(project: Project) -> subprocess.Popen[bytes]:
    # SIGINT as in a shell's foreground: under nohup and in background jobs the tests ignore it, and so would the child.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from jit_fakes import Project;"
        "report = Project(Path(sys.argv[2])).build(); print(len(report.compiled))"
    )
    here = str(Path(__file__).parent)
    return subprocess.Popen([sys.executable, "-c", code, here, str(project.root)], stdout=subprocess.PIPE)


def _calls_so_far(project: Project) -> list[str]:
    log = project.compiler.parent / "calls"
    return log.read_text().splitlines() if log.exists() else []


def _wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_two_processes_build_once(project: Project) -> None:
    project.write("c.cu", "// fake: sleep 0.5\nint c;\n")
    children = [_build_in_process(project) for _ in range(2)]
    counts = []
    for child in children:
        out, _ = child.communicate(timeout=300)
        assert child.returncode == 0
        counts.append(int(out))
    assert sorted(counts) == [0, 3]
    assert project.calls() == ALL


def test_killed_build_leaves_no_lock_no_compiler_and_nothing_false(project: Project) -> None:
    project.write("c.cu", "// fake: sleep 60\nint c;\n")
    child = _build_in_process(project)
    _wait_for(lambda: "c.cu" in _calls_so_far(project) and (project.plan().folder / "obj" / "b.o").exists())
    _wait_for(lambda: _has_objects(project, {"a.o", "b.o"}))
    child.send_signal(signal.SIGKILL)
    child.wait()
    _wait_for(lambda: not _compilers_of(project), 10.0)
    assert not engine.is_fresh(project.plan())
    project.calls()

    project.write("c.cu", "int c;\n")
    started = time.monotonic()
    report = project.build()
    assert time.monotonic() - started < 10
    assert (report.compiled, project.calls()) == (["c.o"], ["c.cu"])
    assert not list(project.plan().folder.glob("tmp-*"))
    assert engine.is_fresh(project.plan())


def _has_objects(project: Project, names: set[str]) -> bool:
    try:
        return names <= set(json.loads(project.plan().manifest.read_text())["objects"])
    except (OSError, ValueError):
        return False


def _compilers_of(project: Project) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(project.compiler).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_measured_need_is_used_by_the_next_build(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.build()
    needs: list[int] = []
    run = engine.run_jobs

    def spy(jobs: list[Job], *args: Any) -> list[JobResult]:
        needs.extend(job.peak_memory for job in jobs)
        return run(jobs, *args)

    monkeypatch.setattr(engine, "run_jobs", spy)
    measured = json.loads(project.plan().manifest.read_text())["objects"]["a.o"]["peak_memory"]
    assert 0 < measured < 100 << 20
    project.write("a.cu", "int changed;\n")
    project.build()
    assert needs[0] == measured


def test_interrupted_build_frees_the_lock_and_ends_its_compilers(project: Project) -> None:
    project.write("c.cu", "// fake: sleep 60\nint c;\n")
    child = _build_in_process(project)
    _wait_for(lambda: "c.cu" in _calls_so_far(project))
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=20) != 0
    assert not _compilers_of(project)
    assert "interrupted or failed" in project.plan().log.read_text()
    project.write("c.cu", "int c;\n")
    project.build()
    assert engine.is_fresh(project.plan())


def test_waiting_for_another_process_is_said(project: Project, jit_log: pytest.LogCaptureFixture) -> None:
    plan = project.plan()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire();"
            "print('held', flush=True); time.sleep(1.6)",
            str(plan.lock_path),
        ],
        stdout=subprocess.PIPE,
    ) if plan.lock_path.parent.mkdir(parents=True) is None else None  # fmt: skip
    assert holder is not None
    assert holder.stdout is not None
    holder.stdout.readline()
    with engine.module_lock(plan):
        pass
    holder.wait()
    assert "another process is building it" in jit_log.text


def test_without_flock_a_dead_holder_does_not_block(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_flock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no flock here")

    monkeypatch.setattr("fcntl.flock", no_flock)
    plan = project.plan()
    plan.lock_path.parent.mkdir(parents=True)
    dead = subprocess.Popen([sys.executable, "-c", "from filelock import SoftFileLock; import os, sys;"
                             "lock = SoftFileLock(sys.argv[1]); lock.acquire(); os._exit(0)",
                             f"{plan.lock_path}.soft"])  # fmt: skip
    assert dead.wait() == 0
    assert Path(f"{plan.lock_path}.soft").exists()
    started = time.monotonic()
    with engine.module_lock(plan):
        assert Path(f"{plan.lock_path}.soft").exists()
    assert time.monotonic() - started < 20
    assert not Path(f"{plan.lock_path}.soft").exists()


def test_compiler_error_is_short_and_names_the_log(project: Project) -> None:
    project.write("b.cu", "// fake: fail identifier is undefined\n")
    with pytest.raises(JitBuildError) as caught:
        project.build()
    plan = project.plan()
    lines = str(caught.value).splitlines()
    assert lines[0] == f"building demo failed: b.o: {project.root}/src/b.cu:3:7: error: identifier is undefined"
    assert lines[1:] == [f"Log: {plan.log}"]
    assert "some warning first" in plan.log.read_text()
    assert not plan.library.exists()


def test_failure_keeps_the_objects_that_are_done(project: Project) -> None:
    project.write("c.cu", "// fake: fail later\n")
    with pytest.raises(JitBuildError):
        project.build(max_jobs=1)
    project.calls()
    project.write("c.cu", "int c;\n")
    project.build()
    assert project.calls() == ["c.cu"]


def test_missing_header_hint(project: Project) -> None:
    project.write("c.cu", '#include "curand_kernel.h"\n')
    with pytest.raises(JitBuildError, match=r"Hint: curand_kernel.h .* pip install nvidia-curand"):
        project.build()


def test_killed_for_memory_is_retried_alone(project: Project) -> None:
    project.write("c.cu", "// fake: kill-once\nint c;\n")
    report = project.build(max_jobs=3)
    assert sorted(report.compiled) == ["a.o", "b.o", "c.o"]
    assert project.calls() == ["a.cu", "b.cu", "c.cu", "c.cu"]


def test_killed_again_is_an_error_with_a_hint(project: Project) -> None:
    project.write("c.cu", "// fake: kill\n")
    with pytest.raises(JitBuildError, match=r"(?s)c\.o: .*Hint: the compiler was killed.*MAX_JOBS=1"):
        project.build(max_jobs=2)
    assert project.calls().count("c.cu") == 2


def test_full_disk_in_the_compiler(project: Project) -> None:
    project.write("c.cu", "// fake: enospc\n")
    with pytest.raises(JitBuildError, match=r"(?s)No space left on device\nHint: .*FLASHINFER_WORKSPACE_BASE"):
        project.build()


def test_full_disk_in_the_cache(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x.o")

    monkeypatch.setattr(engine.os, "replace", full)
    with pytest.raises(
        JitBuildError, match=r"No space left on device: x.o\nHint: the file system of .* MiB free.* full"
    ):
        project.build()
    monkeypatch.undo()
    assert not engine.is_fresh(project.plan())
    project.build()
    assert engine.is_fresh(project.plan())


def test_unwritable_cache(project: Project) -> None:
    (project.root / "cache").write_text("a file where a folder must be")
    with pytest.raises(JitBuildError, match=r"cannot be written: .*\nHint: set FLASHINFER_WORKSPACE_BASE"):
        project.build()


def test_read_only_cache_that_is_fresh_needs_no_writing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.build()

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    monkeypatch.setattr(engine.os, "replace", denied)
    assert engine.is_fresh(project.plan())


def test_compiler_that_writes_nothing(project: Project) -> None:
    project.write("c.cu", "// fake: silent\n")
    with pytest.raises(JitBuildError, match=r"reported success but did not write c\.o"):
        project.build()


def test_compiler_that_is_not_there(project: Project) -> None:
    project.compiler.unlink()
    with pytest.raises(JitBuildError, match=r"nvcc: No such file or directory"):
        project.build()


def test_log_and_progress(project: Project, jit_log: pytest.LogCaptureFixture) -> None:
    project.build(max_jobs=1)
    log = project.plan().log.read_text()
    for name in ("a.o", "b.o", "c.o", "demo.so"):
        assert f"] {name}: " in log
    assert f"-c {project.root}/src/a.cu" in log
    assert "c.o: not built yet" in log
    lines = [record.getMessage() for record in jit_log.records]
    assert lines[0] == "building demo: 3 of 3 sources to compile (1 asked for)"
    assert [line.split(": ")[0] for line in lines[1:5]] == [
        "demo [1/4] a.o",
        "demo [2/4] b.o",
        "demo [3/4] c.o",
        "demo [4/4] demo.so",
    ]


def test_verbose_shows_commands_and_output(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.build(verbose=True)
    assert f"-c {project.root}/src/a.cu" in capsys.readouterr().err


def test_bar_on_a_terminal(project: Project) -> None:
    """On a terminal there is a bar in place of a line per source."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from jit_fakes import Project;"
        "Project(Path(sys.argv[2])).build()"
    )
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(project.root)], stderr=side, stdout=side
    )
    os.close(side)
    seen = b""
    while True:
        try:
            block = os.read(main, 4096)
        except OSError:
            break
        if not block:
            break
        seen += block
    assert child.wait() == 0
    os.close(main)
    assert b"4/4" in seen
    assert b"demo [1/4]" not in seen
