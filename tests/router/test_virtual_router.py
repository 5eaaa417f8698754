# SPDX-License-Identifier: Apache-2.0
"""The router, as compiled for ``sm_121a``, on the virtual SM121 with its checkers on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from virtual_devices import ALL_CHECKERS, virtual_fixture

from flashinfer.fused_moe import router_top_k, sm12x_router
from flashinfer.jit.sm12x.modules import gen_router_module
from flashinfer.testing.router_reference import (
    OPERANDS,
    check_one_element,
    check_routed,
    make_router_inputs,
    with_one_element,
    with_small_rows,
)
from flashinfer.testing.virtual_device import VirtualDevice

device = virtual_fixture(watch=ALL_CHECKERS)


def run(device: VirtualDevice, arguments: dict[str, Any], **named: Any) -> Any:
    routed = router_top_k(**arguments, **named)
    assert [launch.kernel.split("_kernel")[0].split("router")[-1] for launch in device.launches[-2:]] == [
        "_logits",
        "_top_k",
    ]
    assert all(launch.clean for launch in device.launches), device.launches
    return routed


def off(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, that many elements behind where torch puts a tensor."""
    return torch.cat([tensor.new_zeros(elements), tensor.flatten()])[elements:].view(tensor.shape)


# gpt-oss's, with one token, half a tile, and tiles, one of them in part; K longer than registers hold, and one chunk;
# experts that leave columns idle, as many as may be, no multiple of a warp's lanes, and one fewer and one more than
# that; as many as are chosen; blocks with several groups of experts, the last of which have fewer; both.
@pytest.mark.parametrize(
    ("m", "k", "experts", "top_k"),
    [
        (1, 2880, 128, 4),
        (4, 2880, 32, 4),
        (19, 2880, 32, 4),
        (3, 3656, 5, 5),
        (9, 8, 6, 1),
        (2, 64, 512, 32),
        (3, 64, 70, 32),
        (2, 64, 31, 31),
        (2, 64, 33, 32),
        (3, 64, 65, 32),
        (2, 64, 481, 32),
        (70, 264, 70, 4),
        (50, 3656, 70, 4),
    ],
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


def test_padding_and_rounded_logits(device: VirtualDevice) -> None:
    for tokens in (19, 70):
        arguments = make_router_inputs(tokens, 264, 70, 5, 10, adds=True, norms=True, bias=True, as_vllm=True)
        assert 0 < int(arguments["is_padding"].sum()) < tokens
        check_routed(run(device, arguments), arguments)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.25])
def test_the_norm_of_small_rows(device: VirtualDevice, eps: float) -> None:
    arguments = with_small_rows(make_router_inputs(7, 264, 9, 3, 8, adds=True, norms=True, bias=True), eps)
    check_routed(run(device, arguments), arguments)


def test_rows_too_long_for_a_tile(device: VirtualDevice) -> None:
    arguments = make_router_inputs(3, 16_384, 2, 2, 2, norms=True)
    check_routed(run(device, arguments), arguments)
    assert device.launches[-2].grid[0] == 2  # tiles of two tokens


def test_a_bias_between_words(device: VirtualDevice) -> None:
    arguments = make_router_inputs(3, 64, 9, 2, 7, bias=True)
    arguments["bias"] = off(arguments["bias"], 1)
    check_routed(run(device, arguments), arguments)


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


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("operand", OPERANDS)
def test_what_is_no_number_stays_where_it_belongs(device: VirtualDevice, operand: str, value: float) -> None:
    arguments = make_router_inputs(19, 264, 70, 5, 9, adds=True, norms=True, bias=True)
    changed = with_one_element(arguments, operand, value)
    before, after = run(device, arguments), run(device, changed)
    check_routed(after, changed)
    check_one_element(before, after, operand)


def run_both(device: VirtualDevice, first: dict[str, Any], change: Any, constant_weights: bool) -> None:
    """Two routers, the launches of the first still in flight when the second's come: ``change`` of its results is
    given."""
    module = device.module(gen_router_module)
    made = []

    def prepare(arguments: dict[str, Any]) -> tuple[Any, ...]:
        hidden, weight, top_k = (arguments[name] for name in ("hidden_states", "weight", "top_k"))
        parts = [arguments.get(name) for name in ("bias", "residual", "norm_weight")]
        none: dict[str, Any] = dict.fromkeys(sm12x_router.RouterCall._fields)
        given = {
            "hidden_states": hidden,
            "weight": weight,
            "top_k": top_k,
            "residual": parts[1],
            "norm_weight": parts[2],
        }
        outputs = sm12x_router._outputs(sm12x_router.RouterCall(**none | given))
        for output in outputs:
            output.fill_(-1)
        made.append((outputs, arguments))
        normed, total = (
            output if part is not None else None for output, part in zip(outputs[3:], parts[:0:-1], strict=True)
        )
        return (*outputs[:3], normed, total, hidden, weight, *parts, None, 1e-5, False, constant_weights, True)

    one = prepare(first)
    two = prepare(change(made[0][0]))
    tensors = {part.data_ptr(): part for part in (*one, *two) if isinstance(part, torch.Tensor)}
    writes = [output for outputs, _ in made for output in outputs if output.numel()]

    def run_one_and_two(*_: Any) -> None:
        module.sm12x_router_run(*one)
        module.sm12x_router_run(*two)

    device.call(run_one_and_two, *tensors.values(), writes=writes)
    assert all(launch.clean for launch in device.launches), device.launches
    for (weights, ids, logits, normed, total), arguments in made:
        seen = total if "residual" in arguments else arguments["hidden_states"]
        hidden = normed if "norm_weight" in arguments else seen
        check_routed(sm12x_router.Routed(weights, ids, logits, hidden, total), arguments)


def test_tokens_that_the_launch_in_front_writes(device: VirtualDevice) -> None:
    """A router whose tokens are the sums of the one in front, its weights fetched before that has ended."""
    first = make_router_inputs(4, 128, 16, 2, 4, adds=True, norms=True)
    other = make_router_inputs(4, 128, 16, 2, 5, adds=True, norms=True)
    run_both(device, first, lambda made: {**other, "hidden_states": made[3], "residual": made[4]}, True)


def test_weights_that_the_launch_in_front_writes(device: VirtualDevice) -> None:
    """The rows that one router gives are the other's weights, so it may not fetch them early."""
    first = make_router_inputs(16, 128, 16, 2, 5, adds=True)
    run_both(device, first, lambda made: {**make_router_inputs(3, 128, 16, 2, 6), "weight": made[4]}, False)
