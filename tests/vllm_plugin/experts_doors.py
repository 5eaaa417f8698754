# SPDX-License-Identifier: Apache-2.0
"""The checkpoints by which experts of other models than gpt-oss come to this fork, behind one interface for tests."""

from __future__ import annotations

from typing import Any

import checkpoint
import experts_reference
import test_vllm_nvfp4 as nvfp4
import test_vllm_other_models as mxfp4
import torch

HIDDEN, INTER, EXPERTS, TOP_K = nvfp4.HIDDEN, nvfp4.INTER, nvfp4.EXPERTS, nvfp4.TOP_K
MXFP4 = ("DeepSeek-V4", "Quark")
DOORS = (*MXFP4, *nvfp4.DOORS)
# With W4A8 from the first token on; NVFP4 has no such mode.
WAYS = [*((door, "auto") for door in DOORS), *((door, "mxfp4-a8") for door in MXFP4)]


def built(door: str, **options: Any) -> Any:
    """The layer as vLLM builds it; on CPU tensors vLLM's NVFP4 preparation needs ``Tensor.cuda`` patched."""
    return (mxfp4 if door in MXFP4 else nvfp4).built(door, **options)


def weights(door: str, seed: int) -> Any:
    return mxfp4.expert_weights(seed) if door in MXFP4 else nvfp4.experts_of(seed)


def offer(layer: Any, door: str, given: Any) -> None:
    """Give the weights to the layer's weight loaders."""
    if door in MXFP4:
        mxfp4.offer(layer, given)
    else:
        nvfp4.offer(layer, door, given)


def prepare(layer: Any, config: Any) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(layer, config.model_config, torch.device("cpu"))


def matrices(door: str, given: Any) -> list[dict[str, torch.Tensor]]:
    """Each expert's matrices in float32."""
    if door not in MXFP4:
        return [{name: matrix.dense for name, matrix in expert.items()} for expert in given]
    dense = {
        name: checkpoint.dequantize(values.unflatten(-1, (-1, 16)), scales) for name, (values, scales) in given.items()
    }
    return [{name: each[number] for name, each in dense.items()} for number in range(EXPERTS)]


def rounding(moe: str) -> Any:
    """What becomes of tokens and activations of few tokens, given the plugin's choice."""
    return experts_reference._mxfp8 if moe == "mxfp4-a8" else lambda values: values.to(torch.bfloat16).float()


def routed_experts(layer: Any) -> Any:
    return layer.routed_experts


def fused_experts(layer: Any) -> Any:
    return routed_experts(layer).quant_method.moe_kernel.fused_experts


def random_tokens(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of their experts, bfloat16."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((tokens, HIDDEN), generator=generator).to(torch.bfloat16)
    return hidden, torch.randn((tokens, EXPERTS), generator=generator).to(torch.bfloat16)


def run(layer: Any, config: Any, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    from vllm.forward_context import set_forward_context

    with torch.inference_mode(), set_forward_context(None, config, num_tokens=len(hidden)):
        return layer(hidden, logits).float()
