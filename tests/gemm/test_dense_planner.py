# SPDX-License-Identifier: Apache-2.0
"""The dense layers' planner against a GB10's predicted times, by counts of the kernels on the virtual SM121 that are
kept."""

from __future__ import annotations

import functools

import pytest
import torch
from perfmodel import dense, gb10, step
from recording_backend import RecordingBackend

from flashinfer.gemm import sm12x_dense_launch
from flashinfer.gemm.sm12x_dense_launch import (
    BF16,
    MXFP8_SWIZZLED,
    DenseCall,
    choose,
    gemm_compute_dtype,
    planned_instance,
)
from flashinfer.sm12x.device_class import GB10, HOPPER, DeviceClass
from flashinfer.sm12x.instances import DENSE_INSTANCES, Format, Instance
from flashinfer.sm12x.models import MODELS

MATRICES = MODELS[step.LAYER_MODEL].matrices
KEPT = dense.runs_in(dense.RUNS)
NEAR = {"bf16": 1.12, "mxfp8": 1.18}
"""The time that the planner's choice may take, over the fastest by the model. The model assumes that partial sums of
cut units all reach DRAM, and it does not count bytes between L2 and the SMs. So it puts tiles of 64 bf16 tokens, of
which more than half are cut, at 1.118, and tiles of 128 MXFP8 tokens at 1.178. A stream in two passes in place of a
GEMM takes 1.10, and 1.164 if each pass rounds the tokens."""
RATES = {"fast": (gb10.FAST, 0), "slow": (gb10.SLOW, 1)}
MORE = (80, 96, 97, 128, 129, 160, 192, 193, 256)
"""Batches larger than those whose counts are kept. Prompts beyond some length go to cuBLAS, which is not modelled."""


@functools.cache
def modelled(row: Instance, activation: str, layer: tuple[int, int], tokens: int, end: str) -> float:
    """Microseconds at one end of the model's range."""
    rates, place = RATES[end]
    runs = {run: KEPT[dense.KeptRun(row.name, activation, layer[1], *run)] for run in dense.runs_for(row, tokens)}
    launches = dense.launches_of(row, layer, tokens, runs)
    second = 0.0 if row.split_k else gb10.SECOND_LAUNCH_US
    return (
        sum(max(each.busy(row.compute_dtype, rates).values()) for each in launches)
        + gb10.FIXED_US["dense"][place]
        + second
    )


def candidates(weights: str, activation: str, k: int, tokens: int) -> list[Instance]:
    """The instances among which the planner chooses. Streams of more passes than are priced are left out: they are
    slower."""
    rows = [row for row in DENSE_INSTANCES if row.weights == weights and row.longest_k >= k]
    return [
        row
        for row in rows
        if (tokens <= dense.MOST_PASSES * row.block_n if row.split_k else row.compute_dtype == activation)
    ]


def batches(weights: str, activation: str, k: int) -> set[int]:
    """Batches whose counts are kept, up to the size from which counts of two batches serve all."""
    names = {row.name for row in DENSE_INSTANCES if row.weights == weights}
    kept = {run.tokens for run in KEPT if (run.activation, run.k) == (activation, k) and run.instance in names}
    return {tokens for tokens in kept if tokens <= dense.FEW_TOKENS}


CASES = pytest.mark.parametrize(("weights", "activation"), dense.PRICED_FORMATS)


@CASES
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("end", RATES)
def test_sm12x_takes_an_instance_near_the_models_best(weights: str, activation: Format, matrix: str, end: str) -> None:
    n, k = MATRICES[matrix]
    for tokens in sorted({*batches(weights, activation, k), dense.FEW_TOKENS + 1, *MORE}):
        rows = candidates(weights, activation, k, tokens)
        costs = {row.name: modelled(row, activation, (n, k), tokens, end) for row in rows}
        chosen = choose(weights, tokens, n, k, GB10, activation)
        assert chosen is not None
        assert costs[chosen.name] <= NEAR[activation] * min(costs.values()), (tokens, chosen.name, costs)


@CASES
def test_what_the_planner_changes_at_is_priced(weights: str, activation: Format) -> None:
    """One token less, so many, and one more."""
    for matrix, (n, k) in MATRICES.items():
        priced = {*batches(weights, activation, k), dense.FEW_TOKENS + 1, *MORE}
        chosen = [choose(weights, tokens, n, k, GB10, activation) for tokens in range(1, MORE[-1] + 1)]
        changes = [tokens for tokens in range(2, len(chosen) + 1) if chosen[tokens - 1] != chosen[tokens - 2]]
        few = {tokens + more for tokens in changes for more in (-1, 0, 1) if tokens + more <= dense.FEW_TOKENS}
        missing = {1, 8, 64, *few, *changes} - priced
        assert not missing, (
            f"{matrix}, tokens {sorted(missing)}: dense.RUNS says how to renew the file; others stand here"
        )


@pytest.mark.parametrize("device", [GB10, HOPPER], ids=lambda device: device.key)
def test_each_kind_of_call_is_planned_once(device: DeviceClass) -> None:
    """Calls that differ in one thing, twice each: the second time the answer is remembered."""
    sm12x_dense_launch._planned.cache_clear()
    backend, chosen = RecordingBackend(None, device), set()
    for again in (False, True):
        for tokens in (1, 9, 40, 200, 5000):
            for weights, columns in (("mxfp4", 1440), ("mxfp8", 2880)):
                for n in (512, 201088):
                    for token_format in (BF16, MXFP8_SWIZZLED):
                        x, weight = torch.empty(tokens, 2880, device="meta"), torch.empty(n, columns, device="meta")
                        call = DenseCall(None, x, None, weight, weight, weight_format=weights)
                        operand = gemm_compute_dtype(weights, token_format, device)
                        expected = choose(weights, tokens, n, 2880, device, operand, backend.sm_count)
                        known = sm12x_dense_launch._planned.cache_info().misses
                        assert planned_instance(backend, call, token_format) is expected
                        assert sm12x_dense_launch._planned.cache_info().misses == known + (not again)
                        chosen.add(expected)
    assert len(chosen) > 5
