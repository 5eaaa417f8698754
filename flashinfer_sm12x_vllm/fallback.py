# SPDX-License-Identifier: Apache-2.0
"""Failures of this package, or of what it asks the machine, leave a part to vLLM: one line in the log, and the start goes
on. Only refusals of a user's settings end a start.

Nothing but the standard library is imported here: :func:`flashinfer_sm12x_vllm.register` uses it before all else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class Refusal(ValueError):
    """A user's setting that cannot be served as it stands; it ends the start with its message."""


# By name: files that are loaded twice (``settings.load``) have two classes of a name.
REFUSALS = ("Refusal", "VariableError", "FolderError")
_logged: set[str] = set()


def is_refusal(error: BaseException) -> bool:
    """Whether an error refuses a user's setting."""
    return any(each.__name__ in REFUSALS for each in type(error).__mro__)


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
    except Exception as error:  # NVML, imports, configurations of other shapes: each fails in ways of its own
        if is_refusal(error):
            raise
        log_once(part, f"{type(error).__name__}: {error}")
