# SPDX-License-Identifier: Apache-2.0
"""What a process keeps from one call to the next is in a table of ``docs/development.md``, with its key, its reason and
its end: whoever adds a cache says why the ones that are there do not do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "development.md"
HEAD = "| cache | key | why | until |"
DECORATORS = ("cache", "lru_cache", "cached_property")
WRAPPERS = ("cache", "lru_cache", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet")
WRITES = "add append extend insert pop popitem clear update setdefault remove discard appendleft".split()
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp, ast.Call)
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def called(node: ast.expr) -> str:
    """The last word of a decorator's or a function's name."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def containers(body: list[ast.stmt]) -> set[str]:
    """Names that a module or a class gives a container that may be written to."""
    found = set()
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(getattr(node, "value", None), CONTAINERS):
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def caches(tree: ast.Module) -> Iterator[str]:
    """Names of what functions of a module keep: cached functions and properties, containers of the module or of a class
    that they write to, and global variables that they set."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    of_module = containers(tree.body)
    of_classes = {name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for name in containers(node.body)}
    for node in ast.walk(tree):
        if isinstance(node, (*Function, ast.ClassDef)):
            if {called(each) for each in node.decorator_list} & {*DECORATORS}:
                yield node.name
        elif (
            isinstance(node, ast.Call) and called(node) in WRAPPERS and isinstance(node.func, (ast.Name, ast.Attribute))
        ):
            if isinstance(node.func, ast.Attribute) and called(node.func.value) not in ("functools", "weakref"):
                continue
            parent = parents[node]
            if isinstance(parent, (*Function, ast.ClassDef)):
                continue  # a decorator, found above
            if isinstance(parent, ast.Call) and parent.func is node:  # lru_cache(...)(function)
                node, parent = parent, parents[parent]
            while isinstance(parent, ast.Tuple):
                parent = parents[parent]
            target = parent.targets[0] if isinstance(parent, ast.Assign) else getattr(parent, "target", None)
            if isinstance(target, ast.Tuple):
                assert isinstance(parent, ast.Assign) and isinstance(parent.value, ast.Tuple)
                target = target.elts[parent.value.elts.index(node)]
            yield called(target or (node.args[0] if node.args else node))
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node.id in shared:
                yield node.id
            held = None
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                held = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
                held = node.func.value
            if isinstance(held, ast.Name) and held.id in of_module:
                yield held.id
            elif isinstance(held, ast.Attribute) and held.attr in of_classes:
                yield held.attr


def found() -> set[tuple[str, str]]:
    files = [path for folder in ("flashinfer", "flashinfer_sm12x") for path in sorted((REPO / folder).rglob("*.py"))]
    assert len(files) > 100
    return {
        (str(path.relative_to(REPO)), name)
        for path in files
        for name in caches(ast.parse(path.read_text(encoding="utf-8")))
    }


def listed() -> set[tuple[str, str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = lines[lines.index(HEAD) + 2 :]
    entries = set()
    for row in rows[: rows.index("")]:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4 and all(cells), row
        path = ""
        for word in re.findall(r"`([^`]+)`", cells[0]):
            if word.endswith(".py"):
                path = word
            else:
                entries.add((path, word))
    return entries


def test_each_cache_is_in_the_table() -> None:
    missing = sorted(f"{path}: {name}" for path, name in found() - listed())
    assert not missing, f"docs/development.md, 'What a process keeps', lacks their key, reason and end: {missing}"


def test_each_entry_of_the_table_is_there() -> None:
    """Those that no rule above finds are classes and attributes: objects keep them."""
    for path, name in sorted(listed() - found()):
        tree = ast.parse((REPO / path).read_text(encoding="utf-8"))
        names = {getattr(node, "name", None) for node in ast.walk(tree)} | {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        assert name in names, (path, name)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("@functools.cache\ndef f(): ...", ["f"]),
        ("@lru_cache(maxsize=1)\ndef f(): ...", ["f"]),
        ("class C:\n    @functools.cached_property\n    def f(self): ...", ["f"]),
        ("g = functools.lru_cache(maxsize=1)(f)", ["g"]),
        ("class C:\n    def f(self):\n        self.a, self._g = 1, functools.cache(f)", ["_g"]),
        ("known = weakref.WeakKeyDictionary()", ["known"]),
        ("known = {}\ndef f(x): known[x] = 1", ["known"]),
        ("known: dict[int, int] = {}\ndef f(x): return known.setdefault(x, 1)", ["known"]),
        ("known = set()\ndef f(x): known.add(x)", ["known"]),
        ("known = collections.OrderedDict()\ndef f(x):\n    def g(): del known[x]", ["known", "known"]),
        ("known = None\ndef f():\n    global known\n    known = 1", ["known"]),
        ("class C:\n    known = {}\n    def f(self, x): self.known[x] = 1", ["known"]),
        ("class C:\n    known = {}\n    @classmethod\n    def f(cls, x): cls.known.update(x)", ["known"]),
        ("known = {}\nknown[1] = 2\ndef f(x):\n    known = {}\n    return x[1]", []),
        ("def f(case): return case.cache()", []),
    ],
)
def test_a_cache_is_found(source: str, names: list[str]) -> None:
    assert list(caches(ast.parse(source))) == names
