# SPDX-License-Identifier: Apache-2.0
"""The gated activations that the MoE kernels compute (``moe/swiglu.cuh``), by ``ActivationType``'s numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Activation(NamedTuple):
    """What is made of an expert's up and gate rows."""

    name: str
    compute: Callable[..., torch.Tensor]
    """Of up and gate rows, float32, and one number for each of ``defaults``; NaN passes through the clamps."""
    defaults: dict[str, float]
    """The arguments of ``cutlass_fused_moe`` that give each expert a number, and that number without them."""


def swiglu(up: torch.Tensor, gate: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    """``g sigmoid(alpha g) (u + beta)`` of the clamped projections."""
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def swiglu_step(up: torch.Tensor, gate: torch.Tensor, limit: float) -> torch.Tensor:
    """``min(silu(g), limit) clamp(u, -limit, limit)``."""
    return (gate * torch.sigmoid(gate)).clamp(max=limit) * up.clamp(-limit, limit)


_SWIGLU = Activation("Swiglu", swiglu, {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": float("inf")})
SWIGLU = 3
ACTIVATIONS = {
    SWIGLU: _SWIGLU,
    5: _SWIGLU,  # SwigluBias, Swiglu with its parameters by another name
    7: Activation("SwigluStep", swiglu_step, {"swiglu_limit": 7.0}),  # kDefaultStepLimit
}
