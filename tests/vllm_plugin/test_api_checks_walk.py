# SPDX-License-Identifier: Apache-2.0
"""The API checks have all that the plugin touches of vLLM, and nothing else, as a walk over its code finds it
(``touched.py``). vLLM is not needed.

A new line of the plugin that reads an attribute of an object that nothing tells the class of fails here: name the class
in ``NAMES`` or ``VALUES``; then the attribute, if the table lacks it, fails as well.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import touched
from touched import OURS, Touch, Walk

from flashinfer_sm12x.vllm import api_checks, replacements

NAMES = {
    **{f"{file}: current_platform": "Platform" for file in ("compiler.py", "devices.py", "memory.py")},
    "attention.py has_nvidia_artifactory: config": "VllmConfig",
    "attention.py: question": OURS,
    "attention.py: _vllm_flashinfer()": "vllm.utils.flashinfer",
    "config.py: vllm_config": "VllmConfig",
    "dense.py: vllm_config": "VllmConfig",
    "dense.py: self._leave(layer)": "UnquantizedLinearMethod",  # or UnquantizedEmbeddingMethod, called alike
    "dense.py tie_weights: layer.quant_method": "UnquantizedEmbeddingMethod",
    "dense.py: layer": "LinearBase",  # or ParallelLMHead, whose attributes of these names are the same
    "dense.py apply_behind_norm: layer": "QKVParallelLinear",
    "dense.py: norm": "RMSNorm",
    "dense.py: made": OURS,
    "dense.py: quantized": OURS,
    "dense.py: self._dense(layer, bias, x.dtype)": OURS,
    "api_checks.py: signature": OURS,
    "dense.py: attributes": OURS,
    "dense.py: kernel": OURS,
    "dense_folder.py: vllm_config": "VllmConfig",
    "dense_folder.py: layer": "LinearBase",
    "dense_folder.py: loader": OURS,
    "lm_head.py: _model_that_is_built()": "ModelConfig",
    "lm_head.py: tags": "vllm.compilation.backends",
    "lm_head.py: param": OURS,
    **{f"rescored.py: {name}": "ParallelLMHead" for name in ("head", "layer")},
    "rescored.py: embed_tokens": "ParallelLMHead",  # or another of its base class, whose attributes are the same
    "rescored.py: config": "VllmConfig",
    "rescored.py: weight": OURS,
    "rescored.py: each": OURS,
    "rescored.py: name": OURS,
    "rescored.py: self._head(layer, bias, compiles)": OURS,
    "memory.py: vllm_config": "VllmConfig",
    "memory.py: cache": "CacheConfig",
    "model.py: model": "GptOssModel",
    "model.py: head": "ParallelLMHead",
    "model.py: rope": OURS,
    "model.py: cache": OURS,
    "model.py: layout": "KVCacheLayout",
    "model.py: metadata": "FlashInferMetadata",
    "model.py: decode": "FlashInferTrtllmAPIDecode",
    "model.py: norm": "RMSNorm",
    "model.py: linear": "QKVParallelLinear",
    "model.py: following": "LinearBase",
    "model.py: self.layer": "Attention",
    "model.py: self._attention(metadata.kv_cache_layout, rope, workspace)": OURS,
    "model.py _attention: layer": "Attention",
    "model.py attend: layer": "Attention",
    "model.py weight_of: layer": "LinearBase",
    "model.py weight_of: weight": OURS,
    **{
        f"model.py {function}: layer": "TransformerBlock"
        for function in ("_reason_against_layer", "__init__", "metadata", "run", "route_and_compute", "experts_of")
    },
    "model.py: self.model.layers[0]": "TransformerBlock",
    "model.py: self.attention[index]": OURS,
    "model.py: next(model.parameters())": OURS,
    "model.py: router": "ReplicatedLinear",
    "model_class.py: entry.original()": "_LazyRegisteredModel",
    "moe.py: layer": "RoutedExperts",
    "moe.py: moe": "FusedMoEConfig",
    "moe.py: getattr(layer, name)": OURS,  # weights, which create_weights() of vLLM's method makes
    "moe.py: formats": "FusedMoEActivationFormat",
    "moe.py: name": OURS,
    "moe.py: self._layer(w1, w2)": OURS,
    "moe.py: self._layer(layer.w13_weight, layer.w2_weight)": OURS,
    "moe.py: moe_parallel_config": "FusedMoEParallelConfig",
    "moe.py: runner": "MoERunner",
    "moe.py reason_against_a_step: router": "FusedTopKRouter",
    "moe.py: tensor": OURS,
    "nvfp4.py: config": "FusedMoEConfig",
    "reach.py: vllm_config": "VllmConfig",
    "reach.py: model": "GptOssModel",
    "reach.py: layer": "TransformerBlock",
    "reach.py: method": "GptOssMxfp4MoEMethod",
    "replacements.py: holder": OURS,  # as its table says; test_replacements.py compares that with the contacts
    "settings.py: additional_config": OURS,
    "settings.py: given": OURS,
    "settings.py: variables": OURS,
    "settings.py: getattr(self, kind)": OURS,
    "table.py: layers": OURS,
    "table.py: layer": "Attention",
}
"""``file: expression`` or ``file function: expression`` -> the class of vLLM's that it is, or a module."""

VALUES = {
    "get_current_vllm_config()": "VllmConfig",
    "get_current_vllm_config_or_none()": "VllmConfig",
    "get_forward_context()": "ForwardContext",
    "get_layerwise_info()": "LayerReloadingInfo",
    "get_flashinfer_layout_string()": OURS,
    "is_forward_context_available()": OURS,
    "init_logger()": "_VllmLogger",
    "register_quantization_config()": OURS,
    "set_current_vllm_config()": OURS,
    "ModelWeightParameter()": "ModelWeightParameter",
    "VllmConfig.additional_config": OURS,
    "VllmConfig.model_config": "ModelConfig",
    "VllmConfig.parallel_config": "ParallelConfig",
    "VllmConfig.compilation_config": "CompilationConfig",
    "VllmConfig.scheduler_config": "SchedulerConfig",
    "VllmConfig.cache_config": "CacheConfig",
    "VllmConfig.device_config": "DeviceConfig",
    "VllmConfig.load_config": "LoadConfig",
    "VllmConfig.lora_config": "LoRAConfig",
    "VllmConfig.offload_config": "OffloadConfig",
    "VllmConfig.attention_config": "AttentionConfig",
    "VllmConfig.aux_output_config": "AuxOutputConfig",
    "VllmConfig.speculative_config": "SpeculativeConfig",
    "ModelConfig.head_dtype": OURS,
    "ParallelLMHead.quant_method": "UnquantizedEmbeddingMethod",
    "ParallelLMHead.shard_indices": "VocabParallelEmbeddingShardIndices",
    "ParallelLMHead.weight": OURS,
    "get_pp_group()": "GroupCoordinator",
    "OffloadConfig.uva": "UVAOffloadConfig",
    "OffloadConfig.prefetch": "PrefetchOffloadConfig",
    "ModelConfig.hf_config": OURS,  # transformers'
    "CompilationConfig.cudagraph_mode": "CUDAGraphMode",
    "CompilationConfig.cudagraph_capture_sizes": OURS,
    "CompilationConfig.static_forward_context": OURS,
    "LoRAConfig.target_modules": OURS,
    "Platform.get_device_capability()": "DeviceCapability",
    "ForwardContext.attn_metadata": OURS,
    "ForwardContext.is_padding": OURS,
    "GptOssMxfp4Config.online_quantization_config": "OnlineQuantizationConfig",
    "GptOssMxfp4MoEMethod.mxfp4_backend": "Mxfp4MoeBackend",
    "GptOssMxfp4MoEMethod.moe": "FusedMoEConfig",
    "GptOssMxfp4MoEMethod.moe_kernel": "FusedMoEKernel",
    "FusedMoEConfig.moe_parallel_config": "FusedMoEParallelConfig",
    "FusedMoEKernel.fused_experts": "FlashInferExperts",
    "FlashInferExperts.moe_config": "FusedMoEConfig",
    "RoutedExperts._buffers": OURS,
    "RoutedExperts._parameters": OURS,
    "MoERunner.moe_config": "FusedMoEConfig",
    "vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEActivationFormat": "FusedMoEActivationFormat",
    "GptOssForCausalLM.model": "GptOssModel",
    "TransformerBlock.attn": "OAIAttention",
    "TransformerBlock.mlp": "MLPBlock",
    "TransformerBlock.input_layernorm": "RMSNorm",
    "TransformerBlock.post_attention_layernorm": "RMSNorm",
    "OAIAttention.attn": "Attention",
    "OAIAttention.qkv_proj": "QKVParallelLinear",
    "OAIAttention.o_proj": "RowParallelLinear",
    "OAIAttention.rotary_emb": "RotaryEmbeddingBase",
    "RotaryEmbeddingBase.cos_sin_cache": OURS,
    "MLPBlock.router": "ReplicatedLinear",
    "MLPBlock.experts": "MoERunner",
    "MoERunner.routed_experts": "RoutedExperts",
    "MoERunner.router": "BaseRouter",
    "RoutedExperts.quant_method": "GptOssMxfp4MoEMethod",
    "RoutedExperts.moe_config": "FusedMoEConfig",
    "LinearBase.quant_method": "LinearMethodBase",
    "QKVParallelLinear.quant_method": "LinearMethodBase",
    "LinearBase.weight": OURS,
    "Attention.attn_backend": "AttentionBackend",
    "Attention.kv_cache": OURS,
    "Attention.impl": "FlashInferImpl",
    "ModelWeightParameter.data": OURS,
}
"""``Class.attribute`` or ``Class.method()`` -> the class of the value."""

BASES = {
    "QKVParallelLinear": "ColumnParallelLinear",
    "ColumnParallelLinear": "LinearBase",
    "RowParallelLinear": "LinearBase",
    "ReplicatedLinear": "LinearBase",
    "SM12xGptOssConfig": "GptOssMxfp4Config",
    "GptOssMxfp4MoEMethod": "FusedMoEMethodBase",
    "FlashInferExperts": "FusedMoEExperts",
    "FusedTopKRouter": "BaseRouter",
}

INHERITED = "register_buffer register_parameter parameters data value info warning".split()
"""Of torch.nn.Module and torch.nn.Parameter, of members of an enum, of logging's loggers."""

NO_CLASS_HAS = {
    "LinearBase.weight": "a parameter, which the layer's method makes",
    "LinearBase.weight_scale": "made here",
    "LinearBase.sm12x_coarse": "made here",
    "ParallelLMHead.weight": "a parameter, which the layer's method makes",
    **dict.fromkeys(
        ("UnquantizedEmbeddingMethod.weight_was_loaded", "UnquantizedEmbeddingMethod.follow"), "of this plugin's"
    ),
    "LinearBase.weight_global_scale": "made here",
    "LinearBase._already_called_process_weights_after_loading": "vLLM's mark on a layer that is done",
    "LinearBase.input_size_per_partition": "set here, where the layer's weight is made",
    "LinearMethodBase.kernel": "asked with a default",
    "GptOssForCausalLM.sm12x_barrier": "made here",
    "GptOssForCausalLM.sm12x_rope_table": "made here",
    "GptOssForCausalLM.sm12x_workspace": "made here",
    "ReplicatedLinear.weight": "a parameter, which the layer's method makes",
    **dict.fromkeys(
        (
            f"FlashInferExperts.{name}"
            for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "operators_activation")
        ),
        "made here",
    ),
    **dict.fromkeys((f"RoutedExperts.{name}" for name in ("_buffers", "_parameters")), "torch.nn.Module's"),
    "RoutedExperts.w13_weight": "a parameter, which the layer's method makes",
    "RoutedExperts.w2_weight": "a parameter, which the layer's method makes",
    "Attention._k_scale_float": "asked for by model.reason_against(): no method of the class makes it",
    "Attention._v_scale_float": "asked for by model.reason_against(): no method of the class makes it",
    "vllm.compilation.backends.model_tag": "asked for by lm_head.py, which must not import that module",
    "vllm.platforms.current_platform": "a value that its module computes; its class is checked",
}
"""What is touched and no class or module can be asked for beforehand, and why."""

SET = (
    "logical_widths input_size_per_partition output_size_per_partition orig_dtype weight_block_size input_scale".split()
)
"""What the plugin sets on vLLM's layers, for vLLM's kernels."""

PARTS = {
    "config.py": ("config", "decode", "dense"),  # whose API checks it asks for, before it uses what is theirs
    "model_class.py": ("config",),
    **dict.fromkeys(("attention.py", "compiler.py", "devices.py", "memory.py", "settings.py"), ("config", "attention")),
    # What reach.py and table.py read for a message may fail: their callers go on (fallback.leaving).
    **dict.fromkeys(("reach.py", "table.py"), tuple(api_checks.TABLE)),
    "dense.py": ("config", "dense", "decode"),  # a norm is computed with the layer in decode steps alone
    "dense_folder.py": ("config", "dense"),
    "lm_head.py": ("config", "dense", "head"),
    "rescored.py": ("config", "dense", "head", "rescored"),
    "moe.py": ("config", "experts"),
    "nvfp4.py": ("config", "experts", "nvfp4"),
    "model.py": ("config", "experts", "dense", "decode"),
}
"""The parts of the table whose names a file may use: those which are left to vLLM without the file."""

ALSO = {
    "QKVParallelLinear.weight_loader": "called by the name that create_weights() gets it under",
    "RowParallelLinear.weight_loader": "called by the name that create_weights() gets it under",
    "ParallelLMHead.weight_loader": "called by the name that create_weights() gets it under",
    "FlashInferExperts._supports_no_act_and_mul": "vLLM asks it about the experts of NVFP4",
    **{
        f"ApplyMoEActivationConfig.{name}": "asked for by each name of moe.PARAMETERS"
        for name in ("alpha", "beta", "clamp_limit")
    },
    **{
        f"FusedMoEQuantConfig.{name}": "asked for by each name that moe.require_known_format() has"
        for name in "is_scale_swizzled is_scale_transposed mx_alignment per_act_token_quant per_out_ch_quant "
        "block_shape "
        "a1_scale a2_scale w1_zp w2_zp g1_alphas g2_alphas".split()
    },
    "select_nvfp4_moe_backend": "its form; it is replaced in two modules that import it",
}
"""What depends on vLLM and is no attribute of an expression, and why."""

WALK = Walk(NAMES, VALUES).run()


def entries(touch: Touch) -> list[tuple[str, api_checks.ApiCheck]]:
    """The table's checks of a name, of its class or a base."""
    holder, found = touch.holder, []
    while holder:
        for part in api_checks.TABLE:
            for each in api_checks.checks_of(part):
                of_class = each.path in (f"{holder}.{touch.name}", f"{holder.rpartition('.')[2]}.{touch.name}")
                first = each.path.partition(".")[0]
                of_module = each.module == holder and touch.name == first
                if of_class or of_module:
                    found.append((part, each))
        holder = BASES.get(holder, "")
    return found


def is_listed(touch: Touch) -> bool:
    inherited = touch.name in INHERITED and "." not in touch.holder
    return inherited or f"{touch.holder}.{touch.name}" in NO_CLASS_HAS or (touch.is_set and touch.name in SET)


def problem(touch: Touch) -> str:
    """Why the table does not cover a touch; an empty text if it does."""
    if is_listed(touch):
        return ""
    found = entries(touch)
    if not found:
        return f"{touch} is not in the table"
    if not any(part in PARTS[touch.file] for part, _ in found):
        return f"{touch} is in the table for {', '.join(part for part, _ in found)} only"
    if touch.call is None or touch.is_set:
        return ""
    calls = [each for _, each in found if each.path.rpartition(".")[2] in (touch.name, "__init__")]
    calls = [each for each in calls if each.call is not None or each.takes is not None]
    if not calls:
        return f"{touch} is called, and the table does not say how"
    return "" if any(agrees(touch, each) for each in calls) else f"{touch} is called otherwise than the table says"


def agrees(touch: Touch, check: api_checks.ApiCheck) -> bool:
    assert touch.call is not None
    count, keywords = touch.call
    if check.takes is not None:
        try:
            check.takes.bind(*[None] * count, **dict.fromkeys(keywords))
        except TypeError:
            return False
        return True
    assert check.call is not None
    by_position = [each for each in check.call if "=" not in each and not each.startswith("**")]
    if by_position and by_position[-1].startswith("*"):
        by_position, count = by_position[:-1], min(count, len(by_position) - 1)
    others = {"None"} if any(each.startswith("**") for each in check.call) else set()
    asked = {each[:-1] for each in check.call if each.endswith("=")}
    return len(by_position) == count and set(keywords) - others <= asked


def test_every_expression_whose_attributes_are_read_has_a_type():
    assert sorted(set(WALK.untold)) == []


def test_types_that_nothing_asks_for_are_gone():
    assert [key for key in {**NAMES, **VALUES} if key not in WALK.used] == []
    of_class = {f"{touch.holder}.{touch.name}" for touch in WALK.touches}
    assert [key for key in NO_CLASS_HAS if key not in of_class and not key.endswith("current_platform")] == []


def test_every_attribute_of_vllm_that_the_plugin_touches_is_in_the_table():
    assert sorted({message for touch in WALK.touches if (message := problem(touch))}) == []


def test_every_entry_of_the_table_is_touched():
    used = {(each.module, each.path) for touch in WALK.touches for _, each in entries(touch)}
    used |= {(each.module, each.path.partition("[")[0]) for each in replacements.TABLE}
    own = {
        node.name if isinstance(node, ast.FunctionDef) else node.attr
        for path in touched.PLUGIN.glob("*.py")
        for node in ast.walk(touched.parsed(path))
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self")
    }
    imports = {
        name for path in touched.PLUGIN.glob("*.py") for name in touched.File(Walk({}, {}), path).imports.values()
    }
    assert [
        f"{part}: {each}"
        for part in api_checks.TABLE
        for each in api_checks.checks_of(part)
        if (each.module, each.path) not in used
        and each.path not in ALSO
        and not ("." in each.path and each.path.rpartition(".")[2] in own)  # overridden
        and f"{each.module}.{each.path}" not in imports
    ] == []


PLUGIN = """
from vllm.config import get_current_vllm_config
from vllm.utils import flashinfer
from vllm.model_executor.utils import replace_parameter
def hook(vllm_config, layer):
    {}
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vllm_config.model_config", ""),
        ("vllm_config.model_config.hf_config.anything", ""),
        ("vllm_config.model_config.gone", "ModelConfig.gone is not in the table"),
        ("getattr(vllm_config, 'gone', None)", "VllmConfig.gone is not in the table"),
        ("hasattr(vllm_config.model_config, 'gone')", "ModelConfig.gone is not in the table"),
        ("model = vllm_config.model_config; model.gone", "ModelConfig.gone is not in the table"),
        ("(model := get_current_vllm_config().model_config).gone", "ModelConfig.gone is not in the table"),
        ("vllm_config.gone = 1", "VllmConfig.gone is not in the table"),
        ("flashinfer.gone", "flashinfer.gone is not in the table"),
        ("flashinfer._flashinfer_nvcc_path()", ""),
        ("flashinfer._flashinfer_nvcc_path(1)", "is called otherwise than the table says"),
        ("replace_parameter(layer, 'weight', None)", ""),
        ("replace_parameter(layer, 'weight')", "is called otherwise than the table says"),
        ("replace_parameter(layer, 'weight', new_tensor=None)", "is called otherwise than the table says"),
        ("layer.gone", "layer.gone: layer"),
        ("other(vllm_config).gone", "other(vllm_config).gone: "),
        ("[each.gone for each in vllm_config.model_config]", "each.gone: each in vllm_config.model_config"),
        ("vllm_config.cache_config.block_size", "CacheConfig.block_size is not in the table"),
        ("vllm_config.kv_transfer_config.role", "vllm_config.kv_transfer_config.role: VllmConfig.kv_transfer_config"),
    ],
)
def test_the_walk_notices_a_line(tmp_path: Path, line: str, message: str):
    (tmp_path / "dense.py").write_text(PLUGIN.format(line))
    names = {"dense.py: vllm_config": "VllmConfig"}
    walk = Walk(names, VALUES).run(tmp_path)
    every = tuple(api_checks.TABLE)
    found = walk.untold + [
        each
        for touch in walk.touches
        if (each := problem(dataclasses.replace(touch, file="reach.py"))) and PARTS["reach.py"] == every
    ]
    assert (message in found[0]) if message else found == [], found
