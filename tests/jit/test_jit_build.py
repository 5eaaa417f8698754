# SPDX-License-Identifier: Apache-2.0
"""The build engine, with a compiler that takes no time: what is rebuilt, what survives, what errors say."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from jit_fakes import Project

from flashinfer_sm12x.build import engine, toolchain
from flashinfer_sm12x.build.diagnosis import JitBuildError

pytestmark = pytest.mark.privileges

ALL = ["a.cu", "b.cu", "c.cu"]


def test_builds_once_then_nothing(project: Project) -> None:
    report = project.build()
    assert sorted(report.compiled) == ["a.o", "b.o", "c.o"]
    assert report.linked
    assert project.calls() == ALL
    assert "int two;" in project.plan().library.read_text()
    assert project.fresh
    again = project.build()
    assert (again.compiled, again.linked) == ([], False)
    assert project.calls() == []


def test_file_times_do_not_count(project: Project) -> None:
    project.build()
    project.calls()
    future = time.time() + 1e6
    for path in [*(project.root / "src").rglob("*"), project.compiler, *project.plan().folder.rglob("*")]:
        os.utime(path, (future, future))
    assert project.fresh
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
    assert not project.fresh
    project.build()
    assert project.calls() == rebuilt
    assert "int more;" in project.plan().library.read_text()


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
    (project.compiler.parent / "ptxas").write_text("another assembler")
    project.with_flags("-DX=2").build()
    assert project.calls() == ALL


def test_what_bears_another_key_is_removed_by_the_next_build_and_not_by_one_that_fails(project: Project) -> None:
    project.build()
    old = project.plan().library.resolve()
    project.write("a.cu", "// fake: fail no such thing\n")
    with pytest.raises(JitBuildError):
        project.build()
    assert old.exists()
    project.write("a.cu", "int a;\n")
    report = project.build()
    assert not old.exists()
    folder = project.plan().folder
    assert [path for path in folder.glob("*.so") if not path.is_symlink()] == [report.library]
    assert project.plan().library.resolve() == report.library
    assert len(list(folder.glob("obj/*/*.o"))) == len(list(folder.glob("obj/*"))) == 3


def test_going_back_builds_what_was_there_before(project: Project) -> None:
    """The link leads to the library of now, whichever was built last."""
    first = project.build().library
    other = project.with_flags("-DX=2").build().library
    assert first != other
    assert project.build().library == first == project.plan().library.resolve()


def test_a_cache_of_an_older_engine_is_built_anew(project: Project) -> None:
    """It had files in place of the link and of the folders of objects."""
    folder = project.plan().folder
    (folder / "obj").mkdir(parents=True)
    for name in ("demo.so", "obj/a.o", "build.ninja", "inputs.json", ".ninja_log"):
        (folder / name).write_text("older")
    assert not project.fresh
    assert sorted(project.build().compiled) == ["a.o", "b.o", "c.o"]
    assert "int two;" in project.plan().library.read_text()
    assert not (folder / "obj" / "a.o").exists()


def test_removed_source_leaves_the_library(project: Project) -> None:
    project.build()
    project.calls()
    project.names = ["a", "b"]
    assert not project.fresh
    report = project.build()
    assert (project.calls(), report.linked) == ([], True)
    assert "int c;" not in project.plan().library.read_text()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "zeros": lambda content: bytes(len(content)),
    "a bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "more": lambda content: content + b"\0",
}
"""What a full disk, a loss of power or memory makes of a file."""


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_library_is_linked_again_and_damaged_object_compiled_again(
    damage: Callable[[bytes], bytes], project: Project, jit_log: pytest.LogCaptureFixture
) -> None:
    project.build()
    project.calls()
    plan = project.plan()
    good = plan.library.read_bytes()
    plan.library.write_bytes(damage(good))
    made = project.object_of("b")
    made.write_bytes(damage(made.read_bytes()))
    assert not project.fresh
    jit_log.clear()
    assert project.build().compiled == ["b.o"]
    assert project.calls() == ["b.cu"]
    assert plan.library.read_bytes() == good
    messages = [record.getMessage() for record in jit_log.records if record.levelno == logging.WARNING]
    assert messages == [
        f"{plan.library.resolve()} is damaged; a build links it again",
        f"{made} is damaged; it is compiled again",
    ]
    assert project.fresh


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_objects_are_not_linked_into_a_changed_module(
    damage: Callable[[bytes], bytes], project: Project
) -> None:
    """Every object at once, and the build file."""
    project.build()
    project.calls()
    for name in "abc":
        made = project.object_of(name)
        made.write_bytes(damage(made.read_bytes()))
    ninja = project.plan().ninja_path
    ninja.write_bytes(damage(ninja.read_bytes()))
    project.write("c.cu", "int another;\n")
    assert sorted(project.build().compiled) == ["a.o", "b.o", "c.o"]
    text = project.plan().library.read_text()
    assert all(f"int {word};" in text for word in ("one", "two", "another"))


def test_a_library_of_which_the_memo_has_nothing_new_is_read_by_a_build(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may lose a file's content and keep its times; whoever cannot load it has it built."""
    library = project.build().library
    good = library.read_bytes()
    believed, digest = library.stem.rpartition("-")[2], engine.Files.digest
    monkeypatch.setattr(
        engine.Files, "digest", lambda files, path: believed if path == library else digest(files, path)
    )
    library.write_bytes(bytes(len(good)))
    assert project.fresh
    report = project.build()
    assert (report.linked, report.compiled) == (True, [])
    assert library.read_bytes() == good


def test_what_another_module_compiled_is_not_compiled_again(
    project: Project, jit_log: pytest.LogCaptureFixture
) -> None:
    """Nor does it change when the other one's is removed. A damaged one, and one of other flags, is compiled."""
    project.write("a.cu", SPILLS.format(8))
    project.names = ["a", "b"]
    project.build()
    assert project.calls() == ["a.cu", "b.cu"]
    other = replace(project, module="other", names=["a", "b", "c"])
    project.object_of("b").write_bytes(bytes(project.object_of("b").stat().st_size))
    jit_log.clear()
    assert sorted(other.build().compiled) == ["b.o", "c.o"]
    assert project.calls() == ["b.cu", "c.cu"]
    assert [record.getMessage() for record in jit_log.records if "in a.o (8 bytes a thread)" in record.getMessage()]
    shutil.rmtree(project.plan().folder)
    text = other.plan().library.read_text()
    assert all(f"int {word};" in text for word in ("one", "two", "c"))
    assert other.build().compiled == []
    assert sorted(replace(other, module="third", flags=("-DX=2",)).build().compiled) == ["a.o", "b.o", "c.o"]


def test_another_module_that_others_can_write_to_gives_nothing(
    project: Project, jit_log: pytest.LogCaptureFixture
) -> None:
    project.build()
    step = project.plan().steps[0]
    project.plan().object_path(step).chmod(0o666)
    assert replace(project, module="other").build().compiled == [step.name]
    messages = [record.getMessage() for record in jit_log.records if "is not taken for other" in record.getMessage()]
    assert len(messages) == 1 and "is writable by everybody" in messages[0]


@pytest.mark.parametrize("after", ["int after;\n", None], ids=["another content", "the same again"])
def test_source_edited_while_it_is_compiled_is_compiled_again(project: Project, after: str | None) -> None:
    source = project.write("c.cu", "// fake: wait\nint before;\n")
    child = project.start()
    _wait_for(lambda: "c.cu" in _calls_so_far(project), child)
    source.write_text(source.read_text() if after is None else after)
    project.write("go", "")
    output = child.communicate(timeout=LONGEST)
    assert child.returncode == 0, output
    assert f"{source} was edited while demo was built; it is built again" in output[1]
    assert project.calls() == [*ALL, "c.cu"]
    assert project.fresh
    assert (after or "int before;") in project.plan().library.read_text()


def _calls_so_far(project: Project) -> list[str]:
    log = project.compiler.parent / "calls"
    return log.read_text().splitlines() if log.exists() else []


LONGEST = 900
"""Seconds, on however busy a machine; what waits is woken by what happens and not by a clock."""


def _wait_for(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    """Until the child has done something; it fails where the child ends without."""
    deadline = time.monotonic() + LONGEST
    while not condition():
        ended = child.poll() is not None
        assert condition() or not ended, f"it ended with {child.returncode}: {child.communicate()}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_two_processes_build_once(project: Project) -> None:
    project.write("c.cu", "// fake: wait\nint c;\n")
    children = [project.start() for _ in range(2)]
    _wait_for(lambda: "c.cu" in _calls_so_far(project), children[0])
    project.write("go", "")
    counts = [child.communicate(timeout=LONGEST)[0] for child in children]
    assert sorted(counts) == ["0\n", "3\n"]
    assert project.calls() == ALL


@pytest.mark.parametrize("after", ["int c3;\n", None], ids=["another content", "the same again"])
def test_killed_builders_compilers_hold_the_lock_and_nothing_false_stays(project: Project, after: str | None) -> None:
    """Those that do not end with it. Nor does what they made stay: nobody is left who sees whether a file was edited
    meanwhile."""
    project.change_compiler("if source is None", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n")
    project.build()
    project.calls()
    project.write("b.cu", "int another;\n")
    project.write("c.cu", "// fake: wait\nint c;\n")
    child = project.start()
    _wait_for(lambda: "c.cu" in _calls_so_far(project) and "another" in project.object_text("b"), child)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert _compilers_of(project)
    with pytest.raises(BlockingIOError), engine.module_lock(project.plan().lock_path, wait=False):
        pass
    assert not project.fresh
    project.calls()

    project.write("c.cu", after or "// fake: wait\nint c;\n")
    threading.Timer(0.5, project.write, ["go", ""]).start()
    report = project.build()  # waits for them
    assert not _compilers_of(project)
    assert (report.compiled, project.calls()) == (["c.o"], ["c.cu"])
    assert not (project.plan().folder / "tmp").exists()
    assert project.fresh


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGSEGV], ids=lambda n: n.name
)
def test_a_builders_end_is_its_compilers_end(project: Project, number: signal.Signals) -> None:
    """The lock is free then, and the next build takes the objects that were done."""
    project.write("c.cu", "// fake: wait\nint c;\n")
    child = os.fork()
    if child == 0:
        try:
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            project.build()
        finally:
            os._exit(1)
    while "c.cu" not in _calls_so_far(project) or len(_objects(project)) < 2:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    deadline = time.monotonic() + 120
    while _compilers_of(project) or not _is_free(project.plan().lock_path):
        if time.monotonic() > deadline:
            project.write("go", "")
            pytest.fail("its compilers go on")
        time.sleep(0.02)
    assert {path.name for path in _objects(project)} == {"a.o", "b.o"}
    assert not project.fresh
    project.write("c.cu", "int c;\n")
    assert project.build().compiled == ["c.o"]
    assert not (project.plan().folder / "tmp").exists()


def _is_free(lock: Path) -> bool:
    try:
        with engine.module_lock(lock, wait=False):
            return True
    except BlockingIOError:
        return False


def _objects(project: Project) -> list[Path]:
    return list(project.plan().folder.glob("obj/*/*.o"))


def test_a_builder_that_has_ended_starts_no_ninja() -> None:
    """It may end before ninja's process asks to end with it."""
    command = engine.ninja_command("--version")
    command[command.index(str(os.getpid()))] = str(os.getppid())
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the process that builds has ended" in done.stderr
    done = subprocess.run(engine.ninja_command("--version"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_lock_file_that_its_holder_removes_is_taken_again(project: Project) -> None:
    path = project.plan().lock_path
    with engine.module_lock(path):
        path.unlink()
        with engine.module_lock(path, wait=False):
            assert path.exists()


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


def test_interrupted_build_frees_the_lock_ends_its_compilers_and_reports_what_stays(project: Project) -> None:
    project.write("c.cu", "// fake: wait\nint c;\n")
    child = project.start()
    _wait_for(lambda: project.plan().log.is_file() and project.plan().log.read_text().count("\n[") == 2, child)
    child.send_signal(signal.SIGINT)
    _, output = child.communicate(timeout=LONGEST)
    assert child.returncode == -signal.SIGINT
    assert output.splitlines()[-1] == (
        "KeyboardInterrupt: building demo was interrupted: objects that are built stay, and a new run resumes from "
        "there"
    )
    assert not _compilers_of(project)
    project.write("c.cu", "int c;\n")
    assert project.build().compiled == ["c.o"]


def test_waiting_for_another_process_is_reported(project: Project, jit_log: pytest.LogCaptureFixture) -> None:
    path = project.plan().lock_path
    path.parent.mkdir(parents=True)
    holder = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    threading.Timer(0.5, os.close, [holder]).start()
    with engine.module_lock(path):
        pass
    assert "another process is building it" in jit_log.text


def test_compiler_error_is_short_names_the_log_and_keeps_the_objects_that_are_done(project: Project) -> None:
    project.write("c.cu", "// fake: fail identifier is undefined\n")
    with pytest.raises(JitBuildError) as caught:
        project.build(max_jobs=1)
    plan = project.plan()
    lines = str(caught.value).splitlines()
    assert lines[0] == f"building demo failed: c.o: {project.root}/src/c.cu:3:7: error: identifier is undefined"
    assert lines[1:] == [f"Log: {plan.log}"]
    assert "some warning first" in plan.log.read_text()
    assert not plan.library.exists()
    project.write("c.cu", "int c;\n")
    assert project.build().compiled == ["c.o"]


def test_a_link_that_fails_leaves_the_library_that_others_use(project: Project) -> None:
    project.build()
    library = project.plan().library
    before = library.read_bytes()
    half = 'if source is None:\n    open(output, "w").write("half")\n    sys.exit("ld: it failed")\n'
    project.change_compiler("if source is None:", half)
    project.write("c.cu", "int another;\n")
    with pytest.raises(JitBuildError, match=r"demo\.so: ld: it failed"):
        project.build()
    assert library.read_bytes() == before
    assert not project.fresh


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('#include "curand_kernel.h"\n', r"Hint: curand_kernel.h .* pip install nvidia-curand"),
        ("// fake: enospc\n", r"(?s)No space left on device\nHint: .*FLASHINFER_WORKSPACE_BASE"),
        ("// fake: kill\n", r"(?s)c\.o: .*Hint: the compiler was killed.*MAX_JOBS=1"),
        ("// fake: silent\n", r"building demo failed: c\.o: mv: .*c\.o"),
    ],
)
def test_errors_have_a_hint(source: str, message: str, project: Project) -> None:
    project.write("c.cu", source)
    with pytest.raises(JitBuildError, match=message):
        project.build(max_jobs=2)
    assert project.calls().count("c.cu") == (2 if "kill" in source else 1)


def test_killed_for_memory_is_retried_alone(project: Project) -> None:
    project.write("c.cu", "// fake: kill-once\nint c;\n")
    report = project.build(max_jobs=3)
    assert sorted(report.compiled) == ["a.o", "b.o", "c.o"]
    assert project.calls() == ["a.cu", "b.cu", "c.cu", "c.cu"]


def test_full_disk_in_the_cache(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x.o")

    monkeypatch.setattr(engine.os, "replace", full)
    with pytest.raises(
        JitBuildError, match=r"No space left on device: x.o\nHint: the file system of .* MiB free.* full"
    ):
        project.build()
    monkeypatch.undo()
    assert not project.fresh
    project.build()
    assert project.fresh


def _can_mount() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="a disk that is full takes the right to mount one")
def test_disk_that_fills_while_linking(project: Project) -> None:
    """The linker's message about it must not need the same disk."""
    fills = (
        'if source is None and "-o" in args:\n'
        "    try:\n"
        '        open(output, "wb").write(bytes(1 << 22))\n'
        "    except OSError as error:\n"
        '        print("/usr/bin/ld: final link failed: " + error.strerror)\n'
        "        sys.exit(1)\n"
    )
    project.change_compiler("if source is None:", fills)
    small = project.root / "small"
    small.mkdir()
    script = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'
    built = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(small), *project.command(small / "cache")],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 1
    assert "JitBuildError: building demo failed: " in built.stderr
    assert "No space left on device" in built.stderr
    assert " is full. Make room, or set FLASHINFER_WORKSPACE_BASE" in built.stderr


def test_unwritable_cache(project: Project) -> None:
    (project.root / "cache").write_text("a file where a folder must be")
    with pytest.raises(JitBuildError, match=r"cannot be written: .*\nHint: set FLASHINFER_WORKSPACE_BASE"):
        project.build()


def test_compiler_that_is_not_there(project: Project) -> None:
    project.compiler.unlink()
    with pytest.raises(JitBuildError, match=r"nvcc: not found"):
        project.build()


def test_log_and_progress(
    project: Project, jit_log: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    project.build(max_jobs=1, verbose=True)
    source = f"-c {shlex.quote(f'{project.root}/src/a.cu')}"
    assert source in capsys.readouterr().err
    log = project.plan().log.read_text()
    for name in ("a.o", "b.o", "c.o", "demo.so"):
        assert re.search(rf" -o tmp/\S*\b{name}\.new && mv ", log)
    assert source in log
    lines = [record.getMessage() for record in jit_log.records]
    assert lines == [
        "building demo: 3 of 3 objects are missing; 1 compilers at once (1 asked for)",
        "demo [1/4] a.o",
        "demo [2/4] b.o",
        "demo [3/4] c.o",
        "demo [4/4] demo.so",
        "demo is built",
    ]
    messages = [record.getMessage() for record in jit_log.records if record.levelno >= logging.INFO]
    assert messages == [lines[0], lines[-1]]  # it took no ten seconds


def test_a_line_of_progress_is_logged_from_the_tenth_second_on(
    monkeypatch: pytest.MonkeyPatch, jit_log: pytest.LogCaptureFixture
) -> None:
    """Since the last one that was told."""
    now = [100.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: now[0])
    progress = engine.Progress("demo")
    for done, seconds in enumerate((9.999, 0.001, 9.999, 0.001, 25.0, 1.0), 1):
        now[0] += seconds
        progress.tell(done, 6, "a.o")
    messages = [record.getMessage() for record in jit_log.records if record.levelno == logging.INFO]
    assert messages == ["demo [2/6] a.o", "demo [4/6] a.o", "demo [5/6] a.o"]


SPILLS = "// fake: say ptxas warning : Local memory used for function '_Z1kPi', size of stack frame: {} bytes\n"


def test_spills_are_reported_until_they_are_gone(project: Project, jit_log: pytest.LogCaptureFixture) -> None:
    """One line with the compiler, the objects and the fix; also after a build that compiled others, or nothing."""

    def messages() -> list[str]:
        lines = [record.getMessage() for record in jit_log.records if record.levelno == logging.WARNING]
        jit_log.clear()
        return lines

    project.write("a.cu", SPILLS.format(8) + SPILLS.format(16) + SPILLS.format(8))
    project.write("b.cu", SPILLS.format(24))
    project.write("c.cu", "// fake: fail no such thing\n")
    with pytest.raises(JitBuildError, match="no such thing"):
        project.build(max_jobs=1)
    assert messages() == []
    project.write("c.cu", "int c;\n")
    project.build()
    (line,) = messages()
    assert line.startswith("demo works, but more slowly than it should: nvcc 13.0.1 spills registers to memory in ")
    assert "in a.o (16 bytes a thread), b.o (24 bytes a thread). nvcc 13.0 to 13.5, without flags of your own, " in line
    assert line.endswith(
        "does not for SM12x (of Hopper's kernels some always do). Name one in CUDA_HOME, or install one: "
        f"{toolchain.PIP_COMMAND}"
    )
    assert project.build().compiled == []
    assert messages() == [line]
    project.write("c.cu", "int c2;\n")
    assert project.build().compiled == ["c.o"]
    assert messages() == [line]
    project.write("a.cu", "int a;\n")
    project.build()
    assert "in b.o (24 bytes a thread). nvcc" in messages()[0]
    project.names.remove("b")
    project.build()
    assert messages() == []
    project.write("a.cu", SPILLS.format(8))
    project.write("c.cu", "// fake: fail no such thing\n")
    with pytest.raises(JitBuildError, match="no such thing"):
        project.build(max_jobs=1)
    project.write("a.cu", "int a;\n")
    project.write("c.cu", "int c2;\n")
    project.build()
    assert messages() == []


@pytest.mark.parametrize("damage", ["[]", "{", '{"a.o": "16"}'])
def test_a_damaged_list_of_spills_tells_nothing(
    damage: str, project: Project, jit_log: pytest.LogCaptureFixture
) -> None:
    project.build()
    (project.plan().folder / "spills.json").write_text(damage)
    project.build()
    assert not [record for record in jit_log.records if record.levelno == logging.WARNING]


def test_write_atomically(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "f"
    engine.write_atomically(path, "one")
    inode = path.stat().st_ino
    engine.write_atomically(path, "one")
    assert path.stat().st_ino == inode
    engine.write_atomically(path, b"two")
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["f"]


def test_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        engine.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]
