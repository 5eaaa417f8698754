"""MoE layers with MXFP4 or NVFP4 weights: inputs, and the layer in float64."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import torch

from flashinfer.tllm_enums import ActivationType
from tests.test_helpers.mx_formats import (
    assert_close,
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_mxfp4,
    quantize_mxfp8,
    swizzle_scales,
)


@dataclasses.dataclass
class Layer:
    """A layer and its batch: tokens in float32, linear scales, and arguments of cutlass_fused_moe that every mode has.

    NVFP4 weights have float8_e4m3fn scales of 16 elements each, and each GEMM has one more scale per expert.
    """

    x: torch.Tensor
    fc1_sf: torch.Tensor
    fc2_sf: torch.Tensor
    named: dict[str, Any]
    global_scales: Optional[tuple[torch.Tensor, torch.Tensor]] = None

    def matrix(self, index: int, expert: int) -> torch.Tensor:
        """The weights of FC1 or FC2 in float64."""
        packed = self.named[f"fc{index}_expert_weights"][expert]
        scales = (self.fc1_sf, self.fc2_sf)[index - 1][expert]
        if self.global_scales is None:
            return dequantize_mxfp4(packed, scales)
        rows, half = packed.shape
        ones = torch.full((rows, 2 * half // 32), 127, dtype=torch.uint8, device=packed.device)
        blocks = dequantize_mxfp4(packed, ones).view(rows, -1, 16) * scales.double().unsqueeze(-1)
        return blocks.view(rows, -1) * self.global_scales[index - 1][expert].double()

    def arguments(self, mode: str) -> dict[str, Any]:
        """Arguments of cutlass_fused_moe: W4A8 with MXFP8 tokens ("mxfp8") or with tokens that it quantizes ("half"),
        or W4A16 ("bf16")."""
        given = {**self.named, "input": self.x.to(torch.bfloat16), "output_dtype": torch.bfloat16}
        if self.global_scales is not None:
            pairs = zip((self.fc1_sf, self.fc2_sf), self.global_scales, strict=True)
            scales = [each for sf, factor in pairs for each in (swizzle_scales(sf.view(torch.uint8)), factor)]
            scales[::2] = [sf.view(torch.float8_e4m3fn) for sf in scales[::2]]
            return {**given, "quant_scales": scales, "use_w4_group_scaling": True}
        fc1_sf, fc2_sf = swizzle_scales(self.fc1_sf), swizzle_scales(self.fc2_sf)
        if mode == "bf16":
            return {**given, "quant_scales": [fc1_sf, fc2_sf], "use_w4_group_scaling": True}
        if mode == "mxfp8":
            given["input"], linear = quantize_mxfp8(self.x)
            given["input_sf"] = swizzle_scales(linear)
        ones = torch.ones(len(fc1_sf), device="cuda")
        return {**given, "quant_scales": [fc1_sf, ones, fc2_sf, ones], "use_mxfp8_act_scaling": True}


def random_nvfp4(experts: int, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed e2m1, linear E4M3 scales of 16 elements from 0.25 to 3.75, and a factor for each expert, such that a product
    with tokens of unit variance has about unit variance."""
    packed = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x28, 0x48, (experts, rows, k // 16), dtype=torch.uint8, device="cuda")
    factors = (torch.rand(experts, device="cuda") + 0.5) / (4.4 * k**0.5)
    return packed, scales.view(torch.float8_e4m3fn), factors


def make_layer(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inter: int,
    weights_format: str = "mxfp4",
    gated: bool = True,
) -> Layer:
    """Without gate rows the activation is Relu2."""
    torch.manual_seed(0)

    def bf16(*shape):
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    global_scales, fc1_rows = None, 2 * inter if gated else inter
    if weights_format == "nvfp4":
        fc1, fc1_sf, fc1_global = random_nvfp4(experts, fc1_rows, hidden)
        fc2, fc2_sf, fc2_global = random_nvfp4(experts, hidden, inter)
        global_scales = fc1_global, fc2_global
    else:
        fc1, fc1_sf = quantize_mxfp4(torch.randn(experts, fc1_rows, hidden, device="cuda") / hidden**0.5)
        fc2, fc2_sf = quantize_mxfp4(torch.randn(experts, hidden, inter, device="cuda") / inter**0.5)
    weights, ids = torch.randn(tokens, experts, device="cuda").softmax(-1).topk(top_k, dim=-1)
    named = {
        "token_selected_experts": ids.to(torch.int32),
        "token_final_scales": weights.contiguous(),
        "fc1_expert_weights": fc1,
        "fc2_expert_weights": fc2,
        "fc1_expert_biases": bf16(experts, fc1_rows),
        "fc2_expert_biases": bf16(experts, hidden),
    }
    if gated:
        numbers = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
        named |= {f"swiglu_{name}": torch.full((experts,), value, device="cuda") for name, value in numbers.items()}
    else:
        named["activation_type"] = ActivationType.Relu2
    return Layer(bf16(tokens, hidden).float(), fc1_sf, fc2_sf, named, global_scales)


def assert_layer(out: torch.Tensor, layer: Layer, w4a8: bool, first: int = 0, last: Optional[int] = None) -> None:
    """``out`` against float64; experts ``[first, last)`` of ``layer`` contribute."""
    ids = layer.named["token_selected_experts"]
    experts = len(layer.named["fc1_expert_weights"])
    fc1_bias, fc2_bias = (layer.named[f"fc{index}_expert_biases"].double() for index in (1, 2))
    x = dequantize_mxfp8(*quantize_mxfp8(layer.x)) if w4a8 else layer.x.double()
    expected = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    magnitude = torch.zeros_like(expected)
    for expert in range(first, experts if last is None else last):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        w1, w2 = layer.matrix(1, expert), layer.matrix(2, expert)
        projections = x[token] @ w1.T + fc1_bias[expert]
        if "activation_type" in layer.named:
            act = projections.clamp(min=0.0).square()
        else:
            up, gate = projections.chunk(2, dim=1)
            alpha, beta, limit = (float(layer.named[f"swiglu_{name}"][expert]) for name in ("alpha", "beta", "limit"))
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            act = gate * torch.sigmoid(alpha * gate) * (up + beta)
        if w4a8:
            act = dequantize_mxfp8(*quantize_mxfp8(act))
        share = layer.named["token_final_scales"][token, slot].double().unsqueeze(1)
        expected.index_add_(0, token, share * (act @ w2.T + fc2_bias[expert]))
        magnitude.index_add_(0, token, share * (act.abs() @ w2.abs().T + fc2_bias[expert].abs()))
    # Covers the rounding of activations to bfloat16, or to e4m3, where float32 and float64 sums may round to different
    # neighbours.
    assert_close(out, expected, 2.0**-8 * magnitude + 1e-6)
