# SPDX-License-Identifier: Apache-2.0
"""NVFP4 experts of any model on ``flashinfer.fused_moe.cutlass_fused_moe``, W4A16: tokens stay bfloat16.

vLLM's methods load and prepare the weights, those of modelopt's and of compressed-tensors' checkpoints, as for
FlashInfer's CUTLASS backend: up over gate, scales in 128x4 layout, nothing padded but scales; without gate rows the
intermediate size is padded to 128. The scales of a checkpoint's own activations (W4A4) are not used: the fork rounds no
activation. It takes batches of every size: for long ones Marlin would need the weights once more, in its own order, and
upstream's CUTLASS kernels would round activations to NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static

from . import api_checks, fallback, moe, replacements, settings

logger = init_logger("vllm.flashinfer_sm12x")

# FC1's rows are padded to 128 by vLLM's preparation, which refuses gated layers where that adds rows.
ROWS_OF_SCALES = 128
ACTIVATIONS = (
    *(MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE, MoEActivation.SWIGLUSTEP),
    MoEActivation.RELU2_NO_MUL,  # without gate rows
)


class SM12xNvfp4Experts(moe.SM12xExperts):
    """NVFP4 experts with bfloat16 tokens, in the layout of vLLM's FlashInfer CUTLASS backend."""

    READ: ClassVar = (*moe.SM12xExperts.READ, "g1_alphas", "g2_alphas")

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in ACTIVATIONS

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim % moe.BLOCK_SIZE == 0  # vLLM pads it for other kernels alone

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """vLLM's takes tokens for packed ones, half as wide as the output."""
        return (M, K), (0,), (M, K)

    def _mode(self) -> dict[str, bool]:
        return {"use_w4_group_scaling": True}

    def _scales(self) -> list[Any]:
        return [self.w1_scale, self.g1_alphas, self.w2_scale, self.g2_alphas]


def reason_against(config: Any, activation_key: Any) -> str:
    """Why NVFP4 experts are left to vLLM, or an empty text."""
    reason = moe.reason_of_the_server(config, settings.current(), ("auto",))
    if reason:
        return reason
    if config.in_dtype is not torch.bfloat16:
        return f"activations of {config.in_dtype}"
    if config.has_bias:
        return "biases, which vLLM's NVFP4 methods do not load"
    rows = 2 * config.intermediate_size_per_partition
    if config.is_act_and_mul and rows % ROWS_OF_SCALES:
        return (
            f"an intermediate size of {rows // 2}, which vLLM's preparation takes as multiples of {ROWS_OF_SCALES // 2}"
        )
    return moe.reason_of_the_layer(config, SM12xNvfp4Experts, kNvfp4Static, activation_key, "nvfp4")


def ours_first(select: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's selection of NVFP4 experts; it gives :class:`SM12xNvfp4Experts` with ``--moe-backend auto`` where this
    fork serves the layer."""

    def selected(config: Any, weight_key: Any, activation_key: Any) -> Any:
        with fallback.leaving(api_checks.MODULES["nvfp4"][1]):
            reason = reason_against(moe.with_adapters_that_matter(config), activation_key)
            if reason == moe.CHOSEN:
                moe.note_built()  # the choice applies here
            if not reason:
                logger.info_once(
                    "flashinfer-sm12x: the NVFP4 experts are this fork's, W4A16 (--moe-backend names another)"
                )
                return NvFp4MoeBackend.FLASHINFER_CUTLASS, SM12xNvfp4Experts
            logger.warning_once("flashinfer-sm12x: the NVFP4 experts are left to vLLM: %s", reason, scope="global")
        return select(config=config, weight_key=weight_key, activation_key=activation_key)

    return selected


def install() -> None:
    """Put :func:`ours_first` before the selection in modelopt's and compressed-tensors' modules, which look it up
    at each call."""
    with replacements.installing("nvfp4") as selections:
        for selection in selections:
            selection.replace(ours_first(selection.original()))
