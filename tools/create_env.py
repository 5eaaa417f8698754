# SPDX-License-Identifier: Apache-2.0
"""Find or make the Python environment that tests, demo and benchmark run in. Needs the standard library only.

    python3 tools/create_env.py --find    prints the environment to use: the active one if it has every requirement,
                                          else .venv in the checkout
    python3 tools/create_env.py DIR       makes DIR, or completes it, with everything that is needed

``TORCH`` names the torch to install (default ``torch==2.13.0``, any build of it); pip's own variables
(``PIP_INDEX_URL``, ``PIP_EXTRA_INDEX_URL``, ``PIP_CACHE_DIR``) say where it comes from.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ("requirements.txt", "requirements-cuda.txt", "requirements-dev.txt")
OLDEST, NEWEST = (3, 10), (3, 13)
DEFAULT_TORCH = "torch==2.13.0"

# Run by the environment's own interpreter; prints what is absent or pinned to another version.
PROBE = """
import importlib.metadata as metadata, sys
for line in sys.argv[1:]:
    name, pin = line.split(" ")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    if version is None or (pin != "any" and version.split("+")[0] != pin):
        print(name)
"""


def main() -> int:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        return fail(
            f"{sys.executable} is Python {sys.version.split()[0]}; Python 3.10 to 3.13 is needed. "
            f"Name one: make PYTHON=python3.12 ..."
        )
    if sys.argv[1:] == ["--find"]:
        print(find())
        return 0
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        return fail("usage: create_env.py --find | DIR")
    return create(Path(sys.argv[1]))


def find() -> Path:
    """The active virtual environment if it is complete, else ``.venv``."""
    active = os.environ.get("VIRTUAL_ENV")
    if active and Path(active, "bin", "python").exists() and not missing(Path(active)):
        return Path(active)
    return ROOT / ".venv"


def missing(env: Path) -> list[str]:
    """Names of the requirements that ``env`` lacks or has in another version than pinned."""
    wanted = ["torch any"]
    for file in REQUIREMENTS:
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            match = re.match(r"([\w.-]+)(?:==([\w.]+))?", line)
            if match and not line.startswith("#"):
                wanted.append(f"{match[1]} {match[2] or 'any'}")
    probe = subprocess.run(
        [str(env / "bin" / "python"), "-c", PROBE, *wanted],
        capture_output=True,
        text=True,
    )
    return probe.stdout.split() if probe.returncode == 0 else ["a working interpreter"]


def create(env: Path) -> int:
    python = env / "bin" / "python"
    if not python.exists():
        print(f"creating {env} with Python {sys.version.split()[0]}", flush=True)
        if not make_venv(env):
            return fail(
                "could not create a virtual environment with pip in it. On Debian and Ubuntu: apt install python3-venv"
            )
    # Python compiles the modules that are imported when they first are; all of them, in one process, take two minutes.
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    if absent := missing(env):
        print(f"installing {len(absent)} packages: {' '.join(absent)}", flush=True)
        torch = [] if "torch" not in absent else [os.environ.get("TORCH", DEFAULT_TORCH)]
        files = [word for file in REQUIREMENTS for word in ("-r", str(ROOT / file))]
        if run([*pip, *torch, *files]):
            return fail("pip could not install the requirements; its message stands above")
    # An environment made here serves this checkout from any directory. One that only happened to be complete is left
    # as it is: make sets PYTHONPATH.
    # Without dependencies and isolation: both are settled above.
    if env.resolve() != ROOT / ".venv" or serves_checkout(python):
        return 0
    if run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]):
        return fail("pip could not install the checkout; its message stands above")
    return 0


def serves_checkout(python: Path) -> bool:
    code = "import importlib.util as u; s = u.find_spec('flashinfer'); print(s and s.origin)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd="/", env=environment)
    return found.stdout.strip() == str(ROOT / "flashinfer" / "__init__.py")


def make_venv(env: Path) -> bool:
    """``python -m venv``; where the distribution split ``ensurepip`` off, the outer pip installs pip into it."""
    if subprocess.run([sys.executable, "-m", "venv", str(env)], capture_output=True).returncode == 0:
        return True
    python = env / "bin" / "python"
    return (
        run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(env)]) == 0
        and run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "pip"]) == 0
    )


def run(command: list[str]) -> int:
    print("+", shlex.join(command), flush=True)
    return subprocess.run(command).returncode


def fail(message: str) -> int:
    print(f"create_env.py: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
