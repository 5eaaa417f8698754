# SPDX-License-Identifier: Apache-2.0
"""A tactic in a cache file is a row's name: it is that row in another table, too, and a number is never one. It is of
calls of the same dtypes and layouts, on a GPU of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_recording
import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune
from moe_recording import WORKSPACE, RecordingModule, layer_arguments

import flashinfer
from flashinfer.fused_moe import sm12x_launch
from flashinfer.gemm import sm12x_dense_launch
from flashinfer.sm12x import devices, instances, tune
from flashinfer.sm12x.instances import DENSE_INSTANCES
from flashinfer.testing import DenseCase, make_dense_inputs, make_group_gemm_inputs
from flashinfer.testing.dense_reference import TOKENS

BEST = "mxfp8_m128_k128"  # what the profiler finds fastest; no planner's choice for the sizes below
BEST_DENSE = "dense_mxfp4_m8_w3"
# Calls that are not tuned together, most of them of the same shapes.
KINDS: dict[str, list[Any]] = {
    "MoE": [
        {},
        {"top_k": 2},
        {"hidden": 192},
        {"inter": 128},
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
    "dense": [
        *(DenseCase(8, 256, 640, tokens=tokens) for tokens in TOKENS),
        *(DenseCase(8, 256, 640, out_dtype=dtype) for dtype in (torch.float32, torch.float16)),
        DenseCase(8, 512, 640),
    ],
}
Call = Callable[..., str]
EVERY_OPERATOR = pytest.mark.parametrize("call", list(KINDS), indirect=True)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, module: RecordingModule) -> list[str]:
    """The tactics that were timed; :data:`BEST` is the fastest."""
    asked: list[str] = []

    def time(tuner: Any, runner: Any, inputs: Any, tactic: str, config: Any, **named: Any) -> float:
        asked.append(tactic)
        return 0.5 if tactic in (BEST, BEST_DENSE) else 1.0

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", time)
    return asked


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Another process begins: nothing is left but files."""

    def forget() -> None:
        sm12x_launch.default_tactics.cache_clear()
        tune._cached.clear()
        AutoTuner.get().clear_cache()

    return forget


@pytest.fixture(params=["MoE", "grouped GEMM"])
def call(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    module: RecordingModule,
    profiled: list[str],
    restart: Callable[[], None],
) -> Call:
    """An operator that answers with the name of the tactic launched; ``kind``: one of :data:`KINDS`."""
    restart()
    launched: list[str] = []

    class Recorder:
        def sm12x_group_gemm_workspace_size(self) -> int:
            return WORKSPACE

        def sm12x_group_gemm_run(self, *given: Any) -> None:
            launched.append(instances.INSTANCES[given[7]].name)

        def sm12x_dense_gemm_workspace_size(self, *_: int) -> int:
            return WORKSPACE

        def sm12x_dense_run(self, *given: Any) -> None:
            launched.append(DENSE_INSTANCES[given[-4]].name)

    def layer(kind: int = 0) -> str:
        flashinfer.cutlass_fused_moe(**layer_arguments(**KINDS["MoE"][kind]), tune_max_num_tokens=8)
        return instances.INSTANCES[module.launches[-1]["tactic_fc1"]].name

    def gemm(kind: int = 0) -> str:
        dtype, out_dtype = KINDS["grouped GEMM"][kind]
        made = make_group_gemm_inputs([3, 5], 64, 96, 0, dtype=dtype)
        flashinfer.gemm.group_gemm_mxfp4_nt_groupwise(**made, out_dtype=out_dtype)
        return launched[-1]

    def dense(kind: int = 0) -> str:
        inputs = make_dense_inputs(KINDS["dense"][kind], 0)
        flashinfer.gemm.dense_block_scaled(*inputs.arguments, **inputs.named)
        return launched[-1]

    if request.param == "MoE":
        return layer
    module.backend.recorded = Recorder()
    monkeypatch.setattr(sm12x_dense_launch, "_multiply_dequantized", lambda *_: launched.append("dequantized"))
    return gemm if request.param == "grouped GEMM" else dense


def test_a_file_holds_names_and_one_that_is_gone_is_reported_and_not_used(
    call: Call, profiled: list[str], restart: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables' places and numbers are of one version."""
    cache = tmp_path / "tactics.json"
    default = call()
    with autotune(True, cache=str(cache)):
        assert call() == BEST != default
    profiled.clear()
    text = cache.read_text()
    assert f'"{BEST}"' in text
    cache.write_text(text.replace(BEST, "mxfp8_m128_k8"))
    restart()
    lines = moe_recording.logged(monkeypatch)
    with autotune(False, cache=str(cache)):
        assert call() == default
    assert any("cached tactic 'mxfp8_m128_k8'" in line for line in lines), lines
    assert profiled == []


@EVERY_OPERATOR
def test_calls_of_other_dtypes_and_layouts_are_tuned_apart(
    call: Call, restart: Callable[[], None], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """This holds within a process, and through a cache file in another one."""
    kinds = range(len(KINDS[request.node.callspec.params["call"]]))

    def tuned_kinds() -> list[int]:
        return [kind for kind in kinds if call(kind) in (BEST, BEST_DENSE)]

    for tuned in kinds:
        cache = str(tmp_path / f"{tuned}.json")
        with autotune(True, cache=cache):
            call(tuned)
        assert tuned_kinds() == [tuned]
        restart()
        with autotune(False, cache=cache):
            assert tuned_kinds() == [tuned]
        restart()


@EVERY_OPERATOR
def test_a_gpus_tactics_are_not_those_of_another(
    call: Call, restart: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = str(tmp_path / "tactics.json")

    def is_tuned_on(name: str) -> bool:
        monkeypatch.setattr(devices, "gpu_name", lambda device: name)
        return call() in (BEST, BEST_DENSE)

    with autotune(True, cache=cache):
        assert is_tuned_on("NVIDIA GB10")
    assert not is_tuned_on("NVIDIA GeForce RTX 5090")
    assert is_tuned_on("NVIDIA GB10")
    restart()
    with autotune(False, cache=cache):
        assert is_tuned_on("NVIDIA GB10")
        assert not is_tuned_on("NVIDIA GeForce RTX 5090")


def test_numbers_are_what_names_say_and_no_place_of_before() -> None:
    assert instances.tactic("mxfp8_m8_k256") == 1_008_256
    assert instances.tactic("mxfp8_as_bf16_m40_k128") == 2_040_128
    assert instances.tactic("bf16_m64_k128") == 3_064_128
    assert instances.tactic("stream_mxfp8_as_bf16_m16") == 5_016_256
    assert instances.tactic("stream_bf16_m8") == 6_008_256
    assert instances.tactic("stream_bf16_m8_w3") == 6_008_384
    with pytest.raises(ValueError, match=r"^there is no tactic 'moe_bf16_t8'; there are mxfp8_m8_k128, "):
        instances.tactic("moe_bf16_t8")
