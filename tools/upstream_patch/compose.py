# SPDX-License-Identifier: Apache-2.0
"""The parts of the fork that topics take: definitions of its Python, and its C++ at other paths."""

from __future__ import annotations

import ast
import itertools
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from .tree import FORK, ExportError

_TAKE = re.compile(r"^# take (\S+): (.+)$", re.MULTILINE)
_INCLUDE = re.compile(r'^(\s*#include ")([^"]+)(")', re.MULTILINE)
_LEFT_OUT = re.compile(r'(?:\n// [^\n]*)*\n#include "([^"]+)"$', re.MULTILINE)
# Folders in which upstream's and this fork's compilers look for headers.
_INCLUDE_DIRS = ("include", "csrc")
# Parts of bindings that no operator calls upstream: their includes are left out, and headers that only they need.
LEFT_OUT = ("csrc/sm12x_register_instance_binding.h", "csrc/dense_mx_sm12x_rows_binding.inl")
# In templates: what a source is when the fork's build engine makes a library of it alone, and what it is otherwise.
_ALONE = re.compile(r"{% if alone %}\n.*?{% endif %}\n", re.DOTALL)
_NOT_ALONE = re.compile(r"{% if not alone %}\n(.*?){% endif %}\n", re.DOTALL)


def fork_text(path: str) -> str:
    """A file of this fork."""
    file = FORK / path
    if not file.is_file():
        raise ExportError(f"the fork has no {path}")
    return file.read_text(encoding="utf-8")


# --- Python -----------------------------------------------------------------------------------------------------------


def with_definitions(text: str) -> str:
    """``text`` with definitions of the fork where it says ``# take FILE: NAME NAME``; upstream's is its own there, and
    a virtual device the GPU.

    ``__doc__`` is a module's docstring.
    """

    def taken(match: re.Match[str]) -> str:
        found = definitions(match[1], match[2].split())
        return found.replace("upstream's", "the").replace("VirtualDevice", "torch.device")

    return _TAKE.sub(taken, text)


def definitions(source: str, names: Iterable[str]) -> str:
    """Top-level definitions of a Python module of this fork, in its order, with the comments before them.

    Raises:
        ExportError: one is not there.
    """
    lines = fork_text(source).splitlines()
    body = ast.parse("\n".join(lines)).body
    wanted, whole, end = set(names), "", 0
    if "__doc__" in wanted and is_text(body[0]):
        wanted -= {"__doc__"}
        end = body[0].end_lineno or 1
        whole = "\n".join(lines[body[0].lineno - 1 : end])
    for node, behind in itertools.zip_longest(body, body[1:]):
        defined = wanted & _defined(node)
        if not defined:
            continue
        wanted -= defined
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        while first > 1 and lines[first - 2].startswith("#"):
            first -= 1
        # A string behind an assignment documents it.
        documented = isinstance(node, (ast.Assign, ast.AnnAssign)) and is_text(behind)
        last = (behind if documented else node).end_lineno or node.lineno
        # Neighbours stay neighbours.
        whole += ("\n" if first == end + 1 else "\n\n") + "\n".join(lines[first - 1 : last])
        end = last
    if wanted:
        raise ExportError(f"{source} defines no {', '.join(sorted(wanted))}")
    return whole.strip("\n")


def is_text(node: ast.AST | None) -> TypeGuard[ast.Expr]:
    """Whether a statement is a bare string, a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {name.id for name in names if isinstance(name, ast.Name)}


# --- C++ --------------------------------------------------------------------------------------------------------------


def cxx_files(roots: Mapping[str, str], moved: Mapping[str, str]) -> dict[str, str]:
    """C++ sources with the headers that they include, directly or not, ready for upstream's tree.

    Args:
        roots: Path in the fork -> path in upstream's tree.
        moved: The same for headers that other topics bring, if the paths differ.

    Returns:
        Path in upstream's tree -> text; an include of a file that has moved names its new place.
    """
    places, wanted, files = {**moved, **roots}, list(roots), {}
    for path in wanted:
        found = {_resolve(path, name) for _, name, _ in _INCLUDE.findall(fork_text(path))}
        wanted += [header for header in found if header and header not in (*wanted, *LEFT_OUT)]
        files[places.get(path, path)] = _with_includes(path, places)
    return files


def _resolve(path: str, name: str) -> str | None:
    """The fork's file that ``path`` includes as ``name``; None when it is upstream's."""
    folders = (posixpath.dirname(path), *_INCLUDE_DIRS)
    candidates = [posixpath.normpath(posixpath.join(folder, name)) for folder in folders]
    return next((candidate for candidate in candidates if (FORK / candidate).is_file()), None)


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
