# SPDX-License-Identifier: Apache-2.0
"""Files that others wrote, checked field by field before a field is used.

Nothing but the standard library is imported here: vLLM's plugin reads manifests before FlashInfer may be imported.
"""

from __future__ import annotations

import contextlib
import re
import reprlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..files import parse_json

MOST = (1 << 31) - 1
"""The largest size that a file may state; kernels count in 32 bits."""


class UserError(ValueError):
    """An error of a user's making, in a line: what is wrong, and what to do."""


class FolderError(UserError):
    """A file or a folder that cannot be used: which, what is wrong with it, what to do."""


class Fields:
    """The fields of a JSON object of a file.

    Each method returns a field's value if it has the type and the range, and otherwise raises :class:`FolderError` with
    the file, the field, its value and what it may be.

    Parameters
    ----------
    values : dict
        The parsed object.
    path : Path
        Its file.
    is_no : str
        What the file is not, if a field is wrong: "no manifest of sm12x-quantize's".
    fix : str
        What the user can do about it.
    at : str
        The names of the objects around this one, with a dot after each.
    """

    def __init__(self, values: dict[str, Any], path: Path, is_no: str, fix: str, at: str = "") -> None:
        self.values, self.path, self.is_no, self.fix, self.at = values, path, is_no, fix, at

    def __contains__(self, key: str) -> bool:
        """Whether the field is there, and not null."""
        return self.values.get(key) is not None

    def refuse(self, reason: str) -> NoReturn:
        raise FolderError(f"{self.path} is {self.is_no}: {reason}; {self.fix}")

    def _refuse(self, key: str, allowed: str) -> NoReturn:
        if key not in self.values:
            self.refuse(f"it has no {self.at}{_shown(key)}, {allowed}")
        self.refuse(f"{self.at}{_shown(key)} is {reprlib.repr(self.values[key])}; it must be {allowed}")

    def whole(self, key: str, low: int = 1, high: int = MOST) -> int:
        value = self.values.get(key)
        if type(value) is not int or not low <= value <= high:  # True is an int, too
            self._refuse(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value: Any = self.values.get(key)
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
            self._refuse(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if not isinstance(value, bool):
            self._refuse(key, "true or false")
        return value

    def text(self, key: str, pattern: str = "", allowed: str = "a text") -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or (pattern and not re.fullmatch(pattern, value, re.ASCII)):
            self._refuse(key, allowed)
        return value

    def one_of(self, key: str, names: Sequence[str]) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or value not in names:
            self._refuse(key, f"one of {', '.join(names)}")
        return value

    def list_of(self, key: str, names: Sequence[str], length: int) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != length or any(each not in names for each in value):
            self._refuse(key, f"a list of {length}, each one of {', '.join(names)}")
        return value

    def object(self, key: str) -> Fields:
        value = self.values.get(key)
        if not isinstance(value, dict):
            self._refuse(key, "an object")
        return Fields(value, self.path, self.is_no, self.fix, f"{self.at}{_shown(key)}.")

    def file_name(self, key: str, suffix: str) -> str:
        """The name of a file beside this one: no path, so that nothing outside of the folder is ever read."""
        return self.text(key, PLAIN_NAME + re.escape(suffix), f"the name of a file beside it, ending with {suffix}")

    def only(self, *keys: str) -> None:
        """Refuse other fields than ``keys``."""
        for key in self.values:
            if key not in keys:
                self.refuse(f"{self.at}{_shown(key)} is no field of it; its fields are {', '.join(keys)}")


PLAIN_NAME = r"\w[\w.-]*"
"""A name without a path; ``re.ASCII``."""


def _shown(key: str) -> str:
    """A field's name in a message: as it is, if that can be printed in a line."""
    return key if re.fullmatch(r"[\w.-]{1,100}", key, re.ASCII) else reprlib.repr(key)


def read_fields(path: Path, is_no: str, fix: str) -> Fields:
    """The object that a JSON file holds.

    Raises
    ------
    FolderError
        The file cannot be read, is no JSON, or holds something else than an object.
    """
    try:
        found = parse_json(path.read_bytes())
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}; {fix}") from error
    except RecursionError as error:
        raise FolderError(f"{path} is {is_no}: its objects are nested too deep; {fix}") from error
    except ValueError as error:  # JSON's, UTF-8's, and of a whole number with thousands of digits
        raise FolderError(f"{path} is {is_no}: it is not JSON ({error}); {fix}") from error
    if not isinstance(found, dict):
        raise FolderError(f"{path} is {is_no}: it is {reprlib.repr(found)}, and no JSON object; {fix}")
    return Fields(found, path, is_no, fix)


def read_text(path: Path) -> str:
    """A user's text.

    Raises
    ------
    FolderError
        The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FolderError(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error


def require_writable(folder: Path, option: str) -> None:
    """Try to write in a folder, before the hours of work whose result goes there. Afterwards the disk is as before.

    Raises
    ------
    FolderError
        It cannot be made or written; names ``option``, with which the user chose it.
    """
    made: list[Path] = []
    try:
        made += [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise FolderError(f"{option}: {folder} cannot be written: {error.strerror}; choose another folder") from error
    finally:
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()
