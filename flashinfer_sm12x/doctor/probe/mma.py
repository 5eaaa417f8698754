# SPDX-License-Identifier: Apache-2.0
"""Rates of ``mma.sync`` and the fraction bits of its sums (``include/flashinfer/sm12x/probe/mma_rate.cuh``)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import torch

from flashinfer.testing import ANY_ORDER, Accumulation
from flashinfer.testing.mxfp_formats import decode_e2m1

from .target import Target, find_target

ROWS, COLUMNS, ROW_BYTES, CHAINS, WARPS = 16, 8, 32, 8, 16
ITERATIONS, WARMUP_LAUNCHES, TIMED_LAUNCHES = 16384, 10, 15  # of the rates: some milliseconds a launch
IDENTITY_SCALES = 0x7F7F
FLOAT32_FRACTION_BITS = 23
LOOKED_FOR = 40
"""The most fraction bits of a sum that are looked for."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A form of ``mma.sync``, m16n8, with float32 sums.

    Attributes:
        number: The kind's number in the binding.
        a, b: Formats: ``bf16``, ``f16``, ``e4m3``, ``e2m1 in bytes`` (``00xxxx00``) or ``e2m1``.
        k: Elements of a row, in 32 bytes.
        scaled: Takes UE8M0 block scales; SM12x only.
    """

    number: int
    a: str
    b: str
    k: int
    scaled: bool = False


KINDS = {
    "bf16": Kind(0, "bf16", "bf16", 16),
    "f16": Kind(1, "f16", "f16", 16),
    "mxf8f6f4": Kind(2, "e2m1 in bytes", "e4m3", 32, scaled=True),
    "mxf4": Kind(3, "e2m1", "e2m1", 64, scaled=True),
}

_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}
_E2M1 = decode_e2m1(torch.arange(16, dtype=torch.uint8))[::2]


def encode(values: torch.Tensor, fmt: str) -> torch.Tensor:
    """Bytes of rows of values that the format has: float ``[..., k]`` to uint8 ``[..., 32]``.

    Raises:
        ValueError: the format lacks one of the values.
    """
    if fmt in _TYPES:
        found = values.to(_TYPES[fmt])
        exact, data = found.double(), found.view(torch.uint8)
    else:
        codes = (values.double()[..., None] - _E2M1.double()).abs().argmin(-1)
        exact = _E2M1.double()[codes]
        bytes_ = codes.to(torch.uint8)
        data = bytes_ << 2 if fmt == "e2m1 in bytes" else bytes_[..., ::2] | bytes_[..., 1::2] << 4
    if not torch.equal(exact, values.double()):
        raise ValueError(f"{fmt} lacks a value of {values.flatten()[:8].tolist()} ...")
    return data.contiguous()


@dataclasses.dataclass
class Multiplied:
    """Results of a launch: ``d`` float32 ``[blocks, warps, chains, 16, 8]``, ``times`` int64 ``[blocks, 4]``."""

    d: torch.Tensor
    times: torch.Tensor


def multiply(
    target: Target,
    kind: Kind,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    iterations: int = 1,
    scales: Sequence[int] = (IDENTITY_SCALES, IDENTITY_SCALES),
    blocks: int = 1,
    warps: int = 1,
) -> Multiplied:
    """``c + iterations * (a @ b.T)`` by each warp and chain.

    Args:
        target: The device.
        kind: The kind of MMA.
        a: Float ``[16, k]``, values of the kind's format.
        b: Float ``[8, 8, k]``: chains, columns.
        c: Float32 ``[16, 8]``.
        iterations: Number of times that each product is added.
        scales: UE8M0 bytes of A's rows and of B's columns; the lowest byte is the first block's.
        blocks, warps: Blocks of the launch, and warps of a block.
    """
    place = target.device
    d = torch.full((blocks, warps, CHAINS, ROWS, COLUMNS), torch.nan, dtype=torch.float32, device=place)
    times = torch.zeros((blocks, 4), dtype=torch.int64, device=place)
    operands = [encode(a, kind.a).to(place), encode(b, kind.b).to(place), c.float().contiguous().to(place)]
    target.call("mma_rate", *operands, d, times, kind.number, *scales, iterations, writes=(d, times))
    target.synchronize()
    return Multiplied(d, times)


def random_operands(kind: Kind, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``a``, ``b`` and ``c`` whose sums are exact in any width of at least 11 bits for up to four iterations."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(values: Sequence[float], *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]

    a = drawn((0.0, 1.0, -1.0, 2.0, -2.0), ROWS, kind.k)
    b = drawn((0.0, 1.0, -1.0, 0.5, -0.5), CHAINS, COLUMNS, kind.k)
    return a, b, drawn((0.0, 1.0, -3.0, 5.0), ROWS, COLUMNS)


def wrong_results(target: Target, kind: Kind, seed: int = 1) -> int:
    """Elements that differ from the exact product, of a short run with two warps in each of two blocks."""
    a, b, c = random_operands(kind, seed)
    iterations, scales = 3, (0x807F, 0x7F7E)  # A: 2^0 and 2^1, B: 2^-1 and 2^0, of the first and the second 32 of K
    found = multiply(target, kind, a, b, c, iterations, scales, blocks=2, warps=2).d.double().cpu()
    factors = torch.ones(kind.k, dtype=torch.float64)
    if kind.scaled:
        factors[:32] *= 2.0**-1
        factors[32:] *= 2.0**1
    expected = c.double() + iterations * torch.einsum("rk,nck->nrc", a.double() * factors, b.double())
    return int((found != expected).sum())


def rate_of(times: torch.Tensor, flops_per_block: int) -> dict[str, float]:
    """``flops_per_clock`` of one SM, ``tflops`` of the GPU, and the SMs' clock meanwhile in ``gigahertz``.

    They follow from the times that a launch's blocks recorded, one block per SM.

    Args:
        times: Int64 ``[blocks, 4]``: cycles before and after, nanoseconds before and after.
        flops_per_block: Operations of each block.
    """
    first, last, began, ended = times.double().cpu().unbind(1)
    cycles, nanoseconds = last - first, ended - began
    span = float(ended.max() - began.min())
    return {
        "flops_per_clock": flops_per_block / float(cycles.median()),
        "tflops": flops_per_block * len(times) / span / 1e3,
        "gigahertz": float((cycles / nanoseconds.clamp(min=1)).median()),
    }


def measure_rate(target: Target, kind: Kind) -> dict[str, float]:
    """Medians of :func:`rate_of` with a block of 16 warps on each SM, after some launches that raise the clock."""
    a, b, c = random_operands(kind, 2)
    flops = 2 * ROWS * COLUMNS * kind.k * ITERATIONS * CHAINS * WARPS
    rates = []
    for launch in range(WARMUP_LAUNCHES + TIMED_LAUNCHES):
        done = multiply(target, kind, a, b, c, ITERATIONS, blocks=target.sm_count, warps=WARPS)
        if launch >= WARMUP_LAUNCHES:
            rates.append(rate_of(done.times, flops))
    return {name: statistics.median(rate[name] for rate in rates) for name in rates[0]}


def kinds_of(target: Target) -> dict[str, Kind]:
    """The kinds that the target has."""
    return {name: kind for name, kind in KINDS.items() if not kind.scaled or name in target.device_class.mma_kinds}


def all_sum_bits(target: Target) -> dict[str, int]:
    """:func:`sum_bits` of each kind that the target has."""
    return {name: sum_bits(target, kind) for name, kind in kinds_of(target).items()}


_measured: dict[Target, dict[str, int]] = {}


def accumulation_of(target: Target) -> Accumulation:
    """The sums of a target's tensor cores, for error bounds: the fewest bits that any kind of MMA keeps. Measured
    once."""
    if target not in _measured:
        _measured[target] = all_sum_bits(target)
    return Accumulation(min(_measured[target].values()))


def measured_widths() -> dict[str, dict[str, int]]:
    """The widths that :func:`accumulation_of` measured so far: fraction bits by kind, by the target's name."""
    return {target.name: bits for target, bits in _measured.items()}


def accumulation_on(device: torch.device) -> Accumulation:
    """The sums of the operators' backend of a device: float32 on the CPU, as measured on a GPU (the current one)."""
    return accumulation_of(find_target()) if device.type == "cuda" else ANY_ORDER


def sum_bits(target: Target, kind: Kind) -> int:
    """Fraction bits that the MMA keeps of a sum beside its largest addend, at most :data:`LOOKED_FOR`."""
    return min(_kept_of_c(target, kind), _kept_of_products(target, kind))


def _kept_of_c(target: Target, kind: Kind) -> int:
    """Fraction bits kept of ``c``.

    Two products ``p`` and ``-p`` at several distances along K are added to a ``c`` of ``p 2^-n``. The products cancel,
    so whatever the sum loses is lost from ``c``. Also, a product of 1 is added to a ``c`` of ``2^n``, as far as float32
    can hold the sum.
    """
    large = {"e4m3": 256.0, "e2m1": 4.0, "bf16": 256.0, "f16": 256.0}
    exponents = torch.arange(1, ROWS * COLUMNS + 1).view(ROWS, COLUMNS)
    a = torch.zeros(ROWS, kind.k)
    b = torch.zeros(CHAINS, COLUMNS, kind.k)
    c = 4.0 * large[kind.b] * 2.0 ** -exponents.double()
    kept = [LOOKED_FOR]
    for other in (1, kind.k // 2, kind.k - 1):
        a.zero_()[:, [0, other]] = 4.0
        b.zero_()[..., 0], b[..., other] = large[kind.b], -large[kind.b]
        d = multiply(target, kind, a, b, c).d[0, 0, 0].double().cpu()
        kept.append(_first_false((d == c).flatten()))
    a.zero_()[:, 0], b.zero_()[..., 0] = 1.0, 1.0
    c = 2.0 ** exponents.double()
    d = multiply(target, kind, a, b, c).d[0, 0, 0].double().cpu()
    beside = _first_false((d == c + 1).flatten())
    return min(kept) if beside >= FLOAT32_FRACTION_BITS else min(*kept, beside)


_EXPONENTS = {"bf16": range(-9, 9), "f16": range(-9, 9), "e4m3": range(-9, 9), "e2m1": range(-1, 3)}
"""Exponents of the powers of two that a format has; for bf16 and f16, enough of them."""


def _kept_of_products(target: Target, kind: Kind) -> int:
    """Fraction bits kept of a product, as far as the formats' range shows. Hardware may add ``c`` in another way.

    The sum has the products ``p`` and ``-p``, the largest powers of two, and a product of ``p 2^-n`` at several places
    along K. If there are two block scales, the small product is in the other block, whose scale extends e2m1's range.
    """
    exponents_a = _EXPONENTS[kind.a.split()[0]]
    exponents_b = _EXPONENTS[kind.b]
    small_a = torch.tensor([exponents_a[row % len(exponents_a)] for row in range(ROWS)]).double()
    small_b = torch.linspace(exponents_b[0], exponents_b[-1], COLUMNS).round().double()
    small = small_a[:, None] + small_b
    two_blocks = kind.scaled and kind.k == 64
    half = kind.k // 2
    places = [(0, 1, half), (0, half - 1, kind.k - 1)]
    if not two_blocks:
        places += [(0, 1, 2), (0, half, 1), (0, kind.k - 1, half)]
    kept = LOOKED_FOR
    for plus, minus, place in places:
        for shift in range(0, LOOKED_FOR, 4) if two_blocks else (0,):
            a = torch.zeros(ROWS, kind.k)
            b = torch.zeros(CHAINS, COLUMNS, kind.k)
            a[:, [plus, minus]] = 2.0 ** exponents_a[-1]
            b[..., plus], b[..., minus] = 2.0 ** exponents_b[-1], -(2.0 ** exponents_b[-1])
            a[:, place], b[..., place] = 2.0**small_a, 2.0**small_b
            scales = (IDENTITY_SCALES, IDENTITY_SCALES + shift)  # of the first block
            d = multiply(target, kind, a, b, torch.zeros(ROWS, COLUMNS), scales=scales).d[0, 0, 0].double().cpu()
            lost = (exponents_a[-1] + exponents_b[-1] + shift - small)[d != 2.0**small]
            if lost.numel():
                kept = min(kept, int(lost.min()) - 1)
    return kept


def _first_false(held: torch.Tensor) -> int:
    return int(held.long().cumprod(0).sum())
