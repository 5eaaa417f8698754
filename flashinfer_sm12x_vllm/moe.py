# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts on ``flashinfer.fused_moe.cutlass_fused_moe``, W4A16 or W4A8 by a step's number of tokens: gpt-oss's, the
weights unpadded; other models' by vLLM's own method (:func:`install`).

vLLM has a path to the same operator. This one differs in three things: W4A16 exists on SM12x, the layer may quantize its
input itself (one launch fewer, and no need for nvidia-cutlass-dsl), and hidden sizes stay as they are. vLLM pads 2880 to
2944, 4.5 % more bytes of weights for every token and a copy of every activation; the kernels take multiples of 32.
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
from vllm.model_executor.layers.fused_moe.experts import flashinfer_cutlass_moe
from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import (
    Mxfp4MoeBackend,
    _user_moe_activation_override,
    convert_weight_to_mxfp4_moe_kernel_format,
    make_mxfp4_moe_kernel,
)
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.model_executor.layers.quantization.quark import quark_moe
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static, kMxfp8Dynamic
from vllm.model_executor.utils import replace_parameter

from . import devices, settings, table
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
# Tensors that vLLM's experts make besides the weights.
CONSTANTS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "fake_input_scale")


class SM12xExperts(FlashInferExperts):
    """vLLM's experts of ``cutlass_fused_moe``, given bf16: the layer quantizes inside (W4A8) or not at all (W4A16)."""

    @staticmethod
    def _supports_current_device() -> bool:
        return devices.served()

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key == kMxfp4Static and activation_key in ACTIVATION_KEYS.values()

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True


class SM12xAutoExperts(SM12xExperts):
    """The same in W4A16 where that takes no longer, and in W4A8 elsewhere: the operator chooses by a call's tokens."""

    FLAGS: ClassVar = {"use_mxfp8_act_scaling": True, "use_w4_group_scaling": True}
    _of: tuple[Any, ...] = ()
    _made: Any = None

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        **_unused: Any,
    ) -> None:
        """vLLM's call, but for the mode, which vLLM has no name for."""
        self._layer(w1, w2, activation).run(hidden_states, topk_ids.to(torch.int), topk_weights, output=output)

    def step(self, layer: Any, hidden_states: torch.Tensor, **routing: Any) -> torch.Tensor:
        """A decode step's call: new outputs of the layer's experts for ``routing``, as ``moe_step`` takes it."""
        return self._layer(layer.w13_weight, layer.w2_weight, layer.activation).run(hidden_states, **routing)

    def _layer(self, w1: torch.Tensor, w2: torch.Tensor, activation: Any) -> Any:
        """The fork's object of these experts, made where vLLM gives other tensors than the last one was made of."""
        from flashinfer.fused_moe import SM12xMoELayer

        scales = self._scales()
        of = (w1, w2, *scales, self.w1_bias, self.w2_bias, activation)
        if self._of and all(one is other for one, other in zip(of, self._of, strict=True)):
            return self._made
        self._made = SM12xMoELayer(
            w1,
            w2,
            self.out_dtype,
            scales,
            self.w1_bias,
            self.w2_bias,
            self.gemm1_alpha,
            self.gemm1_beta,
            self.gemm1_clamp_limit,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
            **self.FLAGS,
            activation_type=flashinfer_cutlass_moe.activation_to_flashinfer_type(activation),
        )
        self._of = of
        return self._made

    def _scales(self) -> list[Any]:
        assert self.w1_scale is not None
        assert self.w2_scale is not None
        return [self.w1_scale, self.w2_scale]


class SM12xQuantizedInputExperts(SM12xExperts):
    """The same, given MXFP8 by vLLM's quantizer."""

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

    def process_weights_after_loading(self, layer: Any) -> None:
        require_contiguous_experts(layer.expert_map, self.ep_rank, self.num_experts)


class SM12xMxfp4AutoExperts(SM12xAutoExperts, SM12xMxfp4Experts):
    """The same, in the mode of :class:`SM12xAutoExperts`."""


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
    """Build ``fused_moe_120``, or ``fused_moe_120_nvfp4``, and what else layers of these sizes take, or find it built; why
    that failed, or an empty text. Once a process, before weights are loaded."""
    if device_type != "cuda":
        return ""  # tests: CPU tensors need no module
    from flashinfer.fused_moe.sm12x_launch import prepare

    name = "fused_moe_120" if weights == "mxfp4" else f"fused_moe_120_{weights}"
    logger.info("flashinfer-sm12x: building %s, or finding it built", name)
    start = time.monotonic()
    try:
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
    """Whether a LoRA adapter of this server may change experts: ``--lora-target-modules`` names all that one may change."""
    config = get_current_vllm_config_or_none()
    targets = None if config is None or config.lora_config is None else config.lora_config.target_modules
    return targets is None or any(name.rpartition(".")[2] not in ATTENTION for name in targets)


def with_adapters_that_matter(moe: Any) -> Any:
    """A layer's configuration, without LoRA where no adapter may change experts: vLLM's says only that there is LoRA."""
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


def reason_of_the_layer(
    moe: Any, experts: type[SM12xExperts], weight_key: Any, activation_key: Any, weights: str = "mxfp4"
) -> str:
    """Why ``experts`` do not take this layer, or their kernels cannot be had, or an empty text."""
    if moe.is_lora_enabled:
        return "LoRA adapters may change them; with --lora-target-modules q_proj k_proj v_proj o_proj they do not"
    formats = mk.FusedMoEActivationFormat
    batched = moe.moe_parallel_config.use_batched_activation_format
    form = formats.BatchedExperts if batched else formats.Standard
    supported, reason = experts.is_supported_config(experts, moe, weight_key, activation_key, form)
    if not supported:
        return str(reason)
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
    reason = reason_against(moe, chosen)
    if reason:
        logger.warning_once("flashinfer-sm12x: the experts are left to vLLM: %s", reason, scope="global")
        return VllmMoEMethod(moe, reason)
    activations = activations_of(moe, chosen)
    experts = SM12xAutoExperts if activations == "auto" else SM12xExperts
    if (activations, chosen.moe_input) == ("a8", "mxfp8"):
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
        require_contiguous_experts(layer.expert_map, self.moe.moe_parallel_config.ep_rank, self.moe.num_local_experts)
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
        for name in CONSTANTS:
            # Sleep mode at level 2 keeps only buffers.
            tensor = getattr(self.moe_kernel.fused_experts, name, None)
            if tensor is not None:
                layer.register_buffer(f"sm12x_{name}", tensor, persistent=False)


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


def install() -> None:
    """Put :func:`ours_first` in front of vLLM's selections: DeepSeek-V4's, which others share, and Quark's.

    They have no registry: each method's module looks its functions up at each call. Quark's method prepares weights for
    this backend as gpt-oss has them, gate and up rows in turn and with biases; other models' take DeepSeek-V4's way.
    """
    mxfp4.select_deepseek_v4_mxfp4_moe_backend = ours_first(mxfp4.select_deepseek_v4_mxfp4_moe_backend)
    quark_moe.select_mxfp4_moe_backend = ours_first(quark_moe.select_mxfp4_moe_backend)
    to_type = flashinfer_cutlass_moe.activation_to_flashinfer_type
    prepare_gpt_oss = quark_moe.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format

    def prepared(**given: Any) -> Any:
        if given["mxfp4_backend"] != BACKENDS["a8"] or given["layer"].activation == MoEActivation.SWIGLUOAI:
            return prepare_gpt_oss(**given)
        return convert_weight_to_mxfp4_moe_kernel_format(
            **{name: value for name, value in given.items() if not name.endswith("_input_scale")}
        )

    def type_of(activation: MoEActivation) -> Any:
        from flashinfer.tllm_enums import ActivationType

        return ActivationType.SwigluStep if activation == MoEActivation.SWIGLUSTEP else to_type(activation)

    quark_moe.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format = prepared
    flashinfer_cutlass_moe.activation_to_flashinfer_type = type_of  # vLLM's table lacks it


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
