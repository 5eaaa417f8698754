"""MoE layers with MXFP4 weights: inputs, and the layer in float64."""

from __future__ import annotations

import dataclasses
from typing import Optional

import torch

from tests.test_helpers.mx_formats import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_mxfp4,
    quantize_mxfp8,
    swizzle_scales,
)


@dataclasses.dataclass
class Layer:
    """A layer and its batch; scales are linear, and 128x4 where kernels take them."""

    x: torch.Tensor  # float32 (tokens, hidden)
    ids: torch.Tensor
    weights: torch.Tensor  # of the routing
    fc1: torch.Tensor
    fc1_sf: torch.Tensor
    fc2: torch.Tensor
    fc2_sf: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_bias: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor
    limit: torch.Tensor
    ones: torch.Tensor

    @property
    def w4a8_scales(self):
        return [swizzle_scales(self.fc1_sf), self.ones, swizzle_scales(self.fc2_sf), self.ones]

    @property
    def w4a16_scales(self):
        return [swizzle_scales(self.fc1_sf), swizzle_scales(self.fc2_sf)]


def make_layer(tokens: int, top_k: int, experts: int, hidden: int, inter: int) -> Layer:
    torch.manual_seed(0)

    def bf16(*shape):
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    fc1, fc1_sf = quantize_mxfp4(torch.randn(experts, 2 * inter, hidden, device="cuda") / hidden**0.5)
    fc2, fc2_sf = quantize_mxfp4(torch.randn(experts, hidden, inter, device="cuda") / inter**0.5)
    logits = torch.randn(tokens, experts, device="cuda")
    weights, ids = logits.softmax(-1).topk(top_k, dim=-1)
    return Layer(
        bf16(tokens, hidden).float(),
        ids.to(torch.int32),
        weights.contiguous(),
        fc1,
        fc1_sf,
        fc2,
        fc2_sf,
        bf16(experts, 2 * inter),
        bf16(experts, hidden),
        torch.full((experts,), 1.702, device="cuda"),
        torch.ones(experts, device="cuda"),
        torch.full((experts,), 7.0, device="cuda"),
        torch.ones(experts, device="cuda"),
    )


def assert_layer(out: torch.Tensor, layer: Layer, w4a8: bool, first: int = 0, last: Optional[int] = None) -> None:
    """``out`` against float64; experts ``[first, last)`` of ``layer`` contribute."""
    last = layer.fc1.shape[0] if last is None else last
    x = layer.x.double()
    if w4a8:
        x = dequantize_mxfp8(*quantize_mxfp8(layer.x))
    expected = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    magnitude = torch.zeros_like(expected)
    for expert in range(first, last):
        token, slot = (layer.ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        w1 = dequantize_mxfp4(layer.fc1[expert], layer.fc1_sf[expert])
        w2 = dequantize_mxfp4(layer.fc2[expert], layer.fc2_sf[expert])
        up, gate = (x[token] @ w1.T + layer.fc1_bias[expert].double()).chunk(2, dim=1)
        limit = float(layer.limit[expert])
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(float(layer.alpha[expert]) * gate)
        act = gate * sigmoid * (up + float(layer.beta[expert]))
        if w4a8:
            act = dequantize_mxfp8(*quantize_mxfp8(act))
        share = layer.weights[token, slot].double().unsqueeze(1)
        bias = layer.fc2_bias[expert].double()
        expected.index_add_(0, token, share * (act @ w2.T + bias))
        magnitude.index_add_(0, token, share * (act.abs() @ w2.abs().T + bias.abs()))
    # The output's rounding; and of activations those to bfloat16, or the e4m3 that a
    # float32 sum and a float64 one round to different neighbours.
    unit = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-11
    bound = unit * expected.abs() + 2.0**-8 * magnitude + 1e-6
    worst = ((out.double() - expected).abs() / bound).max().item()
    assert worst <= 1, f"{worst:.2f} of the bound"
