# SPDX-License-Identifier: Apache-2.0
"""Commands that fix something in the environment in which they are pasted, or advice if no command would do.

Each function returns ``(command, why)``: a shell command and its reason, or an empty text and advice.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from .asking import CLI, FOLDER, INTERPRETER, PYTHON, TREE, Answers, fork_is_first
from .questions import REPLACED

SERVER = "the server's environment needs it, too"

GUESTS = {
    "WSL2": "this is WSL2, whose driver is Windows's: install or update it there; a Linux driver in here breaks it",
    "container": "this is a container, whose driver is the host's: install or update it there, and start with --gpus "
    "all",
    "VM": "this is a virtual machine: how its host hands the GPU over decides about the driver; ask who runs the host",
}
"""Advice for systems whose driver belongs to another system."""


def prepend(variable: str, entry: object) -> str:
    """A command that puts a folder before what a variable lists."""
    return f"export {variable}={shlex.quote(str(entry))}${{{variable}:+:${variable}}}"


FIRST = prepend("PYTHONPATH", TREE)


def pip(a: Answers, words: str) -> tuple[str, str]:
    """pip's ``install`` or ``uninstall`` with its arguments, by what this Python's environment has of installers.

    Words in place of a command where it would replace a build of the user's.
    """
    found = a.facts.get("installer", {})
    uv = found.get("uv")
    if builds := replaced(a, words):
        goes = "remove" if words.startswith("uninstall") else "replace"
        return "", f"{'; '.join(builds)}: pip {words} would {goes} {'it' if len(builds) == 1 else 'them'}: {OWN_BUILD}"
    if found.get("managed") and not a.environ.get("PIP_BREAK_SYSTEM_PACKAGES"):
        made = "" if found.get("ensurepip", True) else " (apt-get install python3-venv brings venv)"
        return "", (
            f"the system manages this Python, so pip and uv refuse: make an environment, python3 -m venv ~/venv{made}, "
            f"install there, pip {words}, and serve from it"
        )
    if found.get("pip", True):
        return f"{PYTHON} -m pip {words}", ""
    if uv:
        verb, _, rest = words.replace("uninstall --yes", "uninstall").partition(" ")
        return f"{shlex.quote(uv)} pip {verb} --python {PYTHON} {rest}", ""
    if found.get("ensurepip"):
        return f"{PYTHON} -m ensurepip && {PYTHON} -m pip {words}", ""
    return (
        "",
        f"this Python, {INTERPRETER}, has neither pip nor uv: with the program that made its environment, pip {words}",
    )


OWN_BUILD = "build the version that is needed yourself, or use another environment, unless it may go"

REPLACED_WITH: Mapping[str, tuple[str, ...]] = {
    "vllm": tuple(name for name in REPLACED if name not in ("flashinfer-sm12x", "ninja")),
    "flashinfer-sm12x": ("flashinfer-sm12x", "flashinfer-python"),
}
"""The packages that pip may replace when it installs one with its requirements."""


def replaced(a: Answers, words: str) -> list[str]:
    """The builds of the user's that pip would replace, each with its version and kind."""
    builds: Mapping[str, Mapping[str, str]] = a.get("installer", "builds") or {}
    verb, *arguments = shlex.split(words)
    reasons = {}
    for argument in arguments:
        if argument.startswith("-"):
            continue
        folder = argument.rpartition("[")[0] if argument.startswith("/") else ""
        name = "flashinfer-sm12x" if folder else re.split(r"[=<>!~\[ ]", argument)[0]
        alone = verb == "uninstall" or "--no-deps" in arguments
        for each in (name,) if alone else REPLACED_WITH.get(name, (name,)):
            build = builds.get(each)
            if build is not None and not (folder and build["source"] == folder):
                source = f", {build['source']}" if build["source"] else ""
                reasons[each] = f"{each} {build['version']} is a build of your own ({build['kind']}{source})"
    return list(reasons.values())


SHELL = ("cd", "export", "unset")
"""The shell's own commands that fixes run."""

WHERE = {
    "nvidia-smi": {
        "WSL2": "in WSL2 it is in /usr/lib/wsl/lib",
        "container": "the container was started without it: NVIDIA_DRIVER_CAPABILITIES has to name utility",
    },
}
"""Advice on a program that is not on ``PATH``, by the kind of guest."""


def where(a: Answers, name: str) -> str:
    """Advice on a program that is not on ``PATH``."""
    return WHERE.get(name, {}).get(a.get("system", "guest") or "", "install it first")


def programs_of(command: str) -> list[str]:
    """The programs that a command runs, in their order."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    found, first = [], True
    for word in lexer:
        if word and not word.strip("|&;"):
            first = True
        elif first:
            found.append(word)
            first = word == "sudo"
    return found


def pasteable(a: Answers, command: str, why: str) -> tuple[str, str]:
    """The same fix if all that its command runs is there; else words."""
    if not fork_is_first(a):
        command = command.replace(f"{CLI} sm12x-doctor", f"{PYTHON} {shlex.quote(str(FOLDER))}")
    lacking = [name for name in programs_of(command) if name not in SHELL and "/" not in name and not has(a, name)]
    if lacking:
        name = lacking[0]
        return "", "; ".join(filter(None, (f"{name} is not on PATH ({where(a, name)}): {command}", why)))
    if CLI in command.replace(f"{CLI} sm12x-doctor", "") and not _fork_runs(a):
        return "", "; ".join(filter(None, (f"once 'import' is ok: {command}", why)))
    return command, why


def _fork_runs(a: Answers) -> bool:
    """Whether ``python -m flashinfer`` has this fork's commands, which all but the doctor import it."""
    failed = a.get("import", "failed") and a.get("import", "fork") is None
    return fork_is_first(a) and not failed and not a.get("path", "aside")


def as_root(a: Answers, command: str) -> tuple[str, str]:
    """A command that only root may run; in words where this user cannot become root."""
    if os.geteuid() == 0:
        return command, ""
    if not has(a, "sudo"):
        return "", f"as root: {command}"
    return " && ".join(f"sudo {part}" for part in command.split(" && ")), ""


def has(a: Answers, program: str) -> bool:
    """Whether a program is on ``PATH``; taken for granted where that question had no answer."""
    there = a.get("system", "programs")
    return there is None or program in there


def apt(a: Answers, package: str) -> tuple[str, str]:
    """A package of Debian's or Ubuntu's; in words where another system is, or this user may not."""
    if not has(a, "apt-get"):
        return "", f"this system has no apt-get: install what it calls {package}"
    return as_root(a, f"apt-get update && apt-get install --yes {package}")


def driver_package(a: Answers, package: str) -> tuple[str, str]:
    """A driver's package, unless the driver is another system's."""
    if words := GUESTS.get(a.get("system", "guest") or ""):
        return "", words
    command, why = apt(a, package)
    return command, why or "or as the system's vendor says; restart the machine then"


def named_in(a: Answers, error: str) -> tuple[str, str] | None:
    """The installation that a build's error asks for; None where it asks for none."""
    named = re.search(r"\b(pip|apt-get) install ([^\n()]+)", error)
    if not named:
        return None
    if named[1] == "apt-get":
        return apt(a, named[2])
    command, why = pip(a, f"install {named[2].strip()}")
    if command and "[cuda]" in command and a.get("path", "vllm") is not None:
        command = f"{command} && {NAME_TOOLKIT}"
    # A toolkit that a variable names is taken before one that pip brings.
    variable = re.match(r"(CUDA_HOME|CUDA_PATH|FLASHINFER_NVCC)=", error)
    return (f"unset {variable[1]} && {command}" if variable and command else command), why


FIND_TOOLKIT = "from flashinfer.jit.cpp_ext import find_toolkit; print(find_toolkit().root)"
NAME_TOOLKIT = f'export CUDA_HOME="$({PYTHON} -c {shlex.quote(FIND_TOOLKIT)})"'
"""README's second line for a machine without a toolkit: vLLM does not look for pip's by itself."""


def has_ninja() -> bool:
    """Whether this Python's environment has ninja, even if it is not on ``PATH``."""
    return (Path(INTERPRETER).parent / "ninja").exists()
