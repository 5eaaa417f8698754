# SPDX-License-Identifier: Apache-2.0
"""Failures of this package, or of what it asks the machine, leave a part to vLLM: one line in the log, and the start
goes on. Only refusals of a user's settings end a start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from ..quantize.files import FolderError
from ..variables import VariableError


class Refusal(ValueError):
    """A user's setting that cannot be served as it stands; it ends the start with its message."""


REFUSALS = (Refusal, VariableError, FolderError)
"""Errors that refuse a user's setting."""

_logged: set[str] = set()


def log_once(part: str, reason: object) -> None:
    """Log that ``part``, a subject with its verb, is left to vLLM; once a process for each part."""
    if part not in _logged:
        _logged.add(part)
        logging.getLogger("vllm.flashinfer_sm12x").warning("flashinfer-sm12x: %s left to vLLM: %s", part, reason)


@contextlib.contextmanager
def leaving(part: str) -> Iterator[None]:
    """Leave ``part`` to vLLM if the statements in this context fail, whatever with; refusals pass."""
    try:
        yield
    except REFUSALS:
        raise
    except Exception as error:  # NVML, imports, configurations of other shapes: each fails in ways of its own
        log_once(part, f"{type(error).__name__}: {error}")
