# SPDX-License-Identifier: Apache-2.0
"""What upstream's autotuner times and remembers: the tactics of a device's instance table.

FC1 and FC2 are tuned one after the other, each as the time of the whole layer with the other at its default, because
FC2 starts streaming its weights while FC1 still runs.  A tactic that computes the whole layer is one of FC1's; chosen, it
leaves FC2 nothing to choose.  The operators' names in a cache file are
``flashinfer::sm12x_moe::fc1`` and ``flashinfer::sm12x_moe::fc2``; a tactic there is a row's name, which stays what it is
whatever becomes of the tables.  Of names that are gone upstream's tuner says so and takes the default.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import torch

from ..autotuner import DynamicTensorSpec, TunableRunner, TuningConfig
from ..jit.sm12x.instances import INSTANCES, index_of, table
from ..jit.sm12x.instances import tactic as number
from ..sm12x_arguments import round_up
from ..sm12x_probes import NOTHING_TUNED, tuner_state
from . import sm12x_dispatch as dispatch
from .sm12x_launch import Plan, computes_layer, launch, make_plan, pair_tactics, resolved_pair
from .sm12x_validation import BLOCK_SIZE, Mode, MoEProblem
from .utils import get_hybrid_num_tokens_buckets, make_hybrid_bucket_mapper

OPERATORS = ("flashinfer::sm12x_moe::fc1", "flashinfer::sm12x_moe::fc2")
# Positions in the argument tuple that sm12x_operator builds for the kernel module.
_OUTPUT, _INPUT, _INPUT_SF, _IDS, _SCALES, _FC1, _FC2 = 0, 1, 2, 3, 4, 5, 9
_ROUTING_SEED = 0


@functools.cache
def _warn_of_numbers(operator: str) -> None:
    warnings.warn(
        f"a cache file of the autotuner has tactics of {operator} as numbers, from before they had names; they are not "
        "used: tune once more, into a new file",
        stacklevel=5,
    )


def refuse_numbers(tuner: Any, operator: str) -> None:
    """Say once if a file that ``tuner`` has loaded is from before tactics had names; its keys match no call any more."""
    for key, (_, tactic) in getattr(tuner, "_file_configs", {}).items():
        if operator in key and isinstance(tactic, int) and tactic != -1:
            _warn_of_numbers(operator)
            return


@functools.lru_cache(maxsize=16)
def tuning_config(tune_max_num_tokens: int) -> TuningConfig:
    """Token counts to tune at, spaced as for other MoE layers.

    Tactics are timed with a cold L2: a layer's weights do not stay in it from one token to the next, but those of a small
    batch would from one profiling run to the next.
    """
    return TuningConfig(
        dynamic_tensor_specs=(
            DynamicTensorSpec(
                (0,),
                (0,),
                get_hybrid_num_tokens_buckets(tune_max_num_tokens),
                make_hybrid_bucket_mapper(tune_max_num_tokens),
            ),
        ),
        use_cold_l2_cache=True,
        use_cuda_graph=True,
    )


def _place(tactic: Any) -> int:
    return -1 if tactic == -1 else index_of(tactic)


class SM12xMoERunner(TunableRunner):
    """Times one layer with a given tactic for FC1 (``gemm_idx`` 1) or FC2 (2).

    ``inputs`` are the activations, whose token count is tuned over, and the two weights.  Expert ids of a profile are
    drawn uniformly without replacement from a fixed seed, so that two processes time the same routing.
    """

    def __init__(
        self,
        problem: MoEProblem,
        arguments: tuple[Any, ...],
        swizzled_input_sf: bool,
        enable_pdl: bool,
        gemm_idx: int,
    ) -> None:
        self.gemm_idx = gemm_idx
        self.problem = dataclasses.replace(problem, num_tokens=0)
        self.output_dtype = arguments[_OUTPUT].dtype
        self.swizzled_input_sf = swizzled_input_sf
        self.enable_pdl = enable_pdl
        # Names that end in _cache stay out of the runner's hash (TunableRunner.__hash__).
        self._arguments_cache = arguments
        self._profile_cache: dict[int, tuple[Plan, tuple[Any, ...], torch.Tensor]] = {}

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """What besides the shapes tells saved tactics apart; the same in every process, and on every rank of such a GPU."""
        problem = self.problem
        return (
            int(problem.mode),
            str(inputs[0].dtype),
            str(self.output_dtype),
            problem.top_k,
            problem.num_experts_total,
            self.swizzled_input_sf,
            self.enable_pdl,
            dispatch.gpu_name(inputs[0].device),
        )

    def _names(self, device: torch.device, tokens: int) -> list[str]:
        problem = self.problem
        return [
            row.name
            for row in table(dispatch.has_block_scaled_mma(device.index))
            if row.activation == problem.mode.activation
            and not (self.gemm_idx == 2 and computes_layer(row.index))
            and row.takes(tokens * problem.top_k, problem.hidden, problem.inter)
        ]

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[str]:
        """Names of the rows of the device's table that fit this mode, GEMM and number of tokens."""
        return self._names(inputs[0].device, inputs[0].shape[0])

    def validate_tactic(self, inputs: list[torch.Tensor], tactic: Any) -> bool:
        """Whether a remembered tactic names a row that fits, whatever the number of tokens.

        While it tunes, upstream's tuner asks with a call's tensors for every profile, so that a tactic for few tokens would
        be timed anew in each call with many. That it takes a call's tokens is :func:`tuned_tactics`' to see.
        """
        return tactic == -1 or tactic in self._names(inputs[0].device, 0)

    def _profile(self, activations: torch.Tensor) -> tuple[Plan, tuple[Any, ...], torch.Tensor]:
        tokens = activations.shape[0]
        held = self._profile_cache.get(tokens)
        if held is not None:
            return held
        device = activations.device
        problem = dataclasses.replace(self.problem, num_tokens=tokens)
        plan = make_plan(problem, device)
        generator = torch.Generator().manual_seed(_ROUTING_SEED)
        scores = torch.rand((tokens, problem.num_experts_total), generator=generator)
        ids = scores.topk(problem.top_k, dim=1).indices.to(torch.int32)
        arguments = list(self._arguments_cache)
        arguments[_OUTPUT] = torch.empty((tokens, problem.hidden), dtype=self.output_dtype, device=device)
        arguments[_IDS] = ids.to(device)
        arguments[_SCALES] = torch.full((tokens, problem.top_k), 1 / problem.top_k, device=device)
        if problem.mode is Mode.MXFP8_INPUT:
            rows = round_up(tokens, 128) if self.swizzled_input_sf else tokens
            blocks = problem.hidden // BLOCK_SIZE
            if self.swizzled_input_sf:
                blocks = round_up(blocks, 4)
            arguments[_INPUT_SF] = torch.full((rows, blocks), 0x7F, dtype=torch.uint8, device=device)
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
        self._profile_cache[tokens] = plan, tuple(arguments), workspace
        return self._profile_cache[tokens]

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Run the layer once on ``inputs[0]`` with the tactic called ``tactic``, or -1, for this runner's GEMM."""
        plan, arguments, workspace = self._profile(inputs[0])
        own = _place(tactic)
        tactics = resolved_pair((own, -1) if self.gemm_idx == 1 else (-1, own), plan.tactics)
        for each in tactics:
            dispatch.ensure_instance(each)
        given = (arguments[_OUTPUT], inputs[0], *arguments[_INPUT_SF:]), workspace, self.swizzled_input_sf
        if not launch(plan.problem, *given, tactics, self.enable_pdl):
            if tactic != -1:
                raise RuntimeError(f"tactic {tactic} needs all SMs of the device, and this stream has fewer")
            launch(plan.problem, *given, pair_tactics(plan, inputs[0].device), self.enable_pdl)
        return arguments[_OUTPUT]


class SM12xStageRunner(TunableRunner):
    """What upstream's unified ``MoELayer`` tunes a CUTLASS backend with, for this fork's kernels.

    It takes the place of the ``MoERunner`` of upstream's module: the layer hands it activations and weights only, so it
    times them with unit scales.  Its tactics are the numbers of which the layer makes ``profile_ids``.

    ``inputs`` are ``[input, fc1 weights, ignored, fc2 weights, ignored]``.
    """

    def __init__(self, mode: Mode, output_dtype: torch.dtype, top_k: int, ep_size: int, enable_pdl: bool) -> None:
        self.mode = mode
        self.output_dtype = output_dtype
        self.top_k = top_k
        self.ep_size = ep_size
        self.enable_pdl = enable_pdl
        self.gemm_idx_for_tuning: int | None = None  # set by the layer before it tunes a GEMM
        self._runner_cache: dict[Any, SM12xMoERunner] = {}

    def _runner(self, inputs: list[Any], gemm_idx: int | None = None) -> SM12xMoERunner:
        gemm_idx = gemm_idx or self.gemm_idx_for_tuning or 1
        x, fc1, _, fc2, _ = inputs
        key = (fc1.data_ptr(), fc2.data_ptr(), fc2.shape, gemm_idx)
        runner = self._runner_cache.get(key)
        if runner is None:
            experts, hidden, columns = fc2.shape
            inter = 2 * columns * fc2.dtype.itemsize
            problem = MoEProblem(self.mode, 0, hidden, inter, experts, self.top_k, 0, experts * self.ep_size)

            def unit_scales(rows: int, k: int) -> torch.Tensor:
                shape = (experts, round_up(rows, 128), round_up(k // BLOCK_SIZE, 4))
                return torch.full(shape, 0x7F, dtype=torch.uint8, device=x.device)

            ones = None if self.mode is Mode.W4A16 else torch.ones(experts, device=x.device)
            arguments = (
                *(torch.empty(0, dtype=self.output_dtype, device=x.device), x, None, None, None),
                *(fc1.view(torch.uint8), unit_scales(2 * inter, hidden), ones, None),
                *(fc2.view(torch.uint8), unit_scales(hidden, inter), ones, None),
                *(None, None, None),
            )
            runner = self._runner_cache[key] = SM12xMoERunner(problem, arguments, True, self.enable_pdl, gemm_idx)
        return runner

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """As :class:`SM12xMoERunner` has them."""
        return self._runner(inputs).get_cache_key_extras(inputs)

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[int]:
        """As :class:`SM12xMoERunner` has them, as numbers."""
        return [number(name) for name in self._runner(inputs).get_valid_tactics(inputs, profile)]

    def validate_tactic(self, inputs: list[torch.Tensor], tactic: Any) -> bool:
        """Whether a tactic from a cache file is the number of a row that fits.

        The call's tokens too: the layer passes it on as ``profile_ids``, where nothing takes its place.
        """
        return tactic == -1 or tactic in self.get_valid_tactics(inputs, None)

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Run the layer once; ``gemm_idx`` says which GEMM ``tactic`` is for."""
        name = -1 if tactic == -1 else next(row.name for row in INSTANCES if row.number == tactic)
        return self._runner(inputs, kwargs.get("gemm_idx")).forward(inputs, name, do_preparation)


def tuned_tactics(
    tuner: Any,
    plan: Plan,
    arguments: tuple[Any, ...],
    swizzled_input_sf: bool,
    tune_max_num_tokens: int,
    enable_pdl: bool,
) -> tuple[int, int]:
    """The tactics that ``tuner``, the autotuner, has for this call.

    Tuned now inside ``autotune(True)``, else remembered, else the plan's.
    """
    state = tuner_state(tuner)
    if state == NOTHING_TUNED:
        return plan.tactics
    if state is not None:  # and of a plan, which is of sizes alone, what else tells calls apart
        dtypes = arguments[_INPUT].dtype, arguments[_OUTPUT].dtype
        state = (*state, tune_max_num_tokens, enable_pdl, *dtypes, swizzled_input_sf)
    if state is not None and plan.tuned is not None and plan.tuned[0] == state:
        return plan.tuned[1]
    chosen = []
    for gemm_idx, operator in enumerate(OPERATORS, start=1):
        refuse_numbers(tuner, operator)
        _, tactic = tuner.choose_one(
            operator,
            [SM12xMoERunner(plan.problem, arguments, swizzled_input_sf, enable_pdl, gemm_idx)],
            tuning_config(tune_max_num_tokens),
            [arguments[_INPUT], arguments[_FC1], arguments[_FC2]],
            gemm_idx=gemm_idx,
        )
        place, problem = _place(tactic), plan.problem
        if place != -1 and not INSTANCES[place].takes(
            problem.num_tokens * problem.top_k, problem.hidden, problem.inter
        ):
            place = -1  # the largest profile's, which stands for all calls of more tokens
        chosen.append(place)
        if place != -1:
            dispatch.ensure_instance(place)
    tactics = resolved_pair(chosen, plan.tactics)
    if state is not None:
        plan.tuned = (state, tactics)
    return tactics
