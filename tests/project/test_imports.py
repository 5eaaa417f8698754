# SPDX-License-Identifier: Apache-2.0
"""Which way the imports go: no circle, no operator that knows the tests' side, no header that knows a binding."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
from layer_toys import REPO

PACKAGES = ("flashinfer", "flashinfer_sm12x")
MODULES = {
    ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((REPO / package).rglob("*.py"))
}

# Folders and modules from the ground up; each may import those above it in this list, and none below. Upstream's
# package jit, with ours in it, is one place.
ORDER = """
flashinfer_sm12x
flashinfer_sm12x.build
flashinfer._layer
flashinfer.sm12x
flashinfer
flashinfer.jit
flashinfer.compilation_context
flashinfer.aot
flashinfer.quantization
flashinfer.fused_moe
flashinfer.gemm
flashinfer.sm12x_decode
flashinfer.sm12x_decode_layer
flashinfer.decode
flashinfer.experimental
flashinfer.testing
flashinfer_sm12x.quantize
flashinfer_sm12x.vllm
flashinfer_sm12x.doctor.probe
flashinfer_sm12x.doctor
flashinfer.__main__
""".split()

# They measure and check the kernels on a user's machine, with the references.
MAY_IMPORT_TESTING = ("flashinfer.testing", "flashinfer_sm12x.doctor.probe")


def statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All but what only type checkers see."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from statements(node.orelse)
        else:
            yield node
            yield from statements(ast.iter_child_nodes(node))


def imported(module: str) -> set[str]:
    """Modules of this tree that a module imports, in functions too, or has imported by a name in a text."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in statements(tree.body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            found |= {name if (name := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
    return {name for name in found if name in MODULES and name != module}


GRAPH = {module: imported(module) for module in MODULES}


def test_no_circle_among_the_imports() -> None:
    assert sum(map(len, GRAPH.values())) > 200
    try:
        graphlib.TopologicalSorter(GRAPH).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def place(module: str) -> int:
    """The place of a module in :data:`ORDER`, by the longest name there that is the module's or an enclosing
    package's."""
    names = [name for name in ORDER if module == name or (name != "flashinfer" and module.startswith(f"{name}."))]
    return ORDER.index(max(names, key=len))


def test_imports_run_one_way() -> None:
    back = {(module, name) for module, names in GRAPH.items() for name in names if place(name) > place(module)}
    assert not back
    assert {place(module) for module in MODULES} == set(range(len(ORDER))), "a name that nothing bears"


BASE = [
    module
    for module in MODULES
    if module.startswith("flashinfer_sm12x")
    and not module.startswith(tuple(f"flashinfer_sm12x.{name}" for name in ("vllm", "doctor", "quantize")))
]


def test_the_base_package_imports_neither_flashinfer_nor_torch() -> None:
    """Nothing but the standard library and packaging: it runs before ``import flashinfer`` may, in any environment."""
    assert {"flashinfer_sm12x.versions", "flashinfer_sm12x.variables", "flashinfer_sm12x.build.engine"} <= set(BASE)
    code = f"""if True:
        import importlib, json, sys
        before = set(sys.modules)
        for name in {BASE!r}:
            importlib.import_module(name)
        tops = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        print(json.dumps(sorted(tops - sys.stdlib_module_names)))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) == {"flashinfer_sm12x", "packaging"}


def test_no_module_is_loaded_by_its_path_or_forged() -> None:
    forged = re.compile(r"spec_from_file_location|ModuleType\(|sys\.modules\[[^]]*\] = ")
    assert [module for module, path in MODULES.items() if forged.search(path.read_text(encoding="utf-8"))] == []


def test_nothing_that_users_run_imports_testing() -> None:
    wrong = {
        (module, name)
        for module, names in GRAPH.items()
        if not module.startswith(MAY_IMPORT_TESTING)
        for name in names
        if name.startswith("flashinfer.testing")
    }
    assert not wrong


def test_the_virtual_device_is_asked_for_in_one_place() -> None:
    asks = [module for module, path in MODULES.items() if "flashinfer.testing.virtual_device" in path.read_text()]
    assert [module for module in asks if not module.startswith(MAY_IMPORT_TESTING)] == ["flashinfer.sm12x.backend"]


def test_headers_include_headers_only() -> None:
    """Headers in ``include/`` need nothing of ``csrc/``, and folders of kernels include one way."""
    include = REPO / "include"
    graph: dict[str, set[str]] = {}
    for path in include.rglob("*.*h"):
        name = path.relative_to(include).as_posix()
        graph[name] = set()
        for included in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            found = [place for place in (path.parent / included, include / included) if place.exists()]
            assert found, f"{name} includes {included}, which is not in include/"
            graph[name].add(found[0].resolve().relative_to(include.resolve()).as_posix())
    assert len(graph) > 20
    graphlib.TopologicalSorter(graph).prepare()

    def folder(name: str) -> str:  # what lies beside the folders, as types.h, is a thing of its own
        return name.rpartition("/")[0] if name.count("/") > 2 else name

    folders: dict[str, set[str]] = {}
    for name, to in graph.items():
        folders.setdefault(folder(name), set()).update({folder(each) for each in to} - {folder(name)})
    graphlib.TopologicalSorter(folders).prepare()
