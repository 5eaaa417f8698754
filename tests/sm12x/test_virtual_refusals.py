# SPDX-License-Identifier: Apache-2.0
"""Every check of the bindings, by the compiled modules themselves, on the virtual SM121.

Python has validated what it passes on. The bindings repeat what keeps kernels within their tensors, for callers of the
module, so they are reached here past Python: a call that an operator makes is repeated with an argument that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bindings import in_order, named, refusals
from virtual_devices import assert_clean
from virtual_group_gemm import launch_group_gemm
from virtual_moe import moe_module, run_moe

from flashinfer.decode import decode_attention
from flashinfer.fused_moe import router_top_k, sm12x_launch
from flashinfer.gemm import (
    dense_block_scaled,
    dense_block_scaled_rescored_top_k,
    dense_block_scaled_top_k,
    rmsnorm_dense_block_scaled,
)
from flashinfer.gemm.sm12x_dense_launch import BF16, MXFP8_LINEAR
from flashinfer.gemm.sm12x_dense_rescored import MAX_GROUP_ROWS, MAX_K
from flashinfer.jit.sm12x.modules import gen_dense_module
from flashinfer.sm12x.instances import DENSE_INSTANCES, GEMM_INSTANCES, INSTANCES, MAX_EXPERTS, index_of
from flashinfer.testing import DenseCase, MoECase, make_dense_inputs, make_group_gemm_inputs, make_moe_inputs
from flashinfer.testing.decode_reference import make_decode_case
from flashinfer.testing.dense_reference import TOKENS
from flashinfer.testing.router_reference import make_router_inputs
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

Arguments = dict[str, Any]
DENSE = {row.name: row.index for row in DENSE_INSTANCES}
STREAM, GEMM, GEMM_MXFP8, GEMM_MXFP4 = (
    DENSE[f"dense_mxfp4_{name}"] for name in ("m8_w2", "m32_gemm", "m64_gemm_mxfp8", "m64_gemm_mxfp4")
)
K_TOO_LONG = 4096


@pytest.fixture(scope="module")
def device() -> Iterator[VirtualDevice]:
    with virtual_device("sm_121a") as made:
        yield made
        assert_clean(made)


def dense(device: VirtualDevice) -> None:
    inputs = make_dense_inputs(DenseCase(3, 40, 96, tokens="mxfp8", bias=torch.float32, residual=True), 1)
    dense_block_scaled(*inputs.arguments, **inputs.named, tactic="dense_mxfp4_m64_gemm_mxfp8")


def normed(device: VirtualDevice) -> None:
    inputs = make_dense_inputs(DenseCase(3, 40, 96), 1)
    x, *weights = inputs.arguments
    rmsnorm_dense_block_scaled(
        x, torch.ones(96, dtype=torch.bfloat16), *weights, **inputs.named, residual=torch.ones_like(x)
    )


def top_k(device: VirtualDevice) -> None:
    inputs = make_dense_inputs(DenseCase(3, 40, 96), 1)
    dense_block_scaled_top_k(*inputs.arguments, **inputs.named, top_k=1, tactic="dense_mxfp4_m8_w2")


def rescored(device: VirtualDevice) -> None:
    inputs = make_dense_inputs(DenseCase(3, 40, 96, bias=torch.float32), 1)
    fine = torch.zeros(40, 96, dtype=torch.bfloat16)
    dense_block_scaled_rescored_top_k(*inputs.arguments, fine, **inputs.named, groups=2, rescored=3)


def searched(device: VirtualDevice) -> None:
    logits = torch.zeros(3, 40)
    values, indices, ranks = (
        torch.zeros(3, 1),
        torch.zeros(3, 1, dtype=torch.int64),
        torch.zeros(9999, dtype=torch.uint8),
    )
    device.call(device.module(gen_dense_module, "mxfp4").sm12x_row_top_k_run, values, indices, 0, ranks, logits, True)


def dequantized(device: VirtualDevice) -> None:
    inputs = make_dense_inputs(DenseCase(3, 8, 96, tokens="mxfp8"), 1)
    out, module = torch.zeros(3, 96, dtype=torch.bfloat16), device.module(gen_dense_module, "mxfp4")
    arguments = (out, inputs.arguments[0], inputs.named["x_scale"], TOKENS.index("mxfp8"))
    device.call(module.sm12x_dequantize_rows, *arguments)


def moe(device: VirtualDevice) -> None:
    sm12x_launch.ensure_instance(device, index_of("bf16_m8_k128"))  # which one of the cases asks for
    inputs = make_moe_inputs(MoECase(2, 96, 64, 4, 2, 0), 1)
    run_moe(device, inputs, 0, [index_of("mxfp8_m8_k128")] * 2)


def streamed(device: VirtualDevice) -> None:
    inputs = make_moe_inputs(MoECase(2, 96, 64, 4, 2, 2), 1)
    run_moe(device, inputs, 2, [index_of("stream_bf16_m8")] * 2, next_weights=torch.zeros(64, dtype=torch.uint8))


def router(device: VirtualDevice) -> None:
    router_top_k(**make_router_inputs(3, 64, 9, 2, 1, adds=True, norms=True, bias=True))


def grouped(device: VirtualDevice) -> None:
    launch_group_gemm(device, make_group_gemm_inputs([3, 5], 40, 96, 1), GEMM_INSTANCES[0].index)


def decode(device: VirtualDevice) -> None:
    decode_attention(**make_decode_case([20, 40], 1, 1).arguments)


FUNCTIONS = {
    dense: "sm12x_dense_run",
    normed: "sm12x_dense_normed_run",
    top_k: "sm12x_dense_top_k_run",
    rescored: "sm12x_rescore_run",
    searched: "sm12x_row_top_k_run",
    dequantized: "sm12x_dequantize_rows",
    moe: "sm12x_moe_run",
    streamed: "sm12x_moe_run",
    router: "sm12x_router_run",
    grouped: "sm12x_group_gemm_run",
    decode: "sm12x_decode_run",
}


def last_call(device: VirtualDevice, make: Callable[[VirtualDevice], None]) -> tuple[Any, Arguments]:
    """The function of a module that an operator calls last, and its arguments by their names."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    call = device.call

    def recording(function: Any, *arguments: Any, **options: Any) -> Any:
        calls.append((function, arguments))
        return call(function, *arguments, **options)

    device.call = recording  # type: ignore[method-assign]
    try:
        make(device)
    finally:
        del device.call
    function, arguments = calls[-1]
    return function, named(FUNCTIONS[make], arguments)


def fewer(name: str) -> Callable[[Arguments], Arguments]:
    """An element or a row less."""
    return lambda a: {name: a[name][:-1]}


def less(name: str) -> Callable[[Arguments], Arguments]:
    """A column less."""
    return lambda a: {name: a[name][..., :-1].contiguous()}


def given(**values: Any) -> Callable[[Arguments], Arguments]:
    return lambda a: values


def off_by_one_byte(name: str) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: torch.zeros(a[name].numel() + 1, dtype=torch.uint8)[1:].view(a[name].shape)}


HALF = torch.zeros(3, 40, dtype=torch.float16)
FLOAT64 = torch.zeros(3, 40, dtype=torch.float64)
CASES: list[tuple[Callable[[VirtualDevice], None], Callable[[Arguments], Arguments], str]] = [
    (dense, given(token_format=99), "the format is 99; it may be 0 to"),
    (dense, less("tokens"), "a row is 95 wide, not 96"),
    (dense, given(token_scales=None), "quantized rows need their scales"),
    (dense, given(token_scales=torch.zeros(9, dtype=torch.uint8)), "there are 9 scales; 512 are needed"),
    (dense, given(tactic=999), "tactic 999 of the dense layer does not exist"),
    (dense, given(tactic=-1), "tactic is -1; it must be below 2^31"),
    (dense, less("out"), "out must be [3, 40]"),
    (dense, fewer("out"), "out must be [3, 40]"),
    (dense, fewer("weight_scales"), "weight_scales is too small"),
    (dense, fewer("bias"), "bias must have n elements"),
    (dense, given(bias=FLOAT64[0]), "bias must be bfloat16, float16 or float32"),
    (dense, given(residual=HALF), "residual must have the shape and dtype of out"),
    (dense, fewer("residual"), "residual must have the shape and dtype of out"),
    (dense, given(workspace=None), "needs a workspace"),
    (dense, fewer("workspace"), "the workspace is too small"),
    (dense, off_by_one_byte("token_scales"), "scales of tokens must start at a multiple of 4 bytes"),
    (dense, given(tactic=GEMM_MXFP4), "this dense tactic multiplies MXFP4 tokens"),
    (
        dense,
        lambda a: {"token_format": BF16, "tokens": torch.zeros(3, 96, dtype=torch.bfloat16)},
        "this dense tactic multiplies MXFP8 tokens",
    ),
    (
        dense,
        lambda a: {
            "tokens": torch.zeros(3, K_TOO_LONG, dtype=torch.bfloat16),
            "token_format": BF16,
            "weights": torch.zeros(40, K_TOO_LONG // 2, dtype=torch.uint8),
            "weight_scales": torch.zeros(128 * K_TOO_LONG // 32, dtype=torch.uint8),
            "tactic": STREAM,
        },
        "K is too long for this dense tactic",
    ),
    (dense, lambda a: {"token_format": MXFP8_LINEAR, "token_scales": a["token_scales"].flatten()[:8]}, "9 are needed"),
    (normed, given(norm_weight=torch.ones(95, dtype=torch.bfloat16)), "norm_weight must have k elements"),
    (normed, given(sum=None), "residual and what it adds up to must be"),
    (normed, fewer("addend"), "residual and what it adds up to must be"),
    (normed, given(tactic=GEMM), "has no norm in front of it"),
    (normed, given(tactic=DENSE["dense_mxfp4_m16_w2"]), "up to eight bfloat16 tokens, and tiles of eight"),
    (normed, given(next_weights=torch.zeros(64, dtype=torch.uint8)[1:]), "next_weights must start at a multiple of 16"),
    (top_k, lambda a: {"indices": torch.zeros(3, 9, dtype=torch.int64), "values": torch.zeros(3, 9)}, "top 9 of 40"),
    (top_k, fewer("values"), "values and indices must be [rows, top_k]"),
    (top_k, lambda a: {"ranks": a["ranks"][: 8 * 3 * 4 * 48 - 1]}, "ranks is too small"),
    (
        top_k,
        lambda a: {"indices": a["indices"][:2], "values": a["values"][:2]},
        "indices must have a row for each token",
    ),
    (rescored, fewer("fine"), "of at least one token and one row of the fine weight"),
    (rescored, fewer("tokens"), "of at least one token and one row of the fine weight"),
    (rescored, given(groups=0), "groups is 0, rescored 3; they must be positive"),
    (rescored, given(rescored=17), "groups is 2, rescored 17; they must be positive, rescored at most 16"),
    (
        rescored,
        lambda a: {
            "logits": torch.zeros(1, 1).expand(3, MAX_GROUP_ROWS + 1),
            "fine": torch.zeros(1, 96, dtype=torch.bfloat16).expand(MAX_GROUP_ROWS + 1, 96),
            "groups": 1,
        },
        f"groups is 1 of {MAX_GROUP_ROWS + 1} rows; there are less than 2^27, in a group at most {MAX_GROUP_ROWS}",
    ),
    (
        rescored,
        lambda a: {
            "tokens": torch.zeros(3, MAX_K + 32, dtype=torch.bfloat16),
            "fine": torch.zeros(40, MAX_K + 32, dtype=torch.bfloat16),
        },
        f"k is {MAX_K + 32}; it must be at most {MAX_K}",
    ),
    (rescored, lambda a: {"fine": torch.zeros(40, 64, dtype=torch.bfloat16)}, "a row is 64 wide, not 96"),
    (
        rescored,
        given(fine_scales=torch.zeros(9, dtype=torch.uint8), fine=torch.zeros(40, 96, dtype=torch.int8)),
        "there are 9 scales",
    ),
    (rescored, fewer("bias"), "bias must have n elements"),
    (rescored, given(indices=None), "values come with indices and ranks"),
    (rescored, lambda a: {"indices": a["indices"][:2], "values": a["values"][:2]}, "indices must have a row for each"),
    (rescored, lambda a: {"groups": 900, "ranks": a["ranks"][: 8 * 3 * 900 - 1]}, "ranks is too small"),
    (searched, fewer("logits"), "logits must have as many rows"),
    (searched, given(logits=FLOAT64), "logits must be bfloat16, float16 or float32"),
    (dequantized, given(out=torch.zeros(3, 96, dtype=torch.float16)), "out must be bfloat16, with as many rows"),
    (dequantized, fewer("out"), "out must be bfloat16, with as many rows"),
    (dequantized, given(out=torch.zeros(3, 95, dtype=torch.bfloat16)), "k is 95; it must be a multiple of 32"),
    (moe, given(mode=3), "mode is 3; it may be 0"),
    (moe, given(top_k=0), "top_k is 0"),
    (moe, given(token_selected_experts=None), "experts are chosen by token_selected_experts or by router_logits"),
    (moe, fewer("token_selected_experts"), "token_selected_experts must be [tokens, top_k]"),
    (
        moe,
        given(token_selected_experts=None, router_logits=torch.zeros(2, 3)),
        "router_logits must be [tokens, experts]",
    ),
    (
        moe,
        given(
            token_selected_experts=None, router_logits=torch.zeros(2, 4), is_padding=torch.zeros(3, dtype=torch.bool)
        ),
        "is_padding must be [tokens]",
    ),
    (moe, given(token_selected_experts=None, router_logits=torch.zeros(2, 4)), "the two-kernel path takes expert ids"),
    (moe, given(barrier=torch.zeros(3, dtype=torch.int32)), "barrier must have two elements"),
    (moe, given(activation_type=99), "activation_type 99 is none of these kernels'"),
    (moe, less("input"), "disagree about hidden or intermediate size"),
    (moe, fewer("fc1_w"), "disagree about hidden or intermediate size"),
    (
        moe,
        lambda a: {
            "input": a["input"][:, :80].contiguous(),
            "fc1_w": a["fc1_w"][..., :40].contiguous(),
            "fc2_w": a["fc2_w"][:, :80].contiguous(),
        },
        "hidden size 80 and intermediate size 64 must be multiples of 32",
    ),
    (
        moe,
        lambda a: {
            "fc1_w": a["fc1_w"][:1].expand(MAX_EXPERTS + 1, -1, -1),
            "fc2_w": a["fc2_w"][:1].expand(MAX_EXPERTS + 1, -1, -1),
        },
        "513 local experts; the kernels route at most 512",
    ),
    (
        moe,
        lambda a: {"top_k": 1 << 30, "token_selected_experts": torch.zeros(1, dtype=torch.int32).expand(2, 1 << 30)},
        "too many routed rows (tokens x top_k) for one call",
    ),
    (moe, given(first_expert=1), "local experts [1, 5) of 4"),
    (moe, given(first_expert=-1), "local experts [-1, 3) of 4"),
    (moe, given(input_sf=None), "MXFP8 input needs its scales"),
    (moe, off_by_one_byte("input_sf"), "input_sf must start at a multiple of 4 bytes"),
    (moe, given(tactic_fc1=999), "tactic 999 is not among the instances of this module"),
    (moe, given(tactic_fc2=index_of("bf16_m8_k128")), "was compiled for other activations than this call has"),
    (moe, fewer("fc1_sf"), "scales; the tactic's weights have"),
    (moe, fewer("fc2_sf"), "scales; the tactic's weights have"),
    (moe, fewer("workspace"), "the workspace is too small"),
    (moe, lambda a: {"output": a["output"].double()}, "output must be bfloat16, float16 or float32"),
    (moe, lambda a: {"fc1_bias": a["fc1_bias"].double()}, "fc1_expert_biases must be bfloat16, float16 or float32"),
    (
        streamed,
        lambda a: {"fc2_bias": torch.zeros(4 * 96 + 4)[1:-3].view(4, 96)},
        "biases must start at a multiple of 16",
    ),
    (
        streamed,
        given(next_weights=torch.zeros(64, dtype=torch.uint8)[1:]),
        "next_weights must start at a multiple of 16",
    ),
    (
        streamed,
        lambda a: {
            "token_selected_experts": None,
            "router_logits": torch.zeros(2, 513),
            "num_experts_total": 513,
        },
        "chooses experts of at most 32 routed rows (tokens x top_k), of at most 512",
    ),
    (router, less("hidden"), "k is 63"),
    (router, less("weight"), "weight must be [experts, k]"),
    (
        router,
        lambda a: {"top_k_ids": torch.zeros(3, 10, dtype=torch.int32), "top_k_weights": torch.zeros(3, 10)},
        "9 experts, top 10",
    ),
    (router, fewer("logits"), "logits is too small"),
    (router, fewer("top_k_ids"), "top_k_weights and top_k_ids must be [tokens, top_k]"),
    (router, fewer("top_k_weights"), "top_k_weights and top_k_ids must be [tokens, top_k]"),
    (router, fewer("residual"), "residual must have 192 elements"),
    (router, fewer("bias"), "bias must have 9 elements"),
    (router, given(sum=None), "sum goes with residual"),
    (router, given(normed=None), "normed goes with norm_weight"),
    (grouped, lambda a: {"a": a["a"].bfloat16()}, "a must be float8_e4m3fn or float8_e5m2"),
    (grouped, less("b"), "a, b, out and m_indptr disagree about their sizes"),
    (grouped, fewer("m_indptr"), "a, b, out and m_indptr disagree about their sizes"),
    (
        grouped,
        lambda a: {"a": a["a"][:, :80].contiguous(), "b": a["b"][..., :40].contiguous()},
        "k is 80; it must be a multiple of 32",
    ),
    (
        grouped,
        lambda a: {"b": a["b"][:1].expand(513, -1, -1), "m_indptr": torch.zeros(514, dtype=torch.int32)},
        "513 groups; the kernels take at most 512",
    ),
    (grouped, off_by_one_byte("a_sf"), "a_scale must start at a multiple of 4 bytes"),
    (grouped, given(tactic=len(INSTANCES)), "no grouped GEMM instance of that tactic is loaded"),
    (grouped, lambda a: {"workspace": a["workspace"][:-300]}, "the workspace is too small"),
    (grouped, lambda a: {"out": a["out"].double()}, "out must be bfloat16, float16 or float32"),
    (decode, given(q_len=0), "q_len_per_req is 0"),
    (decode, given(q_len=65), "q_len_per_req is 65"),
    (decode, fewer("query"), "query must be [2, 8, 64]"),
    (decode, fewer("out"), "out must be as query"),
    (decode, given(key=None), "key goes with value"),
    (decode, fewer("value"), "key and value must be [2, 1, 64]"),
    (decode, fewer("block_tables"), "block_tables must have a row a sequence"),
    (decode, given(sinks=torch.zeros(7)), "sinks must have 8"),
    (decode, lambda a: {"key_cache": a["key_cache"][:, :, :8]}, "pages have 8 positions; it must be a power of two"),
    (decode, lambda a: {"workspace": a["workspace"][: a["workspace"].numel() // 2]}, "workspace is too small"),
]
ELSEWHERE = {
    "a row of weights is ": "rows of a format have one width for each K, so that K follows from the width",
    " of the dense layer is no GEMM": "asked of a size, below",
    "; it must be at least 1": "asked of a size, below",
    "the module handed over for tactic ": "asked of a registration, below",
    "launch": "the text of a launch that fails",
}
"""Texts of checks that no case has, and why."""


@pytest.mark.parametrize(
    ("make", "change", "message"), CASES, ids=[f"{make.__name__} {text}" for make, _, text in CASES]
)
def test_a_wrong_argument_is_refused(
    device: VirtualDevice, make: Callable[[VirtualDevice], None], change: Callable[[Arguments], Arguments], message: str
) -> None:
    function, arguments = last_call(device, make)
    before = len(device.launches)
    with pytest.raises(Exception, match=re.escape(message)):
        device.call(function, *in_order(FUNCTIONS[make], **arguments | change(arguments)))
    assert len(device.launches) == before, "nothing is launched"


def test_sizes_and_registrations_are_refused(device: VirtualDevice) -> None:
    dense_module = device.module(gen_dense_module, "mxfp4")
    with pytest.raises(Exception, match=f"tactic {STREAM} of the dense layer is no GEMM"):
        device.call(dense_module.sm12x_dense_gemm_workspace_size, 3, 96, STREAM, BF16)
    _, arguments = last_call(device, moe)
    assert arguments["top_k"] == 2
    with pytest.raises(Exception, match="top_k is 0; it must be at least 1"):
        device.call(moe_module(device).sm12x_moe_workspace_size, 3, 96, 64, 4, 0, 0, False)
    with pytest.raises(Exception, match="the module handed over for tactic 5 holds another instance"):
        device.call(moe_module(device).sm12x_register_instance, 5, 0)


def test_every_check_of_a_binding_has_its_case() -> None:
    """The texts in the sources, each by its longest part."""
    checks = [
        each for each in refusals() if "sm12x" in each.file and "binding" in each.file and "probe" not in each.file
    ]
    assert len({each.file for each in checks}) >= 6
    messages = [text for _, _, text in CASES]
    for each in checks:
        found = any(
            message in part or (len(part.strip()) > 2 and part.strip()[:30] in message)
            for message in messages
            for part in each.parts
        )
        assert found or max(each.parts, key=len).startswith(tuple(ELSEWHERE)), each
