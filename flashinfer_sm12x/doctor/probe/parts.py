# SPDX-License-Identifier: Apache-2.0
"""The parts of a probe. Each tells facts, as soon as it has them, to whoever asked for it.

A fact is a name and something that JSON has; the doctor's checks read them (``doctor/probe_checks.py``).
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flashinfer.jit import env as jit_env
from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module
from flashinfer.jit.sm12x import modules
from flashinfer.quantization.block_scaled import WEIGHT_FORMATS
from flashinfer.sm12x.device_class import GB10
from flashinfer.testing.verify import Result, dense_results, gemm_results, moe_results

from ...build.trust import write_atomically
from . import arrivals, launches, layer, mma, predicted, timing
from .target import Target, find_target

READ_BYTES = 1 << 30
CHECKED_BYTES = 1 << 24
SEED = 12

PROPERTIES = "total_memory L2_cache_size memory_bus_width memory_clock_rate clock_rate is_integrated"

Tell = Callable[..., None]


def run(part: str, tell: Tell) -> None:
    """Measure one of ``PARTS`` on the GPU, or the virtual one."""
    globals()[f"probe_{part.replace('-', '_')}"](find_target(), tell)


def probe_device(target: Target, tell: Tell) -> None:
    """The device that is measured."""
    tell(name=target.name, capability=list(target.capability), sm_count=target.sm_count)
    tell(
        virtual=target.virtual is not None, gb10=target.device_class is GB10, sm12x=bool(target.device_class.mma_kinds)
    )
    tell(torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(), machine=platform.machine())
    if target.virtual is None:
        properties = torch.cuda.get_device_properties(target.device)
        tell(properties={name: getattr(properties, name, None) for name in PROPERTIES.split()})


def probe_build(target: Target, tell: Tell) -> None:
    """The kernels that measure."""
    _build(target, tell, (modules.gen_probe_module,))


def probe_build_layers(target: Target, tell: Tell) -> None:
    """The layers' kernels."""
    dense = [(modules.gen_dense_module, form) for form in WEIGHT_FORMATS]
    _build(target, tell, (gen_cutlass_fused_moe_sm120_module,), (modules.gen_group_gemm_module,), *dense)


def _build(target: Target, tell: Tell, *calls: tuple[Any, ...]) -> None:
    """Modules by their generators and what these are given."""
    began = time.perf_counter()
    for generate, *given in calls:
        if target.virtual is not None:
            target.virtual.module(generate, *given)
        else:
            generate(*given).build(need_lock=True)
    tell(seconds=time.perf_counter() - began)


def probe_dram(target: Target, tell: Tell) -> None:
    """Sustained read, by plain loads and by bulk copies."""
    for how, prefix in ((timing.StreamingRead, ""), (timing.BulkRead, "copies_")):
        wrong = timing.wrong_read(target, CHECKED_BYTES if target.virtual is None else 1 << 18, how)
        tell(**{f"{prefix}wrong": wrong})
        if target.virtual is None:
            rate = timing.sustained_read(target, READ_BYTES, how=how)
            tell(**{f"{prefix}gigabytes_per_second": rate, "bytes": READ_BYTES})
    if target.device_class is GB10:
        tell(predicted=predicted.DRAM_GB_PER_SECOND)


def probe_mma(target: Target, tell: Tell) -> None:
    """Results and rates."""
    for name, kind in mma.kinds_of(target).items():
        found: dict[str, Any] = {"wrong": mma.wrong_results(target, kind)}
        if target.virtual is None:
            found |= mma.measure_rate(target, kind)
        if target.device_class is GB10:
            found["predicted"] = predicted.MMA_FLOPS_PER_CLOCK[name]
        tell(**{name: found})


def probe_sums(target: Target, tell: Tell) -> None:
    """The width in which MMAs add up, written down for the planner."""
    bits = mma.all_sum_bits(target)
    tell(**bits, needed=modules.NARROWEST_SUM)
    if target.virtual is None:
        write_sum_bits(bits, target.name)


def write_sum_bits(bits: dict[str, int], name: str) -> None:
    """Leave what ``modules.probed_sum_bits`` looks for, by kind of MMA; ``name`` is the GPU's.

    Raises:
        OSError: the cache's folder cannot be written.
    """
    path = Path(jit_env.FLASHINFER_WORKSPACE_DIR) / modules.PROBE_FILE
    write_atomically(path, json.dumps({"mma_sum_bits": bits, "device": name}) + "\n")


def probe_launch(target: Target, tell: Tell) -> None:
    """Costs of launches, and which overlap."""
    real = target.virtual is None
    for kind in launches.KINDS:
        tell(**{f"{kind} out of order": launches.out_of_order(target, kind, launches.LAUNCHES if real else 20)})
        if real:
            tell(**{kind: launches.cost(target, kind)})
    if real:
        properties: Any = torch.cuda.get_device_properties(target.device)
        shared = properties.shared_memory_per_block_optin
        tell(overlap_plain=launches.overlap(target, dependent=False))
        tell(overlap=launches.overlap(target, dependent=True))
        tell(overlap_shared=launches.overlap(target, dependent=True, shared_bytes=shared))
        tell(overlap_graph=launches.overlap(target, dependent=True, graph=True))


def probe_order(target: Target, tell: Tell) -> None:
    """Arrivals, with and without their fence."""
    rounds, blocks = (arrivals.ROUNDS, 0) if target.virtual is None else (20, 2)
    for fenced in (True, False):
        for copies in (False, True):
            name = f"{'copies' if copies else 'stores'} {'with' if fenced else 'without'} fence"
            tell(**{name: arrivals.hand_over(target, fenced, copies, rounds, blocks)})


def probe_tactics(target: Target, tell: Tell) -> None:
    """Every default tactic against its reference."""
    worst: dict[str, float] = {}
    count, wrong = 0, []
    for result in _every_tactic(target):
        count += 1
        kind = result.what.split(" ", 1)[0]
        worst[kind] = max(worst.get(kind, 0.0), result.used)
        if result.wrong:
            wrong.append(f"{result.what}: {result.wrong}")
            tell(wrong=wrong)
    tell(count=count, used=worst, wrong=wrong)


def _every_tactic(target: Target) -> Iterator[Result]:
    sums = mma.accumulation_of(target)
    if target.virtual is not None:
        yield from moe_results([(160, 96, 8)], (5,), SEED, target.device, sums, every_tactic=True, modes=(0, 2))
        yield from dense_results([(200, 416)], SEED, target.device, sums)
        return
    yield from moe_results([(2880, 2880, 8)], (1, 5, 33, 200), SEED, target.device, sums, every_tactic=True)
    yield from moe_results([(704, 352, 8)], (3, 70), SEED, target.device, sums, every_tactic=True)
    yield from gemm_results([([1, 0, 17, 128], 2880, 2880)], SEED, target.device, sums)
    yield from dense_results([(1088, 2880), (200, 416)], SEED, target.device, sums)


def probe_layer(target: Target, tell: Tell) -> None:
    """gpt-oss-120b's layer."""
    if target.virtual is not None:
        return
    for line in layer.measure(target):
        known = target.device_class is GB10 and not modules.computes_in_fp16()
        expected = predicted.LAYER_US[line["tokens"]] if known else None
        tell(**{f"{line['tokens']} tokens": line | {"predicted": expected}})
