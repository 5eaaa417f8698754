# SPDX-License-Identifier: Apache-2.0
"""Memory of a host that shares it with its GPU, as a DGX Spark (GB10) does: how much vLLM takes, how much stays.

Nothing but the standard library is imported here: the doctor, vLLM's plugin and the scripts load this file without the
rest of FlashInfer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30

SHARE = 0.7
"""``--gpu-memory-utilization`` on unified memory: of a Spark's 119.7 GiB 84, of which gpt-oss-120b's weights take 61.

Reports have hosts that froze at 0.70 (vllm-project/vllm 46307, 56824) and at more. In these the start itself, which no
share bounds, took 20 to 30 GiB beyond it: weights that come in, a profile run. So 36 GiB stay free for that and for the
host, and :data:`HEADROOM` is watched while weights come in. What remains for gpt-oss-120b's KV cache is half a million
tokens in bf16. Nothing here was measured on a GB10.
"""

HEADROOM = 8 * GIB
"""Memory that a host keeps free: below it the plugin ends a load of weights, and the doctor warns of a start. The
reports' last samples before a host stopped answering are 6.3 and 7 GiB."""

VLLM_SHARE = 0.92
"""The share of memory that vLLM 0.33.0 takes unless it is told otherwise."""


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
    """Read the memory of this host; None where the kernel does not tell.

    Limits of control groups do not count: a GPU's memory is not charged to them. Where a container is shown its own
    limits in place of the host's memory (LXC), these are what is read, and :func:`is_shared` says no.
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
    """Whether a GPU's memory of ``gpu_total`` bytes, as CUDA tells it, is the memory that ``host`` is of.

    It is not where a guest (WSL2, a VM, LXC) has a part of the host's. On a GB10 both are MemTotal.
    """
    return abs(host.total - gpu_total) <= gpu_total // 16
