# SPDX-License-Identifier: Apache-2.0
"""Folders of the cache, of sources and of headers.

Adds to upstream: a CUTLASS checkout in ``3rdparty/cutlass`` comes before the wheel's, and a cache that cannot be
written says what to do about it.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend, fork_root

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def _fork_cutlass_include_dirs() -> list[pathlib.Path]:
    """Header folders of the CUTLASS that lies in this tree, if one does."""
    cutlass = fork_root() / "3rdparty" / "cutlass"
    folders = [cutlass / "include", cutlass / "tools" / "util" / "include"]
    return [folder for folder in folders if folder.is_dir()]


CUTLASS_INCLUDE_DIRS: list[pathlib.Path] = _fork_cutlass_include_dirs() + _upstream.CUTLASS_INCLUDE_DIRS


def _check_workspace(folder: pathlib.Path) -> None:
    """Make the workspace and its log, as upstream does a moment later, but with an error that helps.

    Raises:
        OSError: the workspace cannot be written; of the class that the system's error has.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "flashinfer_jit.log", "a"):
            pass
    except OSError as error:
        raise type(error)(
            error.errno,
            f"the FlashInfer cache {folder} cannot be written ({error.strerror}). Set FLASHINFER_WORKSPACE_BASE to "
            "a folder that you may write to (default: the home folder), or correct its owner and mode",
        ) from error


_check_workspace(_upstream.FLASHINFER_WORKSPACE_DIR)
