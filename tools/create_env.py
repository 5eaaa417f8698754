# SPDX-License-Identifier: Apache-2.0
"""Find or make the Python environment that tests, demo and benchmark run in. Needs the standard library only.

    python3 tools/create_env.py --find    prints the environment to use: the active one if it has every requirement,
                                          else .venv in the checkout
    python3 tools/create_env.py DIR       makes DIR, or completes it, with everything that is needed
    python3 tools/create_env.py --demo DIR -- COMMAND    with what runs and compiles kernels, no tests, no linters;
                                          COMMAND (the emulator's build) runs beside pip, which mostly waits

``TORCH`` names the torch to install (default ``torch==2.13.0``, any build of it); pip's own variables
(``PIP_INDEX_URL``, ``PIP_EXTRA_INDEX_URL``, ``PIP_CACHE_DIR``) say where it comes from. One line is seen of pip; if it
fails, its messages and, last, the fix.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from progress import Progress

ROOT = Path(__file__).resolve().parent.parent
RUNNING = ("requirements.txt", "requirements-cuda.txt")
REQUIREMENTS = (*RUNNING, "requirements-dev.txt")
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


# A message of pip or of a compiler -> what to do.
FIXES = {
    r"ensurepip is not available|No module named (?:pip|venv|ensurepip)": "on Debian and Ubuntu apt-get install "
    "python3-venv",
    r"No space left on device|Disk quota exceeded": "the disk is full. A torch with CUDA and the rest need 9 GB; "
    "make room, "
    "or VENV=/another/disk/venv TMPDIR=/another/disk/tmp make ...",
    r"name resolution|Name or service not known|Network is unreachable|Connection refused|timed out|"
    r"ConnectTimeout|No route to host": "no package index answers. Is there a network, or a proxy to name in "
    "https_proxy? "
    "PIP_INDEX_URL names another index, PIP_FIND_LINKS a folder of wheels",
    r"CERTIFICATE_VERIFY_FAILED": "the index's certificate is not trusted: apt-get install ca-certificates, or "
    "PIP_CERT=FILE",
}


def main() -> int:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        return fail(
            f"{sys.executable} is Python {sys.version.split()[0]}; Python 3.10 to 3.13 is needed. "
            "Name one: make PYTHON=python3.12 ... (apt-get install python3.12-venv, or uv python install 3.12)"
        )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("env", metavar="DIR", nargs="?", type=Path)
    parser.add_argument("command", metavar="COMMAND", nargs="*")
    options = parser.parse_args()
    if options.find == bool(options.env):
        parser.error("either --find or DIR")
    if options.find:
        print(find())
        return 0
    return create(options.env, RUNNING if options.demo else REQUIREMENTS, options.command)


def find() -> Path:
    """The active virtual environment if it is complete, else ``.venv``."""
    active = os.environ.get("VIRTUAL_ENV")
    if active and Path(active, "bin", "python").exists() and not missing(Path(active)):
        return Path(active)
    return ROOT / ".venv"


def missing(env: Path, files: Sequence[str] = REQUIREMENTS) -> list[str]:
    """Names of the requirements that ``env`` lacks or has in another version than pinned."""
    wanted = ["torch any"]
    for file in files:
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            # A closed range stands for its last version, which pip takes.
            match = re.match(r"([\w.-]+)(?:(?:==|>=[\w.]+,<=)([\w.]+))?", line)
            if match and not line.startswith("#"):
                wanted.append(f"{match[1]} {match[2] or 'any'}")
    probe = subprocess.run(
        [str(env / "bin" / "python"), "-c", PROBE, *wanted],
        capture_output=True,
        text=True,
    )
    return probe.stdout.split() if probe.returncode == 0 else ["a working interpreter"]


def create(env: Path, files: Sequence[str], command: Sequence[str]) -> int:
    """``env`` with the requirements of ``files``, while ``command`` runs."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        beside = subprocess.Popen(command, stdout=output, stderr=output) if command else None
        status = install(env, files)
        if beside is None:
            return status
        if beside.poll() is None and status == 0:
            with Progress(f"waiting for {' '.join(command)}"):
                beside.wait()
        if status or beside.wait() == 0:
            beside.terminate()
            beside.wait()
            return status
        output.seek(0)
        return fail(f"{' '.join(command)} failed", output.read())


def install(env: Path, files: Sequence[str]) -> int:
    python = env / "bin" / "python"
    if not python.exists() and (message := make_venv(env)):
        return fail(
            f"could not create {env}, a virtual environment with pip in it",
            message,
        )
    # Python compiles the modules that are imported when they first are; all of them, in one process, take two minutes.
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    if absent := missing(env, files):
        torch = [] if "torch" not in absent else [os.environ.get("TORCH", DEFAULT_TORCH)]
        requirements = [word for file in files for word in ("-r", str(ROOT / file))]
        with Progress(f"installing {len(absent)} packages into {env}"):
            done = run([*pip, *torch, *requirements])
        if done.returncode:
            return fail("pip could not install the requirements", done.stdout)
    # An environment made here serves this checkout from any directory. One that was already complete is not changed,
    # nor is the demo's: make sets PYTHONPATH. Dependencies and isolation are off, because both are settled above.
    if env.resolve() != ROOT / ".venv" or files == RUNNING or serves_checkout(python):
        return 0
    done = run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
    return fail("pip could not install the checkout", done.stdout) if done.returncode else 0


def serves_checkout(python: Path) -> bool:
    code = "import importlib.util as u; s = u.find_spec('flashinfer'); print(s and s.origin)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd="/", env=environment)
    return found.stdout.strip() == str(ROOT / "flashinfer" / "__init__.py")


def make_venv(env: Path) -> str:
    """``python -m venv``; where the distribution split ``ensurepip`` off, the outer pip installs pip into it.

    Returns the error's text if neither works, else nothing.
    """
    existed = env.exists()
    first = run([sys.executable, "-m", "venv", str(env)])
    if first.returncode == 0:
        return ""
    python = env / "bin" / "python"
    second = run([sys.executable, "-m", "venv", "--without-pip", str(env)])
    if second.returncode == 0:
        second = run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "pip"])
    if second.returncode == 0:
        return ""
    if not existed:
        shutil.rmtree(env, ignore_errors=True)  # half an environment would pass for one
    return first.stdout + second.stdout


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def fail(message: str, output: str = "", program: str = "create_env.py") -> int:
    """One line: with the fix if what pip or another program said is known, else after all that it said."""
    for pattern, fix in FIXES.items():
        if match := re.search(pattern, output):
            message, output = f"{message} ({match[0]}): {fix}", ""
            break
    print(f"{output}{program}: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
