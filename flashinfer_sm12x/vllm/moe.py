# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts on ``flashinfer.fused_moe.cutlass_fused_moe``, W4A16 or W4A8 by a step's number of tokens: gpt-oss's,
the weights unpadded; other models' by vLLM's own method (:func:`install`).

vLLM has a path to the same operator. This one differs in three things: W4A16 exists on SM12x, the layer may quantize
its input itself (one launch fewer, and no need for nvidia-cutlass-dsl), and hidden sizes stay as they are. vLLM pads
2880 to 2944, 4.5 % more bytes of weights for every token and a copy of every activation; the kernels take multiples
of 32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import (
    Mxfp4MoeBackend,
    _user_moe_activation_override,
    convert_weight_to_mxfp4_moe_kernel_format,
    make_mxfp4_moe_kernel,
)
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static, kMxfp8Dynamic
from vllm.model_executor.utils import replace_parameter

from . import api_checks, devices, fallback, replacements, settings, table
from .layer_object import LayerObject
from .settings import Settings

logger = init_logger("vllm.flashinfer_sm12x")

# vLLM's names of the operator's two modes; its quantization configs follow from them.
BACKENDS = {
    "a8": Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_MXFP8,
    "a16": Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_BF16,
    "auto": Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_BF16,
}
ACTIVATION_KEYS = {"a8": kMxfp8Dynamic, "a16": None, "auto": None}
# --moe-backend values that mean this operator.
OUR_BACKENDS = ("auto", "flashinfer_cutlass")
BLOCK_SIZE = 32
CHOSEN = "chosen"  # the reason of a user who left the experts to vLLM
# Modules of --lora-target-modules, by the last part of their names, whose adapters leave experts as they are.
ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
# vLLM's activations: the operator's name for each, and the parameters that vLLM's has. SILU has a limit alone, even
# where the model's configuration has alpha and beta.
ACTIVATIONS = {
    MoEActivation.SILU: ("Swiglu", ("clamp_limit",)),
    MoEActivation.SWIGLUOAI: ("Swiglu", ("alpha", "beta", "clamp_limit")),
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: ("Swiglu", ("alpha", "beta", "clamp_limit")),
    MoEActivation.SWIGLUSTEP: ("SwigluStep", ("clamp_limit",)),
    MoEActivation.RELU2_NO_MUL: ("Relu2", ()),
}
PARAMETERS = ("alpha", "beta", "clamp_limit")
OFF = '{"sm12x": {"moe": "vllm"}} leaves the experts to vLLM'


class SM12xExperts(FlashInferExperts):
    """gpt-oss's experts on ``cutlass_fused_moe``, given bf16: the layer quantizes inside (W4A8) or not at all
    (W4A16)."""

    READ: ClassVar[tuple[str, ...]] = ("w1_scale", "w2_scale", "w1_bias", "w2_bias")
    """The tensors of vLLM's quantization config that a call reads."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        super().__init__(moe_config, quant_config)
        require_known_format(quant_config, self.READ)
        self.operators_activation, parameters = ACTIVATIONS[moe_config.activation]
        for name in PARAMETERS:
            # activation_config is vLLM's own choice between the two configs in which a parameter may stand.
            value = getattr(self.activation_config, name) if name in parameters else None
            made = (
                None
                if value is None
                else torch.full((self.num_experts,), value, dtype=torch.float32, device=self.device)
            )
            setattr(self, f"gemm1_{name}", made)
        self.expert_map: torch.Tensor | None = None
        self._object = LayerObject()

    @staticmethod
    def _supports_current_device() -> bool:
        return devices.served()

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key == kMxfp4Static and activation_key in ACTIVATION_KEYS.values()

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SWIGLUOAI  # as gpt-oss's method prepares the weights

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        """Tokens of other ranks come by all-gather or not at all: other all-to-alls have ids, scales and weights of
        their own."""
        parallel = moe_parallel_config
        gathers = not parallel.use_all2all_kernels or parallel.use_ag_rs_all2all_kernels
        return gathers and not parallel.use_passthrough_all2all

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the layer's experts and biases, and give it the tensors that CUDA graphs will read
        (:func:`keep_tensors`)."""
        require_contiguous_experts(layer.expert_map, self.ep_rank, self.num_experts)
        found = {self.moe_config.has_bias, self.w1_bias is not None, self.w2_bias is not None}
        if len(found) > 1:
            raise ValueError(
                f"the model {'has' if self.moe_config.has_bias else 'has no'} biases in its experts, and vLLM's method "
                f"gives {'one' if self.w1_bias is not None else 'none'} for FC1 and "
                f"{'one' if self.w2_bias is not None else 'none'} for FC2; {OFF}"
            )
        self.expert_map = layer.expert_map
        keep_tensors(layer, self)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool | None,
    ) -> None:
        """vLLM's call. The workspaces are scratch memory that the operator does not need.

        Raises
        ------
        ValueError
            Naming an argument that is not what the layer was prepared for.
        """
        unlike = ""
        if activation != self.moe_config.activation:
            unlike = f"activation is {activation}"
        elif global_num_experts != self.moe_config.num_experts:
            unlike = f"global_num_experts is {global_num_experts}"
        elif expert_map is not self.expert_map:
            unlike = "expert_map is not the layer's"
        elif a2_scale is not None:
            unlike = "a2_scale is given"
        elif expert_tokens_meta is not None:
            unlike = "expert_tokens_meta is given"
        elif self.post_gemm2_hook is not None:
            unlike = "post_gemm2_hook is set"
        if unlike:
            raise ValueError(f"{unlike}, for which these experts were not prepared; {OFF}")
        # vLLM has multiplied the tokens where it applies the router's weights on the input; no weights are ones.
        weights = None if apply_router_weight_on_input else topk_weights
        self._layer(w1, w2).run(hidden_states, topk_ids.to(torch.int), weights, input_sf=a1q_scale, output=output)

    def _layer(self, w1: torch.Tensor, w2: torch.Tensor) -> Any:
        """The fork's object of these experts (:class:`.LayerObject`)."""
        from flashinfer.tllm_enums import ActivationType

        from flashinfer.fused_moe import SM12xMoELayer

        scales, biases = self._scales(), (self.w1_bias, self.w2_bias)
        tensors = (w1, w2, *scales, *biases)
        if (known := self._object.get(tensors)) is not None:
            return known
        made = SM12xMoELayer(
            w1,
            w2,
            self.out_dtype,
            scales,
            *biases,
            self.gemm1_alpha,
            self.gemm1_beta,
            self.gemm1_clamp_limit,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
            **self._mode(),
            activation_type=ActivationType[self.operators_activation],
        )
        return self._object.keep(made, tensors)

    def _mode(self) -> dict[str, bool]:
        """The operator's flags."""
        rounds = self.quant_dtype == "mxfp8"
        return {"use_mxfp8_act_scaling": rounds, "use_w4_group_scaling": not rounds}

    def _scales(self) -> list[Any]:
        if self._mode()["use_w4_group_scaling"]:
            return [self.w1_scale, self.w2_scale]
        return [self.w1_scale, self.fake_input_scale, self.w2_scale, self.fake_input_scale]


class SM12xAutoExperts(SM12xExperts):
    """The same in W4A16 where that takes no longer, and in W4A8 elsewhere: the operator chooses by a call's tokens."""

    def step(self, layer: Any, hidden_states: torch.Tensor, **routing: Any) -> torch.Tensor:
        """A decode step's call: new outputs of the layer's experts for ``routing``, as ``moe_step`` takes it."""
        return self._layer(layer.w13_weight, layer.w2_weight).run(hidden_states, **routing)

    def _mode(self) -> dict[str, bool]:
        """Both of the operator's modes; vLLM has no name for that."""
        return {"use_mxfp8_act_scaling": True, "use_w4_group_scaling": True}


class SM12xQuantizedInputExperts(SM12xExperts):
    """gpt-oss's experts, given MXFP8 by vLLM's quantizer."""

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        """Scales that vLLM gathers from other ranks are in another layout than those of this rank's tokens."""
        parallel = moe_parallel_config
        gathers = parallel.use_all2all_kernels or parallel.dp_size > 1
        return not gathers and SM12xExperts._supports_parallel_config(parallel)

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False


class SM12xMxfp4Experts(SM12xExperts):
    """:class:`SM12xExperts` of other models, whose weights vLLM's own method prepares: W4A8 from bf16."""

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kMxfp4Static, kMxfp8Dynamic)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in (MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE, MoEActivation.SWIGLUSTEP)


class SM12xMxfp4AutoExperts(SM12xAutoExperts, SM12xMxfp4Experts):
    """The same, in the mode of :class:`SM12xAutoExperts`."""


def require_known_format(config: Any, read: tuple[str, ...]) -> None:
    """Raise unless vLLM's quantization config of a layer says nothing but what a call reads of it (``read``), and that
    weights and tokens are in the formats that its method was chosen for.

    Raises
    ------
    ValueError
        Naming the field.
    """
    known = {
        "is_scale_swizzled": True,
        "is_scale_transposed": False,
        "mx_alignment": 0,
        "per_act_token_quant": False,
        "per_out_ch_quant": False,
        **dict.fromkeys(("block_shape", "a1_scale", "a2_scale", "w1_zp", "w2_zp")),
        **dict.fromkeys(name for name in ("g1_alphas", "g2_alphas") if name not in read),
    }
    if type(config) is not FusedMoEQuantConfig:
        raise ValueError(
            f"vLLM describes these experts by a {type(config).__name__}, which this fork does not know; {OFF}"
        )
    for name, only in known.items():
        found = getattr(config, name)
        if found is not only and (only is None or found != only):
            raise ValueError(
                f"{name} of vLLM's quantization config is {found!r}; these experts take {only!r} alone; {OFF}"
            )


def keep_tensors(layer: Any, experts: SM12xExperts) -> None:
    """Make all tensors that ``experts`` read those of ``layer``, whose method was given them by ``experts``' kernel.

    Captured CUDA graphs hold their addresses. After sleep mode's level 2 vLLM restores buffers. When it loads weights
    anew it prepares other tensors and copies these into the parameters of the first load. So constants become buffers,
    tensors that are made of weights and that vLLM's method did not register become parameters, and the first load's
    kernel, which reads these, stays the layer's.
    """
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*layer._parameters.values(), *layer._buffers.values())
        if tensor is not None
    }
    for name in experts.READ:
        tensor = getattr(experts, name)
        if tensor is not None and tensor.untyped_storage().data_ptr() not in own:
            layer.register_parameter(f"sm12x_{name}", torch.nn.Parameter(tensor, requires_grad=False))
    method = layer.quant_method
    first = vars(method).setdefault("sm12x_first_kernel", method.moe_kernel)
    if first is not method.moe_kernel:
        method.moe_kernel, method.moe_quant_config = first, first.fused_experts.quant_config
        return
    for name, tensor in list(vars(experts).items()):
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in own:
            layer.register_buffer(f"sm12x_{name}", tensor, persistent=False)


def activations_of(moe: Any, chosen: Settings) -> str:
    """The rounding of a layer's tokens by its experts: ``a8`` (to MXFP8), ``a16`` (none), or ``auto`` (by their
    number)."""
    if _user_moe_activation_override():  # mxfp8: reason_against() leaves the others to vLLM
        return "a8"
    activations = chosen.choice("moe").activations
    if activations != "auto":
        return activations
    # W4A16 takes only bf16 tokens, and tokens that vLLM has quantized are MXFP8.
    return "a8" if chosen.moe_input == "mxfp8" or moe.in_dtype is not torch.bfloat16 else "auto"


def most_exact_tokens(moe: Any) -> float:
    """The most tokens of a step that ``auto`` experts multiply without rounding; infinite if they never round."""
    from flashinfer.fused_moe.sm12x_planner import most_exact_tokens
    from flashinfer.sm12x.backend import kernels

    device = torch.device(moe.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    backend = kernels(device)
    known = () if backend is None else (backend.device_class,)
    return most_exact_tokens(moe.experts_per_token, moe.num_experts, *known)


@functools.cache
def build(device_type: str, hidden: int, inter: int, weights: str = "mxfp4") -> str:
    """Build ``fused_moe_120``, or ``fused_moe_120_nvfp4``, and what else layers of these sizes take, or find it built;
    why that failed, or an empty text. Once a process, before weights are loaded."""
    if device_type != "cuda":
        return ""  # tests: CPU tensors need no module
    name = "fused_moe_120" if weights == "mxfp4" else f"fused_moe_120_{weights}"
    logger.info("flashinfer-sm12x: building %s, or finding it built", name)
    start = time.monotonic()
    try:
        from flashinfer.fused_moe.sm12x_launch import prepare

        prepare(hidden, inter, weights=weights)
    except Exception as error:  # a compiler or a linker may fail in any way
        return f"{name} could not be built: {error}"
    logger.info("flashinfer-sm12x: %s is ready after %.0f s", name, time.monotonic() - start)
    return ""


def _fork_is_there() -> str:
    import flashinfer

    if hasattr(flashinfer, "__fork_version__"):
        return ""
    return f"'import flashinfer' is {flashinfer.__file__}, not the fork (see docs/troubleshooting.md)"


def adapters_change_experts() -> bool:
    """Whether a LoRA adapter of this server may change experts: ``--lora-target-modules`` names all that one may
    change."""
    config = get_current_vllm_config_or_none()
    targets = None if config is None or config.lora_config is None else config.lora_config.target_modules
    return targets is None or any(name.rpartition(".")[2] not in ATTENTION for name in targets)


def with_adapters_that_matter(moe: Any) -> Any:
    """A layer's configuration, without LoRA where no adapter may change experts: vLLM's says only that there is
    LoRA."""
    if moe.is_lora_enabled and not adapters_change_experts():
        return dataclasses.replace(moe, is_lora_enabled=False)
    return moe


def reason_of_the_server(moe: Any, chosen: Settings, backends: tuple[str, ...]) -> str:
    """Why any MoE layer is left to vLLM by what a user asked for, or an empty text; ``backends`` mean this fork."""
    if chosen.moe == "vllm":
        return CHOSEN
    if moe.moe_backend not in backends:
        return f"--moe-backend {moe.moe_backend}"
    override = _user_moe_activation_override()
    if override not in (None, kMxfp8Dynamic):
        return f"--quantization-config asks for activations of {override}"
    parallel = moe.moe_parallel_config
    if moe.num_experts % parallel.ep_size:
        return f"{moe.num_experts} experts do not divide into {parallel.ep_size} ranks"
    return "expert load balancing (EPLB)" if parallel.enable_eplb else ""


def reason_of_the_config(moe: Any) -> str:
    """Why no experts of this fork take a layer of this configuration, or an empty text."""
    if type(moe) is not FusedMoEConfig:
        return f"the model describes them by a {type(moe).__name__}"
    ranks = moe.moe_parallel_config.ep_size
    if moe.num_local_experts * ranks != moe.num_experts:
        found = f"{moe.num_local_experts} experts on each of {ranks} ranks"
        return f"{found}, of {moe.num_experts} that the router chooses from"
    if moe.swiglu_limit is not None and not moe.swiglu_limit > 0:
        return f"a SwiGLU limit of {moe.swiglu_limit}"
    return ""


def reason_against_a_step(runner: Any) -> str:
    """Why a decode step may not choose this layer's experts itself, by a softmax over the largest logits, or an empty
    text."""
    router, experts, config = runner.router, runner.routed_experts, runner.moe_config
    if type(router) is not FusedTopKRouter:  # others lack what is asked here
        return f"a {type(router).__name__}"
    asked = {
        "router weights that are not renormalized": not router.renormalize or not experts.renormalize,
        f"router scores by {router.scoring_func}": router.scoring_func != "softmax"
        or experts.scoring_func != "softmax",
        "router weights on the experts' input": experts.apply_router_weight_on_input,
        f"router logits in {config.router_logits_dtype}": config.router_logits_dtype is not config.in_dtype,
        "scaled router weights": runner.routed_scaling_factor != 1.0 or experts.routed_scaling_factor != 1.0,
        "shared experts": runner.shared_experts is not None,
        "a gate of vLLM's runner": runner.gate is not None or runner.shared_expert_gate is not None,
        "tokens transformed for the experts": runner.routed_input_transform is not None
        or runner.routed_output_transform is not None,
    }
    return next((what for what, found in asked.items() if found), "")


def reason_of_the_layer(
    moe: Any, experts: type[SM12xExperts], weight_key: Any, activation_key: Any, weights: str = "mxfp4"
) -> str:
    """Why ``experts`` do not take this layer, or their kernels cannot be had, or an empty text."""
    if moe.is_lora_enabled:
        return "LoRA adapters may change them; with --lora-target-modules q_proj k_proj v_proj o_proj they do not"
    if reason := reason_of_the_config(moe):
        return reason
    formats = mk.FusedMoEActivationFormat
    batched = moe.moe_parallel_config.use_batched_activation_format
    form = formats.BatchedExperts if batched else formats.Standard
    supported, why = experts.is_supported_config(experts, moe, weight_key, activation_key, form)
    if not supported:
        return str(why)
    sizes = moe.hidden_dim, moe.intermediate_size_per_partition
    return _fork_is_there() or build(torch.device(moe.device).type, *sizes, weights)


def reason_against(moe: Any, chosen: Settings, experts: type[SM12xExperts] = SM12xExperts) -> str:
    """Why this layer of MXFP4 experts is left to vLLM and not to ``experts``, or an empty text."""
    if reason := reason_of_the_server(moe, chosen, OUR_BACKENDS):
        return reason
    key = ACTIVATION_KEYS[chosen.choice("moe").activations]
    if issubclass(experts, SM12xMxfp4Experts) and chosen.moe == "auto":
        key = kMxfp8Dynamic  # as which vLLM's method prepares the weights
    return reason_of_the_layer(moe, experts, kMxfp4Static, key)


def make_method(moe: Any, chosen: Settings) -> GptOssMxfp4MoEMethod:
    """The MoE method of a layer: this fork's, or vLLM's own with the reason said once."""
    moe = with_adapters_that_matter(moe)
    quantized = chosen.moe_input == "mxfp8"
    reason = reason_against(moe, chosen, SM12xQuantizedInputExperts if quantized else SM12xExperts)
    if reason:
        logger.warning_once("flashinfer-sm12x: the experts are left to vLLM: %s", reason, scope="global")
        return VllmMoEMethod(moe, reason)
    activations = activations_of(moe, chosen)
    experts = SM12xAutoExperts if activations == "auto" else SM12xExperts
    if quantized:
        experts = SM12xQuantizedInputExperts
    return SM12xMoEMethod(moe, activations, experts, "default" if chosen.moe == Settings.moe else "chosen")


class VllmMoEMethod(GptOssMxfp4MoEMethod):
    """vLLM's own choice, noted in the table."""

    def __init__(self, moe: Any, reason: str) -> None:
        super().__init__(moe)
        table.note("moe", f"vLLM's {self.mxfp4_backend.value}", "mxfp4", reason)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        table.log_once()
        super().process_weights_after_loading(layer)


class SM12xMoEMethod(GptOssMxfp4MoEMethod):
    """gpt-oss's experts on this fork: weights ``[up; gate]``, scales in 128x4 layout, nothing padded but scales."""

    def __init__(self, moe: Any, activations: str, experts_cls: type[SM12xExperts], why: str) -> None:
        # Skip the parent's __init__, which selects a backend of vLLM's.
        FusedMoEMethodBase.__init__(self, moe)
        self.moe_kernel: Any = None
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend, self.experts_cls = BACKENDS[activations], experts_cls
        self.max_capture_size = moe.max_capture_size
        form = f"mxfp4-{activations}, input {'MXFP8 by vLLM' if experts_cls is SM12xQuantizedInputExperts else 'bf16'}"
        if activations == "auto":
            most = most_exact_tokens(moe)
            form = "mxfp4-a16" if most == math.inf else f"mxfp4-a16 up to {most:,} tokens a step, mxfp4-a8 beyond"
        table.note("moe", "flashinfer-sm12x", form, why)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Sizes as they are, up to whole blocks of 32: a tensor-parallel shard of 2880 may be 360."""
        sizes = FusedMoEMethodBase.maybe_roundup_sizes(
            self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        hidden, inter = (-(-size // BLOCK_SIZE) * BLOCK_SIZE for size in sizes)
        return hidden, inter

    def process_weights_after_loading(self, layer: Any) -> None:
        table.log_once()
        for name in ("w13_weight", "w13_weight_scale", "w13_bias"):
            _stack_up_over_gate(getattr(layer, name).data)
        for name in ("w13_weight_scale", "w2_weight_scale"):
            replace_parameter(layer, name, _interleave(getattr(layer, name).data))
        if self.moe_kernel is not None:
            # Loaded anew (sleep mode, level 2): vLLM copies the layer's tensors into those of the first load, which
            # this kernel and CUDA graphs hold.
            return
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = make_mxfp4_moe_kernel(
            moe_quant_config=self.moe_quant_config,
            moe_config=self.moe,
            mxfp4_backend=self.mxfp4_backend,
            experts_cls=self.experts_cls,
            routing_tables=layer._expert_routing_tables(),
        )
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)


_built_for: Any = None  # vLLM's config when it last selected experts that a choice applies to


def note_built() -> None:
    """Remember that the model that vLLM is building has experts that the choice of ``moe`` applies to."""
    global _built_for
    _built_for = get_current_vllm_config_or_none()


def were_built() -> bool:
    """Whether :func:`note_built` was called for the model that vLLM is building; gpt-oss's own experts do not call
    it."""
    return _built_for is not None and _built_for is get_current_vllm_config_or_none()


def ours_first(select: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's selection of MXFP4 experts, changed to give :class:`SM12xMxfp4Experts` if this fork serves the layer.

    This fork serves it with ``--moe-backend auto`` and ``flashinfer_cutlass``, unless the checkpoint asks for other
    activations.
    """

    def selected(moe: Any, activation_key: Any = None) -> Any:
        with fallback.leaving(api_checks.MODULES["experts"][1]):
            note_built()
            reason = f"the checkpoint asks for activations of {activation_key}"
            if activation_key is None:
                reason = reason_against(with_adapters_that_matter(moe), settings.current(), SM12xMxfp4Experts)
            if not reason:
                auto = activations_of(moe, settings.current()) == "auto"
                mode = "W4A16 in short steps, W4A8 in long ones" if auto else "W4A8 from bf16"
                logger.info_once("flashinfer-sm12x: the experts are this fork's, %s", mode)
                return BACKENDS["a8"], SM12xMxfp4AutoExperts if auto else SM12xMxfp4Experts
            logger.warning_once("flashinfer-sm12x: the experts are left to vLLM: %s", reason, scope="global")
        return select(moe) if activation_key is None else select(moe, activation_key=activation_key)

    return selected


def prepared_for_quark(prepare_gpt_oss: Callable[..., Any]) -> Callable[..., Any]:
    """Quark's preparation of weights for this backend, as gpt-oss has them, gate and up rows in turn and with biases;
    changed to prepare other models' as DeepSeek-V4's method does."""

    def prepared(**given: Any) -> Any:
        if given["mxfp4_backend"] != BACKENDS["a8"] or given["layer"].activation == MoEActivation.SWIGLUOAI:
            return prepare_gpt_oss(**given)
        return convert_weight_to_mxfp4_moe_kernel_format(
            **{name: value for name, value in given.items() if not name.endswith("_input_scale")}
        )

    return prepared


def install() -> None:
    """Put :func:`ours_first` before vLLM's selections: DeepSeek-V4's, which others share, and Quark's.

    They have no registry: each method's module looks its functions up at each call.
    """
    with replacements.installing("experts") as (deepseek_v4, quark, preparation):
        for selection in (deepseek_v4, quark):
            selection.replace(ours_first(selection.original()))
        preparation.replace(prepared_for_quark(preparation.original()))


def require_contiguous_experts(expert_map: torch.Tensor | None, ep_rank: int, num_local: int) -> None:
    """Raise unless this rank's experts are ``[ep_rank * num_local, ...)``, which is what the operator takes."""
    if expert_map is None:
        return
    expected = torch.full_like(expert_map, -1)
    start = ep_rank * num_local
    expected[start : start + num_local] = torch.arange(num_local, dtype=expert_map.dtype, device=expert_map.device)
    if not torch.equal(expert_map, expected):
        raise ValueError(
            "the experts of this rank are not consecutive (--expert-placement-strategy round_robin?); this fork serves "
            '--expert-placement-strategy linear, and {"sm12x": {"moe": "vllm"}} leaves the experts to vLLM'
        )


def _stack_up_over_gate(rows: torch.Tensor) -> None:
    """``[E, 2 I, ...]`` with gate and up rows in turn to ``[up; gate]``, in place, one expert's copy at a time."""
    for expert in rows:
        expert.copy_(torch.cat([expert[1::2], expert[0::2]]))


def _interleave(scales: torch.Tensor) -> torch.Tensor:
    """Linear scale bytes ``[E, rows, K / 32]`` to 128x4 ``[E, pad128(rows), pad4(K / 32)]``."""
    from flashinfer import block_scale_interleave

    experts, rows, blocks = scales.shape
    return block_scale_interleave(scales).view(experts, -(-rows // 128) * 128, -(-blocks // 4) * 4)
