# SPDX-License-Identifier: Apache-2.0
"""Upstream's formatting: its licence header, its line lengths, its formatters with its own settings.

The settings are those of the tree. A tree without any, the wheel's, gets the ones pinned here, which are those of
upstream's repository in August 2026. Comments and paragraphs of docstrings are wrapped here, since ruff leaves them as
they are.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from .tree import FORK

PYTHON_COLUMNS = 88
CXX_SUFFIXES = (".cu", ".cuh", ".h", ".inl")
RUFF_SETTINGS = """
[lint]
select = ["E", "F", "B", "SIM"]
ignore = [
    "E402", "F405", "F403", "E741", "E501", "SIM118", "B019", "E902", "SIM102", "SIM108", "E731", "B020", "SIM103", "B023",
]
"""
CLANG_FORMAT_SETTINGS = (
    "BasedOnStyle: Google\nDerivePointerAlignment: false\nColumnLimit: 100\nPointerAlignment: Left\n"
)
PINNED_HOOKS = {"ruff-pre-commit": "0.12.8", "mirrors-clang-format": "19.1.1"}

COPYRIGHT = "Copyright (c) 2026 by FlashInfer team."
# Modules there begin with two comments or with the licence's notice; C++ sources with the notice.
_PYTHON_HEADER = f"# SPDX-FileCopyrightText: {COPYRIGHT}\n# SPDX-License-Identifier: Apache-2.0\n"


class StyleError(RuntimeError):
    """A formatter is missing, or refuses what was exported."""


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

_TABLE = re.compile(r"[^.?!:]  +\S")
_SECTION = re.compile(r"\s*(Args|Raises|Returns):$")
_ITEM = re.compile(r"(\s*)[\w.]+(, [\w.]+)*: \S")
_LIST = re.compile(r"\s*([-*>]|\d+\.|:\w+ |\.\.|=|>>>|\|)")


def wrapped(text: str) -> str:
    """Python with comments and docstrings of at most 88 columns, where they are prose."""
    lines = text.splitlines()
    strings = _docstring_lines(text)
    out: list[str] = []
    index = 0
    items = ""  # indentation of the items of a docstring's section
    while index < len(lines):
        line = lines[index]
        if index in strings and _SECTION.match(line):
            items = re.match(r"\s*", line)[0] + "    "  # type: ignore[index]
        elif index not in strings:
            items = ""
        item = _ITEM.match(line) if items and index in strings else None
        if item is not None and item[1] == items:
            end = index + 1
            while end in strings and lines[end].startswith(items + "    "):
                end += 1
            out += _wrap(lines[index:end], items, items + "    ")
            index = end
            continue
        comment = re.match(r"(\s*)# ", line)
        if comment or (index in strings and line.strip() and not line.lstrip().startswith('"""')):
            end = index
            prefix = comment[0] if comment else re.match(r"\s*", line)[0]  # type: ignore[index]
            while end < len(lines) and _same_paragraph(lines[end], prefix, bool(comment), end in strings):
                end += 1
            block = lines[index:end]
            out += _wrap(block, prefix) if end > index else [line]
            index = max(end, index + 1)
        else:
            out += _split_summary(line) if index in strings else [line]
            index += 1
    return "\n".join(out) + "\n"


def _docstring_lines(text: str) -> set[int]:
    """Indices of the lines of docstrings, and of strings that document assignments."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.end_lineno is not None:
            found |= set(range(value.lineno - 1, value.end_lineno))
    return found


def _same_paragraph(line: str, prefix: str, comment: bool, in_string: bool) -> bool:
    if not line.startswith(prefix) or '"""' in line:
        return False
    rest = line[len(prefix) :]
    if comment:
        return bool(rest.strip()) and not rest.startswith(" ")
    return in_string and bool(rest.strip()) and not rest.startswith(" ")


def _wrap(block: Sequence[str], prefix: str, hanging: str = "") -> list[str]:
    texts = [line.strip() if hanging else line[len(prefix) :] for line in block]
    prose = not any(_LIST.match(text) or _TABLE.search(text) for text in texts)
    if max(map(len, block)) <= PYTHON_COLUMNS or not prose or "---" in block[0]:
        return list(block)
    joined = " ".join(" ".join(block).split())
    if prefix.strip():
        joined = re.sub(r"(^| )# ", " ", joined).strip()
    return textwrap.wrap(
        joined, PYTHON_COLUMNS, initial_indent=prefix, subsequent_indent=hanging or prefix, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _split_summary(line: str) -> list[str]:
    """A docstring's first line, which may be all of it."""
    match = re.match(r'(\s*)(r?""")(.*?)(""")?$', line)
    if len(line) <= PYTHON_COLUMNS or match is None:
        return [line]
    indent, quotes, summary, end = match[1], match[2], match[3], match[4] or ""
    parts = textwrap.wrap(
        summary, PYTHON_COLUMNS - len(indent) - len(quotes), break_long_words=False, break_on_hyphens=False
    )
    first, *more = parts
    return [f"{indent}{quotes}{first}", *(f"{indent}{each}" for each in more), *([f"{indent}{end}"] if end else [])]


# --- formatters -------------------------------------------------------------------------------------------------------


def _tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise StyleError(f"{name} is not installed: pip install -r requirements-dev.txt")
    return found


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StyleError(f"{' '.join(command[:3])} refuses what was exported:\n{done.stdout}{done.stderr}".rstrip())


def formatted(text: str) -> str:
    """A part of a Python file, as upstream's formatter leaves it."""
    command = [_tool("ruff"), "format", "--isolated", "--no-cache", "-"]
    done = subprocess.run(command, input=wrapped(text), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StyleError(done.stderr)
    return done.stdout


def hook_versions(tree: Path) -> dict[str, str]:
    """Versions of the formatters that the tree's pre-commit configuration names, else the pinned ones."""
    file = tree / ".pre-commit-config.yaml"
    found = dict(PINNED_HOOKS)
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        for hook in found:
            match = re.search(rf"/{re.escape(hook)}\s*(?:#[^\n]*\n\s*)*rev:\s*['\"]?v?([\w.]+)", text)
            if match:
                found[hook] = match[1]
    return found


def other_versions(tree: Path) -> list[str]:
    """One line for each formatter here that is not the version the tree asks for."""
    said = []
    wanted = hook_versions(tree)
    for hook, name in (("ruff-pre-commit", "ruff"), ("mirrors-clang-format", "clang-format")):
        answer = subprocess.run([_tool(name), "--version"], capture_output=True, text=True, check=True).stdout
        version = re.search(r"\d+\.\d+\.\d+", answer)
        if version is not None and version[0] != wanted[hook]:
            said.append(f"formatted by {name} {version[0]}; the tree's pre-commit has {wanted[hook]}: run it once more")
    return said


def format_files(tree: Path, new: Iterable[str], edited: Iterable[str]) -> None:
    """Format new files, and lint what is new or edited, as upstream's pre-commit does.

    Edited files are not formatted: another version of a formatter would change lines that no topic does.

    Raises:
        StyleError: a formatter is missing, or finds something to say.
    """
    settings = tree / ".git-ruff.toml"
    clang_format = tree / ".clang-format"
    bring = not clang_format.is_file()
    own = (tree / "pyproject.toml").is_file() and "[tool.ruff" in (tree / "pyproject.toml").read_text(encoding="utf-8")
    new, edited = list(new), list(edited)
    try:
        if not own:
            settings.write_text(RUFF_SETTINGS, encoding="utf-8")
        if bring:
            clang_format.write_text(CLANG_FORMAT_SETTINGS, encoding="utf-8")
        configuration = [] if own else ["--config", str(settings)]
        python = [path for path in new if path.endswith(".py")]
        if python:
            _run([_tool("ruff"), "format", "--quiet", "--no-cache", *configuration, *python], tree)
        linted = python + [path for path in edited if path.endswith(".py")]
        if linted:
            _run([_tool("ruff"), "check", "--quiet", "--no-cache", *configuration, *linted], tree)
        cxx = [path for path in new if path.endswith(CXX_SUFFIXES)]
        if cxx:
            _run([_tool("clang-format"), "-i", *cxx], tree)
    finally:
        settings.unlink(missing_ok=True)
        if bring:
            clang_format.unlink(missing_ok=True)
