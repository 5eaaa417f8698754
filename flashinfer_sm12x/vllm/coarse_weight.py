# SPDX-License-Identifier: Apache-2.0
"""The coarse weight of an LM head that rescores: NVFP4 tensors whose addresses stay while their values follow the bf16
weight's. Nothing of vLLM is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flashinfer.quantization.block_scaled import BlockScaledWeight

FORMAT: Any = "nvfp4"


class CoarseWeight:
    """NVFP4 memory for a weight ``[n, k]`` of this shape and device, on which ``fill`` or ``take`` has to follow.

    Attributes
    ----------
    values, scales, global_scale : torch.Tensor
        As ``dense_block_scaled_rescored`` takes them; scales in 128x4 layout.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        from flashinfer.quantization.block_scaled import LAYOUTS
        from flashinfer.sm12x.checks import padded_scales

        layout, (n, k), device = LAYOUTS[FORMAT], weight.shape, weight.device
        self.values = torch.empty((n, layout.columns(k)), dtype=layout.dtype, device=device)
        self.scales = torch.empty(padded_scales(n, k // layout.scales.block), dtype=torch.uint8, device=device)
        self.global_scale = torch.empty(1, dtype=torch.float32, device=device)
        self._sum = 0

    @torch.no_grad()
    def fill(self, weight: torch.Tensor) -> None:
        """Quantize a weight."""
        from flashinfer.quantization.block_scaled import quantize_rows

        self.take(quantize_rows(weight, FORMAT), weight)

    @torch.no_grad()
    def take(self, made: BlockScaledWeight, weight: torch.Tensor) -> None:
        """Copy what was made of ``weight`` before, with linear scales."""
        from flashinfer.quantization import mx_cpu

        assert made.global_scale is not None
        self.values.copy_(made.values)
        self.scales.copy_(mx_cpu.swizzle_128x4(made.scales))
        self.global_scale.copy_(made.global_scale)
        self._sum = _sum(weight)

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether a weight still is what the values were made of."""
        return _sum(weight) == self._sum


def _sum(weight: torch.Tensor) -> int:
    """The sum of a weight's bits, which changes with the weight but for a coincidence."""
    # By parts: torch would make int64 of all bits first, 4.6 GB for gpt-oss-120b's head.
    parts = weight.detach().view(torch.int16).split(4096)
    return int(torch.stack([bits.sum(dtype=torch.int64) for bits in parts]).sum())


def padding_mask(weight: torch.Tensor, *rows: tuple[int, int]) -> torch.Tensor | None:
    """A bias of minus infinity for rows of a weight that are in none of the ranges ``rows``, or None if all are.

    vLLM pads a vocabulary with rows of 0. Their logits are 0, which may be larger than a token's, and would be rescored
    in its place.
    """
    mask = weight.new_full((len(weight),), -torch.inf)
    for first, end in rows:
        mask[first:end] = 0
    return mask if bool(mask.isinf().any()) else None
