# SPDX-License-Identifier: Apache-2.0
"""A backend that records launches in place of ``fused_moe_120``: a call runs up to them as on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from bindings import named
from flashinfer.autotuner import AutoTuner, autotuner
from recording_backend import RecordingBackend

from flashinfer.sm12x.instances import INSTANCES
from flashinfer.testing import MoECase, make_moe_inputs

CASE = MoECase(6, 160, 96, 8, 3, 0)
WORKSPACE = 4096


class RecordingModule:
    """Stands in for ``fused_moe_120``: keeps the last launch and counts them."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.registered: list[tuple[int, int]] = []
        self.sizes: list[tuple[int, ...]] = []
        self.few_sms = False  # the stream has fewer than the device
        self.backend = RecordingBackend(self)

    def sm12x_moe_workspace_size(self, *sizes: int) -> int:
        self.sizes.append(sizes)
        return WORKSPACE

    def sm12x_moe_run(self, *arguments: Any) -> bool:
        launch = named("sm12x_moe_run", arguments)
        if self.few_sms and INSTANCES[launch["tactic_fc1"]].split_k:
            return False
        self.launches.append(launch)
        return True

    def sm12x_register_instance(self, index: int, address: int) -> None:
        self.registered.append((index, address))


def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The autotuner's warnings from now on, those that it has given before included."""
    lines: list[str] = []
    AutoTuner.get()._logged_invalid_tactic.clear()
    monkeypatch.setattr(autotuner.logger, "warning", lines.append)
    return lines


def layer_arguments(mode: int = 0, **changes: Any) -> dict[str, Any]:
    """Arguments of ``cutlass_fused_moe`` for :data:`CASE` with ``changes``."""
    return make_moe_inputs(dataclasses.replace(CASE, mode=mode, **changes), 0).arguments()
