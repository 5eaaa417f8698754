# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts of other models than gpt-oss, by vLLM's own methods: from the layer that vLLM builds and loads to its
output, on CPU tensors, beside a reference in float32."""

from __future__ import annotations

from typing import Any

import checkpoint
import pytest
import served
import torch
from experts_reference import _mxfp8, random_mxfp4
from test_vllm_models import serve

HIDDEN, INTER, EXPERTS, TOP_K = 256, 128, 8, 3
LIMIT = 2.0


def quantization(door: str) -> Any:
    """The quantization config that a checkpoint of this kind gets."""
    if door == "DeepSeek-V4":
        from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config

        return Mxfp4Config()
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "scale_format": "e8m0"}
    layer = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None}
    config = {"global_quant_config": layer, "layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": []}
    return QuarkConfig.from_config({**config, "export": {"kv_cache_group": [], "pack_method": "order"}})


def expert_weights(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Packed values and scale bytes of each expert's gate (w1), up (w3) and down (w2)."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = {"w1": (INTER, HIDDEN), "w3": (INTER, HIDDEN), "w2": (HIDDEN, INTER)}
    return {name: random_mxfp4(generator, EXPERTS, *size) for name, size in sizes.items()}


def built(door: str, **options: Any) -> Any:
    """The experts as vLLM builds them."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.utils.torch_utils import set_default_torch_dtype

    sizes = EXPERTS, options.pop("top_k", TOP_K), HIDDEN, INTER
    prefix = "model.layers.0.mlp.experts"
    with set_default_torch_dtype(torch.bfloat16):
        return FusedMoEFactory(*sizes, quant_config=quantization(door), prefix=prefix, **options)


def method_of(layer: Any) -> Any:
    return next(module.quant_method for module in layer.modules() if hasattr(module, "quant_method"))


def load(layer: Any, config: Any, weights: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Load and prepare the experts as vLLM does."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    offer(layer, weights)
    process_weights_after_loading(layer, config.model_config, torch.device("cpu"))


def offer(layer: Any, weights: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give the experts to the layer's weight loaders."""
    parameters = dict(layer.named_parameters())
    for name, (values, scales) in weights.items():
        stem = "w2" if name == "w2" else "w13"
        for suffix, tensor in (("weight", values), ("weight_scale", scales)):
            (parameter,) = [p for key, p in parameters.items() if key.split(".")[-1] == f"{stem}_{suffix}"]
            for expert in range(EXPERTS):
                parameter.weight_loader(parameter, tensor[expert], f"{name}.{suffix}", name, expert)


def reference(
    hidden: torch.Tensor, logits: torch.Tensor, weights: dict[str, Any], activation: str, limit: float | None, mode: str
) -> torch.Tensor:
    """float32, rounded to MXFP8 where W4A8 rounds, and to bf16 where W4A16 does."""
    rounded = _mxfp8 if mode == "a8" else lambda x: x.to(torch.bfloat16).float()
    dense = {
        name: checkpoint.dequantize(values.unflatten(-1, (-1, 16)), scales)
        for name, (values, scales) in weights.items()
    }
    chances, ids = logits.softmax(-1).topk(TOP_K)
    chances = chances / chances.sum(-1, keepdim=True)
    given, bound = rounded(hidden.float()), limit or float("inf")
    output = torch.zeros_like(given)
    for token in range(len(hidden)):
        for chance, expert in zip(chances[token], ids[token].tolist(), strict=True):
            gate, up = dense["w1"][expert] @ given[token], dense["w3"][expert] @ given[token]
            if activation == "swiglustep":
                inner = torch.nn.functional.silu(gate).clamp(max=bound) * up.clamp(-bound, bound)
            else:
                inner = torch.nn.functional.silu(gate.clamp(max=bound)) * up.clamp(-bound, bound)
            output[token] += chance * (dense["w2"][expert] @ rounded(inner))
    return output


@pytest.mark.parametrize(
    ("backend", "moe", "tokens", "mode"),
    [
        ("auto", "auto", 9, "a16"),
        ("auto", "auto", 200, "a8"),
        ("flashinfer_cutlass", "auto", 9, "a16"),
        ("auto", "mxfp4-a8", 9, "a8"),
    ],
)
@pytest.mark.parametrize(
    ("door", "activation", "limit"),
    [
        ("DeepSeek-V4", "silu", LIMIT),
        ("DeepSeek-V4", "silu", None),
        ("DeepSeek-V4", "swiglustep", LIMIT),
        ("Quark", "silu", None),
        ("Quark", "silu", LIMIT),
    ],
)
def test_the_experts_are_the_forks_and_agree_with_the_reference(
    checkpoint_folder, log, monkeypatch, door, activation, limit, backend, moe, tokens, mode
):
    from flashinfer.sm12x.device_class import GB10

    monkeypatch.setitem(vars(GB10), "w4a16_rows", 16.0)
    config = serve(checkpoint_folder, {"moe": moe}, "--moe-backend", backend)
    weights = expert_weights(5)
    print("seed", 6)
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn((tokens, HIDDEN), generator=generator).to(torch.bfloat16)
    logits = torch.randn((tokens, EXPERTS), generator=generator).to(torch.bfloat16)
    with served.parallel_groups(config):
        from vllm.forward_context import set_forward_context

        layer = built(door, renormalize=True, activation=activation, swiglu_limit=limit)
        load(layer, config, weights)
        auto = "Auto" if moe == "auto" else ""
        assert type(method_of(layer).moe_kernel.fused_experts).__name__ == f"SM12xMxfp4{auto}Experts"
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=len(hidden)):
            got = layer(hidden, logits).float()
    description = "W4A16 in short steps, W4A8 in long ones" if auto else "W4A8 from bf16"
    assert any(f"this fork's, {description}" in message for message in log)
    expected = reference(hidden, logits.float(), weights, activation, limit, mode)
    # Rounding to bf16 leaves at most 2^-9 of each value; act, summed in another order, may round to another MXFP8 value
    # in a few places.
    error = (got - expected).norm() / expected.norm()
    print(f"error {float(error):.4f}")
    assert error < 2.0**-8
    if limit is not None:  # else the clamp decides nothing
        other = reference(hidden, logits.float(), weights, activation, None, mode)
        assert (other - expected).norm() / expected.norm() > 2.0**-4


@pytest.mark.parametrize(
    ("words", "chosen", "reason"),
    [(("--moe-backend", "marlin"), {}, "--moe-backend marlin"), ((), {"moe": "vllm"}, "chosen")],
)
def test_another_backend_by_name_and_another_choice_win(checkpoint_folder, log, words, chosen, reason):
    config = serve(checkpoint_folder, chosen, *words)
    with served.parallel_groups(config):
        assert method_of(built("DeepSeek-V4")).experts_cls.__name__ == "MarlinExperts"
    assert f"flashinfer-sm12x: the experts are left to vLLM: {reason}" in log


@pytest.mark.parametrize("door", ["DeepSeek-V4", "Quark"])
@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (("q_proj", "o_proj"), ""),
        (
            ("q_proj", "experts"),
            "LoRA adapters may change them; with --lora-target-modules q_proj k_proj v_proj o_proj",
        ),
    ],
)
def test_adapters_of_attention_leave_the_experts_to_the_fork(checkpoint_folder, log, door, targets, reason):
    config = serve(checkpoint_folder, {}, "--enable-lora", "--lora-target-modules", *targets)
    with served.parallel_groups(config):
        chosen = method_of(built(door)).experts_cls.__name__
    assert chosen.startswith("SM12xMxfp4") is not bool(reason)
    assert any(f"the experts are left to vLLM: {reason}" in message for message in log) is bool(reason)
