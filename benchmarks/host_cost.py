# SPDX-License-Identifier: Apache-2.0
"""Measure what a call of ``cutlass_fused_moe``, and of an ``SM12xMoELayer``, costs the host: Python, and the launcher
after it.

A call is timed without waiting for its kernels, in batches small enough that the queue of launches never fills.  The
launcher's share is the same call of the compiled module with the arguments that Python gave it.  Also counted: what the
caching allocator was asked for, and whether anything synchronized.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from timing import github

from flashinfer.fused_moe import sm12x_launch
from flashinfer.sm12x.backend import kernels
from flashinfer.testing.moe_layers import MODE_NAMES, Batch, layer_call, make_layer, object_call, route

BATCH = 100  # calls between two synchronizations: a queue of launches holds about a thousand
BATCHES = 50


class _Recorder:
    """Wraps a module: keeps the arguments of the last run."""

    def __init__(self, module: Any) -> None:
        self.module, self.arguments = module, ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def sm12x_moe_run(self, *arguments: Any) -> bool:
        self.arguments = arguments
        launched: bool = self.module.sm12x_moe_run(*arguments)
        return launched


def per_call(call: Callable[[], Any]) -> float:
    """Median over batches of the microseconds that ``call`` takes to return."""
    times = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - begin) / BATCH * 1e6)
    return statistics.median(times)


def costs(batch: Batch, mode: int) -> list[str]:
    """Cells of the table."""
    call = layer_call(batch.of_mode(mode))
    backend = kernels(batch.inputs.input.device)
    assert backend is not None
    module = sm12x_launch.moe_module(backend, "mxfp4")
    recorder = _Recorder(module)
    with mock.patch.object(sm12x_launch, "moe_module", return_value=recorder):
        call()
    run, arguments = module.sm12x_moe_run, recorder.arguments
    total = per_call(call)
    launcher = per_call(lambda: run(*arguments))
    by_object = per_call(object_call(batch.of_mode(mode)))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(BATCH):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocations = (torch.cuda.memory_stats()["allocation.all.allocated"] - before) / BATCH
    times = (total, by_object, total - launcher, by_object - launcher, launcher)
    return [MODE_NAMES[mode], *(f"{time:.1f}" for time in times), f"{allocations:g}"]


def table(model: str, modes: list[int], seed: int) -> str:
    """One token of ``model`` on the current GPU: microseconds, medians over batches."""
    batch = route(make_layer(model, 1, seed, "cuda"), 1, seed)
    headers = ["mode", "host us a call", "of a layer object", "Python us", "of a layer object", "launcher us"]
    headers.append("allocations a call")
    return github([costs(batch, mode) for mode in modes], headers)
