# SPDX-License-Identifier: Apache-2.0
"""A toy wheel and a toy fork whose every line is known, and where the real ones and their tools lie."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]
OURS = REPO / "flashinfer"
UPSTREAM = "0.7.2.post1"
MECHANISM = (
    "flashinfer/__init__.py",
    "flashinfer/_layer.py",
    "flashinfer_sm12x/__init__.py",
    "flashinfer_sm12x/versions.py",
)
"""The files that make a tree a fork."""

Run = Callable[..., subprocess.CompletedProcess]


def load_tool(name: str) -> ModuleType:
    """``tools/<name>.py`` as a module; it imports its neighbours as a script does."""
    if str(REPO / "tools") not in sys.path:
        sys.path.append(str(REPO / "tools"))
    return importlib.import_module(name)


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return root


def write_wheel(site: Path, files: Mapping[str, str], version: str = UPSTREAM) -> Path:
    """A small stand-in for the installed wheel: its package directory and its metadata."""
    metadata = f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n"
    write_tree(site / "flashinfer", files)
    return write_tree(site, {f"flashinfer_python-{version}.dist-info/METADATA": metadata})


def write_fork(root: Path, files: Mapping[str, str]) -> Path:
    """A fork with this repository's mechanism and the given modules."""
    for name in MECHANISM:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, root / name)
    return write_tree(root / "flashinfer", files).parent


WHEEL_FILES = {
    "__init__.py": '"""Upstream\'s docstring."""\n__version__ = "0.7.2.post1"\nfrom . import plain as plain\n',
    "plain.py": "NAME = __name__\n",
    "table.json": "{}",
    "data/csrc/kernel.cu": "// upstream",
    "ops/__init__.py": '"""Upstream ops."""\nfrom .core import call as call\n',
    "ops/only_upstream.py": "import pathlib\nHERE = pathlib.Path(__file__).parent\n",
    "ops/table.txt": "upstream",
    "ops/core.py": '''\
"""Upstream core."""
import pathlib

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
NAME_DURING = __name__


class Spec:
    """A class of upstream's."""

    class Inner:
        depth = 2

    def method(self):
        return "upstream method"


def helper():
    return "upstream helper"


def call():
    return helper()


def fails():
    raise ValueError("from upstream")


if __name__ == "__main__":
    print("upstream main ran")
''',
}

FORK_FILES = {
    "ops/__init__.py": "from flashinfer._layer import extend\n\n_upstream = extend(globals())\n",
    "ops/extra.py": "ANSWER = 42\n",
    "ops/ours.txt": "ours",
    "ops/core.py": '''\
"""Our core."""
from __future__ import annotations

from flashinfer._layer import extend

_upstream = extend(globals())


class Mine:
    """A class of ours."""

    width = 1


def helper():
    return "our helper over " + _upstream.helper()


def also_fails():
    raise KeyError("from ours")


if __name__ == "__main__":
    print("our main ran in", __name__, "with", Spec.__module__)
''',
}
