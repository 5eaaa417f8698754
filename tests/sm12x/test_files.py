# SPDX-License-Identifier: Apache-2.0
"""Output is written whole or not at all; errors of JSON name what was read, the place and what was expected."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

import pytest

from flashinfer_sm12x.counted import counted
from flashinfer_sm12x.files import json_file, json_object, written_whole


class Full(Exception):
    pass


@pytest.mark.parametrize("before", [None, "a good one"])
def test_what_fails_while_it_is_written_leaves_what_was_there(before: str | None, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    if before is not None:
        path.write_text(before)
    with contextlib.suppress(Full), written_whole(path) as scratch:
        scratch.write_text("half of i")
        assert (path.read_text() if path.exists() else None) == before
        raise Full
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == (
        {} if before is None else {"out.csv": before}
    )


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_has_the_name_the_kind_and_the_mode_of_others(umask: int, tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    old = os.umask(umask)
    try:
        with written_whole(path) as scratch:
            assert scratch.suffix == ".svg", "programs choose a format by it"
            scratch.write_text("whole")
    finally:
        assert os.umask(old) == umask
    assert path.read_text() == "whole"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_a_device_is_written_itself(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "out")
    with written_whole(tmp_path / "link") as scratch:
        scratch.write_text("whole")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "out").read_text() == "whole"
    with written_whole(Path("/dev/null")) as scratch:
        assert scratch == Path("/dev/null")


@pytest.mark.parametrize(
    ("place", "error"), [("", "is a folder"), ("none/out", "No such file"), ("file/out", "Not a dir")]
)
def test_where_nothing_can_be_written_an_error_comes_first(place: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=error), written_whole(tmp_path / place):
        pytest.fail("it begins")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not JSON: Expecting value at line 1, column 1"),
        ('{"a":\n  x}', "is not JSON: Expecting value at line 2, column 3"),
        ("{", "is not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        (b"{\xff", "is not JSON: byte 1 is not UTF-8"),
        ("[" * 100_000, "is not JSON of a depth that can be read"),
        ("[]", "is JSON, but a list"),
        ('"x"', "is JSON, but a text"),
        ("true", "is JSON, but true or false"),
        ("null", "is JSON, but null"),
        ("1", "is JSON, but a number"),
    ],
)
def test_what_is_no_object_is_named(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=r"is (not )?JSON") as caught:
        json_object(text, "--option 'x'", "an object such as {}")
    assert str(caught.value) == f"--option 'x' {problem}; it must be an object such as {{}}"
    assert not isinstance(caught.value, json.JSONDecodeError)


def test_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert json_file(tmp_path / "a.json", "x") == {"a": [1]}
    (tmp_path / "a.json").write_text("no")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/a\.json is not JSON: .*; it must be a report$"):
        json_file(tmp_path / "a.json", "a report")
    with pytest.raises(IsADirectoryError):
        json_file(tmp_path, "a report")


def test_counts() -> None:
    assert [counted(n, "module") for n in (0, 1, 2, 1024)] == ["0 modules", "1 module", "2 modules", "1,024 modules"]
