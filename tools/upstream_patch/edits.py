# SPDX-License-Identifier: Apache-2.0
"""Edits of files, mostly upstream's. Each names its place, and the text that was there when the edit was written.

An ``edits.txt`` holds places, and the changes of each::

    === FILE                                the file
    === FILE HASH NAME.OF.A.DEFINITION      a function or class of a Python module, decorators included
    === FILE HASH 5 lines: THE FIRST ...    so many lines, by how the first begins
    --- after ANCHOR                        (before, replace) the one line of the place that begins so, blanks aside
    --- replace ANCHOR --> LAST             from that line to the next one that begins with LAST

A change's lines follow it, with their final indentation. The text of a place is checked by hash in the commit onto
which topics go (``-``: only the anchor is checked), so that a definition that upstream moved or changed is named before
anything is written.
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from . import style
from .compose import with_definitions
from .tree import Files

HASH_DIGITS = 12


def text_hash(text: str) -> str:
    """The hash of a text; its indentation and trailing blanks do not count."""
    lines = [line.rstrip() for line in textwrap.dedent(text).strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:HASH_DIGITS]


@dataclass(frozen=True)
class Place:
    """The place of an edit.

    Attributes:
        file: Path in upstream's tree.
        definition: Qualified name of a function or class of a Python module (``CompilationContext.__init__``);
            decorators belong to it. Empty: the module itself, or no Python.
        first: The beginning of the first line, if there is no ``definition``.
        lines: The number of lines, if there is no ``definition``.
        sha: Hash of the text (:func:`text_hash`). Empty: only the anchor is checked, as in a list of registrations.
    """

    file: str
    definition: str = ""
    first: str = ""
    lines: int = 1
    sha: str = ""

    @property
    def name(self) -> str:
        """The place in words, for messages."""
        return f"{self.file}: {self.definition or self.first.strip() or 'the file'}"


@dataclass(frozen=True)
class Edit:
    """One change.

    Attributes:
        place: The place to change.
        anchor: The beginning, without leading blanks, of the one line of the place at which the change is made.
        text: New lines with their final indentation; definitions that it takes from the fork are formatted.
        how: ``before`` or ``after`` the anchor's line, or ``replace`` to put the text in its place.
        through: For ``replace``, the beginning of the last line that is replaced; empty: the anchor's line.
    """

    place: Place
    anchor: str
    text: str
    how: Literal["before", "after", "replace"] = "after"
    through: str = ""


_PLACE = re.compile(r"=== (\S+)(?: (?:-|(\w+)) (?:(\d+) lines?: (.*)|(\S+)))?")
_CHANGE = re.compile(r"--- (before|after|replace) (.+?)(?: --> (.+))?")


def read(text: str) -> list[Edit]:
    """The edits of a file, in its order."""
    place, found = Place(""), []
    for line in text.splitlines():
        if match := _PLACE.fullmatch(line):
            file, sha, lines, first, definition = match.groups(default="")
            place = Place(file, definition, first, int(lines or 1), sha)
        elif match := _CHANGE.fullmatch(line):
            how: Any = match[1]
            found.append(Edit(place, match[2], "", how, match[3] or ""))
        else:
            found[-1] = replace(found[-1], text=f"{found[-1].text}{line}\n")
    return found


def definition_lines(source: str, name: str) -> tuple[int, int] | None:
    """Index of the first line (of the decorators) and one past the last line of the definition called ``name``; None if
    there is none."""
    body: Sequence[ast.stmt] = ast.parse(source).body
    bounds = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        named = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not named:
            return None
        body = named[-1].body
        first = min([named[-1].lineno, *(decorator.lineno for decorator in named[-1].decorator_list)])
        bounds = first - 1, named[-1].end_lineno or first
    return bounds


def _bounds(place: Place, source: str) -> tuple[int, int] | str:
    """Index of the first line of a place and one past its last line; or the problem, in words."""
    if place.definition:
        return definition_lines(source, place.definition) or "is not there any more"
    lines = source.splitlines()
    if not place.first:
        return 0, len(lines)
    at = [index for index, line in enumerate(lines) if line.startswith(place.first)]
    return (at[0], at[0] + place.lines) if len(at) == 1 else _not_once(len(at))


def _not_once(count: int) -> str:
    return f"stands there {count} times" if count else "is not there any more"


def mismatch(place: Place, files: Files) -> str:
    """The difference of the base commit's text at ``place`` from the text that the edit was written for; empty if
    none."""
    source = files.original(place.file)
    if source is None:
        made = files.text(place.file) is not None  # by this topic or one before it
        return "" if made else f"{place.name}: there is no such file"
    try:
        bounds = _bounds(place, source)
    except SyntaxError as error:
        return f"{place.name}: the file is no Python ({error.msg}, line {error.lineno})"
    if isinstance(bounds, str):
        return f"{place.name} {bounds}"
    now = text_hash("\n".join(source.splitlines()[slice(*bounds)]))
    if place.sha and now != place.sha:
        return f"{place.name} has changed (its text hashes to {now}, and the edit was written for {place.sha})"
    return ""


def apply(edit: Edit, files: Files) -> str:
    """Make an edit in ``files``; what is the matter when its anchor is not where it was."""
    source = files.text(edit.place.file)
    assert source is not None, "mismatch() is asked first"
    bounds = _bounds(edit.place, source)
    if isinstance(bounds, str):
        return f"{edit.place.name} {bounds}"
    lines = source.splitlines()

    def beginning(text: str, start: int) -> list[int]:
        return [index for index in range(start, bounds[1]) if lines[index].strip().startswith(text.strip())]

    found = beginning(edit.anchor, bounds[0])
    if len(found) != 1:
        return f"{edit.place.name}: the line {edit.anchor.strip()!r} {_not_once(len(found))}"
    first = found[0] + (edit.how == "after")
    end = found[0] + (edit.how != "before")
    if edit.through:
        last = beginning(edit.through, first)
        if not last:
            return f"{edit.place.name}: the line {edit.through.strip()!r} is not there any more"
        end = last[0] + 1
    text = with_definitions(edit.text)
    lines[first:end] = (text if text == edit.text else style.formatted(text) + "\n\n").splitlines()
    files.changed[edit.place.file] = "\n".join(lines) + "\n"
    return ""
