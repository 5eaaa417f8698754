# SPDX-License-Identifier: Apache-2.0
"""Commands that mend something in the environment in which they are pasted, or advice if no command would do.

Each function returns ``(command, why)``: a shell command and its reason, or an empty text and advice.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from .asking import INTERPRETER, PYTHON, TREE, Answers

SERVER = "the server's environment needs it, too"

GUESTS = {
    "WSL2": "this is WSL2, whose driver is Windows's: install or update it there; a Linux driver in here breaks it",
    "container": "this is a container, whose driver is the host's: install or update it there, and start with --gpus all",
    "VM": "this is a virtual machine: how its host hands the GPU over decides about the driver; ask who runs the host",
}
"""Advice for systems whose driver belongs to another system."""


def prepend(variable: str, entry: object) -> str:
    """A command that puts a folder in front of what a variable lists."""
    return f"export {variable}={shlex.quote(str(entry))}${{{variable}:+:${variable}}}"


FIRST = prepend("PYTHONPATH", TREE)


def pip(a: Answers, words: str) -> tuple[str, str]:
    """pip's ``install`` or ``uninstall`` with its arguments, by what this Python's environment has of installers."""
    found = a.facts.get("installer", {})
    uv = found.get("uv")
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


def apt(a: Answers, package: str) -> tuple[str, str]:
    """A package of Debian's or Ubuntu's; in words where another system is, or this user may not."""
    found = a.facts.get("system", {})
    if not found.get("apt", True):
        return "", f"this system has no apt-get: install what it calls {package}"
    command = f"apt-get install --yes {package}"
    if os.geteuid() == 0:
        return command, ""
    if not found.get("sudo", True):
        return "", f"as root: {command}"
    return f"sudo {command}", ""


def driver_package(a: Answers, package: str) -> tuple[str, str]:
    """A driver's package, unless the driver is another system's."""
    if words := GUESTS.get(a.facts.get("system", {}).get("guest") or ""):
        return "", words
    command, why = apt(a, package)
    return command, why or "or as the system's vendor says"


def named_in(a: Answers, error: str) -> tuple[str, str] | None:
    """The installation that a build's error asks for; None where it asks for none."""
    named = re.search(r"\b(pip|apt-get) install ([^\n()]+)", error)
    if not named:
        return None
    if named[1] == "apt-get":
        return apt(a, named[2])
    command, why = pip(a, f"install {named[2]}")
    # A toolkit that a variable names is taken before one that pip brings.
    variable = re.match(r"(CUDA_HOME|CUDA_PATH|FLASHINFER_NVCC)=", error)
    return (f"unset {variable[1]} && {command}" if variable and command else command), why


def has_ninja() -> bool:
    """Whether this Python's environment has ninja, even if it is not on ``PATH``."""
    return (Path(INTERPRETER).parent / "ninja").exists()
