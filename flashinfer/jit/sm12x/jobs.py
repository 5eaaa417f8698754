# SPDX-License-Identifier: Apache-2.0
"""How many compilers may run at once, from free memory, what a compiler needs, and cores."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
DEFAULT_JOB_MEMORY = GIB
"""Assumed need of a job that nobody has measured here: three times what the largest source took when this was written."""

MEMORY_SHARE = 0.9
"""The part of the free memory that a build may plan to use."""

MEMORY_MARGIN = 1.15
"""A job is taken to need this much more than when it was measured: sources change, and other versions of nvcc do."""

_logger = logging.getLogger("flashinfer.jit.sm12x")


@dataclass(frozen=True)
class JobLimit:
    """How many jobs may run together.

    Attributes:
        jobs: At most this many.
        memory: Their needs together may be at most this many bytes; None where ``MAX_JOBS`` decides.
        reason: What decided, for the log.
    """

    jobs: int
    memory: int | None
    reason: str


def job_limit(
    environ: Mapping[str, str] | None = None,
    max_jobs: int | None = None,
    available: int | None = None,
    cores: int | None = None,
) -> JobLimit:
    """The limit for a build that starts now.

    Args:
        environ: The environment; ``MAX_JOBS`` in it wins over memory and cores.
        max_jobs: Wins over all else.
        available: Free memory, bytes; asked of the machine when omitted.
        cores: Usable cores; asked of the machine when omitted.
    """
    environ = os.environ if environ is None else environ
    if max_jobs is not None:
        return JobLimit(max_jobs, None, f"{max_jobs} asked for")
    wanted = environ.get("MAX_JOBS")
    if wanted:
        if wanted.isdigit() and int(wanted) > 0:
            return JobLimit(int(wanted), None, f"MAX_JOBS={wanted}")
        _logger.warning("ignoring MAX_JOBS=%r: it must be a positive whole number", wanted)
    cores = usable_cores() if cores is None else cores
    available = available_memory() if available is None else available
    return JobLimit(
        cores,
        int(available * MEMORY_SHARE),
        f"{cores} core{'s' * (cores != 1)}, {available / GIB:.1f} GiB of memory free",
    )


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    for group in _control_groups(root):
        try:
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
        except (OSError, ValueError):
            continue
    return cores


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that new processes can take without anything being killed or swapped.

    The kernel's ``MemAvailable``, and what the limits of this process's control groups (version 2 or 1) leave.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
    """
    candidates = [*_meminfo(root), *_group_headroom(root)]
    return max(0, min(candidates)) if candidates else DEFAULT_JOB_MEMORY


def _meminfo(root: Path) -> Iterator[int]:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return


def _control_groups(root: Path) -> Iterator[Path]:
    """Version 2 control groups of this process, from its own to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            group = base / path.lstrip("/")
            while group != base and base in group.parents:
                yield group
                group = group.parent
            yield base


def _group_headroom(root: Path) -> Iterator[int]:
    for group in _control_groups(root):
        yield from _headroom(group, "memory.max", "memory.current", "inactive_file")
    yield from _headroom(
        root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )


def _headroom(group: Path, limit_file: str, usage_file: str, reclaimable: str) -> Iterator[int]:
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return
        used = int((group / usage_file).read_text())
        cache = 0
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == reclaimable:
                cache = int(value)
        yield int(limit) - max(0, used - cache)
    except (OSError, ValueError):
        return
