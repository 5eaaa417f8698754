# SPDX-License-Identifier: Apache-2.0
"""The predicted GB10 tables of dense layers: their arithmetic, on launches whose counts are given; the formats' errors."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_dense_mx
import format_error
import pytest
from moe_bench import predict_dense

from flashinfer.jit.sm12x.instances import DENSE_INSTANCES, DenseInstance
from flashinfer.sm12x_gpu_probe.prediction import FAST, SLOW, Assumptions, Counts
from flashinfer.testing.moe_layers import DENSE_LAYERS

BY_NAME = {row.name: row for row in DENSE_INSTANCES}


def true_counts(tokens: int, n: int, k: int) -> Counts:
    """Bilinear in the batch and the rows of the weight."""
    bytes_ = n * k / 2 + 2 * tokens * (n + k) + 3000
    return Counts(40 * n + 7 * tokens + 3 * n * tokens + 100, 2.0 * n * k * tokens, n + tokens, bytes_)


@pytest.fixture
def given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def emulate(_device: Any, row: DenseInstance, case: tuple[int, int, int], _activation: str) -> Any:
        tokens, n, k = case
        launch = SimpleNamespace(blocks_per_sm=1, block=(160, 1, 1), grid=(48, 1, 1))
        if row.streamed:
            return [launch], [true_counts(*case)]
        parts = predict_dense.bytes_of_parts(row, case, predict_dense.grid_of(row, tokens, n, 48))
        return [launch, launch], [Counts(bytes=6.0 * tokens * k), true_counts(*case) + Counts(bytes=parts)]

    monkeypatch.setattr(predict_dense, "emulate", emulate)


@pytest.mark.usefixtures("given_counts")
@pytest.mark.parametrize(
    ("name", "tokens", "blocks"),
    [("dense_mxfp4_m8_w2", 5, 48), ("dense_mxfp4_m64_gemm_mxfp8", 64, 40), ("dense_mxfp4_m128_gemm_mxfp8", 2048, 48)],
)
def test_counts_at_full_size(name: str, tokens: int, blocks: int) -> None:
    device: Any = None
    row = BY_NAME[name]
    *front, (fit, counts) = predict_dense.fitted_counts(device, row, (5120, 2880), tokens, "mxfp8")
    assert fit.blocks == blocks
    expected = true_counts(tokens, 5120, 2880)
    if not row.streamed:
        ((_, before),) = front
        assert before.values() == pytest.approx((0, 0, 0, 6.0 * tokens * 2880))
        expected += Counts(bytes=predict_dense.bytes_of_parts(row, (tokens, 5120, 2880), blocks))
    assert counts.values() == pytest.approx(expected.values(), rel=1e-9)


def test_parts_of_units_that_are_cut() -> None:
    row = BY_NAME["dense_mxfp4_m64_gemm_mxfp8"]
    part = 4.0 * 128 * 64
    for tiles, blocks in ((19, 48), (20, 20), (48, 48), (49, 48)):  # as test_virtual_dense.py sees them launched
        assert predict_dense.grid_of(row, 64, 128 * tiles, 48) == blocks
    assert predict_dense.grid_of(BY_NAME["dense_mxfp4_m128_gemm_mxfp8"], 128, 128 * 35, 48) == 48
    assert predict_dense.grid_of(BY_NAME["dense_mxfp4_m128_gemm_mxfp8"], 128, 128 * 36, 48) == 36
    assert predict_dense.bytes_of_parts(row, (64, 128 * 20, 2880), 20) == 0
    # Two units of three k-tiles: three blocks have two each, the middle one of both units.
    assert predict_dense.bytes_of_parts(row, (64, 256, 384), 3) == 4 * part


@pytest.mark.usefixtures("given_counts")
@pytest.mark.parametrize(("activation", "rate"), [("mxfp8", 1), ("mxfp4", 2)])
def test_a_gemms_line_has_both_launches_and_the_blocks_that_there_are(activation: str, rate: int) -> None:
    device: Any = None
    line = predict_dense.predict_layer(device, "o", 64, "mxfp4", activation)
    assert line is not None
    assert line.instance == f"dense_mxfp4_m64_gemm_{activation}"
    n, k = DENSE_LAYERS["o"]
    given = Assumptions()
    flops = true_counts(64, n, k).mma_flops
    per_sm = 1e3 * given.gigahertz * rate * given.mma_flops_per_cycle
    assert line.mma == pytest.approx(flops / (23 * per_sm))
    seconds = predict_dense.SECOND_LAUNCH_US + predict_dense.FIXED_US["fast"]
    front = 6.0 * 64 * k / 1e3 / FAST.dram_gb_per_second
    behind = max(true_counts(64, n, k).bytes / 1e3 / FAST.dram_gb_per_second, line.mma)
    assert line.fast == pytest.approx(front + behind + seconds)


@pytest.mark.usefixtures("given_counts")
def test_a_line_is_a_range_around_its_busiest_resource() -> None:
    device: Any = None
    line = predict_dense.predict_layer(device, "qkv", 1, "mxfp4", "bf16")
    assert line is not None
    n, k = DENSE_LAYERS["qkv"]
    dram = true_counts(1, n, k).bytes / 1e3
    assert line.bound == "dram"
    assert line.dram == pytest.approx(dram / Assumptions.dram_gb_per_second)
    assert line.fast == pytest.approx(dram / FAST.dram_gb_per_second + predict_dense.FIXED_US["fast"])
    assert line.slow == pytest.approx(dram / SLOW.dram_gb_per_second + predict_dense.FIXED_US["slow"])
    assert line.megabytes == pytest.approx((n * k / 2 + n * 92) / 1e6)  # 2880 / 32 scales, padded to words of four
    assert predict_dense.predict_layer(device, "qkv", 8192, "mxfp4", "bf16") is None  # cuBLAS


@pytest.mark.usefixtures("given_counts")
@pytest.mark.parametrize("streams", [1, 8])
def test_what_the_weights_of_a_step_take(streams: int) -> None:
    device: Any = None
    lines = []
    for name, weights, tokens in itertools.product(DENSE_LAYERS, ("mxfp4", "mxfp8"), (1, 8)):
        line = predict_dense.predict_layer(device, name, tokens, weights, "bf16")
        assert line is not None
        lines.append(line)
    experts: Any = SimpleNamespace(tokens=streams, fast=200.0, slow=300.0, megabytes=52.8)
    bf16, mxfp8, mxfp4 = predict_dense.token_lines(lines, experts)
    layers = predict_dense.LAYERS_OF_MODEL
    values = sum((1 if name == "lm_head" else layers) * 2 * n * k for name, (n, k) in DENSE_LAYERS.items())
    assert float(bf16[2]) == pytest.approx(values / 1e9 + layers * 0.0528, abs=0.006)
    by_name = {line.layer: line for line in lines if (line.weights, line.tokens) == ("mxfp4", streams)}
    fast = layers * (by_name["qkv"].fast + by_name["o"].fast + 200.0) + by_name["lm_head"].fast
    assert mxfp4[0] == str(streams)
    assert mxfp4[4].startswith(f"{fast / 1e3:.1f} - ")
    assert float(bf16[3]) > float(mxfp8[3]) > float(mxfp4[3])
    with pytest.raises(IndexError):  # nothing takes the place of a line that is not there
        predict_dense.token_lines([line for line in lines if line.layer != "o"], experts)


def test_an_unknown_layer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_dense_mx.main(["--layers", "qkv,gate"])
    assert "--layers: ['gate'] are not among ['lm_head', 'o', 'qkv']" in capsys.readouterr().err


def test_no_prediction_without_an_emulator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the emulator is not built")

    monkeypatch.setattr(predict_dense.predict, "build_emulator", lambda: None)
    monkeypatch.setattr(predict_dense, "virtual_device", refuse)
    assert bench_dense_mx.main(["--predict", "--out", str(tmp_path)]) == 2
    assert "no prediction: the emulator is not built" in capsys.readouterr().err


def test_the_formats_errors() -> None:
    rows = format_error.errors((64, 320), 16, seed=3)
    error = {(name, weights): tokens for name, weights, *tokens in rows}
    for name in {name for name, _ in error}:
        assert error[name, "mxfp4, mse"][0] < error[name, "mxfp4, amax"][0]
        assert error[name, "mxfp8, amax"][0] < 0.035 < error[name, "mxfp8, amax"][2]  # and what MXFP4 tokens cost
    assert error["Student's t, 3", "mxfp4, amax"][0] > error["normal", "mxfp4, amax"][0]
