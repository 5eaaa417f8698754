# SPDX-License-Identifier: Apache-2.0
"""More tiles than SMs, as many, one more, one fewer, and a single one, by each operator, on the virtual GPU.

Run by ``test_virtual_sm_counts.py`` in a process for each number of SMs, which ``FLASHINFER_TEST_SMS`` gives: those of
the device, then those of its streams, 0 for all.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from virtual_devices import ALL_CHECKERS, RACES, virtual_fixture
from virtual_group_gemm import launch_group_gemm
from virtual_moe import run_moe

from flashinfer.decode import decode_attention
from flashinfer.fused_moe import router_top_k
from flashinfer.gemm import dense_block_scaled, dense_block_scaled_top_k, rmsnorm_dense_block_scaled
from flashinfer.sm12x.instances import BLOCK_M, DENSE_INSTANCES, GEMM_INSTANCES, INSTANCES, Instance, index_of
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
    make_norm_inputs,
    moe_reference,
    normed_dense_reference,
)
from flashinfer.testing.decode_reference import check_decoded, make_decode_case
from flashinfer.testing.router_reference import check_routed, make_router_inputs
from flashinfer.testing.row_top_k_reference import largest_of_rows
from flashinfer.testing.virtual_device import VirtualDevice

DENSE = {row.name: row for row in DENSE_INSTANCES}
STREAM_ROWS = 64  # of a unit with a short K

DEVICE_SMS, STREAM_SMS = map(int, os.environ["FLASHINFER_TEST_SMS"].split(","))
SMS = STREAM_SMS or DEVICE_SMS  # that a launch may use
# Numbers of tiles.
AROUND = sorted({1, max(SMS - 1, 1), SMS, SMS + 1, 2 * SMS + 1} if SMS < 48 else {1, SMS - 1, SMS + 1})

device = virtual_fixture(watch=ALL_CHECKERS - RACES, sm_count=DEVICE_SMS, stream_sms=STREAM_SMS)


def check_layer(device: VirtualDevice, case: MoECase, tactic: int) -> None:
    inputs = make_moe_inputs(case, case.inter)
    output = run_moe(device, inputs, case.mode, [tactic] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{case}, {DEVICE_SMS} SMs")


@pytest.mark.parametrize("name", ["stream_bf16_m8", "stream_mxfp8_as_bf16_m8", "nvfp4_stream_bf16_m8"])
def test_a_stream_of_experts(device: VirtualDevice, name: str) -> None:
    row = INSTANCES[index_of(name)]
    mode = 2 if row.activation == "bf16" else 0
    if STREAM_SMS > 0:
        # Its blocks wait for each other: nothing is launched, and the output is what it was.
        inputs = make_moe_inputs(MoECase(2, 64, 32, 2, 1, mode, weights=row.weights), 1)
        assert run_moe(device, inputs, mode, [row.index] * 2).isnan().all()
        assert device.launches == []
        return
    for units in AROUND:  # FC2's of each expert; FC1 has one
        for tokens in (1, 40):
            case = MoECase(tokens, STREAM_ROWS * units, 32, 2, 1, mode, weights=row.weights)
            if case.hidden <= row.longest_k:
                check_layer(device, case, row.index)
                assert device.launches[-1].grid[0] == DEVICE_SMS


# Pipelines of 14, 10, 9, 8, 6, 5, 4, 3 and 2 stages; NVFP4's have fewer.
@pytest.mark.parametrize("k", [96, 160, 192, 224, 288, 352, 416, 640, 736])
@pytest.mark.parametrize("name", ["stream_bf16_m8", "stream_mxfp8_as_bf16_m16", "nvfp4_stream_bf16_m8"])
def test_pipelines_of_each_depth(device: VirtualDevice, name: str, k: int) -> None:
    """A block comes to each stage several times, and the last time to a part of them."""
    if SMS > 1:
        pytest.skip("blocks of one SM have enough work")
    row = INSTANCES[index_of(name)]
    mode = 2 if row.activation == "bf16" else 0
    check_layer(device, MoECase(37, k, 160, 3, 1, mode, weights=row.weights), row.index)
    check_layer(device, MoECase(11, 160, k, 3, 1, mode, weights=row.weights), row.index)


@pytest.mark.parametrize("k", [96, 288, 640, 1056, 1536, 2048, 2560, 2880])
def test_pipelines_of_dense_streams(device: VirtualDevice, k: int) -> None:
    """Whole rows and parts of rows."""
    if SMS > 1:
        pytest.skip("blocks of one SM have enough work")
    for name in ("dense_mxfp4_m8_w2", "dense_mxfp4_m16_w2"):
        check_dense(DenseCase(19, 16 * 13 - 3, k), DENSE[name])


@pytest.mark.parametrize("name", ["mxfp8_m8_k128", "bf16_m8_k128", "mxfp8_m128_k128"])
def test_a_pair_of_gemms(device: VirtualDevice, name: str) -> None:
    row = INSTANCES[index_of(name)]
    mode = 2 if row.activation == "bf16" else 0
    for units in AROUND:
        if units <= 12:
            check_layer(device, MoECase(3, BLOCK_M * units, 96, 2, 1, mode), row.index)
            check_layer(device, MoECase(3, 96, BLOCK_M // 2 * units, 2, 1, mode, biases=False), row.index)
    # As many units as blocks, one fewer and one more: tiles of one expert.
    blocks = device.launches[-1].grid[0]
    for tiles in {max(blocks - 1, 1), blocks, blocks + 1} if blocks <= 40 else ():
        check_layer(device, MoECase(tiles * row.block_n, 128, 32, 1, 1, mode), row.index)
        assert device.launches[-1].grid[0] == blocks


def test_a_grouped_gemm(device: VirtualDevice) -> None:
    tile = GEMM_INSTANCES[0].block_n
    for units in AROUND:
        call = make_group_gemm_inputs([tile * (units - units // 2), 0, tile * (units // 2)], 128, 160, units)
        out = launch_group_gemm(device, call, GEMM_INSTANCES[0].index)
        check_within_bound(out, *group_gemm_reference(**call, accumulation=TENSOR_CORE), f"{units} tiles")


def check_dense(case: DenseCase, row: Instance) -> None:
    inputs = make_dense_inputs(case, case.n)
    out = torch.full((case.num_tokens, case.n), torch.nan, dtype=case.out_dtype)
    dense_block_scaled(*inputs.arguments, **inputs.named, out=out, tactic=row.name)
    check_within_bound(out, *dense_reference(inputs), f"{case}, {row.name}")


def test_a_dense_layer(device: VirtualDevice) -> None:
    for units in AROUND:
        check_dense(DenseCase(3, STREAM_ROWS * units, 96), DENSE["dense_mxfp4_m8_w2"])
        assert device.launches[-1].grid[0] == min(units, SMS)
        check_dense(DenseCase(19, STREAM_ROWS * units - 3, 96), DENSE["dense_mxfp4_m8_w2"])
        check_dense(DenseCase(3, BLOCK_M * units, 96), DENSE["dense_mxfp4_m32_gemm"])
        check_dense(DenseCase(3, BLOCK_M * units - 3, 96, tokens="mxfp8"), DENSE["dense_mxfp4_m64_gemm_mxfp8"])
        check_dense(DenseCase(32 * units, 40, 96), DENSE["dense_mxfp4_m32_gemm"])


@pytest.mark.parametrize("tactic", ["dense_mxfp4_m8_w2", "dense_mxfp4_m32_gemm"])
def test_largest_outputs(device: VirtualDevice, tactic: str) -> None:
    """Of a stream, also as many units for each block as it has epilogue warps, one fewer and one more."""
    for units in {*AROUND, *(each * SMS for each in (3, 4, 5) if SMS < 48)}:
        inputs = make_dense_inputs(DenseCase(9, STREAM_ROWS * units - 1, 64), units)
        for top_k in (1, 2):
            logits = torch.full((9, STREAM_ROWS * units - 1), torch.nan, dtype=torch.bfloat16)
            named = {key: value for key, value in inputs.named.items() if key != "out_dtype"}
            found = dense_block_scaled_top_k(*inputs.arguments, **named, top_k=top_k, tactic=tactic, logits=logits)
            check_within_bound(logits, *dense_reference(inputs), f"{units} units")
            values, indices = largest_of_rows(logits, top_k)
            assert torch.equal(found.values, values)
            assert torch.equal(found.indices, indices)


def test_a_layer_behind_a_norm(device: VirtualDevice) -> None:
    for units in AROUND:
        inputs = make_dense_inputs(DenseCase(3, STREAM_ROWS * units - 5, 96), units)
        norm: dict[str, Any] = make_norm_inputs(inputs, units)
        x, *weights = inputs.arguments
        out, total = rmsnorm_dense_block_scaled(
            x, norm["norm_weight"], *weights, **inputs.named, residual=norm["residual"], eps=norm["eps"]
        )
        check_within_bound(out, *normed_dense_reference(inputs, norm, total, factor_last=True), f"{units} units")


def test_a_router(device: VirtualDevice) -> None:
    """Blocks for each tile of eight tokens and eight experts, until they are more than SMs."""
    for groups in AROUND:
        experts = min(8 * groups, 512)
        for tokens in (1, 8, 17):
            arguments = make_router_inputs(tokens, 64, experts, 4, groups, adds=True, norms=True, bias=True)
            check_routed(router_top_k(**arguments), arguments)


def test_decode_attention(device: VirtualDevice) -> None:
    """As many sequences as SMs have blocks, one fewer and one more; those that are fewer are split."""
    most = 2 * DEVICE_SMS
    for sequences in {1, most - 1, most, most + 1} if most <= 12 else {1}:
        for q_len in (1, 2, 5):
            lengths = [5 + 60 * (i % 3) for i in range(sequences - 1)] + [300]
            case = make_decode_case(lengths, 1, sequences, q_len=q_len)
            out = torch.full(case.arguments["query"].shape, torch.nan, dtype=torch.bfloat16)
            decode_attention(**case.arguments, out=out)
            check_decoded(out, case)
