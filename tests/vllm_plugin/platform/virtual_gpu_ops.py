# SPDX-License-Identifier: Apache-2.0
"""The few operators of vLLM's compiled modules that gpt-oss needs on its way, in PyTorch: questions, norms, and the
router's top-k."""

from __future__ import annotations

import torch


def defined() -> bool:
    """Whether this process has defined the operators."""
    return bool(_kept)


def define() -> None:
    """Register them under vLLM's names; the questions are answered with no."""
    kernels = torch.library.Library("_C", "FRAGMENT")
    for name in ("fp4", "fp8", "block_fp8"):
        kernels.define(f"cutlass_scaled_mm_supports_{name}(int capability) -> bool")
        kernels.impl(f"cutlass_scaled_mm_supports_{name}", lambda capability: False, "CompositeExplicitAutograd")
    kernels.define("cutlass_group_gemm_supported(int capability) -> bool")
    kernels.impl("cutlass_group_gemm_supported", lambda capability: False, "CompositeExplicitAutograd")
    kernels.define("rms_norm(Tensor! out, Tensor input, Tensor? weight, float epsilon) -> ()")
    kernels.impl("rms_norm", rms_norm, "CPU")
    kernels.define("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()")
    kernels.impl("fused_add_rms_norm", fused_add_rms_norm, "CPU")
    moe = torch.library.Library("_moe_C", "FRAGMENT")
    moe.define(
        "topk_softmax(Tensor! weights, Tensor! ids, Tensor! token_expert, Tensor gating, bool renormalize, "
        "Tensor? bias, Tensor? is_padding) -> ()"
    )
    moe.impl("topk_softmax", topk_softmax, "CPU")
    _kept.extend((kernels, moe))


_kept: list[torch.library.Library] = []  # a library that is collected takes its operators with it


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """vLLM's kernel: what was normed is rounded before it meets the weight."""
    rows = x.float()
    out.copy_((rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """vLLM's kernel: in place."""
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    token_expert: torch.Tensor,
    gating: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    """vLLM's kernel: softmax over experts, the best ``top_k``, renormalized; rows of padding get expert -1."""
    assert bias is None
    values, chosen = gating.float().softmax(-1).topk(ids.shape[1], dim=-1)
    weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
    ids.copy_(chosen)
    if is_padding is not None:
        ids[is_padding] = -1
