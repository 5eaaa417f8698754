# SPDX-License-Identifier: Apache-2.0
"""Sizes of the models that are planned for, timed and predicted, and the bytes of their weights."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from .instances import FORMATS

SCALE_BLOCK = 32  # of the MX formats


def matrix_bytes(rows: int, k: int, weights: str) -> int:
    """Values ``[rows, k]`` in one of ``FORMATS``, and scales as they lie in memory; bf16 has none.

    ``q8_0`` is llama.cpp's: blocks of 32 int8 values and a 2-byte scale.
    """
    if weights == "q8_0":
        return rows * k // SCALE_BLOCK * (SCALE_BLOCK + 2)
    elements = FORMATS[weights]
    blocks = -(-k // elements.elements_per_scale // 4) * 4 if elements.elements_per_scale else 0
    return rows * elements.row_bytes(k) + -(-rows // 128) * 128 * blocks


Activation = Literal["gpt-oss", "clamp", "step", "plain", "relu2"]
"""A layer's activation. gpt-oss: Swiglu with alpha, beta, limit and biases; clamp: Swiglu with a limit only; step:
SwigluStep; plain: Swiglu; relu2: Relu2, without gate rows."""


class MoELayer(NamedTuple):
    """Sizes of an MoE layer on one GPU, and the format of its experts."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    activation: Activation = "gpt-oss"
    weights: str = "mxfp4"

    @property
    def fc1_rows(self) -> int:
        """FC1's rows of an expert: up and gate, or up alone."""
        return (1 if self.activation == "relu2" else 2) * self.inter

    @property
    def expert_bytes(self) -> int:
        """One expert's weights and scales."""
        shapes = (self.fc1_rows, self.hidden), (self.hidden, self.inter)
        return sum(matrix_bytes(*shape, self.weights) for shape in shapes)


@dataclasses.dataclass(frozen=True)
class Model:
    """A gpt-oss, as one of ``ranks`` GPUs has it: heads, experts' columns and rows of the LM head are shared out."""

    layers: int
    experts: int
    hidden: int = 2880
    inter: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head: int = 64
    top_k: int = 4
    vocab: int = 201_088
    window: int = 128
    ranks: int = 1

    @property
    def moe(self) -> MoELayer:
        """The experts of a layer."""
        return MoELayer(self.hidden, self.inter, self.experts, self.top_k)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and K of the dense layers' weights."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head
        return {
            "QKV": (qkv, self.hidden),
            "O": (self.hidden, self.heads * self.head),
            "LM head": (self.vocab, self.hidden),
        }

    def windowed(self, layer: int) -> bool:
        """Whether a layer's attention sees only :attr:`window` tokens, as every other layer's does from the first
        on."""
        return layer % 2 == 0

    def split(self, ranks: int) -> Model:
        """The part of the model that one of ``ranks`` tensor-parallel GPUs has."""
        return dataclasses.replace(
            self,
            inter=self.inter // ranks,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            vocab=self.vocab // ranks,
            ranks=ranks,
        )


MODELS = {"gpt-oss-120b": Model(layers=36, experts=128), "gpt-oss-20b": Model(layers=24, experts=32)}

MOE_LAYERS = {
    **{name: model.moe for name, model in MODELS.items()},
    "gpt-oss-120b-tp2": MODELS["gpt-oss-120b"].split(2).moe,
    "moe-2048-768-e128": MoELayer(2048, 768, 128, 8),
    # deepseek-ai/DeepSeek-V4-Flash, config.json: swiglu_limit 10; 43 layers.
    "deepseek-v4-flash": MoELayer(4096, 2048, 256, 6, "clamp"),
    "deepseek-v4-flash-tp2": MoELayer(4096, 1024, 256, 6, "clamp"),
    # inclusionAI/Ling-3.0-flash-fp4, config.json: expert_swiglu_limit_list is 4 in the last 7 of 42 layers, else none.
    "ling-3.0-flash": MoELayer(2560, 768, 512, 8, "step"),
    # Quantized to MXFP4 by Quark. Qwen/Qwen3-235B-A22B, zai-org/GLM-4.5-Air and zai-org/GLM-4.7 (GLM-4.5's and 4.6's
    # sizes), config.json of each.
    "qwen3-235b": MoELayer(4096, 1536, 128, 8, "plain"),
    "glm-4.5-air": MoELayer(4096, 1408, 128, 8, "plain"),
    "glm-4.7": MoELayer(5120, 1536, 160, 8, "plain"),
}
"""The experts of each model that tests, benchmarks and the predictor know, as one GPU has them. Only gpt-oss' have
biases."""

NVFP4_LAYERS = {
    # Qwen/Qwen3.6-35B-A3B, Qwen/Qwen3-Coder-Next and MiniMaxAI/MiniMax-M2.7, config.json of each.
    "qwen3.6-35b-a3b": MoELayer(2048, 512, 256, 8, "plain", "nvfp4"),
    "qwen3-coder-next": MoELayer(2048, 512, 512, 10, "plain", "nvfp4"),
    "minimax-m2.7": MoELayer(3072, 1536, 256, 8, "plain", "nvfp4"),
    # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4 and nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4, config.json of
    # each: mlp_hidden_act relu2; Super's experts are between latent projections (moe_latent_size).
    "nemotron-3-nano": MoELayer(2688, 1856, 128, 6, "relu2", "nvfp4"),
    "nemotron-3-super": MoELayer(1024, 2688, 512, 22, "relu2", "nvfp4"),
    "gpt-oss-120b-nvfp4": MODELS["gpt-oss-120b"].moe._replace(weights="nvfp4"),
}
"""The experts of models that are quantized to NVFP4, which are multiplied with bfloat16 tokens alone."""
