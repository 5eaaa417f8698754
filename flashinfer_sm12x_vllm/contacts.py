# SPDX-License-Identifier: Apache-2.0
"""The plugin's contacts with vLLM, by part. If a contact of a part has moved, that part is left to vLLM, and the others
go on.

A contact is a name of vLLM's, with the form of its call or its override if that matters:

``f``               it is there
``f(2, x, y)``      it can be called with two positional arguments and these keywords
``f <- (layer, x)``  it is overridden here: vLLM passes exactly these

``Class.name`` may be an attribute of a class or one of its bases, a field, or an attribute that a method assigns to
``self``. ``tools/contacts.py`` checks a wheel against the same table without importing it; so nothing of vLLM's is
imported here until a part is asked for.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

MODELS = "vllm.model_executor.models"
LAYERS = "vllm.model_executor.layers"
MOE = f"{LAYERS}.fused_moe"

TABLE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "config": {
        "vllm.config": ("get_current_vllm_config()", "get_current_vllm_config_or_none()"),
        "vllm.config.vllm": (
            *"VllmConfig.additional_config VllmConfig.compilation_config VllmConfig.speculative_config".split(),
            *"VllmConfig.performance_mode VllmConfig.scheduler_config VllmConfig.cache_config".split(),
        ),
        "vllm.config.compilation": (
            "CompilationConfig.cudagraph_capture_sizes",
            "CompilationConfig.max_cudagraph_capture_size",
        ),
        "vllm.config.cache": ("CacheConfig.gpu_memory_utilization", "CacheConfig.kv_cache_memory_bytes"),
        "vllm.config.scheduler": ("SchedulerConfig.max_num_seqs", "SchedulerConfig.max_num_batched_tokens"),
        "vllm.logger": ("init_logger(1)", "_VllmLogger.info_once(2, scope)", "_VllmLogger.warning_once(2, scope)"),
        f"{LAYERS}.linear": ("LinearBase",),
        f"{LAYERS}.quantization": ("register_quantization_config(1)",),
        f"{LAYERS}.quantization.mxfp4": (
            "GptOssMxfp4Config._make_moe_method <- (moe)",
            "GptOssMxfp4Config.get_quant_method <- (layer, prefix)",
            "GptOssMxfp4Config.online_quantization_config",
        ),
        f"{MODELS}.registry": ("ModelRegistry.register_model(2)", "ModelRegistry.models"),
        f"{MODELS}.config": ("MODELS_CONFIG_MAP", "GptOssForCausalLMConfig.verify_and_update_config <- (vllm_config)"),
    },
    "experts": {
        f"{MOE}.modular_kernel": (
            "FusedMoEActivationFormat.Standard",
            "FusedMoEActivationFormat.BatchedExperts",
            "FusedMoEExperts.is_supported_config(5)",
            *(
                f"FusedMoEExperts.{name}"
                for name in ("moe_config", "quant_dtype", "activation_config", "post_gemm2_hook")
            ),
            "FusedMoEExperts._supports_shape <- (hidden_dim)",
            "FusedMoEKernel.fused_experts",
        ),
        f"{MOE}.activation": (
            *(f"MoEActivation.{name}" for name in ("SILU", "SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE", "SWIGLUSTEP")),
            "MoEActivation.RELU2_NO_MUL",
            *(f"ApplyMoEActivationConfig.{name}" for name in ("alpha", "beta", "clamp_limit")),
        ),
        f"{MOE}.config": (
            *"FusedMoEConfig.moe_backend FusedMoEConfig.moe_parallel_config FusedMoEConfig.num_experts".split(),
            *"FusedMoEConfig.num_local_experts FusedMoEConfig.hidden_dim FusedMoEConfig.device".split(),
            *"FusedMoEConfig.experts_per_token FusedMoEConfig.in_dtype FusedMoEConfig.is_lora_enabled".split(),
            *"FusedMoEConfig.intermediate_size_per_partition FusedMoEConfig.max_capture_size".split(),
            *"FusedMoEConfig.activation FusedMoEConfig.has_bias FusedMoEConfig.swiglu_limit".split(),
            *"FusedMoEConfig.router_logits_dtype FusedMoEParallelConfig.dp_size".split(),
            *(f"FusedMoEParallelConfig.use_{name}" for name in ("all2all_kernels", "ag_rs_all2all_kernels")),
            "FusedMoEParallelConfig.use_passthrough_all2all",
            *(
                f"FusedMoEQuantConfig.{name}"
                for name in "is_scale_swizzled is_scale_transposed mx_alignment per_act_token_quant per_out_ch_quant "
                "block_shape a1_scale a2_scale w1_zp w2_zp g1_alphas g2_alphas".split()
            ),
            *"FusedMoEParallelConfig.ep_size FusedMoEParallelConfig.ep_rank FusedMoEParallelConfig.enable_eplb".split(),
            "FusedMoEParallelConfig.use_batched_activation_format",
        ),
        f"{MOE}.experts.flashinfer_cutlass_moe": (
            "FlashInferExperts.__init__ <- (moe_config, quant_config)",
            "FlashInferExperts.expects_unquantized_inputs",
            "FlashInferExperts.process_weights_after_loading <- (layer)",
            "FlashInferExperts._supports_current_device <- ()",
            "FlashInferExperts._supports_quant_scheme <- (weight_key, activation_key)",
            "FlashInferExperts._supports_activation <- (activation)",
            "FlashInferExperts._supports_parallel_config <- (moe_parallel_config)",
            "FlashInferExperts.apply <- (output, hidden_states, w1, w2, topk_weights, topk_ids, activation, "
            "global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, "
            "apply_router_weight_on_input)",
            *(f"FlashInferExperts.{name}" for name in ("tp_size", "tp_rank", "ep_size", "ep_rank", "num_experts")),
            *(f"FlashInferExperts.{name}" for name in ("w1_scale", "w2_scale", "w1_bias", "w2_bias", "out_dtype")),
            *("FlashInferExperts.device", "FlashInferExperts.fake_input_scale"),
        ),
        f"{MOE}.fused_moe_method_base": (
            "FusedMoEMethodBase.__init__(1)",
            "FusedMoEMethodBase.maybe_roundup_sizes <- (hidden_size, intermediate_size_per_partition, act_dtype, "
            "moe_parallel_config)",
        ),
        f"{MOE}.oracle.mxfp4": (
            "Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_BF16",
            "_user_moe_activation_override()",
            "convert_weight_to_mxfp4_moe_kernel_format(0, mxfp4_backend, layer, w13_weight, w2_weight, w13_weight_scale, "
            "w2_weight_scale, w13_bias, w2_bias)",
            "make_mxfp4_moe_kernel(0, moe_quant_config, moe_config, mxfp4_backend, experts_cls, routing_tables)",
        ),
        f"{MOE}.routed_experts": (
            "RoutedExperts._expert_routing_tables()",
            *(f"RoutedExperts.{name}" for name in ("expert_map", "quant_method", "renormalize", "scoring_func")),
            *(f"RoutedExperts.{name}" for name in ("apply_router_weight_on_input", "routed_scaling_factor")),
        ),
        f"{MOE}.router.fused_topk_router": ("FusedTopKRouter.renormalize", "FusedTopKRouter.scoring_func"),
        f"{MOE}.runner.moe_runner": tuple(
            f"MoERunner.{name}"
            for name in "moe_config router routed_experts routed_scaling_factor shared_experts gate shared_expert_gate "
            "routed_input_transform routed_output_transform".split()
        ),
        f"{LAYERS}.quantization.mxfp4": (
            "GptOssMxfp4MoEMethod.__init__ <- (moe)",
            "GptOssMxfp4MoEMethod.mxfp4_backend",
            "GptOssMxfp4MoEMethod.experts_cls",
            "GptOssMxfp4MoEMethod.moe_kernel",
            "GptOssMxfp4MoEMethod.moe_quant_config",
            "GptOssMxfp4MoEMethod.get_fused_moe_quant_config(1)",
            "GptOssMxfp4MoEMethod.process_weights_after_loading <- (layer)",
            "select_deepseek_v4_mxfp4_moe_backend(1)",
        ),
        f"{LAYERS}.quantization.quark.quark_moe": (
            "select_mxfp4_moe_backend(1, activation_key)",
            "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
        ),
        f"{LAYERS}.quantization.utils.quant_utils": ("kMxfp4Static", "kMxfp8Dynamic"),
        f"{LAYERS}.attention": ("Attention.attn_backend", "Attention.kv_cache_dtype"),
        "vllm.config.compilation": ("CompilationConfig.static_forward_context",),
        "vllm.config.lora": ("LoRAConfig.target_modules",),
        "vllm.config.vllm": ("VllmConfig.lora_config",),
        "vllm.model_executor.utils": ("replace_parameter(3)",),
    },
    "nvfp4": {
        f"{MOE}.activation": tuple(
            f"MoEActivation.{name}" for name in ("SILU", "SWIGLUOAI_UNINTERLEAVE", "SWIGLUSTEP", "RELU2_NO_MUL")
        ),
        f"{MOE}.config": ("FusedMoEConfig.is_act_and_mul", "FusedMoEConfig.has_bias"),
        f"{MOE}.experts.flashinfer_cutlass_moe": (
            "FlashInferExperts._supports_no_act_and_mul()",
            "FlashInferExperts.workspace_shapes <- (M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, "
            "activation)",
            *(f"FlashInferExperts.{name}" for name in ("g1_alphas", "g2_alphas")),
        ),
        f"{MOE}.oracle.nvfp4": (
            "NvFp4MoeBackend.FLASHINFER_CUTLASS",
            "select_nvfp4_moe_backend(0, config, weight_key, activation_key)",
        ),
        f"{LAYERS}.quantization.modelopt": ("select_nvfp4_moe_backend",),
        f"{LAYERS}.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4": (
            "select_nvfp4_moe_backend",
        ),
        f"{LAYERS}.quantization.utils.quant_utils": ("kNvfp4Static", "kNvfp4Dynamic"),
    },
    "dense": {
        "vllm.config": ("set_current_vllm_config(1)",),
        "vllm.config.vllm": tuple(
            f"VllmConfig.{name}" for name in ("model_config", "parallel_config", "device_config", "load_config")
        ),
        "vllm.config.parallel": ("ParallelConfig.distributed_executor_backend", "ParallelConfig.nnodes"),
        "vllm.config.model": (
            *"ModelConfig.quantization ModelConfig.quantization_config ModelConfig.runner_type".split(),
            "ModelConfig.hf_config",
        ),
        "vllm.config.device": ("DeviceConfig.device_type",),
        "vllm.config.load": ("LoadConfig.load_format",),
        "vllm.model_executor.kernels.linear": (
            "_get_linear_backend(0, quantization)",
            "init_mxfp8_linear_kernel(0, weight_shape)",
            "init_mxfp4_linear_kernel(0, activation_quant_key)",
        ),
        f"{LAYERS}.linear": (
            "LinearMethodBase.create_weights <- (layer, input_size_per_partition, output_partition_sizes, input_size, "
            "output_size, params_dtype, extra_weight_attrs)",
            "LinearMethodBase.apply <- (layer, x, bias)",
            "QKVParallelLinear.weight_loader(3)",
            "RowParallelLinear.weight_loader(2)",
        ),
        "vllm.model_executor.model_loader.reload.layerwise": (
            "get_layerwise_info(1)",
            "initialize_online_processing(1)",
        ),
        "vllm.model_executor.model_loader.reload.types": ("LayerReloadingInfo.reset()",),
        "vllm.model_executor.parameter": (
            "ModelWeightParameter.__init__(0, data, input_dim, output_dim, weight_loader)",
        ),
        "vllm.model_executor.utils": ("replace_parameter(3)",),
        f"{LAYERS}.vocab_parallel_embedding": (
            "UnquantizedEmbeddingMethod.tie_weights(2)",
            "ParallelLMHead.weight_loader(2)",
        ),
    },
    "head": {
        "vllm.config.vllm": ("VllmConfig.model_config",),
        "vllm.config.model": ("ModelConfig.hf_config",),
        "vllm.model_executor.custom_op": ("PluggableLayer.register_oot(0, name)", "op_registry_oot"),
        f"{LAYERS}.vocab_parallel_embedding": (
            "ParallelLMHead.__init__(2, bias, params_dtype, org_num_embeddings, padding_size, quant_config, prefix, "
            "quant_method)",
        ),
    },
    "attention": {
        "vllm.utils.flashinfer": ("has_nvidia_artifactory()", "_flashinfer_nvcc_path()"),
    },
    "decode": {
        "vllm._custom_ops": ("rms_norm(4)", "fused_add_rms_norm(4)"),
        "vllm.envs": (*"VLLM_BATCH_INVARIANT VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_SKIP_PADDING".split(),),
        "vllm.config": (
            *"CompilationMode.NONE CompilationMode.VLLM_COMPILE CUDAGraphMode.NONE CUDAGraphMode.FULL".split(),
            "CUDAGraphMode.PIECEWISE",
            "CUDAGraphMode.mixed_mode()",
            "CUDAGraphMode.decode_mode()",
        ),
        "vllm.config.vllm": tuple(
            f"VllmConfig.{name}"
            for name in "parallel_config compilation_config lora_config speculative_config kv_transfer_config "
            "aux_output_config offload_config attention_config model_config".split()
        ),
        "vllm.config.parallel": tuple(
            f"ParallelConfig.{name}"
            for name in "enable_eplb pipeline_parallel_size data_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size use_sequence_parallel_moe use_ubatching".split()
        ),
        "vllm.config.compilation": ("CompilationConfig.mode", "CompilationConfig.cudagraph_mode"),
        "vllm.config.model": ("ModelConfig.dtype",),
        "vllm.config.attention": ("AttentionConfig.use_trtllm_attention",),
        "vllm.config.offload": (
            *"OffloadConfig.uva OffloadConfig.prefetch UVAOffloadConfig.cpu_offload_gb".split(),
            "PrefetchOffloadConfig.offload_group_size",
        ),
        "vllm.forward_context": (
            *"get_forward_context() is_forward_context_available() ForwardContext.attn_metadata".split(),
            *"ForwardContext.cudagraph_runtime_mode ForwardContext.is_padding".split(),
        ),
        "vllm.sequence": ("IntermediateTensors",),
        f"{MODELS}.gpt_oss": (
            "GptOssForCausalLM.__init__ <- (vllm_config, prefix)",
            "GptOssForCausalLM.forward <- (input_ids, positions, intermediate_tensors, inputs_embeds)",
            *"GptOssForCausalLM.model GptOssModel.embed_input_ids(1) GptOssModel.layers GptOssModel.norm".split(),
            *"GptOssModel.aux_hidden_state_layers TransformerBlock.attn TransformerBlock.mlp".split(),
            *"TransformerBlock.input_layernorm TransformerBlock.post_attention_layernorm OAIAttention.qkv_proj".split(),
            *"OAIAttention.o_proj OAIAttention.attn OAIAttention.rotary_emb MLPBlock.router MLPBlock.experts".split(),
            *"MLPBlock.hidden_size GptOssForCausalLM.lm_head".split(),
        ),
        f"{LAYERS}.layernorm": ("RMSNorm.weight", "RMSNorm.variance_epsilon"),
        f"{LAYERS}.rotary_embedding.base": ("RotaryEmbeddingBase.cos_sin_cache",),
        f"{LAYERS}.linear": ("ReplicatedLinear.bias", "ColumnParallelLinear.bias", "LinearBase.quant_method"),
        f"{LAYERS}.attention": tuple(
            f"Attention.{name}"
            for name in "layer_name num_heads num_kv_heads head_size attn_backend kv_cache_dtype impl kv_cache".split()
        ),
        f"{MOE}.runner.moe_runner": (
            *"MoERunner.router MoERunner.routed_experts MoERunner._maybe_reduce_final_output(2)".split(),
        ),
        f"{MOE}.router.base_router": ("BaseRouter.top_k",),
        f"{MOE}.routed_experts": (
            *"RoutedExperts.quant_method RoutedExperts.moe_config RoutedExperts._ensure_moe_quant_config_init()".split(),
            "RoutedExperts.forward_modular(0, x, topk_weights, topk_ids)",
            "RoutedExperts.activation",
        ),
        "vllm.v1.attention.backends.flashinfer": (
            "FlashInferDecodeKernel.XQA",
            *"FlashInferImpl.sinks FlashInferImpl.scale FlashInferImpl.window_left".split(),
            *"FlashInferMetadata.num_prefills FlashInferMetadata.causal FlashInferMetadata.decode".split(),
            *"FlashInferMetadata.num_decodes FlashInferMetadata.kv_cache_layout".split(),
            *(
                f"FlashInferTrtllmAPIDecode.{name}"
                for name in ("kernel", "q_len_per_req", "mask", "q_cu_seq_lens", "block_tables", "seq_lens")
            ),
        ),
        "vllm.v1.kv_cache_layout": ("KVCacheLayout.layer_view_order",),
        "vllm.v1.attention.backends.utils": ("get_flashinfer_layout_string(1)",),
    },
}
"""Part -> module -> contacts in it."""

NEEDS: Mapping[str, tuple[str, ...]] = {"head": ("dense",), "decode": ("experts",), "nvfp4": ("experts",)}
"""Part -> other parts that it needs; all of them need ``config``."""


class Contact(NamedTuple):
    """One entry of :data:`TABLE`.

    Attributes:
        path: The name, qualified by its classes.
        call: The number of positional arguments of the plugin's call, and its keywords; None: the plugin does not call
            it.
        takes: The parameters that vLLM passes to the plugin's override; None: the plugin does not override it.
    """

    module: str
    path: str
    call: tuple[int, tuple[str, ...]] | None
    takes: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


def parse(module: str, text: str) -> Contact:
    match = re.fullmatch(r"([\w.]+)(?:\((.*)\)| <- \((.*)\))?", text)
    assert match is not None, text
    path, call, takes = match.groups()
    words = re.findall(r"\w+", takes if call is None else call) if (takes or call) else []
    if takes is not None:
        return Contact(module, path, None, tuple(words))
    if call is None:
        return Contact(module, path, None, None)
    count = int(words.pop(0)) if words and words[0].isdigit() else 0
    return Contact(module, path, (count, tuple(words)), None)


def contacts(part: str) -> Iterator[Contact]:
    for module, texts in TABLE[part].items():
        for text in texts:
            yield parse(module, text)


def misfit(contact: Contact, signature: inspect.Signature) -> str:
    """Why the contact does not fit what takes these arguments, ``self`` not among them; an empty text where it does."""
    if contact.call is not None:
        count, words = contact.call
        try:
            signature.bind(*[None] * count, **dict.fromkeys(words))
        except TypeError as error:
            return f"{contact} takes {_named(signature)}: {error}"
    if contact.takes is not None and tuple(signature.parameters) != contact.takes:
        return f"{contact} takes {_named(signature)}, not ({', '.join(contact.takes)})"
    return ""


def _named(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"


def probe(contact: Contact) -> str:
    """Tell what moved of one contact of the installed vLLM; an empty text where nothing did."""
    try:
        found: Any = importlib.import_module(contact.module)
    except Exception as error:  # what an import may fail with is vLLM's choice
        return f"{contact.module} cannot be imported: {type(error).__name__}: {error}"
    holder: Any = None
    for name in contact.path.split("."):
        holder = found
        if isinstance(holder, type) and not hasattr(holder, name) and _is_field(holder, name):
            return ""
        try:
            found = getattr(holder, name)
        except AttributeError:
            return f"{contact} is gone"
    if contact.call is None and contact.takes is None:
        return ""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return f"{contact} is no function any more"
    written = inspect.getattr_static(holder, contact.path.rpartition(".")[2]) if isinstance(holder, type) else None
    if isinstance(written, FunctionType):
        signature = signature.replace(parameters=[*signature.parameters.values()][1:])
    return misfit(contact, signature)


def _is_field(cls: type, name: str) -> bool:
    """Whether instances have what no class has: annotated, or assigned to ``self`` by some method."""
    return any(name in inspect.get_annotations(base) or name in _assigned(base) for base in cls.__mro__)


@functools.cache
def _assigned(cls: type) -> frozenset[str]:
    names: set[str] = set()
    for function in vars(cls).values():
        if isinstance(function, FunctionType):
            # vLLM's decorators keep the function that they wrap in their closure.
            inner = [cell.cell_contents for cell in function.__closure__ or () if cell.cell_contents is not cls]
            for each in (function, *(f for f in inner if isinstance(f, FunctionType))):
                names |= {step.argval for step in dis.get_instructions(each) if step.opname == "STORE_ATTR"}
                if "register_buffer" in each.__code__.co_names:
                    names |= {text for text in each.__code__.co_consts if isinstance(text, str)}
    return frozenset(names)


MODULES: Mapping[str, tuple[str, str]] = {
    "config": ("config", "all of gpt-oss is"),
    "experts": ("moe", "the experts are"),
    "nvfp4": ("nvfp4", "NVFP4 experts are"),
    "dense": ("dense", "QKV, O and the LM head are"),
    "head": ("lm_head", "the LM head is"),
    "attention": ("attention", "the choice of the attention is"),
    "decode": ("model", "decode steps are"),
}
"""Part -> this package's module for it, and the start of what the log says."""

SHOWN = 3


@functools.cache
def why_not(part: str) -> str:
    """Why a part is left to vLLM, or an empty text. The log gets it, once a process."""
    reason = _why_not(part)
    if reason:
        logging.getLogger("vllm.flashinfer_sm12x").warning(
            "flashinfer-sm12x: %s left to vLLM: %s. This fork is made for vLLM 0.33.0", MODULES[part][1], reason
        )
    return reason


def _why_not(part: str) -> str:
    for other in NEEDS.get(part, ()):
        if why_not(other):
            return f"{MODULES[other][1]}, too"
    if moved := list(filter(None, map(probe, contacts(part)))):
        more = f"; and {len(moved) - SHOWN} more" if len(moved) > SHOWN else ""
        return "; ".join(moved[:SHOWN]) + more
    try:
        importlib.import_module(f".{MODULES[part][0]}", __package__)
    except Exception as error:  # a contact that is in no table
        return f"{type(error).__name__}: {error}"
    return ""


def module(part: str) -> ModuleType | None:
    """This package's module for a part, or None where that part is left to vLLM."""
    return None if why_not(part) else importlib.import_module(f".{MODULES[part][0]}", __package__)
