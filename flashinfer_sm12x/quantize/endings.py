# SPDX-License-Identifier: Apache-2.0
"""How a command ends that reads checkpoints: in a line, for each error that is not this fork's own fault."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch

from ..signals import until_interrupted
from .files import UserError


class ModelError(UserError):
    """A checkpoint that cannot be opened, run, quantized or measured."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's or the host's memory is used up."""
    # torch's allocator of the host raises a plain RuntimeError.
    of_host = isinstance(error, RuntimeError) and any(words in str(error) for words in OF_HOST)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or of_host


OF_HOST = ("DefaultCPUAllocator", "Cannot allocate memory", "unable to mmap")


def first_line(error: BaseException) -> str:
    """The first line of an error that is not empty, cut to 300 characters; otherwise its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def message_of(error: BaseException) -> str | None:
    """The line that a command ends with; None for an error that a developer must see with its traceback."""
    if is_out_of_memory(error):
        return (
            f"out of memory ({first_line(error)}): stop what else uses it, such as vLLM, or take a machine with "
            "more of it"
        )
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        if error.filename is not None and error.strerror:
            return f"{error.filename}: {error.strerror}"
        return first_line(error)
    return None


@contextlib.contextmanager
def running(name: str, verb: str) -> Iterator[None]:
    """Turn an error from the code of a model, transformers' or an operator's, into a :class:`ModelError`.

    Such an error can be of any kind, by what is wrong with the checkpoint. Memory, files and what has a line already
    pass.
    """
    try:
        yield
    except Exception as error:
        theirs = isinstance(error, OSError) and error.errno is None  # transformers' and the hub's, not the system's
        if message_of(error) is not None and not theirs:
            raise
        raise ModelError(f"{name} cannot be {verb}: {type(error).__name__}: {first_line(error)}") from error


def in_a_line(program: str, body: Callable[[], int]) -> int:
    """The exit status of ``body``; 2 after a line of an error, 128 and a signal's number after the line of that one."""

    def without_errors() -> int:
        try:
            return body()
        except Exception as error:
            if (line := message_of(error)) is None:
                raise
            print(f"{program}: {line}", file=sys.stderr)
            return 2

    return until_interrupted(program, without_errors, "nothing was written")
