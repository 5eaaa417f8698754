# SPDX-License-Identifier: Apache-2.0
"""A decode step's experts in one launch, as compiled for ``sm_121a``, on the virtual SM121 with its checkers on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_moe_step import layer, random_logits
from virtual_devices import ALL_CHECKERS, virtual_fixture

from flashinfer.fused_moe import cutlass_fused_moe, moe_step, router_logits, router_top_k
from flashinfer.fused_moe.sm12x_router import choose_experts
from flashinfer.testing import MoECase
from flashinfer.testing.router_reference import make_router_inputs
from flashinfer.testing.virtual_device import VirtualDevice

CPU = torch.device("cpu")
STREAM, PACK = "fused_moe_kernel", "moe_pack_kernel"

device = virtual_fixture(watch=ALL_CHECKERS)


def names(device: VirtualDevice, before: int) -> list[str]:
    """The kernels of the launches behind the first ``before``."""
    assert all(launch.clean for launch in device.launches), device.launches
    kernels = (STREAM, PACK, "router_logits_kernel", "router_top_k_kernel", "grouped_gemm_kernel")
    return [name for launch in device.launches[before:] for name in kernels if name in launch.kernel]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 128, 4), (8, 128, 4), (3, 500, 10), (32, 9, 1), (4, 64, 6)]
)
@pytest.mark.parametrize("mode", [1, 2], ids=["W4A8", "W4A16"])
def test_one_launch_chooses_and_computes(
    device: VirtualDevice, tokens: int, experts: int, top_k: int, mode: int
) -> None:
    """The result equals that of two operators. Also covers the counters' second use, another rank's experts, and
    padding."""
    ranks = 2 if experts == 128 else 1
    case = MoECase(tokens, 96, 64, experts, top_k, mode=mode, ep_size=ranks, ep_rank=ranks - 1)
    arguments = layer(CPU, case, tokens)
    logits, barrier = random_logits(CPU, tokens, experts, tokens), torch.zeros(2, dtype=torch.int32)
    padding = torch.arange(tokens) % 3 == 2
    for is_padding in (None, padding):
        weights, ids = choose_experts(logits, top_k, is_padding)
        wanted = cutlass_fused_moe(token_selected_experts=ids, token_final_scales=weights, **arguments)
        before = len(device.launches)
        got = moe_step(router_logits=logits, top_k=top_k, is_padding=is_padding, barrier=barrier, **arguments)
        assert names(device, before) == ([STREAM] if mode == 2 else [PACK, STREAM])
        # The softmax of the device is not torch's to the last bit.
        assert torch.allclose(got.float().nan_to_num(7.0), wanted.float().nan_to_num(7.0), rtol=2.0**-7, atol=1e-30)
        again = moe_step(router_logits=logits, top_k=top_k, is_padding=is_padding, barrier=barrier, **arguments)
        assert equal(again, got)
        assert equal(moe_step(router_logits=logits, top_k=top_k, is_padding=is_padding, **arguments), got)
    assert barrier.tolist()[0] == 0
    assert barrier.tolist()[1] == 4 * device.launches[-1].grid[0]


def test_it_chooses_what_the_router_chooses(device: VirtualDevice) -> None:
    """Bit for bit, through both operators' launches."""
    inputs = make_router_inputs(8, 96, 128, 4, 9, adds=True, norms=True, bias=True)
    arguments = layer(CPU, MoECase(8, 96, 64, 128, 4, mode=2), 3)
    routed = router_top_k(**inputs)
    wanted = cutlass_fused_moe(
        **arguments | {"input": routed.hidden_states},
        token_selected_experts=routed.topk_ids,
        token_final_scales=routed.topk_weights,
    )
    before, top_k = len(device.launches), inputs.pop("top_k")
    decided = router_logits(**inputs)
    barrier = torch.zeros(2, dtype=torch.int32)
    got = moe_step(
        **arguments | {"input": decided.hidden_states}, router_logits=decided.logits, top_k=top_k, barrier=barrier
    )
    assert names(device, before) == ["router_logits_kernel", STREAM]
    assert equal(got, wanted)


@pytest.mark.parametrize("tokens", [9, 80])
def test_with_more_pairs_they_are_chosen_in_front(device: VirtualDevice, tokens: int) -> None:
    arguments = layer(CPU, MoECase(tokens, 96, 64, 8, 4, mode=2), tokens)
    logits, barrier = random_logits(CPU, tokens, 8, tokens), torch.zeros(2, dtype=torch.int32)
    weights, ids = choose_experts(logits, 4, None)
    wanted = cutlass_fused_moe(token_selected_experts=ids, token_final_scales=weights, **arguments)
    assert equal(moe_step(router_logits=logits, top_k=4, barrier=barrier, **arguments), wanted)


def test_any_number_may_stand_in_the_second_counter(device: VirtualDevice) -> None:
    """It wraps around, as it does after some million launches."""
    arguments = layer(CPU, MoECase(1, 96, 64, 8, 4, mode=2), 5)
    logits = random_logits(CPU, 1, 8, 5)
    wanted = moe_step(router_logits=logits, top_k=4, **arguments)
    for start in (7, -1, -20, 2**31 - 30):
        barrier = torch.tensor([0, start], dtype=torch.int32)
        assert equal(moe_step(router_logits=logits, top_k=4, barrier=barrier, **arguments), wanted)
        assert int(barrier[0]) == 0, "as the next launch needs it"
        grown = (int(barrier[1]) - start) % 2**32
        assert grown == device.launches[-1].grid[0]


@pytest.mark.parametrize("bytes_ahead", [0, 40, 1 << 20, 9 << 20])
def test_what_is_read_ahead(device: VirtualDevice, bytes_ahead: int) -> None:
    arguments: dict[str, Any] = layer(CPU, MoECase(2, 96, 64, 8, 4, mode=2), 6)
    logits = random_logits(CPU, 2, 8, 6)
    wanted = moe_step(router_logits=logits, top_k=4, **arguments)
    following = torch.zeros(bytes_ahead, dtype=torch.uint8)
    assert equal(moe_step(router_logits=logits, top_k=4, next_weights=following, **arguments), wanted)
    assert device.launches[-1].counters.prefetched_bytes == min(bytes_ahead, (24 << 20) // 12) // 16 * 16
