# SPDX-License-Identifier: Apache-2.0
"""Files of users: output that is written whole or not at all, and JSON whose errors name what was read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The path of a new file in the folder of ``path``, which takes its place once the block has ended without an error.

    After an error ``path`` is as it was. A link stays a link to the file that is written; a device or a pipe is written
    itself.

    Raises:
        OSError: the folder cannot be written to, or ``path`` is a folder.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    if target.exists() and not target.is_file():
        yield target
        return
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-", suffix=target.suffix)
    scratch = Path(name)
    try:
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(handle, 0o666 & ~mask)
        os.close(handle)
        yield scratch
        scratch.replace(target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def json_object(text: str | bytes, source: str, expected: str) -> dict[str, Any]:
    """The JSON object in ``text``.

    Args:
        text: A file's bytes, or a user's words.
        source: Where it comes from, for the error: an option, a path.
        expected: What the object should be, for the error.

    Raises:
        ValueError: it is no JSON, or no object; the message names ``source``, the place of the error and ``expected``.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError as error:
        problem = f"is not JSON: byte {error.start} is not UTF-8"
    except RecursionError:
        problem = "is not JSON of a depth that can be read"
    else:
        if isinstance(found, dict):
            return found
        names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
        problem = f"is JSON, but {names.get(type(found), 'a number')}"
    raise ValueError(f"{source} {problem}; it must be {expected}") from None


def json_file(path: Path, expected: str) -> dict[str, Any]:
    """The JSON object in a file, as :func:`json_object`.

    Raises:
        OSError, ValueError: it cannot be read, or is not JSON.
    """
    return json_object(path.read_bytes(), str(path), expected)
