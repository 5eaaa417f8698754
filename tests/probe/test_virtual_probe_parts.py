# SPDX-License-Identifier: Apache-2.0
"""The parts of a probe as they run on a GPU: kernels on the virtual SM121, torch's clocks and graphs given.

The parts must tell exactly the facts that the doctor's checks read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashinfer_sm12x.doctor as doctor
from flashinfer.jit.sm12x import modules
from flashinfer.sm12x.device_class import class_of
from flashinfer.sm12x.models import MoELayer
from flashinfer.testing import moe_layers, verify
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device
from flashinfer_sm12x.doctor import asking, questions
from flashinfer_sm12x.doctor.probe import PARTS, TOKENS, arrivals, launches, layer, mma, parts, timing
from flashinfer_sm12x.doctor.probe.target import Target
from flashinfer_sm12x.doctor.probe_checks import PROBE_CHECKS

GB10 = (12, 1)


@dataclasses.dataclass(frozen=True)
class GivenGpu(Target):
    """A Target that takes itself for a GPU."""

    runs_on: Any = None

    def call(self, name: str, *arguments: Any, writes: Sequence[torch.Tensor] = ()) -> None:
        device: VirtualDevice = self.runs_on
        read = [tensor for tensor in _READ if name in ("streaming_read", "bulk_read")]
        function = getattr(device.module(modules.gen_probe_module), f"sm12x_probe_{name}")
        device.call(lambda *_: function(*arguments), *arguments, *read, writes=writes)


_READ: list[torch.Tensor] = []  # what pieces have the addresses of


class Graph:
    """Replays nothing: what is captured has run once."""

    def replay(self) -> None: ...


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, _end: Event) -> float:
        return 0.256


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Target]]:
    names = ("total_memory", "L2_cache_size", "memory_bus_width", "memory_clock_rate", "clock_rate", "is_integrated")
    properties = SimpleNamespace(**dict.fromkeys(names, 1), shared_memory_per_block_optin=4096)
    fakes: dict[str, Any] = {
        "get_device_properties": lambda _device: properties,
        "synchronize": lambda *_: None,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": lambda _graph: contextlib.nullcontext(),
        "Stream": lambda: SimpleNamespace(wait_stream=lambda _other: None),
        "current_stream": lambda: None,
        "stream": lambda _stream: contextlib.nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 10)
    empty, of = torch.empty, timing.Pieces.of
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **{**k, "device": "cpu"}))

    def remembered(tensors: Any, device: torch.device) -> timing.Pieces:
        _READ[:] = list(tensors)
        return of(_READ, device)

    monkeypatch.setattr(timing.Pieces, "of", remembered)
    small: dict[Any, dict[str, Any]] = {
        mma: {"ITERATIONS": 2, "WARMUP_LAUNCHES": 1, "TIMED_LAUNCHES": 2, "WARPS": 2},
        launches: {"LAUNCHES": 8, "REPEATS": 2, "BUSY_CYCLES": 200},
        arrivals: {"ROUNDS": 20},
        parts: {"READ_BYTES": 1 << 16, "CHECKED_BYTES": 1 << 16},
        layer: {"MODEL": "tiny", "TOKENS": TOKENS[:1], "REPEATS": 1},
    }
    for module, values in small.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(moe_layers.MODELS, "tiny", MoELayer(96, 64, 4, 4))
    result = verify.Result("MoE of one size", 0.5)
    monkeypatch.setattr(parts, "_every_tactic", lambda target: iter([result]))
    wrote: list[tuple[dict[str, int], str]] = []
    monkeypatch.setattr(parts, "write_sum_bits", lambda bits, name: wrote.append((bits, name)))
    with virtual_device("sm_121a", strict=False, accumulation_bits=13) as device:

        def made(capability: tuple[int, int]) -> Target:
            target = GivenGpu(torch.device("cpu"), "given", capability, 4, None, runs_on=device)
            monkeypatch.setattr(parts, "find_target", lambda: target)
            monkeypatch.setattr(timing, "find_target", lambda: target)
            return target

        yield made
    _READ.clear()
    halves = {"bf16": 13, "f16": 13}
    assert wrote in ([], [(halves, "given")], [(halves | {"mxf8f6f4": 13, "mxf4": 13}, "given")])


@pytest.mark.parametrize("narrow", mma.KINDS)
def test_the_width_of_each_kind_is_written_down(narrow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = SimpleNamespace(device_class=class_of(GB10), virtual=None, name="given")
    monkeypatch.setattr(mma, "sum_bits", lambda _, kind: 13 if kind is mma.KINDS[narrow] else 25)
    wrote: list[tuple[dict[str, int], str]] = []
    monkeypatch.setattr(parts, "write_sum_bits", lambda bits, name: wrote.append((bits, name)))
    parts.probe_sums(target, lambda **found: None)
    assert wrote == [({kind: 13 if kind == narrow else 25 for kind in mma.KINDS}, "given")]


@pytest.mark.parametrize("capability", [GB10, (9, 0)], ids=["GB10", "Hopper"])
def test_the_checks_read_what_the_parts_tell(gpu: Callable[..., Target], capability: tuple[int, int]) -> None:
    gpu(capability)
    facts: dict[str, dict[str, Any]] = {question: {} for question in questions.QUESTIONS}
    for part in PARTS:
        if not part.startswith("build"):
            answers = facts[f"probe-{part}"] = {}
            parts.run(part, lambda answers=answers, **found: answers.update(json.loads(json.dumps(found))))
    findings = {finding.check: finding for finding in doctor.diagnose(asking.Answers(facts, {}))}
    lines = {check: findings[check] for check in PROBE_CHECKS if check in findings}
    for line in lines.values():
        print(line)
    absent = {f"probe-layer-{tokens}" for tokens in TOKENS[1:]}  # one is enough here
    assert {check for check, line in lines.items() if line.state == "unknown"} == absent
    assert {line.state for line in lines.values()} <= {"ok", "warn", "unknown"}
    scaled = {check for check in lines if check.startswith("probe-mma-mx")}
    assert scaled == ({"probe-mma-mxf8f6f4", "probe-mma-mxf4"} if capability == GB10 else set())
    assert lines["probe-launch"].found.startswith("plain: 32.0 us, 32.0 us in a CUDA graph; dependent: ")
    assert lines["probe-sums"].state == "warn"
    assert ("predicted" in lines["probe-dram"].found) == (capability == GB10)
