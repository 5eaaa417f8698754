# SPDX-License-Identifier: Apache-2.0
"""cuTile's W4A16 MoE kernels of upstream's wheel (0.7.2.post1, ``flashinfer.fused_moe.cutile``), for 8.9, 9.0 and 12.x.

Facts of its interface: weights are the checkpoint's bytes with FC1's rows as [gate; up]; E8M0 scales are linear before
10.0 and swizzled, with 128 rows to a block, from there on; ``prepare_cutile_mxfp4_weights`` makes both from [up; gate].
Rows are grouped by expert in blocks of 16 to 128.  A GEMM has the tactics :data:`CONFIGS`, and upstream's tuner ranks
those of each GEMM with the other's fixed: so does :meth:`_Layer.bind`.  A kernel is compiled at its first use, for some
alignments of its sizes, which takes seconds; for 12.1 tileiras 13.4 takes minutes for tactics of 64 rows, up to 16 MB.

Its pipeline has no biases, so it is not called whole: the grouping and both GEMMs are upstream's, the activation and the
weighted sum are Triton kernels of ours, which add them.  Not yet run on a GPU: compiled for 9.0 and 12.1 without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer.sm12x.probe.timing import time_graph
from flashinfer.testing import MoEInputs
from flashinfer.testing.moe_layers import ALPHA, LIMIT, Batch
from flashinfer.testing.mxfp_formats import BLOCK

from . import gate_first, matrices

# Tile along N and K and blocks of an SM: those of upstream's list whose tile along K holds four blocks of 32.
CONFIGS = ((128, 128, 2), (256, 128, 1), (128, 256, 2), (256, 128, 2), (256, 256, 1))
# Most rows of an expert, on average, with which upstream takes blocks of so many; beyond, 64.
ROW_BLOCKS = ((8, 16), (32, 32), (64, 64), (128, 32))
TUNING_REPEATS = 5

Pair = tuple[tuple[int, int, int], tuple[int, int, int]]


def row_block(rows: int, experts: int) -> int:
    """Rows of a block for ``rows`` (token, slot) pairs."""
    share = -(-rows // experts)
    return next((block for most, block in ROW_BLOCKS if share <= most), 64)


class CuTile:
    """Upstream's module, imported."""

    name = "cuTile"

    def __init__(self) -> None:
        # Here, so that a machine without cuda-tile, without its compiler or without triton says so.
        from flashinfer.cutile import is_cuda_tile_available
        from flashinfer.fused_moe.cutile import fp4

        from .triton_parts import swiglu, weighted_sum

        if not is_cuda_tile_available():
            raise RuntimeError("cuda-tile has no tileiras, or one that does not compile for this GPU")
        self._parts = fp4, swiglu, weighted_sum

    def prepare(self, weights: MoEInputs) -> _Layer:
        return _Layer(*self._parts, weights)


class _Layer:
    def __init__(
        self, kernels: Any, swiglu: Callable[..., None], weighted_sum: Callable[..., None], weights: MoEInputs
    ) -> None:
        from flashinfer.fused_moe.prepare import prepare_cutile_mxfp4_weights

        self._kernels, self._swiglu, self._sum = kernels, swiglu, weighted_sum
        experts, hidden, half = weights.fc2_weights.shape
        self.experts, self.hidden, self.inter = experts, hidden, 2 * half
        fc1, fc2 = matrices(weights)
        view = prepare_cutile_mxfp4_weights(
            fc1.packed,
            fc1.scales,
            fc2.packed,
            fc2.scales,
            num_local_experts=experts,
            hidden_size=hidden,
            intermediate_size=self.inter,
        )
        self.fc1, self.fc2 = ([view[name + part] for part in ("", "_scale", "_global_scale")] for name in ("w1", "w2"))
        self.fc1_bias, self.fc2_bias = fc1.rows(gate_first).bias, fc2.bias

    def bind(self, batch: Batch) -> Callable[[], torch.Tensor]:
        """The call with the fastest tactic of each GEMM."""
        ids = batch.inputs.token_selected_experts
        tokens, top_k = ids.shape
        workspace = self._kernels.allocate_workspace(
            num_tokens=tokens,
            hidden_size=self.hidden,
            intermediate_size=self.inter,
            num_experts=self.experts,
            top_k=top_k,
            is_gated=True,
            block_sizes=(row_block(ids.numel(), self.experts),),
            activation_fp4=False,
            scale_block_size=BLOCK,
            scale_dtype=torch.float8_e8m0fnu,
            device=ids.device,
        )
        output = torch.empty_like(batch.inputs.input)

        def with_pair(pair: Pair) -> Callable[[], torch.Tensor]:
            return self._call(batch, workspace, output, pair)

        def fastest(pairs: list[Pair]) -> Pair:
            return min(pairs, key=lambda pair: time_graph(with_pair(pair), TUNING_REPEATS).median)

        fc1 = fastest([(config, CONFIGS[0]) for config in CONFIGS])[0]
        return with_pair(fastest([(fc1, config) for config in CONFIGS]))

    def _call(self, batch: Batch, workspace: Any, output: torch.Tensor, pair: Pair) -> Callable[[], torch.Tensor]:
        inputs, kernels = batch.inputs, self._kernels
        ids, final_scales = inputs.token_selected_experts, inputs.token_final_scales
        tokens, top_k = ids.shape
        rows = tokens * top_k
        block = row_block(rows, self.experts)
        hidden, activated = workspace.gemm1_out[:rows], workspace.activation_out[:rows]
        parts = workspace.gemm2_out[:rows]
        configs = [kernels.GemmConfig(*config) for config in pair]
        owners = ids.flatten()

        def run() -> torch.Tensor:
            grouping = kernels._permute(ids, self.experts, block, workspace)

            def gemm(x: torch.Tensor, weights: list[torch.Tensor], y: torch.Tensor, top_k: int, config: Any) -> None:
                kernels._grouped_gemm_w4a16_launch(
                    x, *weights, *grouping, y, top_k=top_k, block_size=block, config=config, scale_block_size=BLOCK
                )

            gemm(inputs.input, self.fc1, hidden, top_k, configs[0])
            self._swiglu(hidden, activated, ALPHA, LIMIT, self.fc1_bias, owners)
            gemm(activated, self.fc2, parts, 1, configs[1])
            self._sum(parts.view(tokens, top_k, self.hidden), final_scales, output, self.fc2_bias, ids)
            return output

        return run
