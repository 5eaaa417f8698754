# SPDX-License-Identifier: Apache-2.0
"""The rules for MXFP4 and NVFP4 MoE calls, which hold for every backend.

:func:`select_mode` finds a call's mode by dtypes and flags, or that the call is of another kind, :func:`validate`
checks everything that metadata and addresses tell, and :func:`check_expert_ids` and :func:`check_limits` what only the
values tell.  All errors name the argument, what it was and what it may be.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..sm12x.checks import (
    BLOCK_SIZE,
    ELEMENT,
    INT32_MAX,
    NVFP4_SCALES,
    SCALE_WORD,
    UE8M0,
    UE8M0_DTYPES,
    BlockScales,
    CallCache,
    Unchanged,
    are_apart,
    bounds_of,
    describe,
    is_tensor,
    padded_scales,
    require_activation_bytes,
    require_apart,
    require_int,
    require_k_alignment,
    require_output_dtype,
    require_rank,
    require_read_ahead,
    require_switches,
    require_tensor,
    require_tensor_type,
    span,
)
from ..sm12x.instances import MAX_EXPERTS, Format

WEIGHT_DTYPES = (torch.uint8, torch.int64)
FLOAT32 = (torch.float32,)
MAX_TOP_K = 32  # of a router's logits: a lane each
MAX_ROUTED_EXPERTS = 512  # kRouterMaxExperts: columns of a router's logits
# The unified MoE layer hands linear scales over as views in e4m3.
LINEAR_SCALE_DTYPES = (*UE8M0_DTYPES, torch.float8_e4m3fn)


class Activation(NamedTuple):
    """An activation of the kernels (``moe/activation.cuh``)."""

    name: str
    defaults: dict[str, float]
    """Arguments of ``cutlass_fused_moe`` that hold one parameter per expert, and its value when they are omitted."""
    parts: int = 2
    """FC1's rows of one output: an up row and a gate row, or an up row alone."""


_SWIGLU = Activation("Swiglu", {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": float("inf")})
ACTIVATIONS = {
    3: _SWIGLU,
    5: _SWIGLU,  # SwigluBias, Swiglu with its parameters by another name
    6: Activation("Relu2", {}, parts=1),
    7: Activation("SwigluStep", {"swiglu_limit": 7.0}),  # kDefaultStepLimit
}
"""The activations by the number of their ``ActivationType``."""
_ACTIVATION_TYPES = tuple(ACTIVATIONS)  # a tuple compares and does not hash: an argument may be a tensor
PADDING_EXPERT = -1  # what vLLM gives the slots of padding tokens


class Mode(enum.IntEnum):
    """Format of the activations that MMAs multiply; the kernel module knows the first three by the same numbers."""

    MXFP8_INPUT = 0  # W4A8, the caller quantized the input
    BF16_INPUT = 1  # W4A8, bf16/fp16 input quantized inside
    W4A16 = 2
    AUTO = 3  # W4A16 or BF16_INPUT, by a call's tokens

    __hash__ = int.__hash__  # each call hashes its problem, and Enum's own is Python

    @property
    def activation(self) -> Format:
        """Name of the activation format in the instance tables; :attr:`AUTO` has none yet."""
        assert self is not Mode.AUTO
        return "bf16" if self is Mode.W4A16 else "mxfp8"


MODES = {mode.value: mode for mode in Mode}
"""The modes by their numbers; a third of the time of ``Mode(number)``."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
INPUT_DTYPES = {
    Mode.MXFP8_INPUT: (torch.float8_e4m3fn,),
    Mode.BF16_INPUT: HALF_DTYPES,
    Mode.W4A16: (torch.bfloat16,),
    Mode.AUTO: (torch.bfloat16,),
}
BIAS_DTYPES = {torch.bfloat16: (torch.bfloat16,), torch.float16: (torch.bfloat16, torch.float16)}
"""Allowed dtypes of biases, by the output's dtype."""
_QUANT_SCALES = {
    Mode.MXFP8_INPUT: "[fc1 weight scales, fc1 global scale, fc2 weight scales, fc2 global scale]",
    Mode.BF16_INPUT: "[fc1 weight scales, fc1 global scale, fc2 weight scales, fc2 global scale]",
    Mode.W4A16: "[fc1 weight scales, fc2 weight scales]; or, with NVFP4 weights, the 4 of W4A8, block scales "
    "torch.float8_e4m3fn",
    Mode.AUTO: "[fc1 weight scales, fc2 weight scales]",
}


NVFP4 = BlockScales("E4M3", (torch.float8_e4m3fn,), NVFP4_SCALES.block)
"""NVFP4's block scales; :func:`weights_of` tells NVFP4 experts from MXFP4 ones by their dtype."""


class MoECall(NamedTuple):
    """The arguments of one call, named as in ``cutlass_fused_moe``.

    Three places rely on their order: the schema of ``flashinfer::sm12x_cutlass_fused_moe``, ``_options`` below, and
    ``cutlass_fused_moe`` and :class:`SM12xMoELayer`, which give them by place.
    """

    output: torch.Tensor | None
    workspace_buffer: torch.Tensor | None
    input: torch.Tensor
    input_sf: torch.Tensor | None
    token_selected_experts: torch.Tensor | None  # None: by router_logits
    token_final_scales: torch.Tensor | None
    fc1_expert_weights: torch.Tensor
    fc1_expert_biases: torch.Tensor | None
    fc2_expert_weights: torch.Tensor
    fc2_expert_biases: torch.Tensor | None
    quant_scales: list[torch.Tensor]
    swiglu_alpha: torch.Tensor | None
    swiglu_beta: torch.Tensor | None
    swiglu_limit: torch.Tensor | None
    activation_type: int  # one of ACTIVATIONS
    output_dtype: torch.dtype
    moe_mode: int  # Mode; "mode" alone is taken by torch.compile's own dispatch
    swizzled_input_sf: bool
    tp_size: int
    tp_rank: int
    ep_size: int
    ep_rank: int
    enable_alltoall: bool
    tune_max_num_tokens: int
    enable_pdl: bool | None
    profile_ids: list[int] | None
    # Further arguments, which only moe_step has.
    next_weights: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None
    top_k: int = 0
    is_padding: torch.Tensor | None = None
    barrier: torch.Tensor | None = None


class MoEProblem(NamedTuple):
    """The sizes of a validated call; everything that planning and launching need to know."""

    mode: Mode
    num_tokens: int
    hidden: int
    inter: int
    num_local_experts: int
    top_k: int
    first_expert: int
    num_experts_total: int
    routed_experts: int
    """Among which the tokens' slots are spread: all ranks', or this rank's where all-to-all brought its tokens
    alone."""
    weights: str = "mxfp4"


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
    :func:`validate`, not another kind of call.
    """
    if (
        weight_dtype not in WEIGHT_DTYPES
        or activation_type not in _ACTIVATION_TYPES
        or use_packed_weights
        or use_wfp4afp8_humming
        or use_deepseek_fp8_block_scale
    ):
        return None
    if use_mxfp8_act_scaling:
        if use_w4_group_scaling:
            return Mode.AUTO
        # A mode is not hashed here: torch.compile traces this function, and Dynamo of torch 2.11 cannot hash one.
        return Mode.BF16_INPUT if input_dtype in HALF_DTYPES else Mode.MXFP8_INPUT
    return Mode.W4A16 if use_w4_group_scaling else None


def weights_of(mode: Mode, quant_scales: Any) -> str:
    """The format of the experts: NVFP4 in W4A16 with four scales if a matrix's block scales are float8_e4m3fn, else
    MXFP4."""
    if mode is Mode.W4A16 and isinstance(quant_scales, (list, tuple)) and len(quant_scales) == 4:
        of_blocks = (getattr(scales, "dtype", None) for scales in quant_scales[::2])
        return "nvfp4" if any(dtype in NVFP4.dtypes for dtype in of_blocks) else "mxfp4"
    return "mxfp4"


@functools.lru_cache(maxsize=1024)
def swizzled_scale_shapes(
    groups: int | None, rows: int, k: int, scales: BlockScales = UE8M0
) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Accepted ``(dtype, shape)`` pairs of 128x4 block scales of ``groups`` matrices ``[rows, k]``.

    Bytes ``[groups, pad128(rows), pad4(k / 32)]``, their int32 view with a quarter of the last extent, and the flat
    bytes that ``block_scale_interleave`` returns.  NVFP4's are float8_e4m3fn, for 16 elements of K, in the first and
    the last of these forms.
    """
    padded_rows, blocks = padded_scales(rows, -(-k // scales.block))
    lead = () if groups is None else (groups,)
    count = padded_rows * blocks * (1 if groups is None else groups)
    if scales is NVFP4:
        return tuple((dtype, shape) for dtype in NVFP4.dtypes for shape in ((*lead, padded_rows, blocks), (count,)))
    return (
        (torch.uint8, (*lead, padded_rows, blocks)),
        (torch.float8_e8m0fnu, (*lead, padded_rows, blocks)),
        (torch.int32, (*lead, padded_rows, blocks // 4)),
        (torch.uint8, (count,)),
        (torch.float8_e8m0fnu, (count,)),
    )


def require_swizzled_scales(
    name: str,
    value: Any,
    groups: int | None,
    rows: int,
    k: int,
    device: torch.device,
    alignment: int,
    scales: BlockScales = UE8M0,
) -> None:
    """Raise unless ``value`` holds 128x4 block scales of ``groups`` matrices ``[rows, k]``."""
    accepted = swizzled_scale_shapes(groups, rows, k, scales)
    if is_tensor(value) and (value.dtype, value.shape) in accepted:
        return require_tensor(name, value, [value.shape], [value.dtype], device, "128x4 block scales", alignment)
    expected = " or ".join(f"{dtype} {shape}" for dtype, shape in accepted)
    expected = f"contiguous 128x4 block scales, {expected}, on {device}"
    require_tensor_type(name, value, expected)
    raise ValueError(f"{name} is {describe(value)}; it must be {expected}")


def require_parallel_sizes(tp_size: Any, tp_rank: Any, ep_size: Any, ep_rank: Any) -> tuple[int, int]:
    """``(ep_size, ep_rank)``; raises unless both ranks lie inside their groups."""
    tp_size = require_int("tp_size", tp_size, 1)
    require_int("tp_rank", tp_rank, 0, tp_size - 1, "below tp_size")
    ep_size = require_int("ep_size", ep_size, 1)
    return ep_size, require_int("ep_rank", ep_rank, 0, ep_size - 1, "below ep_size")


def require_pairs(name: str, num_tokens: int, top_k: int) -> None:
    """Raise ``ValueError`` where there are more routed rows than the kernels count; ``name`` is the tokens'."""
    most = INT32_MAX // 2 // top_k
    if num_tokens > most:
        raise ValueError(f"{name} is {num_tokens}; with top_k {top_k} it must be at most {most}: split the batch")


def _weight_sizes(fc1: Any, fc2: Any, activation: Activation, device: torch.device) -> tuple[int, int, int]:
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
    shape = (experts, activation.parts * inter, hidden // (2 * fc1.dtype.itemsize))
    rows = "2 * inter" if activation.parts == 2 else "inter"
    what = f"[experts, {rows}, hidden / 2] bytes, inter and hidden as fc2_expert_weights has them"
    if activation.parts == 1:
        what += f", since {activation.name} has no gate rows"
    require_tensor("fc1_expert_weights", fc1, [shape], [fc1.dtype], device, what)
    require_tensor("fc2_expert_weights", fc2, [tuple(fc2.shape)], [fc2.dtype], device)
    return experts, hidden, inter


def _check_quant_scales(mode: Mode, layer: CheckedExperts, fc1_rows: int, quant_scales: Any) -> None:
    nvfp4 = layer.weights == "nvfp4"
    count = 2 if mode in (Mode.W4A16, Mode.AUTO) and not nvfp4 else 4
    if not isinstance(quant_scales, (list, tuple)) or len(quant_scales) != count:
        raise ValueError(
            f"quant_scales is {describe(quant_scales)}; mode {mode.name} takes the {count} tensors "
            f"{_QUANT_SCALES[mode]}"
        )
    device, experts, hidden, inter = layer[:4]
    step = count // 2
    for index, rows, k in ((0, fc1_rows, hidden), (step, hidden, inter)):
        scales = NVFP4 if nvfp4 else UE8M0
        require_swizzled_scales(f"quant_scales[{index}]", quant_scales[index], experts, rows, k, device, 16, scales)
        if count == 4:
            name, factors, what = f"quant_scales[{index + 1}]", quant_scales[index + 1], "one factor per local expert"
            require_tensor(name, factors, [(experts,)], [torch.float32], device, what, ELEMENT)


def _check_input_sf(mode: Mode, tokens: int, k: int, input_sf: Any, swizzled: bool, device: torch.device) -> None:
    if mode is not Mode.MXFP8_INPUT:
        if input_sf is not None:
            raise ValueError(
                f"input_sf is {describe(input_sf)}; mode {mode.name} takes an unquantized input and no input_sf"
            )
        return
    if input_sf is None:
        raise ValueError(
            "input_sf is None; a float8_e4m3fn input needs its UE8M0 block scales (uint8, what mxfp8_quantize returns)"
        )
    name = f"input_sf (swizzled_input_sf={bool(swizzled)})"
    if swizzled:
        return require_swizzled_scales(name, input_sf, None, tokens, k, device, SCALE_WORD)
    blocks = k // BLOCK_SIZE
    # Rows that are no whole words of scales are read by bytes.
    alignment = SCALE_WORD if k % (SCALE_WORD * BLOCK_SIZE) == 0 else ELEMENT
    shapes = [(tokens, blocks), (tokens * blocks,)]
    require_tensor(name, input_sf, shapes, LINEAR_SCALE_DTYPES, device, "linear scales", alignment)


def _require_expert_ids(ids: Any, tokens: int, device: torch.device) -> int:
    """Check ``token_selected_experts``; how many a token has."""
    require_rank("token_selected_experts", ids, 2, f"2-D int32, [{tokens}, top_k]")
    top_k: int = ids.shape[1]
    require_tensor("token_selected_experts", ids, [(tokens, top_k)], [torch.int32], device, alignment=ELEMENT)
    return top_k


def _require_routing(call: MoECall, tokens: int, experts: int, device: torch.device) -> int:
    """Check what experts are chosen by; how many a token has."""
    ids = call.token_selected_experts
    if call.router_logits is None:
        if ids is None and call.top_k:
            raise TypeError("router_logits is None; it must be a tensor where there are no token_selected_experts")
        top_k = _require_expert_ids(ids, tokens, device)
        if call.is_padding is not None:
            raise ValueError("is_padding is given; it belongs to router_logits, ids of -1 mark padding without them")
        if call.top_k:
            raise ValueError(f"top_k is {call.top_k}; it belongs to router_logits, pass 0 with token_selected_experts")
        return top_k
    if ids is not None or call.token_final_scales is not None:
        raise ValueError(
            "router_logits are given; token_selected_experts and token_final_scales must be None beside them"
        )
    require_tensor(
        "router_logits",
        call.router_logits,
        [(tokens, experts)],
        [torch.float32],
        device,
        "all experts",
        alignment=ELEMENT,
    )
    if experts > MAX_ROUTED_EXPERTS:
        raise ValueError(
            f"router_logits is {describe(call.router_logits)}; it must have at most {MAX_ROUTED_EXPERTS} experts of "
            "all ranks (pass token_selected_experts and token_final_scales)"
        )
    if call.is_padding is not None:
        require_tensor("is_padding", call.is_padding, [(tokens,)], [torch.bool], device, alignment=ELEMENT)
    return require_int("top_k", call.top_k, 1, min(MAX_TOP_K, experts), "no more than there are experts")


class CheckedExperts(NamedTuple):
    """Sizes and formats of a layer whose weights were checked; all its calls share them."""

    device: torch.device
    num_local_experts: int
    hidden: int
    inter: int
    first_expert: int
    num_experts_total: int
    weights: str
    calls: CallCache
    """The layer's valid calls, by :data:`tensors_of` and :data:`options_of`, each with its :class:`MoEProblem`."""


def require_experts(call: MoECall, device: torch.device) -> CheckedExperts:
    """Check the arguments that belong to the layer: weights, scales, biases, activation and its parameters, ranks."""
    return _check_parameters(call, _check_weights(call, device))


def _check_weights(call: MoECall, device: torch.device) -> CheckedExperts:
    ep_size, ep_rank = require_parallel_sizes(call.tp_size, call.tp_rank, call.ep_size, call.ep_rank)
    require_output_dtype("output_dtype", call.output_dtype)
    require_switches(call, "swizzled_input_sf", "enable_alltoall")
    activation = ACTIVATIONS[call.activation_type]
    experts, hidden, inter = _weight_sizes(call.fc1_expert_weights, call.fc2_expert_weights, activation, device)
    most = INT32_MAX // experts
    require_int("ep_size", ep_size, 1, most, f"with {experts} experts a rank, since ids are int32")
    weights = weights_of(Mode(call.moe_mode), call.quant_scales)
    calls = CallCache(device, (), WRITTEN)
    return CheckedExperts(device, experts, hidden, inter, ep_rank * experts, experts * ep_size, weights, calls)


def _check_parameters(call: MoECall, layer: CheckedExperts) -> CheckedExperts:
    device, experts, hidden, inter = layer[:4]
    activation = ACTIVATIONS[call.activation_type]
    fc1_rows = activation.parts * inter
    _check_quant_scales(Mode(call.moe_mode), layer, fc1_rows, call.quant_scales)
    biases = BIAS_DTYPES[call.output_dtype]
    optional: tuple[tuple[str, Any, tuple[int, ...], tuple[torch.dtype, ...], int], ...] = (
        ("fc1_expert_biases", call.fc1_expert_biases, (experts, fc1_rows), biases, 16),
        ("fc2_expert_biases", call.fc2_expert_biases, (experts, hidden), biases, 16),
        ("swiglu_alpha", call.swiglu_alpha, (experts,), FLOAT32, ELEMENT),
        ("swiglu_beta", call.swiglu_beta, (experts,), FLOAT32, ELEMENT),
        ("swiglu_limit", call.swiglu_limit, (experts,), FLOAT32, ELEMENT),
    )
    for name, tensor, shape, dtypes, alignment in optional:
        if tensor is not None:
            require_tensor(name, tensor, [shape], dtypes, device, alignment=alignment)
    for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
        if getattr(call, name) is not None and name not in activation.defaults:
            taken = f"{' and '.join(activation.defaults)} alone" if activation.defaults else "no parameters"
            raise ValueError(f"{name} is given; activation_type {activation.name} has {taken}, pass None")
    require_int("tune_max_num_tokens", call.tune_max_num_tokens, 1)
    bounds = bounds_of([span(each) for each in expert_tensors(call) if each is not None])
    return layer._replace(calls=CallCache(device, bounds, WRITTEN))


MOE_TENSORS = (
    "output",
    "workspace_buffer",
    "barrier",
    "input",
    "input_sf",
    "token_selected_experts",
    "token_final_scales",
    "router_logits",
    "is_padding",
    "next_weights",
)
"""The tensors of a call that are not the layer's."""
WRITTEN = 3
"""So many of :data:`MOE_TENSORS`, the first ones, are written."""
tensors_of: Callable[[MoECall], tuple[Any, ...]] = operator.itemgetter(*map(MoECall._fields.index, MOE_TENSORS))
options_of: Callable[[MoECall], tuple[Any, ...]] = operator.itemgetter(
    *map(MoECall._fields.index, ("top_k", "enable_pdl"))
)
"""What :func:`validate` looks at of a call beside its tensors and its layer."""
_options: Callable[[MoECall], tuple[Any, ...]] = operator.itemgetter(
    slice(MoECall._fields.index("activation_type"), MoECall._fields.index("tune_max_num_tokens") + 1)
)
"""The arguments that :func:`require_experts` checks and that are no tensors."""
_cached: dict[tuple[int, int], tuple[Unchanged, tuple[Any, ...], CheckedExperts]] = {}
"""The experts of valid calls, by the identity of FC1's weights and the mode."""
_MOST_CACHED = 1024


def expert_tensors(call: MoECall) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a call that :func:`require_experts` checks."""
    weights = call.fc1_expert_weights, call.fc1_expert_biases, call.fc2_expert_weights, call.fc2_expert_biases
    return (*weights, *call.quant_scales, call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit)


def _cached_experts(call: MoECall) -> CheckedExperts | None:
    """The result of :func:`require_experts` for this call's layer, if an earlier valid call had the same objects and
    none of them changed; else None. Saves most of a call's checks, because a layer's tensors hardly ever change."""
    known = _cached.get((id(call.fc1_expert_weights), call.moe_mode))
    if known is None or type(call.quant_scales) not in (list, tuple):
        return None
    unchanged, options, checked = known
    given = _options(call)
    # Of equal type, too: 1 equals True and 1.0. The dispatcher makes numbers of its own.
    same = all(map(operator.is_, map(type, options), map(type, given))) and options == given
    same = same and checked.device == call.input.device
    return checked if same and unchanged.holds(*expert_tensors(call)) else None


def _cache_experts(call: MoECall, checked: CheckedExperts) -> None:
    if len(_cached) >= _MOST_CACHED:
        _cached.clear()  # of layers that are gone, too
    known = Unchanged(*expert_tensors(call)), _options(call), checked
    _cached[id(call.fc1_expert_weights), call.moe_mode] = known


def validate(call: MoECall, checked: CheckedExperts | None = None) -> MoEProblem:
    """Check the metadata and addresses of a call and return its sizes.

    Looks at no element, so it needs no synchronization.  ``checked`` is what :func:`require_experts` gave for the
    call's layer, where the caller did not find the call in its cache; calls with the same objects again are cached
    here, and of those with tensors of cached dtypes and shapes, only addresses are checked
    (:class:`~flashinfer.sm12x.checks.CallCache`).

    Raises
    ------
    TypeError, ValueError
        Naming the first argument that does not fit, what it was and what it may be.
    """
    known, tensors, options = checked or _cached_experts(call), tensors_of(call), options_of(call)
    if checked is None and known is not None:
        problem: MoEProblem | None = known.calls.find(tensors, *options)
        if problem is not None:
            return problem
    mode, layer = MODES[call.moe_mode], known or _check_weights(call, call.input.device)
    device, experts, hidden, inter, first, total, weights, _ = layer
    require_rank("input", call.input, 2, f"2-D, [num_tokens, {hidden}]")
    tokens = call.input.shape[0]
    require_tensor("input", call.input, [(tokens, hidden)], INPUT_DTYPES[mode], device)
    top_k = _require_routing(call, tokens, total, device)
    if not 1 <= top_k <= total:
        raise ValueError(
            f"top_k (token_selected_experts.shape[1]) is {top_k}; it must be in [1, {total}], the number of experts "
            f"({experts} here x ep_size {total // experts})"
        )
    require_pairs("num_tokens (input.shape[0])", tokens, top_k)
    require_activation_bytes("num_tokens (input.shape[0])", tokens, top_k * max(hidden, inter))
    if known is None:
        layer = _check_parameters(call, layer)
        _cache_experts(call, layer)
    _check_input_sf(mode, tokens, hidden, call.input_sf, call.swizzled_input_sf, device)
    if call.token_final_scales is not None:
        shape = tokens, top_k
        require_tensor("token_final_scales", call.token_final_scales, [shape], FLOAT32, device, alignment=ELEMENT)
    require_switches(call)
    if call.output is not None:
        require_tensor("output", call.output, [(tokens, hidden)], (call.output_dtype,), device)
    if call.workspace_buffer is not None:
        require_rank("workspace_buffer", call.workspace_buffer, 1, "a 1-D torch.uint8 or torch.int8 tensor")
        size, dtypes = tuple(call.workspace_buffer.shape), (torch.uint8, torch.int8)
        require_tensor("workspace_buffer", call.workspace_buffer, [size], dtypes, device)
    if call.next_weights is not None:
        require_read_ahead(call.next_weights, device)
    if call.barrier is not None:
        require_tensor("barrier", call.barrier, [(2,)], [torch.int32], device, alignment=ELEMENT)
    written = sum(each is not None for each in tensors[:WRITTEN])
    if written:
        spans = [(start := each.data_ptr(), start + each.nbytes) for each in tensors if each is not None]
        if not are_apart(spans, written, layer.calls.bounds):
            require_apart(call, dict.fromkeys(MOE_TENSORS[:WRITTEN], ()))
    routed = experts if call.enable_alltoall else total
    problem = MoEProblem(mode, tokens, hidden, inter, experts, top_k, first, total, routed, weights)
    layer.calls.add(problem, tensors, *options)
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


def check_limits(swiglu_limit: torch.Tensor | None) -> None:
    """Raise ``ValueError`` when an expert's limit is below 0: no number lies in ``[-limit, limit]`` then.

    NaN is a limit, of NaN.  Reads the values, so it synchronizes.
    """
    if swiglu_limit is None or not bool((bad := swiglu_limit < 0).any()):
        return
    expert = int(bad.nonzero()[0])
    raise ValueError(
        f"swiglu_limit[{expert}] is {float(swiglu_limit[expert]):g}; it must not be below 0, and infinity is no limit "
        f"({int(bad.sum())} of {bad.numel()} are)"
    )
