# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 tensors of an LM head that rescores: what they hold, where they stay, and when they are old."""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer.quantization.block_scaled import BlockScaledWeight, quantize_rows, quantize_weight
from flashinfer_sm12x.vllm.coarse_weight import CoarseWeight, padding_mask

ROWS, K = 4_500, 96  # three chunks, the last of which ends within a tile of scales


def random_weight(seed: int, scale: float = 1.0) -> torch.Tensor:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, K, generator=generator) * scale).to(torch.bfloat16)


def tensors(coarse: CoarseWeight) -> tuple[torch.Tensor, ...]:
    return coarse.values, coarse.scales, coarse.global_scale


def holds(coarse: CoarseWeight, expected: BlockScaledWeight) -> bool:
    return all(map(torch.equal, tensors(coarse), expected))


def test_it_is_the_quantized_weight_at_the_same_addresses_whatever_it_held():
    coarse = CoarseWeight(random_weight(1))
    addresses = [each.data_ptr() for each in tensors(coarse)]
    for weight in (random_weight(1), random_weight(2, 40.0), random_weight(3, 0.01)):
        for each in tensors(coarse):
            each.view(torch.uint8).fill_(0x55)
        coarse.fill(weight)
        assert holds(coarse, quantize_weight(weight, "nvfp4"))
        assert [each.data_ptr() for each in tensors(coarse)] == addresses


def test_rounding_takes_the_better_of_two_scales():
    weight = random_weight(4)
    coarse = CoarseWeight(weight)
    coarse.fill(weight)
    assert not holds(coarse, quantize_weight(weight, "nvfp4", "amax"))


def test_a_weight_that_was_quantized_before_is_copied():
    weight, other = random_weight(5), random_weight(6, 3.0)
    coarse = CoarseWeight(weight)
    addresses = [each.data_ptr() for each in tensors(coarse)]
    coarse.take(quantize_rows(other, "nvfp4"), weight)
    assert holds(coarse, quantize_weight(other, "nvfp4"))
    assert [each.data_ptr() for each in tensors(coarse)] == addresses
    assert coarse.is_of(weight)
    assert not coarse.is_of(other)


@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_a_weight_that_was_written_to_is_another(row):
    weight = random_weight(7)
    coarse = CoarseWeight(weight)
    coarse.fill(weight)
    assert coarse.is_of(weight)
    assert coarse.is_of(weight.clone())
    weight[row, -1] = 0.5
    assert not coarse.is_of(weight)
    coarse.fill(weight)
    assert coarse.is_of(weight)


def test_sums_beyond_32_bits_are_told_apart():
    weight = torch.full((ROWS, K), 1.0, dtype=torch.bfloat16)
    coarse = CoarseWeight(weight)
    coarse.fill(weight)
    bits = weight.view(torch.int16)
    bits[0, : 2**16 // 2**7 // 8].add_(2**7)  # a change of the sum that is a multiple of 2^13
    assert not coarse.is_of(weight)


@pytest.mark.parametrize(
    ("ranges", "padding"),
    [
        ([(0, 13)], range(13, 16)),
        ([(0, 5), (8, 12)], [*range(5, 8), *range(12, 16)]),
        ([(0, 16), (16, 16)], []),
        ([(0, 0), (0, 16)], []),
        ([(4, 16)], range(4)),
    ],
)
def test_rows_of_padding_get_minus_infinity(ranges, padding):
    mask = padding_mask(torch.zeros(16, 4, dtype=torch.bfloat16), *ranges)
    if not padding:
        assert mask is None
        return
    assert mask is not None
    assert mask.dtype is torch.bfloat16
    assert mask.tolist() == [-math.inf if row in padding else 0 for row in range(16)]


@pytest.mark.gpu
def test_on_a_gpu_it_takes_little_more_than_its_own_memory(device):
    if device.type == "cpu":
        pytest.skip("torch counts a GPU's memory alone")
    weight = torch.randn(32_768, 2_880, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    coarse = CoarseWeight(weight)
    coarse.fill(weight)
    own = sum(each.nbytes for each in tensors(coarse))
    # Twice its own while values are copied, and a chunk's work in float32.
    assert torch.cuda.max_memory_allocated(device) - before < 2 * own + (512 << 20)
