# SPDX-License-Identifier: Apache-2.0
"""The architectures that modules are compiled for.

Adds to upstream: ``FLASHINFER_CUDA_ARCH_LIST`` is checked entry by entry (spaces or semicolons between them), and
compute capability 12 without a suffix gets the one without which its FP4 instructions do not assemble.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


ARCH_LIST_VARIABLE = "FLASHINFER_CUDA_ARCH_LIST"

logger = logging.getLogger("flashinfer.compilation_context")  # upstream's

_ENTRY = re.compile(r"(?P<major>\d+)\.(?P<minor>\d)(?P<suffix>[af]?)")
_EXAMPLE = (
    f"Valid examples: {ARCH_LIST_VARIABLE}=12.1a (DGX Spark), 12.0a (RTX 50, RTX PRO Blackwell), "
    '9.0a (Hopper), or several: "12.0a 12.1a", "9.0a;12.1a"'
)


def split_arch_list(value: str) -> list[tuple[int, str, str]]:
    """The entries of ``FLASHINFER_CUDA_ARCH_LIST``: major, minor, and the suffix or nothing, each as it stands there.

    Parameters
    ----------
    value : str
        Compute capabilities such as ``12.1a`` or ``8.9``, separated by spaces or semicolons.

    Raises
    ------
    ValueError
        An entry is not a compute capability, has a suffix that its architecture does not have, or there is none at all.
        The message quotes the entry and gives valid examples.
    """
    entries = [entry for entry in re.split(r"[\s;]+", value) if entry]
    if not entries:
        raise ValueError(f"{ARCH_LIST_VARIABLE} is set but names no architecture: {value!r}. {_EXAMPLE}")
    return [_split_entry(entry, value) for entry in entries]


def _split_entry(entry: str, value: str) -> tuple[int, str, str]:
    within = "" if entry == value else f" in {value!r}"
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(
            f"{ARCH_LIST_VARIABLE}: {entry!r}{within} is not a compute capability "
            f"(major.minor with an optional suffix a or f). {_EXAMPLE}"
        )
    major, minor, suffix = int(match["major"]), match["minor"], match["suffix"]
    oldest = {"a": 9, "f": 10}.get(suffix, 0)
    if major < oldest:
        raise ValueError(
            f"{ARCH_LIST_VARIABLE}: {entry!r}{within}: the suffix {suffix!r} exists from compute capability "
            f"{oldest}.0 on. {_EXAMPLE}"
        )
    return major, minor, suffix


def parse_arch_list(value: str) -> set[tuple[int, str]]:
    """``(major, minor with suffix)`` of each entry, e.g. ``{(12, "1a")}``, as in ``TARGET_CUDA_ARCHS``.

    Raises:
        ValueError: as :func:`split_arch_list`.
    """
    return {_with_suffix(*parts) for parts in split_arch_list(value)}


def _with_suffix(major: int, minor: str, suffix: str) -> tuple[int, str]:
    if suffix:
        return major, minor + suffix
    if major == 12:
        return major, _complete_sm12x(f"{major}.{minor}", minor)
    return CompilationContext._normalize_cuda_arch(major, int(minor))


@cache
def _complete_sm12x(entry: str, minor: str) -> str:
    """The minor version with the suffix that FP4 needs; says so once per process and entry."""
    completed = minor + "a"
    if minor == "0":
        # Upstream prefers the family's code for 12.0 where nvcc knows it. Reading the list needs no compiler.
        with contextlib.suppress(RuntimeError, OSError):
            completed = CompilationContext._normalize_cuda_arch(12, 0)[1]
    logger.warning(
        "%s: %s is taken as 12.%s, because without the suffix FP4 conversion and block-scaled MMA do not assemble "
        "(\"Feature 'cvt.e2m1x2...' not supported on .target 'sm_12%s'\")",
        ARCH_LIST_VARIABLE,
        entry,
        completed,
        minor,
    )
    return completed


_UpstreamContext: Any = _upstream.CompilationContext


class CompilationContext(_UpstreamContext):  # type: ignore[misc]
    """The set of architectures that modules are compiled for.

    ``FLASHINFER_CUDA_ARCH_LIST`` names them (see :func:`parse_arch_list`), else they are those of the visible GPUs.
    """

    def __init__(self) -> None:
        value = os.environ.get(ARCH_LIST_VARIABLE)
        if value is None:
            super().__init__()
        else:
            self.TARGET_CUDA_ARCHS: set[tuple[int, str]] = parse_arch_list(value)
