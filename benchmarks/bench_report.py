# SPDX-License-Identifier: Apache-2.0
"""Measure a Spark and print each figure beside its prediction, as a page to paste into an issue.

    python benchmarks/bench_report.py                                          # on a Spark, its server stopped
    python benchmarks/bench_report.py --probe sm12x-probe.json                 # the doctor's report is there already
    python benchmarks/bench_report.py --probe p.json --token report_token.json # a page of earlier runs: no GPU needed

Runs ``python -m flashinfer sm12x-doctor --probe`` and one decode step of ``bench_token.py``, then says which assumption
of the prediction the measurements contradict. The page has no host name, no user name and no path.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import timing
from perfmodel.step import read_report
from timing import file
from token_bench import owner, results

from flashinfer_sm12x.files import written_whole

HERE = Path(__file__).resolve().parent
TOKEN = "report_token"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--probe", type=file, help="a report of sm12x-doctor --probe; measured when omitted")
    parser.add_argument(
        "--token", type=file, help="a JSON of bench_token.py; measured when neither this nor --probe is given"
    )
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder of the files")
    return parser.parse_args(argv)


def measured_by(what: str, *command: str) -> None:
    """Run a program of this project.

    Raises
    ------
    ValueError
        It failed; its own output says why.
    """
    print(f"{what}: {' '.join(['python', *command])}", flush=True)
    began = time.monotonic()
    status = subprocess.run([sys.executable, *command], check=False).returncode
    print(f"{what}: exit status {status}, {time.monotonic() - began:.0f} s", flush=True)
    if status < 0 or status > 1:  # 1: the doctor found something, and wrote its report all the same
        raise ValueError(f"{what} ended with exit status {status}")


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not given; print and write the page."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    probe, token = arguments.probe, arguments.token
    if probe is None:
        probe = arguments.out / "sm12x-probe.json"
        before = probe.stat().st_mtime_ns if probe.exists() else 0
        measured_by("probe", "-m", "flashinfer", "sm12x-doctor", "--probe", "--report", str(probe))
        if not probe.exists() or probe.stat().st_mtime_ns == before:
            raise ValueError("the probe measured nothing; the doctor's table says why")
        if token is None:
            token = arguments.out / f"{TOKEN}.json"
            token.unlink(missing_ok=True)
            step = ["--models", "gpt-oss-120b", "--stacks", "fork", "--dense", "mxfp6", "--decode", "1x1024"]
            measured_by("step", str(HERE / "bench_token.py"), *step, "--name", TOKEN, "--out", str(arguments.out))
    machine, steps = results.load(token) if token is not None and token.exists() else (None, [])
    page = owner.page(read_report(probe), machine, steps)
    path = arguments.out / "report.md"
    with written_whole(path) as scratch:
        scratch.write_text(page, encoding="utf-8")
    print(f"\n{page}\nwrote {path}: paste it into an issue; it names no host, no user and no folder")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The exit status: 2 where a file that is given is of no use, or nothing can be measured."""
    arguments = parse(argv)
    try:
        return run(arguments)
    except (OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    timing.run(main)
