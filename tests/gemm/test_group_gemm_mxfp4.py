# SPDX-License-Identifier: Apache-2.0
"""``group_gemm_mxfp4_nt_groupwise`` against the float64 reference, on the CPU and, every instance forced, on a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.gemm import gemm_base, group_gemm_mxfp4_nt_groupwise, sm12x_group_gemm
from flashinfer.sm12x import devices
from flashinfer.sm12x.instances import GEMM_INSTANCES
from flashinfer.testing import check_within_bound, group_gemm_reference, make_group_gemm_inputs
from flashinfer.testing.moe_inputs import group_gemm_inputs_with_not_numbers
from flashinfer_sm12x.doctor.probe.mma import accumulation_on


def with_tactic(inputs: dict[str, torch.Tensor], tactic: int | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """The operator with a forced instance, which its public signature has no name for."""
    options: dict[str, Any] = {"out": out, "out_dtype": None, "tiles": [1, 128, 128, 128], "swap_ab": True}
    return sm12x_group_gemm.group_gemm(sm12x_group_gemm.GroupGemmCall(**inputs, **options, tactic=tactic))


def _check(
    sizes: list[int],
    n: int,
    k: int,
    device: torch.device,
    seed: int = 0,
    dtype: torch.dtype = torch.float8_e4m3fn,
    out_dtype: torch.dtype = torch.float16,
    data: str = "normal",
) -> None:
    inputs = make_group_gemm_inputs(sizes, n, k, seed, device, dtype, data)  # type: ignore[arg-type]
    reference, bound = group_gemm_reference(**inputs, accumulation=accumulation_on(device))
    if data == "lattice":
        assert (bound == 0).all(), "lattice data is exact"
    tactics: list[int | None] = [None]
    if device.type == "cuda":
        tactics += [row.index for row in GEMM_INSTANCES]
    for tactic in tactics:
        results = []
        for _ in range(2):
            out = torch.full((sum(sizes), n), torch.nan, dtype=out_dtype, device=device)
            result = with_tactic(inputs, tactic, out)
            assert result is out
            results.append(out)
        check_within_bound(results[0], reference, bound, f"sizes {sizes}, n {n}, k {k}, tactic {tactic}, seed {seed}")
        assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16)), "repeats bit for bit"


# Groups, N and K at both ends and around the tiles of 128.
CORNERS = [
    ([1], 8, 32), ([4, 0, 9], 136, 288), ([0, 0, 130, 1], 120, 96), ([128, 128, 128], 128, 128), ([257, 3], 32, 192),
    ([5, 12], 720, 736), ([5, 12], 2880, 736),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("data", ["normal", "lattice"])
def test_corners(data: str, dtype: torch.dtype, device: torch.device) -> None:
    for place, (sizes, n, k) in enumerate(CORNERS):
        out_dtype = (torch.bfloat16, torch.float16)[place % 2]
        _check(sizes, n, k, device, seed=n + k, dtype=dtype, out_dtype=out_dtype, data=data)


def test_all_groups_empty(device: torch.device) -> None:
    inputs = make_group_gemm_inputs([0, 0], 64, 96, 2, device)
    assert group_gemm_mxfp4_nt_groupwise(**inputs).shape == (0, 64)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=6).filter(any),
    st.integers(1, 40).map(lambda i: 8 * i),
    st.integers(1, 20).map(lambda i: 32 * i),
    st.integers(0, 2**31),
)
def test_random_groups(device: torch.device, sizes: list[int], n: int, k: int, seed: int) -> None:
    _check(sizes, n, k, device, seed)


def test_public_function_allocates_and_takes_out(device: torch.device) -> None:
    inputs = make_group_gemm_inputs([3, 5], 64, 96, 3, device)
    expected = group_gemm_mxfp4_nt_groupwise(**inputs)
    assert (expected.dtype, expected.shape) == (torch.bfloat16, (8, 64))
    half = group_gemm_mxfp4_nt_groupwise(**inputs, out_dtype=torch.float16)
    out = torch.empty_like(half)
    assert group_gemm_mxfp4_nt_groupwise(**inputs, out=out) is out
    assert torch.equal(out, half)
    # Upstream's tile arguments keep working.
    for tile_n in (32, 64, 128):
        for swap_ab in (True, False):
            again = group_gemm_mxfp4_nt_groupwise(**inputs, tile_n=tile_n, swap_ab=swap_ab, skip_check=True)
            assert torch.equal(again, expected)


def test_names_and_signature_are_upstreams() -> None:
    assert flashinfer.gemm.group_gemm_mxfp4_nt_groupwise is flashinfer.gemm.group_gemm_mxfp8_mxfp4_nt_groupwise
    upstream = gemm_base._upstream.group_gemm_mxfp8_mxfp4_nt_groupwise
    ours = inspect.signature(group_gemm_mxfp4_nt_groupwise).parameters
    theirs = inspect.signature(inspect.unwrap(upstream)).parameters
    assert [*theirs, "skip_check"] == list(ours)
    assert all(ours[name].default == parameter.default for name, parameter in theirs.items())
    for capability in (90, 100, 120, 121):
        assert group_gemm_mxfp4_nt_groupwise.is_compute_capability_supported(
            capability
        ) == upstream.is_compute_capability_supported(capability)


def test_other_devices_are_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_group_gemm_inputs([3, 5], 64, 128, 4)
    monkeypatch.setattr(devices, "serves", lambda device: False)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        gemm_base._upstream,
        "group_gemm_mxfp8_mxfp4_nt_groupwise",
        lambda **named: seen.update(named),
    )
    group_gemm_mxfp4_nt_groupwise(**inputs, mma_sm=2, tile_m=128, tile_n=192, tile_k=256, swap_ab=False)
    assert all(seen.pop(name) is given for name, given in inputs.items())
    tiles = {"mma_sm": 2, "tile_m": 128, "tile_n": 192, "tile_k": 256, "swap_ab": False}
    assert seen == tiles | {"out": None, "out_dtype": None, "skip_check": False}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_no_number_stays_in_its_row_or_column(dtype: torch.dtype, device: torch.device) -> None:
    accumulation = accumulation_on(device)
    inputs = make_group_gemm_inputs([9, 0, 5], 136, 160, 10, device, dtype)
    for what, call in group_gemm_inputs_with_not_numbers(inputs, 11):
        out = torch.full((14, 136), torch.nan, dtype=torch.float16, device=device)
        group_gemm_mxfp4_nt_groupwise(**call, out=out)
        check_within_bound(out, *group_gemm_reference(**call, accumulation=accumulation), what)


def test_unknown_tactic_is_refused(device: torch.device) -> None:
    inputs = make_group_gemm_inputs([3, 5], 64, 96, 7, device)
    with pytest.raises(ValueError, match=r"^tactic is 99; it must be one of \[0, 1"):
        with_tactic(inputs, 99)


@pytest.mark.gpu
def test_replays_from_a_cuda_graph(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    inputs = make_group_gemm_inputs([3, 40, 0, 5], 128, 288, 8, device)
    expected = group_gemm_mxfp4_nt_groupwise(**inputs)
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group_gemm_mxfp4_nt_groupwise(**inputs, out=out)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
