# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all, and JSON whose errors name what was read.

Nothing but the standard library is imported here: the doctor, vLLM's plugin and the build come before FlashInfer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The path of a new file in the folder of ``path``, which takes its place once the block has ended without an
    error.

    After an error or a loss of power ``path`` is as it was. A link stays a link to the file that is written; a device
    or a pipe is written itself.

    Raises:
        OSError: the folder cannot be written to, or ``path`` is a folder. It has the name of ``path`` if it had none.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    if target.exists() and not target.is_file():
        yield target
        return
    with naming(path), _new_file(target) as scratch:
        yield scratch


def replace_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replace a file, or a link by a file: after an error, an interruption or a loss of power it has the new bytes or
    the old ones, never a part.

    Args:
        path: The file; its folder must be there.
        data: Its bytes.
        mode: Its mode bits, whatever the umask; those of any new file when omitted.

    Raises:
        OSError: with the file's name; what was written so far is removed.
    """
    with naming(path), _new_file(path, mode) as scratch, open(scratch, "wb") as file:
        file.write(data)


@contextmanager
def _new_file(target: Path, mode: int | None = None) -> Iterator[Path]:
    # A name that nobody can guess, and never a file or a link that is there: the folder may be /tmp.
    scratch = target.with_name(f".{target.name}{_SCRATCH}{secrets.token_hex(8)}{target.suffix}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(scratch, flags, 0o666 if mode is None else 0o600)
    except OSError as error:
        error.filename = str(target)
        raise
    try:
        try:
            if mode is not None:
                os.fchmod(handle, mode)
            yield scratch
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(scratch, target)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)  # the new name is on the disk when the folder is
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems write folders at once
            raise
    finally:
        os.close(folder)


_SCRATCH = ".new-"


def remove_scratch(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed while they wrote in a folder."""
    for path in folder.iterdir():
        # A number alone: of versions before.
        if re.fullmatch(rf"\.\w[\w.-]*(?:{re.escape(_SCRATCH)}[0-9a-f]{{16}}(?:\.\w+)?|\.\d+)", path.name, re.ASCII):
            path.unlink()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an :class:`OSError` without a file's name, as a full disk raises it, the name of ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text that a user may have written.

    Python's own parser takes NaN and Infinity, which JSON has not, and makes infinity of a number with many digits.

    Raises:
        ValueError: it is no JSON, no UTF-8, or has such a number, or a whole one with thousands of digits.
        RecursionError: its objects are nested too deep.
    """
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


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
        found = parse_json(text)
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError as error:
        problem = f"is not JSON: byte {error.start} is not UTF-8"
    except RecursionError:
        problem = "is not JSON of a depth that can be read"
    except ValueError as error:  # of a number
        problem = f"is not JSON: {error}"
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
