# SPDX-License-Identifier: Apache-2.0
"""Interpreters with a chosen ``sys.path``: how a layered package resolves depends on nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from doctor_machine import Parts
from layer_toys import FORK_FILES, WHEEL_FILES, Run, write_fork, write_wheel


@pytest.fixture(scope="session")
def site_packages() -> Path:
    """Where the pinned wheel is installed."""
    return Path(str(importlib.metadata.distribution("flashinfer-python").locate_file(""))).resolve()


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run_python(code or -m arguments, path=[...])``: a fresh interpreter, from an empty working directory."""
    elsewhere = tmp_path_factory.mktemp("cwd")

    def run(
        *arguments: str,
        path: list[Path],
        bare: bool = False,
        check: bool = True,
        python: str | Path = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess:
        """``bare``: without site-packages, so that ``path`` is all there is beside the standard library."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLASHINFER"))}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **(env or {})}
        result = subprocess.run(
            [str(python), *(["-S"] if bare else []), *arguments],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if check and result.returncode:
            raise AssertionError(f"{arguments} exited with {result.returncode}:\n{result.stdout}{result.stderr}")
        return result

    return run


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """``sys.path`` entries of a toy fork over a toy wheel."""
    root = tmp_path_factory.mktemp("toy")
    return [write_fork(root / "fork", FORK_FILES), write_wheel(root / "wheel", WHEEL_FILES)]


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """What the doctor's machines share."""
    return Parts.make(tmp_path_factory.mktemp("doctor"))
