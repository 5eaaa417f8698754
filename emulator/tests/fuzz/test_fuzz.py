# SPDX-License-Identifier: Apache-2.0
"""The fuzzer itself: its forms are known to the front end, and a few seconds of it. `make fuzz` runs it with sanitizers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EMULATOR = Path(__file__).parents[2]
sys.path.insert(0, str(EMULATOR / "python"))

from vsm._library import build  # noqa: E402


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory) -> Path:
    program, libraries = tmp_path_factory.mktemp("fuzz") / "fuzz", build()
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-pthread", f"-I{EMULATOR / 'src'}"]
    command += [str(Path(__file__).with_name("fuzz.cpp")), str(libraries / "libvsm.so"), f"-Wl,-rpath,{libraries}"]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_form_is_known(fuzz):
    assert run(fuzz, "forms") == ""


def test_a_few_seconds(fuzz):
    """No crash, no hang; and the programs are worth running: of every outcome there are some."""
    printed = run(fuzz, 4, 1)
    counts = {name: int(count) for name, count in re.findall(r"^([a-z ,]+) (\d+)$", printed, re.MULTILINE)}
    print(counts)
    assert counts["seed"] == 1
    reported = {f"{outcome}, reported" for outcome in ("ok", "fault", "deadlock", "step limit")}
    assert {"ok", "refused", *reported} <= set(counts)


def test_a_seed_makes_the_same_program(fuzz):
    once, again = (re.sub("0x[0-9a-f]{8,}", "*", run(fuzz, 0, 7)) for _ in range(2))
    assert once == again
