# SPDX-License-Identifier: Apache-2.0
"""Counts in messages."""


def counted(count: int, noun: str) -> str:
    """A count with its noun, which has an ``s`` unless there is one of it: ``1 module``, ``1,024 modules``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
