# SPDX-License-Identifier: Apache-2.0
"""Layers that ``sm12x-quantize`` made, by vLLM's own loader on CPU tensors: whole, on each rank, loaded anew; and
folders that cannot be used."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint
import pytest
import served
import torch
from safetensors.torch import load_file, save_file
from test_vllm_models import TOKENS, attention_in_pytorch, check, logits, serve, table
from test_vllm_processes import two_ranks

from flashinfer.quantization import mx_cpu
from flashinfer.quantization.block_scaled import LAYOUTS, BlockScaledWeight, dequantize_rows
from flashinfer_sm12x.quantize import models
from flashinfer_sm12x.quantize.folder import Folder, join
from flashinfer_sm12x.quantize.manifest import MANIFEST, UNFINISHED
from flashinfer_sm12x.quantize.run import Run

__all__ = ["attention_in_pytorch"]  # a fixture

KINDS = ("qkv", "o", "lm_head")
FORMATS = ("mxfp4", "nvfp4", "mxfp6", "mxint8", "mxfp8")
MIXED = {"qkv": "nvfp4", "o": "mxfp6", "lm_head": "mxint8"}
WITHOUT_HEAD = {"qkv": "mxfp6", "o": "mxfp6", "lm_head": "bf16"}
ALL = [dict.fromkeys(KINDS, form) for form in FORMATS] + [MIXED]
# A rank of four has 96 columns of O, rows of MXFP6 with padding, and 64 rows of the vocabulary, the last of them 9.
# vLLM's gpt-oss takes no more ranks than it has heads of keys and values.
HEADS, KV_HEADS, HEAD = 12, 4, 32
FOR_RANKS = {"head_dim": HEAD, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": 256}
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
    """The weight that vLLM's layer holds for the kernel, with linear scales."""
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
    """Replace a checkpoint's tensors by a folder's layers, for the reference."""
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
            padding = weight._replace(values=weight.values[201:], scales=weight.scales[201:].contiguous())
            assert not dequantize_rows(padding, formats[kind], k).any()
            weight = weight._replace(values=weight.values[:201], scales=weight.scales[:201])
        assert same(weight, expected), (kind, number)
    check(got, checkpoint_folder, "a16", change=from_folder(folder))
    for kind, form in formats.items():
        assert table(log)[kind][:3] == ("flashinfer-sm12x", f"{form}-a16", f"chosen, {folder}")
    assert not torch.equal(got, logits(checkpoint_folder, {**A16, **formats})), "error feedback changes nothing here"


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
            k = HEADS * HEAD // ranks if kind == "o" else 160
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
        counts = [HEAD * heads // ranks for heads in (HEADS, KV_HEADS, KV_HEADS)]
        found = [
            torch.cat([m[rank * count :][:count] for m, count in zip(each, counts, strict=True)])
            for each in (values, scales)
        ]
    elif kind == "lm_head":
        mine = 256 // ranks
        found = [
            torch.nn.functional.pad(each[0], (0, 0, 0, 256 - 201))[rank * mine :][:mine] for each in (values, scales)
        ]
    else:
        codes = mx_cpu.unpack_e2m3(values[0], HEADS * HEAD) if form == "mxfp6" else values[0]
        found = [each[:, each.shape[1] // ranks * rank :][:, : each.shape[1] // ranks] for each in (codes, scales[0])]
        if form == "mxfp6":
            found[0] = mx_cpu.pack_e2m3(found[0])
    return BlockScaledWeight(found[0].view(whole[0].values.dtype), found[1], whole[0].global_scale)


def test_two_ranks_agree_with_transformers(checkpoint_folder, made, tmp_path):
    folder = made(MIXED)
    got, _ = two_ranks("prefill", checkpoint_folder, tmp_path / "logits.pt", {**A16, "dense": str(folder)})
    check(got, checkpoint_folder, "a16", change=from_folder(folder))


def test_a_kernel_of_vllms_gets_the_folders_layers_too(checkpoint_folder, made, log):
    folder = made(ALL[4])
    got = logits(checkpoint_folder, {**A16, "dense": str(folder)}, "--linear-backend", "emulation")
    check(got, checkpoint_folder, "a16", change=from_folder(folder))
    assert table(log)["o"][:3] == ("vLLM's EmulationMxfp8LinearKernel", "mxfp8-a16", f"--linear-backend, {folder}")


def test_what_the_folder_leaves_out_is_the_presets(checkpoint_folder, made, log):
    folder = made(WITHOUT_HEAD)
    config = serve(checkpoint_folder, {**A16, "preset": "spark-mxfp8", "dense": str(folder), "o": "mxfp6-a8"})
    assert config.additional_config["sm12x"]["o"] == "mxfp6-a8"
    with served.parallel_groups(config):
        model = served.load_model(config)
    rows = table(log)
    assert rows["qkv"][:3] == ("flashinfer-sm12x", "mxfp6-a16", f"chosen, {folder}")
    assert rows["o"][:3] == ("flashinfer-sm12x", "mxfp6-a8", f"chosen, {folder}")
    assert rows["lm_head"][:3] == ("flashinfer-sm12x", "mxfp8-a16", "chosen")
    assert model.lm_head.weight.dtype == torch.float8_e4m3fn


def test_the_folders_layers_have_their_numbers_on_every_stage(checkpoint_folder, made, monkeypatch):
    """Pipeline parallel: the second stage begins with the layer that vLLM numbers 1 or 2."""
    from vllm.distributed import get_pp_group

    folder = made(MIXED)
    quantized = Folder(folder)
    config = serve(checkpoint_folder, {**A16, "dense": str(folder)})
    with served.parallel_groups(config):
        monkeypatch.setattr(get_pp_group(), "world_size", 2)
        monkeypatch.setattr(get_pp_group(), "ranks", [0, 1])
        monkeypatch.setattr(get_pp_group(), "rank_in_group", 1)
        monkeypatch.setattr(get_pp_group(), "rank", 1)
        model = served.load_model(config)
        first = model.model.start_layer
        assert first in (1, 2)
        for number in range(first, 3):
            attention = model.model.layers[number].attn
            for kind, layer, k in (("qkv", attention.qkv_proj, 160), ("o", attention.o_proj, 256)):
                assert same(of_vllm(layer, MIXED[kind], k), join(quantized.weights(names_of(kind, number))))


def test_the_folders_layers_loaded_anew_after_sleep_are_the_same(checkpoint_folder, made):
    """Sleep mode, level 2, as vLLM wakes from it; a weight that has become another is refused then, too."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    config = serve(checkpoint_folder, {**A16, "dense": str(made(MIXED))})
    with served.parallel_groups(config):
        model = served.load_model(config)
        before = served.logits(config, model, TOKENS)
        held = {
            name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters() if "_proj" in name or "head" in name
        }
        for name, parameter in model.named_parameters():
            if name in held:
                parameter.data.view(torch.uint8).fill_(77)
        reload_weights(config, model, None, None, is_checkpoint_format=True)
        for name, parameter in model.named_parameters():
            if name in held:
                assert parameter.data_ptr() == held[name][0]
                assert torch.equal(parameter.view(torch.uint8), held[name][1].view(torch.uint8)), name
        assert torch.equal(served.logits(config, model, TOKENS), before)
        other = {
            f"model.layers.1.self_attn.{part}_proj": torch.zeros(rows, 160)
            for part, rows in zip("qkv", (256, 128, 128), strict=True)
        }
        weights = [(f"{name}.weight", tensor.bfloat16()) for name, tensor in other.items()]
        biases = [(f"{name}.bias", tensor.bfloat16()[:, 0]) for name, tensor in other.items()]
        with pytest.raises(ValueError, match=r"was made of another model\.layers\.1\.self_attn\.q_proj than"):
            reload_weights(config, model, iter(weights + biases), None, is_checkpoint_format=True)


def test_of_the_checkpoint_no_more_is_held_than_vllm_holds(checkpoint_folder, made, monkeypatch):
    """The tensors remembered until they are hashed are those that vLLM's loading has put aside for the layer."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from flashinfer_sm12x.vllm import dense_folder

    seen: list[Any] = []
    weight = dense_folder.Layer.weight

    def look(own: Any, layer: Any) -> Any:
        theirs = {id(arguments.arguments["loaded_weight"]) for _, arguments in get_layerwise_info(layer).loaded_weights}
        assert own.loaded
        assert {id(tensor) for tensor in own.loaded.values()} <= theirs
        found = weight(own, layer)
        assert not own.loaded
        seen.append(layer)
        return found

    monkeypatch.setattr(dense_folder.Layer, "weight", look)
    loaded(checkpoint_folder, {**A16, "dense": str(made(MIXED))})
    assert len(seen) == 7


def test_the_folder_may_be_a_name_on_the_hub(checkpoint_folder, made, monkeypatch, tmp_path):
    """Asked once for its manifest and once for all of it, although every layer asks where its folder is."""
    import huggingface_hub

    from flashinfer_sm12x.vllm import settings

    monkeypatch.chdir(tmp_path)
    settings.located.cache_clear()
    calls: list[str] = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        matched = [f for f in (MANIFEST, "lm_head.safetensors") if any(Path(f).match(p) for p in allow_patterns)]
        calls.append(f"{name} {len(matched)}")
        return str(made(MIXED))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = loaded(checkpoint_folder, {**A16, "dense": "someone/gpt-oss-dense"})
    assert same(
        of_vllm(model.model.layers[2].attn.o_proj, "mxfp6", 256), join(Folder(made(MIXED)).weights(names_of("o", 2)))
    )
    assert calls == ["someone/gpt-oss-dense 1", "someone/gpt-oss-dense 2"], "the manifest, then all"
    settings.located.cache_clear()


def test_a_tied_head_stays_bf16_beside_a_folder_that_has_one(tmp_path, log, monkeypatch):
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    config = checkpoint.write(tmp_path / "tied", 2, tie_word_embeddings=True)
    # sm12x-quantize takes gpt-oss with a head of its own: here with the same rows.
    apart = Path(shutil.copytree(tmp_path / "tied", tmp_path / "apart"))
    (apart / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(apart / "model-embedding.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, apart / "model-embedding.safetensors", {"format": "pt"})
    folder = quantize(apart, tmp_path / "folder", MIXED)
    construct = GptOssForCausalLM.__init__

    def tying(model: Any, *, vllm_config: Any, prefix: str = "") -> None:
        construct(model, vllm_config=vllm_config, prefix=prefix)
        model.lm_head = model.lm_head.tie_weights(model.model.embedding)

    monkeypatch.setattr(GptOssForCausalLM, "__init__", tying)
    model = loaded(tmp_path / "tied", {**A16, "dense": str(folder)})
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert table(log)["lm_head"] == ("vLLM's (cuBLAS)", "bf16, with the embedding", "tied to the embedding")
    assert table(log)["o"][2] == f"chosen, {folder}"


# --- Folders that cannot be used --------------------------------------------------------------------------------------


def rewrite(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))


FILE = "model.layers.1.self_attn.safetensors"


def unfinish(folder: Path) -> None:
    (folder / MANIFEST).rename(folder / UNFINISHED)


def empty(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def garbage(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"\xff\x00 {")


def a_list(folder: Path) -> None:
    (folder / MANIFEST).write_text("[1]")


def cut_manifest(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[: len(text) // 2])


def another_version(folder: Path) -> None:
    rewrite(folder, version=99)


def lose_a_file(folder: Path) -> None:
    (folder / FILE).unlink()


AT_THE_START = [
    (shutil.rmtree, "is no folder, and no name of one on the hub, which are OWNER/NAME"),
    (empty, f"is no folder of sm12x-quantize's: it has no {MANIFEST}"),
    (unfinish, "was not finished: run the same sm12x-quantize again"),
    (garbage, "is no manifest of sm12x-quantize's"),
    (a_list, "is no manifest of sm12x-quantize's"),
    (cut_manifest, "is no manifest of sm12x-quantize's"),
    (another_version, "is of another version of the fork"),
    (lose_a_file, f"lacks {FILE}, which its manifest names"),
]


def the_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    """Ours, out of what pydantic writes around it."""
    text = str(error.value)
    found = re.search(r"Value error, (.*?)(?: \[type=value_error|$)", text, re.DOTALL)
    line = found[1] if found else text
    assert "\n" not in line
    return line


@pytest.mark.parametrize(("damage", "words"), AT_THE_START, ids=[f.__name__ for f, _ in AT_THE_START])
def test_what_is_wrong_with_a_folder_is_reported_before_anything_is_loaded(checkpoint_folder, copied, damage, words):
    damage(copied)
    with pytest.raises(ValueError, match=r".") as error:
        serve(checkpoint_folder, {"dense": str(copied)})
    line = the_line(error)
    assert line.startswith(str(copied))
    assert words in line


def test_a_name_that_the_hub_does_not_know_ends_the_start(checkpoint_folder, monkeypatch):
    import huggingface_hub

    def fail(name: str, **_: Any) -> str:
        raise OSError("404 Client Error\n\nRepository Not Found")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r".") as error:
        serve(checkpoint_folder, {"dense": "someone/nothing"})
    assert the_line(error) == "someone/nothing could not be downloaded from the hub: 404 Client Error"


def test_a_folder_of_fewer_layers_and_a_dummy_checkpoint_end_the_start(checkpoint_folder, made, tmp_path):
    checkpoint.write(tmp_path / "two", 1, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"has no qkv of layer 2, and the model has 3 layers: it was made of another"):
        serve(checkpoint_folder, {"dense": str(made(MIXED, tmp_path / "two"))})
    with pytest.raises(ValueError, match=r"--load-format dummy loads no checkpoint.*leave 'dense' out"):
        serve(checkpoint_folder, {"dense": str(made(MIXED))}, "--load-format", "dummy")


def truncate(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-1])


def flip(folder: Path) -> None:
    data = bytearray((folder / FILE).read_bytes())
    data[-1] ^= 1
    (folder / FILE).write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_file_is_never_served(checkpoint_folder, copied, damage):
    damage(copied)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(copied / FILE))} is damaged: its SHA-256 is not"):
        loaded(checkpoint_folder, {"dense": str(copied)})


def take_out(folder: Path, part: str, number: int = 1) -> None:
    """Remove a module as if the folder had been made without it: from the manifest, from its file, with a right
    hash."""
    name, file = f"model.layers.{number}.self_attn.{part}", f"model.layers.{number}.self_attn.safetensors"
    tensors = {key: each for key, each in load_file(folder / file).items() if not key.startswith(f"{name}.")}
    save_file(tensors, folder / file)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["modules"][name]
    files = {**manifest["files"], file: hashlib.sha256((folder / file).read_bytes()).hexdigest()}
    rewrite(folder, modules=manifest["modules"], files=files)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_folder_without_one_part_of_a_layer_is_refused_and_not_filled_up(
    checkpoint_folder, copied, monkeypatch, part
):
    """Before anything is loaded; and again by the layer, and by what vLLM loads into it, for each rank."""
    from flashinfer_sm12x.vllm import dense_folder

    take_out(copied, part)
    kind = (
        "has no o of layer 1, and the model"
        if part == "o_proj"
        else r"has [\w., ]+ for qkv of one layer, and its parts"
    )
    with pytest.raises(ValueError, match=rf"{re.escape(str(copied))} {kind}"):
        serve(checkpoint_folder, {"dense": str(copied)})
    monkeypatch.setattr(dense_folder, "require", lambda *_: None)
    kind = r"has no o for model\.layers\.1\." if part == "o_proj" else kind
    with pytest.raises(ValueError, match=rf"{re.escape(str(copied))} {kind}"):
        loaded(checkpoint_folder, {**A16, "dense": str(copied)})
    if part != "o_proj":
        monkeypatch.setattr(dense_folder, "_check_parts", lambda *_: None)
        shard = part[0]
        with pytest.raises(
            ValueError, match=rf"^{re.escape(str(copied))} has .*, and the checkpoint has {shard} of that"
        ):
            loaded(checkpoint_folder, {**A16, "dense": str(copied)})


def test_parts_of_other_sizes_or_twice_are_refused_before_anything_is_loaded(checkpoint_folder, copied):
    manifest = json.loads((copied / MANIFEST).read_text())
    q = manifest["modules"]["model.layers.1.self_attn.q_proj"]
    rewrite(copied, modules={**manifest["modules"], "draft.layers.1.self_attn.q_proj": q})
    with pytest.raises(ValueError, match=r"has [\w., ]+draft\.layers\.1\.self_attn\.q_proj for qkv of one layer"):
        serve(checkpoint_folder, {"dense": str(copied)})
    rewrite(copied, modules={**manifest["modules"], "model.layers.1.self_attn.k_proj": {**q, "k": 96}})
    with pytest.raises(ValueError, match=r"the parts of one layer have different widths \(.*k_proj 96"):
        serve(checkpoint_folder, {"dense": str(copied)})


def test_parts_with_several_global_scales_are_refused(checkpoint_folder, copied):
    """A server multiplies the three by one."""
    tensors = load_file(copied / FILE)
    tensors["model.layers.1.self_attn.k_proj.weight_global_scale"] *= 2
    save_file(tensors, copied / FILE)
    files = {**Folder(copied).manifest.files, FILE: hashlib.sha256((copied / FILE).read_bytes()).hexdigest()}
    rewrite(copied, files=files)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(copied))}: the parts of one matrix have several global scales"
    ):
        loaded(checkpoint_folder, {**A16, "dense": str(copied)})


@pytest.mark.parametrize("seed", range(4))
def test_of_a_checkpoint_the_files_are_read_that_vllm_reads(tmp_path, seed):
    """In its order, for folders that are drawn; where vLLM refuses one, so does the reader."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    from flashinfer_sm12x.quantize import checkpoint as reader

    print("seed", seed)
    draw = random.Random(seed)
    names = ["model", "model-2", "model-10", "model-00001-of-00002", "stray", ".hidden", "consolidated.00", "sub/model"]
    names += ["sub/consolidated"]
    refused = 0
    for number in range(40):
        folder = tmp_path / f"{number}"
        (folder / "sub").mkdir(parents=True)
        there = [name for name in names if draw.random() < (0.15 if "consol" in name else 0.5)]
        for place, name in enumerate(there):
            save_file({"x": torch.full((1,), place)}, folder / f"{name}.safetensors")
        for index in ("model.safetensors.index.json", "consolidated.safetensors.index.json"):
            if draw.random() < 0.5:
                used = draw.sample(names[:5] if index[0] == "m" else ["consolidated.00"], 1) + draw.sample(
                    there, min(1, len(there))
                )
                weights = {f"x{at}": f"{name}.safetensors" for at, name in enumerate(used)}
                (folder / index).write_text(json.dumps({"weight_map": weights}))
        try:
            _, files, safetensors, _ = DefaultModelLoader(LoadConfig())._prepare_weights(
                str(folder), None, None, True, None
            )
            assert safetensors
            expected = [tensor for _, tensor in safetensors_weights_iterator(files, False)]
        except (FileNotFoundError, RuntimeError):
            expected = None
        try:
            got = reader.weight_files(folder)
            assert expected is not None, there
            assert {path.name for path in got} == {Path(file).name for file in files}
            assert [load_file(path)["x"] for path in got] == expected
        except ValueError:
            assert expected is None, there
            refused += 1
    assert 0 < refused < 40


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.v_proj", "model.layers.0.self_attn.o_proj", "lm_head"])
def test_a_checkpoint_that_differs_in_one_bit_is_refused(checkpoint_folder, made, tmp_path, name):
    shutil.copytree(checkpoint_folder, tmp_path / "other")
    for path in (tmp_path / "other").glob("*.safetensors"):
        tensors = load_file(path)
        if f"{name}.weight" in tensors:
            tensors[f"{name}.weight"].view(torch.uint8)[-1, -2] ^= 1
            save_file(tensors, path, {"format": "pt"})
    message = (
        rf"^{re.escape(str(made(MIXED)))} was made of another {re.escape(name)} than this checkpoint's: quantize this"
    )
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path / "other", {"dense": str(made(MIXED))})


# --- Others that read the folder --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "name"),
    [("nvfp4", "nvfp4-pack-quantized"), ("mxfp4", "mxfp4-pack-quantized"), ("mxfp8", "mxfp8-quantized")],
)
def test_compressed_tensors_reads_the_same_weights(made, form, name):
    from compressed_tensors.compressors import BaseCompressor

    folder = made(dict.fromkeys(KINDS, form))
    quantized = Folder(folder)
    compressor = BaseCompressor.get_value_from_registry(name)
    for module, about in quantized.manifest.modules.items():
        tensors = load_file(folder / about.file)
        own = {
            key.removeprefix(f"{module}."): tensor for key, tensor in tensors.items() if key.startswith(f"{module}.")
        }
        assert set(own) <= set(compressor.compression_param_names(None))
        theirs = compressor.decompress(own, None)["weight"]
        ours = quantized.dequantized([module])
        assert ours.count_nonzero() > ours.numel() / 2
        assert torch.equal(theirs.float(), ours), module
