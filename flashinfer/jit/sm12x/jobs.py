# SPDX-License-Identifier: Apache-2.0
"""How many compilers may run at once, from free memory, what a compiler needs, and cores."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
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
    if max_jobs is not None:
        return JobLimit(max_jobs, None, f"{max_jobs} asked for")
    wanted = (os.environ if environ is None else environ).get("MAX_JOBS")
    if wanted:
        if wanted.isdigit() and int(wanted) > 0:
            return JobLimit(int(wanted), None, f"MAX_JOBS={wanted}")
        _logger.warning("ignoring MAX_JOBS=%r: it must be a positive whole number", wanted)
    cores = usable_cores() if cores is None else cores
    available = available_memory() if available is None else available
    reason = f"{cores} core{'s' * (cores != 1)}, {available / GIB:.1f} GiB of memory free"
    return JobLimit(cores, int(available * MEMORY_SHARE), reason)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    for group in _control_groups(root):
        quota = re.match(r"(\d+) (\d+)", _read(group / "cpu.max"))
        if quota is not None:
            cores = min(cores, max(1, math.ceil(int(quota.group(1)) / int(quota.group(2)))))
    return cores


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that new processes can take without anything being killed or swapped.

    The kernel's ``MemAvailable``, and what the limits of this process's control groups (version 2 or 1) leave.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
    """
    left = [kibibytes * 1024 for kibibytes in _numbers(root / "proc/meminfo", "MemAvailable:")]
    version_2 = "memory.max", "memory.current", "inactive_file"
    version_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    groups = [(group, *version_2) for group in _control_groups(root)]
    for group, limit, used, reclaimable in [*groups, (root / "sys/fs/cgroup/memory", *version_1)]:
        cached = sum(_numbers(group / "memory.stat", reclaimable))
        # One pass, or none where there is no such group or no limit ("max").
        for limit_bytes, used_bytes in zip(_numbers(group / limit), _numbers(group / used), strict=False):
            left.append(limit_bytes - max(0, used_bytes - cached))
    return max(0, min(left)) if left else DEFAULT_JOB_MEMORY


def _control_groups(root: Path) -> list[Path]:
    """Version 2 control groups of this process, from its own to the root."""
    base = root / "sys/fs/cgroup"
    own = re.search(r"^0::/*(.*)", _read(root / "proc/self/cgroup"), re.MULTILINE)
    group = base / own.group(1) if own is not None else root
    return [each for each in (group, *group.parents) if each.is_relative_to(base)]


def _numbers(path: Path, name: str = "") -> list[int]:
    """The number that follows ``name`` at the start of a line of a file; none where there is no such file or line."""
    return [int(number) for number in re.findall(rf"^{name}\s*(\d+)", _read(path), re.MULTILINE)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
