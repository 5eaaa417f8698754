# SPDX-License-Identifier: Apache-2.0
"""An upstream tree: a git checkout of upstream's, or the pinned wheel's files laid out as one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FORK = Path(__file__).resolve().parents[2]

_DISTRIBUTION = "flashinfer-python"
# Where a source tree has what the wheel keeps in flashinfer/data. Headers of others are submodules there: links here.
_SOURCES = ("csrc", "include")
_SUBMODULES = {"cutlass": "3rdparty/cutlass", "spdlog": "3rdparty/spdlog", "cccl": "3rdparty/cccl"}
# Made by an editable install of upstream's, and ignored by its git.
_UNTRACKED = ("flashinfer/data", "flashinfer/_build_meta.py", "3rdparty", "__pycache__")
_IDENTITY = {"GIT_AUTHOR_NAME": "flashinfer-sm12x", "GIT_AUTHOR_EMAIL": "flashinfer-sm12x@localhost"}

# Of what is committed upstream, folders of which the wheel has the files.
IN_WHEEL = ("flashinfer/", "csrc/", "include/")
SETTINGS = (".pre-commit-config.yaml", ".clang-format", "pyproject.toml")


class TreeError(RuntimeError):
    """The tree cannot be exported onto; the message says why and what to do."""


def pinned_version() -> str:
    """The version of upstream that this fork extends."""
    version: dict[str, str] = {}
    exec((FORK / "flashinfer" / "_version.py").read_text(encoding="utf-8"), version)
    return version["UPSTREAM_VERSION"]


def pinned_wheel() -> Path:
    """The ``flashinfer`` folder of the installed wheel that this fork extends.

    Raises:
        TreeError: it is not installed.
    """
    for found in importlib.metadata.distributions(name=_DISTRIBUTION):
        package = Path(str(found.locate_file("flashinfer"))).resolve()
        if found.version == pinned_version() and package != FORK / "flashinfer" and package.is_dir():
            return package
    raise TreeError(f"{_DISTRIBUTION}=={pinned_version()} is not installed: run 'make env', or name a checkout")


def lay_out_wheel(folder: Path) -> None:
    """Make ``folder`` upstream's source tree, as far as the wheel has it, with one commit.

    The wheel has no tests, benchmarks or docs, and no configuration of formatters. CUTLASS, spdlog and CCCL, which are
    submodules upstream, are links into the wheel, as is ``flashinfer/data`` into the tree: an editable install of
    upstream's makes those.
    """
    wheel = pinned_wheel()
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    (folder / "3rdparty").mkdir(parents=True)
    shutil.copytree(
        wheel,
        folder / "flashinfer",
        ignore=lambda at, names: {*ignore(at, names), *(["data"] if Path(at) == wheel else [])},
    )
    for name in _SOURCES:
        shutil.copytree(wheel / "data" / name, folder / name, ignore=ignore)
    for name, place in _SUBMODULES.items():
        (folder / place).symlink_to(wheel / "data" / name, target_is_directory=True)
    link_data(folder)
    git(folder, "init", "--quiet", "--initial-branch=main")
    exclude = folder / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("".join(f"{name}\n" for name in _UNTRACKED), encoding="utf-8")
    # No compression: a quarter of a gigabyte of generated kernels, for a tree that lives an hour.
    git(folder, "-c", "core.compression=0", "-c", "core.fsync=none", "add", "--all")
    version = importlib.metadata.version(_DISTRIBUTION)
    commit(folder, f"The files of {_DISTRIBUTION} {version}")


def link_data(folder: Path) -> None:
    """What an editable install of upstream's adds to a source tree: ``flashinfer/data``."""
    data = folder / "flashinfer" / "data"
    data.mkdir(exist_ok=True)
    places = {**{name: name for name in _SOURCES}, **_SUBMODULES}
    for name, place in places.items():
        link = data / name
        if not link.exists():
            link.symlink_to(Path("..") / ".." / place, target_is_directory=True)


def git(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What ``git`` prints in ``folder``.

    Raises:
        TreeError: it failed; the message has what it said.
    """
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )
    if done.returncode != 0:
        raise TreeError(f"git {' '.join(arguments[:3])} in {folder}: {done.stderr.strip()}")
    return done.stdout


def commit(folder: Path, message: str) -> None:
    """Commit what is staged, as whoever git knows, else as this tool."""
    known = subprocess.run(["git", "-C", str(folder), "config", "user.email"], capture_output=True, check=False)
    environment = {}
    if known.returncode != 0:
        environment = {**_IDENTITY, **{name.replace("AUTHOR", "COMMITTER"): text for name, text in _IDENTITY.items()}}
    # No hooks: formatting is done already, and a hook may change what was checked.
    git(folder, "commit", "--quiet", "--no-verify", "--message", message, environment=environment)


def base_of(folder: Path, wanted: str) -> str:
    """The commit onto which topics go.

    Raises:
        TreeError: ``folder`` is no git checkout of upstream's, or has no such revision.
    """
    if not (folder / "flashinfer" / "gemm").is_dir() or not (folder / ".git").exists():
        raise TreeError(
            f"{folder} is not a git checkout of FlashInfer. Name one, or a folder that does not exist: it becomes the "
            "pinned wheel's files, laid out as upstream's tree"
        )
    return git(folder, "rev-parse", "--verify", f"{wanted}^{{commit}}").strip()


@contextmanager
def work_tree(folder: Path, base: str) -> Iterator[Path]:
    """A second work tree of the repository, at ``base``, with the formatters' settings alone; the first stays as it is."""
    with tempfile.TemporaryDirectory(prefix="upstream_patch_") as place:
        tree = Path(place) / "tree"
        git(folder, "worktree", "add", "--quiet", "--detach", "--no-checkout", str(tree), base)
        try:
            git(tree, "reset", "--quiet", base)
            there = git(tree, "ls-files", "--", *SETTINGS).split()
            if there:
                git(tree, "checkout", "--quiet", "--", *there)
            yield tree
        finally:
            git(folder, "worktree", "remove", "--force", str(tree))


class Files:
    """A tree's texts at a commit, with changes that nobody has written yet."""

    def __init__(self, folder: Path, base: str) -> None:
        self._folder, self._base = folder, base
        self._original: dict[str, str | None] = {}
        self._paths: set[str] | None = None
        self.changed: dict[str, str] = {}

    def original(self, path: str) -> str | None:
        """The text of ``path`` in the base commit; None when it has none."""
        if self._paths is None:
            names = git(self._folder, "ls-tree", "-r", "-z", "--name-only", self._base)
            self._paths = set(names.split("\0"))
        if path not in self._original:
            there = path in self._paths
            self._original[path] = git(self._folder, "show", f"{self._base}:{path}") if there else None
        return self._original[path]

    def text(self, path: str) -> str | None:
        """The text of ``path`` as changed so far."""
        return self.changed[path] if path in self.changed else self.original(path)

    def containing(self, text: str, suffix: str) -> list[str]:
        """Paths of the base commit whose texts hold ``text``, and whose names end in ``suffix``."""
        try:
            found = git(
                self._folder, "grep", "--fixed-strings", "--name-only", "-e", text, self._base, "--", f"*{suffix}"
            )
        except TreeError:  # none
            return []
        return [line.partition(":")[2] for line in found.splitlines()]
