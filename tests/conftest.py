# SPDX-License-Identifier: Apache-2.0
"""Devices that operators' tests run on, the CPU and a GPU that serves the kernel family; interpreters with a chosen
path."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import forked_python
import pytest
import torch
from layer_toys import Run
from slow_tests import is_slow, left_for_another_day


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-share", default="0/1", metavar="DAY/DAYS", help="of the slow tests those of a day")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``-m "not slow"`` is ``make test``. Before pytest's own, which looks at the marker."""
    others = []
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
            if left_for_another_day(item.nodeid, config.getoption("--slow-share")):
                others.append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


@pytest.fixture(params=[pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, or the current GPU."""
    if request.param == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from flashinfer.sm12x.devices import serves_cuda

    if not serves_cuda(torch.cuda.current_device()):
        pytest.skip("this GPU runs the kernel family only with FLASHINFER_SM12X_MOE=1 and compute capability 9.0")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def gxx() -> str:
    """The host compiler; without one a test is skipped."""
    name = os.environ.get("CXX", "c++")
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no C++ compiler: {name} is no program on PATH")
    return found


@pytest.fixture(scope="session")
def nvcc(gxx: str) -> Path:
    """The CUDA compiler that modules are built with; a test is skipped where there is none that can compile."""
    from flashinfer_sm12x.build import toolchain

    try:
        return toolchain.discover().nvcc
    except toolchain.ToolchainError as error:
        pytest.skip(f"no CUDA compiler: {error}")


@pytest.fixture(autouse=True)
def _no_switches_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value checks are asked for by the tests that are about them."""
    monkeypatch.delenv("FLASHINFER_SM12X_CHECK", raising=False)
    if os.environ.get("FLASHINFER_SM12X_MOE") == "0":
        monkeypatch.delenv("FLASHINFER_SM12X_MOE")


@pytest.fixture
def plain_signals() -> Iterator[None]:
    """Signals as a command finds them that somebody starts by hand, also where the tests run with some ignored, as in
    the background of a shell and under nohup."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def site_packages() -> Path:
    """The folder in which the pinned wheel is installed."""
    return Path(str(importlib.metadata.distribution("flashinfer-python").locate_file(""))).resolve()


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run_python(code or -m arguments, path=[...])``: a fresh interpreter, from an empty working directory."""
    elsewhere = tmp_path_factory.mktemp("cwd")

    def run(
        *arguments: str,
        path: list[Path],
        bare: bool = False,
        fresh: bool = False,
        check: bool = True,
        python: str | Path = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess:
        """``bare``: without site-packages, so that ``path`` is all there is beside the standard library; ``fresh``:
        with nothing imported, for tests of what an import brings."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLASHINFER"))}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **(env or {})}
        if fresh or bare or python != sys.executable:
            command = [str(python), *(["-S"] if bare else []), *arguments]
            result = subprocess.run(
                command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=600
            )
        else:
            result = forked_python.run(arguments, cwd=elsewhere, env=environment)
        if check and result.returncode:
            raise AssertionError(f"{arguments} exited with {result.returncode}:\n{result.stdout}{result.stderr}")
        return result

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which widths of sums the bounds of a GPU's tests were made with."""
    probe = sys.modules.get("flashinfer_sm12x.doctor.probe.mma")
    for target, bits in (probe.measured_widths() if probe else {}).items():
        terminalreporter.write_line(f"{target}'s MMAs keep of a sum, in fraction bits: {bits}")
