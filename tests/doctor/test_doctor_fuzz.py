# SPDX-License-Identifier: Apache-2.0
"""Whatever the environment, the command line and the answers are, the doctor prints what it has and ends.

CI runs a share. ``FLASHINFER_TEST_DOCTOR=1`` runs 10,000 with the questions stubbed, and 200 of the whole program.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import string
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import DOCTOR, Machine
from planted import PLANTED

from flashinfer.sm12x import doctor, variables
from flashinfer.sm12x.doctor import questions

ALL = os.environ.get("FLASHINFER_TEST_DOCTOR") == "1"
STUBBED, WHOLE = (10_000, 200) if ALL else (300, 3)
SEED = 25

ANSWERS: dict[str, dict[str, Any]] = {
    "path": {
        "found": {"file": "/tree/flashinfer/__init__.py", "folders": ["/tree/flashinfer"]},
        "forks": ["/tree"],
        "vllm": "0.33.0",
        "plugins": ["flashinfer_sm12x"],
    },
    "import": {"version": "0.7.2.post1", "fork": "0.1.0"},
    "build": {"nvcc": "/cuda/bin/nvcc", "origin": "PATH", "version": "13.0", "error": None, "blame": "CXX", "elsewhere": "/x"},
    "gpus": {"gpus": [{"name": "NVIDIA GB10", "capability": "12.1", "driver": "580.95.05"}]},
    "log": {"lines": ["NVRM: Xid 79"], "count": 1},
    "torch": {
        "torch": "2.13.0", "cuda": "13.0", "gpus": [{"name": "GB10", "capability": "12.1"}],
    },
    "folder": {"free_bytes": 1 << 33, "folder": "/cache", "temporary_error": "full"},
    "modules": {
        "workspace": "/cache", "architectures": ["12.1a"], "probed_sum_bits": {"mxf4": 20}, "narrowest_sum": 20,
        "module fused_moe_120": {"prebuilt": False, "stale": "x", "passed_over": ""}, "error": "none", "probe_error": "none",
    },
    "memory": {"available": 1 << 36, "reason": "2 cores", "jobs": 2, "total": 1 << 37},
    "vllm": {
        "settings": {"qkv": "bf16"}, "settings_error": "FLASHINFER_SM12X_VLLM: x", "found": True, "outcome": "installed",
        "nvcc": None, "ninja": None, **dict.fromkeys(questions.VLLM_QUESTIONS, True),
    },
    "probe-device": {"name": "GB10", "capability": [12, 1], "sm_count": 48, "virtual": False, "sm12x": True, "gb10": True},
    "probe-dram": {"wrong": False, "gigabytes_per_second": 1.0, "predicted": [1, 2]},
}  # fmt: skip

ODD: list[Any] = [
    None, "", "x", "\udc80\x1b[", -1, 0, 1e308, [], {}, ["x"], {"x": 1}, True, "12.1", "0.0", "no answer within 1 s",
]  # fmt: skip


def text(chance: random.Random) -> str:
    letters = string.printable + "äß\udc80\U0001f600"
    return "".join(chance.choices(letters, k=chance.choice((0, 1, 3, 12, 300))))


def answers(chance: random.Random, types: bool) -> dict[str, dict[str, Any]]:
    """Facts of which some are absent, or of another type."""
    found: dict[str, dict[str, Any]] = {question: {} for question in questions.QUESTIONS}
    for question, facts in ANSWERS.items():
        kept = {name: fact for name, fact in facts.items() if chance.random() < 0.8}
        if types:
            kept |= {name: chance.choice(ODD) for name in facts if chance.random() < 0.2}
        if chance.random() < 0.3:
            kept["failed"] = chance.choice(("ImportError: x", "it was killed by SIGKILL", "no answer within 3 s"))
        if not question.startswith("probe") or chance.random() < 0.1:
            found[question] = kept
    return found


def environment(chance: random.Random) -> dict[str, str]:
    others = "PYTHONPATH VLLM_PLUGINS LD_LIBRARY_PATH LD_PRELOAD TMPDIR CUDA_VISIBLE_DEVICES"
    names = [*variables.TABLE, *others.split()]
    found = {}
    for name in chance.sample(names, chance.randrange(len(names))):
        if chance.random() < 0.2:  # one letter off
            place = chance.randrange(len(name))
            name = name[:place] + chance.choice(("", "X", "_")) + name[place + chance.randrange(2) :]
        value = chance.choice(("", "0", "1", "/x:/y", "12.1a", "qkv=mxfp8", text(chance)))
        found[name.replace("\0", "")] = value.replace("\0", "")
    return found


def command_line(chance: random.Random) -> list[str]:
    words = [
        "--json", "--timeout", "1", "5.5", "nan", "inf", "-1", "0", "1e9", "", "--report", "/dev/full", "/none/x", "a\nb", "--probe",
        "--additional-config", "{", "{}", '{"SM12X": 1}', "[]", "--help", "-h", "--jso", "--", "--bogus", "%s", text(chance),
    ]  # fmt: skip
    return chance.choices(words, k=chance.choice((0, 1, 1, 2, 3, 6)))


class Broken(io.StringIO):
    """A stream that cannot be written to; of an odd encoding, where it can be."""

    encoding = "ascii"  # type: ignore[assignment]

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def write(self, said: str) -> int:
        if self.error:
            raise self.error
        said.encode("ascii")
        return super().write(said)


def streams(chance: random.Random) -> tuple[Any, Any]:
    """Standard output and error. Python escapes what the latter cannot encode."""
    broken = [None, Broken(BrokenPipeError()), Broken(OSError(28, "full"))]
    return chance.choice([Broken(None), Broken(None), *broken]), chance.choice([io.StringIO(), *broken])


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs the doctor with stubbed questions, an environment and streams: its exit status and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(
        arguments: list[str], environ: dict[str, str], found: dict[str, dict[str, Any]], out: Any, err: Any
    ) -> tuple[int, str]:
        def ask(limits: dict[str, float], arguments: Any = None) -> dict[str, dict[str, Any]]:
            return {question: dict(found.get(question, {})) for question in limits}

        with monkeypatch.context() as patch:
            patch.setattr(doctor, "ask", ask)
            patch.setattr(doctor.probe, "ask", ask)
            patch.setattr(doctor.os, "environ", environ)
            patch.setattr(doctor.sys, "stdout", out)
            patch.setattr(doctor.sys, "stderr", err)
            try:
                status = doctor.main(arguments)
            except SystemExit as error:
                status = int(error.code or 0)
                return status, ""
        # With 2 what is printed is argparse's usage, if anything.
        return status, out.getvalue() if isinstance(out, Broken) and status != 2 else ""

    return run


def test_no_environment_command_line_or_answer_ends_it(ended: Callable[..., tuple[int, str]]) -> None:
    print("seed", SEED)
    for seed in range(SEED, SEED + STUBBED):
        chance = random.Random(seed)
        types, (out, err) = chance.random() < 0.5, streams(chance)
        arguments, environ, found = command_line(chance), environment(chance), answers(chance, types)
        try:
            status, printed = ended(arguments, environ, found, out, err)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {arguments}") from error
        assert status in (0, 1, 2), seed
        if printed.startswith("{"):
            data = json.loads(printed)
            rows = data["findings"]
            assert rows, seed
            assert all("\n" not in row["command"] or "\n" in str(environ) + str(found) for row in rows), seed
            assert status == int(any(row["state"] in ("fail", "unknown") for row in rows)) or "--probe" in arguments, (
                seed
            )
        elif printed:
            assert re.search(r"\d+ ok, \d+ warn, \d+ fail, \d+ unknown\n$", printed), seed
            assert types or "the check itself failed" not in printed, (seed, printed)
        assert (
            status == 1 or not isinstance(out, Broken) or out.error is None or status == 2 or "-h" in str(arguments)
        ), seed


@pytest.mark.parametrize("run", range(WHOLE))
def test_no_whole_run_ends_in_a_traceback(tmp_path: Path, machine: Machine, run: int) -> None:
    """Through both doors, on machines with several plants at once and a random environment."""
    print("seed", SEED + run)
    chance = random.Random(SEED + run)
    states = [state for state in PLANTED.values() if not state.mounts]
    for state in chance.sample(states, chance.randrange(4)):
        try:
            state.into(machine)
        except (FileNotFoundError, FileExistsError):
            continue  # another plant took what this one needs
    kept = ("PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH")
    machine.variables |= {
        name: value
        for name, value in environment(chance).items()
        if name not in kept and "\udc80" not in value and "=" not in name
    }
    for name in chance.sample([*machine.variables], chance.choice((0, 0, 1, 3))):
        del machine.variables[name]
    door = chance.choice(((str(DOCTOR),), ("-m", "flashinfer", "sm12x-doctor")))
    arguments = [
        word.replace("\0", "") for word in command_line(chance) if word not in ("--probe",) and "\udc80" not in word
    ]
    if not {"-h", "--help", "--"}.intersection(arguments):
        arguments += ["--timeout", "20"]
    command = [str(machine.python), *door, *arguments]
    done = subprocess.run(command, env=machine.environment(), cwd=tmp_path, capture_output=True, timeout=300)
    said, printed = done.stderr.decode(errors="replace"), done.stdout.decode(errors="replace")
    assert "Traceback" not in said + printed, (arguments, said)
    assert done.returncode in (0, 1, 2), said
    if done.returncode == 2:
        assert "error:" in said
    elif re.search(r"No module named flashinfer|this copy of the fork is not whole: .*/other/", said):
        assert door[0] == "-m"  # another flashinfer stands before this one, or none does
    elif "usage:" not in printed:
        assert re.search(r'unknown\n$|^{\n "format"', printed), (arguments, printed, said)


@pytest.mark.parametrize("closed", [None, Broken(BrokenPipeError())], ids=["none", "nobody reads it"])
def test_a_wrong_command_line_ends_it_where_an_older_argparse_cannot_say_so(
    ended: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, closed: Any
) -> None:
    """Python 3.11.2's, Debian 12's, writes to whatever standard error is."""
    monkeypatch.setattr(
        doctor.argparse.ArgumentParser,
        "_print_message",
        lambda _, text, file=None: (file or doctor.sys.stderr).write(text),
    )
    assert ended(["--bogus"], {}, {}, Broken(None), closed)[0] == 2
