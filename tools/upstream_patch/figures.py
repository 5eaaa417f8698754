# SPDX-License-Identifier: Apache-2.0
"""Measured figures in messages: taken from this fork's pages, so that a message quotes what they say and nothing else."""

from __future__ import annotations

import re

from .compose import ComposeError, fork_text

# From what a message names to a page, and what stands in front of the table there.
_TABLES = {
    "layer": ("docs/performance.md", "**gpt-oss-120b** (H = I = 2880"),
    "dense": ("docs/performance.md", "## Dense layers, H200"),
}
_PLACEHOLDER = re.compile(r"\{(layer|dense)\|([^|}]+)\|([^|}]+)\}")


def _table(name: str) -> tuple[list[str], dict[str, list[str]]]:
    """Titles and rows of a table; a row's key is its leading cells (one of layers, two of dense ones)."""
    page, start = _TABLES[name]
    text = fork_text(page)
    if start not in text:
        raise ComposeError(f"{page} has no {start!r}, behind which figures of messages stand")
    lines = text[text.index(start) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    titles, _, *body = rows
    found, layer = {}, ""
    for row in body:
        layer = row[0] or layer
        found[f"{layer} {row[1]}" if name == "dense" else row[0]] = row
    return titles, found


def filled_in(message: str) -> str:
    """A message with ``{layer|TOKENS|COLUMN}`` and ``{dense|LAYER TOKENS|COLUMN}`` as the pages have them.

    Raises:
        ComposeError: a page has no such table, row or column.
    """

    def figure(match: re.Match[str]) -> str:
        titles, rows = _table(match[1])
        if match[2] not in rows or match[3] not in titles:
            raise ComposeError(f"{_TABLES[match[1]][0]} has no figure for {match[0]}")
        return rows[match[2]][titles.index(match[3])].partition(" ")[0]

    return _PLACEHOLDER.sub(figure, message)
