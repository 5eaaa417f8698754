# SPDX-License-Identifier: Apache-2.0
"""A build in place of an older library tells which input changed, and a record that is none tells nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from jit_fakes import Project, needs_nvcc, small_spec
from test_jit_build import DAMAGE

from flashinfer_sm12x.build import engine
from flashinfer_sm12x.build.record import record_of

Told = Callable[[], list[str]]


@pytest.fixture
def told(jit_log: pytest.LogCaptureFixture) -> Told:
    """What the log has told of changes, since the last call."""

    def lines() -> list[str]:
        said = [record.getMessage() for record in jit_log.records if record.levelno >= logging.INFO]
        jit_log.clear()
        found = [re.fullmatch("demo was built before; since then: (.*)", line) for line in said]
        return [match[1] for match in found if match]

    return lines


def banner(project: Project) -> None:
    (project.compiler.parent / "banner").write_text("Fake compiler, release 13.1, V13.1.0")


def assembler(project: Project) -> None:
    (project.compiler.parent / "ptxas").write_text("another assembler")


SAID: dict[str, tuple[Callable[[Project], object], str]] = {
    "header": (lambda project: project.write("one.h", "int three;\n"), "header {src}/one.h changed"),
    "new header": (
        lambda project: (project.write("c.cu", '#include "new.h"\n'), project.write("new.h", "")),
        "source {src}/c.cu changed, header {src}/new.h is new",
    ),
    "source": (
        lambda project: project.write("b.cu", "int b;\n"),
        "source {src}/b.cu changed, header {src}/two.h is gone",
    ),
    "flag": (lambda project: setattr(project, "flags", ("-DX=2",)), "flag -DX=1 is gone, flag -DX=2 is new"),
    "order": (
        lambda project: setattr(project, "names", ["b", "a", "c"]),
        "the order of flags or sources changed",
    ),
    "compiler": (
        banner,
        "the compiler is Fake compiler, release 13.1, V13.1.0, the linker is Fake compiler, release 13.1, V13.1.0",
    ),
    "assembler": (assembler, "program ptxas is new"),
    "no source": (lambda project: setattr(project, "names", ["a", "b"]), "source {src}/c.cu is gone"),
}


@pytest.mark.parametrize("change", SAID)
def test_a_build_tells_which_input_changed(change: str, project: Project, told: Told) -> None:
    project.build()
    assert told() == []
    project.build()
    assert told() == []
    edit, expected = SAID[change]
    edit(project)
    project.build()
    expected = expected.format(src=project.root / "src")
    assert told() == [expected]
    assert f"# since the library that is there was built: {expected}\n" in project.plan().log.read_text()
    project.build()
    assert told() == []
    assert len(list(project.plan().folder.glob("demo-*.json"))) == 1


def test_of_many_changes_the_first_are_named(project: Project, told: Told) -> None:
    project.build()
    replace(project, flags=("-DX=1", *(f"-DY={number}" for number in range(7)))).build()
    assert told() == [", ".join(f"flag -DY={number} is new" for number in range(5)) + " and 2 more"]


def test_a_variable_is_named(project: Project, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    project.build()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    project.build()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    project.build()
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    project.build()
    assert told() == [f"variable NVCC_APPEND_FLAGS {what}" for what in ("is new", "changed", "is gone")]


NO_RECORDS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "of another form": lambda path: path.write_text('{"commands": [[1]], "files": {}}'),
    "a list": lambda path: path.write_text("[1]"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    **{
        name: lambda path, damage=damage: path.write_bytes(damage(path.read_bytes())) for name, damage in DAMAGE.items()
    },
}


@pytest.mark.parametrize("damage", NO_RECORDS)
def test_a_record_that_is_none_tells_nothing_and_the_build_goes_on(damage: str, project: Project, told: Told) -> None:
    library = project.build().library
    NO_RECORDS[damage](record_of(library))
    assert project.fresh
    project.write("one.h", "int three;\n")
    report = project.build()
    assert "int three;" in report.library.read_text()
    assert told() == []
    project.write("one.h", "int four;\n")
    project.build()
    assert told() == [f"header {project.root}/src/one.h changed"]


def test_a_build_that_fails_leaves_the_record(project: Project, told: Told) -> None:
    project.build()
    project.write("a.cu", "// fake: fail no such thing\n")
    with pytest.raises(engine.JitBuildError):
        project.build()
    project.write("a.cu", "int a;\n")
    project.build()
    changed = f"source {project.root}/src/a.cu changed"
    assert told() == [changed, changed]


def test_the_library_of_a_cache_that_can_only_be_read_is_an_older_one(project: Project, told: Told) -> None:
    project.build()
    plan = replace(project.plan(), folder=project.root / "mine" / "demo", read_only=project.plan().folder)
    project.write("one.h", "int three;\n")
    with engine.module_lock(plan.lock_path) as lock:
        engine.build(plan, lock=lock)
    assert told() == [f"header {project.root}/src/one.h changed"]


def test_a_damaged_library_of_the_same_inputs_has_no_change(project: Project, told: Told) -> None:
    project.build().library.write_bytes(b"")
    project.build()
    assert told() == []


@needs_nvcc
def test_real_build_names_paths_by_their_roots(workspace: Path, jit_log: pytest.LogCaptureFixture) -> None:
    """With the folder of generated sources and the compilers of this machine."""
    spec = small_spec(workspace / "generated")
    spec.build(need_lock=True)
    (workspace / "generated" / "src" / "answer.h").write_text("#define ANSWER 42\n")
    again = small_spec(workspace / "generated")
    again.extra_cuda_cflags.append("-DMORE")
    again.build(need_lock=True)
    expected = "small was built before; since then: flag -DMORE is new, header generated:/src/answer.h changed"
    assert expected in [record.getMessage() for record in jit_log.records]
