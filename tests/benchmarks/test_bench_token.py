# SPDX-License-Identifier: Apache-2.0
"""The token benchmark: bytes of a step's parts, whose kernels are whose, tables and picture, stacks side by side."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_token
import pytest
import torch
from perfmodel.step import TOKENS_BESIDE, Step, formats_of, mean_experts, parts_of
from printed import cells
from timing import relative_error
from token_bench import check, measure, model, results
from token_bench.model import ForkExperts, Model, fork_experts
from token_bench.operators import PAGE, TorchAttention

from flashinfer.sm12x.models import MODELS
from flashinfer.sm12x.models import Model as Size
from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import Batch
from flashinfer_sm12x.doctor.probe.timing import Sample

SMALL = Size(layers=2, experts=4, hidden=160, inter=96, heads=16, kv_heads=2, top_k=2, vocab=640, window=64)


def size_of(*tensors: Any) -> int:
    """Bytes of tensors, each memory once."""
    whole = {tensor.data_ptr(): tensor for tensor in tensors if tensor is not None}
    return sum(tensor.numel() * tensor.element_size() for tensor in whole.values())


@pytest.mark.parametrize(("weights", "kv"), [("bf16", "fp8"), ("mxfp8", "bf16"), ("mxfp4", "fp8")])
def test_bytes_are_those_of_the_tensors(weights: str, kv: str) -> None:
    """Weights and caches as a model has them; beside them 16 tokens' rows."""
    step = Step(16, 2 * PAGE, kv=kv, formats=formats_of(weights))  # whole pages, no longer than the window
    tried = Model(SMALL, fork_experts(SMALL, "a16"), (weights,), positions=64)
    caches = tried.caches(step, tried.batch(step))
    listed = {part.name: part.bytes for part in parts_of(SMALL, step, SMALL.experts)}
    layer, queries = tried.layers[0], 2 * 16 * SMALL.heads * SMALL.head
    for name, dense, calls in (("QKV", layer.qkv, 2), ("O", layer.o, 2), ("LM head", tried.lm_head, 1)):
        rows = 2 * 16 * sum(SMALL.matrices[name])
        assert listed[name] == calls * (size_of(*dense.weights[weights], dense.bias) + rows), name
    for index, cache in enumerate(caches):
        name = "attention, window" if SMALL.windowed(index) else "attention, full"
        assert listed[name] == size_of(cache, layer.sinks) + 2 * queries
    t = layer.experts.weights
    experts = size_of(t.fc1_weights, t.fc1_scales, t.fc1_bias, t.fc2_weights, t.fc2_scales, t.fc2_bias)
    assert listed["MoE"] == 2 * (experts + 16 * (2 * 2 * SMALL.hidden + SMALL.top_k * 8))


def test_bytes_of_what_is_done_in_place() -> None:
    """By hand: one token, one layer of each kind."""
    size = Size(layers=2, experts=4, hidden=192, inter=160, heads=8, kv_heads=2, head=32, top_k=2, vocab=640)
    parts = {part.name: part for part in parts_of(size, Step(1, 512, kv="fp8"))}
    queries, keys, row = 2 * 8 * 32, 2 * 2 * 32, 2 * 192
    assert parts["embedding"].bytes == 2 * row
    assert parts["rope"].bytes == 2 * (2 * (queries + keys) + 2 * 32)  # there and back, a row of the table
    assert parts["KV write"].bytes == 2 * (2 * keys + 2 * 2 * 32)
    assert (
        parts["norms"].bytes == 5 * 5 * row - 2 * row
    )  # x and residual, both out, the weight; the first has no residual
    router = 4 * (row + 2)  # weight and bias
    assert parts["router"].bytes == 2 * (router + row + 2 * 4)
    assert parts["top-k"].bytes == 2 * (2 * 4 + 2 * 8)
    # The fused router includes the norm and the top-k; it writes float32 logits and reads them again.
    (fused,) = (part for part in parts_of(size, Step(1, 512, fused_router=True)) if part.name == "router")
    assert fused.bytes == 2 * (router + 5 * row + 2 * 4 * 4 + 2 * 8)
    sinks = 4 * 8
    assert parts["attention, full"].bytes == 512 * 2 * 2 * 32 + 2 * queries + sinks
    assert parts["attention, window"].bytes == 128 * 2 * 2 * 32 + 2 * queries + sinks
    assert (parts["norms"].calls, parts["QKV"].calls, parts["attention, full"].calls) == (5, 2, 1)


def test_a_norm_in_qkv_is_not_written_and_read_again() -> None:
    size, tokens = MODELS["gpt-oss-120b"], 4
    step = Step(tokens, 512, formats=formats_of("mxint8"), fused_router=True)
    apart, within = (parts_of(size, dataclasses.replace(step, fork=fork)) for fork in (False, True))
    saved = sum(part.bytes for part in apart) - sum(part.bytes for part in within)
    assert saved == size.layers * 2 * tokens * 2 * size.hidden
    assert {part.name: part.calls for part in within}["norms"] == 1


def test_which_steps_have_a_norm_in_qkv() -> None:
    """The same as in the plugin: with its router, up to eight tokens, and tokens that are not rounded."""
    step = Step(8, 512, formats=formats_of("nvfp4"), fused_router=True)
    assert step.fused_norm
    assert dataclasses.replace(step, sequences=4, new=2, verified=True).fused_norm, "a draft's window"
    without: list[dict[str, Any]] = [
        {"sequences": 9}, {"fused_router": False}, {"new": 2}, {"formats": formats_of("bf16")}, {"fork": False},
        {"formats": formats_of("mxfp8"), "dense_tokens": "mxfp8"},
    ]  # fmt: skip
    assert not [change for change in without if dataclasses.replace(step, **change).fused_norm]


def test_ranks_share_what_is_shared_out() -> None:
    whole, step = MODELS["gpt-oss-120b"], Step(1, 8192)
    one, two = ({part.name: part for part in parts_of(size, step)} for size in (whole, whole.split(2)))
    for name in ("QKV", "O", "LM head", "attention, full"):
        assert 2 * two[name].bytes == pytest.approx(one[name].bytes, rel=2e-3)
    assert 2 * whole.split(2).moe.expert_bytes == pytest.approx(whole.moe.expert_bytes, rel=2e-2)  # rows padded to 128
    assert two["router"].bytes == one["router"].bytes
    assert "all-reduce" not in one
    assert two["all-reduce"].calls == 2 * whole.layers + 1


def test_mean_experts_is_that_of_random_routing() -> None:
    size = Size(1, 128)
    generator = torch.Generator().manual_seed(7)
    print("seed 7")
    seen = [len(torch.rand(16, 128, generator=generator).topk(4).indices.unique()) for _ in range(400)]
    mean = sum(seen) / len(seen)
    assert mean_experts(size, 16) == pytest.approx(mean, abs=0.5)  # 3.5 of one batch's deviation, of 400
    assert mean_experts(size, 1) == 4


def test_pages_in_front_of_the_window_are_not_kept() -> None:
    tried = Model(SMALL, fork_experts(SMALL, "a16"), ("bf16",), positions=2048)
    step = Step(2, 1000)
    batch = tried.batch(step)
    window, full = tried.caches(step, batch)[:2]
    assert full.shape == (2 * 63, 2, SMALL.kv_heads, PAGE, SMALL.head)
    assert window.shape[0] == 2 * (63 - (1000 - 1 - 64) // PAGE)
    assert batch.window.slots.tolist() == [int(batch.window.table[s, 62]) * PAGE + 999 % PAGE for s in (0, 1)]
    # Windowed layers get the same result as with all of the pages.
    sinks, q = torch.zeros(SMALL.heads), torch.randn(2, SMALL.heads, SMALL.head)
    everything = torch.zeros_like(full).float()
    everything[batch.full.table[:, 58:].flatten().long()] = window.float()[batch.window.table[:, 58:].flatten().long()]
    attend = TorchAttention()
    assert torch.equal(
        attend(q, window.float(), batch.window, batch, sinks, 64), attend(q, everything, batch.full, batch, sinks, 64)
    )


def test_kernels_belong_to_the_part_in_front_of_them() -> None:
    spin = "at::cuda::spin_kernel(long)"
    marked = [spin, "embed", spin, "norm", "copy", spin, spin, "gemm"]
    names = ["embed", "norm", "copy", "gemm"]
    marks = ["embedding", "norms", "rope", "QKV"]
    assert measure.owners(marked, marks, names) == ["embedding", "norms", "norms", "QKV"]
    for wrong in (["embed", "norm", "gemm"], ["embed", "copy", "norm", "gemm"]):
        with pytest.raises(RuntimeError, match="no table by part"):
            measure.owners(marked, marks, wrong)
    with pytest.raises(RuntimeError, match="no table by part"):
        measure.owners(marked, [*marks, "O"], names)


def test_kernels_are_ordered_and_timed_to_the_nanosecond() -> None:
    """Since 1970 there are so many microseconds that a float64 holds them to a quarter."""

    def event(name: str, begin: int, duration: int, device: str = "DeviceType.CUDA") -> SimpleNamespace:
        start = 1_763_000_000_000_000_000 + begin
        return SimpleNamespace(
            name=lambda: name, start_ns=lambda: start, duration_ns=lambda: duration, device_type=lambda: device
        )

    events = [
        event("third", 190, 1100),
        event("second", 120, 64),
        event("Context Sync", 0, 9),
        event("host", 0, 9, "DeviceType.CPU"),
        event("first", 100, 10),
    ]
    assert measure.in_order(events) == [("first", 0.0, 0.01), ("second", 0.02, 0.084), ("third", 0.09, 1.19)]
    assert measure.in_order([]) == []


def test_overlapping_kernels_count_once_and_gaps_are_reported() -> None:
    kernels = [("a", 10.0, 14.0), ("b", 13.0, 18.0), ("c", 15.0, 17.0), ("d", 20.0, 21.0)]
    busy, gaps = measure.busy_and_gaps(kernels, ["norms", "QKV", "rope", "QKV"])
    assert busy == {"norms": [4.0], "QKV": [4.0, 1.0], "rope": [0.0]}
    assert gaps == 2.0
    assert sum(map(sum, busy.values())) + gaps == 21.0 - 10.0


def a_measured_step() -> results.Measured:
    return results.Measured(
        model="gpt-oss-20b",
        stack="fork, dense mxfp4",
        step=Step(4, 1024, kv="fp8", formats=formats_of("mxfp4")),
        experts=12.5,
        replay=Sample(2000.0, 1990.0, 2100.0),
        rows=[
            results.Row("norms", "vLLM", 5, 1e6, kernels=5, us=300.0),
            results.Row("MoE", "fork", 2, 3e9, kernels=4, us=1500.0),
        ],
        gaps=200.0,
        kernels={"MoE: void stream<a|b>" + 100 * "x": {"launches": 4, "us": 1500.0}},
    )


def test_a_step_survives_json_and_its_table_adds_up(tmp_path: Path) -> None:
    step = a_measured_step()
    results.save(tmp_path / "deep" / "token.json", {"gpu": "none"}, [step])
    machine, (loaded,) = results.load(tmp_path / "deep" / "token.json")
    assert (machine, loaded) == ({"gpu": "none"}, step)
    assert loaded.tokens_per_second == pytest.approx(4 / 2000e-6)
    rows = {line[0]: line for line in cells(results.by_part(loaded, 3000.0))}
    assert rows["MoE"][2:] == ["4", "1,500.0", "3,000.00", "1,000.0", "75.0%"]
    assert rows["gaps"][3] == "200.0"
    assert rows["all"][2:6] == ["9", "2,000.0", "3,001.00", "1,000.3"]
    _, (part, name, *numbers) = cells(results.by_kernel(loaded))
    assert (part, numbers) == ("MoE", ["4", "1,500.0", "375.00"])
    assert name == "void stream<a/b>" + 71 * "x" + "..."
    _, overview = cells(results.overview([loaded], 3000.0))
    assert overview[5:7] == ["2.000", "2,000"]


def test_an_earlier_run_is_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"gpu": "NVIDIA H200", "date": "2026-11-22", "read_gb_per_second": 4000.0}
    failed = bench_token.not_measured("gpt-oss-20b", "vllm", Step(1, 128), "RuntimeError: no vLLM")
    results.save(tmp_path / "old.json", about, [a_measured_step(), failed])
    assert bench_token.main(["--render", str(tmp_path / "old.json"), "--out", str(tmp_path), "--name", "new"]) == 0
    out = capsys.readouterr().out
    assert "RuntimeError: no vLLM" in out
    text = (tmp_path / "new.md").read_text(encoding="utf-8")
    assert "a replay: 2,000.0 us (1,990.0 to 2,100.0)" in text
    assert "### gpt-oss-20b, fork, dense mxfp4, decode, context 1,024, 4 sequences, KV fp8" in text
    if importlib.util.find_spec("matplotlib") is not None:
        assert "gpt-oss-20b, fork, dense mxfp4" in (tmp_path / "new.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--models", "gpt-oss-21b"], "--models: ['gpt-oss-21b'] are not among"),
        (["--stacks", "sglang"], "--stacks: ['sglang'] are not among"),
        (["--dense", "bf16,int8"], "--dense: ['int8'] are not among"),
        (["--kv", "int4"], "--kv: ['int4'] are not among"),
        (["--router", "vllm"], "--router: ['vllm'] are not among"),
        (["--decode", "1024"], "argument --decode: invalid batches value: '1024'"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_token.main(arguments)
    assert text in capsys.readouterr().err


def test_a_stack_without_vllm_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's stack is not built; the fork's names torch in its rows, and an attention that is not there fails by
    name."""
    arguments = bench_token.parse(["--vllm", str(tmp_path), "--attention", "triton", "--prefill-attention", "torch"])
    tried = Model(SMALL, fork_experts(SMALL, "a16"), ("bf16",), positions=64)
    with pytest.raises(RuntimeError, match="_C_stable_libtorch"):
        bench_token.equip(tried, arguments, "vllm")
    bench_token.equip(tried, arguments, "fork")
    assert "fork: norms, rope, KV write and top-k by torch: RuntimeError" in capsys.readouterr().out
    step = Step(1, 20)
    assert tried.by(step)["norms"] == "torch"
    assert tried.by(step)["attention, full"] == "triton"
    batch = tried.batch(step)
    with pytest.raises(RuntimeError, match="triton attention: "):
        tried.step(step, batch, tried.caches(step, batch))


def test_what_fails_costs_itself_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose GPU is the CPU: one stack cannot be built, one step fails, one has no table; the rest is there."""

    def build(stack: str, size: Size, arguments: Any) -> Model:
        if stack == "vllm":
            raise RuntimeError("no vLLM\nat all")
        return Model(size, fork_experts(size, "a16"), tuple(arguments.dense), positions=64)

    def attribute(measured: results.Measured, *_: Any) -> None:
        if measured.step.context == 32:
            raise RuntimeError("no table by part")

    about = {"gpu": "none", "date": "today"}
    monkeypatch.setattr(bench_token, "machine", lambda: about)
    monkeypatch.setattr(bench_token, "streaming_read", lambda: 100.0)
    monkeypatch.setattr(bench_token, "build", build)
    monkeypatch.setitem(bench_token.MODELS, "gpt-oss-20b", SMALL)
    monkeypatch.setattr(measure, "captured", lambda run: run())
    monkeypatch.setattr(measure, "time_replays", lambda _graph, _repeats: Sample(100.0, 99.0, 101.0))
    monkeypatch.setattr(measure, "attribute", attribute)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = ["--models", "gpt-oss-20b", "--stacks", "vllm,fork", "--dense", "bf16", "--out", str(tmp_path)]
    given += ["--decode", "1x16,1x32,2x90", "--name", "cpu"]  # positions end at 64
    given += ["--router", "separate", "--decode-attention", "separate"]
    assert bench_token.main(given) == 0
    machine, steps = results.load(tmp_path / "cpu.json")
    assert machine == about | {"read_gb_per_second": 100.0}
    assert [(step.stack, step.step.context, step.note) for step in steps[:5]] == [
        ("vllm", 16, "RuntimeError: no vLLM"),
        ("vllm", 32, "RuntimeError: no vLLM"),
        ("vllm", 90, "RuntimeError: no vLLM"),
        ("fork, dense bf16", 16, ""),
        ("fork, dense bf16", 32, "no table by part"),
    ]
    assert steps[5].note.startswith("IndexError")
    assert [step.replay is None for step in steps] == [True, True, True, False, False, True]
    listed = {part.name: part.bytes for part in parts_of(SMALL, Step(1, 16), steps[3].experts)}
    assert {row.part: row.bytes for row in steps[3].rows} == listed
    assert [row.by for row in steps[3].rows if row.part in ("QKV", "norms")] == ["torch", "cuBLAS"]
    assert "RuntimeError: no vLLM" in capsys.readouterr().out


def test_dense_layers_round_their_tokens_as_the_step_says() -> None:
    print("seed 4")
    tried = Model(SMALL, fork_experts(SMALL, "a16"), ("mxfp4",), 4, positions=64)
    steps = {tokens: Step(3, 20, formats=formats_of("mxfp4"), dense_tokens=tokens) for tokens in TOKENS_BESIDE["mxfp4"]}
    batch = tried.batch(steps["bf16"])
    caches = tried.caches(steps["bf16"], batch)
    logits = {name: tried.step(step, batch, [kv.clone() for kv in caches])[0] for name, step in steps.items()}
    errors = {name: relative_error(logits[name], logits["bf16"]) for name in ("mxfp8", "mxfp4")}
    assert 0.002 < errors["mxfp8"] < 0.5 * errors["mxfp4"], errors
    assert tried.by(steps["mxfp8"])["QKV"] == "fork, mxfp4, tokens mxfp8"


class InMarlinsPlace:
    """A peer that computes this fork's layer."""

    def prepare(self, weights: MoEInputs) -> Any:
        layer = ForkExperts(weights, "a16")

        def bind(batch: Batch) -> Callable[[], torch.Tensor]:
            inputs = batch.inputs
            return lambda: layer(inputs.input, inputs.token_selected_experts, inputs.token_final_scales)

        return SimpleNamespace(bind=bind)


def test_the_check_sees_who_disagrees_and_who_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "SMALL", SMALL)
    arguments = bench_token.parse(
        ["--dense", "mxfp8", "--router", "separate,fork", "--decode-attention", "fork,separate"]
    )

    def run(equip: Callable[..., None], peer: Callable[[], Any] = InMarlinsPlace) -> tuple[int, list[str], str]:
        status = check.check(arguments, peer, equip, "cpu")
        out = capsys.readouterr().out
        return status, [line[-1] for line in cells(out)[1:]], out

    status, listed, out = run(lambda *_: None)
    assert "fork router_top_k" in out and "fork decode_attention" in out
    # Decode, a window, and prefill; the fork: two formats, two routers, two attentions for the first two.
    assert (status, len(listed)) == (0, 2 * 2 * (2 + 2 + 1) + 3)
    assert all(float(error) <= check.TOLERANCE for error in listed)

    def blind(tried: Model, _arguments: Any, _stack: str) -> None:
        tried.attention = lambda q, *_: torch.zeros_like(q)
        tried.attention.by = "nobody"
        tried.prefill_attention = bench_token.Unavailable("triton", "not here")

    def no_peer() -> Any:
        raise OSError("no library")

    status, listed, _ = run(blind, no_peer)
    assert status == 1
    assert [text.endswith("DISAGREES") for text in listed] == [False, True] * 4 + [False] * 13
    missing = "RuntimeError: triton attention: not here"
    assert listed[9:16:2] == [missing] * 4 and listed[16:] == [missing] * 4 + ["OSError: no library"]
    assert all(float(error) <= check.TOLERANCE for error in listed[8:16:2]), "a window by the fork's attention"


def test_steps_of_a_run() -> None:
    arguments = bench_token.parse(["--decode", "1x128,4x1024", "--kv", "bf16,fp8", "--prefill", "512"])
    separate = ["separate"]
    steps = list(bench_token.steps_of(arguments, ["bf16", "mxfp4"], separate, separate))
    assert len(steps) == 2 * (2 * 2 + 1)
    assert (steps[1].sequences, steps[1].context, steps[1].tokens) == (4, 1024, 4)
    assert (steps[4].new, steps[4].context, steps[4].prefill) == (512, 512, True)
    assert model.DTYPES[steps[2].kv] is torch.float8_e4m3fn
    # A window is a decode step whose logits are all wanted.
    arguments.windows = [1, 3]
    steps = list(bench_token.steps_of(arguments, ["bf16"], separate, separate))
    listed = [(step.tokens, step.logits, step.prefill) for step in steps[:4]]
    assert listed == [(1, 1, False), (3, 3, False), (4, 4, False), (12, 12, False)]
    assert steps[-1].prefill and steps[-1].logits == 1
    windows = results.Measured(model="", stack="", step=steps[3]).what()
    assert windows == "decode, context 1,024, 4 sequences, windows of 3"
    arguments.windows = [1]
    # A prompt's attention is not the fork's.
    both = list(bench_token.steps_of(arguments, ["bf16"], ["fork"], ["separate", "fork"]))
    assert [(step.fused_attention, step.prefill) for step in both] == [
        *[(False, False)] * 4, (False, True), *[(True, False)] * 4,
    ]  # fmt: skip
    assert bench_token.stack_name("fork", both[-1]) == "fork, dense bf16, its router and attention"
    with pytest.raises(SystemExit):
        bench_token.parse(["--dense", "mxfp8,mxfp4", "--dense-tokens", "mxfp4"])
    # bf16 weights have bf16 tokens, whatever is asked for; MXFP8 ones no MXFP4 tokens.
    arguments = bench_token.parse(["--decode", "1x128", "--dense-tokens", "mxfp8,mxfp4"])
    steps = list(bench_token.steps_of(arguments, ["bf16", "mxfp8", "mxfp4"], separate, separate))
    assert [bench_token.stack_name("fork", step) for step in steps] == [
        "fork, dense bf16",
        "fork, dense mxfp8 (tokens mxfp8)",
        "fork, dense mxfp4 (tokens mxfp8)",
        "fork, dense mxfp4 (tokens mxfp4)",
    ]
