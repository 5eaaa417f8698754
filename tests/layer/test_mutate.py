# SPDX-License-Identifier: Apache-2.0
"""The list of changes that tests must notice, and the tool that applies them, on a toy project."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from layer_toys import REPO
from test_project import load_tool

mutate = load_tool("mutate")
TOY = {
    "toy.py": "def area(a, b):\n    assert a >= 0\n    return a * b\n",
    "tests/testing/separate_instances.py": "",
    "tests/test_toy.py": "import toy\n\n\ndef test_area():\n    assert toy.area(2, 3) == 6\n",
}


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


def test_the_list_can_be_applied() -> None:
    mutations = mutate.read_list(REPO / mutate.LIST)
    compiled = [mutation for mutation in mutations if mutation.file.startswith(("include/", "csrc/"))]
    assert len(mutations) >= 60
    assert len(compiled) >= 40
    for mutation in mutations:
        text = (REPO / mutation.file).read_text(encoding="utf-8")
        assert mutate.changed(text, mutation) != text
        for test in mutation.tests:
            file, _, function = re.split(r" -k |\[", test)[0].partition("::")
            assert f"def {function}" in (REPO / file).read_text(encoding="utf-8"), test


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
        ("sum", "caught"),
        ("unchecked", "survived"),
        ("turned", "equivalent"),
        ("not so", "caught"),
        ("gone", "broken"),
    ]
    assert (toy / "toy.py").read_text() == TOY["toy.py"]
    lines = mutate.table(outcomes)
    assert lines["sum"].startswith("| sum | `toy.py` | caught | `test_toy.py::test_area` | ")
    assert mutate.summary(list(lines.values())) == "5 changes: 2 caught, 1 equivalent, 1 survived, 1 broken"
    assert mutate.read_table(mutate.page(list(lines.values()))) == lines


def test_the_checkout_may_be_another_users(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git refuses those unless told otherwise; CI may well run as another user than the one that cloned."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    refused = subprocess.run(["git", "-C", str(toy), "ls-files"], capture_output=True, text=True)
    assert "dubious ownership" in refused.stderr
    mutate.copy_tree(toy, tmp_path / "copy")
    assert (tmp_path / "copy" / "toy.py").read_text() == TOY["toy.py"]


def test_nothing_is_tried_where_tests_fail_anyway(toy: Path, tmp_path: Path) -> None:
    (toy / "toy.py").write_text("def area(a, b):\n    return 7\n")
    mutation = mutate.Mutation("other", "toy.py", "7", "8", ("tests/test_toy.py::test_area",))
    with pytest.raises(RuntimeError, match="tests fail without any change"):
        mutate.run([mutation], toy, tmp_path / "work", jobs=1, limit=60)


@pytest.mark.parametrize(
    ("code", "text", "verdict"),
    [
        (0, "3 passed in 1.0s", "survived"),
        (0, "3 skipped in 1.0s", "broken"),
        (1, "FAILED tests/a.py::test_b[x y] - AssertionError: no", "caught"),
        (1, "E   flashinfer.jit.sm12x.diagnosis.JitBuildError: building m failed: a.cu: error", "broken"),
        (2, "ERROR tests/a.py", "broken"),
        (4, "ERROR: not found: tests/a.py::test_c", "broken"),
        (-9, "", "caught"),
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


def test_an_incomplete_entry_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text('[[mutation]]\nname = "a"\nfile = "f"\nold = "x"\nnew = "y"\ntests = []\n')
    with pytest.raises(ValueError, match="a names no test"):
        mutate.read_list(path)
    path.write_text('[[mutation]]\nname = "a"\nfile = "f"\nold = "x"\n')
    with pytest.raises(ValueError, match="without"):
        mutate.read_list(path)
