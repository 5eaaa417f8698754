# SPDX-License-Identifier: Apache-2.0
"""QKV, O and the LM head in a block-scaled format, quantized while they are loaded or before, on this fork's kernels.

A weight is materialized in bf16 when its checkpoint tensors arrive, quantized by rows, and freed before the next one:
in addition to the model, memory holds at most one layer's bf16 copy. A layer from a folder of ``sm12x-quantize``
replaces the checkpoint's weight after a hash has shown that this is the weight that was quantized. With
``--linear-backend`` vLLM's kernel of that name computes instead, if vLLM has the format.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from .. import variables
from ..versions import KERNELS_PACKAGE
from . import api_checks, compiler, dense_folder, fallback, settings, table
from .layer_object import LayerObject
from .settings import Choice

logger = init_logger("vllm.flashinfer_sm12x")

BLOCK_SIZE = 32
VLLMS = ("mxfp8", "mxfp4")  # formats for which --linear-backend may name a kernel of vLLM's


class ForkKernel:
    """This fork's dense layer behind the interface of vLLM's linear kernels."""

    def __init__(self, choice: Choice) -> None:
        self.weights: Any = choice.weights
        self.activation: Any = "mxfp8" if choice.activations == "a8" else "bf16"
        self.next_weights: torch.Tensor | None = None  # of a decode step's call, while it runs
        self._object = LayerObject()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Scales into the kernels' layout."""
        from flashinfer.quantization import mx_cpu

        replace_parameter(layer, "weight_scale", mx_cpu.swizzle_128x4(layer.weight_scale))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``[..., K]``, in ``x``'s dtype."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = self._dense(layer, bias, x.dtype).run(rows, next_weights=self.next_weights)
        return out.view(*x.shape[:-1], layer.weight.shape[0])

    def _dense(self, layer: Any, bias: torch.Tensor | None, dtype: torch.dtype) -> Any:
        """The fork's object of a layer (:class:`.LayerObject`)."""
        from flashinfer.gemm import DenseLayer

        compiles = torch.compiler.is_compiling()  # what is made while that traces is the graph's
        tensors = (layer.weight, layer.weight_scale, bias, layer.weight_global_scale)
        if not compiles and (known := self._object.get(tensors, dtype)) is not None:
            return known
        made = DenseLayer(
            layer.weight,
            layer.weight_scale,
            bias,
            weight_format=self.weights,
            activation=self.activation,
            alpha=layer.weight_global_scale,
            out_dtype=dtype,
            constant_weights=True,
        )
        return made if compiles else self._object.keep(made, tensors, dtype)

    def norms(self, layer: Any, rows: int) -> bool:
        """Whether :meth:`apply_behind_norm` is one launch for this number of rows."""
        from flashinfer.gemm.sm12x_dense_norm import most_tokens

        return self.activation == "bf16" and rows <= most_tokens(self.weights, layer.input_size_per_partition)

    def apply_behind_norm(
        self, layer: Any, x: torch.Tensor, residual: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply vLLM's RMSNorm ``norm`` and the layer to ``x + residual`` ``[rows, K]``; return the outputs and that
        sum."""
        made = self._dense(layer, layer.bias, x.dtype)
        out, total = made.run_behind_norm(
            x, norm.weight, residual=residual, eps=norm.variance_epsilon, next_weights=self.next_weights
        )
        return out, total


def make_kernel(choice: Choice, shape: tuple[int, int]) -> Any:
    """The kernel object for weights ``[N, K]``: this fork's, unless ``--linear-backend`` names one of vLLM's.

    Raises
    ------
    Refusal
        The named kernel cannot serve the format; with vLLM's message, if vLLM says so.
    """
    if _is_ours(choice.weights):
        return ForkKernel(choice)
    if choice.weights not in VLLMS:
        raise fallback.Refusal(
            f"--linear-backend {linear._get_linear_backend(quantization=choice.weights)}: vLLM has no kernel that "
            f"multiplies {choice.weights} weights as this plugin makes them; it may be auto, or the layer in "
            f"{' or '.join(VLLMS)}"
        )
    try:
        if choice.weights == "mxfp8":
            return linear.init_mxfp8_linear_kernel(weight_shape=shape)
        assert choice.weights == "mxfp4"  # "bf16" has no kernel object
        return linear.init_mxfp4_linear_kernel(activation_quant_key=None)
    except ValueError as error:
        raise fallback.Refusal(str(error)) from error


@functools.cache
def build(device_type: str, weights: str) -> str:
    """Build the module of a format, or find it built; why that failed, or an empty text. Once a process, before weights
    are loaded."""
    if device_type != "cuda":
        return ""  # tests: CPU tensors need no module
    try:
        from flashinfer.jit.sm12x.modules import gen_dense_module
        from flashinfer.sm12x.backend import kernels

        backend = kernels(torch.device("cuda", torch.cuda.current_device()))
        assert backend is not None
        backend.module(gen_dense_module, weights)
    except Exception as error:  # a compiler or a linker may fail in any way
        return f"the kernels of {weights} could not be built: {error}"
    return ""


def method_of(kind: str, choice: Choice, folder: str, prefix: str) -> DenseMethod | None:
    """The method of a layer that is to be quantized; None, said in log and table, if its kernels cannot be built.

    Raises
    ------
    Refusal, FolderError
        The folder that a user named cannot be used; nothing takes its place.
    """
    reason = build(torch.get_default_device().type, choice.weights) if _is_ours(choice.weights) else ""
    if not reason:
        try:
            return DenseMethod(kind, choice, folder, prefix)
        except fallback.REFUSALS:
            raise
        except Exception as error:
            if not folder:
                raise
            raise fallback.Refusal(f"{folder} cannot be used for {prefix}: {type(error).__name__}: {error}") from error
    fallback.log_once(api_checks.MODULES["dense"][1], reason)
    table.note(kind, "vLLM's (cuBLAS)", "bf16", reason)
    return None


def require_compiler(chosen: settings.Settings, vllm_config: Any) -> None:
    """Refuse quantized layers whose kernel nothing can compile, before weights are loaded.

    It does not initialize CUDA; it only asks ``nvcc`` for its version. Whether prebuilt kernels fit shows when they are
    loaded. With several nodes it refuses nothing, because others may have a compiler.

    Raises
    ------
    Refusal
        There is neither a CUDA compiler for this GPU nor a wheel of kernels; the message says what to install, and how
        to do without.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    elsewhere = parallel.distributed_executor_backend == "ray" or parallel.nnodes > 1
    if vllm_config.device_config.device_type != "cuda" or elsewhere or _has_prebuilt():
        return
    # In such checkpoints QKV and O are this fork's, unless --quantization-config names them.
    quantizes = model.quantization == settings.CHECKPOINTS and model.quantization_config is None
    kinds = ["qkv", "o"] if quantizes else []
    kinds += ["lm_head"] if model.runner_type == "generate" else []
    with set_current_vllm_config(vllm_config):
        weights = {kind: chosen.choice(kind).weights for kind in kinds}
        ours = [
            kind
            for kind, form in weights.items()
            if form != "bf16" and (form == variables.RESCORED or _is_ours(form))  # vLLM has none that rescores
        ]
    if ours and (reason := compiler.why_none()):
        off = json.dumps({settings.KEY: dict.fromkeys(ours, "bf16")})
        raise fallback.Refusal(
            f"flashinfer-sm12x: {', '.join(ours)} are to be quantized, and their kernel cannot be compiled here: "
            f"{reason}. Or install prebuilt kernels (docs/serving.md), or leave these layers to vLLM: "
            f"--additional-config '{off}'"
        )


def _has_prebuilt() -> bool:
    try:
        spec = importlib.util.find_spec(KERNELS_PACKAGE)
    except (ImportError, ValueError):  # a module of that name without a spec
        return False
    folders = (spec.submodule_search_locations if spec else None) or ()
    return any(Path(folder, "manifest.json").is_file() for folder in folders)


def _is_ours(weights: str) -> bool:
    """Whether this fork's kernel computes the format, because ``--linear-backend`` names no kernel of vLLM's."""
    return bool(linear._get_linear_backend(quantization=weights) == "auto")


class DenseMethod(LinearMethodBase):
    """A linear layer or an LM head whose bf16 weight is quantized when it is loaded."""

    uses_meta_device = True  # vLLM's loader finishes such layers one by one

    def __init__(self, kind: str, choice: Choice, folder: str = "", prefix: str = "") -> None:
        self.kind, self.choice = kind, choice
        self.quantized = dense_folder.Layer(folder, kind, prefix) if folder else None
        self._processed = False

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
        self.kernel: Any = None
        with fallback.leaving(api_checks.MODULES["dense"][1]):
            self._create_weight(layer, input_size_per_partition, output_partition_sizes, params_dtype, attributes)
        if self.kernel is None:
            get_layerwise_info(layer).reset()
            self._leave(layer).create_weights(
                layer,
                input_size_per_partition,
                output_partition_sizes,
                input_size,
                output_size,
                params_dtype,
                **attributes,
            )

    def _leave(self, layer: Any) -> Any:
        """Make the layer vLLM's, in bf16; its method."""
        table.note(self.kind, "vLLM's (cuBLAS)", "bf16", "failed, as the log says")
        layer.quant_method = (
            UnquantizedLinearMethod() if isinstance(layer, LinearBase) else UnquantizedEmbeddingMethod()
        )
        return layer.quant_method

    def _create_weight(
        self,
        layer: Any,
        k: int,
        output_partition_sizes: list[int],
        params_dtype: torch.dtype,
        attributes: dict[str, Any],
    ) -> None:
        rows = sum(output_partition_sizes)
        if k % BLOCK_SIZE:
            raise fallback.Refusal(
                f"{self.kind}: a rank's shard has K = {k}; {self.choice.weights} needs a multiple of "
                f'{BLOCK_SIZE}. Choose {{"sm12x": {{"{self.kind}": "bf16"}}}} for this tensor-parallel size'
            )
        kernel = make_kernel(self.choice, (rows, k))
        ours = isinstance(kernel, ForkKernel)
        if ours and self.choice.activations == "a16" and params_dtype is not torch.bfloat16:
            raise fallback.Refusal(
                f"{self.kind}: the model's activations are {params_dtype}; {self.choice} takes torch.bfloat16. Choose "
                f'{{"sm12x": {{"{self.kind}": "{self.choice.weights}-a8"}}}}, or start with --dtype bfloat16'
            )
        # vLLM's kernels read these attributes of a layer.
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = k
        layer.output_size_per_partition = rows
        layer.orig_dtype = params_dtype
        layer.weight_block_size = None
        data = torch.empty(rows, k, device="meta", dtype=params_dtype)
        loader = attributes.get("weight_loader")
        if self.quantized is not None:
            loader = self.quantized.watch(loader)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        )
        initialize_online_processing(layer)
        backend = "flashinfer-sm12x" if ours else f"vLLM's {type(kernel).__name__}"
        why = "chosen" if ours else "--linear-backend"
        table.note(
            self.kind, backend, str(self.choice), why if self.quantized is None else f"{why}, {self.quantized.name}"
        )
        self.kernel = kernel

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        quantized = None
        # Loaded anew: CUDA graphs hold the first load's tensors. From a folder: nothing takes the place of what a user
        # named.
        if self._processed or self.quantized is not None:
            quantized = self._quantize(layer)
        else:
            with fallback.leaving(api_checks.MODULES["dense"][1]):
                quantized = self._quantize(layer)
        if quantized is None:
            self._leave(layer).process_weights_after_loading(layer)
            return
        self._processed = True
        layer.input_scale = None
        replace_parameter(layer, "weight", quantized.values)
        replace_parameter(layer, "weight_scale", quantized.scales)
        replace_parameter(layer, "weight_global_scale", quantized.global_scale)
        self.kernel.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True

    def _quantize(self, layer: Any) -> Any:
        """The layer's bf16 weight as a ``BlockScaledWeight``, or the folder's."""
        from flashinfer.quantization.block_scaled import quantize_rows

        weights: Any = self.choice.weights
        return quantize_rows(layer.weight, weights) if self.quantized is None else self.quantized.weight(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernel.apply_weights(layer, x, bias)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """A head that shares the embedding's weight stays as the embedding is: a lookup needs bf16 rows."""
        logger.warning_once("flashinfer-sm12x: the LM head shares the embedding's weight, so it stays bf16")
        table.note(self.kind, "vLLM's (cuBLAS)", "bf16, with the embedding", "tied to the embedding")
        get_layerwise_info(layer).reset()  # else the loader makes a weight of its own for it
        layer.quant_method = UnquantizedEmbeddingMethod()
        return layer.quant_method.tie_weights(layer, embed_tokens)
