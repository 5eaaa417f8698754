# SPDX-License-Identifier: Apache-2.0
"""Tables of losses beside predicted tokens/s, and the picture with its frontier."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from timing import github
from token_bench import picture
from token_bench.predict import rates, span_and_middle

from flashinfer_sm12x.quantize.choice import GROUPS, Choice
from flashinfer_sm12x.quantize.measure import Bootstrap, Estimate, Scores

from .choices import LLAMA_CPP_NAME, bits, predicted, published

PERCENTILE = 0.99


@dataclasses.dataclass(frozen=True)
class Result:
    """A choice: its loss on the model that was measured, and gpt-oss-120b's bytes and tokens/s with it.

    ``speed`` is slow, middle and fast; a published figure is all three.
    """

    choice: Choice
    kl: Estimate
    tail: Estimate
    same: Estimate
    perplexity: float
    bits: float
    gigabytes: float
    speed: tuple[float, float, float]

    @property
    def published(self) -> bool:
        """Whether the speed is llama.cpp's, measured by others."""
        return self.choice.is_llama_cpp


def result(choice: Choice, scores: Scores, bootstrap: Bootstrap) -> Result:
    step = predicted(choice)
    speed = (published().value,) * 3 if choice.is_llama_cpp else rates(step)
    return Result(
        choice=choice,
        kl=bootstrap.mean(scores.kl),
        tail=bootstrap.quantile(scores.kl, PERCENTILE),
        same=bootstrap.mean(scores.same),
        perplexity=math.exp(float(scores.nll.double().mean())),
        bits=bits(choice),
        gigabytes=step.bytes / 1e9,
        speed=(speed[0], speed[1], speed[2]),
    )


def frontier(results: Sequence[Result]) -> list[Result]:
    """Predicted choices that none beats: whoever is faster in the middle loses more. Slowest first."""
    best: list[Result] = []
    for each in sorted((r for r in results if not r.published), key=lambda r: (-r.speed[1], r.kl.value)):
        if not best or each.kl.value < best[-1].kl.value:
            best.append(each)
    return best[::-1]


def number(value: float) -> str:
    """Three digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def interval(estimate: Estimate) -> str:
    if estimate.low == estimate.high == estimate.value:
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def table(results: Sequence[Result], name: str, marked: Sequence[Result] = ()) -> str:
    """One line a choice, least loss first; ``marked`` are bold."""
    headers = ["QKV, O / LM head", "rounded beside", "bits", f"KL, {name}", "99th percentile", "same first choice"]
    headers += ["perplexity", "GB of a 120b token", "tokens/s, 120b, GB10"]
    body = []
    for each in sorted(results, key=lambda r: (r.kl.value, r.speed[1])):
        weights = f"{LLAMA_CPP_NAME}, {each.choice.weights}" if each.published else each.choice.weights
        body.append(
            [
                f"**{weights}**" if each in marked else weights,
                each.choice.modes,
                f"{each.bits:.2f}",
                interval(each.kl),
                interval(each.tail),
                f"{each.same.value:.1%}",
                f"{each.perplexity:.2f}",
                f"{each.gigabytes:.2f}",
                f"{each.speed[1]:.1f}, published" if each.published else span_and_middle(*each.speed),
            ]
        )
    return github(body, headers)


def masked_table(scores: Mapping[Choice, Scores], bootstrap: Bootstrap, name: str) -> str:
    """One line a choice that was compared under masks: KL and first choice, without a mask and under each."""
    rows = {choice: {"no mask": (each.kl, each.same), **each.masked} for choice, each in scores.items() if each.masked}
    names = list(dict.fromkeys(mask for found in rows.values() for mask in found))
    body = []
    for choice, found in rows.items():
        cells = ([interval(bootstrap.mean(kl)), f"{same.float().mean():.2%}"] for kl, same in found.values())
        body.append([choice.weights, *itertools.chain(*cells)])
    heads = (head for mask in names for head in (f"KL, {name}, {mask}", "same first choice"))
    return github(body, ["QKV, O / LM head", *heads])


def drafts_table(scores: Mapping[Choice, Scores], bootstrap: Bootstrap) -> str:
    """One line a number of rows that a draft's head rescores: how often its first choice is the bf16 head's."""
    rows: dict[str, dict[str, str]] = {}
    for choice, each in scores.items():
        column = f"same first choice{', by sm12x-quantize' if choice.folder else ', rounded'}"
        same = bootstrap.mean(each.same)
        cell = f"{same.value:.2%} [{same.low:.2%}, {same.high:.2%}]"
        rows.setdefault(f"{choice.rescored} of each of {GROUPS}", {})[column] = cell
    columns = list(dict.fromkeys(column for found in rows.values() for column in found))
    return github([[name, *(found[column] for column in columns)] for name, found in rows.items()], ["rows", *columns])


def draw(results: Sequence[Result], name: str, path: Path) -> Any:
    """Loss against speed, with the frontier; writes ``path`` and returns matplotlib's figure.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    plt = picture.pyplot()
    figure, axes = plt.subplots(figsize=(9, 6))
    exact = [r for r in results if r.kl.value <= 0]
    lossy = [r for r in results if r.kl.value > 0]
    for each in lossy:
        slow, middle, fast = each.speed
        below, above = max(each.kl.value - each.kl.low, 0.0), max(each.kl.high - each.kl.value, 0.0)
        style: dict[str, Any] = {"color": "C3", "marker": "*", "markersize": 14} if each.published else {"marker": "o"}
        axes.errorbar(
            middle,
            each.kl.value,
            xerr=None if each.published else [[middle - slow], [fast - middle]],
            yerr=[[below], [above]],
            **{"color": "C0", "markersize": 4, "elinewidth": 0.5, "alpha": 0.9} | style,
        )
        text = f"{LLAMA_CPP_NAME}, {each.choice.weights}, published" if each.published else each.choice.weights
        axes.annotate(text, (middle, each.kl.value), xytext=(5, 4), textcoords="offset points", fontsize=7)
    best = frontier(lossy)
    axes.plot([r.speed[1] for r in best], [r.kl.value for r in best], color="0.3", linewidth=1.2, label="frontier")
    for each in exact:
        axes.axvline(each.speed[1], color="0.6", linestyle=":", linewidth=1)
        axes.annotate(
            f"{each.choice.weights}: no loss",
            (each.speed[1], 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set_yscale("log")
    axes.set(
        xlabel="tokens/s of gpt-oss-120b on a GB10, one stream, context 1,024: predicted, but for llama.cpp's",
        ylabel=f"KL of the next token, {name} (not gpt-oss)",
        title="Loss against speed, by format of QKV and O / LM head",
    )
    axes.legend(loc="upper left", fontsize=8)
    return picture.save(figure, path)
