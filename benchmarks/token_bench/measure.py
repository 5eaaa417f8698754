# SPDX-License-Identifier: Apache-2.0
"""A step in one CUDA graph: its time by replays, and which part each of its kernels belongs to.

Replays have the weights of all layers to read, gigabytes, so L2 brings nothing from one to the next. A second graph of
the same step has an empty kernel before each part; what lies between two of them is the part's. Times of kernels
are those of replays of the first graph under the profiler (CUPTI), which adds a little to each: the total is measured
without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from perfmodel.step import Step, parts_of

from flashinfer_sm12x.doctor.probe.timing import Sample, captured

from .model import Model
from .results import Measured, Row

MARKER = "spin_kernel"  # of torch.cuda._sleep
PROFILED = 3
LEAST_REPLAYS, SECONDS = 5, 1.0
Kernel = tuple[str, float, float]
"""Name, and microseconds of begin and end."""


def time_replays(graph: torch.cuda.CUDAGraph, repeats: int) -> Sample:
    """Microseconds of one replay."""
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
        if len(times) >= LEAST_REPLAYS and sum(times) > 1e6 * SECONDS:
            break
    return Sample(statistics.median(times), min(times), max(times))


def kernels_of(graph: torch.cuda.CUDAGraph, replays: int) -> list[list[Kernel]]:
    """The kernels that each of ``replays`` launched, in order."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(replays):
            graph.replay()
            torch.cuda.synchronize()
    recorded: Any = profile.profiler
    found = in_order(recorded.kineto_results.events())
    count, left = divmod(len(found), replays)
    if left or not count:
        raise RuntimeError(f"the profiler saw {len(found)} kernels in {replays} replays of one graph")
    return [found[i * count : (i + 1) * count] for i in range(replays)]


def in_order(events: Iterable[Any]) -> list[Kernel]:
    """The kernels among the profiler's events, by their begin, in microseconds from the first one's."""
    on_gpu = [
        event
        for event in events
        if str(event.device_type()).endswith("CUDA") and not event.name().startswith("Context Sync")
    ]
    on_gpu.sort(key=lambda event: event.start_ns())
    # Of whole nanoseconds: since 1970 there are so many microseconds that a float64 rounds them to quarters.
    return [
        (
            event.name(),
            (event.start_ns() - on_gpu[0].start_ns()) / 1e3,
            (event.start_ns() + event.duration_ns() - on_gpu[0].start_ns()) / 1e3,
        )
        for event in on_gpu
    ]


def owners(marked: Sequence[str], marks: Sequence[str], names: Sequence[str]) -> list[str]:
    """The part of each kernel in ``names``, by the names ``marked`` of the graph with markers, and its ``marks``.

    Raises
    ------
    RuntimeError
        The graphs do not hold the same kernels.
    """
    parts, found, remaining = [], [], iter(marks)
    part = ""
    for name in marked:
        if MARKER in name:
            part = next(remaining)
        else:
            parts.append(part)
            found.append(name)
    if len(found) != len(names) or next(remaining, None) is not None:
        raise RuntimeError(f"with markers {len(found)} kernels, without {len(names)}: no table by part")
    for i, (ours, other) in enumerate(zip(found, names, strict=True)):
        if ours != other:
            raise RuntimeError(f"kernel {i} is {ours} with markers and {other} without: no table by part")
    return parts


def busy_and_gaps(kernels: Sequence[Kernel], parts: Sequence[str]) -> tuple[dict[str, list[float]], float]:
    """Microseconds of each kernel that no earlier one was running in, by part, and those in which none ran."""
    busy: dict[str, list[float]] = {}
    gaps, reached = 0.0, kernels[0][1]
    for (_, begin, end), part in zip(kernels, parts, strict=True):
        gaps += max(0.0, begin - reached)
        busy.setdefault(part, []).append(max(0.0, end - max(begin, reached)))
        reached = max(reached, end)
    return busy, gaps


def measure_step(model: Model, step: Step, stack: str, name: str, repeats: int) -> Measured:
    """One row of the tables, with its parts."""
    batch = model.batch(step)
    caches = model.caches(step, batch)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return model.step(step, batch, caches)

    logits, _ = run()
    finite = bool(torch.isfinite(logits).all())
    experts = model.experts_touched()
    del logits
    measured = Measured(
        model=name,
        stack=stack,
        step=step,
        experts=experts,
        note="" if finite else "logits are not finite",
    )
    by = model.by(step)
    graph = captured(run)
    measured.replay = time_replays(graph, repeats)
    parts = {part.name: part for part in parts_of(model.size, step, experts)}
    measured.rows = [Row(part.name, by[part.name], part.calls, part.bytes) for part in parts.values()]
    try:
        attribute(measured, model, graph, run)
    except RuntimeError as error:
        measured.note = f"{measured.note} {error}".strip()
    return measured


def attribute(measured: Measured, model: Model, graph: torch.cuda.CUDAGraph, run: Callable[[], Any]) -> None:
    """Fill in the parts' kernels and times."""
    replays = kernels_of(graph, PROFILED)
    marks: list[str] = []

    def mark(part: str) -> None:
        marks.append(part)
        torch.cuda._sleep(1)

    before, model.mark = model.mark, mark
    try:
        with_markers = torch.cuda.CUDAGraph()
        with torch.cuda.graph(with_markers):
            run()
    finally:
        model.mark = before
    names = [name for name, _, _ in kernels_of(with_markers, 1)[0]]
    parts = owners(names, marks, [name for name, _, _ in replays[0]])
    kernels = sorted(replays, key=lambda each: each[-1][2] - each[0][1])[PROFILED // 2]
    busy, measured.gaps = busy_and_gaps(kernels, parts)
    for row in measured.rows:
        times = busy.get(row.part, [])
        row.kernels, row.us = len(times), sum(times)
    by_kernel: dict[str, dict[str, float]] = {}
    for (name, begin, end), part in zip(kernels, parts, strict=True):
        key = f"{part}: {name}"
        entry = by_kernel.setdefault(key, {"launches": 0, "us": 0.0})
        entry["launches"] += 1
        entry["us"] += end - begin
    measured.kernels = by_kernel
