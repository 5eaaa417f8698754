# SPDX-License-Identifier: Apache-2.0
"""Dense layers' time on a GB10, predicted, and what the weights of a whole token take: QKV, O, experts and LM head.

No part of it is a measurement of a GB10; :mod:`flashinfer.sm12x_gpu_probe.prediction` has the model, its ranges and their
sources.  What differs here:

1. A launch's counts are linear in the rows of the weight, N, and, where tokens fill whole tiles, bilinear in N and the
   number of tokens.  They are fitted to runs of the shipped kernels on the virtual SM121 with the layer's K, the batch itself
   (up to :data:`FEW_TOKENS`; else two small ones) and two small N.
2. Units that a GEMM cuts for its blocks leave parts of sums in memory: as many as the walk of the blocks has, whatever N is,
   so they are counted beside the fit, and taken to reach DRAM once, since what is read next fills L2. Where each block has
   a whole unit, fewer SMs issue, multiply and read shared memory; DRAM is taken to give them all it has.
3. What a GEMM reads from DRAM more than once, because L2 is too small, comes from the same simulation as the experts'.
4. Beside its busiest resource a dense layer takes :data:`FIXED_US`: of a streamed layer, one launch; of a GEMM, two.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from flashinfer.gemm.sm12x_dense import choose, dense_mx, gemm_operand
from flashinfer.jit.sm12x.instances import DenseInstance
from flashinfer.jit.sm12x.modules import gen_dense_module
from flashinfer.sm12x_gpu_probe import prediction
from flashinfer.sm12x_gpu_probe.l2 import ROW_TILE, Gemm, dram_bytes, walk
from flashinfer.sm12x_gpu_probe.prediction import (
    FAST,
    SCALE_BLOCK,
    SLOW,
    Assumptions,
    Counts,
    Fit,
    Times,
    resources,
    summed,
)
from flashinfer.testing import DenseCase, make_dense_inputs
from flashinfer.testing.dense_reference import TOKENS as TOKEN_FORMATS
from flashinfer.testing.moe_layers import DENSE_LAYERS, DENSE_VARIANTS, MODELS
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

from . import predict
from .predict import counts_of

TOKENS = (1, 8, 16, 64, 512, 2048, 8192)
FORMATS = {"bf16": "bf16", "mxfp8": "quantize_bf16", "mxfp4": "bf16_to_mxfp4"}
"""Of tokens, by what they are multiplied as: they come in bf16."""
FEW_TOKENS = 64
FIXED_US = {"fast": 5.0, "slow": 12.0}
"""Of a layer in one launch: an H200 takes 10 beyond its bytes at one token, its launch included, with nothing in front of it
that hides a part of that. A GEMM's second launch adds :data:`SECOND_LAUNCH_US`."""
SECOND_LAUNCH_US = 3.0
LAYERS_OF_MODEL = 36
MOE_MODE = 1


def weight_bytes(n: int, k: int, weights: str) -> int:
    """Values and scales as they lie in memory; bf16 has no scales."""
    if weights == "bf16":
        return 2 * n * k
    scales = -(-n // 128) * 128 * (-(-k // SCALE_BLOCK // 4) * 4)
    return n * k // (2 if weights == "mxfp4" else 1) + scales


@dataclasses.dataclass(kw_only=True)
class Line(Times):
    """A row of the table."""

    layer: str
    tokens: int
    weights: str
    activation: str
    instance: str


def emulate(
    device: VirtualDevice, row: DenseInstance, case: tuple[int, int, int], activation: str
) -> tuple[list[Any], list[Counts]]:
    """One layer ``(tokens, n, k)``: its launches and their counts."""
    tokens, n, k = case
    inputs = make_dense_inputs(DenseCase(tokens, n, k, row.weights, FORMATS[activation]), 0)
    before = len(device.launches)
    dense_mx(*inputs.arguments, **inputs.named, constant_weights=True, tactic=row.name)
    launches = device.launches[before:]
    reports = [report for launch in launches for report in launch.reports]
    if reports:
        raise RuntimeError(f"{row.name} with {tokens} tokens: {reports[0]}")
    return launches, [counts_of(launch) for launch in launches]


def grid_of(row: DenseInstance, tokens: int, n: int, resident: int) -> int:
    """Blocks of a GEMM, of which the device holds ``resident`` (``dense_blocks`` in the launcher)."""
    units = -(-n // ROW_TILE) * -(-tokens // row.token_tile)
    busy_percent = 40 if row.token_tile <= 64 else 75
    return units if units <= resident and 100 * units >= busy_percent * Assumptions.multiprocessors else resident


def bytes_of_parts(row: DenseInstance, case: tuple[int, int, int], blocks: int) -> float:
    """What the parts of units that are cut hold."""
    tokens, n, k = case
    units, k_tiles = -(-n // ROW_TILE) * -(-tokens // row.token_tile), -(-k // 128)
    parts = 0
    for block in range(blocks):
        tiles = collections.Counter(unit for unit, _ in walk(units, k_tiles, blocks, block))
        parts += sum(count < k_tiles for count in tiles.values())
    return parts * 4.0 * ROW_TILE * row.token_tile


def fitted_counts(
    device: VirtualDevice, row: DenseInstance, layer: tuple[int, int], tokens: int, activation: str
) -> list[tuple[Fit, Counts]]:
    """Each launch of the layer, and its counts at full size by a fit."""
    n, k = layer
    unit = 16 * 48 if row.streamed else 2 * ROW_TILE
    sizes = [unit, 2 * unit]
    batches = [tokens] if tokens <= FEW_TOKENS else [2 * row.token_tile, 4 * row.token_tile]
    runs = [(m, rows) for m in batches for rows in sizes]
    emulated = [emulate(device, row, (m, rows, k), activation) for m, rows in runs]
    terms = [[1.0, rows] if len(batches) == 1 else [1.0, rows, m, m * rows] for m, rows in runs]
    wanted = [1.0, n] if len(batches) == 1 else [1.0, n, tokens, tokens * n]
    found = []
    for position, launch in enumerate(emulated[0][0]):
        seen = [counts[position] for _, counts in emulated]
        resident = Assumptions.multiprocessors * launch.blocks_per_sm
        blocks, parts = launch.grid[0], 0.0
        if not row.streamed and position == 1:
            cut = [bytes_of_parts(row, (m, rows, k), grid_of(row, m, rows, resident)) for m, rows in runs]
            seen = [each + Counts(bytes=-of_parts) for each, of_parts in zip(seen, cut, strict=True)]
            blocks = grid_of(row, tokens, n, resident)
            parts = bytes_of_parts(row, (tokens, n, k), blocks)
        values = torch.tensor([each.values() for each in seen], dtype=torch.float64)
        solved = torch.linalg.solve(torch.tensor(terms, dtype=torch.float64), values)
        counts = Counts(*(torch.tensor(wanted, dtype=torch.float64) @ solved).tolist()) + Counts(bytes=parts)
        warps = launch.blocks_per_sm * (launch.block[0] // 32) / Assumptions.schedulers
        found.append((Fit(0, False, Counts(), Counts(), Counts(), warps, blocks), counts))
    return found


def reread_bytes(row: DenseInstance, layer: tuple[int, int], tokens: int, blocks: int, given: Assumptions) -> float:
    """What a GEMM reads from DRAM beyond once."""
    n, k = layer
    scales = 128 / SCALE_BLOCK
    weights = ROW_TILE * ((64 if row.weights == "mxfp4" else 128) + scales)
    row_bytes = {"bf16": 256, "mxfp8": 128 + scales, "mxfp4": 64 + scales}[row.operand]
    gemm = Gemm([tokens], -(-n // ROW_TILE), -(-k // 128), row.token_tile, weights, row_bytes)
    return dram_bytes(gemm, blocks, 1e6 * given.l2_megabytes * given.l2_usable) - gemm.once()


def busy(fit: Fit, counts: Counts, operand: str, by: Assumptions) -> dict[str, float]:
    """Microseconds of each resource; those of an SM are as many as there are blocks for."""
    share = min(fit.blocks / by.multiprocessors, 1.0)
    used = resources(fit, counts, operand, by)
    return {name: value / (1.0 if name == "dram" else share) for name, value in used.items()}


def predict_layer(
    device: VirtualDevice, name: str, tokens: int, weights: str, activation: str, shape: tuple[int, int] | None = None
) -> Line | None:
    """One row of the table; None where cuBLAS would multiply, which is not modelled.

    ``shape``: rows and K, where they are not those of :data:`DENSE_LAYERS`.
    """
    n, k = shape or DENSE_LAYERS[name]
    operand = gemm_operand(weights, TOKEN_FORMATS.index(FORMATS[activation]), True)
    row = choose(weights, tokens, n, k, True, operand)
    if row is None:
        return None
    given = Assumptions()
    launches = fitted_counts(device, row, (n, k), tokens, activation)
    if not row.streamed:
        fit, counts = launches[-1]
        launches[-1] = (fit, counts + Counts(bytes=reread_bytes(row, (n, k), tokens, fit.blocks, given)))
    second = 0.0 if row.streamed else SECOND_LAUNCH_US

    def used(by: Assumptions) -> list[dict[str, float]]:
        return [busy(fit, counts, row.operand, by) for fit, counts in launches]

    def microseconds(by: Assumptions, fixed: float) -> float:
        return sum(max(each.values()) for each in used(by)) + fixed + second

    totals, bound = summed(used(given))
    megabytes = weight_bytes(n, k, weights) / 1e6
    return Line(
        layer=name,
        tokens=tokens,
        weights=weights,
        activation=activation,
        instance=row.name,
        megabytes=megabytes,
        floor=1e3 * megabytes / given.dram_gb_per_second,
        **totals,
        fast=microseconds(FAST, FIXED_US["fast"]),
        slow=microseconds(SLOW, FIXED_US["slow"]),
        bound=bound,
    )


def as_table(lines: Sequence[Line]) -> str:
    """For people."""
    headers = ["layer", "tokens", "weights, tokens", "instance", "MB", "floor us", "DRAM us", "issue us", "MMA us"]
    headers += ["shared us", "predicted us", "of 233 GB/s", "bound by"]
    body = [
        [
            line.layer,
            f"{line.tokens:,}",
            f"{line.weights}, {line.activation}",
            line.instance,
            f"{line.megabytes:,.1f}",
            *(f"{value:,.0f}" for value in (line.floor, line.dram, line.issue, line.mma, line.shared)),
            f"{line.fast:,.0f} - {line.slow:,.0f}",
            " - ".join(f"{share:.0%}" for share in line.shares),
            line.bound,
        ]
        for line in lines
    ]
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))


def bf16_layer(name: str) -> tuple[float, float]:
    """A layer in bf16 for few tokens, microseconds: its bytes, and the fixed time of a launch."""
    kilobytes = weight_bytes(*DENSE_LAYERS[name], "bf16") / 1e3
    return (
        kilobytes / FAST.dram_gb_per_second + FIXED_US["fast"],
        kilobytes / SLOW.dram_gb_per_second + FIXED_US["slow"],
    )


def token_lines(lines: Sequence[Line], experts: prediction.Line) -> list[list[str]]:
    """Rows of what a step's weights take, by format of QKV, O and LM head, in milliseconds; as many streams as ``experts`` has
    tokens."""
    rows = []
    for weights in ("bf16", "mxfp8", "mxfp4"):
        ends = []
        for end in ("fast", "slow"):
            times = {}
            for name in DENSE_LAYERS:
                wanted = (name, experts.tokens, weights, "bf16")
                found = [line for line in lines if (line.layer, line.tokens, line.weights, line.activation) == wanted]
                times[name] = bf16_layer(name)[end == "slow"] if weights == "bf16" else getattr(found[0], end)
            per_layer = times["qkv"] + times["o"] + getattr(experts, end)
            ends.append((LAYERS_OF_MODEL * per_layer + times["lm_head"]) / 1e3)
        dense = {name: weight_bytes(n, k, weights) for name, (n, k) in DENSE_LAYERS.items()}
        gigabytes = (LAYERS_OF_MODEL * (dense["qkv"] + dense["o"]) + dense["lm_head"]) / 1e9
        gigabytes += LAYERS_OF_MODEL * experts.megabytes / 1e3
        floor = 1e3 * gigabytes / Assumptions.dram_gb_per_second
        rows.append(
            [
                str(experts.tokens),
                weights,
                f"{gigabytes:.2f}",
                f"{floor:.1f}",
                f"{ends[0]:.1f} - {ends[1]:.1f}",
                f"{floor / ends[1]:.0%} - {floor / ends[0]:.0%}",
            ]
        )
    return rows


def main(layers: Sequence[str], tokens: Sequence[int], folder: Path) -> int:
    """Print both tables and write ``predicted_dense.json``; 2 where the emulator cannot run."""
    try:
        predict.build_emulator()
        lines = []
        with virtual_device("sm_121a", strict=False) as device:
            device.module(gen_dense_module)
            for name, count, (weights, activation) in itertools.product(layers, tokens, DENSE_VARIANTS):
                if name == "lm_head" and count > FEW_TOKENS:
                    continue  # a batch's logits are of its sequences' last tokens
                began = time.perf_counter()
                line = predict_layer(device, name, count, weights, activation)
                seconds = time.perf_counter() - began
                what = f"{name}, {count} tokens, {weights} weights, {activation} tokens"
                print(f"emulated {what}: {seconds:.0f} s" if line else f"{what}: by cuBLAS, no prediction", flush=True)
                lines += [line] if line else []
        model = next(iter(MODELS))
        streams = [count for count in tokens if count <= FEW_TOKENS] if set(layers) == set(DENSE_LAYERS) else []
        experts = list(predict.lines([model], streams, [MOE_MODE], Assumptions(), {}))
    except RuntimeError as error:
        print(f"bench: no prediction: {error}", file=sys.stderr)
        return 2
    print("\nGB10 (SM121): prediction, not a measurement\n")
    print(as_table(lines))
    if experts:
        print(
            f"\nthe weights of a step of {model}, {LAYERS_OF_MODEL} layers: no attention, norms, router or sampling\n"
        )
        headers = ["streams", "QKV, O, LM head", "GB", "floor ms", "predicted ms", "of 233 GB/s"]
        rows = [row for line in experts for row in token_lines(lines, line)]
        print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    print("\nfloor: weights and scales at 233 GB/s. Assumed:")
    for told in Assumptions().told()[:-1]:
        print(f"- {told}")
    print(
        f"- launch and tail: {FIXED_US['fast']:g} to {FIXED_US['slow']:g} us a layer (an H200 takes 10), "
        f"{SECOND_LAUNCH_US:g} more for a GEMM"
    )
    folder.mkdir(parents=True, exist_ok=True)
    report = {"prediction": "not a measurement", "rows": [dataclasses.asdict(line) for line in lines]}
    (folder / "predicted_dense.json").write_text(json.dumps(report, indent=1))
    print(f"wrote {folder / 'predicted_dense.json'}")
    return 0
