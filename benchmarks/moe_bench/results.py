# SPDX-License-Identifier: Apache-2.0
"""What a run measured: the rows, their table, JSON and plot."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from tabulate import tabulate

from flashinfer.sm12x_gpu_probe.timing import Sample


@dataclasses.dataclass
class Entry:
    """One implementation on one batch.

    Attributes
    ----------
    sample : Sample, optional
        ``None`` where it did not run.
    used : float, optional
        Ours: the largest share of its error bound that an element used; a peer: relative error over its tolerance.
        Above 1 the result disagrees with the reference.
    note : str
        Why it did not run.
    tactics : tuple of str, optional
        Ours: FC1's and FC2's, by name.
    forced : dict
        Ours: microseconds of other tactics by their name.
    """

    sample: Sample | None = None
    used: float | None = None
    note: str = ""
    tactics: tuple[str, str] | None = None
    forced: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def disagrees(self) -> bool:
        return self.used is not None and not self.used <= 1.0  # NaN disagrees too


@dataclasses.dataclass
class Row:
    """One batch: a model and a number of tokens."""

    model: str
    tokens: int
    experts: int
    megabytes: float
    read: Sample
    ours: dict[str, Entry]
    peers: dict[str, Entry]

    def ratio(self, entry: Entry) -> float | None:
        """How many times *read* an implementation takes."""
        return None if entry.sample is None else entry.sample.median / self.read.median

    @property
    def ahead(self) -> float | None:
        """The fastest peer's time over the slowest of our modes', where all agree with the reference."""
        peers = [e.sample.median for e in self.peers.values() if e.sample is not None and not e.disagrees]
        ours = [e.sample.median for e in self.ours.values() if e.sample is not None and not e.disagrees]
        return min(peers) / max(ours) if peers and ours else None


def cell(row: Row, entry: Entry | None) -> str:
    """An implementation in the table: microseconds and times *read*."""
    if entry is None:
        return "-"
    if entry.sample is None:
        return "failed" if entry.note else "-"
    text = f"{entry.sample.median:,.1f} ({row.ratio(entry):.2f})"
    return f"{text} DISAGREES" if entry.disagrees else text


def as_table(rows: list[Row]) -> str:
    """For people: one line a batch, implementations side by side."""
    modes = list(dict.fromkeys(name for row in rows for name in row.ours))
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    forced = list(dict.fromkeys(name for row in rows for entry in row.ours.values() for name in entry.forced))
    headers = ["model", "tokens", "experts", "MB", "read us", *modes, *peers]
    headers += ["ahead"] if peers else []
    headers += ["tactics", *forced]
    body = []
    for row in rows:
        line = [row.model, row.tokens, row.experts, f"{row.megabytes:,.0f}", f"{row.read.median:,.1f}"]
        line += [cell(row, row.ours.get(name)) for name in modes]
        line += [cell(row, row.peers.get(name)) for name in peers]
        if peers:
            line.append("-" if row.ahead is None else f"{row.ahead:.2f}")
        tactics = [row.ours[name].tactics for name in modes if name in row.ours]
        line.append(" ".join("/".join(dict.fromkeys(pair)) for pair in tactics if pair is not None) or "-")
        for name in forced:
            times = [entry.forced[name] for entry in row.ours.values() if name in entry.forced]
            line.append(" ".join(f"{time:,.1f}" for time in times) or "-")
        body.append(line)
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))


LEGEND = (
    "microseconds from expert ids to output, median of CUDA-graph replays with a cold L2; in brackets times `read`, the "
    "plain streaming read of the touched experts' weights and scales; ahead: the fastest peer over our slowest mode"
)


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Layer times over tokens with the floor drawn in: median, and the band from the fastest to the slowest replay."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row.model for row in rows))
    figure, panels = plt.subplots(1, len(models), figsize=(7 * len(models), 5), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        of_model = [row for row in rows if row.model == model]
        for kind, marker in (("ours", "o-"), ("peers", "x:")):
            for name in dict.fromkeys(name for row in of_model for name in getattr(row, kind)):
                line = [(row.tokens, getattr(row, kind).get(name)) for row in of_model]
                _draw(panel, [(n, e.sample) for n, e in line if e and e.sample and not e.disagrees], marker, name)
        _draw(panel, [(row.tokens, row.read) for row in of_model], "k--", "streaming read (floor)")
        panel.set(xlabel="tokens", ylabel="microseconds", title=model, yscale="log")
        panel.set_xscale("log", base=2)
        panel.grid(True, which="both", alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _draw(panel: Any, points: list[tuple[int, Sample]], style: str, label: str) -> None:
    if not points:
        return
    tokens = [n for n, _ in points]
    (line,) = panel.plot(tokens, [sample.median for _, sample in points], style, label=label)
    lowest, highest = [sample.fastest for _, sample in points], [sample.slowest for _, sample in points]
    panel.fill_between(tokens, lowest, highest, alpha=0.15, color=line.get_color())


def _entry(fields: dict[str, Any]) -> Entry:
    sample, tactics = fields["sample"], fields["tactics"]
    return Entry(
        **{
            **fields,
            "sample": None if sample is None else Sample(**sample),
            "tactics": None if tactics is None else (tactics[0], tactics[1]),
        }
    )


def load(path: Path) -> tuple[dict[str, str], list[Row]]:
    """An earlier run's JSON."""
    report = json.loads(path.read_text())
    rows = []
    for fields in report["rows"]:
        entries = {kind: {name: _entry(entry) for name, entry in fields[kind].items()} for kind in ("ours", "peers")}
        rows.append(Row(**{**fields, **entries, "read": Sample(**fields["read"])}))
    return report["machine"], rows


def publish(about: dict[str, str], rows: list[Row], folder: Path) -> None:
    """Prints the table, writes the JSON and, where matplotlib is installed, the plot."""
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"\n{as_table(rows)}\n\n{LEGEND}")
    for row in rows:
        for name, entry in (row.ours | row.peers).items():
            if entry.note:
                print(f"{row.model}, {row.tokens} tokens, {name}: {entry.note}")
    folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": about, "rows": [dataclasses.asdict(row) for row in rows]}
    (folder / "bench.json").write_text(json.dumps(report, indent=1))
    print(f"wrote {folder / 'bench.json'}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    plot(rows, folder / "bench.png", f"MXFP4 MoE layer, {about['gpu']}, {about['date']}")
    print(f"wrote {folder / 'bench.png'}")
