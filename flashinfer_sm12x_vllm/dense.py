# SPDX-License-Identifier: Apache-2.0
"""QKV, O and the LM head in MXFP8 or MXFP4, quantized while they are loaded.

A weight is materialized in bf16 when its checkpoint tensors arrive, quantized by rows and freed before the next: one
layer's
bf16 copy is the most that is there beside the model. This fork has no dense kernels yet; vLLM's serve these layers
(:func:`make_kernel`), and the table says which. A kernel of ours goes to the front of :data:`PREFERRED`.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MxFp4LinearLayerConfig, Mxfp8LinearLayerConfig
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from . import table
from .settings import Choice

logger = init_logger("vllm.flashinfer_sm12x")

BLOCK_SIZE = 32
# Rows quantized at once: 94 MB of float32 for a hidden size of 2880.
CHUNK_ROWS = 8192
# Kernel classes by format, best first. Where none of them can, or --linear-backend names one, vLLM chooses.
PREFERRED: dict[tuple[str, str], tuple[str, ...]] = {
    ("mxfp8", "a16"): ("MarlinMxfp8LinearKernel",),
    ("mxfp8", "a8"): ("FlashInferCutlassMxfp8LinearKernel", "MarlinMxfp8LinearKernel"),
    ("mxfp4", "a16"): ("MarlinMxFp4LinearKernel",),
    ("mxfp4", "a8"): ("MarlinMxFp4LinearKernel",),
}
# Those of them that are weight-only whatever is asked.
WEIGHT_ONLY = ("MarlinMxfp8LinearKernel", "MarlinMxFp4LinearKernel")


def make_kernel(choice: Choice, shape: tuple[int, int]) -> Any:
    """The kernel object for weights ``[N, K]``: the first of :data:`PREFERRED` that this machine has, else vLLM's
    choice.

    Raises
    ------
    ValueError
        vLLM's, when no kernel of its own can serve the format.
    """
    config: Any
    if choice.weights == "mxfp8":
        config = Mxfp8LinearLayerConfig(weight_shape=shape)
    else:
        config = MxFp4LinearLayerConfig(activation_quant_key=None)
    if linear._get_linear_backend(quantization=choice.weights) == "auto":
        for name in PREFERRED[choice.weights, choice.activations]:
            cls = getattr(linear, name)
            if name not in envs.VLLM_DISABLED_KERNELS and cls.is_supported()[0] and cls.can_implement(config)[0]:
                return cls(config)
    if choice.weights == "mxfp8":
        return linear.init_mxfp8_linear_kernel(weight_shape=shape)
    return linear.init_mxfp4_linear_kernel(activation_quant_key=None)


def quantize(weight: torch.Tensor, weights: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` floats to packed values and linear scale bytes ``[N, K / 32]``, by chunks of rows."""
    from flashinfer.quantization import mx_cpu

    one = mx_cpu.quantize_mxfp8_linear if weights == "mxfp8" else mx_cpu.quantize_mxfp4_linear
    values, scales = zip(*(one(rows) for rows in weight.split(CHUNK_ROWS)), strict=True)
    return torch.cat(values), torch.cat(scales)


class DenseMethod(LinearMethodBase):
    """A linear layer or an LM head whose bf16 weight is quantized when it is loaded."""

    uses_meta_device = True  # vLLM's loader finishes such layers one by one

    def __init__(self, kind: str, choice: Choice) -> None:
        self.kind, self.choice = kind, choice

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """A weight without storage: vLLM's layerwise loading gives it some when its checkpoint tensors are there."""
        rows = sum(output_partition_sizes)
        if input_size_per_partition % BLOCK_SIZE:
            raise ValueError(
                f"{self.kind}: a rank's shard has K = {input_size_per_partition}; {self.choice.weights} needs a multiple of "
                f'{BLOCK_SIZE}. Choose {{"sm12x": {{"{self.kind}": "bf16"}}}} for this tensor-parallel size'
            )
        # What vLLM's kernels read from a layer.
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = rows
        layer.orig_dtype = params_dtype
        layer.weight_block_size = None
        data = torch.empty(rows, input_size_per_partition, device="meta", dtype=params_dtype)
        loader = attributes.get("weight_loader")
        layer.register_parameter(
            "weight", ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        )
        initialize_online_processing(layer)
        self.kernel = make_kernel(self.choice, (rows, input_size_per_partition))
        name = type(self.kernel).__name__
        why = "chosen"
        if name in WEIGHT_ONLY and self.choice.activations == "a8":
            why = "chosen; no kernel with 8-bit activations is there, so they stay bf16"
        table.note(self.kind, f"vLLM's {name}", str(self.choice), why)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        values, scales = quantize(layer.weight, self.choice.weights)
        layer.input_scale = None
        replace_parameter(layer, "weight", values)
        replace_parameter(layer, "weight_scale", scales)
        self.kernel.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernel.apply_weights(layer, x, bias)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """A head that shares the embedding's weight stays as the embedding is: a lookup needs bf16 rows."""
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        logger.warning_once("flashinfer-sm12x: the LM head shares the embedding's weight, so it stays bf16")
        table.note(self.kind, "vLLM's (cuBLAS)", "bf16", "tied to the embedding")
        layer.quant_method = UnquantizedEmbeddingMethod()
        return layer.quant_method.tie_weights(layer, embed_tokens)
