# SPDX-License-Identifier: Apache-2.0
"""A layer's time on a GB10, predicted: the shipped kernels are run on the virtual SM121, and their counts fitted.

The model, what it assumes and what a row of the table says stand in :mod:`flashinfer.sm12x_gpu_probe.prediction`.
"""

from __future__ import annotations

import dataclasses
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
from flashinfer.jit import env as jit_env
from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module
from flashinfer.jit.sm12x.instances import INSTANCES
from flashinfer.sm12x_gpu_probe.prediction import (
    FAST,
    SLOW,
    Assumptions,
    Counts,
    Fit,
    Line,
    Work,
    fits_as_json,
    planned,
    predict,
    work_of,
)
from flashinfer.testing import MoECase, make_moe_inputs
from flashinfer.testing.moe_layers import MODE_NAMES, MODELS
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

TOKENS = (1, 2, 4, 8, 16, 32, 64, 2048, 8192)
DEFAULT_MODES = (1, 2)  # mode 0's GEMMs are mode 1's
EMULATED_EXPERTS = 2


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
            by_tokens = "moe_pack" not in launch.kernel or INSTANCES[tactics[0]].streamed
            fit = fit_rows(by_tokens, works[:3], counts[:3], warps)
        fits.append(fit)
        if tile:
            expected = fit.at(works[3])
            for seen, told in ((counts[3].instructions, expected.instructions), (counts[3].bytes, expected.bytes)):
                deviation = max(deviation, abs(told - seen) / seen)
    return fits, deviation, sum(len(launch.reports) for _, launches in emulated for launch in launches)


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


Fitted = dict[tuple[int, tuple[int, int], tuple[int, int]], list[Fit]]


def lines(
    models: Sequence[str], tokens: Sequence[int], modes: Sequence[int], given: Assumptions, fitted: Fitted
) -> Iterator[Line]:
    """All rows; says what it builds and emulates. ``fitted`` is filled."""
    rows = [
        (model, mode, count, planned(model, mode, count))
        for model, mode, count in itertools.product(models, modes, tokens)
    ]
    wanted = list(dict.fromkeys((mode, tactics, MODELS[model][:2]) for model, mode, _, tactics in rows))
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
    given, fitted = Assumptions(), Fitted()
    try:
        table = list(lines(models, tokens, modes, given, fitted))
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
    (folder / "gb10_fits.json").write_text(fits_as_json(fitted))
    print(f"wrote {folder / 'predicted.json'} and gb10_fits.json")
    return 0
