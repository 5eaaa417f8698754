# SPDX-License-Identifier: Apache-2.0
"""The layer benchmarks' tables from measurements on CPU tensors with a fake clock."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_cutlass_fused_moe_mxfp4 as bench
import bench_dense_mx
import peers
import pytest
import timing
import torch
from printed import cells
from timing import Entry, Row

import flashinfer
from flashinfer.sm12x.models import MoELayer
from flashinfer.testing import MoEInputs, moe_layers, moe_reference
from flashinfer_sm12x.doctor.probe.timing import Sample

MODEL = "tiny"
TOKENS = [1, 5, 40]


class StillRead:
    """A floor that takes no time to measure."""

    def time(self, inputs: MoEInputs, repeats: int) -> tuple[Sample, int, int]:
        return Sample(10.0, 9.0, 11.0), len(inputs.token_selected_experts.unique()), 4_000_000

    def time_tensors(self, tensors: Any, repeats: int) -> tuple[Sample, int]:
        return Sample(sum(t.numel() for t in tensors) / 1e3, 1.0, 1.0), 0


class GivenPeer:
    """A peer that computes the layer on the CPU and multiplies its result."""

    def __init__(self, name: str, factor: float = 1.0, error: Exception | None = None, at: str = "") -> None:
        self.name, self.factor, self.error, self.at, self.prepared = name, factor, error, at, 0

    def prepare(self, weights: MoEInputs) -> GivenPeer:
        self.prepared += 1
        if self.at == "prepare" and self.error:
            raise self.error
        return self

    def bind(self, batch: moe_layers.Batch) -> Callable[[], torch.Tensor]:
        if self.at == "bind" and self.error:
            raise self.error
        call = moe_layers.layer_call(batch.inputs)
        return lambda: call() * self.factor


@pytest.fixture(autouse=True)
def given_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time_graph", lambda run, repeats: Sample(20.0, 19.0, 22.0))
    monkeypatch.setattr(timing, "context_error", lambda: None)
    for benchmark in (bench, bench_dense_mx):
        monkeypatch.setattr(benchmark, "StreamingRead", StillRead)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setitem(moe_layers.MODELS, MODEL, MoELayer(128, 64, 8, 2))
    monkeypatch.setattr(bench, "planned_tactics", lambda inputs, mode: ("bf16_m8_k128", "bf16_m8_k128"))
    return bench.parse(["--models", MODEL, "--tokens", ",".join(map(str, TOKENS)), "--modes", "0,1,2"])


def test_rows_of_all_modes_and_peers(arguments: argparse.Namespace) -> None:
    absent = GivenPeer("absent", error=RuntimeError("cannot lay out\nmore"), at="prepare")
    failing = GivenPeer("failing", error=ValueError("no such batch"), at="bind")
    rows = bench.measure(arguments, "cpu")
    others = [GivenPeer("right"), GivenPeer("wrong", 1.1), absent, failing]
    timing.add_peers(bench.peer_attempts(arguments, others, rows, "cpu"))
    assert absent.prepared == 1
    assert [(row.what["model"], row.what["tokens"]) for row in rows] == [(MODEL, n) for n in TOKENS]
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
    table = timing.as_table(rows)
    assert table.count("20.0 (2.00) DISAGREES") == len(TOKENS)
    assert table.count("failed") == 2 * len(TOKENS)
    assert table.count(" bf16_m8_k128 bf16_m8_k128 bf16_m8_k128 |") == len(TOKENS)


def test_a_wrong_result_is_seen_at_any_number_of_tokens(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = flashinfer.cutlass_fused_moe

    def wrong(**named: Any) -> torch.Tensor:
        output = right(**named)
        output[-1, 17] += 1.0
        return output

    monkeypatch.setattr(moe_layers, "cutlass_fused_moe", wrong)
    rows = bench.measure(arguments, "cpu")
    assert all(entry.disagrees for row in rows for entry in row.ours.values())


@pytest.mark.usefixtures("arguments")
def test_modes_are_the_same_layer() -> None:
    batch, again = (moe_layers.route(moe_layers.make_layer(MODEL, 4, 3, "cpu"), 4, 5) for _ in range(2))
    references = [moe_reference(batch.of_mode(mode))[0] for mode in range(3)]
    for reference in references[:2]:
        # e4m3 activations: two roundings of 2**-4 relative at most, in each of two GEMMs.
        assert timing.relative_error(reference, references[2]) < 4 * 2.0**-4
    assert torch.equal(batch.inputs.token_selected_experts, batch.logits.topk(2).indices.int())
    assert torch.allclose(batch.inputs.token_final_scales.sum(1), torch.ones(4))
    assert torch.equal(again.inputs.input, batch.inputs.input)
    assert torch.equal(again.logits, batch.logits)


def test_a_lost_context_ends_the_peers_and_keeps_ours(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "context_error", lambda: "an illegal memory access was encountered")
    rows = bench.measure(arguments, "cpu")
    timing.add_peers(bench.peer_attempts(arguments, [GivenPeer("right"), GivenPeer("next")], rows, "cpu"))
    assert [list(row.peers) for row in rows] == [["right"], [], []]
    assert all(len(row.ours) == 3 for row in rows)
    assert "no peer is measured from here on" in capsys.readouterr().err
    assert timing.as_table(rows)


def test_dense_layers_and_their_peers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """cuBLAS is right, a peer that scales its result is not, and one that fails costs itself only."""
    monkeypatch.setitem(bench_dense_mx.DENSE_LAYERS, "qkv", (320, 96))
    monkeypatch.setattr(bench_dense_mx, "CHECKED_ROWS", 64)
    layers = bench_dense_mx.measure(["qkv"], [1, 8], 3, "cpu")
    ((inputs, rows),) = layers
    assert [(row.what, list(row.ours)) for row in rows] == [
        ({"layer": "qkv", "tokens": n}, [" ".join(variant) for variant in moe_layers.DENSE_VARIANTS]) for n in (1, 8)
    ]
    # MXFP4: half a byte a value, and scales of 384 rows by 4; MXFP8: a byte.
    assert [rows[0].reads[name].median for name in ("read mxfp4", "read mxfp8")] == [16.896, 32.256]
    assert all(0 < entry.used <= 1 for row in rows for entry in row.ours.values())
    wrong = inputs.weights["mxfp4"]

    def refuse(_: Any) -> Any:
        raise OSError("no library")

    def doubled(_: Any) -> bench_dense_mx.Bind:
        return lambda x: lambda: 2 * torch.addmm(inputs.bias, x, inputs.wide.T)

    given = [bench_dense_mx.Peer("cuBLAS bf16", "bf16", bench_dense_mx.BF16_TOLERANCE, bench_dense_mx.cublas)]
    given += [bench_dense_mx.Peer("doubled", "mxfp8", 0.5, doubled), bench_dense_mx.Peer("absent", "mxfp4", 1, refuse)]
    timing.add_peers(bench_dense_mx.peer_attempts(given, layers, 3))
    head, *lines = cells(timing.as_table(rows))
    assert head[-3:] == ["cuBLAS bf16", "doubled", "absent"]
    assert [line[-3:] for line in lines] == [["20.0", "20.0 DISAGREES", "failed"]] * 2
    assert rows[1].peers["absent"].note == "OSError: no library"
    # A weight that is not the one which was multiplied.
    inputs.weights["mxfp4"] = wrong._replace(values=wrong[0].flip(0))
    x = inputs.batches[1]
    out = flashinfer.gemm.sm12x_dense.dense_mx(
        x, wrong[0], flashinfer.quantization.mx_cpu.swizzle_128x4(wrong[1]), inputs.bias
    )
    assert bench_dense_mx.share_of_bound(out, inputs, x, "mxfp4", "bf16") == float("inf")
    assert "disagrees with the reference" in capsys.readouterr().err


def _rows() -> list[Row]:
    ours = {"W4A16": Entry(Sample(30.0, 29.0, 31.0), 0.5, tactics="bf16_m8_k128", forced={"other": 31.5})}
    good, bad = Entry(Sample(60.0, 59.0, 61.0), 0.4), Entry(Sample(5.0, 5.0, 5.0), 40.0)
    read = {"read us": Sample(20.0, 19.5, 21.0)}
    others = {"good": good, "bad": bad, "no": Entry(note="why")}
    return [Row({"model": "m", "tokens": n, "experts": 4, "MB": 52.9}, read, dict(ours), others) for n in (1, 2)]


@pytest.mark.parametrize(("main", "name"), [(bench.main, "moe"), (bench_dense_mx.main, "dense")])
def test_report_survives_json_and_is_drawn(
    main: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    rows, about = _rows(), {"gpu": "G", "date": "2000-01-01"}
    path = tmp_path / f"{name}.json"
    timing.publish(about, rows, path, "title")
    printed = capsys.readouterr().out
    assert "30.0 (1.50)" in printed
    assert "60.0 (3.00)" in printed
    assert "| 2.00 " in printed, "ahead: 60 over 30, the wrong peer left out"
    assert "| 53 " in printed
    assert "m, 1 tokens, 4, 52.9, no: why" in printed
    assert timing.load(path) == (about, rows)
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert main(["--render", str(path), "--out", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / path.name).read_text()) == json.loads(path.read_text())


@pytest.mark.parametrize(("used", "status"), [(0.9, 0), (1.5, 1), (float("nan"), 1)])
def test_exit_status_tells_whether_ours_agrees(
    used: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _rows()
    rows[1].ours["W4A16"] = dataclasses.replace(rows[1].ours["W4A16"], used=used)
    monkeypatch.setattr(bench, "measure", lambda *arguments: rows)
    monkeypatch.setattr(bench_dense_mx, "measure", lambda *arguments: [(None, rows)])
    monkeypatch.setattr(bench_dense_mx, "peer_attempts", lambda *arguments: ())
    for benchmark in (bench, bench_dense_mx):
        monkeypatch.setattr(benchmark, "find_peers", lambda *arguments: [])
    monkeypatch.setattr(timing, "machine", lambda: {"gpu": "G", "date": "2000-01-01"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for main in (bench.main, bench_dense_mx.main):
        assert main(["--out", str(tmp_path)]) == status
        assert ("m, 2 tokens, 4, 52.9, W4A16 disagrees with the reference" in capsys.readouterr().err) is bool(status)


@pytest.mark.parametrize(
    ("main", "arguments", "text"),
    [
        (bench.main, ["--models", "llama"], r"--models: \['llama'\] are not among"),
        (bench.main, ["--modes", "3"], r"--modes: \[3\] are not among \[0, 1, 2\]"),
        (bench.main, ["--tokens", "0,1"], "--tokens: 0 is less than 1"),
        (bench.main, ["--tokens", "many"], "argument --tokens: invalid"),
        (bench.main, ["--peers", "cublas"], r"--peers: \['cublas'\] are not among"),
        (bench.main, ["--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (
            bench_dense_mx.main,
            ["--layers", "qkv,gate"],
            r"--layers: \['gate'\] are not among \['lm_head', 'o', 'qkv'\]",
        ),
        (bench_dense_mx.main, ["--peers", "triton_kernels"], r"--peers: \['triton_kernels'\] are not among"),
    ],
)
def test_bad_arguments(main: Any, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert re.search(text, capsys.readouterr().err)


def test_peers_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that was asked for by name ends the run; others are told, with the reason."""
    for loaders, library in ((peers.PEERS, peers.MOE_LIBRARY), (bench_dense_mx.PEERS, peers.LIBRARY)):
        with pytest.raises(SystemExit, match=rf"marlin cannot be measured: RuntimeError: {tmp_path} has no {library}"):
            peers.find_peers(loaders, ["marlin"], tmp_path)
        peers.find_peers(loaders, None, tmp_path)
        assert f"marlin: not measured: RuntimeError: {tmp_path} has no {library}" in capsys.readouterr().out
    (tmp_path / peers.MOE_LIBRARY).write_text("not a library")
    with pytest.raises(SystemExit, match="marlin cannot be measured: "):
        peers.find_peers(peers.PEERS, ["marlin"], tmp_path)


def test_host_cost_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--host"]) == 2
    assert "--host needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("program", [bench, bench_dense_mx], ids=lambda program: program.__name__)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x", "is not JSON: Expecting value at line 1, column 1; it must be the JSON that this benchmark wrote"),
        ("[]", "is JSON, but a list; it must be the JSON that this benchmark wrote"),
        ("{}", "is not the JSON that this benchmark wrote: it has no 'rows'"),
        ('{"rows": [], "machine": {}}', "is not the JSON that this benchmark wrote: "),
    ],
)
def test_an_earlier_run_that_is_none_is_refused(
    program: Any, text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.json"
    old.write_text(text)
    assert program.main(["--render", str(old), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"bench: {old} {why}")
    assert not (tmp_path / "out").exists()


def test_a_run_that_measured_nothing_leaves_an_earlier_ones_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "moe.json"
    path.write_text("a good one")
    row = timing.Row({"tokens": 1}, {"read": Sample(1.0, 1.0, 1.0)}, {"ours": timing.Entry(note="no such kernel")})
    timing.publish({"gpu": "none", "date": "today"}, [row], path, "a title")
    assert f"nothing was measured, so {path} is not written" in capsys.readouterr().out
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"moe.json": "a good one"}
