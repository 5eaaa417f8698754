# SPDX-License-Identifier: Apache-2.0
"""Each name of vLLM 0.33.0's interface of experts, and what this plugin does with it.

``taken``
    the plugin's code reads the name, or another one that stands behind the colon
``refused``
    a layer with it is left to vLLM, or a call with it raises, by the name, or the one behind the colon
``harmless``
    results cannot depend on it, with the reason
"""

from __future__ import annotations

import dataclasses
import inspect

ROUTERS = "harmless: vLLM's router has chosen experts and weights before a call"
STEPS = "harmless: vLLM's router applies it; decode steps of this fork are gpt-oss's alone, by a FusedTopKRouter"
ROCM = "harmless: set on ROCm alone"
LOADERS = "harmless: for vLLM's weight loaders"
BY_ALL2ALL = "refused: use_all2all_kernels"
RUNNERS = "harmless: vLLM's runner does it behind the experts, and decode steps call the runner's reduction"
GATHERED = "harmless: vLLM gathers tokens before the experts; decode steps leave such a server to vLLM"
SCRATCH = "harmless: scratch memory that the operator does not need"
DEFERRED = "harmless: models ask it of vLLM's TRTLLM experts alone; a hook that they set is refused"

TABLE: dict[str, dict[str, str]] = {
    "arguments of a call": {
        **dict.fromkeys(("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"), "taken"),
        "global_num_experts": "refused",
        "expert_map": "refused",
        "a1q_scale": "taken",
        "a2_scale": "refused",
        "workspace13": SCRATCH,
        "workspace2": SCRATCH,
        "expert_tokens_meta": "refused",
        "apply_router_weight_on_input": "taken",
    },
    "members of the experts' classes": {
        "consumes_expert_mask": "harmless: false here, so vLLM gives the map of experts, not AITER's mask",
        "post_gemm2_hook": "refused",
        "_uses_post_gemm2_hook": "refused: post_gemm2_hook",
        "_run_post_gemm2_hook": "refused: post_gemm2_hook",
        "process_weights_after_loading": "taken",
        "is_monolithic": "harmless: false, as of all modular experts",
        "expects_unquantized_inputs": "taken",
        "activation_format": "harmless: FlashInferExperts' standard format, [tokens, hidden]",
        "is_supported_config": "taken",
        "_supports_current_device": "taken",
        "_supports_no_act_and_mul": "harmless: true; which activations there are, _supports_activation says",
        "_supports_quant_scheme": "taken",
        "_supports_activation": "taken",
        "_supports_parallel_config": "taken",
        "_supports_routing_method": ROUTERS,
        "_supports_hash_routing": ROUTERS,
        "_supports_router_logits_dtype": ROUTERS,
        "_supports_shape": "taken",
        "_supports_batch_invariance": "harmless: false, so vLLM leaves the layer to others where it is asked for",
        "quant_dtype": "taken",
        "weight_quant_dtype": "harmless: _supports_quant_scheme decides by vLLM's keys of the same",
        "block_shape": "refused",
        "per_act_token_quant": "refused",
        "per_out_ch_quant": "refused",
        "a1_scale": "refused",
        "a2_scale": "refused",
        "a1_gscale": "harmless: of activations in NVFP4 (W4A4), which this fork does not round",
        "a2_gscale": "harmless: of activations in NVFP4 (W4A4), which this fork does not round",
        **dict.fromkeys(("w1_scale", "w2_scale", "w1_bias", "w2_bias", "g1_alphas", "g2_alphas"), "taken"),
        "w1_zp": "refused",
        "w2_zp": "refused",
        "supports_lora": "harmless: false, so vLLM leaves the layer to others where adapters may change it",
        "supports_packed_ue8m0_act_scales": "harmless: false, so vLLM does not pack scales",
        "moe_problem_size": "harmless: for the shapes of workspaces and outputs, which depend on tokens alone",
        "workspace_dtype": "harmless: the output's dtype, which is the tokens'",
        "output_hidden_dim": "harmless: the hidden size as it is; vLLM's runner cuts its padding off",
        "workspace_shapes": "taken",
        "adjust_N_for_activation": "harmless: nothing of this fork's or FlashInferExperts' calls it",
        "activation": "harmless: vLLM's function of an activation, which is computed inside the operator here",
        "finalize_weight_and_reduce_impl": "harmless: FlashInferExperts': outputs are weighted and reduced",
        "apply": "taken",
    },
    "FusedMoEConfig": {
        "num_experts": "taken",
        "experts_per_token": "taken",
        "hidden_dim": "taken",
        "intermediate_size": "harmless: of all ranks; intermediate_size_per_partition is taken",
        "num_local_experts": "taken",
        "num_logical_experts": "harmless: another number than num_experts with EPLB alone, which is refused",
        "activation": "taken",
        "device": "taken",
        "routing_method": ROUTERS,
        "moe_parallel_config": "taken",
        "in_dtype": "taken",
        "router_logits_dtype": "taken",
        "hidden_dim_unpadded": "harmless: padding is zeros, and vLLM's runner cuts it off",
        "intermediate_size_per_partition_unpadded": "harmless: padding is zeros, of which every activation makes zeros",
        "intermediate_pad": ROCM,
        "moe_backend": "taken",
        "max_num_tokens": "harmless: of the batched format's buffers",
        "elastic_ep_max_dp_size": "harmless: elastic EP wants EPLB, which is refused",
        "has_bias": "taken",
        "is_lora_enabled": "refused",
        "has_hash_routing": ROUTERS,
        "require_decomposed_backend": ROUTERS,
        "shared_expert_prefix": LOADERS,
        "skip_final_all_reduce": RUNNERS,
        "_defer_moe_finalize": DEFERRED,
        "defer_moe_finalize_max_num_tokens": DEFERRED,
        "swiglu_limit": "taken",
        "swiglu_alpha": "taken: activation_config",
        "swiglu_beta": "taken: activation_config",
        "activation_situ_beta": "refused: _supports_activation",
        "activation_situ_linear_beta": "refused: _supports_activation",
        "max_capture_size": "taken",
        "intermediate_size_per_partition": "taken",
        "tp_shard_with_padding": LOADERS,
        "rocm_aiter_fmoe_enabled": ROCM,
        "aiter_fmoe_shared_expert_enabled": ROCM,
        "use_mxfp4_w4a4_dsv4": ROCM,
    },
    "FusedMoEParallelConfig": {
        **dict.fromkeys(("tp_size", "tp_rank", "ep_size", "ep_rank", "dp_size"), "taken"),
        "pcp_size": GATHERED,
        "pcp_rank": "harmless: vLLM gathers tokens in front of the experts",
        "dp_rank": "harmless: vLLM gathers tokens in front of the experts",
        "sp_size": GATHERED,
        "use_ep": "harmless: ep_size is 1 without it",
        "all2all_backend": "taken: use_ag_rs_all2all_kernels",
        "enable_eplb": "refused",
        "use_all2all_kernels": "taken",
        "use_ag_rs_all2all_kernels": "taken",
        "use_passthrough_all2all": "refused",
        "use_batched_activation_format": "taken",
        **dict.fromkeys(
            (
                *("use_deepep_ht_kernels", "use_deepep_ll_kernels", "use_deepep_v2_kernels", "use_moonep_kernels"),
                *("use_fi_nvl_two_sided_kernels", "use_fi_nvl_one_sided_kernels", "use_mori_kernels"),
                "use_nixl_ep_kernels",
            ),
            BY_ALL2ALL,
        ),
    },
    "FusedMoEQuantConfig": {
        "_a1": "taken: quant_dtype",
        "_a2": "refused: a2_scale",
        "_w1": "taken: w1_scale",
        "_w2": "taken: w2_scale",
        "is_scale_swizzled": "refused",
        "is_scale_transposed": "refused",
        "gemm1_alpha": "taken: activation_config",
        "gemm1_beta": "taken: activation_config",
        "gemm1_clamp_limit": "taken: activation_config",
        "mx_alignment": "refused",
    },
    "FusedMoEQuantDesc": {
        "dtype": "taken: quant_dtype",
        "shape": "refused: block_shape",
        "scale": "taken: w1_scale",
        "alpha_or_gscale": "taken: g1_alphas",
        "zp": "refused: w1_zp",
        "bias": "taken: w1_bias",
    },
    "ApplyMoEActivationConfig": {
        "clamp_limit": "taken",
        "alpha": "taken",
        "beta": "taken",
        "activation_situ_beta": "refused: _supports_activation",
        "activation_situ_linear_beta": "refused: _supports_activation",
    },
    "RoutedExperts": {
        "layer_name": LOADERS,
        "params_dtype": LOADERS,
        "moe_config": "taken",
        "quant_config": "harmless: it makes the method, whose choice of experts this plugin is asked in",
        "expert_map_manager": "taken: expert_map",
        **dict.fromkeys(("ckpt_gate_proj_name", "ckpt_down_proj_name", "ckpt_up_proj_name"), LOADERS),
        "is_fused_checkpoint_transposed": LOADERS,
        "renormalize": "taken",
        "use_grouped_topk": STEPS,
        "num_expert_group": STEPS,
        "topk_group": STEPS,
        "custom_routing_function": STEPS,
        "scoring_func": "taken",
        "routed_scaling_factor": "taken",
        "swiglu_limit": "taken: activation_config",
        "swiglu_alpha": "taken: activation_config",
        "swiglu_beta": "taken: activation_config",
        "e_score_correction_bias": STEPS,
        "apply_router_weight_on_input": "taken",
        "hash_indices_table": STEPS,
    },
    "MoERunner": {
        "layer_name": LOADERS,
        "moe_config": "taken",
        "router": "taken",
        "routed_experts": "taken",
        "enable_dbo": "harmless: each microbatch is a call of its own; decode steps leave such a server to vLLM",
        "gate": "taken",
        "shared_experts": "taken",
        "shared_expert_gate": "taken",
        "routed_input_transform": "taken",
        "routed_output_transform": "taken",
        "routed_scaling_factor": "taken",
    },
    "FusedMoEFactory": {
        "num_experts": "taken",
        "top_k": "taken",
        "hidden_size": "taken: hidden_dim",
        "intermediate_size": "taken: intermediate_size_per_partition",
        "intermediate_pad": ROCM,
        "params_dtype": LOADERS,
        "renormalize": "taken",
        **dict.fromkeys(("use_grouped_topk", "num_expert_group", "topk_group", "custom_routing_function"), STEPS),
        "quant_config": "harmless: it makes the method, whose choice of experts this plugin is asked in",
        "tp_size": "taken",
        "dp_size": "taken",
        "pcp_size": GATHERED,
        "prefix": LOADERS,
        "router": "taken",
        "scoring_func": "taken",
        "routed_scaling_factor": "taken",
        "swiglu_limit": "taken",
        "swiglu_alpha": "taken: activation_config",
        "swiglu_beta": "taken: activation_config",
        "activation_situ_beta": "refused: _supports_activation",
        "activation_situ_linear_beta": "refused: _supports_activation",
        "e_score_correction_bias": STEPS,
        "apply_router_weight_on_input": "taken",
        "activation": "taken",
        "enable_eplb": "refused",
        "num_redundant_experts": "refused: enable_eplb",
        "has_bias": "taken",
        "is_sequence_parallel": GATHERED,
        "reduce_results": RUNNERS,
        "ckpt_names": LOADERS,
        "is_fused_checkpoint_transposed": LOADERS,
        "n_shared_experts": "refused: num_local_experts",
        "fuse_shared_experts": "refused: num_local_experts",
        "shared_expert_prefix": LOADERS,
        "router_logits_dtype": "taken",
        "gate": "taken",
        "shared_experts": "taken",
        "shared_expert_gate": "taken",
        "routed_input_transform": "taken",
        "routed_output_transform": "taken",
        "apply_routed_scale_to_output": "taken: routed_scaling_factor",
        "zero_expert_type": "harmless: vLLM's router gives such slots weights of 0, and its runner adds their output",
        "hash_indices_table": STEPS,
        "bias_vl": STEPS,
        "image_sentinel_lo": STEPS,
        "runner_cls": "harmless: it calls the method's apply, whose arguments are above",
        "runner_args": "harmless: of runner_cls",
        "routed_experts_cls": "harmless: it calls the method's apply, whose arguments are above",
        "moe_config_cls": "refused: FusedMoEConfig",
        "routed_experts_args": "harmless: of routed_experts_cls",
        "skip_padding": "harmless: rows of padding have ids of -1, which contribute nothing",
    },
}


def of_vllm() -> dict[str, set[str]]:
    """The names of the installed vLLM, by the parts of :data:`TABLE`."""
    from vllm.model_executor.layers.fused_moe import activation, config, layer, modular_kernel, routed_experts
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    def parameters(function: object) -> set[str]:
        return set(inspect.signature(function).parameters) - {"self"}  # type: ignore[arg-type]

    def fields(cls: type) -> set[str]:
        return {field.name for field in dataclasses.fields(cls)}

    bases = modular_kernel.FusedMoEExperts, modular_kernel.FusedMoEExpertsModular
    members = {name for cls in bases for name in vars(cls) if not name.startswith(("__", "_abc"))}
    ways = {name for name in vars(config.FusedMoEParallelConfig) if name.startswith("use_")}
    return {
        "arguments of a call": parameters(modular_kernel.FusedMoEExpertsModular.apply),
        "members of the experts' classes": members,
        "FusedMoEConfig": fields(config.FusedMoEConfig),
        "FusedMoEParallelConfig": fields(config.FusedMoEParallelConfig) | ways,
        "FusedMoEQuantConfig": fields(config.FusedMoEQuantConfig),
        "FusedMoEQuantDesc": fields(config.FusedMoEQuantDesc),
        "ApplyMoEActivationConfig": fields(activation.ApplyMoEActivationConfig),
        "RoutedExperts": parameters(routed_experts.RoutedExperts.__init__),
        "MoERunner": parameters(moe_runner.MoERunner.__init__),
        "FusedMoEFactory": parameters(layer.FusedMoEFactory),
    }
