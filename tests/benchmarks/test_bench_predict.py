# SPDX-License-Identifier: Apache-2.0
"""The predicted GB10 table: its arithmetic, on launches whose counts are given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_cutlass_fused_moe_mxfp4 as bench
import pytest
import torch
from moe_bench import predict

from flashinfer.jit import env as jit_env
from flashinfer.jit.sm12x.instances import INSTANCES
from flashinfer.sm12x_gpu_probe import layer, prediction
from flashinfer.sm12x_gpu_probe.prediction import Assumptions, Counts, Fit, Work

REPO = Path(__file__).resolve().parents[2]
MODEL = "gpt-oss-120b"
TACTIC = next(row.index for row in INSTANCES if row.activation == "mxfp8")
TILE = INSTANCES[TACTIC].token_tile
CONSTANT, PER_TILE, PER_ROW = Counts(1e5, 0, 100, 1e4), Counts(7e5, 2e8, 2e5, 9e6), Counts(3e3, 1e3, 50, 2e4)
GIVEN = Fit(TILE, False, CONSTANT, PER_TILE, PER_ROW, 2.5, 96)


def launch(
    counts: Counts, threads: int = 160, blocks_per_sm: int = 2, reports: tuple[str, ...] = (), kernel: str = "k"
) -> Any:
    fields = ("warp_instructions", "mma_flops", "shared_wavefronts", "global_distinct_bytes")
    counters = SimpleNamespace(**dict(zip(fields, counts.values(), strict=True)))
    return SimpleNamespace(
        kernel=kernel,
        counters=counters,
        blocks_per_sm=blocks_per_sm,
        grid=(48 * blocks_per_sm, 1, 1),
        block=(threads, 1, 1),
        reports=reports,
    )


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prologue is linear in the tokens, the arranging of tokens in the rows, and both GEMMs are :data:`GIVEN`."""

    def emulate(device: Any, model: str, mode: int, run: predict.Run, tactics: tuple[int, int]) -> Any:
        ids = run.ids(predict.EMULATED_EXPERTS)
        prologue = Counts(1000, 0, 0, 3200) + Counts(4000, 0, 10, 8640) * ids.shape[0]
        gemm = launch(GIVEN.at(prediction.work_of(ids, TILE)))
        arrange = Counts(500, 0, 0, 64) + Counts(300, 0, 4, 5760) * ids.numel()
        return ids, [launch(prologue), launch(arrange, kernel="moe_pack_kernel"), gemm, gemm]

    monkeypatch.setattr(predict, "emulate", emulate)


def close(a: Counts, b: Counts) -> bool:
    return a.values() == pytest.approx(b.values(), rel=1e-6, abs=1e-3)


def test_three_runs_give_the_coefficients(linear: None) -> None:
    fits, deviation, reports = predict.fit_layer(None, MODEL, 1, (TACTIC, TACTIC))  # type: ignore[arg-type]
    assert [fit.tile for fit in fits] == [0, 0, TILE, TILE]
    assert [fit.by_tokens for fit in fits] == [True, False, False, False]
    assert close(fits[1].constant, Counts(500, 0, 0, 64))
    assert close(fits[1].per_row, Counts(300, 0, 4, 5760))
    for fit in fits[2:]:
        assert close(fit.constant, CONSTANT)
        assert close(fit.per_tile, PER_TILE)
        assert close(fit.per_row, PER_ROW)
        assert fit.warps_per_scheduler == 2.5
    assert close(fits[0].at(Work(100, 1, 0, 400)), Counts(401000, 0, 1000, 867200))
    assert deviation < 1e-6
    assert reports == 0


@pytest.mark.parametrize("first", sorted({row.token_tile for row in INSTANCES}))
@pytest.mark.parametrize("second", sorted({row.token_tile for row in INSTANCES}))
def test_runs_determine_the_coefficients_of_any_pair(first: int, second: int) -> None:
    tactics = [next(row.index for row in INSTANCES if row.token_tile == tile) for tile in (first, second)]
    runs = predict.runs_for((tactics[0], tactics[1]))
    for tile in (first, second):
        works = [prediction.work_of(run.ids(predict.EMULATED_EXPERTS), tile) for run in runs]
        system = torch.tensor([[1.0, work.tiles, work.rows] for work in works[:3]])
        assert int(torch.linalg.matrix_rank(system)) == 3, works
        assert all(work.tokens * predict.EMULATED_EXPERTS == work.rows for work in works)


def test_a_check_that_is_off_is_told(monkeypatch: pytest.MonkeyPatch, linear: None) -> None:
    exact = predict.emulate

    def off(*arguments: Any) -> Any:
        ids, launches = exact(*arguments)
        if arguments[3].rows == 0:
            launches[2] = launch(predict.counts_of(launches[2]) * 1.25, reports=("a race",))
        return ids, launches

    monkeypatch.setattr(predict, "emulate", off)
    _, deviation, reports = predict.fit_layer(None, MODEL, 1, (TACTIC, TACTIC))  # type: ignore[arg-type]
    assert deviation == pytest.approx(0.2)
    assert reports == 1


def test_work_of_a_routing() -> None:
    ids = torch.tensor([[0, 3], [3, 5], [3, 0]])
    assert prediction.work_of(ids, 2) == Work(3, 3, 1 + 2 + 1, 6)
    assert prediction.work_of(ids, 0) == Work(3, 3, 0, 6)
    assert prediction.mean_work(MODEL, 1, 8) == Work(1, 4, 4, 4)


def test_time_of_a_row_by_hand() -> None:
    """One token: four experts, one tile and one row each; all numbers of a GEMM follow from its coefficients."""
    given = Assumptions(fixed_us=19.0)
    line = prediction.predict(MODEL, 1, 1, (TACTIC, TACTIC), [GIVEN], given)
    # FC1: 5760 rows of 1440 + 92 bytes (2880 / 32 = 90 scales, padded to 92; 5760 rows are a multiple of 128).
    # FC2: 2880 rows of 1440 bytes; its scales are padded to 2944 rows.
    size = 5760 * (1440 + 92) + 2880 * 1440 + 2944 * 92
    assert line.megabytes == pytest.approx(4 * size / 1e6)
    assert line.floor == pytest.approx(4 * size / 233e3)
    cycles = 48 * 2418.0
    counts = (1e5 + 4 * 7e5 + 4 * 3e3, 4 * 2e8 + 4 * 1e3, 100 + 4 * 2e5 + 4 * 50, 1e4 + 4 * 9e6 + 4 * 2e4)
    assert line.issue == pytest.approx(counts[0] / (cycles * 4 * 0.6))
    assert line.mma == pytest.approx(counts[1] / (cycles * 2048))
    assert line.shared == pytest.approx(counts[2] / cycles)
    assert line.dram == pytest.approx(counts[3] / 233e3)
    assert line.bound == "dram"
    assert line.overhead == pytest.approx(19.0)
    assert line.fast == pytest.approx(counts[3] / 236e3 + 14)
    assert line.slow == pytest.approx(counts[3] / 220e3 + 30)
    assert line.shares == pytest.approx((line.floor / line.slow, line.floor / line.fast))


def test_a_range_holds_what_is_not_known_of_bf16_mmas_and_of_a_pairs_second_gemm() -> None:
    tactic = next(row.index for row in INSTANCES if row.multiplies == "bf16" and not row.streamed)
    busy = Fit(8, False, Counts(mma_flops=1e12), Counts(), Counts(), 4.0, 48)
    line = prediction.predict(MODEL, 2, 1, (tactic, tactic), [busy, busy], Assumptions(l2_megabytes=1e6))
    cycles = 48 * 2418.0
    assert line.bound == "mma"
    assert line.fast == pytest.approx(2e12 / (cycles * 1024) + 14 + 11.7)
    assert line.slow == pytest.approx(2e12 / (cycles * 512) + 30 + 11.7)
    assert line.mma == pytest.approx(2e12 / (cycles * 768))


def test_bf16_and_few_warps_are_slower() -> None:
    counts = Counts(1e6, 1e9, 0, 0)
    given = Assumptions()
    many = prediction.resources(GIVEN, counts, "mxfp8", given)
    few = prediction.resources(dataclasses.replace(GIVEN, warps_per_scheduler=1.0), counts, "bf16", given)
    assert few["mma"] == pytest.approx(many["mma"] * 2048 / 768)
    assert few["issue"] == pytest.approx(many["issue"] * 0.6 / 0.42)


def test_an_experts_second_tile_reads_no_weights_again() -> None:
    one, two = GIVEN.at(Work(1, 1, 1, 8)), GIVEN.at(Work(1, 1, 2, 8))
    assert two.bytes == one.bytes
    assert two.instructions == one.instructions + PER_TILE.instructions


def test_a_streamed_layer_reads_weights_once_a_tile() -> None:
    tactic = next(row.index for row in INSTANCES if row.streamed and row.token_tile == 8)
    fit = dataclasses.replace(GIVEN, tile=8)
    work = prediction.mean_work(MODEL, 512, 8)
    assert work.tiles > 2 * work.experts
    line = prediction.predict(MODEL, 1, 512, (tactic, tactic), [fit], Assumptions())
    expected = fit.at(work).bytes + (work.tiles - work.experts) * prediction.weight_bytes(MODEL)
    assert line.dram == pytest.approx(expected / 233e3)


def test_what_an_l2_of_a_gb10_loses() -> None:
    """Contributions of a large batch are read back; tiles are read once, since neighbours are at work at a time."""
    given, tactic = Assumptions(), next(row.index for row in INSTANCES if row.token_tile == 64)
    contributions = 4.0 * 2048 * 4 * 2880
    assert prediction.reread_bytes(MODEL, 1, tactic, False, 48, given) == pytest.approx(0.0, abs=1.0)
    assert prediction.reread_bytes(MODEL, 2048, tactic, False, 48, given) == pytest.approx(contributions, rel=1e-6)
    small = dataclasses.replace(given, l2_megabytes=1.0)
    assert prediction.reread_bytes(MODEL, 2048, tactic, False, 48, small) > 1.1 * contributions


class NoDevice:
    def __enter__(self) -> NoDevice:
        return self

    def module(self, generate: Any) -> None:
        print(f"module of {generate.__name__}")

    def __exit__(self, *_error: Any) -> None:
        return None


def test_table_without_a_gpu_says_what_it_is(
    linear: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(predict.subprocess, "run", lambda command, **named: ran.append(command))
    monkeypatch.setattr(predict, "virtual_device", lambda *arguments, **named: NoDevice())
    monkeypatch.setattr(predict, "planned", lambda *arguments: (TACTIC, TACTIC))
    monkeypatch.setattr(prediction, "reread_bytes", lambda *arguments: 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--out", str(tmp_path), "--models", "gpt-oss-120b,gpt-oss-20b"]) == 0
    printed = capsys.readouterr().out
    assert "no GPU here: the prediction for a GB10 instead" in printed
    assert "GB10 (SM121): prediction, not a measurement" in printed
    for line in Assumptions().told():
        assert line in printed
    report = json.loads((tmp_path / "predicted.json").read_text())
    tokens = [row["tokens"] for row in report["rows"] if row["model"] == MODEL and row["mode"] == "W4A16"]
    assert tokens == [1, 2, 4, 8, 16, 32, 64, 2048, 8192]
    assert len(report["rows"]) == 2 * 2 * 9
    assert printed.count("\nemulated ") == 2, "the two models share their GEMMs' sizes"
    # What takes minutes is announced before it begins, with where its results stay.
    announced = ["building the emulator", "building fused_moe_120", "module of gen_", "built in", "[1/2] emul", "[2/2]"]
    assert [printed.index(text) for text in announced] == sorted(printed.index(text) for text in announced)
    assert f"kept in {REPO / 'emulator' / 'build'}" in printed
    assert f"kept in {jit_env.FLASHINFER_JIT_DIR}" in printed
    # Not by way of a call that swallows make's output, and not quietly.
    ((make, *arguments),) = ran
    assert Path(make).name == "make"
    assert {"-s", "--silent", "--quiet"}.isdisjoint(arguments)
    assert report["prediction"] == "not a measurement"


def test_no_emulator_no_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("the emulator cannot be built: no g++")

    monkeypatch.setattr(predict, "virtual_device", refuse)
    monkeypatch.setattr(predict, "build_emulator", lambda: None)
    assert bench.main(["--predict", "--out", str(tmp_path)]) == 2
    assert "bench: no prediction: the emulator cannot be built: no g++" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_launches_that_come_and_go_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def emulate(*arguments: Any) -> Any:
        counts.append(1)
        return arguments[3].ids(2), [launch(CONSTANT)] * len(counts)

    monkeypatch.setattr(predict, "emulate", emulate)
    with pytest.raises(RuntimeError, match="the number of launches depends on the batch"):
        predict.fit_layer(None, MODEL, 1, (TACTIC, TACTIC))  # type: ignore[arg-type]


def as_columns(table: str) -> Sequence[str]:
    return [cell.strip() for cell in table.splitlines()[0].strip("|").split("|")]


def test_columns() -> None:
    line = prediction.predict(MODEL, 1, 1, (TACTIC, TACTIC), [GIVEN], Assumptions())
    columns = as_columns(predict.as_table([line]))
    for wanted in ("MB", "floor us", "issue us", "MMA us", "fixed us", "predicted us", "of 233 GB/s", "bound by"):
        assert wanted in columns


# --- what is kept with the package ------------------------------------------------------------------------------------


def test_what_the_doctors_probe_times_is_predicted() -> None:
    """Tactics that the planner gives now; a range whose ends are those of the table's row."""
    for tokens in layer.TOKENS:
        tactics = prediction.planned(layer.MODEL, layer.MODE, tokens)
        fits = prediction.known_fits(layer.MODE, tactics, (2880, 2880))
        assert fits, f"{tokens} tokens, tactics {tactics}: prediction.FITS says how to write it anew"
        line = prediction.predict(layer.MODEL, layer.MODE, tokens, tactics, fits, Assumptions())
        assert prediction.predicted_range(layer.MODEL, layer.MODE, tokens) == (line.fast, line.slow)
        assert 0.95 * line.floor < line.fast < line.slow < 1.5 * line.floor + 100
    assert prediction.known_fits(layer.MODE, (0, 0), (2880, 2880)) is None
    again = json.loads(prediction.fits_as_json({(0, (0, 0), (2880, 2880)): fits}))
    assert [prediction._fit_from_json(launch) for launch in again[0]["launches"]] == fits


def test_a_pair_of_gemms_in_half_precision_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_SM12X_HALF_MMA", "1")
    assert prediction.predicted_range(layer.MODEL, layer.MODE, 1) is not None
    assert prediction.predicted_range(layer.MODEL, layer.MODE, 2048) is None
