# SPDX-License-Identifier: Apache-2.0
"""The owner's page: figures beside predictions, and which assumption measurements contradict."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import bench_report
import pytest
from perfmodel import gb10
from perfmodel.devices import GB10
from perfmodel.step import GRAPH_NODE_US, Given, Step, formats_of, predict, read_report
from token_bench import owner, results

from flashinfer_sm12x.doctor.probe.predicted import LAYER_US
from flashinfer_sm12x.doctor.probe.timing import Sample

MODEL = "gpt-oss-120b"


def middle(ends: tuple[float, float]) -> float:
    return sum(ends) / 2


def spark(tmp_path: Path, **changes: Any) -> Path:
    """A report of a GB10 that does as predicted, but for ``changes`` of its parts."""
    rate = middle((gb10.SLOW.dram_gb_per_second, gb10.FAST.dram_gb_per_second))
    measured: dict[str, Any] = {
        "device": {"name": "NVIDIA GB10", "gb10": True, "sm_count": 48, "torch": "2.13.0", "machine": "aarch64"},
        "dram": {"gigabytes_per_second": rate, "copies_gigabytes_per_second": rate},
        "mma": {kind: {"flops_per_clock": middle(ends)} for kind, ends in gb10.mma_rates().items()},
        "launch": {"plain": {"graph_us": GRAPH_NODE_US}},
        "layer": {f"{tokens} tokens": {"layer_us": middle(ends)} for tokens, ends in LAYER_US.items()},
    }
    path = tmp_path / "spark.json"
    fields = {"format": 1, "fork": "0.1.0", "upstream": "0.7.2.post1", "driver": "580.95", "toolkit": "13.0"}
    path.write_text(json.dumps({**fields, "measured": {**measured, **changes}}))
    return path


def with_layers(factors: dict[int, float]) -> dict[str, dict[str, float]]:
    return {f"{n} tokens": {"layer_us": factors.get(n, 1.0) * middle(ends)} for n, ends in LAYER_US.items()}


def moved(path: Path, *steps: results.Measured) -> list[str]:
    """The sentences at the end of the page."""
    page = owner.page(read_report(path), None, steps)
    return re.findall(r"^- (.*)$", page.partition("Assumptions that moved:")[2], re.MULTILINE)


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Spark as predicted: every figure is inside, and nothing moved."""
    assert bench_report.main(["--probe", str(spark(tmp_path)), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.md").read_text()
    assert page in capsys.readouterr().out
    assert "NVIDIA GB10, 48 SMs" in page and "driver 580.95" in page
    assert page.count("inside") == 7 + len(LAYER_US) and "OUTSIDE" not in page
    assert moved(spark(tmp_path)) == ["None: every figure that was measured is within 5% of its range."]


def test_slow_memory_explains_slow_layers(tmp_path: Path) -> None:
    """DRAM 20 % slower than the range's slow end; the layers as they then are predicted."""
    rate = 0.8 * gb10.SLOW.dram_gb_per_second
    slow = Given(dataclasses.replace(GB10, dram=(rate, rate)))
    factors = {}
    for tokens in (1, 4, 64):
        before, after = (owner.experts_us(Step(tokens, 1024), given) for given in (None, slow))
        factors[tokens] = middle(after) / middle(before)
        assert factors[tokens] > 1.15, "this test would not see a layer outside its range"
    dram = {"gigabytes_per_second": rate, "copies_gigabytes_per_second": rate}
    lines = moved(spark(tmp_path, dram=dram, layer=with_layers(factors)))
    assert [line.partition(":")[0] for line in lines[:2]] == ["DRAM, plain loads", "DRAM, bulk copies"]
    assert f"{rate:,.1f} GB/s; 218.0 to 250.0 is assumed (-25% from the middle)" in lines[0]
    names = "MoE layer, 1 token; MoE layer, 4 tokens; MoE layer, 64 tokens"
    assert lines[2:] == [f"With these inputs predicted again, the prediction holds for: {names}."]


def test_copies_that_lose_are_the_layers_rate(tmp_path: Path) -> None:
    """Loads as assumed, bulk copies at 195 GB/s: the layers are predicted by the copies."""
    dram = {"gigabytes_per_second": 250.9, "copies_gigabytes_per_second": 195.0}
    path = spark(tmp_path, dram=dram)
    assert read_report(path).given().device.dram == (195.0, 195.0)
    assert moved(path)[0].startswith("DRAM, bulk copies: ")
    older = spark(tmp_path, dram={"gigabytes_per_second": 210.0})
    assert read_report(older).given().device.dram == (210.0, 210.0)


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_a_layer_that_no_input_explains_is_named(tmp_path: Path, factor: float) -> None:
    lines = moved(spark(tmp_path, layer=with_layers({4: factor})))
    assert len(lines) == 1
    assert lines[0].startswith(f"MoE layer, 4 tokens: {factor * middle(LAYER_US[4]):,.0f} us; 818 to 952 is predicted")
    assert lines[0].endswith("No input explains it: the kernel's counts or its fixed time are wrong.")


def step_of(factor: float, part: str = "LM head") -> results.Measured:
    """A measured decode step as predicted, but for one part."""
    step = Step(1, 1024, formats=formats_of("mxfp6"), fused_router=True, fused_attention=True)
    rows = []
    for row in predict(MODEL, step).rows:
        time = row.middle * (factor if row.part == part else 1.0)
        rows.append(results.Row(row.part, row.by, row.calls, row.bytes, row.calls, time))
    whole = sum(row.us for row in rows)
    return results.Measured(
        model=MODEL, stack="fork, dense mxfp6", step=step, rows=rows, replay=Sample(whole, whole, whole)
    )


def test_a_part_of_the_step_is_named(tmp_path: Path) -> None:
    path = spark(tmp_path)
    assert moved(path, step_of(1.0)) == ["None: every figure that was measured is within 5% of its range."]
    lines = moved(path, step_of(1.5))
    assert [line.partition(":")[0] for line in lines] == ["LM head"]
    page = owner.page(read_report(path), {"date": "2026-11-28", "command": "python /home/x"}, [step_of(1.5)])
    assert "2026-11-28" in page and "/home" not in page
    whole = sum(row.us for row in step_of(1.5).rows)
    assert f"{1e6 / whole:,.1f} tokens/s" in page


def test_other_gpus_and_parts_that_are_missing(tmp_path: Path) -> None:
    """An H100's report is shown beside a GB10's prediction, and said to be so; what was not measured is said so."""
    device = {"name": "NVIDIA H100 80GB HBM3", "gb10": False, "sm_count": 132}
    page = owner.page(read_report(spark(tmp_path, device=device, mma={"bf16": {"flops_per_clock": 4096.0}})), None, [])
    assert "**This GPU is no GB10; what is predicted is a GB10.**" in page
    assert page.count("not measured") == 3
    assert "4,096" in page
    assert "Assumptions that moved" not in page
    assert "No decode step was measured." in page


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "a list"),
        ("{}", "no object 'measured'"),
        ('{"measured": {"device": {}, "dram": {"gigabytes_per_second": -1}}}', "must be a positive number"),
    ],
)
def test_a_file_of_no_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert bench_report.main(["--probe", str(path), "--out", str(tmp_path / "out")]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out" / "report.md").exists()


def test_a_machine_without_a_gpu_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def probe_of_nothing(command: list[str], check: bool) -> Any:
        ran.append(command[1:])
        return type("Done", (), {"returncode": 1})

    monkeypatch.setattr(bench_report.subprocess, "run", probe_of_nothing)
    (tmp_path / "sm12x-probe.json").write_text("{}")  # an earlier run's is not taken for today's
    assert bench_report.main(["--out", str(tmp_path)]) == 2
    assert ran[0][:4] == ["-m", "flashinfer", "sm12x-doctor", "--probe"]
    assert "the probe measured nothing" in capsys.readouterr().err
