# SPDX-License-Identifier: Apache-2.0
"""A layer's time on a GB10, predicted: counters of the shipped kernels on the virtual SM121, and a GB10's limits.

No part of it is a measurement of a GB10.  For each mode and each tactic that the planner gives a row of the table:

1. The kernels compiled for ``sm_121a`` run on the virtual device in the layer's full hidden and intermediate size, on a few
   experts.  Each launch yields its counts: warp instructions, MMA operations, shared-memory wavefronts and distinct bytes of
   global memory.
2. A launch's counts are linear in three numbers: 1 (the grid, and units of work that are cut between blocks), the tiles of
   tokens T (summed over experts: for each, all rows and all of K are computed) and the token rows R (what is done for each
   row of an expert).  Three runs - few experts with short tiles, more of them, the first with full tiles - give the three
   coefficients; a fourth, with random routing, is predicted from them and the deviation is printed.  By these counts
   weights come from DRAM once per touched expert, not once per tile; what a pair of GEMMs reads more often, because L2 is
   too small, is simulated (:mod:`.l2`) and added, and so are contributions that are read back when L2 has lost them.  A
   streamed layer reads an expert's weights once for each of its tiles.
3. A row's T, R and touched experts are means over random routings.  A prologue is linear in the tokens, as is the
   arranging of tokens for a streamed layer; for a pair of GEMMs that is linear in R (it reads a token's row once and writes
   it for each of its experts; emulated with fewer of them, reads are overestimated).
4. Each launch takes as long as the busiest of four resources: DRAM, issue slots, MMA, shared memory.  To these come
   what launches and their tails add, during which DRAM idles.

What is assumed beyond the counters stands in :class:`Assumptions`, with where it is from, and is printed with the table.
Three of them are known only as ranges: the rate of DRAM, that of bf16 MMAs, and the fixed time of a layer.  So a prediction
is a range, from :data:`FAST` to :data:`SLOW`; shares are of the 233 GB/s that a saturating kernel reads.
What is not modelled: other sectors that are written and read again (they count once), the clock under load, DRAM refresh
and page conflicts, the sort of a large batch's routing (one block), the producer warp's own pace, and a bound on bytes in
flight (``sm12x-instances`` has them).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..fused_moe.sm12x_planner import plan_moe
from ..jit.sm12x.instances import INSTANCES
from ..jit.sm12x.modules import multiplies_in_half
from ..testing.moe_layers import MODE_NAMES, MODELS
from .l2 import ROW_TILE, Gemm, dram_bytes

ROUTINGS = 8
SCALE_BLOCK = 32
FITS = Path(__file__).with_name("gb10_fits.json")
"""Of the launches that the planner gives gpt-oss-120b in the sizes that the doctor's probe times; see :func:`known_fits`.
``benchmarks/bench_cutlass_fused_moe_mxfp4.py --predict --modes 0 --tokens 1,4,64,2048`` writes it, to its ``--out``."""


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What the counters do not say: the middle of each range.

    ``fixed_us`` is what a layer takes beside its busiest resource, launches, routing and tail; ``second_gemm_us`` what a
    pair of GEMMs adds to that.
    """

    multiprocessors: int = 48
    gigahertz: float = 2.418
    dram_gb_per_second: float = 233.0
    l2_megabytes: float = 24.0
    l2_usable: float = 0.8
    schedulers: int = 4
    mma_flops_per_cycle: int = 2048
    bf16_flops_per_cycle: int = 768
    issue_per_warp: float = 0.42
    issue_ceiling: float = 0.6
    fixed_us: float = 22.0
    second_gemm_us: float = 11.7

    def told(self) -> list[str]:
        """One line each, with its source."""
        return [
            f"GB10: {self.multiprocessors} SMs, {self.schedulers} schedulers each, {self.gigahertz} GHz, L2 of "
            f"{self.l2_megabytes:g} MB (published)",
            f"DRAM: {FAST.dram_gb_per_second:g} to {SLOW.dram_gb_per_second:g} GB/s, the middle and what shares are of: "
            f"{self.dram_gb_per_second:g} (public measurements of saturating reads: 231 to 236; sold as 273)",
            f"L2: {self.l2_usable:.0%} of it holds tiles, the least recently used goes first, blocks keep pace (this simulation "
            "gave 1.57 and 14.2 GB where an H200 was measured to read 1.57 and 15.0)",
            f"MMA: {self.mma_flops_per_cycle} operations per cycle and SM with block-scaled 8-bit operands (measured on SM120 "
            "cards), twice as many with two packed MXFP4 ones (published); "
            f"{FAST.bf16_flops_per_cycle} to {SLOW.bf16_flops_per_cycle} with bf16 (the one on RTX PRO, the other on "
            "GeForce; unknown of a GB10)",
            f"issue: {self.issue_per_warp} instructions per cycle for each resident warp of a scheduler, at most "
            f"{self.issue_ceiling} (measured on an H200: a probe with one warp each, and 59 % of all slots at 64 tokens)",
            f"launches, routing and tail: {FAST.fixed_us:g} to {SLOW.fixed_us:g} us a layer (an H200 takes 14 at one token beyond "
            f"its bytes and arithmetic; a GB10's clock and latencies are unknown), {self.second_gemm_us:g} more for a pair of "
            "GEMMs (measured on an H200)",
        ]


FAST = Assumptions(dram_gb_per_second=236.0, bf16_flops_per_cycle=1024, fixed_us=14.0)
SLOW = Assumptions(dram_gb_per_second=220.0, bf16_flops_per_cycle=512, fixed_us=30.0)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one launch did."""

    instructions: float = 0.0
    mma_flops: float = 0.0
    wavefronts: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def __mul__(self, factor: float) -> Counts:
        return Counts(*(factor * value for value in self.values()))

    def values(self) -> tuple[float, ...]:
        """The fields in their order."""
        return dataclasses.astuple(self)


@dataclasses.dataclass(frozen=True)
class Work:
    """What the counts of a batch are linear in."""

    tokens: float
    experts: float
    tiles: float
    rows: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """Counts of one launch as a function of the work: ``constant + per_tile T + per_row R``.

    ``tile`` is its token tile, 0 for what is no GEMM; the rows of a prologue, and of a streamed layer's arranging, are the
    batch's tokens (``by_tokens``).
    """

    tile: int
    by_tokens: bool
    constant: Counts
    per_tile: Counts
    per_row: Counts
    warps_per_scheduler: float
    blocks: int = 0

    def at(self, work: Work) -> Counts:
        """Counts of ``work``; the bytes that a tile brings are an expert's weights, read once."""
        tiles = dataclasses.replace(self.per_tile * work.tiles, bytes=self.per_tile.bytes * work.experts)
        return self.constant + tiles + self.per_row * (work.tokens if self.by_tokens else work.rows)


def work_of(ids: torch.Tensor, tile: int) -> Work:
    """The work of a routing with token tiles of ``tile``; no tiles where that is 0."""
    per_expert = torch.bincount(ids.flatten().long())
    tiles = int(((per_expert + tile - 1) // tile).sum()) if tile else 0
    return Work(ids.shape[0], int((per_expert > 0).sum()), tiles, ids.numel())


@dataclasses.dataclass(kw_only=True)
class Times:
    """Microseconds of a layer, by the middle of each range except ``fast`` and ``slow``; ``bound`` is what takes most of it."""

    megabytes: float
    floor: float
    dram: float
    issue: float
    mma: float
    shared: float
    fast: float
    slow: float
    bound: str

    @property
    def shares(self) -> tuple[float, float]:
        """Of 233 GB/s, by the bytes of weights and scales alone: the slow end's and the fast end's."""
        return self.floor / self.slow, self.floor / self.fast


@dataclasses.dataclass(kw_only=True)
class Line(Times):
    """A row of the experts' predicted table."""

    model: str
    mode: str
    tokens: int
    tactics: tuple[int, int]
    experts: float
    overhead: float


def weight_bytes(model: str) -> int:
    """Weights and scales of one expert as they lie in memory."""
    hidden, inter, _, _ = MODELS[model]

    def matrix(rows: int, k: int) -> int:
        return rows * k // 2 + -(-rows // 128) * 128 * (-(-k // SCALE_BLOCK // 4) * 4)

    return matrix(2 * inter, hidden) + matrix(hidden, inter)


@functools.cache
def mean_work(model: str, tokens: int, tile: int) -> Work:
    """The mean over random routings."""
    _, _, experts, top_k = MODELS[model]
    works = []
    for seed in range(ROUTINGS):
        scores = torch.rand((tokens, experts), generator=torch.Generator().manual_seed(seed))
        works.append(dataclasses.astuple(work_of(scores.topk(top_k).indices, tile)))
    return Work(*torch.tensor(works, dtype=torch.float64).mean(0).tolist())


@functools.cache
def reread_bytes(model: str, tokens: int, tactic: int, fc1: bool, blocks: int, given: Assumptions) -> float:
    """What one GEMM of a pair reads from DRAM beyond once, for one random routing; FC2 its contributions, too."""
    hidden, inter, experts, top_k = MODELS[model]
    row = INSTANCES[tactic]
    scores = torch.rand((tokens, experts), generator=torch.Generator().manual_seed(0))
    rows = torch.bincount(scores.topk(top_k).indices.flatten(), minlength=experts).tolist()
    outputs, k = (2 * inter, hidden) if fc1 else (hidden, inter)
    scales = row.k_tile / SCALE_BLOCK
    weights = ROW_TILE * (row.k_tile / 2 + scales)
    row_bytes = row.k_tile + scales if row.multiplies == "mxfp8" else 2 * row.k_tile
    gemm = Gemm(rows, -(-outputs // ROW_TILE), -(-k // row.k_tile), row.token_tile, weights, row_bytes)
    capacity = 1e6 * given.l2_megabytes * given.l2_usable
    contributions = 0 if fc1 else 4.0 * sum(rows) * hidden
    return dram_bytes(gemm, blocks, capacity) - gemm.once() + (contributions if contributions > capacity else 0.0)


def resources(fit: Fit, counts: Counts, operand: str, given: Assumptions) -> dict[str, float]:
    """Microseconds that each resource is busy with a launch whose MMAs multiply ``bf16``, ``mxfp8`` or ``mxfp4`` tokens.

    Two packed MXFP4 operands are multiplied at twice the rate of 8-bit ones (``kind::mxf4``).
    """
    cycles = 1e3 * given.gigahertz * given.multiprocessors  # of all multiprocessors, per microsecond
    issue = min(given.issue_ceiling, given.issue_per_warp * fit.warps_per_scheduler)
    scaled = given.mma_flops_per_cycle
    flops = {"bf16": given.bf16_flops_per_cycle, "mxfp8": scaled, "mxfp4": 2 * scaled}[operand]
    return {
        "dram": counts.bytes / (1e3 * given.dram_gb_per_second),
        "issue": counts.instructions / (cycles * given.schedulers * issue),
        "mma": counts.mma_flops / (cycles * flops),
        "shared": counts.wavefronts / cycles,
    }


def summed(launches: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], str]:
    """Of a layer's launches: what each resource takes in all, and the one that launches wait for longest."""
    totals, waited = (dict.fromkeys(("dram", "issue", "mma", "shared"), 0.0) for _ in range(2))
    for used in launches:
        totals = {name: totals[name] + value for name, value in used.items()}
        busiest = max(used, key=lambda name: used[name])
        waited[busiest] += used[busiest]
    return totals, max(waited, key=lambda name: waited[name])


def counts_of_layer(
    model: str, tokens: int, tactics: tuple[int, int], fits: Sequence[Fit], given: Assumptions
) -> Iterator[tuple[Fit, Counts]]:
    """What each launch of a layer does."""
    gemms = 0
    for fit in fits:
        work = mean_work(model, tokens, fit.tile)
        counts = fit.at(work)
        if fit.tile and INSTANCES[tactics[0]].streamed:
            # A block's share holds one tile after the other: an expert's second tile finds none of its weights in L2.
            counts += Counts(bytes=(work.tiles - work.experts) * weight_bytes(model))
        elif fit.tile:
            counts += Counts(bytes=reread_bytes(model, tokens, tactics[gemms], gemms == 0, fit.blocks, given))
        gemms += fit.tile > 0
        yield fit, counts


def predict(
    model: str, mode: int, tokens: int, tactics: tuple[int, int], fits: Sequence[Fit], given: Assumptions
) -> Line:
    """One row of the table; ``given`` is the middle of its ranges."""
    experts = mean_work(model, tokens, 0).experts
    operand = "mxfp8" if INSTANCES[tactics[0]].multiplies == "mxfp8" else "bf16"
    launches = list(counts_of_layer(model, tokens, tactics, fits, given))
    second = given.second_gemm_us * (sum(fit.tile > 0 for fit in fits) - 1)

    def microseconds(by: Assumptions) -> float:
        busy = sum(max(resources(fit, counts, operand, by).values()) for fit, counts in launches)
        return busy + by.fixed_us + second

    totals, bound = summed([resources(fit, counts, operand, given) for fit, counts in launches])
    megabytes = experts * weight_bytes(model) / 1e6
    return Line(
        model=model,
        mode=MODE_NAMES[mode],
        tokens=tokens,
        tactics=tactics,
        experts=experts,
        megabytes=megabytes,
        floor=1e3 * megabytes / given.dram_gb_per_second,
        **totals,
        overhead=given.fixed_us + second,
        fast=microseconds(FAST),
        slow=microseconds(SLOW),
        bound=bound,
    )


def planned(model: str, mode: int, tokens: int) -> tuple[int, int]:
    """What the planner gives a GB10."""
    hidden, inter, experts, top_k = MODELS[model]
    first, second = plan_moe(tokens, top_k, experts, hidden, inter, mode)
    return int(first), int(second)


def mma_rates() -> dict[str, tuple[float, float]]:
    """Predicted FLOP per cycle and SM, slow and fast; of bf16 and f16, on GeForce and on RTX PRO."""
    bf16 = (float(SLOW.bf16_flops_per_cycle), float(FAST.bf16_flops_per_cycle))
    scaled = float(FAST.mma_flops_per_cycle)
    return {"bf16": bf16, "f16": bf16, "mxf8f6f4": (scaled,) * 2, "mxf4": (2 * scaled,) * 2}


def fits_as_json(fitted: Mapping[tuple[int, tuple[int, int], tuple[int, int]], Sequence[Fit]]) -> str:
    """What :func:`known_fits` reads: by mode, tactics' names, and hidden and intermediate size."""
    table = [
        {
            "mode": mode,
            "tactics": _names(tactics),
            "sizes": sizes,
            "launches": [dataclasses.asdict(fit) for fit in fits],
        }
        for (mode, tactics, sizes), fits in fitted.items()
    ]
    return json.dumps(table, indent=1) + "\n"


def known_fits(mode: int, tactics: tuple[int, int], sizes: tuple[int, int]) -> list[Fit] | None:
    """Fits that are kept with the package; None where there are none.

    The benchmark's prediction writes the file (``make bench`` where there is no GPU). A test emulates a batch and compares.
    """
    for entry in json.loads(FITS.read_text(encoding="utf-8")):
        if (entry["mode"], entry["tactics"], tuple(entry["sizes"])) == (mode, _names(tactics), sizes):
            return [_fit_from_json(launch) for launch in entry["launches"]]
    return None


def _names(tactics: tuple[int, int]) -> list[str]:
    return [INSTANCES[tactic].name for tactic in tactics]


def _fit_from_json(launch: Mapping[str, Any]) -> Fit:
    counts = {name: Counts(**launch[name]) for name in ("constant", "per_tile", "per_row")}
    return Fit(**{**launch, **counts})


def predicted_range(model: str, mode: int, tokens: int) -> tuple[float, float] | None:
    """Microseconds that a GB10 may take, fast and slow, by fits that are kept; None without them.

    They are of modules that multiply MXFP8 by block-scaled MMAs.
    """
    tactics = planned(model, mode, tokens)
    fits = known_fits(mode, tactics, MODELS[model][:2])
    if fits is None or (multiplies_in_half() and not INSTANCES[tactics[0]].streamed):
        return None
    line = predict(model, mode, tokens, tactics, fits, Assumptions())
    return line.fast, line.slow
