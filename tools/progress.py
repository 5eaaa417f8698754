# SPDX-License-Identifier: Apache-2.0
"""One line of progress for long tasks. Needs only the standard library."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType


class Progress:
    """Shows a task, its progress and its seconds: on a terminal one line that is updated, elsewhere one line at the
    beginning and one at the end.

    Attributes:
        note: The progress, such as ``"7 of 19"``; the task sets it.
    """

    def __init__(self, what: str) -> None:
        self.what, self.note = what, ""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True) if sys.stdout.isatty() else None

    def __enter__(self) -> Progress:
        if self._ticker:
            self._ticker.start()
        else:
            print(f"{self.what} ...", flush=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._ticker:
            self._ticker.join()
        print(f"{self._start()}{self._line()}{', failed' if error else ''}", flush=True)

    def _tick(self) -> None:
        while not self._ended.wait(0.5):
            print(f"{self._start()}{self._line()}", end="", flush=True)

    def _start(self) -> str:
        return "\r\033[K" if self._ticker else ""  # carriage return, erase the line

    def _line(self) -> str:
        note = f", {self.note}" if self.note else ""
        return f"{self.what}{note}: {time.monotonic() - self._began:.0f} s"
