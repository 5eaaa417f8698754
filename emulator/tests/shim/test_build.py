# SPDX-License-Identifier: Apache-2.0
"""The libraries follow their sources, whoever builds them: ``make`` here, or Python on first use."""

from __future__ import annotations

import subprocess

import pytest
from vsm import _library


def test_an_edited_header_is_noticed_by_make_and_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    _library.build()
    started: list[list[str]] = []
    run = subprocess.run
    with monkeypatch.context() as patched:
        patched.setattr(
            subprocess, "run", lambda command, **options: started.append(command) or run(command, **options)
        )
        _library.build.__wrapped__()
    (from_python,) = started
    commands = [from_python]
    if _library.build_directory() == _library._ROOT / "build":
        commands.append(["make", "-C", str(_library._ROOT)])
    for command in commands:
        done = run([*command, "-n", "-W", "src/shim/runtime.h"], capture_output=True, text=True, check=True)
        assert "src/shim/launch.cpp" in done.stdout, command
        assert "src/ptx/lexer.cpp" not in done.stdout, command
