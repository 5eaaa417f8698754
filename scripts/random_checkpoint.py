#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a gpt-oss checkpoint of random weights, with the real one's tensor names and formats, and a tokenizer.

    scripts/random_checkpoint.py FOLDER --layers 4

The sizes are gpt-oss-20b's with as many layers as asked, so that a server starts in seconds and nothing is downloaded.
The tokenizer's words are ``t2 t3 ...``: token ids can be read off any text. Weights are drawn so that activations keep
their size through the layers and the router's logits lie apart. A layer takes 0.5 GB, embedding and head 2.3 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import vllm_server

with contextlib.suppress(ImportError):  # --help does without
    import torch

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
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
# vLLM's Harmony parser looks these tokens up when a server of gpt-oss starts.
HARMONY_TOKENS = ("start", "end", "message", "channel", "constrain", "return", "call")


def write(folder: Path, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Write ``config.json``, a shard for each layer and one for the rest, and the tokenizer; returns the config.

    The config is gpt-oss-20b's with ``changes``.
    """
    from safetensors.torch import save_file

    config = {**GPT_OSS_20B, **changes}
    layers = config["num_hidden_layers"]
    config |= {"layer_types": (["sliding_attention", "full_attention"] * layers)[:layers]}
    generator = torch.Generator().manual_seed(seed)
    hidden, inter, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv, head = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).to(torch.bfloat16)

    def blocks(rows: int, k: int) -> torch.Tensor:
        return torch.randint(0, 256, (experts, rows, k // 32, 16), generator=generator, dtype=torch.uint8)

    def scales(rows: int, k: int) -> torch.Tensor:
        # e2m1 values of all codes have a root mean square of 2.9; a row's sum of K products is to be about 1.
        low = 125 - (k.bit_length() + 1) // 2
        return torch.randint(low, low + 3, (experts, rows, k // 32), generator=generator, dtype=torch.uint8)

    weight_map: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)

    def save(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    embedding = normal(config["vocab_size"], hidden, scale=1.0)
    rest = {"model.embed_tokens.weight": embedding, "model.norm.weight": 1 + normal(hidden, scale=0.1)}
    if not config["tie_word_embeddings"]:
        rest["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=hidden**-0.5)
    save("model-embedding.safetensors", rest)
    del embedding, rest
    for index in range(layers):
        at = f"model.layers.{index}"
        tensors: dict[str, torch.Tensor] = {}
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
        save(f"model-layer-{index:02}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    write_tokenizer(folder, config["vocab_size"])
    return config


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer whose word ``t17`` is token 17; the first two and the last ids are special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # No special token may be the beginning of a word: it would be cut out of it.
    pad, end = "<|pad|>", "<|endoftext|>"
    special = [f"<|{name}|>" for name in HARMONY_TOKENS]
    words = [pad, end, *(f"t{index}" for index in range(2, vocab_size - len(special))), *special]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad, unk_token=pad)
    fast.save_pretrained(folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new or an empty one")
    parser.add_argument("--layers", type=vllm_server.positive, default=4)
    parser.add_argument("--experts", type=vllm_server.positive, default=32, help="128 for gpt-oss-120b")
    parser.add_argument("--vocabulary", type=vllm_server.positive, default=GPT_OSS_20B["vocab_size"])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.experts < GPT_OSS_20B["num_experts_per_tok"]:
        parser.error(f"--experts: {given.experts} are fewer than the {GPT_OSS_20B['num_experts_per_tok']} of a token")
    if given.vocabulary < 2 + len(HARMONY_TOKENS):
        parser.error(f"--vocabulary: {given.vocabulary} has no room for the tokenizer's {2 + len(HARMONY_TOKENS)} own")
    return given


def main() -> None:
    given = arguments()
    vllm_server.need("torch", "safetensors", "tokenizers", "transformers")
    try:
        given.folder.mkdir(parents=True, exist_ok=True)
        if any(given.folder.iterdir()):
            sys.exit(f"{given.folder} holds files: name a new folder, or empty it")
    except OSError as error:
        sys.exit(f"{given.folder} cannot be written: {error.strerror}")
    sizes = {
        "num_hidden_layers": given.layers,
        "num_local_experts": given.experts,
        "vocab_size": given.vocabulary,
    }
    try:
        write(given.folder, given.seed, sizes)
    except BaseException:  # a part of a checkpoint is of no use, and the folder was empty
        for file in given.folder.iterdir():
            file.unlink()
        raise
    print(f"{given.folder}: {given.layers} layers, seed {given.seed}")


if __name__ == "__main__":
    vllm_server.run(main)
