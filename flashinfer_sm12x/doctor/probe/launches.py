# SPDX-License-Identifier: Apache-2.0
"""The cost of launches, and which of them overlap (``include/flashinfer/sm12x/probe/launch_order.cuh``)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from .target import Target
from .timing import captured, microseconds

KINDS = {"plain": 0, "dependent": 1, "cooperative": 2}
LAUNCHES = 256
REPEATS = 15
BUSY_CYCLES = 100_000


def new_steps(target: Target, launches: int) -> torch.Tensor:
    """Int32 ``[launches + 1]`` for a chain, the first of them 1."""
    steps = torch.zeros(launches + 1, dtype=torch.int32, device=target.device)
    steps[0] = 1
    return steps


def launch_chain(target: Target, steps: torch.Tensor, kind: str, blocks: int) -> None:
    """Launches that count, one after the other: afterwards ``steps`` is 1, 2, 3, ..."""
    target.call("launch_steps", steps, KINDS[kind], blocks, writes=(steps,))


def out_of_order(target: Target, kind: str, launches: int = LAUNCHES, blocks: int = 4) -> int:
    """Launches of a chain that did not see what the one before them wrote."""
    steps = new_steps(target, launches)
    launch_chain(target, steps, kind, blocks)
    target.synchronize()
    return int((steps.cpu() != torch.arange(1, launches + 2)).sum())


def cost(target: Target, kind: str) -> dict[str, float]:
    """Microseconds of one launch in a chain, of a block on each SM: on the device, for the host, and in a CUDA
    graph."""
    steps = new_steps(target, LAUNCHES)
    host = []

    def run() -> None:
        began = time.perf_counter()
        launch_chain(target, steps, kind, target.sm_count)
        host.append(1e6 * (time.perf_counter() - began))

    graph = captured(run)
    host.clear()
    stream = [microseconds(run) for _ in range(REPEATS)]
    replay = [microseconds(graph.replay) for _ in range(REPEATS)]
    names = {"host_us": host, "stream_us": stream, "graph_us": replay}
    return {name: statistics.median(times) / LAUNCHES for name, times in names.items()}


def overlap(
    target: Target, dependent: bool, shared_bytes: int = 0, cycles: int = 0, graph: bool = False
) -> dict[str, float]:
    """Microseconds that the first of two launches took, and by which the second one began before the first one's end.

    Args:
        target: The device.
        dependent: Launch the second one with programmatic stream serialization.
        shared_bytes: Dynamic shared memory of the second one; the first one has none.
        cycles: Cycles for which the first one works; :data:`BUSY_CYCLES` when omitted.
        graph: Launch both from a CUDA graph.
    """
    cycles = cycles or BUSY_CYCLES
    first, second = (torch.zeros((target.sm_count, 3), dtype=torch.int64, device=target.device) for _ in range(2))

    def run() -> None:
        target.call("launch_overlap", first, second, cycles, shared_bytes, dependent, writes=(first, second))

    repeat: Callable[[], None] = captured(run).replay if graph else run
    lengths, leads, waits = [], [], []
    for _ in range(1 if target.virtual is not None else REPEATS):
        repeat()
        target.synchronize()
        ended = first[:, 2].max()
        lengths.append(float(ended - first[:, 0].min()) / 1e3)
        leads.append(float(ended - second[:, 0].min()) / 1e3)
        waits.append(float(second[:, 1].min() - ended) / 1e3)
    return {
        "first_us": statistics.median(lengths),
        "began_before_end_us": statistics.median(leads),
        "released_after_end_us": statistics.median(waits),
    }
