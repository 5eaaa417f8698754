# SPDX-License-Identifier: Apache-2.0
"""The record of a library's inputs, with which the log of a later build names the inputs that changed.

The record is a JSON file next to the library, with the library's name. It decides nothing: the hash in the library's
name decides whether a library is current (``build_hash``). A missing or damaged record names nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .trust import read_file, write_atomically

_NAMED = 5
"""Changes that a line names; it counts the others."""


def record_of(library: Path) -> Path:
    return library.with_suffix(".json")


def write_record(library: Path, parts: Mapping[str, Any]) -> None:
    """Record the parts of a library's build hash.

    Args:
        library: The library.
        parts: Names and values of the arguments of :func:`~.build_hash.hash_of`, from :class:`~.engine.BuildHashes`.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(record_of(library), json.dumps(parts))


def changes_since(library: Path, parts: Mapping[str, Any]) -> str:
    """The inputs that differ from those of an older library: the first few by name, and the number of the others.

    Args:
        library: The older library.
        parts: The parts of the build hash now.

    Returns:
        The list; empty if the library has no record that can be read, or if nothing differs.
    """
    try:
        recorded = json.loads(read_file(record_of(library)))
        before, now = _labels(recorded), _labels(parts)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    found = []
    for label in sorted({**before, **now}, key=lambda label: _KINDS.index(label[0])):
        old, new = before.get(label), now.get(label)
        kind, name = label
        if old == new:
            continue
        if kind in _COMPILERS and new:
            # Of nvcc's lines the last in this order has its version.
            found.append(f"the {kind} is {max(new - (old or set()) or new)}")
        else:
            found.append(f"{kind} {name} {'is new' if old is None else 'is gone' if new is None else 'changed'}")
    if not found and recorded != json.loads(json.dumps(parts)):
        found = ["the order of flags or sources changed"]
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")


_COMPILERS = ("compiler", "host compiler", "linker")
_KINDS = (
    *_COMPILERS,
    "program",
    "launcher",
    "flag",
    "argument",
    "variable",
    "source",
    "header",
    "linker's flag",
    "linked file",
)
"""Kinds of inputs, in the order in which a line names them."""


def _labels(parts: Any) -> dict[tuple[str, str], set[str]]:
    """Kind and name of each input -> what is known of it."""
    labels: dict[tuple[str, str], set[str]] = {}

    def add(kind: str, name: str, value: object) -> None:
        labels.setdefault((kind, name), set()).add(str(value))

    def add_identity(kind: str, identity: str) -> None:
        for line in identity.splitlines():
            program = re.fullmatch(r"([^\s:]+):(\S+)", line)  # a name and a size or digest; another is of a banner
            add(*(("program", *program.groups()) if program else (kind, "", line)))

    sources = set()
    for words, identities, launchers, environment in parts["commands"]:
        source = words.index("-c") + 1
        sources.add(words[source])
        for word in [*words[: source - 1], *words[source + 1 :]]:
            add("flag" if word.startswith("-") else "argument", word, "")
        for index, identity in enumerate(identities):
            add_identity("host compiler" if index else "compiler", identity)
        for launcher in launchers:
            add("launcher", *launcher.rsplit(":", 1))
        for name, value in environment.items():
            add("variable", name, value)
    for path, digest in parts["files"]:
        add("source" if path in sources else "header", path, digest)
    words, identity = parts["link"]
    for word in words:
        add("linker's flag", word, "")
    add_identity("linker", identity)
    for path, digest in parts["linked"]:
        add("linked file", path, digest)
    return labels
