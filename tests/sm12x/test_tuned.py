# SPDX-License-Identifier: Apache-2.0
"""Tactics of upstream's autotuner, remembered between calls."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune, autotuner
from recording_backend import recording_tuner

from flashinfer.sm12x import tune


class _Runner(tune.Runner):
    """One tactic beside the default, and a log of what ran."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # it launches nothing

    def key(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return ()

    def names(self, tokens: int) -> list[str]:
        return ["fast", "slow"]

    def run(self, inputs: list[torch.Tensor], tactic: str | None) -> torch.Tensor:
        return inputs[0]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Upstream's, whose profiler finds ``fast`` fast."""

    def profile(_runner: Any, _inputs: Any, tactic: Any, *_: Any, **__: Any) -> float:
        return 0.5 if tactic == "fast" else 1.0

    monkeypatch.setattr(tune.devices, "gpu_name", lambda device: "stands in")
    with recording_tuner(monkeypatch, time=profile) as made:
        yield made


def _tuned() -> str | None:
    return tune.tuned("flashinfer::test", _Runner(), 8, [torch.empty(4, 2)])


def test_whatever_changes_the_tuners_answer_is_noticed(tuner: Any, tmp_path: pathlib.Path) -> None:
    """Nothing, tuning, records, a file, and nothing again: what was remembered under one is not the others' answer."""
    assert tune.is_idle()
    assert _tuned() is None
    with autotune(True, tuning_buckets=(4,), round_up=True):
        assert not tune.is_idle()
        assert _tuned() == "fast"
    assert not tune.is_idle()
    assert _tuned() == "fast"
    tuner.save_configs(str(tmp_path / "records.json"))
    tuner.clear_cache()
    assert tune.is_idle()
    assert _tuned() is None
    tuner.load_configs(str(tmp_path / "records.json"))
    assert not tune.is_idle()
    assert _tuned() == "fast"


def test_a_shape_that_was_not_tuned_is_no_warning(tuner: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = autotuner.logger
    logger.addHandler(caplog.handler)
    try:
        with autotune(True):
            assert _tuned() == "fast"
        assert _tuned() == "fast"
        for tokens, width in ((4, 6), (4096, 2)):
            inputs = [torch.empty(tokens, width)]
            assert tune.tuned("flashinfer::test", _Runner(), 8, inputs) == ("fast" if width == 2 else None)
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        tuner.choose_one("flashinfer::test", [_Runner()], tune.config(8), [torch.empty(4, 6)])
        assert "No tuned config covers" in caplog.text, "upstream's function warns"
    finally:
        logger.removeHandler(caplog.handler)


def test_it_is_asked_once_while_nothing_changes(tuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    search = AutoTuner.search_cache
    monkeypatch.setattr(AutoTuner, "search_cache", lambda *given, **named: asked.append(1) or search(*given, **named))
    for _ in range(3):
        _tuned()
    assert len(asked) == 1


@pytest.mark.parametrize("private", ["_dirty_seq", "_file_configs", "_active_tuning_contexts", "_managed_cache"])
def test_a_tuner_of_another_version_is_asked_every_time(
    tuner: Any, monkeypatch: pytest.MonkeyPatch, private: str
) -> None:
    class Other:
        asked = 0

        def __getattr__(self, name: str) -> Any:
            if name == private:
                raise AttributeError(name)
            return getattr(tuner, name)

        def choose_one(self, *given: Any, **named: Any) -> Any:
            self.asked += 1
            return tuner.choose_one(*given, **named)

    other = Other()
    monkeypatch.setattr(tune.AutoTuner, "get", lambda: other)
    assert not tune.is_idle()
    for _ in range(3):
        _tuned()
    assert other.asked == 3
