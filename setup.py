# SPDX-License-Identifier: Apache-2.0
"""Build the files that ``pip install .`` and ``pip install -e .`` put into site-packages.

The wheel ``flashinfer-python`` owns ``site-packages/flashinfer/``; no file of it may be touched. So this
distribution installs three things of its own names::

    flashinfer_sm12x_tree/  flashinfer/, flashinfer_sm12x/, include/, csrc/, 3rdparty/, LICENSE and NOTICE as in the
                            checkout (absent from an editable install)
    _flashinfer_sm12x.py    puts that directory, or the checkout, before site-packages on sys.path
    flashinfer_sm12x.pth    has Python import _flashinfer_sm12x when it starts

``pip uninstall flashinfer-sm12x`` removes them, and ``import flashinfer`` is the plain wheel again.
"""

import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NAME = "flashinfer_sm12x"
TREE = f"{NAME}_tree"
# Only the headers of a CUTLASS checkout in 3rdparty/ are needed.
SHIPPED = (
    # These lie at the package's top, because pip's uninstaller does not remove a folder that holds only folders.
    "LICENSE",
    "NOTICE",
    "flashinfer/**/*",
    "flashinfer_sm12x/**/*",
    "include/**/*",
    "csrc/**/*",
    "3rdparty/*/README.md",
    "3rdparty/*/include/**/*",
    "3rdparty/*/tools/util/include/**/*",
)

ACTIVATOR = '''\
# SPDX-License-Identifier: Apache-2.0
"""Puts the SM12x fork of flashinfer before the wheel it extends; {name}.pth imports this when Python starts."""

import os
import sys

_SITE = os.path.dirname(os.path.abspath(__file__))
_TREE = os.path.join(_SITE, {tree!r})

if not os.path.isfile(os.path.join(_TREE, "flashinfer", "_layer.py")):
    sys.stderr.write(
        "flashinfer-sm12x: " + _TREE + " holds no fork any more, so 'import flashinfer' is the plain wheel. "
        "Install the fork again from where it is now, or run: pip uninstall flashinfer-sm12x\\n"
    )
elif _TREE not in sys.path:
    sys.path.insert(sys.path.index(_SITE) if _SITE in sys.path else 0, _TREE)
'''


class BuildTree(build_py):
    """Lays out the files above instead of Python packages."""

    def shipped(self) -> list[Path]:
        """Files of the tree that an installation needs, relative to the checkout."""
        files = {path for pattern in SHIPPED for path in ROOT.glob(pattern) if path.is_file()}
        return sorted(
            path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts and path.suffix != ".pyc"
        )

    def is_editable(self) -> bool:
        return os.environ.get("FLASHINFER_SM12X_EDITABLE") == "1"

    def run(self) -> None:
        lib = Path(self.build_lib)
        # Files that an earlier build left here would be shipped too.
        shutil.rmtree(lib, ignore_errors=True)
        lib.mkdir(parents=True)
        tree = str(ROOT) if self.is_editable() else TREE
        (lib / f"_{NAME}.py").write_text(ACTIVATOR.format(name=NAME, tree=tree), encoding="utf-8")
        (lib / f"{NAME}.pth").write_text(f"import _{NAME}\n", encoding="utf-8")
        for file in [] if self.is_editable() else self.shipped():
            target = lib / TREE / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, target)

    def get_source_files(self) -> list[str]:
        return [str(path) for path in self.shipped()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [str(path) for path in Path(self.build_lib).rglob("*") if path.is_file()]


setup(py_modules=[f"_{NAME}"], cmdclass={"build_py": BuildTree})
