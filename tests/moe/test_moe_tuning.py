# SPDX-License-Identifier: Apache-2.0
"""Upstream's autotuner over the instance tables, with a profiler that answers given times."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune
from moe_recording import RecordingModule, layer_arguments, logged

import flashinfer
from flashinfer.fused_moe import SM12xMoELayer
from flashinfer.fused_moe.sm12x_planner import computes_layer, resolved_pair, wanted_tactics
from flashinfer.fused_moe.sm12x_validation import Mode, MoEProblem
from flashinfer.sm12x import device_class, instances
from flashinfer.sm12x.instances import FUSED_MOE_ROUTED_ROWS, HOPPER, INSTANCES, MAIN_MODULE, NVFP4, is_alone
from flashinfer.testing import MoECase, make_moe_inputs

BUCKETS = {1, 2, 4, 8, 16}
MOST_TOKENS = 16
PROBLEM = MoEProblem(Mode.MXFP8_INPUT, 4, 64, 64, 8, 2, 0, 8, 8)


class Profiler:
    """Answers with given times and keeps what it was asked, tactics as places; 1.0 where no time is given."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int], float] = {}
        self.asked: list[tuple[int, int, int]] = []  # gemm, tactic, tokens
        self.configs: list[Any] = []

    def __call__(self, tuner: AutoTuner, runner: Any, inputs: Any, tactic: Any, config: Any, **kwargs: Any) -> float:
        gemm = kwargs["gemm_idx"]
        runner(inputs, tactic=tactic, gemm_idx=gemm)
        place = tactic if tactic == -1 else instances.index_of(tactic)
        self.asked.append((gemm, place, inputs[0].shape[0]))
        self.configs.append(config)
        return self.times.get((gemm, place), 1.0)


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch, module: RecordingModule) -> Profiler:
    made = Profiler()
    monkeypatch.setattr(
        AutoTuner, "_profile_single_kernel", lambda tuner, *given, **named: made(tuner, *given, **named)
    )
    return made


def caller(
    module: RecordingModule, mode: int = 0, num_tokens: int = MOST_TOKENS, by_object: bool = False, **options: Any
) -> Callable[[], tuple[int, int]]:
    arguments = {**layer_arguments(mode, num_tokens=num_tokens), "tune_max_num_tokens": MOST_TOKENS, **options}
    call = functools.partial(flashinfer.cutlass_fused_moe, **arguments)
    if by_object:
        of_a_call = inspect.signature(SM12xMoELayer.run).parameters
        layer = SM12xMoELayer(**{name: value for name, value in arguments.items() if name not in of_a_call})
        call = functools.partial(layer.run, **{name: arguments[name] for name in arguments.keys() & of_a_call.keys()})

    def tactics() -> tuple[int, int]:
        call()
        return module.launches[-1]["tactic_fc1"], module.launches[-1]["tactic_fc2"]

    return tactics


def offered(mode: int, gemm: int = 1) -> list[int]:
    rows = [row.index for row in MAIN_MODULE if row.activation == Mode(mode).activation]
    return [tactic for tactic in rows if gemm == 1 or not computes_layer(tactic)]


def two_others(mode: int, default: tuple[int, int]) -> tuple[int, int]:
    """Tactics for FC1 and FC2 that are not the default's."""
    free = [tactic for tactic in offered(mode, 2) if tactic not in default]
    return free[0], free[-1]


@pytest.mark.parametrize(("mode", "by_object"), [(0, False), (1, False), (2, False), (2, True)])
def test_every_tactic_that_fits_is_timed_for_both_gemms_and_the_best_are_used(
    mode: int, by_object: bool, module: RecordingModule, profiler: Profiler, tmp_path: Path
) -> None:
    """And kept for another process, which has nothing but the file: the tuner is emptied. Calls are all alike, so that
    none but the first one's arguments are checked in full; the tuner is asked in each."""
    tactics, cache = caller(module, mode, by_object=by_object), str(tmp_path / "tactics.json")
    default = tactics()
    wanted = two_others(mode, default)
    profiler.times = {(1, wanted[0]): 0.5, (2, wanted[1]): 0.25}
    with autotune(True, cache=cache):
        assert tactics() == wanted
    for gemm in (1, 2):
        asked = {(tactic, tokens) for which, tactic, tokens in profiler.asked if which == gemm}
        assert {tactic for tactic, _ in asked} >= set(offered(mode, gemm))
        for tactic in offered(mode, gemm):
            assert {tokens for timed, tokens in asked if timed == tactic} >= BUCKETS, "each bucket is timed"
    launched = {(launch["tactic_fc1"], launch["tactic_fc2"]) for launch in module.launches}
    assert launched >= {resolved_pair((tactic, -1), default) for tactic in offered(mode)}, "what is timed is launched"
    assert launched >= {resolved_pair((-1, tactic), default) for tactic in offered(mode, 2)}
    for launch in module.launches:
        tokens = launch["input"].shape[0]
        assert launch["output"].shape == (tokens, 160)
        assert launch["token_selected_experts"].shape == launch["token_final_scales"].shape == (tokens, 3)
        assert (launch["token_selected_experts"].dtype, launch["token_final_scales"].dtype) == (
            torch.int32,
            torch.float32,
        )
    assert tactics() == wanted
    timed = len(profiler.asked)
    with autotune(True):
        assert tactics() == wanted
    AutoTuner.get().clear_cache()
    assert tactics() == default
    for tunes in (False, True):
        with autotune(tunes, cache=cache):
            assert tactics() == wanted
    assert len(profiler.asked) == timed, "what was timed is not timed again"
    assert all(config.use_cold_l2_cache and config.use_cuda_graph for config in profiler.configs)


def test_a_tactic_that_does_not_take_the_layer_is_not_timed(
    module: RecordingModule, profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tactics = caller(module)
    default = tactics()
    too_large = next(tactic for tactic in offered(0) if tactic not in default)
    takes = instances.Instance.takes
    monkeypatch.setattr(instances.Instance, "takes", lambda row, *sizes: row.index != too_large and takes(row, *sizes))
    with autotune(True):
        tactics()
    asked = {tactic for _, tactic, _ in profiler.asked}
    assert too_large not in asked
    assert set(offered(0)) - {too_large} <= asked


def test_a_device_without_block_scales_times_what_was_made_for_it(module: RecordingModule, profiler: Profiler) -> None:
    """Hopper's table, whose own rows are built for it."""
    module.backend.device_class, module.backend.tactics = device_class.HOPPER, INSTANCES
    with autotune(True):
        caller(module)()
    asked = {tactic for which, tactic, _ in profiler.asked if which == 1}
    assert asked - {-1} == {row.index for row in HOPPER if row.activation == "mxfp8" and row.block_k <= 256}
    assert {tactic for tactic in asked - {-1} if is_alone(INSTANCES[tactic])} <= set(module.backend.built)


def test_nvfp4_experts_are_tuned_by_tactics_of_their_own(module: RecordingModule, profiler: Profiler) -> None:
    """And what was tuned for one format is nothing to the other, whose sizes are the same."""
    best = {"mxfp4": next(row for row in MAIN_MODULE if row.activation == "bf16"), "nvfp4": NVFP4[1]}
    profiler.times = {(gemm, row.index): 0.25 for row in best.values() for gemm in (1, 2)}
    for weights in ("mxfp4", "nvfp4"):
        profiler.asked.clear()
        arguments = layer_arguments(2, num_tokens=MOST_TOKENS, weights=weights)
        with autotune(True):
            flashinfer.cutlass_fused_moe(**arguments, tune_max_num_tokens=MOST_TOKENS)
        asked = {tactic for gemm, tactic, _ in profiler.asked if gemm == 1 and tactic != -1}
        rows = NVFP4 if weights == "nvfp4" else [row for row in MAIN_MODULE if row.activation == "bf16"]
        assert asked == {row.index for row in rows}
        flashinfer.cutlass_fused_moe(**arguments, tune_max_num_tokens=MOST_TOKENS)
        assert module.launches[-1]["tactic_fc1"] == module.launches[-1]["tactic_fc2"] == best[weights].index


def test_profile_ids_win_over_what_was_tuned(module: RecordingModule, profiler: Profiler) -> None:
    default = caller(module)()
    wanted = two_others(0, default)
    profiler.times = {(1, wanted[0]): 0.5, (2, wanted[1]): 0.25}
    with autotune(True):
        assert caller(module)() == wanted
    forced = list(reversed(wanted))
    assert caller(module, profile_ids=[INSTANCES[tactic].profile_id for tactic in forced])() == tuple(forced)
    assert caller(module)() == wanted


STREAMED = instances.index_of("stream_mxfp8_as_bf16_m8")


def test_pairs_with_a_tactic_that_computes_the_layer() -> None:
    whole, (one, other) = STREAMED, offered(0, 2)[:2]
    assert resolved_pair((-1, -1), (one, other)) == (one, other)
    assert resolved_pair((other, -1), (one, one)) == (other, one)
    assert resolved_pair((-1, other), (one, one)) == (one, other)
    assert resolved_pair((-1, -1), (whole, whole)) == (whole, whole)
    assert resolved_pair((whole, -1), (one, other)) == (whole, whole)
    assert resolved_pair((whole, other), (one, other)) == (whole, whole)
    assert resolved_pair((one, -1), (whole, whole)) == (one, one)
    assert resolved_pair((-1, one), (whole, whole)) == (one, one)
    assert resolved_pair((one, other), (whole, whole)) == (one, other)
    numbers = {tactic: -1 if tactic == -1 else INSTANCES[tactic].profile_id for tactic in (whole, one, -1)}
    assert wanted_tactics([numbers[whole]] * 2, PROBLEM) == (whole, whole)
    assert wanted_tactics([numbers[whole], numbers[one]], PROBLEM) == (whole, one)
    for first in (one, -1):
        with pytest.raises(
            ValueError,
            match=rf"{INSTANCES[whole].name} computes FC1 and FC2 in one launch.*\[{numbers[whole]}, "
            rf"{numbers[whole]}\]",
        ):
            wanted_tactics([numbers[first], numbers[whole]], PROBLEM)


@pytest.mark.parametrize("row", [row for row in INSTANCES if row.split_k], ids=lambda row: row.name)
def test_a_fused_moe_tactic_refuses_what_it_cannot_take(row) -> None:
    """Each limit, and the largest problem within all of them."""
    mode = Mode.W4A16 if row.activation == "bf16" else Mode.MXFP8_INPUT
    longest = row.longest_k
    largest = PROBLEM._replace(
        mode=mode, weights=row.weights, num_tokens=FUSED_MOE_ROUTED_ROWS // 4, top_k=4, hidden=longest, inter=longest
    )
    assert wanted_tactics([row.profile_id, -1], largest) == (row.index, -1)
    for beyond in ({"num_tokens": FUSED_MOE_ROUTED_ROWS // 4 + 1}, {"hidden": longest + 32}, {"inter": longest + 32}):
        problem = largest._replace(**beyond)
        with pytest.raises(
            ValueError,
            match=rf"^profile_ids is \[{row.profile_id}, -1\]; {row.name} takes at most 1536 routed rows "
            rf"\(tokens x top_k\), and hidden and intermediate sizes up to {longest}, but this call has "
            rf"{4 * problem.num_tokens} routed rows and the sizes {problem.hidden} and {problem.inter}: pass other "
            "tactics, or -1",
        ):
            wanted_tactics([row.profile_id, -1], problem)


def test_a_call_with_too_many_tokens_for_its_tactic_is_refused() -> None:
    arguments = make_moe_inputs(MoECase(385, 64, 64, 4, 4, 0), 17).arguments()
    number = INSTANCES[STREAMED].profile_id
    with pytest.raises(ValueError, match=r"takes at most 1536 .* but this call has 1540 routed rows"):
        flashinfer.cutlass_fused_moe(**arguments, profile_ids=[number, number])


def test_pairs_keep_activations_alike() -> None:
    as_bf16 = instances.index_of("mxfp8_as_bf16_m16_k128")
    assert resolved_pair((-1, -1), (as_bf16, as_bf16)) == (as_bf16, as_bf16)
    assert resolved_pair((0, -1), (as_bf16, as_bf16)) == (0, 0)
    assert resolved_pair((-1, 0), (as_bf16, as_bf16)) == (0, 0)
    assert resolved_pair((-1, as_bf16), (0, 1)) == (as_bf16, as_bf16)
    assert resolved_pair((0, as_bf16), (1, 1)) == (0, 0)
    assert resolved_pair((1, -1), (0, 2)) == (1, 2)


@pytest.mark.parametrize("best", [True, False])
def test_a_tactic_that_computes_the_layer_is_tuned_as_fc1s(
    best: bool, module: RecordingModule, profiler: Profiler
) -> None:
    tactics = caller(module)
    wanted = (STREAMED, STREAMED) if best else two_others(0, tactics())
    profiler.times = {(1, wanted[0]): 0.5, (2, offered(0, 2)[-1]): 0.25}
    with autotune(True):
        assert tactics() == wanted
    timed = {(gemm, tactic) for gemm, tactic, _ in profiler.asked}
    assert (1, STREAMED) in timed and (2, STREAMED) not in timed
    launched = {(launch["tactic_fc1"], launch["tactic_fc2"]) for launch in module.launches}
    assert {pair for pair in launched if STREAMED in pair} == {(STREAMED, STREAMED)}
    assert tactics() == wanted


def test_a_call_of_many_tokens_finds_and_leaves_the_tactics_of_few(
    module: RecordingModule, profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM warms up: a batch of the most tokens tunes all profiles, also those whose best streams the layer.

    The next layer, and the next process, find these. The largest profile's tactic serves larger batches if it takes
    them.
    """
    cache = tmp_path / "tactics.json"
    lines = logged(monkeypatch)
    few, many = caller(module), caller(module, num_tokens=instances.FUSED_MOE_ROUTED_ROWS)
    profiler.times = {(1, STREAMED): 0.5}
    default, _ = many()
    with autotune(True, cache=str(cache)):
        pair = many()
        asked = len(profiler.asked)
        assert (1, STREAMED) in {(gemm, tactic) for gemm, tactic, _ in profiler.asked}
        assert many() == pair
    assert pair[0] == default
    assert STREAMED not in pair
    assert few() == (STREAMED, STREAMED)
    AutoTuner.get().clear_cache()
    with autotune(True, cache=str(cache)):
        assert many() == pair
        assert few() == (STREAMED, STREAMED)
    assert len(profiler.asked) == asked
    assert not [line for line in lines if "cached tactic" in line]
