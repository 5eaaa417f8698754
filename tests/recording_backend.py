# SPDX-License-Identifier: Apache-2.0
"""A backend that hands launches to an object in place of a compiled module: a call runs up to them as on a GPU."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner

from flashinfer.sm12x import tune
from flashinfer.sm12x.device_class import GB10, DeviceClass
from flashinfer.testing import virtual_device


class RecordingBackend:
    """A GPU whose module keeps launches; tensors are the CPU's."""

    is_cuda = True
    sm_count = 48

    def __init__(self, module: Any, device_class: DeviceClass = GB10) -> None:
        self.recorded = module
        self.device_class, self.tactics = device_class, device_class.tactics
        self.memo: dict[Any, Any] = {}
        self.built: list[int] = []
        self.wanted_pdl: list[bool | None] = []

    def module(self, _generate: Any, *of: Any) -> Any:
        """A module that launches, or one of a tactic, by its number."""
        tactic = [each for each in of if isinstance(each, int)]
        self.built += tactic
        return types.SimpleNamespace(sm12x_instance_address=lambda: 4711) if tactic else self.recorded

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def call(self, function: Any, *arguments: Any, writes: Sequence[torch.Tensor]) -> Any:
        return function(*arguments)

    def pdl(self, wanted: bool | None) -> bool:
        return wanted is not False


@contextlib.contextmanager
def recording_tuner(
    monkeypatch: pytest.MonkeyPatch, recording: RecordingBackend | None = None, time: Callable[..., float] | None = None
) -> Iterator[AutoTuner]:
    """Upstream's autotuner without a GPU, empty before and after: launches go to ``recording``, ``time`` times
    tactics."""
    if recording is not None:
        monkeypatch.setattr(virtual_device, "active", lambda: recording)
    if time is not None:
        monkeypatch.setattr(AutoTuner, "_profile_single_kernel", lambda tuner, *given, **named: time(*given, **named))
    monkeypatch.setattr(AutoTuner, "_get_l2_cache_size_in_bytes", lambda tuner, device_id=None: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tune, "_cached", {})
    AutoTuner.get().clear_cache()
    yield AutoTuner.get()
    AutoTuner.get().clear_cache()
