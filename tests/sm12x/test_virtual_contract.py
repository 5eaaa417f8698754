# SPDX-License-Identifier: Apache-2.0
"""One contract for all operators: what the CPU backend refuses the kernels refuse, in the same words, and the other way round.

Each tensor of each operator is made wrong in each way, each number too, and each tensor that is written is put over each
other one. A call runs on the CPU and on the virtual SM121, in memory of its own. What both take must give alike results.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer.decode import decode_attention
from flashinfer.gemm import dense_mx, dense_mx_top_k, group_gemm_mxfp4_nt_groupwise, mm_bf16_mxfp8
from flashinfer.quantization import mx_cpu
from flashinfer.testing import DenseCase, MoECase, make_dense_inputs, make_group_gemm_inputs, make_moe_inputs
from flashinfer.testing.decode_reference import make_decode_case
from flashinfer.testing.router_reference import make_router_inputs
from flashinfer.testing.virtual_device import virtual_device

Arguments = dict[str, Any]
SEED = 5


def _dense(tokens: str = "bf16", **more: Any) -> Arguments:
    case = DenseCase(3, 72, 96, bias=torch.bfloat16, alpha=True, residual=True, tokens=tokens, **more)
    inputs = make_dense_inputs(case, SEED)
    return dict(zip(("x", "weight", "weight_scale"), inputs.arguments, strict=True)) | inputs.named


def _matrices(form: str) -> Arguments:
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (3, 72))
    quantize = mx_cpu.quantize_mxfp4_linear if "fp4" in form else mx_cpu.quantize_mxfp8_linear
    values, scales = quantize(b)
    made = {"b_descale": mx_cpu.swizzle_128x4(scales)}
    if form.startswith("bf16"):
        return made | {"a": a, "b": values}
    tokens, token_scales = quantize(a)
    return made | {"a": tokens, "a_descale": mx_cpu.swizzle_128x4(token_scales), "b": values.t()}


def _moe(mode: int) -> Arguments:
    return make_moe_inputs(MoECase(3, 96, 64, 4, 2, mode), SEED).arguments()


def _decode(**more: Any) -> Arguments:
    arguments = make_decode_case([17, 5], 1, SEED, **more).arguments
    return {**arguments, "out": torch.zeros(arguments["query"].shape, dtype=torch.bfloat16)}


def _out(make: Callable[[], Arguments], name: str, *shape: int) -> Callable[[], Arguments]:
    return lambda: {**make(), name: torch.zeros(shape, dtype=torch.bfloat16)}


OPERATORS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    **{f"MoE {mode}": (flashinfer.cutlass_fused_moe, _out(lambda mode=mode: _moe(mode), "output", 3, 96)) for mode in range(3)},
    "grouped GEMM": (group_gemm_mxfp4_nt_groupwise, _out(lambda: dict(make_group_gemm_inputs([3, 5], 64, 96, SEED)), "out", 8, 64)),
    "dense_mx": (dense_mx, _out(_dense, "out", 3, 72)),
    "dense_mx, MXFP8 tokens": (dense_mx, _out(lambda: _dense("mxfp8"), "out", 3, 72)),
    "dense_mx, linear scales": (dense_mx, _out(lambda: _dense("mxfp8_linear", weights="mxfp8"), "out", 3, 72)),
    "dense_mx_top_k": (dense_mx_top_k, _out(_dense, "logits", 3, 72)),
    "mm_fp4": (
        lambda **given: flashinfer.mm_fp4(**{"block_size": 32, "use_nvfp4": False, **given}),
        _out(lambda: _matrices("fp4") | {"alpha": torch.tensor([0.5])}, "out", 3, 72),
    ),
    "mm_mxfp8": (flashinfer.mm_mxfp8, _out(lambda: _matrices("fp8"), "out", 3, 72)),
    "mm_bf16_fp4": (
        lambda **given: flashinfer.mm_bf16_fp4(**{"block_size": 32, "backend": "sm12x", **given}),
        _out(lambda: _matrices("bf16 fp4") | {"alpha": torch.tensor([0.5])}, "out", 3, 72),
    ),
    "mm_bf16_mxfp8": (mm_bf16_mxfp8, _out(lambda: _matrices("bf16 fp8"), "out", 3, 72)),
    "decode": (decode_attention, _decode),
    "decode, fp8": (decode_attention, lambda: _decode(fp8=True)),
    "router": (
        flashinfer.fused_moe.router_top_k,
        lambda: {**make_router_inputs(3, 64, 16, 2, SEED, adds=True, norms=True, bias=True)},
    ),
}  # fmt: skip

# --- what is wrong with a tensor --------------------------------------------------------------------------------------


def _at(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same elements ``offset`` bytes behind an aligned address."""
    size = tensor.element_size()
    memory = np.zeros(tensor.numel() * size + offset + 256, np.uint8)
    start = -memory.ctypes.data % 128 + offset
    moved = torch.frombuffer(memory, dtype=tensor.dtype, offset=start, count=tensor.numel()).view(tensor.shape)
    return moved.copy_(tensor)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def _sparse(tensor: torch.Tensor) -> torch.Tensor:
    indices = torch.zeros((tensor.ndim, 0), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.empty(0, dtype=tensor.dtype), tensor.shape, check_invariants=False)


def _parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())


def _resized(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP leaves a parameter that is sharded: it has a shape, and no memory."""
    made = tensor.clone()
    made.untyped_storage().resize_(0)
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
    "an odd address": lambda tensor: _at(tensor, 1),
    "two bytes on": lambda tensor: _at(tensor, 2),
    "four bytes on": lambda tensor: _at(tensor, 4),
    "eight bytes on": lambda tensor: _at(tensor, 8),
    "a parameter": _parameter,
    "negative bit": lambda tensor: torch._neg_view(tensor) if tensor.dtype in (torch.float32, torch.bfloat16) else tensor,
    "a storage that was resized": _resized,
    "nested": lambda tensor: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "without a shape": lambda tensor: torch.nn.UninitializedParameter(),
    **{
        str(dtype): lambda tensor, dtype=dtype: torch.zeros(tensor.shape, dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.float64, torch.complex64, torch.int64, torch.int32, torch.uint16)
    },
    **{
        f"bytes as {dtype}": lambda tensor, dtype=dtype: tensor.view(dtype)
        if tensor.element_size() == 1
        else torch.zeros(tensor.shape, dtype=dtype)
        for dtype in (torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float8_e5m2)
    },
}  # fmt: skip
NUMBERS: dict[str, Any] = {
    "None": None, "string": "2", "float": 2.5, "NaN": float("nan"), "infinite": float("inf"), "negative": -3, "zero": 0,
    "2**40": 2**40, "True": True, "tensor": torch.tensor(2), "list": [1],
}  # fmt: skip
# Numbers, choices and switches of the operators' signatures.
OTHERS = (
    "tp_size", "tp_rank", "ep_size", "ep_rank", "cluster_size", "cluster_rank", "tune_max_num_tokens", "profile_ids",
    "output_dtype", "out_dtype", "activation", "tactic", "top_k", "first_index", "eps", "q_len_per_req", "sm_scale",
    "window_left", "k_scale", "v_scale", "kv_layout", "backend", "block_size", "mma_sm", "tile_m", "tile_n", "tile_k", "swap_ab",
    "quant_scales", "swizzled_input_sf", "swizzled_x_scale", "enable_alltoall", "constant_weights", "constant_cache",
    "enable_pdl",
)  # fmt: skip


def _tensors(arguments: Arguments) -> list[tuple[str, int | None]]:
    places: list[tuple[str, int | None]] = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            places.append((name, None))
        elif isinstance(value, (list, tuple)):
            places += ((name, index) for index, item in enumerate(value) if isinstance(item, torch.Tensor))
    return places


def _get(arguments: Arguments, place: tuple[str, int | None]) -> torch.Tensor:
    name, index = place
    tensor: torch.Tensor = arguments[name] if index is None else arguments[name][index]
    return tensor


def _put(arguments: Arguments, place: tuple[str, int | None], value: Any) -> None:
    name, index = place
    if index is None:
        arguments[name] = value
    else:
        arguments[name] = [*arguments[name][:index], value, *arguments[name][index + 1 :]]


def _overlay(arguments: Arguments, written: tuple[str, int | None], other: tuple[str, int | None], offset: int) -> None:
    """Put two tensors into one memory, the one that is written ``offset`` bytes behind the other."""
    first, second = _get(arguments, other), _get(arguments, written)
    memory = torch.zeros(max(first.nbytes, second.nbytes + offset) + 128, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 128 :]

    def place(tensor: torch.Tensor, start: int) -> torch.Tensor:
        return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    over, under = place(second.contiguous(), offset), place(first.contiguous(), 0)
    under.copy_(first)
    _put(arguments, other, under)
    _put(arguments, written, over)


WRITTEN = ("output", "out", "logits", "workspace_buffer")


def _changes(name: str) -> Iterator[tuple[str, Callable[[Arguments], None]]]:
    """All that is done to an operator's arguments, with a description."""
    function, make = OPERATORS[name]
    arguments = make()
    places = _tensors(arguments)
    for place in places:
        for what, wrong in WRONG.items():
            yield (
                f"{place}: {what}",
                lambda given, place=place, wrong=wrong: _put(given, place, wrong(_get(given, place))),
            )
    for target in (place for place in places if place[0] in WRITTEN):
        for other in places:
            if other != target:
                for offset in (0, 64):
                    yield (
                        f"{target} over {other} + {offset}",
                        lambda given, target=target, other=other, offset=offset: _overlay(given, target, other, offset),
                    )
    if "kv_cache" in arguments:
        yield "out is query", lambda given: given.update(out=given["query"])
        for place in ("key", "value", "query", "rope_table", "sinks"):
            yield (
                f"cache over {place}",
                lambda given, place=place: _overlay(given, ("kv_cache", None), (place, None), 0),
            )
        yield "keys are values", lambda given: given.update(kv_cache=(given["kv_cache"][:, 0], given["kv_cache"][:, 0]))
        yield (
            "keys are values, nothing appended",
            lambda given: given.update(
                kv_cache=(given["kv_cache"][:, 0], given["kv_cache"][:, 0]), key=None, value=None
            ),
        )
        yield (
            "two caches",
            lambda given: given.update(kv_cache=(given["kv_cache"][:, 0].clone(), given["kv_cache"][:, 1].clone())),
        )
        yield (
            "an expanded cache",
            lambda given: given.update(
                kv_cache=tuple(
                    given["kv_cache"][:1, part].clone().expand(len(given["kv_cache"]), -1, -1, -1) for part in (0, 1)
                )
            ),
        )
    if "residual" in arguments and "out" in arguments:
        yield "out is residual", lambda given: given.update(out=given["residual"])
    known = set(inspect.signature(function).parameters) - (
        {"backend"} if "MoE" in name else set()
    )  # upstream's own words
    if "fp4" in name:
        known |= {"backend", "block_size"}
    for other_name in OTHERS:
        if other_name in known:
            for what, value in NUMBERS.items():
                yield f"{other_name}: {what}", lambda given, key=other_name, value=value: given.update({key: value})


def _outcome(function: Callable[..., Any], arguments: Arguments) -> tuple[str, str, list[torch.Tensor]]:
    """What a call does: the exception's type and text, less addresses and devices' own words, or its results."""
    try:
        result = function(**arguments)
    except Exception as error:
        return type(error).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(error)), []
    results = [result] if isinstance(result, torch.Tensor) else [each for each in result if each is not None]
    written = [arguments[name] for name in ("out", "output", "logits") if isinstance(arguments.get(name), torch.Tensor)]
    cache = arguments.get("kv_cache", ())
    return (
        "",
        "",
        [each.detach().clone() for each in (*results, *written, *([cache] if torch.is_tensor(cache) else cache))],
    )


def _alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    if [each.shape for each in ours] != [each.shape for each in theirs]:
        return False
    for first, second in zip(ours, theirs, strict=True):
        first, second = first.double(), second.double()
        largest = float(second.nan_to_num(0, 0, 0).abs().amax()) if second.numel() else 0.0
        if not torch.allclose(first, second, rtol=2**-5, atol=2**-5 * largest, equal_nan=True):
            return False
    return True


CLEAR = ("TypeError", "ValueError", "NotImplementedError")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_both_refuse_the_same_in_the_same_words(name: str) -> None:
    function, make = OPERATORS[name]
    print("seed", SEED)
    changes = list(_changes(name))
    outcomes = []
    for _, change in changes:
        arguments = make()
        change(arguments)
        outcomes.append(_outcome(function, arguments))
    differ, unclear, refused = [], [], 0
    with virtual_device("sm_121a"):
        for (what, change), (kind, text, results) in zip(changes, outcomes, strict=True):
            arguments = make()
            change(arguments)
            other = _outcome(function, arguments)
            refused += bool(kind)
            if (kind, text) != other[:2] or not _alike(results, other[2]):
                differ.append((what, (kind, text), other[:2]))
            if kind and (kind not in CLEAR or not re.search("; |must be", text)):
                unclear.append((what, kind, text))
    print(f"{len(changes)} calls, {refused} refused")
    assert not differ, "\n".join(map(str, differ))
    assert not unclear, "\n".join(map(str, unclear))
    assert refused > len(changes) // 3


# --- whatever torch is in the middle of -------------------------------------------------------------------------------


@contextlib.contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "default device meta": lambda: _default_device("meta"),
}


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [False, True], ids=["CPU", "virtual"])
@pytest.mark.parametrize("name", OPERATORS)
def test_modes_of_torch_change_nothing(name: str, virtual: bool) -> None:
    function, make = OPERATORS[name]
    print("seed", SEED)
    with virtual_device("sm_121a") if virtual else contextlib.nullcontext():
        expected = _outcome(function, make())
        assert expected[0] == "", expected
        for what, mode in MODES.items():
            arguments = make()
            with mode():
                kind, text, results = _outcome(function, arguments)
            assert (kind, text) == ("", ""), (what, kind, text)
            for ours, theirs in zip(results, expected[2], strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), what
        arguments = {key: _parameter(value) if key in ("x", "weight", "query", "hidden_states", "a") and torch.is_tensor(value)
                     and value.is_floating_point() and value.element_size() > 1 else value for key, value in make().items()}  # fmt: skip
        kind, text, results = _outcome(function, arguments)
        assert (kind, text) == ("", "")
        for ours, theirs in zip(results, expected[2], strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [False, True], ids=["CPU", "virtual"])
@pytest.mark.parametrize("name", OPERATORS)
def test_fake_tensors_give_fake_results_and_leave_nothing_behind(name: str, virtual: bool) -> None:
    function, make = OPERATORS[name]
    print("seed", SEED)
    with virtual_device("sm_121a") if virtual else contextlib.nullcontext():
        expected = _outcome(function, make())
        fake = FakeTensorMode()

        def moved(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return fake.from_tensor(value)
            return type(value)(map(moved, value)) if isinstance(value, (list, tuple)) else value

        arguments = {key: moved(value) for key, value in make().items()}
        with fake:
            kind, text, results = _outcome(function, arguments)
        assert (kind, text) == ("", "")
        assert [(each.shape, each.dtype) for each in results] == [(each.shape, each.dtype) for each in expected[2]]
        again = _outcome(function, make())
        for ours, theirs in zip(again[2], expected[2], strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
