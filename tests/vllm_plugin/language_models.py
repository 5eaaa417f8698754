# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of other models than gpt-oss, with random weights, and transformers' models of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 12_013,  # rows of padding: vLLM's vocabularies are multiples of 64
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def write_llama(folder: Path, seed: int, **changes: Any) -> Path:
    """A dense Llama; ``tie_word_embeddings=True``: without a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _write(folder, seed, LlamaForCausalLM, LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **changes}))


def _write(folder: Path, seed: int, of_class: Any, config: Any) -> Path:
    print("seed", seed)
    torch.manual_seed(seed)
    model = of_class(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and ("lm_head" in name or "embed" in name):
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    """transformers' model of a checkpoint, in bf16."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()


def in_pytorch(monkeypatch: Any) -> None:
    """Have vLLM build its activation without its CUDA operator."""
    monkeypatch.setattr(torch.ops._C, "silu_and_mul", None, raising=False)


def native(model: Any) -> Any:
    """The model with vLLM's rope, norms and activations in PyTorch."""
    from vllm.model_executor.custom_op import CustomOp

    for module in model.modules():
        if isinstance(module, CustomOp):
            module._forward_method = module.forward_native
    return model


def changed(folder: Path, **changes: Any) -> None:
    """Change a checkpoint's configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


EXPERTS, TOP_K, INTER = 4, 2, 64


def write_qwen3_moe(folder: Path, seed: int) -> Path:
    """A Qwen3-MoE whose experts are NVFP4 as modelopt's checkpoints have them; all else, the head too, is bf16."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from flashinfer.quantization import mx_cpu

    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": INTER}
    config = Qwen3MoeConfig(**{**SIZES, **sizes, "tie_word_embeddings": False, "norm_topk_prob": True})
    _write(folder, seed, Qwen3MoeForCausalLM, config)
    (file,) = folder.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        factor = mx_cpu.nvfp4_global_scale(tensor)
        values, scales = mx_cpu.quantize_nvfp4_linear(tensor, factor)
        tensors |= {f"{stem}.weight": values, f"{stem}.weight_scale": scales.view(torch.float8_e4m3fn)}
        tensors |= {f"{stem}.weight_scale_2": factor.reshape(()), f"{stem}.input_scale": torch.tensor(0.01)}
    save_file(tensors, file, {"format": "pt"})
    ignore = ["lm_head", "*self_attn*", "*mlp.gate"]
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ignore}
    changed(folder, quantization_config=quantization)
    return folder
