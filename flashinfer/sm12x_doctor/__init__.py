# SPDX-License-Identifier: Apache-2.0
"""``python -m flashinfer sm12x-doctor``: what stands between this machine and the SM12x kernels, and what mends it.

Every check reads facts that ``questions`` found, each question in a process of its own with a time limit; the doctor
itself imports neither torch nor vLLM and nothing of FlashInfer. So it also runs by its folder, with whatever Python and
whatever ``PYTHONPATH`` the server has: ``python <checkout>/flashinfer/sm12x_doctor``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import checks, probe, vllm_checks
from .asking import Answers, Facts, Unanswered, ask_all, versions
from .probe_checks import PROBE_CHECKS

FORMAT = 1
"""Of the JSON; another number means that a key went or changed its meaning."""

REPORT = "sm12x-probe.json"
"""What ``--probe`` writes, in the folder that it is run in."""

STATES = ("ok", "warn", "fail", "unknown")


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: Its name, a key of :data:`CHECKS`.
        state: One of :data:`STATES`; ``unknown`` where the question ended without an answer.
        found: What there is, and what it means.
        remedy: What to do, empty where there is nothing to do.
    """

    check: str
    state: str
    found: str
    remedy: str = ""


CHECKS: Mapping[str, Callable[[Answers], checks.Outcome]] = {
    name.removeprefix("check_").replace("_", "-"): check
    for module in (checks, vllm_checks)
    for name, check in vars(module).items()
    if name.startswith("check_")
}
"""In the order of the table."""


def diagnose(answers: Answers) -> list[Finding]:
    """What the checks find; those that do not apply are left out, and so are a probe's where nothing was measured."""
    findings = []
    asked = dict(CHECKS)
    if (measured := answers.facts.get("probe-device")) is not None:
        asked |= {"probe-device": PROBE_CHECKS["probe-device"]} if "failed" in measured else PROBE_CHECKS
    for name, check in asked.items():
        try:
            outcome = check(answers)
        except Unanswered as error:
            slow = "no answer within" in str(error)
            outcome = "unknown", str(error), "again, with a longer --timeout" if slow else "mend what stopped it"
        except Exception as error:  # a fact of a form that nobody foresaw: the other checks still count
            outcome = "unknown", f"the check itself failed: {error!r}", "report this, with the output of --json"
        if outcome is not None:
            findings.append(Finding(name, *outcome))
    return findings


def as_text(findings: Sequence[Finding], width: int = 120) -> str:
    """A table: state, check, what was found, and below it what to do."""
    names = max(len(finding.check) for finding in findings)
    margin = " " * (9 + names + 2)
    lines = []
    for finding in findings:
        head = f"{finding.state:9}{finding.check:{names}}  "
        lines += _wrapped(finding.found, head, margin, width)
        if finding.remedy:
            lines += _wrapped(finding.remedy, f"{margin}-> ", f"{margin}   ", width)
    counts = [f"{sum(finding.state == state for finding in findings)} {state}" for state in STATES]
    return "\n".join([*lines, "", ", ".join(counts)])


def _wrapped(text: str, first: str, others: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def as_json(findings: Sequence[Finding], facts: Mapping[str, Facts]) -> str:
    """``{"format", "fork", "upstream", "findings": [Finding], "facts": {question: {fact: value}}}``."""
    fork, upstream = versions()
    about = {"format": FORMAT, "fork": fork, "upstream": upstream}
    return json.dumps({**about, "findings": [asdict(finding) for finding in findings], "facts": facts}, indent=1)


def run(json_output: bool, timeout: float, probes: bool = False, report: str = REPORT) -> int:
    """Ask, check, print.

    Args:
        json_output: Print JSON instead of the table.
        timeout: Seconds that each question may take; they are asked at once.
        probes: Measure the GPU, too.
        report: The file for what was measured.

    Returns:
        The exit status: 0 if no check failed and each had an answer, else 1.
    """
    facts = ask_all(timeout)
    if probes:
        facts |= probe.measure(timeout)
    findings = diagnose(Answers(facts, os.environ))
    print(as_json(findings, facts) if json_output else as_text(findings))
    if probes:
        try:
            probe.write_report(Path(report), facts, findings)
        except OSError as error:
            print(f"probe: {report} cannot be written: {error.strerror}; pass --report FILE", file=sys.stderr)
        else:
            print(f"probe: written to {Path(report).absolute()}", file=sys.stderr)
    return int(any(finding.state in ("fail", "unknown") for finding in findings))


def main(arguments: Sequence[str]) -> int:
    """The command line, where click may be missing."""
    parser = argparse.ArgumentParser(prog="sm12x-doctor", description="Find what keeps the SM12x kernels from running")
    parser.add_argument("--json", action="store_true", help="Emit JSON instead of a table")
    parser.add_argument("--timeout", type=float, default=60, help="Seconds that each question may take (60)")
    parser.add_argument("--probe", action="store_true", help="Measure the GPU, too: minutes in which it is busy")
    parser.add_argument("--report", default=REPORT, metavar="FILE", help=f"For what was measured ({REPORT})")
    options = parser.parse_args(arguments)
    return run(options.json, options.timeout, options.probe, options.report)
