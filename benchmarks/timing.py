# SPDX-License-Identifier: Apache-2.0
"""Code that the benchmarks share: implementations beside their floor, checked before they are timed; tables, JSON and
plot.

The clock is :mod:`flashinfer_sm12x.doctor.probe.timing`: medians of replays of a CUDA graph, the floor a plain
streaming read.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from tabulate import tabulate

import flashinfer
from flashinfer.testing import BoundViolation, check_within_bound
from flashinfer_sm12x.doctor.probe.timing import Sample, time_graph
from flashinfer_sm12x.files import json_file, written_whole
from flashinfer_sm12x.signals import until_interrupted

T = TypeVar("T")
QUANTIZED_ROWS = 16_384


def run(main: Callable[[], int | None]) -> NoReturn:
    """End the process after a benchmark's ``main``, or with a line after Ctrl-C, SIGTERM or SIGHUP."""
    sys.exit(until_interrupted("bench", main, "files that it wrote are whole"))


def machine() -> dict[str, Any]:
    """The machine and the software that the numbers were taken on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "flashinfer": f"{flashinfer.__version__} + {flashinfer.__fork_version__}",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def reason(error: BaseException) -> str:
    """An exception in one line; what it was raised from, where there is something."""
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"


def names(text: str) -> list[str]:
    """The words of an option, which stand with commas between."""
    return [item for item in text.split(",") if item]


def numbers(text: str) -> list[int]:
    """The numbers of an option, which stand with commas between."""
    return [int(item) for item in names(text)]


def allow(parser: argparse.ArgumentParser, arguments: argparse.Namespace, **allowed: Iterable[Any]) -> None:
    """End the run, and say why, where an option has something that is not ``allowed``."""
    for option, known in allowed.items():
        if unknown := set(getattr(arguments, option) or ()) - set(known):
            parser.error(f"--{option.replace('_', '-')}: {sorted(unknown)} are not among {sorted(known)}")


def file(text: str) -> Path:
    """An argument that is a file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return Path(text)


def layer_parser(description: str | None, peers: Iterable[str]) -> argparse.ArgumentParser:
    """The options that benchmarks of layers share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=numbers, help="of the batches; a prediction has fewer by default")
    parser.add_argument(
        "--peers", type=names, help=f"these must be there; default: those of {', '.join(peers)} that are"
    )
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's package, where it is not installed")
    parser.add_argument("--predict", action="store_true", help="measure nothing: the predicted GB10 table")
    parser.add_argument("--render", type=file, help="measure nothing: table and plot of this JSON")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "out", help="folder of the JSON and the plot"
    )
    return parser


def parse_layers(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with the shared ones checked."""
    arguments = parser.parse_args(argv)
    if arguments.tokens and min(arguments.tokens) < 1:
        parser.error(f"--tokens: {min(arguments.tokens)} is less than 1")
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1")
    return arguments


def github(body: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """A table in Markdown."""
    return str(tabulate(body, headers, tablefmt="github", disable_numparse=True))


@dataclasses.dataclass
class Entry:
    """One implementation on one batch.

    Attributes
    ----------
    sample : Sample, optional
        ``None`` if it did not run.
    used : float, optional
        Ours: the largest share of its error bound that an element used; a peer: relative error over its tolerance.
        Above 1 the result disagrees with the reference.
    note : str
        Why it did not run.
    tactics : str
        Ours: FC1's and FC2's, by name.
    forced : dict
        Ours: microseconds of other tactics by their name.
    """

    sample: Sample | None = None
    used: float | None = None
    note: str = ""
    tactics: str = ""
    forced: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def disagrees(self) -> bool:
        return self.used is not None and not self.used <= 1.0  # NaN disagrees too


@dataclasses.dataclass
class Row:
    """One batch: ``what`` holds its leading cells, with "tokens"; ``reads`` its floors.

    If there is one floor, all of ours do the same work.
    """

    what: dict[str, Any]
    reads: dict[str, Sample]
    ours: dict[str, Entry] = dataclasses.field(default_factory=dict)
    peers: dict[str, Entry] = dataclasses.field(default_factory=dict)

    def described(self) -> str:
        return ", ".join(f"{value} tokens" if name == "tokens" else str(value) for name, value in self.what.items())

    def ratio(self, entry: Entry) -> float | None:
        """An implementation's time over the floor; None where there are several floors."""
        if entry.sample is None or len(self.reads) > 1:
            return None
        return entry.sample.median / next(iter(self.reads.values())).median

    @property
    def ahead(self) -> float | None:
        """The fastest peer's time over the slowest of ours, where all agree with the reference."""
        peers = [e.sample.median for e in self.peers.values() if e.sample is not None and not e.disagrees]
        ours = [e.sample.median for e in self.ours.values() if e.sample is not None and not e.disagrees]
        return min(peers) / max(ours) if peers and ours and len(self.reads) == 1 else None


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference."""
    return float((output.double() - reference.double()).norm() / reference.double().norm())


def share_of_bound(output: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest share of its error bound that an element uses; infinite, and says where, beyond it."""
    try:
        return check_within_bound(output, reference, bound, "")
    except BoundViolation as error:
        print(f"a result disagrees with the reference: {error}", file=sys.stderr)
        return float("inf")


def measured(call: Callable[[], Any], used: float | None, repeats: int) -> Entry:
    """The time of ``call``, whose result was compared."""
    return Entry(time_graph(call, repeats), used)


def once(make: Callable[[], T]) -> Callable[[], T]:
    """``make``'s result, or its exception again, however often it is asked for."""
    found: list[T] = []
    failure: list[Exception] = []

    def get() -> T:
        if failure:
            raise failure[0]
        if not found:
            try:
                found.append(make())
            except Exception as error:
                failure.append(error)
                raise
        return found[0]

    return get


def context_error() -> str | None:
    """The CUDA context's error, if the context is lost; else None."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def add_peers(attempts: Iterable[tuple[Row, str, Callable[[], Entry]]]) -> None:
    """Add peers to rows; one that fails is named with the reason, and the others go on.

    It comes after all of ours: a peer that breaks the CUDA context ends it for everybody.
    """
    for row, name, attempt in attempts:
        try:
            row.peers[name] = attempt()
        except Exception as error:
            row.peers[name] = Entry(note=reason(error))
        if (broken := context_error()) is not None:
            print(f"no peer is measured from here on, the CUDA context is lost: {broken}", file=sys.stderr)
            return


def cell(row: Row, entry: Entry | None) -> str:
    """An implementation in the table: microseconds and, where there is one floor, times that."""
    if entry is None or entry.sample is None:
        return "failed" if entry and entry.note else "-"
    ratio = row.ratio(entry)
    text = f"{entry.sample.median:,.1f}" + ("" if ratio is None else f" ({ratio:.2f})")
    return f"{text} DISAGREES" if entry.disagrees else text


def as_table(rows: Sequence[Row]) -> str:
    """A table to read: one line per batch, implementations side by side."""
    ours = list(dict.fromkeys(name for row in rows for name in row.ours))
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    forced = list(dict.fromkeys(name for row in rows for entry in row.ours.values() for name in entry.forced))
    ahead = bool(peers) and len(rows[0].reads) == 1
    tactics = any(entry.tactics for row in rows for entry in row.ours.values())
    headers = [*rows[0].what, *rows[0].reads, *ours, *peers]
    headers += [*(["ahead"] if ahead else []), *(["tactics"] if tactics else []), *forced]
    body = []
    for row in rows:
        line = [f"{value:,.0f}" if isinstance(value, float) else str(value) for value in row.what.values()]
        line += [f"{read.median:,.1f}" for read in row.reads.values()]
        line += [cell(row, row.ours.get(name)) for name in ours]
        line += [cell(row, row.peers.get(name)) for name in peers]
        if ahead:
            line.append("-" if row.ahead is None else f"{row.ahead:.2f}")
        if tactics:
            line.append(" ".join(entry.tactics for entry in row.ours.values() if entry.tactics) or "-")
        for name in forced:
            times = [entry.forced[name] for entry in row.ours.values() if name in entry.forced]
            line.append(" ".join(f"{time:,.1f}" for time in times) or "-")
        body.append(line)
    return github(body, headers)


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Times over tokens with the floors drawn in: median, and the band from the fastest to the slowest replay."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    key = next(iter(rows[0].what))
    groups = list(dict.fromkeys(row.what[key] for row in rows))
    figure, panels = plt.subplots(1, len(groups), figsize=(7 * len(groups), 5), squeeze=False)

    def draw(panel: Any, points: list[tuple[int, Sample]], style: str, label: str) -> None:
        tokens = [n for n, _ in points]
        (line,) = panel.plot(tokens, [sample.median for _, sample in points], style, label=label)
        ends = [[getattr(sample, end) for _, sample in points] for end in ("fastest", "slowest")]
        panel.fill_between(tokens, *ends, alpha=0.15, color=line.get_color())

    for panel, group in zip(panels[0], groups, strict=True):
        of_group = [row for row in rows if row.what[key] == group]
        for kind, marker in (("ours", "o-"), ("peers", "x:")):
            for name in dict.fromkeys(name for row in of_group for name in getattr(row, kind)):
                found = [(row.what["tokens"], getattr(row, kind).get(name)) for row in of_group]
                points = [(n, e.sample) for n, e in found if e and e.sample and not e.disagrees]
                if points:
                    draw(panel, points, marker, name)
        for name in of_group[0].reads:
            draw(panel, [(row.what["tokens"], row.reads[name]) for row in of_group], "k--", f"{name} (floor)")
        panel.set(xlabel="tokens", ylabel="microseconds", title=group, yscale="log")
        panel.set_xscale("log", base=2)
        panel.grid(True, which="both", alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    figure.tight_layout()
    with written_whole(path) as scratch:
        figure.savefig(scratch, dpi=120)


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report; an interrupted write leaves the old file."""
    text = json.dumps(report, indent=1, default=dataclasses.asdict)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def _entry(fields: dict[str, Any]) -> Entry:
    sample = fields["sample"]
    return Entry(**{**fields, "sample": None if sample is None else Sample(**sample)})


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """An earlier run's JSON.

    Raises
    ------
    OSError, ValueError
        It cannot be read, or is no report of this benchmark's; the message names the file.
    """
    report = json_file(path, REPORT)
    rows = []
    with report_of(path):
        for fields in report["rows"]:
            entries = {
                kind: {name: _entry(entry) for name, entry in fields[kind].items()} for kind in ("ours", "peers")
            }
            reads = {name: Sample(**sample) for name, sample in fields["reads"].items()}
            rows.append(Row(fields["what"], reads, **entries))
        return dict(report["machine"]), rows


REPORT = "the JSON that this benchmark wrote"


@contextmanager
def report_of(path: Path) -> Iterator[None]:
    """Errors of fields that are absent or of another type name the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} is not {REPORT}: it has no {error}") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is not {REPORT}: {error}") from error


def render(given: Path, path: Path, title: str) -> int:
    """Publish an earlier run again; the exit status, 2 where its file is of no use or none can be written."""
    try:
        about, rows = load(given)
        with report_of(given):
            publish(about, rows, path, title)
    except (OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def publish(about: dict[str, Any], rows: Sequence[Row], path: Path, title: str) -> None:
    """Print the table; write the JSON to ``path`` and, where matplotlib is installed, the plot beside it."""
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"\n{as_table(rows)}\n\n{title}: microseconds, medians of CUDA-graph replays with a cold L2; read: a plain")
    print("streaming read of the weights and scales, in brackets times that; ahead: the fastest peer over our slowest")
    for row in rows:
        for name, entry in (row.ours | row.peers).items():
            if entry.note:
                print(f"{row.described()}, {name}: {entry.note}")
    if not any(entry.sample for row in rows for entry in (row.ours | row.peers).values()):
        print(f"nothing was measured, so {path} is not written")
        return
    write_json(path, {"machine": about, "rows": rows})
    print(f"wrote {path}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    plot(rows, path.with_suffix(".png"), f"{title}, {about['gpu']}, {about['date']}")
    print(f"wrote {path.with_suffix('.png')}")


def wrong(rows: Sequence[Row]) -> int:
    """An exit status: 1, with what disagrees, where one of ours does."""
    found = [f"{row.described()}, {name}" for row in rows for name, entry in row.ours.items() if entry.disagrees]
    for what in found:
        print(f"bench: {what} disagrees with the reference", file=sys.stderr)
    return int(bool(found))


def report(
    rows: Sequence[Row], attempts: Iterable[tuple[Row, str, Callable[[], Entry]]], path: Path, title: str
) -> int:
    """Publish ours and, where there are ``attempts``, the peers after that; an exit status."""
    about = machine()
    publish(about, rows, path, title)  # in case a peer takes the process down
    if attempts:
        add_peers(attempts)
        publish(about, rows, path, title)
    return wrong(rows)
