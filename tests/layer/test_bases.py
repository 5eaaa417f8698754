# SPDX-License-Identifier: Apache-2.0
"""Every tested version of the wheel: the tests of this folder over each, and what packages and prebuilt kernels ask of
them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from layer_toys import REPO
from other_wheels import downloaded, environment_with
from packaging.requirements import Requirement

from flashinfer_sm12x.versions import TESTED_VERSIONS, UPSTREAM_DISTRIBUTION

OTHERS = [version for version in TESTED_VERSIONS if version != importlib.metadata.version(UPSTREAM_DISTRIBUTION)]


@pytest.fixture(scope="module", params=OTHERS)
def wheel(request: pytest.FixtureRequest) -> Path:
    return downloaded(request.param)


def run_over(wheel: Path, folder: Path, *words: str) -> int:
    """Run tests in an environment that has that wheel in this one's place; how many passed."""
    python = environment_with(wheel, folder / "environment")
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folder / 'temporary'}",
        *words,
    ]
    variables = {"PYTHONPATH": str(REPO), "FLASHINFER_WORKSPACE_BASE": str(folder / "workspace")}
    done = subprocess.run(command, env={**os.environ, **variables}, cwd=REPO, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed, done.stdout
    return int(passed[1])


def test_the_tests_of_this_folder_over_another_base(wheel: Path, tmp_path: Path) -> None:
    tests = ["tests/layer", "tests/quantization/test_block_scaled.py", f"--ignore={__file__}"]
    assert run_over(wheel, tmp_path, *tests) > 80


def test_packages_that_are_installed_may_be_of_every_tested_version_and_of_no_other() -> None:
    lines = (REPO / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(UPSTREAM_DISTRIBUTION))
    allowed = Requirement(line.partition("#")[0].strip()).specifier
    published = ["0.6.18.post1", "0.7.0.post1", "0.7.1", "0.7.2.post2", "0.7.3", *TESTED_VERSIONS]
    assert sorted(version for version in published if version in allowed) == sorted(TESTED_VERSIONS)


INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
ROOTS = (
    "include",
    "csrc",
    "csrc/nv_internal",
    "csrc/nv_internal/include",
    "cutlass/include",
    "cutlass/tools/util/include",
    "spdlog/include",
)


def included(wheel: dict[str, bytes]) -> set[str]:
    """The files of a wheel's ``data/`` that this fork's sources include, whatever the conditions."""
    ours = [path for root in ("include", "csrc") for path in (REPO / root).rglob("*") if path.is_file()]
    mine = {path.relative_to(REPO).as_posix() for path in ours}
    texts, found = [path.read_text(encoding="utf-8") for path in ours], set()
    while texts:
        for name in INCLUDE.findall(texts.pop()):
            if f"include/{name}" in mine or f"csrc/{name}" in mine:
                continue
            for place in (f"{root}/{name}" for root in ROOTS):
                if place in wheel and place not in found:
                    found.add(place)
                    texts.append(wheel[place].decode())
    return found


def test_prebuilt_kernels_fit_every_base(wheel: Path, site_packages: Path) -> None:
    """They are loaded where the headers that they were compiled from have the same bytes."""
    data = site_packages / "flashinfer" / "data"
    here = {
        path.relative_to(data).as_posix(): path.read_bytes()
        for root in ROOTS
        for path in (data / root).rglob("*.*h*")
        if path.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        prefix = "flashinfer/data/"
        there = {
            name.removeprefix(prefix): archive.read(name)
            for name in archive.namelist()
            if name.startswith(prefix) and name.removeprefix(prefix) in here
        }
    needed = included(here)
    assert {"include/flashinfer/layout.cuh", "csrc/tvm_ffi_utils.h"} <= needed
    assert [name for name in sorted(needed) if there.get(name) != here[name]] == []
