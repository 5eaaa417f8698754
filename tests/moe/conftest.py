# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the MoE tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moe_recording import RecordingModule
from recording_backend import recording_tuner


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingModule]:
    """Stands in for ``fused_moe_120`` (``moe_recording``); the autotuner starts empty."""
    made = RecordingModule()
    with recording_tuner(monkeypatch, made.backend):
        yield made
