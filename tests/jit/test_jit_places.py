# SPDX-License-Identifier: Apache-2.0
"""A cache is as good at another place, for another checkout, and beside packages that have nothing to do with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jit_fakes import Project, needs_nvcc

from flashinfer._layer import fork_root
from flashinfer.jit.sm12x import build as engine
from flashinfer.jit.sm12x import toolchain


def _second_checkout(project: Project, folder: Path) -> Project:
    """A copy of sources and compiler that uses the cache of ``project``."""
    for name in ("src", "toolkit"):
        shutil.copytree(project.root / name, folder / name, ignore=shutil.ignore_patterns("calls"))
    return Project(folder, cache=project.cache)


def test_two_checkouts_share_a_cache(project: Project, tmp_path: Path) -> None:
    project.build()
    other = _second_checkout(project, tmp_path / "other")
    for each in (other, project):
        assert engine.is_fresh(each.plan())
        report = each.build()
        assert (report.compiled, report.linked) == ([], False)
    assert other.calls() == []


def test_header_that_another_checkout_has_differently_recompiles(project: Project, tmp_path: Path) -> None:
    project.build()
    other = _second_checkout(project, tmp_path / "other")
    other.write("two.h", "int two_of_the_other;\n")
    other.build()
    assert other.calls() == ["b.cu"]
    assert not engine.is_fresh(project.plan())


def test_cache_at_another_place_compiles_nothing(project: Project, tmp_path: Path) -> None:
    generated = project.cache / "generated" / "d.cu"
    generated.parent.mkdir(parents=True)
    generated.write_text("int d;\n")
    assert sorted(project.build().compiled) == ["a.o", "b.o", "c.o", "d.o"]
    project.calls()
    moved = Project(project.root, cache=tmp_path / "moved")
    project.cache.rename(moved.cache)
    assert moved.build().compiled == []
    assert moved.calls() == []


def test_include_folder_that_is_not_read_from_changes_nothing(project: Project, tmp_path: Path) -> None:
    package = tmp_path / "package" / "include"
    package.mkdir(parents=True)
    (package / "three.h").write_text("int three;\n")
    project.build()
    project.calls()
    project.after = (package,)
    assert project.build().compiled == []
    project.before, project.after = (package,), ()
    assert project.build().compiled == []
    (package / "two.h").write_text("int two_of_the_package;\n")
    assert project.build().compiled == ["b.o"]
    project.before = ()
    assert project.build().compiled == ["b.o"]


def test_object_for_a_debugger_is_of_its_own_place(project: Project, tmp_path: Path) -> None:
    """Line tables name the sources by their paths."""
    project.with_flags("-g").build()
    other = _second_checkout(project, tmp_path / "other").with_flags("-g")
    assert sorted(other.build().compiled) == ["a.o", "b.o", "c.o"]


BUILD_ONE = """
import dataclasses, sys
from flashinfer.jit.sm12x import modules
whole = modules.gen_fused_moe_module()
source = min((each for each in whole.sources if "_m8_" in each.name), key=lambda each: each.name)
spec = dataclasses.replace(whole, name="one", sources=[source])
include_dirs = [folder for _, folder in spec.plan.steps[0].include_dirs]
done = spec.build(need_lock=True)
print(len(done.compiled), done.linked, any("unrelated" in folder for folder in include_dirs))
"""
"""Builds one instance of the real module."""


@needs_nvcc
@pytest.mark.slow
def test_real_checkouts_caches_and_packages(tmp_path: Path) -> None:
    """With nvcc: a second checkout, a cache that was moved (to a path with a ``$``), a package with other CUDA headers."""
    trees = [tmp_path / "one", tmp_path / "two"]
    for tree in trees:
        for name in ("flashinfer", "include", "csrc", "3rdparty"):
            shutil.copytree(fork_root() / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    cache, moved = tmp_path / "cache", tmp_path / "mo $ved"
    # A companion of the toolkit, as wheels unpack: its folder joins the include folders.
    package = tmp_path / "unrelated"
    headers = package / "nvidia" / f"cu{toolchain.discover().version.major}" / "include"
    for name in toolchain.COMPANION_HEADERS:
        (headers / name).parent.mkdir(parents=True, exist_ok=True)
        (headers / name).write_text("#error not to be read\n")

    def build(tree: Path, base: Path, *packages: Path) -> list[str]:
        environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(base), "FLASHINFER_CUDA_ARCH_LIST": "12.1a"}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (tree, *packages)))
        result = subprocess.run(
            [sys.executable, "-c", BUILD_ONE], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    assert build(trees[0], cache) == ["1", "True", "False"]
    assert build(trees[1], cache) == ["0", "False", "False"]
    compiled, linked, joined = build(trees[0], cache, package)
    assert (compiled, linked) == ("0", "False")
    assert joined == "True" or not toolchain.discover().extra_include_dirs
    cache.rename(moved)
    assert build(trees[0], moved) == ["0", "False", "False"]
    header = next((trees[1] / "include").rglob("grouped_gemm.cuh"))
    header.write_text(header.read_text() + "\n// another line\n")
    assert build(trees[1], moved) == ["1", "True", "False"]
