# SPDX-License-Identifier: Apache-2.0
"""Readers of the doctor's fixes: a shell, pip's own parser of arguments, this project's parsers."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from layer_toys import REPO
from packaging.requirements import Requirement
from pip._internal.commands import create_command

import flashinfer_sm12x.doctor as doctor
from flashinfer.__main__ import cli
from flashinfer.compilation_context import parse_arch_list
from flashinfer_sm12x import variables
from flashinfer_sm12x.doctor.asking import FOLDER

UVS_OPTIONS = {"install": {"-e", "--force-reinstall", "--no-deps"}, "uninstall": set()}
"""Those of pip's that uv 0.13 takes under the same name; its ``uninstall`` asks nothing and has no ``--yes``."""

NVIDIA_SMI_DISPLAYS = (
    "MEMORY UTILIZATION ECC TEMPERATURE POWER CLOCK COMPUTE PIDS PERFORMANCE SUPPORTED_CLOCKS PAGE_RETIREMENT "
    "ACCOUNTING ENCODER_STATS VOLTAGE ROW_REMAPPER"
).split()
"""Words that ``nvidia-smi -d`` takes beside ``-q``, several with commas between them."""

APT = r"apt-get (update|install( --yes)?( [a-z0-9][a-z0-9.+-]+)+)"
PART = re.compile(r"""((?:'[^']*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}|[^|&;'"])+)(\|\||&&|[|;&]|$)""")
"""A command of a line, with what parts it from the next."""


def read_by_its_reader(command: str, environ: Mapping[str, str]) -> None:
    """Fail where a part of a command would not be taken by what reads it."""
    subprocess.run(["bash", "-n", "-c", command], check=True)
    parts = [match[1].strip() for match in PART.finditer(command)]
    assert all(parts), command
    for part in parts:
        words = shlex.split(part)
        program = words[1] if words[0] == "sudo" else words[0]
        if words[1:2] == ["-m"] and words[2] in MODULES:
            MODULES[words[2]](words)
        elif words[1:2] == ["-X"]:
            assert words[2:4] == ["importtime", "-c"], words
            compile(words[4], "-c", "exec")
        elif words[1:2] == [str(FOLDER)]:
            doctor.parser().parse_args(words[2:])
        elif words[1:2] == ["pip"]:
            _installed(words)
        elif words[0] == "export" and "$(" in part:
            substituted = re.fullmatch(r'export [A-Z_]+="\$\((.+)\)"', part)
            assert substituted is not None, part
            program, option, code = shlex.split(substituted[1])
            assert (Path(program).is_file(), option) == (True, "-c"), part
            compile(code, "-c", "exec")
        elif words[0] == "export":
            _exported(part, environ)
        else:
            assert program in PROGRAMS, f"nobody is known to read {part!r} of {command!r}"
            PROGRAMS[program](words[words.index(program) + 1 :])


def words_are_read(why: str, environ: Mapping[str, str]) -> None:
    """Fail where words name what there is not: a row, a variable's value, a package, an architecture, a page."""
    rows = {*doctor.CHECKS, *doctor.PROBE_CHECKS}
    named = re.findall(r"'([a-z-]+)'", why) + re.findall(r"\bsee ([a-z]+-[a-z-]+)", why)
    assert rows.issuperset(named), (why, named)
    assert ": " not in "".join(re.findall(r"\bsee '[^']*'", why)), why
    for name, value in re.findall(r"\b([A-Z][A-Z0-9_]+)=(\S+)", why):
        assert name in variables.TABLE or environ.get(name) == value.rstrip(";"), (why, name)
        if environ.get(name) is None:
            variables.read(name, {name: value})
    for verb, arguments in re.findall(r"\bpip ((?:un)?install) (.+?)(?= would |[,;)]|$)", why):
        _arguments_of_pip(verb, shlex.split(arguments))
    for command in re.findall(r"apt-get install [a-z0-9 .+-]+?(?= brings|[,;)]|$)", why):
        assert re.fullmatch(APT, command), (why, command)
    for share in re.findall(r"--gpu-memory-utilization (\S+)", why):
        assert 0 <= float(share) < 1, why
    for architecture in re.findall(r"\b\d+\.\d[af]\b", why):
        parse_arch_list(architecture)
    for page in re.findall(r"\bdocs/[\w.]+", why):
        assert (REPO / page).is_file(), why


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


def _unset(words: list[str]) -> None:
    assert words
    assert all(word.isidentifier() for word in words), words


def _installed(words: list[str]) -> None:
    by_uv = words[1] == "pip"
    verb, *arguments = words[2:] if by_uv else words[3:]
    if by_uv:
        assert arguments.pop(0) == "--python"
        arguments.pop(0)
        assert {word for word in arguments if word.startswith("-")} <= UVS_OPTIONS[verb], words
    _arguments_of_pip(verb, arguments)


def _arguments_of_pip(verb: str, arguments: list[str]) -> None:
    options, packages = create_command(verb).parse_args(arguments)
    packages = [*packages, *getattr(options, "editables", [])]
    assert packages, arguments
    for package in packages:
        if folder := re.fullmatch(r"(/.*)\[cuda\]", package):
            project = Path(folder[1], "pyproject.toml").read_text(encoding="utf-8")
            assert re.search(r"^optional-dependencies\.cuda = ", project, re.MULTILINE), package
        else:
            Requirement(package)


def _ours(words: list[str]) -> None:
    name, *arguments = words[3:]
    if name == "sm12x-doctor":
        doctor.parser().parse_args(arguments)
        return
    command = cli.commands[name]
    if hasattr(command, "commands") and arguments:
        assert arguments[0] in command.commands, words
    else:
        command.make_context(name, arguments)


def _nvidia_smi(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-q", action="store_true")
    parser.add_argument("-d")
    options = parser.parse_args(words)
    if options.d is not None:
        assert options.q, words
        assert set(options.d.split(",")) <= set(NVIDIA_SMI_DISPLAYS), words


def _run(program: str, *statuses: int) -> Callable[[list[str]], None]:
    """By the program itself, where it is: one that changes nothing."""

    def read(words: list[str]) -> None:
        if shutil.which(program) is not None:
            done = subprocess.run([program, *words], input="", capture_output=True, text=True)
            assert done.returncode in statuses, (program, words, done.stderr)

    return read


def _as(pattern: str) -> Callable[[list[str]], None]:
    """Arguments, parted by spaces, are of a form."""

    def read(words: list[str]) -> None:
        assert re.fullmatch(pattern, " ".join(words)), (pattern, words)

    return read


PROGRAMS: Mapping[str, Callable[[list[str]], None]] = {
    "unset": _unset,
    "nvidia-smi": _nvidia_smi,
    "ps": _run("ps", 0),
    "grep": _run("grep", 0, 1),
    "head": _run("head", 0),
    "dmesg": _as(""),
    "cd": _as(""),
    "rm": _as(r"/.*"),
    "mkdir": _as(r"-p -m 755 /.*"),
    "apt-get": lambda words: _as(APT)(["apt-get", *words]),
}
MODULES: Mapping[str, Callable[[list[str]], None]] = {
    "pip": _installed,
    "ensurepip": lambda words: _as("")(words[3:]),
    "flashinfer": _ours,
}
