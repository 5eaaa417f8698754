# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` with MXFP4 weights against the float64 reference, on the CPU and on a GPU.

On a GPU every instance of the table that fits the mode is forced as well.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_harness import check_case, run, same_bits, tactics_to_force, workspace_bytes

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.sm12x.devices import serves_cuda
from flashinfer.testing import (
    MoECase,
    MoEInputs,
    check_within_bound,
    make_moe_inputs,
    moe_reference,
    quantize_mxfp8,
    swizzle_scales,
    unswizzle_scales,
)
from flashinfer.testing.moe_inputs import moe_inputs_with_not_numbers
from flashinfer_sm12x.doctor.probe.mma import accumulation_on

MODES = (0, 1, 2)


def _check(case: MoECase, seed: int, device: torch.device) -> None:
    check_case(case, seed, device, tactics_to_force(case, device))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("data", ["normal", "lattice"])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 130])
def test_modes_and_token_counts(mode: int, data: str, num_tokens: int, device: torch.device) -> None:
    case = MoECase(num_tokens, 288, 352, 8, 3, mode, data=data, output_dtype=torch.float16)  # type: ignore[arg-type]
    _check(case, 100 + num_tokens, device)


CORNERS: dict[str, MoECase] = {
    # 736 is gpt-oss over four ranks, 720, padded to a multiple of 32; 2880 and 2944 are gpt-oss and its vLLM padding.
    **{f"inter {n}": MoECase(9, 160, n, 4, 2, 0, data="lattice") for n in (736, 1440, 2880, 2944)},
    **{f"hidden {n}": MoECase(6, n, 96, 4, 2, 0, data="lattice") for n in (32, 64, 2880)},
    **{
        f"top {top_k} of {experts}": MoECase(21, 96, 64, experts, top_k, 0)
        for experts, top_k in ((8, 8), (32, 4), (128, 4), (256, 1), (256, 6), (1, 1))
    },
    **{
        f"{n} tokens, {routing}": MoECase(n, 160, 96, 16, 2, 0, routing=routing)
        for n in (5, 200)
        for routing in ("one_expert", "few_experts")
    },
    "no biases": MoECase(10, 96, 64, 4, 2, 0, biases=False),
    "fp16 output and biases": MoECase(10, 96, 64, 4, 2, 0, output_dtype=torch.float16, bias_dtype=torch.float16),
    "fp16 output": MoECase(10, 96, 64, 4, 2, 0, output_dtype=torch.float16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("corner", CORNERS)
def test_corners(corner: str, mode: int, device: torch.device) -> None:
    """Random layers seldom reach these corners."""
    _check(dataclasses.replace(CORNERS[corner], mode=mode), 26, device)


@pytest.mark.parametrize("mode", MODES)
def test_shard_of_720_padded_with_zeros(mode: int, device: torch.device) -> None:
    """gpt-oss over four ranks: I = 720 is no multiple of 32, so callers pad FC1's rows and FC2's columns with zeros."""
    inter, padded = 720, 736
    whole = make_moe_inputs(MoECase(7, 160, inter, 4, 2, mode, output_dtype=torch.float16), 28, device)
    assert whole.fc1_bias is not None

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        filled = tensor.new_zeros((4, 2 * padded, *tensor.shape[2:]))
        filled[:, :inter], filled[:, padded : padded + inter] = tensor[:, :inter], tensor[:, inter:]
        return filled

    fc1_sf = unswizzle_scales(whole.fc1_scales, 2 * inter, 5)
    fc2_sf = unswizzle_scales(whole.fc2_scales, 160, 23)  # the last block has 16 elements, and 32 when padded
    inputs = dataclasses.replace(
        whole,
        fc1_weights=rows(whole.fc1_weights),
        fc1_scales=swizzle_scales(rows(fc1_sf)),
        fc1_bias=rows(whole.fc1_bias),
        fc2_weights=torch.nn.functional.pad(whole.fc2_weights, (0, (padded - inter) // 2)),
        fc2_scales=swizzle_scales(fc2_sf),
    )
    reference, bound = moe_reference(whole, accumulation_on(device))
    check_within_bound(run(inputs, device, 0xFF, None), reference, bound)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ep_size", [2, 4])
def test_expert_parallel_ranks_sum_to_the_whole(mode: int, ep_size: int, device: torch.device) -> None:
    whole_case = MoECase(19, 160, 96, 8, 3, mode)
    whole = make_moe_inputs(whole_case, 11, device)
    accumulation = accumulation_on(device)
    reference, bound = moe_reference(whole, accumulation)
    total, total_bound = torch.zeros_like(reference), torch.zeros_like(reference)
    local = 8 // ep_size
    for rank in range(ep_size):
        owned = slice(rank * local, (rank + 1) * local)
        shard = dataclasses.replace(whole, ep_size=ep_size, ep_rank=rank)
        for field in dataclasses.fields(shard):
            value = getattr(shard, field.name)
            if isinstance(value, torch.Tensor) and field.name.startswith(("fc1_", "fc2_", "swiglu_")):
                setattr(shard, field.name, value[owned].clone())
        output = run(shard, device, 0xFF, None)
        part, part_bound = moe_reference(shard, accumulation)
        check_within_bound(output, part, part_bound, f"rank {rank}")
        total, total_bound = total + part, total_bound + part_bound
    assert ((total - reference).abs() <= bound + total_bound).all()


def tensor_parallel_shards(whole: MoEInputs, ranks: int) -> Iterator[MoEInputs]:
    """``whole`` with its weights sharded along I; the caller sums, so rank 0 alone has the FC2 bias, as in vLLM."""
    experts, hidden, half = whole.fc2_weights.shape
    inter = 2 * half
    part = inter // ranks
    fc1_sf = unswizzle_scales(whole.fc1_scales, 2 * inter, hidden // 32)
    fc2_sf = unswizzle_scales(whole.fc2_scales, hidden, inter // 32)
    for rank in range(ranks):
        rows = torch.arange(rank * part, (rank + 1) * part, device=fc1_sf.device)
        rows = torch.cat((rows, rows + inter))
        blocks = slice(rank * part // 32, (rank + 1) * part // 32)
        assert whole.fc1_bias is not None
        yield dataclasses.replace(
            whole,
            fc1_weights=whole.fc1_weights[:, rows].contiguous(),
            fc1_scales=swizzle_scales(fc1_sf[:, rows]),
            fc1_bias=whole.fc1_bias[:, rows].contiguous(),
            fc2_weights=whole.fc2_weights[..., rank * part // 2 : (rank + 1) * part // 2].contiguous(),
            fc2_scales=swizzle_scales(fc2_sf[..., blocks].contiguous()),
            fc2_bias=whole.fc2_bias if rank == 0 else None,
            output_dtype=torch.float16,
        )


def test_tensor_parallel_shards_sum_to_the_whole(device: torch.device) -> None:
    whole = make_moe_inputs(MoECase(9, 160, 192, 4, 2, 2, global_scales=False), 12, device)
    reference, bound = moe_reference(whole, accumulation_on(device))
    parts = torch.zeros_like(reference)
    slack = bound.clone()
    for rank, shard in enumerate(tensor_parallel_shards(whole, 2)):
        output = cutlass_fused_moe(**shard.arguments(), tp_size=2, tp_rank=rank)
        part, part_bound = moe_reference(shard, accumulation_on(device))
        check_within_bound(output, part, part_bound, f"rank {rank}")
        parts, slack = parts + part, slack + part_bound
    assert ((parts - reference).abs() <= slack).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 700])
def test_a_layer_split_over_two_gpus(tokens: int) -> None:
    """Both ranks at once from one thread, whichever device is the current one; gpt-oss' H and I."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    if not all(serves_cuda(index) for index in range(2)):
        pytest.skip("these GPUs run the kernel family only with FLASHINFER_SM12X_MOE=1 and compute capability 9.0")
    first, second = (torch.device("cuda", index) for index in range(2))
    whole = make_moe_inputs(MoECase(tokens, 2880, 2880, 8, 4, 1, global_scales=False), 13, first)
    reference, bound = moe_reference(whole, accumulation_on(first))
    shards = list(tensor_parallel_shards(whole, 2))
    shards[1] = dataclasses.replace(
        shards[1],
        **{
            field.name: value.to(second)
            for field in dataclasses.fields(shards[1])
            if isinstance(value := getattr(shards[1], field.name), torch.Tensor)
        },
    )
    for current in (first, second):
        with torch.cuda.device(current):
            outputs = [
                cutlass_fused_moe(**shard.arguments(), tp_size=2, tp_rank=rank) for rank, shard in enumerate(shards)
            ]
            assert torch.cuda.current_device() == current.index
        assert [output.device for output in outputs] == [first, second]
        total, slack = torch.zeros_like(reference), bound.clone()
        for rank, (output, shard) in enumerate(zip(outputs, shards, strict=True)):
            part, part_bound = (value.to(output.device) for value in moe_reference(shard, accumulation_on(first)))
            check_within_bound(output, part, part_bound, f"rank {rank}, current device {current}")
            total, slack = total + part.to(first), slack + part_bound.to(first)
        assert ((total - reference).abs() <= slack).all()


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129])
def test_input_scale_layouts(swizzled: bool, num_tokens: int, device: torch.device) -> None:
    for hidden in (160, 192):
        _check(MoECase(num_tokens, hidden, 64, 4, 2, 0, swizzled_input_sf=swizzled), 14, device)


@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float16])
def test_inside_quantization_equals_quantizing_outside(input_dtype: torch.dtype, device: torch.device) -> None:
    case = MoECase(33, 288, 96, 4, 2, 1, input_dtype=input_dtype)
    inputs = make_moe_inputs(case, 15, device)
    inside = run(inputs, device, 0xFF, None)
    values, scales = quantize_mxfp8(inputs.input)
    outside = dataclasses.replace(inputs, input=values, input_sf=swizzle_scales(scales).flatten())
    reference, bound = moe_reference(outside, accumulation_on(device))
    check_within_bound(inside, reference, bound)
    if device.type == "cpu":
        assert same_bits(inside, run(outside, device, 0x00, None))


@pytest.mark.parametrize("mode", MODES)
def test_views_of_weights_and_scales_give_the_same_bits(mode: int, device: torch.device) -> None:
    inputs = make_moe_inputs(MoECase(12, 288, 352, 4, 2, mode), 16, device)
    expected = cutlass_fused_moe(**inputs.arguments())
    arguments = inputs.arguments()
    viewed = dict(arguments)
    for name in ("fc1_expert_weights", "fc2_expert_weights"):
        viewed[name] = arguments[name].view(torch.int64)
    for view in (lambda scales: scales.view(torch.int32), lambda scales: scales.flatten()):
        viewed["quant_scales"] = [view(s) if s.ndim == 3 else s for s in arguments["quant_scales"]]
        assert same_bits(cutlass_fused_moe(**viewed), expected)
    if mode == 0:
        for sf in (inputs.input_sf.view(128, -1), inputs.input_sf.view(128, -1).view(torch.int32)):  # type: ignore[union-attr]
            assert same_bits(cutlass_fused_moe(**{**arguments, "input_sf": sf}), expected)
        rows = inputs.input_sf.view(128, -1)  # type: ignore[union-attr]
        scales = unswizzle_scales(rows, 12, 9)
        for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu):
            linear = dataclasses.replace(inputs, input_sf=scales.view(dtype), swizzled_input_sf=False)
            assert same_bits(cutlass_fused_moe(**linear.arguments()), expected)


@pytest.mark.parametrize("mode", MODES)
def test_absent_parameters_have_their_defaults(mode: int, device: torch.device) -> None:
    case = MoECase(9, 96, 64, 4, 2, mode, biases=False, swiglu_parameters=False)
    inputs = make_moe_inputs(case, 17, device)
    expected = run(inputs, device, 0xFF, None)
    explicit = dataclasses.replace(
        inputs,
        swiglu_alpha=torch.ones(4, device=device),
        swiglu_beta=torch.zeros(4, device=device),
        swiglu_limit=torch.full((4,), torch.inf, device=device),
        fc1_bias=torch.zeros(4, 128, dtype=torch.bfloat16, device=device),
        fc2_bias=torch.zeros(4, 96, dtype=torch.bfloat16, device=device),
    )
    assert torch.equal(run(explicit, device, 0xFF, None), expected)
    without = dataclasses.replace(inputs, token_final_scales=None)
    ones = dataclasses.replace(inputs, token_final_scales=torch.ones(9, 2, device=device))
    assert same_bits(run(without, device, 0xFF, None), run(ones, device, 0xFF, None))


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_give_an_empty_output(mode: int, device: torch.device) -> None:
    inputs = make_moe_inputs(MoECase(0, 96, 64, 4, 2, mode), 18, device)
    output = cutlass_fused_moe(**inputs.arguments())
    assert output.shape == (0, 96)
    assert output.dtype == torch.bfloat16
    assert output.device == inputs.input.device


def test_duplicate_expert_of_a_token_counts_twice(device: torch.device) -> None:
    inputs = make_moe_inputs(MoECase(5, 96, 64, 4, 2, 1), 19, device)
    inputs.token_selected_experts[2] = 3
    reference, bound = moe_reference(inputs, accumulation_on(device))
    check_within_bound(run(inputs, device, 0xFF, None), reference, bound)


@pytest.mark.parametrize(("mode", "swizzled"), [(0, True), (0, False), (1, True), (2, True)])
def test_what_is_no_number_stays_where_it_is(mode: int, swizzled: bool, device: torch.device) -> None:
    """NaN and infinity in each operand: the same outputs are NaN as in the reference, and none of other tokens or
    experts.

    Outputs whose reference did not change keep their bits.
    """
    inputs = make_moe_inputs(MoECase(12, 160, 96, 6, 2, mode, swizzled_input_sf=swizzled), 30, device)
    made = moe_inputs_with_not_numbers(inputs, 31)
    _, numbers = next(made)
    before, output_before = moe_reference(numbers, accumulation_on(device))[0], run(numbers, device, 0xFF, None)
    for what, changed in made:
        reference, bound = moe_reference(changed, accumulation_on(device))
        output = run(changed, device, 0xFF, None)
        check_within_bound(output, reference, bound, what)
        kept = reference == before
        assert same_bits(output[kept], output_before[kept]), what


def test_larger_workspace_and_int8_are_taken(device: torch.device) -> None:
    inputs = make_moe_inputs(MoECase(20, 160, 96, 4, 2, 1), 24, device)
    expected = cutlass_fused_moe(**inputs.arguments())
    size = workspace_bytes(inputs, device) + 1000
    for dtype in (torch.uint8, torch.int8):
        workspace = torch.full((size,), -1 if dtype is torch.int8 else 255, dtype=dtype, device=device)
        output = cutlass_fused_moe(**inputs.arguments(), workspace_buffer=workspace)
        assert same_bits(output, expected)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_random_layers(device: torch.device, seed: int) -> None:
    """Sizes, routing, shards, layouts and dtypes drawn independently, as ``gpu_sweep --quick`` draws them."""
    from gpu_sweep import random_case

    case = random_case(random.Random(seed), quick=True)
    _check(dataclasses.replace(case, num_tokens=case.num_tokens % 90 + 1), seed % 2**31, device)


def test_inputs_are_not_written(device: torch.device) -> None:
    inputs = make_moe_inputs(MoECase(20, 160, 96, 4, 2, 0), 27, device)
    fields = [f.name for f in dataclasses.fields(MoEInputs)]
    tensors = {name: v for name in fields if isinstance(v := getattr(inputs, name), torch.Tensor)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    run(inputs, device, 0xFF, None)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
