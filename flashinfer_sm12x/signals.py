# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and SIGHUP end a command in a line, after its processes are ended and its files are whole."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator


class Ending:
    """The signal that ended a block of :func:`ended_by_signals`: SIGINT unless another one came."""

    def __init__(self) -> None:
        self.signal = signal.SIGINT

    @property
    def status(self) -> int:
        """The exit status that a shell gives a process that the signal ended."""
        return 128 + self.signal

    def line(self, program: str, left: str) -> str:
        """What a command prints last: the signal, and what is left of its work."""
        return f"{program}: interrupted by {self.signal.name}: {left}"


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt in the block, as Ctrl-C does: what was started is ended, what is half
    written removed. A signal that the caller has ignored, as nohup does, or handles, stays ignored or handled.
    """
    ending = Ending()

    def end(number: int, _frame: object) -> None:
        # One after the other, as systemd and a closing terminal send them: the second would interrupt the cleaning up.
        if ending.signal is signal.SIGINT:
            ending.signal = signal.Signals(number)
            raise KeyboardInterrupt

    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def until_interrupted(program: str, body: Callable[[], int | None], left: str) -> int:
    """The exit status of ``body``; of one that a signal ended its own, behind a line.

    Args:
        program: The command's name.
        body: The command.
        left: What is left of its work, unless the KeyboardInterrupt says it.
    """
    with ended_by_signals() as ending:
        try:
            return body() or 0
        except KeyboardInterrupt as error:
            print(f"\n{ending.line(program, str(error) or left)}", file=sys.stderr)
            return ending.status
