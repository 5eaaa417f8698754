# SPDX-License-Identifier: Apache-2.0
"""Upstream's formatting: its licence header, its line lengths, its formatters.

Their settings are those of upstream's repository in August 2026: the wheel has none. Comments and paragraphs of
docstrings are wrapped here: ruff leaves them as they are.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from .compose import is_text
from .tree import FORK, ExportError

PYTHON_COLUMNS = 88
CXX_SUFFIXES = (".cu", ".cuh", ".h", ".inl")
RUFF_CHECK = (
    "--isolated",
    "--select=E,F,B,SIM",
    "--ignore=E402,F405,F403,E741,E501,SIM118,B019,E902,SIM102,SIM108,E731,B020,SIM103,B023",
)
CLANG_FORMAT = "{BasedOnStyle: Google, DerivePointerAlignment: false, ColumnLimit: 100, PointerAlignment: Left}"

COPYRIGHT = "Copyright (c) 2026 by FlashInfer team."
# Modules there begin with two comments or with the licence's notice; C++ sources with the notice.
_PYTHON_HEADER = f"# SPDX-FileCopyrightText: {COPYRIGHT}\n# SPDX-License-Identifier: Apache-2.0\n"


@functools.cache
def _cxx_header() -> str:
    """The notice at the end of the licence, as a comment."""
    licence = (FORK / "LICENSE").read_text(encoding="utf-8")
    notice = licence[licence.rindex("Licensed under the Apache License") :].rstrip().splitlines()
    lines = [COPYRIGHT, "", *(line.removeprefix("   ") for line in notice)]
    return "/*\n" + "".join(f" * {line}".rstrip() + "\n" for line in lines) + " */\n"


def with_header(path: str, text: str) -> str:
    """``text`` with upstream's licence header in place of this fork's."""
    python = path.endswith(".py")
    mark = "#" if python else "//"
    lines = text.splitlines()
    while lines and lines[0].startswith(f"{mark} SPDX-"):
        del lines[0]
    if lines and lines[0] == "//":  # between this fork's header and what it says of the file
        del lines[0]
    return (_PYTHON_HEADER if python else _cxx_header()) + "\n".join(lines) + "\n"


# --- prose of Python files -------------------------------------------------------------------------------------------

# Lists, tables and underlined titles keep their lines.
_FIXED = re.compile(r"([-*>]|\d+\.|:\w+ |\.\.|=|\|)|.*[^.?!:]  +\S|.*---")


def wrapped(text: str) -> str:
    """Python with comments and docstrings of at most 88 columns, where they are prose."""
    strings = _docstring_lines(text)

    def prefix(numbered: tuple[int, str]) -> str | int:
        """The common prefix of a paragraph's lines; for a line that is not prose, its number."""
        index, line = numbered
        match = re.match(r"\s*" if index in strings else r"\s*# (?=\S)", line)
        return index if match is None or line.strip() in ("", '"""') else match[0]

    out: list[str] = []
    for before, numbered in itertools.groupby(enumerate(text.splitlines()), prefix):
        lines = [line for _, line in numbered]
        if isinstance(before, str) and max(map(len, lines)) > PYTHON_COLUMNS:
            prose = [line[len(before) :].rstrip() for line in lines]
            if not any(map(_FIXED.match, prose)):
                lines = textwrap.wrap(
                    " ".join(prose), PYTHON_COLUMNS, initial_indent=before, subsequent_indent=before,
                    break_long_words=False, break_on_hyphens=False,
                )  # fmt: skip
        out += lines
    return "\n".join(out) + "\n"


def _docstring_lines(text: str) -> set[int]:
    """Indices of the lines of docstrings, and of strings that document assignments."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if is_text(node):
            found |= set(range(node.lineno - 1, node.end_lineno or node.lineno))
    return found


# --- formatters -------------------------------------------------------------------------------------------------------


def tool(name: str) -> str:
    """A formatter, of this environment or on PATH.

    Raises:
        ExportError: there is none.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ExportError(f"{name} is not installed: pip install -r requirements-dev.txt")
    return found


def _run(*command: str, folder: Path | None = None, given: str | None = None) -> str:
    done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = f"{' '.join(command[:3])} refuses what was exported:\n{done.stdout}{done.stderr}"
        raise ExportError(message.rstrip())
    return done.stdout


def formatted(text: str) -> str:
    """A part of a Python file, as upstream's formatter leaves it."""
    return _run(tool("ruff"), "format", "--isolated", "--no-cache", "-", given=wrapped(text))


def format_files(tree: Path, new: Sequence[str], edited: Sequence[str]) -> None:
    """Format new files, and lint what is new or edited, as upstream's pre-commit does.

    Edited files are not formatted: another version of a formatter would change lines that no topic does.

    Raises:
        ExportError: a formatter is missing, or finds something to say.
    """
    python = [path for path in new if path.endswith(".py")]
    if python:
        _run(tool("ruff"), "format", "--quiet", "--no-cache", "--isolated", *python, folder=tree)
    if linted := python + [path for path in edited if path.endswith(".py")]:
        _run(tool("ruff"), "check", "--quiet", "--no-cache", *RUFF_CHECK, *linted, folder=tree)
    if cxx := [path for path in new if path.endswith(CXX_SUFFIXES)]:
        _run(tool("clang-format"), f"--style={CLANG_FORMAT}", "-i", *cxx, folder=tree)
