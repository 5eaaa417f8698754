# SPDX-License-Identifier: Apache-2.0
"""What split-K kernels prefetch for the next launch, at the K of real models, on the virtual SM121.

K decides how many stages the pipeline has, and these how many warps prefetch: with two or three stages fewer than the
four of a small layer. Each prefetch is replaced by a store of its size where it begins: read back, the sizes lead from
the tensor's first byte to its last, so that no byte is prefetched twice, or left out, and none lies beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from virtual_moe import run_moe

from flashinfer.gemm import dense_block_scaled, rmsnorm_dense_block_scaled
from flashinfer.gemm.sm12x_dense_norm import norms
from flashinfer.sm12x.instances import DENSE_INSTANCES, INSTANCES, Instance
from flashinfer.sm12x.models import MODELS, MOE_LAYERS, NVFP4_LAYERS
from flashinfer.testing import (
    TENSOR_CORE,
    DenseCase,
    MoECase,
    check_within_bound,
    dense_reference,
    make_dense_inputs,
    make_moe_inputs,
    make_norm_inputs,
    moe_reference,
)
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

SMS, MOST_BYTES = 48, (24 << 20) // 12
WARPS = 4  # that prefetch, where there are as many stages
PREFETCH = "cp.async.bulk.prefetch.L2.global"
STREAMS = [row for row in INSTANCES if row.split_k]
SPLIT_K_DENSE = [row for row in DENSE_INSTANCES if row.split_k]
LAYERS = {**MOE_LAYERS, **NVFP4_LAYERS}.values()
MOE_K = sorted({max(layer.hidden, layer.inter) for layer in LAYERS} | {layer.inter for layer in LAYERS} | {96})
DENSE_K = sorted(
    {layer.hidden for layer in LAYERS} | {k for model in MODELS.values() for _, k in model.matrices.values()}
)
# Less than a share for each warp; shares of two sizes; a size that is no multiple of 16; more than L2 has room for.
SIZES = {48: torch.int64, 16 * (SMS * 12 + 5) + 8: torch.bfloat16, MOST_BYTES + 160: torch.uint8}


@pytest.fixture(scope="module")
def device() -> Iterator[VirtualDevice]:
    with virtual_device("sm_121a", planted={PREFETCH: "st.global.u32"}) as made:
        yield made


def prefetched(following: torch.Tensor) -> list[int]:
    """The sizes of the prefetches, which follow each other from the first byte on."""
    words = following[: len(following) // 16 * 16].view(torch.int32)
    sizes, at = [], 0
    while 4 * at < words.nbytes and words[at] != 0:
        sizes.append(int(words[at]))
        at += sizes[-1] // 4
    assert 4 * at == min(len(following), MOST_BYTES) // 16 * 16, "bytes are left out"
    assert len(sizes) == int((words != 0).sum()), "a prefetch begins in another one, or beyond"
    return sizes


def check(device: VirtualDevice, run: Callable[[torch.Tensor], None], kernel: str) -> set[int]:
    """Run with tensors of some sizes; the number of warps of a block that prefetch."""
    warps = set()
    for size, dtype in SIZES.items():
        following = device.empty(size)
        following.zero_()
        run(following.view(dtype))
        launch = device.launches[-1]
        assert kernel in launch.kernel
        assert launch.clean, launch
        sizes = prefetched(following)
        if size // 16 >= SMS * WARPS:
            assert max(sizes) - min(sizes) <= 16
            warps.add(len(sizes) // launch.grid[0])
            assert len(sizes) % launch.grid[0] == 0
    return warps


def stage_bytes(row: Instance, parts: int, out: int, k: int) -> int:
    """Packed rows of a work tile, their scales and biases, and sums of lanes beyond K (split_k/params.h)."""
    outputs, k_warps = 16 // parts, -(-k // row.block_k)
    groups = next(each for each in (4, 2, 1) if each * k_warps <= row.mma_warps and out % (each * outputs) == 0)
    words = -(-k // 128) * (2 if row.weights == "nvfp4" else 1)
    scales = parts * words * min(outputs * groups, 32) * 16
    tail = groups * row.block_n // 8 * 512 if k % 128 else 0
    rows = -(-16 * groups * k // 2 // 128) * 128
    return -(-(rows + scales + 64 * groups + tail) // 128) * 128


def warps_that_prefetch(row: Instance, hidden: int, inter: int) -> int:
    stage = max(stage_bytes(row, 2, inter, hidden), stage_bytes(row, 1, hidden, inter))
    return min((101376 - 6016) // stage, WARPS)


def warps_of_a_layer(device: VirtualDevice, row: Instance, case: MoECase) -> set[int]:
    inputs = make_moe_inputs(case, case.hidden)
    reference = moe_reference(inputs, TENSOR_CORE)

    def run(following: torch.Tensor) -> None:
        output = run_moe(device, inputs, case.mode, [row.index] * 2, next_weights=following)
        check_within_bound(output, *reference, f"{case}, {row.name}")

    return check(device, run, "fused_moe_kernel")


@pytest.mark.parametrize("k", MOE_K)
@pytest.mark.parametrize("row", STREAMS, ids=lambda row: row.name)
def test_a_layer(device: VirtualDevice, row: Instance, k: int) -> None:
    """FC1 has the long K, then FC2."""
    if not row.takes(1, k, 32):
        pytest.skip("the layer is the two-kernel path")
    for hidden, inter in ((k, 32), (64, k)):
        case = MoECase(1, hidden, inter, 2, 1, 2 if row.activation == "bf16" else 0, weights=row.weights)
        assert warps_of_a_layer(device, row, case) == {warps_that_prefetch(row, hidden, inter)}, case


@pytest.mark.parametrize("k", DENSE_K)
@pytest.mark.parametrize("row", SPLIT_K_DENSE, ids=lambda row: row.name)
def test_a_dense_layer(device: VirtualDevice, row: Instance, k: int) -> None:
    """Each block has a unit, and one has two; behind a norm, too."""
    if k > row.longest_k:
        pytest.skip("the layer is a GEMM")
    case = DenseCase(3, 16 * SMS + 8, k, row.weights)
    inputs = make_dense_inputs(case, k)
    reference = dense_reference(inputs)

    def run(following: torch.Tensor) -> None:
        out = dense_block_scaled(*inputs.arguments, **inputs.named, next_weights=following, tactic=row.name)
        check_within_bound(out, *reference, f"{case}, {row.name}")

    warps = check(device, run, "dense_layer_kernel")
    assert len(warps) == 1
    assert warps <= set(range(1, WARPS + 1))
    if norms(row):
        x, *weights = inputs.arguments
        norm: dict[str, Any] = make_norm_inputs(inputs, k)

        def run_normed(following: torch.Tensor) -> None:
            rmsnorm_dense_block_scaled(
                x, norm["norm_weight"], *weights, **inputs.named, next_weights=following, tactic=row.name
            )

        assert check(device, run_normed, "dense_layer_kernel") == warps
