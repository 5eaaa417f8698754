# SPDX-License-Identifier: Apache-2.0
"""What the plugin's code touches of vLLM, found by walking its syntax trees, without importing vLLM.

Each expression whose attribute is read gets a type: a class of vLLM's, an object that a module imports from vLLM, or
:data:`OURS`, of which anything may be read. Types come from imports, annotations and assignments; what these do not
tell stands in ``NAMES`` and ``VALUES``, by hand. An expression whose type nothing tells is an error, so that no
attribute is left out.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from flashinfer_sm12x.vllm import api_checks

PLUGIN = Path(api_checks.__file__).parent
OURS = "-"
"""The type of all that is not vLLM's: torch's, the standard library's, this fork's."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Touch:
    """One attribute that is read, set or called.

    Attributes:
        holder: A class of vLLM's, or a module's full name.
        call: Number of arguments by position and names of keywords; None: it is not called.
        is_set: It is assigned.
    """

    file: str
    line: int
    holder: str
    name: str
    call: tuple[int, tuple[str, ...]] | None = None
    is_set: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.holder}.{self.name}"


@dataclass
class Walk:
    """The plugin's files, read with what is known by hand.

    Attributes:
        names: ``file: expression`` or ``file function: expression`` -> type.
        values: ``Class.attribute``, ``Class.method()`` or ``module.function()`` -> type of the value.
    """

    names: Mapping[str, str]
    values: Mapping[str, str]
    touches: list[Touch] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def run(self, folder: Path = PLUGIN) -> Walk:
        for path in sorted(folder.glob("*.py")):
            File(self, path).walk()
        return self


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class File:
    """One file of the plugin."""

    def __init__(self, walk: Walk, path: Path) -> None:
        self.walk_, self.path, self.tree = walk, path, parsed(path)
        self.imports: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and str(node.module).split(".")[0] == "vllm":
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    vllms = alias.asname and alias.name.split(".")[0] == "vllm"
                    self.imports[alias.asname or alias.name.split(".")[0]] = alias.name if vllms else OURS
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {alias.asname or alias.name: OURS for alias in node.names}
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.top = set(self.classes)
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                self.top.add(node.name)
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            self.top |= {
                each.id for target in targets for each in ast.walk(target or ast.Pass()) if isinstance(each, ast.Name)
            }

    def walk(self) -> None:
        self.scope(self.tree.body, None, None)

    def scope(self, body: list[ast.stmt], function: Function | None, cls: ast.ClassDef | None) -> None:
        """The expressions of a function, or of a module or class outside of its functions."""
        for node in self.inside(body):
            if isinstance(node, Function):
                self.scope(node.body, node, cls)
            elif isinstance(node, ast.ClassDef):
                self.scope(node.body, function, node)
            elif isinstance(node, (ast.Attribute, ast.Call)):
                self.type_of(node, function, cls, record=True)

    def inside(self, body: list[ast.stmt]) -> Iterator[ast.AST]:
        """All nodes, but those within inner functions and classes, which come as they are."""
        stack: list[ast.AST] = list(body)
        while stack:
            node = stack.pop()
            yield node
            if isinstance(node, Function):
                stack += [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
            elif isinstance(node, ast.ClassDef):
                stack += node.decorator_list
            elif not isinstance(node, ast.AnnAssign):
                stack += ast.iter_child_nodes(node)
            elif node.value is not None:
                stack += [node.value, node.target]

    def named_class(self, expression: ast.expr, function: Function | None) -> str | None:
        text = ast.unparse(expression)
        for key in (f"{self.path.name} {function.name if function else ''}: {text}", f"{self.path.name}: {text}"):
            if key in self.walk_.names:
                self.walk_.used.add(key)
                return self.walk_.names[key]
        return None

    def type_of(
        self, node: ast.expr, function: Function | None, cls: ast.ClassDef | None, record: bool = False, depth: int = 0
    ) -> str:
        """The type of an expression; ``?`` and a reason where nothing tells. ``record``: note what it touches
        itself."""
        known = self.named_class(node, function)
        if known is not None and not (record and isinstance(node, (ast.Attribute, ast.Call))):
            return known
        if depth > 20:
            return "?"
        inner = depth + 1
        if isinstance(node, ast.Attribute):
            base = self.type_of(node.value, function, cls, depth=inner)
            return known or self.attribute(node, base, node.attr, cls, record)
        if isinstance(node, ast.Call):
            return known or self.call(node, function, cls, record, inner)
        if isinstance(node, ast.Name):
            return self.name(node.id, function, cls, inner)
        if isinstance(node, ast.Subscript):
            base = self.type_of(node.value, function, cls, depth=inner)
            return base if base == OURS else self.value(f"{base}[]")
        if isinstance(node, (ast.BoolOp, ast.IfExp)):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            types = {self.type_of(part, function, cls, depth=inner) for part in parts if not _is_none(part)}
            return types.pop() if len(types) == 1 else "?"
        if isinstance(node, (ast.NamedExpr, ast.Starred, ast.Await)):
            return self.type_of(node.value, function, cls, depth=inner)
        return OURS  # literals, comparisons, arithmetic: vLLM's objects have none that the plugin reads attributes of

    def value(self, key: str) -> str:
        if key in self.walk_.values:
            self.walk_.used.add(key)
            return self.walk_.values[key]
        return f"?{key}"

    def attribute(self, node: ast.expr, base: str, name: str, cls: ast.ClassDef | None, record: bool) -> str:
        if base == OURS or (name.startswith("__") and name != "__init__"):
            return OURS
        if base.startswith("?"):
            if record:
                self.walk_.untold.append(f"{self.path.name}:{node.lineno}: {ast.unparse(node)}: {base[1:]}")
            return "?"
        if base == "self" or base.startswith("own "):
            cls = cls if base == "self" else self.classes[base.removeprefix("own ")]
            assert cls is not None
            found = self.own(cls, name)
            if found:
                return found
            base = self.base_of(cls)
            if base == OURS:
                return OURS
        if record:
            is_set = isinstance(getattr(node, "ctx", None), ast.Store)
            self.walk_.touches.append(Touch(self.path.name, node.lineno, base, name, is_set=is_set))
        return self.value(f"{base}.{name}")

    def own(self, cls: ast.ClassDef, name: str) -> str:
        """The type of what a class of ours defines itself, or one of its bases of ours; else an empty text."""
        for node in cls.body:
            if isinstance(node, Function) and node.name == name:
                return OURS
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if name in [getattr(each, "id", "") for each in targets]:
                return OURS
        for method in cls.body:
            if isinstance(method, Function):
                for node in ast.walk(method):
                    for target, value in _assignments(node):
                        if ast.unparse(target) == f"self.{name}":
                            named_class = self.named_class(target, method)
                            return named_class or (self.type_of(value, method, cls, depth=5) if value else OURS)
        for each in cls.bases:
            if isinstance(each, ast.Name) and each.id in self.classes:
                found = self.own(self.classes[each.id], name)
                if found:
                    return found
            elif isinstance(each, ast.Attribute) and each.attr.startswith("SM12x"):
                other = File(self.walk_, PLUGIN / f"{ast.unparse(each.value)}.py")
                return other.own(other.classes[each.attr], name)
        return ""

    def base_of(self, cls: ast.ClassDef) -> str:
        """vLLM's class from which one of ours derives."""
        for each in cls.bases:
            text = ast.unparse(each)
            if text in self.classes:
                return self.base_of(self.classes[text])
            if self.imports.get(text, OURS) != OURS:
                return text
            if isinstance(each, ast.Attribute) and each.attr.startswith("SM12x"):
                other = File(self.walk_, PLUGIN / f"{ast.unparse(each.value)}.py")
                return other.base_of(other.classes[each.attr])
        return OURS

    def call(
        self, node: ast.Call, function: Function | None, cls: ast.ClassDef | None, record: bool, depth: int
    ) -> str:
        arguments = [each for each in node.args if not isinstance(each, ast.Starred)]
        if arguments and ast.unparse(arguments[0]) == "self":  # Base.method(self, ...)
            arguments = arguments[1:]
        given = (len(arguments), tuple(each.arg for each in node.keywords if each.arg is not None))
        text = ast.unparse(node.func)
        if text in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
            base = self.type_of(node.args[0], function, cls, depth=depth)
            if isinstance(node.args[1], ast.Constant):
                return self.attribute(node, base, str(node.args[1].value), cls, record)
            return OURS if base == OURS else "?"
        if text == "super":
            assert cls is not None
            return self.base_of(cls)
        if text == "type" and len(node.args) == 1:
            return self.type_of(node.args[0], function, cls, depth=depth)
        if text in (
            "iter",
            "next",
            "list",
            "tuple",
            "sorted",
            "reversed",
            "set",
            "enumerate",
            "zip",
            "map",
            "filter",
            "dict",
        ):
            types = {self.type_of(each, function, cls, depth=depth) for each in node.args}
            return OURS if types <= {OURS} else f"?{text}() of {types}"
        called = self.type_of(node.func, function, cls, depth=depth)
        if isinstance(node.func, ast.Name) and self.imports.get(node.func.id, OURS) != OURS:
            module, _, name = self.imports[node.func.id].rpartition(".")
            if record:
                self.walk_.touches.append(Touch(self.path.name, node.lineno, module, name, given))
            return self.value(f"{name}()")
        if isinstance(node.func, ast.Attribute):
            base = self.type_of(node.func.value, function, cls, depth=depth)
            if base == "self" or base.startswith("own "):
                cls = cls if base == "self" else self.classes[base.removeprefix("own ")]
                assert cls is not None
                if self.own(cls, node.func.attr):
                    return self.returned(node.func.attr)
                base = self.base_of(cls)
            if base == OURS:
                return OURS
            if record and not called.startswith("?") and called != OURS and called in self.walk_.values.values():
                self.walk_.touches.append(Touch(self.path.name, node.lineno, called, "forward", given))
                return self.value(f"{called}.forward()")
            if record and not base.startswith("?"):
                self.walk_.touches.append(Touch(self.path.name, node.lineno, base, node.func.attr, given))
            return f"?{base}" if base.startswith("?") else self.value(f"{base}.{node.func.attr}()")
        if isinstance(node.func, ast.Name) and node.func.id in self.top:
            return self.returned(node.func.id)
        if isinstance(node.func, ast.Name) and called != OURS and not called.startswith("?"):  # a module of torch's
            if record:
                self.walk_.touches.append(Touch(self.path.name, node.lineno, called, "forward", given))
            return self.value(f"{called}.forward()")
        return OURS if called == OURS else f"?{text}()"

    def returned(self, name: str) -> str:
        """The type that a function of this file gives, by its annotation; a class of ours is OURS."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function) and node.name == name:
                return self.annotated(node.returns, f"{name}()")
        return OURS

    def annotated(self, annotation: ast.expr | None, what: str) -> str:
        words = set() if annotation is None else {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}
        if isinstance(annotation, ast.Constant) and annotation.value is None:
            return OURS
        if not words or "Any" in words:
            return f"?{what}"
        if len(words - {"type", "None"}) == 1 and (own := (words - {"type", "None"}).pop()) in self.classes:
            return OURS if self.base_of(self.classes[own]) == OURS else f"own {own}"
        vllms = [word for word in words if self.imports.get(word, OURS) != OURS]
        return (vllms[0] if words == set(vllms) else f"?{what}") if vllms else OURS

    def name(self, name: str, function: Function | None, cls: ast.ClassDef | None, depth: int) -> str:
        if name in ("self", "cls") and cls is not None:
            return "self"
        if function is not None:
            arguments = function.args
            for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if each.arg == name:
                    return self.annotated(each.annotation, name)
            if name in [each.arg for each in (arguments.vararg, arguments.kwarg) if each]:
                return OURS
            types = set()
            for node in ast.walk(function):
                for target, value in _assignments(node):
                    if isinstance(target, ast.Name) and target.id == name and value is not None and not _is_none(value):
                        types.add(self.type_of(value, function, cls, depth=depth + 1))
                    elif isinstance(target, (ast.Tuple, ast.List)):
                        types |= self.unpacked(target, value, name, function, cls, depth)
                for target, iterated in _iterations(node):
                    if name in [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]:
                        of = self.type_of(iterated, function, cls, depth=depth + 1)
                        types.add(OURS if of == OURS else f"?{name} in {ast.unparse(iterated)}")
            if types:
                return types.pop() if len(types) == 1 else f"?{name} has several types"
        found = self.imports.get(name)
        if found is not None:
            return OURS if found == OURS else (found if _is_module(found) else name)
        for node in self.tree.body:
            for target, value in _assignments(node):
                if isinstance(target, ast.Name) and target.id == name:
                    return (
                        OURS if value is None or _is_none(value) else self.type_of(value, None, None, depth=depth + 1)
                    )
        if name in self.top or hasattr(builtins, name):
            return OURS
        return f"?{name}"

    def unpacked(
        self,
        target: ast.Tuple | ast.List,
        value: ast.expr | None,
        name: str,
        function: Function,
        cls: ast.ClassDef | None,
        depth: int,
    ) -> set[str]:
        names = [getattr(each, "id", "") for each in target.elts]
        if name not in names or value is None:
            return set()
        if isinstance(value, ast.Tuple) and len(value.elts) == len(names):
            return {self.type_of(value.elts[names.index(name)], function, cls, depth=depth + 1)}
        of = self.type_of(value, function, cls, depth=depth + 1)
        return {OURS if of == OURS else f"?{name} of {ast.unparse(value)}"}


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_module(path: str) -> bool:
    """Whether an import from vLLM is a module: those are what the table has checks of, or are named like one."""
    return path.rpartition(".")[2].islower() and path in MODULES


MODULES = {module for part in api_checks.TABLE.values() for module in part}


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield node.target, node.value
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield item.optional_vars, item.context_expr


def _iterations(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, (ast.For, ast.comprehension)):
        yield node.target, node.iter
