# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's folder, read as vLLM 0.33.0 reads it, so that what is quantized here is what vLLM serves.

Weights are the ``*.safetensors`` directly in the folder; with ``consolidated*.safetensors`` beside them, Mistral's,
only those. If the folder has the index of its kind, files that the index does not name are not read, and all that it
names must be there. Files are read in the order of the numbers in their names; of a tensor that is in several the last
one counts, whichever file the index gives.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .files import Fields, FolderError, read_fields

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
AGAIN = "download the checkpoint again"
CONSOLIDATED = "consolidated"
DESCRIPTIONS = ("*.json", "*.jinja", "*.model")
"""All files of a repository but its weights, for the config and the tokenizer."""
READ_BY_TRANSFORMERS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


def config(folder: Path) -> Fields:
    """The fields of ``config.json``, with its sizes checked.

    Raises
    ------
    FolderError
        The file is missing or damaged, or a size is no size.
    """
    if not (folder / CONFIG).is_file():
        raise FolderError(f"{folder} is no folder of a checkpoint (it has no {CONFIG}) and no .gguf file")
    found = _described(folder / CONFIG)
    for key in SIZES:
        if key in found:
            found.whole(key)
    return found


def quantization(about: Fields) -> str:
    """The ``quant_method`` of a config; empty: none."""
    if "quantization_config" not in about:
        return ""
    return about.object("quantization_config").text("quant_method")


def check_descriptions(folder: Path) -> None:
    """Raise :class:`FolderError` for a JSON file that transformers will read, and that is no JSON object."""
    for name in READ_BY_TRANSFORMERS:
        if (folder / name).is_file():
            _described(folder / name)


def _described(path: Path) -> Fields:
    return read_fields(path, "no file of a checkpoint", AGAIN)


def _by_number(path: Path) -> list[tuple[bool, int, str]]:
    """The key that sorts ``model-10`` behind ``model-2``."""
    parts = re.split(r"(\d+)", path.name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def indexed(index: Path) -> set[str]:
    """The files that an index names.

    Raises
    ------
    FolderError
        It is no index, or names something else than files beside it.
    """
    tensors = read_fields(index, "no index of a checkpoint", AGAIN).object("weight_map")
    if not tensors.values:
        tensors.refuse("its weight_map is empty")
    return {tensors.file_name(name, SUFFIX) for name in tensors.values}


def weight_files(folder: Path, mistral: bool = True) -> list[Path]:
    """The files of a checkpoint's weights that vLLM reads, in its order; without ``mistral``, with
    ``--load-format hf``.

    Raises
    ------
    FolderError
        There are none, or one that the index names is missing.
    """
    here = [path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(".")]
    index = folder / INDEX
    # vLLM looks for Mistral's in subfolders, too, and then reads only those that lie beside the config.
    theirs = sorted(folder.rglob(f"{CONSOLIDATED}*{SUFFIX}")) if mistral else []
    if theirs:
        here = [path for path in here if path.name.startswith(CONSOLIDATED)]
        index = folder / f"{CONSOLIDATED}{SUFFIX}.index.json"
        if not here:
            raise FolderError(
                f"{folder} has {theirs[0].relative_to(folder)}: vLLM takes it for a checkpoint of Mistral's, whose "
                f"weights would lie beside its {CONFIG}; move that file away"
            )
    if index.is_file() and here:
        wanted = indexed(index)
        if missing := sorted(wanted - {path.name for path in here}):
            raise FolderError(
                f"{folder} lacks {', '.join(missing[:3])}{_more(missing)}, which {index.name} names; {AGAIN}"
            )
        here = [path for path in here if path.name in wanted]
    if not here:
        raise FolderError(f"{folder} has no weights: no *{SUFFIX} lies in it; {AGAIN}")
    return sorted(here, key=_by_number)


def _more(names: list[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""


@contextlib.contextmanager
def opened(file: Path, device: str = "cpu") -> Iterator[Any]:
    """A file of tensors.

    Raises
    ------
    FolderError
        The file cannot be read, is cut off, or is no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        size = file.stat().st_size
        with safe_open(file, "pt", device=device) as tensors:
            yield tensors
    except OSError as error:
        raise FolderError(f"{file} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise FolderError(f"{file} is cut off or no file of tensors ({size:,} bytes; {error}); {AGAIN}") from error


def names(files: list[Path]) -> dict[str, Path]:
    """The file of each tensor. Raises :class:`FolderError`."""
    found: dict[str, Path] = {}
    for file in files:
        with opened(file) as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found


def tensors(folder: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name.

    Raises
    ------
    FolderError
        The errors of :func:`weight_files`; a file that is cut off or no file of tensors.
    """
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with opened(file, device) as there:
            found |= {name: there.get_tensor(name) for name in there.keys()}  # noqa: SIM118 (no mapping)
    return found


def take(
    found: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], folder: Path, integer: bool
) -> torch.Tensor:
    """Remove a tensor from ``found``: bytes, or floats in bf16, to which vLLM converts them too.

    Raises
    ------
    FolderError
        It is not there, or has another shape or dtype.
    """
    tensor = found.pop(name, None)
    if tensor is None:
        raise FolderError(f"{folder} has no tensor {name}, which its {CONFIG} asks for; {AGAIN}")
    good = tensor.dtype == torch.uint8 if integer else tensor.is_floating_point() and tensor.element_size() > 1
    if tuple(tensor.shape) != shape or not good:
        kind = "torch.uint8" if integer else "bfloat16, float16 or float32"
        raise FolderError(
            f"{folder}: {name} is {tensor.dtype} {list(tensor.shape)}; by {CONFIG} it must be {kind} {list(shape)}; "
            f"{AGAIN}"
        )
    return tensor if integer else tensor.to(torch.bfloat16)
