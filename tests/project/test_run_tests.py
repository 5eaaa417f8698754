# SPDX-License-Identifier: Apache-2.0
"""The tests that each of the three processes of ``make test`` gets."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import few_instances
import pytest
import slow_tests
from layer_toys import REPO, load_tool

from flashinfer.sm12x import instances

tool = load_tool("run_tests")
VIRTUAL = sorted(str(path.relative_to(REPO)) for path in REPO.glob("tests/*/test_virtual_*.py"))
HOST_FILE, VIRTUAL_FILE, EMULATOR_FILE = (
    "tests/project/test_prose.py",
    "tests/gemm/test_virtual_dense.py",
    "emulator/tests/tma",
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """The tests and the options of each process."""
    processes: list[tuple[list[str], list[str]]] = []

    def run(part: Any, jobs: int, given: list[str]) -> int:
        processes.append((part.tests, [*part.options, *given]))
        return 0

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.chdir(REPO)
    return processes


def test_all_tests_are_run_once(started: Any) -> None:
    assert tool.main(["--jobs", "2", "-m", "not slow"]) == 0
    (host, host_options), (device, _), (emulator, options) = started
    assert (host, sorted(device), emulator) == (["tests"], VIRTUAL, ["emulator/tests"])
    assert {option.removeprefix("--ignore=") for option in host_options} >= set(VIRTUAL)
    assert "--ignore=emulator/tests/upstream" in options
    assert host_options[-2:] == options[-2:] == ["-m", "not slow"]


def test_quick_tests_exist_and_are_run_with_few_instances(started: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--quick", "--jobs", "2"]) == 0
    (host, host_options), (device, device_options) = started
    assert sorted([*host, *device]) == sorted(tool.QUICK)
    assert host_options[-2:] == ["-m", "not slow"]
    assert device_options[-2:] == ["-p", "few_instances"]
    assert "minutes here the first time" in capsys.readouterr().out
    for test in tool.QUICK:
        file, _, name = test.partition("::")
        assert (REPO / file).exists(), test
        assert f"def {name.partition('[')[0]}" in ((REPO / file).read_text() if name else "def "), test
    rows = [row for row in few_instances.ROWS if row not in instances._INDICES]
    assert rows == []


@pytest.mark.parametrize("operator", ["moe", "gemm", "router", "attention"])
def test_quick_tests_cover_each_operator(operator: str) -> None:
    """On CPU tensors and by its kernels."""
    assert f"tests/{operator}" in tool.QUICK
    assert any(test.startswith(f"tests/{operator}/test_virtual_") for test in tool.QUICK)


def test_arguments_choose_among_all_tests_that_are_not_slow(started: Any) -> None:
    tool.main(["--quick", "--jobs", "2", "-k", "layer"])
    assert [tests for tests, _ in started] == [["tests"], VIRTUAL, ["emulator/tests"]]
    for _, options in started:
        assert options[-4:] == ["-m", "not slow", "-k", "layer"]
        assert "few_instances" not in options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((HOST_FILE,), [[HOST_FILE]]),
        ((f"{HOST_FILE}::test_each[a]", "-x"), [[f"{HOST_FILE}::test_each[a]"]]),
        ((f"./{VIRTUAL_FILE}",), [[VIRTUAL_FILE]]),
        (("--lf", EMULATOR_FILE), [[EMULATOR_FILE]]),
        ((HOST_FILE, VIRTUAL_FILE, EMULATOR_FILE), [[HOST_FILE], [VIRTUAL_FILE], [EMULATOR_FILE]]),
        (("tests/gemm",), [["tests/gemm"], [path for path in VIRTUAL if path.startswith("tests/gemm/")]]),
        (("-k", "docs"), [["tests"], VIRTUAL, ["emulator/tests"]]),  # a folder has that name
        (("--ignore", "tests/gemm"), [["tests"], VIRTUAL, ["emulator/tests"]]),
        ((".",), [["tests"], VIRTUAL, ["emulator/tests"]]),
        ((str(REPO / HOST_FILE),), [[HOST_FILE]]),
    ],
)
def test_what_is_named_is_all_that_is_run(started: Any, words: tuple[str, ...], expected: list[list[str]]) -> None:
    assert tool.main(["--jobs", "2", *words]) == 0
    assert [sorted(tests) for tests, _ in started] == expected
    for _, options in started:
        assert not any(Path(word).exists() for word in options if word not in words)


def test_folders_take_the_place_of_all_where_no_test_is_named(started: Any) -> None:
    tool.main(["--among", "tests/jit", "tests/layer", "--jobs", "2", "-m", "privileges"])
    assert started == [(["tests/jit", "tests/layer"], started[0][1])]
    assert started.pop()[1][-2:] == ["-m", "privileges"]
    tool.main(["--among", "tests/jit", "--jobs", "2", HOST_FILE])
    assert [tests for tests, _ in started] == [[HOST_FILE]]


def test_the_emulator_has_slow_tests_of_other_peoples_kernels_only(started: Any) -> None:
    tool.main(["-m", "slow"])
    assert len(started) == 2
    tool.main(["--upstream", "-m", "slow"])
    assert started[-1][0] == ["emulator/tests/upstream"]
    assert not any("ignore" in option for option in started[-1][1])


@pytest.mark.parametrize("days", [2, 3])
def test_slow_tests_are_shared_out_among_days(started: Any, days: int) -> None:
    """Each is one of one day; the emulator's, which have another conftest, are not."""
    tool.main(["--rotate", str(days), "--upstream", "-m", "slow"])
    today = datetime.date.today().toordinal() % days
    for tests, options in started:
        shares = [option for option in options if option.startswith("--slow-share")]
        assert shares == ([] if tests[0].startswith("emulator/") else [f"--slow-share={today}/{days}"])
    for entry in slow_tests.LONG:
        node = entry if entry.endswith("]") else f"{entry.replace(' -k ', '::test_')}[a]"
        place = [slow_tests.LONG.index(entry) % days]
        assert days_of(node, days) == (list(range(days)) if entry in slow_tests.EVERY_DAY else place)


def days_of(node: str, days: int) -> list[int]:
    return [day for day in range(days) if not slow_tests.left_for_another_day(node, f"{day}/{days}")]


@pytest.mark.parametrize("pattern", slow_tests.ON_ONE_DAY)
def test_tests_of_a_module_that_no_quick_test_compiles_run_on_one_day(pattern: str) -> None:
    words = pattern.replace(".*", "_")
    for name in "abcdefg":
        assert days_of(f"tests/gemm/test_virtual_{words}.py::test_{name}[1]", 7) == [slow_tests.ON_ONE_DAY[pattern]]
    assert {day for name in "abcdefg" for day in days_of(f"tests/gemm/test_virtual_dense.py::test_{name}[1]", 7)} > {0}


def test_no_quick_test_is_on_the_list_of_modules_that_none_compiles() -> None:
    dense = [node for node in slow_tests.noticing() if node.startswith("tests/gemm/test_virtual_dense")]
    assert len(dense) > 20
    assert [node for node in dense for pattern in slow_tests.ON_ONE_DAY if re.search(pattern, node)] == []


@pytest.mark.parametrize(
    ("words", "statuses", "expected"),
    [
        ((), (0, 0, 0), 0),
        ((), (1, 0, 0), 1),
        ((), (0, 5, 0), 1),
        (("-k", "x"), (5, 0, 5), 0),
        (("-k", "x"), (5, 0, 1), 1),
        (("-k", "x"), (5, 5, 5), 5),
    ],
)
def test_exit_status(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], statuses: tuple[int, ...], expected: int
) -> None:
    left = iter(statuses)
    monkeypatch.setattr(tool, "run", lambda *_: next(left))
    assert tool.main(words) == expected
    assert list(left) == []


@pytest.mark.parametrize(
    ("target", "words"), [("test", "--quick"), ("test-slow", "-m slow"), ("test-all", ""), ("test-host", "")]
)
def test_make_prints_nothing_of_its_own(target: str, words: str, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    done = [word for what in ("compiler", "env", "emulator") for word in ("-o", what)]
    command = ["make", *done, target, f"VENV={tmp_path}", f"PYTEST_ARGS={HOST_FILE} -x", "TEST_JOBS=2"]
    # If "make test DAYS=7" runs this test, these variables would have the inner make print the folder that it enters,
    # and give it the outer one's variables.
    outer = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "DAYS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    shown = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("tools/run_tests.py ")
    assert " ".join(f"--jobs 2 {words} {HOST_FILE} -x".split()) in shown
    assert shown.count("\n") == 1


def test_a_process_runs_pytest_and_gives_its_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    test = tmp_path / "test_one.py"
    test.write_text(
        "import pytest\ndef test_one(): assert 1 == 2\n@pytest.mark.skip(reason='why')\ndef test_two(): pass\n"
    )
    assert tool.main(["--jobs", "1", "-c", str(REPO / "pyproject.toml"), str(test)]) == 1
    out = capfd.readouterr().out
    assert "1 failed, 1 skipped" in out
    assert "SKIPPED" not in out.partition("short test summary")[2]
