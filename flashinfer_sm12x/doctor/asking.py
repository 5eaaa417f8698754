# SPDX-License-Identifier: Apache-2.0
"""Asking the questions, each in a process of its own, and reading the answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO, cast

from ..versions import UPSTREAM_VERSION, __fork_version__
from .questions import MARK

FOLDER = Path(os.path.abspath(__file__)).parent
TREE = FOLDER.parents[1]
PACKAGE = TREE / "flashinfer"
"""The folder ``flashinfer/`` that this doctor is of."""

INTERPRETER = sys.executable or os.path.realpath("/proc/self/exe")
PYTHON = shlex.quote(INTERPRETER)
CLI = f"{PYTHON} -m flashinfer"
PLUGIN = "flashinfer_sm12x"
LONGEST_LINE = 1 << 20
SIGNALS = {number.value: number.name for number in signal.Signals}

ASKED_BY = "_SM12X_DOCTOR"
"""The variable by which :func:`end_all` knows the processes of a question, whatever sessions they made."""

Facts = Mapping[str, Any]


def end_all(mark: str) -> None:
    """Kill the processes whose environment has a mark that begins so, until there is none."""
    entry = f"{ASKED_BY}={mark}".encode()
    for _ in range(100):
        found = False
        with contextlib.suppress(OSError):
            for folder in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    variables = Path("/proc", folder, "environ").read_bytes()  # a dead one's is empty
                    if any(variable.startswith(entry) for variable in variables.split(b"\0")):
                        os.kill(int(folder), signal.SIGKILL)
                        found = True
        if not found:
            return
        time.sleep(0.01)


class _Asked:
    """A question's process, and the facts that it has told so far."""

    def __init__(self, mark: str, limit: float, *command: str) -> None:
        self.facts: dict[str, Any] = {}
        self._limit, self._until = limit, time.monotonic() + limit
        self._line = b""
        self._child: subprocess.Popen[bytes] | None = None
        self._mark = f"{mark}-{command[0]}-"
        try:
            self._child = subprocess.Popen(
                [INTERPRETER, str(FOLDER / "questions.py"), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, ASKED_BY: self._mark},
            )
            self._output = cast(IO[bytes], self._child.stdout)
            os.set_blocking(self._output.fileno(), False)
        except OSError as error:
            self.facts["failed"] = f"it could not be started: {error}"

    def turn(self) -> bool:
        """Read what there is; whether the process still runs and may."""
        if self._child is None:
            return False
        status = self._child.poll()
        self._read()
        if status is None and time.monotonic() < self._until:
            return True
        if status is None:
            self.facts["failed"] = f"no answer within {self._limit:g} s"
        elif status < 0:
            self.facts["failed"] = f"it was killed by {SIGNALS.get(-status, f'signal {-status}')}"
        elif status:
            self.facts["failed"] = f"it ended with exit status {status}"
        self.end()
        return False

    def end(self) -> None:
        """Kill the process and all that it started, and remove what a build that was killed left."""
        if self._child is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, signal.SIGKILL)
            end_all(self._mark)
            self._read()
            scratch = Path(str(self.facts.get("scratch", "")))
            if scratch.name == f"doctor-{self._child.pid}":
                shutil.rmtree(scratch, ignore_errors=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5)  # one that waits for a dead file server does not even die
            self._output.close()
            self._child = None

    def _read(self) -> None:
        for _ in range(64):  # whoever writes without an end is not waited for
            try:
                block = os.read(self._output.fileno(), 1 << 16)
            except OSError:
                return
            if not block:
                return
            *lines, rest = (self._line + block).split(b"\n")
            self._line = rest[:LONGEST_LINE]
            for line in lines:
                if line.startswith(MARK.encode()):
                    with contextlib.suppress(ValueError, TypeError, RecursionError):
                        self.facts.update(json.loads(line[len(MARK) :]))


def ask(limits: Mapping[str, float], arguments: Mapping[str, Sequence[str]] | None = None) -> dict[str, dict[str, Any]]:
    """The facts that questions find, asked at once; ``failed`` among them says why there are no more.

    Args:
        limits: Question -> seconds, after which its process and all that it started are killed.
        arguments: Question -> what it is told.
    """
    asked: dict[str, _Asked] = {}
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    try:
        for question, limit in limits.items():
            asked[question] = _Asked(mark, limit, question, *(arguments or {}).get(question, ()))
        running = list(asked.values())
        while running := [each for each in running if each.turn()]:
            time.sleep(0.01)
    finally:
        for each in asked.values():
            each.end()
        end_all(mark)
    return {question: each.facts for question, each in asked.items()}


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
        return self.facts.get(question, {}).get(fact)

    def gpus(self) -> list[tuple[str, str]]:
        """``(name, compute capability)`` by the driver or, in containers without its tool, by torch."""
        found = self.get("gpus", "gpus") or self.get("torch", "gpus") or []
        return [(gpu["name"], gpu["capability"]) for gpu in found]

    def modules(self) -> dict[str, dict[str, Any]]:
        """Facts of each of the fork's modules."""
        found = self.facts["modules"].items()
        return {name.removeprefix("module "): fact for name, fact in found if name.startswith("module ")}


def fork_is_first(a: Answers) -> bool:
    """Whether the flashinfer that Python finds is a fork's; taken for granted where that question had no answer."""
    path = a.facts.get("path", {})
    if "found" not in path:
        return True
    file = (path["found"] or {}).get("file")
    return file is not None and os.path.isfile(os.path.join(os.path.dirname(file), "_layer.py"))


def say(text: str, stream: TextIO | None) -> bool:
    """Print a text; whether somebody could read it. Signs that the stream cannot encode are escaped."""
    try:
        assert stream is not None
        encoding = stream.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except (AssertionError, AttributeError, LookupError, OSError, ValueError):
        return False
    return True


def versions() -> dict[str, str]:
    """The versions of the ``fork``, and of ``upstream``, the wheel to install under it."""
    return {"fork": __fork_version__, "upstream": UPSTREAM_VERSION}


def public_version(version: str) -> str:
    """Without what a builder adds behind a plus: ``0.33.0+cu130`` is 0.33.0, a nightly of the next one is not."""
    return version.strip().removeprefix("v").partition("+")[0]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
