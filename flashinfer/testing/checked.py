# SPDX-License-Identifier: Apache-2.0
"""The public functions of ``flashinfer.testing``: metadata of their arguments is checked before anything is computed.

A scale too few broadcasts, an expert too many is never read: both would be a reference of something else. References of
dense layers and of grouped GEMMs take what their operators take, so those check the calls; that of a MoE layer also
sizes that tests pad themselves. Values, but for group ends, are not looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import torch

from ..sm12x.checks import (
    BLOCK_SIZE,
    UE8M0_DTYPES,
    describe,
    padded_scales,
    require_choice,
    require_float,
    require_int,
    require_k_alignment,
    require_output_dtype,
    require_tensor_type,
)
from . import dense_reference as dense
from . import error_bounds, gemm_reference, moe_inputs, mxfp_formats
from . import moe_reference as moe
from .dense_reference import DenseCase, DenseInputs
from .error_bounds import ANY_ORDER, TENSOR_CORE, Accumulation
from .moe_inputs import Data, MoECase, Routing
from .moe_reference import MoEInputs

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
MXFP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (*UE8M0_DTYPES, torch.float8_e4m3fn)
SEEDS = -(1 << 63), (1 << 64) - 1  # torch.Generator.manual_seed's

F = TypeVar("F", bound=Callable[..., Any])


def _before(function: F) -> Callable[[Callable[..., None]], F]:
    """Turn a check of arguments into ``function`` with that check before it."""

    parameters = [(each.name, each.default) for each in inspect.signature(function).parameters.values()]

    def decorate(check: Callable[..., None]) -> F:
        of_check = [(each.name, each.default) for each in inspect.signature(check).parameters.values()]
        assert of_check == parameters, f"{check.__name__} and its check have other parameters"

        @functools.wraps(function)
        def checked(*arguments: Any, **named: Any) -> Any:
            check(*arguments, **named)
            return function(*arguments, **named)

        return checked  # type: ignore[return-value]

    return decorate


def _require(
    name: str,
    value: Any,
    shape: tuple[int, ...] | None,
    dtypes: Sequence[torch.dtype],
    like: torch.Tensor | None = None,
) -> None:
    """Raise unless ``value`` is a tensor of that shape, of any where it is None, of one of ``dtypes``, on the device of
    ``like``; unlike an operator's it may have any strides and address."""
    expected = f"a tensor of {' or '.join(map(str, dtypes))}{'' if shape is None else f', shape {shape}'}"
    expected += "" if like is None else f", on {like.device}"
    require_tensor_type(name, value, expected)
    fits = value.dtype in dtypes and (shape is None or value.shape == shape)
    if not fits or (like is not None and value.device != like.device):
        raise ValueError(f"{name} is {describe(value)}; it must be {expected}")


def _require_rank(name: str, value: Any, rank: int, dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless ``value`` is a tensor of so many dimensions and one of ``dtypes``."""
    _require(name, value, None, dtypes)
    if value.ndim != rank:
        raise ValueError(f"{name} is {describe(value)}; it must have {rank} dimensions")


def _require_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {describe(value)}; it must be of {kind.__name__}")


def _require_accumulation(value: Any) -> None:
    _require_type("accumulation", value, Accumulation)
    if value.sum_bits is not None:
        require_int("sum_bits", value.sum_bits, 1, 52, "or None")


def _require_dimensions(name: str, value: torch.Tensor, least: int, multiple: int = 1) -> None:
    """Raise unless a tensor has so many dimensions, and elements in its last one."""
    if value.ndim < least or value.shape[-1] < 1 or value.shape[-1] % multiple:
        elements = "one element" if multiple == 1 else f"a positive multiple of {multiple} elements"
        expected = f"at least {least} dimension{'s' * (least > 1)}, {elements} or more in the last"
        raise ValueError(f"{name} is {describe(value)}; it must have {expected}")


# --- formats ------------------------------------------------------------------------------------------------------


def _require_scales_of(values: torch.Tensor, scales: Any, k: int) -> None:
    _require("scales", scales, (*values.shape[:-1], -(-k // BLOCK_SIZE)), UE8M0_DTYPES, values)


def _require_swizzled(name: str, scales: torch.Tensor, rows: int, blocks: int, lead: tuple[int, ...] = ()) -> None:
    """Raise unless a tensor has the shape of 128x4 scales of ``lead`` matrices, or is one matrix's and flat."""
    padded_rows, padded_blocks = padded_scales(rows, blocks)
    last = padded_blocks // scales.element_size()
    _require(name, scales, (padded_rows * last,) if scales.ndim < 2 else (*lead, padded_rows, last), (scales.dtype,))


@_before(mxfp_formats.dequantize_mxfp4)
def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> None:
    _require("packed", packed, None, (torch.uint8,))
    _require_dimensions("packed", packed, 1)
    _require_scales_of(packed, scales, 2 * packed.shape[-1])


@_before(mxfp_formats.dequantize_mxfp8)
def dequantize_mxfp8(values: torch.Tensor, scales: torch.Tensor) -> None:
    _require("values", values, None, MXFP8)
    _require_dimensions("values", values, 1)
    _require_scales_of(values, scales, values.shape[-1])


@_before(mxfp_formats.quantize_mxfp4)
def quantize_mxfp4(values: torch.Tensor, saturates: bool = False) -> None:
    _require("values", values, None, FLOATS)
    _require_dimensions("values", values, 1, 2)
    require_int("saturates", saturates, 0, 1, "True or False")


@_before(mxfp_formats.quantize_mxfp8)
def quantize_mxfp8(values: torch.Tensor, saturates: bool = False) -> None:
    _require("values", values, None, FLOATS)
    _require_dimensions("values", values, 1)
    require_int("saturates", saturates, 0, 1, "True or False")


@_before(mxfp_formats.swizzle_scales)
def swizzle_scales(linear: torch.Tensor) -> None:
    _require("linear", linear, None, SCALES)
    _require_dimensions("linear", linear, 2)


@_before(mxfp_formats.unswizzle_scales)
def unswizzle_scales(swizzled: torch.Tensor, rows: int, blocks: int) -> None:
    require_int("rows", rows, 0)
    require_int("blocks", blocks, 1)
    _require("swizzled", swizzled, None, (*SCALES, torch.int32))
    _require_swizzled("swizzled", swizzled, rows, blocks, swizzled.shape[:-2])


# --- bounds -------------------------------------------------------------------------------------------------------


@_before(error_bounds.check_within_bound)
def check_within_bound(actual: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, what: str = "") -> None:
    _require("actual", actual, None, FLOATS)
    _require("reference", reference, None, FLOATS, actual)
    _require("bound", bound, tuple(reference.shape), FLOATS, actual)
    _require_type("what", what, str)


# --- MoE layers ---------------------------------------------------------------------------------------------------

_MOE_OPTIONS = ("swizzled_input_sf", "swiglu_step", "relu2")
_OF_EXPERTS = ("fc1_global", "fc2_global", "swiglu_alpha", "swiglu_beta", "swiglu_limit")


@_before(moe_inputs.make_moe_inputs)
def make_moe_inputs(case: MoECase, seed: int, device: torch.device | str = "cpu") -> None:
    _require_type("case", case, MoECase)
    require_int("seed", seed, *SEEDS)
    require_int("num_tokens", case.num_tokens, 0)
    require_k_alignment("hidden", case.hidden)
    if require_int("inter", case.inter, 2) % 2:  # a test pads the last block itself
        raise ValueError(f"inter is {case.inter}; it must be even, since a byte holds two weights")
    experts = require_int("num_experts", case.num_experts, 1)
    require_int("top_k", case.top_k, 1, experts, "no more than there are experts")
    ep_size = require_int("ep_size", case.ep_size, 1, experts)
    if experts % ep_size:
        raise ValueError(f"ep_size is {ep_size}; it must divide num_experts, {experts}")
    require_int("ep_rank", case.ep_rank, 0, ep_size - 1, "below ep_size")
    require_choice("weights", case.weights, tuple(moe.WEIGHTS))
    require_int("mode", case.mode, 2 if case.weights == "nvfp4" else 0, 2, f"with weights {case.weights!r}")
    require_choice("data", case.data, get_args(Data))
    if isinstance(case.routing, tuple):
        _require_rows(case.routing, case)
    else:
        require_choice("routing", case.routing, get_args(Routing))
    switches = "biases", "swiglu_parameters", "swiglu_limit_alone", "global_scales", *_MOE_OPTIONS
    for name in switches:
        require_int(name, getattr(case, name), 0, 1, "True or False")
    for name in ("input_dtype", "output_dtype"):
        require_output_dtype(name, getattr(case, name), HALVES)
    require_output_dtype("bias_dtype", case.bias_dtype, (*HALVES, torch.float32))


def _require_rows(rows: tuple[Any, ...], case: MoECase) -> None:
    """Raise unless these can be the numbers of tokens that a case's experts get."""
    for expert, count in enumerate(rows):
        require_int(f"routing[{expert}]", count, 0, case.num_tokens, "since an expert gets a token once")
    if len(rows) != case.num_experts or sum(rows) != case.num_tokens * case.top_k:
        raise ValueError(
            f"routing is {len(rows)} numbers that add up to {sum(rows)}; it must be num_experts, {case.num_experts}, "
            f"that add up to num_tokens * top_k, {case.num_tokens * case.top_k}"
        )


@_before(moe.moe_reference)
def moe_reference(inputs: MoEInputs, accumulation: Accumulation = ANY_ORDER) -> None:
    _require_type("inputs", inputs, MoEInputs)
    _require_accumulation(accumulation)
    require_choice("weights", inputs.weights, tuple(moe.WEIGHTS))
    for name in _MOE_OPTIONS:
        require_int(name, getattr(inputs, name), 0, 1, "True or False")
    require_output_dtype("output_dtype", inputs.output_dtype, HALVES)
    ep_size = require_int("ep_size", inputs.ep_size, 1)
    require_int("ep_rank", inputs.ep_rank, 0, ep_size - 1, "below ep_size")
    x, ids = inputs.input, inputs.token_selected_experts
    _require_rank("input", x, 2, HALVES[:1] if inputs.w4a16 else (*HALVES, torch.float8_e4m3fn))
    _require_rank("token_selected_experts", ids, 2, (torch.int32, torch.int64))
    _require_rank("fc2_weights", inputs.fc2_weights, 3, (torch.uint8,))
    (tokens, hidden), top_k, (experts, _, half) = x.shape, ids.shape[1], inputs.fc2_weights.shape
    rows = (2 if inputs.relu2 else 4) * half
    shapes: dict[str, tuple[tuple[int, ...], Sequence[torch.dtype]]] = {
        "token_selected_experts": ((tokens, top_k), (ids.dtype,)),
        "token_final_scales": ((tokens, top_k), (torch.float32,)),
        "fc1_weights": ((experts, rows, hidden // 2), (torch.uint8,)),
        "fc2_weights": ((experts, hidden, half), (torch.uint8,)),
        "fc1_bias": ((experts, rows), (*HALVES, torch.float32)),
        "fc2_bias": ((experts, hidden), (*HALVES, torch.float32)),
        **dict.fromkeys(_OF_EXPERTS, ((experts,), (torch.float32,))),
    }
    optional = {field.name for field in dataclasses.fields(inputs) if "None" in str(field.type)}
    for name, (shape, dtypes) in shapes.items():
        if name not in optional or getattr(inputs, name) is not None:
            _require(name, getattr(inputs, name), shape, dtypes, x)
    block = moe.WEIGHTS[inputs.weights][1]
    for name, scales, of_rows, k in (
        ("fc1", inputs.fc1_scales, rows, hidden),
        ("fc2", inputs.fc2_scales, hidden, 2 * half),
    ):
        _require(f"{name}_scales", scales, None, (*SCALES, torch.int32), x)
        _require_rank(f"{name}_scales", scales, 3, (scales.dtype,))  # a flat tensor is the operator's too
        _require_swizzled(f"{name}_scales", scales, of_rows, -(-k // block), (experts,))
    if (inputs.fc1_global is None) != (inputs.fc2_global is None):
        raise ValueError("fc1_global and fc2_global must be given both, or neither of them")
    _require_parameters(inputs)
    if (x.dtype is torch.float8_e4m3fn) != (inputs.input_sf is not None):
        raise ValueError(
            f"input_sf is {describe(inputs.input_sf)}; it must be given if input is quantized, which is {x.dtype}"
        )
    if inputs.input_sf is not None and inputs.swizzled_input_sf:
        _require("input_sf", inputs.input_sf, None, (*SCALES, torch.int32), x)
        _require_swizzled("input_sf", inputs.input_sf, tokens, hidden // BLOCK_SIZE)
    elif inputs.input_sf is not None:
        _require("input_sf", inputs.input_sf, (tokens, hidden // BLOCK_SIZE), SCALES, x)


def _require_parameters(inputs: MoEInputs) -> None:
    """Raise where an activation's parameter is given that it does not have, and would not be read."""
    for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
        if getattr(inputs, name) is not None and (inputs.relu2 or (inputs.swiglu_step and name != "swiglu_limit")):
            raise ValueError(f"{name} is given; it must be None with {inputs.activation_type.name}")


# --- dense layers -------------------------------------------------------------------------------------------------


@_before(dense.make_dense_inputs)
def make_dense_inputs(case: DenseCase, seed: int) -> None:
    _require_type("case", case, DenseCase)
    require_int("seed", seed, *SEEDS)
    require_int("num_tokens", case.num_tokens, 0)
    require_int("n", case.n, 0)
    require_k_alignment("k", case.k)
    require_choice("weights", case.weights, tuple(dense.WEIGHTS))
    require_choice("tokens", case.tokens, dense.TOKENS)
    if case.bias is not None:
        require_output_dtype("bias", case.bias, (*HALVES, torch.float32))
    require_output_dtype("out_dtype", case.out_dtype, (*HALVES, torch.float32))
    for name in ("alpha", "residual"):
        require_int(name, getattr(case, name), 0, 1, "True or False")


def _require_dense(inputs: Any, accumulation: Any) -> None:
    from ..gemm.sm12x_dense import validate
    from ..gemm.sm12x_dense_launch import DenseCall

    _require_type("inputs", inputs, DenseInputs)
    _require_accumulation(accumulation)
    require_choice("tokens", inputs.tokens, dense.TOKENS)
    if not isinstance(inputs.arguments, tuple) or len(inputs.arguments) != 3:
        raise TypeError(f"arguments is {describe(inputs.arguments)}; it must be x, weight and weight_scale")
    _require_type("named", inputs.named, dict)
    x, weight, weight_scale = inputs.arguments
    require_choice("weight_format", inputs.named.get("weight_format"), tuple(dense.WEIGHTS))
    named = {"x_scale": None, **inputs.named}
    call = DenseCall(out=None, x=x, weight=weight, weight_scale=weight_scale, **named)
    _, token_format = validate(call)
    # An operator takes scales by their number of bytes.
    (n, _), m = weight.shape, len(x)
    _require_swizzled("weight_scale", weight_scale, n, call.k // dense.WEIGHTS[call.weight_format].elements_per_scale)
    if call.x_scale is not None and call.swizzled_x_scale:
        _require_swizzled("x_scale", call.x_scale, m, call.k // BLOCK_SIZE)
    elif call.x_scale is not None:
        _require("x_scale", call.x_scale, (m, call.k // BLOCK_SIZE), UE8M0_DTYPES)
    if dense.TOKENS[token_format] != inputs.tokens:
        raise ValueError(f"tokens is {inputs.tokens!r}; x and x_scale are {dense.TOKENS[token_format]!r}")


@_before(dense.dense_reference)
def dense_reference(inputs: DenseInputs, accumulation: Accumulation = TENSOR_CORE) -> None:
    _require_dense(inputs, accumulation)


@_before(dense.make_norm_inputs)
def make_norm_inputs(inputs: DenseInputs, seed: int, adds: bool = True, eps: float = 1e-5) -> None:
    _require_dense(inputs, TENSOR_CORE)
    require_int("seed", seed, *SEEDS)
    require_int("adds", adds, 0, 1, "True or False")
    require_float("eps", eps, 0.0, math.inf)


@_before(dense.normed_dense_reference)
def normed_dense_reference(
    inputs: DenseInputs,
    norm: dict[str, Any],
    total: torch.Tensor,
    factor_last: bool,
    accumulation: Accumulation = TENSOR_CORE,
) -> None:
    _require_dense(inputs, accumulation)
    m, k = inputs.arguments[0].shape
    _require_type("norm", norm, dict)
    _require("norm_weight", norm.get("norm_weight"), (k,), FLOATS, inputs.arguments[0])
    require_float("eps", norm.get("eps"), 0.0, math.inf)
    _require("total", total, (m, k), FLOATS, inputs.arguments[0])
    require_int("factor_last", factor_last, 0, 1, "True or False")


# --- grouped GEMM -------------------------------------------------------------------------------------------------


@_before(moe_inputs.make_group_gemm_inputs)
def make_group_gemm_inputs(
    sizes: Sequence[int],
    n: int,
    k: int,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float8_e4m3fn,
    data: Data = "normal",
) -> None:
    for group, size in enumerate(sizes):
        require_int(f"sizes[{group}]", size, 0)
    require_int("n", n, 1)
    require_k_alignment("k", k)
    require_int("seed", seed, *SEEDS)
    require_output_dtype("dtype", dtype, MXFP8)
    require_choice("data", data, get_args(Data))


@_before(gemm_reference.group_gemm_reference)
def group_gemm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    accumulation: Accumulation = ANY_ORDER,
) -> None:
    from ..gemm.sm12x_group_gemm import GroupGemmCall, check_group_ends, validate

    _require_accumulation(accumulation)
    validate(GroupGemmCall(None, a, b, a_scale, b_scale, m_indptr, torch.bfloat16, [1, 128, 128, 128], False))
    check_group_ends(m_indptr, a.shape[0])
