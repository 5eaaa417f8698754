# SPDX-License-Identifier: Apache-2.0
"""Folders of the cache, of sources and of headers.

Adds to upstream: a CUTLASS checkout in ``3rdparty/cutlass`` comes before the wheel's; a relative
``FLASHINFER_WORKSPACE_BASE`` means the same folder for compilers and child processes, which run elsewhere, and is the
home folder of a user who has none; a cache that
cannot be written is used for what is prebuilt in it, or says what to do about it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from flashinfer._layer import extend, fork_root
from flashinfer_sm12x import variables

if _base := variables.read("FLASHINFER_WORKSPACE_BASE"):
    os.environ["FLASHINFER_WORKSPACE_BASE"] = os.path.abspath(_base)
else:
    os.environ.pop("FLASHINFER_WORKSPACE_BASE", None)


if not os.path.isabs(os.path.expanduser("~")):  # nor has the system's list of users the user
    if not _base:
        raise RuntimeError(
            "there is no folder for FlashInfer's cache: HOME is not set, and the user has no entry in the system's "
            "list of users. Set FLASHINFER_WORKSPACE_BASE to a folder that you may write to"
        )
    # Upstream asks for the home folder in several places, also where it then takes the workspace.
    os.environ["HOME"] = os.environ["FLASHINFER_WORKSPACE_BASE"]

_upstream = extend(globals())

import logging
import pathlib
from typing import TYPE_CHECKING, Any

from flashinfer_sm12x.build.trust import UntrustedCacheError, make_folder, require_trusted

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def _fork_cutlass_include_dirs() -> list[pathlib.Path]:
    """Header folders of the CUTLASS that lies in this tree, if one does."""
    cutlass = fork_root() / "3rdparty" / "cutlass"
    folders = [cutlass / "include", cutlass / "tools" / "util" / "include"]
    return [folder for folder in folders if folder.is_dir()]


CUTLASS_INCLUDE_DIRS: list[pathlib.Path] = _fork_cutlass_include_dirs() + _upstream.CUTLASS_INCLUDE_DIRS

PREBUILT_JIT_DIR: pathlib.Path | None = None
"""The folder of modules in a cache that can be read only: what is fresh there is loaded from there."""


def _make_workspace(folder: pathlib.Path) -> None:
    """Make the workspace, its log and its folders before upstream does, which would make them as the umask is.

    Raises:
        OSError: it cannot be written.
    """
    make_folder(folder)
    # Upstream opens this for ever: not a link of somebody's, not a pipe that nobody reads.
    log = os.open(folder / "flashinfer_jit.log", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(log).st_mode):
            raise OSError(errno.EINVAL, "flashinfer_jit.log is no file")
    finally:
        os.close(log)
    make_folder(folder / "cached_ops")
    make_folder(folder / "generated")


def _usable_workspace(folder: pathlib.Path) -> pathlib.Path:
    """``folder``, or where to build instead: when others may write to it, or it holds modules and can only be read.

    Raises:
        OSError: it cannot be written, and holds nothing; of the class that the system's error has.
        UntrustedCacheError: others may write to it, and there is no place for another.
    """
    log = logging.getLogger("flashinfer.jit")
    try:
        require_trusted(folder)
        _make_workspace(folder)
        return folder
    except UntrustedCacheError as error:
        instead = _temporary_workspace(folder)
        if instead is None:
            raise
        log.warning("%s. Until then modules are built in %s", error, instead)
    except OSError as error:
        instead = _temporary_workspace(folder) if (folder / "cached_ops").is_dir() else None
        if instead is None:
            raise type(error)(
                error.errno,
                f"the FlashInfer cache {folder} cannot be written ({error.strerror}). Set FLASHINFER_WORKSPACE_BASE "
                "to a folder that you may write to (default: the home folder), or correct its owner and mode",
            ) from error
        log.warning(
            "the FlashInfer cache %s can only be read (%s): what is fresh in it is used, the rest is built in %s",
            folder,
            error.strerror,
            instead,
        )
    return instead


def _temporary_workspace(folder: pathlib.Path) -> pathlib.Path | None:
    """A workspace of this user's among temporary files; None when there is no place for one."""
    for parent in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm")):
        base = pathlib.Path(parent).absolute() / f"flashinfer-{os.geteuid()}"
        workspace = base / folder.relative_to(_upstream.FLASHINFER_CACHE_DIR)
        with contextlib.suppress(OSError, UntrustedCacheError):
            make_folder(base)
            require_trusted(base)  # anybody could have made it
            _make_workspace(workspace)
            return workspace
    return None


FLASHINFER_WORKSPACE_DIR: pathlib.Path = _usable_workspace(_upstream.FLASHINFER_WORKSPACE_DIR)
if FLASHINFER_WORKSPACE_DIR != _upstream.FLASHINFER_WORKSPACE_DIR:
    PREBUILT_JIT_DIR = _upstream.FLASHINFER_JIT_DIR
    FLASHINFER_JIT_DIR: pathlib.Path = FLASHINFER_WORKSPACE_DIR / "cached_ops"
    FLASHINFER_GEN_SRC_DIR: pathlib.Path = FLASHINFER_WORKSPACE_DIR / "generated"
