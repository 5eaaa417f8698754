# SPDX-License-Identifier: Apache-2.0
"""Asking the questions, each in a process of its own, and reading the answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .questions import MARK, QUESTIONS

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder ``flashinfer/`` that this doctor is of."""

TREE = PACKAGE.parent
PYTHON = shlex.quote(sys.executable)
PIP = f"{PYTHON} -m pip"
CLI = f"{PYTHON} -m flashinfer"
PLUGIN = "flashinfer_sm12x"

Facts = Mapping[str, Any]


def ask(question: str, limit: float) -> dict[str, Any]:
    """The facts that a question finds within ``limit`` seconds; ``failed`` among them says why there are no more.

    The process and all that it started are killed then. Their output goes to a file: whoever holds a pipe open could
    make its reader wait.
    """
    command = [sys.executable, str(Path(__file__).with_name("questions.py")), question]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        failed = ""
        try:
            status = child.wait(limit)
            if status < 0:
                failed = f"it was killed by {_signal_name(-status)}"
            elif status:
                failed = f"it ended with exit status {status}"
        except subprocess.TimeoutExpired:
            failed = f"no answer within {limit:g} s"
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)  # one that waits for a dead file server does not even die
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - (1 << 20)))
        text = output.read().decode(errors="replace")
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):
                facts.update(json.loads(line.removeprefix(MARK)))
    if failed:
        facts["failed"] = failed
    return facts


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ask_all(limit: float) -> dict[str, dict[str, Any]]:
    """The answers to all questions, asked at once."""
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = {question: pool.submit(ask, question, limit) for question in QUESTIONS}
        return {question: answer.result() for question, answer in answers.items()}


class Unanswered(Exception):
    """A check lacks a fact; its text says why."""


@dataclass(frozen=True)
class Answers:
    """All facts, and the environment that they were found in."""

    facts: Mapping[str, Facts]
    environ: Mapping[str, str]

    def __call__(self, question: str, fact: str) -> Any:
        """One fact.

        Raises:
            Unanswered: the question ended before it.
        """
        answers = self.facts[question]
        if fact not in answers:
            raise Unanswered(f"the question '{question}' ended without an answer: {answers.get('failed', fact)}")
        return answers[fact]

    def get(self, question: str, fact: str) -> Any:
        return self.facts[question].get(fact)

    def versions(self) -> Mapping[str, str]:
        return self("path", "versions")

    def gpus(self) -> list[tuple[str, str]]:
        """``(name, compute capability)`` by the driver or, in containers without its tool, by torch."""
        for question in ("gpus", "torch"):
            if self.get(question, "gpus"):
                return [(gpu["name"], gpu["capability"]) for gpu in self.get(question, "gpus")]
        return []

    def serves(self) -> bool:
        """Whether vLLM and a GPU of the SM12x family, or no GPU at all, are here."""
        return all(capability.startswith("12.") for _, capability in self.gpus())

    def plugin(self) -> bool:
        """Whether vLLM would load the fork's plugin and the plugin would act."""
        listed = self.environ.get("VLLM_PLUGINS")
        return (
            PLUGIN in self("path", "plugins")
            and (listed is None or PLUGIN in listed.split(","))
            and self.environ.get("FLASHINFER_SM12X_VLLM") != "0"
            and self.environ.get("FLASHINFER_SM12X_MOE") != "0"
        )


def versions() -> tuple[str, str]:
    """The fork's version and that of the wheel it extends."""
    names: dict[str, Any] = {}
    exec((PACKAGE / "_version.py").read_text(encoding="utf-8"), names)
    return names["__fork_version__"], names["UPSTREAM_VERSION"]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
