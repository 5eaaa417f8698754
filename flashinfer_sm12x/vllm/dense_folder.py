# SPDX-License-Identifier: Apache-2.0
"""Layers that ``sm12x-quantize`` made, in place of those that are quantized while they are loaded.

vLLM loads the checkpoint's bf16 weight as usual. The weight is hashed: if it is the one that was quantized, the rank's
part of the folder's weight replaces it, cut by vLLM's own loader of that layer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.parameter import ModelWeightParameter

from ..quantize import manifest
from ..quantize.files import FolderError
from . import settings

if TYPE_CHECKING:
    from flashinfer.quantization.block_scaled import BlockScaledWeight

SHARDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}  # what vLLM calls the rows of QKV


def require(chosen: settings.Settings, vllm_config: Any) -> None:
    """Refuse a folder that lacks layers of the model, or a file, before any process is started; bytes are looked at
    when they are loaded.

    Raises
    ------
    ValueError
        A layer or a file is missing; or ``--load-format dummy``, which loads no weights to compare with the folder's.
    """
    if not chosen.dense:
        return
    folder = settings.located(chosen.dense)
    if vllm_config.load_config.load_format == "dummy":
        raise FolderError(
            f"--load-format dummy loads no checkpoint, of which {folder} could be: leave 'dense' out, and choose "
            "formats"
        )
    found = manifest.finished(folder)
    for file in found.files:
        if not (folder / file).is_file():
            raise FolderError(f"{folder} lacks {file}, which its manifest names: copy it again")
    count = vllm_config.model_config.hf_config.num_hidden_layers
    for kind in found.formats:
        parts = _parts(found, kind)
        wanted: list[int | None] = [None] if kind == "lm_head" else [*range(count)]
        for number in wanted:
            if number not in parts:
                layer = "LM head" if number is None else f"{kind} of layer {number}"
                raise FolderError(
                    f"{folder} has no {layer}, and the model has {count} layers: it was made of another model"
                )
            _check_parts(folder, kind, found, parts[number])


def _parts(found: manifest.Manifest, kind: str) -> dict[int | None, list[str]]:
    """The modules of a kind, by their layer's number."""
    parts: dict[int | None, list[str]] = {}
    for name, module in found.modules.items():
        if module.kind == kind:
            parts.setdefault(_number(name), []).append(name)
    return parts


def _check_parts(folder: Path, kind: str, found: manifest.Manifest, names: list[str]) -> None:
    """Refuse a layer of which a part is missing or there twice, or whose parts do not fit together."""
    wanted = list(SHARDS.values()) if kind == "qkv" else [""]
    if sorted(map(_shard, names)) != sorted(wanted):
        parts = f"its parts are {', '.join(SHARDS)}" if kind == "qkv" else "it is one module"
        raise FolderError(
            f"{folder} has {', '.join(names)} for {kind} of one layer, and {parts}: copy or quantize it again"
        )
    modules = [found.modules[name] for name in names]
    if len({each.k for each in modules}) > 1:
        widths = ", ".join(f"{name} {each.k}" for name, each in zip(names, modules, strict=True))
        raise FolderError(
            f"{folder}: the parts of one layer have different widths ({widths}): copy or quantize it again"
        )


class Layer:
    """A layer that a folder has.

    Parameters
    ----------
    folder : str
        The folder's path on this machine.
    kind : str
        ``qkv``, ``o`` or ``lm_head``.
    prefix : str
        vLLM's name of the layer.

    Raises
    ------
    ValueError
        The folder has no such layer.
    """

    def __init__(self, folder: str, kind: str, prefix: str) -> None:
        from ..quantize.folder import Folder

        self.name, self.folder = folder, Folder(Path(folder))
        self.parts = _parts(self.folder.manifest, kind).get(_number(prefix), [])
        if not self.parts:
            raise FolderError(f"{folder} has no {kind} for {prefix}: it was made of a model with fewer layers")
        _check_parts(Path(folder), kind, self.folder.manifest, self.parts)
        self.loader: Callable[..., None] | None = None
        self.loaded: dict[str, torch.Tensor] = {}

    def watch(self, loader: Any) -> Callable[..., None]:
        """vLLM's loader of the layer's weight, which remembers what it was given."""
        self.loader = loader

        @functools.wraps(loader)
        def load(param: Any, loaded_weight: torch.Tensor, *shard: Any) -> None:
            self.loaded[str(*shard)] = loaded_weight
            loader(param, loaded_weight, *shard)

        return load

    def weight(self, layer: Any) -> BlockScaledWeight:
        """This rank's part, with linear scales, on the device of the layer's bf16 weight.

        Raises
        ------
        ValueError
            The checkpoint's weight is not the one that was quantized, or a file of the folder is damaged.
        """
        from flashinfer.quantization import mx_cpu
        from flashinfer.quantization.block_scaled import LAYOUTS, BlockScaledWeight

        self._check()
        module = self.folder.manifest.modules[self.parts[0]]
        form = manifest.stored(self.folder.formats[module.kind])
        layout = LAYOUTS[form]
        rows, k = layer.weight.shape
        whole = self.folder.weights(self.parts)
        # Bytes of a row can be cut where values can, but for MXFP6's, whose blocks lie apart.
        unpacked = form == "mxfp6" and k != module.k
        values = [mx_cpu.unpack_e2m3(each.values, module.k) if unpacked else each.values for each in whole]
        columns = k if unpacked else layout.columns(k)
        own = self._cut([each.view(torch.uint8) for each in values], rows, columns)
        if unpacked:
            own = mx_cpu.pack_e2m3(own)
        scales = self._cut([each.scales for each in whole], rows, k // layout.scales.block)
        device, factor = layer.weight.device, whole[0].global_scale
        return BlockScaledWeight(
            own.view(layout.dtype).to(device), scales.to(device), None if factor is None else factor.to(device)
        )

    def _check(self) -> None:
        loaded, self.loaded = self.loaded, {}
        for name in self.parts:
            weight = loaded.pop(_shard(name), None)
            if weight is None:
                raise FolderError(
                    f"{name}: no weight of it was loaded, which {self.name} was made of; --load-format dummy has none"
                )
            self.folder.require_source(name, weight)
        if loaded:  # rows of the layer that would be 0
            raise FolderError(
                f"{self.name} has {', '.join(self.parts)}, and the checkpoint has {', '.join(loaded)} of that layer, "
                "too: it was made of another model"
            )

    def _cut(self, parts: list[torch.Tensor], rows: int, columns: int) -> torch.Tensor:
        """A rank's ``[rows, columns]`` bytes of the parts'; rows that no part has are 0."""
        assert self.loader is not None
        own = torch.zeros(rows, columns, dtype=torch.uint8)
        target = ModelWeightParameter(data=own, input_dim=1, output_dim=0, weight_loader=self.loader)
        for name, part in zip(self.parts, parts, strict=True):
            shard = _shard(name)
            self.loader(target, part, *([shard] if shard else []))
        return target.data


def _number(name: str) -> int | None:
    """The layer's number in a module's name, the checkpoint's or vLLM's."""
    found = re.search(r"\blayers\.(\d{1,9})\.", name)
    return int(found[1]) if found else None


def _shard(name: str) -> str:
    """The shard of its layer that a module is; empty: it is the whole layer."""
    return SHARDS.get(name.rpartition(".")[2], "")
