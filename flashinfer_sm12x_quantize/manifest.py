# SPDX-License-Identifier: Apache-2.0
"""The manifest in which a folder of ``sm12x-quantize`` describes itself. :mod:`.folder` has its tensors.

Nothing but the standard library is imported here: vLLM's plugin reads manifests before FlashInfer may be imported.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MANIFEST = "sm12x_dense.json"
UNFINISHED = "sm12x_dense.unfinished.json"
"""The manifest of what has been written so far."""
VERSION = 1
KINDS = ("qkv", "o", "lm_head")
HEAD = "lm_head"
FORMATS = ("mxfp4", "nvfp4", "mxfp6", "mxint8", "mxfp8")


class FolderError(ValueError):
    """A folder that cannot be used, in a line: which, what is wrong with it, what to do."""


@dataclasses.dataclass(frozen=True)
class Module:
    """One of the checkpoint's layers: its kind (``qkv``, ``o``, ``lm_head``), size, file, and its weight's hash."""

    kind: str
    n: int
    k: int
    file: str
    source: str


@dataclasses.dataclass
class Manifest:
    """``formats``: of each kind that is there. ``run``: all that the bytes depend on, as :mod:`.run` has it; compared, not
    read. ``told``: for people: losses, minutes."""

    formats: dict[str, Any]
    run: dict[str, Any]
    modules: dict[str, Module] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    told: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def told_formats(self) -> str:
        return ", ".join(f"{kind} {name}" for kind, name in self.formats.items())

    def write(self, path: Path) -> None:
        text = json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)
        replace_bytes(path, (text + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises :class:`FolderError` for what is no manifest of this version."""
        try:
            found = json.loads(path.read_bytes())
            if found.pop("version") != VERSION:
                raise FolderError(f"{path} is of another version of the fork; quantize again, or install that one")
            modules = {name: Module(**each) for name, each in found.pop("modules").items()}
            manifest = cls(modules=modules, **found)
            known = all(kind in KINDS and name in FORMATS for kind, name in manifest.formats.items())
            known = known and all(each.kind in manifest.formats for each in modules.values())
            if not known or not all(each.file in manifest.files for each in modules.values()):
                raise KeyError
        except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise FolderError(f"{path} is no manifest of sm12x-quantize's") from error
        return manifest


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file's bytes at once: after an interruption it has the new bytes or the old ones, never a part."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with open(scratch, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def finished(path: Path) -> Manifest:
    """The manifest of a folder that can be loaded.

    Raises
    ------
    FolderError
        The folder has no manifest, or was not finished.
    """
    if (path / MANIFEST).is_file():
        return Manifest.read(path / MANIFEST)
    if (path / UNFINISHED).is_file():
        raise FolderError(f"{path} was not finished: run the same sm12x-quantize again, it goes on")
    raise FolderError(f"{path} is no folder of sm12x-quantize's: it has no {MANIFEST}")


def located(name: str, patterns: Sequence[str] = (MANIFEST, "*.safetensors")) -> Path:
    """A folder on disk, or the local copy of one on the Hugging Face hub; missing files that match ``patterns`` are
    downloaded.

    Raises
    ------
    FolderError
        There is neither.
    """
    path = Path(name).expanduser()
    return path if path.is_dir() else from_hub(name, patterns, "folder")


def from_hub(name: str, patterns: Sequence[str], what: str) -> Path:
    """A repository's files on the Hugging Face hub, downloaded if they are not there.

    Raises
    ------
    FolderError
        There is no such repository, or it cannot be reached; ``name`` is no ``what`` either.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):  # what the hub calls its repositories
        raise FolderError(f"{name} is no {what}, and no name of one on the hub, which are OWNER/NAME")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (ImportError, OSError, ValueError) as error:  # the hub's own errors are of the last two
        said = str(error).strip().partition("\n")[0]
        raise FolderError(f"{name} is no {what}, and no name of one on the hub: {said}") from error
