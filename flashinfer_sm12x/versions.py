# SPDX-License-Identifier: Apache-2.0
"""The versions: this fork's own, those of upstream's wheel that it was tested over, and what is installed here.

Nothing but the standard library is imported: ``flashinfer/__init__.py`` asks here before it runs upstream's code.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

__fork_version__ = "0.1.0"
UPSTREAM_DISTRIBUTION = "flashinfer-python"
TESTED_VERSIONS = ("0.7.2.post1", "0.7.2")
"""The wheels that this fork extends, the one to install first: vLLM 0.33.0 pins it. ``tests/layer`` runs over each."""
UPSTREAM_VERSION = TESTED_VERSIONS[0]
SWITCH = "FLASHINFER_SM12X_MOE"
KERNELS_PACKAGE = "flashinfer_sm12x_kernels"
"""The package of prebuilt libraries that ``tools/kernels_wheel.py`` makes."""


class Wheel(NamedTuple):
    """An installed ``flashinfer-python``: its version, and its package directory if that is there."""

    version: str
    package: Path
    complete: bool

    def __str__(self) -> str:
        lacks = "" if self.complete else ", without its package directory flashinfer/"
        return f"{UPSTREAM_DISTRIBUTION} {self.version} in {self.package.parent}{lacks}"


def installed_wheels() -> list[Wheel]:
    """Upstream's wheels that metadata on ``sys.path`` names, in the order of the path."""
    ours, found = Path(__file__).resolve().parents[1] / "flashinfer", []
    for dist in importlib.metadata.distributions(name=UPSTREAM_DISTRIBUTION):
        package = Path(str(dist.locate_file("flashinfer"))).resolve()
        found.append(Wheel(dist.version, package, package != ours and (package / "__init__.py").is_file()))
    return found


def tested_wheel() -> Wheel | None:
    """The first wheel that this fork extends; None where none is installed. A local label, ``+...``, counts as it does
    for pip: not."""
    return next((w for w in installed_wheels() if w.complete and w.version.partition("+")[0] in TESTED_VERSIONS), None)


def needed() -> str:
    """The requirement to install, in pip's syntax."""
    return f"{UPSTREAM_DISTRIBUTION}=={UPSTREAM_VERSION}"


def fix(options: str = "") -> str:
    """The command that installs it."""
    return f'"{sys.executable}" -m pip install {options}"{needed()}"'


def _is_a_fork(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "_layer.py"))


def upstream_spec() -> ModuleSpec | None:
    """The spec that Python would import as ``flashinfer`` if no tree of this fork were on ``sys.path``; None if there
    is none."""
    elsewhere = [entry for entry in sys.path if not _is_a_fork(os.path.join(entry or os.curdir, "flashinfer"))]
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)  # Python 3.11 still takes finders without
        spec = find and find("flashinfer", elsewhere if finder is PathFinder else None)
        if spec is not None and spec.origin and not _is_a_fork(os.path.dirname(spec.origin)):
            return spec
    return None


def upstream_alone() -> str:
    """The reason why ``import flashinfer`` gives upstream's package alone; empty if the fork extends it, or if there is
    no upstream package."""
    if os.environ.get(SWITCH, "").strip() == "0":
        return f"{SWITCH}=0" if upstream_spec() is not None else ""
    if tested_wheel() is not None or (spec := upstream_spec()) is None:
        return ""
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    versions = [wheel.version for wheel in installed_wheels() if wheel.package == folder.resolve()]
    return (
        f"{UPSTREAM_DISTRIBUTION} {versions[0] if versions else 'of an unknown version'} in {folder.parent} is none "
        f"that flashinfer-sm12x {__fork_version__} was tested with ({', '.join(TESTED_VERSIONS)})"
    )
