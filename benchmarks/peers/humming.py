# SPDX-License-Identifier: Apache-2.0
"""HUMMING (package humming-kernels 0.1.19): GEMMs with MXFP4, NVFP4 or MXFP8 weights, called as vLLM 0.33 calls them.

Facts of its interface: weights are int32 words of the checkpoint's bytes, ``[N, K bits / 32]`` or of experts
``[E, ...]``, scales E8M0 ``[N, K / 32]``, or E4M3 ``[N, K / 16]`` beside a float32 per expert;
``prepare_and_transform_humming_tensors`` pads (vLLM: N to 256, K to 128) and rearranges them; inputs and outputs keep
their sizes.  A schedule is chosen by the number of rows among intervals ``(low, high]``, and the kernels of all
schedules that it is given are compiled at their first use.  An indexed GEMM takes routed rows grouped by expert
in blocks of its schedule's rows, as vLLM's ``moe_align_block_size`` makes them.

The activation between the GEMMs is the package's own kernel with an expression of ours; the weighted sum of a token's
experts, which vLLM has in Triton, is a Triton kernel of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from humming.forward import humming_forward, may_process_input
from humming.schema import HummingInputSchema, HummingWeightSchema
from humming.transform import prepare_and_transform_humming_tensors
from humming.tune import get_heuristics_config

from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import ALPHA, LIMIT, Batch
from flashinfer.testing.moe_reference import WEIGHTS
from flashinfer.testing.mxfp_formats import BLOCK

from . import gate_first, matrices
from .marlin import routing_buffers

NVFP4_BLOCK = WEIGHTS["nvfp4"][1]
N_MULTIPLE, K_MULTIPLE = 256, 128  # vLLM's padding
LOCKS_PER_SM = 8
# C++ of the gate ``a`` and the linear half ``b``, or of one value ``a``; all float.
SWIGLU = (
    f"fminf(a, {LIMIT}f) / (1.f + expf(-{ALPHA}f * fminf(a, {LIMIT}f))) * (fminf(fmaxf(b, -{LIMIT}f), {LIMIT}f) + 1.f)"
)
RELU2 = "fmaxf(a, 0.f) * fmaxf(a, 0.f)"


def input_format(activation: str, major: int) -> dict[str, Any]:
    """How tokens are multiplied: as they are, or in e4m3 with the scales that the architecture takes.

    SM12x has MXFP8's; Hopper's kernels refuse E8M0 scales of tokens, and get what vLLM gives them, one of float32 each.
    """
    if activation == "bf16":
        return {"input_quant_mode": "none"}
    if major >= 12:
        blocks = {"input_scale_group_size": BLOCK, "input_scale_dtype": "float8e8m0"}
        return {"a_dtype": "float8e4m3", "input_quant_mode": "dynamic_group", **blocks}
    return {"a_dtype": "float8e4m3", "input_quant_mode": "dynamic_token"}


class Gemm:
    """``[rows, K]`` bf16 by a weight, dense or of experts, and a bias, to ``[rows, N]`` bf16.

    Parameters
    ----------
    values : torch.Tensor
        Packed e2m1 bytes ``[N, K / 2]`` or e4m3 ``[N, K]``; of experts ``[E, ...]``.
    scales : torch.Tensor
        UE8M0 bytes ``[N, K / 32]``, linear, or with ``factors`` E4M3 bytes ``[N, K / 16]``; of experts ``[E, ...]``.
    bias : torch.Tensor, optional
        bf16 ``[N]``; of experts ``[E, N]``.
    activation : str
        ``"bf16"`` or ``"fp8"`` (quantized in each call).
    sizes : iterable of int, optional
        The numbers of rows of later calls: only the kernels of their schedules and of one row are compiled. ``None``:
        all are compiled.
    factors : torch.Tensor, optional
        NVFP4's global scales, float32 ``[E]``.
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str = "bf16",
        sizes: Iterable[int] | None = None,
        factors: torch.Tensor | None = None,
    ) -> None:
        fp4 = values.dtype is torch.uint8
        n, k = values.shape[-2], values.shape[-1] * (2 if fp4 else 1)
        device = values.device
        properties = torch.cuda.get_device_properties(device)
        kind = "indexed" if values.ndim == 3 else "dense"
        # Clones: with fp8 tokens the preparation changes weights in place.
        tensors = {
            "weight": values.view(torch.uint8).clone().view(torch.int32),
            "weight_scale": scales.view(torch.uint8)
            .clone()
            .view(torch.float8_e8m0fnu if factors is None else torch.float8_e4m3fn),
        }
        of_scales: dict[str, Any] = {"bs_dtype": "float8e8m0", "weight_scale_group_size": BLOCK}
        if factors is not None:
            tensors["weight_scale_2"] = factors.clone()
            of_scales = {
                "bs_dtype": "float8e4m3",
                "weight_scale_group_size": NVFP4_BLOCK,
                "weight_scale_type": "group",
                "weight_scale_2_type": "tensor",
            }
        if bias is not None:
            tensors["bias"] = bias
        self.config, self.tensors = prepare_and_transform_humming_tensors(
            tensors=tensors,
            shape_n=n,
            shape_k=k,
            weight_schema=HummingWeightSchema(b_dtype="float4e2m1" if fp4 else "float8e4m3", **of_scales),
            input_schema=HummingInputSchema(**input_format(activation, properties.major)),
            num_experts=values.shape[0] if values.ndim == 3 else None,
            pad_n_to_multiple=N_MULTIPLE,
            pad_k_to_multiple=K_MULTIPLE,
            has_bias=bias is not None,
            torch_dtype=torch.bfloat16,
            device=device,
        )
        choice = {"use_f16_accum": False, "use_batch_invariant": False, "gemm_type": kind}
        schedules = get_heuristics_config(layer_config=self.config, **choice)
        # One row is always wanted: its launcher looks that schedule up in each call.
        wanted = None if sizes is None else {1, *sizes}
        self.schedules = [
            (low, high, schedule)
            for low, high, schedule in schedules
            if wanted is None or any(low < size <= high for size in wanted)
        ]
        self.options = {"compute_config": json.dumps(choice), "tuning_config": json.dumps(self.schedules)}
        self.locks = torch.zeros(LOCKS_PER_SM * properties.multi_processor_count, dtype=torch.int32, device=device)

    def block(self, rows: int) -> int:
        """Rows of a block of the schedule for ``rows`` rows."""
        return int(next(schedule["block_shape"][0] for low, high, schedule in self.schedules if low < rows <= high))

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor, **routing: Any) -> None:
        """Multiply. ``routing``, of experts: ``sorted_ids``, ``expert_ids``, ``num_tokens_padded``, ``top_k``."""
        humming_forward(
            self.config, inputs=inputs, outputs=outputs, locks=self.locks, valid_shape_m=len(outputs),
            **self.tensors, **routing, **self.options,
        )  # fmt: skip


class Humming:
    """The package, imported, with ``moe_align_block_size`` of vLLM's library."""

    name = "HUMMING"

    def __init__(self, library: Path) -> None:
        from .triton_parts import weighted_sum  # here, so that a machine without triton says so

        self._sum = weighted_sum
        torch.ops.load_library(str(library))
        self.operators: Any = torch.ops._moe_C

    def prepare(self, weights: MoEInputs) -> _Layer:
        return _Layer(self.operators, self._sum, weights)


class _Layer:
    def __init__(self, operators: Any, weighted_sum: Callable[..., None], weights: MoEInputs) -> None:
        self._operators, self._sum = operators, weighted_sum
        self.experts, _, half = weights.fc2_weights.shape
        self.inter = 2 * half
        fc1, fc2 = matrices(weights)
        self.matrices = (fc1 if weights.relu2 else fc1.rows(gate_first)), fc2
        nvfp4 = weights.weights == "nvfp4"
        self.factors = (weights.fc1_global, weights.fc2_global) if nvfp4 else (None, None)
        self.parts = 1 if weights.relu2 else 2
        self.activation = (
            {"activation_type": "unary", "activation_impl": RELU2}
            if weights.relu2
            else {"activation_type": "binary_split", "activation_impl": SWIGLU}
        )

    def bind(self, batch: Batch) -> Callable[[], torch.Tensor]:
        inputs = batch.inputs
        ids, final_scales = inputs.token_selected_experts, inputs.token_final_scales
        tokens, top_k = ids.shape
        rows, device = tokens * top_k, inputs.input.device
        # For this batch: the kernels of all schedules take minutes to compile.
        fc1, fc2 = (
            Gemm(*matrix, sizes=(rows,), factors=factor)
            for matrix, factor in zip(self.matrices, self.factors, strict=True)
        )
        blocks = [gemm.block(rows) for gemm in (fc1, fc2)]
        # One grouping where both schedules have blocks of the same size.
        groupings = {block: routing_buffers(rows, self.experts, block, device) for block in blocks}

        new = inputs.input.new_empty
        hidden, activated, output = new(rows, self.parts * self.inter), new(rows, self.inter), new(inputs.input.shape)
        parts = new(rows, output.shape[1])

        def multiply(gemm: Gemm, a: torch.Tensor, c: torch.Tensor, block: int, top_k: int) -> None:
            order, owners, used = groupings[block]
            gemm(a, c, sorted_ids=order, expert_ids=owners, num_tokens_padded=used, top_k=top_k)

        def run() -> torch.Tensor:
            for block, buffers in groupings.items():
                self._operators.moe_align_block_size(ids, self.experts, block, *buffers, None, None)
            multiply(fc1, inputs.input, hidden, blocks[0], top_k)
            may_process_input(fc2.config, inputs=hidden, outputs=activated, **self.activation)
            multiply(fc2, activated, parts, blocks[1], 1)
            self._sum(parts.view(tokens, top_k, -1), final_scales, output)
            return output

        return run
