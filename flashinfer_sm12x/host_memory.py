# SPDX-License-Identifier: Apache-2.0
"""Memory of a host that shares it with its GPU, as a DGX Spark (GB10) does: how much vLLM takes, how much stays.

The doctor, vLLM's plugin and the scripts use it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30

SHARE = 0.7
"""``--gpu-memory-utilization`` on unified memory: 84 of a Spark's 119.7 GiB; gpt-oss-120b's weights take 61 of these.

Users reported hosts that froze at 0.70 (vllm-project/vllm 46307, 56824) and at more. There vLLM's start, whose memory
no share bounds (loading weights, a profile run), took 20 to 30 GiB beyond the share. So 36 GiB stay free for the start
and the host, and :data:`HEADROOM` is watched while weights are loaded. The rest holds half a million tokens of
gpt-oss-120b's KV cache in bf16. Nothing here was measured on a GB10.
"""

HEADROOM = 8 * GIB
"""Bytes of memory that a host must keep free: below this the plugin aborts a load of weights, and the doctor warns of a
start. In the reports the last samples before a host stopped answering are 6.3 and 7 GiB."""

VLLM_SHARE = 0.92
"""The share of memory that vLLM 0.33.0 takes by default."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a host's memory.

    Attributes:
        available: Memory that programs can still take: free, and what the kernel gives back (page cache).
        total: All of it.
    """

    available: int
    total: int


def read(meminfo: Path = Path("/proc/meminfo")) -> HostMemory | None:
    """Read the memory of this host; None if the kernel does not tell.

    Limits of control groups do not count: a GPU's memory is not charged to them. A container that sees its own limits
    in place of the host's memory (LXC) gets these, and :func:`is_shared` then says no.
    """
    try:
        text = meminfo.read_text()
    except (OSError, ValueError):
        return None
    found = dict(re.findall(r"^(MemAvailable|MemTotal):\s*(\d+) kB$", text, re.MULTILINE))
    if len(found) != 2:
        return None
    return HostMemory(*(int(found[name]) * 1024 for name in ("MemAvailable", "MemTotal")))


def is_shared(host: HostMemory, gpu_total: int) -> bool:
    """Whether GPU and host share memory: ``gpu_total``, CUDA's size of the GPU's memory, is about the host's total.

    It is not in a guest (WSL2, a VM, LXC) that has a part of the host's memory. On a GB10 both are MemTotal.
    """
    return abs(host.total - gpu_total) <= gpu_total // 16
