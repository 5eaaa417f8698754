# SPDX-License-Identifier: Apache-2.0
"""What a call of ``cutlass_fused_moe`` costs the host: Python, and the launcher behind it.

On a GPU a call is timed without waiting for its kernels, in batches small enough that the queue of launches never fills.
The launcher's share is the same call of the compiled module with the arguments that Python gave it.  Also counted: what
the caching allocator was asked for, and whether anything synchronized.  Without a GPU the module is replaced by one that
does nothing: that leaves Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from timing import github

import flashinfer
from flashinfer.fused_moe import sm12x_launch, sm12x_operator
from flashinfer.jit.sm12x.instances import SM12X
from flashinfer.sm12x.backend import kernels
from flashinfer.testing import MoECase, make_moe_inputs
from flashinfer.testing.moe_layers import MODE_NAMES, MODELS, Batch, layer_call, make_layer, route

BATCH = 100  # calls between two synchronizations: a queue of launches holds about a thousand
BATCHES = 50
STUB_EXPERTS = 8  # their number costs nothing


@dataclasses.dataclass
class HostCost:
    """Microseconds of one call, medians over batches."""

    mode: str
    total: float
    launcher: float | None
    allocations: int | None

    @property
    def python(self) -> float:
        return self.total - (self.launcher or 0.0)


class _Recorder:
    """A module in front of another: keeps the arguments of the last run."""

    def __init__(self, module: Any) -> None:
        self.module, self.arguments = module, ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def sm12x_moe_run(self, *arguments: Any) -> bool:
        self.arguments = arguments
        launched: bool = self.module.sm12x_moe_run(*arguments)
        return launched


class _Stub:
    """A backend, and its module, that computes nothing."""

    block_scaled_mma = unified_memory = is_cuda = True
    tactics = SM12X

    def __init__(self) -> None:
        self.memo: dict[Any, Any] = {}

    def module(self, *_: Any) -> Any:
        return self

    def pdl(self, _wanted: bool | None) -> bool:
        return True

    def call(self, function: Callable[..., Any], *arguments: Any, writes: Any) -> Any:
        return function(*arguments)

    def sm12x_moe_workspace_size(self, *_sizes: int) -> int:
        return 4096

    def sm12x_moe_run(self, *_arguments: Any) -> bool:
        """Takes what the launcher takes."""
        return True


def per_call(call: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Median over batches of the microseconds that ``call`` takes to return."""
    times = []
    for _ in range(BATCHES):
        synchronize()
        begin = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - begin) / BATCH * 1e6)
    return statistics.median(times)


def on_gpu(model: str, modes: list[int], seed: int) -> list[HostCost]:
    """One token of ``model`` on the current GPU."""
    batch = route(make_layer(model, 1, seed, "cuda"), 1, seed)
    return [_on_gpu(batch, mode) for mode in modes]


def _on_gpu(batch: Batch, mode: int) -> HostCost:
    call = layer_call(batch.of_mode(mode))
    backend = kernels(batch.inputs.input.device)
    assert backend is not None
    module = sm12x_launch.moe_module(backend)
    recorder = _Recorder(module)
    with mock.patch.object(sm12x_launch, "moe_module", return_value=recorder):
        call()
    run, arguments = module.sm12x_moe_run, recorder.arguments
    total = per_call(call, torch.cuda.synchronize)
    launcher = per_call(lambda: run(*arguments), torch.cuda.synchronize)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(BATCH):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return HostCost(MODE_NAMES[mode], total, launcher, torch.cuda.memory_stats()["allocation.all.allocated"] - before)


@contextlib.contextmanager
def _stubbed() -> Iterator[None]:
    stub = _Stub()

    def answers(value: Any) -> Callable[[torch.device], Any]:  # a Mock would cost more than what is timed
        return lambda _device: value

    with (
        mock.patch.object(sm12x_operator, "kernels", answers(stub)),
        mock.patch.object(sm12x_operator, "checks_values", answers(False)),
    ):
        yield


def with_stub(model: str, modes: list[int]) -> list[HostCost]:
    """One token of ``model``, Python only."""
    hidden, inter, _, top_k, _ = MODELS[model]
    costs = []
    for mode in modes:
        inputs = make_moe_inputs(MoECase(1, hidden, inter, STUB_EXPERTS, top_k, mode), 0)
        workspace = torch.empty(4096 + 128, dtype=torch.uint8)
        arguments = inputs.arguments() | {
            "output": torch.empty((1, hidden), dtype=inputs.output_dtype),
            "workspace_buffer": workspace[-workspace.data_ptr() % 128 :][:4096],
        }
        with _stubbed():
            total = per_call(lambda given=arguments: flashinfer.cutlass_fused_moe(**given), lambda: None)
        costs.append(HostCost(MODE_NAMES[mode], total, None, None))
    return costs


def as_table(costs: list[HostCost]) -> str:
    """For people."""
    headers = ["mode", "host us a call", "Python us", "launcher us", "allocations a call"]
    body = []
    for cost in costs:
        launcher = "-" if cost.launcher is None else f"{cost.launcher:.1f}"
        allocations = "-" if cost.allocations is None else f"{cost.allocations / BATCH:g}"
        body.append([cost.mode, f"{cost.total:.1f}", f"{cost.python:.1f}", launcher, allocations])
    return github(body, headers)
