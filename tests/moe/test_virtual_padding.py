# SPDX-License-Identifier: Apache-2.0
"""Expert id -1, which vLLM gives padding tokens, contributes nothing in the kernels: on a virtual SM121 with sums of 25
bits."""

from __future__ import annotations

import pytest
import torch
from virtual_devices import virtual_fixture

import flashinfer
from flashinfer.sm12x.instances import IN_KERNEL_ROUTED_ROWS, INSTANCES, SM12X
from flashinfer.testing import Accumulation, MoECase, MoEInputs, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.virtual_device import VirtualDevice

WIDE = Accumulation(25)  # an H200's and a B200's
HIDDEN, INTER, EXPERTS, TOP_K = 352, 160, 6, 2
MODES = {0: "MXFP8 input", 1: "bf16 input", 2: "W4A16"}
# Pairs of GEMMs route by themselves up to IN_KERNEL_ROUTED_ROWS routed rows, but W4A16's never do; fused MoE kernels
# route up to 32 in registers.
FEW, MANY = 9, IN_KERNEL_ROUTED_ROWS // TOP_K + 3

device = virtual_fixture(accumulation_bits=WIDE.sum_bits)


def tactics() -> list[object]:
    """Each mode, and format of experts, with a fused MoE tactic and with the two-kernel path."""
    found = []
    for mode, name in MODES.items():
        fitting = [row for row in SM12X if row.activation == ("bf16" if mode == 2 else "mxfp8")]
        for row in {(row.weights, row.split_k): row for row in reversed(fitting)}.values():
            found.append(pytest.param(mode, row.index, id=f"{name}, {row.name}"))
    return found


def layer(device: VirtualDevice, inputs: MoEInputs, tactic: int, **options: bool) -> torch.Tensor:
    """The output, from memory that holds NaN before."""
    output = torch.full((inputs.input.shape[0], HIDDEN), torch.nan, dtype=inputs.output_dtype)
    flashinfer.cutlass_fused_moe(
        **inputs.arguments(), output=output, profile_ids=[INSTANCES[tactic].profile_id] * 2, **options
    )
    assert device.launches and all(launch.clean for launch in device.launches), device.launches
    return output


@pytest.mark.parametrize("tokens", [FEW, MANY], ids=lambda tokens: f"{tokens} tokens")
@pytest.mark.parametrize(("mode", "tactic"), tactics())
def test_a_batch_of_padding_is_zeros(device: VirtualDevice, mode: int, tactic: int, tokens: int) -> None:
    inputs = make_moe_inputs(
        MoECase(tokens, HIDDEN, INTER, EXPERTS, TOP_K, mode, weights=INSTANCES[tactic].weights), 800 + tactic
    )
    inputs.token_selected_experts.fill_(-1)
    zeros = torch.zeros((tokens, HIDDEN), dtype=torch.bfloat16)
    assert torch.equal(layer(device, inputs, tactic), zeros)


@pytest.mark.parametrize(
    ("tokens", "rank"), [(FEW, None), (MANY, None), (FEW, 0), (FEW, 1)], ids=["few", "many", "rank 0", "rank 1"]
)
@pytest.mark.parametrize(("mode", "tactic"), tactics())
def test_padding_between_tokens(device: VirtualDevice, mode: int, tactic: int, tokens: int, rank: int | None) -> None:
    """Whole tokens of padding, before, between and after others, and single slots."""
    seed = 820 + tactic
    print("seed", seed)
    shard = {} if rank is None else {"ep_size": 2, "ep_rank": rank}
    inputs = make_moe_inputs(
        MoECase(tokens, HIDDEN, INTER, EXPERTS, TOP_K, mode, weights=INSTANCES[tactic].weights, **shard), seed
    )
    ids = inputs.token_selected_experts
    ids[[0, 4, tokens - 1]] = -1
    ids[2, 1] = ids[3, 0] = -1
    output = layer(device, inputs, tactic)
    used = check_within_bound(output, *moe_reference(inputs, WIDE), f"mode {mode}, tactic {tactic}, seed {seed}")
    print(f"{used:.1%} of the bound")
    assert not output[[0, 4, tokens - 1]].any()
    assert output[2].any() or rank is not None


@pytest.mark.parametrize(("mode", "tactic"), tactics())
def test_padding_of_an_all_to_all_is_the_same(device: VirtualDevice, mode: int, tactic: int) -> None:
    case = MoECase(FEW, HIDDEN, INTER, EXPERTS, TOP_K, mode, weights=INSTANCES[tactic].weights)
    inputs = make_moe_inputs(case, 840 + tactic)
    inputs.token_selected_experts[4] = -1
    inputs.token_selected_experts[2, 1] = -1
    output = layer(device, inputs, tactic)
    assert torch.equal(layer(device, inputs, tactic, enable_alltoall=True), output)
