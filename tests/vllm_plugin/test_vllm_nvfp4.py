# SPDX-License-Identifier: Apache-2.0
"""NVFP4 experts by vLLM's methods for modelopt's and compressed-tensors' checkpoints: from the layer that vLLM builds
and loads to its output, on CPU tensors, beside a reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import served
import torch
from test_vllm_models import serve
from test_vllm_other_models import method_of

from flashinfer.quantization import mx_cpu

HIDDEN, INTER, EXPERTS, TOP_K = 256, 128, 8, 3
LIMIT = 2.0
INPUT_SCALE = 0.01  # of quantized activations, which the fork does not use
GROUP = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
    "dynamic": False,
}


def quantization(door: str) -> Any:
    """The quantization config that a checkpoint of this kind gets."""
    if door.startswith("modelopt"):
        from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

        fields = {"group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": []}
        algorithm = "NVFP4" if door.endswith("W4A4") else "W4A16_NVFP4"
        return ModelOptNvFp4Config.from_config({"quantization": {"quant_algo": algorithm, **fields}})
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    dynamic = {**GROUP, "dynamic": "local"} if door.endswith("W4A4") else None
    group = {"targets": ["Linear"], "weights": GROUP, "input_activations": dynamic, "output_activations": None}
    given = {"format": "nvfp4-pack-quantized", "quant_method": "compressed-tensors", "ignore": []}
    return CompressedTensorsConfig.from_config({**given, "config_groups": {"group_0": group}})


class Expert:
    """One matrix of one expert: packed values, E4M3 scales, the global scale, and what they mean."""

    def __init__(self, generator: torch.Generator, rows: int, k: int, global_scale: float) -> None:
        self.values = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
        codes = torch.randint(0x28, 0x48, (rows, k // 16), generator=generator, dtype=torch.uint8)
        self.scales, self.global_scale = codes.view(torch.float8_e4m3fn), global_scale
        self.dense = mx_cpu.dequantize_nvfp4_linear(self.values, self.scales) * global_scale


def experts_of(seed: int, inter: int = INTER, gated: bool = True) -> list[dict[str, Expert]]:
    """Gate (w1), up (w3) and down (w2) of each; gate and up share a global scale, as vLLM wants it. Without gate rows
    up is w1."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(EXPERTS):
        first, second = (float(scale) for scale in 0.01 + 0.02 * torch.rand(2, generator=generator))
        made.append(
            {
                **{name: Expert(generator, inter, HIDDEN, first) for name in (("w1", "w3") if gated else ("w1",))},
                "w2": Expert(generator, HIDDEN, inter, second),
            }
        )
    return made


def built(door: str, **options: Any) -> Any:
    """The experts as vLLM builds them."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.utils.torch_utils import set_default_torch_dtype

    sizes = EXPERTS, options.pop("top_k", TOP_K), options.pop("hidden", HIDDEN), options.pop("inter", INTER)
    with set_default_torch_dtype(options.pop("dtype", torch.bfloat16)):
        return FusedMoEFactory(*sizes, quant_config=quantization(door), prefix="model.layers.0.mlp.experts", **options)


def load(layer: Any, config: Any, door: str, experts: list[dict[str, Expert]]) -> None:
    """Load and prepare the experts as vLLM does."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    offer(layer, door, experts)
    process_weights_after_loading(layer, config.model_config, torch.device("cpu"))


def offer(layer: Any, door: str, experts: list[dict[str, Expert]]) -> None:
    """Give the experts to the layer's weight loaders, by the names of such a checkpoint."""
    parameters = {key.split(".")[-1]: parameter for key, parameter in layer.named_parameters()}
    modelopt = door.startswith("modelopt")
    for number, matrices in enumerate(experts):
        for name, matrix in matrices.items():
            scale = torch.tensor(matrix.global_scale if modelopt else 1 / matrix.global_scale)
            of_input = torch.tensor(INPUT_SCALE if modelopt else 1 / INPUT_SCALE)
            given = {
                "weight" if modelopt else "weight_packed": matrix.values,
                "weight_scale": matrix.scales,
                "weight_scale_2" if modelopt else "weight_global_scale": scale,
            }
            if door.endswith("W4A4"):
                given["input_scale" if modelopt else "input_global_scale"] = of_input
            for suffix, tensor in given.items():
                parameter = parameters[f"{'w2' if name == 'w2' else 'w13'}_{suffix}"]
                parameter.weight_loader(parameter, tensor, f"{number}.{name}.{suffix}", name, number)


def reference(
    hidden: torch.Tensor, logits: torch.Tensor, experts: list[dict[str, Expert]], activation: str, limit: float | None
) -> torch.Tensor:
    """float32, act rounded to bfloat16."""
    chances, ids = logits.softmax(-1).topk(TOP_K)
    chances = chances / chances.sum(-1, keepdim=True)
    bound, output = limit or float("inf"), torch.zeros(hidden.shape)
    for token in range(len(hidden)):
        for chance, number in zip(chances[token], ids[token].tolist(), strict=True):
            dense = {name: matrix.dense for name, matrix in experts[number].items()}
            gate = dense["w1"] @ hidden[token].float()
            up = dense["w3"] @ hidden[token].float() if "w3" in dense else None
            if up is None:
                inner = torch.relu(gate) ** 2
            elif activation == "swiglustep":
                inner = torch.nn.functional.silu(gate).clamp(max=bound) * up.clamp(-bound, bound)
            else:
                inner = torch.nn.functional.silu(gate.clamp(max=bound)) * up.clamp(-bound, bound)
            output[token] += chance * (dense["w2"] @ inner.bfloat16().float())
    return output


NO_GATE = {"activation": "relu2_no_mul", "ckpt_names": ("up_proj", "down_proj", None)}
DOORS = ("modelopt W4A4", "modelopt W4A16", "compressed-tensors W4A4", "compressed-tensors W4A16")


@pytest.mark.parametrize("tokens", [9, 200])
@pytest.mark.parametrize(("activation", "limit"), [("silu", None), ("silu", LIMIT), ("swiglustep", LIMIT)])
@pytest.mark.parametrize("door", DOORS)
def test_the_experts_are_the_forks_and_agree_with_the_reference(
    checkpoint_folder, log, monkeypatch, door, activation, limit, tokens
):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)  # vLLM's preparation asks for a GPU's tensors
    config = serve(checkpoint_folder, {})
    experts = experts_of(15)
    print("seed", 16)
    generator = torch.Generator().manual_seed(16)
    hidden = torch.randn((tokens, HIDDEN), generator=generator).to(torch.bfloat16)
    logits = torch.randn((tokens, EXPERTS), generator=generator).to(torch.bfloat16)
    with served.parallel_groups(config):
        from vllm.forward_context import set_forward_context

        layer = built(door, renormalize=True, activation=activation, swiglu_limit=limit)
        load(layer, config, door, experts)
        assert type(method_of(layer).moe_kernel.fused_experts).__name__ == "SM12xNvfp4Experts"
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=tokens):
            got = layer(hidden, logits).float()
    assert any("the NVFP4 experts are this fork's, W4A16" in message for message in log)
    expected = reference(hidden, logits.float(), experts, activation, limit)
    error = (got - expected).norm() / expected.norm()
    print(f"error {float(error):.4f}")
    assert error < 2.0**-8  # bfloat16's rounding of the output, and of act in a few places
    if limit is not None:  # else the clamp decides nothing
        other = reference(hidden, logits.float(), experts, activation, None)
        assert (other - expected).norm() / expected.norm() > 2.0**-4


@pytest.mark.parametrize("inter", [128, 160], ids=["whole rows of scales", "padded to 256"])
@pytest.mark.parametrize("door", DOORS)
def test_experts_without_gate_rows_are_the_forks_too(checkpoint_folder, log, monkeypatch, door, inter):
    """Nemotron's: ReLU-squared of up rows, which the checkpoint calls up_proj and vLLM w1."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    config = serve(checkpoint_folder, {})
    experts = experts_of(17, inter, gated=False)
    print("seed", 18)
    generator = torch.Generator().manual_seed(18)
    hidden = torch.randn((9, HIDDEN), generator=generator).to(torch.bfloat16)
    logits = torch.randn((9, EXPERTS), generator=generator).to(torch.bfloat16)
    with served.parallel_groups(config):
        from vllm.forward_context import set_forward_context

        layer = built(door, renormalize=True, inter=inter, **NO_GATE)
        load(layer, config, door, experts)
        assert type(method_of(layer).moe_kernel.fused_experts).__name__ == "SM12xNvfp4Experts"
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=9):
            got = layer(hidden, logits).float()
    assert any("the NVFP4 experts are this fork's, W4A16" in message for message in log)
    expected = reference(hidden, logits.float(), experts, "relu2_no_mul", None)
    error = (got - expected).norm() / expected.norm()
    print(f"error {float(error):.4f}")
    assert error < 2.0**-8


@pytest.mark.parametrize(
    ("words", "chosen", "options", "reason"),
    [
        (("--moe-backend", "marlin"), {}, {}, "--moe-backend marlin"),
        (("--moe-backend", "flashinfer_cutlass"), {}, {}, "--moe-backend flashinfer_cutlass"),
        ((), {"moe": "vllm"}, {}, "chosen"),
        (("--enable-lora",), {}, {}, "LoRA adapters may change them; with --lora-target-modules q_proj k_proj"),
        (("--enable-lora", "--lora-target-modules", "o_proj", "up_proj"), {}, {}, "LoRA adapters may change them"),
        ((), {}, {"inter": 96}, "an intermediate size of 96, which vLLM's preparation takes as multiples of 64"),
        ((), {}, NO_GATE | {"activation": "silu_no_mul"}, "kernel does not support"),
    ],
    ids=[
        "another backend",
        "upstream's W4A4",
        "chosen",
        "adapters",
        "adapters of experts",
        "an odd size",
        "no gate, SiLU",
    ],
)
def test_what_is_left_to_vllm_is_reported(checkpoint_folder, log, monkeypatch, words, chosen, options, reason):
    from flashinfer_sm12x.vllm import nvfp4

    selected = []
    config = serve(checkpoint_folder, chosen, *words)
    with served.parallel_groups(config):
        from vllm.model_executor.layers.quantization import modelopt

        ours = modelopt.select_nvfp4_moe_backend
        assert ours.__qualname__.startswith("ours_first")

        def vllms(**given: Any) -> Any:
            selected.append(given["activation_key"])
            return nvfp4.NvFp4MoeBackend.MARLIN, nvfp4.SM12xNvfp4Experts

        monkeypatch.setattr(modelopt, "select_nvfp4_moe_backend", nvfp4.ours_first(vllms))
        built("modelopt W4A4", **options)
    assert selected == [nvfp4.kNvfp4Dynamic]
    assert any(f"the NVFP4 experts are left to vLLM: {reason}" in message for message in log), log


@pytest.mark.parametrize("door", DOORS)
def test_adapters_of_attention_leave_the_experts_to_the_fork(checkpoint_folder, log, monkeypatch, door):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    config = serve(checkpoint_folder, {}, "--enable-lora", "--lora-target-modules", "q_proj", "o_proj")
    with served.parallel_groups(config):
        layer = built(door)
        load(layer, config, door, experts_of(19))
        assert type(method_of(layer).moe_kernel.fused_experts).__name__ == "SM12xNvfp4Experts"
    assert any("the NVFP4 experts are this fork's, W4A16" in message for message in log)
