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
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import flashinfer
from flashinfer._layer import fork_root
from flashinfer.fused_moe.sm12x_planner import plan_moe
from flashinfer.jit import env as jit_env
from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module
from flashinfer.jit.sm12x.instances import INSTANCES
from flashinfer.testing import MoECase, make_moe_inputs
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

from .l2 import ROW_TILE, Gemm, dram_bytes
from .problem import MODE_NAMES, MODELS

TOKENS = (1, 2, 4, 8, 16, 32, 64, 2048, 8192)
DEFAULT_MODES = (1, 2)  # mode 0's GEMMs are mode 1's
ROUTINGS = 8
SCALE_BLOCK = 32
EMULATED_EXPERTS = 2


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
            f"cards); {FAST.bf16_flops_per_cycle} to {SLOW.bf16_flops_per_cycle} with bf16 (the one on RTX PRO, the other on "
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


def fit_gemm(tile: int, works: Sequence[Work], counts: Sequence[Counts], warps: float, blocks: int) -> Fit:
    """The coefficients from three runs whose tiles and rows are not proportional."""
    system = torch.tensor([[1.0, work.tiles, work.rows] for work in works], dtype=torch.float64)
    solved = torch.linalg.solve(system, torch.tensor([c.values() for c in counts], dtype=torch.float64))
    constant, per_tile, per_row = (Counts(*row.tolist()) for row in solved)
    return Fit(tile, False, constant, per_tile, per_row, warps, blocks)


def fit_rows(by_tokens: bool, works: Sequence[Work], counts: Sequence[Counts], warps: float) -> Fit:
    """A launch that is linear in the tokens, or in the rows."""
    sizes = [work.tokens if by_tokens else work.rows for work in works]
    system = torch.tensor([[1.0, size] for size in sizes], dtype=torch.float64)
    solved = torch.linalg.lstsq(system, torch.tensor([c.values() for c in counts], dtype=torch.float64)).solution
    constant, per_row = (Counts(*row.tolist()) for row in solved)
    return Fit(0, by_tokens, constant, Counts(), per_row, warps)


def counts_of(launch: Any) -> Counts:
    """From the emulator's counters."""
    c = launch.counters
    return Counts(c.warp_instructions, c.mma_flops, c.shared_wavefronts, c.global_distinct_bytes)


@dataclasses.dataclass(frozen=True)
class Run:
    """A batch to be emulated: ``rows`` of each of ``experts`` (all equal), or random ids when ``rows`` is 0."""

    experts: int
    rows: int
    tokens: int

    def ids(self, top_k: int) -> torch.Tensor:
        if self.rows == 0:
            scores = torch.rand((self.tokens, self.experts), generator=torch.Generator().manual_seed(0))
            return scores.topk(top_k).indices.int()
        return torch.arange(self.experts, dtype=torch.int32).repeat(self.rows).view(self.tokens, top_k)


def token_tiles(tactics: tuple[int, int]) -> tuple[int, int]:
    """The token tiles of FC1 and FC2."""
    return INSTANCES[tactics[0]].token_tile, INSTANCES[tactics[1]].token_tile


def runs_for(tactics: tuple[int, int]) -> list[Run]:
    """Three that determine the coefficients, and one that checks them."""
    few, short, full = EMULATED_EXPERTS, max(1, min(token_tiles(tactics)) // 8), max(token_tiles(tactics))
    return [Run(few, short, short), Run(2 * few, short, 2 * short), Run(few, full, full), Run(2 * few, 0, 2 * short)]


def work_of(ids: torch.Tensor, tile: int) -> Work:
    """The work of a routing with token tiles of ``tile``; no tiles where that is 0."""
    per_expert = torch.bincount(ids.flatten().long())
    tiles = int(((per_expert + tile - 1) // tile).sum()) if tile else 0
    return Work(ids.shape[0], int((per_expert > 0).sum()), tiles, ids.numel())


def emulate(
    device: VirtualDevice, model: str, mode: int, run: Run, tactics: tuple[int, int]
) -> tuple[torch.Tensor, list[Any]]:
    """One batch on the virtual device: its expert ids and its launches."""
    hidden, inter, _, _ = MODELS[model]
    top_k = EMULATED_EXPERTS
    inputs = make_moe_inputs(MoECase(run.tokens, hidden, inter, run.experts, top_k, mode), 0)
    inputs = dataclasses.replace(inputs, token_selected_experts=run.ids(top_k))
    before = len(device.launches)
    flashinfer.cutlass_fused_moe(**inputs.arguments(), profile_ids=[INSTANCES[each].number for each in tactics])
    return inputs.token_selected_experts, device.launches[before:]


def fit_layer(device: VirtualDevice, model: str, mode: int, tactics: tuple[int, int]) -> tuple[list[Fit], float, int]:
    """The launches of a layer, the largest deviation of the check, and how often a watcher reported.

    A launch without MMAs is a prologue or arranges tokens; the others are FC1 and FC2 in this order, or the whole layer where
    there is one.
    """
    emulated = [emulate(device, model, mode, run, tactics) for run in runs_for(tactics)]
    if len({len(launches) for _, launches in emulated}) != 1:
        raise RuntimeError(f"tactics {tactics}: the number of launches depends on the batch, which is not modelled")
    fits: list[Fit] = []
    deviation = 0.0
    for position, launch in enumerate(emulated[0][1]):
        counts = [counts_of(launches[position]) for _, launches in emulated]
        warps = launch.blocks_per_sm * (launch.block[0] // 32) / Assumptions.schedulers
        gemms = sum(fit.tile > 0 for fit in fits)
        tile = token_tiles(tactics)[min(gemms, 1)] if counts[0].mma_flops else 0
        works = [work_of(ids, tile) for ids, _ in emulated]
        if tile:
            fit = fit_gemm(tile, works[:3], counts[:3], warps, launch.grid[0])
        else:
            by_tokens = "moe_arrange" not in launch.kernel or INSTANCES[tactics[0]].streamed
            fit = fit_rows(by_tokens, works[:3], counts[:3], warps)
        fits.append(fit)
        if tile:
            expected = fit.at(works[3])
            for seen, told in ((counts[3].instructions, expected.instructions), (counts[3].bytes, expected.bytes)):
                deviation = max(deviation, abs(told - seen) / seen)
    return fits, deviation, sum(len(launch.reports) for _, launches in emulated for launch in launches)


@dataclasses.dataclass
class Line:
    """A row of the predicted table; times in microseconds, by the middle of each range except ``fast`` and ``slow``."""

    model: str
    mode: str
    tokens: int
    tactics: tuple[int, int]
    experts: float
    megabytes: float
    floor: float
    dram: float
    issue: float
    mma: float
    shared: float
    overhead: float
    fast: float
    slow: float
    bound: str

    @property
    def shares(self) -> tuple[float, float]:
        """Of 233 GB/s, by the bytes of weights and scales alone: the slow end's and the fast end's."""
        return self.floor / self.slow, self.floor / self.fast


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


def resources(fit: Fit, counts: Counts, eight_bit: bool, given: Assumptions) -> dict[str, float]:
    """Microseconds that each resource is busy with a launch; ``eight_bit``: its MMAs have 8-bit operands, else bf16."""
    cycles = 1e3 * given.gigahertz * given.multiprocessors  # of all multiprocessors, per microsecond
    issue = min(given.issue_ceiling, given.issue_per_warp * fit.warps_per_scheduler)
    flops = given.mma_flops_per_cycle if eight_bit else given.bf16_flops_per_cycle
    return {
        "dram": counts.bytes / (1e3 * given.dram_gb_per_second),
        "issue": counts.instructions / (cycles * given.schedulers * issue),
        "mma": counts.mma_flops / (cycles * flops),
        "shared": counts.wavefronts / cycles,
    }


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
    eight_bit = INSTANCES[tactics[0]].multiplies == "mxfp8"
    launches = list(counts_of_layer(model, tokens, tactics, fits, given))
    second = given.second_gemm_us * (sum(fit.tile > 0 for fit in fits) - 1)

    def microseconds(by: Assumptions) -> float:
        busy = sum(max(resources(fit, counts, eight_bit, by).values()) for fit, counts in launches)
        return busy + by.fixed_us + second

    totals = dict.fromkeys(("dram", "issue", "mma", "shared"), 0.0)
    by_bound = dict.fromkeys(totals, 0.0)
    for fit, counts in launches:
        used = resources(fit, counts, eight_bit, given)
        totals = {name: totals[name] + value for name, value in used.items()}
        bound = max(used, key=lambda name: used[name])
        by_bound[bound] += used[bound]
    megabytes = experts * weight_bytes(model) / 1e6
    return Line(
        model,
        MODE_NAMES[mode],
        tokens,
        tactics,
        experts,
        megabytes,
        1e3 * megabytes / given.dram_gb_per_second,
        **totals,
        overhead=given.fixed_us + second,
        fast=microseconds(FAST),
        slow=microseconds(SLOW),
        bound=max(by_bound, key=lambda name: by_bound[name]),
    )


def as_table(lines: Sequence[Line]) -> str:
    """For people."""
    headers = ["model", "mode", "tokens", "tactics", "experts", "MB", "floor us", "DRAM us", "issue us", "MMA us"]
    headers += ["shared us", "fixed us", "predicted us", "of 233 GB/s", "bound by"]
    body = [
        [
            line.model,
            line.mode,
            f"{line.tokens:,}",
            "/".join(dict.fromkeys(INSTANCES[tactic].name for tactic in line.tactics)),
            f"{line.experts:.1f}",
            f"{line.megabytes:,.0f}",
            *(f"{value:,.0f}" for value in (line.floor, line.dram, line.issue, line.mma, line.shared, line.overhead)),
            f"{line.fast:,.0f} - {line.slow:,.0f}",
            " - ".join(f"{share:.0%}" for share in line.shares),
            line.bound,
        ]
        for line in lines
    ]
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))


def planned(model: str, mode: int, tokens: int, given: Assumptions) -> tuple[int, int]:
    """What the planner gives a GB10."""
    hidden, inter, experts, top_k = MODELS[model]
    first, second = plan_moe(tokens, top_k, experts, hidden, inter, mode)
    return int(first), int(second)


def build_emulator() -> None:
    """Bring the emulator up to date where one sees it; what fails here fails again, with the reason, when it is used."""
    folder = fork_root() / "emulator"
    make = shutil.which("make")
    if make is None or not folder.is_dir() or "VSM_BUILD_DIR" in os.environ:
        return
    print(
        f"building the emulator where it is not fresh (about a minute at first; kept in {folder / 'build'})", flush=True
    )
    subprocess.run([make, "--no-print-directory", "-C", str(folder), f"-j{min(4, os.cpu_count() or 1)}"], check=False)


def build_kernels(device: VirtualDevice) -> None:
    """The module with its PTX; the engine reports each source on standard error."""
    print(
        "building fused_moe_120 for SM121, with its PTX, where it is not fresh "
        f"(minutes of compilers at first; kept in {jit_env.FLASHINFER_JIT_DIR})",
        flush=True,
    )
    began = time.perf_counter()
    device.module(gen_cutlass_fused_moe_sm120_module)
    print(f"built in {time.perf_counter() - began:.0f} s", flush=True)


def lines(models: Sequence[str], tokens: Sequence[int], modes: Sequence[int], given: Assumptions) -> Iterator[Line]:
    """All rows; says what it builds and emulates."""
    rows = [
        (model, mode, count, planned(model, mode, count, given))
        for model, mode, count in itertools.product(models, modes, tokens)
    ]
    wanted = list(dict.fromkeys((mode, tactics, MODELS[model][:2]) for model, mode, _, tactics in rows))
    fitted: dict[tuple[Any, ...], list[Fit]] = {}
    build_emulator()
    with virtual_device("sm_121a", strict=False) as device:
        build_kernels(device)
        for model, mode, count, tactics in rows:
            key = (mode, tactics, MODELS[model][:2])
            if key not in fitted:
                began = time.perf_counter()
                names = f"{MODE_NAMES[mode]}, {' and '.join(dict.fromkeys(INSTANCES[each].name for each in tactics))}"
                print(f"[{wanted.index(key) + 1}/{len(wanted)}] emulating {names}", flush=True)
                fitted[key], deviation, reports = fit_layer(device, model, mode, tactics)
                print(
                    f"emulated {names}: "
                    f"{time.perf_counter() - began:.0f} s, check off by {deviation:.1%}, {reports} watchers' reports",
                    flush=True,
                )
            yield predict(model, mode, count, tactics, fitted[key], given)


def main(models: Sequence[str], tokens: Sequence[int], modes: Sequence[int], folder: Path) -> int:
    """Print the table and write it to ``predicted.json``; 2 where the emulator cannot run."""
    given = Assumptions()
    try:
        table = list(lines(models, tokens, modes, given))
    except RuntimeError as error:
        print(f"bench: no prediction: {error}", file=sys.stderr)
        return 2
    print("\nGB10 (SM121): prediction, not a measurement\n")
    print(as_table(table))
    print("\nfloor: weights and scales of the touched experts at 233 GB/s. Assumed:")
    for line in given.told():
        print(f"- {line}")
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "prediction": "not a measurement",
        "assumptions": {
            "middle": dataclasses.asdict(given),
            "fast": dataclasses.asdict(FAST),
            "slow": dataclasses.asdict(SLOW),
        },
        "rows": [dataclasses.asdict(line) | {"shares": line.shares} for line in table],
    }
    (folder / "predicted.json").write_text(json.dumps(report, indent=1))
    print(f"wrote {folder / 'predicted.json'}")
    return 0
