# SPDX-License-Identifier: Apache-2.0
"""What ``make test`` leaves to ``make test-all``: the marker ``slow`` is given here, and nowhere else.

A test is slow

* if ``LONG`` names it: it takes more than 20 seconds of one core, what it compiles included;
* if it runs on the virtual SM121 (``tests/*/test_virtual_*.py``), unless it is the first, cheapest one that notices some
  change of ``tests/mutations.toml``. Of a thousand these are some 150: of each kernel family several, with every
  watcher on.
"""

from __future__ import annotations

import fnmatch
from functools import cache

from layer_toys import REPO, load_tool

VIRTUAL = "tests/*/test_virtual_*.py"
LONG: tuple[str, ...] = ()
"""Files, tests or tests with their parameters."""


@cache
def noticing() -> frozenset[str]:
    """The first test of each change that a test must notice: node ids, or ``FILE -k WORD``."""
    mutate = load_tool("mutate")
    return frozenset(m.tests[0] for m in mutate.read_list(REPO / mutate.LIST) if not m.equivalent)


def covers(entry: str, node: str) -> bool:
    """Whether a file, a test, one with its parameters, or ``FILE -k WORD`` is or holds the test of that node id."""
    file, word_given, word = entry.partition(" -k ")
    if word_given:
        return node.startswith(f"{file}::") and word in node
    return entry in (node, node.partition("[")[0], node.partition("::")[0])


def is_slow(node: str) -> bool:
    if any(covers(entry, node) for entry in LONG):
        return True
    return fnmatch.fnmatch(node.partition("::")[0], VIRTUAL) and not any(covers(entry, node) for entry in noticing())
