# SPDX-License-Identifier: Apache-2.0
"""Weights quantized with error feedback: columns that are not yet rounded compensate for the output error of each
rounded column (GPTQ, arXiv:2210.17323).

For a layer that multiplies tokens x, the squared error of its outputs is ``tr (W - Q) G (W - Q)^T``, where G is the sum
of ``x^T x`` over tokens. Columns are rounded one after the other. Let U be the upper Cholesky factor of ``G^-1``. An
error e of column j is best compensated by moving the rest of the row by ``-e / U[j, j] * U[j, j + 1:]``; the outputs'
squared error is then the sum of ``(e / U[j, j])^2`` over the columns.

Scale blocks are rounded in descending order of their inputs' energy: errors of the first cost most, and all later
blocks compensate for them. A block's scale is chosen when its turn comes, from its columns as moved so far: the scale
of the rule ``"amax"`` or the next finer one, whichever has the smaller sum above over the block.

Everything but the rounding is float64. Factors and moved columns then differ between two devices by a relative 1e-12 or
so, and codes differ only for values that lie that close to the midpoint of two codes.
"""

from __future__ import annotations

import torch

from ..sm12x.checks import describe, require_choice, require_float, require_rank, require_storage
from . import mx_cpu
from .block_scaled import LAYOUTS, WEIGHT_FORMATS, BlockScaledWeight, Layout, WeightFormat

DAMPING = 0.003
"""The share of the mean of G's diagonal that is added to the diagonal, so that directions in which the tokens have no
component still count."""

CHUNK_ROWS = 16384
"""Rows that are quantized at once; they do not depend on each other. For a hidden size of 2880 they take 380 MB in
float64."""


def feedback_factor(gram: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """The factor U of the module's docstring, float64 ``[k, k]``, up to a constant.

    Raises
    ------
    TypeError, ValueError
        The Gram matrix is no square matrix of floats, or not finite; the damping is negative or no number.
    """
    require_rank("gram", gram, 2, "a square float matrix")
    if not gram.is_floating_point() or gram.shape[0] != gram.shape[1]:
        raise ValueError(f"gram is {describe(gram)}; it must be a square float matrix")
    require_storage("gram", gram)
    require_float("damping", damping, 0.0, 1.0, "a share of the mean of gram's diagonal")
    gram = gram.double()
    if not bool(gram.isfinite().all()):
        raise ValueError("the layer's inputs hold infinities or NaN")
    mean = gram.diagonal().mean()
    if not mean > 0:  # all inputs are 0, so outputs have no error to compensate
        return torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    damped = gram / mean
    damped.diagonal().add_(damping)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)


def _by_energy(gram: torch.Tensor, size: int) -> torch.Tensor:
    """Columns in the order in which they are rounded; those of a block stay together."""
    blocks = gram.diagonal().view(-1, size).sum(1).argsort(descending=True, stable=True)
    return (blocks[:, None] * size + torch.arange(size, device=gram.device)).flatten()


def quantize_with_feedback(
    weight: torch.Tensor, gram: torch.Tensor, weight_format: WeightFormat, damping: float = DAMPING
) -> BlockScaledWeight:
    """A weight ``[n, k]`` as ``quantize_rows`` returns it, with linear scales.

    Parameters
    ----------
    weight : torch.Tensor
        bfloat16, float16 or float32, finite, on any device; k a positive multiple of 32.
    gram : torch.Tensor
        ``[k, k]``, the sum of ``x^T x`` over the layer's input rows x, on the weight's device.
    weight_format : str
        One of ``WEIGHT_FORMATS``.
    damping : float
        The share that :data:`DAMPING` describes.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    """
    require_rank("weight", weight, 2, "a float matrix [n, k]")
    mx_cpu.check_float_input("weight", weight)
    require_choice("weight_format", weight_format, WEIGHT_FORMATS)
    k = weight.shape[1]
    require_rank("gram", gram, 2, f"[{k}, {k}]")
    if gram.shape != (k, k) or gram.device != weight.device:
        raise ValueError(f"gram is {tuple(gram.shape)} on {gram.device}; it must be [{k}, {k}] on {weight.device}")
    if not bool(weight.isfinite().all()):
        raise ValueError("weight holds infinities or NaN")
    layout = LAYOUTS[weight_format]
    order = _by_energy(gram, layout.scales.block)
    factor = feedback_factor(gram[order][:, order], damping)
    global_scale = mx_cpu.nvfp4_global_scale(weight) if weight_format == "nvfp4" else None
    parts = [_rows(rows, order, factor, layout, global_scale) for rows in weight.split(CHUNK_ROWS)]
    values, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return BlockScaledWeight(values.view(layout.dtype), scales, global_scale)


def _rows(
    weight: torch.Tensor, order: torch.Tensor, factor: torch.Tensor, layout: Layout, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values as bytes, and linear scales."""
    k, size = weight.shape[1], layout.scales.block
    columns = weight.double().t()[order]  # a column's rounding then reads what lies together
    if global_scale is not None:
        columns /= global_scale
    costs = factor.diagonal().reciprocal()
    elements = torch.empty_like(columns, dtype=torch.float32)
    scales = torch.empty(k // size, len(weight), dtype=torch.uint8, device=weight.device)
    for first in range(0, k, size):
        last = first + size
        block = columns[first:last]
        chosen, scale = _choose_scale(block, costs[first:last, None], layout)
        scales[first // size] = chosen
        inverse = _inverse(scale)
        errors = torch.empty_like(block)
        for i in range(size):
            j = first + i
            elements[j] = layout.elements.round((block[i] * inverse).float())
            errors[i] = (block[i] - elements[j] * scale) * costs[j]
            block[i + 1 :] -= factor[j, j + 1 : last, None] * errors[i]
        columns[last:] -= factor[first:last, last:].t() @ errors
    in_place, block_in_place = torch.empty_like(elements), torch.empty_like(scales)
    in_place[order] = elements
    block_in_place[order[::size] // size] = scales
    blocks = in_place.t().contiguous().unflatten(-1, (-1, size))
    return layout.elements.pack(blocks).view(torch.uint8), block_in_place.t().contiguous()


def _choose_scale(block: torch.Tensor, costs: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the scale bytes ``[n]`` of columns ``[size, n]``; returns them, and the scales as float64."""
    candidates = []
    for scales in layout.candidates(block.t().float()):
        scale = layout.decode_scales(scales, torch.float32).double()
        rounded = layout.elements.round((block * _inverse(scale)).float()) * scale
        candidates.append((scales, scale, ((block - rounded) * costs).square().sum(0)))
    (whole, whole_scale, error), (finer, finer_scale, finer_error) = candidates
    better = finer_error < error
    return torch.where(better, finer, whole), torch.where(better, finer_scale, whole_scale)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """An E4M3 scale may be 0: all elements of its block are."""
    return torch.where(scale == 0, 0.0, scale.reciprocal())
