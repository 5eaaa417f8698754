# SPDX-License-Identifier: Apache-2.0
"""A folder of quantized dense layers: a file of tensors for each attention and one for the LM head, and a manifest.

Tensors are named as compressed-tensors 0.17 names them, and are what it means by them where it has the format::

    format   tensors behind the module's name                                    compressed-tensors'
    mxfp4    weight_packed [n, k / 2] uint8, weight_scale [n, k / 32] uint8      mxfp4-pack-quantized
    nvfp4    weight_packed, weight_scale [n, k / 16] float8_e4m3fn,
             weight_global_scale [1] float32, the reciprocal of the factor       nvfp4-pack-quantized
    mxfp8    weight [n, k] float8_e4m3fn, weight_scale [n, k / 32] uint8         mxfp8-quantized
    mxfp6    weight_packed [n, columns] uint8 (quantization/block_scaled.py),
             weight_scale [n, k / 32] uint8                                      -
    mxint8   weight [n, k] int8, weight_scale [n, k / 32] uint8                  -

Modules are the checkpoint's: queries, keys and values apart, of NVFP4 with one factor. The manifest, written last, holds
the SHA-256 of each file, and of each module's weight in bfloat16: who loads a folder sees that every byte is there, and
that the checkpoint is the one that was quantized.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flashinfer.quantization.block_scaled import LAYOUTS, BlockScaledWeight, dequantize_rows

from .manifest import FolderError, Manifest, finished

PACKED = ("mxfp4", "nvfp4", "mxfp6")


def weight_hash(weight: torch.Tensor) -> str:
    """SHA-256 of a weight's bytes after conversion to bfloat16, for any dtype and device."""
    rows: Any = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(rows).hexdigest()


def to_tensors(name: str, weight_format: str, weight: BlockScaledWeight) -> dict[str, torch.Tensor]:
    """A module's tensors of a weight with linear scales."""
    values, scales = weight.values.cpu(), weight.scales.cpu()
    found = {f"{name}.weight{'_packed' if weight_format in PACKED else ''}": values}
    found[f"{name}.weight_scale"] = scales.view(torch.float8_e4m3fn) if weight_format == "nvfp4" else scales
    if weight.global_scale is not None:
        found[f"{name}.weight_global_scale"] = 1.0 / weight.global_scale.cpu()  # a power of two
    return {key: tensor.contiguous() for key, tensor in found.items()}


def from_tensors(name: str, weight_format: str, tensors: Mapping[str, torch.Tensor]) -> BlockScaledWeight:
    """:func:`to_tensors`' weight. Raises ``KeyError`` for a tensor that is not there."""
    values = tensors[f"{name}.weight{'_packed' if weight_format in PACKED else ''}"]
    scales = tensors[f"{name}.weight_scale"].view(torch.uint8)
    global_scale = 1.0 / tensors[f"{name}.weight_global_scale"] if weight_format == "nvfp4" else None
    return BlockScaledWeight(values, scales, global_scale)


def join(parts: list[BlockScaledWeight]) -> BlockScaledWeight:
    """Weights with linear scales, concatenated by rows; NVFP4 weights share one global scale."""
    # View as bytes: torch.cat does not take every 8-bit dtype.
    values = torch.cat([part.values.view(torch.uint8) for part in parts])
    scales = torch.cat([part.scales for part in parts])
    return BlockScaledWeight(values.view(parts[0].values.dtype), scales, parts[0].global_scale)


class Folder:
    """A finished folder, for reading; or with the manifest of an unfinished one what is there of it.

    Raises
    ------
    FolderError
        There is no manifest, it is of another version, or the folder was not finished.
    """

    def __init__(self, path: Path, unfinished: Manifest | None = None) -> None:
        self.path = path
        self.manifest = finished(path) if unfinished is None else unfinished

    @property
    def formats(self) -> dict[str, Any]:
        """The format of each kind of layer that is in the folder: ``qkv``, ``o``, ``lm_head``."""
        return self.manifest.formats

    def tensors(self, file: str) -> dict[str, torch.Tensor]:
        """A file's tensors, on the CPU.

        Raises
        ------
        FolderError
            The file is missing, or its bytes are not those that were written.
        """
        from safetensors.torch import load

        path = self.path / file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FolderError(f"{path} cannot be read: {error.strerror}; the manifest names it") from error
        if hashlib.sha256(data).hexdigest() != self.manifest.files[file]:
            raise FolderError(f"{path} is damaged: its SHA-256 is not the manifest's; copy or quantize it again")
        return load(data)

    def dequantized(self, names: list[str]) -> torch.Tensor:
        """The weights of several modules, concatenated by rows, in float32. Raises the errors of :meth:`weights`."""
        weights = self.weights(names)
        modules = [self.manifest.modules[name] for name in names]
        rows = (dequantize_rows(w, self.formats[m.kind], m.k) for w, m in zip(weights, modules, strict=True))
        return torch.cat(list(rows))

    def weights(self, names: list[str]) -> list[BlockScaledWeight]:
        """Modules' weights with linear scales, on the CPU; modules of one file.

        Raises
        ------
        FolderError
            The errors of :meth:`tensors`; a module that is not in the folder; tensors that do not form its weight.
        """
        found = []
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name in names:
            module = self.manifest.modules.get(name)
            if module is None:
                raise FolderError(f"{self.path} has no {name}: it was made of another model")
            if module.file not in tensors:
                tensors[module.file] = self.tensors(module.file)
            form = self.formats[module.kind]
            try:
                weight = from_tensors(name, form, tensors[module.file])
            except KeyError as error:
                raise FolderError(f"{self.path / module.file} has no tensor {error}") from error
            layout = LAYOUTS[form]
            expected = (module.n, layout.columns(module.k)), (module.n, module.k // layout.scales.block)
            if (weight.values.shape, weight.scales.shape) != expected or weight.values.dtype != layout.dtype:
                raise FolderError(f"{self.path / module.file}: {name} is not [{module.n}, {module.k}] of {form}")
            found.append(weight)
        return found
