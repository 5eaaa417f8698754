# SPDX-License-Identifier: Apache-2.0
"""What others measured, predicted by the model that predicts this fork: predicted beside published.

``published.csv`` has the figures. ``row``: a figure to compare with. ``held``: the same, and not looked at when a cause was
looked for. ``input``: the model takes it, so that it is no row. ``hindcast_frozen.csv`` has what the model of 2026-11-24
predicted before any comparison.

Kernels of others are their bytes, their FLOPs and their launches; none was run. Nothing that predicts reads a value of
``published.csv``.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

from flashinfer.sm12x.perfmodel.devices import DEVICES
from flashinfer.sm12x.perfmodel.routing import PUBLISHED as ROUTING
from flashinfer.sm12x.perfmodel.step import ENGINE_US, Predicted, Step, formats_of, given_by, predict

HERE = Path(__file__).parent
PUBLISHED, FROZEN = HERE / "published.csv", HERE / "hindcast_frozen.csv"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of ``published.csv``; the batch's fields are zero in an input."""

    role: str
    name: str
    source: str
    date: str
    gpu: str
    gpus: int
    engine: str
    model: str
    dense: str
    kv: str
    sequences: int
    context: int
    new: int
    value: float
    unit: str
    configuration: str


def figures() -> list[Figure]:
    """All lines, inputs included."""
    numbers = ("gpus", "sequences", "context", "new")
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return [
            Figure(**{**line, "value": float(line["value"]), **{name: int(line[name] or 0) for name in numbers}})
            for line in csv.DictReader(file)
        ]


def rows() -> list[Figure]:
    """Those to compare with."""
    return [figure for figure in figures() if figure.role != "input"]


def predicted(row: Figure) -> Predicted:
    """A row's step, with routing as published and, of a server, its engine."""
    step = Step(row.sequences, row.context, row.new, row.kv, formats_of(row.dense), fork=False)
    engine = ENGINE_US if row.engine.startswith("vLLM") else (0.0, 0.0)
    return predict(row.model, step, row.gpus, given_by(DEVICES[row.gpu], routing=ROUTING, engine_us=engine))


def rates(step: Predicted) -> tuple[float, float, float]:
    """Tokens/s: slow, at the middle of the times, fast."""
    return step.rate(step.slow), step.middle_rate, step.rate(step.fast)
