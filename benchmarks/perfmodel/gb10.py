# SPDX-License-Identifier: Apache-2.0
"""Assumptions about a GB10, with their sources, and the time of launches by their counts.

Each launch takes as long as the busiest of four resources: DRAM, issue slots, MMA, shared memory. A fixed time is added
for launches and tails, during which DRAM idles. Three numbers are known only as ranges: DRAM's rate, the rate of bf16
MMAs, and the fixed time of a layer. So a prediction is a range, from :data:`FAST` to :data:`SLOW`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flashinfer.sm12x.instances import FORMATS

MULTIPROCESSORS = 48
SCHEDULERS = 4
GIGAHERTZ = 2.418
L2_MEGABYTES = 24.0
L2_USABLE = 0.8
MMA_FLOPS_PER_CYCLE = 2048
BLOCK_SCALED_FLOPS_PER_CYCLE = {"mxf8f6f4": float(MMA_FLOPS_PER_CYCLE), "mxf4": 2.0 * MMA_FLOPS_PER_CYCLE}
"""FLOP per cycle and SM, by the kind of MMA."""
ISSUE_PER_WARP = 0.42
ISSUE_CEILING = 0.6
L2_CAPACITY = 1e6 * L2_MEGABYTES * L2_USABLE
CYCLES = 1e3 * GIGAHERTZ * MULTIPROCESSORS
"""Clock cycles per microsecond, summed over the multiprocessors."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of DRAM and of one SM's bf16 MMAs."""

    dram_gb_per_second: float
    bf16_flops_per_cycle: float


FAST, MIDDLE, SLOW = Rates(250.0, 1024.0), Rates(233.0, 943.0), Rates(218.0, 862.0)
"""DRAM, fast: what a bf16 GEMV reads on a GB10 (250.9 GB/s, gptoss-spark; a read-only probe 252.7, minfer). Slow: the
least marginal rate of the kernels that stream experts with one block an SM and three or more stages in flight: 218 to
222 (trellis experts by ``cp.async``) and 223 (CUTLASS's grouped GEMM by bulk copies, three stages). Not taken: 195 and
208 GB/s of ``cp.async`` kernels, which are whole times, launches included, and 83 of two stages. bf16, fast: RTX PRO's
rate; slow: what cuBLAS reaches on a GB10 (100 TFLOPS at 2.418 GHz), so that GeForce's 512 is excluded."""

FIXED_US = {
    "MoE": (14.0, 30.0),
    "dense": (5.0, 12.0),
    "small": (1.7, 2.9),
    "gemm": (2.1, 8.6),
    "router": (3.0, 8.0),
    "attention": (8.0, 16.0),
    "decode_attention": (5.0, 12.0),
}
"""Microseconds, fast and slow, that a call takes in addition to its busiest resource: its launches in a graph, tails
and gaps.

MoE: an H200 takes 14 us at one token beyond its bytes and arithmetic. dense: one launch; an H200 takes 10 us at one
token beyond its bytes, with no earlier launch to hide a part of that. small: a norm or an elementwise kernel of
vLLM's decode step on a GB10 takes 1.67 us (0.29 ms, 174 kernels, gptoss-spark), a top-k on an H200 2.9, and no time
passes between kernels of a graph there (24.9 of 25 s). gemm: on a GB10 cuBLAS's router takes 5.3 us, 3.2 of them bytes;
Marlin's 79 GEMMs of a drafted pass take 5.62 ms, 0.68 more than their 1.23 GB at the fast rate. router: this fork's,
two launches; an H200 takes 6.0 us for one token, norm and bytes included. Its weights may be prefetched before it
begins; that is not modelled. attention: FlashInfer's XQA takes 10 to 15 us on an H200 up to a context of 1,024.
decode_attention: this fork's; assumed equal to dense, which is one launch with a start and a tail, too: an H200 takes
8.3 to 8.8 us in a window and 9.3 to 10.2 us at a context of 1,024.
"""
LAUNCH_SAVED_US = {"experts": 0.7, "top-k": 1.0}
"""Microseconds that a call in a decode step saves. experts: ``moe_step`` with the caller's counters needs no launch
before it. top-k: at one token the experts' launch does the router's top-k. Both are net: an H100's step of 36 layers is
24 and 35 us shorter. Fusing the norm into QKV needs no such number, because it removes the part "norms" itself."""
SECOND_GEMM_US = 11.7
"""Microseconds that the two-kernel path adds to an MoE layer."""
SECOND_LAUNCH_US = 3.0
"""Microseconds that a second launch adds to a dense layer."""


def assumptions(layers: str) -> list[str]:
    """The assumptions, one line each; the last one is of ``layers``, "MoE" or "dense"."""
    fast, slow = (f"{end:g}" for end in FIXED_US[layers])
    fixed = {
        "MoE": f"launches, routing and tail: {fast} to {slow} us a layer (an H200 takes 14 at one token beyond "
        f"its bytes and arithmetic; a GB10's clock and latencies are unknown), {SECOND_GEMM_US:g} more for a pair of "
        "GEMMs (measured on an H200)",
        "dense": f"launch and tail: {fast} to {slow} us a layer (an H200 takes 10), {SECOND_LAUNCH_US:g} more for a "
        "GEMM",
    }
    return [
        f"GB10: {MULTIPROCESSORS} SMs, {SCHEDULERS} schedulers each, {GIGAHERTZ} GHz, L2 of {L2_MEGABYTES:g} MB "
        "(published)",
        f"DRAM: {FAST.dram_gb_per_second:g} GB/s (a bf16 GEMV and a read-only probe) to {SLOW.dram_gb_per_second:g} "
        f"(marginal rate of streamed experts: 218 to 223), shares are of {MIDDLE.dram_gb_per_second:g} (saturating "
        "reads: 227 to 253; Marlin's LM head 233; sold as 273)",
        f"L2: {L2_USABLE:.0%} of it holds tiles, the least recently used goes first, blocks keep pace (this simulation "
        "gave 1.57 and 14.2 GB where an H200 was measured to read 1.57 and 15.0)",
        f"MMA: {MMA_FLOPS_PER_CYCLE} operations per cycle and SM with block-scaled 8-bit operands (measured on SM120 "
        f"cards), twice as many with two packed MXFP4 ones (published); {FAST.bf16_flops_per_cycle:g} (as on RTX PRO) "
        f"to {SLOW.bf16_flops_per_cycle:g} (what cuBLAS reaches on a GB10) with bf16",
        f"issue: {ISSUE_PER_WARP} instructions per cycle for each resident warp of a scheduler, at most "
        f"{ISSUE_CEILING} (measured on an H200: a probe with one warp each, and 59 % of all slots at 64 tokens)",
        fixed[layers],
    ]


def mma_rates() -> dict[str, tuple[float, float]]:
    """FLOP per cycle and SM, slow and fast; of bf16 and f16, as cuBLAS reaches on a GB10 and as RTX PRO has."""
    bf16 = SLOW.bf16_flops_per_cycle, FAST.bf16_flops_per_cycle
    return {"bf16": bf16, "f16": bf16} | {kind: (rate,) * 2 for kind, rate in BLOCK_SCALED_FLOPS_PER_CYCLE.items()}


@dataclasses.dataclass(frozen=True)
class Counts:
    """Instructions, MMA operations, shared-memory wavefronts and DRAM bytes of one launch."""

    instructions: float = 0.0
    mma_flops: float = 0.0
    wavefronts: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def __mul__(self, factor: float) -> Counts:
        return Counts(*(factor * value for value in self.values()))

    def values(self) -> tuple[float, ...]:
        """The fields in their order."""
        return dataclasses.astuple(self)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Counts of a launch, and how much of the GPU it fills.

    ``warps``: resident warps per scheduler. ``blocks``: with fewer of them than SMs, only so many SMs issue, multiply
    and read shared memory, while DRAM's rate is assumed to stay whole; 0: enough for all SMs. ``resident``: blocks that
    the GPU holds at a time.
    """

    counts: Counts
    warps: float
    blocks: int = 0
    resident: int = 0

    def busy(self, operand: str, by: Rates = MIDDLE) -> dict[str, float]:
        """Microseconds of each resource, with MMAs that multiply ``bf16``, ``mxfp8`` or ``mxfp4`` tokens.

        Two packed MXFP4 operands are multiplied at twice the rate of 8-bit ones (``kind::mxf4``).
        """
        share = min(self.blocks / MULTIPROCESSORS, 1.0) if self.blocks else 1.0
        cycles = CYCLES * share
        issue = min(ISSUE_CEILING, ISSUE_PER_WARP * self.warps)
        kind = FORMATS[operand].mma
        flops = BLOCK_SCALED_FLOPS_PER_CYCLE[kind] if kind else by.bf16_flops_per_cycle
        return {
            "dram": self.counts.bytes / (1e3 * by.dram_gb_per_second),
            "issue": self.counts.instructions / (cycles * SCHEDULERS * issue),
            "mma": self.counts.mma_flops / (cycles * flops),
            "shared": self.counts.wavefronts / cycles,
        }


@dataclasses.dataclass(kw_only=True)
class Times:
    """Microseconds, by the middle of each range except ``fast`` and ``slow``; ``bound``: what launches wait for
    longest.

    ``megabytes`` are those that must be read.
    """

    megabytes: float
    dram: float
    issue: float
    mma: float
    shared: float
    fast: float
    slow: float
    bound: str

    @property
    def floor(self) -> float:
        """Microseconds to read the megabytes at 233 GB/s."""
        return 1e3 * self.megabytes / MIDDLE.dram_gb_per_second

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of 233 GB/s that the slow and the fast end reach."""
        return self.floor / self.slow, self.floor / self.fast


def times(launches: Sequence[Launch], operand: str, megabytes: float, fixed: tuple[float, float]) -> dict[str, Any]:
    """The fields of :class:`Times` of launches one after the other; ``fixed``: microseconds beside them, fast and
    slow."""
    totals, waited = (dict.fromkeys(("dram", "issue", "mma", "shared"), 0.0) for _ in range(2))
    for launch in launches:
        used = launch.busy(operand)
        totals = {name: totals[name] + value for name, value in used.items()}
        busiest = max(used, key=lambda name: used[name])
        waited[busiest] += used[busiest]
    fast, slow = (
        sum(max(launch.busy(operand, by).values()) for launch in launches) + beside
        for by, beside in zip((FAST, SLOW), fixed, strict=True)
    )
    bound = max(waited, key=lambda name: waited[name])
    return {"megabytes": megabytes, **totals, "fast": fast, "slow": slow, "bound": bound}
