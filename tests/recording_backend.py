# SPDX-License-Identifier: Apache-2.0
"""A backend that hands launches to an object in place of a compiled module: a call runs up to them as on a GPU."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from flashinfer.jit.sm12x.instances import INSTANCES, SM12X


class RecordingBackend:
    """A GPU whose module keeps launches; tensors are the CPU's."""

    is_cuda = True
    unified_memory = True
    sm_count = 48

    def __init__(self, module: Any, block_scaled_mma: bool = True) -> None:
        self.recorded = module
        self.block_scaled_mma = block_scaled_mma
        self.tactics = SM12X if block_scaled_mma else INSTANCES
        self.memo: dict[Any, Any] = {}
        self.built: list[int] = []
        self.wanted_pdl: list[bool | None] = []

    def module(self, _generate: Any, *tactic: int) -> Any:
        self.built += tactic
        return types.SimpleNamespace(sm12x_instance_address=lambda: 4711) if tactic else self.recorded

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def call(self, function: Any, *arguments: Any, writes: Sequence[torch.Tensor]) -> Any:
        return function(*arguments)

    def pdl(self, wanted: bool | None) -> bool:
        return wanted is not False
