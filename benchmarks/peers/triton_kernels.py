# SPDX-License-Identifier: Apache-2.0
"""triton_kernels' ``matmul_ogs`` with MXFP4 weights, bf16 activations and its fused SwiGLU, as vLLM 0.33 uses it.

Weights and scales are laid out by the package's own ``convert_layout``.  FC1's rows interleave gate and up, biases are
float32.  Routing starts from given expert ids and the logits whose softmax gives their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton_kernels.matmul_ogs_details.opt_flags as opt_flags
from triton_kernels.matmul_ogs import FlexCtx, FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
from triton_kernels.numerics import InFlexData
from triton_kernels.routing import routing
from triton_kernels.swiglu import swiglu_fn
from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
from triton_kernels.tensor_details import layout

from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import ALPHA, LIMIT, Batch

from . import matrices, require_mxfp4

NUM_WARPS = 8
SM12X_TOKEN_BLOCKS = (16, 32)  # more does not fit its shared memory in more than one stage


class TritonKernels:
    """The package, imported."""

    name = "triton_kernels"

    def __init__(self) -> None:
        self.major = torch.cuda.get_device_capability()[0]
        # vLLM sets this: without it, kernels for Hopper split K into float32 parts, and those for Blackwell are
        # refused.
        constraints = {"split_k": 1} if self.major == 9 else {"is_persistent": True, "epilogue_subtile": 1}
        opt_flags.update_opt_flags_constraints(constraints)

    def prepare(self, weights: MoEInputs) -> _Layer:
        require_mxfp4(weights)
        return _Layer(weights, self.major == 12)


def _interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows gate 0, up 0, gate 1, up 1, ..."""
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def _matrix(packed: torch.Tensor, scales: torch.Tensor) -> tuple[Any, Any]:
    """Weights ``[E, K, N]`` and what describes their scales, from rows ``[E, N, K / 2]`` and bytes
    ``[E, N, K / 32]``."""
    value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=NUM_WARPS)
    # Hopper's layout of scales wants groups of four along K.
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))
    values = wrap_torch_tensor(packed.transpose(1, 2), dtype=FP4)
    values = convert_layout(values, value_layout, **value_options)
    scaling = convert_layout(wrap_torch_tensor(scales.transpose(1, 2)), scale_layout, **scale_options)
    return values, PrecisionConfig(weight_scale=scaling, flex_ctx=FlexCtx(rhs_data=InFlexData()))


class _Layer:
    def __init__(self, weights: MoEInputs, sm12x: bool) -> None:
        self.experts, _, half = weights.fc2_weights.shape
        self.inter, self.sm12x = 2 * half, sm12x
        fc1, fc2 = matrices(weights)
        fc1 = fc1.rows(_interleaved)
        self.fc1, self.fc1_precision = _matrix(fc1.packed, fc1.scales)
        self.fc2, self.fc2_precision = _matrix(fc2.packed, fc2.scales)
        self.fc1_bias, self.fc2_bias = fc1.bias.float(), fc2.bias.float()
        specs = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"))
        self.activation = FusedActivation(specs, (ALPHA, LIMIT), 2)

    def bind(self, batch: Batch) -> Callable[[], torch.Tensor]:
        inputs, logits = batch.inputs, batch.logits
        tokens, top_k = inputs.token_selected_experts.shape
        device = inputs.input.device
        # triton_kernels' own top-k sorts a token's experts by id. Ids are 32 bits wide, because its kernel shifts a 1
        # of the ids' dtype by up to 31.
        ids = inputs.token_selected_experts.sort(dim=1).values
        hidden = torch.empty((1, tokens * top_k, self.inter), dtype=torch.bfloat16, device=device)
        output = torch.empty((1, *inputs.input.shape), dtype=torch.bfloat16, device=device)
        if self.sm12x:
            share = max(1, tokens * top_k // self.experts)
            block = next((b for b in SM12X_TOKEN_BLOCKS if share <= b), SM12X_TOKEN_BLOCKS[-1])
            opt_flags.update_opt_flags_constraints({"block_m": block})

        def run() -> torch.Tensor:
            data, gather, scatter = routing(logits, top_k, expt_indx=ids)
            matmul_ogs(
                inputs.input, self.fc1, self.fc1_bias, data,
                gather_indx=gather, precision_config=self.fc1_precision, fused_activation=self.activation, y=hidden,
            )  # fmt: skip
            matmul_ogs(
                hidden[0], self.fc2, self.fc2_bias, data,
                scatter_indx=scatter, precision_config=self.fc2_precision, gammas=data.gate_scal, y=output,
            )  # fmt: skip
            return output[0]

        return run
