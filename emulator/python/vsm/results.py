# SPDX-License-Identifier: Apache-2.0
"""The results of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Report:
    """One finding of a checker.

    Attributes:
        kind: The kind of finding, for example ``"out of bounds"``.
        kernel: The kernel's mangled name.
        line: The line of the PTX text, from 1.
        instruction: The text of that line.
        block: The block's index.
        warp, lane: -1 if the whole block or the whole warp is meant.
        address: The address of the access.
        space: ``"global"``, ``"shared"``, ... or empty.
        text: The event, in one sentence.
        summary: All of it in one line.
    """

    kind: str
    kernel: str = ""
    line: int = 0
    instruction: str = ""
    block: tuple[int, ...] = (0, 0, 0)
    warp: int = -1
    lane: int = -1
    address: int = 0
    space: str = ""
    text: str = ""
    summary: str = ""

    def __str__(self) -> str:
        return self.summary or f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Counters:
    """Counts of one launch. Bytes, instructions of warps unless said otherwise.

    ``global_distinct_bytes`` is 0 unless the distinct watch is on; it counts distinct 32-byte sectors times 32.
    ``prefetched_bytes`` are those of bulk prefetches, which no other counter of bytes includes.
    ``shared_bank_conflicts`` are passes beyond the least that the access size allows.
    """

    warp_instructions: int = 0
    thread_instructions: int = 0
    by_class: Mapping[str, int] = field(default_factory=dict)
    mma_flops: int = 0
    global_load_bytes: int = 0
    global_store_bytes: int = 0
    global_sectors: int = 0
    async_load_bytes: int = 0
    async_store_bytes: int = 0
    prefetched_bytes: int = 0
    global_distinct_bytes: int = 0
    shared_accesses: int = 0
    shared_wavefronts: int = 0
    shared_bank_conflicts: int = 0
    barrier_waits: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds on the modelled GPU: the largest of four resources' times, and which it is (src/model)."""

    seconds: float = 0.0
    bound: str = "none"
    dram: float = 0.0
    issue: float = 0.0
    mma: float = 0.0
    shared: float = 0.0


@dataclass(frozen=True)
class Launch:
    """One launch: what was asked for, what happened.

    Attributes:
        kernel: Mangled name.
        status: ``"ok"``, ``"refused"``, ``"fault"``, ``"trap"``, ``"deadlock"`` or ``"step limit"``.
        message: Empty when the status is ok.
        registers: Registers per thread, from the cubin; 0 if there is none.
        blocks_per_sm: Blocks that one SM holds at a time.
        programmatic: Launched as a programmatic dependent.
        cooperative: Launched so that all of its blocks are resident together, or not at all.
        host_seconds: Time on this host; ``predicted`` has the time on the GPU.
    """

    kernel: str = ""
    status: str = "ok"
    message: str = ""
    grid: tuple[int, ...] = (1, 1, 1)
    block: tuple[int, ...] = (1, 1, 1)
    static_shared: int = 0
    dynamic_shared: int = 0
    registers: int = 0
    blocks_per_sm: int = 0
    programmatic: bool = False
    cooperative: bool = False
    host_seconds: float = 0.0
    predicted: Prediction = Prediction()
    counters: Counters = Counters()
    reports: tuple[Report, ...] = ()

    @property
    def clean(self) -> bool:
        """It ran to its end and no checker reported anything."""
        return self.status == "ok" and not self.reports

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {self.status}" + (f" ({self.message})" if self.message else "")]
        return "\n  ".join([*lines, *map(str, self.reports)])

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Launch:
        """Make a launch from the C interface's JSON object; keys that this class does not have are an error."""
        nested: dict[str, Any] = dict(values)
        nested["counters"] = Counters(**values.get("counters", {}))
        nested["predicted"] = Prediction(**values.get("predicted", {}))
        reports = []
        for report in values.get("reports", ()):
            reports.append(Report(**{**report, "block": tuple(report.get("block", (0, 0, 0)))}))
        nested["reports"] = tuple(reports)
        for name in ("grid", "block"):
            if name in nested:
                nested[name] = tuple(nested[name])
        unknown = nested.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise KeyError(f"a launch's JSON has unknown keys {sorted(unknown)}")
        return cls(**nested)
