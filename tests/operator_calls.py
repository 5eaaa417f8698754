# SPDX-License-Identifier: Apache-2.0
"""Calls of all operators, right and wrong: each tensor is made wrong in each way, each number too, and each tensor that
is written is put over each other one."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import flashinfer
from flashinfer.decode import decode_attention
from flashinfer.fused_moe import moe_step
from flashinfer.gemm import (
    dense_block_scaled,
    dense_block_scaled_rescored,
    dense_block_scaled_rescored_top_k,
    dense_block_scaled_top_k,
    group_gemm_mxfp4_nt_groupwise,
    mm_bf16_mxfp8,
    rmsnorm_dense_block_scaled,
)
from flashinfer.quantization import mx_cpu
from flashinfer.quantization.block_scaled import quantize_weight
from flashinfer.testing import DenseCase, MoECase, make_dense_inputs, make_group_gemm_inputs, make_moe_inputs
from flashinfer.testing.decode_reference import make_decode_case
from flashinfer.testing.router_reference import make_router_inputs

Arguments = dict[str, Any]
SEED = 5


def on(device: torch.device, arguments: Arguments) -> Arguments:
    """Arguments with all tensors of the CPU's on ``device``, those in lists and tuples, too."""

    def move(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(move, value))
        return value.to(device) if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value

    return {name: move(value) for name, value in arguments.items()}


def _dense(tokens: str = "bf16", **more: Any) -> Arguments:
    case = DenseCase(3, 72, 96, bias=torch.bfloat16, alpha=True, residual=True, tokens=tokens, **more)
    inputs = make_dense_inputs(case, SEED)
    return dict(zip(("x", "weight", "weight_scale"), inputs.arguments, strict=True)) | inputs.named


def _matrices(form: str) -> Arguments:
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (3, 72))
    if form == "bf16 nvfp4":
        weight = quantize_weight(b, "nvfp4")
        return {"a": a, "b": weight.values, "b_descale": weight.scales, "alpha": weight.global_scale}
    quantize = mx_cpu.quantize_mxfp4_linear if "fp4" in form else mx_cpu.quantize_mxfp8_linear
    values, scales = quantize(b)
    made = {"b_descale": mx_cpu.swizzle_128x4(scales)}
    if form.startswith("bf16"):
        return made | {"a": a, "b": values}
    tokens, token_scales = quantize(a)
    return made | {"a": tokens, "a_descale": mx_cpu.swizzle_128x4(token_scales), "b": values.t()}


def _moe(mode: int, **more: Any) -> Arguments:
    return make_moe_inputs(MoECase(3, 96, 64, 4, 2, mode, **more), SEED).arguments()


def _step() -> Arguments:
    arguments = _moe(2)
    del arguments["token_selected_experts"], arguments["token_final_scales"]
    print("seed", SEED)
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(SEED))
    barrier = torch.zeros(2, dtype=torch.int32)
    return {**arguments, "router_logits": logits, "top_k": 2, "is_padding": torch.zeros(3).bool(), "barrier": barrier}


def _normed() -> Arguments:
    arguments = _dense()
    arguments.pop("residual", None)
    residual = torch.zeros(arguments["x"].shape, dtype=torch.bfloat16)
    return {**arguments, "norm_weight": torch.ones(arguments["x"].shape[1], dtype=torch.bfloat16), "residual": residual}


def _rescored(fine: str = "bf16") -> Arguments:
    print("seed", SEED)
    arguments = _dense(weights="nvfp4")
    del arguments["residual"]
    rows = torch.randn(72, 96, generator=torch.Generator().manual_seed(SEED)).bfloat16()
    arguments |= {"fine_weight": rows, "fine_format": fine, "groups": 2, "rescored": 5}
    if fine == "mxint8":
        kept = quantize_weight(rows, "mxint8")
        arguments |= {"fine_weight": kept.values, "fine_scale": kept.scales}
    return arguments


def workspace_sizes() -> Arguments:
    """Arguments of ``cutlass_fused_moe_workspace_size``."""
    return {
        "max_num_tokens": 8,
        "hidden_size": 160,
        "intermediate_size": 96,
        "num_experts_total": 8,
        "top_k": 3,
        "x_dtype": torch.bfloat16,
        "weight_dtype": torch.int64,
        "use_mxfp8_act_scaling": True,
        "device": torch.device("cpu"),
    }


def _decode(**more: Any) -> Arguments:
    arguments = make_decode_case([17, 5], 1, SEED, **more).arguments
    return {**arguments, "out": torch.zeros(arguments["query"].shape, dtype=torch.bfloat16)}


def _out(make: Callable[[], Arguments], name: str, *shape: int) -> Callable[[], Arguments]:
    return lambda: {**make(), name: torch.zeros(shape, dtype=torch.bfloat16)}


OPERATORS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    **{f"MoE {mode}": (flashinfer.cutlass_fused_moe, _out(lambda mode=mode: _moe(mode), "output", 3, 96))
    for mode in range(3)},
    "grouped GEMM": (group_gemm_mxfp4_nt_groupwise, _out(lambda: dict(make_group_gemm_inputs([3, 5], 64, 96, SEED)),
        "out", 8, 64)),
    "dense_block_scaled": (dense_block_scaled, _out(_dense, "out", 3, 72)),
    "dense_block_scaled, MXFP8 tokens": (dense_block_scaled, _out(lambda: _dense("mxfp8"), "out", 3, 72)),
    "dense_block_scaled, linear scales": (dense_block_scaled, _out(lambda: _dense("mxfp8_linear", weights="mxfp8"),
        "out", 3, 72)),
    **{
        f"dense_block_scaled, {form}": (dense_block_scaled, _out(lambda form=form: _dense(weights=form), "out", 3, 72))
        for form in ("mxint8", "mxfp6", "nvfp4")
    },
    "dense_block_scaled_top_k": (dense_block_scaled_top_k, _out(_dense, "logits", 3, 72)),
    "dense_block_scaled_top_k, MXFP8 tokens": (dense_block_scaled_top_k, _out(lambda: _dense("mxfp8"), "logits", 3,
        72)),
    "dense_block_scaled_rescored": (dense_block_scaled_rescored, _out(_rescored, "out", 3, 72)),
    "dense_block_scaled_rescored, MXINT8": (dense_block_scaled_rescored, _out(lambda: _rescored("mxint8"), "out", 3,
        72)),
    "dense_block_scaled_rescored_top_k": (dense_block_scaled_rescored_top_k, _out(lambda: _rescored("mxint8"),
        "logits", 3, 72)),
    "rmsnorm_dense_block_scaled": (rmsnorm_dense_block_scaled, _normed),
    "moe_step": (moe_step, _step),
    "MoE, NVFP4": (flashinfer.cutlass_fused_moe, _out(lambda: _moe(2, weights="nvfp4"), "output", 3, 96)),
    "moe_step, ids": (moe_step, _out(lambda: _moe(2), "output", 3, 96)),
    "router_logits": (
        flashinfer.fused_moe.router_logits,
        lambda: {
            name: value
            for name, value in make_router_inputs(3, 64, 16, 2, SEED, adds=True, norms=True, bias=True).items()
            if name != "top_k"
        },
    ),
    "mm_fp4": (
        functools.partial(flashinfer.mm_fp4, block_size=32, use_nvfp4=False),
        _out(lambda: _matrices("fp4") | {"alpha": torch.tensor([0.5])}, "out", 3, 72),
    ),
    "mm_mxfp8": (flashinfer.mm_mxfp8, _out(lambda: _matrices("fp8"), "out", 3, 72)),
    "mm_bf16_fp4": (
        functools.partial(flashinfer.mm_bf16_fp4, block_size=32, backend="sm12x"),
        _out(lambda: _matrices("bf16 fp4") | {"alpha": torch.tensor([0.5])}, "out", 3, 72),
    ),
    "mm_bf16_fp4, NVFP4": (
        functools.partial(flashinfer.mm_bf16_fp4, block_size=16, backend="sm12x"),
        _out(lambda: _matrices("bf16 nvfp4"), "out", 3, 72),
    ),
    "mm_bf16_mxfp8": (mm_bf16_mxfp8, _out(lambda: _matrices("bf16 fp8") | {"alpha": torch.tensor([0.5])}, "out", 3,
        72)),
    "decode": (decode_attention, _decode),
    "decode, fp8": (decode_attention, lambda: _decode(fp8=True)),
    "router": (
        flashinfer.fused_moe.router_top_k,
        lambda: {**make_router_inputs(3, 64, 16, 2, SEED, adds=True, norms=True, bias=True),
        "is_padding": torch.zeros(3).bool()},
    ),
}  # fmt: skip

# --- what is wrong with a tensor --------------------------------------------------------------------------------------


def moved_to(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same elements ``offset`` bytes behind an aligned address."""
    size = tensor.element_size()
    memory = np.zeros(tensor.numel() * size + offset + 256, np.uint8)
    start = -memory.ctypes.data % 128 + offset
    moved = torch.frombuffer(memory, dtype=tensor.dtype, offset=start, count=tensor.numel()).view(tensor.shape)
    return moved.copy_(tensor)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


def _sparse(tensor: torch.Tensor) -> torch.Tensor:
    indices = torch.zeros((tensor.ndim, 0), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.empty(0, dtype=tensor.dtype), tensor.shape, check_invariants=False)


def parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())


def _resized(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """To no bytes, as FSDP leaves a parameter that is sharded: it has a shape, and no memory."""
    made = tensor.clone()
    made.untyped_storage().resize_(size)
    return made


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "None": lambda tensor: None,
    "list": lambda tensor: [1.0, 2.0],
    "numpy array": lambda tensor: np.ones(tuple(tensor.shape), np.uint8),
    "float": lambda tensor: 2.5,
    "string": lambda tensor: "tensor",
    "on meta": lambda tensor: torch.empty_like(tensor, device="meta"),
    "strided": _strided,
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
    "transposed": lambda tensor: tensor.transpose(0, -1),
    "sparse": _sparse,
    "one dimension more": lambda tensor: tensor[None],
    "flat": lambda tensor: tensor.reshape(-1),
    "a row less": lambda tensor: tensor[1:].clone(),
    "no rows": lambda tensor: tensor[:0],
    "empty numpy array": lambda tensor: torch.from_numpy(np.empty((0, *tensor.shape[1:]), np.uint8)).view(tensor.dtype)
    if tensor.element_size() == 1
    else torch.from_numpy(np.empty((0, *tensor.shape[1:]), np.float32)),
    "an odd address": lambda tensor: moved_to(tensor, 1),
    "two bytes on": lambda tensor: moved_to(tensor, 2),
    "four bytes on": lambda tensor: moved_to(tensor, 4),
    "eight bytes on": lambda tensor: moved_to(tensor, 8),
    "a parameter": parameter,
    "negative bit": lambda tensor: torch._neg_view(tensor) if tensor.dtype in (torch.float32, torch.bfloat16)
        else tensor,
    "a storage that was resized": lambda tensor: _resized(tensor, 0),
    "a storage that was cut short": lambda tensor: _resized(tensor, tensor.nbytes - 1),
    "nested": lambda tensor: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "without a shape": lambda tensor: torch.nn.UninitializedParameter(),
    **{
        str(dtype): lambda tensor, dtype=dtype: torch.zeros(tensor.shape, dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.float64, torch.complex64, torch.int64, torch.int32,
            torch.uint16)
    },
    **{
        f"bytes as {dtype}": lambda tensor, dtype=dtype: tensor.view(dtype)
        if tensor.element_size() == 1
        else torch.zeros(tensor.shape, dtype=dtype)
        for dtype in (torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float8_e5m2)
    },
}  # fmt: skip
NUMBERS = (None, "2", 2.5, math.nan, math.inf, -3, 0, 2**40, True, torch.tensor(2), [1])
# Numbers, choices and switches of the operators' signatures.
OTHERS = (
    "tp_size", "tp_rank", "ep_size", "ep_rank", "cluster_size", "cluster_rank", "tune_max_num_tokens", "profile_ids",
    "output_dtype", "out_dtype", "activation", "tactic", "top_k", "first_index", "eps", "q_len_per_req", "sm_scale",
    "window_left", "k_scale", "v_scale", "kv_layout", "backend", "block_size", "mma_sm", "tile_m", "tile_n", "tile_k",
    "swap_ab",
    "max_num_tokens", "hidden_size", "intermediate_size", "num_experts_total", "x_dtype", "device", "alignment",
    "sf_swizzle_layout", "sfLayout", "quant_scales", "swizzled_input_sf", "swizzled_x_scale", "enable_alltoall",
    "constant_weights", "constant_cache", "fine_format", "groups", "rescored",
    "enable_pdl",
)  # fmt: skip


def places(arguments: Arguments) -> list[tuple[str, int | None]]:
    found: list[tuple[str, int | None]] = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found.append((name, None))
        elif isinstance(value, (list, tuple)):
            found += ((name, index) for index, item in enumerate(value) if isinstance(item, torch.Tensor))
    return found


def name_of(place: tuple[str, int | None]) -> str:
    """The argument's name in error messages."""
    return place[0] if place[1] is None else f"{place[0]}[{place[1]}]"


def get_tensor(arguments: Arguments, place: tuple[str, int | None]) -> torch.Tensor:
    name, index = place
    tensor: torch.Tensor = arguments[name] if index is None else arguments[name][index]
    return tensor


def put_tensor(arguments: Arguments, place: tuple[str, int | None], value: Any) -> None:
    name, index = place
    if index is None:
        arguments[name] = value
    else:
        arguments[name] = [*arguments[name][:index], value, *arguments[name][index + 1 :]]


def _overlay(arguments: Arguments, written: tuple[str, int | None], other: tuple[str, int | None], offset: int) -> None:
    """Put two tensors into one memory, the one that is written ``offset`` bytes after the other."""
    first, second = get_tensor(arguments, other), get_tensor(arguments, written)
    memory = torch.zeros(max(first.nbytes, second.nbytes + offset) + 128, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 128 :]

    def place(tensor: torch.Tensor, start: int) -> torch.Tensor:
        return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    over, under = place(second.contiguous(), offset), place(first.contiguous(), 0)
    under.copy_(first)
    put_tensor(arguments, other, under)
    put_tensor(arguments, written, over)


WRITTEN = ("output", "out", "logits", "workspace_buffer")
Change = tuple[str, str, Callable[[Arguments], None]]


def changes(function: Callable[..., Any], make: Callable[[], Arguments]) -> Iterator[Change]:
    """All that is done to a function's arguments: the one that is changed, a description, and what does it."""
    arguments = make()
    names = {place: name_of(place) for place in places(arguments)}
    for place, name in names.items():
        for what, wrong in WRONG.items():
            yield (
                name,
                what,
                lambda given, place=place, wrong=wrong: put_tensor(given, place, wrong(get_tensor(given, place))),
            )
    for target in (place for place in names if place[0] in WRITTEN):
        for other in names:
            if other != target:
                for offset in (0, 64):
                    yield (
                        names[target],
                        f"over {names[other]} + {offset}",
                        lambda given, target=target, other=other, offset=offset: _overlay(given, target, other, offset),
                    )
    if "kv_cache" in arguments:
        yield from _changes_of_a_cache()
    if "residual" in arguments and "out" in arguments:
        yield "out", "is residual", lambda given: given.update(out=given["residual"])
    known = set(inspect.signature(function).parameters)
    if "ep_size" in known:
        known -= {"backend"}  # upstream's own words
    for name in OTHERS:
        if name in known:
            for value in NUMBERS:
                yield name, repr(value), lambda given, name=name, value=value: given.update({name: value})


def _changes_of_a_cache() -> Iterator[Change]:
    def expand(given: Arguments) -> None:
        cache = given["kv_cache"]
        given["kv_cache"] = tuple(cache[:1, part].clone().expand(len(cache), -1, -1, -1) for part in (0, 1))

    def use_keys_as_values(given: Arguments, **more: None) -> None:
        given.update(kv_cache=(given["kv_cache"][:, 0],) * 2, **more)

    yield "out", "is query", lambda given: given.update(out=given["query"])
    for name in ("key", "value", "query", "rope_table", "sinks"):
        yield name, "is the cache", lambda given, name=name: _overlay(given, ("kv_cache", None), (name, None), 0)
    yield "kv_cache", "keys are values", use_keys_as_values
    yield "kv_cache", "keys are values, nothing appended", lambda given: use_keys_as_values(given, key=None, value=None)
    yield "kv_cache", "two", lambda given: given.update(kv_cache=tuple(given["kv_cache"][:, i].clone() for i in (0, 1)))
    yield "kv_cache", "two expanded", expand


def outcome(function: Callable[..., Any], arguments: Arguments) -> tuple[str, str, list[torch.Tensor]]:
    """The result of a call: the exception's type and text, less addresses and devices' own words, or its results."""
    try:
        result = function(**arguments)
    except Exception as error:
        return type(error).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(error)), []
    written = (arguments.get(name) for name in ("out", "output", "logits"))
    cache = arguments.get("kv_cache", ())
    results = result if isinstance(result, tuple) else (result,)
    every = (*results, *written, *([cache] if torch.is_tensor(cache) else cache))
    return "", "", [each.detach().clone() for each in every if isinstance(each, torch.Tensor)]
