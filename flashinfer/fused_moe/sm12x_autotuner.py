# SPDX-License-Identifier: Apache-2.0
"""Upstream's autotuner times the MoE layer's tactics, which are a device's instance table.

FC1 and FC2 are tuned one after the other, each as the time of the whole layer with the other at its default, because
FC2 starts streaming its weights while FC1 still runs.  A tactic that computes the whole layer is one of FC1's; chosen,
it leaves FC2 nothing to choose.  The operators' names in a cache file are ``flashinfer::sm12x_moe::fc1`` and
``flashinfer::sm12x_moe::fc2``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..autotuner import TunableRunner
from ..sm12x import tune
from ..sm12x.backend import Backend, kernels
from ..sm12x.checks import BLOCK_SIZE, padded_scales
from ..sm12x.instances import INSTANCES, index_of
from ..sm12x.instances import tactic as number
from .sm12x_launch import as_bytes, default_tactics, launch, workspace_bytes
from .sm12x_planner import computes_layer, resolved_pair
from .sm12x_validation import Mode, MoECall, MoEProblem

OPERATORS = ("flashinfer::sm12x_moe::fc1", "flashinfer::sm12x_moe::fc2")
_ROUTING_SEED = 0


class SM12xMoERunner(tune.Runner):
    """Times one layer with a given tactic for FC1 (``gemm_idx`` 1) or FC2 (2).

    ``inputs`` are the activations, whose token count is tuned over, and the two weights.  Expert ids of a profile are
    drawn uniformly without replacement from a fixed seed, so that two processes time the same routing.
    """

    def __init__(self, backend: Backend, problem: MoEProblem, call: MoECall, gemm_idx: int) -> None:
        super().__init__(backend)
        self.gemm_idx = gemm_idx
        self.problem = problem._replace(num_tokens=0)
        self.output_dtype = call.output_dtype
        self.swizzled_input_sf = bool(call.swizzled_input_sf)
        self.enable_pdl = backend.pdl(call.enable_pdl)
        self._call_cache = call

    def key(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """Sizes and types that are no shape of ``inputs``."""
        problem = self.problem
        return (
            int(problem.mode),
            str(inputs[0].dtype),
            str(self.output_dtype),
            problem.top_k,
            problem.num_experts_total,
            self.swizzled_input_sf,
            self.enable_pdl,
            *([problem.weights] if problem.weights != "mxfp4" else []),
        )

    def names(self, tokens: int) -> list[str]:
        """Rows of the device's table that fit this mode, GEMM and number of tokens."""
        problem = self.problem
        sizes = tokens * problem.top_k, problem.hidden, problem.inter
        return [
            row.name
            for row in self.backend.device_class.candidates(*sizes, problem.weights)
            if row.activation == problem.mode.activation and not (self.gemm_idx == 2 and computes_layer(row.index))
        ]

    def make_profile(self, inputs: list[torch.Tensor]) -> tuple[MoEProblem, MoECall, torch.Tensor]:
        """The call with as many tokens, and a workspace."""
        tokens, device, backend = inputs[0].shape[0], inputs[0].device, self.backend
        problem = self.problem._replace(num_tokens=tokens)
        generator = torch.Generator().manual_seed(_ROUTING_SEED)
        scores = torch.rand((tokens, problem.num_experts_total), generator=generator)
        ids = scores.topk(problem.top_k, dim=1).indices.to(torch.int32)
        input_sf = None
        if problem.mode is Mode.MXFP8_INPUT:
            rows, blocks = tokens, problem.hidden // BLOCK_SIZE
            if self.swizzled_input_sf:
                rows, blocks = padded_scales(rows, blocks)
            input_sf = tune.unit_scales(rows, blocks, device=device)
        call = self._call_cache._replace(
            output=torch.empty((tokens, problem.hidden), dtype=self.output_dtype, device=device),
            input_sf=input_sf,
            token_selected_experts=ids.to(device),
            token_final_scales=torch.full((tokens, problem.top_k), 1 / problem.top_k, device=device),
        )
        workspace = backend.empty(workspace_bytes(backend, problem, not backend.device_class.mma_kinds))
        return problem, call, workspace

    def run(self, inputs: list[torch.Tensor], tactic: str | None) -> torch.Tensor:
        """The layer once on ``inputs[0]``, with ``tactic`` for this runner's GEMM."""
        problem, call, workspace = self.profile(inputs)
        call, backend = call._replace(input=inputs[0]), self.backend
        own = -1 if tactic is None else index_of(tactic)
        default = default_tactics(problem, backend.device_class)
        tactics = resolved_pair((own, -1) if self.gemm_idx == 1 else (-1, own), default)
        if not launch(backend, problem, call, workspace, tactics):
            if tactic is not None:
                raise RuntimeError(f"tactic {tactic} needs all SMs of the device, and this stream has fewer")
            pair = default_tactics(problem, backend.device_class, False)
            launch(backend, problem, call, workspace, pair)
        output: torch.Tensor = call.output
        return output


class SM12xStageRunner(TunableRunner):
    """The runner with which upstream's unified ``MoELayer`` tunes a CUTLASS backend, for this fork's kernels.

    It takes the place of the ``MoERunner`` of upstream's module: the layer hands it activations and weights only, so it
    times them with unit scales.  Its tactics are numbers, which the layer passes on as ``profile_ids``.

    ``inputs`` are ``[input, fc1 weights, ignored, fc2 weights, ignored]``.
    """

    def __init__(
        self,
        mode: Mode,
        activation_type: int,
        output_dtype: torch.dtype,
        top_k: int,
        ep_size: int,
        enable_pdl: bool,
    ) -> None:
        self.mode = mode
        self.activation_type = int(activation_type)
        self.output_dtype = output_dtype
        self.top_k = top_k
        self.ep_size = ep_size
        self.enable_pdl = enable_pdl
        self.gemm_idx_for_tuning: int | None = None  # set by the layer before it tunes a GEMM
        self._runner_cache: dict[Any, SM12xMoERunner] = {}

    def _runner(self, inputs: list[Any], gemm_idx: int | None = None) -> SM12xMoERunner:
        gemm_idx = gemm_idx or self.gemm_idx_for_tuning or 1
        x, fc1, _, fc2, _ = inputs
        key = (
            gemm_idx,
            *((each.data_ptr(), each.untyped_storage().nbytes(), each.shape, each.dtype) for each in (fc1, fc2)),
        )
        runner = self._runner_cache.get(key)
        if runner is None:
            experts, hidden, columns = fc2.shape
            inter = 2 * columns * fc2.dtype.itemsize
            total = experts * self.ep_size
            problem = MoEProblem(self.mode, 0, hidden, inter, experts, self.top_k, 0, total, total)

            fc1_scales, fc2_scales = (
                tune.unit_scales(experts, *padded_scales(rows, k // BLOCK_SIZE), device=x.device)
                for rows, k in ((fc1.shape[1], hidden), (hidden, inter))
            )
            ones = [] if self.mode is Mode.W4A16 else [torch.ones(experts, device=x.device)]
            given: dict[str, Any] = dict.fromkeys(MoECall._fields) | {
                "input": x,
                "fc1_expert_weights": fc1,
                "fc2_expert_weights": fc2,
                "quant_scales": [fc1_scales, *ones, fc2_scales, *ones],
                "activation_type": self.activation_type,
                "output_dtype": self.output_dtype,
                "moe_mode": int(self.mode),
                "swizzled_input_sf": True,
                "enable_pdl": self.enable_pdl,
            }
            backend = kernels(x.device)
            assert backend is not None, "tactics are timed on a GPU"
            runner = self._runner_cache[key] = SM12xMoERunner(backend, problem, MoECall(**given), gemm_idx)
        return runner

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """The key extras of :class:`SM12xMoERunner`."""
        return self._runner(inputs).get_cache_key_extras(inputs)

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[int]:
        """The valid tactics of :class:`SM12xMoERunner`, as numbers."""
        return [number(name) for name in self._runner(inputs).get_valid_tactics(inputs, profile)]

    def validate_tactic(self, inputs: list[torch.Tensor], tactic: Any) -> bool:
        """Whether a tactic from a cache file is the number of an instance that takes this call.

        It must take the call's tokens, too: the layer passes it on as ``profile_ids``, for which there is no fallback.
        """
        return tactic == -1 or tactic in self.get_valid_tactics(inputs, None)

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Run the layer once; ``gemm_idx`` says which GEMM ``tactic`` is for."""
        name = -1 if tactic == -1 else next(row.name for row in INSTANCES if row.profile_id == tactic)
        return self._runner(inputs, kwargs.get("gemm_idx")).forward(inputs, name, do_preparation)


def tuned_tactics(backend: Backend, problem: MoEProblem, call: MoECall, default: tuple[int, int]) -> tuple[int, int]:
    """The tactics that the autotuner has for this call: tuned now inside ``autotune(True)``, else remembered, else
    ``default``."""
    chosen = []
    inputs = [call.input, as_bytes(call.fc1_expert_weights), as_bytes(call.fc2_expert_weights)]
    for gemm_idx, operator in enumerate(OPERATORS, start=1):
        runner = SM12xMoERunner(backend, problem, call, gemm_idx)
        name = tune.tuned(operator, runner, call.tune_max_num_tokens, inputs, gemm_idx=gemm_idx)
        # Calls of more tokens than the largest profile get that profile's tactic, which may not take so many.
        chosen.append(-1 if name is None or name not in runner.names(problem.num_tokens) else index_of(name))
    return resolved_pair(chosen, default)
