# SPDX-License-Identifier: Apache-2.0
"""What ``dense_block_scaled_rescored`` must make of given coarse logits: the rows that it chooses, and their logits in
float64 with their bound."""

from __future__ import annotations

import torch

from .error_bounds import TENSOR_CORE, Accumulation, affine_error, dot_error
from .mxfp_formats import Operand
from .row_top_k_reference import largest_of_rows

TILE_ROWS = 16  # that go to a group together


def rows_of_groups(n: int, groups: int) -> list[torch.Tensor]:
    """The rows of each group, rising."""
    group = torch.arange(n) // TILE_ROWS % groups
    return [torch.nonzero(group == each).flatten() for each in range(groups)]


def rescored_rows(coarse: torch.Tensor, groups: int, rescored: int) -> torch.Tensor:
    """Bool ``[m, n]``: which of the coarse logits are replaced."""
    chosen = torch.zeros(coarse.shape, dtype=torch.bool, device=coarse.device)
    for rows in rows_of_groups(coarse.shape[1], groups):
        if len(rows):
            places = largest_of_rows(coarse[:, rows.to(coarse.device)], rescored)[1]
            chosen.scatter_(1, rows.to(coarse.device)[places], True)
    return chosen


def rescored_reference(
    coarse: torch.Tensor,
    x: torch.Tensor,
    fine: Operand,
    bias: torch.Tensor | None,
    groups: int,
    rescored: int,
    accumulation: Accumulation = TENSOR_CORE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 logits ``[m, n]`` and their bound.

    Parameters
    ----------
    coarse : torch.Tensor
        ``[m, n]`` of the logits' dtype, as the coarse weight gives them; where a row is not rescored they are the
        result, and the bound is 0.
    x : torch.Tensor
        bfloat16 ``[m, k]``.
    fine : Operand
        The fine weight ``[n, k]``.
    bias : torch.Tensor, optional
        ``[n]``.
    groups, rescored : int
        The same as in the operator.
    accumulation : Accumulation
        The implementation's way of adding up.
    """
    chosen = rescored_rows(coarse, groups, rescored)
    product = x.double() @ fine.values.T
    error = dot_error(Operand.of_bf16(x), fine, accumulation)
    result, bound = product, error
    if bias is not None:
        result = product + bias.double()
        bound = affine_error(product, error, 1.0, result)
    return torch.where(chosen, result, coarse.double()), torch.where(chosen, bound, 0.0)
