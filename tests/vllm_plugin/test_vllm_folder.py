# SPDX-License-Identifier: Apache-2.0
"""Layers that ``sm12x-quantize`` made, by vLLM's own loader on CPU tensors: whole, on each rank, loaded anew; and folders
that cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint
import pytest
import served
import torch
from test_vllm_models import TOKENS, attention_in_pytorch, check, logits, serve, table

from flashinfer.quantization import mx_cpu
from flashinfer.quantization.block_scaled import LAYOUTS, BlockScaledWeight, dequantize_rows
from flashinfer.sm12x.accuracy import models
from flashinfer.sm12x.quantize.folder import Folder, join
from flashinfer.sm12x.quantize.run import Run

__all__ = ["attention_in_pytorch"]  # a fixture

KINDS = ("qkv", "o", "lm_head")
FORMATS = ("mxfp4", "nvfp4", "mxfp6", "mxint8", "mxfp8")
MIXED = {"qkv": "nvfp4", "o": "mxfp6", "lm_head": "mxint8"}
WITHOUT_HEAD = {"qkv": "mxfp6", "o": "mxfp6", "lm_head": "bf16"}
ALL = [dict.fromkeys(KINDS, form) for form in FORMATS] + [MIXED]
# A rank of four has 3 heads of 12 and a copy of one of 2 heads of keys and values, and 96 columns of O: rows of MXFP6 with
# padding. It has 64 rows of the vocabulary, the last of them 9.
FOR_RANKS = {"head_dim": 32, "num_attention_heads": 12, "intermediate_size": 256}
A16 = {"moe": "mxfp4-a16"}


def quantize(model: Path, target: Path, formats: dict[str, str]) -> Path:
    generator = torch.Generator().manual_seed(3)
    print("seed", 3)
    windows = torch.randint(checkpoint.CONFIG["vocab_size"], (4, 32), generator=generator).tolist()
    run = Run(models.load(model, torch.bfloat16, "cpu"), target, formats, windows)
    run.fill()
    run.finish({})
    return target


Make = Callable[..., Path]


@pytest.fixture(scope="module")
def made(checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The folder of formats, of the session's checkpoint or another; made once."""
    there: dict[str, Path] = {}

    def make(formats: dict[str, str], model: Path = checkpoint_folder) -> Path:
        key = f"{formats} {model}"
        if key not in there:
            there[key] = quantize(model, tmp_path_factory.mktemp("dense") / "folder", formats)
        return there[key]

    return make


@pytest.fixture(scope="module")
def checkpoint_for_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint.write(folder, 4, **FOR_RANKS)
    return folder


@pytest.fixture
def copied(made: Make, tmp_path: Path) -> Path:
    """A folder to damage."""
    return Path(shutil.copytree(made(MIXED), tmp_path / "copy"))


def loaded(folder: Path, chosen: dict[str, Any], *words: str) -> Any:
    config = serve(folder, chosen, *words)
    with served.parallel_groups(config):
        return served.load_model(config)


def names_of(kind: str, number: int) -> list[str]:
    """The checkpoint's modules of a layer."""
    if kind == "lm_head":
        return ["lm_head"]
    parts = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",)}[kind]
    return [f"model.layers.{number}.self_attn.{part}" for part in parts]


def layers(model: Any) -> Iterator[tuple[str, int, Any]]:
    """Kind, number and vLLM's layer."""
    for number, layer in enumerate(model.model.layers):
        yield "qkv", number, layer.attn.qkv_proj
        yield "o", number, layer.attn.o_proj
    yield "lm_head", 0, model.lm_head


def of_vllm(layer: Any, form: str, k: int) -> BlockScaledWeight:
    """What vLLM's layer holds for the kernel, with linear scales."""
    scales = mx_cpu.unswizzle_128x4(layer.weight_scale, len(layer.weight), k // LAYOUTS[form].scales.block)
    return BlockScaledWeight(layer.weight.data, scales, layer.weight_global_scale)


def same(got: BlockScaledWeight, expected: BlockScaledWeight) -> bool:
    assert got.values.dtype == expected.values.dtype
    factors = [each.global_scale for each in (got, expected)]
    return (
        torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))
        and torch.equal(got.scales, expected.scales)
        and (factors == [None, None] or torch.equal(*factors))
    )


def from_folder(folder: Path) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """What a folder's layers are in the reference."""
    quantized = Folder(folder)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        module = name.removesuffix(".weight")
        return quantized.dequantized([module]).to(tensor) if module in quantized.manifest.modules else tensor

    return change


@pytest.mark.parametrize("formats", ALL, ids=lambda formats: "-".join(dict.fromkeys(formats.values())))
def test_layers_are_the_folders_and_not_quantized_again(checkpoint_folder, made, log, formats):
    folder = made(formats)
    config = serve(checkpoint_folder, {**A16, "dense": str(folder)})
    with served.parallel_groups(config):
        model = served.load_model(config)
        got = served.logits(config, model, TOKENS)
    quantized = Folder(folder)
    for kind, number, layer in layers(model):
        expected = join(quantized.weights(names_of(kind, number)))
        k = quantized.manifest.modules[names_of(kind, number)[0]].k
        weight = of_vllm(layer, formats[kind], k)
        if kind == "lm_head":  # vLLM's vocabulary is a multiple of 64
            padding = weight._replace(values=weight.values[201:], scales=weight.scales[201:])
            assert not dequantize_rows(padding, formats[kind], k).any()
            weight = weight._replace(values=weight.values[:201], scales=weight.scales[:201])
        assert same(weight, expected), (kind, number)
    check(got, checkpoint_folder, "a16", change=from_folder(folder))
    assert not torch.equal(got, logits(checkpoint_folder, {**A16, **formats})), "error feedback changes nothing here"
    for kind, form in formats.items():
        assert table(log)[kind][:3] == ("flashinfer-sm12x", f"{form}-a16", f"chosen, {folder}")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("formats", ALL, ids=lambda formats: "-".join(dict.fromkeys(formats.values())))
def test_a_rank_has_its_part_of_the_folder(checkpoint_for_ranks, made, monkeypatch, formats, ranks):
    """vLLM's layers are told another rank, one after the other: loading takes no communication."""
    from vllm.distributed import get_tp_group

    folder = made(formats, checkpoint_for_ranks)
    quantized = Folder(folder)
    parts: dict[str, list[BlockScaledWeight]] = {}
    for rank in range(ranks):
        config = serve(checkpoint_for_ranks, {**A16, "dense": str(folder)})
        with served.parallel_groups(config):
            monkeypatch.setattr(get_tp_group(), "world_size", ranks)
            monkeypatch.setattr(get_tp_group(), "rank_in_group", rank)
            model = served.load_model(config)
        for kind, number, layer in layers(model):
            k = 12 * 32 // ranks if kind == "o" else 160
            parts.setdefault(f"{kind} {number}", []).append(of_vllm(layer, formats[kind], k))
    for kind, number, _ in layers(model):
        form = formats[kind]
        own = parts[f"{kind} {number}"]
        whole = quantized.weights(names_of(kind, number))
        for rank, part in enumerate(own):
            assert same(part, cut(kind, form, whole, rank, ranks)), (kind, number, rank)


def cut(kind: str, form: str, whole: list[BlockScaledWeight], rank: int, ranks: int) -> BlockScaledWeight:
    """A rank's part, by slices."""
    values = [each.values.view(torch.uint8) for each in whole]
    scales = [each.scales for each in whole]
    if kind == "qkv":
        rows = [slice(rank * 12 * 32 // ranks, (rank + 1) * 12 * 32 // ranks)]
        head = rank * 2 // ranks  # of two for keys and values
        rows += [slice(32 * head, 32 * (head + 1))] * 2
        found = [torch.cat([m[r] for m, r in zip(each, rows, strict=True)]) for each in (values, scales)]
    elif kind == "lm_head":
        mine = 256 // ranks
        found = [
            torch.nn.functional.pad(each[0], (0, 0, 0, 256 - 201))[rank * mine :][:mine] for each in (values, scales)
        ]
    else:
        k = 12 * 32
        codes = mx_cpu.unpack_e2m3(values[0], k) if form == "mxfp6" else values[0]
        found = [each[:, each.shape[1] // ranks * rank :][:, : each.shape[1] // ranks] for each in (codes, scales[0])]
        if form == "mxfp6":
            found[0] = mx_cpu.pack_e2m3(found[0])
    return BlockScaledWeight(found[0].view(whole[0].values.dtype), found[1], whole[0].global_scale)
