# SPDX-License-Identifier: Apache-2.0
"""Devices that the MoE tests run on: the CPU, and a GPU that serves the kernel family."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from moe_recording import RecordingModule, recording


def _gpu_reason() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    from flashinfer.fused_moe import sm12x_dispatch

    if not sm12x_dispatch.serves_cuda(torch.cuda.current_device()):
        return "this GPU runs the kernel family only with FLASHINFER_SM12X_MOE=1 and compute capability 9.0"
    return None


@pytest.fixture(params=[pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, or the current GPU."""
    if request.param == "cuda":
        reason = _gpu_reason()
        if reason:
            pytest.skip(reason)
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_switches_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value checks are asked for by the tests that are about them."""
    monkeypatch.delenv("FLASHINFER_SM12X_CHECK", raising=False)
    if os.environ.get("FLASHINFER_SM12X_MOE") == "0":
        monkeypatch.delenv("FLASHINFER_SM12X_MOE")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingModule]:
    """Stands in for ``fused_moe_120`` on meta tensors (``moe_recording``)."""
    with recording(monkeypatch) as recorder:
        yield recorder
