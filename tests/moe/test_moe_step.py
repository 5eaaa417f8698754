# SPDX-License-Identifier: Apache-2.0
"""``moe_step`` and ``router_logits`` on the CPU, and on a GPU that serves the family: bit for bit ``router_top_k`` and
``cutlass_fused_moe``."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from operator_calls import on

from flashinfer.fused_moe import SM12xMoELayer, cutlass_fused_moe, moe_step, router_logits, router_top_k
from flashinfer.fused_moe.sm12x_router import choose_experts
from flashinfer.testing import MoECase, make_moe_inputs
from flashinfer.testing.router_reference import make_router_inputs


def layer(device: torch.device, case: MoECase, seed: int) -> dict[str, Any]:
    """A layer's arguments, without ids and weights."""
    print("seed", seed, case)
    arguments = on(device, make_moe_inputs(case, seed).arguments())
    del arguments["token_selected_experts"], arguments["token_final_scales"]
    return arguments


def random_logits(device: torch.device, tokens: int, experts: int, seed: int) -> torch.Tensor:
    """Random logits with ties, both infinities and NaN."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator).bfloat16().float()
    for value in (torch.nan, torch.inf, -torch.inf):
        logits[torch.rand(tokens, experts, generator=generator) < 0.5 / experts] = value
    return logits.to(device)


# One token, as many as one warp routes, one more pair, and what is no stream; experts of which some are another rank's.
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 128, 4), (8, 128, 4), (3, 500, 10), (32, 9, 1), (9, 32, 4), (300, 8, 2)]
)
@pytest.mark.parametrize("mode", [1, 2], ids=["W4A8", "W4A16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_layer_chooses_as_the_router_does(
    device: torch.device, tokens: int, experts: int, top_k: int, mode: int, ranks: int
) -> None:
    seed = int(torch.randint(2**31, ()))
    print("seed", seed)
    ranks = ranks if experts % ranks == 0 else 1
    arguments = layer(
        device, MoECase(tokens, 96, 64, experts, top_k, mode=mode, ep_size=ranks, ep_rank=ranks - 1), seed
    )
    logits = random_logits(device, tokens, experts, seed)
    padding = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.3
    barrier = torch.zeros(2, dtype=torch.int32, device=device)
    for is_padding in (None, padding.to(device)):
        weights, ids = choose_experts(logits, top_k, is_padding)
        wanted = cutlass_fused_moe(token_selected_experts=ids, token_final_scales=weights, **arguments)
        for given in (None, barrier, barrier):  # the counters' second use behind the first
            got = moe_step(router_logits=logits, top_k=top_k, is_padding=is_padding, barrier=given, **arguments)
            # The kernel's softmax is not torch's to the last bit; test_virtual_step.py has the router's, which is the
            # same.
            near = 0.0 if device.type == "cpu" else 2.0**-7
            assert torch.allclose(got.float().nan_to_num(7.0), wanted.float().nan_to_num(7.0), rtol=near, atol=near)
        got = moe_step(token_selected_experts=ids, token_final_scales=weights, barrier=barrier, **arguments)
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert barrier[0] == 0


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_logits_are_the_routers(device: torch.device, tokens: int) -> None:
    arguments = on(device, make_router_inputs(tokens, 264, 70, 5, 9, adds=True, norms=True, bias=True))
    whole = router_top_k(**arguments)
    top_k = arguments.pop("top_k")
    alone = router_logits(**arguments)
    assert all(torch.equal(getattr(alone, name), getattr(whole, name)) for name in alone._fields)
    weights, ids = choose_experts(alone.logits, top_k, None)
    assert torch.equal(ids, whole.topk_ids)
    assert torch.allclose(weights, whole.topk_weights, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 9}, "top_k is 9.*no more than there are experts"),
        ({"router_logits": torch.zeros(3, 7)}, "router_logits is .*shape"),
        ({"router_logits": torch.zeros(3, 8).half()}, "router_logits is .*float16"),
        ({"is_padding": torch.zeros(3)}, "is_padding is .*float32"),
        ({"is_padding": torch.zeros(2, dtype=torch.bool)}, "is_padding is .*shape"),
        ({"barrier": torch.zeros(3, dtype=torch.int32)}, "barrier is .*shape"),
        ({"barrier": torch.zeros(2)}, "barrier is .*float32"),
        ({"token_final_scales": torch.zeros(3, 2)}, "must be None beside them"),
        ({"token_selected_experts": torch.zeros(3, 2, dtype=torch.int32)}, "must be None beside them"),
        ({"router_logits": None}, "token_selected_experts"),
        ({"router_logits": None, "token_selected_experts": torch.zeros(3, 2, dtype=torch.int32)},
            "top_k is 2; it belongs to"),
        ({"fc1_bias": torch.zeros(8, 128)}, "fc1_bias is no argument"),
        ({"cluster_size": 2}, "cluster_size is 2"),
        ({"backend": "b12x"}, "backend is 'b12x'"),
        ({"next_weights": torch.zeros(64, 2).T}, "next_weights is .*it must be a contiguous tensor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_arguments(change: dict[str, Any], message: str) -> None:
    arguments = layer(torch.device("cpu"), MoECase(3, 64, 64, 8, 2, mode=2), 1)
    given: dict[str, Any] = {"router_logits": torch.zeros(3, 8), "top_k": 2}
    with pytest.raises((ValueError, TypeError), match=message):
        moe_step(**arguments, **given | change)


def test_padding_without_logits_is_refused() -> None:
    arguments = layer(torch.device("cpu"), MoECase(3, 64, 64, 8, 2, mode=2), 1)
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="is_padding is given; it belongs to router_logits"):
        moe_step(**arguments, token_selected_experts=ids, token_final_scales=None, is_padding=torch.zeros(3).bool())


def test_it_compiles(device: torch.device) -> None:
    arguments = layer(device, MoECase(3, 64, 64, 8, 2, mode=2), 2)
    logits, barrier = random_logits(device, 3, 8, 2), torch.zeros(2, dtype=torch.int32, device=device)
    plain = moe_step(**arguments, router_logits=logits, top_k=2)
    compiled = torch.compile(
        lambda: moe_step(**arguments, router_logits=logits, top_k=2, barrier=barrier), fullgraph=True
    )()
    assert torch.equal(compiled.nan_to_num(7.0), plain.nan_to_num(7.0))


@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_a_graph_holds_it(device: torch.device, tokens: int) -> None:
    if device.type == "cpu":
        pytest.skip("graphs are of CUDA")
    arguments = layer(device, MoECase(tokens, 2880, 2880, 32, 4, mode=2), 3)
    logits, barrier = random_logits(device, tokens, 32, 3), torch.zeros(2, dtype=torch.int32, device=device)
    named = {"router_logits": logits, "top_k": 4, "barrier": barrier}
    plain = moe_step(**arguments, **named)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [moe_step(**arguments, **named) for _ in range(3)]
    for _ in range(50):
        for output in captured:
            output.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(output.nan_to_num(7.0), plain.nan_to_num(7.0)) for output in captured)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("by", ["function", "layer"])
def test_logits_have_at_most_512_experts_of_all_ranks(device: torch.device, ranks: int, by: str) -> None:
    """More are refused before any launch, on each backend; ids of more experts are taken, where these have several
    ranks."""
    for experts in (512, 514):
        if experts // ranks > 512:
            continue
        arguments = layer(device, MoECase(2, 32, 32, experts, 2, mode=2, biases=False, ep_size=ranks), 3)
        logits = random_logits(device, 2, experts, 4)
        if by == "layer":
            names = inspect.signature(SM12xMoELayer).parameters
            step: Any = SM12xMoELayer(**{name: arguments.pop(name) for name in names if name in arguments}).run
        else:
            step = moe_step
        weights, ids = choose_experts(logits, 2, None)
        wanted = step(token_selected_experts=ids, token_final_scales=weights, **arguments)
        if experts == 512:
            got = step(router_logits=logits, top_k=2, **arguments)
            assert torch.allclose(got.float(), wanted.float(), rtol=2**-7, atol=0, equal_nan=True)
            continue
        text = r"^router_logits is torch.float32 \(2, 514\) on .*; it must have at most 512 experts of all ranks"
        with pytest.raises(ValueError, match=text):
            step(router_logits=logits, top_k=2, **arguments)
