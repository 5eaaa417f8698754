# SPDX-License-Identifier: Apache-2.0
"""The benchmark's switch, and predictions in this process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _switch_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark sets it for its process."""
    monkeypatch.setenv("FLASHINFER_SM12X_MOE", "1")


@pytest.fixture(autouse=True)
def _predictions_are_made_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else, where torch brings CUDA, they are made in another one, which has nothing of what a test replaced."""
    for benchmark in ("bench_cutlass_fused_moe_mxfp4", "bench_dense_mx", "bench_token"):
        monkeypatch.setattr(f"{benchmark}.in_own_process", lambda function, *arguments: function(*arguments))
