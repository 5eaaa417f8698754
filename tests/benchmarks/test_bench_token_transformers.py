# SPDX-License-Identifier: Apache-2.0
"""The benchmark's model and transformers' GptOss have the same logits, prompt and decode, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peers import matrices
from perfmodel.step import Step, formats_of
from token_bench.model import Dense, ForkExperts, Layer, Model, fork_experts
from token_bench.operators import PAGE, Batch

from flashinfer.sm12x.models import Model as Size
from flashinfer.testing.mxfp_formats import dequantize_mxfp4, dequantize_mxfp8, unswizzle_scales

transformers = pytest.importorskip("transformers")

SIZE = Size(layers=2, experts=8, hidden=192, inter=160, heads=8, kv_heads=2, head=32, vocab=640, window=24)
PROMPT, DECODED = 45, 3
TOLERANCE = 0.02
"""Allowed error of a token's logits, relative to their norm: transformers in bf16 differs from itself in float32 by
0.008 to 0.020, depending on the seed."""


def wide(dense: Dense, weights: str) -> torch.Tensor:
    """The layer's weight as it is multiplied, dequantized to float32."""
    values, *scales = dense.weights[weights]
    if weights == "bf16":
        return values.float()
    n, k = values.shape[0], values.shape[1] * (2 if weights == "mxfp4" else 1)
    linear = unswizzle_scales(scales[0].view(-1, -(-k // 128) * 4), n, k // 32)
    return (dequantize_mxfp4 if weights == "mxfp4" else dequantize_mxfp8)(values, linear).float()


def experts_of(experts: ForkExperts) -> dict[str, torch.Tensor]:
    """transformers' parameters: gate and up in turn, inputs first."""

    def in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.stack([gate, up], dim=2).flatten(1, 2)

    parts = {}
    fc1, fc2 = matrices(experts.weights)
    for name, (packed, scales, bias) in (("gate_up_proj", fc1.rows(in_turn)), ("down_proj", fc2)):
        wide = torch.stack([dequantize_mxfp4(*expert).float() for expert in zip(packed, scales, strict=True)])
        parts[name], parts[f"{name}_bias"] = wide.transpose(1, 2).contiguous(), bias.float()
    return parts


def layer_of(layer: Layer, formats: dict[str, str]) -> dict[str, torch.Tensor]:
    """transformers' parameters of a layer."""
    sizes = [SIZE.heads * SIZE.head] + [SIZE.kv_heads * SIZE.head] * 2
    weights, biases = wide(layer.qkv, formats["QKV"]).split(sizes), layer.qkv.bias.split(sizes)
    found = {"input_layernorm.weight": layer.norms[0], "post_attention_layernorm.weight": layer.norms[1]}
    for name, weight, bias in zip("qkv", weights, biases, strict=True):
        found |= {f"self_attn.{name}_proj.weight": weight, f"self_attn.{name}_proj.bias": bias}
    found |= {"self_attn.o_proj.weight": wide(layer.o, formats["O"]), "self_attn.o_proj.bias": layer.o.bias}
    found |= {"self_attn.sinks": layer.sinks, "mlp.router.weight": layer.router[0], "mlp.router.bias": layer.router[1]}
    return found | {f"mlp.experts.{name}": tensor for name, tensor in experts_of(layer.experts).items()}


def reference_of(model: Model, formats: dict[str, str]) -> Any:
    """transformers' model of the same weights, float32."""
    config = transformers.GptOssConfig(
        num_hidden_layers=SIZE.layers,
        num_local_experts=SIZE.experts,
        vocab_size=SIZE.vocab,
        hidden_size=SIZE.hidden,
        intermediate_size=SIZE.inter,
        head_dim=SIZE.head,
        num_attention_heads=SIZE.heads,
        num_key_value_heads=SIZE.kv_heads,
        sliding_window=SIZE.window,
        num_experts_per_tok=SIZE.top_k,
        max_position_embeddings=4096 * 32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        pad_token_id=0,
        attn_implementation="eager",
    )
    reference = transformers.GptOssForCausalLM(config).float().eval()
    parameters = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    parameters["lm_head.weight"] = wide(model.lm_head, formats["LM head"])
    for index, layer in enumerate(model.layers):
        parameters |= {f"model.layers.{index}.{name}": part for name, part in layer_of(layer, formats).items()}
    reference.load_state_dict(parameters)
    return reference


def next_batch(model: Model, step: Step, ids: torch.Tensor, full: Batch) -> Batch:
    """``ids`` at the end of ``step``'s context, in the pages of ``full``."""
    batch = model.batch(step)
    batch.ids = ids
    for cache in (batch.full, batch.window):
        pages = -(-step.context // PAGE)
        cache.table = full.full.table[:, :pages].contiguous()
        cache.slots = batch.positions.clone()
    return batch


@pytest.mark.parametrize(("weights", "seed"), [("bf16", 6), ("mxfp8", 5), ("mxfp4", 1)])
def test_logits_are_those_of_transformers(weights: str, seed: int) -> None:
    """A prompt longer than the window, then tokens one by one from the cache that it left.

    The seeds are such that rounding changes no token's experts.
    """
    print("seed", seed)
    formats = formats_of(weights)
    model = Model(SIZE, fork_experts(SIZE, "a16"), (weights,), seed, positions=4096)
    length = PROMPT + DECODED
    whole = Step(1, length, length, formats=formats)
    pages = model.batch(whole)
    caches = [kv.zero_() for kv in model.caches(whole, pages)]
    with torch.inference_mode():
        expected = reference_of(model, formats)(pages.ids[None]).logits[0]
        for position in range(PROMPT, length + 1):
            new = PROMPT if position == PROMPT else 1
            step = Step(1, position, new, formats=formats)
            batch = next_batch(model, step, pages.ids[position - new : position], pages)
            logits, token = model.step(step, batch, caches)
            wanted = expected[position - 1]
            error = float((logits[0].float() - wanted).norm() / wanted.norm())
            print(weights, position, error)
            assert error < TOLERANCE
            assert int(token) == int(logits[0].argmax())
