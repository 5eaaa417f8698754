# SPDX-License-Identifier: Apache-2.0
"""Content hashes, dependency files, and the manifest: what makes a built file the right one.

A file's times never count, so a cache on a network file system, in a container image or in a restored backup is as
good as one made here. An object is fresh when the command that makes it, the compiler, and every file that the compiler
read have the content that they had when it was made; a library is fresh when its objects and its link command are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST_FORMAT = 1
ABSENT = "absent"
"""The hash of a file that cannot be read: equal to no content's."""


class ContentHashes:
    """SHA-256 of files, each read once in the lifetime of this object."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, path: str | Path) -> str:
        """Hex digest of the file's content, or :data:`ABSENT`."""
        key = str(path)
        if key not in self._known:
            self._known[key] = hash_file(key)
        return self._known[key]


def hash_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's content, or :data:`ABSENT` when it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return ABSENT
    return digest.hexdigest()


def hash_strings(parts: Iterable[str]) -> str:
    """Hex SHA-256 of a sequence of strings; ``["ab"]`` and ``["a", "b"]`` differ."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(b"%d:" % len(encoded) + encoded)
    return digest.hexdigest()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part. Same content: left alone.

    Raises:
        OSError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.read_bytes() == data:
            return
    except OSError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def parse_depfile(text: str) -> list[str]:
    """The prerequisites in a make rule, as compilers write it (``-MD``), in their order and once each."""
    joined = re.sub(r"\\\r?\n", " ", text)
    _, _, prerequisites = _split_rule(joined)
    words = re.findall(r"(?:\\[ #\\]|[^\s])+", prerequisites)
    paths = (re.sub(r"\\([ #\\])", r"\1", word).replace("$$", "$") for word in words)
    return list(dict.fromkeys(paths))


def _split_rule(text: str) -> tuple[str, str, str]:
    # The colon that ends the target is followed by whitespace; one inside a path is not.
    match = re.search(r":(?=\s)", text)
    if match is None:
        return text, "", ""
    return text[: match.start()], ":", text[match.end() :]


def shadowing_files(paths: Iterable[str], include_dirs: Sequence[str]) -> list[str]:
    """Existing files that an earlier include folder offers under the relative name of a file from a later one.

    A header that appears in an earlier folder changes what is compiled though no file read before has changed; the
    list before and after differ then.
    """
    roots = [root.rstrip("/") + "/" for root in include_dirs]
    listings: dict[str, frozenset[str]] = {}
    found = []
    for path in paths:
        owner = next((i for i, root in enumerate(roots) if path.startswith(root)), 0)
        relative = path[len(roots[owner]) :] if owner else ""
        for root in roots[:owner]:
            folder, _, name = (root + relative).rpartition("/")
            if folder not in listings:
                listings[folder] = _names_in(folder)
            if name in listings[folder]:
                found.append(root + relative)
    return found


def _names_in(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


@dataclass
class ObjectRecord:
    """How one object came to be.

    Attributes:
        source: The source file.
        command: Hash of the command and the compiler's identity.
        files: Every file that the compiler read -> its hash when the build began.
        shadows: Hash of :func:`shadowing_files`.
        content: Hash of the object file.
        peak_memory: Largest resident set of a process of the compiler, bytes.
        cpu_seconds, wall_seconds: What it took.
    """

    source: str
    command: str
    files: dict[str, str]
    shadows: str
    content: str
    peak_memory: int
    cpu_seconds: float
    wall_seconds: float


@dataclass
class Manifest:
    """What lies in a module's folder, and what it was made from."""

    module: str
    objects: dict[str, ObjectRecord] = field(default_factory=dict)
    link: str = ""
    library: str = ""

    @classmethod
    def read(cls, path: Path, module: str) -> Manifest:
        """The manifest at ``path``; an empty one when there is none that can be understood."""
        try:
            data = json.loads(path.read_bytes())
            if data["format"] != MANIFEST_FORMAT or data["module"] != module:
                return cls(module)
            files = [(str(name), str(digest)) for name, digest in data["files"]]
            objects = {
                name: ObjectRecord(**{**record, "files": dict(files[i] for i in record["files"])})
                for name, record in data["objects"].items()
            }
            return cls(module, objects, data["link"], data["library"])
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return cls(module)

    def write(self, path: Path) -> None:
        """Write it atomically.

        Raises:
            OSError: it cannot be written.
        """
        table: dict[tuple[str, str], int] = {}
        objects: dict[str, Mapping[str, Any]] = {}
        for name, record in sorted(self.objects.items()):
            indices = [table.setdefault(item, len(table)) for item in record.files.items()]
            objects[name] = {**vars(record), "files": indices}
        data = {
            "format": MANIFEST_FORMAT,
            "module": self.module,
            "library": self.library,
            "link": self.link,
            "objects": objects,
            "files": list(table),
        }
        write_atomically(path, json.dumps(data, indent=1))
