# SPDX-License-Identifier: Apache-2.0
"""Tables of predicted steps (:mod:`perfmodel.step`), and which steps they show."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from emulate import CONTEXTS
from perfmodel.drafts import DRAFTS, SHORT_HEAD, draft_us
from perfmodel.gb10 import MIDDLE
from perfmodel.routing import PROFILE, WINDOW
from perfmodel.step import (
    DENSE_FORMATS,
    KV_BYTES,
    LAYER_MODEL,
    MATRICES,
    TOKENS_BESIDE,
    Given,
    Predicted,
    Step,
    formats_of,
    predict,
)
from timing import github

from flashinfer.sm12x.device_class import GB10
from flashinfer_sm12x.variables import PRESETS

from .results import Measured

SHOWN_PRESETS = (
    "spark-int8",
    "spark",
    "spark-fast",
    "spark-mxfp4",
)  # spark-mxfp8 has spark-int8's bytes, and more loss
PRESET_FORMATS = {"bf16": formats_of("bf16")} | {
    name: dict(zip(MATRICES, map(PRESETS[name].__getitem__, ("qkv", "o", "lm_head")), strict=True))
    for name in SHOWN_PRESETS
}
"""Formats of QKV, O and LM head with each of the plugin's presets, and without one (bf16)."""


def of_measured(measured: Measured) -> dict[str, tuple[float, float]] | None:
    """Predicted times of a measured step of this fork, by part and as "all"; None if the step is not modelled."""
    if not measured.stack.startswith("fork"):
        return None
    try:
        predicted = predict(measured.model, measured.step)
    except ValueError:
        return None
    return {row.part: (row.fast, row.slow) for row in predicted.rows} | {"all": (predicted.fast, predicted.slow)}


def span(fast: float, slow: float, digits: int = 1) -> str:
    return f"{fast:,.{digits}f} - {slow:,.{digits}f}"


def tokens_per_second(predicted: Predicted) -> str:
    """Slow to fast and, in brackets, at the middle of the times."""
    return span_and_middle(*rates(predicted))


def rates(predicted: Predicted) -> tuple[float, float, float]:
    """Tokens/s: slow, at the middle of the times, fast."""
    return predicted.rate(predicted.slow), predicted.middle_rate, predicted.rate(predicted.fast)


def span_and_middle(slow: float, middle: float, fast: float) -> str:
    digits = 0 if middle >= 1000 else 1
    return f"{span(slow, fast, digits)} ({middle:,.{digits}f})"


def by_part(predicted: Sequence[Predicted], names: Sequence[str]) -> str:
    """Parts of several predictions of the same step, side by side: microseconds of all calls. A step that lacks a part
    has a dash there."""
    headers = ["part", "calls"]
    for name in names:
        headers += [f"{name}: MB", "floor us", "predicted us"]
    in_order = sorted(predicted, key=lambda each: -len(each.rows))  # what few steps have stands among the others
    body = []
    for part in dict.fromkeys(row.part for each in in_order for row in each.rows):
        rows = [next((row for row in each.rows if row.part == part), None) for each in predicted]
        line = [part, _counts([row.calls for row in rows if row is not None])]
        for row in rows:
            if row is None:
                line += ["-"] * 3
                continue
            floor = 0.0 if part == "all-reduce" else row.bytes / MIDDLE.dram_gb_per_second / 1e3
            line += [f"{row.bytes / 1e6:,.1f}", f"{floor:,.0f}", span(row.fast, row.slow, 0)]
        body.append(line)
    line = ["all", _counts([sum(row.calls for row in each.rows) for each in predicted])]
    for each in predicted:
        line += [f"{each.bytes / 1e6:,.1f}", f"{each.floor:,.0f}", span(each.fast, each.slow, 0)]
    return github([*body, line], headers)


def _counts(calls: Sequence[int]) -> str:
    """Least and most calls."""
    least, most = min(calls), max(calls)
    return str(least) if least == most else f"{least} - {most}"


def by_context(model: str, ranks: int, **fused: bool) -> str:
    """Tokens/s of one stream, slow and fast end and, in brackets, at the middle of the times: contexts down, presets
    across."""
    body = []
    for context, kv in itertools.product(CONTEXTS, KV_BYTES):
        steps = [Step(1, context, 1, kv, formats, **fused) for formats in PRESET_FORMATS.values()]
        body.append([f"{context:,}", kv, *(tokens_per_second(predict(model, step, ranks)) for step in steps)])
    return github(body, ["context", "KV", *PRESET_FORMATS])


def overview(predicted: Sequence[tuple[str, Predicted]]) -> str:
    """One line a step, with its routing."""
    body = []
    for routing, each in predicted:
        step = each.step
        what = f"prefill {step.new:,}" if step.prefill else f"{step.context:,}"
        body.append(
            [
                str(each.size.ranks),
                " / ".join(dict.fromkeys((step.formats["QKV"], step.formats["LM head"]))),
                step.dense_tokens,
                step.kv,
                what,
                str(step.sequences),
                routing,
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
        "routing",
        "GB",
        "floor ms",
        "predicted ms",
        "tokens/s",
    ]
    headers += ["middle", "floor / predicted"]
    return github(body, headers)


def side_by_side(before: Predicted, after: Predicted) -> str:
    """Parts as predicted, and with what a report measured in place of ranges."""
    body = [
        [a.part, a.by, span(b.fast, b.slow, 0), f"{a.fast:,.0f}" if a.fast == a.slow else span(a.fast, a.slow, 0)]
        for b, a in zip(before.rows, after.rows, strict=True)
    ]
    steps = (before, after)
    body.append(["all, us", "", *(span(each.fast, each.slow, 0) for each in steps)])
    body.append(["tokens/s", "", *(span(each.rate(each.slow), each.rate(each.fast)) for each in steps)])
    headers = ["part", "by", "predicted us", "with the report us"]
    return github(body, headers)


def headline(ranks: int, model: str = LAYER_MODEL, given: Given | None = None, **fused: bool) -> list[Predicted]:
    """One stream at a context of 1,024 with each of :data:`PRESET_FORMATS`; ``fused``: of :class:`Step`."""
    steps = [Step(1, 1024, formats=formats, **fused) for formats in PRESET_FORMATS.values()]
    return [predict(model, step, ranks, given) for step in steps]


def batches(model: str, **fused: bool) -> list[tuple[str, Predicted]]:
    """Several streams, with uniform routing and by gpt-oss's profile, and prompts, on one Spark; prompts are vLLM's own
    forward, with nothing fused.

    Leaves out prompts with bf16 tokens that cuBLAS multiplies by dequantized weights; these are not modelled.
    """
    streams = [Step(n, 1024, **fused) for n in (4, 16, 64)]
    prompts = [Step(1, tokens, tokens) for tokens in (512, 2048, 8192)]
    wanted = [
        dataclasses.replace(step, formats=formats_of(weights), dense_tokens=tokens)
        for step in (*streams, *prompts)
        for weights in DENSE_FORMATS
        for tokens in (TOKENS_BESIDE[weights] if step.prefill else ("bf16",))
    ]
    return [
        (name, predict(model, step, given=given))
        for step in wanted
        if step.tokens < GB10.cublas_tokens or step.dense_tokens != "bf16" or step.formats["QKV"] == "bf16"
        for name, given in ROUTINGS.items()
    ]


ROUTINGS = {"uniform": Given(), "gpt-oss": Given(routing=PROFILE)}


def streams_by_preset(model: str, **fused: bool) -> str:
    """Tokens/s of several streams: streams and routing down, presets across."""
    body = []
    for count, (name, given) in itertools.product((4, 16, 64), ROUTINGS.items()):
        steps = [Step(count, 1024, formats=formats, **fused) for formats in PRESET_FORMATS.values()]
        body.append([str(count), name, *(tokens_per_second(predict(model, step, given=given)) for step in steps)])
    return github(body, ["streams", "routing", *PRESET_FORMATS])


DRAFT_WAYS = {"bf16": ("bf16", 0), "MXFP4": ("mxfp4", 0), f"MXFP4, head of {SHORT_HEAD:,} rows": ("mxfp4", SHORT_HEAD)}
"""Formats of a draft's matrices and rows of its LM head; bf16 is what vLLM leaves it in."""


def yields(drafted: int, accepted: float) -> float:
    """Tokens of a pass, each drafted one right with a probability of ``accepted`` if those before it are."""
    return sum(accepted**position for position in range(drafted + 1))


def pays_from(drafted: int, passes: float) -> float:
    """The acceptance from which a pass that takes ``passes`` plain ones is no slower; above 1: never."""
    if drafted + 1 < passes:
        return float("inf")
    low, high = 0.0, 1.0
    for _ in range(40):
        half = (low + high) / 2
        low, high = (half, high) if yields(drafted, half) < passes else (low, half)
    return high


def drafts(model: str, draft: str, drafted: Sequence[int], accepted: Sequence[float]) -> str:
    """One stream on one Spark, context 1,024: a pass that verifies a window and drafts the next one's tokens.

    Times are ranges; the acceptance that pays and tokens/s are by the middles.
    """
    body = []
    for (preset, formats), way in itertools.product(PRESET_FORMATS.items(), DRAFT_WAYS):
        plain = 0.0
        for count in drafted:
            step = Step(1, 1024, 1 + count, formats=formats, verified=True, fused_router=True, fused_attention=True)
            done = predict(model, step, given=Given(routing=WINDOW))
            draft_ends = draft_us(DRAFTS[draft], *DRAFT_WAYS[way])
            fast, slow = (end + count * each for end, each in zip((done.fast, done.slow), draft_ends, strict=True))
            middle = (fast + slow) / 2
            plain = plain or middle_of_plain(model, formats)
            wanted = pays_from(count, middle / plain)
            body.append(
                [
                    preset,
                    way if count else "",
                    str(count),
                    span(fast / 1e3, slow / 1e3),
                    f"{middle / plain:.2f}",
                    "" if not count else "never" if wanted > 1 else f"{wanted:.0%}",
                    *(f"{1e6 * yields(count, each) / middle:.1f}" for each in accepted),
                ]
            )
    once = [line for position, line in enumerate(body) if line[1] or line not in body[:position]]
    heads = ["preset", "draft", "drafted", "pass, ms", "plain passes", "pays from"]
    return github(once, [*heads, *(f"tokens/s at {each:.0%}" for each in accepted)])


def middle_of_plain(model: str, formats: Mapping[str, str]) -> float:
    """Microseconds of a step without a draft, the middle."""
    done = predict(model, Step(1, 1024, formats=formats, fused_router=True, fused_attention=True))
    return (done.fast + done.slow) / 2
