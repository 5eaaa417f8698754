# SPDX-License-Identifier: Apache-2.0
"""What a GB10 measured beside what was predicted for it: the page of ``bench_report.py``.

Inputs of the prediction (DRAM, MMAs, a graph's node) come first, then the layers and the parts of a decode step that
follow from them. A layer or a part outside its range is predicted again with the measured inputs: within the new range
the inputs explain it, else its own assumptions are wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfmodel import gb10
from perfmodel.step import GRAPH_NODE_US, LAYER_MODEL, Given, Report, Step, predict
from timing import github

from flashinfer_sm12x.doctor.probe.predicted import LAYER_US

from .results import Measured

SLACK = 0.05
"""A figure is outside its range if it is beyond an end by more than this share; medians of a GPU spread by as much."""

GPU = "GB10"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure: its predicted range, low and high, and the measured value; ``again`` is the range predicted with the
    measured inputs, of what follows from them."""

    name: str
    unit: str
    low: float
    high: float
    measured: float | None
    again: tuple[float, float] | None = None

    @property
    def deviation(self) -> float:
        """Of the measured value from the middle of the range, as a share of it."""
        assert self.measured is not None
        return 2 * self.measured / (self.low + self.high) - 1

    @property
    def outside(self) -> bool:
        return self.measured is not None and not within(self.measured, self.low, self.high)

    @property
    def explained(self) -> bool:
        """Whether the measured inputs explain a value outside its range."""
        return self.again is not None and self.measured is not None and within(self.measured, *self.again)


def within(value: float, low: float, high: float) -> bool:
    return (1 - SLACK) * low <= value <= (1 + SLACK) * high


def inputs(report: Report) -> list[Figure]:
    """The figures that the prediction takes as given."""
    slow, fast = gb10.SLOW.dram_gb_per_second, gb10.FAST.dram_gb_per_second
    found = [
        Figure("DRAM, plain loads", "GB/s", slow, fast, report.figure("dram", "gigabytes_per_second")),
        Figure("DRAM, bulk copies", "GB/s", slow, fast, report.figure("dram", "copies_gigabytes_per_second")),
    ]
    for kind, (low, high) in gb10.mma_rates().items():
        rate = report.figure("mma", kind, "flops_per_clock")
        found.append(Figure(f"MMA, {kind}", "FLOP a clock and SM", low, high, rate))
    node = report.figure("launch", "plain", "graph_us")
    return [*found, Figure("a graph's node", "us", GRAPH_NODE_US, GRAPH_NODE_US, node)]


def experts_us(step: Step, given: Given | None = None) -> tuple[float, float]:
    """Microseconds of one MoE layer in a step, fast and slow."""
    (row,) = (row for row in predict(LAYER_MODEL, step, given=given).rows if row.part == "MoE")
    return row.fast / row.calls, row.slow / row.calls


def layers(report: Report) -> list[Figure]:
    """gpt-oss-120b's MoE layer, by tokens."""
    given, found = dataclasses.replace(report.given(), layers={}), []
    for tokens, (low, high) in LAYER_US.items():
        step = Step(tokens, 1024) if tokens < 1024 else Step(1, tokens, tokens)
        # The probe's layer has MXFP8 input and the step's bf16 input; the ratio of two predictions is the inputs'.
        before, after = experts_us(step), experts_us(step, given)
        again = low * after[0] / before[0], high * after[1] / before[1]
        measured = report.figure("layer", f"{tokens} tokens", "layer_us")
        found.append(Figure(f"MoE layer, {tokens:,} token{'s' * (tokens > 1)}", "us", low, high, measured, again))
    return found


def parts(step: Measured, report: Report) -> list[Figure]:
    """The parts of a measured decode step, all calls of each, and the step."""
    given = dataclasses.replace(report.given(), layers={})
    before, after = predict(step.model, step.step), predict(step.model, step.step, given=given)
    times = {row.part: row.us for row in step.rows}
    found = [
        Figure(a.part, "us", b.fast, b.slow, times.get(a.part) or None, (a.fast, a.slow))
        for b, a in zip(before.rows, after.rows, strict=True)
    ]
    whole = None if step.replay is None else step.replay.median
    return [*found, Figure("a decode step", "us", before.fast, before.slow, whole, (after.fast, after.slow))]


def ends(figure: Figure, digits: int) -> str:
    """The predicted range, or the one value."""
    low, high = (f"{end:,.{digits}f}" for end in (figure.low, figure.high))
    return low if low == high else f"{low} to {high}"


def table(figures: Iterable[Figure]) -> str:
    """A line a figure."""
    body = []
    for each in figures:
        digits = 1 if each.high < 100 else 0
        line = [each.name, each.unit, ends(each, digits)]
        if each.measured is None:
            body.append([*line, "not measured", "", ""])
            continue
        verdict = "inside" if not each.outside else "explained by the inputs" if each.explained else "OUTSIDE"
        body.append([*line, f"{each.measured:,.{digits}f}", f"{each.deviation:+.0%}", verdict])
    return github(body, ["figure", "unit", "predicted", "measured", "from the middle", ""])


def moved(given: Sequence[Figure], following: Sequence[Figure]) -> list[str]:
    """The assumptions that the measurements contradict, a sentence each."""
    lines = [
        f"{each.name}: {each.measured:,.1f} {each.unit}; {ends(each, 1)} is assumed ({each.deviation:+.0%} from the "
        "middle)."
        for each in given
        if each.outside
    ]
    if because := [each for each in following if each.outside and each.explained]:
        lines.append(f"With these inputs predicted again, the prediction holds for: {names(because)}.")
    for each in following:
        if each.outside and not each.explained:
            assert each.again is not None
            lines.append(
                f"{each.name}: {each.measured:,.0f} us; {each.low:,.0f} to {each.high:,.0f} is predicted, and "
                f"{each.again[0]:,.0f} to {each.again[1]:,.0f} with the measured inputs. No input explains it: the "
                "kernel's counts or its fixed time are wrong."
            )
    return lines or [f"None: every figure that was measured is within {SLACK:.0%} of its range."]


def names(figures: Iterable[Figure]) -> str:
    return "; ".join(each.name for each in figures)


def about(report: Report, machine: Mapping[str, Any] | None) -> list[str]:
    """The GPU and the software; nothing that names a host, a user or a folder."""
    device = report.measured["device"]
    software = {
        "flashinfer-sm12x": report.fields.get("fork"),
        "flashinfer-python": report.fields.get("upstream"),
        "driver": report.fields.get("driver"),
        "CUDA toolkit": report.fields.get("toolkit"),
        "torch": device.get("torch"),
        "Python": device.get("python"),
        "processor": device.get("machine"),
        "date": (machine or {}).get("date"),
    }
    gpu = f"{device.get('name', 'a GPU')}, {device.get('sm_count', '?')} SMs"
    return [gpu, ", ".join(f"{name} {value}" for name, value in software.items() if value)]


def page(report: Report, machine: Mapping[str, Any] | None, steps: Sequence[Measured]) -> str:
    """The whole page. It is what an owner can paste into an issue."""
    given, following = inputs(report), layers(report)
    told = ["### Measured beside predicted", *about(report, machine)]
    is_gb10 = report.measured["device"].get("gb10") is True
    if not is_gb10:
        told.append(f"**This GPU is no {GPU}; what is predicted is a {GPU}.**")
    told += ["Inputs of the prediction:", table(given), f"{LAYER_MODEL}'s MoE layer:", table(following)]
    for step in steps:
        if step.model == LAYER_MODEL and step.stack.startswith("fork") and step.replay is not None:
            of_step = parts(step, report)
            following += of_step
            title = f"{step.model}, {step.what()}, KV {step.step.kv}, QKV, O and LM head {step.step.formats['QKV']}"
            rate = f"{1e6 * step.step.tokens / step.replay.median:,.1f} tokens/s"
            told += [f"{title}: {rate}", table(of_step)]
    if not steps:
        told.append("No decode step was measured.")
    if is_gb10:  # another GPU's figures contradict no assumption about a GB10
        told += ["Assumptions that moved:", "\n".join(f"- {line}" for line in moved(given, following))]
    return "\n\n".join(told) + "\n"
