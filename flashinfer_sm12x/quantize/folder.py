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

An LM head in ``nvfp4_rescored`` is stored as one in ``nvfp4`` is: its fine rows are the checkpoint's own.

Modules are the checkpoint's: queries, keys and values apart, of NVFP4 with one factor. The manifest, written last,
holds the SHA-256 of each file, and of each module's weight in bfloat16: who loads a folder sees that every byte is
there, and that the checkpoint is the one that was quantized.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flashinfer.quantization.block_scaled import LAYOUTS, BlockScaledWeight, dequantize_rows

from .files import FolderError
from .manifest import Manifest, finished, stored

PACKED = ("mxfp4", "nvfp4", "mxfp6")
LARGEST = {"mxfp4": 6.0, "nvfp4": 6.0 * 448.0, "mxfp6": 7.5, "mxint8": 2.0, "mxfp8": 448.0}
"""Each format's largest element; NVFP4's with its largest scale."""
FLOAT32_MAX = torch.finfo(torch.float32).max


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


def tensor_names(name: str, weight_format: str) -> list[str]:
    """The names of a module's tensors: its values, its scales and, of NVFP4, its global scale."""
    found = [f"{name}.weight{'_packed' if weight_format in PACKED else ''}", f"{name}.weight_scale"]
    return [*found, f"{name}.weight_global_scale"] if weight_format == "nvfp4" else found


def from_tensors(
    name: str, weight_format: str, tensors: Mapping[str, torch.Tensor], size: tuple[int, int]
) -> BlockScaledWeight:
    """:func:`to_tensors`' weight of ``[n, k]``.

    Raises
    ------
    ValueError
        Tensors of another dtype or shape, or with scales that no quantizer gives; names the tensor.
    """
    layout = LAYOUTS[weight_format]
    n, k = size
    nvfp4 = weight_format == "nvfp4"
    expected = [
        (layout.dtype, (n, layout.columns(k))),
        (torch.float8_e4m3fn if nvfp4 else torch.uint8, (n, k // layout.scales.block)),
        (torch.float32, (1,)),
    ]
    found = []
    for tensor_name, (dtype, shape) in zip(tensor_names(name, weight_format), expected, strict=False):
        tensor = tensors[tensor_name]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{tensor_name} is {tensor.dtype} {list(tensor.shape)}; of {weight_format} [{n}, {k}] it must be "
                f"{dtype} {list(shape)}"
            )
        found.append(tensor)
    values, scales = found[0], found[1].view(torch.uint8)
    global_scale = 1.0 / found[2] if nvfp4 else None
    factor = float(found[2]) if global_scale is not None else 1.0
    # Also the product of the largest element must be finite, which bounds the scales on both sides.
    if not (0 < factor < math.inf and LARGEST["nvfp4"] / factor < FLOAT32_MAX):
        raise ValueError(
            f"{name}.weight_global_scale is {factor:g}; it must be positive and finite, as must its reciprocal"
        )
    # E4M3's NaN and signs, which no quantizer gives; UE8M0's NaN and scales that make infinity of the largest element.
    most = 0x7E if nvfp4 else 127 + math.floor(math.log2(FLOAT32_MAX / LARGEST[weight_format]))
    if scales.numel() and (largest := int(scales.max())) > most:
        raise ValueError(f"{name}.weight_scale has the byte {largest:#04x}; a scale is at most {most:#04x}")
    if weight_format == "mxfp8" and bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ValueError(f"{name}.weight holds NaN")
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
            The file is missing, its bytes are not those that were written, or they are not its modules' tensors.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = self.path / file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FolderError(f"{path} cannot be read: {error.strerror}; the manifest names it") from error
        if hashlib.sha256(data).hexdigest() != self.manifest.files[file]:
            raise FolderError(f"{path} is damaged: its SHA-256 is not the manifest's; copy or quantize it again")
        try:
            found = load(data)
        except (SafetensorError, KeyError, ValueError) as error:  # the others of dtypes that torch has not
            raise FolderError(f"{path} is no file of tensors ({error}); copy or quantize it again") from error
        modules = {name: each for name, each in self.manifest.modules.items() if each.file == file}
        expected = {each for name, m in modules.items() for each in tensor_names(name, stored(self.formats[m.kind]))}
        for name in sorted(expected ^ found.keys()):
            problem = "has no tensor" if name in expected else "has a tensor that its manifest does not know of:"
            raise FolderError(f"{path} {problem} {name!r:.120}; copy or quantize it again")
        return found

    def require_source(self, name: str, weight: torch.Tensor) -> None:
        """Raise :class:`FolderError` unless ``weight`` is what a module's weight was before it was quantized."""
        module = self.manifest.modules.get(name)
        if module is None:
            raise FolderError(f"{self.path} has no {name}: it was made of another model")
        if tuple(weight.shape) != (module.n, module.k) or weight_hash(weight) != module.source:
            raise FolderError(
                f"{self.path} was made of another {name} than this checkpoint's: quantize this one (sm12x-quantize), "
                "or take the one it was made of"
            )

    def dequantized(self, names: list[str]) -> torch.Tensor:
        """The weights of several modules, concatenated by rows, in float32. Raises the errors of :meth:`weights`."""
        weights = self.weights(names)
        modules = [self.manifest.modules[name] for name in names]
        formats: list[Any] = [stored(self.formats[module.kind]) for module in modules]
        rows = (dequantize_rows(w, form, m.k) for w, m, form in zip(weights, modules, formats, strict=True))
        return torch.cat(list(rows))

    def weights(self, names: list[str]) -> list[BlockScaledWeight]:
        """Modules' weights with linear scales, on the CPU: modules that are rows of one matrix.

        Raises
        ------
        FolderError
            The errors of :meth:`tensors`; a module that is not in the folder; tensors that do not form its weight;
            NVFP4 weights with several global scales.
        """
        found = []
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name in names:
            module = self.manifest.modules.get(name)
            if module is None:
                raise FolderError(f"{self.path} has no {name}: it was made of another model")
            if module.file not in tensors:
                tensors[module.file] = self.tensors(module.file)
            size = module.n, module.k
            try:
                found.append(from_tensors(name, stored(self.formats[module.kind]), tensors[module.file], size))
            except ValueError as error:
                raise FolderError(f"{self.path / module.file}: {error}; copy or quantize it again") from error
        scales = [None if weight.global_scale is None else float(weight.global_scale) for weight in found]
        if len(set(scales)) > 1:
            problem = ", ".join(f"{name} {scale}" for name, scale in zip(names, scales, strict=True))
            raise FolderError(
                f"{self.path}: the parts of one matrix have several global scales ({problem}); copy or quantize it "
                "again"
            )
        return found
