# SPDX-License-Identifier: Apache-2.0
"""The build hash: a hash of all inputs of an object, a library or a prebuilt wheel's library; the file is named by it.

A changed flag, compiler or header changes the hash and so the name. A file with the current hash is therefore what a
build would make now: no record decides, and no file can be out of date. The hashed files are the source and the files
that its ``#include`` lines reach through the command's include folders. All such lines count, whatever ``#if``
surrounds them, and each counts the file of that name in every folder, so neither macros nor the order of folders
matters. Only a name in ``"..."`` that exists beside the including file means that file alone. The system's headers lie
in none of these folders; the host compiler's version stands for them. Flags are read in all spellings that nvcc and GCC
take, also in lists that nvcc hands on (``-Xcompiler``) and in options files.

A memo saves reading and hashing: it holds each file's digest with the size, times and inode that it had when hashed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
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


def hash_of(*facts: Any) -> str:
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


def digest_of(path: str | Path) -> str:
    """Hex SHA-256 of a file's content.

    Raises:
        OSError: it is no regular file, or cannot be read.
    """
    return hashlib.sha256(read_file(path)).hexdigest()


def hash_file(path: str | Path) -> str | None:
    """:func:`digest_of`; None if it is no regular file or cannot be read."""
    try:
        return digest_of(path)
    except (OSError, ValueError):  # the latter: no path at all
        return None


_TAKE_A_VALUE = {
    "folder": (
        *("-I", "-isystem", "-iquote", "-idirafter", "--include-path", "--system-include"),
        *("--include-directory", "--include-directory-after"),
    ),
    "header": ("-include", "-imacros", "--pre-include", "--include", "--imacros"),
    "options": ("-optf", "--options-file", "@"),
    "host compiler": ("-ccbin", "--compiler-bindir"),
    "file": ("-specs", "--specs", "-fplugin", "-fprofile-use", "-fauto-profile", "-wrapper"),
}
"""The flags of nvcc and GCC that name an input: the next word, or what follows a ``=``."""

_JOINED = ("-I", "-isystem", "-iquote", "-idirafter", "-include", "-imacros", "@")
"""Those of them whose value may follow at once."""

_LONGEST_FIRST = sorted(
    ((flag, kind) for kind, flags in _TAKE_A_VALUE.items() for flag in flags), key=lambda each: -len(each[0])
)

_HANDS_ON = r"(?:-X[a-z]+|--[a-z]+-options)"
"""A flag that hands a list of words to another program: ``-Xcompiler``, ``--ptxas-options``."""


def words_of(text: str) -> list[str]:
    """The words of a variable's value or of an options file."""
    try:
        return shlex.split(text)
    except ValueError:  # a quote that does not close
        return text.split()


def _inputs(words: Sequence[str], start: str) -> list[tuple[str, str]]:
    """The inputs that a command's flags name, and those of the options files among them.

    Args:
        words: The command's flags.
        start: The folder in which it runs.

    Returns:
        Kind of the flag, one of :data:`_TAKE_A_VALUE`, and its value. A value with commas is also each of its parts.
    """
    found: list[tuple[str, str]] = []
    left, opened = [*words], set[str]()
    while left:
        flat = _flatten(left)
        left = []
        for word, after in zip(flat, [*flat[1:], ""], strict=True):
            kind, value = _named_by(word, after)
            values = dict.fromkeys([value, *value.split(",")]) if value else {}
            found += [(kind, each) for each in values]
            for path in (os.path.join(start, each) for each in values if kind == "options"):
                if path not in opened:
                    opened.add(path)
                    with contextlib.suppress(OSError):
                        left += words_of(read_file(path).decode(errors="replace"))
    return found


def _flatten(words: Sequence[str]) -> list[str]:
    """The words, where each list that a flag hands on is the words in it."""
    flat: list[str] = []
    handed = False
    for word in words:
        flag, equals, listed = word.partition("=")
        if re.fullmatch(_HANDS_ON, word):
            handed = True
            continue
        if equals and re.fullmatch(_HANDS_ON, flag):
            flat += listed.split(",")
        elif handed or re.match("-W[alp],", word):
            flat += word.split(",")
        else:
            flat.append(word)
        handed = False
    return flat


def _named_by(word: str, after: str) -> tuple[str, str]:
    """Kind and value of a word that is one of :data:`_TAKE_A_VALUE`; empty ones of another."""
    for flag, kind in _LONGEST_FIRST:
        if word == flag:
            return kind, after
        if word.startswith(f"{flag}="):
            return kind, word[len(flag) + 1 :]
        if flag in _JOINED and word.startswith(flag):
            return kind, word[len(flag) :]
    return "", ""


def searched_by(words: Sequence[str], start: str | Path) -> tuple[list[str], list[str]]:
    """The folders in which a command looks for headers, and the files that it reads in addition to the source.

    Args:
        words: The command's flags.
        start: The folder in which it runs.
    """
    start = os.path.realpath(start)
    inputs = _inputs(words, start)

    def named(*kinds: str) -> list[str]:
        return list(dict.fromkeys(value for kind, value in inputs if kind in kinds))

    folders = [os.path.normpath(os.path.join(start, folder)) for folder in named("folder")]
    # A header that a flag names is looked for as one of an #include line.
    headers = [os.path.join(folder, name) for name in named("header") for folder in folders]
    files = [os.path.join(start, name) for name in named("header", "options", "file")]
    return folders, [os.path.normpath(path) for path in [*files, *filter(os.path.isfile, headers)]]


def host_compilers(words: Sequence[str], start: str | Path) -> list[str]:
    """The host compilers that a command's flags name to nvcc, each a program or a folder that holds ``gcc`` or ``g++``.

    Args:
        words: The command's flags.
        start: The folder in which it runs.
    """
    start = os.path.realpath(start)
    programs = []
    for kind, value in _inputs(words, start):
        path = os.path.join(start, value)
        if kind == "host compiler" and os.path.isdir(path):
            programs += [os.path.join(path, name) for name in ("gcc", "g++")]
        elif kind == "host compiler":
            programs.append(path if "/" in value else value)
    return programs


def linked_by(words: Sequence[str], start: str | Path) -> list[str]:
    """The files whose content a linker takes over: objects, archives and scripts. Not shared libraries, which are read
    when the library is loaded.

    Args:
        words: The linker's flags.
        start: The folder in which it runs.
    """
    start, flat = os.path.realpath(start), _flatten(words)
    pairs = [*zip(flat, [*flat[1:], ""], strict=True)]
    folders = [word[2:] or after for word, after in pairs if word.startswith("-L")]
    names = [re.sub("^(?:@|-T)", "", word.rpartition("=")[2]) for word in flat]
    for name in (word[2:] for word in flat if word.startswith("-l")):
        file = name[1:] if name.startswith(":") else f"lib{name}.a"
        names += [os.path.join(folder, file) for folder in folders]
    paths = dict.fromkeys(os.path.normpath(os.path.join(start, name)) for name in names)
    return [path for path in paths if os.path.isfile(path) and ".so" not in os.path.basename(path)]


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
        """Path -> digest of the sources and of all files that ``#include`` lines reach from them; None where a source
        is no file.

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
        lines = [] if b"\0" in data[:1024] else _INCLUDE.findall(data)  # of a library
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
