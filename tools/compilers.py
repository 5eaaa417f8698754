# SPDX-License-Identifier: Apache-2.0
"""CUDA compilers of many versions side by side, each in a folder of its own: ``build/compilers/<version>``.

    python tools/compilers.py              lists them, and which are installed
    python tools/compilers.py VERSION...   installs those that are missing; also "newest" and "all" (270 MB each)

``CUDA_HOME=build/compilers/<version>/nvidia/cu13`` builds with one. Each has the code generator, the headers and the
runtime of its own release, without which it compiles nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from create_env import ROOT, fail
from progress import Progress

FOLDER = ROOT / "build" / "compilers"
RUNTIMES = {
    "13.0.48": "13.0.48",
    "13.0.88": "13.0.96",
    "13.1.80": "13.1.80",
    "13.1.115": "13.1.80",
    "13.2.51": "13.2.51",
    "13.2.78": "13.2.75",
    "13.2.86": "13.2.86",
    "13.3.33": "13.3.29",
    "13.3.73": "13.3.29",
    "13.4.59": "13.4.49",
    "13.4.92": "13.4.92",
    "13.5.37": "13.5.37",
}
"""Every ``nvidia-cuda-nvcc`` of CUDA 13, oldest first, and the ``nvidia-cuda-runtime`` that goes with it."""

NEWEST = list(RUNTIMES)[-1]


def chosen(words: Sequence[str]) -> list[str]:
    """The versions that ``words`` name, in their order; ``ValueError`` for a word that is none."""
    versions: list[str] = []
    for word in words:
        if word not in (*RUNTIMES, "newest", "all"):
            raise ValueError(f"{word} is not one of them: {', '.join(RUNTIMES)}, newest, all")
        versions += RUNTIMES if word == "all" else [NEWEST if word == "newest" else word]
    return list(dict.fromkeys(versions))


def toolkit(version: str) -> Path:
    """The folder that ``CUDA_HOME`` names to build with a version, whether or not it is installed."""
    return FOLDER / version / "nvidia" / "cu13"


def install(version: str) -> str:
    """Install a version if it is missing; what pip said if it failed, else an empty text."""
    if toolkit(version).is_dir():
        return ""
    pieces = [f"{name}=={version}" for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")]
    unfinished = FOLDER / f"{version}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--target", str(unfinished), *pieces, f"nvidia-cuda-runtime=={RUNTIMES[version]}"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return done.stderr or done.stdout
    # nvcc looks for cicc in nvvm/bin; the wheel of 13.0.48 has it beside nvcc.
    cicc = unfinished / "nvidia" / "cu13" / "nvvm" / "bin" / "cicc"
    if not cicc.exists():
        cicc.parent.mkdir()
        cicc.symlink_to("../../bin/cicc")
    unfinished.rename(FOLDER / version)
    return ""


def main(words: Sequence[str]) -> int:
    try:
        versions = chosen(words)
    except ValueError as error:
        print(f"compilers.py: {error}", file=sys.stderr)
        return 2
    if not words:
        for version in RUNTIMES:
            print(f"nvcc {version:9}{toolkit(version) if toolkit(version).is_dir() else 'not installed'}")
    missing = [version for version in versions if not toolkit(version).is_dir()]
    if missing:
        with Progress(f"pip install nvcc {', '.join(missing)}"):
            output = {version: install(version) for version in missing}
        for version in missing:
            if output[version]:
                return fail(f"pip could not install nvcc {version}", output[version], "compilers.py")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
