# SPDX-License-Identifier: Apache-2.0
"""Tables of measured and predicted steps, and their JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from flashinfer.sm12x_gpu_probe.timing import Sample

from .sizes import TokenFormat

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
    sequences: int
    context: int
    new: int
    kv: str
    formats: dict[str, str]
    fused_router: bool = False
    fused_attention: bool = False
    dense_tokens: TokenFormat = "bf16"
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
        return 1e6 * self.sequences * self.new / self.replay.median

    def what(self) -> str:
        """The batch, in words."""
        if self.new > 1:
            return f"prefill of {self.new:,} tokens"
        return (
            f"decode, context {self.context:,}, {self.sequences} {'sequence' if self.sequences == 1 else 'sequences'}"
        )


def load(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """What :func:`save` wrote."""
    report = json.loads(path.read_text(encoding="utf-8"))
    steps = []
    for fields in report["steps"]:
        rows = [Row(**row) for row in fields["rows"]]
        replay = None if fields["replay"] is None else Sample(**fields["replay"])
        steps.append(Measured(**{**fields, "rows": rows, "replay": replay}))
    return report["machine"], steps


def save(path: Path, machine: dict[str, Any], steps: Sequence[Measured]) -> None:
    """For :func:`load`; written anew after each step, so that what ends the process costs one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "steps": [dataclasses.asdict(step) for step in steps]}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1), encoding="utf-8")
    partial.replace(path)


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
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))


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
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))


def overview(steps: Sequence[Measured], gigabytes_per_second: float | None) -> str:
    """One line a step."""
    body = []
    for step in steps:
        what = f"prefill {step.new:,}" if step.new > 1 else f"{step.context:,}"
        line = [step.model, step.stack, what, str(step.sequences), step.kv]
        if step.replay is None:
            body.append([*line, "-", "-", "-", "-", "-", step.note])
            continue
        milliseconds = step.replay.median / 1e3
        floor = None if gigabytes_per_second is None else step.bytes / gigabytes_per_second / 1e6
        line += [f"{milliseconds:.3f}", f"{step.tokens_per_second:,.0f}", f"{step.bytes / 1e9:.2f}"]
        line += ["-" if floor is None else f"{floor:.3f}", f"{step.gaps / step.span:.1%}" if step.span else "-"]
        body.append([*line, step.note])
    headers = ["model", "stack", "context", "sequences", "KV", "ms", "tokens/s", "GB", "floor ms", "gaps", "note"]
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))
