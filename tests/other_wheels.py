# SPDX-License-Identifier: Apache-2.0
"""This environment with another ``flashinfer-python``, for interpreters that are started ``bare``."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

DISTRIBUTION = "flashinfer-python"
UNTESTED = "99.0.0"


def environment_with(folder: Path, wheel: Path, version: str | None = None) -> list[Path]:
    """What to put on ``sys.path`` behind a fork: links to all that is installed here, but to the wheel of FlashInfer's that
    is unpacked in ``wheel``.

    Metadata say that it is of ``version``, if that is given; the wheel's files stay as they are.
    """
    sites = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    linked = []
    for number, site in enumerate(sites):
        target = folder / str(number)
        target.mkdir(parents=True)
        for entry in site.iterdir():
            if not entry.name.lower().startswith(("flashinfer", "_flashinfer")) and entry.name != "b12x":
                (target / entry.name).symlink_to(entry)
        linked.append(target)
    found = next(importlib.metadata.distributions(name=DISTRIBUTION, path=[str(wheel)]))
    target = folder / "wheel"
    target.mkdir()
    for name in ("flashinfer", "b12x"):
        if (wheel / name).exists():
            (target / name).symlink_to((wheel / name).resolve())
    info = f"flashinfer_python-{version or found.version}.dist-info"
    shutil.copytree(wheel / f"flashinfer_python-{found.version}.dist-info", target / info)
    if version is not None:
        metadata = target / info / "METADATA"
        text = metadata.read_text(encoding="utf-8")
        metadata.write_text(text.replace(f"Version: {found.version}\n", f"Version: {version}\n"), encoding="utf-8")
    return [target, *linked]
