# SPDX-License-Identifier: Apache-2.0
"""``sm12x-quantize``: the folder that it writes, runs that are interrupted, and what it refuses."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from toy_llama import llama, some_windows

from flashinfer.__main__ import _group
from flashinfer.quantization.block_scaled import WEIGHT_FORMATS, dequantize_rows, quantize_rows
from flashinfer.quantization.error_feedback import quantize_with_feedback
from flashinfer_sm12x.quantize import command, folder, manifest, measure, models, run, texts
from flashinfer_sm12x.quantize.choice import Choice
from flashinfer_sm12x.quantize.folder import Folder
from flashinfer_sm12x.quantize.manifest import MANIFEST, FolderError
from flashinfer_sm12x.quantize.run import QUANTIZED, ROUNDED, QuantizeError, Run, gram

MIXED = {"qkv": "mxfp6", "o": "nvfp4", "lm_head": "mxint8"}
FILES = ["lm_head.safetensors", *(f"model.layers.{i}.self_attn.safetensors" for i in range(2))]


def quantized(to: Path, formats: dict[str, str] = MIXED, **changes: Any) -> models.Subject:
    """A toy, and its finished folder."""
    subject = llama(**changes)
    made = Run(subject, to, formats, some_windows())
    made.fill()
    made.finish({})
    return subject


def bytes_of(path: Path) -> dict[str, str]:
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in path.glob("*.safetensors")}


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_layers_are_quantized_for_the_inputs_they_will_have(tmp_path: Path, form: Any) -> None:
    """Each from what the quantized layers before it give, by their definition; nothing else of the model moves."""
    subject = quantized(tmp_path / "f", dict.fromkeys(MIXED, form))
    found = Folder(tmp_path / "f")
    ids, real = measure.batch(some_windows(), torch.device("cpu"))
    original = llama().model
    for index, layer in enumerate(original.model.layers):
        attention = layer.self_attn
        seen: dict[str, torch.Tensor] = {}
        for name in ("q", "o"):
            module = getattr(attention, f"{name}_proj")
            module.register_forward_pre_hook(lambda _, given, name=name, seen=seen: seen.__setitem__(name, given[0]))
        for names in (["q", "k", "v"], ["o"]):
            with torch.inference_mode():
                original.model(ids, use_cache=False)
            layers = [getattr(attention, f"{name}_proj") for name in names]
            weight = torch.cat([each.weight.data for each in layers])
            expected = quantize_with_feedback(weight, gram(seen[names[0]][real]), form)
            parts = [f"model.layers.{index}.self_attn.{name}_proj" for name in names]
            written = folder.join(found.weights(parts))
            assert torch.equal(written.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(written.scales, expected.scales)
            assert written.global_scale == expected.global_scale
            rows = dequantize_rows(expected, form, weight.shape[1])
            for each, part in zip(layers, rows.split([each.out_features for each in layers]), strict=True):
                each.weight.data = part
    for (name, mine), theirs in zip(original.named_parameters(), subject.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    with torch.inference_mode():
        hidden = original.model(ids, use_cache=False).last_hidden_state
    head = quantize_with_feedback(original.lm_head.weight.data, gram(hidden[real]), form)
    assert torch.equal(found.dequantized(["lm_head"]), dequantize_rows(head, form, 96))


def test_what_fills_rows_up_is_no_input(tmp_path: Path) -> None:
    """Windows of several lengths stand in one batch."""
    seen = []
    subject = llama()
    subject.model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    made = Run(subject, tmp_path / "f", MIXED, some_windows())
    given = []
    made.quantize = lambda layers, inputs: given.append(inputs) or Run.quantize(made, layers, inputs)  # type: ignore[method-assign]
    made.fill()
    alone = []
    for window in some_windows():
        llama_again = llama()
        llama_again.model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, x: alone.append(x[0][0]))
        llama_again.model.model(torch.tensor([window]), use_cache=False)
    torch.testing.assert_close(given[0], torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert seen


@pytest.mark.parametrize("formats", [MIXED, {"qkv": "bf16", "o": "mxfp4", "lm_head": "bf16"}])
def test_what_the_folder_reports_of_itself(tmp_path: Path, formats: dict[str, str]) -> None:
    quantized(tmp_path / "f", formats)
    found = Folder(tmp_path / "f")
    kept = {kind: name for kind, name in formats.items() if name != "bf16"}
    assert found.formats == kept
    weights = {
        name: p for name, p in llama(tie_word_embeddings=True).model.state_dict().items() if name.endswith("weight")
    }
    ending = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "lm_head": ("lm_head",)}
    expected = {
        name.removesuffix(".weight"): weight
        for name, weight in weights.items()
        if name.removesuffix(".weight").endswith(sum((ending[kind] for kind in kept), ()))
    }
    assert found.manifest.modules.keys() == expected.keys()
    for name, module in found.manifest.modules.items():
        assert (module.n, module.k) == expected[name].shape
        assert module.source == folder.weight_hash(expected[name]), "of the weight before it was quantized"
    files = {path.name for path in (tmp_path / "f").iterdir()}
    assert files == {MANIFEST, *found.manifest.files} == {MANIFEST, *(m.file for m in found.manifest.modules.values())}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("files", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, late: bool
) -> None:
    """Killed before or behind a file's writing, when the manifest does not know of it."""
    quantized(tmp_path / "whole")
    written: list[str] = []

    def until(path: Path, data: bytes) -> None:
        if path.suffix == ".safetensors":
            if len(written) == files and not late:
                raise Killed
            manifest.replace_bytes(path, data)
            written.append(path.name)
            if len(written) == files + 1 and late:
                raise Killed
            return
        manifest.replace_bytes(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(run, "replace_bytes", until)
        with pytest.raises(Killed):
            quantized(tmp_path / "f")
    with pytest.raises(FolderError, match=r"f was not finished: run the same sm12x-quantize again, it goes on$"):
        Folder(tmp_path / "f")
    made: list[str] = []
    monkeypatch.setattr(run, "quantize_with_feedback", lambda *a: made.append("") or quantize_with_feedback(*a))
    quantized(tmp_path / "f")
    assert len(made) == 5 - [0, 2, 4][files], "what was there is read, not made again"
    assert bytes_of(tmp_path / "f") == bytes_of(tmp_path / "whole")
    mine, whole = (Folder(tmp_path / name).manifest for name in ("f", "whole"))
    assert mine == whole


def begun(to: Path, files: int = 1) -> None:
    """A folder that a run has left with so many files."""
    made = Run(llama(), to, MIXED, some_windows())
    write = made.write

    def some(file: str, found: Any) -> None:
        if made.done == files:
            raise Killed
        write(file, found)

    made.write = some  # type: ignore[method-assign]
    with pytest.raises(Killed):
        made.fill()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"formats": {**MIXED, "o": "mxfp4"}},
            r"formats was qkv mxfp6, o nvfp4, lm_head mxint8, is qkv mxfp6, o mxfp4, lm_head mxint8",
        ),
        ({"windows": some_windows(5)}, r"tokens_sha256 was \w+, is \w+"),
        ({"name": "another"}, r"model was toy, is another"),
    ],
)
def test_a_folder_is_not_finished_by_another_run(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    begun(tmp_path / "f")
    before = bytes_of(tmp_path / "f")
    subject = llama()
    subject.name = changes.get("name", subject.name)
    with pytest.raises(
        FolderError, match=rf"f was begun by another run \({words}\): choose another folder, or remove it"
    ):
        Run(subject, tmp_path / "f", changes.get("formats", MIXED), changes.get("windows", some_windows()))
    assert bytes_of(tmp_path / "f") == before


def test_a_folder_is_not_finished_with_other_weights(tmp_path: Path) -> None:
    begun(tmp_path / "f")
    subject = llama()
    weight = subject.model.model.layers[0].self_attn.v_proj.weight
    weight.data[3, 7] *= 2
    with pytest.raises(FolderError, match=r"begun with another weight of model\.layers\.0\.self_attn\.v_proj: choose"):
        Run(subject, tmp_path / "f", MIXED, some_windows()).fill()


def test_folders_that_hold_something_are_left_alone(tmp_path: Path) -> None:
    quantized(tmp_path / "done")
    with pytest.raises(FolderError, match=r"done is finished: choose another folder, or remove it"):
        Run(llama(), tmp_path / "done", MIXED, some_windows())
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(FolderError, match=r"home is not empty, and was not begun by sm12x-quantize: choose another"):
        Run(llama(), tmp_path / "home", MIXED, some_windows())
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    subject = llama()
    subject.model.model.layers[1].self_attn.k_proj.weight.data[1, 2] = value
    layers = ", ".join(f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
    with pytest.raises(QuantizeError, match=rf"^toy: {layers}: weight holds infinities or NaN$"):
        Run(subject, tmp_path / "f", MIXED, some_windows()).fill()
    subject = llama()
    subject.model.model.layers[0].mlp.down_proj.weight.data[1, 2] = value
    with pytest.raises(QuantizeError, match=rf"^toy: {layers}: the layer's inputs hold infinities or NaN$"):
        Run(subject, tmp_path / "g", MIXED, some_windows()).fill()


def truncate(path: Path) -> None:
    file = path / FILES[1]
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    file = path / FILES[1]
    data = bytearray(file.read_bytes())
    data[-77] ^= 16
    file.write_bytes(data)


def remove_a_file(path: Path) -> None:
    (path / FILES[1]).unlink()


def of_another_layer(path: Path) -> None:
    (path / FILES[1]).write_bytes((path / FILES[2]).read_bytes())


def changed_manifest(path: Path, change: Any) -> None:
    message = json.loads((path / MANIFEST).read_text())
    change(message)
    (path / MANIFEST).write_text(json.dumps(message))


Q, K = (f"model.layers.0.self_attn.{part}_proj" for part in "qk")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to copy."""
    folder = tmp_path_factory.mktemp("finished") / "f"
    quantized(folder)
    return folder


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncate, r"is damaged: its SHA-256 is not the manifest's; copy or quantize it again$"),
        (flip_a_bit, r"is damaged: "),
        (of_another_layer, r"is damaged: "),
        (remove_a_file, r"cannot be read: No such file or directory; the manifest names it$"),
        (lambda path: (path / MANIFEST).unlink(), r"f is no folder of sm12x-quantize's: it has no sm12x_dense\.json$"),
        (lambda path: (path / MANIFEST).write_text("{"), r"is no manifest of .*: it is not JSON \("),
        (lambda path: (path / MANIFEST).write_text("[]"), r"is no manifest of .* and no JSON object"),
        (lambda path: (path / MANIFEST).write_bytes(b"\xff"), r"is no manifest of .*: it is not JSON \("),
        (
            lambda path: changed_manifest(path, lambda message: message.update(version=2)),
            r"is of another version of the fork",
        ),
        (lambda path: changed_manifest(path, lambda message: message.pop("files")), r"is no manifest"),
        (lambda path: changed_manifest(path, lambda message: message["formats"].update(qkv="int3")), r"is no manifest"),
        (
            lambda path: changed_manifest(path, lambda message: message["formats"].update(qkv="nvfp4_rescored")),
            r"is no manifest",
        ),
        (
            lambda path: changed_manifest(path, lambda message: message["formats"].update(moe="mxfp4")),
            r"is no manifest",
        ),
        (lambda path: changed_manifest(path, lambda message: message["files"].pop(FILES[1])), r"is no manifest"),
        (
            lambda path: changed_manifest(path, lambda message: message["modules"].pop(Q)),
            rf"has no {Q}: it was made of another",
        ),
        (
            lambda path: changed_manifest(path, lambda message: message["formats"].update(qkv="nvfp4")),
            r"has no tensor 'model\.layers\.0\.self_attn\.k_proj\.weight_global_scale'",
        ),
        (
            lambda path: changed_manifest(path, lambda message: message["modules"][Q].update(n=95)),
            rf"{Q}\.weight_packed is torch\.uint8 \[96, 80\]; of mxfp6 \[95, 96\] it must be torch\.uint8 \[95, 80\]",
        ),
        (
            lambda path: changed_manifest(path, lambda message: message["formats"].update(qkv="mxfp4")),
            rf"{Q}\.weight_packed is torch\.uint8 \[96, 80\]; of mxfp4 \[96, 96\] it must be torch\.uint8 \[96, 48\]",
        ),
    ],
)
def test_damage_is_named_before_anything_is_served(finished: Path, tmp_path: Path, spoil: Any, words: str) -> None:
    shutil.copytree(finished, tmp_path / "f")
    Folder(tmp_path / "f").weights([Q, K])
    spoil(tmp_path / "f")
    with pytest.raises(FolderError, match=words):
        Folder(tmp_path / "f").weights([Q, K])


def test_an_interrupted_runs_damaged_file_is_not_taken(tmp_path: Path) -> None:
    begun(tmp_path / "f")
    (tmp_path / "f" / FILES[1]).write_bytes(b"")
    with pytest.raises(FolderError, match=r"is damaged: "):
        Run(llama(), tmp_path / "f", MIXED, some_windows()).fill()


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_tensors_are_compressed_tensors_names_and_types(tmp_path: Path, form: str) -> None:
    quantized(tmp_path / "f", dict.fromkeys(MIXED, form))
    tensors = load_file(tmp_path / "f" / FILES[1])
    packed = {"mxfp4": 48, "nvfp4": 48, "mxfp6": 80}.get(form)
    values = tensors[f"{Q}.weight{'_packed' if packed else ''}"]
    assert values.shape == (96, packed or 96)
    dtype = {"mxfp8": torch.float8_e4m3fn, "mxint8": torch.int8}.get(form, torch.uint8)
    scale_dtype, block = (torch.float8_e4m3fn, 16) if form == "nvfp4" else (torch.uint8, 32)
    assert values.dtype is dtype
    assert tensors[f"{Q}.weight_scale"].dtype is scale_dtype
    assert tensors[f"{Q}.weight_scale"].shape == (96, 96 // block)
    factors = {name: float(each) for name, each in tensors.items() if name.endswith("weight_global_scale")}
    assert len(factors) == 4 * (form == "nvfp4")
    if factors:  # what values are divided by; of Q, K and V one
        whole = torch.cat([getattr(llama().model.model.layers[0].self_attn, f"{name}_proj").weight for name in "qkv"])
        assert {1 / v for name, v in factors.items() if "o_proj" not in name} == {
            float(quantize_rows(whole, "nvfp4").global_scale or 0)
        }


def test_a_rescored_head_is_stored_as_a_coarse_one_is(tmp_path: Path) -> None:
    """The same file, byte for byte; the manifest alone tells that it is rescored."""
    coarse, rescored = ({"qkv": "bf16", "o": "bf16", "lm_head": name} for name in ("nvfp4", "nvfp4_rescored"))
    quantized(tmp_path / "coarse", coarse)
    quantized(tmp_path / "rescored", rescored)
    assert bytes_of(tmp_path / "rescored") == bytes_of(tmp_path / "coarse")
    found = Folder(tmp_path / "rescored")
    assert found.formats == {"lm_head": "nvfp4_rescored"}
    assert found.manifest.formats_summary == "lm_head nvfp4_rescored"
    weights, expected = (Folder(tmp_path / name).weights(["lm_head"])[0] for name in ("rescored", "coarse"))
    assert torch.equal(weights.values, expected.values)
    assert torch.equal(weights.scales, expected.scales)
    assert weights.global_scale == expected.global_scale
    assert torch.equal(found.dequantized(["lm_head"]), Folder(tmp_path / "coarse").dequantized(["lm_head"]))
    found.require_source("lm_head", llama().model.lm_head.weight)  # the fine rows are the checkpoint's own
    with pytest.raises(FolderError, match=r"was made of another lm_head than this checkpoint's"):
        found.require_source("lm_head", llama().model.lm_head.weight * 2)
    (tmp_path / "rescored" / MANIFEST).rename(tmp_path / "rescored" / manifest.UNFINISHED)
    with pytest.raises(FolderError, match=r"was begun by another run \(formats was lm_head nvfp4_rescored, is lm_head"):
        Run(llama(), tmp_path / "rescored", coarse, some_windows())


def test_a_rescored_head_that_was_interrupted_is_read_again(tmp_path: Path) -> None:
    formats = {"qkv": "mxfp6", "o": "mxfp6", "lm_head": "nvfp4_rescored"}
    for _ in range(2):
        made = Run(llama(), tmp_path / "f", formats, some_windows())
        made.fill()
    assert made.done == 3
    made.finish({})
    assert Folder(tmp_path / "f").dequantized(["lm_head"]).shape == (160, 96)


@pytest.mark.parametrize(
    "formats", [MIXED, {"qkv": "bf16", "o": "mxfp6", "lm_head": "nvfp4_rescored"}], ids=["mixed", "rescored"]
)
def test_losses_are_those_of_the_instrument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: dict[str, str]
) -> None:
    """The losses of rounded weights, and of the folder, are those that the benchmark measures of a fresh model."""
    few = measure.rescore  # of 160 rows all would be rescored
    monkeypatch.setattr(measure, "rescore", lambda coarse, fine, rows: few(coarse, fine, groups=4, rows=rows // 8))
    windows = some_windows(9, (40, 40))
    made = Run(llama(), tmp_path / "f", formats, some_windows())
    found = run.with_losses(made, windows)
    made.finish({})
    rounded, of_folder = Choice(**formats), Choice(**formats, folder=str(tmp_path / "f"))
    coarse = Choice(**{**formats, "lm_head": "nvfp4"})
    if formats["lm_head"] == "nvfp4_rescored":
        plain = measure.scores(llama(), windows, [coarse])[coarse]
        assert found[ROUNDED].kl.mean() < 0.75 * plain.kl.mean()
    expected = measure.scores(llama(), windows, [rounded, of_folder])
    for name, choice in ((ROUNDED, rounded), (QUANTIZED, of_folder)):
        torch.testing.assert_close(found[name].kl, expected[choice].kl, rtol=1e-3, atol=1e-6)
        assert found[name].kl.mean() > 1e-4
    assert not torch.allclose(found[ROUNDED].kl, found[QUANTIZED].kl)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> models.Subject:
    """The model that the command opens."""
    subject = llama()
    monkeypatch.setattr(command, "opened", lambda request: copy.deepcopy(subject))
    return subject


def quantize(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_group, ["sm12x-quantize", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_the_command_tells_loss_size_and_how_to_serve(tmp_path: Path, toy: models.Subject) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Something to read, and some more of it. " * 9)
    out = tmp_path / "f"
    status, output = quantize("toy", "--out", str(out), "--text", str(text), "--lm-head", "nvfp4", "--device", "cpu")
    assert status == 0, output
    assert f"toy: 360 tokens of {text}, layers of K up to 96" in output
    assert "fewer than" not in output
    losses = [line.split() for line in output.splitlines() if line.startswith("  ")]
    assert [line[:3] for line in losses] == [["rounded", "to", "nearest"], ["with", "error", "feedback"]]
    kl = Folder(out).manifest.told["kl"]
    assert [line[3] for line in losses] == [f"{kl[name]['value']:.4f}" for name in (ROUNDED, QUANTIZED)]
    assert "qkv mxfp6, o mxfp6, lm_head nvfp4; 0.00 GB, " in output
    assert "toy is no gpt-oss in MXFP4, whose folders alone vLLM's plugin serves" in output
    assert "vllm serve" not in output
    assert quantize("toy", "--out", str(out), "--device", "cpu")[0] == 1
    few = quantize("toy", "--out", str(tmp_path / "g"), "--text", str(text), "--tokens", "280", "--device", "cpu")
    assert "fewer than 288 tokens: more of them, by --text and --tokens, lose less" in few[1]


def test_the_folder_of_a_gpt_oss_is_served_with_readmes_words(tmp_path: Path, toy: models.Subject) -> None:
    request = command.Request("openai/gpt-oss-20b", tmp_path / "f", {}, None, None, "cpu")
    toy.model.a8 = False  # as packed experts have it
    dense = f"""--additional-config '{{"sm12x": {{"dense": "{tmp_path / "f"}"}}}}'"""
    wanted = f"vllm serve openai/gpt-oss-20b --host 127.0.0.1 --gpu-memory-utilization 0.7 {dense}"
    assert command.how_to_serve(request, toy) == f"serve it: {wanted}"
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert "vllm serve openai/gpt-oss-120b --host 127.0.0.1 --gpu-memory-utilization 0.7 --additional-config" in readme


def test_by_default_the_head_is_rescored(tmp_path: Path, toy: models.Subject) -> None:
    status, output = quantize("toy", "--out", str(tmp_path / "f"), "--device", "cpu")
    assert status == 0, output
    assert "qkv mxfp6, o mxfp6, lm_head nvfp4_rescored; 0.00 GB, " in output
    assert Folder(tmp_path / "f").formats == {"qkv": "mxfp6", "o": "mxfp6", "lm_head": "nvfp4_rescored"}


def test_by_default_four_tokens_are_read_for_each_input(tmp_path: Path, toy: models.Subject) -> None:
    status, output = quantize("toy", "--out", str(tmp_path / "f"), "--device", "cpu")
    assert status == 0, output
    assert "toy: 384 tokens of the texts that come along, layers of K up to 96" in output
    assert Folder(tmp_path / "f").manifest.run["tokens"] == 384


def test_the_texts_to_look_at_suffice_for_gpt_oss_and_share_nothing_with_those_for_losses() -> None:
    read, measured = texts.calibration(), texts.texts("evaluation")
    assert sum(len(each.split()) for each in read) > 4 * 4096
    lines = {line for each in measured for line in each.splitlines() if len(line) > 30}
    assert not lines & {line for each in read for line in each.splitlines()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--qkv", "int4"], "'int4' is not one of 'bf16', 'mxfp4', 'nvfp4', 'mxfp6', 'mxfp8', 'mxint8'"),
        (["--o", "nvfp4_rescored"], "'nvfp4_rescored' is not one of 'bf16', 'mxfp4'"),
        (["--lm-head", "int4"], "'mxint8', 'nvfp4_rescored'"),
        (["--qkv", "bf16", "--o", "bf16", "--lm-head", "bf16"], "are all bf16: nothing is to be quantized"),
        (["--tokens", "3"], "3 is not in the range 16<=x<=65536"),
        (["--text", "/nowhere"], "File '/nowhere' does not exist"),
        (["--text", "SHORT"], "--text: there are fewer than 16 tokens in it"),
        (["--text", "BYTES"], "BYTES is not UTF-8: byte 0 is 0xff"),
        (["--device", "cuda:99"], "--device: torch finds no GPU for cuda:99; --device cpu"),
        (["--device", "tpu"], "--device is 'tpu'; it must be cpu, cuda, or cuda: and a number"),
    ],
)
def test_bad_arguments_end_with_a_line(tmp_path: Path, toy: models.Subject, arguments: list[str], words: str) -> None:
    (tmp_path / "SHORT").write_text("too short")
    (tmp_path / "BYTES").write_bytes(b"\xff\xfe" * 50)
    arguments = [str(tmp_path / each) if each.isupper() else each for each in arguments]
    status, output = quantize("toy", "--out", str(tmp_path / "f"), "--device", "cpu", *arguments)
    assert status != 0
    assert output.count("\n") == 1 or "Usage" in output
    assert words in output.replace("\n", " ")
    assert not (tmp_path / "f").exists()


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: (_ for _ in ()).throw(OSError("404")))
    status, output = quantize("no/such", "--out", str(tmp_path / "f"), "--device", "cpu")
    assert status == 1
    assert "no/such could not be downloaded from the hub: 404" in output
    status, output = quantize("/nowhere", "--out", str(tmp_path / "f"), "--device", "cpu")
    assert status == 1
    assert "/nowhere is no checkpoint's folder, and no name of one on the hub, which are OWNER/NAME" in output
    (tmp_path / "empty").mkdir()
    status, output = quantize(str(tmp_path / "empty"), "--out", str(tmp_path / "f"), "--device", "cpu")
    assert status == 1
    assert "is no folder of a checkpoint (it has no config.json)" in output


def test_a_folder_that_cannot_be_used_is_reported_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    monkeypatch.setattr(command, "opened", lambda request: pytest.fail("it was loaded"))
    status, output = quantize("toy", "--out", str(tmp_path), "--device", "cpu")
    assert status == 1
    assert "is not empty, and was not begun by sm12x-quantize: choose another folder" in output


def test_a_model_of_the_hub_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    llama().model.save_pretrained(tmp_path / "0a1b2c")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / "0a1b2c"))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: None)
    request = command.Request("somebody/toy", tmp_path / "f", MIXED, None, None, "cpu")
    assert command.opened(request).name == "somebody/toy"


def test_the_formats_are_the_operators() -> None:
    assert sorted(manifest.FORMATS) == sorted(WEIGHT_FORMATS)
    assert sorted(manifest.FORMATS_OF["lm_head"]) == sorted([*WEIGHT_FORMATS, "nvfp4_rescored"])
    assert manifest.FORMATS_OF["qkv"] == manifest.FORMATS_OF["o"] == manifest.FORMATS
    assert set(map(manifest.stored, manifest.FORMATS_OF["lm_head"])) == set(WEIGHT_FORMATS)


def test_smollm2s_losses(tmp_path: Path) -> None:
    """NVFP4's losses, on a cut of the texts, from half as many tokens as the command reads; docs/accuracy.md has what
    it loses."""
    subject = models.load(None, torch.float32, "cpu")
    windows = texts.windows(texts.calibration(), subject.encode, 256, 1152)
    made = Run(subject, tmp_path / "f", dict.fromkeys(MIXED, "nvfp4"), windows)
    losses = run.with_losses(made, texts.windows(texts.texts("evaluation"), subject.encode, 256, 1024))
    rounded, found = (float(losses[name].kl.mean()) for name in (ROUNDED, QUANTIZED))
    print(rounded, found)
    assert found <= 0.1
    assert found < rounded / 2
