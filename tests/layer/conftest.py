# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of ``flashinfer/_layer.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from layer_toys import FORK_FILES, WHEEL_FILES, write_fork, write_wheel


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """``sys.path`` entries of a toy fork over a toy wheel."""
    root = tmp_path_factory.mktemp("toy")
    return [write_fork(root / "fork", FORK_FILES), write_wheel(root / "wheel", WHEEL_FILES)]
