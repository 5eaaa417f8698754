# SPDX-License-Identifier: Apache-2.0
"""What the benchmark makes of its measurements, on CPU tensors with a clock that is given."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_cutlass_fused_moe_mxfp4 as bench
import pytest
import torch
from moe_bench import measure, peers, results

import flashinfer
from flashinfer.sm12x_gpu_probe.timing import Sample
from flashinfer.testing import MoEInputs, moe_layers, moe_reference

MODEL = "tiny"
TOKENS = [1, 5, 40]


class StillRead:
    """A floor that takes no time to measure."""

    def time(self, inputs: MoEInputs, repeats: int) -> tuple[Sample, int, int]:
        return Sample(10.0, 9.0, 11.0), len(inputs.token_selected_experts.unique()), 4_000_000


class GivenPeer:
    """A peer that computes the layer on the CPU and multiplies its result."""

    def __init__(self, name: str, factor: float = 1.0, error: Exception | None = None, at: str = "") -> None:
        self.name, self.factor, self.error, self.at = name, factor, error, at

    def prepare(self, weights: MoEInputs) -> GivenPeer:
        if self.at == "prepare" and self.error:
            raise self.error
        return self

    def bind(self, batch: moe_layers.Batch) -> Callable[[], torch.Tensor]:
        if self.at == "bind" and self.error:
            raise self.error
        call = moe_layers.layer_call(batch.inputs)
        return lambda: call() * self.factor


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> measure.Plan:
    monkeypatch.setitem(moe_layers.MODELS, MODEL, (128, 64, 8, 2))
    monkeypatch.setattr(measure, "StreamingRead", StillRead)
    monkeypatch.setattr(measure, "time_graph", lambda run, repeats: Sample(20.0, 19.0, 22.0))
    monkeypatch.setattr(measure, "planned_tactics", lambda inputs, mode: ("bf16_m8_k128", "bf16_m8_k128"))
    monkeypatch.setattr(measure, "context_error", lambda: None)
    return measure.Plan([MODEL], TOKENS, [0, 1, 2], "", False, 3, 7, [], "cpu")


def test_rows_of_all_modes_and_peers(plan: measure.Plan) -> None:
    plan.peers = [
        GivenPeer("right"),
        GivenPeer("wrong", 1.1),
        GivenPeer("absent", error=RuntimeError("cannot lay out\nmore"), at="prepare"),
        GivenPeer("failing", error=ValueError("no such batch"), at="bind"),
    ]
    rows = measure.measure(plan)
    measure.measure_peers(plan, rows)
    assert [(row.model, row.tokens) for row in rows] == [(MODEL, n) for n in TOKENS]
    for row in rows:
        assert list(row.ours) == ["W4A8 mxfp8", "W4A8 bf16", "W4A16"]
        assert all(
            entry.used is not None and 0 < entry.used <= 1 and not entry.disagrees for entry in row.ours.values()
        )
        assert not row.peers["right"].disagrees
        assert row.peers["right"].sample == Sample(20.0, 19.0, 22.0)
        assert row.peers["wrong"].disagrees
        assert row.peers["absent"].note == "RuntimeError: cannot lay out"
        assert row.peers["failing"].note == "ValueError: no such batch"
        assert row.ahead == 1.0, "a peer that is wrong does not count"
    table = results.as_table(rows)
    assert table.count("20.0 (2.00) DISAGREES") == len(TOKENS)
    assert table.count("failed") == 2 * len(TOKENS)


def test_a_peer_may_have_a_tolerance_of_its_own(plan: measure.Plan) -> None:
    plan.peers = [GivenPeer("rounds", 1.1), GivenPeer("wrong", 1.3)]
    for peer in plan.peers:
        vars(peer)["tolerance"] = 0.2
    rows = measure.measure(plan)
    measure.measure_peers(plan, rows)
    for row in rows:
        assert row.peers["rounds"].used == pytest.approx(0.5, rel=0.1)
        assert row.peers["wrong"].disagrees


def test_a_wrong_result_is_seen_at_any_number_of_tokens(plan: measure.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    right = flashinfer.cutlass_fused_moe

    def wrong(**named: Any) -> torch.Tensor:
        output = right(**named)
        output[-1, 17] += 1.0
        return output

    monkeypatch.setattr(moe_layers, "cutlass_fused_moe", wrong)
    rows = measure.measure(plan)
    assert all(entry.disagrees for row in rows for entry in row.ours.values())


def test_modes_are_the_same_layer(plan: measure.Plan) -> None:
    batch = moe_layers.route(moe_layers.make_layer(MODEL, 4, 3, "cpu"), 4, 5)
    references = [moe_reference(batch.of_mode(mode))[0] for mode in range(3)]
    for reference in references[:2]:
        # e4m3 activations: two roundings of 2**-4 relative at most, in each of two GEMMs.
        assert peers.relative_error(reference, references[2]) < 4 * 2.0**-4
    assert torch.equal(batch.inputs.token_selected_experts, batch.logits.topk(2).indices.int())
    assert torch.allclose(batch.inputs.token_final_scales.sum(1), torch.ones(4))
    again = moe_layers.route(moe_layers.make_layer(MODEL, 4, 3, "cpu"), 4, 5)
    assert torch.equal(again.inputs.input, batch.inputs.input)
    assert torch.equal(again.logits, batch.logits)


def test_a_lost_context_ends_the_peers_and_keeps_ours(
    plan: measure.Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "context_error", lambda: "an illegal memory access was encountered")
    plan.peers = [GivenPeer("right")]
    rows = measure.measure(plan)
    measure.measure_peers(plan, rows)
    assert [list(row.peers) for row in rows] == [["right"], [], []]
    assert all(len(row.ours) == 3 for row in rows)
    assert "no peer is measured from here on" in capsys.readouterr().err
    assert results.as_table(rows)


def _rows() -> list[results.Row]:
    tactics = "bf16_m8_k128", "bf16_m8_k128"
    ours = {"W4A16": results.Entry(Sample(30.0, 29.0, 31.0), 0.5, tactics=tactics, forced={"other": 31.5})}
    good, bad = results.Entry(Sample(60.0, 59.0, 61.0), 0.4), results.Entry(Sample(5.0, 5.0, 5.0), 40.0)
    sample = Sample(20.0, 19.5, 21.0)
    return [
        results.Row("m", n, 4, 52.9, sample, ours, {"good": good, "bad": bad, "no": results.Entry(note="why")})
        for n in (1, 2)
    ]


def test_report_survives_json_and_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = _rows()
    about = {"gpu": "G", "date": "2000-01-01"}
    results.publish(about, rows, tmp_path)
    printed = capsys.readouterr().out
    assert "30.0 (1.50)" in printed
    assert "60.0 (3.00)" in printed
    assert "| 2.00 " in printed, "ahead: 60 over 30, the wrong peer left out"
    assert "m, 1 tokens, no: why" in printed
    assert results.load(tmp_path / "bench.json") == (about, rows)
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
    assert bench.main(["--render", str(tmp_path / "bench.json"), "--out", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "bench.json").read_text()) == json.loads(
        (tmp_path / "bench.json").read_text()
    )


@pytest.mark.parametrize(("used", "status"), [(0.9, 0), (1.5, 1), (float("nan"), 1)])
def test_exit_status_tells_whether_ours_agrees(
    used: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _rows()
    rows[1].ours["W4A16"] = dataclasses.replace(rows[1].ours["W4A16"], used=used)
    monkeypatch.setattr(measure, "measure", lambda plan: rows)
    monkeypatch.setattr(measure, "measure_peers", lambda plan, rows: None)
    monkeypatch.setattr(measure, "find_peers", lambda *arguments: [])
    monkeypatch.setattr(bench, "machine", lambda: {"gpu": "G", "date": "2000-01-01"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench.main(["--out", str(tmp_path)]) == status
    assert ("m, 2 tokens, W4A16 disagrees with the reference" in capsys.readouterr().err) is bool(status)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--models", "llama"], r"--models: \['llama'\] are not among"),
        (["--modes", "3"], r"--modes: \[3\] are not among \[0, 1, 2\]"),
        (["--tokens", "0,1"], "--tokens: 0 is less than 1"),
        (["--tokens", "many"], "argument --tokens: invalid"),
        (["--peers", "cublas"], r"--peers: \['cublas'\] are not among"),
        (["--repeats", "0"], "--repeats is 0; it must be at least 1"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.parse(arguments)
    assert stopped.value.code == 2
    assert re.search(text, capsys.readouterr().err)


def test_peers_that_are_not_there_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for look in ("marlin", "triton_kernels"):
        monkeypatch.setattr(measure.peer_module, look, lambda given: (None, "not installed"))
    assert measure.find_peers("marlin,triton_kernels", None, None, None) == []
    printed = capsys.readouterr().out
    assert "marlin: not measured: not installed" in printed
    assert "triton_kernels: not measured: not installed" in printed
    assert measure.find_peers("", tmp_path, tmp_path, tmp_path) == []
    assert capsys.readouterr().out == ""


def test_peers_that_were_named_must_be_usable(tmp_path: Path) -> None:
    text = tmp_path / "library.so"
    text.write_text("not a library")
    for wanted, marlin, triton_kernels, told in (
        ("marlin", text, None, f"marlin cannot be measured: {text}: "),
        ("marlin", tmp_path / "absent.so", None, "is no file"),
        ("triton_kernels", None, tmp_path, f"--triton-kernels: {tmp_path} is no folder of the package"),
    ):
        with pytest.raises(SystemExit, match=re.escape(told)):
            measure.find_peers(wanted, marlin, triton_kernels, None)


def test_host_cost_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("times the real launcher where there is a GPU")
    assert bench.main(["--host", "--models", "gpt-oss-20b"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| W4A")]
    assert len(lines) == 3
    for line in lines:
        assert float(line.split("|")[3]) > 0
