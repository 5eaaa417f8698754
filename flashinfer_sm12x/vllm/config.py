# SPDX-License-Identifier: Apache-2.0
"""The two objects by which vLLM chooses gpt-oss's layers: the quantization config, and the model's hook into the
server's config."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.models.config import GptOssForCausalLMConfig
from vllm.model_executor.models.registry import ModelRegistry

from . import api_checks, fallback, memory, replacements, settings, table

logger = init_logger("vllm.flashinfer_sm12x")

ARCHITECTURE = "GptOssForCausalLM"
MODEL = "flashinfer_sm12x.vllm.model_class:SM12xGptOssForCausalLM"  # by name: it imports what may ask for CUDA
# Suffixes of vLLM's module names.
DENSE_KINDS = {".qkv_proj": "qkv", ".o_proj": "o"}
# A Spark's decode batches are small, and vLLM pads a batch to the next captured size. So every size up to 8 is
# captured, and later ones in steps of at most a fifth. On an H200 neither padding nor capturing costs measurable time
# (docs/serving.md).
GRAPH_SIZES = (*range(1, 9), 10, 12, 14, 16, *range(20, 33, 4), *range(40, 65, 8), *range(80, 257, 16))


class SM12xGptOssConfig(GptOssMxfp4Config):
    """gpt-oss's quantization config, with experts and dense layers by the choices of :mod:`.settings`."""

    def _make_moe_method(self, moe_config: Any) -> Any:
        moe, method = api_checks.module("experts"), None
        if moe is not None:
            with fallback.leaving(api_checks.MODULES["experts"][1]):
                method = moe.make_method(moe_config, settings.current())
        return super()._make_moe_method(moe_config) if method is None else method

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        kind = next((kind for suffix, kind in DENSE_KINDS.items() if prefix.endswith(suffix)), None)
        method = None
        if kind is not None and isinstance(layer, LinearBase):
            with fallback.leaving(api_checks.MODULES["dense"][1]):
                method = self._dense_method(kind, layer, prefix)
        return super().get_quant_method(layer, prefix) if method is None else method

    def _dense_method(self, kind: str, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer of ``kind``; None if it is vLLM's."""
        dense = api_checks.module("dense")
        if dense is None:
            return None
        chosen = settings.current()
        choice = chosen.choice(kind)
        online = self.online_quantization_config
        if online is not None and online.resolve_quant_method_cls(type(layer), prefix) is not None:
            # --quantization-config names this layer: the user said it in vLLM's own words.
            instead = f", in place of {chosen.dense}" if chosen.folder(kind) else ""
            table.note(kind, "as --quantization-config says", "vLLM's", f"asked for{instead}")
            return None
        if choice.weights == "bf16":
            table.note(kind, "vLLM's (cuBLAS)", "bf16", "default")
            return None
        return dense.method_of(kind, choice, chosen.folder(kind), prefix)


class SM12xGptOssHook(GptOssForCausalLMConfig):
    """Checks the settings before any process is started, proposes the sizes of CUDA graphs, bounds memory's share."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        chosen = settings.resolve(vllm_config.additional_config)
        with fallback.leaving("messages about presets are"):
            for line in settings.changed_presets(vllm_config.additional_config):
                logger.info_once("flashinfer-sm12x: %s (docs/accuracy.md)", line)
        if isinstance(vllm_config.additional_config, dict):
            # vLLM's compile cache hashes this and not the environment; workers get it wherever they are started.
            vllm_config.additional_config[settings.KEY] = dataclasses.asdict(chosen)
        memory.bound_share(vllm_config)
        if dense := api_checks.module("dense"):
            with fallback.leaving("the check of the folder of quantized layers is"):
                dense.dense_folder.require(chosen, vllm_config)
            with fallback.leaving("the check of the compiler is"):
                dense.require_compiler(chosen, vllm_config)
        if chosen.graphs == "spark":
            with fallback.leaving("sizes of CUDA graphs are"):
                _propose_graph_sizes(vllm_config)
        GptOssForCausalLMConfig.verify_and_update_config(vllm_config)


def _propose_graph_sizes(vllm_config: Any) -> None:
    compilation = vllm_config.compilation_config
    asked = compilation.cudagraph_capture_sizes is not None or compilation.max_cudagraph_capture_size is not None
    if asked or vllm_config.speculative_config is not None or vllm_config.performance_mode != "balanced":
        return
    scheduler = vllm_config.scheduler_config
    most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, GRAPH_SIZES[-1])
    compilation.cudagraph_capture_sizes = sorted({*(size for size in GRAPH_SIZES if size <= most), most})


def install() -> None:
    """Register the classes above, unless another plugin has replaced vLLM's entry."""
    with replacements.installing("config") as (quantization, hook):
        quantization.replace(SM12xGptOssConfig, through=register_quantization_config(settings.CHECKPOINTS))
        with fallback.leaving(api_checks.MODULES["decode"][1]), replacements.installing("decode") as (model,):
            model.replace(MODEL, through=functools.partial(ModelRegistry.register_model, ARCHITECTURE))
        if hook.original() is GptOssForCausalLMConfig:
            hook.replace(SM12xGptOssHook)
        else:
            logger.warning("flashinfer-sm12x: another plugin hooks %s; its settings stay unchecked here", ARCHITECTURE)
