# SPDX-License-Identifier: Apache-2.0
"""List the cache of compiled modules, and remove some of it.

The cache is ``<base>/.cache/flashinfer/<version>/<architectures>/cached_ops/<module>/``. Only folders of that form are
listed and removed. A link in the place of one, or of one above it, is left alone, and so is what it leads to.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flashinfer_sm12x.build.engine import module_lock

from .modules import MODULES

UPSTREAMS = ("fused_moe_120_upstream",)
"""Upstream's own modules whose names begin as one of this fork's does."""


@dataclass(frozen=True)
class CachedModule:
    """One module in the cache.

    Attributes:
        name: The module's name.
        target: Version and architectures that it was built for, the two folders above ``cached_ops``.
        folder: Its folder.
        bytes: Size of all files in it; links count as nothing.
        built: Time at which its library was made, in seconds since the epoch; if it has none, the last change of its
            folder.
        complete: Whether its library is there. ``sm12x-doctor`` and ``sm12x-build`` tell whether it is up to date.
    """

    name: str
    target: str
    folder: Path
    bytes: int
    built: float
    complete: bool

    @property
    def ours(self) -> bool:
        return self.name.startswith(tuple(MODULES)) and self.name not in UPSTREAMS


def cached_modules(cache: Path) -> list[CachedModule]:
    """The modules in a cache, of all versions and architectures.

    Args:
        cache: ``<base>/.cache/flashinfer``.
    """
    found = []
    for version in _folders(cache):
        for architectures in _folders(version):
            operators = architectures / "cached_ops"
            if operators.is_symlink():
                continue
            target = f"{version.name}/{architectures.name}"
            found += [_module(folder, target) for folder in _folders(operators) if folder.name != "tmp"]
    return found


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _module(folder: Path, target: str) -> CachedModule:
    library = folder / f"{folder.name}.so"
    complete = library.is_file()
    built = (library if complete else folder).stat().st_mtime
    return CachedModule(folder.name, target, folder, sum(_sizes(folder)), built, complete)


def _sizes(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a compiler has just removed it
                state = os.lstat(os.path.join(parent, name))
                # Of an object that several modules have, a share.
                yield 0 if stat.S_ISLNK(state.st_mode) else state.st_size // state.st_nlink


def chosen(modules: list[CachedModule], name: str | None, older_than_days: float | None) -> list[CachedModule]:
    """The modules that ``clear`` removes.

    Args:
        modules: The modules that there are.
        name: Only modules of this name; this fork's when omitted.
        older_than_days: Only what was built longer ago than that.

    Raises:
        ValueError: there is no module of that name; the message lists those that there are.
    """
    if name is not None and name not in {module.name for module in modules}:
        there = ", ".join(sorted({module.name for module in modules})) or "none"
        raise ValueError(f"the cache has no module {name!r}; it has: {there}")
    limit = float("inf") if older_than_days is None else time.time() - older_than_days * 86400
    return [m for m in modules if (m.ours if name is None else m.name == name) and m.built < limit]


def remove(module: CachedModule) -> None:
    """Remove a module's folder, under its lock.

    Raises:
        OSError: it is being built, or cannot be removed.
    """
    try:
        with module_lock(module.folder.parent / "tmp" / f"{module.name}.lock", wait=False):
            shutil.rmtree(module.folder)
    except BlockingIOError:
        raise BlockingIOError("it is being built") from None
    except RuntimeError as error:
        raise OSError(str(error)) from error
