# SPDX-License-Identifier: Apache-2.0
"""A cache holds code that is run: whose it may be, and writing into it without following links."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import IO

ALLOW_VARIABLE = "FLASHINFER_ALLOW_SHARED_CACHE"
"""Set to 1, a cache is used that other users own or may write to."""


class UntrustedCacheError(RuntimeError):
    """Another user could have put something into the cache."""


def require_trusted(path: Path, base: Path) -> None:
    """Check that nobody but this user and root can put anything at ``path``.

    The owner of ``path`` and of each folder above it must be one of the two, and no one else may write to them. A group
    with its owner's number is that user's own (the usual setup where the umask is 002). In a folder with the sticky bit
    (``/tmp``) others can add entries and not replace them, so that what counts are the owners below it.

    Args:
        path: A file or folder; what does not exist is left out.
        base: The last folder upwards to look at, where it is one of those above ``path``; else all of them.

    Raises:
        UntrustedCacheError: it is not so; the message says who and what to do.
    """
    if os.environ.get(ALLOW_VARIABLE) == "1":
        return
    for each in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):
            problem = _problem(each.stat())
            if problem:
                raise UntrustedCacheError(
                    f"the FlashInfer cache is not used: {each} {problem}, so another user could choose the code that "
                    f"runs here. Set FLASHINFER_WORKSPACE_BASE to a folder of your own, correct owner and mode (chmod "
                    f"go-w), or set {ALLOW_VARIABLE}=1 if you trust everybody who can write there"
                )
        if each == base:
            return


def _problem(state: os.stat_result) -> str | None:
    if state.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {state.st_uid}"
    if stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX:
        return None
    if state.st_mode & stat.S_IWOTH:
        return "is writable by everybody"
    if state.st_mode & stat.S_IWGRP and state.st_gid != state.st_uid:
        return f"is writable by group {state.st_gid}"
    return None


def make_folder(path: Path) -> None:
    """Make a folder and those above it, writable by nobody else whatever the umask is.

    Raises:
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o755, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)


def own_folder(path: Path) -> None:
    """As :func:`make_folder`; a link in its place is removed, since what it leads to may be somebody else's.

    Raises:
        OSError: it cannot be made.
    """
    if path.is_symlink():
        path.unlink()
    make_folder(path)


def new_text_file(path: Path) -> IO[str]:
    """Open a new file for writing; one that was there, or a link, is removed and not written to.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    return open(path, "x", encoding="utf-8", errors="replace")
