# SPDX-License-Identifier: Apache-2.0
"""The predicted GB10 token: its ranges, what they are made of, and what a doctor's report puts in their place."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import bench_token
import pytest
import torch
from emulate import CONTEXTS, DECODE, PREFILL
from perfmodel import moe
from perfmodel import step as model
from perfmodel.devices import GB10
from perfmodel.gb10 import FAST, FIXED_US, LAUNCH_SAVED_US, MIDDLE, SLOW
from perfmodel.step import (
    DENSE_FORMATS,
    KV_BYTES,
    MATRICES,
    NORMED,
    NORMED_BATCHES,
    Given,
    Kernel,
    Step,
    formats_of,
    from_report,
    kept,
    kept_kernel,
    parts_of,
)
from printed import cells
from token_bench import predict, results

from flashinfer.sm12x.models import MODELS, matrix_bytes
from flashinfer_sm12x.doctor.probe import layer
from flashinfer_sm12x.doctor.probe.timing import Sample

MODEL = "gpt-oss-120b"
FAST_BYTES, SLOW_BYTES = 1e3 * FAST.dram_gb_per_second, 1e3 * SLOW.dram_gb_per_second
"""Bytes of DRAM in a microsecond."""


def step_of(weights: str, context: int = 1024, **named: Any) -> Step:
    return Step(1, context, formats=formats_of(weights), **named)


def rows_of(predicted: model.Predicted) -> dict[str, model.Row]:
    return {row.part: row for row in predicted.rows}


def bytes_of(step: Step) -> dict[str, float]:
    return {part.name: part.bytes for part in parts_of(MODELS[MODEL], step)}


def test_kept_kernels_are_of_todays_sizes() -> None:
    """Checks the weights' bytes of each kept line, and the experts' times against the doctor's fits for MXFP8 input.

    bf16 input, which the layer quantizes, adds less than 1 %.
    """
    lines = kept().values()
    for line in lines:
        if line.kind == "MoE":
            experts = MODELS[line.model].split(line.ranks).moe
            touched = moe.mean_work(experts, line.tokens, 0).experts
            assert line.megabytes == pytest.approx(touched * experts.expert_bytes / 1e6)
            continue
        matrix = "QKV" if line.kind == NORMED else line.kind
        if matrix not in MATRICES:
            continue  # below
        n, k = MODELS[line.model].split(line.ranks).matrices[matrix]
        assert line.megabytes == matrix_bytes(n, k, line.weights) / 1e6
    for tokens in (1, 4, 64, 2048):
        line = kept_kernel("MoE", MODEL, 1, tokens, "mxfp4", "mxfp8")
        assert (line.fast, line.slow) == pytest.approx(
            moe.predicted_range(MODELS[MODEL].moe, layer.MODE, tokens), rel=0.01
        )
    assert len(lines) == len(model.KERNELS.read_text(encoding="utf-8").splitlines()) - 1
    assert {line.tokens for line in lines} == {*DECODE, *PREFILL, *NORMED_BATCHES}


RESCORED = {**formats_of("mxfp6"), "LM head": "nvfp4_rescored"}


def test_a_rescored_head_reads_coarse_rows_and_768_fine_ones_a_token_until_the_fine_head_is_cheaper() -> None:
    coarse, fine = (matrix_bytes(201_088, 2880, weights) for weights in ("nvfp4", "bf16"))
    own = 2 * (2880 + 201_088)  # a token's row and its logits
    for streams in (1, 8, 64, 188):
        found = bytes_of(Step(streams, 1024, formats=RESCORED))
        assert found["LM head"] == coarse + streams * own
        assert found["rescoring"] == streams * (768 * 2880 * 2 + own)
    found = bytes_of(Step(189, 1024, formats=RESCORED))
    assert found["LM head"] == fine + 189 * own
    assert "rescoring" not in found
    window = bytes_of(Step(1, 1024, 3, formats=RESCORED, verified=True))
    assert window["rescoring"] == 3 * (768 * 2880 * 2 + own), "of all tokens of a window that verifies a draft"
    assert bytes_of(Step(1, 512, 512, formats=RESCORED))["rescoring"] == 768 * 2880 * 2 + own, "of a prompt's last one"
    assert "rescoring" not in bytes_of(step_of("nvfp4"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_rescoring_takes_the_time_of_its_counts_for_each_token(ranks: int) -> None:
    one, four = (rows_of(model.predict(MODEL, Step(n, 1024, formats=RESCORED), ranks))["rescoring"] for n in (1, 4))
    line = kept_kernel("rescoring", MODEL, ranks, 1, "bf16", "bf16")
    assert (one.by, one.calls, one.fast, one.slow) == ("fork, virtual SM121", 1, line.fast, line.slow)
    assert 1e6 * line.megabytes == pytest.approx(one.bytes, rel=1e-3), "what was counted is what must be read"
    for end, fixed in zip(("fast", "slow"), FIXED_US["dense"], strict=True):
        assert getattr(four, end) - fixed == pytest.approx(4 * (getattr(one, end) - fixed))
    coarse = rows_of(model.predict(MODEL, Step(1, 1024, formats={**RESCORED, "LM head": "nvfp4"}), ranks))["LM head"]
    head = rows_of(model.predict(MODEL, Step(1, 1024, formats=RESCORED), ranks))["LM head"]
    assert (head.bytes, head.fast, head.slow) == (coarse.bytes, coarse.fast, coarse.slow)


def test_a_rescored_head_is_faster_than_one_of_8_bits() -> None:
    fused = {"fused_router": True, "fused_attention": True}
    rescored = model.predict(MODEL, Step(1, 1024, formats=RESCORED, **fused))
    int8 = model.predict(MODEL, Step(1, 1024, formats={**RESCORED, "LM head": "mxint8"}, **fused))
    assert rescored.middle_rate >= 1.07 * int8.middle_rate
    assert rescored.bytes == pytest.approx(3.06e9, rel=0.002)


def test_ranges_are_in_order_and_add_up() -> None:
    contexts = [
        model.predict(MODEL, Step(1, context, kv=kv, formats=formats), ranks)
        for context, kv, formats, ranks in itertools.product(
            CONTEXTS, KV_BYTES, (*map(formats_of, DENSE_FORMATS), RESCORED), (1, 2)
        )
    ]
    for step in contexts + [each for routing, each in predict.batches(MODEL) if routing == "uniform"]:
        parts = {part.name: part for part in parts_of(step.size, step.step)}
        assert [row.part for row in step.rows] == list(parts)
        for row in step.rows:
            assert 0 < row.fast < row.slow, row
            assert row.bytes == parts[row.part].bytes
            # Nothing is faster than its bytes at the fastest rate; kernels' own are bytes as counted, biases included.
            if row.part != "all-reduce":
                assert row.fast > 0.99 * row.bytes / 1e3 / FAST.dram_gb_per_second, row
        assert step.fast == pytest.approx(sum(row.fast for row in step.rows))
        assert step.rate(step.slow) < step.middle_rate < step.rate(step.fast)


def test_a_small_part_is_its_bytes_and_a_launch() -> None:
    step = step_of("bf16", 8192)
    rows, parts = rows_of(model.predict(MODEL, step)), bytes_of(step)
    assert rows["norms"].fast == pytest.approx(parts["norms"] / FAST_BYTES + 73 * FIXED_US["small"][0])
    assert rows["norms"].slow == pytest.approx(parts["norms"] / SLOW_BYTES + 73 * FIXED_US["small"][1])
    assert rows["QKV"].fast == pytest.approx(parts["QKV"] / FAST_BYTES + 36 * FIXED_US["gemm"][0])
    attention = rows["attention, full"]
    assert attention.slow == pytest.approx(1.1 * parts["attention, full"] / SLOW_BYTES + 18 * FIXED_US["attention"][1])


@pytest.mark.parametrize(
    ("fused", "gone", "part", "changed", "fixed", "off"),
    [
        (
            "fused_router",
            {"top-k"},
            "router",
            {"norms", "router", "QKV", "MoE"},  # its decode steps have fewer launches in all of them
            36 * (FIXED_US["router"][1] - LAUNCH_SAVED_US["top-k"]),
            0.01,
        ),
        (
            "fused_attention",
            {"rope", "KV write"},
            "attention, full",
            {"attention, full", "attention, window"},
            18 * FIXED_US["decode_attention"][1],
            0.05,
        ),
    ],
)
def test_a_kernel_of_the_forks_takes_several_parts(
    fused: str, gone: set[str], part: str, changed: set[str], fixed: float, off: float
) -> None:
    """Its bytes are those counted, within ``off`` of the part's own; other parts stay as they were."""
    one, two = (predict.headline(1, **{fused: used})[-1] for used in (False, True))
    before, after = rows_of(one), rows_of(two)
    assert set(before) - set(after) == gone
    assert {name for name, row in after.items() if row != before[name]} == changed
    assert after[part].by == "fork, virtual SM121"
    bytes_ = bytes_of(step_of("mxfp4", **{fused: True}))[part]
    assert after[part].slow == pytest.approx(bytes_ / SLOW_BYTES + fixed, rel=off)
    assert two.middle_rate > one.middle_rate
    if part == "router":
        assert (after["norms"].calls, before["norms"].calls) == (1, 73)
        return
    assert bytes_ == 18 * (1024 * 2 * 8 * 64 * 2 + 2 * 64 * 64 * 2 + 64 * 4 + 2 * 8 * 64 * 2 + 64 * 2)
    elsewhere = rows_of(model.predict(MODEL, step_of("mxfp4", 1000, fused_attention=True)))[part]
    assert elsewhere.by == "bytes + launch"  # no such context was run
    assert elsewhere.slow == pytest.approx(after[part].slow, rel=0.1)


def test_launches_that_a_decode_step_does_without() -> None:
    """The norm before QKV up to eight tokens, the router's top-k at one, and what packs tokens for W4A16's
    stream."""

    def rows(tokens: int, **named: Any) -> dict[str, model.Row]:
        given: dict[str, Any] = {
            "formats": formats_of("mxint8"),
            "fused_router": True,
            "expert_tokens": "bf16",
            **named,
        }
        return rows_of(model.predict(MODEL, Step(tokens, 1024, **given)))

    def of_kept(kind: str, tokens: int, weights: str, activation: str = "bf16") -> tuple[float, float]:
        line = kept_kernel(kind, MODEL, 1, tokens, weights, activation)
        return 36 * line.fast, 36 * line.slow

    for tokens, batch in ((1, 1), (4, 4), (16, None)):
        found = rows(tokens)
        wanted = of_kept("QKV", tokens, "mxint8") if batch is None else of_kept(NORMED, batch, "mxint8")
        assert (found["QKV"].fast, found["QKV"].slow) == pytest.approx(wanted)
        assert found["norms"].calls == (37 if batch is None else 1)
        saved = 36 * LAUNCH_SAVED_US["top-k"] if tokens == 1 else 0.0
        wanted = of_kept("router", tokens, "bf16")
        assert (found["router"].fast, found["router"].slow) == pytest.approx(tuple(end - saved for end in wanted))
        for activation, less in (("bf16", 36 * LAUNCH_SAVED_US["experts"]), ("mxfp8", 0.0)):
            experts = rows(tokens, expert_tokens=activation)["MoE"]
            wanted = of_kept("MoE", tokens, "mxfp4", activation)
            assert (experts.fast, experts.slow) == pytest.approx(tuple(end - less for end in wanted))
    assert rows(8)["QKV"].slow == pytest.approx(of_kept(NORMED, 8, "mxint8")[1])
    assert rows(64)["MoE"].slow == pytest.approx(of_kept("MoE", 64, "mxfp4")[1] - 36 * LAUNCH_SAVED_US["experts"])
    plain, step = rows(1, fused_router=False), rows(1)
    assert sum(row.slow for row in step.values()) < sum(row.slow for row in plain.values())


def test_a_prompt_is_bound_by_arithmetic() -> None:
    rows = rows_of(model.predict(MODEL, step_of("bf16", 2048, new=2048)))
    cycles = 48 * 2.418e3
    n, k = MODELS[MODEL].matrices["QKV"]
    flops = 2 * 2048 * n * k
    assert rows["QKV"].slow == pytest.approx(
        36 * (flops / (SLOW.bf16_flops_per_cycle * 0.7 * cycles) + FIXED_US["gemm"][1])
    )
    pairs = sum(min(token + 1, 2048) for token in range(2048))
    assert model.flops_of(MODELS[MODEL], step_of("bf16", 2048, new=2048), "attention, full") == 4 * 64 * 64 * pairs
    fast = 4 * 64 * 64 * pairs / (1024 * 0.73 * cycles)
    assert rows["attention, full"].fast == pytest.approx(18 * (fast + FIXED_US["attention"][0]))
    # One sequence's logits: as in decode.
    decode = rows_of(model.predict(MODEL, step_of("bf16")))
    assert rows["LM head"] == decode["LM head"]


def test_what_was_not_emulated_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"no prediction of MoE for 3 tokens of gpt-oss-120b on 2 GPU\(s\), mxfp4 and tokens in bf16: 1, 4",
    ):
        model.predict(MODEL, Step(3, 1024), 2)
    prompt = Step(1, 8192, 8192, formats=formats_of("mxfp4"))
    with pytest.raises(
        ValueError, match=r"QKV for 8192 tokens .* mxfp4 and tokens in bf16: 1, 4, 16, 64, 512, 2048 only"
    ):
        model.predict(MODEL, prompt)  # cuBLAS and dequantized weights


def a_line(**named: Any) -> Kernel:
    times = {"megabytes": 23.3, "dram": 100.0, "issue": 1.0, "mma": 1.0, "shared": 1.0}
    ends = {"fast": 1e5 * 233 / FAST_BYTES + 5, "slow": 1e5 * 233 / SLOW_BYTES + 12, "bound": "dram"}
    about = {"kind": "O", "model": MODEL, "ranks": 1, "tokens": 1, "weights": "mxfp4", "activation": "bf16"}
    return Kernel(**{**times, **ends, **about, **named})


def test_a_measured_rate_moves_what_dram_binds() -> None:
    line, slower = a_line(), dataclasses.replace(GB10, dram=(200.0, 200.0))
    assert model.on_device(line, False, slower) == pytest.approx((116.5 + 5, 116.5 + 12))
    bound = a_line(mma=120.0, fast=125.0, slow=132.0, bound="mma")
    assert model.on_device(bound, True, slower) == (bound.fast, bound.slow)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A report in the form of ``sm12x-doctor --probe``, of a GB10 somewhat slower than predicted."""
    measured = {
        "device": {"name": "NVIDIA GB10", "gb10": True},
        "dram": {"gigabytes_per_second": 210.0},
        "mma": {"bf16": {"flops_per_clock": 600.0}},
        "launch": {"plain": {"graph_us": 1.8}},
        "layer": {"1 tokens": {"layer_us": 290.0}, "64 tokens": {"layer_us": 7000.0}},
    }
    path = tmp_path / "spark.json"
    path.write_text(json.dumps({"format": 1, "measured": measured}))
    return path


def test_a_report_takes_the_place_of_ranges(report: Path) -> None:
    given = from_report(report)
    slower = dataclasses.replace(GB10, dram=(210.0, 210.0), bf16=(600.0, 600.0))
    assert given == Given(slower, pytest.approx((2.2, 3.4)), {1: 290.0, 64: 7000.0})
    rows = rows_of(model.predict(MODEL, step_of("bf16"), given=given))
    assert rows["MoE"].fast == rows["MoE"].slow == 36 * 290.0
    parts = bytes_of(step_of("bf16"))
    assert rows["LM head"].fast == pytest.approx(parts["LM head"] / 210e3 + FIXED_US["gemm"][0])
    # Layers of other shapes were not measured.
    assert model.predict(MODEL, step_of("bf16"), 2, given).rows != model.predict(MODEL, step_of("bf16"), 2).rows
    two = rows_of(model.predict(MODEL, step_of("bf16"), 2, given))
    assert two["MoE"].fast < two["MoE"].slow


def test_prediction_and_report_stand_side_by_side(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_token.main(["--report", str(report), "--out", str(tmp_path), "--name", "t"]) == 0
    out = capsys.readouterr().out
    fused = {"fused_router": True, "fused_attention": True}  # the plugin's decode steps
    before, after = (predict.headline(1, MODEL, given, **fused)[0] for given in (None, from_report(report)))
    table = predict.side_by_side(before, after)
    assert table in out
    row = rows_of(before)["MoE"]
    assert ["MoE", "fork, measured", predict.span(row.fast, row.slow, 0), "10,440"] in cells(table)
    assert re.search(r"^published, 2 Sparks, vLLM CUTLASS, context [\d,]+, tokens/s: 71.43$", out, re.MULTILINE)
    assert (tmp_path / "t_predicted.md").read_text(encoding="utf-8").strip() in out


def test_a_step_measured_on_a_gb10_has_its_prediction_beside_it(tmp_path: Path) -> None:
    step = step_of("mxfp8", 8192, kv="fp8")
    rows = [results.Row(part.name, "x", part.calls, part.bytes, us=1.0) for part in parts_of(MODELS[MODEL], step)]
    steps = [
        results.Measured(model=MODEL, step=step, stack=stack, rows=rows, replay=Sample(1.0, 1.0, 1.0))
        for stack in ("fork, x", "vllm")
    ]
    for gpu, tables in (("NVIDIA GB10", 1), ("NVIDIA H200", 0)):
        about = {"gpu": gpu, "date": "today", "read_gb_per_second": 230.0}
        results.save(tmp_path / "m.json", about, steps)
        assert bench_token.main(["--render", str(tmp_path / "m.json"), "--out", str(tmp_path)]) == 0
        text = (tmp_path / "token.md").read_text(encoding="utf-8")
        assert text.count("predicted us") == tables
        if tables:
            predicted = model.predict(MODEL, step)
            row = rows_of(predicted)["O"]
            (line,) = [line for line in cells(text) if line[0] == "O" and len(line) == 8]
            assert line[-1] == predict.span(row.fast, row.slow, 0)
            assert predict.span(predicted.fast, predicted.slow, 0) in text
    assert predict.of_measured(dataclasses.replace(steps[0], step=dataclasses.replace(step, sequences=100))) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "is not a report of sm12x-doctor --probe: it has no object 'measured' with an object 'device'"),
        ('{"measured": []}', "has no object 'measured'"),
        ('{"measured": {"device": "gb10"}}', "has no object 'measured' with an object 'device'"),
        (
            "no json",
            "bad.json is not JSON: Expecting value at line 1, column 1; it must be a report of sm12x-doctor --probe",
        ),
        ("[]", "bad.json is JSON, but a list; it must be a report"),
        ("\udcff", "bad.json is not JSON: byte 0 is not UTF-8"),
        ("[" * 100_000, "bad.json is not JSON of a depth that can be read"),
        (
            '{"measured": {"device": {"gb10": true}, "dram": {"gigabytes_per_second": "fast"}}}',
            "measured.dram.gigabytes_per_second is 'fast'; it must be a positive number",
        ),
        (
            '{"measured": {"device": {"gb10": true}, "mma": {"bf16": {"flops_per_clock": NaN}}}}',
            "is not JSON: NaN is no JSON",
        ),
        (
            '{"measured": {"device": {"gb10": true}, "layer": {"4 tokens": {"layer_us": true}}}}',
            "layer.4 tokens.layer_us is True",
        ),
        ('{"measured": {"device": {"name": "NVIDIA H200", "gb10": false}}}', "is of NVIDIA H200"),
        ('{"measured": {"device": {"failed": "no device"}}}', "is of no GPU"),
    ],
)
def test_a_report_of_no_use_is_refused(text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text(text, errors="surrogateescape")
    assert bench_token.main(["--report", str(tmp_path / "bad.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench: {tmp_path / 'bad.json'}")
    assert why in line


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "",
            "old.json is not JSON: Expecting value at line 1, column 1; it must be the JSON that this benchmark wrote",
        ),
        ("{}", "old.json is not the JSON that this benchmark wrote: it has no 'steps'"),
        ('{"steps": [1], "machine": {}}', "old.json is not the JSON that this benchmark wrote: "),
        ('{"steps": [], "machine": {}}', "it has no 'read_gb_per_second'"),
    ],
)
def test_an_earlier_run_that_is_none_is_refused(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.json").write_text(text)
    assert bench_token.main(["--render", str(tmp_path / "old.json"), "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench: {tmp_path / 'old.json'}")
    assert why in line


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--models", ""], "--models: nothing is named"),
        (["--windows", ","], "--windows: nothing is named"),
        (["--decode", "0x1024"], "--decode: 0x1024; sequences and context must be at least 1"),
        (["--decode", "4"], "argument --decode: invalid"),
        (["--prefill", "0"], "--prefill: 0; a prompt has at least one token"),
        (["--repeats", "0"], "--repeats is 0; it must be at least 1"),
    ],
)
def test_bad_options(options: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_token.main(options)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_output_that_cannot_be_written_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert bench_token.main(["--predict", "--out", str(tmp_path / "file" / "below")]) == 2
    assert capsys.readouterr().err == f"bench: [Errno 20] Not a directory: '{tmp_path / 'file' / 'below'}'\n"


def test_a_run_that_measures_nothing_leaves_an_earlier_ones_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    for name in ("machine", "streaming_read"):
        monkeypatch.setattr(bench_token, name, dict if name == "machine" else lambda: None)
    monkeypatch.setattr(bench_token, "build", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    good = {f"token.{suffix}": "a good one" for suffix in ("json", "md", "svg")}
    for name, text in good.items():
        (tmp_path / name).write_text(text)
    assert bench_token.main(["--out", str(tmp_path), "--dense", "bf16"]) == 1
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == good
    assert "nothing was measured, so the files of " in capsys.readouterr().err


def test_what_needs_a_gpu_or_a_file_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_token.main(["--check", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "bench: --check runs kernels, and there is no GPU: torch.cuda.is_available() is False\n"
    )
    with pytest.raises(SystemExit):
        bench_token.main(["--render", str(tmp_path / "absent.json")])
    assert "argument --render: '" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_tables_hold_what_was_predicted() -> None:
    steps, names = predict.headline(1), list(predict.PRESET_FORMATS)
    rows, mxfp4 = {line[0]: line for line in cells(predict.by_part(steps, names))}, rows_of(steps[-1])
    for name in MATRICES:
        row = mxfp4[name]
        assert rows[name][-3:] == [
            f"{row.bytes / 1e6:,.1f}",
            f"{row.bytes / MIDDLE.dram_gb_per_second / 1e3:,.0f}",
            predict.span(row.fast, row.slow, 0),
        ]
    assert rows["all"][-1] == predict.span(steps[-1].fast, steps[-1].slow, 0)
    at = 2 + 3 * list(predict.PRESET_FORMATS).index("spark")
    assert rows["rescoring"][2:5] == ["-"] * 3 and "-" not in rows["rescoring"][at : at + 3], "bf16 rescores nothing"
    assert len(cells(predict.overview([("uniform", step) for step in steps]))) == 1 + len(steps)
    by_context = {(line[0], line[1]): line for line in cells(predict.by_context(MODEL, 2))}
    one = model.predict(MODEL, step_of("mxfp4", 8192, kv="fp8"), 2)
    assert by_context["8,192", "fp8"][-1] == predict.tokens_per_second(one)
    assert by_context["8,192", "bf16"][-1] != predict.tokens_per_second(one)
    assert {line.split(":")[0] for line in model.assumptions()} >= {"DRAM", "attention's cache"}


PAGES = Path(bench_token.__file__).parents[1] / "docs"
OWN = {"fused_router": True, "fused_attention": True}  # the plugin's decode steps


def test_performances_tables_of_a_token_are_todays() -> None:
    """Presets by context, on one GB10 and on two, and several streams by routing."""
    page = cells((PAGES / "performance.md").read_text(encoding="utf-8"))
    lines = {line[0]: line[1:] for line in page if line[0].startswith(("1 stream, ", "two GB10s, "))}
    for name, context, kv, ranks in (
        ("1 stream, context 1,024", 1024, "bf16", 1),
        ("1 stream, 32,768, fp8 KV", 32_768, "fp8", 1),
        ("1 stream, 131,072, fp8 KV", 131_072, "fp8", 1),
        ("two GB10s, 1 stream, 1,024", 1024, "bf16", 2),
    ):
        steps = [Step(1, context, kv=kv, formats=formats, **OWN) for formats in predict.PRESET_FORMATS.values()]
        assert lines[name] == [predict.tokens_per_second(model.predict(MODEL, step, ranks)) for step in steps], name
    streams = [line for line in cells(predict.streams_by_preset(MODEL, **OWN)) if line[1] in predict.ROUTINGS]
    assert len(streams) == 6 and all(line in page for line in streams)


@pytest.mark.parametrize("page", ["serving.md", "accuracy.md"])
def test_other_pages_ranges_are_todays(page: str) -> None:
    """Each range of tokens/s beside a preset or a format is one of today's."""
    ends = set()
    for layers, head in itertools.product((*DENSE_FORMATS, "q8_0"), (*DENSE_FORMATS, "q8_0", RESCORED["LM head"])):
        formats = {"QKV": layers, "O": layers, "LM head": head}
        for (context, kv), tokens in itertools.product(
            ((1024, "bf16"), (1024, "fp8"), (32_768, "fp8")), ("bf16", "mxfp8", "mxfp4")
        ):
            step = Step(1, context, kv=kv, formats=formats, dense_tokens=tokens, **OWN)  # type: ignore[arg-type]
            try:
                ends.add(predict.tokens_per_second(model.predict(MODEL, step)).partition(" (")[0])
            except ValueError:  # not run so
                continue
    found = re.findall(r"\| ([2-8]\d\.\d - [2-9]\d\.\d)(?= \(|\s*\|)", (PAGES / page).read_text(encoding="utf-8"))
    assert len(found) >= 10 and set(found) <= ends, set(found) - ends
