# SPDX-License-Identifier: Apache-2.0
"""Which tactics a layer gets and why, for people: ``python -m flashinfer sm12x-plan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..jit.sm12x.instances import INSTANCES, MAX_EXPERTS
from ..sm12x_arguments import require_k_alignment
from . import sm12x_planner
from .sm12x_validation import Mode

MODES = {"w4a8": Mode.MXFP8_INPUT, "w4a8-bf16": Mode.HALF_INPUT, "w4a16": Mode.W4A16}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a layer on one rank."""

    hidden: int
    inter: int
    experts: int
    top_k: int

    def check(self) -> None:
        """Raise ``ValueError`` unless the kernels take such a layer."""
        require_k_alignment("hidden", self.hidden)
        require_k_alignment("inter", self.inter)
        if not 1 <= self.experts <= MAX_EXPERTS:
            raise ValueError(f"experts is {self.experts}; it must be in [1, {MAX_EXPERTS}]")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k is {self.top_k}; it must be in [1, {self.experts}], the number of experts")


@dataclasses.dataclass(frozen=True)
class Device:
    """What the planner asks about a GPU."""

    name: str
    sm_count: int
    block_scaled_mma: bool


MODELS = {"gpt-oss-120b": Layer(2880, 2880, 128, 4), "gpt-oss-20b": Layer(2880, 2880, 32, 4)}
DEVICES = {"gb10": Device("GB10", 48, True), "h200": Device("H200", 132, False)}


@dataclasses.dataclass(frozen=True)
class Explained:
    """The tactics of one number of tokens.

    Attributes
    ----------
    tokens : int
        Of the batch.
    rows_per_expert : float
        Rows that an expert can expect which is hit at all.
    fc1, fc2 : int
        The tactics, and the names of their instances.
    reason : str
        The planner's.
    """

    tokens: int
    rows_per_expert: float
    fc1: int
    fc1_instance: str
    fc2: int
    fc2_instance: str
    reason: str


def explain(layer: Layer, mode: Mode, tokens: Sequence[int], device: Device) -> list[Explained]:
    """The default tactics of ``layer`` for each number of ``tokens``.

    Raises
    ------
    ValueError
        A size that the kernels do not take.
    """
    layer.check()
    if device.sm_count < 1:
        raise ValueError(f"sm_count is {device.sm_count}; it must be at least 1")
    explained = []
    for count in tokens:
        if count < 1:
            raise ValueError(f"tokens is {count}; it must be at least 1")
        rows = count * layer.top_k
        sizes = (count, layer.top_k, layer.experts, layer.hidden, layer.inter, int(mode))
        fc1, fc2 = sm12x_planner.plan_moe(*sizes, device.block_scaled_mma)
        activation: Any = mode.activation
        choice = sm12x_planner.choose(
            activation, rows, layer.experts, device.block_scaled_mma, (layer.hidden, layer.inter)
        )
        explained.append(
            Explained(
                count,
                sm12x_planner.expected_rows(rows, layer.experts),
                int(fc1),
                INSTANCES[fc1].name,
                int(fc2),
                INSTANCES[fc2].name,
                choice.reason,
            )
        )
    return explained


def as_table(rows: Sequence[Explained]) -> tuple[list[str], list[list[Any]]]:
    """Titles and cells for ``tabulate``."""
    headers = ["tokens", "rows/expert", "FC1", "FC1's instance", "FC2", "FC2's instance", "why"]
    cells = [
        [row.tokens, f"{row.rows_per_expert:.1f}", row.fc1, row.fc1_instance, row.fc2, row.fc2_instance, row.reason]
        for row in rows
    ]
    return headers, cells
