# SPDX-License-Identifier: Apache-2.0
"""The manifest in which a folder of ``sm12x-quantize`` describes itself. :mod:`.folder` has its tensors.

Nothing but the standard library is imported here: vLLM's plugin reads manifests before FlashInfer may be imported.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import replace_bytes
from ..variables import RESCORED
from .files import Fields, FolderError, read_fields

MANIFEST = "sm12x_dense.json"
UNFINISHED = "sm12x_dense.unfinished.json"
"""The manifest of what has been written so far."""
VERSION = 1
HEAD = "lm_head"
KINDS = ("qkv", "o", HEAD)
FORMATS = ("mxfp4", "nvfp4", "mxfp6", "mxint8", "mxfp8")
COARSE = {RESCORED: "nvfp4"}
"""Formats of an LM head whose largest logits are computed again from the checkpoint's own rows, and what they hold of
it (``flashinfer.gemm.dense_block_scaled_rescored``)."""
FORMATS_OF = {"qkv": FORMATS, "o": FORMATS, HEAD: (*FORMATS, *COARSE)}
"""The formats that each kind of layers may have."""
NAMES = {"qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"), "o": ("o_proj",), "lm_head": (HEAD,)}
"""What the modules of each kind are called."""
BLOCK = 32
SHA256 = r"[0-9a-f]{64}"


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
    """``formats``: of each kind that is there. ``run``: all that the bytes depend on, as :mod:`.run` has it; compared,
    not read. ``told``: for people: losses, minutes."""

    formats: dict[str, Any]
    run: dict[str, Any]
    modules: dict[str, Module] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    told: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def formats_summary(self) -> str:
        return ", ".join(f"{kind} {name}" for kind, name in self.formats.items())

    def write(self, path: Path) -> None:
        text = json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)
        replace_bytes(path, (text + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises :class:`FolderError` for what is no manifest of this version, or one that contradicts itself."""
        found = read_fields(path, "no manifest of sm12x-quantize's", "copy the folder again, or quantize again")
        if found.whole("version") != VERSION:
            raise FolderError(f"{path} is of another version of the fork; quantize again, or install that one")
        found.only("version", *(field.name for field in dataclasses.fields(cls)))
        formats, modules, files = found.object("formats"), found.object("modules"), found.object("files")
        formats.only(*KINDS)
        manifest = cls(
            formats={kind: formats.one_of(kind, FORMATS_OF[kind]) for kind in formats.values},
            run=found.object("run").values,
            modules={name: _module(modules, name) for name in modules.values},
            files={name: files.text(name, SHA256, "a SHA-256, 64 hexadecimal digits") for name in files.values},
            told=found.object("told").values,
        )
        used = {each.file for each in manifest.modules.values()}
        for name, each in manifest.modules.items():
            if each.kind not in manifest.formats:
                modules.refuse(f"{name} is a module of {each.kind}, for which formats has no entry")
            if each.file not in manifest.files:
                modules.refuse(f"{name} is in {each.file}, which files does not have")
        for file in manifest.files:
            if file not in used:
                files.refuse(f"no module is in {file!r:.80}")
        return manifest


def stored(name: str) -> str:
    """The format of the tensors that a folder holds for a layer of format ``name``."""
    return COARSE.get(name, name)


def _module(modules: Fields, name: str) -> Module:
    if not re.fullmatch(r"\w+(\.\w+)*", name, re.ASCII):
        modules.refuse(f"{name!r:.80} is no module's name")
    about = modules.object(name)
    about.only(*(field.name for field in dataclasses.fields(Module)))
    kind = about.one_of("kind", KINDS)
    if name.rpartition(".")[2] not in NAMES[kind]:
        about.refuse(f"{name} is no module of {kind}, which are called {', '.join(NAMES[kind])}")
    k = about.whole("k")
    if k % BLOCK:
        about.refuse(f"the k of {name} is {k}; it must be a multiple of {BLOCK}")
    file = about.file_name("file", ".safetensors")
    return Module(kind, about.whole("n"), k, file, about.text("source", SHA256, "a SHA-256, 64 hexadecimal digits"))


def finished(path: Path) -> Manifest:
    """The manifest of a folder that can be loaded.

    Raises
    ------
    FolderError
        The folder has no manifest, or was not finished.
    """
    if (path / MANIFEST).is_file():
        found = Manifest.read(path / MANIFEST)
        if lacking := [kind for kind in found.formats if kind not in {each.kind for each in found.modules.values()}]:
            raise FolderError(f"{path / MANIFEST} has no module of {', '.join(lacking)}: copy the folder again")
        if not found.formats:
            raise FolderError(f"{path / MANIFEST} has no layers at all: copy the folder again, or quantize again")
        return found
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
    """Files of a repository on the Hugging Face hub, downloaded if they are not there; of its subfolders none.

    Raises
    ------
    FolderError
        Why there is none: ``name`` is no ``what`` and no name of a repository; the hub has no such repository, or shows
        it to others alone; the hub cannot be reached; the download failed.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):  # what the hub calls its repositories
        raise FolderError(f"{name} is no {what}, and no name of one on the hub, which are OWNER/NAME")
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise FolderError(
            f"{name} is no {what} here; to look for it on the hub, pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
    except Exception as error:  # the HTTP client's, the hub's, the disk's
        message = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, errors.GatedRepoError):
            reason = (
                "the hub gives it to those alone who accepted its terms: accept them on its page, then hf auth login"
            )
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = "the hub has no repository of that name (or a private one, which needs hf auth login)"
        elif isinstance(error, errors.HFValidationError):
            reason = f"no name of one on the hub: {message}"
        elif isinstance(error, errors.LocalEntryNotFoundError):
            offline = " (HF_HUB_OFFLINE is set)" if _offline() else ""
            reason = (
                f"whether the hub has it is not known: it cannot be reached{offline}, and no whole copy was downloaded "
                "before; go online, or name a folder"
            )
        elif isinstance(error, OSError) and not isinstance(error, errors.HfHubHTTPError) and error.strerror:
            raise FolderError(
                f"{name} could not be downloaded: {error.filename or '~/.cache'}: {error.strerror}"
            ) from error
        else:
            raise FolderError(f"{name} could not be downloaded from the hub: {message}") from error
        raise FolderError(f"{name} is no {what} here, and {reason}") from error


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
