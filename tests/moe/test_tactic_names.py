# SPDX-License-Identifier: Apache-2.0
"""A tactic in a cache file is a row's name: it is that row in another table, too, and a number is never one. It is of calls
of the same dtypes and layouts, on a GPU of the same name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_recording
import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune
from moe_recording import WORKSPACE, RecordingModule, layer_arguments

import flashinfer
from flashinfer.fused_moe import sm12x_autotuner, sm12x_launch, sm12x_operator, sm12x_planner
from flashinfer.gemm import sm12x_group_gemm
from flashinfer.jit.sm12x import instances
from flashinfer.jit.sm12x.instances import GEMM_INSTANCES, INSTANCES, MAIN_MODULE, SM12X
from flashinfer.sm12x import devices, tune
from flashinfer.testing import make_group_gemm_inputs

BEST = "mxfp8_m128_k128"  # what the profiler finds fastest; no planner's choice for the sizes below
# Calls of the same shapes that are not tuned together.
KINDS: dict[str, list[Any]] = {
    "MoE": [
        {},
        {"swizzled_input_sf": False},
        {"output_dtype": torch.float16},
        {"mode": 1},
        {"mode": 1, "input_dtype": torch.float16},
    ],
    "grouped GEMM": [
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e5m2, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float16),
    ],
}


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, module: RecordingModule) -> list[str]:
    """The tactics that were timed; :data:`BEST` is the fastest."""
    asked: list[str] = []

    def time(tuner: Any, runner: Any, inputs: Any, tactic: str, config: Any, **named: Any) -> float:
        asked.append(tactic)
        return 0.5 if tactic == BEST else 1.0

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", time)
    monkeypatch.setattr(AutoTuner, "_get_l2_cache_size_in_bytes", lambda tuner, device_id=None: 0)
    return asked


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Another process begins: nothing is left but files."""

    def forget() -> None:
        sm12x_launch.default_tactics.cache_clear()
        tune._remembered.clear()
        AutoTuner.get().clear_cache()

    return forget


@pytest.fixture(params=["MoE", "grouped GEMM"])
def call(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    module: RecordingModule,
    profiled: list[str],
    restart: Callable[[], None],
) -> Callable[..., int]:
    """An operator that answers with the number of the tactic launched; ``kind``: one of :data:`KINDS`."""
    if request.param == "MoE":
        restart()

        def layer(kind: int = 0) -> int:
            flashinfer.cutlass_fused_moe(**layer_arguments(**KINDS["MoE"][kind]), tune_max_num_tokens=8)
            return int(module.launches[-1]["tactic_fc1"])

        return layer

    launched: list[int] = []

    class Recorder:
        def sm12x_group_gemm_workspace_size(self) -> int:
            return WORKSPACE

        def sm12x_group_gemm_run(self, *given: Any) -> None:
            launched.append(given[7])

    module.backend.recorded = Recorder()
    restart()

    def gemm(kind: int = 0) -> int:
        dtype, out_dtype = KINDS["grouped GEMM"][kind]
        made = make_group_gemm_inputs([3, 5], 64, 96, 0, dtype=dtype)
        flashinfer.gemm.group_gemm_mxfp4_nt_groupwise(**made, out_dtype=out_dtype)
        return launched[-1]

    return gemm


TABLES = {"INSTANCES": INSTANCES, "SM12X": SM12X, "MAIN_MODULE": MAIN_MODULE, "GEMM_INSTANCES": GEMM_INSTANCES}


def renumber(monkeypatch: pytest.MonkeyPatch, tables: dict[str, tuple[instances.Instance, ...]]) -> dict[str, int]:
    """Replace the tables everywhere; the places of the rows' names."""
    numbers = {row.name: number for number, row in enumerate(tables["INSTANCES"])}
    monkeypatch.setattr(instances, "_PLACES", numbers)
    for place in (
        instances,
        sm12x_planner,
        sm12x_autotuner,
        sm12x_launch,
        sm12x_operator,
        sm12x_group_gemm,
        moe_recording,
    ):
        for name in tables.keys() & vars(place).keys():
            monkeypatch.setattr(place, name, tables[name])
    return numbers


def test_a_file_serves_a_process_whose_rows_have_moved(
    call: Callable[[], int],
    profiled: list[str],
    restart: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = str(tmp_path / "tactics.json")
    before = instances.index_of(BEST)
    assert call() != before
    with autotune(True, cache=cache):
        assert call() == before
    profiled.clear()

    def other(rows: tuple[instances.Instance, ...]) -> tuple[instances.Instance, ...]:
        return tuple(dataclasses.replace(row, stages=row.stages + 1) for row in reversed(rows))

    tables = {name: other(rows) for name, rows in TABLES.items()}
    after = renumber(monkeypatch, tables)[BEST]
    assert after != before
    restart()
    with autotune(False, cache=cache):
        assert call() == after
    assert profiled == []


def test_a_name_that_is_gone_is_told_and_not_used(
    call: Callable[[], int],
    restart: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = str(tmp_path / "tactics.json")
    default = INSTANCES[call()].name
    with autotune(True, cache=cache):
        call()
    left = {name: tuple(row for row in rows if row.name != BEST) for name, rows in TABLES.items()}
    numbers = renumber(monkeypatch, left)
    restart()
    lines = moe_recording.logged(monkeypatch)
    with autotune(False, cache=cache):
        assert call() == numbers[default]
    assert any(f"cached tactic '{BEST}'" in line for line in lines), lines


def test_calls_of_other_dtypes_and_layouts_are_tuned_apart(
    call: Callable[..., int], restart: Callable[[], None], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a process, and by a file in another one."""
    best, kinds = instances.index_of(BEST), range(len(KINDS[request.node.callspec.params["call"]]))
    for tuned in kinds:
        cache = str(tmp_path / f"{tuned}.json")
        with autotune(True, cache=cache):
            assert call(tuned) == best
        assert [kind for kind in kinds if call(kind) == best] == [tuned]
        restart()
        with autotune(False, cache=cache):
            assert [kind for kind in kinds if call(kind) == best] == [tuned]
        restart()


def test_a_gpus_tactics_are_not_those_of_another(
    call: Callable[..., int], restart: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, cache = instances.index_of(BEST), str(tmp_path / "tactics.json")

    def on(name: str) -> int:
        monkeypatch.setattr(devices, "gpu_name", lambda device: name)
        return call()

    with autotune(True, cache=cache):
        assert on("NVIDIA GB10") == best
    assert [on("NVIDIA GeForce RTX 5090"), on("NVIDIA GB10")] == [on("a third"), best]
    assert on("a third") != best
    restart()
    with autotune(False, cache=cache):
        assert on("NVIDIA GB10") == best != on("NVIDIA GeForce RTX 5090")


def test_numbers_are_what_names_say_and_no_place_of_before() -> None:
    assert instances.tactic("mxfp8_m8_k256") == 1_008_256
    assert instances.tactic("mxfp8_as_bf16_m40_k128") == 2_040_128
    assert instances.tactic("bf16_m64_k128") == 3_064_128
    assert instances.tactic("stream_mxfp8_as_bf16_m16") == 5_016_256
    assert instances.tactic("stream_bf16_m8") == 6_008_256
    assert instances.tactic("stream_bf16_m8_w3") == 6_008_384
    with pytest.raises(ValueError, match=r"^there is no tactic 'moe_bf16_t8'; there are mxfp8_m8_k128, "):
        instances.tactic("moe_bf16_t8")
