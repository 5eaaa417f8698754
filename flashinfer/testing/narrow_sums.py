# SPDX-License-Identifier: Apache-2.0
"""How far MMAs whose sums keep few bits may lie from the exact dot product.

Published models that agree bit for bit with H100 and B200 (arXiv 2512.07004) have an MMA add in steps.  A step aligns its
products and the accumulator ``c`` to the largest exponent ``E`` among them, cuts each toward zero to a multiple of
``q = 2^(E - F)``, adds what is left exactly, and cuts the sum to ``F`` fraction bits.  ``F`` is 13 for FP8 on Ada and in
Hopper's ``wgmma``, 25 on B200.  With block scales a step is taken to be an MMA: 32 elements of one scale, or, of MXFP4 times
MXFP4, 64 of two.  The bound holds for any order of the steps, and for parts of the sum added up elsewhere and then in
float32.

Write ``B_j`` for the exact sum of step ``j``, ``R`` for the larger one of ``sum max(B_j, 0)`` and ``sum max(-B_j, 0)``, ``S``
for the number of steps and ``e`` for the bound.

1. Every accumulator is the exact sum of some steps, off by at most ``e``: ``|c| <= R + e``.
2. A step's exponent is that of a product or of the accumulator.  A subnormal element counts with the least exponent of
   its format: up to 3 above its own for e4m3, 2 for e5m2, 1 for e2m1.  So ``E_j <= E <= top``, with ``E_j`` the largest
   exponent of a product of the step and ``top`` the larger one of ``max E_j + s`` and the exponent of ``R + e``; ``s`` is
   the sum of those of the two formats.
3. What a step's products lose is known once ``E`` is: ``L_j(E) = sum_k (p_k - cut(p_k))``, signs included, which cancel.
   It is charged at the worst exponent in ``[E_j, top]``.  Where the products themselves are not known, all ``K`` of them
   lose at most ``min(K q, sum |p_k|)`` with the ``q`` of ``top``.
4. The accumulator and the sum are cut once each: ``2 q`` a step with the ``q`` of ``top``.
5. Adding parts in float32 costs at most ``S 2^-24 (R + e)``.

``e`` is the sum of 3, 4 and 5.  It stands on both sides: ``top`` is raised until the exponent of ``R + e`` does not exceed
it.  If it always does, nothing is bounded and the result is infinite.
"""

from __future__ import annotations

import torch

from .mxfp_formats import BLOCK, power_of_two

SUBNORMAL_EXPONENTS = {"mxfp4": 1, "mxfp8": 3}  # of a format: see 2.
_NOTHING = -1000  # exponent of 0
_MOST_STEPS = 64
_FLOAT32_ROUNDOFF = 2.0**-24


def _exponents(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, _NOTHING, torch.frexp(values)[1] - 1)


def step_elements(tokens: str, weights: str) -> int:
    """Elements along K of an MMA."""
    return 2 * BLOCK if tokens == weights == "mxfp4" else BLOCK


def _steps(x: torch.Tensor, w: torch.Tensor, elements: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The products ``[m, n, elements]`` of each step and their largest exponents ``[m, n]``."""
    parts = zip(x.split(elements, -1), w.split(elements, -1), strict=True)
    return [(a[:, None] * b, (_exponents(a)[:, None] + _exponents(b)).amax(-1)) for a, b in parts]


def _loss(products: torch.Tensor, least: torch.Tensor, top: torch.Tensor, bits: int) -> torch.Tensor:
    """``L_j`` at its worst exponent in ``[least, top]``: ``[m, n]``."""
    worst = torch.zeros_like(least, dtype=torch.float64)
    span = torch.where(least > _NOTHING // 2, top - least, -1)
    for below in range(int(span.amax()) + 1):
        exponent = top - below
        unit = power_of_two(exponent - bits).unsqueeze(-1)
        lost = (products - torch.trunc(products / unit) * unit).sum(-1).abs()
        worst = torch.where(exponent >= least, torch.maximum(worst, lost), worst)
    return worst


def narrow_sum_error(
    x: torch.Tensor, w: torch.Tensor, bits: int, signs_known: bool, weights: str = "mxfp4", tokens: str = "mxfp8"
) -> torch.Tensor:
    """Bound ``[m, n]`` on the error of ``x @ w.T`` in sums of ``bits`` fraction bits.

    Takes time and memory for ``m n K`` products: for small tests.

    Parameters
    ----------
    x, w : torch.Tensor
        float64 ``[m, K]`` and ``[n, K]``, values of ``tokens`` and of ``weights``; ``K`` is a multiple of 32.
    bits : int
        ``F`` above.
    signs_known : bool
        Whether ``x`` is what the implementation multiplies; otherwise its magnitudes bound that.
    weights, tokens : str
        Formats of ``w`` and ``x``: ``"mxfp4"`` or ``"mxfp8"``.
    """
    steps = _steps(x, w, step_elements(tokens, weights))
    sums = torch.stack([products.sum(-1) for products, _ in steps])
    range_of_sums = torch.maximum(sums.clamp(min=0).sum(0), (-sums).clamp(min=0).sum(0))
    magnitude = x.abs() @ w.abs().T
    if not signs_known:
        range_of_sums = magnitude
    above = SUBNORMAL_EXPONENTS[tokens] + SUBNORMAL_EXPONENTS[weights]
    top = torch.stack([least for _, least in steps]).amax(0) + above
    top = torch.maximum(top, _exponents(range_of_sums)).clamp(min=-900)
    error = torch.full_like(magnitude, torch.inf)
    for _ in range(_MOST_STEPS):
        unit = power_of_two(top - bits)
        if signs_known:
            lost = torch.stack([_loss(products, least, top, bits) for products, least in steps]).sum(0)
        else:
            lost = torch.minimum(x.shape[-1] * unit, magnitude)
        reached = range_of_sums + lost + 2 * len(steps) * unit
        error = reached * (1 + 2 * len(steps) * _FLOAT32_ROUNDOFF) - range_of_sums
        beyond = _exponents(range_of_sums + error) > top
        if not bool(beyond.any()):
            return error
        top = torch.where(beyond, top + 1, top)
    return torch.where(beyond, torch.inf, error)
