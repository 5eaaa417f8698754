# SPDX-License-Identifier: Apache-2.0
"""Upstream's autotuner times the tactics of dense layers: an instance, or cuBLAS on dequantized weights.

The operator's name in a cache file is ``flashinfer::sm12x_dense_mx``; a tactic there is an instance's name, or
:data:`DEQUANTIZED`. Outside ``autotune(True)`` a call takes what is remembered for its number of tokens, else the
planner's choice (``sm12x_dense_launch.choose``).
"""

from __future__ import annotations

from typing import Any

import torch

from ..quantization import mx_cpu
from ..sm12x import tune
from ..sm12x.backend import Backend
from ..sm12x.checks import BLOCK_SIZE
from ..sm12x.instances import DENSE_INSTANCES, Instance
from .sm12x_dense_launch import MXFP8_LINEAR, DenseCall, choose, gemm_compute_dtype, launch

OPERATOR = "flashinfer::sm12x_dense_mx"
DEQUANTIZED = "widened"  # as cache files of the autotuner have it
"""cuBLAS on weights dequantized to bfloat16."""

MOST_TOKENS = 1024
"""Most tokens of a call that takes the tuned tactic; with more the planner chooses. An LM head's outputs of that many
rows are 0.4 GB."""

SPLIT_K_PASSES = 4
"""Tiles of tokens, at most, for which a split-K kernel is timed: it reads them once for each."""

_BY_NAME = {row.name: row for row in DENSE_INSTANCES}


class SM12xDenseRunner(tune.Runner):
    """Times a dense layer with each instance that takes it.

    ``inputs`` are token rows, whose number is tuned over, and the weight; the rest is the call's own, or made for a
    profile's number of tokens.
    """

    def __init__(self, backend: Backend, call: DenseCall, token_format: int) -> None:
        super().__init__(backend)
        self.token_format = token_format
        self.device_class = backend.device_class
        self.weights = call.weight_format
        self.k = call.k
        self.out_dtype = call.out_dtype
        self._call_cache = call._replace(constant_weights=False, enable_pdl=None)

    def key(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """Formats."""
        return self.weights, self.token_format, str(self.out_dtype), bool(self.device_class.mma_kinds)

    def names(self, tokens: int) -> list[str]:
        """Names of the instances for these weights, this K and number of tokens, and cuBLAS where it may take part."""
        compute_dtype = gemm_compute_dtype(self.weights, self.token_format, self.device_class)
        names = [
            row.name
            for row in DENSE_INSTANCES
            if row.weights == self.weights
            and row.longest_k >= self.k
            and (tokens <= SPLIT_K_PASSES * row.block_n if row.split_k else row.compute_dtype == compute_dtype)
        ]
        return [*names, DEQUANTIZED] if compute_dtype == "bf16" else names

    def make_profile(self, inputs: list[torch.Tensor]) -> DenseCall:
        """The call with an output, scales and a residual of as many tokens."""
        x, given = inputs[0], self._call_cache
        tokens, blocks = x.shape[0], self.k // BLOCK_SIZE
        out = torch.empty((tokens, given.weight.shape[0]), dtype=self.out_dtype, device=x.device)
        scale = given.x_scale
        if scale is not None:
            linear = self.token_format == MXFP8_LINEAR
            size = tokens * blocks if linear else mx_cpu.swizzled_size(tokens, blocks)
            scale = tune.unit_scales(size, device=x.device).view(scale.dtype)
        residual = None if given.residual is None else torch.zeros_like(out)
        return given._replace(out=out, x_scale=scale, residual=residual)

    def run(self, inputs: list[torch.Tensor], tactic: str | None) -> torch.Tensor:
        """The layer once on ``inputs[0]``."""
        call = self.profile(inputs)._replace(x=inputs[0])
        if tactic is None:
            compute_dtype = gemm_compute_dtype(self.weights, self.token_format, self.device_class)
            sizes = inputs[0].shape[0], call.weight.shape[0], self.k
            row = choose(self.weights, *sizes, self.device_class, compute_dtype, self.backend.sm_count)
        else:
            row = None if tactic == DEQUANTIZED else _BY_NAME[tactic]
        launch(self.backend, row, call, self.token_format)
        out: torch.Tensor = call.out
        return out


def tuned_instance(backend: Backend, call: DenseCall, token_format: int, planned: Instance | None) -> Instance | None:
    """The instance that the autotuner has for this call, which is on a GPU; None: cuBLAS on dequantized weights.

    Inside ``autotune(True)`` a call is tuned now, also one with more than :data:`MOST_TOKENS`; outside it the
    remembered choice is taken, else ``planned``.
    """
    if call.x.shape[0] == 0:
        return planned
    runner = SM12xDenseRunner(backend, call, token_format)
    name = tune.tuned(OPERATOR, runner, MOST_TOKENS, [call.x, call.weight])
    if name is None or call.x.shape[0] > MOST_TOKENS:
        return planned
    return None if name == DEQUANTIZED else _BY_NAME[name]
