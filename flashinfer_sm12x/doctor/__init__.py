# SPDX-License-Identifier: Apache-2.0
"""``python -m flashinfer sm12x-doctor``: finds what keeps the SM12x kernels from running on this machine, and a fix.

Every check reads facts that ``questions`` found, each question in a process of its own with a time limit; the doctor
itself imports neither torch nor vLLM and nothing of FlashInfer but the table of variables. So it also runs by its
folder, with the server's own Python and ``PYTHONPATH``: ``python <checkout>/flashinfer_sm12x.doctor``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..signals import ended_by_signals
from . import checks, fixes, probing
from .asking import CLI, Answers, Facts, Unanswered, ask, say, versions
from .probe_checks import PROBE_CHECKS
from .questions import QUESTIONS

FORMAT = 2
"""The version of the JSON that :func:`as_json` makes; another number means that a key went or changed its meaning."""

REPORT = "sm12x-probe.json"
"""The file that ``--probe`` writes, in the folder that it is run in."""

STATES = ("ok", "warn", "fail", "unknown")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Its name, a key of :data:`CHECKS`.
        state: One of :data:`STATES`; ``unknown`` if the question ended without an answer.
        found: The state of things, and its consequence.
        command: A shell command that fixes it, or shows more; empty if there is none.
        why: Further advice, in prose.
    """

    check: str
    state: str
    found: str
    command: str = ""
    why: str = ""


CHECKS: Mapping[str, Callable[[Answers], checks.Outcome]] = {
    name.removeprefix("check_").replace("_", "-"): check
    for name, check in vars(checks).items()
    if name.startswith("check_")
}
"""The checks, in the order of the table that is printed."""


def diagnose(answers: Answers, timeout: float = 60) -> list[Finding]:
    """The findings of the checks that apply; those of a probe are left out where nothing was measured."""
    findings = []
    asked = dict(CHECKS)
    if (measured := answers.facts.get("probe-device")) is not None:
        asked |= {"probe-device": PROBE_CHECKS["probe-device"]} if "failed" in measured else PROBE_CHECKS
    for name, check in asked.items():
        try:
            outcome = check(answers)
        except Unanswered as error:
            slow = "no answer within" in str(error)
            again = f"{CLI} sm12x-doctor --timeout {min(4 * timeout, LONGEST):g}" if slow else ""
            outcome = "unknown", str(error), again, "" if slow else "fix what stopped it"
        except Exception as error:  # a fact of a form that nobody foresaw: the other checks still count
            report = "report this, with the output"
            outcome = "unknown", f"the check itself failed: {error!r}", f"{CLI} sm12x-doctor --json", report
        if outcome is not None:
            findings.append(pasteable(answers, Finding(name, *map(str, outcome))))
    return findings


def pasteable(answers: Answers, finding: Finding) -> Finding:
    """The same finding, with words in place of a command that cannot be run here."""
    try:
        command, why = fixes.pasteable(answers, finding.command, finding.why)
    except Exception:  # a fact of a form that nobody foresaw: it is not known what can be run
        command, why = "", "; ".join(filter(None, (finding.command, finding.why)))
    return replace(finding, command=command, why=why)


def as_text(findings: Sequence[Finding]) -> str:
    """A table: state, check, what was found, and below it the command that fixes it, alone, and prose."""
    names = max(len(finding.check) for finding in findings)
    margin = " " * (9 + names + 2)
    wrapper = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
    lines = []
    for finding in findings:
        wrapper.initial_indent, wrapper.subsequent_indent = f"{finding.state:9}{finding.check:{names}}  ", margin
        lines += wrapper.wrap(finding.found)
        if finding.command:
            lines.append(f"{margin}$ {finding.command}")  # unbroken, to be copied
        if finding.why:
            wrapper.initial_indent, wrapper.subsequent_indent = f"{margin}-> ", f"{margin}   "
            lines += wrapper.wrap(finding.why)
    counts = [f"{sum(finding.state == state for finding in findings)} {state}" for state in STATES]
    return "\n".join([*lines, "", ", ".join(counts)])


def as_json(findings: Sequence[Finding], facts: Mapping[str, Facts]) -> str:
    """``{"format", "fork", "upstream", "findings": [Finding], "facts": {question: {fact: value}}}``."""
    found = [asdict(finding) for finding in findings]
    return json.dumps({"format": FORMAT, **versions(), "findings": found, "facts": facts}, indent=1)


LONGEST = 86400.0


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to {LONGEST:g}")
    return value


def parser() -> argparse.ArgumentParser:
    """The parser of the command line, for an environment that may lack click."""
    made = argparse.ArgumentParser(prog="sm12x-doctor", description="Find what keeps the SM12x kernels from running")
    made.add_argument("--json", action="store_true", help="Emit JSON instead of a table")
    made.add_argument("--timeout", type=_seconds, default=60.0, help="Seconds that each question may take (60)")
    made.add_argument("--probe", action="store_true", help="Measure the GPU, too: minutes in which it is busy")
    made.add_argument("--report", default=REPORT, metavar="FILE", help=f"For what was measured ({REPORT})")
    made.add_argument("--additional-config", default="{}", metavar="JSON", help="As vLLM will get it, to be checked")
    return made


def main(arguments: Sequence[str]) -> int:
    """Ask, check, print.

    Returns:
        The exit status: 0 if no check failed, each had an answer, and all was printed; else 1. 2, or ``SystemExit(2)``,
        for a wrong command line; 128 and a signal's number if that ended it.
    """
    try:
        options = parser().parse_args(arguments)
    except (AttributeError, OSError):  # argparse before Python 3.11.4, where there is no stream to say an error to
        return 2
    report = Path(options.report)
    if options.probe and (reason := why_not_written(report)):
        say(f"sm12x-doctor: --report {report}: {reason}; name a file in a folder that you can write to", sys.stderr)
        return 2
    with ended_by_signals() as ending:
        try:
            facts = ask(dict.fromkeys(QUESTIONS, options.timeout), {"vllm": [options.additional_config]})
            if options.probe:
                facts |= probing.measure(options.timeout)
        except KeyboardInterrupt:
            left = f"; {report} is as it was" if options.probe else ""
            text = "all that was started is ended, compiled modules stay, and a new run asks everything again"
            say(ending.line("sm12x-doctor", text + left), sys.stderr)
            return ending.status
    findings = diagnose(Answers(facts, os.environ), options.timeout)
    printed = say(as_json(findings, facts) if options.json else as_text(findings), sys.stdout)
    if not printed:
        say("sm12x-doctor: what it found cannot be printed: nobody reads its standard output", sys.stderr)
    if options.probe and not probing.has_measured(facts):
        say(f"probe: nothing was measured, so {report} is not written", sys.stderr)
    elif options.probe:
        try:
            probing.write_report(report, facts, findings)
            say(f"probe: written to {os.path.abspath(report)}", sys.stderr)
        except Exception as error:  # of the file system, or facts of a form that nobody foresaw
            reason = getattr(error, "strerror", None) or str(error)
            say(f"probe: {report} cannot be written: {reason}; pass --report FILE", sys.stderr)
            printed = False
    return int(not printed or any(finding.state in ("fail", "unknown") for finding in findings))


def why_not_written(path: Path) -> str:
    """The reason why a file cannot be written; empty if it can. The file itself is not touched."""
    if path.is_dir():
        return "it is a folder"
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return ""
