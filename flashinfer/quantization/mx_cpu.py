# SPDX-License-Identifier: Apache-2.0
"""MXFP4 and MXFP8 in torch's own operations, vectorized; for CPU tensors, and for what CUDA ones need once at load time.

The formats are those of OCP Microscaling Formats v1.0, the rounding is that of upstream's CUDA quantizers: scales are
``amax / element_max`` rounded up to a power of two (the rule ``"amax"``), values round to nearest even and saturate.  All of it is done on the bits
of float32, which hold every value exactly, so that the results equal those of the float64 reference bit for bit.

The rule ``"mse"`` takes that scale or its half, whichever leaves the smaller squared error over the block, summed in
float32: for weights, whose quantization is done once. Its double never does: below the block's maximum it has no values
that the scale itself lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch

from ..sm12x.checks import BLOCK_SIZE, describe, padded_scales, require_storage
from ..sm12x.checks import swizzled_size as swizzled_size
from ..sm12x.operator import is_traced
from ..tllm_enums import SfLayout

ScaleRule = Literal["amax", "mse"]
SCALE_RULES: tuple[str, ...] = get_args(ScaleRule)
CPU_LAYOUTS = (SfLayout.layout_128x4, SfLayout.layout_linear)
_MANTISSA_BITS = 23
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def swizzle_128x4(linear: torch.Tensor) -> torch.Tensor:
    """Linear scale bytes ``[..., rows, blocks]`` to the 128x4 layout ``[..., pad128(rows), pad4(blocks)]``, padded with 0."""
    *matrices, rows, blocks = linear.shape
    padded_rows, padded_blocks = padded_scales(rows, blocks)
    padded = linear.new_zeros((*matrices, padded_rows, padded_blocks))
    padded[..., :rows, :blocks] = linear
    tiles = padded.view(*matrices, padded_rows // 128, 4, 32, padded_blocks // 4, 4)
    return tiles.transpose(-4, -2).reshape(padded.shape)


def unswizzle_128x4(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The linear ``[rows, blocks]`` of 128x4 scales of any byte-compatible shape and dtype."""
    padded_rows, padded_blocks = padded_scales(rows, blocks)
    tiles = swizzled.reshape(-1).view(torch.uint8)
    tiles = tiles.view(padded_rows // 128, padded_blocks // 4, 32, 4, 4)
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_blocks)
    return linear[:rows, :blocks]


def _block_amax(blocks: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each block; NaN takes no part in it."""
    return blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)


def _scale_bytes(amax: torch.Tensor, max_exponent: int, max_mantissa: int) -> torch.Tensor:
    """UE8M0 bytes of ``amax / element_max`` rounded up to a power of two.

    ``element_max`` is ``2^max_exponent`` times the significand whose mantissa bits are ``max_mantissa``: an amax with a larger
    mantissa carries into the exponent, one with the same or a smaller mantissa does not.
    """
    carry = (1 << _MANTISSA_BITS) - 1 - max_mantissa
    biased = ((amax.view(torch.int32) + carry) >> _MANTISSA_BITS) - max_exponent
    return torch.where(torch.isinf(amax), 254, biased.clamp(0, 254)).to(torch.uint8).contiguous()


def decode_scale_bytes(scale_bytes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """UE8M0 bytes as ``dtype``, which is float32 or bfloat16: ``2^(s - 127)``, NaN for 255."""
    exponent = scale_bytes.to(torch.int32)
    bits = torch.where(exponent > 0, exponent << _MANTISSA_BITS, 1 << (_MANTISSA_BITS - 1))
    bits[exponent == 255] = 0x7FC00000
    return bits.view(torch.float32).to(dtype)


def _inverse_scales(scale_bytes: torch.Tensor) -> torch.Tensor:
    """``2^(127 - s)`` as float32 of bytes up to 254; for that one it is the subnormal ``2^-127``."""
    return decode_scale_bytes(254 - scale_bytes, torch.float32)


def _to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _e2m1_magnitudes(scaled: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 7 of the nearest magnitude."""
    magnitude = scaled.abs()
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    # Midpoints between neighbours; a tie goes to the even code, so every other midpoint belongs to the upper one.
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        codes += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        codes += magnitude >= midpoint
    return codes


def check_scale_rule(rule: Any) -> ScaleRule:
    """``rule`` as one of :data:`SCALE_RULES`; raises ``ValueError`` for others."""
    if rule not in SCALE_RULES:
        raise ValueError(f"scale_rule is {describe(rule)}; it must be one of {', '.join(map(repr, SCALE_RULES))}")
    return cast("ScaleRule", rule)


def _choose_scales(
    blocks: torch.Tensor, scales: torch.Tensor, rule: ScaleRule, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes by ``rule``, from those of the amax rule, and the blocks over them.

    ``rounded`` gives the magnitudes, or the values, that elements round to. A block that the half does not better keeps its
    scale, as one with infinity or NaN does.
    """
    scaled = blocks * _inverse_scales(scales).unsqueeze(-1)
    if check_scale_rule(rule) == "amax":
        return scales, scaled
    whole = (rounded(scaled).abs() - scaled.abs()).square().sum(-1)
    half = (rounded(2.0 * scaled).abs() / 2.0 - scaled.abs()).square().sum(-1)
    chosen = torch.where((half < whole) & (scales != 0), scales - 1, scales)
    return chosen, blocks * _inverse_scales(chosen).unsqueeze(-1)


def quantize_mxfp8_linear(values: torch.Tensor, scale_rule: ScaleRule = "amax") -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., K]`` floats to (e4m3 ``[..., K]``, linear scale bytes ``[..., K / 32]``)."""
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    scales = _scale_bytes(_block_amax(blocks), 8, 0x600000)  # 448 = 1.75 * 2^8
    scales, scaled = _choose_scales(blocks, scales, scale_rule, lambda x: _to_e4m3(x).float())
    return _to_e4m3(scaled).flatten(-2), scales


def dequantize_mxfp8_linear(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` e4m3 or e5m2 with linear scale bytes to float32."""
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * decode_scale_bytes(scales, torch.float32).unsqueeze(-1)).flatten(-2)


def quantize_mxfp4_linear(values: torch.Tensor, scale_rule: ScaleRule = "amax") -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., K]`` floats to (packed e2m1 ``[..., K / 2]``, linear scale bytes ``[..., K / 32]``); NaN gives scale 255."""
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    scales = _scale_bytes(_block_amax(blocks), 2, 0x400000)  # 6 = 1.5 * 2^2
    magnitudes = torch.tensor(_E2M1_VALUES, device=values.device)
    scales, scaled = _choose_scales(blocks, scales, scale_rule, lambda x: magnitudes[_e2m1_magnitudes(x).int()])
    codes = _e2m1_magnitudes(scaled)
    isnan = torch.isnan(scaled)
    codes |= (torch.signbit(scaled) & ~isnan).to(torch.uint8) << 3
    scales = torch.where(isnan.any(-1), 255, scales).to(torch.uint8)
    codes = codes.flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _four_element_table(device: torch.device) -> torch.Tensor:
    """bfloat16 values of every pair of packed bytes: entry ``b0 + 256 b1`` holds four of them as one int64."""
    nibble = torch.tensor([*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)])
    pair = torch.arange(65536)
    values = torch.stack([nibble[(pair >> shift) & 15] for shift in (0, 4, 8, 12)], 1)
    return values.to(torch.bfloat16).view(torch.int64).view(-1).to(device)


_kept_table = functools.cache(_four_element_table)


def dequantize_mxfp4_linear(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``[rows, K / 2]`` bytes with linear scale bytes ``[rows, K / 32]`` to float32 or bfloat16 ``[rows, K]``.

    Both dtypes hold the products exactly, up to overflow of scales near ``2^127``.
    """
    rows, width = packed.shape
    flat = packed.reshape(-1)
    if flat.storage_offset() % 2:  # torch does not see pairs of bytes there
        flat = flat.clone()
    pairs = flat.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    # A table that a mode of torch made, as FakeTensorMode does, is that mode's.
    table = (_four_element_table if is_traced(()) else _kept_table)(pairs.device)
    values = table.index_select(0, pairs).view(torch.bfloat16)
    blocks = values.view(rows, 2 * width // BLOCK_SIZE, BLOCK_SIZE)
    if dtype is torch.bfloat16 or not bool((scales >= 252).any()):
        blocks.mul_(decode_scale_bytes(scales, torch.bfloat16).unsqueeze(-1))
        return blocks.flatten(1).to(dtype)
    return (blocks.float() * decode_scale_bytes(scales, torch.float32).unsqueeze(-1)).flatten(1)


def arrange_scales(linear: torch.Tensor, layout: SfLayout) -> torch.Tensor:
    """Linear scales ``[..., blocks]`` in ``layout``, all rows as one matrix's."""
    linear = linear.reshape(-1, linear.shape[-1])
    return swizzle_128x4(linear) if layout is SfLayout.layout_128x4 else linear


def check_layout(name: str, layout: Any) -> SfLayout:
    """``layout`` as one that the CPU makes; raises ``ValueError`` for others and for what is no layout."""
    try:
        known = SfLayout(layout)
    except ValueError:
        known = None
    if known not in CPU_LAYOUTS:
        raise ValueError(
            f"{name} is {describe(layout) if known is None else known.name}; on the CPU it must be layout_128x4 or "
            "layout_linear (layout_8x4 exists on CUDA only)"
        )
    return known


def check_float_input(name: str, tensor: Any) -> None:
    """Raise ``ValueError`` unless ``tensor`` is a float ``[..., K]`` with K a positive multiple of 32."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    last = tensor.shape[-1] if tensor.ndim else 0
    if tensor.dtype not in dtypes or tensor.layout is not torch.strided or last == 0 or last % BLOCK_SIZE:
        raise ValueError(
            f"{name} is {describe(tensor)}; it must be {', '.join(map(str, dtypes))} with a last dimension that is a "
            f"positive multiple of {BLOCK_SIZE}"
        )
    require_storage(name, tensor)
