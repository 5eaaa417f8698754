# SPDX-License-Identifier: Apache-2.0
"""The launcher around the kernels, as it ships, on the virtual SM121: sizes, absent arguments, threads, refusals."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from virtual_moe import arguments_of, run_moe

from flashinfer.fused_moe.sm12x_launch import allowed_tactics, computes_layer
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module
from flashinfer.testing import TENSOR_CORE, MoECase, check_within_bound, make_moe_inputs, moe_reference
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    with virtual_device("sm_121a") as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("as_bf16", [False, True])
def test_a_workspace_serves_fewer_tokens_too(device: VirtualDevice, mode: Mode, as_bf16: bool) -> None:
    size_of = device.module(gen_cutlass_fused_moe_sm120_module).sm12x_moe_workspace_size
    for hidden, inter, experts, top_k in ((2880, 2880, 128, 4), (64, 32, 3, 3), (2048, 768, 128, 8), (96, 96, 8, 1)):
        sizes = [size_of(tokens, hidden, inter, experts, top_k, int(mode), as_bf16) for tokens in range(1, 2049)]
        smaller = [n for n, (one, next_) in enumerate(zip(sizes, sizes[1:], strict=False), start=1) if next_ < one]
        assert not smaller, (
            f"{hidden} x {inter}, top-{top_k}: less than for {smaller[:5]} tokens is enough for one more"
        )


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "pair"])
def test_absent_routing_weights_count_one(device: VirtualDevice, mode: Mode, streamed: bool) -> None:
    tactic = next(t for t in allowed_tactics(mode) if computes_layer(t) == streamed)
    case = MoECase(num_tokens=5, hidden=128, inter=96, num_experts=4, top_k=2, mode=int(mode))
    inputs = make_moe_inputs(case, seed=3)
    inputs.token_final_scales = torch.ones_like(inputs.token_final_scales)
    reference = moe_reference(inputs, TENSOR_CORE)
    inputs.token_final_scales = None
    check_within_bound(run_moe(device, inputs, mode, [tactic, tactic]), *reference)


@pytest.mark.slow
def test_threads_with_layers_of_different_sizes_do_not_take_each_others_shared_memory(device: VirtualDevice) -> None:
    """Each launch of a streamed layer asks for shared memory by the layer's sizes; the grant is the kernel's."""
    module = device.module(gen_cutlass_fused_moe_sm120_module)
    tactic = next(t for t in allowed_tactics(Mode.W4A16) if computes_layer(t))
    seed = random.randrange(1 << 16)
    print("seed", seed)
    failures: list[BaseException] = []
    start = threading.Barrier(2)

    def launch_again_and_again(hidden: int, inter: int) -> None:
        case = MoECase(num_tokens=2, hidden=hidden, inter=inter, num_experts=2, top_k=1, mode=int(Mode.W4A16))
        inputs = make_moe_inputs(case, seed=seed)
        output = torch.full((case.num_tokens, hidden), float("nan"), dtype=torch.bfloat16)
        size = module.sm12x_moe_workspace_size(2, hidden, inter, 2, 1, int(Mode.W4A16), False)
        workspace = torch.zeros(size, dtype=torch.uint8)
        arguments = (*arguments_of(inputs, output), workspace, int(Mode.W4A16), False, 0, 2, tactic, tactic, True)
        try:
            start.wait()
            for _ in range(12):  # without one grant for all, about one launch in five is refused
                device.call(module.sm12x_moe_run, *arguments)
            check_within_bound(output, *moe_reference(inputs, TENSOR_CORE))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=launch_again_and_again, args=sizes) for sizes in ((256, 128), (2880, 64))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.slow
def test_scales_that_are_no_words_are_refused_before_a_launch(device: VirtualDevice) -> None:
    case = MoECase(num_tokens=3, hidden=128, inter=64, num_experts=2, top_k=1, mode=int(Mode.MXFP8_INPUT))
    inputs = make_moe_inputs(case, seed=5)
    buffer = torch.empty(inputs.input_sf.numel() + 1, dtype=torch.uint8)
    odd = buffer[1:].view(inputs.input_sf.shape)
    odd.copy_(inputs.input_sf.view(torch.uint8))
    inputs.input_sf = odd
    with pytest.raises(ValueError, match="input_sf must start at a multiple of 4 bytes"):
        run_moe(device, inputs, int(Mode.MXFP8_INPUT))
    assert device.launches == []
