# SPDX-License-Identifier: Apache-2.0
"""What upstream's autotuner times and remembers of dense layers: an instance, or cuBLAS on widened weights.

The operator's name in a cache file is ``flashinfer::sm12x_dense_mx``; a tactic there is an instance's name, or
:data:`WIDENED`. Outside ``autotune(True)`` a call takes what is remembered for its number of tokens, else the planner's
choice (``sm12x_dense.choose``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..autotuner import DynamicTensorSpec, TunableRunner, TuningConfig
from ..jit.sm12x.instances import DENSE_INSTANCES, DenseInstance
from ..quantization import mx_cpu
from ..quantization.mx_cpu import BLOCK_SIZE
from ..sm12x_probes import NOTHING_TUNED, tuner_state
from .sm12x_dense import OPERATOR, Operands, _dispatch, choose, gemm_operand, run, weights_of
from .sm12x_dense_validation import MXFP8_LINEAR

WIDENED = "widened"
"""cuBLAS on weights widened to bfloat16."""

MOST_TOKENS = 1024
"""Of a call that takes what was tuned; more are the planner's. An LM head's outputs of that many rows are 0.4 GB."""

STREAMED_PASSES = 4
"""Tiles of tokens, at most, for which a stream of weights is timed: it reads them once for each."""

_MOST_REMEMBERED = 1024
_BY_NAME = {row.name: row for row in DENSE_INSTANCES}
_tuned: dict[Any, DenseInstance | None] = {}
"""By the tuner's state and what tells calls apart; emptied when it is full."""


@functools.cache
def _tuning_config() -> TuningConfig:
    """As the MoE layer's: L2 is cold, since a layer's weights do not stay there from one token to the next."""
    from ..fused_moe.utils import get_hybrid_num_tokens_buckets, make_hybrid_bucket_mapper

    buckets = get_hybrid_num_tokens_buckets(MOST_TOKENS)
    return TuningConfig(
        dynamic_tensor_specs=(DynamicTensorSpec((0,), (0,), buckets, make_hybrid_bucket_mapper(MOST_TOKENS)),),
        use_cold_l2_cache=True,
        use_cuda_graph=True,
    )


class SM12xDenseRunner(TunableRunner):
    """Times a dense layer with each instance that takes it.

    ``inputs`` are token rows, whose number is tuned over, and the weight; the rest is the call's own, or made for a
    profile's number of tokens.
    """

    def __init__(self, operands: Operands, token_format: int, on_sm12x: bool) -> None:
        self.token_format = token_format
        self.on_sm12x = on_sm12x
        self.weights = weights_of(operands.weight)
        self.k = operands.k
        self.out_dtype = operands.out.dtype
        # Names that end in _cache stay out of the runner's hash (TunableRunner.__hash__).
        self._operands_cache = operands
        self._profile_cache: dict[int, Operands] = {}

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """What besides the shapes tells saved tactics apart; the same in every process, and on every rank of such a GPU."""
        name = _dispatch().gpu_name(inputs[0].device)
        return self.weights, self.token_format, str(self.out_dtype), self.on_sm12x, name

    def _names(self, tokens: int) -> list[str]:
        operand = gemm_operand(self.weights, self.token_format, self.on_sm12x)
        names = [
            row.name
            for row in DENSE_INSTANCES
            if row.weights == self.weights
            and row.longest_k >= self.k
            and (tokens <= STREAMED_PASSES * row.token_tile if row.streamed else row.operand == operand)
        ]
        return [*names, WIDENED] if operand == "bf16" else names

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[str]:
        """Names of the instances for these weights, this K and number of tokens, and cuBLAS where it may take part."""
        return self._names(inputs[0].shape[0])

    def validate_tactic(self, inputs: list[torch.Tensor], tactic: Any) -> bool:
        """Whether a remembered tactic is one, whatever the number of tokens.

        While it tunes, upstream's tuner asks with a call's tensors for every profile.
        """
        return tactic == -1 or tactic in self._names(1)

    def _profile(self, x: torch.Tensor) -> Operands:
        tokens = x.shape[0]
        held = self._profile_cache.get(tokens)
        if held is None:
            given = self._operands_cache
            out = torch.empty((tokens, given.weight.shape[0]), dtype=self.out_dtype, device=x.device)
            scale = given.x_scale
            if scale is not None:
                blocks = self.k // BLOCK_SIZE
                linear = self.token_format == MXFP8_LINEAR
                size = tokens * blocks if linear else mx_cpu.swizzled_size(tokens, blocks)
                scale = torch.full((size,), 0x7F, dtype=torch.uint8, device=x.device).view(scale.dtype)
            residual = None if given.residual is None else torch.zeros_like(out)
            held = given._replace(out=out, x_scale=scale, residual=residual)
            self._profile_cache = {tokens: held}  # one at a time: an LM head's outputs are large
        return held._replace(x=x)

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Run the layer once on ``inputs[0]`` with the tactic of that name, or the planner's for -1."""
        operands = self._profile(inputs[0])
        if tactic == -1:
            operand = gemm_operand(self.weights, self.token_format, self.on_sm12x)
            sizes = inputs[0].shape[0], operands.weight.shape[0], self.k
            row = choose(self.weights, *sizes, self.on_sm12x, operand)
        else:
            row = None if tactic == WIDENED else _BY_NAME[tactic]
        run(row, operands, self.token_format, False, None)
        return operands.out


def tuned_instance(
    tuner: Any, operands: Operands, token_format: int, on_sm12x: bool, planned: DenseInstance | None
) -> DenseInstance | None:
    """What ``tuner``, the autotuner, has for this call, which is on a GPU; None: cuBLAS on widened weights.

    Tuned now inside ``autotune(True)``, also by a call of more than :data:`MOST_TOKENS`; else remembered, else ``planned``.
    """
    x, weight = operands.x, operands.weight
    state = tuner_state(tuner)
    if state == NOTHING_TUNED or x.shape[0] == 0:
        return planned
    key = state, x.shape, weight.shape, weight.dtype, token_format, operands.out.dtype, x.device
    if state is not None and key in _tuned:
        return _tuned[key]
    runner = SM12xDenseRunner(operands, token_format, on_sm12x)
    _, tactic = tuner.choose_one(OPERATOR, [runner], _tuning_config(), [x, weight])
    row = planned
    if tactic != -1 and x.shape[0] <= MOST_TOKENS:
        row = None if tactic == WIDENED else _BY_NAME[tactic]
    if state is not None:
        if len(_tuned) >= _MOST_REMEMBERED:
            _tuned.clear()
        _tuned[key] = row
    return row
