# SPDX-License-Identifier: Apache-2.0
"""``sm12x-doctor --probe``: the GPU measured, one part after the other, each in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import written_whole
from .asking import Facts, ask, say, versions
from .probe import PARTS

if TYPE_CHECKING:
    from . import Finding

FORMAT = 1
"""The version of the file's format; another number means that a key went or changed its meaning."""

PREFIX = "probe-"


def measure(limit: float) -> dict[str, dict[str, Any]]:
    """The facts of all parts, by ``probe-<part>``; if there is nothing to measure, those of the first part only.

    Parts run one after the other, since two measurements at once would disturb each other. Progress goes to standard
    error.
    """
    facts: dict[str, dict[str, Any]] = {}
    for part, factor in PARTS.items():
        began = time.monotonic()
        facts |= ask({PREFIX + part: factor * limit})
        found = facts[PREFIX + part]
        found["wall_seconds"] = round(time.monotonic() - began, 1)
        say(f"probe: {part}: {found.get('failed', 'done')}, {found['wall_seconds']} s", sys.stderr)
        if part == "device" and "failed" in found:
            break
    return facts


def has_measured(facts: Mapping[str, Facts]) -> bool:
    """Whether a part has a measurement; neither the device nor a build is one."""
    parts = [PREFIX + part for part in PARTS if part != "device" and not part.startswith("build")]
    return any(set(facts.get(part, {})) - {"failed", "wall_seconds"} for part in parts)


def write_report(path: Path, facts: Mapping[str, Facts], findings: Sequence[Finding]) -> None:
    """The file for others to read: the device and its driver, versions, what was measured, and what was found of it.

    Raises:
        OSError, ValueError: it cannot be written. The file is then as it was.
    """
    measured = {name.removeprefix(PREFIX): found for name, found in facts.items() if name.startswith(PREFIX)}
    gpus = facts["gpus"].get("gpus") or [{}]
    about = {"driver": gpus[0].get("driver"), "toolkit": facts["build"].get("version")}
    found = [asdict(finding) for finding in findings if finding.check.startswith(PREFIX)]
    report = {"format": FORMAT, **versions(), **about, "measured": measured, "findings": found}
    text = json.dumps(report, indent=1) + "\n"
    with written_whole(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
