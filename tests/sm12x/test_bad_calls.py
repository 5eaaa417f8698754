# SPDX-License-Identifier: Apache-2.0
"""Bad calls of all operators, a row each: what is changed of a right call, and what the error says.

``test_every_argument.py`` asks that an error name the argument and what was given, also where that is ``None`` or on
meta; here stand the words after it, and mistakes that only one operator knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashinfer.tllm_enums import ActivationType, SfLayout
from operator_calls import NUMBERS, OPERATORS, WRONG, Arguments, moved_to, on, workspace_sizes

import flashinfer
from flashinfer.decode import decode_attention
from flashinfer.fused_moe import cutlass_fused_moe_workspace_size
from flashinfer.gemm import dense_block_scaled, dense_block_scaled_top_k, group_gemm_mxfp4_nt_groupwise
from flashinfer.testing import DenseCase, MoECase, make_dense_inputs, make_group_gemm_inputs, make_moe_inputs
from flashinfer.testing.decode_reference import make_decode_case
from flashinfer.testing.router_reference import make_router_inputs


def _moe(mode: int, **changes: Any) -> Arguments:
    return make_moe_inputs(MoECase(6, 160, 96, 8, 3, mode, **changes), 0).arguments()


def _dense(weights: str = "mxfp4", **more: Any) -> Arguments:
    inputs = make_dense_inputs(DenseCase(3, 40, 64, weights, **more), 1)
    scale = {key: value for key, value in inputs.named.items() if "x_scale" in key or key == "weight_format"}
    return dict(zip(("x", "weight", "weight_scale"), inputs.arguments, strict=True)) | scale


def _group_gemm() -> Arguments:
    return dict(make_group_gemm_inputs([3, 5], 64, 96, 6))


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    **{f"MoE {mode}": (flashinfer.cutlass_fused_moe, lambda mode=mode: _moe(mode)) for mode in range(3)},
    "MoE, NVFP4": (flashinfer.cutlass_fused_moe, lambda: _moe(2, weights="nvfp4")),
    "MoE, other kinds": (flashinfer.cutlass_fused_moe, lambda: _moe(0)),
    "MoE, SwigluStep": (flashinfer.cutlass_fused_moe, lambda: _moe(0, swiglu_step=True)),
    "MoE, Relu2": (flashinfer.cutlass_fused_moe, lambda: _moe(0, relu2=True)),
    "MoE, Relu2, NVFP4": (flashinfer.cutlass_fused_moe, lambda: _moe(2, relu2=True, weights="nvfp4")),
    **{f"MoE {mode}, both flags": (flashinfer.cutlass_fused_moe, lambda mode=mode: _moe(mode)) for mode in range(2)},
    "MoE, NVFP4, both flags": (flashinfer.cutlass_fused_moe, lambda: _moe(2, weights="nvfp4")),
    **{
        f"MoE workspace{which}": (cutlass_fused_moe_workspace_size, workspace_sizes)
        for which in ("", ", other kinds", ", the rest")
    },
    "grouped GEMM": (group_gemm_mxfp4_nt_groupwise, _group_gemm),
    "dense_block_scaled": (dense_block_scaled, _dense),
    "dense_block_scaled, MXFP8 weights": (dense_block_scaled, lambda: _dense("mxfp8")),
    "dense_block_scaled, linear scales": (dense_block_scaled, lambda: _dense(tokens="mxfp8_linear")),
    **{
        f"dense_block_scaled, {form}": (dense_block_scaled, lambda form=form: _dense(form))
        for form in ("mxint8", "mxfp6", "nvfp4")
    },
    "dense_block_scaled_top_k": (dense_block_scaled_top_k, _dense),
    **{name: OPERATORS[name] for name in ("mm_fp4", "mm_mxfp8", "mm_bf16_fp4", "mm_bf16_mxfp8")},
    "decode": (decode_attention, lambda: make_decode_case([3, 20], 2, 5).arguments),
    "router": (flashinfer.fused_moe.router_top_k, lambda: make_router_inputs(3, 64, 8, 2, 5)),
    "mxfp8_quantize": (flashinfer.mxfp8_quantize, lambda: {"input": torch.zeros(2, 64)}),
    "mxfp4_quantize": (flashinfer.mxfp4_quantize, lambda: {"a": torch.zeros(2, 64)}),
    "mxfp4_dequantize": (
        flashinfer.mxfp4_dequantize,
        lambda: {"a_fp4": torch.zeros(2, 16).byte(), "a_sf": torch.zeros(512).byte()},
    ),
    "block_scale_interleave": (
        flashinfer.block_scale_interleave,
        lambda: {"unswizzled_sf": torch.zeros(4, 4).byte(), "out": torch.zeros(512).byte()},
    ),
}

strided, E4M3 = WRONG["strided"], torch.float8_e4m3fn


def off_by_one(t: torch.Tensor) -> torch.Tensor:
    """The same elements, one element behind an aligned address."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def emptied(t: torch.Tensor) -> torch.Tensor:
    """A shape without memory, as FSDP leaves a parameter that is sharded."""
    made = t.clone()
    made.untyped_storage().resize_(0)
    return made


def wide(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, dim=-1)


def apart(t: torch.Tensor, dimension: int, elements: int = 4) -> torch.Tensor:
    """A copy with a stride of ``dimension`` that is larger by ``elements``, by default 8 bytes."""
    strides = list(t.stride())
    strides[: dimension + 1] = [stride + elements for stride in strides[: dimension + 1]]
    return t.new_empty(t.shape[0] * strides[0] + t.numel()).as_strided(t.shape, strides)


def ends(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


EITHER = (TypeError, ValueError)
BAD_LAYOUTS = ("swizzled", 7, 2.5, [0], SfLayout.layout_8x4)
OTHER_KINDS = "^cutlass_fused_moe on CPU tensors serves MXFP4 weights"
# For the other calls CPU and GPU give the same errors (test_virtual_contract.py), or upstream serves the call on a GPU.
ON_A_GPU = (
    *("MoE 0", "MoE 1", "MoE 2", "MoE, NVFP4", "MoE, SwigluStep", "MoE, Relu2", "MoE, Relu2, NVFP4", "MoE workspace"),
    "grouped GEMM",
)
# The change: a value, or how it is made of the right one. Without another type the error is a ValueError.
# Here the MoE operator's, in the modes of a flag each.
MOE_BAD: dict[str, list[tuple[Any, ...]]] = {
    "MoE 0": [
        ({"input": lambda x: x.to(torch.float8_e5m2)}, r"^input is torch.float8_e5m2 \(6, 160\).*float8_e4m3fn"),
        ({"input": lambda x: x.float()}, r"^input is torch.float32 \(6, 160\).*torch.float8_e4m3fn"),
        ({"input_sf": None}, "^input_sf is None; a float8_e4m3fn input needs its UE8M0 block scales"),
        ({"input_sf": lambda s: s[:-1]}, r"^input_sf \(swizzled_input_sf=True\) is torch.uint8 \(1023,\).*\(1024,\)"),
        ({"swizzled_input_sf": False}, r"^input_sf \(swizzled_input_sf=False\) is .*\(1024,\).*\(6, 5\) or \(30,\)"),
        ({"input_sf": lambda s: s.to(torch.int32)}, r"^input_sf .*torch.int32 \(1024,\)"),
        (
            {"token_selected_experts": lambda i: i.long()},
            r"^token_selected_experts is torch.int64 \(6, 3\).*torch.int32",
        ),
        ({"token_selected_experts": lambda i: i[:5]}, r"^token_selected_experts is .*\(5, 3\).*\(6, 3\)"),
        ({"token_selected_experts": lambda i: i.flatten()}, r"^token_selected_experts is .*\(18,\).*2-D"),
        ({"token_selected_experts": strided}, "^token_selected_experts is .*strides"),
        ({"token_selected_experts": lambda i: i[:, :0]}, r"^top_k .* is 0; it must be in \[1, 8\]"),
        (
            {"token_selected_experts": lambda i: i.repeat(1, 3)},
            r"^top_k \(token_selected_experts.shape\[1\]\) is 9; it must be in \[1, 8\], the number of experts",
        ),
        ({"token_final_scales": lambda s: s.bfloat16()}, "^token_final_scales is torch.bfloat16.*torch.float32"),
        ({"token_final_scales": lambda s: s[:, :2].contiguous()}, r"^token_final_scales is .*\(6, 2\).*\(6, 3\)"),
        ({"token_final_scales": lambda s: s.T.contiguous().T}, "^token_final_scales is .*strides"),
        ({"fc1_expert_weights": lambda w: w[0]}, r"^fc1_expert_weights is .*\(192, 80\).*3-D"),
        ({"fc2_expert_weights": lambda w: w[0]}, "^fc2_expert_weights is .*3-D"),
        ({"fc2_expert_weights": lambda w: w.to(torch.int32)}, "^fc2_expert_weights is torch.int32.*torch.int64 view"),
        ({"fc1_expert_weights": lambda w: w[:7]}, r"^fc1_expert_weights is .*\(7, 192, 80\).*\(8, 192, 80\)"),
        (
            {"fc1_expert_weights": lambda w: w[:, :96].contiguous()},
            r"^fc1_expert_weights is .*\(8, 96, 80\).*\(8, 192, 80\)",
        ),
        ({"fc1_expert_weights": strided}, "^fc1_expert_weights is .*strides"),
        ({"fc2_expert_weights": strided}, "^fc2_expert_weights is .*strides"),
        ({"fc2_expert_weights": lambda w: w[:0]}, "^fc2_expert_weights is .*1 to 512 experts"),
        (
            {"fc2_expert_weights": lambda w: w[..., :40].contiguous()},
            r"^intermediate size .* is 80; it must be a positive multiple of 32 \(pad the weights with zeros to 96\)",
        ),
        ({"fc2_expert_weights": lambda w: w[:, :150].contiguous()}, r"^hidden size .* is 150; .*multiple of 32"),
        ({"quant_scales": lambda s: s[:3]}, r"^quant_scales is a list of 3; mode MXFP8_INPUT takes the 4 tensors"),
        ({"quant_scales": None}, "^quant_scales is None"),
        (
            {"quant_scales[0]": lambda s: None},
            r"^quant_scales\[0\] is None; it must be contiguous 128x4 block scales",
            TypeError,
        ),
        (
            {"quant_scales[0]": lambda s: s[:, :128].contiguous()},
            r"^quant_scales\[0\] is torch.uint8 \(8, 128, 8\).*\(8, 256, 8\)",
        ),
        (
            {"quant_scales[2]": lambda s: s[..., :3].contiguous()},
            r"^quant_scales\[2\] is .*\(8, 256, 3\).*\(8, 256, 4\)",
        ),
        ({"quant_scales[2]": lambda s: s.float()}, r"^quant_scales\[2\] is torch.float32"),
        ({"quant_scales[0]": strided}, r"^quant_scales\[0\] is .*strides"),
        (
            {"quant_scales[1]": lambda g: g[:7]},
            r"^quant_scales\[1\] is torch.float32 \(7,\).*\(8,\).*one factor per local expert",
        ),
        ({"quant_scales[3]": lambda g: g.half()}, r"^quant_scales\[3\] is torch.float16 \(8,\).*torch.float32"),
        ({"fc1_expert_biases": lambda b: b[:, :96].contiguous()}, r"^fc1_expert_biases is .*\(8, 96\).*\(8, 192\)"),
        ({"fc2_expert_biases": lambda b: b[:7]}, r"^fc2_expert_biases is .*\(7, 160\).*\(8, 160\)"),
        ({"fc1_expert_biases": lambda b: b.float()}, "^fc1_expert_biases is torch.float32.*torch.bfloat16"),
        ({"fc2_expert_biases": lambda b: b.half()}, "^fc2_expert_biases is torch.float16.*torch.bfloat16"),
        ({"fc2_expert_biases": strided}, "^fc2_expert_biases is .*strides"),
        ({"fc1_expert_biases": off_by_one}, r"^fc1_expert_biases starts at address 0x\w+; .* aligned to 16 bytes"),
        ({"swiglu_alpha": torch._neg_view}, "^swiglu_alpha is a view with the negative bit; it must hold its values"),
        (
            {"fc2_expert_biases": lambda b: b.to_sparse()},
            r"^fc2_expert_biases is .*layout torch.sparse_coo; it must be a ",
        ),
        (
            {"fc2_expert_weights": emptied},
            "^fc2_expert_weights is .*, of which its storage holds 0 bytes; it was resized",
        ),
        ({"token_selected_experts": lambda i: i.tolist()}, "^token_selected_experts is a list of 6", TypeError),
        ({"swiglu_alpha": lambda a: a[:1]}, r"^swiglu_alpha is torch.float32 \(1,\).*\(8,\)"),
        ({"swiglu_beta": lambda b: b.bfloat16()}, "^swiglu_beta is torch.bfloat16.*torch.float32"),
        ({"swiglu_limit": strided}, "^swiglu_limit is .*strides"),
        ({"swiglu_limit": 7.0}, "^swiglu_limit is 7.0; it must be a contiguous tensor", TypeError),
        ({"output_dtype": torch.float32}, "^output_dtype is torch.float32; it must be torch.bfloat16 or torch.float16"),
        ({"output": torch.empty(6, 128, dtype=torch.bfloat16)}, r"^output is .*\(6, 128\).*\(6, 160\)"),
        ({"output": torch.empty(6, 160, dtype=torch.float16)}, "^output is torch.float16.*torch.bfloat16"),
        ({"output": torch.empty(160, 6, dtype=torch.bfloat16).T}, "^output is .*strides"),
        ({"workspace_buffer": torch.empty(2, 8, dtype=torch.uint8)}, r"^workspace_buffer is torch.uint8 \(2, 8\).*1-D"),
        ({"workspace_buffer": torch.empty(64)}, "^workspace_buffer is torch.float32.*torch.uint8 or torch.int8"),
        ({"workspace_buffer": 17}, "^workspace_buffer is 17; it must be a 1-D", TypeError),
        ({"ep_size": 0}, r"^ep_size is 0; it must be an integer in \[1, 2147483647\]"),
        ({"ep_size": 2, "ep_rank": 2}, r"^ep_rank is 2; it must be an integer in \[0, 1\], below ep_size"),
        ({"ep_size": 2, "ep_rank": -1}, r"^ep_rank is -1; it must be an integer in \[0, 1\]"),
        ({"tp_size": -1}, "^tp_size is -1"),
        ({"tp_size": 2, "tp_rank": 5}, r"^tp_rank is 5; it must be an integer in \[0, 1\], below tp_size"),
        ({"cluster_size": 2}, "^cluster_size is 2, cluster_rank 0; they must be 1 and 0"),
        ({"profile_ids": [0]}, r"^profile_ids is \[0\]; it must be \[fc1_tactic, fc2_tactic\]"),
        (
            {"profile_ids": [0, 99]},
            r"^profile_ids is \[0, 99\].*mode MXFP8_INPUT, one of 1008128 \(mxfp8_m8_k128\), 1008256 \(mxfp8_m8_k256\)",
        ),
        ({"profile_ids": [-2, 0]}, r"^profile_ids is \[-2, 0\]"),
        ({"profile_ids": 5}, r"^profile_ids is 5; it must be \[fc1_tactic, fc2_tactic\]", TypeError),
        ({"ep_size": 2**30}, r"^ep_size is 1073741824; .* with 8 experts a rank, since ids are int32"),
        ({"ep_size": 2.0}, r"^ep_size is 2.0; it must be an integer", TypeError),
        ({"swizzled_input_sf": 2}, r"^swizzled_input_sf is 2; it must be an integer in \[0, 1\], True or False"),
        ({"enable_pdl": "yes"}, r"^enable_pdl is 'yes'; .*True, False or None", TypeError),
        ({"tune_max_num_tokens": 0}, r"^tune_max_num_tokens is 0"),
        ({"situ_beta": torch.ones(8)}, "^situ_beta is given; it belongs to another activation_type"),
        ({"situ_linear_beta": torch.ones(8)}, "^situ_linear_beta is given"),
        ({"clamped_relu2_limit": torch.ones(1)}, "^clamped_relu2_limit is given"),
        ({"min_latency_mode": True}, "^min_latency_mode is True", NotImplementedError),
    ],
    "MoE 1": [
        ({"input": lambda x: x[0]}, r"^input is torch.bfloat16 \(160,\).*2-D"),
        ({"input": lambda x: x[:, :128].contiguous()}, r"^input is torch.bfloat16 \(6, 128\).*\(6, 160\)"),
        ({"input": strided}, r"^input is .*strides \(320, 2\); it must be a contiguous tensor"),
        (
            {"input_sf": torch.zeros(1024, dtype=torch.uint8)},
            "^input_sf is .*mode BF16_INPUT takes an unquantized input",
        ),
        ({"quant_scales": lambda s: s[::2]}, "^quant_scales is a list of 2; mode BF16_INPUT takes the 4 tensors"),
    ],
    "MoE 2": [
        ({"input": lambda x: x.half()}, r"^input is torch.float16.*torch.bfloat16"),
        ({"input_sf": torch.zeros(1024, dtype=torch.uint8)}, "^input_sf is .*mode W4A16 takes an unquantized input"),
        ({"quant_scales": lambda s: [*s, *s]}, "^quant_scales is a list of 4; mode W4A16 takes the 2 tensors"),
        ({"quant_scales[1]": lambda s: s[:7]}, r"^quant_scales\[1\] is .*\(7, 256, 4\)"),
        ({"profile_ids": [0, -1]}, r"^profile_ids is \[0, -1\].*mode W4A16, one of 3008128 \(bf16_m8_k128\), 3016128 "),
    ],
    "MoE, NVFP4": [
        ({"input": lambda x: x.half()}, r"^input is torch.float16.*torch.bfloat16"),
        (
            {"quant_scales": lambda s: [t.view(torch.uint8) for t in s]},
            r"^quant_scales is a list of 4; mode W4A16 takes the 2 tensors .* or, with NVFP4 weights, the 4 of W4A8, "
            r"block scales "
            r"torch\.float8_e4m3fn",
        ),
        ({"quant_scales[0]": lambda s: s.view(torch.uint8)}, r"^quant_scales\[0\] is torch.uint8 \(8, 256, 12\)"),
        ({"quant_scales[2]": lambda s: s.view(torch.uint8)}, r"^quant_scales\[2\] is torch.uint8 \(8, 256, 8\)"),
        (
            {"quant_scales[0]": lambda s: s[..., :8]},
            r"^quant_scales\[0\] is .*\(8, 256, 8\).*float8_e4m3fn \(8, 256, 12\)",
        ),
        ({"quant_scales[2]": lambda s: s[:7]}, r"^quant_scales\[2\] is .*\(7, 256, 8\).*float8_e4m3fn \(8, 256, 8\)"),
        (
            {"quant_scales[1]": lambda s: s[:7]},
            r"^quant_scales\[1\] is torch.float32 \(7,\).*\(8,\).*one factor per local",
        ),
        ({"quant_scales[3]": lambda s: None}, r"^quant_scales\[3\] is None", TypeError),
        ({"quant_scales": lambda s: s[:3]}, r"^quant_scales is a list of 3; mode W4A16 takes the 2 tensors"),
        (
            {"use_mxfp8_act_scaling": True, "use_w4_group_scaling": False},
            r"^quant_scales\[0\] is torch.float8_e4m3fn .* it must be contiguous 128x4 block scales, torch.uint8 ",
        ),
        (
            {"profile_ids": [3008128, -1]},
            r"^profile_ids is \[3008128, -1\].*mode W4A16, one of 13008128 \(nvfp4_bf16_m8_k128\), 13016128 ",
        ),
        ({"input_sf": torch.zeros(1024, dtype=torch.uint8)}, "^input_sf is .*mode W4A16 takes an unquantized input"),
    ],
    "MoE, SwigluStep": [
        ({name: torch.ones(8)}, f"^{name} is given; activation_type SwigluStep has swiglu_limit alone")
        for name in ("swiglu_alpha", "swiglu_beta")
    ],
    "MoE, Relu2": [
        *(
            ({name: torch.ones(8)}, f"^{name} is given; activation_type Relu2 has no parameters, pass None")
            for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
        ),
        (
            {"clamped_relu2_limit": torch.ones(1)},
            "^clamped_relu2_limit is given; it belongs to another activation_type",
        ),
        (
            {"fc1_expert_weights": lambda w: torch.cat([w, w], dim=1)},
            r"^fc1_expert_weights is .*\(8, 192, 80\) .*; .*\(8, 96, 80\).*\[experts, inter, hidden / 2\] bytes, .*, "
            r"since "
            "Relu2 has no gate rows",
        ),
        ({"fc1_expert_biases": lambda b: torch.cat([b, b], dim=1)}, r"^fc1_expert_biases is .*\(8, 192\).*\(8, 96\)"),
        (
            {"quant_scales[0]": lambda s: torch.cat([s, s], dim=1)},
            r"^quant_scales\[0\] is torch.uint8 \(8, 256, 8\).*\(8, 128, 8\)",
        ),
        (
            {"activation_type": ActivationType.Swiglu},
            r"^fc1_expert_weights is .*\(8, 96, 80\) .*; .*\(8, 192, 80\).*\[experts, 2 \* inter, hidden / 2\] bytes",
        ),
    ],
    "MoE, Relu2, NVFP4": [
        (
            {"fc1_expert_weights": lambda w: torch.cat([w, w], dim=1)},
            r"^fc1_expert_weights is .*\(8, 192, 80\) .*; .*\(8, 96, 80\).*, since Relu2 has no gate rows",
        ),
        (
            {"quant_scales[0]": lambda s: torch.cat([s, s], dim=1)},
            r"^quant_scales\[0\] is torch.float8_e4m3fn \(8, 256, 12\).*\(8, 128, 12\)",
        ),
    ],
    "MoE workspace": [
        ({"max_num_tokens": 2**29}, "^max_num_tokens is 536870912; with top_k 3 it must be at most 357913941"),
        ({"hidden_size": 150}, "^hidden_size is 150; it must be a positive multiple of 32"),
        ({"top_k": 9}, r"^top_k is 9; it must be an integer in \[1, 8\], num_experts_total"),
        *(({"x_dtype": bad}, "^x_dtype.* is .*; ") for bad in (None, "bfloat16", torch.float32)),
        *(({"output_dtype": bad}, "^output_dtype.* is .*; ") for bad in (None, torch.float32)),
    ],
}
BAD: dict[str, list[tuple[Any, ...]]] = {
    **MOE_BAD,
    "MoE 0, both flags": [
        ({"use_w4_group_scaling": True}, "^input is torch.float8_e4m3fn .*torch.bfloat16"),
    ],
    "MoE 1, both flags": [
        ({"use_w4_group_scaling": True}, "^quant_scales is a list of 4; mode AUTO takes the 2 tensors"),
        ({"use_w4_group_scaling": True, "input": lambda x: x.half()}, "^input is torch.float16 .*torch.bfloat16"),
    ],
    "MoE, NVFP4, both flags": [
        ({"use_mxfp8_act_scaling": True}, "^quant_scales is a list of 4; mode AUTO takes the 2 tensors"),
    ],
    "MoE workspace, the rest": [
        ({"max_num_tokens": 0}, r"^max_num_tokens is 0; it must be an integer in \[1, 2147483647\]"),
        ({"intermediate_size": -32}, "^intermediate_size is -32"),
        ({"num_experts_total": 0}, "^num_experts_total is 0"),
        ({"top_k": 0}, "^top_k is 0"),
        ({"ep_size": 3}, "^num_experts_total is 8; it must be a multiple of ep_size, 3"),
        ({"ep_size": 2, "ep_rank": 2}, "^ep_rank is 2"),
        ({"tp_size": 0}, "^tp_size is 0"),
        *(({"device": bad}, "^device.* is .*; ") for bad in (2.5, "cudax", "meta", [0])),
    ],
    "grouped GEMM": [
        ({"a": lambda a: a.bfloat16()}, r"^a is torch.bfloat16 \(8, 96\).*float8_e4m3fn or torch.float8_e5m2"),
        ({"a": lambda a: a[:, :64].contiguous()}, r"^a is .*\(8, 64\).*\(8, 96\)"),
        ({"a": lambda a: a.T.contiguous().T}, r"^a is .*strides"),
        ({"a": lambda a: a[0]}, r"^a is .*\(96,\).*2-D"),
        ({"b": lambda b: b.to(torch.int32)}, r"^b is torch.int32.*torch.uint8"),
        ({"b": lambda b: b[0]}, r"^b is .*3-D"),
        ({"b": lambda b: b[:, :60].contiguous()}, r"^n \(b.shape\[1\]\) is 60; it must be a positive multiple of 8"),
        ({"b": lambda b: b[..., :40].contiguous()}, r"^k \(b.shape\[2\] \* 2\) is 80; .*multiple of 32"),
        ({"b": lambda b: b[:1]}, r"^m_indptr is torch.int32 \(3,\).*\(2,\)"),
        ({"b": lambda b: b[:0]}, r"^b is .*1 to 512 groups"),
        ({"b": lambda b: b.to("meta")}, r"^b is .*on meta"),
        ({"b": lambda b: None}, r"^b is None; it must be a 3-D tensor", TypeError),
        ({"a_scale": lambda s: s[:128]}, r"^a_scale is .*\(128, 4\).* at least .* = 256 rows"),
        ({"a_scale": lambda s: s[:, :3].contiguous()}, r"^a_scale is .*\(256, 3\).*\(256, 4\)"),
        ({"a_scale": lambda s: s.flatten()}, r"^a_scale is .*2-D"),
        ({"a_scale": lambda s: s.to(torch.int8)}, r"^a_scale is torch.int8.*torch.uint8"),
        ({"b_scale": lambda s: s[:, :64].contiguous()}, r"^b_scale is .*\(2, 64, 4\).*\(2, 128, 4\)"),
        ({"b_scale": lambda s: s.float()}, r"^b_scale is torch.float32"),
        ({"m_indptr": lambda i: i.long()}, r"^m_indptr is torch.int64.*torch.int32"),
        ({"mma_sm": 2}, r"^mma_sm is 2; it must be 1"),
        ({"tile_m": 64}, r"^tile_m is 64; it must be 128"),
        ({"tile_n": 256}, r"^tile_n is 256; it must be 32 or 64 or 128"),
        ({"tile_k": 256}, r"^tile_k is 256; it must be 128"),
        ({"swap_ab": 3}, r"^swap_ab is 3; it must be True or False"),
        ({"out_dtype": torch.float32}, r"^out_dtype is torch.float32"),
        ({"out": torch.empty(8, 32, dtype=torch.bfloat16)}, r"^out is .*\(8, 32\).*\(8, 64\)"),
        (
            {"out": torch.empty(8, 64, dtype=torch.bfloat16), "out_dtype": torch.float16},
            r"^out is torch.bfloat16.*torch.float16",
        ),
        ({"m_indptr": ends(0, 3, 7)}, r"^m_indptr runs from 0 to 7; it must run from 0 to 8"),
        ({"m_indptr": ends(1, 3, 8)}, r"^m_indptr runs from 1 to 8"),
        ({"m_indptr": ends(0, 9, 8)}, r"^m_indptr\[2\] is 8, below m_indptr\[1\] = 9"),
    ],
    "dense_block_scaled": [
        ({"x": lambda t: t.float()}, r"x is torch.float32 .*must be bfloat16"),
        ({"x": lambda t: t[0]}, r"x is .* it must be a 2-D tensor"),
        ({"x": lambda t: t[:, :32]}, r"x is .*shape \(3, 64\)"),
        ({"x": lambda t: t.half()}, "with activation='bf16' and no x_scale it must be bfloat16"),
        ({"weight": lambda t: t.int()}, r"weight is torch.int32"),
        ({"weight": lambda t: t[:, :31].contiguous()}, r"k is 62; it must be a positive multiple of 32"),
        ({"weight_scale": lambda t: t[:64]}, r"weight_scale is .*512 contiguous bytes: 128x4 scales of 40 rows"),
        ({"weight_scale": lambda t: t.view(torch.float8_e4m3fn)}, r"weight_scale is torch.float8_e4m3fn"),
        ({"weight_scale": lambda t: t.view(torch.bool)}, r"weight_scale is torch.bool"),
        ({"bias": torch.zeros(39)}, r"bias is .*shape \(40,\)"),
        ({"bias": torch.zeros(40, dtype=torch.int32)}, r"bias is torch.int32"),
        ({"alpha": torch.ones(2)}, r"alpha is torch.float32"),
        ({"alpha": 1.0}, r"alpha is 1.0", TypeError),
        ({"residual": torch.zeros(3, 40)}, r"residual is torch.float32"),
        ({"out": torch.zeros(3, 41, dtype=torch.bfloat16)}, r"out is .*shape \(3, 40\)"),
        ({"out_dtype": torch.float64}, r"out_dtype is torch.float64"),
        ({"activation": "fp8"}, r"activation is 'fp8'; it must be 'mxfp4', 'mxfp8' or 'bf16'"),
        ({"x_scale": torch.zeros(6, dtype=torch.uint8)}, "with x_scale it must be float8_e4m3fn"),
        ({"tactic": 99}, r"tactic is '99'"),
        (
            {"weight_format": "fp4"},
            r"weight_format is 'fp4'; it must be 'mxfp4', 'nvfp4', 'mxfp6', 'mxint8' or 'mxfp8'",
        ),
        ({"weight_format": None}, r"weight_format is None; it must be"),
        ({"weight_format": "mxint8"}, r"weight is torch.uint8 .* must be .*torch.int8, .*\(weight_format='mxint8'\)"),
        ({"weight_format": "mxfp6"}, r"x is torch.bfloat16 .* must be .*shape \(3, 32\)"),  # of 32 bytes, 8 padding
    ],
    "dense_block_scaled, mxint8": [
        (
            {"weight": lambda t: t.view(torch.uint8)},
            r"weight is torch.uint8 .* must be a contiguous tensor of torch.int8",
        ),
        ({"activation": "mxfp4"}, r"activation is 'mxfp4'; with mxint8 weights it may be bf16, mxfp8"),
    ],
    "dense_block_scaled, mxfp6": [
        ({"weight": lambda t: t[:, :40].contiguous()}, r"weight is .*; a row of mxfp6 is 24 bytes"),
        (
            {"weight": lambda t: t.view(torch.int8)},
            r"weight is torch.int8 .* must be a contiguous tensor of torch.uint8",
        ),
        ({"weight_format": "mxfp4"}, r"x is .* must be .*shape \(3, 96\)"),
    ],
    "dense_block_scaled, nvfp4": [
        (
            {"weight_scale": lambda t: t.view(torch.float8_e8m0fnu)},
            r"weight_scale is torch.float8_e8m0fnu .*E4M3 block",
        ),
        ({"weight_scale": lambda t: t[:64]}, r"weight_scale is .*512 contiguous bytes: .* 40 rows and 4 blocks of 16"),
    ],
    "dense_block_scaled_top_k": [
        ({"top_k": 0}, r"top_k is 0; it must be an integer in \[1, 8\], no more than the weight has rows"),
        ({"top_k": 9}, r"top_k is 9"),
        ({"top_k": 1.0}, r"top_k is 1.0", TypeError),
        ({"first_index": -1}, r"first_index is -1"),
        ({"logits": torch.zeros(3, 41)}, r"logits is .*shape \(3, 40\)"),
        ({"logits": torch.zeros(3, 40, dtype=torch.float64)}, r"out_dtype is torch.float64"),
        ({"tactic": 99}, r"tactic is '99'"),
        ({"weight": lambda w: w[:5], "top_k": 6}, r"top_k is 6; it must be an integer in \[1, 5\]"),
        (
            {"weight": lambda w: w[:0], "weight_scale": lambda s: s[:0]},
            r"^weight is torch.uint8 \(0, 32\) on \w+(:0)?; it must have rows, of whose outputs some are the largest$",
        ),
    ],
    "decode": [
        ({"query": lambda t: t.float()}, r"query is torch.float32 .* must be torch.bfloat16 \(2, 16, 64\)"),
        ({"query": lambda t: t[:, :8]}, r"must be torch.bfloat16 \(2, 16, 64\)"),
        ({"query": lambda t: wide(t)[..., ::2]}, "the heads of a token must lie one after the other"),
        ({"query": lambda t: apart(t, 0)}, "tokens a multiple of 8 elements apart"),
        ({"key": lambda t: apart(t, 0)}, "key is .* tokens a multiple of 8 elements apart"),
        ({"value": lambda t: apart(t, 0)}, "value is .* tokens a multiple of 8 elements apart"),
        *(({"kv_cache": lambda t, i=i: apart(t, i)}, r"strides .* multiples of 8 \(16 bytes\)") for i in (0, 2, 3)),
        *(
            ({"kv_cache": lambda t, i=i: apart(t.to(E4M3), i, 8)}, r"strides .* multiples of 16 \(16 bytes\)")
            for i in (0, 2, 3)
        ),
        ({"kv_cache": lambda t: t[:, 0]}, "it must be 5-D, its second dimension 2"),
        ({"kv_cache": lambda t: (t[:, 0],)}, "kv_cache is a tuple of 1"),
        ({"kv_cache": lambda t: (t[:, 0], t[:, 1].contiguous())}, "both must be alike"),
        (
            {"kv_cache": lambda t: [t[:, 0].contiguous(), moved_to(t[:, 1].contiguous(), 8)]},
            r"^kv_cache's values starts at address 0x\w+; it must be aligned to 16 bytes",
        ),
        ({"kv_cache": lambda t: t.half()}, "kv_cache has torch.float16"),
        ({"kv_cache": lambda t: wide(t)}, "kv_cache has heads of 128; they must be of 64"),
        ({"kv_cache": lambda t: t[..., :8, :]}, "kv_cache has pages of 8; it must be a power of two from 16 on"),
        ({"kv_cache": lambda t: wide(t)[..., ::2]}, "kv_cache has strides .* the last must be 1"),
        (
            {"kv_cache": lambda t: tuple(t[:1, part].expand(len(t), -1, -1, -1) for part in (0, 1))},
            "where key is given they are written, and may not be expanded",
        ),
        ({"kv_layout": "DHN"}, "kv_layout is 'DHN'; it must be 'HND' or 'NHD'"),
        ({"block_tables": lambda t: t.long()}, r"block_tables is torch.int64 .* must be int32 \(2, max_pages\)"),
        ({"block_tables": lambda t: t[:1]}, r"must be int32 \(2, max_pages\)"),
        ({"block_tables": lambda t: t.T.contiguous().T}, "rows must be contiguous"),
        ({"seq_lens": lambda t: t.long()}, "seq_lens is torch.int64"),
        ({"seq_lens": lambda t: t[None]}, "seq_lens is .* it must be a 1-D tensor"),
        ({"key": None}, "key is None; it must be given where value is: key and value go together"),
        ({"value": lambda t: t[:1]}, r"value is .* must be torch.bfloat16 \(2, 2, 64\)"),
        ({"rope_table": lambda t: t.half()}, "rope_table is torch.float16"),
        ({"rope_table": lambda t: t[:, :32]}, r"rope_table is .*\(\d+, 64\)"),
        ({"sinks": lambda t: t.bfloat16()}, "sinks is torch.bfloat16"),
        ({"sinks": lambda t: t[:8]}, r"sinks is .*\(16,\)"),
        ({"q_len_per_req": 65}, r"q_len_per_req is 65; it must be an integer in \[1, 64\]"),
        ({"q_len_per_req": 0}, "q_len_per_req is 0"),
        ({"window_left": 1.5}, "window_left is 1.5", TypeError),
        ({"sm_scale": 0.0}, "sm_scale is 0.0; it must be a number in"),
        ({"k_scale": torch.ones(1)}, "k_scale is .* it must be a number", TypeError),
        ({"v_scale": math.nan}, "v_scale is nan"),
        ({"k_scale": 1e-40}, "k_scale is 1e-40"),
        ({"kv_cache": lambda t: t[:, :, :0]}, "the number of KV heads is 0"),
        ({"out": torch.zeros(2, 16, 32, dtype=torch.bfloat16)}, r"out is .*\(2, 16, 64\)"),
    ],
    "router": [
        ({"hidden_states": lambda t: t.float()}, r"hidden_states is torch.float32"),
        ({"hidden_states": lambda t: t[:, :56]}, r"hidden_states is .*shape \(3, 64\)"),
        ({"hidden_states": lambda t: t[0]}, "it must be a 2-D tensor"),
        ({"hidden_states": lambda t: t.repeat_interleave(2, 0)[::2]}, "hidden_states is .* a contiguous tensor"),
        ({"weight": lambda t: torch.cat([t, t[:, :4]], 1)[:, :-4]}, "weight is .* a contiguous tensor"),
        ({"residual": torch.zeros(3, 68, dtype=torch.bfloat16)[:, :64]}, "residual is .* a contiguous tensor"),
        ({"weight": lambda t: t.half()}, "weight is torch.float16"),
        ({"weight": lambda t: t[:, :60].contiguous()}, "k is 60; it must be a multiple of 8"),
        ({"weight": lambda t: t.new_zeros(513, 64)}, r"num_experts is 513; it must be an integer in \[1, 512\]"),
        ({"top_k": 9}, r"top_k is 9; it must be an integer in \[1, 8\], no more than there are experts"),
        ({"top_k": 0}, "top_k is 0"),
        *(({"eps": eps}, f"eps is {eps}; it must be a number in") for eps in (math.nan, -1e-5, math.inf)),
        ({"eps": None}, "eps is None", TypeError),
        ({"bias": torch.zeros(8)}, "bias is torch.float32"),
        ({"residual": torch.zeros(2, 64, dtype=torch.bfloat16)}, r"residual is .*shape \(3, 64\)"),
        ({"norm_weight": torch.zeros(63, dtype=torch.bfloat16)}, r"norm_weight is .*shape \(64,\)"),
    ],
    "MoE, other kinds": [
        ({"backend": "nonsense"}, "unsupported fused MoE backend"),
        *(
            ({name: value}, OTHER_KINDS, NotImplementedError)
            for name, value in {
                "use_mxfp8_act_scaling": False,
                "use_packed_weights": True,
                "use_wfp4afp8_humming": True,
                "use_deepseek_fp8_block_scale": True,
                "fc1_expert_weights": lambda w: w.bfloat16(),
            }.items()
        ),
        *(
            (
                {"activation_type": kind},
                rf"{OTHER_KINDS}.* Swiglu, SwigluStep or Relu2, .* activation_type ActivationType.{kind.name}[.]",
                NotImplementedError,
            )
            for kind in ActivationType
            if kind.name not in ("Swiglu", "SwigluBias", "SwigluStep", "Relu2")
        ),
    ],
    "MoE workspace, other kinds": [
        ({"weight_dtype": torch.bfloat16}, "on the CPU only MXFP4 weights are served", NotImplementedError),
    ],
    "dense_block_scaled, MXFP8 weights": [
        ({"activation": "mxfp4"}, r"activation is 'mxfp4'; with mxfp8 weights it may be bf16, mxfp8"),
    ],
    "dense_block_scaled, linear scales": [
        ({"swizzled_x_scale": True}, r"x_scale is .* it must be 512 contiguous bytes: 128x4 scales of 3 rows"),
    ],
    "mm_fp4": [
        ({"out": lambda out: out.t().contiguous()}, r"out is torch.bfloat16 \(72, 3\).*shape \(3, 72\)"),
        (
            {"b_descale": lambda s: s[:, :2]},
            r"b_descale is .* it must be 512 contiguous bytes: 128x4 scales of 72 rows",
        ),
        ({"use_8x4_sf_layout": True}, "takes 128x4 scales"),
    ],
    "mm_mxfp8": [
        ({"b": lambda b: b.contiguous()}, r"b is .*it must be column-major"),
        ({"use_8x4_sf_layout": True}, "use_8x4_sf_layout must be False"),
        ({"a": lambda a: a.bfloat16()}, r"a is torch.bfloat16 .* must be a matrix of torch.float8_e4m3fn"),
        ({"a_descale": lambda s: s[:64]}, r"a_descale is .* it must be 512 contiguous bytes"),
    ],
    "mm_bf16_fp4": [
        ({"block_size": 64}, r"block_size is 64; with backend='sm12x' it must be 16 \(NVFP4\) or 32"),
        (
            {"block_size": 16},
            r"b_descale is .* it must be 1024 contiguous bytes: 128x4 scales of 72 rows and 6 blocks of 16",
        ),
    ],
    "mm_bf16_mxfp8": [
        ({"a": lambda a: a.half()}, r"a is torch.float16"),
        ({"b": lambda b: b.bfloat16()}, r"b is torch.bfloat16"),
    ],
    "mxfp8_quantize": [
        ({"input": lambda x: x[:, :48]}, r"input is torch.float32 \(2, 48\).*multiple of 32"),
        ({"input": lambda x: x.int()}, "input is torch.int32"),
        ({"input": lambda x: x[0, 0]}, "^input.* is .*; "),
        ({"input": lambda x: x[:, :0]}, "^input.* is .*; "),
        *(({"alignment": bad}, "^alignment.* is .*; ", EITHER) for bad in (*NUMBERS, 48) if bad is not True),
        *(({"sf_swizzle_layout": bad}, "^sf_swizzle_layout.* is .*; ", EITHER) for bad in BAD_LAYOUTS),
        ({"sf_swizzle_layout": SfLayout.layout_8x4}, "layout_8x4 exists on CUDA only"),
        ({"backend": "xyz"}, "backend is 'xyz'; it must be 'cuda' or 'cute-dsl'"),
        ({"scale_rule": "least"}, r"scale_rule is 'least'; it must be one of 'amax', 'mse'"),
        ({"is_sf_swizzled_layout": "False"}, "is_sf_swizzled_layout is 'False'; it must be an integer", TypeError),
    ],
    "mxfp4_quantize": [
        ({"a": lambda x: x[:, :33]}, r"a is torch.float32 \(2, 33\)"),
        ({"a": lambda x: x.int()}, "a is torch.int32"),
        ({"a": lambda x: x[0, 0]}, "^a.* is .*; "),
        ({"a": lambda x: x[:, :0]}, "^a.* is .*; "),
        *(({"sfLayout": bad}, "^sfLayout.* is .*; ", EITHER) for bad in BAD_LAYOUTS),
        ({"scale_rule": "least"}, r"scale_rule is 'least'; it must be one of 'amax', 'mse'"),
    ],
    "mxfp4_dequantize": [
        ({"a_sf": lambda s: s.flatten()[:3]}, "a_sf holds 3 bytes; layout_128x4 scales of a 2 x 32 matrix have 512"),
        ({"a_fp4": torch.zeros(2, 17).byte()}, "a_fp4 is torch.uint8"),
        *(
            (
                {"a_sf": torch.zeros(512).byte().view(dtype)},
                f"a_sf is {dtype} .*must be dense, torch.uint8 or torch.float8_e8m0fnu",
            )
            for dtype in (torch.bool, torch.int8, E4M3, torch.int32, torch.float32)
        ),
    ],
    "block_scale_interleave": [
        ({"unswizzled_sf": lambda s: s.float()}, "unswizzled_sf is torch.float32"),
        ({"out": lambda out: out[:-1]}, "out is"),
    ],
}


def in_a_row_each(bad: dict[str, list[tuple[Any, ...]]]) -> list[Any]:
    """``bad`` as a test's parameters: operator, changes, message, error."""
    return [
        pytest.param(operator, changes, message, *(error or [ValueError]), id=f"{operator}: {message[:60]}")
        for operator, rows in bad.items()
        for changes, message, *error in rows
    ]


def changed(arguments: Arguments, changes: Arguments) -> Arguments:
    """A right call's arguments, changed."""
    for key, change in changes.items():
        name, _, index = key.rstrip("]").partition("[")
        held, place = (list(arguments[name]), int(index)) if index else (arguments, name)
        held[place] = change(held[place]) if callable(change) else change
        arguments[name] = held if index else held[name]
    return arguments


@pytest.mark.parametrize(("operator", "changes", "message", "error"), in_a_row_each(BAD))
def test_a_bad_argument_is_named(
    operator: str,
    changes: Arguments,
    message: str,
    error: type[Exception] | tuple[type[Exception], ...],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, make = CALLS[operator]
    arguments = on(device, make())
    if device.type == "cuda":
        if operator.removesuffix(", both flags").removesuffix(", the rest") not in ON_A_GPU:
            pytest.skip("on the CPU only")
        monkeypatch.setenv("FLASHINFER_SM12X_CHECK", "1")
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # layout_8x4 would be upstream's
    if "device" in arguments:
        arguments["device"] = device
    with pytest.raises(error, match=message):
        function(**on(device, changed(arguments, changes)))


def test_a_tensor_that_changed_in_place_is_checked_again() -> None:
    """``resize_`` and ``set_`` leave the object what it was."""
    arguments = _moe(0) | {"output": torch.empty(6, 160, dtype=torch.bfloat16)}
    flashinfer.cutlass_fused_moe(**arguments)
    arguments["output"].resize_(6, 64)
    with pytest.raises(ValueError, match=r"^output"):
        flashinfer.cutlass_fused_moe(**arguments)
    arguments["output"].set_(torch.empty(6, 320, dtype=torch.bfloat16)[:, ::2])
    with pytest.raises(ValueError, match=r"^output"):
        flashinfer.cutlass_fused_moe(**arguments)
