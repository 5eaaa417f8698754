# SPDX-License-Identifier: Apache-2.0
"""The content key: every file that a compiler reads counts, wherever the command finds it; none is read without need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from jit_fakes import Project, needs_nvcc

from flashinfer.jit.sm12x import content_key, modules
from flashinfer.jit.sm12x.build import Keys
from flashinfer.jit.sm12x.content_key import Files, namer, searched_by

pytestmark = pytest.mark.privileges


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "number"),
    [(modules.DECODE, 0), (modules.FUSED_MOE, 0), (modules.FUSED_MOE, -1), ("dense_mxfp4_sm12x", -1)],
)
def test_what_the_compiler_says_that_it_read_counts(name: str, number: int, workspace: Path) -> None:
    """All but the system's own headers, which lie in no folder that the command names."""
    plan = modules.MODULES[name]().plan
    step = plan.steps[number]
    command = [step.compiler, *step.flags, "-M", str(step.source)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, _, files = listed.replace("\\\n", " ").partition(":")
    read = {os.path.realpath(path) for path in files.split()}
    folders = [f"{os.path.realpath(folder)}/" for folder in searched_by(step.flags, "/")[0]]
    ours = {path for path in read if path.startswith((*folders, str(workspace)))}
    assert len(ours) > 30
    assert ours <= {os.path.realpath(path) for path in Keys(plan).sources[step.name]}


def test_another_place_of_the_same_files_is_the_same_key(project: Project, tmp_path: Path) -> None:
    """This holds for the folders that a plan names. A file that no ``#include`` reaches does not change the key."""

    def keys(src: Path) -> tuple[dict[str, str], str]:
        plan = project.plan()
        steps = tuple(
            replace(step, source=src / step.source.name, flags=("-DX=1", "-I", str(src))) for step in plan.steps
        )
        found = Keys(replace(plan, steps=steps, roots={"src": str(src)}))
        return found.objects, found.library

    here, there = project.root / "src", tmp_path / "elsewhere"
    shutil.copytree(here, there)
    assert keys(here) == keys(there)
    project.write("unrelated.h", "int u;\n")
    assert keys(here) == keys(there)
    project.write("one.h", "int other;\n")
    (a, whole), (b, other) = keys(here), keys(there)
    assert whole != other
    assert {name for name in a if a[name] != b[name]} == {"a.o", "b.o"}


def test_the_number_of_compilers_threads_is_none_of_the_key(project: Project) -> None:
    keys = [Keys(project.with_flags("-DX=1", flag).plan()).library for flag in ("--threads=1", "--threads=4", "-O1")]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["-I", "inc"], {}),
        (["-Iinc"], {}),
        (["-isystem", "inc"], {}),
        (["-isysteminc"], {}),
        (["-iquoteinc"], {}),
        (["-idirafter", "inc"], {}),
        (["--include-path=inc"], {}),
        (["--system-include", "inc"], {}),
        (["-Xcompiler", "-O1,-Iinc"], {}),
        (["--compiler-options=-Iinc"], {}),
        (["-include", "inc/new.h"], {}),
        ([], {"CPATH": ":inc"}),
        ([], {"NVCC_PREPEND_FLAGS": "-O1 -Iinc"}),
    ],
    ids=str,
)
def test_a_header_counts_however_a_command_finds_it(
    flags: list[str], variables: dict[str, str], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project.plan().folder / "inc"  # relative to where commands run
    folder.mkdir(parents=True)
    project.write("c.cu", "#if 0\n  #  include <new.h>\n#endif\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    keys = []
    for text in ("", "int x;\n", "int y;\n"):
        if text:
            (folder / "new.h").write_text(text)
        keys.append(Keys(project.with_flags(*flags).plan()).objects)
    for name, changes in (("a.o", "-include" in flags), ("c.o", True)):
        assert len({each[name] for each in keys}) == (3 if changes else 1)


def test_a_header_that_comes_to_stand_before_another_counts(project: Project) -> None:
    """Also one that ``#include_next`` or another order of folders would pass over."""
    first, second = project.root / "first", project.root / "second"
    for folder in (first, second):
        folder.mkdir()
    project.write("b.cu", '#include "late.h"\n')
    (second / "late.h").write_text("int second;\n")
    flagged = project.with_flags("-I", str(first), "-I", str(second))
    flagged.build()
    (first / "late.h").write_text("int first;\n")
    assert flagged.build().compiled == ["b.o"]
    assert "int first;" in flagged.plan().library.read_text()
    (second / "late.h").write_text("int passed_over;\n")
    assert not flagged.fresh


def test_what_lies_beside_a_file_comes_first_for_quotes_and_does_not_count_for_angles(tmp_path: Path) -> None:
    for name in ("a/x.cu", "a/q.h", "a/n.h", "b/q.h", "b/n.h", "b/inner/y.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    source = tmp_path / "a" / "x.cu"
    for text, expected in (
        ('#include "q.h"', ["a/q.h"]),
        ("#include <q.h>", ["b/q.h"]),
        ('#include_next "n.h"', ["b/n.h"]),
        ('#include "inner/y.h"', ["b/inner/y.h"]),
        ('#include "../b/n.h"', ["b/n.h"]),
        (f'#include "{tmp_path}/b/n.h"', ["b/n.h"]),
        ('// #include "q.h"', []),
    ):
        source.write_text(text)
        read = Files().read_by([str(source)], [str(tmp_path / "b")]).keys() - {str(source)}
        assert {os.path.relpath(path, tmp_path) for path in read} == set(expected), text


def test_headers_that_include_each_other_by_another_way_each_time(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    header = tmp_path / "a" / "x.h"
    header.write_text('#include "../a/x.h"\n#include "a/../a/x.h"\n#include <none.h>\n')
    (tmp_path / "b").symlink_to("a")
    assert Files().read_by([str(header)], [str(tmp_path)]).keys() == {str(header)}
    assert Files().read_by([str(tmp_path / "none.cu")], []) == {str(tmp_path / "none.cu"): None}


def test_a_load_reads_no_file_that_is_in_the_memo(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other than one that was changed so lately that its times may not tell of another change."""
    project.build()
    read: list[str] = []
    real = content_key.read_file
    monkeypatch.setattr(content_key, "read_file", lambda path: (read.append(Path(path).name), real(path))[1])
    assert project.fresh
    assert sorted(name for name in read if not name.startswith("demo-")) == sorted(
        ["digests.json", "a.cu", "b.cu", "c.cu", "one.h", "two.h"]
    )
    monkeypatch.setattr(content_key, "_YOUNG", -3600.0)
    assert project.fresh  # writes the memo
    read.clear()
    assert project.fresh
    assert read == ["digests.json"]
    header = project.root / "src" / "two.h"
    before = header.stat()
    header.write_text("int TWO;\n")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    read.clear()
    assert not project.fresh
    assert read == ["digests.json", "two.h"]


def test_a_file_that_was_just_changed_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next change may bear the same times."""
    path, memo = tmp_path / "x.h", tmp_path / "memo"
    path.write_text("one")
    now = time.time_ns()
    for age, remembered in ((0, False), (3_000_000_000, True)):
        monkeypatch.setattr(content_key, "_state", lambda path, age=age: [3, 1, now - age, 1])
        files = Files(memo)
        before = files.digest(path)
        files.remember()
        path.write_text("two")
        assert (Files(memo).digest(path) == before) == remembered
        path.write_text("one")


def test_names_of_folders_in_each_other(tmp_path: Path) -> None:
    roots = {"tree": "/w/main", "wheel": "/w/main/.venv/flashinfer"}
    named = [namer(roots)(text) for text in ("-I/w/main/include", "/w/main/.venv/flashinfer/a.h", "/w/mainly/a", "/w")]
    assert named == ["-Itree:/include", "wheel:/a.h", "/w/mainly/a", "/w"]
    assert searched_by(["-Ia", "-O1", "-I", "/b", "-Ia"], "/w") == (["/w/a", "/b"], [])


@pytest.mark.parametrize("damage", ["", "[]", "[" * 100_000, '{"a.cu": 3}', "all digests are those of other files"])
def test_a_damaged_memo_is_as_none(project: Project, damage: str) -> None:
    """And a header that came with an older time counts; so do the entries of a memo that was taken for another file."""
    project.build()
    project.calls()
    memo = project.plan().folder / "digests.json"
    memo.write_text(
        json.dumps({path: [[0, 0, 0, 0], "0" * 64, []] for path in Keys(project.plan()).sources["b.o"]})
        if damage.startswith("all")
        else damage
    )
    assert project.fresh
    assert project.build().compiled == []
    header = project.write("two.h", "int newer;\n")
    os.utime(header, (1, 1))
    assert not project.fresh
    project.build()
    assert project.fresh
    assert project.calls() == ["b.cu"]
    assert "int newer;" in project.plan().library.read_text()
