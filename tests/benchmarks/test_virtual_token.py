# SPDX-License-Identifier: Apache-2.0
"""The kernels' times that the predicted token is made of are those of the kernels as they are."""

from __future__ import annotations

import emulate
import pytest
from perfmodel import dense, step

from flashinfer.sm12x.instances import DENSE_INSTANCES
from flashinfer.testing.virtual_device import virtual_device


@pytest.mark.parametrize("kind", ["O", "router", "attention, full", "attention, window"])
def test_the_times_that_are_kept_are_those_of_the_kernels(kind: str) -> None:
    """Else the kernels changed and the file did not: the smallest dense layer, which one of two ranks has, and small
    calls."""
    with virtual_device("sm_121a", strict=False) as device:
        if kind == "O":
            seen = emulate.dense_kernel(device, 2, kind, "mxfp4", 1, "bf16")
        elif kind == "router":
            seen = emulate.router_kernel(device, step.LAYER_MODEL, 4)
        else:
            seen = emulate.attention_kernel(device, 1, "bf16", 1, 1024 if kind == "attention, full" else 0)
    about = {name: value for name, value in vars(seen).items() if not isinstance(value, float) and name != "bound"}
    assert seen is not None and seen.kind == kind
    (line,) = [each for each in step.kept().values() if about.items() <= vars(each).items()]
    for name, value in vars(line).items():
        counted = getattr(seen, name)
        assert counted == (pytest.approx(value, rel=0.03) if isinstance(value, float) else value), (
            f"{name}: {counted}, kept {value}: bench_token.py --emulate writes the file anew"
        )


@pytest.mark.parametrize("instance", ["dense_mxfp4_m8_w3", "dense_mxfp4_m32_gemm"])
def test_the_runs_that_dense_layers_are_priced_by_are_those_of_the_kernels(instance: str) -> None:
    """Eight tokens and the fewer rows of a weight."""
    (row,) = (row for row in DENSE_INSTANCES if row.name == instance)
    tokens, n = dense.runs_for(row, 8)[0]
    with virtual_device("sm_121a", strict=False) as device:
        seen = emulate.emulate_dense(device, row, (tokens, n, 4096), "bf16")
    kept = dense.runs_in(dense.RUNS)[dense.KeptRun(instance, "bf16", 4096, tokens, n)]
    for counted, line in zip(seen, kept, strict=True):
        assert counted.counts.values() == pytest.approx(line.counts.values(), rel=0.03, abs=300), (
            "bench_token.py --emulate writes dense.RUNS anew"
        )
        assert (counted.warps, counted.blocks, counted.resident) == (line.warps, line.blocks, line.resident)
