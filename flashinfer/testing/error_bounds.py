# SPDX-License-Identifier: Apache-2.0
"""How far a float32 implementation may lie from the float64 reference, element by element.

Every function returns, beside a float64 value ``v``, a bound ``e`` such that a float32 implementation of the contract
computes something within ``[v - e, v + e]``.  The bounds are worst cases, not estimates: no test tolerance is left to
choose.  An infinite bound means that float32 can overflow there, so that the contract fixes nothing.

Dot products
------------
With ``u`` the relative error of one float32 addition and ``n`` the number of additions on the longest path of a term
through the sum, in whatever order, ``|computed - exact| <= gamma * sum |x_k w_k|`` with
``gamma = n u / (1 - n u)`` (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2).  The products
themselves are exact: an e4m3 or bf16 significand times an e2m1 significand has at most 10 bits, and block scales are
powers of two.

A sum is free of error when it cannot round.  If all products of a sum are multiples of a power of two ``q`` and
``sum |x_k w_k| <= 2^24 q``, then every partial sum in every order is a multiple of ``q`` that 24 bits hold.  Test data
on a lattice (small integers, scales from a narrow range) meets this, and makes a single wrong product visible.

SwiGLU
------
``s(g) = g sigmoid(alpha g)`` has ``|s''| <= |alpha| / 2``, so an error ``d`` of ``g`` moves it by at most
``(|s'(g)| + |alpha| d / 4) d``.  Clamps are applied to the ends of the error interval.  Evaluating
``s(g) (u + beta)`` in float32 adds a relative error of ``(16 + 4 |alpha g|) 2^-24``: the argument's rounding and the
exponential's own error (CUDA C++ Programming Guide, table of single-precision functions: ``__expf`` 2 + 1.16 |x| ulp,
``expf`` and a library's vectorized one less), and one rounding for each other operation.

Requantization
--------------
Rounding to a format is monotone.  If the activation lies in ``[a - d, a + d]`` and its block's scale is ``2^s``, the
quantized value lies in ``[Q_s(a - d), Q_s(a + d)]``; the scale itself follows from the block's largest magnitude, which
is known to within its own ``d``, so the union over the scales between those of the smallest and the largest possible
``amax`` holds every outcome.  For float32-sized ``d`` the two ends agree for nearly all elements, and a rounding tie or
a scale step that may fall either way is charged in full.
"""

from __future__ import annotations

import dataclasses

import torch

from .mxfp_formats import (
    BLOCK,
    E4M3_MAX,
    block_amax,
    power_of_two,
    round_to_e4m3,
    scale_exponents,
)
from .narrow_sums import SUBNORMAL_EXPONENTS, narrow_sum_error

FLOAT32_ROUNDOFF = 2.0**-24
_FLOAT32_MAX = 3.4028234663852886e38
_UNDERFLOW = 2.0**-120  # covers products of float32 subnormals
_MAX_SCALE_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How an implementation forms float32 dot products.

    Attributes
    ----------
    unit_roundoff : float
        Relative error of one addition: ``2^-24`` rounding to nearest, ``2^-23`` for an adder that truncates.
    mma_depths : tuple of int, optional
        For a GEMM that issues MMAs of one of these depths along K: a term passes through at most as many additions inside
        its MMA and one for each MMA.  ``None`` for any order, in which there are as many as terms.
    exact_bits : int
        Sums of multiples of ``q`` are exact while magnitudes stay below ``2^exact_bits q``.
    accumulation_bits : int, optional
        Fraction bits that block-scaled MMAs keep of their sums (``narrow_sums`` derives the bound); ``None``: those of
        float32.
    weights, tokens : str
        Formats of what such MMAs multiply.
    """

    unit_roundoff: float = FLOAT32_ROUNDOFF
    mma_depths: tuple[int, ...] | None = None
    exact_bits: int = 24
    accumulation_bits: int | None = None
    weights: str = "mxfp4"
    tokens: str = "mxfp8"

    def gamma(self, k: int) -> float:
        """Relative error of a sum of ``k`` terms against the sum of their magnitudes."""
        n = k
        if self.mma_depths is not None:
            n = max(min(k, depth + -(-k // depth)) for depth in self.mma_depths)
        return n * self.unit_roundoff / (1 - n * self.unit_roundoff)


ANY_ORDER = Accumulation()
# Tensor cores add the products of an MMA and the accumulator at once and truncate. Depths of the kernel family: 16 (bf16, and
# f16 on compute capability 9.0), whose path is the longest from K = 1,024 on, 32 (MXFP8), 64 (packed MXFP4).
TENSOR_CORE = Accumulation(unit_roundoff=2.0**-23, mma_depths=(16, 32, 64), exact_bits=22)


def narrow_tensor_core(accumulation_bits: int, weights: str = "mxfp4", tokens: str = "mxfp8") -> Accumulation:
    """Tensor cores whose block-scaled MMAs keep so many fraction bits of their sums.

    Products that are multiples of ``q`` lose nothing if ``2^s sum |x_k w_k| <= 2^accumulation_bits q`` with ``s`` of
    ``narrow_sums``: that is above the exponent of any sum, and of any product as its elements are encoded.
    """
    exact_bits = accumulation_bits - SUBNORMAL_EXPONENTS[tokens] - SUBNORMAL_EXPONENTS[weights]
    return Accumulation(exact_bits=exact_bits, accumulation_bits=accumulation_bits, weights=weights, tokens=tokens)


def granularity(values: torch.Tensor) -> torch.Tensor:
    """For each row of ``[..., K]`` the largest power of two that divides all its values; infinity for a zero row.

    Rows that hold infinity or NaN get 0.
    """
    fraction, exponent = torch.frexp(values.nan_to_num(0.0, 0.0, 0.0))
    digits = (fraction.abs() * 2.0**53).long()
    lowest = (digits & -digits).double() * power_of_two(exponent - 53)
    lowest = torch.where(digits == 0, torch.inf, lowest)
    lowest = torch.where(torch.isfinite(values), lowest, 0.0)
    return lowest.amin(-1)


def scale_granularity(linear_scales: torch.Tensor) -> torch.Tensor:
    """A power of two that divides every value of an MXFP4 row with these scales: half its smallest scale."""
    return power_of_two(linear_scales.to(torch.int32).amin(-1) - 128)


def dot_error(
    x: torch.Tensor,
    w: torch.Tensor,
    w_granularity: torch.Tensor,
    accumulation: Accumulation,
    *,
    signs_known: bool = True,
) -> torch.Tensor:
    """Bound ``[m, n]`` on the error of ``x @ w.T`` in float32.

    ``x`` is ``[m, K]``, ``w`` ``[n, K]`` and ``w_granularity`` ``[n]`` a power of two that divides the row.  Without
    ``signs_known`` the magnitudes of ``x`` bound those of what is multiplied, and no more is known of it.
    """
    magnitude = x.abs() @ w.abs().T
    if accumulation.accumulation_bits is None:
        error = accumulation.gamma(x.shape[-1]) * magnitude
    else:
        formats = accumulation.weights, accumulation.tokens
        error = narrow_sum_error(x, w, accumulation.accumulation_bits, signs_known, *formats)
    unit = torch.outer(granularity(x), w_granularity)
    error = torch.where(magnitude <= 2.0**accumulation.exact_bits * unit, 0.0, error)
    return torch.where(magnitude > _FLOAT32_MAX, torch.inf, error)


def affine_error(
    product: torch.Tensor,
    error: torch.Tensor,
    factor: torch.Tensor | float,
    result: torch.Tensor,
) -> torch.Tensor:
    """Bound on ``factor * product + addend`` in float32: ``error`` of the product, and one rounding for each operation."""
    scaled = (error * factor).abs()
    return scaled + FLOAT32_ROUNDOFF * ((product * factor).abs() + result.abs() + 2 * scaled)


def swiglu(
    up: torch.Tensor,
    gate: torch.Tensor,
    up_error: torch.Tensor,
    gate_error: torch.Tensor,
    alpha: float,
    beta: float,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``g sigmoid(alpha g) (u + beta)`` of the clamped gate and up projections, and its bound."""
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    g_error = torch.maximum(
        (gate + gate_error).clamp(max=limit) - g,
        g - (gate - gate_error).clamp(max=limit),
    )
    u_error = torch.maximum(
        (up + up_error).clamp(-limit, limit) - u,
        u - (up - up_error).clamp(-limit, limit),
    )
    sigmoid = torch.sigmoid(alpha * g)
    swish = g * sigmoid
    slope = (sigmoid + alpha * g * sigmoid * (1 - sigmoid)).abs()
    swish_error = (slope + abs(alpha) * g_error / 4) * g_error
    linear = (u + beta).abs()
    error = swish.abs() * u_error + linear * swish_error + u_error * swish_error
    evaluation = (16 + 4 * (alpha * g).abs()) * FLOAT32_ROUNDOFF
    value = swish * (u + beta)
    magnitude = (swish.abs() + swish_error) * (u.abs() + abs(beta) + u_error)
    return value, error + evaluation * magnitude + _UNDERFLOW * (1 + g.abs() + linear)


def requantize_mxfp8(values: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 values (dequantized) of ``values``, and how far those of anything within ``error`` can lie from them."""
    k = values.shape[-1]
    low = block_amax((values.abs() - error).clamp(min=0))
    high = block_amax(values.abs() + error)
    exact = scale_exponents(block_amax(values), E4M3_MAX)
    first, last = scale_exponents(low, E4M3_MAX), scale_exponents(high, E4M3_MAX)

    def quantize(v: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        scales = power_of_two(exponents).repeat_interleave(BLOCK, dim=-1)[..., :k]
        return round_to_e4m3(v / scales) * scales

    reference = quantize(values, exact)
    smallest, largest = reference, reference
    for step in range(_MAX_SCALE_STEPS):
        exponents = torch.minimum(first + step, last)
        smallest = torch.minimum(smallest, quantize(values - error, exponents))
        largest = torch.maximum(largest, quantize(values + error, exponents))
    radius = torch.maximum(largest - reference, reference - smallest)
    # A block of nothing but noise can have any scale up to the last: charge that scale's widest rounding.
    coarse = 16 * power_of_two(last).repeat_interleave(BLOCK, dim=-1)[..., :k]
    many = (last - first >= _MAX_SCALE_STEPS).repeat_interleave(BLOCK, dim=-1)[..., :k]
    radius = torch.where(many, error + 2 * coarse, radius)
    return reference, torch.where(torch.isinf(error), torch.inf, radius)


def round_to_bfloat16(values: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 roundings of ``values``, and how far those of anything within ``error`` can lie from them."""
    reference, smallest, largest = (v.float().bfloat16().double() for v in (values, values - error, values + error))
    return reference, torch.maximum(largest - reference, reference - smallest)


class BoundViolation(AssertionError):
    """An element lies outside its bound; the message tells which, and by how much."""


def check_within_bound(actual: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, what: str = "") -> float:
    """Assert that ``actual`` is the rounding to its dtype of something within ``bound`` of ``reference``.

    Rounding is monotone, so the ends of the interval are rounded and compared, and no tolerance for the output dtype is
    needed.  Where ``reference`` is NaN ``actual`` must be; where ``bound`` is infinite nothing is asked.

    Returns
    -------
    float
        The largest distance from the reference over the bound plus half a unit in the last place: how much of the room
        was used, at most about 1.

    Raises
    ------
    BoundViolation
        With the number of elements outside, and the worst one.
    """
    if actual.shape != reference.shape:
        raise BoundViolation(f"{what}: shape {tuple(actual.shape)}, expected {tuple(reference.shape)}")
    if actual.numel() == 0:
        return 0.0
    free = torch.isinf(bound)
    wanted_nan = torch.isnan(reference) & ~free
    low = (reference - bound).float().to(actual.dtype)
    high = (reference + bound).float().to(actual.dtype)
    inside = (actual >= low) & (actual <= high)
    good = torch.where(wanted_nan, torch.isnan(actual), inside) | free
    judged = ~(free | wanted_nan) & torch.isfinite(actual)
    distance = (actual.double() - reference).abs()
    half_ulp = torch.finfo(actual.dtype).eps / 2 * reference.abs()
    room = bound + half_ulp + torch.finfo(actual.dtype).smallest_normal
    used = torch.where(judged & good & (room > 0), distance / room, 0.0)
    if bool(good.all()):
        return float(used.max())
    excess = torch.where(good, -1.0, (distance - bound).nan_to_num(torch.inf))
    worst = tuple(int(i) for i in (excess == excess.max()).nonzero()[0])
    raise BoundViolation(
        f"{what}: {int((~good).sum())} of {good.numel()} elements outside their bound; worst at {worst}: "
        f"got {float(actual[worst])!r}, reference {float(reference[worst])!r} +- {float(bound[worst]):.3g}"
    )
