# SPDX-License-Identifier: Apache-2.0
"""Weights in block-scaled formats: what each is in memory, and the quantizers, on any device.

==========  =======================  =============================  ==========================  ======================
format      elements                 ``values`` of ``[n, k]``       a scale for                 bits an element
==========  =======================  =============================  ==========================  ======================
``mxfp4``   e2m1                     uint8 ``[n, k / 2]``           32, UE8M0                   4.25
``nvfp4``   e2m1                     uint8 ``[n, k / 2]``           16, E4M3; one float32       4.5
``mxfp6``   e2m3                     uint8 ``[n, 24 (k / 32)]``     32, UE8M0                   6.25
``mxint8``  int8 in 64ths            int8 ``[n, k]``                32, UE8M0                   8.25
``mxfp8``   e4m3                     float8_e4m3fn ``[n, k]``       32, UE8M0                   8.25
==========  =======================  =============================  ==========================  ======================

Rows of MXFP6 are rounded up to multiples of 16 bytes; ``include/flashinfer/sm12x/types.h`` has their order. MXFP4,
MXFP6, MXFP8 and MXINT8 are those of OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch

from ..sm12x.checks import (
    BLOCK_SIZE,
    ELEMENT,
    NVFP4_SCALES,
    UE8M0,
    BlockScales,
    describe,
    require_choice,
    require_k_alignment,
    require_rank,
    require_scales,
    require_storage,
    require_tensor,
)
from . import mx_cpu

WeightFormat = Literal["mxfp4", "nvfp4", "mxfp6", "mxint8", "mxfp8"]
WEIGHT_FORMATS: tuple[str, ...] = get_args(WeightFormat)

CHUNK_ROWS = 2048
"""Rows that are quantized at once: 24 MB in float32 for a hidden size of 2880, of which a scale rule holds some six."""


class Layout(NamedTuple):
    """A format in memory."""

    dtype: torch.dtype
    """The dtype of packed values."""
    scales: BlockScales
    columns: Callable[[int], int]
    """Elements of ``dtype`` in a row of k values."""
    k: Callable[[int], int]
    """Values of a row that is so wide; 0 where none is."""
    quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Floats ``[rows, k]``, the global scale if the format has one, and a scale rule, to packed values and linear scale
    bytes."""
    dequantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """``[rows, columns]`` and linear scale bytes to float32 ``[rows, k]``, without a global scale."""
    elements: mx_cpu.Elements
    candidates: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Blocks ``[..., size]``, over the global scale if there is one, to two scale bytes of each: the one of the rule
    ``"amax"``, and the finer one beside it of ``"mse"``."""
    decode_scales: Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def _half(k: int) -> int:
    return k // 2


def _double(columns: int) -> int:
    return 2 * columns


def _same(k: int) -> int:
    return k


def _mxfp6_k(columns: int) -> int:
    k = columns // 24 * BLOCK_SIZE
    return k if mx_cpu.mxfp6_columns(k) == columns else 0


def _layout(
    name: str,
    dtype: torch.dtype,
    columns: Callable[[int], int],
    k: Callable[[int], int],
    elements: mx_cpu.Elements,
    scales: BlockScales = UE8M0,
    candidates: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    decode_scales: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = mx_cpu.decode_scale_bytes,
) -> Layout:
    quantize, dequantize = (getattr(mx_cpu, f"{verb}_{name}_linear") for verb in ("quantize", "dequantize"))
    if candidates is None:
        candidates = functools.partial(_scale_and_half, getattr(mx_cpu, f"{name}_scale"))
    return Layout(dtype, scales, columns, k, quantize, dequantize, elements, candidates, decode_scales)


def _scale_and_half(
    scale: Callable[[torch.Tensor], torch.Tensor], blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    whole = scale(blocks)
    return whole, mx_cpu.finer_scale(whole)


def _sixth_and_fourth(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mx_cpu.nvfp4_scale(blocks, 6.0), mx_cpu.nvfp4_scale(blocks, 4.0)


LAYOUTS: dict[str, Layout] = {
    "mxfp4": _layout("mxfp4", torch.uint8, _half, _double, mx_cpu.E2M1),
    "nvfp4": _layout(
        "nvfp4", torch.uint8, _half, _double, mx_cpu.E2M1, NVFP4_SCALES, _sixth_and_fourth, mx_cpu.decode_nvfp4_scales
    ),
    "mxfp6": _layout("mxfp6", torch.uint8, mx_cpu.mxfp6_columns, _mxfp6_k, mx_cpu.E2M3),
    "mxint8": _layout("mxint8", torch.int8, _same, _same, mx_cpu.INT8),
    "mxfp8": _layout("mxfp8", torch.float8_e4m3fn, _same, _same, mx_cpu.E4M3),
}


class BlockScaledWeight(NamedTuple):
    """A quantized weight ``[n, k]``, as ``dense_block_scaled`` takes it."""

    values: torch.Tensor
    """``[n, columns]`` of the format's dtype."""
    scales: torch.Tensor
    """Bytes in 128x4 layout, ``[pad128(n), pad4(k / scale_block)]`` uint8."""
    global_scale: torch.Tensor | None
    """NVFP4: float32 ``[1]``, a factor of all values (``alpha``)."""


def best_rule(weight_format: str) -> mx_cpu.ScaleRule:
    """The scale rule that leaves less error in a format: the better of two scales; MXFP8 gains nothing by it."""
    return "amax" if weight_format == "mxfp8" else "mse"


def quantize_weight(
    weight: torch.Tensor, weight_format: WeightFormat, scale_rule: mx_cpu.ScaleRule | None = None
) -> BlockScaledWeight:
    """A weight in a block-scaled format, by chunks of rows.

    Parameters
    ----------
    weight : torch.Tensor
        ``[n, k]`` bfloat16, float16 or float32 on any device; k a positive multiple of 32.
    weight_format : str
        One of :data:`WEIGHT_FORMATS`.
    scale_rule : str, optional
        ``"amax"``: the smallest scale with which no value of the block saturates (NVFP4: ``amax / 6`` rounded to
        nearest). ``"mse"``: that scale or the next finer one, whichever leaves the smaller squared error (``mx_cpu``).
        By default :func:`best_rule`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    """
    values, scales, global_scale = quantize_rows(weight, weight_format, scale_rule)
    return BlockScaledWeight(values, mx_cpu.swizzle_128x4(scales), global_scale)


def quantize_rows(
    weight: torch.Tensor, weight_format: WeightFormat, scale_rule: mx_cpu.ScaleRule | None = None
) -> BlockScaledWeight:
    """:func:`quantize_weight` with linear scales, uint8 ``[n, k / scale_block]``.

    Raises
    ------
    TypeError, ValueError
        The errors of :func:`quantize_weight`.
    """
    require_rank("weight", weight, 2, "a float matrix [n, k]")
    mx_cpu.check_float_input("weight", weight)
    require_choice("weight_format", weight_format, WEIGHT_FORMATS)
    rule = best_rule(weight_format) if scale_rule is None else mx_cpu.check_scale_rule(scale_rule)
    weight = weight.detach()
    global_scale = mx_cpu.nvfp4_global_scale(weight) if weight_format == "nvfp4" else None
    more = () if global_scale is None else (global_scale,)
    quantize = LAYOUTS[weight_format].quantize
    values, scales = zip(*(quantize(rows, *more, rule) for rows in weight.split(CHUNK_ROWS)), strict=True)
    bytes_ = torch.cat([rows.view(torch.uint8) for rows in values])  # not of every dtype of 8 bits torch has a cat
    return BlockScaledWeight(bytes_.view(values[0].dtype), torch.cat(scales), global_scale)


def dequantize_weight(weight: BlockScaledWeight, weight_format: WeightFormat, k: int) -> torch.Tensor:
    """The weight as float32 ``[n, k]``, exact unless the global scale is not a power of two.

    Raises
    ------
    TypeError, ValueError
        An unknown format; values that are no rows of ``k`` elements of it; scales of another size or dtype; a global
        scale that is no float32, or that the format does not have (None is 1).
    """
    rows, blocks = _require_weight(weight, weight_format, k)
    require_scales("scales", weight.scales, rows, k, weight.values.device, formats=LAYOUTS[weight_format].scales)
    return _dequantize(weight._replace(scales=mx_cpu.unswizzle_128x4(weight.scales, rows, blocks)), weight_format, k)


def dequantize_rows(weight: BlockScaledWeight, weight_format: WeightFormat, k: int) -> torch.Tensor:
    """:func:`dequantize_weight` of linear scales.

    Raises
    ------
    TypeError, ValueError
        The errors of :func:`dequantize_weight`.
    """
    rows, blocks = _require_weight(weight, weight_format, k)
    scales, formats = weight.scales, LAYOUTS[weight_format].scales
    require_scales("scales", scales, rows, k, weight.values.device, swizzled=False, alignment=ELEMENT, formats=formats)
    return _dequantize(weight._replace(scales=scales.view(torch.uint8).view(rows, blocks)), weight_format, k)


def _require_weight(weight: BlockScaledWeight, weight_format: WeightFormat, k: int) -> tuple[int, int]:
    """Check all but the scales; rows of the weight, and scale blocks of a row."""
    require_choice("weight_format", weight_format, WEIGHT_FORMATS)
    if not isinstance(weight, BlockScaledWeight):
        raise TypeError(f"weight is {describe(weight)}; it must be a BlockScaledWeight, as quantize_weight returns")
    layout = LAYOUTS[weight_format]
    require_rank("values", weight.values, 2, "packed rows")
    columns, rows = layout.columns(require_k_alignment("k", k)), weight.values.shape[0]
    if weight.values.shape[1] != columns or weight.values.dtype != layout.dtype:
        raise ValueError(f"values is {describe(weight.values)}; it must be {layout.dtype} [n, {columns}]")
    require_storage("values", weight.values)
    factor = weight.global_scale
    if factor is not None:
        if weight_format != "nvfp4":
            raise ValueError(f"global_scale is {describe(factor)}; {weight_format} has none, pass None")
        require_tensor("global_scale", factor, [(1,), ()], [torch.float32], weight.values.device, alignment=ELEMENT)
    return rows, k // layout.scales.block


def _dequantize(weight: BlockScaledWeight, weight_format: WeightFormat, k: int) -> torch.Tensor:
    """A valid weight with linear scales ``[n, blocks]``."""
    layout = LAYOUTS[weight_format]
    parts = [layout.dequantize(*part) for part in _chunks(weight.values, weight.scales)]
    whole = torch.cat(parts) if parts else weight.values.new_empty((0, k), dtype=torch.float32)
    return whole if weight.global_scale is None else whole * weight.global_scale


def _chunks(*matrices: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    return zip(*(matrix.split(CHUNK_ROWS) for matrix in matrices), strict=True)
