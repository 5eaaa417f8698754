# SPDX-License-Identifier: Apache-2.0
"""Tables of measured and predicted steps, and their JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfmodel.step import Step
from timing import REPORT, github, report_of, write_json

from flashinfer_sm12x.counted import counted
from flashinfer_sm12x.doctor.probe.timing import Sample
from flashinfer_sm12x.files import json_file

NAME_WIDTH = 90  # of a kernel's name in a table


@dataclasses.dataclass
class Row:
    """A part of a step: who computes it, how often, the bytes it moves at least, its kernels and their microseconds."""

    part: str
    by: str
    calls: int
    bytes: float
    kernels: int = 0
    us: float = 0.0


@dataclasses.dataclass(kw_only=True)
class Measured:
    """A step on a GPU: ``replay`` of its graph, the same by part under the profiler, and the gaps between kernels.

    ``kernels`` has launches and microseconds by part and kernel; ``note`` says what is missing, and why.
    """

    model: str
    stack: str
    step: Step
    experts: float = 0.0
    replay: Sample | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    gaps: float = 0.0
    kernels: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def bytes(self) -> float:
        return sum(row.bytes for row in self.rows)

    @property
    def span(self) -> float:
        """Microseconds under the profiler: all parts and the gaps."""
        return sum(row.us for row in self.rows) + self.gaps

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences."""
        assert self.replay is not None
        return 1e6 * self.step.tokens / self.replay.median

    def what(self) -> str:
        """The batch, in words."""
        step = self.step
        if step.prefill:
            return f"prefill of {counted(step.new, 'token')}"
        window = f", windows of {step.new}" if step.verified else ""
        return f"decode, context {step.context:,}, {counted(step.sequences, 'sequence')}{window}"


def load(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """Read a report that :func:`save` wrote.

    Raises:
        OSError, ValueError: it cannot be read, or is no such report; the message names the file.
    """
    report = json_file(path, REPORT)
    steps = []
    with report_of(path):
        for fields in report["steps"]:
            rows = [Row(**row) for row in fields["rows"]]
            replay = None if fields["replay"] is None else Sample(**fields["replay"])
            steps.append(Measured(**{**fields, "step": Step(**fields["step"]), "rows": rows, "replay": replay}))
        return dict(report["machine"]), steps


def save(path: Path, machine: dict[str, Any], steps: Sequence[Measured]) -> None:
    """For :func:`load`; written anew after each step, so that what ends the process costs one. Not before one is
    measured: the file may have an earlier run's."""
    if any(step.replay is not None for step in steps):
        write_json(path, {"machine": machine, "steps": steps})


def by_part(
    step: Measured, gigabytes_per_second: float | None, predicted: Mapping[str, tuple[float, float]] | None = None
) -> str:
    """A step's table: microseconds, bytes and what they take at the rate of a streaming read, share of the step.

    ``predicted``: fast and slow microseconds by part, and of "all".
    """
    span = step.span or 1.0
    body: list[list[Any]] = []
    for row in step.rows:
        floor = "-" if gigabytes_per_second is None else f"{row.bytes / gigabytes_per_second / 1e3:,.1f}"
        body.append([row.part, row.by, row.kernels, f"{row.us:,.1f}", f"{row.bytes / 1e6:,.2f}", floor])
        body[-1].append(f"{row.us / span:.1%}")
    body.append(["gaps", "", "", f"{step.gaps:,.1f}", "", "", f"{step.gaps / span:.1%}"])
    kernels = sum(row.kernels for row in step.rows)
    floor = "-" if gigabytes_per_second is None else f"{step.bytes / gigabytes_per_second / 1e3:,.1f}"
    body.append(["all", "", kernels, f"{step.span:,.1f}", f"{step.bytes / 1e6:,.2f}", floor, ""])
    headers = ["part", "by", "kernels", "us", "MB", "floor us", "share"]
    if predicted is not None:
        headers.append("predicted us")
        for line in body:
            fast, slow = predicted.get(line[0], (0.0, 0.0))
            line.append(f"{fast:,.0f} - {slow:,.0f}" if slow else "")
    return github(body, headers)


def by_kernel(step: Measured) -> str:
    """The kernels of each part, in a step's order: launches, microseconds of all and of one."""
    body = []
    for key, entry in step.kernels.items():
        part, name = key.split(": ", 1)
        short = name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."
        each = entry["us"] / entry["launches"]
        cells = [part, short.replace("|", "/"), f"{entry['launches']:.0f}", f"{entry['us']:,.1f}", f"{each:,.2f}"]
        body.append(cells)
    headers = ["part", "kernel", "launches", "us", "us each"]
    return github(body, headers)


def overview(steps: Sequence[Measured], gigabytes_per_second: float | None) -> str:
    """One line a step."""
    body = []
    for step in steps:
        of = step.step
        what = f"prefill {of.new:,}" if of.prefill else f"{of.context:,}"
        what += f", windows of {of.new}" if of.verified else ""
        line = [step.model, step.stack, what, str(of.sequences), of.kv]
        if step.replay is None:
            body.append([*line, "-", "-", "-", "-", "-", step.note])
            continue
        milliseconds = step.replay.median / 1e3
        floor = None if gigabytes_per_second is None else step.bytes / gigabytes_per_second / 1e6
        line += [f"{milliseconds:.3f}", f"{step.tokens_per_second:,.0f}", f"{step.bytes / 1e9:.2f}"]
        line += ["-" if floor is None else f"{floor:.3f}", f"{step.gaps / step.span:.1%}" if step.span else "-"]
        body.append([*line, step.note])
    headers = ["model", "stack", "context", "sequences", "KV", "ms", "tokens/s", "GB", "floor ms", "gaps", "note"]
    return github(body, headers)
