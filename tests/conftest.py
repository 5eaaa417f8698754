# SPDX-License-Identifier: Apache-2.0
"""Devices that operators' tests run on: the CPU, and a GPU that serves the kernel family."""

from __future__ import annotations

import os
import sys

import pytest
import torch


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


@pytest.fixture(autouse=True)
def _no_switches_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value checks are asked for by the tests that are about them."""
    monkeypatch.delenv("FLASHINFER_SM12X_CHECK", raising=False)
    if os.environ.get("FLASHINFER_SM12X_MOE") == "0":
        monkeypatch.delenv("FLASHINFER_SM12X_MOE")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which widths of sums the bounds of a GPU's tests were made with."""
    probe = sys.modules.get("flashinfer.sm12x.probe.mma")
    for target, bits in (probe.measured_widths() if probe else {}).items():
        terminalreporter.write_line(f"{target}'s MMAs keep of a sum, in fraction bits: {bits}")
