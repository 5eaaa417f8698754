# SPDX-License-Identifier: Apache-2.0
"""This environment with another ``flashinfer-python``: another version's wheel, or the same files under another
version."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from layer_toys import REPO

UNTESTED = "99.0.0"
DOWNLOADS = REPO / "build" / "wheels"
PACKAGES = ("flashinfer", "b12x")
"""Packages that the wheel owns in site-packages, beside its metadata."""


def downloaded(version: str) -> Path:
    """The wheel of that version, from the package index or from an earlier run.

    Raises:
        RuntimeError: pip cannot download it.
    """
    pattern = f"flashinfer_python-{version}-*.whl"
    if not list(DOWNLOADS.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(DOWNLOADS)]
        done = subprocess.run([*command, f"flashinfer-python=={version}"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"the wheel flashinfer-python=={version}, over which this fork is tested, cannot be downloaded. On a "
                f"machine without a network put it into {DOWNLOADS}. pip says:\n{done.stderr}"
            )
    (wheel,) = DOWNLOADS.glob(pattern)
    return wheel


def _site_packages(environment: Path) -> Path:
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else "posix_prefix"  # Python 3.10 knows no other name
    return Path(sysconfig.get_path("purelib", scheme, {"base": str(environment), "installed_base": str(environment)}))


def environment_with(wheel: Path, folder: Path, version: str | None = None) -> Path:
    """Make an environment that has what this one has, but of FlashInfer's only a wheel.

    Args:
        wheel: A wheel; or where one is installed, and linked to.
        folder: For the environment.
        version: The version that the wheel's metadata are to say, if not their own; its files stay as they are.

    Returns:
        The environment's interpreter.
    """
    venv.create(folder, symlinks=True)
    site = _site_packages(folder)
    for outer in [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]:
        for entry in outer.iterdir():
            other = not entry.name.startswith(("flashinfer", "_flashinfer", *PACKAGES)) and entry.name != "outer.pth"
            if other and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    if wheel.is_dir():
        for name in PACKAGES:
            (site / name).symlink_to(wheel / name)
        (info,) = wheel.glob("flashinfer_python-*.dist-info")
        shutil.copytree(info, site / info.name)
    else:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    if version is not None:
        (info,) = site.glob("flashinfer_python-*.dist-info")
        was = info.name.removesuffix(".dist-info").partition("-")[2]
        text = (info / "METADATA").read_text(encoding="utf-8")
        (info / "METADATA").write_text(text.replace(f"Version: {was}\n", f"Version: {version}\n", 1), encoding="utf-8")
        info.rename(site / f"flashinfer_python-{version}.dist-info")
    return folder / "bin" / "python"
