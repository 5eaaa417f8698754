# SPDX-License-Identifier: Apache-2.0
"""Devices that the attention tests run on: the CPU, and a GPU that serves the kernel family."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, or the current GPU."""
    if request.param == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from flashinfer.fused_moe import sm12x_dispatch

    if not sm12x_dispatch.serves_cuda(torch.cuda.current_device()):
        pytest.skip("this GPU runs the kernel family only with FLASHINFER_SM12X_MOE=1 and compute capability 9.0")
    return torch.device("cuda", torch.cuda.current_device())
