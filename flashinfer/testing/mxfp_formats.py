# SPDX-License-Identifier: Apache-2.0
"""Block-scaled formats in float64, written to be read next to the OCP Microscaling Formats specification v1.0.

Every function works on any device and keeps its tensors there.  Values are exact: e2m1, e2m3, e4m3, e5m2, int8 and
UE8M0 all fit float64, and so do their products.  MXFP6's order in memory is this project's (``sm12x/types.h``); NVFP4
is e2m1 with an E4M3 scale, whose sign is not read, for 16 elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

BLOCK = 32  # elements along K that share one scale (section 5.2)
NAN_SCALE = 255  # UE8M0 (section 5.4.1)
SCALE_BIAS = 127
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # section 5.3.3


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """``2^exponents`` as float64, exact; integer ``exponents`` in [-1022, 1023]."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """``2^(s - 127)`` of UE8M0 bytes, NaN for 255, as float64 of the same shape."""
    scales = scales.view(torch.uint8)
    values = power_of_two(scales.to(torch.int32) - SCALE_BIAS)
    return torch.where(scales == NAN_SCALE, torch.nan, values)


def lowest_bits(values: torch.Tensor) -> torch.Tensor:
    """The largest power of two that divides each float64 value: infinity for 0, 0 for what is not finite."""
    bits, magnitude = values.contiguous().view(torch.int64), values.abs()
    without = (bits & (bits - 1)).view(torch.float64)  # the last digit of the mantissa, if it has any
    lowest = torch.where(bits & (1 << 52) - 1 == 0, magnitude, (values - without).abs_())
    lowest = lowest.masked_fill_(magnitude == 0, torch.inf)
    return torch.where(magnitude < torch.inf, lowest, 0.0)


def _e2m1_table(device: torch.device) -> torch.Tensor:
    return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64, device=device)


def _look_up_nibbles(packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Entries of a float64 table of 16: bytes ``[..., n]`` to ``[..., 2 n]``, the low nibble first."""
    # Entry b of the table of all bytes is the pair (low nibble, high nibble), kept as one complex number.
    pairs = torch.complex(table.repeat(16), table.repeat_interleave(16))
    codes = packed.contiguous().view(torch.uint8)
    values = torch.view_as_real(pairs.index_select(0, codes.flatten().to(torch.int32)))
    return values.view(*codes.shape[:-1], -1)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Values of packed e2m1: bytes ``[..., n]`` to float64 ``[..., 2 n]``, the low nibble first."""
    return _look_up_nibbles(packed, _e2m1_table(packed.device))


def _scale_(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` times linear scales ``[..., ceil(K / 32)]``, in place: an expert of gpt-oss-120b is 200 MB."""
    k = values.shape[-1]
    if k % BLOCK == 0:
        values.unflatten(-1, (-1, BLOCK)).mul_(decode_scales(scales).unsqueeze(-1))
        return values
    return values.mul_(_per_element(scales, k))


def _per_element(scales: torch.Tensor, k: int) -> torch.Tensor:
    return decode_scales(scales).repeat_interleave(BLOCK, dim=-1)[..., :k]


def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K / 2]`` bytes with linear scales ``[..., ceil(K / 32)]`` to float64 ``[..., K]``."""
    return _scale_(decode_e2m1(packed), scales)


def dequantize_mxfp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` e4m3 or e5m2 with linear scales ``[..., ceil(K / 32)]`` to float64 ``[..., K]``."""
    return _scale_(values.to(torch.float64, copy=True), scales)


_INT8_UNIT = 2.0**-6  # section 5.3.5
E2M3_MAX = 7.5
NVFP4_BLOCK = 16
NVFP4_NAN_SCALE = 0x7F
_E2M3_MAGNITUDES = (*(m / 8 for m in range(8)), *(2.0**e * (1 + m / 8) for e in range(3) for m in range(8)))  # 5.3.4


def dequantize_mxint8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int8 ``[..., K]`` with linear UE8M0 scales ``[..., K / 32]`` to float64 ``[..., K]``."""
    return _scale_(values.double() * _INT8_UNIT, scales)


def _bits_of_mxfp6(k: int) -> torch.Tensor:
    """Places ``[K, 6]`` of an element's bits in its row, the sign first: bit ``p % 8`` of byte ``p // 8``."""
    places = []
    for element in range(k):
        word, i = divmod(element, 128)  # two planes: 16 bytes of each block, then 8 of each
        block, i = divmod(i, 32)
        blocks = min(4, (k - 128 * word) // 32)
        nibble = 8 * (96 * word + 16 * block) + 4 * i
        half, i = divmod(i, 16)
        rotation = 4 * (i // 8) + 2 * (i % 2)
        pairs, byte = 8 * (96 * word + 16 * blocks + 8 * block + 4 * half), 8 * (i % 8 // 2)
        sign = pairs + (byte + 7 + rotation) % 32
        places.append([sign, pairs + byte + rotation, nibble + 3, nibble + 2, nibble + 1, nibble])
    return torch.tensor(places)


def decode_e2m3(rows: torch.Tensor, k: int) -> torch.Tensor:
    """Values of MXFP6's packed rows ``[n, bytes]``, float64 ``[n, k]``."""
    places = _bits_of_mxfp6(k).to(rows.device)
    bits = rows.long()[:, places // 8] >> places % 8 & 1
    codes = (bits[..., 1:] * torch.tensor([16, 8, 4, 2, 1], device=rows.device)).sum(-1)
    magnitudes = torch.tensor(_E2M3_MAGNITUDES, dtype=torch.float64, device=rows.device)[codes]
    return torch.where(bits[..., 0] == 1, -magnitudes, magnitudes)


def dequantize_mxfp6(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed rows ``[n, bytes]`` with linear UE8M0 scales ``[n, K / 32]`` to float64 ``[n, K]``."""
    return _scale_(decode_e2m3(rows, BLOCK * scales.shape[-1]), scales)


def decode_nvfp4_scales(scales: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes without their sign bits as float64, NaN for 0x7F."""
    magnitudes = scales.view(torch.uint8) & 0x7F
    return magnitudes.view(torch.float8_e4m3fn).double()


def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[n, K / 2]`` bytes with linear E4M3 scales ``[n, K / 16]`` to float64 ``[n, K]``, without the global scale."""
    blocks = decode_e2m1(packed).unflatten(-1, (-1, NVFP4_BLOCK))
    return (blocks * decode_nvfp4_scales(scales).unsqueeze(-1)).flatten(-2)


def scale_exponents(amax: torch.Tensor, element_max: float, saturates: bool = False) -> torch.Tensor:
    """Exponents of the scales for blocks of largest magnitude ``amax``: ``amax / element_max`` up to a power of two.

    Clamped to what UE8M0 holds, [-127, 127]; ``amax = 0`` gives -127, infinity 127. Where it ``saturates``, as rounding
    inside a call does, the largest is that with which ``element_max`` is a float32, and infinity gives that.
    """
    largest = 128 - math.frexp(element_max)[1] if saturates else 127
    fraction, exponent = torch.frexp(amax.double() / element_max)
    # frexp gives [0.5, 1) * 2^exponent, and 0.5 * 2^exponent is itself a power of two.  Dividing by 448 or 6 rounds,
    # but never across a power of two: float64 has room for amax of any smaller format.
    rounded_up = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(-127, largest)
    rounded_up = torch.where(amax == 0, -127, rounded_up)
    return torch.where(torch.isinf(amax), largest, rounded_up)


def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Float64 values rounded to the nearest e4m3, ties to even, saturated to 448; NaN stays."""
    magnitude = values.abs().clamp(max=E4M3_MAX)
    _, exponent = torch.frexp(magnitude)
    # A value in [2^e, 2^(e+1)) has e4m3 neighbours 2^(e-3) apart; below 2^-6 they stay 2^-9 apart.
    quantum = power_of_two((exponent - 1).clamp(min=-6) - 3)
    return torch.copysign((torch.round(magnitude / quantum) * quantum).clamp(max=E4M3_MAX), values)


def block_amax(values: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each scale block of ``[..., K]``, NaN left out; ``[..., ceil(K / 32)]``."""
    k = values.shape[-1]
    padded = torch.nn.functional.pad(values.abs().nan_to_num(nan=0.0, posinf=torch.inf), (0, -k % BLOCK))
    return padded.unflatten(-1, (-1, BLOCK)).amax(-1)


def quantize_mxint8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float ``[..., K]`` to (int8 ``[..., K]``, linear UE8M0 ``[..., K / 32]``).

    The scale is ``amax / (127 / 64)`` rounded up to a power of two; a block that holds a NaN gets the NaN scale.
    """
    scales = _scales_of(values, 127 * _INT8_UNIT)
    scaled = values.double() / _per_element(scales, values.shape[-1])
    codes = torch.round(scaled / _INT8_UNIT).clamp(-128, 127).nan_to_num(nan=0.0)
    return codes.to(torch.int8), _nan_scales(scales, values)


def quantize_mxfp6(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float ``[n, K]`` to (packed e2m3 rows, linear UE8M0 ``[n, K / 32]``); the scale is ``amax / 7.5``, as above."""
    k = values.shape[-1]
    scales = _scales_of(values, E2M3_MAX)
    scaled = values.double() / _per_element(scales, k)
    codes = _nearest_codes(scaled, _E2M3_MAGNITUDES) + 32 * (torch.signbit(scaled) & ~torch.isnan(scaled))
    bits = codes.unsqueeze(-1) >> torch.tensor([5, 4, 3, 2, 1, 0], device=values.device) & 1
    places = _bits_of_mxfp6(k).to(values.device)
    rows = torch.zeros((len(values), -(-(k // BLOCK) * 24 // 16) * 16), dtype=torch.int64, device=values.device)
    for bit in range(6):
        rows.index_add_(1, places[:, bit] // 8, bits[..., bit] << places[:, bit] % 8)
    return rows.to(torch.uint8), _nan_scales(scales, values)


def quantize_nvfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float ``[n, K]`` to (packed e2m1 ``[n, K / 2]``, linear E4M3 ``[n, K / 16]``), for a global scale of 1.

    The scale is ``amax / 6`` in float32 to the nearest E4M3; a block that holds a NaN gets the NaN scale.
    """
    blocks = values.double().unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
    scales = round_to_e4m3((amax / E2M1_MAX).float().double())
    scaled = torch.where(scales.unsqueeze(-1) == 0, 0.0, blocks / scales.unsqueeze(-1)).flatten(-2)
    codes = _nearest_codes(scaled, E2M1_VALUES) + 8 * (torch.signbit(scaled) & ~torch.isnan(scaled))
    found = scales.float().to(torch.float8_e4m3fn).view(torch.uint8)
    found = torch.where(torch.isnan(blocks).any(-1), NVFP4_NAN_SCALE, found).to(torch.uint8)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), found


def _scales_of(values: torch.Tensor, element_max: float, saturates: bool = False) -> torch.Tensor:
    return (scale_exponents(block_amax(values.double()), element_max, saturates) + SCALE_BIAS).to(torch.uint8)


def _nan_scales(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``scales`` with NaN for each block of ``values`` that holds a NaN, because the elements' format has none."""
    isnan = torch.nn.functional.pad(torch.isnan(values), (0, -values.shape[-1] % BLOCK))
    return torch.where(isnan.unflatten(-1, (-1, BLOCK)).any(-1), NAN_SCALE, scales).to(torch.uint8)


def _nearest_codes(scaled: torch.Tensor, magnitudes: tuple[float, ...]) -> torch.Tensor:
    """Codes of the nearest magnitudes, saturated; NaN is 0. Ties go to the even code."""
    table = torch.tensor(magnitudes, dtype=torch.float64, device=scaled.device)
    distance = (scaled.abs().clamp(max=magnitudes[-1]).unsqueeze(-1) - table).abs()
    codes = torch.arange(len(magnitudes), device=scaled.device)
    even_first = torch.cat([codes[0::2], codes[1::2]])
    return torch.where(torch.isnan(scaled), 0, even_first[distance[..., even_first].argmin(-1)])


def quantize_mxfp8(values: torch.Tensor, saturates: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Float ``[..., K]`` to (e4m3 ``[..., K]``, linear UE8M0 ``[..., ceil(K / 32)]``).

    The scale is ``amax / 448`` rounded up to a power of two (byte 0 for an all-zero block); values are rounded to
    nearest even and saturated, so infinity becomes 448; NaN stays NaN and does not take part in ``amax``.
    ``saturates``: as inside a call, where no scale is above 2^119, so that every number is a float32.
    """
    scales = _scales_of(values, E4M3_MAX, saturates)
    scaled = values.double() / _per_element(scales, values.shape[-1])
    return round_to_e4m3(scaled).float().to(torch.float8_e4m3fn), scales


def quantize_mxfp4(values: torch.Tensor, saturates: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Float ``[..., K]``, K even, to (packed e2m1 bytes ``[..., K / 2]``, linear UE8M0 ``[..., ceil(K / 32)]``).

    The scale is ``amax / 6`` rounded up to a power of two (byte 0 for an all-zero block); values are rounded to nearest
    even and saturated, so infinity becomes 6.  e2m1 has no NaN: a block that holds one gets the NaN scale.
    ``saturates``: as inside a call, where no scale is above 2^125, so that every number is a float32.
    """
    scales = _scales_of(values, E2M1_MAX, saturates)
    scaled = values.double() / _per_element(scales, values.shape[-1])
    codes = _nearest_codes(scaled, E2M1_VALUES) + 8 * (torch.signbit(scaled) & ~torch.isnan(scaled))
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), _nan_scales(scales, values)


def swizzle_scales(linear: torch.Tensor) -> torch.Tensor:
    """Linear scales ``[..., rows, blocks]`` to 128x4 bytes ``[..., pad128(rows), pad4(blocks)]``; padding is 0.

    Byte of (row m, block k):
    ``(m // 128) * (KB // 4) * 512 + (k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4`` with KB the padded
    number of blocks.
    """
    rows, blocks = linear.shape[-2:]
    padded = torch.nn.functional.pad(linear.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))
    # [..., M tile, row // 32 % 4, row % 32, block tile, block % 4] -> [..., M tile, block tile, 32, 4, 4]
    swizzled = tiles.movedim((-2, -3, -4), (-4, -3, -2)).contiguous()
    return swizzled.view(padded.shape)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """128x4 scales of any integer view, ``[..., pad128(rows), *]``, to linear bytes ``[..., rows, blocks]``.

    A flat tensor is taken as one matrix.
    """
    padded_rows, padded_blocks = rows + -rows % 128, blocks + -blocks % 4
    lead = swizzled.shape[:-2]
    tiles = swizzled.contiguous().view(torch.uint8).reshape(*lead, padded_rows // 128, padded_blocks // 4, 32, 4, 4)
    linear = tiles.movedim((-4, -3, -2), (-2, -3, -4))
    return linear.reshape(*lead, padded_rows, padded_blocks)[..., :rows, :blocks].contiguous()


def with_nan_padding(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """128x4 scales whose padding is NaN: the scales of rows and blocks that do not exist, which no code may use."""
    lead = swizzled.shape[:-2]
    used = swizzle_scales(torch.ones((*lead, rows, blocks), dtype=torch.uint8, device=swizzled.device))
    return torch.where(used.view(swizzled.shape).bool(), swizzled, NAN_SCALE)


def swizzled_place(scales: torch.Tensor, rows: int, blocks: int, place: tuple[int, ...]) -> tuple[int, ...]:
    """The index, within 128x4 scales of the shape of ``scales``, of the scale of (..., row, block)."""
    lead = [index + 1 for index in place[:-2]]
    mark = torch.zeros((*lead, rows, blocks), dtype=torch.uint8)
    mark[place] = 1
    return tuple(swizzle_scales(mark).view(*lead, *scales.shape[len(lead) :]).nonzero()[0].tolist())


# Bytes that are not finite numbers: UE8M0's NaN, e4m3's two NaNs, a NaN and both infinities of e5m2.
_NOT_NUMBERS: dict[torch.dtype, tuple[float, ...]] = {
    torch.uint8: (NAN_SCALE,),
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e5m2: (0x7D, 0x7C, 0xFC),
}


def with_not_numbers(
    tensor: torch.Tensor, place: Any, values: tuple[int, ...] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of floating-point values, or of UE8M0 bytes, each with another non-finite value at ``place``, and its
    name.

    ``values``: the bytes to put there, for other formats.
    """
    for value in values or _NOT_NUMBERS.get(tensor.dtype, (torch.nan, torch.inf, -torch.inf)):
        changed = tensor.clone()
        (changed.view(torch.uint8) if tensor.dtype in _NOT_NUMBERS else changed)[place] = value
        yield f"{changed[place].float().item() if tensor.dtype is not torch.uint8 else torch.nan}", changed


def _scaled_lowest(lowest: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """:func:`lowest_bits` of scaled values, computed in place from ``lowest``, the elements' own, which tables hold."""
    return _scale_(lowest, scales).nan_to_num_(nan=0.0, posinf=torch.inf)


_LEAST_EXPONENTS = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix of a dot product, as an MMA takes it.

    Attributes
    ----------
    form : str
        ``"bf16"``, or a block-scaled format.
    values : torch.Tensor
        float64 ``[rows, K]``.
    least : torch.Tensor
        float64 ``[rows, ceil(K / 32)]``: 2 to the least exponent with which elements of a block count, their scale
        included.  A subnormal element's own is lower.
    lowest : torch.Tensor
        float64 ``[rows, K]``: :func:`lowest_bits` of ``values``, computed where they are not given.
    """

    form: str
    values: torch.Tensor
    least: torch.Tensor
    lowest: torch.Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.lowest is None:
            object.__setattr__(self, "lowest", lowest_bits(self.values))

    @classmethod
    def of_bf16(cls, values: torch.Tensor) -> Operand:
        """bfloat16 ``[rows, K]``."""
        rows, k = values.shape
        return cls(
            "bf16", values.double(), torch.full((rows, -(-k // BLOCK)), 2.0**-126, device=values.device).double()
        )

    @classmethod
    def of_mxfp8(cls, values: torch.Tensor, linear: torch.Tensor) -> Operand:
        """e4m3 or e5m2 ``[rows, K]`` with linear scales ``[rows, K / 32]``."""
        table = torch.arange(256, dtype=torch.uint8, device=values.device).view(values.dtype).double()
        codes = values.contiguous().view(torch.uint8)
        lowest = lowest_bits(table).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
        least = 2.0 ** _LEAST_EXPONENTS[values.dtype] * decode_scales(linear)
        return cls("mxfp8", dequantize_mxfp8(values, linear), least, _scaled_lowest(lowest, linear))

    @classmethod
    def of_mxfp4(cls, packed: torch.Tensor, linear: torch.Tensor) -> Operand:
        """Bytes ``[rows, K / 2]`` with linear scales ``[rows, K / 32]``."""
        lowest = _look_up_nibbles(packed, lowest_bits(_e2m1_table(packed.device)))
        return cls("mxfp4", dequantize_mxfp4(packed, linear), decode_scales(linear), _scaled_lowest(lowest, linear))

    @classmethod
    def of_mxfp6(cls, packed: torch.Tensor, linear: torch.Tensor) -> Operand:
        """Packed rows with linear scales ``[rows, K / 32]``; the least exponent of e2m3 is 0."""
        return cls("mxfp6", dequantize_mxfp6(packed, linear), decode_scales(linear))

    @classmethod
    def of_mxint8(cls, values: torch.Tensor, linear: torch.Tensor) -> Operand:
        """int8 ``[rows, K]`` with linear scales ``[rows, K / 32]``, which no MMA takes but as bfloat16."""
        return cls.as_bf16("mxint8", dequantize_mxint8(values, linear))

    @classmethod
    def of_nvfp4(cls, packed: torch.Tensor, linear: torch.Tensor) -> Operand:
        """Bytes ``[rows, K / 2]`` with linear E4M3 scales ``[rows, K / 16]``, without the global scale; as bfloat16."""
        return cls.as_bf16("nvfp4", dequantize_nvfp4(packed, linear))

    @classmethod
    def as_bf16(cls, form: str, values: torch.Tensor) -> Operand:
        """Values that are bfloat16's, whatever their format."""
        return cls(form, values, cls.of_bf16(values).least)

    def __getitem__(self, rows: Any) -> Operand:
        return Operand(self.form, self.values[rows], self.least[rows], self.lowest[rows])
