# SPDX-License-Identifier: Apache-2.0
"""The list of changes that tests must notice, and the tool that applies them, on a toy project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import slow_tests
from layer_toys import REPO, load_tool

mutate = load_tool("mutate")
TOY = {
    "toy.py": "def area(a, b):\n    assert a >= 0\n    return a * b\n",
    "tests/separate_instances.py": "",
    "emulator/python/vsm/__init__.py": "",
    "emulator/python/vsm/preload.py": "",
    "tests/test_toy.py": "import toy\n\n\ndef test_area():\n    assert toy.area(2, 3) == 6\n",
}

ONLY_TEST_ALL = [
    "packed rows are copied from 32 bits of bytes",
    "the grid counter is raised relaxed and without its fence",
    "blocks count themselves without a fence",
    "binaries for the family do without fences",
    "outputs of a layer are counted in 32 bits",
    "partial outputs are written at 32 bits",
    "packed rows are counted in 32 bits of bytes",
    "a dense layer's tokens are counted in 32 bits of bytes",
    "partial outputs are read at 32 bits",
    "outputs of a split-K dense kernel are counted in 32 bits",
    "scales of a dense layer's tokens have no room for what fills their last word",
    "logits are searched at 32 bits",
    "doctor: uv is asked for an option of pip's",
    "doctor: a Linux driver in a guest",
]
"""The mutations that only slow tests notice, in the order of the list."""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    root = tmp_path / "toy"
    for name, text in TOY.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    subprocess.run(["git", "-C", str(root), "add", "."], check=True)
    return root


def test_what_goes_and_what_comes_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text('[changes.f]\na = [["t"], "i[0] = [-one-]{+++two+};[-\\n  wait();-]"]')
    (mutation,) = mutate.read_list(path)
    assert (mutation.old, mutation.new) == ("i[0] = one;\n  wait();", "i[0] = ++two;")


def test_the_list_can_be_applied() -> None:
    mutations = mutate.read_list(REPO / mutate.LIST)
    compiled = [mutation for mutation in mutations if mutation.file.startswith(("include/", "csrc/"))]
    assert len(mutations) >= 60
    assert len(compiled) >= 40
    for mutation in mutations:
        text = (REPO / mutation.file).read_text(encoding="utf-8")
        assert mutate.changed(text, mutation) != text


def test_every_test_of_the_lists_can_be_collected() -> None:
    """Parameters included, under the plugin that empties the instance tables; otherwise a later baseline run would
    fail.

    Slow tests are checked as well, because a renamed test would no longer be slow. And the page must count the changes
    all of whose tests are slow.
    """
    mutations = mutate.read_list(REPO / mutate.LIST)
    tests = {test for mutation in mutations for test in mutation.tests} | set(slow_tests.LONG)
    files = {re.split("::| -k ", test, maxsplit=1)[0] for test in tests}
    paths = os.pathsep.join(map(str, (REPO, REPO / "tests")))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *mutate.PLUGINS, *files]
    environment = {**os.environ, "PYTHONPATH": paths}
    found = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    nodes = {test: [node for node in found.stdout.splitlines() if slow_tests.covers(test, node)] for test in tests}
    for test in tests:
        _, word_given, word = test.partition(" -k ")
        assert not word_given or word.isidentifier(), f"{test}: one word, which pytest looks for in the names of tests"
        assert nodes[test], test
    noticed = [mutation for mutation in mutations if not mutation.equivalent]
    left = [
        mutation.name
        for mutation in noticed
        if all(slow_tests.is_slow(node) for test in mutation.tests for node in nodes[test])
    ]
    page = (REPO / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert left == ONLY_TEST_ALL
    assert f"{len(left)} of the mutations only slow tests notice" in page


def test_every_outcome(toy: Path, tmp_path: Path) -> None:
    def change(name: str, old: str, new: str, **more: str) -> object:
        return mutate.Mutation(name, "toy.py", old, new, ("tests/test_toy.py::test_area",), **more)

    mutations = [
        change("sum", "a * b", "a + b"),
        change("unchecked", "    assert a >= 0\n", ""),
        change("turned", "a * b", "b * a", equivalent="multiplication is commutative"),
        change("not so", "a * b", "a / b", equivalent="it is said"),
        change("gone", "a ** b", "a"),
    ]
    outcomes = mutate.run(mutations, toy, tmp_path / "work", jobs=2, limit=60)
    assert [(outcome.mutation.name, outcome.verdict) for outcome in outcomes] == [
        ("sum", "killed"),
        ("unchecked", "survived"),
        ("turned", "equivalent"),
        ("not so", "killed"),
        ("gone", "broken"),
    ]
    assert (toy / "toy.py").read_text() == TOY["toy.py"]
    first, *_, last = mutate.table(outcomes).splitlines()
    assert re.fullmatch(r"killed +\d+ s  sum: tests/test_toy\.py::test_area", first)
    assert last == "5 changes: 2 killed, 1 equivalent, 1 survived, 1 broken"


def test_the_checkout_may_be_another_users(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git refuses those unless told otherwise; CI may well run as another user than the one that cloned."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    refused = subprocess.run(["git", "-C", str(toy), "ls-files"], capture_output=True, text=True)
    if refused.returncode == 0:
        pytest.skip("this git is older than that rule, and takes any user's checkout")
    assert "dubious ownership" in refused.stderr
    mutate.copy_tree(toy, tmp_path / "copy")
    assert (tmp_path / "copy" / "toy.py").read_text() == TOY["toy.py"]


def test_the_command_fails_where_tests_of_the_days_changes_fail_anyway(toy: Path, tmp_path: Path) -> None:
    """As CI calls it: that of another day's change would pass."""
    (toy / "tools").mkdir()
    shutil.copy(REPO / "tools" / "mutate.py", toy / "tools")
    (toy / "tests" / "test_toy.py").write_text(
        TOY["tests/test_toy.py"] + "\n\ndef test_nothing():\n    assert toy.area(2, 3) == 7\n"
    )
    entry = '"{0}" = [["tests/test_toy.py::{0}"], "a[- * b-]"]\n'
    (toy / mutate.LIST).write_text('[changes."toy.py"]\n' + entry.format("test_area") + entry.format("test_nothing"))
    status = []
    for turn in range(2):
        command = [sys.executable, "tools/mutate.py", "--rotate", "1", "--turn", str(turn), "--jobs", "2"]
        done = subprocess.run(command, cwd=toy, capture_output=True, text=True)
        status.append(done.returncode)
        assert ("tests fail without any change" in done.stderr) == (turn == 1), done.stdout + done.stderr
    assert status == [0, 1]


def test_a_baseline_that_did_not_run_is_none(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no processes left")

    monkeypatch.setattr(mutate.Worker, "run_tests", refuse)
    mutation = mutate.Mutation("sum", "toy.py", "a * b", "a + b", ("tests/test_toy.py::test_area",))
    with pytest.raises(RuntimeError, match="no processes left"):
        mutate.run([mutation], toy, tmp_path / "work", jobs=1, limit=60)


@pytest.mark.parametrize(
    ("code", "text", "verdict"),
    [
        (0, "3 passed in 1.0s", "survived"),
        (0, "3 skipped in 1.0s", "broken"),
        (1, "FAILED tests/a.py::test_b[x y] - AssertionError: no", "killed"),
        (1, "E   flashinfer_sm12x.build.diagnosis.JitBuildError: building m failed: a.cu: error", "broken"),
        (2, "ERROR tests/a.py", "broken"),
        (4, "ERROR: not found: tests/a.py::test_c", "broken"),
        (-9, "", "killed"),
    ],
)
def test_verdicts(code: int, text: str, verdict: str) -> None:
    found, by = mutate.judge(code, text, "tests/a.py::test_b")
    assert found == verdict
    if "FAILED" in text:
        assert by == "tests/a.py::test_b[x y]"


def test_consecutive_turns_go_round_the_list() -> None:
    mutations = [mutate.Mutation(str(i), "f", "a", "b", ("t",), equivalent="x" if i == 3 else "") for i in range(8)]
    turns = [[mutation.name for mutation in mutate.rotated(mutations, 3, turn)] for turn in range(3)]
    assert turns == [["0", "1", "2"], ["4", "5", "6"], ["7", "0", "1"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[changes.f]\na = [[], "[-x-]"]', "a names no test"),
        ('[changes.f]\na = [["t"], "x"]', r"a is .*; it must be \[\[tests\], text with \[-old-\] or \{\+new\+\}\]"),
        ('[changes.f]\na = [["t"], "[-x-]"]\n[changes.g]\na = [["t"], "{+y+}"]', "a stands twice"),
        ('equivalent.b = "why"\n[changes.f]\na = [["t"], "[-x-]{+y+}"]', "equivalent names no change: b"),
    ],
)
def test_an_incomplete_entry_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        mutate.read_list(path)
