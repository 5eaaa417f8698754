# SPDX-License-Identifier: Apache-2.0
"""Checks of owner and mode of the files that are loaded and compiled.

Nothing of FlashInfer's is imported, so that the doctor can use this module.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from .. import variables
from ..files import replace_bytes

ALLOW_VARIABLE = "FLASHINFER_ALLOW_SHARED_CACHE"
"""1 allows a cache that other users own or may write to."""


class UntrustedCacheError(RuntimeError):
    """Another user could have put something into the cache."""


def require_trusted(path: Path) -> None:
    """Check that nobody but this user and root can decide what lies at ``path``: the rule of ssh's StrictModes.

    Every folder and link from the root to ``path``, and ``path`` itself, must belong to root or to this user, and
    nobody else may write to it. There are two exceptions. Others may write to a folder with the sticky bit (``/tmp``):
    there they cannot replace an entry of this user's or of root's, but they can link to a file of root's, so the next
    component must be this user's or a folder. And the owner's own group may write if it has no other member (the umask
    is 002 on some systems). A path that passes cannot be changed by another user later.

    Args:
        path: A file or folder; components that do not exist are skipped.

    Raises:
        UntrustedCacheError: the check failed; the message says where and what to do.
        OSError: the path cannot be looked at, or is a circle of links.
    """
    if variables.read(ALLOW_VARIABLE):
        return
    path = path if path.is_absolute() else Path.cwd() / path
    for place, state in _components(str(path)):
        problem = _problem(place, state, place != "/" and _sticky(os.lstat(os.path.dirname(place))))
        if problem:
            raise UntrustedCacheError(
                f"the FlashInfer cache is not used: {place} {problem}, so another user could choose the code that "
                "runs here. Set FLASHINFER_WORKSPACE_BASE to a folder of your own, correct owner and mode (chmod "
                f"go-w), or set {ALLOW_VARIABLE}=1 if you trust everybody who can write there"
            )


def require_trusted_tree(folder: Path) -> None:
    """:func:`require_trusted` of a folder and of all that lies in it, where nothing may be but folders and files.

    Raises:
        UntrustedCacheError: as there, or a pipe, a socket or a device lies there: whoever opens a pipe waits, ninja
            too.
        OSError: as there.
    """
    require_trusted(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            require_trusted(path)
            with contextlib.suppress(FileNotFoundError):  # a link to nothing; a file that another process removes
                mode = path.stat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise UntrustedCacheError(
                        f"the FlashInfer cache is not used: {path} is no file and no folder, and opening it could "
                        f"wait for ever. Remove it: rm {shlex.quote(str(path))}"
                    )


def read_file(path: str | Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it is not a regular file (opening a pipe without a writer would wait), or it cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        return file.read()


def _components(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each folder, link and file that the kernel passes on the way to an absolute path, as far as they exist."""
    here, left, links = "/", path.split("/")[::-1], 0
    yield here, os.lstat(here)
    while left:
        name = left.pop()
        if name == "..":
            here = os.path.dirname(here)
        if name in ("", ".", ".."):
            continue
        place = os.path.join(here, name)
        try:
            state = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return
        yield place, state
        if not stat.S_ISLNK(state.st_mode):
            here = place
            continue
        links += 1
        if links > 40:  # as many as Linux follows
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(place)
        left += target.split("/")[::-1]
        here = "/" if target.startswith("/") else here


@functools.cache
def _root_outside() -> int:
    """The user that root's files seem to belong to: 65534 in a user namespace without root (Apptainer, bubblewrap),
    else 0.

    In such a namespace the files of all unmapped users seem to be 65534's, so ``/`` and ``/home`` cannot be told from
    another user's folder. If the namespace maps a user of that number, as a rootless container does, it is a real user,
    and the answer is 0.
    """
    with contextlib.suppress(OSError):
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if all(outside != 0 and not inside <= overflow < inside + count for inside, outside, count in mapped):
            return overflow
    return 0


def _sticky(state: os.stat_result) -> bool:
    return stat.S_ISDIR(state.st_mode) and bool(state.st_mode & stat.S_ISVTX)


def _problem(place: str, state: os.stat_result, in_sticky: bool) -> str:
    if in_sticky:
        of_root = state.st_uid == 0 and stat.S_ISDIR(state.st_mode)
    else:
        of_root = state.st_uid in (0, _root_outside())
    if state.st_uid != os.geteuid() and not of_root:
        return f"belongs to user {state.st_uid}"
    if stat.S_ISLNK(state.st_mode) or _sticky(state):
        return ""
    if state.st_mode & stat.S_IWOTH:
        return "is writable by everybody"
    if state.st_mode & stat.S_IWGRP:
        if not _own_group(state.st_uid, state.st_gid):
            return f"is writable by group {state.st_gid}"
        with contextlib.suppress(OSError):  # a file system without such attributes
            if "system.posix_acl_access" in os.listxattr(place):
                return "has an access control list by which others may write"
    return ""


def _own_group(user: int, group: int) -> bool:
    """Whether a group is that user's own: it has the user's name, is the user's primary group, and has no other
    member."""
    try:
        account, members = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    own = account.pw_gid == group and members.gr_name == account.pw_name
    others = {each.pw_name for each in pwd.getpwall() if each.pw_gid == group}.union(members.gr_mem)
    return own and others <= {account.pw_name}


def make_folder(path: Path) -> None:
    """Make a folder and those above it: 0755 less what the umask forbids, so that nobody else may write.

    Raises:
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o755, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part. Same content: left alone.

    Raises:
        OSError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if read_file(path) == data:
            return
    except OSError:
        pass
    make_folder(path.parent)
    replace_bytes(path, data, 0o644)
