# SPDX-License-Identifier: Apache-2.0
"""transformers' gpt-oss with its experts on ``cutlass_fused_moe``, weights left in MXFP4.

Only the experts differ from transformers' own code. On the CPU the operator computes the same contract.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flashinfer.fp4_quantization import block_scale_interleave
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from flashinfer.fused_moe import SM12xMoELayer
from flashinfer.sm12x.checks import BLOCK_SIZE

from . import checkpoint
from .files import FolderError

# The checkpoint's tensors of a layer's experts, after "model.layers.N.mlp.experts.".
NAMES = [f"{matrix}_{part}" for matrix in ("gate_up_proj", "down_proj") for part in ("blocks", "scales", "bias")]

ALPHA, LIMIT = 1.702, 7.0
"""SwiGLU's constants if the config lacks them: transformers 5.17 has them in its module of the experts instead."""


class FlashInferExperts(torch.nn.Module):
    """Replaces transformers' ``GptOssExperts``: it takes the same call and keeps the weights packed.

    Parameters
    ----------
    config : GptOssConfig
        Holds the activation's constants.
    tensors : dict
        The checkpoint's tensors, by the names in :data:`NAMES`: blocks ``[E, rows, K / 32, 16]`` uint8, scales
        ``[E, rows, K / 32]`` uint8, biases ``[E, rows]`` bf16; gate and up rows of ``gate_up_proj`` alternate.
    activations : str
        ``"a8"``: MXFP8 inside the layer (W4A8), ``"a16"``: bf16 (W4A16).
    """

    def __init__(self, config: GptOssConfig, tensors: dict[str, torch.Tensor], activations: str) -> None:
        super().__init__()
        self.a8 = activations == "a8"
        self._layers: dict[bool, SM12xMoELayer] = {}  # of W4A8 and W4A16: a8 may be set between calls
        for name, tensor in tensors.items():
            if name.startswith("gate_up"):  # the operator takes [up; gate]
                tensor = torch.cat([tensor[:, 1::2], tensor[:, 0::2]], dim=1)
            if name.endswith("blocks"):
                tensor = tensor.flatten(2)
            elif name.endswith("scales"):  # in tiles of 128 x 4
                experts, rows, blocks = tensor.shape
                tiles = block_scale_interleave(tensor.contiguous())
                tensor = tiles.view(experts, -(-rows // 128) * 128, -(-blocks // 4) * 4)
            tensor = tensor.contiguous()
            if tensor.data_ptr() % 16:  # as a file that is mapped has it
                tensor = tensor.clone()
            self.register_buffer(name, tensor, persistent=False)
        bias = tensors["down_proj_bias"]
        experts, device = bias.shape[0], bias.device
        alpha, limit = getattr(config, "swiglu_alpha", ALPHA), getattr(config, "swiglu_limit", LIMIT)
        constants = {"alpha": alpha, "beta": 1.0, "limit": limit, "one": 1.0}
        for name, value in constants.items():
            self.register_buffer(name, torch.full((experts,), value, device=device), persistent=False)

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[tokens, hidden]`` bf16, with ids and weights ``[tokens, top_k]``."""
        if self.a8 not in self._layers:
            self._layers[self.a8] = self._make_layer(hidden_states.dtype)
        return self._layers[self.a8].run(hidden_states, router_indices.to(torch.int32), routing_weights.float())

    def _make_layer(self, dtype: torch.dtype) -> SM12xMoELayer:
        scales = [self.gate_up_proj_scales, self.down_proj_scales]
        if self.a8:
            scales = [scales[0], self.one, scales[1], self.one]
        return SM12xMoELayer(
            self.gate_up_proj_blocks,
            self.down_proj_blocks,
            output_dtype=dtype,
            quant_scales=scales,
            fc1_expert_biases=self.gate_up_proj_bias,
            fc2_expert_biases=self.down_proj_bias,
            swiglu_alpha=self.alpha,
            swiglu_beta=self.beta,
            swiglu_limit=self.limit,
            use_mxfp8_act_scaling=self.a8,
            use_w4_group_scaling=not self.a8,
        )

    def _apply(self, *arguments: Any, **named: Any) -> Any:
        self._layers.clear()  # its buffers become others, as on another device
        return super()._apply(*arguments, **named)


def _config(folder: Path) -> GptOssConfig:
    """A gpt-oss's config, whose fields have a value with which a model can be built and run."""
    about = checkpoint.config(folder)
    if about.values.get("model_type") != "gpt_oss" or checkpoint.quantization(about) != "mxfp4":
        raise FolderError(f"{folder} is no gpt-oss with experts in MXFP4: its {checkpoint.CONFIG} says otherwise")
    for key in checkpoint.SIZES:
        about.whole(key)
    experts = about.whole("num_local_experts")
    about.whole("num_experts_per_tok", high=experts)
    for key in ("hidden_size", "intermediate_size"):
        if about.values[key] % BLOCK_SIZE:
            about.refuse(f"{key} is {about.values[key]}; it must be a multiple of {BLOCK_SIZE}")
    if about.values["num_attention_heads"] % about.values["num_key_value_heads"]:
        about.refuse("num_attention_heads is no multiple of num_key_value_heads")
    if "sliding_window" in about:
        about.whole("sliding_window")
    for key, low, high in (("rms_norm_eps", 1e-12, 1.0), ("rope_theta", 1.0, 1e12), ("swiglu_limit", 1e-6, 1e6)):
        if key in about:
            about.number(key, low, high)
    for key in ("tie_word_embeddings", "attention_bias"):
        if key in about:
            about.flag(key)
    if "layer_types" in about:
        about.list_of("layer_types", ("sliding_attention", "full_attention"), about.values["num_hidden_layers"])
    for key in ("rope_scaling", "rope_parameters"):
        if key in about:
            rope = about.object(key)
            rope.text("rope_type" if "rope_type" in rope else "type")
            for part in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "rope_theta"):
                if part in rope:
                    rope.number(part, 1e-6, 1e12)
            if "truncate" in rope:
                rope.flag("truncate")
    return GptOssConfig.from_pretrained(folder)


def _layers(names: Iterable[str]) -> set[int]:
    """The numbers of the layers that tensors belong to."""
    return {int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d{1,9})\.", name))}


def load(folder: Path, activations: str = "a8", device: torch.device | str = "cpu") -> GptOssForCausalLM:
    """The model of a gpt-oss checkpoint, in bf16, with :class:`FlashInferExperts`.

    Files are chosen as vLLM chooses them (:mod:`.checkpoint`); floats of other dtypes are converted to bf16.

    Raises
    ------
    FolderError
        A file is missing or damaged; the checkpoint lacks a tensor of the model, has one that the model lacks, or one
        of another shape or dtype.
    """
    config = _config(folder)
    layers = _layers(checkpoint.names(checkpoint.weight_files(folder)))
    if layers != set(range(config.num_hidden_layers)):  # before a model is built of so many
        raise FolderError(
            f"{folder}: num_hidden_layers is {config.num_hidden_layers} in {checkpoint.CONFIG}, and the weights have "
            f"{len(layers)} layers, the last of them {max(layers, default='none')}; {checkpoint.AGAIN}"
        )
    # Weights stay packed: transformers' own quantizer is not to see them.
    del config.quantization_config
    with torch.device("meta"):
        model = GptOssForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    tensors = checkpoint.tensors(folder, str(device))
    if config.tie_word_embeddings and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    experts, hidden, inter = config.num_local_experts, config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}
    for matrix, rows, k in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        blocks = experts, rows, k // BLOCK_SIZE
        shapes |= {
            f"{matrix}_blocks": (*blocks, BLOCK_SIZE // 2),
            f"{matrix}_scales": blocks,
            f"{matrix}_bias": blocks[:2],
        }
    for index, layer in enumerate(model.model.layers):
        at = f"model.layers.{index}.mlp.experts."
        given = {
            name: checkpoint.take(tensors, at + name, shapes[name], folder, integer=not name.endswith("bias"))
            for name in NAMES
        }
        layer.mlp.experts = FlashInferExperts(config, given, activations)
    others = {
        name: checkpoint.take(tensors, name, tuple(each.shape), folder, integer=False)
        for name, each in model.state_dict().items()
    }
    if tensors:
        raise FolderError(f"{folder} has {min(tensors)}, a tensor that no gpt-oss of its {checkpoint.CONFIG} has")
    model.model.rotary_emb = GptOssRotaryEmbedding(config).to(device)
    model.load_state_dict(others, assign=True)
    return model.eval()
