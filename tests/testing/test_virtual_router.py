# SPDX-License-Identifier: Apache-2.0
"""The router, as compiled for ``sm_121a``, on the virtual SM121 with its watchers on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashinfer.fused_moe import router_top_k
from flashinfer.testing.router_reference import check_routed, make_router_inputs
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

pytestmark = pytest.mark.slow

ALL_WATCHERS = 31


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    with virtual_device("sm_121a", watch=ALL_WATCHERS) as made:
        yield made


def run(device: VirtualDevice, arguments: dict[str, Any], **named: Any) -> Any:
    routed = router_top_k(**arguments, **named)
    assert [launch.kernel.split("_kernel")[0].split("router")[-1] for launch in device.launches[-2:]] == [
        "_logits",
        "_top_k",
    ]
    assert all(launch.clean for launch in device.launches), device.launches
    return routed


# gpt-oss's, with one token, a whole tile, and a tile in part; K longer than registers hold, and shorter than a warp; experts
# that leave warps idle, and as many as may be; as many as are chosen.
@pytest.mark.parametrize(
    ("m", "k", "experts", "top_k"),
    [(1, 2880, 128, 4), (8, 2880, 32, 4), (19, 2880, 32, 4), (3, 3656, 5, 5), (9, 8, 6, 1), (2, 64, 512, 32)],
    ids=str,
)
@pytest.mark.parametrize("constant_weights", [False, True], ids=["waits", "weights first"])
def test_shapes(device: VirtualDevice, m: int, k: int, experts: int, top_k: int, constant_weights: bool) -> None:
    seed = m + k + experts
    print("seed", seed)
    arguments = make_router_inputs(m, k, experts, top_k, seed, adds=True, norms=True, bias=True)
    check_routed(run(device, arguments, constant_weights=constant_weights), arguments)


@pytest.mark.parametrize(("adds", "norms", "bias"), [(False, False, False), (True, False, True), (False, True, False)])
def test_parts(device: VirtualDevice, adds: bool, norms: bool, bias: bool) -> None:
    arguments = make_router_inputs(5, 264, 9, 3, 1, adds=adds, norms=norms, bias=bias)
    check_routed(run(device, arguments), arguments)


def test_rows_too_long_for_a_tile(device: VirtualDevice) -> None:
    arguments = make_router_inputs(3, 20_480, 2, 2, 2, norms=True)
    check_routed(run(device, arguments), arguments)
    assert device.launches[-2].grid[0] == 2  # tiles of two tokens


@pytest.mark.parametrize("value", [0.0, torch.inf, -torch.inf, torch.nan])
def test_ties_and_what_is_no_number(device: VirtualDevice, value: float) -> None:
    """As the CPU chooses: of equal logits the first expert's; NaN before all; ids are valid and differ."""
    arguments = make_router_inputs(2, 64, 70, 5, 3, bias=True)
    arguments["weight"][2:] = 0
    arguments["bias"][2:] = -0.0
    arguments["bias"][40:] = value
    routed = run(device, arguments)
    with_nan_first = routed.logits.nan_to_num(nan=torch.inf, posinf=torch.finfo(torch.float32).max)
    order = with_nan_first.argsort(dim=1, descending=True, stable=True)[:, :5]
    assert torch.equal(routed.topk_ids.long(), order)


def test_launches_behind_each_other(device: VirtualDevice) -> None:
    """A router whose tokens are the sums of the one in front, its weights fetched before that has ended."""
    first = make_router_inputs(4, 128, 16, 2, 4, adds=True, norms=True)
    routed = run(device, first, constant_weights=True)
    second = {**first, "hidden_states": routed.hidden_states, "residual": routed.residual}
    check_routed(run(device, second, constant_weights=True), second)


def test_weights_that_the_launch_in_front_writes(device: VirtualDevice) -> None:
    """The rows that one router gives are the other's weights, so it may not fetch them early."""
    first = make_router_inputs(16, 128, 16, 2, 5, adds=True)
    rows = run(device, first).hidden_states
    second = {**make_router_inputs(3, 128, 16, 2, 6), "weight": rows}
    check_routed(run(device, second), second)
