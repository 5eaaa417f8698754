# SPDX-License-Identifier: Apache-2.0
"""An MoE layer's time on a GB10, predicted for each mode and each tactic that the planner gives.

1. The kernels compiled for ``sm_121a`` run on the virtual device in the layer's full hidden and intermediate size, on a
   few experts.  Each launch yields its counts: warp instructions, MMA operations, shared-memory wavefronts and distinct
   bytes of global memory.
2. A launch's counts are linear in three numbers: 1 (the grid, and units of work that are cut between blocks), the tiles
   of tokens T (summed over experts: for each, all rows and all of K are computed) and the token rows R (what is done
   for each row of an expert).  Three runs - few experts with short tiles, more of them, the first with full tiles -
   give the three coefficients; a fourth, with random routing, is predicted from them and the deviation is printed.  By
   these counts weights come from DRAM once per touched expert, not once per tile; what the two-kernel path reads more
   often, because L2 is too small, is simulated (:mod:`.l2`) and added, and so are contributions that are read back when
   L2 has lost them.  A fused MoE kernel reads an expert's weights once for each of its tiles.
3. A row's T, R and touched experts are means over random routings.  A prologue is linear in the tokens, as is the
   arranging of tokens for a fused MoE kernel; for the two-kernel path that is linear in R (it reads a token's row once
   and writes it for each of its experts; emulated with fewer of them, reads are overestimated).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from flashinfer.fused_moe.sm12x_planner import plan_moe
from flashinfer.jit.sm12x.modules import computes_in_fp16
from flashinfer.sm12x.instances import BLOCK_M, FORMATS, INSTANCES
from flashinfer.sm12x.models import SCALE_BLOCK, MoELayer
from flashinfer_sm12x.files import written_whole

from . import gb10
from .gb10 import FIXED_US, SECOND_GEMM_US, Counts, Launch, Times, times
from .l2 import Gemm, dram_bytes
from .routing import UNIFORM, Routing, routed

ROUTINGS = 8
FITS = Path(__file__).with_name("gb10_fits.csv")
"""One line a launch of what the planner gives gpt-oss-120b in the sizes that the doctor's probe times;
``benchmarks/bench_token.py --emulate`` writes it. A test emulates a batch and compares."""

Tactics = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Work:
    """The numbers of a batch in which its counts are linear."""

    tokens: float
    experts: float
    tiles: float
    rows: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """Counts of one launch as a function of the work: ``constant + per_tile T + per_row R``.

    ``tile`` is its token tile, 0 for what is no GEMM; the rows of a prologue, and of a fused MoE kernel's arranging,
    are the batch's tokens (``by_tokens``). ``warps`` are the resident ones of a scheduler.
    """

    tile: int
    by_tokens: bool
    constant: Counts
    per_tile: Counts
    per_row: Counts
    warps: float
    blocks: int = 0

    def at(self, work: Work) -> Counts:
        """Counts of ``work``. A tile's bytes are those of its expert's weights, which are read once however many tiles
        it has."""
        tiles = dataclasses.replace(self.per_tile * work.tiles, bytes=self.per_tile.bytes * work.experts)
        return self.constant + tiles + self.per_row * (work.tokens if self.by_tokens else work.rows)


Fits = dict[tuple[int, Tactics, tuple[int, ...]], list[Fit]]
"""Fits of each (mode, tactics, (hidden size, intermediate size)); of several models' layers with FC1's rows besides."""


@dataclasses.dataclass(kw_only=True)
class Line(Times):
    """A layer with a batch of tokens."""

    mode: int
    tokens: int
    tactics: Tactics
    experts: float
    overhead: float


def work_of(ids: torch.Tensor, tile: int) -> Work:
    """The work of a routing with token tiles of ``tile``; no tiles where that is 0."""
    per_expert = torch.bincount(ids.flatten().long())
    tiles = int(((per_expert + tile - 1) // tile).sum()) if tile else 0
    return Work(ids.shape[0], int((per_expert > 0).sum()), tiles, ids.numel())


@functools.cache
def mean_work(layer: MoELayer, tokens: int, tile: int, routing: Routing = UNIFORM, new: int = 1) -> Work:
    """The mean over routings of ``tokens``, each ``new`` of them of one sequence."""
    works = [
        dataclasses.astuple(work_of(routed(layer, tokens // new, new, seed, routing), tile)) for seed in range(ROUTINGS)
    ]
    return Work(*torch.tensor(works, dtype=torch.float64).mean(0).tolist())


@functools.cache
def reread_bytes(layer: MoELayer, tokens: int, tactic: int, fc1: bool, blocks: int) -> float:
    """Bytes that one GEMM of a pair reads from DRAM again, for one random routing; FC2's contributions included."""
    row = INSTANCES[tactic]
    rows = torch.bincount(routed(layer, tokens, 1, 0).flatten(), minlength=layer.experts).tolist()
    outputs, k = (layer.fc1_rows, layer.hidden) if fc1 else (layer.hidden, layer.inter)
    scales = row.block_k / SCALE_BLOCK
    block = FORMATS[row.weights].elements_per_scale
    assert block is not None
    weights = BLOCK_M * (row.block_k / 2 + row.block_k / block)
    row_bytes = row.block_k + scales if row.compute_dtype == "mxfp8" else 2 * row.block_k
    gemm = Gemm(rows, -(-outputs // BLOCK_M), -(-k // row.block_k), row.block_n, weights, row_bytes)
    contributions = 0 if fc1 else 4.0 * sum(rows) * layer.hidden
    read_back = contributions if contributions > gb10.L2_CAPACITY else 0.0
    return dram_bytes(gemm, blocks, gb10.L2_CAPACITY) - gemm.once() + read_back


def launches_of(
    layer: MoELayer, tokens: int, tactics: Tactics, fits: Sequence[Fit], routing: Routing = UNIFORM, new: int = 1
) -> Iterator[Launch]:
    """The launches of a layer with a batch of tokens."""
    gemms = 0
    for fit in fits:
        work = mean_work(layer, tokens, fit.tile, routing, new)
        counts = fit.at(work)
        if fit.tile and INSTANCES[tactics[0]].split_k:
            # A block's share holds one tile after the other: an expert's second tile finds none of its weights in L2.
            counts += Counts(bytes=(work.tiles - work.experts) * layer.expert_bytes)
        elif fit.tile:
            counts += Counts(bytes=reread_bytes(layer, tokens, tactics[gemms], gemms == 0, fit.blocks))
        gemms += fit.tile > 0
        yield Launch(counts, fit.warps)


def predict(
    layer: MoELayer,
    mode: int,
    tokens: int,
    tactics: Tactics,
    fits: Sequence[Fit],
    routing: Routing = UNIFORM,
    new: int = 1,
) -> Line:
    """One row of the table."""
    experts = mean_work(layer, tokens, 0, routing, new).experts
    operand = INSTANCES[tactics[0]].compute_dtype
    second = SECOND_GEMM_US * (sum(fit.tile > 0 for fit in fits) - 1)
    fast, slow = FIXED_US["MoE"]
    launches = list(launches_of(layer, tokens, tactics, fits, routing, new))
    return Line(
        mode=mode,
        tokens=tokens,
        tactics=tactics,
        experts=experts,
        overhead=(fast + slow) / 2 + second,
        **times(launches, operand, experts * layer.expert_bytes / 1e6, (fast + second, slow + second)),
    )


def planned(layer: MoELayer, mode: int, tokens: int) -> Tactics:
    """The planner's tactics for a GB10."""
    sizes = tokens, layer.top_k, layer.experts, layer.hidden, layer.inter
    first, second = plan_moe(*sizes, mode, weights=layer.weights)
    return int(first), int(second)


COUNTS = ("constant", "per_tile", "per_row")
FIT_COLUMNS = ("tile", "by_tokens", "warps", "blocks", *COUNTS)
"""Columns of a file of fits, behind those that name the layer; counts are four numbers in their order."""


def write_fits(path: Path, fitted: Sequence[tuple[Mapping[str, object], Sequence[Fit]]]) -> None:
    """For :func:`fits_in`: one line a launch, of the columns that tell whose it is and its own."""
    with written_whole(path) as scratch, scratch.open("w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, [*fitted[0][0], *FIT_COLUMNS], lineterminator="\n")
        lines.writeheader()
        for whose, fits in fitted:
            for fit in fits:
                counts = {name: " ".join(map(repr, getattr(fit, name).values())) for name in COUNTS}
                lines.writerow({**whose, **vars(fit), **counts, "by_tokens": int(fit.by_tokens)})


def fits_in(path: Path, **whose: object) -> list[Fit]:
    """The fits of a file's lines whose columns say ``whose``."""
    found = []
    with path.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            if all(line[column] == str(value) for column, value in whose.items()):
                counts = {name: Counts(*map(float, line[name].split())) for name in COUNTS}
                tile, by_tokens = int(line["tile"]), line["by_tokens"] == "1"
                found.append(Fit(tile, by_tokens, **counts, warps=float(line["warps"]), blocks=int(line["blocks"])))
    return found


def columns(mode: int, tactics: Tactics, sizes: tuple[int, ...]) -> dict[str, object]:
    """The columns of :data:`FITS` that identify a fit."""
    fc1, fc2 = (INSTANCES[tactic].name for tactic in tactics)
    return {"mode": mode, "fc1": fc1, "fc2": fc2, "hidden": sizes[0], "inter": sizes[1]}


def known_fits(mode: int, tactics: Tactics, sizes: tuple[int, int]) -> list[Fit]:
    """Fits that are kept with the package; empty if there are none."""
    return fits_in(FITS, **columns(mode, tactics, sizes))


def predicted_range(layer: MoELayer, mode: int, tokens: int) -> tuple[float, float] | None:
    """Microseconds that a GB10 may take, fast and slow, by fits that are kept; None without them.

    They are of modules that multiply MXFP8 by block-scaled MMAs.
    """
    tactics = planned(layer, mode, tokens)
    fits = known_fits(mode, tactics, (layer.hidden, layer.inter))
    if not fits or (computes_in_fp16() and not INSTANCES[tactics[0]].split_k):
        return None
    line = predict(layer, mode, tokens, tactics, fits)
    return line.fast, line.slow
