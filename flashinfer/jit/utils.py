# SPDX-License-Identifier: Apache-2.0
"""Helpers that the generators of modules share.

Changes in upstream: a generated source is code, so nobody else may write to it, whatever the umask is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

from flashinfer_sm12x.build.diagnosis import explained_os_errors
from flashinfer_sm12x.build.trust import write_atomically

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def write_if_different(path: Path, content: str) -> None:
    """Write a generated source, unless it is there; of its folder's mode bits, too, only the owner's allow to write.

    Raises:
        JitBuildError: it cannot be written.
    """
    with explained_os_errors(path.parent.name, path.parent):
        write_atomically(path, content)
        for place in (path.parent, path):
            mode = place.stat().st_mode
            if mode & 0o022:
                place.chmod(mode & ~0o022)
