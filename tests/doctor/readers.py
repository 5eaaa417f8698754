# SPDX-License-Identifier: Apache-2.0
"""Readers of the doctor's remedies: a shell, pip's own parser of arguments, this project's parsers."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping

from packaging.requirements import Requirement
from pip._internal.commands import create_command

import flashinfer_sm12x_doctor as doctor
from flashinfer.__main__ import cli
from flashinfer.compilation_context import parse_arch_list
from flashinfer.sm12x import variables

PROGRAMS = ("ps", "nvidia-smi", "dmesg", "sudo dmesg", "rm", "mkdir", "cd")
UVS_OPTIONS = {"install": {"--force-reinstall", "--no-deps"}, "uninstall": set()}
"""Those of pip's that uv 0.13 takes under the same name; its ``uninstall`` asks nothing and has no ``--yes``."""


def read_by_its_reader(command: str, environ: Mapping[str, str]) -> None:
    """Fail where a part of a command would not be taken by what reads it."""
    subprocess.run(["bash", "-n", "-c", command], check=True)
    for part in re.split(r"&&|;", command.partition("|")[0]):
        words = shlex.split(part)
        if words[0] == "export":
            _exported(part, environ)
        elif words[0] == "unset":
            assert words[1:], command
            assert all(word.isidentifier() for word in words[1:]), command
        elif words[1:3] == ["-m", "pip"] or words[1:2] == ["pip"]:
            _installed(words)
        elif words[1:] == ["-m", "ensurepip"] or words[1:2] == ["-X"]:
            pass  # Python's own
        elif words[1:3] == ["-m", "flashinfer"]:
            _ours(words[3:])
        elif "apt-get" in words[:2]:
            assert re.fullmatch(r"(sudo )?apt-get install --yes( [a-z0-9][a-z0-9.+-]+)+", " ".join(words)), command
        else:
            assert part.strip().startswith(PROGRAMS), f"nobody is known to read {part!r} of {command!r}"


def _exported(part: str, environ: Mapping[str, str]) -> None:
    """Once the line has run, the variable holds a value that it may have."""
    name = shlex.split(part)[1].partition("=")[0]
    script = f'{part}; printf %s "${{{name}}}"'
    done = subprocess.run(["/bin/sh", "-euc", script], env=dict(environ), capture_output=True, text=True)
    assert done.returncode == 0, (part, done.stderr)
    if name in variables.TABLE:
        variables.read(name, {name: done.stdout})
    if name == "FLASHINFER_CUDA_ARCH_LIST":
        parse_arch_list(done.stdout)


def _installed(words: list[str]) -> None:
    by_uv = words[1] == "pip"
    verb, *arguments = words[2:] if by_uv else words[3:]
    if by_uv:
        assert arguments.pop(0) == "--python"
        arguments.pop(0)
        assert {word for word in arguments if word.startswith("-")} <= UVS_OPTIONS[verb], words
    _, packages = create_command(verb).parse_args(arguments)
    assert packages, words
    for package in packages:
        Requirement(package)


def _ours(words: list[str]) -> None:
    if words[0] == "sm12x-doctor":
        doctor.parser().parse_args(words[1:])
    else:
        command = cli.commands[words[0]]
        if hasattr(command, "commands") and words[1:]:
            assert words[1] in command.commands, words
        else:
            command.make_context(words[0], words[1:])
