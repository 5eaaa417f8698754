# SPDX-License-Identifier: Apache-2.0
"""Times of this fork's kernels on a GB10, predicted from runs on the virtual SM121, as a step of gpt-oss needs them.

They are kept beside this module (``gb10_kernels.json``), since running them takes a quarter of an hour;
``bench_token.py --emulate`` runs them all again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_bench import predict, predict_dense
from moe_bench.predict import counts_of
from moe_bench.predict_dense import busy

from flashinfer.decode import decode_attention
from flashinfer.fused_moe import router_top_k
from flashinfer.jit.sm12x.modules import gen_dense_module
from flashinfer.sm12x_gpu_probe.prediction import FAST, SLOW, Assumptions, Counts, Fit, Times, summed
from flashinfer.testing.decode_reference import make_decode_case
from flashinfer.testing.router_reference import make_router_inputs
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

from .sizes import KV_BYTES, MATRICES, SIZES, TOKENS_BESIDE

KEPT = Path(__file__).with_name("gb10_kernels.json")
MODE = 1  # W4A8 from bf16, the plugin's default
MODELS = {
    ("gpt-oss-120b", 1): "gpt-oss-120b",
    ("gpt-oss-120b", 2): "gpt-oss-120b-tp2",
    ("gpt-oss-20b", 1): "gpt-oss-20b",
}
"""Of a model and its ranks the name in the layers' table."""
DECODE, PREFILL = (1, 4, 16, 64), (512, 2048, 8192)
RANKS = (1, 2)
CONTEXTS = (128, 1024, 8192, 32_768, 131_072)
ROUTER_US = (3.0, 8.0)
"""What this fork's router, two launches, takes beside what its counts say, fast and slow: an H200 takes 6.0 for one token,
norm and bytes included."""
DECODE_ATTENTION_US = (5.0, 12.0)
"""Of its decode attention, taken as the dense layers', which are one launch with a start and a tail, too: an H200 takes 8.3
to 8.8 in a window and 9.3 to 10.2 at 1,024."""
MODEL = "gpt-oss-120b"


@dataclasses.dataclass(kw_only=True)
class Kept(Times):
    """One call: ``kind`` is "MoE" or one of the dense layers, ``weights`` its format, ``activation`` that of its tokens.

    The experts' tokens are rounded to MXFP8. Or ``kind`` is a part of a step that this fork's router or decode attention
    computes; of attention ``tokens`` are sequences, ``weights`` the cache's format and ``context`` the full layers' context.
    """

    kind: str
    model: str
    ranks: int
    tokens: int
    weights: str
    activation: str
    context: int = 0


def times(line: Times) -> dict[str, Any]:
    """The fields of :class:`Times` alone."""
    return {field.name: getattr(line, field.name) for field in dataclasses.fields(Times)}


def dense_line(device: VirtualDevice, ranks: int, kind: str, weights: str, tokens: int, activation: str) -> list[Kept]:
    """A dense layer run and predicted; none where cuBLAS would multiply widened weights."""
    began = time.perf_counter()
    shape = SIZES[MODEL].split(ranks).matrices[kind]
    row = predict_dense.predict_layer(device, kind, tokens, weights, activation, shape)
    what = f"{kind} of {ranks}, {tokens} tokens of {activation}, {weights}"
    print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)
    if row is None:
        return []
    about = {"kind": kind, "model": MODEL, "ranks": ranks, "tokens": tokens, "weights": weights}
    return [Kept(**about, activation=activation, **times(row))]


def called(device: VirtualDevice, call: Callable[[], Any], fixed: tuple[float, float], **about: Any) -> Kept:
    """What a call's launches take; ``fixed`` is what it takes beside the busiest resource of each, fast and slow.

    Raises
    ------
    RuntimeError
        A watcher reported on one.
    """
    before = len(device.launches)
    call()
    launches = device.launches[before:]
    if reports := [report for launch in launches for report in launch.reports]:
        raise RuntimeError(f"{about}: {reports[0]}")

    def used(by: Assumptions) -> list[dict[str, float]]:
        found = []
        for launch in launches:
            warps = launch.blocks_per_sm * launch.block[0] // 32 / by.schedulers
            fit = Fit(0, False, Counts(), Counts(), Counts(), warps, launch.grid[0])
            found.append(busy(fit, counts_of(launch), "bf16", by))
        return found

    def microseconds(by: Assumptions, beside: float) -> float:
        return sum(max(each.values()) for each in used(by)) + beside

    given = Assumptions()
    totals, bound = summed(used(given))
    megabytes = sum(counts_of(launch).bytes for launch in launches) / 1e6
    return Kept(
        **about,
        megabytes=megabytes,
        floor=1e3 * megabytes / given.dram_gb_per_second,
        **totals,
        fast=microseconds(FAST, fixed[0]),
        slow=microseconds(SLOW, fixed[1]),
        bound=bound,
    )


def router_line(device: VirtualDevice, model: str, tokens: int) -> Kept:
    """This fork's router with the norm in front of it."""
    size = SIZES[model]
    inputs = make_router_inputs(tokens, size.hidden, size.experts, size.top_k, 0, adds=True, norms=True, bias=True)
    call = functools.partial(router_top_k, **inputs, constant_weights=True)
    about = {"kind": "router", "model": model, "ranks": 1, "tokens": tokens, "weights": "bf16", "activation": "bf16"}
    return called(device, call, ROUTER_US, **about)


def attention_line(device: VirtualDevice, ranks: int, kv: str, sequences: int, context: int) -> Kept:
    """This fork's decode attention, with rope and the new row of the cache; ``context`` 0: within the window."""
    size = SIZES[MODEL].split(ranks)
    named = {} if context else {"window_left": size.window - 1}
    case = make_decode_case([context or 2 * size.window] * sequences, size.kv_heads, 0, fp8=kv == "fp8", **named)
    call = functools.partial(decode_attention, **case.arguments, constant_cache=True)
    kind = "attention, full" if context else "attention, window"
    about = {"kind": kind, "model": MODEL, "ranks": ranks, "tokens": sequences, "weights": kv, "activation": "bf16"}
    return called(device, call, DECODE_ATTENTION_US, **about, context=context)


def attention_lines(device: VirtualDevice) -> Iterator[Kept]:
    """Each context with one sequence, and batches at 1,024."""
    for ranks, kv, context in itertools.product(RANKS, KV_BYTES, (*CONTEXTS, 0)):
        yield attention_line(device, ranks, kv, 1, context)
    for sequences, context in itertools.product(DECODE[1:], (1024, 0)):
        yield attention_line(device, 1, "bf16", sequences, context)


def emulate() -> int:
    """Run all of them and write :data:`KEPT`; 2 where the emulator cannot run."""
    found: list[Kept] = []
    try:
        predict.build_emulator()
        for (model, ranks), name in MODELS.items():
            for line in predict.lines([name], [*DECODE, *PREFILL], [MODE], Assumptions(), {}):
                found.append(
                    Kept(
                        kind="MoE",
                        model=model,
                        ranks=ranks,
                        tokens=line.tokens,
                        weights="mxfp4",
                        activation="mxfp8",
                        **times(line),
                    )
                )
        with virtual_device("sm_121a", strict=False) as device:
            device.module(gen_dense_module)
            for ranks, kind, weights, tokens in itertools.product(
                RANKS, MATRICES, ("mxfp8", "mxfp4"), (*DECODE, *PREFILL)
            ):
                if kind == "LM head" and tokens in PREFILL:
                    continue  # a prompt's logits are of its last token
                for activation in TOKENS_BESIDE[weights]:
                    found += dense_line(device, ranks, kind, weights, tokens, activation)
            found += [router_line(device, *each) for each in itertools.product(SIZES, (*DECODE, *PREFILL))]
            found += attention_lines(device)
    except RuntimeError as error:
        print(f"bench: no prediction: {error}", file=sys.stderr)
        return 2
    KEPT.write_text(json.dumps([dataclasses.asdict(line) for line in found], indent=1) + "\n", encoding="utf-8")
    print(f"wrote {KEPT}")
    return 0


def kept() -> list[Kept]:
    """What :func:`emulate` wrote."""
    return [Kept(**line) for line in json.loads(KEPT.read_text(encoding="utf-8"))]
