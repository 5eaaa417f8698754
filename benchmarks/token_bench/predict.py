# SPDX-License-Identifier: Apache-2.0
"""A step of gpt-oss on a GB10, predicted as a range, part by part. No part of it is a measurement of a GB10.

Three kinds of parts:

1. This fork's kernels (MoE; QKV, O and LM head in MXFP8 and MXFP4; its router and its decode attention): their counts on the
   virtual SM121, by the model of :mod:`flashinfer.sm12x_gpu_probe.prediction`, kept in ``gb10_kernels.json``
   (:mod:`.emulate`). Attention at another context or batch than those kept there is taken as in 2.
2. Everybody else's kernels that stream (bf16 GEMMs, attention's cache) or are small (norms, rope, KV write, top-k, argmax,
   embedding): their bytes at DRAM's rate, and a fixed time for each call, :data:`FIXED_US`. Those were not executed on the
   virtual device.
3. Between two Sparks: an all-reduce behind O and behind the experts, by published latencies, :data:`ALL_REDUCE_US`.

Where a prompt makes arithmetic the longer (bf16 GEMMs, attention), it is FLOPs over the bf16 rate's range times how much of
it such kernels reach, :data:`REACHED`. What is not modelled: the engine around a step (scheduler, sampling beyond argmax,
detokenizer), clocks under load, and a launch that overlaps the one in front of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from flashinfer.gemm import sm12x_dense
from flashinfer.sm12x_gpu_probe.prediction import FAST, SLOW, Assumptions

from .emulate import CONTEXTS, DECODE_ATTENTION_US, ROUTER_US, Kept, kept
from .results import Measured
from .sizes import DENSE_FORMATS, KV_BYTES, MATRICES, SIZES, TOKENS_BESIDE, Part, Size, Step, parts_of

FIXED_US = {
    "small": (2.0, 4.0),
    "gemm": (5.0, 12.0),
    "router": ROUTER_US,
    "attention": (8.0, 16.0),
    "decode_attention": DECODE_ATTENTION_US,
}
"""Fast and slow, of one call, with its launch in a graph and the gap behind it.

small: vLLM's engine on an H200 takes 2.7 for a norm and 2.9 for the top-k, gaps included; one node of a graph is published
as 1.3 (Megatron-LM #6064). gemm: as of this fork's dense layers (an H200 takes 10 beyond their bytes, 9 for the router).
router, decode_attention: this fork's (:mod:`.emulate`). Weights may be on their way before a router begins, which is left out.
attention: FlashInfer's XQA takes 10 to 15 on an H200 up to a context of 1,024.
"""
STREAMED = (1.0, 1.1)
"""Times the bytes' time, of attention's cache: this fork's streams take up to 1.12 times a plain read on an H200."""
REACHED = {"gemm": (0.9, 0.7), "attention": (0.73, 0.5)}
"""Of the bf16 MMA rate. gemm: assumed. attention: FlashAttention-2 on an A100 (arXiv 2307.08691)."""
ALL_REDUCE_US = (15.5, 35.2)
"""Of 8 KB: one-shot RDMA writes in a CUDA graph, four Sparks (b12x #295); NCCL, two Sparks (dgx-spark-playbooks #103). A
token's hidden state is 5.8 KB."""
PUBLISHED = {
    1: {"vLLM, MXFP4 everywhere": 59.5, "llama.cpp": 59.0},
    2: {"vLLM, MXFP4 everywhere": 75.96},
}
"""Tokens/s of one stream of gpt-oss-120b, by the number of Sparks."""
LAYER_MODEL = "gpt-oss-120b"  # of the doctor's probe


@dataclasses.dataclass(frozen=True)
class Given:
    """What a prediction takes from elsewhere, fast and slow; ``layers``: microseconds of an MoE layer by its tokens."""

    dram: tuple[float, float] = (FAST.dram_gb_per_second, SLOW.dram_gb_per_second)
    bf16: tuple[float, float] = (float(FAST.bf16_flops_per_cycle), float(SLOW.bf16_flops_per_cycle))
    small_us: tuple[float, float] = FIXED_US["small"]
    layers: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """A part of a predicted step: microseconds of all its calls."""

    part: str
    by: str
    calls: int
    bytes: float
    fast: float
    slow: float

    @property
    def middle(self) -> float:
        return (self.fast + self.slow) / 2


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A step on one of ``size.ranks`` GB10s."""

    model: str
    size: Size
    step: Step
    rows: Sequence[Row]

    @property
    def fast(self) -> float:
        return sum(row.fast for row in self.rows)

    @property
    def slow(self) -> float:
        return sum(row.slow for row in self.rows)

    @property
    def bytes(self) -> float:
        """Of memory, one GPU's."""
        return sum(row.bytes for row in self.rows if row.part != "all-reduce")

    @property
    def floor(self) -> float:
        """Microseconds of its bytes at 233 GB/s."""
        return self.bytes / Assumptions.dram_gb_per_second / 1e3

    def rate(self, microseconds: float) -> float:
        """Tokens/s of a step that takes so long."""
        return 1e6 * self.step.tokens / microseconds

    @property
    def middle_rate(self) -> float:
        """At the middle of the range of times."""
        return self.rate((self.fast + self.slow) / 2)


@functools.cache
def kept_line(kind: str, model: str, ranks: int, tokens: int, weights: str, activation: str, context: int = 0) -> Kept:
    """A kernel's kept times.

    Raises
    ------
    ValueError
        There are none for so many tokens.
    """
    wanted = (kind, model, ranks, weights, activation, context)
    fitting = [
        line
        for line in kept()
        if (line.kind, line.model, line.ranks, line.weights, line.activation, line.context) == wanted
    ]
    for line in fitting:
        if line.tokens == tokens:
            return line
    counts = ", ".join(str(line.tokens) for line in fitting) or "none"
    raise ValueError(
        f"no prediction of {kind} for {tokens} tokens of {model} on {ranks} GPU(s), {weights} and tokens in {activation}: "
        f"{counts} only"
    )


def on_fork(line: Kept, given: Given) -> tuple[float, float]:
    """Microseconds of one call, the kept range moved to ``given``'s DRAM rate where DRAM is what binds."""
    if line.bound != "dram":
        return line.fast, line.slow
    usual, middle = Given().dram, Assumptions.dram_gb_per_second
    moved = [line.dram * middle * (1 / rate - 1 / before) for rate, before in zip(given.dram, usual, strict=True)]
    return line.fast + moved[0], line.slow + moved[1]


def arithmetic(flops: float, kind: str, given: Given) -> tuple[float, float]:
    """Microseconds of bf16 MMAs."""
    cycles = 1e3 * Assumptions.gigahertz * Assumptions.multiprocessors
    fast, slow = (flops / (rate * reached * cycles) for rate, reached in zip(given.bf16, REACHED[kind], strict=True))
    return fast, slow


def flops_of(size: Size, step: Step, part: str) -> float:
    """Of one call of a bf16 GEMM or of attention."""
    if part in ("attention, full", "attention, window"):
        seen = min(step.context, size.window) if part.endswith("window") else step.context
        pairs = step.new * seen - (step.new * (step.new - 1) / 2 if seen == step.context else 0)
        return 4.0 * step.sequences * pairs * size.heads * size.head
    n, k = {**size.matrices, "router": (size.experts, size.hidden)}[part]
    return 2.0 * n * k * (step.sequences if part == "LM head" else step.tokens)


def attention_line(part: str, size: Size, step: Step) -> Kept | None:
    """The kept times of this fork's decode attention; None where it was not run so."""
    context = 0 if part == "attention, window" and step.context >= size.window else step.context
    try:
        return kept_line(part, LAYER_MODEL, size.ranks, step.sequences, step.kv, "bf16", context)
    except ValueError:
        return None


def row_of(model: str, size: Size, step: Step, part: Part, given: Given) -> Row:
    """One part's range."""
    calls = part.calls
    each = part.bytes / calls / 1e3
    streamed = [each / rate for rate in given.dram]
    if part.name == "all-reduce":
        ends, by = ALL_REDUCE_US, "RDMA, published"
    elif part.name == "MoE":
        measured = given.layers.get(step.tokens) if (model, size.ranks) == (LAYER_MODEL, 1) else None
        line = kept_line("MoE", model, size.ranks, step.tokens, "mxfp4", "mxfp8")
        ends = on_fork(line, given) if measured is None else (measured, measured)
        by = "fork, virtual SM121" if measured is None else "fork, measured"
    elif part.name in MATRICES and step.formats[part.name] != "bf16":
        tokens = step.sequences if part.name == "LM head" else step.tokens
        # Dense layers are the same in all models.
        line = kept_line(part.name, LAYER_MODEL, size.ranks, tokens, step.formats[part.name], step.dense_tokens)
        ends, by = on_fork(line, given), "fork, virtual SM121"
    elif part.name == "router" and step.fused_router:
        ends = on_fork(kept_line("router", model, 1, step.tokens, "bf16", "bf16"), given)
        by = "fork, virtual SM121"
    elif step.fused_attention and (line := attention_line(part.name, size, step)) is not None:
        ends, by = on_fork(line, given), "fork, virtual SM121"
    elif part.name in (*MATRICES, "router") or part.name.startswith("attention"):
        attention = part.name.startswith("attention")
        kind = "attention" if attention else "gemm"
        fixed_of = "decode_attention" if attention and step.fused_attention else kind
        more = STREAMED if attention else (1.0, 1.0)
        computed = arithmetic(flops_of(size, step, part.name), kind, given)
        fast, slow = (
            max(bytes_us * times, flops_us) + fixed
            for bytes_us, times, flops_us, fixed in zip(streamed, more, computed, FIXED_US[fixed_of], strict=True)
        )
        ends, by = (fast, slow), "bytes + launch"
    else:
        ends, by = (streamed[0] + given.small_us[0], streamed[1] + given.small_us[1]), "bytes + launch"
    return Row(part.name, by, calls, part.bytes, calls * ends[0], calls * ends[1])


def predict(model: str, step: Step, ranks: int = 1, given: Given | None = None) -> Predicted:
    """A step on ``ranks`` Sparks."""
    size = SIZES[model].split(ranks) if ranks > 1 else SIZES[model]
    rows = [row_of(model, size, step, part, given or Given()) for part in parts_of(size, step)]
    return Predicted(model, size, step, rows)


def of_measured(measured: Measured) -> dict[str, tuple[float, float]] | None:
    """What a measured step of this fork's was predicted to take, by part and in "all"; None for what is not modelled."""
    step = Step(**{field.name: getattr(measured, field.name) for field in dataclasses.fields(Step)})
    try:
        predicted = predict(measured.model, step)
    except ValueError:
        return None
    if not measured.stack.startswith("fork"):
        return None
    return {row.part: (row.fast, row.slow) for row in predicted.rows} | {"all": (predicted.fast, predicted.slow)}


def formats_of(weights: str) -> dict[str, str]:
    """QKV, O and LM head in one format."""
    return dict.fromkeys(MATRICES, weights)


def from_report(path: Path) -> Given:
    """What a doctor's report (``sm12x-doctor --probe``) measured in place of the ranges.

    Its MoE layers have MXFP8 input, those here bf16: less than 1 % apart.

    Raises
    ------
    ValueError
        It is no such report, or of a GPU that is no GB10.
    """
    try:
        measured: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["measured"]
        device = measured["device"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no report of sm12x-doctor --probe: {error!r}") from error
    if not device.get("gb10"):
        raise ValueError(f"{path} is of {device.get('name', 'no GPU')}: what is predicted here is a GB10")
    usual = Given()

    def both(value: float | None, otherwise: tuple[float, float]) -> tuple[float, float]:
        return otherwise if value is None else (value, value)

    launch = measured.get("launch", {}).get("plain", {}).get("graph_us")
    # A small kernel's own time stays as it is; a node of a graph was taken as 1.3 us.
    small = usual.small_us if launch is None else tuple(fixed - 1.3 + launch for fixed in usual.small_us)
    layers = {
        int(name.split()[0]): line["layer_us"] for name, line in measured.get("layer", {}).items() if "tokens" in name
    }
    return Given(
        both(measured.get("dram", {}).get("gigabytes_per_second"), usual.dram),
        both(measured.get("mma", {}).get("bf16", {}).get("flops_per_clock"), usual.bf16),
        (small[0], small[1]),
        layers,
    )


def span(fast: float, slow: float, digits: int = 1) -> str:
    return f"{fast:,.{digits}f} - {slow:,.{digits}f}"


def by_part(predicted: Sequence[Predicted], names: Sequence[str]) -> str:
    """Parts of several predictions of the same step, side by side: microseconds of all calls."""
    headers = ["part", "calls"]
    for name in names:
        headers += [f"{name}: MB", "floor us", "predicted us"]
    parts = list(dict.fromkeys(row.part for each in predicted for row in each.rows))
    body = []
    for part in parts:
        rows = [next(row for row in each.rows if row.part == part) for each in predicted]
        line = [part, str(rows[0].calls)]
        for row in rows:
            floor = 0.0 if part == "all-reduce" else row.bytes / Assumptions.dram_gb_per_second / 1e3
            line += [f"{row.bytes / 1e6:,.1f}", f"{floor:,.0f}", span(row.fast, row.slow, 0)]
        body.append(line)
    line = ["all", str(sum(row.calls for row in predicted[0].rows))]
    for each in predicted:
        line += [f"{each.bytes / 1e6:,.1f}", f"{each.floor:,.0f}", span(each.fast, each.slow, 0)]
    return str(tabulate([*body, line], headers, tablefmt="github", disable_numparse=True))


def by_context(model: str, ranks: int, **fused: bool) -> str:
    """Tokens/s of one stream, slow and fast end and, in brackets, at the middle of the times: contexts down, choices across."""
    columns = [(kv, weights) for kv in KV_BYTES for weights in DENSE_FORMATS]
    body = []
    for context in CONTEXTS:
        steps = [
            predict(model, Step(1, context, 1, kv, formats_of(weights), **fused), ranks) for kv, weights in columns
        ]
        body.append([f"{context:,}", *(f"{rates(each)} ({each.middle_rate:.1f})" for each in steps)])
    headers = ["context", *(f"{weights}, {kv} KV" for kv, weights in columns)]
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))


def overview(predicted: Sequence[Predicted]) -> str:
    """One line a step."""
    body = []
    for each in predicted:
        step = each.step
        what = f"prefill {step.new:,}" if step.prefill else f"{step.context:,}"
        body.append(
            [
                str(each.size.ranks),
                step.formats["QKV"],
                step.dense_tokens,
                step.kv,
                what,
                str(step.sequences),
                f"{each.bytes / 1e9:.2f}",
                f"{each.floor / 1e3:.1f}",
                span(each.fast / 1e3, each.slow / 1e3),
                span(each.rate(each.slow), each.rate(each.fast), 0 if step.tokens > 1 else 1),
                f"{each.middle_rate:,.{0 if step.tokens > 1 else 1}f}",
                span(100 * each.floor / each.slow, 100 * each.floor / each.fast, 0) + " %",
            ]
        )
    headers = [
        "Sparks",
        "QKV, O, LM head",
        "their tokens",
        "KV",
        "context",
        "sequences",
        "GB",
        "floor ms",
        "predicted ms",
        "tokens/s",
    ]
    headers += ["middle", "floor / predicted"]
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))


def side_by_side(before: Predicted, after: Predicted) -> str:
    """Parts as predicted, and with what a report measured in place of ranges."""
    body = [
        [a.part, a.by, span(b.fast, b.slow, 0), f"{a.fast:,.0f}" if a.fast == a.slow else span(a.fast, a.slow, 0)]
        for b, a in zip(before.rows, after.rows, strict=True)
    ]
    for name, each in (("all, us", lambda p: span(p.fast, p.slow, 0)), ("tokens/s", rates)):
        body.append([name, "", each(before), each(after)])
    headers = ["part", "by", "predicted us", "with the report us"]
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))


def rates(predicted: Predicted) -> str:
    """Tokens/s, slow and fast."""
    return span(predicted.rate(predicted.slow), predicted.rate(predicted.fast))


def told() -> list[str]:
    """What is assumed beyond the kernels' model, a line each."""
    fixed = ", ".join(f"{name} {fast:g} to {slow:g}" for name, (fast, slow) in FIXED_US.items())
    return [
        *Assumptions().told(),
        f"other kernels: their bytes and a fixed time a call, us: {fixed} (small: vLLM's engine on an H200 takes 2.7 to 2.9, a "
        "graph's node 1.3 by Megatron-LM #6064; gemm: 9 to 10 there; attention: XQA takes 10 to 11 there)",
        f"attention's cache: {STREAMED[0]:g} to {STREAMED[1]:g} times its bytes' time (this fork's streams: up to 1.12 on an H200)",
        f"bf16 GEMMs of a prompt reach {REACHED['gemm'][1]:.0%} to {REACHED['gemm'][0]:.0%} of the bf16 rate (assumed), attention "
        f"{REACHED['attention'][1]:.0%} to {REACHED['attention'][0]:.0%} (FlashAttention-2 on an A100, arXiv 2307.08691)",
        f"an all-reduce of a token between two Sparks: {ALL_REDUCE_US[0]:g} us (one-shot RDMA writes, 8 KB, four Sparks, b12x #295) "
        f"to {ALL_REDUCE_US[1]:g} (NCCL, 8 KB, two Sparks, dgx-spark-playbooks #103)",
    ]


def headline(ranks: int, model: str = LAYER_MODEL, given: Given | None = None, **fused: bool) -> list[Predicted]:
    """One stream at a context of 1,024, in each format; ``fused``: of :class:`Step`."""
    steps = [Step(1, 1024, formats=formats_of(weights), **fused) for weights in DENSE_FORMATS]
    return [predict(model, step, ranks, given) for step in steps]


def batches(model: str, **fused: bool) -> list[Predicted]:
    """Several streams and prompts, on one Spark; prompts have no fused attention.

    Without prompts of bf16 tokens that cuBLAS multiplies with widened weights, which is not modelled.
    """
    streams = [Step(n, 1024, **fused) for n in (4, 16, 64)]
    prompts = [Step(1, tokens, tokens, **{**fused, "fused_attention": False}) for tokens in (512, 2048, 8192)]
    wanted = [
        dataclasses.replace(step, formats=formats_of(weights), dense_tokens=tokens)
        for step in (*streams, *prompts)
        for weights in DENSE_FORMATS
        for tokens in (TOKENS_BESIDE[weights] if step.prefill else ("bf16",))
    ]
    return [
        predict(model, step)
        for step in wanted
        if step.tokens < sm12x_dense.WIDENED_TOKENS[True]
        or step.dense_tokens != "bf16"
        or step.formats["QKV"] == "bf16"
    ]
