# SPDX-License-Identifier: Apache-2.0
"""Infinite tokens by kernels that expand rounded rows to bfloat16, and by those whose MMAs take the scales."""

from __future__ import annotations

import pytest
import torch
from infinite_tokens import check_dense, check_infinite_activations, check_moe
from virtual_devices import ALL_CHECKERS, RACES, virtual_fixture
from virtual_moe import run_moe

from flashinfer.gemm import dense_block_scaled
from flashinfer.sm12x.instances import index_of
from flashinfer.testing import TENSOR_CORE, DenseInputs, MoEInputs
from flashinfer.testing.virtual_device import VirtualDevice

CPU = torch.device("cpu")  # where the virtual device's tensors are
device = virtual_fixture(watch=ALL_CHECKERS - RACES)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("dense_mxfp4_m8_w2", "quantize_bf16"),
        ("dense_mxfp4_m8_w2", "f16_to_mxfp4"),
        ("dense_mxfp4_m32_gemm", "quantize_f16"),
        ("dense_mxfp4_m64_gemm_mxfp8", "quantize_bf16"),
        ("dense_mxfp4_m64_gemm_mxfp4", "bf16_to_mxfp4"),
    ],
)
def test_a_dense_layer(device: VirtualDevice, name: str, tokens: str) -> None:
    def layer(inputs: DenseInputs) -> torch.Tensor:
        return dense_block_scaled(*inputs.arguments, **inputs.named, tactic=name)

    check_dense(layer, "mxfp4", tokens, 9, TENSOR_CORE, CPU)
    assert ("dense_layer_kernel" if name.endswith("w2") else "grouped_gemm_kernel") in device.launches[-1].kernel


@pytest.mark.parametrize("name", ["stream_mxfp8_as_bf16_m8", "mxfp8_m8_k128"])
def test_a_moe_layer(device: VirtualDevice, name: str) -> None:
    def layer(inputs: MoEInputs) -> torch.Tensor:
        return run_moe(device, inputs, 1, [index_of(name)] * 2)

    check_moe(layer, torch.bfloat16, 9, TENSOR_CORE, CPU)
    check_moe(layer, torch.float16, 1, TENSOR_CORE, CPU)
    check_infinite_activations(layer, 9, CPU)
