# SPDX-License-Identifier: Apache-2.0
"""Bounds on the distance of a float32 implementation from the float64 reference, element by element.

Every function returns, beside a float64 value ``v``, a bound ``e`` such that a float32 implementation of the contract
computes something within ``[v - e, v + e]``.  The bounds are worst cases, not estimates: no test tolerance is left to
choose.  An infinite bound means that float32 can overflow there, so that the contract fixes nothing.

Dot products of float32 additions
---------------------------------

With ``u`` the relative error of one float32 addition and ``n`` the number of additions on the longest path of a term
through the sum, in whatever order, ``|computed - exact| <= gamma * sum |x_k w_k|`` with
``gamma = n u / (1 - n u)`` (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2).  The
products themselves are exact: an e4m3 or bf16 significand times an e2m1 significand has at most 10 bits, and block
scales are powers of two.

Dot products of tensor cores
----------------------------

An MMA adds in steps.  A step aligns its products and the accumulator ``c`` to the largest exponent ``E`` among them,
cuts each toward zero to a multiple of ``q = 2^(E - F)``, adds what is left exactly, and cuts the sum to ``min(F, 23)``
fraction bits.  This is the published model of A100 to B200 (arXiv 2512.07004), with which the golden data of an H200
agree bit for bit at ``F = 25``; on an RTX 5090 others measured ``F`` (:data:`SM120_SUM_BITS`).  The bound holds for any
grouping of at least :data:`STEP` products into steps, and for partial sums added in float32, at most one addition for
each step.

Write ``A`` for ``sum |x_k w_k|``, ``S`` for the number of steps and ``e`` for the bound.

1. An accumulator is the exact sum of some of the products, off by at most ``e``: ``|c|
   <= R + e``. In any order, ``R`` is the larger one of the sums of the positive and of
   the negative products. Where products are added along K, so that what an accumulator
   holds is a contiguous range of blocks and a part of one more, ``R`` is at most the
   difference of the largest and the smallest sum of the first blocks, and the
   magnitudes of one block. So it is in these kernels, whose warps and blocks split K
   into ranges; the router's warps take turns.
2. A step's exponent is that of a product or of the accumulator. A subnormal element
   counts with the least exponent of its format, up to 3 above its own for e4m3, 2 for
   e5m2, 1 for e2m1. So ``E <= T``, the exponent of ``R + e`` or the sum of the largest
   exponents of the two rows.
3. With the ``q`` of ``T`` a product loses less than ``q``, and no more than itself; and
   it loses nothing where ``q`` is at most its lowest set bit ``g_k``, so at most ``q
   min(1, q / g_k)`` in any case. All of them lose at most the least of ``K q``, ``q^2
   sum 1 / g_k`` and ``A``. A token element that is itself known to within an interval
   has at least the lowest bit of its format's values at the interval's smaller end;
   where that is 0, its products are charged ``q``.
4. Each step cuts the accumulator by less than ``q`` and the sum by less than ``2^(T -
   min(F, 23))``.
5. Each addition in float32 costs at most ``2^-24 (R + e)``.

``e`` is the sum of 3, 4 and 5, and ``T`` depends on ``e``: ``T`` is raised until the exponent of ``R + e`` does not
exceed it.  If it always does, there is no bound and the result is infinite.

Exact sums
----------

A sum is free of error when it cannot round.  If all products of a sum are multiples of a power of two ``unit``, so is
every partial sum; a cut at a smaller ``q`` removes nothing, and float32 holds every multiple of ``unit`` up to
``2^24 unit``.  Test data on a lattice (small integers, scales from a narrow range) meets this, and makes a single wrong
product visible.

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
import math

import torch

from .mxfp_formats import (
    BLOCK,
    E4M3_MAX,
    Operand,
    block_amax,
    power_of_two,
    round_to_e4m3,
    scale_exponents,
)

FLOAT32_ROUNDOFF = 2.0**-24
_FLOAT32_MAX = 3.4028234663852886e38
_UNDERFLOW = 2.0**-120  # covers products of float32 subnormals
_MAX_SCALE_STEPS = 3

STEP = 8
"""Least number of products that a published tensor core adds at once (16 bits each, A100 and Ada)."""

SM120_SUM_BITS = {"bf16": 21, "f16": 21, "f8": 20, "mxf8f6f4": 20, "mxf4": 20}
"""Fraction bits ``F`` that the MMAs of an SM120 keep of a sum, as others measured an RTX 5090: 1 survives beside
``2^F`` (QuACK, ``quack/gemm_sm120.py``, 2026-07-29).  f16 and mxf4 are taken to be as bf16 and mxf8f6f4; no SM121 was
measured."""

_FRACTION_BITS = {"bf16": 7, "mxfp4": 1, "mxfp8": 3}

_MOST_ROUNDS = 64  # of raising T


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """An implementation's way of adding up dot products.

    Attributes
    ----------
    sum_bits : int, optional
        Fraction bits ``F`` that tensor cores keep of a sum; ``None``: float32 additions rounded to nearest, in any
        order.
    """

    sum_bits: int | None = None

    def gamma(self, k: int) -> float:
        """The worst error of a sum of ``k`` terms, relative to the sum of their magnitudes."""
        if self.sum_bits is None:
            error = k * FLOAT32_ROUNDOFF
        else:
            q, cut = 2.0**-self.sum_bits, 2.0 ** -min(self.sum_bits, 23)
            error = k * q + -(-k // STEP) * (q + cut + FLOAT32_ROUNDOFF)
        return error / (1 - error) if error < 1 else math.inf


ANY_ORDER = Accumulation()
TENSOR_CORE = Accumulation(min(SM120_SUM_BITS.values()))
"""An SM120's, as measured: the fewest bits that any of its MMAs keeps."""


def _power_below(values: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is at most each positive value; infinity and NaN stay."""
    powers = torch.ldexp(torch.ones_like(values), torch.frexp(values)[1] - 1)
    return torch.where(torch.isfinite(values), powers, values)


def _reach(x: Operand, x_error: torch.Tensor | None, w: Operand, along_k: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``R`` and ``A`` of "Dot products of tensor cores", ``[m, n]``."""
    block = BLOCK * (2 if x.form == w.form == "mxfp4" else 1)  # of an MMA whose elements are not in the order of K
    most = x.values.abs() if x_error is None else x.values.abs() + x_error
    total = torch.zeros(len(x.values), len(w.values), dtype=torch.float64, device=w.values.device)
    magnitude, low, high, widest = (torch.zeros_like(total) for _ in range(4))
    for first in range(0, w.values.shape[-1], block):
        part = slice(first, first + block)
        total = total + x.values[:, part] @ w.values[:, part].T
        size = most[:, part] @ w.values[:, part].abs().T
        magnitude, widest = magnitude + size, torch.maximum(widest, size)
        low, high = torch.minimum(low, total), torch.maximum(high, total)
    moved = 0.0 if x_error is None else x_error @ w.values.abs().T
    reach = (magnitude + total.abs() + moved) / 2
    return torch.minimum(reach, high - low + widest + moved) if along_k else reach, magnitude


def _largest_power(x: Operand, x_error: torch.Tensor | None = None) -> torch.Tensor:
    """2 to the largest exponent with which an element of a row counts, ``[rows]``."""
    most = x.values.abs() if x_error is None else x.values.abs() + x_error
    return torch.maximum(_power_below(most.amax(-1)), x.least.amax(-1))


def _adder_error(
    x: Operand, x_error: torch.Tensor | None, w: Operand, unit: torch.Tensor, bits: int, along_k: bool
) -> torch.Tensor:
    """``e`` of "Dot products of tensor cores"; ``unit`` divides all products, 0 where nothing is known to."""
    k = w.values.shape[-1]
    steps = -(-k // STEP)
    reach, magnitude = _reach(x, x_error, w, along_k)
    lowest = x.lowest
    uncertain: torch.Tensor | float = 0.0  # products of elements without a lowest bit
    if x_error is not None:
        smallest = (x.values.abs() - x_error).clamp(min=0)
        in_format = torch.where(smallest == 0, 0.0, _power_below(smallest) * 2.0 ** -_FRACTION_BITS[x.form])
        lowest = torch.where(x_error == 0, lowest, in_format)
        uncertain = (lowest == 0).double() @ (w.values != 0).double().T
        lowest = torch.where(lowest == 0, torch.inf, lowest)
    inverse = lowest.reciprocal() @ w.lowest.reciprocal().T
    encoded = torch.outer(_largest_power(x, x_error), _largest_power(w))
    top = torch.maximum(_power_below(reach), encoded).clamp(min=2.0**-126)
    for _ in range(_MOST_ROUNDS):
        q = top * 2.0**-bits
        cut = top * 2.0 ** -min(bits, 23)
        products = torch.minimum(torch.minimum(k * q, magnitude), q * q * inverse + q * uncertain)
        products, aligned = (torch.where(q <= unit, 0.0, lost) for lost in (products, q))
        cut = torch.where(cut <= unit, 0.0, cut)
        rounded = torch.where(reach <= 2.0**24 * unit, 0.0, FLOAT32_ROUNDOFF * reach)
        error = (products + steps * (aligned + cut + rounded)) * (1 + 2 * steps * FLOAT32_ROUNDOFF)
        error = torch.where(magnitude > _FLOAT32_MAX, torch.inf, error)
        beyond = (_power_below(reach + error) > top) & torch.isfinite(error)
        if not bool(beyond.any()):
            return error
        top = torch.where(beyond, 2 * top, top)
    return torch.where(beyond, torch.inf, error)


def dot_error(
    x: Operand, w: Operand, accumulation: Accumulation, *, x_error: torch.Tensor | None = None, along_k: bool = True
) -> torch.Tensor:
    """Bound ``[m, n]`` on the error of ``x @ w.T``.

    Parameters
    ----------
    x, w : Operand
        ``[m, K]`` and ``[n, K]``.
    accumulation : Accumulation
        The implementation's way of adding products.
    x_error : torch.Tensor, optional
        ``[m, K]``: the implementation multiplies values of the format that differ from ``x`` by at most this.  The
        bound is on the error of their product, not on its distance to ``x @ w.T``.
    along_k : bool
        Whether each partial sum of the tensor cores covers a contiguous range of K.
    """
    known = x.lowest.amin(-1)  # divides all values of a row
    if x_error is not None:
        known = torch.where((x_error == 0).all(-1), known, 0.0)
    unit = torch.outer(known, w.lowest.amin(-1))
    if accumulation.sum_bits is not None:
        return _adder_error(x, x_error, w, unit, accumulation.sum_bits, along_k)
    most = x.values.abs() if x_error is None else x.values.abs() + x_error
    magnitude = most @ w.values.abs().T
    error = torch.where(magnitude <= 2.0**24 * unit, 0.0, accumulation.gamma(w.values.shape[-1]) * magnitude)
    return torch.where(magnitude > _FLOAT32_MAX, torch.inf, error)


def affine_error(
    product: torch.Tensor,
    error: torch.Tensor,
    factor: torch.Tensor | float,
    result: torch.Tensor,
) -> torch.Tensor:
    """Bound on ``factor * product + addend`` in float32: ``error`` of the product, and one rounding for each
    operation."""
    scaled = (error * factor).abs()
    return scaled + FLOAT32_ROUNDOFF * ((product * factor).abs() + result.abs() + 2 * scaled)


def _clamped(value: torch.Tensor, error: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``value`` between ``low`` and ``high``, and how far anything within ``error`` of it can lie from that."""
    middle, above, below = (each.clamp(low, high) for each in (value, value + error, value - error))
    return middle, torch.maximum(above - middle, middle - below)


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
    g, g_error = _clamped(gate, gate_error, -torch.inf, limit)
    u, u_error = _clamped(up, up_error, -limit, limit)
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


def swiglu_step(
    up: torch.Tensor, gate: torch.Tensor, up_error: torch.Tensor, gate_error: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``min(silu(g), limit) clamp(u, -limit, limit)`` of the gate and up projections, and its bound."""
    ones = torch.ones_like(up)
    silu, error = swiglu(ones, gate, torch.zeros_like(up), gate_error, 1.0, 0.0, torch.inf)
    s, s_error = _clamped(silu, error, -torch.inf, limit)
    u, u_error = _clamped(up, up_error, -limit, limit)
    error = s.abs() * u_error + u.abs() * s_error + s_error * u_error
    return s * u, error + 2 * FLOAT32_ROUNDOFF * ((s * u).abs() + error) + _UNDERFLOW


def relu2(up: torch.Tensor, up_error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``max(u, 0)^2`` of the up projection, and its bound: ``(r + d)^2 - r^2`` where it may be off by ``d``, and the
    square's rounding."""
    r, error = _clamped(up, up_error, 0.0, torch.inf)
    largest = (r + error).square()
    bound = error * (2 * r + error) + FLOAT32_ROUNDOFF * largest + _UNDERFLOW
    return r.square(), torch.where(largest > _FLOAT32_MAX, torch.inf, bound)


def requantize_mxfp8(values: torch.Tensor, error: torch.Tensor) -> tuple[Operand, torch.Tensor]:
    """MXFP8 of ``values``, saturated as inside a call, and how far the values of anything within ``error`` can lie from
    its own."""
    k = values.shape[-1]
    low = block_amax((values.abs() - error).clamp(min=0))
    high = block_amax(values.abs() + error)
    exact, first, last = (scale_exponents(amax, E4M3_MAX, True) for amax in (block_amax(values), low, high))

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
    operand = Operand("mxfp8", reference, power_of_two(last - 6))
    return operand, torch.where(torch.isinf(error), torch.inf, radius)


def round_to_bfloat16(values: torch.Tensor, error: torch.Tensor) -> tuple[Operand, torch.Tensor]:
    """bfloat16 roundings of ``values``, and how far those of anything within ``error`` can lie from them."""
    reference, smallest, largest = (v.float().bfloat16() for v in (values, values - error, values + error))
    operand = Operand.of_bf16(reference)
    return operand, torch.maximum(largest.double() - operand.values, operand.values - smallest.double())


class BoundViolation(AssertionError):
    """An element lies outside its bound; the message tells which, and by how much."""


def check_within_bound(actual: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, what: str = "") -> float:
    """Assert that ``actual`` is the rounding to its dtype of something within ``bound`` of ``reference``.

    Rounding is monotone, so the ends of the interval are rounded and compared, and no tolerance for the output dtype is
    needed.  If ``reference`` is NaN, ``actual`` must be NaN; if ``bound`` is infinite, any value passes.

    Returns
    -------
    float
        The largest share of the allowed distance that was used, at most about 1: the distance from the reference over
            the
        bound plus half a unit in the last place.

    Raises
    ------
    BoundViolation
        Elements lie outside; the message gives their number and the worst one.
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
