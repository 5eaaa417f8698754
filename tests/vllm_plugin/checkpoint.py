# SPDX-License-Identifier: Apache-2.0
"""A small gpt-oss checkpoint (``scripts/random_checkpoint.py``) and transformers' model of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import random_checkpoint
import torch
from safetensors.torch import load_file, save_file

# No size is a multiple of 128, so nothing passes that only works for padded ones; the vocabulary is no multiple of 64.
CONFIG: dict[str, Any] = {
    **random_checkpoint.GPT_OSS_20B,
    "hidden_size": 160,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 201,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "rope_scaling": {**random_checkpoint.GPT_OSS_20B["rope_scaling"], "original_max_position_embeddings": 128},
}


def write(folder: Path, seed: int, **changes: Any) -> dict[str, Any]:
    """Write a small checkpoint to ``folder``; returns its configuration."""
    print("seed", seed)
    return random_checkpoint.write(folder, seed, {**CONFIG, **changes})


def write_draft(folder: Path, seed: int, vocabulary: int, of: int = CONFIG["vocab_size"]) -> None:
    """An EAGLE3 draft for :data:`CONFIG`'s model, by the names of published ones; it knows the first ``vocabulary``
    tokens ``of`` the model's."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    hidden, inter, heads, kv, head = 160, 96, 4, 2, 40
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "num_hidden_layers": 1,
        "vocab_size": of,
        "draft_vocab_size": vocabulary,
        "max_position_embeddings": CONFIG["max_position_embeddings"],
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }

    def normal(rows: int, k: int) -> torch.Tensor:
        return (torch.randn(rows, k, generator=generator) * k**-0.5).to(torch.bfloat16)

    tensors = {
        "fc.weight": normal(hidden, 3 * hidden),
        "lm_head.weight": normal(vocabulary, hidden),
        "d2t": torch.zeros(vocabulary, dtype=torch.int64),
        "midlayer.self_attn.q_proj.weight": normal(heads * head, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": normal(kv * head, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": normal(kv * head, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": normal(hidden, heads * head),
        "midlayer.mlp.gate_proj.weight": normal(inter, hidden),
        "midlayer.mlp.up_proj.weight": normal(inter, hidden),
        "midlayer.mlp.down_proj.weight": normal(hidden, inter),
    }
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


# e2m1, sign in the highest of four bits (OCP MX v1.0).
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K / 32, 16]`` bytes with ``[..., K / 32]`` scales to float32 ``[..., K]``."""
    values = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1).flatten(-2)
    return (values * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)


def reference_model(folder: Path, change: Any = None) -> Any:
    """transformers' model in float32 of the checkpoint's weights, experts dequantized.

    ``change(name, tensor)`` may replace a bf16 tensor by the one that quantizing it leaves.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    tensors = {name: change(name, tensor) if change else tensor for name, tensor in load(folder).items()}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        dense = dequantize(tensors.pop(name), tensors.pop(f"{stem}_scales"))
        tensors[stem] = dense.transpose(1, 2).contiguous()
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    values = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "quantization_config"}
    model = GptOssForCausalLM(GptOssConfig(**values, attn_implementation="eager", experts_implementation="eager"))
    model = model.float().eval()
    missing, unexpected = model.load_state_dict({n: t.float() for n, t in tensors.items()}, strict=False)
    assert not unexpected, unexpected
    assert not missing, missing
    return model
