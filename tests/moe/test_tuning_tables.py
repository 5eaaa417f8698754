# SPDX-License-Identifier: Apache-2.0
"""A saved tactic is a row's number: behind another table of instances a cache's entry is none."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune
from moe_recording import WORKSPACE, RecordingModule, meta_arguments

import flashinfer
from flashinfer.fused_moe import sm12x_dispatch, sm12x_known_calls, sm12x_moe, sm12x_tuning
from flashinfer.fused_moe.sm12x_tuning import table_digest
from flashinfer.gemm import sm12x_group_gemm
from flashinfer.jit.sm12x.instances import GEMM_INSTANCES, INSTANCES, Instance
from flashinfer.testing import make_group_gemm_inputs

Table = tuple[Instance, ...]
BEST = 4  # what the profiler finds fastest; no planner's choice for the sizes below
CHANGED = 3  # the row that other tables differ in
COLUMNS = {
    "activation": "bf16", "token_tile": 56, "k_tile": 256, "stages": 5, "blocks_per_sm": 3, "default": False,
    "mma_warps": 12, "widens": True,
}  # fmt: skip


def changed(table: Table, column: str) -> Table:
    (row,) = [row for row in table if row.index == CHANGED]
    assert getattr(row, column) != COLUMNS[column]
    return tuple(dataclasses.replace(each, **{column: COLUMNS[column]}) if each is row else each for each in table)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, module: RecordingModule) -> list[int]:
    """The tactics that were timed; :data:`BEST` is the fastest."""
    asked: list[int] = []

    def time(tuner: Any, runner: Any, inputs: Any, tactic: int, config: Any, **named: Any) -> float:
        asked.append(tactic)
        return 0.5 if tactic == BEST else 1.0

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", time)
    monkeypatch.setattr(AutoTuner, "_get_l2_cache_size_in_bytes", lambda tuner, device_id=None: 0)
    AutoTuner.get().clear_cache()
    return asked


@pytest.fixture(params=["MoE", "grouped GEMM"])
def operator(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, module: RecordingModule, profiled: list[int]
) -> tuple[Callable[[], int], Callable[[Table], None], Table]:
    """A call that answers with the tactic launched, what makes a process of another table, and that table."""

    def restart() -> None:
        for place in (sm12x_moe, sm12x_group_gemm):
            monkeypatch.setattr(place, "_plans", {})
        monkeypatch.setattr(sm12x_known_calls, "_known", {})
        AutoTuner.get().clear_cache()

    if request.param == "MoE":
        arguments = meta_arguments(0)

        def layer() -> int:
            flashinfer.cutlass_fused_moe(**arguments, tune_max_num_tokens=8)
            return module.launches[-1]["tactic_fc1"]

        def use_for_layers(table: Table) -> None:
            monkeypatch.setattr(sm12x_tuning, "INSTANCES", table)
            restart()

        return layer, use_for_layers, INSTANCES

    launched: list[int] = []

    class Recorder:
        def sm12x_group_gemm_workspace_size(self, *sizes: int) -> int:
            return WORKSPACE

        def sm12x_group_gemm_run(self, *given: Any) -> None:
            launched.append(given[7])

    monkeypatch.setattr(sm12x_dispatch, "group_gemm_module", Recorder)
    monkeypatch.setattr(sm12x_group_gemm, "device_support_pdl", lambda device: True)
    restart()
    operands = {name: tensor.to("meta") for name, tensor in make_group_gemm_inputs([3, 5], 64, 96, 0).items()}

    def gemm() -> int:
        sm12x_group_gemm.group_gemm(**operands, tiles=(1, 128, 128, 128, True), out=None, out_dtype=torch.bfloat16)
        return launched[-1]

    def use_for_gemms(table: Table) -> None:
        monkeypatch.setattr(sm12x_group_gemm, "GEMM_INSTANCES", table)
        restart()

    return gemm, use_for_gemms, GEMM_INSTANCES


def test_a_cache_of_another_table_is_not_used(
    operator: tuple[Callable[[], int], Callable[[Table], None], Table], profiled: list[int], tmp_path: Path
) -> None:
    call, use, table = operator
    cache = str(tmp_path / "tactics.json")
    default = call()
    assert default != BEST
    with autotune(True, cache=cache):
        assert call() == BEST
    profiled.clear()
    tables = {column: changed(table, column) for column in COLUMNS}
    tables["a row less"] = tuple(row for row in table if row.index != CHANGED)
    for name, other in tables.items():
        use(other)
        with autotune(False, cache=cache):
            assert call() == default, name
    assert profiled == []
    use(copy.deepcopy(table))  # the same rows, as another process has them
    with autotune(False, cache=cache):
        assert call() == BEST
    assert profiled == []
    use(tables["stages"])
    with autotune(True, cache=cache):
        call()
    assert profiled, "tuning measures anew where the table is another"


@pytest.mark.parametrize("table", [INSTANCES, GEMM_INSTANCES], ids=["INSTANCES", "GEMM_INSTANCES"])
def test_the_digest_is_of_every_column(table: Table) -> None:
    assert {field.name for field in dataclasses.fields(Instance)} == {"index", *COLUMNS}
    digests = {table_digest(changed(table, column)) for column in COLUMNS}
    digests.add(table_digest(tuple(dataclasses.replace(row, index=row.index + 1) for row in table)))
    assert len(digests | {table_digest(table)}) == len(COLUMNS) + 2
    assert table_digest(copy.deepcopy(table)) == table_digest(table)
