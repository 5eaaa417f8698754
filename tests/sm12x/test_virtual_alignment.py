# SPDX-License-Identifier: Apache-2.0
"""Tensors that start where the kernels can read them are read right, wherever that is.

Those that start elsewhere are refused: ``test_virtual_contract.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operator_calls import moved_to
from virtual_devices import virtual_fixture

import flashinfer
from flashinfer.fused_moe import cutlass_fused_moe_workspace_size
from flashinfer.gemm import dense_block_scaled
from flashinfer.sm12x.instances import INSTANCES
from flashinfer.testing import DenseCase, MoECase, make_dense_inputs, make_group_gemm_inputs, make_moe_inputs
from flashinfer.testing.virtual_device import VirtualDevice

device = virtual_fixture()


def moe(swizzled: bool = True, hidden: int = 160, mode: int = 0) -> dict[str, Any]:
    case = MoECase(5, hidden, 96, 4, 2, mode, swizzled_input_sf=swizzled)
    arguments = make_moe_inputs(case, 900).arguments()
    arguments["output"] = torch.full((5, hidden), torch.nan, dtype=torch.bfloat16)
    return arguments


@pytest.mark.parametrize("streamed", [False, True], ids=["pair", "streamed"])
@pytest.mark.parametrize("mode", [0, 1])
def test_workspace_of_a_layer(device: VirtualDevice, streamed: bool, mode: int) -> None:
    """16 bytes are what the widest access needs: torch gives 64 on the CPU, other libraries less."""
    tactic = next(row.profile_id for row in INSTANCES if row.activation == "mxfp8" and row.split_k == streamed)
    arguments = {**moe(mode=mode), "profile_ids": [tactic, tactic]}
    expected = flashinfer.cutlass_fused_moe(**arguments).clone()
    size = cutlass_fused_moe_workspace_size(
        *(5, 160, 96, 4, 2),
        x_dtype=arguments["input"].dtype,
        weight_dtype=arguments["fc1_expert_weights"].dtype,
        use_mxfp8_act_scaling=True,
        device=arguments["input"].device,
    )
    space = torch.full((size,), 255, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^workspace_buffer starts at address 0x\w+; it must be aligned to 16 bytes"):
        flashinfer.cutlass_fused_moe(**arguments, workspace_buffer=moved_to(space, 8))
    arguments["output"].fill_(torch.nan)
    given = flashinfer.cutlass_fused_moe(**arguments, workspace_buffer=moved_to(space, 16))
    assert torch.equal(given, expected)
    assert device.launches


@pytest.mark.parametrize("streamed", [False, True], ids=["pair", "streamed"])
@pytest.mark.parametrize(
    ("swizzled", "hidden", "offset"),
    [(True, 160, 4), (False, 256, 4), (False, 160, 5), (False, 160, 2), (False, 192, 6)],
    ids=[
        "128x4",
        "linear, whole words",
        "linear, a row on",
        "linear, odd words",
        "linear, two blocks in the last word",
    ],
)
def test_scales_of_tokens_that_start_where_they_may(
    device: VirtualDevice, swizzled: bool, hidden: int, offset: int, streamed: bool
) -> None:
    """Linear scales of a K that is no multiple of 128 are read by bytes: a view from another row on is right."""
    tactic = next(row.profile_id for row in INSTANCES if row.activation == "mxfp8" and row.split_k == streamed)
    arguments = {**moe(swizzled, hidden), "profile_ids": [tactic, tactic]}
    expected = flashinfer.cutlass_fused_moe(**arguments).clone()
    arguments["output"].fill_(torch.nan)
    arguments["input_sf"] = moved_to(arguments["input_sf"], offset)
    assert torch.equal(flashinfer.cutlass_fused_moe(**arguments), expected)
    assert device.launches


def test_linear_scales_in_whole_words(device: VirtualDevice) -> None:
    arguments = moe(swizzled=False, hidden=256)
    arguments["input_sf"] = moved_to(arguments["input_sf"], 1)
    with pytest.raises(ValueError, match=r"^input_sf .*starts at address 0x\w+; it must be aligned to 4 bytes"):
        flashinfer.cutlass_fused_moe(**arguments)
    assert device.launches == []


def test_scales_of_rows_are_words(device: VirtualDevice) -> None:
    arguments: dict[str, Any] = dict(make_group_gemm_inputs([3, 5], 64, 96, 902))
    expected = flashinfer.gemm.group_gemm_mxfp4_nt_groupwise(**arguments)
    arguments["a_scale"] = moved_to(arguments["a_scale"], 4)
    assert torch.equal(flashinfer.gemm.group_gemm_mxfp4_nt_groupwise(**arguments), expected)


TACTICS = ("dense_mxfp8_m8_w2", "dense_mxfp8_m32_gemm", "dense_mxfp8_m64_gemm_mxfp8")


def dense(tactic: str, linear: bool = False) -> dict[str, Any]:
    """Rows of outputs are 8 bytes more than a multiple of 16."""
    tokens = "mxfp8_linear" if linear else "quantize_bf16"
    inputs = make_dense_inputs(DenseCase(5, 36, 192, "mxfp8", tokens, torch.bfloat16, True, True), 903)
    operands = dict(zip(("x", "weight", "weight_scale"), inputs.arguments, strict=True)) | inputs.named
    return operands | {"tactic": tactic, "out": torch.full((5, 36), torch.nan, dtype=torch.bfloat16)}


@pytest.mark.parametrize("tactic", TACTICS)
def test_what_a_dense_layer_takes_by_elements_may_start_at_any(device: VirtualDevice, tactic: str) -> None:
    for linear, names in ((False, ("out", "residual", "bias", "alpha")), (True, ("x_scale",))):
        expected = dense_block_scaled(**dense(tactic, linear))
        for name in names:
            size = dense(tactic, linear)[name].element_size()
            for offset in (size, 8, 8 + size):
                arguments = dense(tactic, linear)
                arguments[name] = moved_to(arguments[name], offset)
                assert torch.equal(dense_block_scaled(**arguments), expected), (name, offset)


@pytest.mark.parametrize("streamed", [False, True], ids=["pair", "streamed"])
def test_one_row_of_a_wider_tensor(device: VirtualDevice, streamed: bool) -> None:
    """Its stride, 8 bytes more than a multiple of 16, is nobody's business."""

    def first_row(row: torch.Tensor) -> torch.Tensor:
        wide = torch.empty((1, row.shape[1] + 8 // row.element_size()), dtype=row.dtype)
        wide.view(torch.uint8).fill_(0xFF)
        wide[:, : row.shape[1]].view(torch.uint8).copy_(row.view(torch.uint8))
        view = wide[:, : row.shape[1]]
        assert view.is_contiguous() and view.stride(0) != row.stride(0)
        return view

    made = make_moe_inputs(MoECase(1, 256, 96, 4, 2, 0, swizzled_input_sf=False), 904)
    tactic = next(row.profile_id for row in INSTANCES if row.activation == "mxfp8" and row.split_k == streamed)
    arguments = {**made.arguments(), "profile_ids": [tactic, tactic]}
    expected = flashinfer.cutlass_fused_moe(**arguments)
    for name in ("input", "input_sf", "token_selected_experts", "token_final_scales"):
        arguments[name] = first_row(arguments[name])
    arguments["output"] = first_row(torch.empty((1, 256), dtype=torch.bfloat16))
    assert torch.equal(flashinfer.cutlass_fused_moe(**arguments), expected)
    layer = make_dense_inputs(DenseCase(1, 36, 96, residual=True), 905)
    x, *weight = layer.arguments
    named = {"tactic": "dense_mxfp4_m8_w2" if streamed else "dense_mxfp4_m32_gemm", **layer.named}
    expected = dense_block_scaled(x, *weight, **named)
    named |= {name: first_row(layer.named["residual"].clone()) for name in ("out", "residual")}
    assert torch.equal(dense_block_scaled(first_row(x), *weight, **named), expected)
