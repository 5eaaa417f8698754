# SPDX-License-Identifier: Apache-2.0
"""New files of upstream's tree: texts of ``text/`` with definitions of the fork's, and the fork's C++ at other paths."""

from __future__ import annotations

import ast
import itertools
import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from .tree import FORK

TEXT = Path(__file__).parent / "text"
_TAKE = re.compile(r"^# take (\S+): (.+)$", re.MULTILINE)
_INCLUDE = re.compile(r'^(\s*#include ")([^"]+)(")', re.MULTILINE)
_LEFT_OUT = re.compile(r'(?:\n// [^\n]*)*\n#include "([^"]+)"$', re.MULTILINE)
# Folders that upstream's and this fork's compilers look into.
_INCLUDE_DIRS = ("include", "csrc")
# Parts of bindings that no operator upstream calls: their includes are left out, with what they alone need.
LEFT_OUT = ("csrc/sm12x_register_instance_binding.h", "csrc/dense_mx_sm12x_rows_binding.inl")
# In templates: what a source is when the fork's build engine makes a library of it alone, and what it is otherwise.
_ALONE = re.compile(r"{% if alone %}\n.*?{% endif %}\n", re.DOTALL)
_NOT_ALONE = re.compile(r"{% if not alone %}\n(.*?){% endif %}\n", re.DOTALL)


class ComposeError(RuntimeError):
    """The fork's sources are not what a topic says of them."""


def fork_text(path: str) -> str:
    """A file of this fork."""
    file = FORK / path
    if not file.is_file():
        raise ComposeError(f"the fork has no {path}")
    return file.read_text(encoding="utf-8")


def definitions(source: str, names: Iterable[str]) -> str:
    """Top-level definitions of a Python module of this fork, in its order, with the comments in front of them.

    Raises:
        ComposeError: one is not there.
    """
    lines = fork_text(source).splitlines()
    body = ast.parse("\n".join(lines)).body
    wanted, whole, end = set(names), "", 0
    for node, behind in itertools.zip_longest(body, body[1:]):
        defined = wanted & _defined(node)
        if not defined:
            continue
        wanted -= defined
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        while first > 1 and lines[first - 2].startswith("#"):
            first -= 1
        # A string behind an assignment documents it.
        documented = isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_text(behind)
        last = (behind if documented else node).end_lineno or node.lineno
        # Neighbours stay neighbours.
        whole += ("\n" if first == end + 1 else "\n\n") + "\n".join(lines[first - 1 : last])
        end = last
    if wanted:
        raise ComposeError(f"{source} defines no {', '.join(sorted(wanted))}")
    return whole.strip("\n")


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def with_definitions(text: str) -> str:
    """``text`` with definitions of the fork where it says ``# take FILE: NAME NAME``."""
    return _TAKE.sub(lambda match: definitions(match[1], match[2].split()), text)


def text_of(path: str) -> str:
    """What ``text/`` has for a new Python file of upstream's tree."""
    return with_definitions((TEXT / path).read_text(encoding="utf-8"))


def headers_of(roots: Iterable[str]) -> list[str]:
    """The fork's headers that ``roots`` (paths in the fork) include, directly or not; sorted, without the roots."""
    seen: set[str] = set()
    stack = list(roots)
    first = set(stack)
    while stack:
        path = stack.pop()
        for _, name, _ in _INCLUDE.findall(fork_text(path)):
            found = _resolve(path, name)
            if found is not None and found not in seen and found not in LEFT_OUT:
                seen.add(found)
                stack.append(found)
    return sorted(seen - first)


def _resolve(path: str, name: str) -> str | None:
    """The fork's file that ``path`` includes as ``name``; None when it is upstream's."""
    candidates = [posixpath.join(posixpath.dirname(path), name), *(f"{folder}/{name}" for folder in _INCLUDE_DIRS)]
    for candidate in map(posixpath.normpath, candidates):
        if (FORK / candidate).is_file():
            return candidate
    return None


def cxx_files(roots: Mapping[str, str], moved: Mapping[str, str]) -> dict[str, str]:
    """C++ sources with the headers that they need, ready for upstream's tree.

    Args:
        roots: From paths in the fork to paths in upstream's tree.
        moved: The same of headers that other topics bring, or that these roots include, where the paths differ.

    Returns:
        From paths in upstream's tree to texts; an include of a file that has moved names its new place.
    """
    places = {**moved, **roots}
    paths = [*roots, *headers_of(roots)]
    return {places.get(path, path): _with_includes(path, places) for path in paths}


def _with_includes(path: str, places: Mapping[str, str]) -> str:
    here = posixpath.dirname(places.get(path, path))

    def renamed(match: re.Match[str]) -> str:
        found = _resolve(path, match[2])
        if found is None or (found not in places and path not in places):
            return match[0]
        there = places.get(found, found)
        # Templates are rendered into other folders.
        if posixpath.dirname(there) == here and not path.endswith(".jinja"):
            name = posixpath.basename(there)
        else:
            name = there.partition("/")[2]  # from the folder of headers
        return f"{match[1]}{name}{match[3]}"

    def kept(match: re.Match[str]) -> str:
        return "" if _resolve(path, match[1]) in LEFT_OUT else match[0]

    text = _INCLUDE.sub(renamed, _LEFT_OUT.sub(kept, fork_text(path))).rstrip("\n") + "\n"
    return _NOT_ALONE.sub(r"\1\n", _ALONE.sub("", text))
