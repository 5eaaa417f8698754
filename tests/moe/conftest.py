# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the MoE tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moe_recording import RecordingModule, recording


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingModule]:
    """Stands in for ``fused_moe_120`` (``moe_recording``)."""
    with recording(monkeypatch) as recorder:
        yield recorder
