# SPDX-License-Identifier: Apache-2.0
"""Each argument of each public operator, wrong in each way: an error that names it, what it is and what it may be.

These tests run on the CPU. ``test_virtual_contract.py`` checks that the kernels' errors have the same words.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from operator_calls import (
    OPERATORS,
    Arguments,
    changes,
    get_tensor,
    moved_to,
    name_of,
    outcome,
    places,
    put_tensor,
    workspace_sizes,
)

import flashinfer
from flashinfer.fused_moe import cutlass_fused_moe_workspace_size
from flashinfer.gemm import prepare_bf16_fp4_weights, sm12x_group_gemm


def _prepare(b: torch.Tensor, b_descale: torch.Tensor, alpha: torch.Tensor | None = None, block_size: int = 32) -> Any:
    return prepare_bf16_fp4_weights(b, b_descale, alpha, backend="sm12x", block_size=block_size)


ON_THE_CPU: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    **OPERATORS,
    # Not among the operators': the kernels need 12 MB, the CPU needs none.
    "MoE 0, a workspace": (
        flashinfer.cutlass_fused_moe,
        lambda: {**OPERATORS["MoE 0"][1](), "workspace_buffer": torch.zeros(4096, dtype=torch.uint8)},
    ),
    "workspace size": (cutlass_fused_moe_workspace_size, workspace_sizes),
    # Their kernels are upstream's.
    "mxfp8_quantize": (flashinfer.mxfp8_quantize, lambda: {"input": torch.ones(4, 64)}),
    "mxfp4_quantize": (flashinfer.mxfp4_quantize, lambda: {"a": torch.ones(4, 64)}),
    "mxfp4_dequantize": (
        flashinfer.mxfp4_dequantize,
        lambda: dict(zip(("a_fp4", "a_sf"), flashinfer.mxfp4_quantize(torch.ones(4, 64)), strict=True)),
    ),
    "prepare_bf16_fp4_weights": (
        _prepare,
        lambda: {
            name: value for name, value in OPERATORS["mm_bf16_fp4"][1]().items() if name in ("b", "b_descale", "alpha")
        },
    ),
    "block_scale_interleave": (
        flashinfer.block_scale_interleave,
        lambda: {"unswizzled_sf": torch.ones(4, 8).byte(), "out": torch.ones(1024).byte()},
    ),
}
# The message's words about a value that no argument may have.
MESSAGES = {
    "None": "None", "list": r"a list of 2|1\.0", "numpy array": r"a numpy\.ndarray, uint8 \(", "float": r"2\.5",
    "string": "'tensor'", "on meta": "meta", "sparse": r"layout torch\.sparse_coo",
        "torch.complex64": r"torch\.complex64",
    "a storage that was resized": r"its storage holds \d+ bytes",
        "a storage that was cut short": r"its storage holds \d+ bytes",
}  # fmt: skip
MESSAGES_OF_NUMBERS = {
    "None": "None", "'2'": "'?2'?", "2.5": r"2\.5", "-3": "-3", "1099511627776": "1099511627776",
        "[1]": r"a list of 1|\[1\]|\['1'\]",
}  # fmt: skip
# Values that make another argument wrong, or a size; and upstream's own words, which the last two are.
OF_ANOTHER = (
    r"(k|num_experts|cluster_size|out_dtype|(hidden|intermediate) size)( \(.*\))? is .*; ",
    r"(x|a) is .*; with activation='bf16' and no x_scale it must be bfloat16",
    r"(input_sf|query|x_scale) .*is .*; it must be ",
    r"cutlass_fused_moe on CPU tensors serves MXFP4 weights .*; ",
    r"device must be a cuda device",
)  # fmt: skip
OPTIONAL = ("token_final_scales",)  # by its documentation only
LONG = ("profile_ids",)  # all tactics are listed


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_an_error_names_the_argument_and_what_was_given(name: str) -> None:
    function, make = ON_THE_CPU[name]
    parameters = inspect.signature(function).parameters
    given = make()
    names = "|".join(map(re.escape, (*given, *parameters)))
    unclear, refused, tried = [], 0, 0
    for named, what, change in changes(function, make):
        arguments = make()
        change(arguments)
        kind, text, _ = outcome(function, arguments)
        tried, refused = tried + 1, refused + bool(kind)
        argument = named.partition("[")[0]
        tensor = argument != named or isinstance(given.get(argument), torch.Tensor)
        if not kind:
            known = parameters[argument]
            optional = what == "None" and ("None" in f"{known.annotation} {known.default}" or argument in OPTIONAL)
            if tensor and what in MESSAGES and not optional:
                unclear.append((named, what, "is taken"))
            continue
        message = MESSAGES.get(what) if tensor else MESSAGES_OF_NUMBERS.get(what)
        exact = (
            rf"{re.escape(named)}(?!\w).*(?:{message})"
            if message
            else rf"(?:{names})(?!\w).*(?: is| are| has| holds| starts at| overlaps| runs from) "
        )
        clear = kind in ("TypeError", "ValueError") and re.match(exact + ".*; ", text)
        clear = clear and (len(text) < 400 or named in LONG)
        of_another = not re.match(rf"{argument}(?!\w)", text) and any(re.match(pattern, text) for pattern in OF_ANOTHER)
        if not clear and not of_another:
            unclear.append((named, what, f"{kind}: {text}"))
    assert not unclear, "\n".join(map(str, unclear))
    assert refused > tried // 3


@pytest.mark.parametrize(
    ("groups", "rows", "fits"), [(1, 2**31 - 128, True), (1, 2**31 - 127, False), (4, 2**31, False)]
)
def test_rows_of_the_grouped_gemm_fit_int32(groups: int, rows: int, fits: bool) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    call = sm12x_group_gemm.GroupGemmCall(
        None,
        empty(rows, 32, dtype=torch.float8_e4m3fn),
        empty(groups, 8, 16),
        empty(sm12x_group_gemm.scale_rows(rows, groups), 4),
        empty(groups, 128, 4),
        empty(groups + 1, dtype=torch.int32),
        None,
        [1, 128, 128, 128],
        True,
        None,
    )
    if fits:
        assert sm12x_group_gemm.validate(call) is torch.bfloat16
        return
    with pytest.raises(ValueError, match=rf"^cum_m \(a.shape\[0\]\) is {rows}; it must be an integer in \[0, "):
        sm12x_group_gemm.validate(call)


# Tensors of an operator must start at a multiple of so many bytes; the kernels copy so many at once.
ALIGNMENTS = {
    "MoE 0": {
        16: "input fc1_expert_weights fc2_expert_weights quant_scales[0] quant_scales[2] fc1_expert_biases "
            "fc2_expert_biases output",
        4: "input_sf token_selected_experts token_final_scales quant_scales[1] quant_scales[3] swiglu_alpha "
            "swiglu_beta swiglu_limit",
    },
    "grouped GEMM": {16: "a b b_scale out", 4: "a_scale m_indptr"},
    "dense_block_scaled, MXFP8 tokens": {16: "x weight weight_scale", 4: "x_scale alpha", 2: "bias residual out"},
    "dense_block_scaled, linear scales": {16: "x weight weight_scale", 4: "alpha", 2: "bias residual out",
        1: "x_scale"},
    "decode": {16: "query kv_cache key value rope_table out", 4: "block_tables seq_lens sinks"},
    "router": {16: "hidden_states weight residual norm_weight", 2: "bias", 1: "is_padding"},
}  # fmt: skip


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_addresses_are_multiples_of_what_is_copied_at_once(name: str) -> None:
    function, make = OPERATORS[name]
    wanted = {tensor: alignment for alignment, tensors in ALIGNMENTS[name].items() for tensor in tensors.split()}
    for place in places(make()):
        alignment = wanted.pop(name_of(place))
        arguments = make()
        put_tensor(arguments, place, moved_to(get_tensor(arguments, place), alignment))
        assert outcome(function, arguments)[0] == "", (place, alignment)
        if alignment > 1:
            put_tensor(arguments, place, moved_to(get_tensor(arguments, place), alignment // 2))
            _, text, _ = outcome(function, arguments)
            message = rf"{re.escape(name_of(place))}.* starts at address 0x; it must be aligned to {alignment} bytes"
            assert re.match(message, text), (place, text)
    assert not wanted


def test_every_tensor_is_listed() -> None:
    """An argument that upstream adds is one to add to the calls; ``next_weights`` may have any shape and dtype."""
    foreign = {"clamped_relu2_limit", "situ_beta", "situ_linear_beta", "workspace_buffer", "next_weights"}
    for function, _ in OPERATORS.values():
        parameters = inspect.signature(function).parameters.items()
        typed = {name for name, parameter in parameters if "Tensor" in str(parameter.annotation)}
        every = set().union(*(make_one() for other, make_one in OPERATORS.values() if other is function))
        assert typed - foreign <= every, (function, typed - foreign - every)
