# SPDX-License-Identifier: Apache-2.0
"""``router_top_k`` on the CPU, and on a GPU that serves the family: bounds, order of ties, arguments, graphs,
compilation."""

from __future__ import annotations

import pytest
import torch
from operator_calls import on

from flashinfer.fused_moe import router_top_k
from flashinfer.testing.router_reference import (
    OPERANDS,
    check_one_element,
    check_routed,
    make_router_inputs,
    with_one_element,
    with_small_rows,
)
from flashinfer_sm12x.doctor.probe.mma import accumulation_on


@pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
def test_random_shapes(device: torch.device, adds: bool, norms: bool) -> None:
    for _ in range(6):
        seed = int(torch.randint(2**31, ()))
        print("seed", seed)
        generator = torch.Generator().manual_seed(seed)
        m, experts, chunks = (int(torch.randint(1, high, (), generator=generator)) for high in (40, 300, 500))
        top_k = int(torch.randint(1, min(experts, 32) + 1, (), generator=generator))
        bias, as_vllm = seed % 2 == 0, seed % 3 == 0
        inputs = make_router_inputs(m, 8 * chunks, experts, top_k, seed, adds, norms, bias, as_vllm)
        arguments = on(device, inputs)
        routed = router_top_k(**arguments)
        check_routed(routed, arguments, accumulation_on(device))
        again = router_top_k(**arguments)
        assert all(torch.equal(a, b) for a, b in zip(routed[:4], again[:4], strict=True))


def test_what_is_not_computed_is_the_argument(device: torch.device) -> None:
    arguments = on(device, make_router_inputs(3, 64, 8, 2, 1))
    routed = router_top_k(**arguments)
    assert routed.hidden_states is arguments["hidden_states"]
    assert routed.residual is None
    added = router_top_k(**arguments, residual=torch.ones_like(arguments["hidden_states"]))
    assert added.hidden_states is added.residual


def test_of_equal_logits_the_first_experts_are_taken(device: torch.device) -> None:
    arguments = on(device, make_router_inputs(5, 64, 70, 4, 2))
    arguments["weight"].zero_()
    routed = router_top_k(**arguments)
    assert routed.topk_ids.tolist() == [[0, 1, 2, 3]] * 5
    assert routed.topk_weights.tolist() == [[0.25] * 4] * 5


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_ids_are_valid_whatever_the_logits_are(device: torch.device, value: float) -> None:
    arguments = on(device, make_router_inputs(2, 64, 40, 4, 3, bias=True))
    arguments["bias"][7:] = value
    routed = router_top_k(**arguments)
    ids = routed.topk_ids.cpu()
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 40 for row in ids.tolist())
    if value == torch.inf:
        assert routed.topk_weights.tolist() == [[0.25] * 4] * 2
    elif value != value:
        assert (ids >= 7).all()
    else:
        assert (ids < 7).all()


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.25])
def test_the_norm_of_small_rows(device: torch.device, eps: float) -> None:
    arguments = on(device, with_small_rows(make_router_inputs(7, 264, 9, 3, 8, adds=True, norms=True, bias=True), eps))
    check_routed(router_top_k(**arguments), arguments)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("operand", OPERANDS)
def test_what_is_no_number_stays_where_it_belongs(device: torch.device, operand: str, value: float) -> None:
    arguments = on(device, make_router_inputs(19, 264, 70, 5, 9, adds=True, norms=True, bias=True))
    changed = with_one_element(arguments, operand, value)
    before, after = router_top_k(**arguments), router_top_k(**changed)
    check_routed(after, changed, accumulation_on(device))
    check_one_element(before, after, operand)


def test_no_tokens(device: torch.device) -> None:
    arguments = on(device, make_router_inputs(1, 64, 8, 2, 4))
    arguments["hidden_states"] = arguments["hidden_states"][:0]
    assert router_top_k(**arguments).topk_ids.shape == (0, 2)


@pytest.mark.gpu
def test_a_captured_graph_replays(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("graphs are of CUDA")
    arguments = on(device, make_router_inputs(20, 2880, 128, 4, 7, adds=True, norms=True, bias=True))
    eager = router_top_k(**arguments, constant_weights=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = router_top_k(**arguments, constant_weights=True)
    for _ in range(3):
        captured.topk_ids.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True) if a is not None)
