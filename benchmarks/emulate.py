# SPDX-License-Identifier: Apache-2.0
"""Counts of the shipped kernels on the virtual SM121, for :mod:`perfmodel`, and the tables of layers.

Each table is of a prediction; no part of it is a measurement of a GB10.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import torch
from perfmodel import dense, gb10, moe, step
from perfmodel.devices import DEVICES
from perfmodel.gb10 import FIXED_US, MULTIPROCESSORS, SCHEDULERS, Counts, Launch, Times
from perfmodel.moe import Fit, Fits, Tactics, Work, planned, predict, work_of
from perfmodel.routing import UNIFORM, Routing, routed
from perfmodel.step import (
    DENSE_FORMATS,
    KV_BYTES,
    LAYER_MODEL,
    MATRICES,
    NORMED,
    NORMED_BATCHES,
    RESCORING,
    RESCORING_US,
    TOKENS_BESIDE,
    Kernel,
)
from timing import github

import flashinfer
from flashinfer._layer import fork_root
from flashinfer.decode import decode_attention
from flashinfer.fused_moe import router_top_k
from flashinfer.fused_moe.sm12x_launch import moe_module
from flashinfer.gemm.sm12x_dense import dense_block_scaled
from flashinfer.gemm.sm12x_dense_launch import choose, dense_module, gemm_compute_dtype
from flashinfer.gemm.sm12x_dense_norm import rmsnorm_dense_block_scaled
from flashinfer.jit import env as jit_env
from flashinfer.jit.sm12x.modules import gen_dense_module
from flashinfer.sm12x.device_class import GB10
from flashinfer.sm12x.instances import DENSE_INSTANCES, INSTANCES, Format, Instance
from flashinfer.sm12x.models import MODELS, MOE_LAYERS, MoELayer
from flashinfer.testing import DenseCase, MoECase, make_dense_inputs, make_moe_inputs, make_norm_inputs
from flashinfer.testing.decode_reference import make_decode_case
from flashinfer.testing.dense_reference import TOKENS as TOKEN_FORMATS
from flashinfer.testing.moe_layers import DENSE_LAYERS, DENSE_VARIANTS, MODE_NAMES, MODES_OF
from flashinfer.testing.moe_layers import MODELS as LAYERS
from flashinfer.testing.router_reference import make_router_inputs
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device
from flashinfer_sm12x.doctor.probe import layer as probed
from flashinfer_sm12x.quantize.choice import GROUPS, RESCORED_ROWS
from flashinfer_sm12x.quantize.manifest import COARSE
from flashinfer_sm12x.variables import RESCORED

P = ParamSpec("P")
EMULATED_EXPERTS = 2
TOKENS_AS = {"bf16": "bf16", "mxfp8": "quantize_bf16", "mxfp4": "bf16_to_mxfp4"}
"""A dense layer's ``activation`` by the format that its MMAs multiply; the tokens themselves are bf16."""
STEP_MODES = {1: "mxfp8", 2: "bf16"}
"""MoE modes that take bf16 tokens, as the plugin calls them, and the format to which each rounds the tokens."""
DECODE, PREFILL = (1, 4, 16, 64), (512, 2048, 8192)
CONTEXTS = (128, 1024, 8192, 32_768, 131_072)
CARD = DEVICES["RTX PRO 6000"]
PRICED = (1, 8, 64)
"""Batches of dense layers at which each instance is priced, beside those where the planner's choice changes."""


def launches_of(device: VirtualDevice, call: Callable[[], Any]) -> list[Any]:
    """Run ``call`` and return its launches on the virtual device."""
    before = len(device.launches)
    call()
    return device.launches[before:]


def seen(launch: Any) -> Launch:
    """A launch's counts, by the emulator's counters."""
    c = launch.counters
    counts = Counts(c.warp_instructions, c.mma_flops, c.shared_wavefronts, c.global_distinct_bytes)
    warps = launch.blocks_per_sm * (launch.block[0] // 32) / SCHEDULERS
    return Launch(counts, warps, launch.grid[0], MULTIPROCESSORS * launch.blocks_per_sm)


def unreported(launches: Sequence[Any], what: str) -> list[Launch]:
    """The launches' counts, if no checker reported on them.

    Raises
    ------
    RuntimeError
        A checker reported on one of them.
    """
    if reports := [report for launch in launches for report in launch.reports]:
        raise RuntimeError(f"{what}: {reports[0]}")
    return [seen(launch) for launch in launches]


# --- MoE layers -------------------------------------------------------------------------------------------------------


def fit_launch(launches: Sequence[Launch], works: Sequence[Work], tile: int, by_tokens: bool) -> Fit:
    """The coefficients: of a GEMM from three runs whose tiles and rows are not proportional, else linear in the
    rows."""
    terms = [[1.0, work.tiles, work.rows] if tile else [1.0, work.tokens if by_tokens else work.rows] for work in works]
    system = torch.tensor(terms, dtype=torch.float64)
    values = torch.tensor([launch.counts.values() for launch in launches], dtype=torch.float64)
    solved = torch.linalg.solve(system, values) if tile else torch.linalg.lstsq(system, values).solution
    constant, *tiles, per_row = (Counts(*row.tolist()) for row in solved)
    first = launches[0]
    return Fit(
        tile, by_tokens, constant, tiles[0] if tile else Counts(), per_row, first.warps, first.blocks if tile else 0
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """A batch to be emulated: ``rows`` of each of ``experts`` (all equal), or random ids when ``rows`` is 0."""

    experts: int
    rows: int
    tokens: int

    def ids(self, top_k: int) -> torch.Tensor:
        if self.rows == 0:
            return routed(MoELayer(0, 0, self.experts, top_k), self.tokens, 1, 0).int()
        return torch.arange(self.experts, dtype=torch.int32).repeat(self.rows).view(self.tokens, top_k)


def token_tiles(tactics: Tactics) -> tuple[int, int]:
    """The token tiles of FC1 and FC2."""
    return INSTANCES[tactics[0]].block_n, INSTANCES[tactics[1]].block_n


def runs_for(tactics: Tactics) -> list[Run]:
    """Three that determine the coefficients, and one that checks them."""
    few, short, full = EMULATED_EXPERTS, max(1, min(token_tiles(tactics)) // 8), max(token_tiles(tactics))
    return [Run(few, short, short), Run(2 * few, short, 2 * short), Run(few, full, full), Run(2 * few, 0, 2 * short)]


def emulate_moe(
    device: VirtualDevice, layer: MoELayer, mode: int, run: Run, tactics: Tactics
) -> tuple[torch.Tensor, list[Any]]:
    """One batch on the virtual device: its expert ids and its launches."""
    top_k = EMULATED_EXPERTS
    sizes = run.tokens, layer.hidden, layer.inter, run.experts, top_k, mode
    case = MoECase(*sizes, relu2=layer.activation == "relu2", weights=layer.weights)
    inputs = make_moe_inputs(case, 0)
    inputs = dataclasses.replace(inputs, token_selected_experts=run.ids(top_k))
    named = {**inputs.arguments(), "profile_ids": [INSTANCES[each].profile_id for each in tactics]}
    return inputs.token_selected_experts, launches_of(device, lambda: flashinfer.cutlass_fused_moe(**named))


def fit_layer(device: VirtualDevice, layer: MoELayer, mode: int, tactics: Tactics) -> tuple[list[Fit], float, int]:
    """The launches of a layer, the largest deviation of the check, and how often a checker reported.

    A launch without MMAs is a prologue or arranges tokens; the others are FC1 and FC2 in this order, or the whole layer
    where there is one.
    """
    emulated = [emulate_moe(device, layer, mode, run, tactics) for run in runs_for(tactics)]
    if len({len(launches) for _, launches in emulated}) != 1:
        raise RuntimeError(f"tactics {tactics}: the number of launches depends on the batch, which is not modelled")
    fits: list[Fit] = []
    deviation = 0.0
    for position, launch in enumerate(emulated[0][1]):
        launches = [seen(launches[position]) for _, launches in emulated]
        gemms = sum(fit.tile > 0 for fit in fits)
        tile = token_tiles(tactics)[min(gemms, 1)] if launches[0].counts.mma_flops else 0
        works = [work_of(ids, tile) for ids, _ in emulated]
        by_tokens = not tile and ("moe_pack" not in launch.kernel or INSTANCES[tactics[0]].split_k)
        fits.append(fit_launch(launches[:3], works[:3], tile, by_tokens))
        if tile:
            expected, found = fits[-1].at(works[3]), launches[3].counts
            for saw, predicted in ((found.instructions, expected.instructions), (found.bytes, expected.bytes)):
                deviation = max(deviation, abs(predicted - saw) / saw)
    return fits, deviation, sum(len(launch.reports) for _, launches in emulated for launch in launches)


def build_emulator() -> None:
    """Bring the emulator up to date where one sees it; what fails here fails again, with the reason, when it is
    used."""
    folder = fork_root() / "emulator"
    make = shutil.which("make")
    if make is None or not folder.is_dir() or "VSM_BUILD_DIR" in os.environ:
        return
    print(
        f"building the emulator where it is not fresh (about a minute at first; kept in {folder / 'build'})", flush=True
    )
    subprocess.run([make, "--no-print-directory", "-C", str(folder), f"-j{min(4, os.cpu_count() or 1)}"], check=False)


def moe_lines(
    layers: Sequence[MoELayer],
    tokens: Sequence[int],
    modes: Sequence[int],
    fitted: Fits,
    routing: Routing = UNIFORM,
) -> Iterator[moe.Line]:
    """All rows; says what it builds and emulates. ``fitted`` is filled."""
    rows = [
        (layer, mode, count, planned(layer, mode, count))
        for layer, mode, count in itertools.product(layers, modes, tokens)
        if mode in MODES_OF[layer.weights]
    ]
    wanted = list(dict.fromkeys((mode, tactics, (*layer[:2], layer.fc1_rows)) for layer, mode, _, tactics in rows))
    build_emulator()
    with virtual_device("sm_121a", strict=False) as device:
        print(
            "building fused_moe_120 for SM121, with its PTX, where it is not fresh "
            f"(minutes of compilers at first; kept in {jit_env.FLASHINFER_JIT_DIR})",
            flush=True,
        )
        began = time.perf_counter()
        for weights in dict.fromkeys(layer.weights for layer in layers):
            moe_module(device, weights)
        print(f"built in {time.perf_counter() - began:.0f} s", flush=True)
        for layer, mode, count, tactics in rows:
            key = (mode, tactics, (*layer[:2], layer.fc1_rows))
            if key not in fitted:
                began = time.perf_counter()
                names = f"{MODE_NAMES[mode]}, {' and '.join(dict.fromkeys(INSTANCES[each].name for each in tactics))}"
                print(f"[{wanted.index(key) + 1}/{len(wanted)}] emulating {names}", flush=True)
                fitted[key], deviation, reports = fit_layer(device, layer, mode, tactics)
                print(
                    f"emulated {names}: "
                    f"{time.perf_counter() - began:.0f} s, check off by {deviation:.1%}, {reports} checkers' reports",
                    flush=True,
                )
            yield predict(layer, mode, count, tactics, fitted[key], routing)


# --- dense layers -----------------------------------------------------------------------------------------------------


def emulate_dense(
    device: VirtualDevice, row: Instance, case: tuple[int, int, int], activation: str, normed: bool = False
) -> list[Launch]:
    """One layer ``(tokens, n, k)``; ``normed``: with an addition and a norm in it."""
    tokens, n, k = case
    inputs = make_dense_inputs(DenseCase(tokens, n, k, row.weights, TOKENS_AS[activation]), 0)
    named: dict[str, Any] = {**inputs.named, "constant_weights": True, "tactic": row.name}
    if normed:
        x, weight, weight_scale = inputs.arguments
        named |= {"x": x, "weight": weight, "weight_scale": weight_scale, **make_norm_inputs(inputs, 0)}
        call = functools.partial(rmsnorm_dense_block_scaled, **named)
    else:
        call = functools.partial(dense_block_scaled, *inputs.arguments, **named)
    return unreported(launches_of(device, call), f"{row.name} with {tokens} tokens")


@dataclasses.dataclass(kw_only=True)
class DenseLine(Times):
    """A row of the dense layers' table."""

    layer: str
    tokens: int
    weights: str
    activation: str
    instance: str


def dense_line(
    device: VirtualDevice,
    name: str,
    shape: tuple[int, int],
    tokens: int,
    weights: str,
    activation: str,
    normed: bool = False,
) -> DenseLine | None:
    """A layer of ``shape``, rows and K of its weight, run and predicted; None where cuBLAS multiplies: not modelled."""
    n, k = shape
    operand = gemm_compute_dtype(weights, TOKEN_FORMATS.index(TOKENS_AS[activation]), GB10)
    row = choose(weights, tokens, n, k, GB10, operand)
    if row is None:
        return None
    runs = {
        (m, rows): emulate_dense(device, row, (m, rows, k), activation, normed)
        for m, rows in dense.runs_for(row, tokens)
    }
    about = {"layer": name, "tokens": tokens, "weights": weights, "activation": activation, "instance": row.name}
    return DenseLine(**about, **dense.times_of(row, shape, dense.launches_of(row, shape, tokens, runs)))


def priced_tokens(weights: str, operand: Format, k: int) -> list[int]:
    """The batches at which the planner's choice for a matrix of this K changes, with one token less and one more, and
    others."""
    tokens = {*PRICED}
    for n, width in MODELS[LAYER_MODEL].matrices.values():
        if width == k:
            chosen = [choose(weights, count, n, k, compute_dtype=operand) for count in range(1, dense.FEW_TOKENS + 2)]
            changed = [count for count in range(2, len(chosen) + 1) if chosen[count - 1] != chosen[count - 2]]
            tokens |= {count + beside for count in changed for beside in (-1, 0, 1)}
    return sorted(count for count in tokens if count <= dense.FEW_TOKENS)


def dense_runs(device: VirtualDevice, weights: str, activation: Format) -> Iterator[tuple[dense.KeptRun, list[Launch]]]:
    """Emulate the runs by which each instance that the planner could choose is priced, at each of :func:`priced_tokens`
    and for any larger batch."""
    for k in sorted({k for _, k in MODELS[LAYER_MODEL].matrices.values()}):
        for row in DENSE_INSTANCES:
            if row.weights != weights or row.longest_k < k or (row.compute_dtype != activation and not row.split_k):
                continue
            began = time.perf_counter()
            most = dense.MOST_PASSES * row.block_n if row.split_k else 2**30
            counts = [
                count for count in [*priced_tokens(weights, activation, k), dense.FEW_TOKENS + 1] if count <= most
            ]
            for tokens, n in dict.fromkeys(run for count in counts for run in dense.runs_for(row, count)):
                run = dense.KeptRun(row.name, activation, k, tokens, n)
                yield run, emulate_dense(device, row, (tokens, n, k), activation)
            print(f"{row.name} with {activation} tokens, k = {k}: {time.perf_counter() - began:.0f} s", flush=True)


# --- tables of layers -------------------------------------------------------------------------------------------------


def cells(line: Times, *more: float) -> list[str]:
    """The cells of a prediction, which follow a table's leading columns; ``more``: microseconds to list after the
    resources'."""
    return [
        *(f"{value:,.0f}" for value in (line.floor, line.dram, line.issue, line.mma, line.shared, *more)),
        f"{line.fast:,.0f} - {line.slow:,.0f}",
        " - ".join(f"{share:.0%}" for share in line.shares),
        line.bound,
    ]


def moe_table(lines: Sequence[tuple[str, moe.Line]]) -> str:
    """A table of MoE layers; each line comes with its model's name."""
    headers = ["model", "mode", "tokens", "tactics", "experts", "MB", "floor us", "DRAM us", "issue us", "MMA us"]
    headers += ["shared us", "fixed us", "predicted us", "of 233 GB/s", "bound by", f"{CARD.name} us"]
    body = [
        [
            model,
            MODE_NAMES[line.mode],
            f"{line.tokens:,}",
            "/".join(dict.fromkeys(INSTANCES[tactic].name for tactic in line.tactics)),
            f"{line.experts:.1f}",
            f"{line.megabytes:,.0f}",
            *cells(line, line.overhead),
            "{:,.0f} - {:,.0f}".format(*step.on_device(line, INSTANCES[line.tactics[0]].compute_dtype != "bf16", CARD)),
        ]
        for model, line in lines
    ]
    return github(body, headers)


def dense_table(lines: Sequence[DenseLine]) -> str:
    """One line a layer, batch and formats."""
    headers = ["layer", "tokens", "weights, tokens", "instance", "MB", "floor us", "DRAM us", "issue us", "MMA us"]
    headers += ["shared us", "predicted us", "of 233 GB/s", "bound by"]
    body = [
        [
            line.layer,
            f"{line.tokens:,}",
            f"{line.weights}, {line.activation}",
            line.instance,
            f"{line.megabytes:,.1f}",
            *cells(line),
        ]
        for line in lines
    ]
    return github(body, headers)


def unless_impossible(predicts: Callable[P, None]) -> Callable[P, int]:
    """``predicts``, with an exit status: 2, and why, where the emulator cannot run."""

    @functools.wraps(predicts)
    def run(*arguments: P.args, **named: P.kwargs) -> int:
        try:
            predicts(*arguments, **named)
        except RuntimeError as error:
            print(f"bench: no prediction: {error}", file=sys.stderr)
            return 2
        return 0

    return run


def say(table: str, floor: str, layers: str) -> None:
    """Print a prediction with what was assumed."""
    print(f"\nGB10 (SM121): prediction, not a measurement\n\n{table}\n\nfloor: {floor} at 233 GB/s. Assumed:")
    print("\n".join(f"- {line}" for line in gb10.assumptions(layers)))


@unless_impossible
def predict_moe(models: Sequence[str], tokens: Sequence[int], modes: Sequence[int], routing: Routing = UNIFORM) -> None:
    """Print the table of MoE layers."""
    lines = moe_lines([LAYERS[model] for model in models], tokens, modes, {}, routing)
    of_each = [len([mode for mode in modes if mode in MODES_OF[LAYERS[model].weights]]) for model in models]
    names = [model for model, count in zip(models, of_each, strict=True) for _ in range(count * len(tokens))]
    table = moe_table(list(zip(names, lines, strict=True)))
    say(table, "weights and scales of the touched experts", "MoE")
    dram = " to ".join(f"{rate:,.0f}" for rate in CARD.dram)
    print(
        f"- {CARD.name}: {CARD.multiprocessors} SMs, {CARD.gigahertz} GHz, DRAM {dram} GB/s (95 to 85 % of what is "
        "sold), with a GB10's tactics, launches and L2"
    )


@unless_impossible
def predict_dense(layers: Sequence[str], tokens: Sequence[int]) -> None:
    """Print the table of gpt-oss-120b's dense layers."""
    build_emulator()
    lines = []
    with virtual_device("sm_121a", strict=False) as device:
        for form in dict(DENSE_VARIANTS):
            device.module(gen_dense_module, form)
        for name, count, (weights, activation) in itertools.product(layers, tokens, DENSE_VARIANTS):
            if name == "lm_head" and count > dense.FEW_TOKENS:
                continue  # a batch's logits are of its sequences' last tokens
            began = time.perf_counter()
            line = dense_line(device, name, DENSE_LAYERS[name], count, weights, activation)
            took = f"{time.perf_counter() - began:.0f} s"
            what = f"{name}, {count} tokens, {weights} weights, {activation} tokens"
            print(f"emulated {what}: {took}" if line else f"{what}: by cuBLAS, no prediction", flush=True)
            lines += [line] if line else []
    say(dense_table(lines), "weights and scales", "dense")


# --- what a step of gpt-oss needs -------------------------------------------------------------------------------------


def kernel(line: Times, **about: Any) -> Kernel:
    """A prediction in the form in which it is kept."""
    return Kernel(**about, **{field.name: getattr(line, field.name) for field in dataclasses.fields(Times)})


def dense_kernel(
    device: VirtualDevice, ranks: int, kind: str, weights: str, tokens: int, activation: str
) -> Kernel | None:
    """A dense layer of one of ``ranks`` GPUs; None where cuBLAS would multiply dequantized weights."""
    began, normed = time.perf_counter(), kind == NORMED
    shape = MODELS[LAYER_MODEL].split(ranks).matrices["QKV" if normed else kind]
    line = dense_line(device, kind, shape, tokens, weights, activation, normed)
    what = f"{kind} of {ranks}, {tokens} tokens of {activation}, {weights}"
    print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)
    about = {"kind": kind, "model": LAYER_MODEL, "ranks": ranks, "tokens": tokens, "weights": weights}
    return kernel(line, **about, activation=activation) if line else None


def called(device: VirtualDevice, call: Callable[[], Any], fixed: tuple[float, float], **about: Any) -> Kernel:
    """The predicted time of a call's launches; ``fixed`` us, fast and slow, are added to the busiest resource's."""
    launches = unreported(launches_of(device, call), str(about))
    megabytes = sum(launch.counts.bytes for launch in launches) / 1e6
    return Kernel(**about, activation="bf16", **gb10.times(launches, "bf16", megabytes, fixed))


def router_kernel(device: VirtualDevice, model: str, tokens: int) -> Kernel:
    """This fork's router with the norm before it."""
    size = MODELS[model]
    inputs = make_router_inputs(tokens, size.hidden, size.experts, size.top_k, 0, adds=True, norms=True, bias=True)
    call = functools.partial(router_top_k, **inputs, constant_weights=True)
    return called(device, call, FIXED_US["router"], kind="router", model=model, ranks=1, tokens=tokens, weights="bf16")


def rescoring_kernel(device: VirtualDevice, ranks: int) -> Kernel:
    """The launch of a rescored LM head after the coarse weight's, of one token: it reads the logits and the fine rows
    of the largest. Blocks of other tokens do the same."""
    n, k = MODELS[LAYER_MODEL].split(ranks).matrices["LM head"]
    logits = torch.randn(1, n, generator=torch.Generator().manual_seed(0)).bfloat16()
    # Counts do not depend on values: rows of zeros take no memory until they are read.
    x, fine = torch.zeros(1, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16)
    module = dense_module(device, COARSE[RESCORED])
    no_top_k = (None, None, 0, None)
    call = functools.partial(
        device.call,
        module.sm12x_rescore_run,
        *(logits, x, fine, None, None, GROUPS, RESCORED_ROWS, *no_top_k, False),
        writes=[logits],
    )
    about = {"kind": RESCORING, "model": LAYER_MODEL, "ranks": ranks, "tokens": 1, "weights": "bf16"}
    return called(device, call, RESCORING_US, **about)


def attention_kernel(device: VirtualDevice, ranks: int, kv: str, sequences: int, context: int) -> Kernel:
    """This fork's decode attention, with rope and the new row of the cache; ``context`` 0: within the window."""
    size = MODELS[LAYER_MODEL].split(ranks)
    named = {} if context else {"window_left": size.window - 1}
    case = make_decode_case([context or 2 * size.window] * sequences, size.kv_heads, 0, fp8=kv == "fp8", **named)
    call = functools.partial(decode_attention, **case.arguments, constant_cache=True)
    kind = "attention, full" if context else "attention, window"
    about = {"kind": kind, "model": LAYER_MODEL, "ranks": ranks, "tokens": sequences, "weights": kv, "context": context}
    return called(device, call, FIXED_US["decode_attention"], **about)


def kernels() -> Iterator[Kernel]:
    """All kernels that :mod:`perfmodel.step` looks up; on two GPUs gpt-oss-120b only."""
    for model, ranks in ((LAYER_MODEL, 1), (LAYER_MODEL, 2), ("gpt-oss-20b", 1)):
        size = MODELS[model].split(ranks)
        for line in moe_lines([size.moe], [*DECODE, *PREFILL], list(STEP_MODES), {}):
            about = {"kind": "MoE", "model": model, "ranks": ranks, "tokens": line.tokens}
            yield kernel(line, **about, weights="mxfp4", activation=STEP_MODES[line.mode])
    with virtual_device("sm_121a", strict=False) as device:
        for ranks, kind, weights, tokens in itertools.product((1, 2), MATRICES, DENSE_FORMATS[1:], (*DECODE, *PREFILL)):
            if kind == "LM head" and tokens in PREFILL:
                continue  # a prompt's logits are of its last token
            for activation in TOKENS_BESIDE[weights]:
                if (found := dense_kernel(device, ranks, kind, weights, tokens, activation)) is not None:
                    yield found
        for ranks, weights, tokens in itertools.product((1, 2), DENSE_FORMATS[1:], NORMED_BATCHES):
            if (found := dense_kernel(device, ranks, NORMED, weights, tokens, "bf16")) is not None:
                yield found
        for model, tokens in itertools.product(MODELS, (*DECODE, *PREFILL)):
            yield router_kernel(device, model, tokens)
        for ranks in (1, 2):
            yield rescoring_kernel(device, ranks)
        for ranks, kv, context in itertools.product((1, 2), KV_BYTES, (*CONTEXTS, 0)):
            yield attention_kernel(device, ranks, kv, 1, context)
        for sequences, context in itertools.product(DECODE[1:], (1024, 0)):
            yield attention_kernel(device, 1, "bf16", sequences, context)


@unless_impossible
def renew() -> None:
    """Run all that is kept with :mod:`perfmodel` again, and write it."""
    fitted: Fits = {}
    layer = MOE_LAYERS[probed.MODEL]
    for _ in moe_lines([layer], probed.TOKENS, list(step.FITTED_MODES.values()), fitted):
        pass
    with virtual_device("sm_121a", strict=False) as device:
        # The others that the planner could choose: a test holds its choice against them.
        for row in GB10.candidates(1, *layer[:2]):
            mode = step.FITTED_MODES[row.activation]
            key = (mode, (row.index, row.index), layer[:2])
            if key not in fitted:
                fitted[key] = fit_layer(device, layer, mode, key[1])[0]
        runs = {
            run: launches
            for weights, activation in dense.PRICED_FORMATS
            for run, launches in dense_runs(device, weights, activation)
        }
    dense.write_runs(dense.RUNS, runs)
    step.write_kernels(list(kernels()))
    moe.write_fits(moe.FITS, [(moe.columns(*key), fits) for key, fits in fitted.items()])
    print(f"wrote {step.KERNELS}, {moe.FITS} and {dense.RUNS}")
