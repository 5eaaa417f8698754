#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Carry out a Dockerfile's instructions in a plain Debian made by debootstrap, without Docker and without a GPU.

    sudo docker/chroot_test.py docker/Dockerfile /tmp/image --build-arg VLLM=torch==2.13.0

What RUN lines mount is stood in for: a bind mount by a copy of the checkout, a cache by nothing. ``--copy`` takes files
of this machine along that its package sources need, such as pip's configuration. Ends with a table of the
instructions, and with the first that fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASES = {"debian:12-slim": "bookworm"}
# A mount namespace of its own: what is mounted for the command is gone after it.
INSIDE = (
    'mount --types proc proc "$1/proc" && exec chroot --userspec="$2" "$1" /usr/bin/env --ignore-environment "${@:3}"'
)


class Image:
    """A root file system, and what a Dockerfile has set so far."""

    def __init__(self, root: Path, build_args: dict[str, str], files: list[Path]) -> None:
        self.root = root
        self.build_args = build_args
        self.files = files
        self.arguments: dict[str, str] = {}
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.user, self.folder = "0", "/"

    def expand(self, text: str) -> str:
        return string.Template(text).safe_substitute({**self.arguments, **self.environment})

    def run(self, command: str) -> None:
        for option in re.findall(r"--mount=(\S+)", command):
            fields = dict(field.partition("=")[::2] for field in option.split(","))
            if fields["type"] == "bind":
                copy_checkout(self.root / fields["target"].lstrip("/"))
        for file in self.files:  # before each command, since packages bring some of these themselves
            target = self.root / str(file).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        command = re.sub(r"^(?:\s*--mount=\S+)+", "", command).strip()
        variables = {**self.arguments, **self.environment, "HOME": self.home(), "LANG": "C.UTF-8"}
        given = [f"{name}={value}" for name, value in variables.items()]
        script = f"cd {shlex.quote(self.folder)} && {command}"
        inside = [str(self.root), f"{self.user}:{self.user}", *given, "/bin/bash", "-o", "pipefail", "-c", script]
        subprocess.run(["unshare", "--mount", "/bin/bash", "-c", INSIDE, "inside", *inside], check=True)

    def home(self) -> str:
        for line in (self.root / "etc" / "passwd").read_text().splitlines():
            fields = line.split(":")
            if fields[2] == self.user:
                return fields[5]
        return "/"

    def copy(self, words: list[str]) -> None:
        *sources, target = (self.expand(word) for word in words)
        into = self.root / target.lstrip("/")
        into.mkdir(parents=True, exist_ok=True)
        for source in sources:
            shutil.copy(ROOT / source, into)

    def carry_out(self, instruction: str, text: str) -> bool:
        """False where the instruction only says what a container is started with."""
        if instruction == "RUN":
            self.run(text)
        elif instruction == "ARG":
            name, _, default = shlex.split(text)[0].partition("=")
            self.arguments[name] = self.build_args.get(name, self.expand(default))
        elif instruction == "ENV":
            for word in shlex.split(text):
                name, _, value = word.partition("=")
                self.environment[name] = self.expand(value)
        elif instruction == "COPY":
            self.copy(shlex.split(text))
        elif instruction == "USER":
            self.user = self.expand(text)
        elif instruction == "WORKDIR":
            self.folder = self.expand(text)
            (self.root / self.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        else:
            return False
        return True


def copy_checkout(target: Path) -> None:
    """What git knows, and the wheels of kernels: what an image's build would see, but for ignored files."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in [*filter(None, files.split("\0")), *map(str, (ROOT / "dist").glob("*.whl"))]:
        source = ROOT / name
        into = target / source.relative_to(ROOT)
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, into)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """``(RUN, command)`` and so on; continued lines are one, comments are left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            instruction, _, rest = line.strip().partition(" ")
            yield instruction, rest.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("root", type=Path, help="Folder for the file system; made, or used as debootstrap left it")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--copy", action="append", default=[], type=Path, metavar="FILE", help="To the same place inside"
    )
    options = parser.parse_args()
    for program, package in {"debootstrap": "debootstrap", "unshare": "util-linux", "chroot": "coreutils"}.items():
        if shutil.which(program) is None:
            parser.error(f"there is no {program}: apt-get install {package}")
    if os.geteuid():
        parser.error("it makes a root file system, which only root may: sudo -E")
    files = [Path("/etc/resolv.conf"), *options.copy]
    image = Image(options.root.resolve(), dict(each.split("=", 1) for each in options.build_arg), files)
    table: list[str] = []
    for instruction, text in instructions(options.dockerfile.read_text()):
        print(f"--- {instruction} {text}", flush=True)
        started, outcome = time.monotonic(), "done"
        try:
            if instruction == "FROM":
                if not (image.root / "etc").is_dir():
                    release = RELEASES[text]
                    subprocess.run(["debootstrap", "--variant=minbase", release, str(image.root)], check=True)
            elif not image.carry_out(instruction, text):
                outcome = "not carried out"
        except subprocess.CalledProcessError as error:
            outcome = f"failed, exit status {error.returncode}"
        line = text if len(text) <= 70 else f"{text[:67]}..."
        table.append(f"{outcome:17}{time.monotonic() - started:6.1f} s  {instruction} {line}")
        if outcome.startswith("failed"):
            break
    print("\n".join(["", *table]))
    return int("failed" in table[-1])


if __name__ == "__main__":
    sys.exit(main())
