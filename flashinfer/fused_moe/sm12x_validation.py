# SPDX-License-Identifier: Apache-2.0
"""What an MXFP4 MoE call may look like, checked once for the CPU and the CUDA backend.

:func:`select_mode` decides from dtypes and flags whether a call is one of the three MXFP4 modes,
:func:`validate_moe` checks everything that shapes, dtypes, strides and devices tell, and
:func:`check_expert_ids` what only the values tell.  All errors name the argument, what it was and what it may be.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import torch

from ..jit.sm12x.instances import MAX_EXPERTS, Activation
from ..sm12x_arguments import (
    INT32_MAX,
    describe,
    is_dense,
    require_int,
    require_k_alignment,
    require_output_dtype,
    require_tensor,
    require_tensor_type,
    round_up,
)

BLOCK_SIZE = 32  # elements that share one UE8M0 scale (OCP MX v1.0, section 5.2)
WORKSPACE_ALIGNMENT = 128  # bytes, as cutlass_fused_moe asks
WEIGHT_DTYPES = (torch.uint8, torch.int64)
# What a byte of scales may be typed as: the unified MoE layer hands linear ones over as float8.
SCALE_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
SWIGLU = 3  # ActivationType.Swiglu
PADDING_EXPERT = -1  # what vLLM gives the slots of padding tokens


class Mode(enum.IntEnum):
    """The three combinations of activations and MXFP4 weights; the numbers are the kernel module's."""

    MXFP8_INPUT = 0  # W4A8, the caller quantized the input
    HALF_INPUT = 1  # W4A8, bf16/fp16 input quantized inside
    W4A16 = 2

    @property
    def activation(self) -> Activation:
        """Name of the activation format in the instance tables."""
        return "bf16" if self is Mode.W4A16 else "mxfp8"


INPUT_DTYPES = {
    Mode.MXFP8_INPUT: (torch.float8_e4m3fn,),
    Mode.HALF_INPUT: (torch.bfloat16, torch.float16),
    Mode.W4A16: (torch.bfloat16,),
}
_QUANT_SCALES = {
    Mode.MXFP8_INPUT: "[fc1 weight scales, fc1 global scale, fc2 weight scales, fc2 global scale]",
    Mode.HALF_INPUT: "[fc1 weight scales, fc1 global scale, fc2 weight scales, fc2 global scale]",
    Mode.W4A16: "[fc1 weight scales, fc2 weight scales]",
}


@dataclasses.dataclass(frozen=True)
class MoEProblem:
    """The sizes of a validated call; everything that planning and launching need to know."""

    mode: Mode
    num_tokens: int
    hidden: int
    inter: int
    num_local_experts: int
    top_k: int
    first_expert: int
    num_experts_total: int


def select_mode(
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    use_mxfp8_act_scaling: bool,
    use_w4_group_scaling: bool,
    use_packed_weights: bool,
    use_wfp4afp8_humming: bool,
    use_deepseek_fp8_block_scale: bool,
    activation_type: int,
) -> Mode | None:
    """The MXFP4 mode that dtypes and flags ask for, or ``None`` when the call is of another kind.

    The flags and the weights' dtype decide; an input dtype that does not fit the mode is an error of
    :func:`validate_moe`, not another kind of call.
    """
    if (
        weight_dtype not in WEIGHT_DTYPES
        or activation_type != SWIGLU
        or use_packed_weights
        or use_wfp4afp8_humming
        or use_deepseek_fp8_block_scale
    ):
        return None
    if use_mxfp8_act_scaling:
        if use_w4_group_scaling:
            raise ValueError(
                "use_mxfp8_act_scaling and use_w4_group_scaling are both True; MXFP4 weights take the first for "
                "MXFP8 activations (W4A8) or the second for bfloat16 activations (W4A16), not both"
            )
        return Mode.HALF_INPUT if input_dtype in INPUT_DTYPES[Mode.HALF_INPUT] else Mode.MXFP8_INPUT
    return Mode.W4A16 if use_w4_group_scaling else None


def swizzled_scale_shapes(groups: int | None, rows: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Accepted ``(dtype, shape)`` pairs of 128x4 block scales of ``groups`` matrices ``[rows, k]``.

    Bytes ``[groups, pad128(rows), pad4(k / 32)]``, their int32 view with a quarter of the last extent, and the flat
    bytes that ``block_scale_interleave`` returns.
    """
    padded_rows, blocks = round_up(rows, 128), round_up(-(-k // BLOCK_SIZE), 4)
    lead = () if groups is None else (groups,)
    count = padded_rows * blocks * (1 if groups is None else groups)
    return (
        (torch.uint8, (*lead, padded_rows, blocks)),
        (torch.int32, (*lead, padded_rows, blocks // 4)),
        (torch.uint8, (count,)),
    )


def require_swizzled_scales(
    name: str,
    value: Any,
    groups: int | None,
    rows: int,
    k: int,
    device: torch.device,
) -> None:
    """Raise unless ``value`` holds 128x4 block scales of ``groups`` matrices ``[rows, k]``."""
    accepted = swizzled_scale_shapes(groups, rows, k)
    expected = " or ".join(f"{dtype} {shape}" for dtype, shape in accepted)
    expected = f"contiguous 128x4 block scales, {expected}, on {device}"
    require_tensor_type(name, value, expected)
    if (value.dtype, tuple(value.shape)) not in accepted or value.device != device or not is_dense(value):
        raise ValueError(f"{name} is {describe(value)}; it must be {expected}")


def require_parallel_sizes(tp_size: Any, tp_rank: Any, ep_size: Any, ep_rank: Any) -> tuple[int, int]:
    """``(ep_size, ep_rank)``; raises unless both ranks lie inside their groups."""
    checked = []
    for name, size, rank in (("tp", tp_size, tp_rank), ("ep", ep_size, ep_rank)):
        size = require_int(f"{name}_size", size, 1)
        checked += [size, require_int(f"{name}_rank", rank, 0, size - 1, f"below {name}_size")]
    return checked[2], checked[3]


def require_pairs(name: str, num_tokens: int, top_k: int) -> None:
    """Raise ``ValueError`` where there are more (token, slot) pairs than the kernels count; ``name`` is the tokens'."""
    most = INT32_MAX // 2 // top_k
    if num_tokens > most:
        raise ValueError(f"{name} is {num_tokens}; with top_k {top_k} it must be at most {most}: split the batch")


def _weight_sizes(fc1: Any, fc2: Any, device: torch.device) -> tuple[int, int, int]:
    """``(num_local_experts, hidden, inter)`` of the packed weights, whose shapes must agree."""
    for name, weights in (("fc1_expert_weights", fc1), ("fc2_expert_weights", fc2)):
        require_tensor_type(name, weights, "a uint8 or int64 tensor")
        if weights.ndim != 3 or weights.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{name} is {describe(weights)}; it must be packed e2m1, 3-D, as torch.uint8 or its torch.int64 view"
            )
    experts, hidden, columns = fc2.shape
    inter = columns * 2 * fc2.dtype.itemsize
    require_k_alignment("hidden size (fc2_expert_weights.shape[1])", hidden)
    require_k_alignment("intermediate size (fc2_expert_weights.shape[2], unpacked)", inter)
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"fc2_expert_weights is {describe(fc2)}; it must hold 1 to {MAX_EXPERTS} experts")
    shape = (experts, 2 * inter, hidden // (2 * fc1.dtype.itemsize))
    what = "[experts, 2 * inter, hidden / 2] bytes, inter and hidden as fc2_expert_weights has them"
    require_tensor("fc1_expert_weights", fc1, [shape], [fc1.dtype], device, what)
    require_tensor("fc2_expert_weights", fc2, [tuple(fc2.shape)], [fc2.dtype], device)
    return experts, hidden, inter


def _check_quant_scales(problem: MoEProblem, quant_scales: Any, device: torch.device) -> None:
    layout = _QUANT_SCALES[problem.mode]
    count = 2 if problem.mode is Mode.W4A16 else 4
    if not isinstance(quant_scales, (list, tuple)) or len(quant_scales) != count:
        raise ValueError(
            f"quant_scales is {describe(quant_scales)}; mode {problem.mode.name} takes the {count} tensors {layout}"
        )
    experts, hidden, inter = problem.num_local_experts, problem.hidden, problem.inter
    step = count // 2
    require_swizzled_scales("quant_scales[0]", quant_scales[0], experts, 2 * inter, hidden, device)
    require_swizzled_scales(f"quant_scales[{step}]", quant_scales[step], experts, hidden, inter, device)
    if count == 4:
        for index in (1, 3):
            require_tensor(
                f"quant_scales[{index}]",
                quant_scales[index],
                [(experts,)],
                [torch.float32],
                device,
                "one factor per local expert",
            )


def _check_input_sf(problem: MoEProblem, input_sf: Any, swizzled: bool, device: torch.device) -> None:
    if problem.mode is not Mode.MXFP8_INPUT:
        if input_sf is not None:
            raise ValueError(
                f"input_sf is {describe(input_sf)}; mode {problem.mode.name} takes an unquantized input and no input_sf"
            )
        return
    if input_sf is None:
        raise ValueError(
            "input_sf is None; a float8_e4m3fn input needs its UE8M0 block scales (uint8, what mxfp8_quantize returns)"
        )
    if swizzled:
        require_swizzled_scales(
            "input_sf (swizzled_input_sf=True)",
            input_sf,
            None,
            problem.num_tokens,
            problem.hidden,
            device,
        )
    else:
        blocks = problem.hidden // BLOCK_SIZE
        shapes = [(problem.num_tokens, blocks), (problem.num_tokens * blocks,)]
        require_tensor(
            "input_sf (swizzled_input_sf=False)",
            input_sf,
            shapes,
            SCALE_DTYPES,
            device,
            "linear scales",
        )


def validate_moe(
    mode: Mode,
    *,
    input: torch.Tensor,
    input_sf: torch.Tensor | None,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc1_expert_biases: torch.Tensor | None,
    fc2_expert_weights: torch.Tensor,
    fc2_expert_biases: torch.Tensor | None,
    quant_scales: Sequence[torch.Tensor],
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    output: torch.Tensor | None,
    output_dtype: torch.dtype,
    swizzled_input_sf: bool,
    tp_size: int,
    tp_rank: int,
    ep_size: int,
    ep_rank: int,
) -> MoEProblem:
    """Check the metadata of a call of ``cutlass_fused_moe`` with MXFP4 weights and return its sizes.

    Looks at no element, so it needs no synchronization.  Arguments are those of ``cutlass_fused_moe``.

    Raises
    ------
    TypeError, ValueError
        Naming the first argument that does not fit, what it was and what it may be.
    """
    device = input.device
    ep_size, ep_rank = require_parallel_sizes(tp_size, tp_rank, ep_size, ep_rank)
    require_output_dtype("output_dtype", output_dtype)
    experts, hidden, inter = _weight_sizes(fc1_expert_weights, fc2_expert_weights, device)
    if input.ndim != 2:
        raise ValueError(f"input is {describe(input)}; it must be 2-D, [num_tokens, {hidden}]")
    tokens = input.shape[0]
    require_tensor("input", input, [(tokens, hidden)], INPUT_DTYPES[mode], device)

    wanted = f"2-D int32, [{tokens}, top_k]"
    require_tensor_type("token_selected_experts", token_selected_experts, wanted)
    if token_selected_experts.ndim != 2:
        raise ValueError(f"token_selected_experts is {describe(token_selected_experts)}; it must be {wanted}")
    top_k = token_selected_experts.shape[1]
    require_tensor(
        "token_selected_experts",
        token_selected_experts,
        [(tokens, top_k)],
        [torch.int32],
        device,
    )
    require_int("ep_size", ep_size, 1, INT32_MAX // experts, f"with {experts} experts a rank, since ids are int32")
    total = experts * ep_size
    if not 1 <= top_k <= total:
        raise ValueError(
            f"top_k (token_selected_experts.shape[1]) is {top_k}; it must be in [1, {total}], the number of experts "
            f"({experts} here x ep_size {ep_size})"
        )
    require_pairs("num_tokens (input.shape[0])", tokens, top_k)
    problem = MoEProblem(mode, tokens, hidden, inter, experts, top_k, ep_rank * experts, total)
    if token_final_scales is not None:
        require_tensor(
            "token_final_scales",
            token_final_scales,
            [(tokens, top_k)],
            [torch.float32],
            device,
        )
    _check_quant_scales(problem, quant_scales, device)
    _check_input_sf(problem, input_sf, swizzled_input_sf, device)
    bias_dtypes = tuple(dict.fromkeys((torch.bfloat16, output_dtype)))
    for name, bias, rows in (
        ("fc1_expert_biases", fc1_expert_biases, 2 * inter),
        ("fc2_expert_biases", fc2_expert_biases, hidden),
    ):
        if bias is not None:
            require_tensor(name, bias, [(experts, rows)], bias_dtypes, device)
    for name, parameter in (
        ("swiglu_alpha", swiglu_alpha),
        ("swiglu_beta", swiglu_beta),
        ("swiglu_limit", swiglu_limit),
    ):
        if parameter is not None:
            require_tensor(name, parameter, [(experts,)], [torch.float32], device)
    if output is not None:
        require_tensor("output", output, [(tokens, hidden)], [output_dtype], device)
    return problem


def check_expert_ids(token_selected_experts: torch.Tensor, num_experts: int) -> None:
    """Raise ``ValueError`` when an id is neither -1, which is padding, nor in ``[0, num_experts)``.

    Reads the values, so it synchronizes.
    """
    if token_selected_experts.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(token_selected_experts))
    if low < PADDING_EXPERT or high >= num_experts:
        bad = (token_selected_experts < PADDING_EXPERT) | (token_selected_experts >= num_experts)
        token, slot = (int(i) for i in bad.nonzero()[0])
        value = int(token_selected_experts[token, slot])
        raise ValueError(
            f"token_selected_experts[{token}, {slot}] is {value}; expert ids must be in [0, {num_experts}), or "
            f"{PADDING_EXPERT} for padding ({int(bad.sum())} of {bad.numel()} are not)"
        )


def check_workspace(workspace: Any, needed: int, device: torch.device, hint: str) -> None:
    """Raise unless ``workspace`` is a 1-D byte tensor on ``device``, and large enough.

    Where kernels read it, it must be aligned too; that is checked with the other addresses, on every call.

    ``hint`` says how its size is to be found.
    """
    require_tensor_type("workspace_buffer", workspace, "a 1-D torch.uint8 or torch.int8 tensor")
    if workspace.ndim != 1 or workspace.dtype not in (torch.uint8, torch.int8) or not is_dense(workspace):
        raise ValueError(
            f"workspace_buffer is {describe(workspace)}; it must be contiguous, 1-D, torch.uint8 or torch.int8"
        )
    if workspace.device != device:
        raise ValueError(f"workspace_buffer is on {workspace.device}; it must be on the input's device, {device}")
    if workspace.numel() < needed:
        raise ValueError(f"workspace_buffer holds {workspace.numel()} bytes; this call needs {needed} ({hint})")
