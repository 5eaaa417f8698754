# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's model class of the plugin, by vLLM's own code on CPU tensors: prefill, then decode through the paged
cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint
import paged
import pytest
import served
import torch
from paged import Batch, Paged
from test_vllm_models import serve, table

SEED = 3
# Heads as decode_attention takes them, and a window that the prompts reach beyond.
CHANGES = {"num_attention_heads": 16, "num_key_value_heads": 2}
PROMPTS, NEW = (29, 5), 4
PAGES = [[3, 7, 2], [5, 1, 9]]


@pytest.fixture(autouse=True)
def attention_in_pytorch(monkeypatch):
    from vllm.model_executor.layers.attention import Attention

    monkeypatch.setattr(Attention, "forward", paged.forward)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decode")
    checkpoint.write(folder, SEED, **CHANGES)
    return folder


@pytest.fixture
def loaded(folder) -> Iterator[Any]:
    """``loaded(chosen, *words)``: the settings' model with its configuration."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def load(chosen: dict[str, str], *words: str, folder: Any = folder) -> Any:
            config = engine(folder, chosen, *words)
            stack.enter_context(served.parallel_groups(config))
            return config, served.load_model(config)

        yield load


def engine(folder: Any, chosen: dict[str, str], *words: str) -> Any:
    return serve(folder, chosen, "--attention-backend", "FLASHINFER", *words)


def tokens_of(sequence: int, count: int) -> list[int]:
    return ((torch.arange(count) + 100 * sequence) * 2654435761 % checkpoint.CONFIG["vocab_size"]).tolist()


def prefill(steps: Paged) -> None:
    """The prompts, one after the other."""
    for sequence, length in enumerate(PROMPTS):
        steps.step(tokens_of(sequence, length), Batch([length], [length], [PAGES[sequence]]))


def answers(steps: Paged, rows: int = 0, sequences: int = 0, **context: Any) -> tuple[torch.Tensor, list[Batch]]:
    """float32 logits of both sequences' decode steps, behind their prompts: ``[steps, sequence, vocabulary]``."""
    prefill(steps)
    found, batches = [], []
    for step in range(NEW):
        lengths = [length + step + 1 for length in PROMPTS]
        batch = Batch([1, 1], lengths, PAGES)
        new = [tokens_of(sequence, length)[-1] for sequence, length in enumerate(lengths)]
        found.append(steps.step(new, batch, rows, sequences, **context)[:2])
        batches.append(batch)
    return torch.stack(found), batches


DENSE = [
    {},
    {"qkv": "mxfp8", "o": "mxfp4", "lm_head": "mxfp8"},
    {"qkv": "mxfp4-a8", "o": "mxfp8-a8", "lm_head": "mxfp4"},
]


@pytest.mark.parametrize("kinds", DENSE, ids=lambda kinds: ",".join(kinds.values()) or "bf16")
@pytest.mark.parametrize("moe", ["mxfp4-a8", "mxfp4-a16"])
def test_decode_steps_are_the_executors_and_as_near_as_vllms(loaded, log, moe, kinds):
    """Window and full layers; within what bf16 arithmetic may differ by, of what vLLM's layers compute on the same
    cache."""
    config, model = loaded({"moe": moe, **kinds})
    steps = Paged(config, model)
    got, batches = answers(steps)
    assert [batch.stock for batch in batches] == [[]] * NEW
    assert table(log)["decode"][:3] == ("flashinfer-sm12x", "up to 64 tokens", "default")
    executor, model.decode_steps = model.decode_steps, None
    vllms, batches = answers(steps)
    assert all(batch.stock == list(steps.layers) for batch in batches)
    assert executor is not None
    distance = (got.log_softmax(-1) - vllms.log_softmax(-1)).abs().mean()
    print("seed", SEED, "mean difference of log probabilities", float(distance))
    assert 0 < distance < 0.1


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"], ids=["NHD", "HND"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_each_cache_is_written_as_vllm_writes_it(loaded, layout, cache):
    """A first layer's keys and values differ by roundings of rope alone; e4m3 with scales that are not 1."""
    config, model = loaded({"moe": "mxfp4-a16"}, "--kv-cache-dtype", cache)
    for layer in model.model.layers:
        if cache == "fp8":
            layer.attn.attn._k_scale_float, layer.attn.attn._v_scale_float = 0.5, 2.0
    steps, kept = Paged(config, model, layout), []
    for executor in (model.decode_steps, None):
        model.decode_steps = executor
        got, _ = answers(steps)
        first = next(iter(steps.layers.values())).kv_cache.clone()
        kept.append((got, first.view(torch.float8_e4m3fn).float() if cache == "fp8" else first.float()))
    (got, ours), (vllms, written) = kept
    assert (got.log_softmax(-1) - vllms.log_softmax(-1)).abs().mean() < 0.1
    largest = written.abs().max()
    assert (ours - written).abs().max() <= largest * (2.0**-3 if cache == "fp8" else 2.0**-7)
    assert torch.equal(ours.any(-1), written.any(-1))  # no position but the same ones


@pytest.mark.parametrize(("rows", "sequences"), [(4, 4), (4, 2), (5, 3)], ids=["graph", "rows", "both"])
def test_rows_of_padding_change_nothing_and_write_nothing(loaded, rows, sequences, monkeypatch):
    """Sequences of length 0 with the null page, as in a full graph, and rows without a sequence; expert -1."""
    import flashinfer.fused_moe as operators

    config, model = loaded({})
    steps = Paged(config, model)
    plain, _ = answers(steps)
    caches = [layer.kv_cache.clone() for layer in steps.layers.values()]
    routed: list[Any] = []
    router = operators.router_top_k
    monkeypatch.setattr(operators, "router_top_k", lambda *a, **k: (routed.append(router(*a, **k)), routed[-1])[1])
    padded, batches = answers(steps, rows, sequences)
    assert [batch.stock for batch in batches] == [[]] * NEW
    assert torch.equal(padded, plain)
    assert all(map(torch.equal, caches, (layer.kv_cache for layer in steps.layers.values())))
    assert not any(layer.kv_cache[0].any() for layer in steps.layers.values())
    assert len(routed) == NEW * len(steps.layers)
    assert all((each.topk_ids[2:] == -1).all() and (each.topk_ids[:2] >= 0).all() for each in routed)


@pytest.mark.parametrize("fails", ["metadata", "run"])
def test_a_step_that_fails_is_vllms_and_so_are_all_after_it(loaded, log, monkeypatch, fails):
    """vLLM's layers write the same positions of the cache once more; logits are theirs alone."""
    config, model = loaded({"moe": "mxfp4-a16"})
    steps, executor = Paged(config, model), model.decode_steps
    model.decode_steps = None
    vllms, _ = answers(steps)
    model.decode_steps = executor
    calls: list[int] = []

    def fail(*_: Any) -> Any:
        calls.append(1)
        raise OSError("injected")

    monkeypatch.setattr(executor, fails, fail)
    got, batches = answers(steps)
    assert torch.equal(got, vllms)
    assert all(batch.stock == list(steps.layers) for batch in batches)
    assert len(calls) == 1
    assert model.decode_steps is None
    assert [line for line in log if "injected" in line] == [
        "flashinfer-sm12x: decode steps are left to vLLM: OSError: injected"
    ]


def test_a_step_that_fails_in_one_of_several_ranks_ends_them(loaded, monkeypatch):
    """The others are in the middle of the step: a second one from its start would be reduced with the rest of
    theirs."""
    config, model = loaded({"moe": "mxfp4-a16"})
    steps = Paged(config, model)
    model.decode_steps.alone = False

    def fail(*_: Any) -> Any:
        raise OSError("injected")

    monkeypatch.setattr(model.decode_steps, "run", fail)
    with pytest.raises(OSError, match="injected"):
        answers(steps)


def test_what_is_no_step_of_decodes_alone_is_vllms(loaded, monkeypatch):
    from vllm.config import CUDAGraphMode

    config, model = loaded({})
    steps = Paged(config, model)
    layers = list(steps.layers)

    def stock(batch: Batch, **context: Any) -> list[str]:
        steps.step(tokens_of(0, batch.starts[-1]), batch, **context)
        return batch.stock

    assert stock(Batch([1, 1], [9, 7], PAGES)) == []
    assert stock(Batch([1, 5], [9, 5], PAGES)) == layers  # mixed
    assert stock(Batch([4], [20], PAGES[:1])) == layers  # a prompt's next chunk
    assert stock(Batch([1], [9], PAGES[:1]), cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE) == layers
    assert stock(Batch([1] * 65, [1] * 65, [[each % 23 + 1] for each in range(65)])) == layers
    assert stock(Batch([1] * 64, [1] * 64, [[each % 23 + 1] for each in range(64)])) == []
    for change in ({"num_prefills": 1}, {"causal": False}, {"num_decodes": 2}):
        found = steps.metadata(Batch([1], [9], PAGES[:1]), 1)
        for name, value in change.items():
            setattr(found[layers[-1]], name, value)  # one layer's is enough
        with monkeypatch.context() as patch:
            patch.setattr(steps, "metadata", lambda *_, found=found: found)
            assert stock(Batch([1], [9], PAGES[:1])) == layers, change


# Windows of up to three tokens. Four of two are eight rows, beyond which the norm of QKV is a launch of its own.
DRAFT = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}')
WINDOW = 2


def windows(steps: Paged, rows: int = 0) -> tuple[torch.Tensor, list[Batch]]:
    """float32 logits of two steps of windows, of which all tokens are kept:
    ``[steps, sequence, window, vocabulary]``."""
    prefill(steps)
    found, batches = [], []
    for step in (1, 2):
        lengths = [length + step * WINDOW for length in PROMPTS]
        new = [token for sequence, length in enumerate(lengths) for token in tokens_of(sequence, length)[-WINDOW:]]
        batch = Batch([WINDOW] * 2, lengths, PAGES)
        found.append(steps.step(new, batch, rows)[: 2 * WINDOW].view(2, WINDOW, -1))
        batches.append(batch)
    return torch.stack(found), batches


@pytest.mark.parametrize("kinds", DENSE[:2], ids=["bf16", "quantized"])
def test_windows_that_verify_a_draft_are_the_executors(loaded, log, kinds, monkeypatch):
    """The executor runs these steps, as close to vLLM's layers as with one token per step; padding rows and sequences
    have no effect."""
    config, model = loaded({"moe": "mxfp4-a16", **kinds}, *DRAFT)
    assert table(log)["decode"][:3] == ("flashinfer-sm12x", "up to 64 tokens", "default")
    steps = Paged(config, model)
    got, batches = windows(steps)
    assert [batch.stock for batch in batches] == [[], []]
    caches = [layer.kv_cache.clone() for layer in steps.layers.values()]

    def as_replayed(batch: Batch, _: int) -> dict[str, Any]:
        """Metadata of a graph that was captured with four sequences; the last two have length 0 and the null page in a
        replay."""
        if batch.new[0] != WINDOW:
            return metadata(batch, len(batch.new))
        four = metadata(Batch([WINDOW] * 4, [*batch.lengths, WINDOW, WINDOW], [*batch.pages, [1], [1]]), 4)
        for each in four.values():
            each.decode.seq_lens[2:] = 0
            each.decode.block_tables[2:] = 0
        return four

    metadata = steps.metadata
    for found, rows in ((metadata, 2 * WINDOW + 1), (metadata, 4 * WINDOW), (as_replayed, 4 * WINDOW)):
        with monkeypatch.context() as patch:
            patch.setattr(steps, "metadata", found)
            padded, batches = windows(steps, rows)
        assert [batch.stock for batch in batches] == [[], []]
        assert torch.equal(padded, got)
        assert all(map(torch.equal, caches, (layer.kv_cache for layer in steps.layers.values())))
    assert not any(layer.kv_cache[0].any() for layer in steps.layers.values())
    executor, model.decode_steps = model.decode_steps, None
    vllms, batches = windows(steps)
    assert all(batch.stock == list(steps.layers) for batch in batches)
    assert executor is not None
    distance = (got.log_softmax(-1) - vllms.log_softmax(-1)).abs().mean(-1)
    print("seed", SEED, "mean differences of log probabilities", distance.flatten().tolist())
    assert 0 < distance.max() < 0.1


def test_windows_of_different_lengths_are_vllms(loaded):
    config, model = loaded({}, *DRAFT)
    steps = Paged(config, model)
    for new, taken in (
        ([2, 2], True),
        ([3, 3], True),
        ([1, 1], True),
        ([2, 3], False),
        ([1, 3], False),
        ([4, 4], False),
    ):
        batch = Batch(new, [9 + new[0], 7 + new[1]], PAGES)
        steps.step(tokens_of(0, sum(new)), batch)
        assert batch.stock == ([] if taken else list(steps.layers)), new


def test_a_draft_reads_the_states_that_vllms_layers_give_it(loaded):
    """EAGLE3: before any layer, and after the last."""
    from vllm.forward_context import get_forward_context, set_forward_context

    config, model = loaded({"moe": "mxfp4-a16", "qkv": "mxint8"}, *DRAFT)
    steps, found = Paged(config, model), []
    count = len(model.model.layers)
    model.set_aux_hidden_state_layers(tuple(range(count + 1)))
    batch = Batch([WINDOW] * 2, [length + WINDOW for length in PROMPTS], PAGES)
    new = torch.tensor(
        [token for sequence in range(2) for token in tokens_of(sequence, batch.lengths[sequence])[-WINDOW:]]
    )
    for executor in (model.decode_steps, None):
        model.decode_steps = executor
        prefill(steps)
        slots = dict.fromkeys(steps.layers, batch.slots(len(new)))
        context = set_forward_context(steps.metadata(batch, 2), config, num_tokens=len(new), slot_mapping=slots)
        with torch.inference_mode(), context:
            get_forward_context().additional_kwargs["batch"] = batch
            hidden, states = model(new, batch.positions(len(new)))
        found.append([hidden, *states])
    assert batch.stock == list(steps.layers)  # of the second alone
    assert [len(each) for each in found] == [2 + count] * 2
    assert torch.equal(found[0][1], found[1][1])  # the embedding
    for ours, vllms in zip(*found, strict=True):
        assert (ours.float() - vllms.float()).norm() < 0.05 * vllms.float().norm()
    assert not torch.equal(found[0][2], found[0][3])


def test_a_compiled_model_takes_the_executor_where_a_full_graph_is_captured(loaded, monkeypatch):
    """The run before a capture is vllm's, behind one of the executor's for each number of rows."""
    config, model = loaded({})
    steps = Paged(config, model)
    eager, _ = answers(steps)
    ran: list[int] = []
    run = model.decode_steps.run
    monkeypatch.setattr(model.decode_steps, "run", lambda ids, *rest: (ran.append(len(ids)), run(ids, *rest))[1])
    model.decode_steps.eager = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    vllms, batches = answers(steps)
    assert ran == [2]
    assert all(batch.stock == list(steps.layers) for batch in batches)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured, batches = answers(steps)
    assert ran == [2] * (1 + NEW)
    assert [batch.stock for batch in batches] == [[]] * NEW
    assert torch.equal(captured, eager)
    assert not torch.equal(captured, vllms)


def test_all_steps_can_be_vllms(loaded, log):
    config, model = loaded({"decode": "vllm"})
    assert model.decode_steps is None
    assert table(log)["decode"] == ("vLLM's layers", "", "chosen")
    _, batches = answers(steps := Paged(config, model))
    assert all(batch.stock == list(steps.layers) for batch in batches)


def test_what_the_executor_does_not_serve_is_named(loaded, monkeypatch):
    from unittest import mock

    from vllm.config import CompilationMode, CUDAGraphMode

    from flashinfer_sm12x.vllm.model import reason_against

    config, model = loaded({})
    assert reason_against(config, model.model) == ""
    parallel, compilation = config.parallel_config, config.compilation_config
    attention = model.model.layers[1].attn.attn
    changes = [
        (config, "lora_config", object(), "LoRA"),
        (config, "kv_transfer_config", object(), "transfer of the KV cache"),
        (config, "aux_output_config", mock.Mock(enabled=True), "routed experts are returned"),
        (config.offload_config.uva, "cpu_offload_gb", 1, "weights are offloaded"),
        (config.offload_config.prefetch, "offload_group_size", 2, "weights are offloaded"),
        (config.attention_config, "use_trtllm_attention", False, "use_trtllm_attention is false"),
        (parallel, "enable_eplb", True, "expert load balancing (EPLB)"),
        (parallel, "pipeline_parallel_size", 2, "pipeline parallelism"),
        (parallel, "data_parallel_size", 2, "data parallelism"),
        (parallel, "decode_context_parallel_size", 2, "context parallelism"),
        (config.model_config, "dtype", torch.float16, "--dtype torch.float16"),
        (compilation, "mode", CompilationMode.STOCK_TORCH_COMPILE, "compilation mode "),
        (compilation, "mode", CompilationMode.VLLM_COMPILE, "cudagraph_mode "),
        (compilation, "cudagraph_mode", CUDAGraphMode.FULL, "cudagraph_mode "),
        (compilation, "cudagraph_mode", CUDAGraphMode.PIECEWISE, "cudagraph_mode "),
        (attention, "kv_cache_dtype", "fp8_e5m2", "KV cache fp8_e5m2"),
        (attention, "num_heads", 12, "12 query heads, 2 KV heads of 64 a rank"),
        (attention, "attn_backend", mock.Mock(get_name=lambda: "TRITON_ATTN"), "attention by TRITON_ATTN"),
        (model.model.layers[2].mlp.experts.routed_experts, "quant_method", mock.Mock(), "the experts are vLLM's"),
    ]
    for holder, name, value, reason in changes:
        with monkeypatch.context() as patch:
            patch.setitem(vars(holder), name, value) if name in vars(holder) else patch.setitem(
                holder._modules, name, value
            )
            assert reason_against(config, model.model).startswith(reason), name
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
        assert reason_against(config, model.model) == "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
    monkeypatch.setattr(compilation, "mode", CompilationMode.VLLM_COMPILE)
    for mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
        monkeypatch.setattr(compilation, "cudagraph_mode", mode)
        assert reason_against(config, model.model) == ""


def test_modules_that_cannot_be_built_leave_the_steps_to_vllm(folder, log, monkeypatch):
    from flashinfer_sm12x.vllm import model

    monkeypatch.setattr(model, "prepare", lambda _: "could not be built: nvcc was killed")
    config = engine(folder, {})
    with served.parallel_groups(config):
        assert served.load_model(config).decode_steps is None
    assert table(log)["decode"] == ("vLLM's layers", "", "could not be built: nvcc was killed")


@pytest.mark.parametrize("words", [(), ("--enable-expert-parallel",)], ids=["tensor parallel", "expert parallel"])
def test_two_ranks_decode_as_one(loaded, folder, tmp_path, words):
    from test_vllm_processes import two_ranks

    (found, vllms), _ = two_ranks("decode", folder, tmp_path / "logits.pt", {"moe": "mxfp4-a16"}, *words)
    alone, _ = answers(Paged(*loaded({"moe": "mxfp4-a16"})))
    for other in (vllms, alone):
        distance = (found.log_softmax(-1) - other.log_softmax(-1)).abs().mean()
        print("mean difference of log probabilities", float(distance))
        assert distance < 0.1
