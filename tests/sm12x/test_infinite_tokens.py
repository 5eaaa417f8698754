# SPDX-License-Identifier: Apache-2.0
"""An infinite token that a call rounds counts as the largest number of the format, whatever the number of tokens."""

from __future__ import annotations

import pytest
import torch
from infinite_tokens import ROUNDED, check_dense, check_infinite_activations, check_moe

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.gemm import dense_block_scaled
from flashinfer.testing import DenseInputs, MoEInputs
from flashinfer.testing.dense_reference import WEIGHTS
from flashinfer_sm12x.doctor.probe.mma import accumulation_on

TOKENS = (1, 8, 9, 64, 65, 300)


@pytest.mark.parametrize("tokens", ROUNDED)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_dense_layer(weights: str, tokens: str, device: torch.device) -> None:
    if weights != "mxfp4" and tokens.endswith("to_mxfp4"):
        pytest.skip("tokens are rounded to MXFP4 for MXFP4 weights")

    def layer(inputs: DenseInputs) -> torch.Tensor:
        return dense_block_scaled(*inputs.arguments, **inputs.named)

    for num_tokens in TOKENS:
        check_dense(layer, weights, tokens, num_tokens, accumulation_on(device), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_moe_layer(dtype: torch.dtype, device: torch.device) -> None:
    for num_tokens in TOKENS:
        check_moe(_moe, dtype, num_tokens, accumulation_on(device), device)


def test_activations_between_the_gemms(device: torch.device) -> None:
    for num_tokens in TOKENS:
        check_infinite_activations(_moe, num_tokens, device)


def _moe(inputs: MoEInputs) -> torch.Tensor:
    return cutlass_fused_moe(**inputs.arguments())
