# SPDX-License-Identifier: Apache-2.0
"""The content key: a hash of all inputs of an object, a library or a prebuilt wheel's library; the file is named by it.

A changed flag, compiler or header changes the key and so the name. A file with the current key is therefore what a
build would make now: no record is kept, and no file can be out of date. The hashed files are the source and the files
that its ``#include`` lines reach through the command's include folders. All such lines count, whatever ``#if``
surrounds them, and each counts the file of that name in every folder, so neither macros nor the order of folders
matters. Only a name in ``"..."`` that exists beside the including file means that file alone. The system's headers lie
in none of these folders; the host compiler's version stands for them.

A memo saves reading and hashing: it holds each file's digest with the size, times and inode that it had when hashed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .trust import read_file, write_atomically

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include(_next)?[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)

_YOUNG = 2.0
"""Seconds within which a second change may leave a file's times as they are: the memo leaves out files younger than
this."""


def key_of(*facts: Any) -> str:
    """The hash of facts that ``repr`` spells out, short enough for a file's name."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


def namer(roots: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces folders' paths by their names in a path or a flag, so that it is the same in another
    checkout or cache.

    Args:
        roots: Name -> folder. If one folder lies in another, the inner one is replaced.
    """
    names = {folder: f"{name}:" for name, folder in roots.items()}
    inner_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = re.compile(rf"(?:{inner_first})(?=/|$)")
    return lambda text: pattern.sub(lambda found: names[found[0]], text) if names else text


def hash_file(path: str | Path) -> str | None:
    """Hex SHA-256 of a regular file's content; None when it is none or cannot be read."""
    try:
        return hashlib.sha256(read_file(path)).hexdigest()
    except (OSError, ValueError):  # the latter: no path at all
        return None


def searched_by(words: Sequence[str], start: str | Path) -> tuple[list[str], list[str]]:
    """The folders in which a command looks for headers, and the files that it reads before the source.

    Args:
        words: The command's flags.
        start: The folder in which it runs.
    """
    folders, files = [], []
    # Also what stands in a list that a flag hands on, as in --compiler-options=-Ia,-Ib.
    pieces = [piece for word in words for piece in dict.fromkeys([word, *re.split("[=,]", word)])]
    for piece, after in zip(pieces, [*pieces[1:], ""], strict=True):
        if joined := re.fullmatch("(?:-I|-isystem|-iquote|-idirafter)(.+)", piece):
            folders.append(joined[1])
        elif piece in ("-I", "-isystem", "-iquote", "-idirafter", "--include-path", "--system-include"):
            folders.append(after)
        elif piece in ("-include", "--pre-include"):
            files.append(after)
    start = os.path.realpath(start)

    def absolute(paths: Iterable[str]) -> list[str]:
        return [os.path.normpath(os.path.join(start, path)) for path in dict.fromkeys(paths)]

    return absolute(folders), absolute(files)


class _Seen(NamedTuple):
    """A file as it was when it was read; ``includes``: ``"x.h`` or ``<x.h``, with the opening mark of its line."""

    state: list[int]
    digest: str
    includes: list[str]


def _state(path: str) -> list[int] | None:
    """Size, times and inode, one of which changes with a file's content; None if there is no regular file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


class Files:
    """Digests of files, each as the file was when it was first asked for.

    Args:
        memo: The file of digests that are known already; it need not be there.
    """

    def __init__(self, memo: Path | None = None) -> None:
        self._memo, self._known = memo, _read_memo(memo)
        self._seen: dict[str, _Seen | None] = {}
        self._entries: dict[str, frozenset[str]] = {}
        self._real = functools.cache(os.path.realpath)
        self._found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        self._hashed = False

    def digest(self, path: str | Path) -> str | None:
        """Hex SHA-256; None of what is no regular file."""
        seen = self._look(str(path))
        return seen.digest if seen else None

    def read_by(self, sources: Iterable[str], folders: Sequence[str]) -> dict[str, str | None]:
        """Path -> digest of the sources and of all files that ``#include`` lines reach from them; None where a source is
        no file.

        Args:
            sources: Absolute paths.
            folders: Absolute paths of the folders that are searched; what lies beside a file is found as well.
        """
        searched = tuple(folders)
        found: dict[str, str | None] = {}
        left = list(sources)
        while left:
            path = left.pop()
            if path not in found:
                found[path] = self.digest(path)
                left += self._reached_from(path, searched)
        return found

    def _reached_from(self, path: str, folders: tuple[str, ...]) -> Iterator[str]:
        seen = self._look(path)
        beside = (os.path.dirname(path),)
        for mark, name in ((line[0], line[1:]) for line in (seen.includes if seen else ())):
            there = list(self._named(name, beside)) if mark == '"' else []
            yield from there or self._lying_in(name, folders)

    def _lying_in(self, name: str, folders: tuple[str, ...]) -> list[str]:
        key = name, folders
        if key not in self._found:
            self._found[key] = list(self._named(name, folders))
        return self._found[key]

    def _named(self, name: str, folders: tuple[str, ...]) -> Iterator[str]:
        """The files of that name; in each folder its entries tell at once that most are not there."""
        top = name.split("/", 1)[0]
        for folder in folders:
            if top in ("", ".", "..") or top in self._listed(folder):
                path = os.path.join(folder, name)
                if ".." in name:  # else files that include each other so have ever longer names
                    path = os.path.join(self._real(os.path.dirname(path)), os.path.basename(path))
                if self._look(path):
                    yield path

    def _listed(self, folder: str) -> frozenset[str]:
        if folder not in self._entries:
            try:
                self._entries[folder] = frozenset(os.listdir(folder))
            except OSError:
                self._entries[folder] = frozenset()
        return self._entries[folder]

    def _look(self, path: str) -> _Seen | None:
        if path not in self._seen:
            state = _state(path)
            known = self._known.get(path)
            if state is not None and (known is None or known.state != state):
                known = self._read(path, state)
            self._seen[path] = known if state is not None else None
        return self._seen[path]

    def _read(self, path: str, state: list[int]) -> _Seen | None:
        try:
            data = read_file(path)
        except OSError:
            return None
        self._hashed = True
        library = path.endswith(".so")
        lines = [] if library else _INCLUDE.findall(data)
        includes = [("<" if after else mark.decode()) + os.fsdecode(name) for after, mark, name in lines]
        return _Seen(state, hashlib.sha256(data).hexdigest(), list(dict.fromkeys(includes)))

    def changed(self, paths: Iterable[str]) -> list[str]:
        """The paths whose files were edited since they were asked for."""
        return [path for path in paths if not self._is_as_it_was(path)]

    def _is_as_it_was(self, path: str) -> bool:
        seen, now = self._seen[path], _state(path)
        if seen is None or now is None:
            return seen is None and now is None
        # The inode does not count: some network file systems give a file another one each time.
        return seen.state[:3] == now[:3]

    def remember(self) -> None:
        """Write the memo, if a file was hashed; where it cannot be written, the next process hashes again."""
        limit = (time.time() - _YOUNG) * 1e9
        old = {path: seen for path, seen in self._seen.items() if seen and seen.state[2] < limit}
        if self._memo is not None and self._hashed and old != self._known:
            with contextlib.suppress(OSError):
                write_atomically(self._memo, json.dumps(old))


def _read_memo(memo: Path | None) -> dict[str, _Seen]:
    try:
        data = json.loads(read_file(memo)) if memo is not None else {}
        entries = {path: _Seen(*entry) for path, entry in data.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    whole = all(isinstance(seen.digest, str) and _are_names(seen.includes) for seen in entries.values())
    return entries if whole else {}


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) and name.startswith(("<", '"')) for name in names)
