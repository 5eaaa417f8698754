# SPDX-License-Identifier: Apache-2.0
"""Lists names of FlashInfer and vLLM that moved between the versions that this fork is made for and others.

    python -m tools.api_checks --flashinfer flashinfer_python-0.7.3-py3-none-any.whl --vllm vllm-0.34.0-....whl

Reads wheels, or folders in which one is unpacked or installed, and imports nothing of them. Exit status 1 if a name
moved that the fork needs.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flashinfer_sm12x import versions
from flashinfer_sm12x.vllm import api_checks

ROOT = Path(__file__).resolve().parent.parent
Found = tuple[str, ast.stmt | None]


class Sources:
    """The Python sources of a wheel, a file or a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._wheel = zipfile.ZipFile(path) if path.is_file() else None
        self._names = set(self._wheel.namelist()) if self._wheel else set()
        self._modules: dict[str, ast.Module | None] = {}

    def text(self, file: str) -> str | None:
        if self._wheel is not None:
            return self._wheel.read(file).decode() if file in self._names else None
        place = self.path / file
        return place.read_text(encoding="utf-8") if place.is_file() else None

    def module(self, name: str) -> ast.Module | None:
        """A module's syntax tree; None if there is no such module."""
        if name not in self._modules:
            stem = name.replace(".", "/")
            text = self.text(f"{stem}.py")
            text = self.text(f"{stem}/__init__.py") if text is None else text
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]

    def is_package(self, name: str) -> bool:
        return self.text(f"{name.replace('.', '/')}/__init__.py") is not None

    def resolve(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Found | None:
        """The module and the statement that define a name, through imports; a statement of None is a module itself."""
        tree = self.module(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        node = definitions(tree).get(name)
        if isinstance(node, ast.ImportFrom):
            source = self.absolute(module, node)
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            found = self.resolve(source, original, seen)
            is_module = found is None and self.module(f"{source}.{original}") is not None
            return (f"{source}.{original}", None) if is_module else found
        if isinstance(node, ast.Import):
            original = next((alias.name for alias in node.names if alias.asname == name), name)
            return (original, None) if self.module(original) is not None else (module, node)
        if node is None and self.module(f"{module}.{name}") is not None:
            return f"{module}.{name}", None
        if node is None and "__getattr__" in definitions(tree) and f'"{name}"' in self.words(module):
            return module, None
        return None if node is None else (module, node)

    def words(self, module: str) -> str:
        """A module's source, in which names that its ``__getattr__`` gives appear as texts."""
        return ast.unparse(self.module(module) or ast.Module([], [])).replace("'", '"')

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import names."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + self.is_package(module)]
        return ".".join([*parts, *filter(None, [node.module])])


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or a class, with those below ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                for inner in getattr(node, field, []):
                    yield from _statements([inner] if isinstance(inner, ast.stmt) else inner.body)


def bound(node: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        targets = [each for target in node.targets for each in getattr(target, "elts", [target])]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return []


@cache
def definitions(tree: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    """Name -> the last statement that binds it, but for one that only says so in an overload."""
    return {name: node for node in _statements(tree.body) for name in bound(node)}


@cache
def assigned(cls: ast.ClassDef) -> frozenset[str]:
    """Names that methods assign to ``self``, or register as a buffer."""
    names = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "register_buffer":
            names |= {str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return frozenset(names)


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> inspect.Signature:
    """The signature of a definition; a method's without ``self``."""
    found: inspect.Signature = api_checks.signature_of(function.args)
    static = any(getattr(each, "id", "") == "staticmethod" for each in function.decorator_list)
    return found.replace(parameters=[*found.parameters.values()][method and not static :])


class Moved:
    """Checks sources against the plugin's table."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def probe(self, check: Any) -> str:
        """The answer that :func:`flashinfer_sm12x.vllm.api_checks.probe` would give, as far as sources tell."""
        if self.sources.module(check.module) is None:
            return f"{check.module} is gone"
        name, *inner = check.path.split(".")
        found = self.sources.resolve(check.module, name)
        method = False
        for attribute in inner:
            cls = self.class_of(found)
            if cls is None:
                break  # the sources do not tell this object's class
            found, method = self.attribute(*cls, attribute), True
            if found is None:
                return f"{check} is gone"
        if found is None:
            return f"{check} is gone"
        if isinstance(found[1], (ast.FunctionDef, ast.AsyncFunctionDef)):
            return str(api_checks.misfit(check, signature(found[1], method)))
        return ""

    def class_of(self, found: tuple[str, Any] | None) -> tuple[str, ast.ClassDef] | None:
        """The class that was found, or of the object that is made where it was."""
        if found is not None and isinstance(found[1], ast.ClassDef):
            return found[0], found[1]
        made = getattr(found[1], "value", None) if found is not None else None
        if found is not None and isinstance(made, ast.Call) and isinstance(made.func, ast.Name):
            return self.class_of(self.sources.resolve(found[0], made.func.id))
        return None

    def attribute(self, module: str, cls: ast.ClassDef, name: str) -> tuple[str, Any] | None:
        if name in (known := definitions(cls)):
            return module, known[name]
        if name in assigned(cls):
            return module, None
        for base in cls.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            words = ast.unparse(base).split(".")
            parent = self.sources.resolve(module, words[0])
            for word in words[1:]:
                parent = self.sources.resolve(parent[0], word) if parent is not None else None
            above = self.class_of(parent)
            found = self.attribute(*above, name) if above is not None else None
            if found is not None:
                return found
        return None

    def report(self) -> list[str]:
        """A line for each check that fails, with the part that goes without it."""
        return [
            f"{part}: {message}"
            for part in api_checks.TABLE
            for check in api_checks.checks_of(part)
            if (message := self.probe(check))
        ]


def touched(file: Path) -> set[str]:
    """The names of upstream's that a module of ours replaces or calls."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "_upstream"
    }
    replaced = {
        name
        for name, node in definitions(tree).items()
        if not isinstance(node, (ast.Import, ast.ImportFrom)) and not name.startswith("__")
    }
    return called | replaced


def layered() -> Iterator[Path]:
    """The modules of ours that extend one of upstream's."""
    for file in sorted((ROOT / "flashinfer").rglob("*.py")):
        if file.name != "_layer.py" and "extend(globals())" in file.read_text(encoding="utf-8"):
            yield file


def compare(before: Sources, now: Sources, show: bool) -> tuple[list[str], list[str]]:
    """Tell what moved of FlashInfer between two versions, as far as the layer touches it.

    Returns:
        Changes that the layer cannot be without, and those that somebody must read: functions whose text changed.
    """
    gone: list[str] = []
    changed: list[str] = []
    for file in layered():
        path = file.relative_to(ROOT)
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        old, new = before.module(module), now.module(module)
        if old is None or new is None:
            if old is not None:
                gone.append(f"{path}: upstream's module is gone")
            continue
        for name in sorted(touched(file) & definitions(old).keys()):
            was, to = definitions(old)[name], definitions(new).get(name)
            if to is None:
                gone.append(f"{path}: {name} is gone")
            elif ast.dump(was) != ast.dump(to):
                changed.append(f"{path}: {name}{_signatures(was, to)}")
                if show:
                    lines = difflib.unified_diff(
                        ast.unparse(was).splitlines(), ast.unparse(to).splitlines(), lineterm="", n=2
                    )
                    changed += [f"    {line}" for line in lines][2:]
    for file in sorted((ROOT / "flashinfer").rglob("*.py")):
        gone += _imports_that_are_gone(file, before, now)
    return gone, changed


def _signatures(was: ast.stmt, to: ast.stmt) -> str:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if not isinstance(was, functions) or not isinstance(to, functions):
        return ": text"
    old, new = (signature(each, False).parameters for each in (was, to))
    added, lost = [each for each in new if each not in old], [each for each in old if each not in new]
    words = [f"takes {', '.join(added)} more"] * bool(added) + [f"takes {', '.join(lost)} no more"] * bool(lost)
    kept = [each for each in old if each in new]
    if kept != [each for each in new if each in old]:
        words.append(f"takes ({', '.join(new)}) in this order")
    changed = [each for each in kept if old[each] != new[each]]
    return ": " + ("; ".join(words + [f"takes {', '.join(changed)} otherwise"] * bool(changed)) or "text")


def _imports_that_are_gone(file: Path, before: Sources, now: Sources) -> list[str]:
    path = file.relative_to(ROOT)
    ours = Sources(ROOT)
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    lost: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            source = ours.absolute(module, node)
            for alias in node.names if source.startswith("flashinfer") else ():
                if before.resolve(source, alias.name) and not now.resolve(source, alias.name):
                    lost.append(f"{path}: {source}.{alias.name} is gone")
    return lost


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashinfer", type=Path, metavar="WHEEL", help="a flashinfer-python to compare")
    parser.add_argument("--flashinfer-from", type=Path, metavar="WHEEL", help="with this one (the installed one)")
    parser.add_argument("--vllm", type=Path, metavar="WHEEL", help="a vLLM to ask for what the plugin touches")
    parser.add_argument("--show", action="store_true", help="print the changes of functions, too")
    options = parser.parse_args(arguments)
    if options.flashinfer is None and options.vllm is None:
        parser.error("name a wheel: --flashinfer, --vllm or both")
    for path in (options.flashinfer, options.flashinfer_from, options.vllm):
        if path is not None and not path.exists():
            parser.error(f"there is no {path}; pip download --no-deps gets a wheel")
    moved = 0
    if options.flashinfer is not None:
        base = options.flashinfer_from or installed()
        gone, changed = compare(Sources(base), Sources(options.flashinfer), options.show)
        moved += len(gone)
        _say(f"FlashInfer, from {base.name} to {options.flashinfer.name}", {"gone": gone, "to be read": changed})
    if options.vllm is not None:
        lines = Moved(Sources(options.vllm)).report()
        moved += len(lines)
        _say(f"vLLM, {options.vllm.name}", {"moved": lines})
    return int(moved > 0)


def installed() -> Path:
    """The folder of the tested FlashInfer that is installed.

    Raises:
        SystemExit: none is.
    """
    wheel = versions.tested_wheel()
    if wheel is None:
        raise SystemExit(f"no tested flashinfer-python is installed: {versions.fix()}, or pass --flashinfer-from")
    return Path(wheel.package).parent


def _say(title: str, lists: Mapping[str, list[str]], write: Callable[[str], Any] = print) -> None:
    write(f"{title}:")
    for what, lines in lists.items():
        count = sum(not line.startswith("    ") for line in lines)
        write(f"  {what}: {count or 'nothing'}")
        for line in lines:
            write(f"    {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
