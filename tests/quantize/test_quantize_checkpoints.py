# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that ``sm12x-quantize``, the accuracy benchmark and the example are given: whole ones of any float dtype,
damaged ones, names of the hub's; and how each command ends."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_accuracy
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from test_quantize_files import cases, places, small_disk
from toy_llama import llama

from flashinfer.__main__ import _group
from flashinfer_sm12x.quantize import checkpoint, command, endings, gpt_oss, models, run
from flashinfer_sm12x.quantize.files import FolderError, UserError
from flashinfer_sm12x.quantize.folder import Folder
from flashinfer_sm12x.quantize.manifest import MANIFEST, UNFINISHED

__all__ = ["small_disk"]  # a fixture

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "examples" / "transformers_gpt_oss.py"
INDEX = checkpoint.INDEX
TOKENS = torch.arange(20, 40)[None]


@pytest.fixture(scope="module")
def gpt_oss_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small gpt-oss, not to be changed."""
    sys.path.append(str(REPO / "scripts"))
    import random_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint") / "toy-oss"
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "sliding_window": 8}
    print("seed", 6)
    random_checkpoint.write(folder, 6, {**random_checkpoint.GPT_OSS_20B, **sizes, **heads})
    return folder


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are not what these tests are about."""
    monkeypatch.setattr(command, "HELD_OUT", 32)


@pytest.fixture
def copied(gpt_oss_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(gpt_oss_folder, tmp_path / "toy-oss"))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with the other's tokenizer, not to be changed."""
    import random_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint") / "toy-llama"
    llama(tie_word_embeddings=False).model.save_pretrained(folder)
    random_checkpoint.write_tokenizer(folder, 160)
    return folder


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return models.load(folder, torch.float32, "cpu").model(TOKENS).logits


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})


# ------------------------------------------------------------------------------------------------- what vLLM would read


def test_a_file_that_the_index_does_not_name_is_not_read(gpt_oss_folder: Path, copied: Path) -> None:
    shutil.copy(copied / "model-layer-00.safetensors", copied / "model-zz.safetensors")
    rewrite(copied / "model-zz.safetensors", lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    (copied / "half.safetensors").write_bytes(b"\1\2")
    assert torch.equal(logits(copied), logits(gpt_oss_folder))


def test_without_an_index_all_files_are_read_and_the_last_number_counts(copied: Path) -> None:
    """model-10 behind model-9; a dot makes a file invisible."""
    (copied / INDEX).unlink()
    expected = torch.full((64,), 3.0, dtype=torch.bfloat16)
    for number in (9, 10):
        save_file({"model.norm.weight": torch.full((64,), number - 7.0)}, copied / f"model-{number}.safetensors")
    (copied / ".hidden.safetensors").write_bytes(b"")
    (copied / "model-embedding.safetensors").rename(copied / "model-1.safetensors")
    assert [path.name for path in checkpoint.weight_files(copied)][:3] == [f"model-{n}.safetensors" for n in (1, 9, 10)]
    assert torch.equal(gpt_oss.load(copied).model.norm.weight.data, expected)


def test_consolidated_files_come_first_and_have_an_index_of_their_own(tmp_path: Path) -> None:
    def names() -> list[str]:
        return [path.name for path in checkpoint.weight_files(tmp_path)]

    for name in ("model", "consolidated.00", "consolidated.01"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"x": "model.safetensors"}}')
    assert names() == ["consolidated.00.safetensors", "consolidated.01.safetensors"]
    (tmp_path / "consolidated.safetensors.index.json").write_text(
        '{"weight_map": {"x": "consolidated.01.safetensors"}}'
    )
    assert names() == ["consolidated.01.safetensors"]
    for number in (0, 1):
        (tmp_path / f"consolidated.0{number}.safetensors").unlink()
    assert names() == ["model.safetensors"]
    (tmp_path / "original").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "original" / "consolidated.safetensors")
    with pytest.raises(
        FolderError, match=r"has original/consolidated\.safetensors: vLLM takes it for .*; move that file"
    ):
        names()


def test_transformers_is_given_the_files_that_vllm_would_read(llama_folder: Path, tmp_path: Path) -> None:
    """transformers itself takes model.safetensors before the index, and no file of another name without one."""
    folder = Path(shutil.copytree(llama_folder, tmp_path / "llama"))
    expected = logits(llama_folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.equal(logits(folder), expected)
    names = load_file(folder / "weights.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "weights.safetensors")}))
    save_file({name: torch.zeros_like(each) for name, each in names.items()}, folder / "model.safetensors")
    assert torch.equal(logits(folder), expected)


def test_weights_that_are_missing_are_not_made_up(llama_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama_folder, tmp_path / "llama"))
    rewrite(folder / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=rf"^{folder} has no weights for model\.layers\.1\.mlp\.up_proj\.weight$"):
        logits(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_floats_of_a_checkpoint_are_converted_to_bf16_as_vllm_converts_them(
    gpt_oss_folder: Path, copied: Path, dtype: torch.dtype
) -> None:
    """Values of bf16 that both dtypes hold: small ones are first rounded to float16's steps in both checkpoints."""
    other = Path(shutil.copytree(gpt_oss_folder, copied.with_name("again")))
    for folder, target in ((other, torch.bfloat16), (copied, dtype)):
        for file in folder.glob("*.safetensors"):

            def convert(tensors: dict[str, torch.Tensor], target: torch.dtype = target) -> None:
                floats = {name: each for name, each in tensors.items() if each.is_floating_point()}
                tensors |= {name: each.half().bfloat16().to(target) for name, each in floats.items()}

            rewrite(file, convert)
    assert torch.equal(logits(copied), logits(other))


# ------------------------------------------------------------------------------------------------------ damaged files

LAYER = "model-layer-01.safetensors"


def cut(folder: Path) -> None:
    (folder / LAYER).write_bytes((folder / LAYER).read_bytes()[:-1])


def pointer(folder: Path) -> None:
    (folder / LAYER).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n")


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / LAYER, lambda tensors: tensors.pop(f"model.layers.1.{name}"))


def other(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    name = f"model.layers.1.{name}"
    return lambda folder: rewrite(
        folder / LAYER, lambda tensors: tensors.__setitem__(name, change(tensors[name]).contiguous())
    )


DAMAGED = {
    "a shard is missing": (lambda folder: (folder / LAYER).unlink(), rf"lacks {LAYER}, which {INDEX} names; download"),
    "a shard is cut off": (cut, rf"{LAYER} is cut off or no file of tensors \([\d,]+ bytes; "),
    "a shard is empty": (
        lambda folder: (folder / LAYER).write_bytes(b""),
        rf"{LAYER} is cut off or no file of tensors",
    ),
    "a shard is a pointer": (pointer, rf"{LAYER} is cut off or no file of tensors \(\d\d bytes; "),
    "a shard is a folder": (
        lambda folder: (cut(folder), (folder / LAYER).unlink(), (folder / LAYER).mkdir()),
        rf"{LAYER} (cannot be read|is cut off)",
    ),
    "there are no shards": (lambda folder: [f.unlink() for f in folder.glob("*.safetensors")], r"has no weights"),
    "experts are missing": (
        without("mlp.experts.down_proj_scales"),
        r"has no tensor model\.layers\.1\.mlp\.experts\.down",
    ),
    "a bias is missing": (without("self_attn.k_proj.bias"), r"has no tensor model\.layers\.1\.self_attn\.k_proj\.bias"),
    "blocks are short": (
        other("mlp.experts.gate_up_proj_blocks", lambda t: t[:, :-1]),
        r"gate_up_proj_blocks is torch\.uint8 \[4, 63, 2, 16\]; by config\.json it must be torch\.uint8 \[4, 64, 2, "
        r"16\]",
    ),
    "scales are floats": (other("mlp.experts.gate_up_proj_scales", torch.Tensor.float), r"_scales is torch\.float32"),
    "a bias has bytes": (other("mlp.experts.down_proj_bias", torch.Tensor.byte), r"down_proj_bias is torch\.uint8"),
    "a weight has another shape": (
        other("self_attn.q_proj.weight", lambda t: t[:, :-1]),
        r"q_proj\.weight is .*\[64, 63\]",
    ),
    "a weight is e4m3": (
        other("self_attn.q_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
        r"q_proj\.weight is torch\.float8_e4m3fn",
    ),
    "a tensor is too much": (
        lambda folder: rewrite(folder / LAYER, lambda t: t.__setitem__("model.more", torch.zeros(1))),
        r"has model\.more, a tensor that no gpt-oss",
    ),
    "a layer is too much": (
        lambda folder: rewrite(folder / LAYER, lambda t: t.__setitem__("model.layers.2.more", torch.zeros(1))),
        r"num_hidden_layers is 2 in config\.json, and the weights have 3 layers",
    ),
    "the config is a list": (lambda folder: (folder / "config.json").write_text("[1]"), r"config\.json is no .*\[1\]"),
    "the config is no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff"), r"config\.json is no "),
    "the tokenizer is a list": (lambda f: (f / "tokenizer.json").write_text("[]"), r"tokenizer\.json is no file of"),
    "the tokenizer is another's": (
        lambda f: (f / "tokenizer.json").write_text('{"model": 1}'),
        r"toy-oss: its tokenizer cannot be opened: ",
    ),
    "generation is a list": (
        lambda f: (f / "generation_config.json").write_text("[]"),
        r"generation_config\.json is no",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_ends_every_command_with_a_line(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    damage, words = DAMAGED[name]
    damage(copied)
    lines = []
    status, output = quantize(str(copied), "--out", str(tmp_path / "f"))
    assert status == 1
    lines.append(output.removeprefix("Error: "))
    assert bench_accuracy.main(["--model", str(copied), "--device", "cpu", "--out", str(tmp_path / "b")]) == 2
    lines.append(capsys.readouterr().err.removeprefix("bench: "))
    assert example(copied) == 2
    lines.append(capsys.readouterr().err.removeprefix("transformers_gpt_oss: "))
    for line in lines:
        assert line.startswith(str(copied))
        assert re.search(words, line), line
        assert line.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"toy-oss"}


def quantize(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_group, ["sm12x-quantize", *arguments, "--device", "cpu"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def example(*arguments: Any) -> int:
    """The example's exit status, in this process."""
    before = sys.argv
    sys.argv = [str(EXAMPLE), *map(str, arguments), "t20 t21", "--tokens", "1"]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        sys.argv = before
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_example_takes_a_gpt_oss_alone(
    gpt_oss_folder: Path, llama_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example(gpt_oss_folder) == 0
    assert capsys.readouterr().out.startswith("t20 t21 ")
    assert example(llama_folder) == 2
    output = capsys.readouterr().err
    assert output == (
        f"transformers_gpt_oss: {llama_folder} is no gpt-oss with experts in MXFP4: its config.json says otherwise\n"
    )


# A missing field has transformers' default, gpt-oss's own, which is not always the toy's.
DEFAULTS = {"sliding_window", "swiglu_limit", "rope_theta", "rope_scaling", "rms_norm_eps", "num_experts_per_tok"}
DEFAULTS |= {"attention_bias", "tie_word_embeddings", "layer_types"}


def test_a_config_or_an_index_with_a_wrong_field_is_refused_or_means_the_same(
    gpt_oss_folder: Path, copied: Path
) -> None:
    expected = logits(gpt_oss_folder)
    refused = 0
    for name, seed in (("config.json", 21), (INDEX, 22)):
        good = json.loads((copied / name).read_text())
        assert len(list(places(good))) > 30
        for at, how, text in cases(good, seed, 60):
            if at[:1] and at[0] in DEFAULTS and (how == "missing" or how is None):
                continue
            (copied / name).write_text(text)
            label = f"{name} {'.'.join(map(str, at))} {how!r:.60}"
            try:
                assert torch.equal(logits(copied), expected), label
            except UserError as error:
                assert str(copied) in str(error), label
                assert "\n" not in str(error), label
                refused += 1
        (copied / name).write_text(json.dumps(good))
    assert refused > 60


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(copied: Path) -> None:
    import random_checkpoint

    random_checkpoint.write_tokenizer(copied, 500)
    subject = models.load(copied, torch.float32, "cpu")
    assert subject.encode("t20 t21") == [20, 21]
    with pytest.raises(UserError, match=r"its tokenizer gives token 300, and the model has 101 of them: they do not"):
        subject.encode("t20 t300")


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size"])
def test_a_config_of_billions_is_refused_before_a_model_is_built(
    gpt_oss_folder: Path, llama_folder: Path, tmp_path: Path, key: str
) -> None:
    for folder in (gpt_oss_folder, llama_folder):
        there = Path(shutil.copytree(folder, tmp_path / folder.name))
        config = json.loads((there / "config.json").read_text())
        (there / "config.json").write_text(json.dumps({**config, key: 2_000_000_000}))
        with pytest.raises(UserError, match=rf"^{there}"):
            logits(there)


# -------------------------------------------------------------------------------------------------------------- the hub


class Hub(http.server.BaseHTTPRequestHandler):
    status, code = 404, "RepoNotFound"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def hub(status: int, code: str) -> Iterator[str]:
    """The address of a server that answers all that the hub is asked for."""
    handler = type("Answer", (Hub,), {"status": status, "code": code})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


LOOK = "import sys; from flashinfer_sm12x.quantize import manifest\ntry: manifest.located(sys.argv[1])\n"
LOOK += "except manifest.FolderError as error: print(error)"


def looked_up(tmp_path: Path, address: str, **more: str) -> str:
    """What the real client says of a name, of which nothing is on this machine."""
    environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(REPO), **more}
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "_proxy" not in name.lower()
    }
    done = subprocess.run(
        [sys.executable, "-c", LOOK, "someone/dense"],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    return done.stdout


def test_a_hub_that_cannot_be_reached_is_not_one_that_lacks_the_name(tmp_path: Path) -> None:
    unknown = "someone/dense is no folder here, and whether the hub has it is not known: it cannot be reached"
    assert looked_up(tmp_path, "http://127.0.0.1:9").startswith(f"{unknown}, and no whole copy was downloaded before")
    offline = looked_up(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert offline.startswith(f"{unknown} (HF_HUB_OFFLINE is set), and no whole copy")
    with hub(404, "RepoNotFound") as address:
        assert "and the hub has no repository of that name (or a private one" in looked_up(tmp_path, address)
    with hub(403, "GatedRepo") as address:
        assert "to those alone who accepted its terms: accept them on its page" in looked_up(tmp_path, address)


def test_a_full_disk_under_a_download_is_not_a_wrong_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "/data/hub/blobs/12")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    status, output = quantize("someone/model", "--out", str(tmp_path / "f"))
    assert (status, output) == (
        1,
        "Error: someone/model could not be downloaded: /data/hub/blobs/12: No space left on device\n",
    )


def test_of_a_repository_the_weights_come_last_and_those_of_the_index_alone(
    gpt_oss_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert (name, ignore_patterns) == ("someone/toy-oss", ["*/*"])
        asked.append(allow_patterns)
        return str(gpt_oss_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert models.fetched("someone/toy-oss") == gpt_oss_folder
    first, second = asked
    assert not any("safetensors" in pattern for pattern in first)
    assert set(second) == {*first, *(path.name for path in gpt_oss_folder.glob("*.safetensors"))}
    monkeypatch.setattr(models, "tokenizer", lambda path: (_ for _ in ()).throw(FolderError("no tokenizer")))
    with pytest.raises(FolderError, match="no tokenizer"):
        models.fetched("someone/toy-oss")
    assert len(asked) == 3, "no weights"


# ------------------------------------------------------------------------------------------------------- needs and ends


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without gguf and accelerate, in which nothing is downloaded."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("gguf", "accelerate") else find(name)
    )
    monkeypatch.setattr(models, "default_wheel", lambda folder: pytest.fail("it was downloaded"))


def test_all_that_is_missing_is_reported_before_anything_is_downloaded(
    lacking: None,
    tmp_path: Path,
    llama_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub

    needs = f"accelerate, gguf is not installed for {sys.executable}: pip install accelerate gguf\n"
    status, output = quantize(models.DEFAULT, "--out", str(tmp_path / "f"))
    assert (status, output) == (1, f"Error: {needs}")
    assert bench_accuracy.main(["--out", str(tmp_path / "b"), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == f"bench: {needs}"

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        return str(llama_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    status, output = quantize("someone/llama", "--out", str(tmp_path / "f"))
    assert (status, output) == (1, f"Error: accelerate is not installed for {sys.executable}: pip install accelerate\n")


def test_a_place_that_cannot_be_written_is_reported_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("it was read"))
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "f")
    status, output = quantize(models.DEFAULT, "--out", out)
    assert status == 1
    assert f"--out: {out} cannot be written: Not a directory; choose another folder" in output
    assert bench_accuracy.main(["--out", out, "--device", "cpu"]) == 2
    assert f"bench: --out: {out} cannot be written: Not a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_accuracy.main(["--name", "a/b"])
    assert "--name is 'a/b'; it must be a file's name without a path" in capsys.readouterr().err


def text_file(tmp_path: Path) -> Path:
    print("seed", 7)
    generator = torch.Generator().manual_seed(7)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"t{token}" for token in torch.randint(20, 90, (90,), generator=generator).tolist()))
    return path


@pytest.mark.privileges
def test_a_disk_that_is_full_on_the_way_ends_with_a_line_and_whole_files(
    gpt_oss_folder: Path, tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For real; with room again the same command goes on."""
    out, text = small_disk / "f", text_file(tmp_path)
    command = (str(gpt_oss_folder), "--out", str(out), "--text", str(text))
    (small_disk / "other").write_bytes(bytes(36 << 10))
    status, output = quantize(*command)
    assert status == 1
    assert re.search(
        rf"Error: {out}/[\w.]+: No space left on device; files in {out} so far: \d; the same command", output
    )
    there = {path.name for path in out.iterdir()}
    assert not any(name.startswith(".") for name in there)
    assert UNFINISHED in there
    (small_disk / "other").unlink()
    status, output = quantize(*command)
    assert status == 0, output
    assert Folder(out).manifest.files.keys() == {path.name for path in out.iterdir()} - {MANIFEST}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reports_that_a_new_run_goes_on_and_it_does(
    gpt_oss_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_signals: None, number: signal.Signals
) -> None:
    text, calls = text_file(tmp_path), []

    def interrupt(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            os.kill(os.getpid(), number)
            time.sleep(60)
        return quantize_with_feedback(*given)

    quantize_with_feedback = run.quantize_with_feedback
    for name in ("whole", "f"):
        if name == "f":
            monkeypatch.setattr(run, "quantize_with_feedback", interrupt)
        command = (str(gpt_oss_folder), "--out", str(tmp_path / name), "--text", str(text))
        status, output = quantize(*command)
        assert status == (128 + number) * (name == "f"), output
    so_far = f"files in {tmp_path / 'f'} so far: 1; the same command, run again, goes on from there"
    assert output.endswith(f"Error: interrupted by {number.name}: {so_far}\n")
    status, output = quantize(*command)
    assert status == 0, output
    assert len(calls) == 4 + 3, "the first layer was read"
    files = {name: sorted((tmp_path / name).glob("*.safetensors")) for name in ("whole", "f")}
    assert [path.read_bytes() for path in files["f"]] == [path.read_bytes() for path in files["whole"]]
    monkeypatch.setattr(
        "flashinfer_sm12x.quantize.command.opened", lambda _: (_ for _ in ()).throw(KeyboardInterrupt())
    )
    status, output = quantize(str(gpt_oss_folder), "--out", str(tmp_path / "g"))
    assert (status, output) == (130, "Error: interrupted by SIGINT: nothing was written\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_file_is_written_leaves_no_part_of_it(
    gpt_oss_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_signals: None, number: signal.Signals
) -> None:
    """At the second file of layers, which is on the disk but has not its name yet; another signal follows at once."""
    text, out, written = text_file(tmp_path), tmp_path / "f", []

    def replace(scratch: str | Path, path: str | Path) -> None:
        written.append(Path(path).name)
        if len([name for name in written if name.endswith(".safetensors")]) == 2:
            os.kill(os.getpid(), number)
            time.sleep(60)
        real(scratch, path)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        os.kill(os.getpid(), signal.SIGTERM if number == signal.SIGHUP else signal.SIGHUP)
        time.sleep(0.01)
        remove(path, missing_ok)

    real, remove = os.replace, Path.unlink
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        patched.setattr(Path, "unlink", unlink)
        status, output = quantize(str(gpt_oss_folder), "--out", str(out), "--text", str(text))
    assert status == 128 + number
    assert f"interrupted by {number.name}: files in {out} so far: 1; the same command" in output
    (layer,) = [name for name in written if name.endswith(".safetensors")][:1]
    assert {path.name for path in out.iterdir()} == {layer, UNFINISHED}
    status, output = quantize(str(gpt_oss_folder), "--out", str(out), "--text", str(text))
    assert status == 0, output


def too_much_for_torch() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of ...")


def host() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("fail", "output"),
    [
        (too_much_for_torch, r"\[?.*DefaultCPUAllocator.*"),
        (gpu, r"CUDA out of memory\. Tried to allocate 2\.00 GiB\."),
        (host, "MemoryError"),
    ],
)
def test_memory_that_is_used_up_ends_every_command_with_a_line(
    gpt_oss_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fail: Any,
    output: str,
) -> None:
    """While the model is opened, and while it runs."""
    line = rf"out of memory \({output}\): stop what else uses it, such as vLLM, or take a machine with more of it"
    with monkeypatch.context() as patched:
        patched.setattr(gpt_oss, "load", lambda *_: fail())
        status, label = quantize(str(gpt_oss_folder), "--out", str(tmp_path / "f"))
        assert status == 1
        assert re.fullmatch(rf"Error: {line}; nothing was written\n", label)
        assert bench_accuracy.main(["--model", str(gpt_oss_folder), "--device", "cpu", "--out", str(tmp_path)]) == 2
        assert re.fullmatch(rf"bench: {line}\n", capsys.readouterr().err)
        assert example(gpt_oss_folder) == 2
        assert re.fullmatch(rf"transformers_gpt_oss: {line}\n", capsys.readouterr().err)
    monkeypatch.setattr(run, "quantize_with_feedback", lambda *_: fail())
    status, label = quantize(str(gpt_oss_folder), "--out", str(tmp_path / "f"), "--text", str(text_file(tmp_path)))
    assert status == 1
    assert re.search(rf"Error: {line}; files in {tmp_path / 'f'} so far: 0; the same command", label)


def test_an_operators_exception_ends_with_a_line(
    gpt_oss_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise TypeError("fc1_expert_biases is torch.float32; it must be torch.bfloat16\nand more")

    monkeypatch.setattr(gpt_oss.FlashInferExperts, "forward", refuse)
    output = "cannot be run: TypeError: fc1_expert_biases is torch.float32; it must be torch.bfloat16\n"
    status, label = quantize(str(gpt_oss_folder), "--out", str(tmp_path / "f"))
    assert (status, label) == (1, f"Error: toy-oss {output}")
    assert bench_accuracy.main(["--model", str(gpt_oss_folder), "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"bench: toy-oss {output}"
    assert gpt_oss_folder.is_dir()


def test_ctrl_c_ends_a_script_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert endings.in_a_line("bench", interrupted) == 130
    assert capsys.readouterr().err == "\nbench: interrupted by SIGINT: nothing was written\n"


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    def fault() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        endings.in_a_line("bench", fault)
