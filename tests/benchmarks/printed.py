# SPDX-License-Identifier: Apache-2.0
"""Tables that the benchmarks print, read back."""

from __future__ import annotations


def cells(text: str) -> list[list[str]]:
    """Of each line of the tables in ``text``: heads and rows, without the rules between them."""
    lines = (line for line in text.splitlines() if line.startswith("|") and not line.startswith(("|-", "| -")))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
