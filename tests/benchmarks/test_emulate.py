# SPDX-License-Identifier: Apache-2.0
"""Predicted layers: fits and times by hand, on launches whose counts are given; the tables that are printed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_cutlass_fused_moe_mxfp4 as bench
import bench_dense_mx
import emulate
import format_error
import pytest
import torch
from perfmodel import dense, gb10, moe
from perfmodel.gb10 import FAST, FIXED_US, MIDDLE, SECOND_LAUNCH_US, SLOW, Counts, Launch
from perfmodel.moe import Fit, Work
from printed import cells

from flashinfer.sm12x.instances import DENSE_INSTANCES, INSTANCES, Instance
from flashinfer.sm12x.models import MODELS, MOE_LAYERS, NVFP4_LAYERS, MoELayer
from flashinfer.testing.moe_layers import DENSE_VARIANTS
from flashinfer_sm12x.doctor.probe import layer

MODEL = "gpt-oss-120b"
MOE = MODELS[MODEL].moe
TACTIC = next(row.index for row in INSTANCES if row.activation == "mxfp8")
TILE = INSTANCES[TACTIC].block_n
CONSTANT, PER_TILE, PER_ROW = Counts(1e5, 0, 100, 1e4), Counts(7e5, 2e8, 2e5, 9e6), Counts(3e3, 1e3, 50, 2e4)
GIVEN = Fit(TILE, False, CONSTANT, PER_TILE, PER_ROW, 2.5, 96)
CYCLES = 48 * 2418.0  # per microsecond


def launch(counts: Counts, reports: tuple[str, ...] = (), kernel: str = "k") -> Any:
    fields = ("warp_instructions", "mma_flops", "shared_wavefronts", "global_distinct_bytes")
    counters = SimpleNamespace(**dict(zip(fields, counts.values(), strict=True)))
    about = {"blocks_per_sm": 2, "grid": (96, 1, 1), "block": (160, 1, 1), "reports": reports}
    return SimpleNamespace(kernel=kernel, counters=counters, **about)


def close(a: Counts, b: Counts) -> bool:
    return a.values() == pytest.approx(b.values(), rel=1e-6, abs=1e-3)


# --- MoE layers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prologue is linear in the tokens, the packing of tokens in the rows, and both GEMMs are :data:`GIVEN`."""

    def emulated(device: Any, layer: MoELayer, mode: int, run: emulate.Run, tactics: tuple[int, int]) -> Any:
        ids = run.ids(emulate.EMULATED_EXPERTS)
        prologue = Counts(1000, 0, 0, 3200) + Counts(4000, 0, 10, 8640) * ids.shape[0]
        gemm = launch(GIVEN.at(moe.work_of(ids, TILE)))
        pack = Counts(500, 0, 0, 64) + Counts(300, 0, 4, 5760) * ids.numel()
        return ids, [launch(prologue), launch(pack, kernel="moe_pack_kernel"), gemm, gemm]

    monkeypatch.setattr(emulate, "emulate_moe", emulated)


@pytest.mark.usefixtures("linear")
def test_three_runs_give_the_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = None
    fits, deviation, reports = emulate.fit_layer(device, MOE, 1, (TACTIC, TACTIC))
    assert [fit.tile for fit in fits] == [0, 0, TILE, TILE]
    assert [fit.by_tokens for fit in fits] == [True, False, False, False]
    assert close(fits[1].constant, Counts(500, 0, 0, 64))
    assert close(fits[1].per_row, Counts(300, 0, 4, 5760))
    for fit in fits[2:]:
        for found, given in ((fit.constant, CONSTANT), (fit.per_tile, PER_TILE), (fit.per_row, PER_ROW)):
            assert close(found, given)
        assert (fit.warps, fit.blocks) == (2.5, 96)
    assert close(fits[0].at(Work(100, 1, 0, 400)), Counts(401000, 0, 1000, 867200))
    assert (deviation < 1e-6, reports) == (True, 0)
    exact = emulate.emulate_moe

    def off(*arguments: Any) -> Any:
        ids, launches = exact(*arguments)
        if arguments[3].rows == 0:
            launches[2] = launch(emulate.seen(launches[2]).counts * 1.25, reports=("a race",))
        return ids, launches

    monkeypatch.setattr(emulate, "emulate_moe", off)
    _, deviation, reports = emulate.fit_layer(device, MOE, 1, (TACTIC, TACTIC))
    assert deviation == pytest.approx(0.2)
    assert reports == 1


@pytest.mark.parametrize("first", sorted({row.block_n for row in INSTANCES}))
@pytest.mark.parametrize("second", sorted({row.block_n for row in INSTANCES}))
def test_runs_determine_the_coefficients_of_any_pair(first: int, second: int) -> None:
    tactics = [next(row.index for row in INSTANCES if row.block_n == tile) for tile in (first, second)]
    runs = emulate.runs_for((tactics[0], tactics[1]))
    for tile in (first, second):
        works = [moe.work_of(run.ids(emulate.EMULATED_EXPERTS), tile) for run in runs]
        system = torch.tensor([[1.0, work.tiles, work.rows] for work in works[:3]])
        assert int(torch.linalg.matrix_rank(system)) == 3, works
        assert all(work.tokens * emulate.EMULATED_EXPERTS == work.rows for work in works)


def test_launches_that_come_and_go_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def emulated(*arguments: Any) -> Any:
        counts.append(1)
        return arguments[3].ids(2), [launch(CONSTANT)] * len(counts)

    monkeypatch.setattr(emulate, "emulate_moe", emulated)
    device: Any = None
    with pytest.raises(RuntimeError, match="the number of launches depends on the batch"):
        emulate.fit_layer(device, MOE, 1, (TACTIC, TACTIC))


def test_work_of_a_routing() -> None:
    ids = torch.tensor([[0, 3], [3, 5], [3, 0]])
    assert moe.work_of(ids, 2) == Work(3, 3, 1 + 2 + 1, 6)
    assert moe.work_of(ids, 0) == Work(3, 3, 0, 6)
    assert moe.mean_work(MOE, 1, 8) == Work(1, 4, 4, 4)


def test_time_of_a_row_by_hand() -> None:
    """One token: four experts, one tile and one row each; all numbers of a GEMM follow from its coefficients."""
    line = moe.predict(MOE, 1, 1, (TACTIC, TACTIC), [GIVEN])
    # FC1: 5760 rows of 1440 + 92 bytes (2880 / 32 = 90 scales, padded to 92; 5760 rows are a multiple of 128).
    # FC2: 2880 rows of 1440 bytes; its scales are padded to 2944 rows.
    size = 5760 * (1440 + 92) + 2880 * 1440 + 2944 * 92
    assert line.megabytes == pytest.approx(4 * size / 1e6)
    assert line.floor == pytest.approx(4 * size / 233e3)
    counts = (1e5 + 4 * 7e5 + 4 * 3e3, 4 * 2e8 + 4 * 1e3, 100 + 4 * 2e5 + 4 * 50, 1e4 + 4 * 9e6 + 4 * 2e4)
    assert line.issue == pytest.approx(counts[0] / (CYCLES * 4 * 0.6))
    assert line.mma == pytest.approx(counts[1] / (CYCLES * 2048))
    assert line.shared == pytest.approx(counts[2] / CYCLES)
    assert line.dram == pytest.approx(counts[3] / 233e3)
    assert line.bound == "dram"
    assert line.overhead == pytest.approx(22.0)
    assert line.fast == pytest.approx(counts[3] / (1e3 * FAST.dram_gb_per_second) + 14)
    assert line.slow == pytest.approx(counts[3] / (1e3 * SLOW.dram_gb_per_second) + 30)
    assert line.shares == pytest.approx((line.floor / line.slow, line.floor / line.fast))


def test_a_range_holds_what_is_not_known_of_bf16_mmas_and_of_a_pairs_second_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe, "reread_bytes", lambda *_: 0.0)
    tactic = next(row.index for row in INSTANCES if row.compute == "bf16" and not row.split_k)
    busy = Fit(8, False, Counts(mma_flops=1e12), Counts(), Counts(), 4.0, 48)
    line = moe.predict(MOE, 2, 1, (tactic, tactic), [busy, busy])
    assert line.bound == "mma"
    assert line.overhead == pytest.approx(22 + 11.7)
    assert line.fast == pytest.approx(2e12 / (CYCLES * FAST.bf16_flops_per_cycle) + 14 + 11.7)
    assert line.slow == pytest.approx(2e12 / (CYCLES * SLOW.bf16_flops_per_cycle) + 30 + 11.7)
    assert line.mma == pytest.approx(2e12 / (CYCLES * MIDDLE.bf16_flops_per_cycle))


def test_few_warps_few_blocks_and_bf16_are_slower() -> None:
    counts = Counts(1e6, 1e9, 1e5, 1e6)
    many, few = Launch(counts, 2.5).busy("mxfp8"), Launch(counts, 1.0, 12).busy("bf16")
    assert few["mma"] == pytest.approx(4 * many["mma"] * 2048 / MIDDLE.bf16_flops_per_cycle)
    assert few["issue"] == pytest.approx(4 * many["issue"] * 0.6 / 0.42)
    assert few["shared"] == pytest.approx(4 * many["shared"])
    assert few["dram"] == many["dram"]
    assert Launch(counts, 2.5).busy("mxfp4")["mma"] == pytest.approx(many["mma"] / 2)


def test_weights_are_read_once_an_expert_or_when_streamed_once_a_tile() -> None:
    one, two = GIVEN.at(Work(1, 1, 1, 8)), GIVEN.at(Work(1, 1, 2, 8))
    assert two.bytes == one.bytes
    assert two.instructions == one.instructions + PER_TILE.instructions
    tactic = next(row.index for row in INSTANCES if row.split_k and row.block_n == 8)
    fit = dataclasses.replace(GIVEN, tile=8)
    work = moe.mean_work(MOE, 512, 8)
    assert work.tiles > 2 * work.experts
    line = moe.predict(MOE, 1, 512, (tactic, tactic), [fit])
    expected = fit.at(work).bytes + (work.tiles - work.experts) * MOE.expert_bytes
    assert line.dram == pytest.approx(expected / 233e3)


def test_what_an_l2_of_a_gb10_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contributions of a large batch are read back; tiles are read once, since neighbours are at work at a time."""
    tactic = next(row.index for row in INSTANCES if row.block_n == 64)
    contributions = 4.0 * 2048 * 4 * 2880
    reread = moe.reread_bytes.__wrapped__
    assert reread(MOE, 1, tactic, False, 48) == pytest.approx(0.0, abs=1.0)
    assert reread(MOE, 2048, tactic, False, 48) == pytest.approx(contributions, rel=1e-6)
    monkeypatch.setattr(gb10, "L2_CAPACITY", 0.8e6)
    assert reread(MOE, 2048, tactic, False, 48) > 1.1 * contributions


def test_layers_without_gate_rows_have_half_of_fc1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are padded to 128 only for scales; what a pair reads again is that of as many rows with gates."""
    nano = NVFP4_LAYERS["nemotron-3-nano"]
    assert nano.fc1_rows == 1856
    assert nano.expert_bytes == 1856 * 1344 + 1920 * 168 + 2688 * 928 + 2688 * 116
    assert MOE.fc1_rows == 2 * 2880
    tactic = next(row.index for row in INSTANCES if row.block_n == 64)
    monkeypatch.setattr(gb10, "L2_CAPACITY", 0.8e6)
    reread = moe.reread_bytes.__wrapped__
    without = MoELayer(MOE.hidden, 2 * MOE.inter, MOE.experts, MOE.top_k, "relu2")
    assert reread(without, 2048, tactic, True, 48) == reread(MOE, 2048, tactic, True, 48) > 1e6


# --- dense layers -----------------------------------------------------------------------------------------------------

BY_NAME = {row.name: row for row in DENSE_INSTANCES}
QKV, OUT = (MODELS[MODEL].matrices[name] for name in ("QKV", "O"))


def true_counts(tokens: int, n: int, k: int) -> Counts:
    """Bilinear in the batch and the rows of the weight."""
    bytes_ = n * k / 2 + 2 * tokens * (n + k) + 3000
    return Counts(40 * n + 7 * tokens + 3 * n * tokens + 100, 2.0 * n * k * tokens, n + tokens, bytes_)


@pytest.fixture
def given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def emulated(
        _device: Any, row: Instance, case: tuple[int, int, int], _activation: str, _normed: bool = False
    ) -> list[Launch]:
        tokens, n, k = case
        if row.split_k:
            return [Launch(true_counts(*case), 1.25, 48, 48)]
        parts = dense.bytes_of_parts(row, case, dense.grid_of(row, tokens, n, 48))
        counts = (Counts(bytes=6.0 * tokens * k), true_counts(*case) + Counts(bytes=parts))
        return [Launch(each, 1.25, 48, 48) for each in counts]

    monkeypatch.setattr(emulate, "emulate_dense", emulated)


@pytest.mark.usefixtures("given_counts")
@pytest.mark.parametrize(
    ("name", "tokens", "blocks"),
    [("dense_mxfp4_m8_w2", 5, 48), ("dense_mxfp4_m64_gemm_mxfp8", 64, 40), ("dense_mxfp4_m128_gemm_mxfp8", 2048, 48)],
)
def test_counts_at_full_size(name: str, tokens: int, blocks: int) -> None:
    device: Any = None
    row = BY_NAME[name]
    runs = {run: emulate.emulate_dense(device, row, (*run, 2880), "mxfp8") for run in dense.runs_for(row, tokens)}
    *front, last = dense.launches_of(row, QKV, tokens, runs)
    assert last.blocks == blocks
    expected = true_counts(tokens, *QKV)
    if not row.split_k:
        assert front[0].counts.values() == pytest.approx((0, 0, 0, 6.0 * tokens * 2880))
        expected += Counts(bytes=dense.bytes_of_parts(row, (tokens, *QKV), blocks))
        expected += Counts(bytes=dense.reread_bytes(row, QKV, tokens, blocks))
    assert last.counts.values() == pytest.approx(expected.values(), rel=1e-9)


def test_a_stream_of_two_passes_waits_for_dram_in_the_first() -> None:
    """If L2 holds the weights, a second pass takes the time of its instructions; if not, it reads them from DRAM
    again."""
    row, counts = BY_NAME["dense_mxfp4_m8_w3"], Counts(8e6, 3e9, 2e5, 6.5e6)
    seen = {run: [Launch(counts, 4.0, 48, 48)] for run in dense.runs_for(row, 12)}  # whatever N is
    first, second = dense.launches_of(row, OUT, 12, seen)
    assert first.counts.values() == pytest.approx((4e6, 1.5e9, 1e5, 6.5e6))
    assert second.counts.values() == pytest.approx((4e6, 1.5e9, 1e5, 0))
    issue = 4e6 / (CYCLES * 4 * 0.6)
    fast = dense.times_of(row, OUT, [first, second])["fast"]
    assert fast == pytest.approx(6.5e6 / (1e3 * FAST.dram_gb_per_second) + issue + FIXED_US["dense"][0])
    head = MODELS[MODEL].matrices["LM head"]
    *_, third = dense.launches_of(BY_NAME["dense_mxfp4_m8_w2"], head, 17, seen)
    assert third.counts.bytes == head[0] * (2880 // 2 + 92)


@pytest.mark.usefixtures("given_counts")
def test_runs_that_are_kept_are_read_and_price_every_instance(tmp_path: Path) -> None:
    device: Any = None
    runs = dict(emulate.dense_runs(device, "mxint8", "bf16"))
    dense.write_runs(tmp_path / "runs.csv", runs)
    read = dense.runs_in(tmp_path / "runs.csv")
    assert read.keys() == runs.keys()
    for run, launches in runs.items():
        for message, given in zip(read[run], launches, strict=True):
            assert message.counts.values() == pytest.approx(given.counts.values(), abs=0.5)
            assert (message.warps, message.blocks, message.resident) == (given.warps, given.blocks, given.resident)
    for row in DENSE_INSTANCES:
        if row.weights == "mxint8":
            few = {(run.tokens, run.n) for run in runs if (run.instance, run.k) == (row.name, 2880)}
            assert few.issuperset(dense.runs_for(row, 8))
            assert row.split_k or few.issuperset(dense.runs_for(row, 1000))


def test_parts_of_units_that_are_cut() -> None:
    row = BY_NAME["dense_mxfp4_m64_gemm_mxfp8"]
    part = 4.0 * 128 * 64
    for tiles, blocks in ((19, 48), (20, 20), (48, 48), (49, 48)):  # as test_virtual_dense.py sees them launched
        assert dense.grid_of(row, 64, 128 * tiles, 48) == blocks
    assert dense.grid_of(BY_NAME["dense_mxfp4_m128_gemm_mxfp8"], 128, 128 * 35, 48) == 48
    assert dense.grid_of(BY_NAME["dense_mxfp4_m128_gemm_mxfp8"], 128, 128 * 36, 48) == 36
    assert dense.bytes_of_parts(row, (64, 128 * 20, 2880), 20) == 0
    # Two units of three k-tiles: three blocks have two each, the middle one of both units.
    assert dense.bytes_of_parts(row, (64, 256, 384), 3) == 4 * part


@pytest.mark.usefixtures("given_counts")
@pytest.mark.parametrize(("activation", "rate"), [("mxfp8", 1), ("mxfp4", 2)])
def test_a_gemms_line_has_both_launches_and_the_blocks_that_there_are(activation: str, rate: int) -> None:
    device: Any = None
    line = emulate.dense_line(device, "o", OUT, 64, "mxfp4", activation)
    assert line is not None
    assert line.instance == f"dense_mxfp4_m64_gemm_{activation}"
    flops = true_counts(64, *OUT).mma_flops
    assert line.mma == pytest.approx(flops / (23 * 2418.0 * rate * 2048))
    beside = SECOND_LAUNCH_US + FIXED_US["dense"][0]
    front = 6.0 * 64 * OUT[1] / 1e3 / FAST.dram_gb_per_second
    behind = max(true_counts(64, *OUT).bytes / 1e3 / FAST.dram_gb_per_second, line.mma)
    assert line.fast == pytest.approx(front + behind + beside)


@pytest.mark.usefixtures("given_counts")
def test_a_line_is_a_range_around_its_busiest_resource() -> None:
    device: Any = None
    line = emulate.dense_line(device, "qkv", QKV, 1, "mxfp4", "bf16")
    assert line is not None
    dram = true_counts(1, *QKV).bytes / 1e3
    assert line.bound == "dram"
    assert line.dram == pytest.approx(dram / MIDDLE.dram_gb_per_second)
    assert line.fast == pytest.approx(dram / FAST.dram_gb_per_second + FIXED_US["dense"][0])
    assert line.slow == pytest.approx(dram / SLOW.dram_gb_per_second + FIXED_US["dense"][1])
    n, k = QKV
    assert line.megabytes == pytest.approx((n * k / 2 + n * 92) / 1e6)  # 2880 / 32 scales, padded to words of four
    assert emulate.dense_line(device, "qkv", QKV, 8192, "mxfp4", "bf16") is None  # cuBLAS


# --- what is printed --------------------------------------------------------------------------------------------------


class NoDevice:
    def __enter__(self) -> NoDevice:
        return self

    def module(self, generate: Any, *arguments: str) -> None:
        print(f"module of {generate.__name__}")

    def __exit__(self, *_error: Any) -> None:
        return None


@pytest.mark.usefixtures("linear", "given_counts")
def test_tables_without_a_gpu_say_what_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(emulate.subprocess, "run", lambda command, **named: ran.append(command))
    monkeypatch.setattr(emulate, "virtual_device", lambda *arguments, **named: NoDevice())
    monkeypatch.setattr(emulate, "planned", lambda *arguments: (TACTIC, TACTIC))
    monkeypatch.setattr(moe, "reread_bytes", lambda *arguments: 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--out", str(tmp_path), "--models", "gpt-oss-120b,gpt-oss-20b"]) == 0
    printed = capsys.readouterr().out
    assert "no GPU here: the prediction for a GB10 instead" in printed
    assert "GB10 (SM121): prediction, not a measurement" in printed
    for line in gb10.assumptions("MoE"):
        assert f"- {line}\n" in printed
    head, *rows = cells(printed)
    for model in ("gpt-oss-120b", "gpt-oss-20b"):
        tokens = [row[2] for row in rows if row[:2] == [model, "W4A16"]]
        assert tokens == ["1", "2", "4", "8", "16", "32", "64", "2,048", "8,192"]
    assert len(rows) == 2 * 2 * 9
    line = moe.predict(MOE_LAYERS["gpt-oss-20b"], 1, 16, (TACTIC, TACTIC), [GIVEN, GIVEN])
    (row,) = (row for row in rows if row[:3] == ["gpt-oss-20b", "W4A8 bf16", "16"])
    message = dict(zip(head, row, strict=True))
    assert (message["MB"], message["floor us"], message["fixed us"]) == (
        f"{line.megabytes:,.0f}",
        f"{line.floor:,.0f}",
        "34",
    )
    assert message["bound by"] == line.bound
    assert printed.count("\nemulated ") == 2, "the two models share their GEMMs' sizes"
    # A step that takes minutes is announced before it begins.
    announced = ["building the emulator", "building fused_moe_120", "module of gen_", "built in", "[1/2] emul", "[2/2]"]
    assert [printed.index(text) for text in announced] == sorted(printed.index(text) for text in announced)
    ((make, *_),) = ran
    assert Path(make).name == "make"
    assert bench_dense_mx.main(["--tokens", "1,8192", "--layers", "qkv,lm_head"]) == 0
    printed = capsys.readouterr().out
    assert "qkv, 8192 tokens, mxfp4 weights, bf16 tokens: by cuBLAS, no prediction" in printed
    rounded = sum(tokens != "bf16" for _, tokens in DENSE_VARIANTS)
    assert printed.count("\n| qkv ") == len(DENSE_VARIANTS) + rounded
    assert printed.count("\n| lm_head ") == len(DENSE_VARIANTS)  # a batch's logits are of its last tokens
    assert all(f"- {line}\n" in printed for line in gb10.assumptions("dense"))


@pytest.mark.parametrize("main", [bench.main, bench_dense_mx.main])
def test_no_emulator_no_table(main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("the emulator cannot be built: no g++")

    monkeypatch.setattr(emulate, "virtual_device", refuse)
    monkeypatch.setattr(emulate, "build_emulator", lambda: None)
    assert main(["--predict"]) == 2
    assert "bench: no prediction: the emulator cannot be built: no g++" in capsys.readouterr().err


# --- what is kept with the package ------------------------------------------------------------------------------------


def test_what_the_doctors_probe_times_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tactics that the planner gives now; a range whose ends are those of the table's row; what is written is read."""
    for tokens in layer.TOKENS:
        tactics = moe.planned(MOE, layer.MODE, tokens)
        fits = moe.known_fits(layer.MODE, tactics, MOE[:2])
        assert fits, f"{tokens} tokens, tactics {tactics}: moe.FITS says how to write it anew"
        line = moe.predict(MOE, layer.MODE, tokens, tactics, fits)
        assert moe.predicted_range(MOE, layer.MODE, tokens) == (line.fast, line.slow)
        # The floor is at the middle rate of memory, the fast end at the fast one.
        fastest = gb10.MIDDLE.dram_gb_per_second / gb10.FAST.dram_gb_per_second * line.floor
        assert fastest < line.fast < line.slow < 1.5 * line.floor + 100
    assert moe.known_fits(layer.MODE, (0, 1), MOE[:2]) == []
    assert moe.predicted_range(MoELayer(64, 32, 8, 2), layer.MODE, 1) is None
    monkeypatch.setattr(moe, "FITS", tmp_path / "fits.csv")
    moe.write_fits(moe.FITS, [(moe.columns(2, (0, 1), (64, 32)), fits), (moe.columns(0, (0, 1), (64, 32)), [])])
    assert moe.known_fits(2, (0, 1), (64, 32)) == fits


def test_a_pair_of_gemms_in_half_precision_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_SM12X_HALF_MMA", "1")
    assert moe.predicted_range(MOE, layer.MODE, 1) is not None
    assert moe.predicted_range(MOE, layer.MODE, 2048) is None


def test_a_layers_error_is_that_of_what_a_mode_rounds() -> None:
    """W4A16 rounds act and output to bf16, W4A8 tokens and act to MXFP8; tokens come to it either way."""
    rows = list(format_error.activation_errors(seed=3))
    assert len(rows) == 5
    for _, quantized, from_bf16, w4a16 in rows:
        assert w4a16 < 2.0**-8 < 2.0**-6 < quantized < 2.0**-3
        assert from_bf16 == pytest.approx(quantized, rel=1e-3)


def test_the_formats_errors() -> None:
    rows = format_error.errors((64, 320), 16, seed=3)
    error = {(name, weights): tokens for name, weights, *tokens in rows}
    for name in {name for name, _ in error}:
        assert error[name, "mxfp4, mse"][0] < error[name, "mxfp4, amax"][0]
        assert error[name, "mxfp8, amax"][0] < 0.035 < error[name, "mxfp8, amax"][2]  # and what MXFP4 tokens cost
    assert error["Student's t, 3", "mxfp4, amax"][0] > error["normal", "mxfp4, amax"][0]
