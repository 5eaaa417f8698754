# SPDX-License-Identifier: Apache-2.0
"""HUMMING as a peer: its driver on a stand-in that computes, and on the package itself where that is installed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import bench_dense_mx
import humming_stand_in
import pytest
import torch
from moe_bench import measure, peers
from test_bench_marlin import TorchOperators, assert_computes

from flashinfer.sm12x_gpu_probe.timing import Sample
from flashinfer.testing import moe_layers
from flashinfer.testing.mxfp_formats import dequantize_mxfp4

INSTALLED = importlib.util.find_spec("humming")
needs_package = pytest.mark.skipif(INSTALLED is None, reason="humming-kernels is not installed")
DRIVER = "moe_bench.peer_humming"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The driver, on the stand-in and a GPU with three multiprocessors; ``major`` of it is there to be changed."""
    for name, module in humming_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    properties = SimpleNamespace(multi_processor_count=humming_stand_in.SMS, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    sys.modules.pop(DRIVER, None)
    yield importlib.import_module(DRIVER)
    sys.modules.pop(DRIVER, None)


def _weighted_sum(parts: torch.Tensor, weights: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_((parts.float() * weights.unsqueeze(-1)).sum(dim=1))


@pytest.mark.parametrize(("tokens", "groupings"), [(1, 1), (3, 2), (40, 1)])
def test_driver_computes_the_layer(
    tokens: int, groupings: int, driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle the GEMMs' schedules have blocks of other sizes; FC1 has them in 16 rows, FC2 in 8."""
    monkeypatch.setitem(moe_layers.MODELS, "tiny", (160, 96, 8, 3))
    print("seed", tokens)
    batch = moe_layers.route(moe_layers.make_layer("tiny", tokens, tokens, "cpu"), tokens, tokens)
    before = [t.clone() for t in (batch.inputs.fc1_weights, batch.inputs.fc2_weights, batch.inputs.fc2_scales)]
    operators = TorchOperators()
    called = []
    align = operators.moe_align_block_size
    monkeypatch.setattr(operators, "moe_align_block_size", lambda *given: [called.append(given[2]), align(*given)])
    layer = driver._Layer(operators, _weighted_sum, batch.inputs)
    after = (batch.inputs.fc1_weights, batch.inputs.fc2_weights, batch.inputs.fc2_scales)
    assert all(map(torch.equal, before, after)), "the preparation works in place"
    assert_computes(layer.bind(batch), batch.inputs)
    assert len(called) == 2 * groupings


def dense_inputs(seed: int) -> bench_dense_mx.Inputs:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(320, 160, generator=generator).bfloat16()
    weights = {name: bench_dense_mx.quantized(wide, name) for name in ("mxfp4", "mxfp8")}
    batches = [torch.randn(tokens, 160, generator=generator).bfloat16() for tokens in (1, 9)]
    return bench_dense_mx.Inputs(weights, torch.randn(320, generator=generator).bfloat16(), batches)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_dense_mx, "time_graph", lambda run, repeats: Sample(20.0, 19.0, 22.0))
    monkeypatch.setattr(bench_dense_mx, "context_error", lambda: None)
    monkeypatch.setattr(bench_dense_mx, "CHECKED_ROWS", 64)


def _rows(count: int) -> list[dict[str, Any]]:
    names = [" ".join(variant) for variant in moe_layers.DENSE_VARIANTS]
    return [
        {"layer": "o", "tokens": 1, "read": {"mxfp4": 1, "mxfp8": 2}, "ours": dict.fromkeys(names, 9.0), "cublas": 9.0}
        for _ in range(count)
    ]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("major", [9, 12])
def test_dense_layers(major: int, driver: ModuleType) -> None:
    torch.cuda.get_device_properties(0).major = major
    rows = _rows(2)
    bench_dense_mx.add_peer(bench_dense_mx.measure_humming, rows, [dense_inputs(major)], 3)
    for row in rows:
        assert list(row["peers"]) == [f"HUMMING {weight} {x}" for weight in ("mxfp4", "mxfp8") for x in ("bf16", "fp8")]
        for name, entry in row["peers"].items():
            assert entry.sample == Sample(20.0, 19.0, 22.0)
            assert entry.used is not None
            error = entry.used * bench_dense_mx.HUMMING_TOLERANCE[name.split()[-1]]
            # bf16 rounds by 2**-9 at most; e4m3 tokens by 2**-4, and evenly spread by more than an eighth of it
            assert (2.0**-7 < error < 2.0**-4) if name.endswith("fp8") else (0 < error < 2.0**-9)
    head, _, *lines = bench_dense_mx.table(rows).splitlines()
    assert head.endswith("| HUMMING mxfp4 bf16 | HUMMING mxfp4 fp8 | HUMMING mxfp8 bf16 | HUMMING mxfp8 fp8 |")
    assert [line.split("|")[-5:-1] for line in lines] == [[" 20.0 "] * 4] * 2


@pytest.mark.usefixtures("clock")
def test_a_dense_peer_that_fails_or_is_wrong_is_marked(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = driver.humming_forward

    def forward(config: Any, **given: Any) -> None:
        if config.input.input_quant_mode != "none":
            raise RuntimeError("no such kernel\nmore")
        right(config, **given)
        given["outputs"][:, 0] *= 1.5

    prepare = driver.prepare_and_transform_humming_tensors

    def refuse(**given: Any) -> Any:
        if given["weight_schema"].b_dtype == "float8e4m3":
            raise ValueError("no such layout")
        return prepare(**given)

    monkeypatch.setattr(driver, "humming_forward", forward)
    monkeypatch.setattr(driver, "prepare_and_transform_humming_tensors", refuse)
    rows = _rows(2)
    bench_dense_mx.add_peer(bench_dense_mx.measure_humming, rows, [dense_inputs(5)], 3)
    for row in rows:
        notes = {name: entry.note for name, entry in row["peers"].items()}
        assert notes == {
            "HUMMING mxfp4 bf16": "", "HUMMING mxfp4 fp8": "RuntimeError: no such kernel",
            "HUMMING mxfp8 bf16": "ValueError: no such layout", "HUMMING mxfp8 fp8": "ValueError: no such layout",
        }  # fmt: skip
        assert row["peers"]["HUMMING mxfp4 bf16"].disagrees
    cells = bench_dense_mx.table(rows).splitlines()[-1].split("|")[-5:-1]
    assert cells[0].startswith(" wrong (")
    assert cells[1:] == [" failed "] * 3


@pytest.mark.usefixtures("clock")
def test_a_lost_context_ends_it(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_dense_mx, "context_error", lambda: "an illegal memory access was encountered")
    rows = _rows(4)
    bench_dense_mx.add_peer(bench_dense_mx.measure_humming, rows, [dense_inputs(1), dense_inputs(2)], 3)
    assert ["peers" in row for row in rows] == [True, True, False, False]
    assert "no peer is measured from here on" in capsys.readouterr().err
    assert bench_dense_mx.table(rows).splitlines()[-1].endswith("| - | - | - | - |")


def test_only_the_schedules_that_are_asked_for_are_compiled(driver: ModuleType) -> None:
    inputs = dense_inputs(3)
    values, scales = inputs.weights["mxfp4"]
    gemm = driver.Gemm(values, scales, inputs.bias, "bf16", [25])
    assert [(low, high) for low, high, _ in gemm.schedules] == [(0, 4), (24, 2**30)]
    assert [gemm.block(rows) for rows in (4, 25)] == [8, 32]
    x = inputs.batches[1].repeat(3, 1)[:25]
    out = torch.empty(25, 320, dtype=torch.bfloat16)
    gemm(x, out)
    reference = x.double() @ dequantize_mxfp4(values, scales).T + inputs.bias.double()
    assert peers.relative_error(out, reference) < 2.0**-9
    assert len(driver.Gemm(values, scales, inputs.bias).schedules) == 3


def test_it_is_said_why_it_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert measure.find_peers("humming", None, None, None) == []
    assert "humming: not measured: not installed (humming-kernels)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is no folder of the package humming"):
        measure.find_peers("humming", None, None, tmp_path)
    package = tmp_path / "humming"
    package.mkdir()
    (package / "forward.py").write_text("raise RuntimeError('of another CUDA')")
    assert peers.humming(package, None) == (None, "needs a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, DRIVER, raising=False)
    (package / "__init__.py").write_text("")
    assert peers.humming(package, None) == (None, "RuntimeError: of another CUDA")
    with pytest.raises(SystemExit, match="humming cannot be measured: RuntimeError: of another CUDA"):
        bench_dense_mx.main(["--humming", str(package)])
    sys.modules.pop("humming", None)


@pytest.mark.usefixtures("driver")
def test_it_needs_vllms_library_for_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "find_vllm", lambda *inside: None)
    spec = SimpleNamespace(origin="humming/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    peer, why = peers.humming(None, None)
    assert peer is None
    assert why == "vLLM, whose moe_align_block_size it needs, is not installed; --marlin names its library"


def _signature(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Parameters of a function, or fields of a class, in order."""
    if isinstance(node, ast.ClassDef):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        return [ast.unparse(each.target) for each in fields if "ClassVar" not in ast.unparse(each.annotation)]
    given = node.args
    required = len(given.args) - len(given.defaults)
    names = [f"{each.arg}{'' if i < required else '='}" for i, each in enumerate(given.args)]
    return names + [f"*{each.arg}" for each in given.kwonlyargs]


@needs_package
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("forward.py", "humming_forward"),
        ("forward.py", "may_process_input"),
        ("transform.py", "prepare_and_transform_humming_tensors"),
        ("tune/__init__.py", "get_heuristics_config"),
        ("schema/humming.py", "HummingWeightSchema"),
        ("schema/humming.py", "HummingInputSchema"),
    ],
)
def test_the_stand_in_has_the_packages_signatures(file: str, name: str) -> None:
    def of(source: str) -> list[str]:
        (node,) = [
            each
            for each in ast.parse(source).body
            if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name
        ]
        return _signature(node)

    assert INSTALLED is not None
    assert INSTALLED.origin is not None
    theirs = of((Path(INSTALLED.origin).parent / file).read_text(encoding="utf-8"))
    assert theirs == of(inspect.getsource(humming_stand_in))


@needs_package
def test_the_package_lays_out_what_it_is_given(tmp_path: Path) -> None:
    """In a process of its own: the package wants a GPU and triton, which are replaced there as far as it looks at them."""
    here = Path(__file__).parent
    paths = [str(here.parents[1] / "benchmarks"), *filter(None, sys.path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
        "HUMMING_TMP_DIR": str(tmp_path),
        "HUMMING_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, here / "humming_on_cpu.py"], env=environment, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4 layouts agree"
