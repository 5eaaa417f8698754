# SPDX-License-Identifier: Apache-2.0
"""Content hashes, dependency files, and the manifest: what makes a built file the right one.

A file's times never count, nor does where it lies: folders go by names (:class:`Roots`), so a cache on a network file
system, in a container image, in a restored backup or shared by two checkouts is as good as one made here. An object is
fresh when the flags, the compiler, and every file that the compiler read are what they were when it was made, and the
include folders still lead to those files; a library is fresh when its objects and its link command are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .trust import make_folder

MANIFEST_FORMAT = 3
ABSENT = "absent"
"""The hash of a file that cannot be read: equal to no content's."""


class Roots:
    """Names of folders, so that a path can be recorded without saying where on this machine it is.

    Args:
        folders: Name -> folder. Where one lies in another, the inner one names what is in it.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = {name: os.path.realpath(path) for name, path in folders.items()}
        places = {place: name for name, path in folders.items() for place in (os.path.realpath(path), str(path))}
        self._names = sorted(((f"{place}/", name) for place, name in places.items()), key=lambda item: -len(item[0]))

    def name(self, path: str) -> str:
        """``<root>:<path in it>``; the path itself when it lies in none of the folders."""
        for place, name in self._names:
            if f"{path}/".startswith(place):
                return f"{name}:{path[len(place) :]}"
        return path

    def path(self, name: str) -> str:
        """The path that :meth:`name` made ``name`` from, with the folders as they are here."""
        root, separator, rest = name.partition(":")
        return os.path.join(self._folders[root], rest) if separator and root in self._folders else name


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
    make_folder(path.parent)
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
    # The colon that ends the target is followed by whitespace; one inside a path is not.
    _, *prerequisites = re.split(r":(?=\s)", re.sub(r"\\\r?\n", " ", text), maxsplit=1)
    words = re.findall(r"(?:\\[ #\\]|[^\s])+", "".join(prerequisites))
    paths = (re.sub(r"\\([ #\\])", r"\1", word).replace("$$", "$") for word in words)
    return list(dict.fromkeys(paths))


def search_of(
    paths: Iterable[str],
    include_dirs: Sequence[tuple[str, str]],
    roots: Roots,
    exists: Callable[[str], bool] = os.path.lexists,
) -> list[str]:
    """What the include folders contributed: those that hold a file that was read, in their order, and shadowing files.

    A shadowing file is one that an earlier include folder offers under the relative name of a file from a later one: a
    header that appears there changes what is compiled though no file read before has changed. A folder from which
    nothing was read changes nothing.

    Args:
        paths: The files that the compiler read.
        include_dirs: ``(flag, folder)`` in the order in which headers are looked for.
        roots: Names of folders, for the result.
        exists: Whether there is a file.
    """
    folders = [(folder.rstrip("/") + "/", os.path.realpath(folder) + "/") for _, folder in include_dirs]
    used: set[int] = set()
    shadows = []
    for path in paths:
        owner, place = next(
            ((i, place) for i, places in enumerate(folders) for place in places if path.startswith(place)), (0, path)
        )
        relative = path[len(place) :]
        if relative:
            used.add(owner)
            shadows += [folder + relative for folder, _ in folders[:owner] if exists(folder + relative)]
    return [f"{flag} {roots.name(folder)}" for flag, folder in (include_dirs[i] for i in sorted(used))] + [
        roots.name(shadow) for shadow in shadows
    ]


@dataclass
class ObjectRecord:
    """How one object came to be.

    Attributes:
        command: Hash of the flags and the compiler's identity.
        files: Every file that the compiler read, by its name in :class:`Roots` -> its hash when the build began. The
            first is the source.
        search: Hash of :func:`search_of`.
        content: Hash of the object file.
        peak_memory: Largest resident set of a process of the compiler, bytes.
        wall_seconds: How long it took.
    """

    command: str
    files: dict[str, str]
    search: str
    content: str
    peak_memory: int
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
        """The manifest at ``path``; an empty one when there is none, or one that is not as it was written."""
        try:
            data = json.loads(path.read_bytes())
            if data.pop("checksum") == _checksum(data) and data["module"] == module:
                for record in data["objects"].values():
                    record["files"] = dict(data["files"][index] for index in record["files"])
                objects = {name: ObjectRecord(**record) for name, record in data["objects"].items()}
                return cls(module, objects, data["link"], data["library"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        return cls(module)

    def write(self, path: Path) -> None:
        """Write it atomically.

        Raises:
            OSError: it cannot be written.
        """
        table: dict[tuple[str, str], int] = {}  # files that many objects were made from are listed once
        objects = {
            name: {**vars(record), "files": [table.setdefault(item, len(table)) for item in record.files.items()]}
            for name, record in sorted(self.objects.items())
        }
        about = {"module": self.module, "library": self.library, "link": self.link}
        data = {**about, "objects": objects, "files": list(table)}
        write_atomically(path, json.dumps({"checksum": _checksum(data), **data}, indent=1))


def _checksum(data: Mapping[str, Any]) -> str:
    return hash_strings([f"format {MANIFEST_FORMAT}", json.dumps(data, sort_keys=True)])
