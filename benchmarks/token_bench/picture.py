# SPDX-License-Identifier: Apache-2.0
"""Where a token goes: a stacked bar for each step, with its bytes' floor drawn in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfmodel.step import PARTS

from flashinfer_sm12x.files import written_whole

SEGMENTS = (*PARTS, "gaps")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A step: microseconds of each part and of the gaps, and of reading its bytes once (None: unknown).

    ``low`` and ``high`` are a predicted total's range.
    """

    label: str
    parts: Mapping[str, float]
    floor: float | None
    low: float | None = None
    high: float | None = None


def pyplot() -> Any:
    """matplotlib's, for files.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"  # letters as letters: a tenth of the size
    plt.rcParams["svg.hashsalt"] = "token"  # the same picture is the same file
    return plt


def save(figure: Any, path: Path) -> Any:
    """Write a figure, and close it."""
    with written_whole(path) as scratch:
        figure.savefig(scratch, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)
    return figure


def draw(bars: Sequence[Bar], title: str, path: Path) -> Any:
    """Write the picture to ``path``, whose suffix tells the format; returns matplotlib's figure.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    plt = pyplot()
    from matplotlib.patches import Patch

    colors = plt.get_cmap("tab20")
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.42 * len(bars)))
    for row, bar in enumerate(bars):
        left = 0.0
        for index, part in enumerate(SEGMENTS):
            width = bar.parts.get(part, 0.0) / 1e3
            if not width:
                continue
            color = "white" if part == "gaps" else colors(index)
            axes.barh(row, width, left=left, height=0.7, color=color, edgecolor="0.4", linewidth=0.3)
            left += width
        if bar.floor is not None:
            axes.plot([bar.floor / 1e3] * 2, [row - 0.45, row + 0.45], color="black", linewidth=2)
        if bar.low is not None and bar.high is not None:
            ends = [[left - bar.low / 1e3], [bar.high / 1e3 - left]]
            axes.errorbar(left, row, xerr=ends, color="0.3", capsize=3, linewidth=1)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds; black: the bytes' floor", title=title)
    used = [part for part in SEGMENTS if any(bar.parts.get(part) for bar in bars)]
    handles = [Patch(color="white" if part == "gaps" else colors(SEGMENTS.index(part))) for part in used]
    axes.legend(handles, used, fontsize=7, ncols=5, loc="upper center", bbox_to_anchor=(0.4, -0.9 / len(bars) - 0.08))
    return save(figure, path)
