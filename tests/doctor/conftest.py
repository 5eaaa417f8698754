# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the doctor's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_machine import Machine, Parts


@pytest.fixture(scope="session")
def parts(gxx: str, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """The files that the doctor's machines share."""
    return Parts.make(tmp_path_factory.mktemp("doctor"), gxx)


@pytest.fixture
def machine(tmp_path: Path, parts: Parts) -> Machine:
    return Machine(tmp_path, parts)
