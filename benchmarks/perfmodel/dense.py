# SPDX-License-Identifier: Apache-2.0
"""A dense layer's time on a GB10, predicted.

1. A launch's counts are linear in the weight's rows, N, and, where tokens fill whole tiles, bilinear in N and the
   number of tokens. They are fitted to runs of the shipped kernels on the virtual SM121 with the layer's K, the batch
   itself (up to :data:`FEW_TOKENS`; else two small ones) and two small N.
2. A GEMM's blocks write partial sums of the units that they share to memory. Their number follows from the walk of the
   blocks and not from N, so they are counted apart from the fit. They are taken to reach DRAM once, because later reads
   fill L2.
3. The simulation that serves the experts (:mod:`.l2`) gives the bytes that a GEMM reads from DRAM again because L2 is
   small.
4. A stream passes over all weights once per tile of tokens. The first pass waits for DRAM. If the weights fit in L2, a
   later pass reads them there and its time is that of its instructions.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashinfer.sm12x.instances import BLOCK_M, Format, Instance
from flashinfer.sm12x.models import matrix_bytes
from flashinfer_sm12x.files import written_whole

from .gb10 import FIXED_US, L2_CAPACITY, MULTIPROCESSORS, SECOND_LAUNCH_US, Counts, Launch, times
from .l2 import Gemm, dram_bytes, walk

FEW_TOKENS = 64
MOST_PASSES = 4
"""Tiles of tokens up to which a split-K kernel is priced."""
Run = tuple[int, int]
"""Tokens, and rows of the weight."""
RUNS = Path(__file__).with_name("gb10_dense.csv")
"""One line a launch of each run that prices an instance which the planner could give gpt-oss-120b's matrices, where its
choice changes; ``benchmarks/bench_token.py --emulate`` writes it. A test emulates one and compares."""

PRICED_FORMATS: tuple[tuple[str, Format], ...] = (
    ("mxfp4", "bf16"),
    ("mxfp4", "mxfp8"),
    ("mxint8", "bf16"),
)
"""Formats of weights and of the tokens that MMAs multiply. Other weights have the tiles and bytes of one of these, or
lie between them."""


class KeptRun(NamedTuple):
    """One run of :data:`RUNS`: the leading columns of its launches' lines. ``activation``: the format tokens are
    rounded to."""

    instance: str
    activation: str
    k: int
    tokens: int
    n: int


def runs_for(row: Instance, tokens: int) -> list[Run]:
    """The runs to which the counts of a batch of ``tokens`` are fitted."""
    unit = 16 * MULTIPROCESSORS if row.split_k else 2 * BLOCK_M
    batches = [tokens] if tokens <= FEW_TOKENS else [2 * row.block_n, 4 * row.block_n]
    return list(itertools.product(batches, (unit, 2 * unit)))


def grid_of(row: Instance, tokens: int, n: int, resident: int) -> int:
    """Blocks of a GEMM on a device that holds ``resident`` blocks at a time (``dense_blocks`` in the launcher)."""
    units = -(-n // BLOCK_M) * -(-tokens // row.block_n)
    busy_percent = 40 if row.block_n <= 64 else 75
    return units if units <= resident and 100 * units >= busy_percent * MULTIPROCESSORS else resident


def bytes_of_parts(row: Instance, case: tuple[int, int, int], blocks: int) -> float:
    """Bytes of the partial sums of units that blocks share; ``case``: tokens, N, K."""
    tokens, n, k = case
    units, k_tiles = -(-n // BLOCK_M) * -(-tokens // row.block_n), -(-k // 128)
    parts = 0
    for block in range(blocks):
        tiles = collections.Counter(unit for unit, _ in walk(units, k_tiles, blocks, block))
        parts += sum(count < k_tiles for count in tiles.values())
    return parts * 4.0 * BLOCK_M * row.block_n


def launches_of(
    row: Instance, layer: tuple[int, int], tokens: int, seen: Mapping[Run, Sequence[Launch]]
) -> list[Launch]:
    """The launches of a layer (N, K), from those that each of :func:`runs_for` was seen to launch."""
    n, k = layer
    bilinear = len({m for m, _ in seen}) > 1

    def terms(m: float, rows: float) -> list[float]:
        return [1.0, rows, m, m * rows] if bilinear else [1.0, rows]

    system = torch.tensor([terms(*run) for run in seen], dtype=torch.float64)
    found = []
    for position, launches in enumerate(zip(*seen.values(), strict=True)):
        launch, beside = launches[0], Counts()
        counts = [each.counts for each in launches]
        if not row.split_k and position == 1:
            for index, (m, rows) in enumerate(seen):
                parts = bytes_of_parts(row, (m, rows, k), grid_of(row, m, rows, launch.resident))
                counts[index] += Counts(bytes=-parts)
            launch = dataclasses.replace(launch, blocks=grid_of(row, tokens, n, launch.resident))
            parts = bytes_of_parts(row, (tokens, n, k), launch.blocks)
            beside = Counts(bytes=parts + reread_bytes(row, layer, tokens, launch.blocks))
        values = torch.tensor([each.values() for each in counts], dtype=torch.float64)
        at_size = torch.tensor(terms(tokens, n), dtype=torch.float64) @ torch.linalg.solve(system, values)
        found.append(dataclasses.replace(launch, counts=Counts(*at_size.tolist()) + beside))
    return passes_of(row, layer, tokens, found[0]) if row.split_k else found


def passes_of(row: Instance, layer: tuple[int, int], tokens: int, stream: Launch) -> list[Launch]:
    """The passes of a stream's launch over its weights, as launches one after the other."""
    passes = -(-tokens // row.block_n)
    weights = matrix_bytes(*layer, row.weights)
    first = dataclasses.replace(stream.counts * (1 / passes), bytes=stream.counts.bytes)
    later = dataclasses.replace(first, bytes=weights if weights > L2_CAPACITY else 0.0)
    return [dataclasses.replace(stream, counts=counts) for counts in [first, *[later] * (passes - 1)]]


def reread_bytes(row: Instance, layer: tuple[int, int], tokens: int, blocks: int) -> float:
    """Bytes that a GEMM reads from DRAM again, because L2 did not keep them."""
    n, k = layer
    weights, row_bytes = (matrix_bytes(128, 128, elements) / 128 for elements in (row.weights, row.compute_dtype))
    gemm = Gemm([tokens], -(-n // BLOCK_M), -(-k // 128), row.block_n, BLOCK_M * weights, row_bytes)
    return dram_bytes(gemm, blocks, L2_CAPACITY) - gemm.once()


def times_of(row: Instance, layer: tuple[int, int], launches: Sequence[Launch]) -> dict[str, Any]:
    """The fields of :class:`.gb10.Times`."""
    second = 0.0 if row.split_k else SECOND_LAUNCH_US
    fast, slow = FIXED_US["dense"]
    megabytes = matrix_bytes(*layer, row.weights) / 1e6
    return times(launches, row.compute_dtype, megabytes, (fast + second, slow + second))


def write_runs(path: Path, runs: Mapping[KeptRun, Sequence[Launch]]) -> None:
    """For :func:`runs_in`: one line a launch."""
    counts = [field.name for field in dataclasses.fields(Counts)]
    with written_whole(path) as scratch, scratch.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([*KeptRun._fields, *counts, "warps", "blocks", "resident"])
        for run, launches in runs.items():
            for launch in launches:
                values = map(round, launch.counts.values())
                lines.writerow([*run, *values, launch.warps, launch.blocks, launch.resident])


def runs_in(path: Path) -> dict[KeptRun, list[Launch]]:
    """The launches of each run, in their order."""
    runs: dict[KeptRun, list[Launch]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for instance, activation, k, tokens, n, *values, warps, blocks, resident in itertools.islice(
            csv.reader(file), 1, None
        ):
            run = KeptRun(instance, activation, int(k), int(tokens), int(n))
            launch = Launch(Counts(*map(float, values)), float(warps), int(blocks), int(resident))
            runs.setdefault(run, []).append(launch)
    return runs
