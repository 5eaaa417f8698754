# SPDX-License-Identifier: Apache-2.0
"""The texts that models read, which come with the tree and were written for it, and windows of tokens.

``texts/evaluation`` is what losses are measured on. ``texts/calibration`` shares nothing with it: a quantizer that
looks at text looks at that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "texts"


def texts(kind: str) -> list[str]:
    """The texts of ``evaluation`` or ``calibration``: prose and code."""
    return [path.read_text(encoding="utf-8") for path in sorted((FOLDER / kind).glob("*.txt"))]


def calibration() -> list[str]:
    """The texts that a quantizer looks at: those for calibration, then the chapters of Python's language reference,
    which every Python brings: some 120,000 tokens of prose and code."""
    try:
        chapters = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # a Python that was cut down
        chapters = {}
    return [*texts("calibration"), *(chapters[name] for name in sorted(chapters))]


def windows(texts: Sequence[str], encode: Callable[[str], list[int]], size: int, most: int) -> list[list[int]]:
    """Token ids of at most ``size`` in a row, at most ``most`` in all; each text's first window comes before any second
    one.

    Pieces of fewer than 16 tokens are left out: behind so few a model guesses.
    """
    cut = [[ids[at : at + size] for at in range(0, len(ids), size)] for ids in map(encode, texts)]
    rounds = max(map(len, cut), default=0)
    found: list[list[int]] = []
    for turn in range(rounds):
        for each in cut:
            window = each[turn][: most - sum(map(len, found))] if turn < len(each) else []
            if len(window) >= min(16, size):
                found.append(window)
    return found
