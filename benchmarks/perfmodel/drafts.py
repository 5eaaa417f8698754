# SPDX-License-Identifier: Apache-2.0
"""What drafting a token costs on a GB10: a draft model's matrices are read once a drafted token, its own LM head among
them.

Others compute it (vLLM: cuBLAS in bf16, Marlin in MXFP4), so its time is its bytes and the fixed times of its kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from flashinfer.sm12x.models import matrix_bytes

from .devices import GB10, Device
from .gb10 import FIXED_US
from .step import CUBLAS_GB_PER_SECOND

HEAD = "LM head"


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft model of one layer: rows and columns of its matrices, and how many small kernels it launches."""

    matrices: Mapping[str, tuple[int, int]]
    small: int


EAGLE3 = Draft(
    {
        "fc": (2880, 8640),
        "QKV": (5120, 5760),
        "O": (2880, 4096),
        "gate and up": (32_768, 2880),
        "down": (2880, 16_384),
        HEAD: (201_088, 2880),
    },
    10,
)
"""NVIDIA's Eagle3-v3 of gpt-oss-120b (sizes in gptoss-spark's bench/draft_microbench.py): three hidden states of the
model go in, and its LM head is its own."""
SHORT_HEAD = 32_768
"""Rows that gptoss-spark leaves of that LM head (``ops/shrink-draft-vocab.py``); 1.8 points of acceptance are lost."""
DRAFTS = {"eagle3": EAGLE3}


def draft_bytes(draft: Draft, weights: str, head_rows: int = 0) -> dict[str, float]:
    """Bytes of each matrix in a format; ``head_rows``: rows that are left of the LM head."""
    return {
        name: matrix_bytes(head_rows if name == HEAD and head_rows else n, k, weights)
        for name, (n, k) in draft.matrices.items()
    }


def draft_us(draft: Draft, weights: str, head_rows: int = 0, device: Device = GB10) -> tuple[float, float]:
    """Microseconds of drafting one token, fast and slow."""
    ends = []
    for end in (0, 1):
        time = draft.small * FIXED_US["small"][end] + FIXED_US["attention"][end]
        for name, size in draft_bytes(draft, weights, head_rows).items():
            rate = device.dram[end]
            if end and weights == "bf16" and name != HEAD:
                rate = min(rate, CUBLAS_GB_PER_SECOND)
            time += size / 1e3 / rate + FIXED_US["gemm"][end]
        ends.append(time)
    return ends[0], ends[1]
