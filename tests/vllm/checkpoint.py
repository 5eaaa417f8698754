# SPDX-License-Identifier: Apache-2.0
"""A small gpt-oss checkpoint in safetensors, with the real one's names and formats, and transformers' model of the
same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# No size is a multiple of 128, so nothing passes that only works for padded ones; the vocabulary is no multiple of 64.
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 160,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 201,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 4096,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "pad_token_id": 0,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}

# Experts lie apart, so that bf16's rounding seldom decides which are taken.
ROUTER_SCALE = 4.0


def write(folder: Path, seed: int, **changes: Any) -> dict[str, Any]:
    """Write ``config.json`` and two shards to ``folder``; returns the configuration."""
    print("seed", seed)
    config = {**CONFIG, **changes}
    generator = torch.Generator().manual_seed(seed)
    hidden, inter, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv, head = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)

    def blocks(rows: int, k: int) -> torch.Tensor:
        return torch.randint(0, 256, (experts, rows, k // 32, 16), generator=generator, dtype=torch.uint8)

    def scales(rows: int, k: int) -> torch.Tensor:
        return torch.randint(121, 124, (experts, rows, k // 32), generator=generator, dtype=torch.uint8)

    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=1.0),
        "model.norm.weight": 1 + normal(hidden, scale=0.1),
        "lm_head.weight": normal(config["vocab_size"], hidden, scale=hidden**-0.5),
    }
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        for name, rows, k in (
            ("q_proj", heads * head, hidden),
            ("k_proj", kv * head, hidden),
            ("v_proj", kv * head, hidden),
            ("o_proj", hidden, heads * head),
        ):
            tensors[f"{at}.self_attn.{name}.weight"] = normal(rows, k, scale=k**-0.5)
            tensors[f"{at}.self_attn.{name}.bias"] = normal(rows, scale=0.1)
        tensors |= {
            f"{at}.self_attn.sinks": normal(heads, scale=1.0),
            f"{at}.input_layernorm.weight": 1 + normal(hidden, scale=0.1),
            f"{at}.post_attention_layernorm.weight": 1 + normal(hidden, scale=0.1),
            f"{at}.mlp.router.weight": normal(experts, hidden, scale=ROUTER_SCALE * hidden**-0.5),
            f"{at}.mlp.router.bias": normal(experts, scale=0.1),
            f"{at}.mlp.experts.gate_up_proj_blocks": blocks(2 * inter, hidden),
            f"{at}.mlp.experts.gate_up_proj_scales": scales(2 * inter, hidden),
            f"{at}.mlp.experts.gate_up_proj_bias": normal(experts, 2 * inter, scale=0.1),
            f"{at}.mlp.experts.down_proj_blocks": blocks(hidden, inter),
            f"{at}.mlp.experts.down_proj_scales": scales(hidden, inter),
            f"{at}.mlp.experts.down_proj_bias": normal(experts, hidden, scale=0.1),
        }
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name].contiguous() for name in held}, folder / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return config


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
    values = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "quantization_config"}
    model = GptOssForCausalLM(GptOssConfig(**values, attn_implementation="eager", experts_implementation="eager"))
    model = model.float().eval()
    missing, unexpected = model.load_state_dict({n: t.float() for n, t in tensors.items()}, strict=False)
    assert not unexpected, unexpected
    assert not missing, missing
    return model
