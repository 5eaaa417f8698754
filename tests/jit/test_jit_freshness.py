# SPDX-License-Identifier: Apache-2.0
"""Dependency files, hashes, atomic writing, and the manifest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.jit.sm12x.freshness import (
    ABSENT,
    Manifest,
    ObjectRecord,
    Roots,
    hash_file,
    hash_strings,
    parse_depfile,
    search_of,
    write_atomically,
)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("a.o: a.cu", ["a.cu"]),
        ("a.o : a.cu \\\n    /usr/include/b.h \\\n    c.h\n", ["a.cu", "/usr/include/b.h", "c.h"]),
        ("a.o: a.cu \\\r\n b.h", ["a.cu", "b.h"]),
        ("a.o: with\\ space.h da$$h.h ha\\#sh.h", ["with space.h", "da$h.h", "ha#sh.h"]),
        ("/x:y/a.o: a.cu a.cu", ["a.cu"]),
        ("a.o:\n", []),
        ("", []),
    ],
)
def test_parse_depfile(text: str, paths: list[str]) -> None:
    assert parse_depfile(text) == paths


@given(st.lists(st.text("abc/.$# -_", min_size=1).map(lambda s: "x" + s + "x"), unique=True))
def test_parse_depfile_undoes_make_quoting(paths: list[str]) -> None:
    quoted = [path.replace("$", "$$").replace("#", "\\#").replace(" ", "\\ ") for path in paths]
    assert parse_depfile("out.o: " + " \\\n ".join(quoted) + "\n") == paths


def test_hashes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert hash_file(path) == ABSENT
    path.write_bytes(b"abc")
    assert hash_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    assert hash_strings(["ab", "c"]) != hash_strings(["a", "bc"]) != hash_strings(["abc"])


def test_write_atomically(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "f"
    write_atomically(path, "one")
    inode = path.stat().st_ino
    write_atomically(path, "one")
    assert path.stat().st_ino == inode
    write_atomically(path, b"two")
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["f"]


def test_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_roots_name_paths_and_find_them_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    here = Roots({"tree": tmp_path / "link", "inner": tmp_path / "a" / "inner"})
    for path, name in [
        (tmp_path / "a" / "x.h", "tree:x.h"),
        (tmp_path / "link" / "x.h", "tree:x.h"),  # as given, and as it is
        (tmp_path / "a" / "inner" / "y.h", "inner:y.h"),
        (tmp_path / "a", "tree:"),
        (tmp_path / "another" / "x.h", str(tmp_path / "another" / "x.h")),
    ]:
        assert here.name(str(path)) == name
    there = Roots({"tree": Path("/elsewhere"), "inner": Path("/far")})
    assert there.path("tree:x.h") == "/elsewhere/x.h"
    assert there.path("inner:y.h") == "/far/y.h"
    assert there.path("/usr/a:b.h") == "/usr/a:b.h"
    assert there.path("unknown:x.h") == "unknown:x.h"


def test_search_of(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        (folder / "sub").mkdir(parents=True)
    read = [str(second / "sub" / "x.h"), str(first / "y.h"), "/elsewhere/z.h"]
    folders = [("-I", str(first)), ("-isystem", str(second))]
    roots = Roots({"t": tmp_path})
    assert search_of(read, folders, roots) == ["-I t:first", "-isystem t:second"]
    assert search_of(read[2:], folders, roots) == []
    # A folder that offers nothing that was read does not count, wherever it stands.
    for place in range(3):
        more = [*folders[:place], ("-I", str(third)), *folders[place:]]
        assert search_of(read, more, roots) == search_of(read, folders, roots)
    assert search_of(read, folders[::-1], roots) != search_of(read, folders, roots)
    assert search_of(read, folders[:1], roots) == ["-I t:first"]
    (first / "sub" / "x.h").touch()
    (second / "y.h").touch()  # later than what was read: no matter
    assert search_of(read, folders, roots) == ["-I t:first", "-isystem t:second", "t:first/sub/x.h"]


def test_manifest_round_trip(tmp_path: Path) -> None:
    def record(**files: str) -> ObjectRecord:
        return ObjectRecord("cmd", files, "search", "content", 5, 1.5)

    manifest = Manifest("m", {"a.o": record(h="1", g="2"), "b.o": record(h="1"), "c.o": record(h="3")}, "link", "lib")
    path = tmp_path / "manifest.json"
    manifest.write(path)
    assert Manifest.read(path, "m") == manifest
    assert Manifest.read(path, "other") == Manifest("other")
    assert Manifest.read(tmp_path / "none", "m") == Manifest("m")
