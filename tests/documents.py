# SPDX-License-Identifier: Apache-2.0
"""Commands that the pages, and texts that a program prints, have their reader type."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from layer_toys import REPO

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONTINUED = re.compile(r"\s*\\+\n\s*(?:# +)?")
SERVE = re.compile(r"(?:^[ #$]*|`)((?:\w+=\S+ )*)vllm serve +([^\s`\"][^`\n]*)", re.MULTILINE)


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository, new ones included; not what tools and users put beside them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [path for name in sorted(set(listed.stdout.splitlines())) if (path := REPO / name).is_file()]


def code_lines(page: Path) -> list[str]:
    """Lines of a page's blocks of shell, continued ones as one."""
    blocks = [
        block for language, block in FENCE.findall(page.read_text(encoding="utf-8")) if language in ("sh", "bash")
    ]
    return [line for block in blocks for line in CONTINUED.sub(" ", block).splitlines()]


class Serve(NamedTuple):
    """A documented ``vllm serve``: the variables before it, and its words behind ``serve``."""

    file: Path
    variables: dict[str, str]
    words: list[str]


def serve_commands() -> list[Serve]:
    """Each one that a page, a script's docstring or a program's text has whole, from the model's name on."""
    found = []
    for file in tracked("*.md", "*.py", "*.sh", "*.yaml", "docker/*"):
        if "tests" in file.relative_to(REPO).parts:
            continue
        text = CONTINUED.sub(" ", file.read_text(encoding="utf-8"))
        for variables, words in SERVE.findall(text):
            split = shlex.split(
                words.replace("{{", "{").replace("}}", "}") if file.suffix == ".py" else words, comments=True
            )
            pairs = dict(pair.split("=", 1) for pair in shlex.split(variables))
            found.append(Serve(file, pairs, split))
    return found
