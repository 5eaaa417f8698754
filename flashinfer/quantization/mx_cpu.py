# SPDX-License-Identifier: Apache-2.0
"""Block-scaled formats in torch's own operations, vectorized; for CPU tensors, and for what CUDA ones need once at load
time.

MXFP4, MXFP6 (e2m3), MXFP8 and MXINT8 are those of OCP Microscaling Formats v1.0, the rounding is that of upstream's
CUDA quantizers: scales are ``amax / element_max`` rounded up to a power of two (the rule ``"amax"``), values round to
nearest even and saturate.  All of it is done on the bits of float32, which hold every value exactly, so that the
results equal those of the float64 reference bit for bit.

The rule ``"mse"`` takes that scale or its half, whichever leaves the smaller squared error over the block, summed in
float32: for weights, whose quantization is done once. Its double never does: below the block's maximum it has no values
that the scale itself lacks.

NVFP4 is e2m1 with an E4M3 scale for 16 elements and a float32 factor for the matrix. Here that factor is the power of
two with which the largest block's ``amax / 6`` lies in (224, 448], so that scales, scaled values and products are exact
in float32. A block's scale is ``amax / 6`` rounded to nearest (``"amax"``), or that or ``amax / 4``, by the squared
error (``"mse"``): with the latter the two largest magnitudes are 6 and 4 of 1.5 times as fine a grid ("Four Over Six").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, get_args

import torch

from ..sm12x.checks import BLOCK_SIZE, NVFP4_SCALES, describe, is_traced, padded_scales, require_storage, round_up
from ..sm12x.checks import swizzled_size as swizzled_size
from ..tllm_enums import SfLayout

ScaleRule = Literal["amax", "mse"]
SCALE_RULES: tuple[str, ...] = get_args(ScaleRule)
CPU_LAYOUTS = (SfLayout.layout_128x4, SfLayout.layout_linear)
_MANTISSA_BITS = 23
_MXFP8_LARGEST, _MXFP4_LARGEST = 448.0 * 2.0**119, 6.0 * 2.0**125
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def swizzle_128x4(linear: torch.Tensor) -> torch.Tensor:
    """Linear scale bytes ``[..., rows, blocks]`` to the 128x4 layout ``[..., pad128(rows), pad4(blocks)]``, padded with
    0."""
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


def _scale_of_blocks(blocks: torch.Tensor, max_exponent: int, max_mantissa: int) -> torch.Tensor:
    """UE8M0 bytes of ``amax / element_max`` rounded up to a power of two, of blocks ``[..., size]``.

    ``element_max`` is ``2^max_exponent`` times the significand whose mantissa bits are ``max_mantissa``: an amax with a
    larger mantissa carries into the exponent, one with the same or a smaller mantissa does not.
    """
    carry = (1 << _MANTISSA_BITS) - 1 - max_mantissa
    amax = _block_amax(blocks)
    bits = amax.view(torch.int32)
    biased = ((bits + carry) >> _MANTISSA_BITS) - max_exponent
    if max_exponent == 0:  # byte 0 is half of the least normal number: of subnormal ones mantissas have another limit
        biased = torch.where(bits <= (1 << _MANTISSA_BITS | max_mantissa) >> 1, 0, biased)
    return torch.where(torch.isinf(amax), 254, biased.clamp(0, 254)).to(torch.uint8).contiguous()


mxfp4_scale = functools.partial(_scale_of_blocks, max_exponent=2, max_mantissa=0x400000)  # 6 = 1.5 * 2^2
mxfp6_scale = functools.partial(_scale_of_blocks, max_exponent=2, max_mantissa=0x700000)  # 7.5 = 1.875 * 2^2
mxfp8_scale = functools.partial(_scale_of_blocks, max_exponent=8, max_mantissa=0x600000)  # 448 = 1.75 * 2^8
mxint8_scale = functools.partial(_scale_of_blocks, max_exponent=0, max_mantissa=0x7E0000)  # 127 / 64 = 1.984375 * 2^0


def finer_scale(scales: torch.Tensor) -> torch.Tensor:
    """The halves of UE8M0 scales; 0, the smallest, stays."""
    return torch.where(scales != 0, scales - 1, scales)


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


def _to_int8(scaled: torch.Tensor) -> torch.Tensor:
    """Codes of MXINT8: 64ths of the value, NaN as 0."""
    return (64.0 * scaled).round().clamp(-128.0, 127.0).nan_to_num(nan=0.0).to(torch.int8)


def _round_to_e2m3(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest magnitudes of e2m3: multiples of 1/8 below 2, of 1/4 below 4, of 1/2 to 7.5."""
    magnitude = scaled.abs()
    steps = torch.where(magnitude < 2.0, 8.0, torch.where(magnitude < 4.0, 4.0, 2.0))
    return ((magnitude * steps).round() / steps).clamp(max=7.5)


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

    ``rounded`` gives what elements round to, or its magnitude. A block that the half does not better keeps its scale,
    as one with infinity or NaN does.
    """
    scaled = blocks * _inverse_scales(scales).unsqueeze(-1)
    if check_scale_rule(rule) == "amax":
        return scales, scaled
    whole = (rounded(scaled).abs() - scaled.abs()).square().sum(-1)
    half = (rounded(2.0 * scaled).abs() / 2.0 - scaled.abs()).square().sum(-1)
    chosen = torch.where(half < whole, finer_scale(scales), scales)
    return chosen, blocks * _inverse_scales(chosen).unsqueeze(-1)


def quantize_mxfp8_linear(values: torch.Tensor, scale_rule: ScaleRule = "amax") -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., K]`` floats to (e4m3 ``[..., K]``, linear scale bytes ``[..., K / 32]``)."""
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    scales = mxfp8_scale(blocks)
    scales, scaled = _choose_scales(blocks, scales, scale_rule, lambda x: _to_e4m3(x).float())
    return _to_e4m3(scaled).flatten(-2), scales


def dequantize_mxfp8_linear(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` e4m3 or e5m2 with linear scale bytes to float32."""
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * decode_scale_bytes(scales, torch.float32).unsqueeze(-1)).flatten(-2)


def quantize_mxfp4_linear(values: torch.Tensor, scale_rule: ScaleRule = "amax") -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., K]`` floats to (packed e2m1 ``[..., K / 2]``, linear scale bytes ``[..., K / 32]``); NaN gives scale
    255."""
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    scales = mxfp4_scale(blocks)
    magnitudes = torch.tensor(_E2M1_VALUES, device=values.device)
    scales, scaled = _choose_scales(blocks, scales, scale_rule, lambda x: magnitudes[_e2m1_magnitudes(x).int()])
    return _pack_e2m1(scaled), _with_nan(scales, scaled, 255)


def _with_nan(scales: torch.Tensor, blocks: torch.Tensor, nan: int) -> torch.Tensor:
    """Scale bytes with ``nan`` where a block holds a NaN, for elements that have none."""
    return torch.where(torch.isnan(blocks).any(-1), nan, scales).to(torch.uint8)


def _signs(scaled: torch.Tensor, place: int) -> torch.Tensor:
    """Sign bits, those of NaN clear, at bit ``place`` of a byte."""
    return (torch.signbit(scaled) & ~torch.isnan(scaled)).to(torch.uint8) << place


def _pack_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Blocks ``[..., blocks, size]`` as bytes ``[..., K / 2]``, the even element in the low nibble."""
    codes = (_e2m1_magnitudes(scaled) | _signs(scaled, 3)).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def round_to_mxfp8(values: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` floats as a layer's call rounds them to MXFP8, in float32.

    What exceeds 448 x 2^119, MXFP8's largest number that float32 and bfloat16 hold, becomes that: infinity too, to
    which :func:`quantize_mxfp8_linear` gives a scale of 2^127. NaN stays.
    """
    return dequantize_mxfp8_linear(*quantize_mxfp8_linear(values.float().clamp(-_MXFP8_LARGEST, _MXFP8_LARGEST)))


def round_to_mxfp4(values: torch.Tensor) -> torch.Tensor:
    """``[rows, K]`` floats as a layer's call rounds them to MXFP4, in float32: what exceeds 6 x 2^125 becomes that."""
    return dequantize_mxfp4_linear(*quantize_mxfp4_linear(values.float().clamp(-_MXFP4_LARGEST, _MXFP4_LARGEST)))


def quantize_mxint8_linear(values: torch.Tensor, scale_rule: ScaleRule = "amax") -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., K]`` floats to (int8 ``[..., K]`` in 64ths, linear scale bytes ``[..., K / 32]``); NaN gives scale
    255."""
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    scales = mxint8_scale(blocks)
    scales, scaled = _choose_scales(blocks, scales, scale_rule, lambda x: _to_int8(x).float() / 64.0)
    return _to_int8(scaled).flatten(-2), _with_nan(scales, scaled, 255)


def dequantize_mxint8_linear(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` int8 with linear scale bytes to float32; -128 is -2."""
    blocks = (values.float() / 64.0).unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * decode_scale_bytes(scales, torch.float32).unsqueeze(-1)).flatten(-2)


# --- MXFP6: the layout of a row (sm12x/types.h) -----------------------------------------------------------------------

K_BLOCK = 128
"""Elements whose nibbles lie together, with their pairs of bits after them; a row's last K block may be shorter."""
_BLOCKS = K_BLOCK // BLOCK_SIZE


def mxfp6_columns(k: int) -> int:
    """Bytes of a row of ``k`` elements: 24 for 32 of them, and 8 that nobody reads where their number is odd."""
    return round_up(k // BLOCK_SIZE * 24, 16)


def _bit_places(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The bit positions of 16 elements in their 32-bit word: the upper exponent bit's, and the sign's."""
    element = torch.arange(16, device=device)
    rotation, inside = 4 * (element // 8) + 2 * (element % 2), 8 * (element % 8 // 2)
    return inside + rotation, (inside + 7 + rotation) % 32


def _in_k_blocks(codes: torch.Tensor, blocks: int) -> list[torch.Tensor]:
    """``[..., blocks, size]`` as K blocks, and the shorter last one: ``[..., K blocks, blocks of one, size]``."""
    whole = blocks - blocks % _BLOCKS
    parts = [codes[..., :whole, :].unflatten(-2, (-1, _BLOCKS))] if whole else []
    return parts + ([codes[..., whole:, :].unsqueeze(-3)] if blocks % _BLOCKS else [])


def pack_e2m3(codes: torch.Tensor) -> torch.Tensor:
    """Six-bit codes (sign, two exponent bits, three mantissa bits) ``[..., K]`` as the bytes of MXFP6's rows."""
    blocks = codes.unflatten(-1, (-1, BLOCK_SIZE))
    nibbles = blocks & 15
    nibbles = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    upper, sign = _bit_places(codes.device)
    halves = blocks.unflatten(-1, (2, 16)).long()
    words = ((halves >> 4 & 1) << upper | (halves >> 5 & 1) << sign).sum(-1)
    pairs = words.to(torch.int32).view(torch.uint8) if words.numel() else words.new_zeros((*words.shape[:-1], 8)).byte()
    count = blocks.shape[-2]
    planes = zip(_in_k_blocks(nibbles, count), _in_k_blocks(pairs, count), strict=True)
    rows = torch.cat([torch.cat([part.flatten(-2) for part in each], -1).flatten(-2) for each in planes], -1)
    return torch.nn.functional.pad(rows, (0, mxfp6_columns(codes.shape[-1]) - rows.shape[-1]))


def unpack_e2m3(rows: torch.Tensor, k: int) -> torch.Tensor:
    """The codes ``[..., K]`` of :func:`pack_e2m3`'s rows, as uint8."""
    upper, sign = _bit_places(rows.device)
    found, at = [], 0
    blocks = k // BLOCK_SIZE
    for k_blocks, of_one in ((blocks // _BLOCKS, _BLOCKS), (1, blocks % _BLOCKS)):
        if not k_blocks or not of_one:
            continue
        part = rows[..., at : at + k_blocks * of_one * 24].unflatten(-1, (k_blocks, of_one * 24))
        at += k_blocks * of_one * 24
        nibbles = part[..., : of_one * 16].unflatten(-1, (of_one, 16))
        lower = torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(-2)
        pairs = part[..., of_one * 16 :].contiguous().view(torch.int32).unflatten(-1, (of_one, 2)).long() & 0xFFFFFFFF
        bits = pairs.unsqueeze(-1)
        above = (bits >> upper & 1) << 4 | (bits >> sign & 1) << 5
        found.append((lower | above.flatten(-2)).flatten(-3))
    return torch.cat(found, -1).to(torch.uint8)


def _e2m3_codes(scaled: torch.Tensor) -> torch.Tensor:
    value = _round_to_e2m3(scaled).nan_to_num(nan=0.0)
    upper = torch.where(value < 4.0, 16.0 + 4.0 * (value - 2.0), 24.0 + 2.0 * (value - 4.0))
    return torch.where(value < 2.0, 8.0 * value, upper).to(torch.uint8) | _signs(scaled, 5)


def quantize_mxfp6_linear(values: torch.Tensor, scale_rule: ScaleRule = "amax") -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., K]`` floats to (packed e2m3, linear scale bytes ``[..., K / 32]``); NaN gives scale 255.

    A row is :func:`mxfp6_columns` bytes; ``sm12x/types.h`` has its order.
    """
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    scales = mxfp6_scale(blocks)
    scales, scaled = _choose_scales(blocks, scales, scale_rule, _round_to_e2m3)
    return pack_e2m3(_e2m3_codes(scaled).flatten(-2)), _with_nan(scales, scaled, 255)


def dequantize_mxfp6_linear(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed e2m3 with linear scale bytes ``[..., K / 32]`` to float32 ``[..., K]``."""
    codes = unpack_e2m3(rows, BLOCK_SIZE * scales.shape[-1]).int()
    exponent, mantissa = codes >> 3 & 3, (codes & 7).float() / 8.0
    magnitude = torch.where(exponent == 0, mantissa, (1.0 + mantissa) * (1 << exponent).float() / 2.0)
    blocks = torch.where(codes >= 32, -magnitude, magnitude).unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * decode_scale_bytes(scales, torch.float32).unsqueeze(-1)).flatten(-2)


# --- NVFP4
# --------------------------------------------------------------------------------------------------------------

NVFP4_BLOCK = NVFP4_SCALES.block
_E4M3_MAX = 448.0
_E4M3_NAN = 0x7F


_ROWS_AT_ONCE = 4096  # whose float32 copies are small beside a matrix


def nvfp4_global_scale(values: torch.Tensor) -> torch.Tensor:
    """``[1]`` float32: the power of two over which the largest magnitude's sixth lies in (224, 448]; 1 of zeros.

    Infinity and NaN take no part.
    """
    amax = values.new_zeros(1, dtype=torch.float32)
    for rows in values.split(_ROWS_AT_ONCE) if values.numel() else ():
        amax = amax.maximum(rows.abs().float().nan_to_num(nan=0.0, posinf=0.0).amax())
    fraction, exponent = torch.frexp(amax.double() / (6.0 * _E4M3_MAX))
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(-126, 127)
    return torch.where(amax > 0, torch.ldexp(torch.ones_like(fraction), exponent), 1.0).float()


def nvfp4_scale(blocks: torch.Tensor, divisor: float) -> torch.Tensor:
    """E4M3 bytes of ``amax / divisor`` rounded to nearest, of blocks ``[..., size]`` over the global scale."""
    return _to_e4m3(_block_amax(blocks).clamp(max=6.0 * _E4M3_MAX) / divisor).view(torch.uint8)


def quantize_nvfp4_linear(
    values: torch.Tensor, global_scale: torch.Tensor, scale_rule: ScaleRule = "amax"
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., K]`` floats to (packed e2m1 ``[..., K / 2]``, linear E4M3 bytes ``[..., K / 16]``); NaN gives scale 0x7F.

    ``global_scale`` is :func:`nvfp4_global_scale`'s of the whole matrix, or any power of two.
    """
    blocks = (values.float() / global_scale.to(values.device)).unflatten(-1, (-1, NVFP4_BLOCK))
    magnitudes = torch.tensor(_E2M1_VALUES, device=values.device)

    def candidate(divisor: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scales, the blocks over them, and their squared errors."""
        scales = nvfp4_scale(blocks, divisor)
        wide = decode_nvfp4_scales(scales, torch.float32).unsqueeze(-1)
        scaled = torch.where(wide == 0, 0.0, blocks / wide)
        error = (magnitudes[_e2m1_magnitudes(scaled).int()] * wide - blocks.abs()).square().sum(-1)
        return scales, scaled, error

    scales, scaled, error = candidate(6.0)
    if check_scale_rule(scale_rule) == "mse":
        fine, fine_scaled, fine_error = candidate(4.0)
        better = fine_error < error
        scales = torch.where(better, fine, scales)
        scaled = torch.where(better.unsqueeze(-1), fine_scaled, scaled)
    return _pack_e2m1(scaled), _with_nan(scales, blocks, _E4M3_NAN)


def decode_nvfp4_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E4M3 bytes as ``dtype``: the sign bit is not read, 0x7F is NaN."""
    return (scales.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn).to(dtype)


def dequantize_nvfp4_linear(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[rows, K / 2]`` bytes with linear E4M3 bytes ``[rows, K / 16]`` to float32 ``[rows, K]``, without the global
    scale."""
    unit = torch.full(
        (packed.shape[0], packed.shape[1] * 2 // BLOCK_SIZE), 127, dtype=torch.uint8, device=packed.device
    )
    blocks = dequantize_mxfp4_linear(packed, unit).unflatten(-1, (-1, NVFP4_BLOCK))
    return (blocks * decode_nvfp4_scales(scales, torch.float32).unsqueeze(-1)).flatten(-2)


# --- Elements without their scales
# ----------------------------------------------------------------------------------------


class Elements(NamedTuple):
    """Rounding and packing of the elements of a format's blocks."""

    round: Callable[[torch.Tensor], torch.Tensor]
    """Values over their scales, float32 without NaN, to the nearest elements."""
    pack: Callable[[torch.Tensor], torch.Tensor]
    """Blocks ``[..., blocks, size]`` of values over their scales to rows as they are stored."""


def _nearest_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor(_E2M1_VALUES, device=scaled.device)
    return torch.copysign(magnitudes[_e2m1_magnitudes(scaled).int()], scaled)


E2M1 = Elements(_nearest_e2m1, _pack_e2m1)
E2M3 = Elements(
    lambda scaled: torch.copysign(_round_to_e2m3(scaled), scaled),
    lambda blocks: pack_e2m3(_e2m3_codes(blocks).flatten(-2)),
)
E4M3 = Elements(lambda scaled: _to_e4m3(scaled).float(), lambda blocks: _to_e4m3(blocks).flatten(-2))
INT8 = Elements(lambda scaled: _to_int8(scaled).float() / 64.0, lambda blocks: _to_int8(blocks).flatten(-2))


def _four_element_table(device: torch.device) -> torch.Tensor:
    """bfloat16 values of every pair of packed bytes: entry ``b0 + 256 b1`` holds four of them as one int64."""
    # On the CPU explicitly: torch's default device may be another one, and may differ between calls.
    nibble = torch.tensor([*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)], device="cpu")
    pair = torch.arange(65536, device="cpu")
    values = torch.stack([nibble[(pair >> shift) & 15] for shift in (0, 4, 8, 12)], 1)
    return values.to(torch.bfloat16).view(torch.int64).view(-1).to(device)


_cached_table = functools.cache(_four_element_table)


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
    table = (_four_element_table if is_traced(()) else _cached_table)(pairs.device)
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
