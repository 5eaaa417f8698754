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

from flashinfer_sm12x_quantize import manifest

from . import settings

if TYPE_CHECKING:
    from flashinfer.quantization.block_scaled import BlockScaledWeight

SHARDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}  # what vLLM calls the rows of QKV


def require(chosen: settings.Settings, vllm_config: Any) -> None:
    """Refuse a folder that lacks layers of the model, or a file, before any process is started; bytes are looked at when
    they are loaded.

    Raises
    ------
    ValueError
        A layer or a file is missing; or ``--load-format dummy``, which loads no weights to compare with the folder's.
    """
    if not chosen.dense:
        return
    folder = settings.located(chosen.dense)
    if vllm_config.load_config.load_format == "dummy":
        raise manifest.FolderError(
            f"--load-format dummy loads no checkpoint, of which {folder} could be: leave 'dense' out, and choose formats"
        )
    found = manifest.finished(folder)
    for file in found.files:
        if not (folder / file).is_file():
            raise manifest.FolderError(f"{folder} lacks {file}, which its manifest names: copy it again")
    count = vllm_config.model_config.hf_config.num_hidden_layers
    for kind in found.formats:
        numbers = {_number(name) for name, module in found.modules.items() if module.kind == kind}
        wanted: list[int | None] = [None] if kind == "lm_head" else [*range(count)]
        for number in wanted:
            if number not in numbers:
                layer = "LM head" if number is None else f"{kind} of layer {number}"
                raise manifest.FolderError(
                    f"{folder} has no {layer}, and the model has {count} layers: it was made of another model"
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
        from flashinfer_sm12x_quantize.folder import Folder

        self.name, self.folder = folder, Folder(Path(folder))
        number = _number(prefix)
        modules = self.folder.manifest.modules
        self.parts = [name for name, each in modules.items() if (each.kind, _number(name)) == (kind, number)]
        if not self.parts:
            raise manifest.FolderError(f"{folder} has no {kind} for {prefix}: it was made of a model with fewer layers")
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
        form = self.folder.formats[module.kind]
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
        from flashinfer_sm12x_quantize.folder import weight_hash

        loaded, self.loaded = self.loaded, {}
        for name in self.parts:
            weight = loaded.get(_shard(name))
            if weight is None:
                raise manifest.FolderError(
                    f"{name}: no weight of it was loaded, which {self.name} was made of; --load-format dummy has none"
                )
            if weight_hash(weight) != self.folder.manifest.modules[name].source:
                raise manifest.FolderError(
                    f"{self.name} was made of another {name} than this checkpoint's: quantize this one (sm12x-quantize), or "
                    "serve the one it was made of"
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
    found = re.search(r"\blayers\.(\d+)\.", name)
    return int(found[1]) if found else None


def _shard(name: str) -> str:
    """The shard of its layer that a module is; empty: it is the whole layer."""
    return SHARDS.get(name.rpartition(".")[2], "")
