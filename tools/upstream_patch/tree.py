# SPDX-License-Identifier: Apache-2.0
"""An upstream tree: a git checkout of upstream's, or the pinned wheel's files laid out as one."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flashinfer._layer import wheel_root
from flashinfer_sm12x.versions import UPSTREAM_DISTRIBUTION, UPSTREAM_VERSION

FORK = Path(__file__).resolve().parents[2]

# Places in a source tree of the wheel's flashinfer/data. Third-party headers are submodules there, and links here.
_SOURCES = ("csrc", "include")
_SUBMODULES = {"cutlass": "3rdparty/cutlass", "spdlog": "3rdparty/spdlog", "cccl": "3rdparty/cccl"}
# Made by an editable install of upstream's, and ignored by its git.
_UNTRACKED = "flashinfer/data\nflashinfer/_build_meta.py\n3rdparty\n__pycache__\n"


class ExportError(RuntimeError):
    """Nothing was exported; the message says why and what to do."""


def lay_out_wheel(folder: Path) -> None:
    """Make ``folder`` upstream's source tree with one commit, as far as the wheel has its files.

    The wheel has no tests, benchmarks or docs, and no configuration of formatters. CUTLASS, spdlog and CCCL, which are
    submodules upstream, are links into the wheel, as is ``flashinfer/data`` into the tree: an editable install of
    upstream's makes those.
    """
    wheel = wheel_root()
    data = folder / "flashinfer" / "data"
    shutil.copytree(wheel, folder / "flashinfer", ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "data"))
    data.mkdir()
    for name in _SOURCES:
        shutil.copytree(wheel / "data" / name, folder / name)
        (data / name).symlink_to(Path("..") / ".." / name, target_is_directory=True)
    (folder / "3rdparty").mkdir()
    for name, place in _SUBMODULES.items():
        (folder / place).symlink_to(wheel / "data" / name, target_is_directory=True)
        (data / name).symlink_to(Path("..") / ".." / place, target_is_directory=True)
    git(folder, "init", "--quiet", "--initial-branch=main", "--template=")  # whose hooks and excludes are nobody's here
    (folder / ".git" / "info").mkdir()
    (folder / ".git" / "info" / "exclude").write_text(_UNTRACKED, encoding="utf-8")
    # No compression: a quarter of a gigabyte of generated kernels, for a tree that lives an hour.
    git(folder, "-c", "core.compression=0", "-c", "core.fsync=none", "add", "--all")
    commit(folder, f"The files of {UPSTREAM_DISTRIBUTION} {UPSTREAM_VERSION}")


def git(folder: Path, *arguments: str) -> str:
    """Run ``git`` in ``folder`` and return its output.

    Raises:
        ExportError: it failed; the message has its error.
    """
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ExportError(f"git {' '.join(arguments[:3])} in {folder}: {done.stderr.strip()}")
    return done.stdout


def commit(folder: Path, message: str) -> None:
    """Commit what is staged, as whoever git knows, else as this tool."""
    known = subprocess.run(["git", "-C", str(folder), "config", "user.email"], capture_output=True, check=False)
    identity = ("-c", "user.name=flashinfer-sm12x", "-c", "user.email=flashinfer-sm12x@localhost")
    # No hooks: formatting is done already, and a hook may change what was checked.
    words = ("commit", "--quiet", "--no-verify", "--message", message)
    git(folder, *(() if known.returncode == 0 else identity), *words)


def base_of(folder: Path, wanted: str) -> str:
    """The commit onto which topics go.

    Raises:
        ExportError: ``folder`` is no git checkout of upstream's, or has no such revision.
    """
    if not (folder / "flashinfer" / "gemm").is_dir() or not (folder / ".git").exists():
        raise ExportError(
            f"{folder} is not a git checkout of FlashInfer. Name one, or a folder that does not exist: it becomes the "
            "pinned wheel's files, laid out as upstream's tree"
        )
    return git(folder, "rev-parse", "--verify", f"{wanted}^{{commit}}").strip()


@contextmanager
def work_tree(folder: Path, base: str) -> Iterator[Path]:
    """A second work tree of the repository, at ``base``, without its files; the first stays as it is."""
    with tempfile.TemporaryDirectory(prefix="upstream_patch_") as place:
        tree = Path(place) / "tree"
        git(folder, "worktree", "add", "--quiet", "--detach", "--no-checkout", str(tree), base)
        try:
            git(tree, "reset", "--quiet", base)
            yield tree
        finally:
            git(folder, "worktree", "remove", "--force", str(tree))


class Files:
    """A tree's texts at a commit, with changes that nobody has written yet."""

    def __init__(self, folder: Path, base: str, changed: Mapping[str, str] | None = None) -> None:
        self._folder, self._base = folder, base
        self._paths = set(git(folder, "ls-tree", "-r", "-z", "--name-only", base).split("\0"))
        self.changed = dict(changed or {})

    def original(self, path: str) -> str | None:
        """The text of ``path`` in the base commit; None when it has none."""
        return git(self._folder, "show", f"{self._base}:{path}") if path in self._paths else None

    def text(self, path: str) -> str | None:
        """The text of ``path`` as changed so far."""
        return self.changed[path] if path in self.changed else self.original(path)
