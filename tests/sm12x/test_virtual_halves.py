# SPDX-License-Identifier: Apache-2.0
"""Operands one half of whose rows, columns or blocks is much larger than the other, on the virtual SM121.

A half is all indices that have a certain bit set, or clear. Bits 0 to 2 divide an MMA's lanes, bit 3 its two groups of
rows, higher bits the two MMAs of a warp, and warps; along K they divide the blocks of a scale word, and words. A kernel
decides some things per group and not per row, for example whether all scales are small enough to be multiplied while
weights are expanded. Such decisions then differ between groups.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from virtual_devices import virtual_fixture
from virtual_group_gemm import launch_group_gemm
from virtual_moe import run_moe

from flashinfer.gemm import dense_block_scaled
from flashinfer.sm12x.instances import DENSE_INSTANCES, GEMM_INSTANCES, MAIN_MODULE, NVFP4, Instance
from flashinfer.testing import (
    TENSOR_CORE,
    DenseCase,
    MoECase,
    check_within_bound,
    dense_reference,
    group_gemm_reference,
    make_dense_inputs,
    make_group_gemm_inputs,
    make_moe_inputs,
    moe_reference,
    swizzle_scales,
)
from flashinfer.testing.dense_reference import TOKENS_OF
from flashinfer.testing.virtual_device import VirtualDevice

device = virtual_fixture()
SEED = 17
BLOCK = 32


class Half(NamedTuple):
    """Rows, or blocks of K, in whose number a bit has a value."""

    axis: int
    bit: int
    value: int

    def of(self, rows: int, blocks: int) -> torch.Tensor:
        """``[rows, blocks]``, whether a block is of the large ones."""
        numbers = torch.arange((rows, blocks)[self.axis])
        chosen = (numbers >> self.bit & 1) == self.value
        return (chosen[:, None] if self.axis == 0 else chosen).expand(rows, blocks)

    def exponents(self, rows: int, blocks: int, seed: int) -> torch.Tensor:
        """UE8M0 bytes: of the large half above 128, which no expansion folds; of a sum's terms none is lost."""
        return exponents_of(self.of(rows, blocks), 116 if self.axis == 0 else 125, seed)


class One(NamedTuple):
    """One block of one row, which is counted from the end if it is negative."""

    row: int
    block: int

    def exponents(self, rows: int, blocks: int, seed: int) -> torch.Tensor:
        """The same: of all scales that a warp decides about one is large."""
        large = torch.zeros(rows, blocks, dtype=torch.bool)
        large[self.row, self.block] = True
        return exponents_of(large, 125, seed)


def exponents_of(large: torch.Tensor, low: int, seed: int) -> torch.Tensor:
    """``low`` or one more where nothing is large, else 130 or 131."""
    rows, blocks = large.shape
    uneven = (11 * torch.arange(rows)[:, None] + 7 * torch.arange(blocks) + seed) // 3 % 2
    return (torch.where(large, 130, low) + uneven).to(torch.uint8)


ROWS = [Half(0, bit, value) for bit in range(7) for value in (0, 1)]
BLOCKS = [Half(1, bit, value) for bit in range(3) for value in (0, 1)]
# Of both groups of rows of each of a warp's MMAs: these have rows 64 apart, or one of up and one of gate.
ONES = [One(3, 0), One(12, 5), One(67, 2), One(76, 7), One(-61, 4), One(-52, 1)]
TOKENS = [half for half in (*ROWS, *BLOCKS) if half.bit < 6]


def halves() -> Iterator[tuple[Half | One, Half, int]]:
    """Halves, or ones, of weights and halves of tokens, and a seed: each at least once."""
    tokens = itertools.cycle(TOKENS)
    for seed, weights in enumerate((*ROWS, *BLOCKS, *ONES), start=SEED):
        yield weights, next(tokens), seed


def stretch(x: torch.Tensor, half: Half) -> torch.Tensor:
    """Tokens whose large half is 2^4 times as large, of rows 2^12."""
    rows, k = x.shape
    factor = torch.where(half.of(rows, k // BLOCK), 2.0 ** (12 if half.axis == 0 else 4), 1.0)
    return (x.float().unflatten(1, (-1, BLOCK)) * factor.unsqueeze(-1)).flatten(1).to(x.dtype)


def e4m3_of(linear: torch.Tensor) -> torch.Tensor:
    """NVFP4's for scales of 32: a large one is 2^9 times a small one, two blocks of 16 in one of 32."""
    return torch.where((linear > 128).repeat_interleave(2, -1), 0x75, 0x2D).to(torch.uint8)


@pytest.mark.parametrize("instance", [*MAIN_MODULE, *NVFP4], ids=lambda row: row.name)
def test_a_layer(device: VirtualDevice, instance: Instance) -> None:
    mode = 2 if instance.activation == "bf16" else 0
    hidden, inter, tokens = 256, 256, max(instance.block_n, 16)
    print("seeds from", SEED)
    for of_weights, of_tokens, seed in halves():
        case = MoECase(tokens, hidden, inter, 2, 1, mode, biases=False, swiglu_parameters=False, global_scales=False)
        case = dataclasses.replace(case, weights=instance.weights)
        inputs = make_moe_inputs(case, seed)
        for scales, rows, k in ((inputs.fc1_scales, 2 * inter, hidden), (inputs.fc2_scales, hidden, inter)):
            linear = torch.stack([of_weights.exponents(rows, k // BLOCK, seed + expert) for expert in range(2)])
            linear = e4m3_of(linear) if instance.weights == "nvfp4" else linear
            scales.view(torch.uint8).copy_(swizzle_scales(linear).view(scales.shape))
        if mode == 2:
            inputs.input = stretch(inputs.input, of_tokens)
        else:
            assert inputs.input_sf is not None
            linear = of_tokens.exponents(tokens, hidden // BLOCK, seed) - 10
            inputs.input_sf.view(torch.uint8).copy_(swizzle_scales(linear).view(inputs.input_sf.shape))
        reference, bound = moe_reference(inputs, TENSOR_CORE)
        assert torch.isfinite(bound).all()
        output = run_moe(device, inputs, mode, [instance.index] * 2)
        check_within_bound(output, reference, bound, f"{of_weights}, tokens {of_tokens}, seed {seed}")


@pytest.mark.parametrize("instance", GEMM_INSTANCES, ids=lambda row: row.name)
def test_a_grouped_gemm(device: VirtualDevice, instance: Instance) -> None:
    n, k, groups = 128, 256, [instance.block_n, 5]
    print("seeds from", SEED)
    for of_weights, of_tokens, seed in halves():
        call = make_group_gemm_inputs(groups, n, k, seed)
        linear = torch.stack([of_weights.exponents(n, k // BLOCK, seed + group) for group in range(2)])
        call["b_scale"].view(torch.uint8).copy_(swizzle_scales(linear).view(call["b_scale"].shape))
        rows = call["a_scale"].shape[0]
        linear = of_tokens.exponents(rows, k // BLOCK, seed) - 10
        call["a_scale"].view(torch.uint8).copy_(swizzle_scales(linear).view(call["a_scale"].shape))
        reference, bound = group_gemm_reference(**call, accumulation=TENSOR_CORE)
        assert torch.isfinite(bound).all()
        out = launch_group_gemm(device, call, instance.index)
        check_within_bound(out, reference, bound, f"{of_weights}, tokens {of_tokens}, seed {seed}")


@pytest.mark.parametrize("instance", DENSE_INSTANCES, ids=lambda row: row.name)
def test_a_dense_layer(device: VirtualDevice, instance: Instance) -> None:
    n, k, tokens, form = 128, 256, instance.block_n, instance.weights
    print("seeds from", SEED)
    for of_weights, of_tokens, seed in halves():
        inputs = make_dense_inputs(DenseCase(tokens, n, k, form, TOKENS_OF[instance.compute_dtype]), seed)
        x, weight, scales = inputs.arguments
        linear = of_weights.exponents(n, k // BLOCK, seed)
        linear = e4m3_of(linear) if form == "nvfp4" else linear
        scales = swizzle_scales(linear).view(scales.shape)
        if "x_scale" in inputs.named:
            of_x = swizzle_scales(of_tokens.exponents(tokens, k // BLOCK, seed) - 10)
            inputs.named["x_scale"] = of_x.view(inputs.named["x_scale"].shape)
        else:
            x = stretch(x, of_tokens)
        inputs.arguments = x, weight, scales
        reference, bound = dense_reference(inputs)
        assert torch.isfinite(bound).all()
        out = torch.full((tokens, n), torch.nan, dtype=torch.bfloat16)
        dense_block_scaled(*inputs.arguments, **inputs.named, out=out, tactic=instance.name)
        check_within_bound(out, reference, bound, f"{of_weights}, tokens {of_tokens}, seed {seed}")
