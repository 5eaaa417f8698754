# SPDX-License-Identifier: Apache-2.0
"""Fixtures for programs that compile upstream's sources from the installed wheel and run on the virtual GPU with every
checker on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

INCLUDES = ("include", "csrc", "csrc/nv_internal", "csrc/nv_internal/include", "cutlass/include",
            "cutlass/tools/util/include", "cccl/libcudacxx/include", "cccl/cub", "cccl/thrust", "spdlog/include")  # fmt: skip
# The flags of upstream's JIT, but PTX only: the virtual GPU executes PTX, and ptxas would double the time.
FLAGS = ("-O3", "-DNDEBUG", "-use_fast_math", "--expt-relaxed-constexpr", "-w",
         "-gencode", "arch=compute_121a,code=compute_121a", "-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4")  # fmt: skip


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The data folder of the flashinfer-python wheel."""
    try:
        found = importlib.metadata.distribution("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the flashinfer-python wheel is not installed")
    return Path(str(found.locate_file("flashinfer/data")))


@pytest.fixture(scope="session")
def compile_upstream(compile_cuda: Callable[..., Path], wheel: Path) -> Callable[..., Path]:
    """Compile sources of ours and of the wheel into one program."""

    def build(name: str, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
        return compile_cuda(name, *sources, flags=(*FLAGS, *flags, *(f"-I{wheel / path}" for path in INCLUDES)))

    return build


@pytest.fixture
def run_checked(shim: Path, tmp_path: Path) -> Callable[..., tuple[str, list[dict[str, Any]]]]:
    """Run a program with every checker on: what it printed and its launches.

    ``known`` gives the kinds that must be reported and, for each, how the instructions at fault begin: others, or none
    of a kind, fail.
    """

    def run(
        *command: object, known: Mapping[str, tuple[str, ...]] | None = None, watch: str = "all"
    ) -> tuple[str, list[dict[str, Any]]]:
        trace = tmp_path / "trace.json"
        trace.unlink(missing_ok=True)
        settings = {"LD_LIBRARY_PATH": str(shim), "VSM_WATCH": watch, "VSM_TRACE": str(trace)}
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, env={**os.environ, **settings}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        launches = [json.loads(line) for line in trace.read_text().splitlines()]
        reports = [report for launch in launches for report in launch["reports"]]
        known = known or {}
        assert {report["kind"] for report in reports} == known.keys(), reports
        assert all(report["instruction"].startswith(known[report["kind"]]) for report in reports), reports
        instructions = sum(launch["counters"]["warp_instructions"] for launch in launches)
        print(f"{instructions} warp instructions in {sum(launch['host_seconds'] for launch in launches):.3f} s")
        return done.stdout, launches

    return run
