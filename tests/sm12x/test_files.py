# SPDX-License-Identifier: Apache-2.0
"""Output is written whole or not at all; errors of JSON name what was read, the place and what was expected."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flashinfer_sm12x import files
from flashinfer_sm12x.build import trust
from flashinfer_sm12x.counted import counted
from flashinfer_sm12x.files import json_file, json_object, replace_bytes, written_whole


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


Writer = Callable[[Path, bytes], None]


def through_a_block(path: Path, data: bytes) -> None:
    with written_whole(path) as scratch:
        scratch.write_bytes(data)


WRITERS: dict[str, Writer] = {"block": through_a_block, "bytes": replace_bytes, "cache": trust.write_atomically}


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_of_the_cache_alone_has_one_mode_whatever_the_umask(writer: str, umask: int, tmp_path: Path) -> None:
    old = os.umask(umask)
    try:
        WRITERS[writer](tmp_path / "x", b"new")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == (0o644 if writer == "cache" else 0o666 & ~umask)


@pytest.mark.parametrize("writer", ["bytes", "cache"])
def test_a_link_in_a_folder_of_ours_becomes_a_file_and_what_it_leads_to_stays(writer: str, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("old")
    (tmp_path / "link").symlink_to("blob")
    WRITERS[writer](tmp_path / "link", b"new")
    assert (tmp_path / "blob").read_text() == "old"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text() == "new"


@pytest.mark.parametrize("writer", WRITERS)
def test_the_new_name_comes_when_the_bytes_are_on_the_disk_and_the_folder_after_it(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = tmp_path / "x", []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"{os.fstat(handle).st_size} bytes")
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", synced)
    monkeypatch.setattr(files.os, "replace", lambda *names: (done.append("name"), replace(*names)))
    WRITERS[writer](path, b"four")
    assert done == ["4 bytes", "name", "folder"]


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders_is_written_to(
    number: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", refused)
    with pytest.raises(OSError, match=str(tmp_path / "x")) if fails else contextlib.nullcontext():
        replace_bytes(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_that_cannot_be_written_is_an_error_with_the_files_name(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refused(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(files.os, "open", refused)
    with pytest.raises(PermissionError, match=rf"Permission denied: '{tmp_path}/x'$"):
        WRITERS[writer](tmp_path / "x", b"new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_threads_that_write_one_file_leave_the_whole_of_one(writer: str, tmp_path: Path) -> None:
    blocks = [bytes([number]) * 50_000 for number in range(8)]
    threads = [threading.Thread(target=WRITERS[writer], args=(tmp_path / "x", block)) for block in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "x").read_bytes() in blocks
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


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
        ('{"a": NaN}', "is not JSON: NaN is no JSON"),
        ('{"a": -1e999}', "is not JSON: -1e999 is too large for a number"),
        ('{"a": ' + "9" * 5000 + "}", None),  # in Python's words
    ],
)
def test_what_is_no_object_is_named(text: str | bytes, problem: str | None) -> None:
    with pytest.raises(ValueError, match=r"is (not )?JSON") as caught:
        json_object(text, "--option 'x'", "an object such as {}")
    if problem is None:
        problem = re.match("--option 'x' (is not JSON: .*digits.*); it must", str(caught.value))[1]
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
