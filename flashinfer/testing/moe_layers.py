# SPDX-License-Identifier: Apache-2.0
"""The layers that are timed, their inputs in each mode, and a call of ``cutlass_fused_moe`` on them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..fused_moe import SM12xMoELayer, cutlass_fused_moe, cutlass_fused_moe_workspace_size
from ..sm12x import models
from .moe_inputs import MoECase, make_moe_inputs
from .moe_reference import MoEInputs
from .mxfp_formats import quantize_mxfp8

MODELS = models.MOE_LAYERS | models.NVFP4_LAYERS
"""Sizes and activation of each."""

DENSE_LAYERS = {name.lower().replace(" ", "_"): shape for name, shape in models.MODELS["gpt-oss-120b"].matrices.items()}
"""gpt-oss-120b's: rows and K of the weight."""
DENSE_VARIANTS = (
    ("mxfp4", "bf16"),
    ("mxfp4", "mxfp8"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "bf16"),
    ("mxfp6", "bf16"),
    ("mxfp6", "mxfp8"),
    ("mxint8", "bf16"),
    ("mxfp8", "bf16"),
    ("mxfp8", "mxfp8"),
)
"""Formats of the weight, and as what tokens, which come in bf16, are multiplied."""

MODES_OF = {"mxfp4": (0, 1, 2), "nvfp4": (2,)}
"""The modes of a format of experts."""
MODE_NAMES = {0: "W4A8 mxfp8", 1: "W4A8 bf16", 2: "W4A16"}
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0  # gpt-oss' activation, the only one that every peer computes


def case_of(layer: models.MoELayer, num_tokens: int, mode: int, **changes: Any) -> MoECase:
    """A batch of ``layer``, with its activation, to make inputs for."""
    gpt_oss = layer.activation == "gpt-oss"
    case = MoECase(
        num_tokens,
        layer.hidden,
        layer.inter,
        layer.experts,
        layer.top_k,
        mode,
        biases=gpt_oss,
        swiglu_parameters=layer.activation in ("gpt-oss", "clamp", "step"),
        swiglu_step=layer.activation == "step",
        swiglu_limit_alone=layer.activation == "clamp",
        relu2=layer.activation == "relu2",
        weights=layer.weights,
    )
    return dataclasses.replace(case, **changes)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of tokens for one layer: bf16 activations, routing, and the layer's weights.

    ``logits`` are what the routing was drawn from, float32 ``[M, E]``: the ids are the largest of a row and the routing
    weights their softmax.  ``inputs`` is the W4A16 call (mode 2); :meth:`of_mode` gives the others.
    """

    inputs: MoEInputs
    logits: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.inputs.input.shape[0]

    def of_mode(self, mode: int) -> MoEInputs:
        """The same layer and routing as a call of ``mode``."""
        if mode == 2:
            return self.inputs
        ones = torch.ones(self.inputs.fc1_weights.shape[0], device=self.inputs.input.device)
        changes: dict[str, Any] = {"fc1_global": ones, "fc2_global": ones}
        if mode == 1:
            return dataclasses.replace(self.inputs, **changes)
        values, scales = quantize_mxfp8(self.inputs.input.double())
        return dataclasses.replace(self.inputs, **changes, input=values, input_sf=scales, swizzled_input_sf=False)


def make_layer(model: str, num_tokens: int, seed: int, device: str) -> Batch:
    """The weights of ``model`` and activations for up to ``num_tokens`` tokens; :func:`route` replaces its routing.

    Activation and biases are gpt-oss's for every model that has gate rows.
    """
    hidden, inter, experts, top_k, activation, weights = MODELS[model]
    if activation == "relu2":
        return Batch(make_moe_inputs(case_of(MODELS[model], num_tokens, 2), seed, device), torch.empty(0))
    inputs = make_moe_inputs(MoECase(num_tokens, hidden, inter, experts, top_k, 2, weights=weights), seed, device)

    def constant(value: float) -> torch.Tensor:
        return torch.full((experts,), value, dtype=torch.float32, device=device)

    inputs = dataclasses.replace(
        inputs, swiglu_alpha=constant(ALPHA), swiglu_beta=constant(BETA), swiglu_limit=constant(LIMIT)
    )
    return Batch(inputs, torch.empty(0))


def route(layer: Batch, num_tokens: int, seed: int, log_popularity: torch.Tensor | None = None) -> Batch:
    """The first ``num_tokens`` rows of ``layer`` with random routing of ``seed``.

    ``log_popularity`` ``[experts]``: logarithms of the weights with which a token's experts are drawn; uniform when
    omitted.
    """
    inputs = layer.inputs
    device = inputs.input.device
    top_k = inputs.token_selected_experts.shape[1]
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(num_tokens, inputs.fc1_weights.shape[0], device=device, generator=generator)
    if log_popularity is not None:
        # The largest of log-weights plus Gumbel noise are a draw by the weights, without replacement.
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        logits = log_popularity.to(device, torch.float32) + noise
    largest, ids = logits.topk(top_k)
    return Batch(
        dataclasses.replace(
            inputs,
            input=inputs.input[:num_tokens].contiguous(),
            token_selected_experts=ids.int(),
            token_final_scales=largest.softmax(dim=1),
        ),
        logits,
    )


def rows_of(inputs: MoEInputs, rows: torch.Tensor) -> MoEInputs:
    """The call on some of the tokens only; inputs with linear scales or none."""
    assert inputs.input_sf is None or not inputs.swizzled_input_sf
    final = inputs.token_final_scales
    return dataclasses.replace(
        inputs,
        input=inputs.input[rows],
        input_sf=None if inputs.input_sf is None else inputs.input_sf[rows],
        token_selected_experts=inputs.token_selected_experts[rows],
        token_final_scales=None if final is None else final[rows],
    )


def _memory(inputs: MoEInputs) -> dict[str, torch.Tensor]:
    """An output, of NaN, and a workspace for a call."""
    tokens, top_k = inputs.token_selected_experts.shape
    experts, hidden, half = inputs.fc2_weights.shape
    device = inputs.input.device
    size = cutlass_fused_moe_workspace_size(
        tokens,
        hidden,
        2 * half,
        experts,
        top_k,
        x_dtype=inputs.input.dtype,
        weight_dtype=inputs.fc1_weights.dtype,
        output_dtype=inputs.output_dtype,
        use_w4_group_scaling=inputs.w4a16,
        use_mxfp8_act_scaling=not inputs.w4a16,
        device=device,
    )
    return {
        "output": torch.full((tokens, hidden), torch.nan, dtype=inputs.output_dtype, device=device),
        "workspace_buffer": torch.empty(size, dtype=torch.uint8, device=device),
    }


def layer_call(inputs: MoEInputs, profile_ids: list[int] | None = None) -> Callable[[], torch.Tensor]:
    """A call of ``cutlass_fused_moe`` that allocates nothing; its output starts as NaN."""
    arguments = inputs.arguments() | _memory(inputs)
    return lambda: cutlass_fused_moe(**arguments, profile_ids=profile_ids)


def object_call(inputs: MoEInputs) -> Callable[[], torch.Tensor]:
    """The same by an ``SM12xMoELayer`` that is made once."""
    arguments = inputs.arguments()
    names = inspect.signature(SM12xMoELayer).parameters
    layer = SM12xMoELayer(**{name: arguments.pop(name) for name in names if name in arguments})
    return functools.partial(layer.run, **arguments, **_memory(inputs))
