# SPDX-License-Identifier: Apache-2.0
"""Upstream's autotuner times and remembers tactics of the SM12x family's operators.

A cache file holds a tactic as its instance's name, which does not depend on the tables.  If a name no longer exists,
upstream's tuner says so and takes the default.  Tactics are timed with a cold L2: a model's layer never finds its
weights in L2, but successive profiling runs of a small batch would.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..autotuner import AutoTuner, DynamicTensorSpec, TunableRunner, TuningConfig
from . import devices
from .backend import Backend

_NOTHING = (0, 0, 0, None)
_MOST_CACHED = 4096
_cached: dict[Any, Any] = {}
"""Tactics by the tuner's state and a call's key; emptied when it is full."""


class Runner(TunableRunner):
    """Times a call with each of its tactics.

    ``inputs[0]`` holds token rows; their number is the tuned dimension.  Subclasses give a key for saved tactics
    (:meth:`key`), the tactics' names (:meth:`names`), the call to time (:meth:`make_profile`), and run it
    (:meth:`run`).
    """

    def __init__(self, backend: Backend) -> None:
        # Names that end in _cache stay out of the runner's hash (TunableRunner.__hash__).
        self._backend_cache = backend
        self._profile_cache: dict[int, Any] = {}

    @property
    def backend(self) -> Backend:
        """The backend that runs the call."""
        return self._backend_cache

    def profile(self, inputs: list[torch.Tensor]) -> Any:
        """The call that :meth:`make_profile` made for this number of tokens. Only the last one is cached, because an LM
        head's outputs are large."""
        tokens = inputs[0].shape[0]
        if tokens not in self._profile_cache:
            self._profile_cache = {tokens: self.make_profile(inputs)}
        return self._profile_cache[tokens]

    def key(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """Facts in addition to the shapes that tell saved tactics apart; the same in every process."""
        raise NotImplementedError

    def names(self, tokens: int) -> list[str]:
        """Tactics for so many tokens."""
        raise NotImplementedError

    def make_profile(self, inputs: list[torch.Tensor]) -> Any:
        """A call for the number of tokens of ``inputs``, with whatever else it takes."""
        raise NotImplementedError

    def run(self, inputs: list[torch.Tensor], tactic: str | None) -> torch.Tensor:
        """Compute ``inputs`` with ``tactic``, or as the planner says."""
        raise NotImplementedError

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """:meth:`key` and the GPU's name, so that ranks with the same GPU share tactics and others do not."""
        return (*self.key(inputs), devices.gpu_name(inputs[0].device))

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[Any]:
        """The tactics for a profile's number of tokens."""
        return self.names(inputs[0].shape[0])

    def validate_tactic(self, inputs: list[torch.Tensor], tactic: Any) -> bool:
        """Whether a remembered tactic exists, for any number of tokens.

        While it tunes, upstream's tuner asks with the call's tensors about every profile's tactic. If the call's number
        of tokens counted here, each call with many tokens would time the tactics for few anew. The operator itself
        checks that a tactic takes the call's tokens.
        """
        return tactic == -1 or tactic in self.names(0)

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **_: Any
    ) -> torch.Tensor:
        """Run a call in the form in which upstream's tuner asks for it; -1 is the default tactic."""
        return self.run(inputs, None if tactic == -1 else tactic)


def unit_scales(*shape: int, device: torch.device) -> torch.Tensor:
    """UE8M0 scales of 1."""
    return torch.full(shape, 0x7F, dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=16)
def config(most_tokens: int) -> TuningConfig:
    """Token counts to tune at: the buckets of MoE layers."""
    from ..fused_moe.utils import get_hybrid_num_tokens_buckets, make_hybrid_bucket_mapper

    buckets = get_hybrid_num_tokens_buckets(most_tokens)
    return TuningConfig(
        dynamic_tensor_specs=(DynamicTensorSpec((0,), (0,), buckets, make_hybrid_bucket_mapper(most_tokens)),),
        use_cold_l2_cache=True,
        use_cuda_graph=True,
    )


def _state(tuner: Any) -> Any:
    """The state that the tuner's answers depend on outside a tuning context; None: the tuner must be asked.

    These attributes are private to upstream: a tuner without them is asked on every call.
    """
    try:
        if tuner.is_tuning_mode or tuner._active_tuning_contexts or tuner._in_v2_context:
            return None
        return tuner._dirty_seq, len(tuner.profiling_cache), len(tuner._file_configs), tuner._managed_cache
    except AttributeError:
        return None


def tuned(operator: str, runner: Runner, most_tokens: int, inputs: list[torch.Tensor], **named: Any) -> str | None:
    """The tactic that upstream's autotuner has for this call, which is on a GPU; None: the planner's.

    Tuned now inside ``autotune(True)``, else remembered.
    """
    tuner: Any = AutoTuner.get()
    state = _state(tuner)
    key = None
    if state is not None:
        key = state, operator, most_tokens, runner.get_cache_key_extras(inputs), *(each.shape for each in inputs)
        if key in _cached:
            known: str | None = _cached[key]
            return known
    if key is None:
        _, tactic = tuner.choose_one(operator, [runner], config(most_tokens), inputs, **named)
    else:  # not choose_one, which warns of shapes that were not tuned: the planner's tactic for them is no fallback
        shapes = tuple(tuple(each.shape) for each in inputs)
        _, _, tactic, _ = tuner.search_cache(operator, [runner], shapes, config(most_tokens), inputs=inputs)
    name = None if tactic == -1 else str(tactic)
    if key is not None:
        if len(_cached) >= _MOST_CACHED:
            _cached.clear()
        _cached[key] = name
    return name


def is_tuning() -> bool:
    """Whether the tuner is timing tactics now, inside ``autotune(True)``."""
    return bool(AutoTuner.get().is_tuning_mode)


def is_idle() -> bool:
    """Whether the tuner holds no tactics and is timing none; callers then need not make a runner to ask it."""
    return _state(AutoTuner.get()) == _NOTHING
