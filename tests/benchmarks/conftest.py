# SPDX-License-Identifier: Apache-2.0
"""The benchmark's modules, which lie beside the package and not in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def _switch_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark sets it for its process."""
    monkeypatch.setenv("FLASHINFER_SM12X_MOE", "1")


@pytest.fixture(autouse=True)
def _predictions_are_made_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else, where torch brings CUDA, they are made in another one, which has nothing of what a test replaced."""
    for benchmark in ("bench_cutlass_fused_moe_mxfp4", "bench_dense_mx", "bench_token"):
        monkeypatch.setattr(f"{benchmark}.in_own_process", lambda function, *arguments: function(*arguments))
