# SPDX-License-Identifier: Apache-2.0
"""Every module of the pinned wheel behaves through the layer as it does without it.

Two interpreters import every module in the same order, one from the plain wheel, one through the layer. If upstream
cannot import a module here (an optional package is absent), the layer must fail with the same error, or succeed if this
fork fixes the cause. If upstream can, no public name may be lost.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
from pathlib import Path

import pytest
from layer_toys import OURS, REPO, Run

# Run in the interpreter under test: argv is the JSON list of module names.
IMPORT_ALL = """
import importlib, json, os, sys, warnings
warnings.simplefilter("ignore")
plain = sys.argv[2] == "plain"
# An environment where the fork is installed, editable or not, has it on sys.path: take it off for the comparison.
sys.path[:] = [p for p in sys.path if not (plain and os.path.exists(os.path.join(p, "flashinfer", "_layer.py")))]
results = {}
for name in json.loads(open(sys.argv[1]).read()):
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        results[name] = f"{type(error).__name__}: {error}"
    else:
        results[name] = sorted(vars(module))
import flashinfer
results[""] = flashinfer.__file__
json.dump(results, open(sys.argv[3], "w"))
"""


def modules_under(package: Path) -> list[str]:
    """Dotted names of the Python files under a ``flashinfer`` directory, ``data/`` left out."""
    names = []
    for file in package.rglob("*.py"):
        parts = ("flashinfer", *file.relative_to(package).with_suffix("").parts)
        if parts[1] != "data":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(names)


@pytest.fixture(scope="module")
def wheel_modules(site_packages: Path) -> list[str]:
    names = modules_under(site_packages / "flashinfer")
    assert len(names) > 1000, "the wheel's package directory looks incomplete"
    return names


@pytest.fixture(scope="module")
def imported(run_python: Run, wheel_modules: list[str], site_packages: Path, tmp_path_factory: pytest.TempPathFactory):
    """The result of importing each module: its names, or the error as text. ``imported["plain" | "layer"][module]``."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "names.json").write_text(json.dumps(wheel_modules))
    results = {}
    for kind, path in {"plain": [], "layer": [REPO]}.items():
        output = folder / f"{kind}.json"
        run_python("-c", IMPORT_ALL, str(folder / "names.json"), kind, str(output), path=path)
        results[kind] = json.loads(output.read_text())
    # The two differ as meant.
    assert Path(results["plain"][""]).resolve() == site_packages / "flashinfer" / "__init__.py"
    assert results["layer"][""] == str(OURS / "__init__.py")
    return results


def test_what_imports_and_what_does_not_is_the_same(imported, wheel_modules: list[str], site_packages: Path) -> None:
    # Errors name files, and the layer finds them where an environment that is a link leads to.
    linked = str(importlib.metadata.distribution("flashinfer-python").locate_file(""))

    def errors(kind: str) -> dict[str, str]:
        found = ((name, imported[kind][name]) for name in wheel_modules)
        return {name: got.replace(linked, str(site_packages)) for name, got in found if isinstance(got, str)}

    plain = errors("plain")
    # If neither nvcc nor torch knows a CUDA version, upstream's command line cannot be imported; ours can.
    if "Could not determine CUDA version" in plain.get("flashinfer.__main__", ""):
        del plain["flashinfer.__main__"]
    assert errors("layer") == plain
    assert len(plain) < len(wheel_modules) / 2


def test_no_public_name_is_lost(imported, wheel_modules: list[str]) -> None:
    lost = {}
    for name in wheel_modules:
        plain, layer = imported["plain"][name], imported["layer"][name]
        if isinstance(plain, list) and (missing := set(plain) - set(layer)):
            lost[name] = sorted(missing)
    assert lost == {}


def test_our_modules_import(run_python: Run) -> None:
    ours = [name for name in modules_under(OURS) if not name.endswith("__main__")]
    code = f"import importlib\nfor name in {ours!r}: importlib.import_module(name)"
    run_python("-c", code, path=[REPO])


def calls_extend(file: Path) -> bool:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "extend"
        for statement in tree.body
        for node in ast.walk(statement)
    )


def test_our_files_follow_the_rules_of_the_layer(site_packages: Path) -> None:
    """Each namesake extends, nothing else does, and each directory of ours is a package."""
    problems = []
    for file in sorted(OURS.rglob("*.py")):
        inside = file.relative_to(OURS)
        module = file.parent if file.name == "__init__.py" else file.with_suffix("")
        stem = site_packages / module.relative_to(REPO)
        has_namesake = (stem / "__init__.py").exists() or stem.with_name(f"{stem.name}.py").exists()
        if has_namesake and not calls_extend(file):
            problems.append(f"{inside} hides upstream's module: it must call extend(globals())")
        if not has_namesake and calls_extend(file):
            problems.append(f"{inside} extends, but upstream has no such module")
        if not (file.parent / "__init__.py").exists():
            problems.append(f"{inside.parent} has no __init__.py: its modules would never be found")
    assert problems == []


def test_the_wheels_other_top_level_package_finds_its_code(run_python: Run, site_packages: Path) -> None:
    """``b12x`` asks where flashinfer is, to load its own code from there, with or without flashinfer imported."""
    for first in ("b12x", "flashinfer", "flashinfer.experimental.b12x"):
        code = f"import {first}, b12x, b12x._lib.compile_plan as m; print(m.__file__, hasattr(b12x, 'OpMeta'))"
        file = site_packages / "flashinfer" / "experimental" / "b12x" / "_lib" / "compile_plan.py"
        assert run_python("-c", code, path=[REPO]).stdout.split() == [str(file), "True"]
