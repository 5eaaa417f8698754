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
