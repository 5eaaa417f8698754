# SPDX-License-Identifier: Apache-2.0
"""The build hash: every file that a compiler reads counts, wherever the command finds it; none is read without need."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from jit_fakes import Project, needs_nvcc

from flashinfer.jit.sm12x import modules
from flashinfer_sm12x.build import build_hash
from flashinfer_sm12x.build.build_hash import Files, namer, searched_by
from flashinfer_sm12x.build.engine import COMPILER_ENVIRONMENT, BuildHashes

pytestmark = pytest.mark.privileges


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "number"),
    [(modules.DECODE, 0), (modules.FUSED_MOE, 0), (modules.FUSED_MOE, -1), ("dense_mxfp4_sm12x", -1)],
)
def test_what_the_compiler_reports_as_read_counts(name: str, number: int, workspace: Path) -> None:
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
    assert ours <= {os.path.realpath(path) for path in BuildHashes(plan).sources[step.name]}


def test_another_place_of_the_same_files_is_the_same_key(project: Project, tmp_path: Path) -> None:
    """This holds for the folders that a plan names. A file that no ``#include`` reaches does not change the hash."""

    def hashes(src: Path) -> tuple[dict[str, str], str]:
        plan = project.plan()
        steps = tuple(
            replace(step, source=src / step.source.name, flags=("-DX=1", "-I", str(src))) for step in plan.steps
        )
        found = BuildHashes(replace(plan, steps=steps, roots={"src": str(src)}))
        return found.objects, found.library

    here, there = project.root / "src", tmp_path / "elsewhere"
    shutil.copytree(here, there)
    assert hashes(here) == hashes(there)
    project.write("unrelated.h", "int u;\n")
    assert hashes(here) == hashes(there)
    project.write("one.h", "int other;\n")
    (a, whole), (b, other) = hashes(here), hashes(there)
    assert whole != other
    assert {name for name in a if a[name] != b[name]} == {"a.o", "b.o"}


def test_the_number_of_compilers_threads_is_none_of_the_key(project: Project) -> None:
    hashes = [
        BuildHashes(project.with_flags("-DX=1", flag).plan()).library for flag in ("--threads=1", "--threads=4", "-O1")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


FOLDERS = {
    "g++": (
        *("-I inc", "-Iinc", "-isystem inc", "-isysteminc", "-idirafter inc", "-idirafterinc"),
        *("--include-directory inc", "--include-directory=inc", "--include-directory-after=inc"),
        *("-Wp,-I,inc", "-Wp,-Iinc", "@options"),
    ),
    "nvcc": (
        *("-I inc", "-Iinc", "-I=inc", "-I other,inc", "-Iother,inc", "--include-path inc", "--include-path=other,inc"),
        *("-isystem inc", "-isystem=inc", "--system-include inc", "--system-include=inc"),
        *("-Xcompiler -Iinc", "-Xcompiler=-Iinc", "-Xcompiler -O1,-Iinc", "-Xcompiler -isystem,inc"),
        *("-Xcompiler -isystem -Xcompiler inc", "--compiler-options -Iinc", "--compiler-options=-O1,-idirafter,inc"),
        *("-Xcompiler @options", "-optf options", "-optf=options", "--options-file options", "--options-file=options"),
    ),
}
"""Spellings by which a compiler finds ``new.h`` in the folder ``inc``; the file ``options`` holds ``-Iinc``."""

HEADERS = {
    "g++": (
        *("-include inc/new.h", "-includeinc/new.h", "--include inc/new.h", "--include=inc/new.h"),
        *("-imacros inc/new.h", "-imacrosinc/new.h", "--imacros=inc/new.h", "-Wp,-include,inc/new.h"),
        "-Iinc -include new.h",
    ),
    "nvcc": (
        *("-include inc/new.h", "-include=inc/new.h", "--pre-include inc/new.h", "--pre-include=inc/new.h"),
        *("-Xcompiler -include,inc/new.h", "-Xcompiler=-imacros,inc/new.h", "-Iinc --pre-include=new.h"),
        "-Xcompiler -include -Xcompiler inc/new.h",
    ),
}
"""Spellings by which a compiler reads ``inc/new.h`` before the source."""

VARIABLES = {
    "g++": (("CPATH", "other:inc"), ("CPLUS_INCLUDE_PATH", "inc")),
    "nvcc": (
        *(("CPATH", ":inc"), ("CPLUS_INCLUDE_PATH", "inc"), ("INCLUDES", "-Iinc"), ("SYSTEM_INCLUDES", "-isystem inc")),
        *(
            ("NVCC_PREPEND_FLAGS", "-O1 -Iinc"),
            ("NVCC_APPEND_FLAGS", "-Xcompiler -Iinc"),
            ("NVCC_APPEND_FLAGS", '-I"inc"'),
        ),
    ),
}
"""Variables by which a compiler finds ``new.h`` in the folder ``inc``."""

SPELLINGS = [
    (compiler, words, dict(variables), "#include <new.h>\n" * (kind != "header"))
    for compiler in FOLDERS
    for kind, each in (("folder", FOLDERS), ("header", HEADERS), ("variable", VARIABLES))
    for words, variables in (("", [item]) if isinstance(item, tuple) else (item, []) for item in each[compiler])
]


@pytest.mark.parametrize(("compiler", "words", "variables", "source"), SPELLINGS, ids=str)
def test_a_header_counts_however_a_command_finds_it(
    compiler: str,
    words: str,
    variables: dict[str, str],
    source: str,
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The header counts before it is there, and with each content; so does what an options file says."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    folder = project.plan().folder  # where commands run
    (folder / "inc").mkdir(parents=True)
    (folder / "options").write_text("-Iinc")
    project.write("c.cu", source)
    flagged = project.with_flags(*words.split())
    hashes = []
    for text in ("", "int x;\n", "int y;\n"):
        if text:
            (folder / "inc" / "new.h").write_text(text)
        hashes.append(BuildHashes(flagged.plan()))
    assert len({each.objects["c.o"] for each in hashes}) == len({each.library for each in hashes}) == 3
    assert len({each.objects["a.o"] for each in hashes}) == (1 if source else 3)
    (folder / "options").write_text("-Iinc -DX")
    changed = BuildHashes(flagged.plan()).objects["c.o"] != hashes[-1].objects["c.o"]
    assert changed == ("options" in re.split("[ =@]", words))


def test_an_empty_folder_of_a_variable_is_the_current_folder(
    gxx: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the compiler has it, and as it counts."""
    monkeypatch.setenv("CPATH", "other:")
    folder = project.plan().folder
    folder.mkdir(parents=True)
    source = project.write("c.cu", "#include <new.h>\n")
    hashes = []
    for text in ("int x;\n", "int y;\n"):
        (folder / "new.h").write_text(text)
        hashes.append(BuildHashes(project.plan()).objects["c.o"])
    assert hashes[0] != hashes[1]
    listed = subprocess.run(
        [gxx, "-x", "c++", "-M", str(source)], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "new.h" in listed.stdout


@pytest.mark.parametrize("compiler", ["g++", "nvcc"])
def test_compilers_take_each_of_these_spellings(
    compiler: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tables above are of the compilers' own language."""
    program = str(request.getfixturevalue("nvcc")) if compiler == "nvcc" else request.getfixturevalue("gxx")
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "new.h").write_text("#define NEW 1\n")
    (tmp_path / "options").write_text("-Iinc")
    (tmp_path / "x.cu").write_text("")
    (tmp_path / "y.cu").write_text("#include <new.h>\n")
    refused = []
    for _, words, variables, source in (each for each in SPELLINGS if each[0] == compiler):
        command = [
            program,
            *words.split(),
            "-x",
            "cu" if compiler == "nvcc" else "c++",
            "-M",
            "y.cu" if source else "x.cu",
        ]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )
        if "inc/new.h" not in done.stdout:
            refused.append((words, variables, done.stderr))
    assert not refused


@pytest.mark.parametrize("name", COMPILER_ENVIRONMENT)
def test_each_variable_of_a_compilers_counts(name: str, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = [BuildHashes(project.plan())]
    for value in ("", "a", "b"):
        monkeypatch.setenv(name, value)
        hashes.append(BuildHashes(project.plan()))
    assert len({each.objects["c.o"] for each in hashes}) == len({each.library for each in hashes}) == 4


CCBIN = ("-ccbin {}", "-ccbin={}", "--compiler-bindir {}", "--compiler-bindir={}", "--options-file host")


@pytest.mark.parametrize("place", ["program", "folder", "relative", "on PATH"])
@pytest.mark.parametrize(
    ("through", "spelling"),
    [
        ("NVCC_CCBIN", "{}"),
        *((through, each) for through in ("flags", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS") for each in CCBIN),
    ],
)
def test_the_host_compiler_counts_however_it_is_named(
    through: str, spelling: str, place: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version, in each place that nvcc takes."""
    host = project.root / "hosts" / "gcc"
    host.parent.mkdir()
    folder = project.plan().folder
    folder.mkdir(parents=True)
    named = {
        "program": str(host),
        "folder": str(host.parent),
        "relative": os.path.relpath(host, folder),
        "on PATH": "gcc",
    }[place]
    monkeypatch.setenv("PATH", f"{host.parent}:{os.environ['PATH']}" if place == "on PATH" else os.environ["PATH"])
    (folder / "host").write_text(f"-ccbin {shlex.quote(named)}\n")
    words = [word.format(named) for word in spelling.split()]
    if through == "flags":
        project = project.with_flags(*words)
    else:
        monkeypatch.setenv(through, named if through == "NVCC_CCBIN" else shlex.join(words))
    hashes = []
    for version in ("12.2.0", "13.2.0"):
        host.write_text(f"#!/bin/sh\necho gcc {version}\n")
        host.chmod(0o755)
        hashes.append(BuildHashes(project.plan()).objects["c.o"])
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    "what", ["-DX=2", "-D X=2", "-UX", "-O2", "-gencode=arch=compute_120a,code=sm_120a", "-Xptxas -O1"]
)
def test_each_other_flag_counts(what: str, project: Project) -> None:
    hashes = [BuildHashes(each.plan()) for each in (project, project.with_flags(*project.flags, *what.split()))]
    assert hashes[0].objects["c.o"] != hashes[1].objects["c.o"]
    assert hashes[0].library != hashes[1].library


def test_a_script_in_place_of_a_compiler_or_before_it_counts(project: Project) -> None:
    """By its content: an edit may leave its size and what it prints for ``--version``. So does ``nvcc.profile``."""
    wrapper = project.root / "wrapper"
    wrapper.write_text('#!/bin/sh\nexec "$@" -DA\n')
    wrapper.chmod(0o755)

    def library_hash() -> str:
        plan = project.plan()
        return BuildHashes(
            replace(plan, steps=tuple(replace(step, launcher=(str(wrapper),)) for step in plan.steps))
        ).library

    hashes = [library_hash()]
    wrapper.write_text('#!/bin/sh\nexec "$@" -DB\n')
    hashes.append(library_hash())
    project.change_compiler("# Understands", "# another\n")
    hashes.append(library_hash())
    project.compiler.write_text(project.compiler.read_text().replace("# another\n", "# changed\n"))
    hashes.append(library_hash())
    profile = project.compiler.parent / "nvcc.profile"
    for flags in ("-O1", "-O2"):
        profile.write_text(f"PTXAS_FLAGS += {flags}\n")
        hashes.append(library_hash())
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    "words",
    [
        "{0}/libx.a",
        "-L{0} -lx",
        "-L {0} -lx",
        "-L{0} -l:libx.a",
        "-Wl,--version-script={0}/libx.a",
        "-Wl,-T,{0}/libx.a",
        "@{0}/libx.a",
    ],
)
def test_what_a_linker_takes_over_counts(words: str, project: Project, tmp_path: Path) -> None:
    """A shared library does not: it is read when the module is loaded."""
    (tmp_path / "libx.so").write_text("shared")
    hashes = []
    for text in ("one", "two"):
        (tmp_path / "libx.a").write_text(text)
        shared = str(tmp_path / "libx.so")
        plan = replace(
            project.plan(), link_flags=("-shared", shared, *(word.format(tmp_path) for word in words.split()))
        )
        hashes.append(BuildHashes(plan))
    assert hashes[0].library != hashes[1].library
    assert hashes[0].objects == hashes[1].objects
    (tmp_path / "libx.so").write_text("another")
    assert BuildHashes(plan).library == hashes[1].library


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
    real = build_hash.read_file
    monkeypatch.setattr(build_hash, "read_file", lambda path: (read.append(Path(path).name), real(path))[1])
    assert project.fresh
    compiler = ["nvcc"]  # a script: its content is its identity
    assert sorted(name for name in read if not name.startswith("demo-")) == sorted(
        [*compiler, "digests.json", "a.cu", "b.cu", "c.cu", "one.h", "two.h"]
    )
    monkeypatch.setattr(build_hash, "_YOUNG", -3600.0)
    assert project.fresh  # writes the memo
    read.clear()
    assert project.fresh
    assert read == ["digests.json", *compiler]
    header = project.root / "src" / "two.h"
    before = header.stat()
    header.write_text("int TWO;\n")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    read.clear()
    assert not project.fresh
    assert sorted(read) == ["digests.json", *compiler, "two.h"]


def test_a_file_that_was_just_changed_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next change may bear the same times."""
    path, memo = tmp_path / "x.h", tmp_path / "memo"
    path.write_text("one")
    now = time.time_ns()
    for age, remembered in ((0, False), (3_000_000_000, True)):
        monkeypatch.setattr(build_hash, "_state", lambda path, age=age: [3, 1, now - age, 1])
        files = Files(memo)
        before = files.digest(path)
        files.remember()
        path.write_text("two")
        assert (Files(memo).digest(path) == before) == remembered
        path.write_text("one")


def test_a_file_is_remembered_from_two_seconds_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memo = tmp_path / "x.h", tmp_path / "memo"
    path.write_text("one")
    monkeypatch.setattr(build_hash.time, "time", lambda: 1000.0)
    for changed, remembered in ((998_000_000_001, False), (998_000_000_000, False), (997_999_999_999, True)):
        monkeypatch.setattr(build_hash, "_state", lambda path, changed=changed: [3, 1, changed, 1])
        files = Files(memo)
        files.digest(path)
        files.remember()
        assert (str(path) in build_hash._read_memo(memo)) == remembered, changed


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
        json.dumps({path: [[0, 0, 0, 0], "0" * 64, []] for path in BuildHashes(project.plan()).sources["b.o"]})
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
