# SPDX-License-Identifier: Apache-2.0
"""API checks: what the plugin uses of vLLM, by part. If a name of a part has moved, that part is left to vLLM, and the
others go on.

A check is a name of vLLM's, with the form of its call or its override if that matters:

``f``                     it is there
``f(a, b, x=, y=None)``   it is called: ``a`` and ``b`` by position, in this order, ``x`` by keyword; ``y`` is left at
                          its default, which is None (``*args``: by position, as many as there are; ``**more``: by any
                          keyword)
``f <- (layer, x=None)``  it is overridden here: vLLM's has these parameters, in this order and with these defaults

A default that is no literal is ``...``, which fits every default.

``Class.name`` may be an attribute of a class or one of its bases, a field, or an attribute that a method assigns to
``self``. ``tools/api_checks.py`` checks a wheel against the same table without importing it; so nothing of vLLM's is
imported here until a part is asked for.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from . import fallback

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
        "vllm.logger": (
            "init_logger(name)",
            "_VllmLogger.info_once(msg, *args, scope=)",
            "_VllmLogger.warning_once(msg, *args, scope=)",
        ),
        f"{LAYERS}.linear": ("LinearBase",),
        f"{LAYERS}.quantization": (
            "register_quantization_config(quantization)",
            "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG",
        ),
        f"{LAYERS}.quantization.mxfp4": (
            "GptOssMxfp4Config._make_moe_method <- (moe)",
            "GptOssMxfp4Config.get_quant_method <- (layer, prefix)",
            "GptOssMxfp4Config.online_quantization_config",
        ),
        "vllm.platforms.interface": (
            *"Platform.is_cuda() Platform.get_device_capability(device_id=0)".split(),
            "Platform.is_device_capability(capability, device_id=0)",
            "Platform.is_device_capability_family(capability, device_id=0)",
            "Platform.get_device_total_memory(device_id=0)",
            *"DeviceCapability.major DeviceCapability.minor".split(),
        ),
        f"{MODELS}.registry": (
            "ModelRegistry.register_model(model_arch, model_cls)",
            *"ModelRegistry.models _LazyRegisteredModel.load_model_cls()".split(),
        ),
        f"{MODELS}.config": ("MODELS_CONFIG_MAP", "GptOssForCausalLMConfig.verify_and_update_config <- (vllm_config)"),
    },
    "experts": {
        f"{MOE}.modular_kernel": (
            "FusedMoEActivationFormat.Standard",
            "FusedMoEActivationFormat.BatchedExperts",
            "FusedMoEExperts.is_supported_config(cls, moe_config, weight_key, activation_key, activation_format)",
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
            *"FusedMoEParallelConfig.ep_size FusedMoEParallelConfig.enable_eplb".split(),
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
            "FusedMoEMethodBase.__init__(moe)",
            "FusedMoEMethodBase.moe",
            "FusedMoEMethodBase.maybe_roundup_sizes <- (hidden_size, intermediate_size_per_partition, act_dtype, "
            "moe_parallel_config)",
        ),
        f"{MOE}.oracle.mxfp4": (
            "Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_MXFP8",
            "Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_BF16",
            "_user_moe_activation_override()",
            "convert_weight_to_mxfp4_moe_kernel_format(mxfp4_backend=, layer=, w13_weight=, w2_weight=, "
            "w13_weight_scale=, w2_weight_scale=, w13_bias=, w2_bias=, _cache_permute_indices=None, activation=None, "
            "use_separated_a4w4=False, activation_key=None)",
            "make_mxfp4_moe_kernel(moe_quant_config=, moe_config=, mxfp4_backend=, experts_cls=, routing_tables=)",
        ),
        f"{MOE}.routed_experts": (
            *"RoutedExperts._expert_routing_tables() RoutedExperts.activation".split(),
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
            "GptOssMxfp4MoEMethod.get_fused_moe_quant_config(layer)",
            "GptOssMxfp4MoEMethod.process_weights_after_loading <- (layer)",
            "select_deepseek_v4_mxfp4_moe_backend(config)",
        ),
        f"{LAYERS}.quantization.quark.quark_moe": (
            "select_mxfp4_moe_backend(config, activation_key=)",
            "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
        ),
        f"{LAYERS}.quantization.utils.quant_utils": ("kMxfp4Static", "kMxfp8Dynamic"),
        f"{LAYERS}.attention": ("Attention.attn_backend", "Attention.kv_cache_dtype"),
        "vllm.config.compilation": ("CompilationConfig.static_forward_context",),
        "vllm.config.lora": ("LoRAConfig.target_modules",),
        "vllm.config.vllm": ("VllmConfig.lora_config",),
        "vllm.model_executor.utils": ("replace_parameter(layer, param_name, new_tensor)",),
    },
    "nvfp4": {
        f"{MOE}.activation": tuple(
            f"MoEActivation.{name}" for name in ("SILU", "SWIGLUOAI_UNINTERLEAVE", "SWIGLUSTEP", "RELU2_NO_MUL")
        ),
        f"{MOE}.config": ("FusedMoEConfig.is_act_and_mul", "FusedMoEConfig.has_bias"),
        f"{MOE}.experts.flashinfer_cutlass_moe": (
            "FlashInferExperts._supports_no_act_and_mul()",
            "FlashInferExperts.workspace_shapes <- (M, N, K, topk, global_num_experts, local_num_experts, "
            "expert_tokens_meta, activation)",
            *(f"FlashInferExperts.{name}" for name in ("g1_alphas", "g2_alphas")),
        ),
        f"{MOE}.oracle.nvfp4": (
            "NvFp4MoeBackend.FLASHINFER_CUTLASS",
            "select_nvfp4_moe_backend(config=, weight_key=, activation_key=)",
        ),
        f"{LAYERS}.quantization.modelopt": ("select_nvfp4_moe_backend",),
        f"{LAYERS}.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4": (
            "select_nvfp4_moe_backend",
        ),
        f"{LAYERS}.quantization.utils.quant_utils": ("kNvfp4Static", "kNvfp4Dynamic"),
    },
    "dense": {
        "vllm.config": ("set_current_vllm_config(vllm_config, check_compile=False, prefix=None)",),
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
            "_get_linear_backend(quantization=)",
            "init_mxfp8_linear_kernel(weight_shape=, bmm_batch_size=None)",
            "init_mxfp4_linear_kernel(activation_quant_key=)",
        ),
        f"{LAYERS}.quantization.online.base": ("OnlineQuantizationConfig.resolve_quant_method_cls(layer_cls, prefix)",),
        f"{LAYERS}.linear": (
            "UnquantizedLinearMethod.__init__()",
            "UnquantizedLinearMethod.create_weights(layer, input_size_per_partition, output_partition_sizes, "
            "input_size, output_size, params_dtype, **extra_weight_attrs)",
            "UnquantizedLinearMethod.process_weights_after_loading(layer)",
            "LinearBase.quant_method",
            "LinearMethodBase.create_weights <- (layer, input_size_per_partition, output_partition_sizes, input_size, "
            "output_size, params_dtype, **extra_weight_attrs)",
            "LinearMethodBase.apply <- (layer, x, bias=None)",
            "QKVParallelLinear.weight_loader(param, loaded_weight, loaded_shard_id)",
            "RowParallelLinear.weight_loader(param, loaded_weight)",
        ),
        "vllm.model_executor.model_loader.reload.layerwise": (
            "get_layerwise_info(layer)",
            "initialize_online_processing(layer)",
        ),
        "vllm.model_executor.model_loader.reload.types": ("LayerReloadingInfo.reset()",),
        "vllm.model_executor.parameter": (
            "ModelWeightParameter.__init__(data=, input_dim=, output_dim=, weight_loader=)",
        ),
        "vllm.model_executor.utils": ("replace_parameter(layer, param_name, new_tensor)",),
        f"{LAYERS}.vocab_parallel_embedding": (
            "UnquantizedEmbeddingMethod()",
            "UnquantizedEmbeddingMethod.create_weights(layer, input_size_per_partition, output_partition_sizes, "
            "input_size, output_size, params_dtype, **extra_weight_attrs)",
            "UnquantizedEmbeddingMethod.process_weights_after_loading(layer)",
            "UnquantizedEmbeddingMethod.tie_weights(layer, embed_tokens)",
            "ParallelLMHead.weight_loader(param, loaded_weight)",
        ),
    },
    "head": {
        "vllm.config.vllm": ("VllmConfig.model_config",),
        "vllm.config.model": tuple(
            f"ModelConfig.{name}" for name in ("hf_config", "architecture", "runner_type", "dtype")
        ),
        "vllm.distributed.parallel_state": ("get_pp_group()", "GroupCoordinator.is_last_rank"),
        "vllm.model_executor.custom_op": (
            "PluggableLayer.register_oot(name=, _decorated_layer_cls=None)",
            "op_registry_oot",
        ),
        f"{LAYERS}.vocab_parallel_embedding": (
            "ParallelLMHead.__init__(num_embeddings, embedding_dim, bias=, params_dtype=, org_num_embeddings=, "
            "padding_size=, quant_config=, prefix=, quant_method=, disable_tp=False)",
            "ParallelLMHead.weight_loader <- (param, loaded_weight)",
            "ParallelLMHead.quant_method",
        ),
        f"{LAYERS}.logits_processor": (
            "LogitsProcessor.__init__ <- (vocab_size, org_vocab_size=None, scale=1.0, logits_as_input=False, "
            "soft_cap=None)",
        ),
    },
    "rescored": {
        "vllm.config.vllm": ("VllmConfig.lora_config", "VllmConfig.speculative_config"),
        "vllm.config.model": ("ModelConfig.head_dtype", "ModelConfig.dtype"),
        "vllm.config.lora": ("LoRAConfig.target_modules",),
        "vllm.config.speculative": ("SpeculativeConfig.draft_lm_head_quantization",),
        "vllm.envs": ("VLLM_BATCH_INVARIANT",),
        f"{LAYERS}.linear": ("UnquantizedLinearMethod",),
        f"{LAYERS}.vocab_parallel_embedding": (
            "UnquantizedEmbeddingMethod.apply <- (layer, x, bias=None)",
            "UnquantizedEmbeddingMethod.process_weights_after_loading <- (layer)",
            "UnquantizedEmbeddingMethod.tie_weights <- (layer, embed_tokens)",
            "VocabParallelEmbedding.weight_loader <- (param, loaded_weight)",
            *"ParallelLMHead.prefix ParallelLMHead.quant_method ParallelLMHead.shard_indices".split(),
            *(
                f"VocabParallelEmbeddingShardIndices.{name}"
                for name in ("num_org_elements", "num_org_elements_padded", "num_added_elements")
            ),
        ),
        "vllm.v1.worker.gpu_worker": ("Worker.reload_weights", "Worker.finish_weight_update"),
        "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner._get_prompt_logprobs_dict",),
        "vllm.v1.worker.gpu.sample.prompt_logprob": (
            "PromptLogprobsWorker.compute_prompt_logprobs",
            "PromptLogprobsWorker.compute_prompt_token_id_logprobs",
        ),
    },
    "attention": {
        "vllm.utils.flashinfer": ("has_nvidia_artifactory()", "_flashinfer_nvcc_path()"),
    },
    "decode": {
        "vllm._custom_ops": (
            "rms_norm(out, input, weight, epsilon)",
            "fused_add_rms_norm(input, residual, weight, epsilon)",
        ),
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
            "decode_context_parallel_size use_sequence_parallel_moe use_ubatching tensor_parallel_size".split()
        ),
        "vllm.config.compilation": ("CompilationConfig.mode", "CompilationConfig.cudagraph_mode"),
        "vllm.config.aux_output": ("AuxOutputConfig.enabled",),
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
            "GptOssForCausalLM.__init__ <- (vllm_config, prefix='')",
            "GptOssForCausalLM.forward <- (input_ids, positions, intermediate_tensors=None, inputs_embeds=None)",
            "GptOssForCausalLM.load_weights <- (weights)",
            *"GptOssForCausalLM.model GptOssModel.embed_input_ids(input_ids) GptOssModel.layers "
            "GptOssModel.norm".split(),
            *"GptOssModel.aux_hidden_state_layers TransformerBlock.attn TransformerBlock.mlp".split(),
            *"TransformerBlock.input_layernorm TransformerBlock.post_attention_layernorm OAIAttention.qkv_proj".split(),
            *"OAIAttention.o_proj OAIAttention.attn OAIAttention.rotary_emb MLPBlock.router MLPBlock.experts".split(),
            *"MLPBlock.hidden_size GptOssForCausalLM.lm_head".split(),
        ),
        f"{LAYERS}.layernorm": ("RMSNorm.weight", "RMSNorm.variance_epsilon"),
        f"{LAYERS}.rotary_embedding.base": ("RotaryEmbeddingBase.cos_sin_cache",),
        f"{LAYERS}.linear": (
            *"ReplicatedLinear.bias ColumnParallelLinear.bias LinearBase.quant_method".split(),
            "ColumnParallelLinear.forward(input_)",
            "RowParallelLinear.forward(input_)",
        ),
        f"{LAYERS}.attention": tuple(
            f"Attention.{name}"
            for name in "layer_name num_heads num_kv_heads head_size attn_backend kv_cache_dtype impl kv_cache".split()
        ),
        f"{MOE}.runner.moe_runner": (
            *"MoERunner.router MoERunner.routed_experts".split(),
            "MoERunner._maybe_reduce_final_output(states, trunc_size, output_is_reduced=None)",
        ),
        f"{MOE}.router.base_router": ("BaseRouter.top_k",),
        f"{MOE}.routed_experts": (
            *"RoutedExperts.quant_method RoutedExperts.moe_config "
            "RoutedExperts._ensure_moe_quant_config_init()".split(),
            "RoutedExperts.forward_modular(x=, topk_weights=, topk_ids=, shared_experts=None, "
            "shared_experts_input=None)",
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
        "vllm.v1.attention.backend": ("AttentionBackend.get_name()",),
        "vllm.v1.kv_cache_layout": ("KVCacheLayout.layer_view_order",),
        "vllm.v1.attention.backends.utils": ("get_flashinfer_layout_string(layout)",),
    },
}
"""Part -> module -> checks of its names."""

NEEDS: Mapping[str, tuple[str, ...]] = {
    "head": ("dense",),
    "rescored": ("head",),
    "decode": ("experts",),
    "nvfp4": ("experts",),
}
"""Part -> other parts that it needs; all of them need ``config``."""


class ApiCheck(NamedTuple):
    """One entry of :data:`TABLE`.

    Attributes:
        path: The name, qualified by its classes.
        call: The arguments of the plugin's call, as the entry has them; None: the plugin does not call it.
        takes: The signature that the plugin's override has; None: the plugin does not override it.
    """

    module: str
    path: str
    call: tuple[str, ...] | None
    takes: inspect.Signature | None

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


def parse(module: str, text: str) -> ApiCheck:
    match = re.fullmatch(r"([\w.]+)(?:\((.*)\)| <- \((.*)\))?", text)
    assert match is not None, text
    path, call, takes = match.groups()
    if takes is not None:
        (function,) = ast.parse(f"def f({takes}): ...").body
        assert isinstance(function, ast.FunctionDef)
        return ApiCheck(module, path, None, signature_of(function.args))
    return ApiCheck(module, path, None if call is None else tuple(filter(None, call.split(", "))), None)


def checks_of(part: str) -> Iterator[ApiCheck]:
    for module, texts in TABLE[part].items():
        for text in texts:
            yield parse(module, text)


def signature_of(arguments: ast.arguments) -> inspect.Signature:
    """The signature of a definition in a source."""
    kinds = inspect.Parameter
    by_position = [
        *((each, kinds.POSITIONAL_ONLY) for each in arguments.posonlyargs),
        *((each, kinds.POSITIONAL_OR_KEYWORD) for each in arguments.args),
    ]
    defaults: list[ast.expr | None] = [None] * (len(by_position) - len(arguments.defaults)) + list(arguments.defaults)
    found = [
        kinds(each.arg, kind, default=kinds.empty if default is None else _value(default))
        for (each, kind), default in zip(by_position, defaults, strict=True)
    ]
    if arguments.vararg:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = kinds.empty if default is None else _value(default)
        found.append(kinds(each.arg, kinds.KEYWORD_ONLY, default=value))
    if arguments.kwarg:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


def _value(expression: ast.expr) -> Any:
    """The value of a literal; else ``...``."""
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return ...


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter as an entry of the table has it: no annotation, and a default that is no literal is ``...``."""
    default = parameter.default
    if default is not parameter.empty and type(default) not in (bool, int, float, str, type(None)):
        default = ...
    return parameter.replace(annotation=parameter.empty, default=default)


def _fits(default: Any, other: Any) -> bool:
    """Whether two defaults of a parameter may be the same; no default fits no other."""
    if inspect.Parameter.empty in (default, other) or ... not in (default, other):
        return type(default) is type(other) and bool(default == other)
    return True


def misfit(check: ApiCheck, signature: inspect.Signature) -> str:
    """Why the check fails for what has this signature, ``self`` not in it; an empty text where it passes."""
    parameters = [_plain(each) for each in signature.parameters.values()]
    shown = str(inspect.Signature(parameters)).replace("Ellipsis", "...")
    if check.call is not None:
        reason = _misfit_of_call(check.call, parameters)
        return f"{check} takes {shown}: {reason}" if reason else ""
    if check.takes is None:
        return ""
    expected = list(check.takes.parameters.values())
    if [(each.name, each.kind) for each in expected] == [(each.name, each.kind) for each in parameters] and all(
        _fits(one.default, other.default) for one, other in zip(expected, parameters, strict=True)
    ):
        return ""
    return f"{check} takes {shown}, not {str(check.takes).replace('Ellipsis', '...')}"


def _misfit_of_call(arguments: Iterable[str], parameters: Sequence[inspect.Parameter]) -> str:
    kinds = inspect.Parameter
    named = {each.name: each for each in parameters}
    takes_any = {each.kind for each in parameters} & {kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD}
    in_order = [each for each in parameters if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    given: set[str] = set()
    for place, argument in enumerate(arguments):
        name, equals, default = argument.partition("=")
        if name.startswith("**"):
            if kinds.VAR_KEYWORD not in takes_any:
                return "it takes no other keywords"
        elif name.startswith("*"):
            if kinds.VAR_POSITIONAL not in takes_any:
                return "it takes no more arguments by position"
        elif not equals:
            if place >= len(in_order) or in_order[place].name != name:
                return f"argument {place + 1} is not {name}"
        elif not default:
            by_keyword = name in named and named[name].kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
            if name in given or not (by_keyword or kinds.VAR_KEYWORD in takes_any):
                return f"{name} is no keyword"
        elif name in named and not _fits(ast.literal_eval(default), named[name].default):
            return f"{name} is not {default} by default"
        given.add(name)
    needed = (each.name for each in parameters if each.default is each.empty and each.name not in given)
    for name in needed:
        if named[name].kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            return f"{name} is needed"
    return ""


def probe(check: ApiCheck) -> str:
    """Check one name of the installed vLLM: what moved; an empty text where nothing did."""
    try:
        found: Any = importlib.import_module(check.module)
    except Exception as error:  # what an import may fail with is vLLM's choice
        return f"{check.module} cannot be imported: {type(error).__name__}: {error}"
    holder: Any = None
    for name in check.path.split("."):
        holder = found
        if isinstance(holder, type) and not hasattr(holder, name) and _is_field(holder, name):
            return ""
        try:
            found = getattr(holder, name)
        except AttributeError:
            return f"{check} is gone"
        except Exception as error:  # of a name whose value is computed
            return f"{check} cannot be read: {type(error).__name__}: {error}"
    if check.call is None and check.takes is None:
        return ""
    if str(getattr(found, "__module__", "")).startswith(f"{__package__}."):
        return ""  # replaced by this plugin, which asked before it did
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return f"{check} is no function any more"
    written = inspect.getattr_static(holder, check.path.rpartition(".")[2]) if isinstance(holder, type) else None
    if isinstance(written, FunctionType):
        signature = signature.replace(parameters=[*signature.parameters.values()][1:])
    return misfit(check, signature)


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
    "rescored": ("rescored", "the rescored LM head is"),
    "attention": ("attention", "the choice of the attention is"),
    "decode": ("model", "decode steps are"),
}
"""Part -> this package's module for it, and the start of what the log says."""

SHOWN = 3


_left: dict[str, str] = {}
"""Parts that could not be installed, and why."""


def leave(part: str, why: str) -> None:
    """Leave a part to vLLM from now on, and those that need it."""
    _left[part] = why


def why_not(part: str) -> str:
    """Why a part is left to vLLM, or an empty text. The log gets it, once a process."""
    needed = next((other for other in NEEDS.get(part, ()) if why_not(other)), None)
    reason = f"{MODULES[needed][1]}, too" if needed else _left.get(part) or _moved(part)
    if reason:
        fallback.log_once(MODULES[part][1], reason)
    return reason


@functools.cache
def _moved(part: str) -> str:
    """What moved of vLLM that a part needs, or an empty text."""
    reason = ""
    try:
        if moved := list(filter(None, map(probe, checks_of(part)))):
            more = f"; and {len(moved) - SHOWN} more" if len(moved) > SHOWN else ""
            reason = "; ".join(moved[:SHOWN]) + more
        else:
            importlib.import_module(f".{MODULES[part][0]}", __package__)
    except Exception as error:  # a name that computes its value and fails, or an import of ours that is not there
        reason = f"{type(error).__name__}: {error}"
    return f"{reason}. This fork is made for vLLM 0.33.0" if reason else ""


def module(part: str) -> ModuleType | None:
    """This package's module for a part, or None where that part is left to vLLM."""
    return None if why_not(part) else importlib.import_module(f".{MODULES[part][0]}", __package__)
