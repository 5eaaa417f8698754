# SPDX-License-Identifier: Apache-2.0
"""What a user sees of a build: a bar on a terminal, lines elsewhere, everything in ``build.log``."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from .executor import JobResult
from .jobs import GIB
from .trust import new_text_file


class Progress:
    """Shows and records the steps of one build. A context manager.

    Args:
        module: The module's name.
        total: Number of steps.
        log_path: Where the full output goes; an older log is replaced.
        header: First lines of the log.
        logger: Where lines go when standard error is no terminal.
        verbose: Show each command and all that it prints as well.
    """

    def __init__(
        self, module: str, total: int, log_path: Path, header: str, logger: logging.Logger, verbose: bool
    ) -> None:
        self._module = module
        self._total = total
        self._done = 0
        self._logger = logger
        self._verbose = verbose
        self._started = time.monotonic()
        self._log = new_text_file(log_path)
        self._log.write(header + "\n")
        self._bar: Any = None
        if sys.stderr.isatty() and not verbose:
            self._bar = tqdm(total=total, desc=module, unit="file", file=sys.stderr, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = "interrupted or failed" if error is not None else "done"
        self._log.write(f"\n# {outcome} after {time.monotonic() - self._started:.1f} s\n")
        self._log.close()
        if self._bar is not None:
            self._bar.close()

    def step(self, result: JobResult) -> None:
        """A command has ended."""
        self._done += 1
        took = f"{result.wall_seconds:.1f} s, {result.peak_memory / GIB:.2f} GiB"
        status = "" if result.returncode == 0 else f", exit status {result.returncode}"
        command = shlex.join(result.job.command)
        self._log.write(
            f"\n# [{self._done}/{self._total}] {result.job.name}: {took}{status}\n{command}\n{result.output}"
        )
        self._log.flush()
        if self._verbose:
            sys.stderr.write(f"{command}\n{result.output}")
            sys.stderr.flush()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{result.job.name} {took}", refresh=False)
            self._bar.update()
        else:
            self._logger.info(
                "%s [%d/%d] %s: %s%s", self._module, self._done, self._total, result.job.name, took, status
            )
