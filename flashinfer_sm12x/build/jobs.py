# SPDX-License-Identifier: Apache-2.0
"""How many compilers may run at once: by memory, cores and ``MAX_JOBS``.

Only the table of variables is imported from FlashInfer: the doctor runs this without the rest.
"""

from __future__ import annotations

import logging
import math
import os
import re
from pathlib import Path

from .. import variables

GIB = 1 << 30
DEFAULT_JOB_MEMORY = GIB
"""Bytes that a compiler of this fork's sources needs at most: three times what the largest one took when this was
written."""

MEMORY_SHARE = 0.9
"""The part of the free memory that a build may use."""

_logger = logging.getLogger("flashinfer.jit.sm12x")


def parallel_jobs(job_memory: int = DEFAULT_JOB_MEMORY, max_jobs: int | None = None) -> tuple[int, str]:
    """The number of compilers that a build may run at once if it starts now, and the reason in words.

    Args:
        job_memory: Bytes that one of them may need.
        max_jobs: The number, if given; else ``MAX_JOBS`` gives it, if set.
    """
    if max_jobs is not None:
        return max_jobs, f"{max_jobs} asked for"
    try:
        if wanted := variables.read("MAX_JOBS"):
            return int(wanted), f"MAX_JOBS={wanted}"
    except variables.VariableError as error:
        _logger.warning("%s; it is ignored", error)
    cores, available = usable_cores(), available_memory()
    jobs = max(1, min(cores, int(available * MEMORY_SHARE) // job_memory))
    return jobs, f"{cores} core{'s' * (cores != 1)}, {available / GIB:.1f} GiB of memory free"


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
        root: The folder that holds ``proc`` and ``sys``; tests pass their own.
    """
    left = [kibibytes * 1024 for kibibytes in _numbers(root / "proc/meminfo", "MemAvailable:")]
    version_2 = "memory.max", "memory.current", "inactive_file"
    version_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    groups = [(group, *version_2) for group in _control_groups(root)]
    for group, limit, used, reclaimable in [*groups, (root / "sys/fs/cgroup/memory", *version_1)]:
        cached = sum(_numbers(group / "memory.stat", reclaimable))
        # Runs once, or not at all if there is no such group or no limit ("max").
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
