# SPDX-License-Identifier: Apache-2.0
"""Changes of upstream's files: each says where it goes, and how what stands there was when the change was written.

A place is a definition of a Python module, by its qualified name, or some lines of another file, by how the first one
begins. Its text is checked by hash in the commit onto which topics go, so that a definition that upstream moved or
changed is named before anything is written.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from . import style
from .compose import Part
from .tree import Files

HASH_DIGITS = 12


def text_hash(text: str) -> str:
    """Of a text, whatever its indentation and the blanks at the ends of its lines."""
    lines = [line.rstrip() for line in textwrap.dedent(text).strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:HASH_DIGITS]


@dataclass(frozen=True)
class Place:
    """Where an edit goes.

    Attributes:
        file: Path in upstream's tree.
        definition: Qualified name of a function or class of a Python module (``CompilationContext.__init__``);
            decorators belong to it. Empty: the module itself, or no Python.
        first: Without ``definition``: how the first line begins.
        lines: Without ``definition``: how many lines.
        sha: Hash of the text (:func:`text_hash`). Empty: the anchor alone tells, as in a list of registrations.
    """

    file: str
    definition: str = ""
    first: str = ""
    lines: int = 1
    sha: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.file}: {self.definition or self.first.strip() or 'the file'}"


@dataclass(frozen=True)
class Edit:
    """One change.

    Attributes:
        place: Where.
        anchor: How the one line of the place begins, blanks aside, at which the change is made.
        text: New lines, indented as they are to stand; or definitions of the fork's, which are formatted.
        how: ``before`` or ``after`` the anchor's line, or in its stead.
        through: Of ``replace``: how the last line begins that goes too; the anchor's own when empty.
    """

    place: Place
    anchor: str
    text: str | Part
    how: Literal["before", "after", "replace"] = "after"
    through: str = ""


def definition_lines(source: str, name: str) -> tuple[int, int] | None:
    """First line (of the decorators) and last line, from 1, of the definition called ``name``; None without one."""
    body: Sequence[ast.stmt] = ast.parse(source).body
    found: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None = None
    for part in name.split("."):
        named = [
            node
            for node in body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == part
        ]
        if not named:
            return None
        found = named[-1]
        body = found.body
    assert found is not None
    assert found.end_lineno is not None
    return min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)]), found.end_lineno


def _bounds(place: Place, source: str) -> tuple[int, int] | str:
    """First and last line of a place, from 1; or what is the matter."""
    if place.definition:
        return definition_lines(source, place.definition) or "is not there any more"
    if not place.first:
        return 1, len(source.splitlines())
    at = [number for number, line in enumerate(source.splitlines(), 1) if line.startswith(place.first)]
    if len(at) != 1:
        return "is not there any more" if not at else f"stands there {len(at)} times"
    return at[0], at[0] + place.lines - 1


def _lines(source: str, bounds: tuple[int, int]) -> str:
    return "\n".join(source.splitlines()[bounds[0] - 1 : bounds[1]])


def _elsewhere(place: Place, files: Files) -> str:
    """Where else in the tree a definition of that name is."""
    name = place.definition.rpartition(".")[2]
    if not name:
        return ""
    for form in (f"def {name}(", f"class {name}"):
        found = [path for path in files.containing(form, ".py") if path != place.file]
        if found:
            return f"; a definition of that name is in {', '.join(found[:3])}"
    return ""


def mismatch(place: Place, files: Files) -> str:
    """How the base commit's text at ``place`` differs from what the edit was written for; empty when it does not."""
    source = files.original(place.file)
    if source is None:
        return f"{place.name}: there is no such file{_elsewhere(place, files)}"
    try:
        bounds = _bounds(place, source)
    except SyntaxError as error:
        return f"{place.name}: the file is no Python ({error.msg}, line {error.lineno})"
    if isinstance(bounds, str):
        return f"{place.name} {bounds}{_elsewhere(place, files)}"
    now = text_hash(_lines(source, bounds))
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
    found = [index for index in range(bounds[0] - 1, bounds[1]) if lines[index].strip().startswith(edit.anchor.strip())]
    if len(found) != 1:
        many = "is not there any more" if not found else f"stands there {len(found)} times"
        return f"{edit.place.name}: the line {edit.anchor.strip()!r} {many}"
    first = last = found[0]
    if edit.through:
        ends = [index for index in range(first, bounds[1]) if lines[index].strip().startswith(edit.through.strip())]
        if not ends:
            return f"{edit.place.name}: the line {edit.through.strip()!r} is not there any more"
        last = ends[0]
    text = edit.text if isinstance(edit.text, str) else style.formatted(edit.text.text()) + "\n\n"
    new = text.splitlines()
    if edit.how == "replace":
        lines[first : last + 1] = new
    else:
        at = first + (edit.how == "after")
        lines[at:at] = new
    files.changed[edit.place.file] = "\n".join(lines) + "\n"
    return ""
