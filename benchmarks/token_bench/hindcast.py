# SPDX-License-Identifier: Apache-2.0
"""What others measured, predicted by the model that predicts this fork: predicted beside published.

``published.csv`` has the figures. ``row``: a figure to compare with. ``held``: the same, and no constant's cause was
taken from it. ``later``: the same, added and predicted once when the model's causes were final. ``counted``: the same,
added before experts of others were counted, and predicted once before and once behind that. ``input``: the model takes
it, so that it is no row. ``autumn``: the same, added on 2026-11-28 from what others had measured since August.
``routing`` and ``taken``: figures of these from which the model takes its routing or a constant, so that they are shown
and not counted. ``told``: a figure whose kernels were not counted in its sizes, so that nothing is predicted.
``hindcast_frozen.csv`` has what the model of 2026-11-24 predicted before any comparison, ``hindcast_bytes.csv`` what it
did of all rows before that counting, ``hindcast_counted.csv`` what it did afterwards, ``hindcast_autumn.csv`` what the
model of 2026-11-28 predicted of the autumn's rows before any comparison.

Experts of vLLM are counted on the virtual SM121; other kernels of others are their bytes, their FLOPs and their
launches. No prediction reads a value of ``published.csv``.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from perfmodel.devices import DEVICES, GB10, Device
from perfmodel.drafts import EAGLE3, SHORT_HEAD, draft_us
from perfmodel.routing import PROFILE, WINDOW, Routing
from perfmodel.step import (
    EAGER_US,
    ENGINE_US,
    LAYER_MODEL,
    REACHED,
    Given,
    Predicted,
    Step,
    formats_of,
    predict,
    touched,
)
from timing import github

from flashinfer.sm12x.models import MODELS

from . import picture
from .predict import PRESET_FORMATS, rates, span_and_middle, tokens_per_second

HERE = Path(__file__).parent
PUBLISHED, FROZEN, BY_BYTES, COUNTED, AUTUMN = (
    HERE / name
    for name in (
        "published.csv",
        "hindcast_frozen.csv",
        "hindcast_bytes.csv",
        "hindcast_counted.csv",
        "hindcast_autumn.csv",
    )
)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of ``published.csv``; the batch's fields are zero in an input.

    ``experts``: how many distinct ones a timed layer was given; 0: by routing. ``yields``: tokens that a step of
    ``new`` ones gave, where all but one were drafted; 0: all of them.
    """

    role: str
    name: str
    source: str
    date: str
    gpu: str
    gpus: int
    engine: str
    model: str
    dense: str
    kv: str
    sequences: int
    context: int
    new: int
    experts: int
    yields: float
    value: float
    unit: str
    configuration: str


def figures() -> list[Figure]:
    """All lines, inputs included."""
    numbers = ("gpus", "sequences", "context", "new", "experts")
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return [
            Figure(
                **{
                    **line,
                    **{name: float(line[name] or 0) for name in ("value", "yields")},
                    **{name: int(line[name] or 0) for name in numbers},
                }
            )
            for line in csv.DictReader(file)
        ]


def rows() -> list[Figure]:
    """The published figures to compare with: all but the model's inputs and what is not predicted."""
    return [figure for figure in figures() if figure.role not in ("input", "told")]


def loaded(name: str) -> Device:
    """A GPU whose block-scaled MMAs run at the rate that others reached; of cards it is part of what they are."""
    device = DEVICES[name]
    return dataclasses.replace(device, sustained=REACHED["experts"]) if device == GB10 else device


SERVERS = {"vLLM": ENGINE_US, "vLLM-eager": EAGER_US}
ALONE = {"CUTLASS": "MoE", "cuBLAS router": "router", "Marlin LM head": "LM head"}
"""Parts of a step that were timed alone, by the engine of their rows."""


def predicted(row: Figure) -> Predicted:
    """A row's step, with routing as published and, of a server, its engine; experts by counts where they were counted.

    Of a part that was timed alone a whole step that has it.
    """
    server, _, experts = row.engine.partition(" ")
    if row.engine in ALONE:
        experts = "CUTLASS"
    verified = row.yields > 0
    step = Step(
        row.sequences,
        row.context or 1,
        row.new,
        row.kv or "bf16",
        formats_of(row.dense or "bf16"),
        fork=False,
        experts=experts,
        verified=verified,
    )
    engine = SERVERS.get(server, (0.0, 0.0))
    routing = WINDOW if verified else PROFILE
    given = Given(loaded(row.gpu), routing=routing, engine_us=engine, experts=row.experts, nccl=row.gpus > 1)
    return predict(row.model, step, row.gpus, given)


def slow_middle_fast(row: Figure) -> tuple[float, float, float]:
    """A row's prediction in its unit: tokens/s, or microseconds of a part that was timed alone."""
    step = predicted(row)
    if row.unit == "us":
        part = next(each for each in step.rows if each.part == ALONE[row.engine])
        fast, slow = part.fast / part.calls, part.slow / part.calls
        return slow, (fast + slow) / 2, fast
    if not row.yields:
        return rates(step)
    head = SHORT_HEAD if row.engine.endswith("0.2") else 0
    drafted = [(row.new - 1) * end for end in draft_us(EAGLE3, row.dense, head)]
    fast, slow = (end + draft for end, draft in zip((step.fast, step.slow), drafted, strict=True))
    slow, middle, fast = (1e6 * row.sequences * row.yields / end for end in (slow, (fast + slow) / 2, fast))
    return slow, middle, fast


def inside(row: Figure, slow: float, fast: float) -> bool:
    """Whether a figure lies between the ends of its prediction."""
    return min(slow, fast) <= row.value <= max(slow, fast)


def earlier(path: Path) -> dict[str, tuple[float, float, float]]:
    """Predictions by row in its unit, slow, middle and fast: :data:`FROZEN`, :data:`BY_BYTES` or :data:`AUTUMN`."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            line["name"]: (float(line["slow"]), float(line["middle"]), float(line["fast"]))
            for line in csv.DictReader(file)
        }


CALIBRATING = ("routing", "taken")
"""Roles of rows from which a constant was taken: they are shown, and not counted."""
FAR = 0.15


@dataclasses.dataclass(frozen=True)
class Compared:
    """A row beside its prediction in its unit."""

    row: Figure
    slow: float
    middle: float
    fast: float

    @property
    def inside(self) -> bool:
        return inside(self.row, self.slow, self.fast)

    @property
    def off(self) -> float:
        """The middle over the published figure, less 1."""
        return self.middle / self.row.value - 1

    @property
    def span(self) -> str:
        """Least to most and, in brackets, the middle."""
        least, most = sorted((self.slow, self.fast))
        return span_and_middle(least, self.middle, most)

    @property
    def width(self) -> float:
        """The wider end over the narrower one."""
        return max(self.slow, self.fast) / min(self.slow, self.fast)


def compared() -> list[Compared]:
    """All rows, predicted today."""
    return [Compared(row, *slow_middle_fast(row)) for row in rows()]


def frozen_again(them: Sequence[Compared]) -> list[Compared]:
    """The same rows as they were predicted before any comparison: earlier ones when those were final, the autumn's
    frozen."""
    kept = earlier(COUNTED) | earlier(AUTUMN)
    return [Compared(each.row, *kept[each.row.name]) for each in them]


def share(them: Sequence[Compared], which: str) -> str:
    """How many of the counted rows are inside, and how many middles are far off."""
    counted = [each for each in them if each.row.role not in CALIBRATING]
    far = sum(abs(each.off) > FAR for each in counted)
    fitting = sum(each.inside for each in counted)
    return (
        f"{which}: {fitting} of {len(counted)} inside ({fitting / len(counted):.0%}), "
        f"middles off by more than {FAR:.0%}: {far} ({far / len(counted):.0%})"
    )


def widest(them: Sequence[Compared], which: str, most: float) -> str:
    """The widest range, and how many exceed ``most``."""
    width = max(each.width for each in them)
    wide = sum(each.width > most for each in them)
    return f"ranges of {which}: {width:.2f} at most, {wide} of {len(them)} wider than {most:g}"


def summary(them: Sequence[Compared]) -> str:
    """The aims' lines; the last one is of all rows."""
    spark = [each for each in them if each.row.gpu == "GB10" and each.row.unit == "tokens/s"]
    decode = [each for each in spark if each.row.new == 1 or each.row.yields]
    autumn = [each for each in them if each.row.role == "autumn"]
    return "\n".join(
        [
            widest([each for each in decode if each.row.sequences == 1], "one stream on GB10s", 1.3),
            widest([each for each in decode if each.row.sequences > 1], "several streams on GB10s", 1.5),
            share(frozen_again(them), "as predicted before any comparison"),
            share(frozen_again(autumn), "the autumn's rows, as frozen"),
            share(autumn, "the autumn's rows, today"),
            share(them, "all rows, today"),
        ]
    )


def layer_line() -> str:
    """The layer by distinct experts: a line through the published times, and through the predicted ones."""
    layers = [
        each for each in compared() if each.row.name.startswith("gptoss-spark layer") and "experts" in each.row.name
    ]
    system = torch.tensor([[1.0, each.row.experts] for each in layers], dtype=torch.float64)

    def line(times: Sequence[float]) -> list[float]:
        solved = torch.linalg.lstsq(system, torch.tensor(times, dtype=torch.float64).unsqueeze(1)).solution
        return [float(each) for each in solved.flatten()]

    times = {
        "published": [each.row.value for each in layers],
        "fast": [each.fast for each in layers],
        "middle": [each.middle for each in layers],
        "slow": [each.slow for each in layers],
    }
    body = [[name, *(f"{number:.1f}" for number in line(of_each))] for name, of_each in times.items()]
    return github(body, ["layer of CUTLASS experts", "us beside experts", "us an expert"])


def table(them: Sequence[Compared]) -> str:
    """Each row, predicted beside published; the last lines are the aims'."""
    before, body = [earlier(path) for path in (FROZEN, BY_BYTES, AUTUMN)], []
    for each in them:
        row = each.row
        body.append(
            [
                row.name,
                row.role,
                *(span_and_middle(*kept[row.name]) if row.name in kept else "-" for kept in before),
                each.span,
                f"{row.value:,g}",
                f"{each.off:+.0%}",
                "yes" if each.inside else "no",
            ]
        )
    headers = [
        "published of others",
        "",
        "frozen",
        "by bytes",
        "frozen in autumn",
        "predicted, tokens/s or us",
        "published",
        "middle off by",
        "inside",
    ]
    return f"{github(body, headers)}\n\n{summary(them)}"


def inputs() -> str:
    """Published figures that the model takes."""
    body = [
        [each.name, f"{each.value:g} {each.unit}", each.gpu, each.source] for each in figures() if each.role == "input"
    ]
    return github(body, ["input of the model", "value", "GPU", "source"])


# --- this fork, by the same model: not measured on any of these GPUs --------------------------------------------------


def own(model: str, step: Step, device: str = "GB10", ranks: int = 1) -> Predicted:
    """This fork in a server: routing as published, the engine, and of a GB10 the MMA rates that others reached."""
    return predict(model, step, ranks, Given(loaded(device), routing=PROFILE, engine_us=ENGINE_US))


FUSED = {"fused_router": True, "fused_attention": True}
STREAMS = (1, 2, 4, 8, 16, 32, 64)
PROMPT = 2048


def own_steps() -> dict[str, Predicted]:
    """One stream with each preset, streams, and a prompt: gpt-oss-120b on one GB10."""
    found = {
        f"1 stream, {preset}": own(LAYER_MODEL, Step(1, 1024, formats=formats, **FUSED))
        for preset, formats in PRESET_FORMATS.items()
    }
    for count in (4, 16, 64):
        step = Step(count, 1024, formats=PRESET_FORMATS["spark"], **FUSED)
        found[f"{count} streams, spark"] = own(LAYER_MODEL, step)
    prompt = Step(1, PROMPT, PROMPT, formats=formats_of("mxfp4"), dense_tokens="mxfp8", fused_router=True)
    return found | {f"prompt of {PROMPT:,}, mxfp4": own(LAYER_MODEL, prompt)}


def draw(path: Path) -> None:
    """Predicted against published, with the diagonal; this fork's predictions lie on it, since nobody measured them.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    plt = picture.pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 6))
    limits = (25, 12_000)
    axes.plot(limits, limits, color="0.6", linewidth=1)
    groups = [
        ("row", "others, published", "C0"),
        ("held", "held back", "C1"),
        ("later", "added later", "C2"),
        ("counted", "added before counting", "C3"),
        ("autumn", "the autumn's", "C4"),
        ("routing", "gives the routing", "C5"),
        ("taken", "gives a constant", "C6"),
    ]
    shown = [each for each in compared() if each.row.unit == "tokens/s"]
    for role, label, color in groups:
        these = [(each.row, (each.slow, each.middle, each.fast)) for each in shown if each.row.role == role]
        ends = [[now[1] - now[0] for _, now in these], [now[2] - now[1] for _, now in these]]
        axes.errorbar(
            [row.value for row, _ in these], [now[1] for _, now in these], yerr=ends, fmt="o", markersize=4, capsize=2,
            color=color, linewidth=1, label=label,
        )  # fmt: skip
    mine = [rates(step) for step in own_steps().values()]
    middles = [middle for _, middle, _ in mine]
    spread = [[middle - slow for slow, middle, _ in mine], [fast - middle for _, middle, fast in mine]]
    axes.errorbar(
        middles, middles, yerr=spread, fmt="D", markersize=5, capsize=2, color="0.35", markerfacecolor="white",
        linewidth=1,
        label="this fork on a GB10: not measured",
    )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel="published tokens/s", ylabel="predicted tokens/s",
        title="The model against published figures",
    )  # fmt: skip
    axes.legend(fontsize=8)
    picture.save(figure, path)


# --- routing in practice ----------------------------------------------------------------------------------------------


def streams(profiles: Sequence[float]) -> str:
    """Tokens/s of several streams on one GB10, without an engine, by :attr:`.Routing.spread`; 0 is uniform routing."""
    body = []
    for count in STREAMS:
        step = Step(count, 1024, formats=PRESET_FORMATS["spark"], **FUSED)
        line = [str(count)]
        for spread in profiles:
            routing = Routing(spread=spread)
            line.append(f"{touched(MODELS[LAYER_MODEL], step, routing):.0f}")
            given = Given(DEVICES["GB10"], routing=(routing, routing))
            line.append(tokens_per_second(predict(LAYER_MODEL, step, given=given)))
        body.append(line)
    headers = ["streams", *(head for spread in profiles for head in (f"spread {spread:g}: experts", "tokens/s"))]
    return github(body, headers)


# --- SM120 cards ------------------------------------------------------------------------------------------------------


def cards() -> str:
    """This fork's layer and token on each SM120 card: a prediction, of a card that holds the model."""
    body = []
    for name, (model, gigabytes) in itertools.product(DEVICES, (("gpt-oss-20b", 14), ("gpt-oss-120b", 66))):
        device = DEVICES[name]
        if name == "GB10" or device.gigabytes <= gigabytes:
            continue
        line = [name, model]
        given = Given(device)
        for tokens in (1, 64, PROMPT):
            new = tokens if tokens == PROMPT else 1
            step = Step(
                tokens // new,
                max(new, 1024),
                new,
                dense_tokens="mxfp8" if new > 1 else "bf16",
                formats=formats_of("mxfp4"),
            )
            layer = next(row for row in predict(model, step, given=given).rows if row.part == "MoE")
            line.append(f"{layer.fast / layer.calls:,.0f} - {layer.slow / layer.calls:,.0f}")
        for dense, count in (("bf16", 1), ("mxfp4", 1), ("mxfp4", 16), ("mxfp4", 64)):
            line.append(tokens_per_second(own(model, Step(count, 1024, formats=formats_of(dense), **FUSED), name)))
        prompt = Step(1, PROMPT, PROMPT, formats=formats_of("mxfp4"), dense_tokens="mxfp8", fused_router=True)
        line.append(tokens_per_second(own(model, prompt, name)))
        body.append(line)
    headers = [
        "card",
        "model",
        "layer, 1 token, us",
        "64",
        f"{PROMPT:,}",
        "1 stream, bf16 dense",
        "mxfp4 dense",
        "16 streams",
        "64 streams",
    ]
    return github(body, [*headers, f"prompt of {PROMPT:,}"])
