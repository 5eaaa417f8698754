# SPDX-License-Identifier: Apache-2.0
"""Fixtures of a virtual SM121, and its checkers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

ALL_CHECKERS = 31  # vsm.Watch.ALL, races included, and ARRIVALS: GB10's rule
RACES = 2


def assert_clean(device: VirtualDevice) -> None:
    assert all(launch.clean for launch in device.launches), device.launches


def virtual_fixture(**options: Any) -> Any:
    """A fixture: a device with these options of ``virtual_device``, on which each launch of the test must be clean."""

    @pytest.fixture
    def device() -> Iterator[VirtualDevice]:
        with virtual_device("sm_121a", **options) as made:
            yield made
            assert_clean(made)

    return device
