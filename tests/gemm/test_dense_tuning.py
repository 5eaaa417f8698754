# SPDX-License-Identifier: Apache-2.0
"""Upstream's autotuner over dense layers, with a profiler that answers given times and a module that records
launches."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune, autotuner
from recording_backend import RecordingBackend, recording_tuner

from flashinfer.gemm import dense_block_scaled, sm12x_dense_launch, sm12x_dense_tuning
from flashinfer.gemm.sm12x_dense_tuning import DEQUANTIZED, MOST_TOKENS
from flashinfer.quantization.mx_cpu import swizzled_size
from flashinfer.sm12x import tune
from flashinfer.sm12x.instances import DENSE_INSTANCES
from flashinfer.testing import DenseCase, make_dense_inputs

N, K = 256, 640
FORMATS = ("bf16", "quantize_bf16", "mxfp8", "mxfp8_linear", "mxfp4")


class Stand:
    """Stands in for the kernels' module and for cuBLAS, and times as it is told: 1.0 where nothing is said."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int]] = []
        self.operands: list[Any] = []
        self.times: dict[str, float] = {}
        self.timed: list[tuple[str, int]] = []

    def sm12x_dense_gemm_workspace_size(self, *_: int) -> int:
        return 64

    def sm12x_dense_run(self, *arguments: Any) -> None:
        operands = types.SimpleNamespace(
            **dict(zip(sm12x_dense_launch.DenseCall._fields[:8], arguments[:8], strict=True))
        )
        *_, index, _next_weights, _constant, _pdl = arguments
        self.operands.append(operands)
        self.launches.append((DENSE_INSTANCES[index].name, operands.x.shape[0]))

    def dequantized(self, _module: Any, call: sm12x_dense_launch.DenseCall, _format: int) -> None:
        self.operands.append(call)
        self.launches.append((DEQUANTIZED, call.x.shape[0]))

    def profile(self, runner: Any, inputs: Any, tactic: Any, config: Any, **named: Any) -> float:
        assert config.use_cold_l2_cache and config.use_cuda_graph
        runner(inputs, tactic=tactic)
        if tactic != -1:
            assert self.launches[-1] == (tactic, inputs[0].shape[0])
        self.timed.append(self.launches[-1])
        return self.times.get(tactic, 1.0)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    made = Stand()
    monkeypatch.setattr(sm12x_dense_launch, "_multiply_dequantized", made.dequantized)
    with recording_tuner(monkeypatch, RecordingBackend(made), made.profile):
        yield made


def arguments(tokens: int, weights: str = "mxfp4", form: str = "bf16", **more: Any) -> dict[str, Any]:
    inputs = make_dense_inputs(DenseCase(tokens, N, K, weights, form, **more), 0)
    return dict(zip(("x", "weight", "weight_scale"), inputs.arguments, strict=True)) | inputs.named


def took(stand: Stand, *given: Any, **named: Any) -> str:
    dense_block_scaled(**arguments(*given, **named))
    return stand.launches[-1][0]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("weights", ["mxfp4", "mxfp8"])
def test_what_takes_a_call_is_timed_and_the_best_is_used(stand: Stand, weights: str, form: str) -> None:
    planned = took(stand, 8, weights, form)
    best = f"dense_{weights}_m8_w3"
    assert planned != best
    stand.times = {best: 0.5}
    with autotune(True):
        assert took(stand, 8, weights, form) == best
    names = {name for name, _ in stand.timed}
    assert all(name == DEQUANTIZED or name.startswith(f"dense_{weights}_") for name in names)
    gemms = {row.name for row in DENSE_INSTANCES if row.weights == weights and not row.split_k}
    # SM12x: bf16 tokens by bf16 MMAs or cuBLAS, others by block-scaled ones, MXFP4's being those of two MXFP4 operands.
    ending = "_gemm" if form == "bf16" else "_mxfp4" if form == weights == "mxfp4" else "_mxfp8"
    ways = {name for name in gemms if name.endswith(ending)}
    assert names & (gemms | {DEQUANTIZED}) == (ways | {DEQUANTIZED} if form == "bf16" else ways)
    assert max(tokens for name, tokens in stand.timed if name == f"dense_{weights}_m16_w2") == 64
    assert took(stand, 8, weights, form) == best
    assert took(stand, 7, weights, form) == best  # of the next profile
    assert len(stand.timed) == len(set(stand.timed))


@pytest.mark.parametrize("form", FORMATS)
def test_profiles_have_operands_of_their_size(stand: Stand, form: str) -> None:
    with autotune(True):
        dense_block_scaled(**arguments(8, form=form, residual=True, out_dtype=torch.float16))
    assert {operands.x.shape[0] for operands in stand.operands} >= {1, 2, 4, 8, 256, MOST_TOKENS}
    for operands in stand.operands:
        tokens = operands.x.shape[0]
        assert operands.out.shape == operands.residual.shape == (tokens, N)
        assert operands.out.dtype == operands.residual.dtype == torch.float16
        if form in ("bf16", "quantize_bf16"):
            assert operands.x_scale is None
        else:
            size = tokens * K // 32 if form == "mxfp8_linear" else swizzled_size(tokens, K // 32)
            assert operands.x_scale.numel() == size


def test_a_call_of_many_tokens_tunes_and_takes_the_planners(stand: Stand, monkeypatch: Any) -> None:
    """As vLLM warms up: with the most tokens a batch may have. The next layer finds what was tuned."""
    lines: list[str] = []
    AutoTuner.get()._logged_invalid_tactic.clear()
    monkeypatch.setattr(autotuner.logger, "warning", lines.append)
    best = "dense_mxfp4_m16_w2"
    planned = took(stand, 4 * MOST_TOKENS)
    stand.times = {best: 0.5, "dense_mxfp4_m32_gemm": 0.75}
    with autotune(True):
        assert took(stand, 4 * MOST_TOKENS) == planned
        timed = len(stand.timed)
        assert took(stand, 4 * MOST_TOKENS) == planned
    assert len(stand.timed) == timed
    assert took(stand, 3) == best
    assert took(stand, MOST_TOKENS) == "dense_mxfp4_m32_gemm" != planned
    assert not [line for line in lines if "cached tactic" in line]


@pytest.mark.parametrize("form", FORMATS)
def test_cublas_is_taken_of_bfloat16_tokens_alone(stand: Stand, form: str, tmp_path: Path) -> None:
    """Also by what is in a file."""
    stand.times, cache = {DEQUANTIZED: 0.25}, str(tmp_path / "tactics.json")
    assert took(stand, 8, form=form) != DEQUANTIZED
    with autotune(True, cache=cache):
        assert (took(stand, 8, form=form) == DEQUANTIZED) is (form == "bf16")
    assert sm12x_dense_tuning.OPERATOR in Path(cache).read_text()
    AutoTuner.get().clear_cache()
    tune._cached.clear()
    with autotune(False, cache=cache):
        assert (took(stand, 8, form=form) == DEQUANTIZED) is (form == "bf16")


def test_a_forced_instance_wins(stand: Stand) -> None:
    stand.times = {"dense_mxfp4_m8_w3": 0.5}
    with autotune(True):
        dense_block_scaled(**arguments(8), tactic="dense_mxfp4_m16_w2")
        assert stand.timed == []
        dense_block_scaled(**arguments(8))
    dense_block_scaled(**arguments(8), tactic="dense_mxfp4_m16_w2")
    assert stand.launches[-1][0] == "dense_mxfp4_m16_w2"
