# SPDX-License-Identifier: Apache-2.0
"""Each argument of each public function of ``flashinfer.testing``: wrong ones are refused by name, before torch sees
them.

Functions, arguments and fields are those that there are; what is wrong follows from the value of a valid call.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer.testing as public
from flashinfer.testing import BoundViolation, DenseCase, MoECase

SEED = random.randrange(1 << 32)
FUNCTIONS = {
    name: value
    for name, value in vars(public).items()
    if inspect.isfunction(value) and Path(inspect.getfile(value)).parent == Path(public.__file__).parent
}
EXPERTS = ("mxfp8 input", "bf16 input", "w4a16", "nvfp4", "relu2")


def draw(low: int, high: int) -> int:
    return random.randint(low, high)


def moe_case(kind: str) -> MoECase:
    experts = draw(2, 5)
    sizes = (draw(2, 9), 32 * draw(2, 5), 32 * draw(2, 5), experts, draw(1, experts))
    if kind == "relu2":
        return MoECase(*sizes, mode=2, relu2=True)
    mode = {"mxfp8 input": 0, "bf16 input": 1, "w4a16": 2, "nvfp4": 2}[kind]
    return MoECase(
        *sizes, mode=mode, weights="nvfp4" if kind == "nvfp4" else "mxfp4", swizzled_input_sf=draw(0, 1) == 1
    )


def dense_case(weights: str, tokens: str) -> DenseCase:
    bias = torch.bfloat16
    return DenseCase(draw(2, 9), draw(2, 140), 32 * draw(2, 5), weights, tokens, bias, alpha=True, residual=True)


def valid(name: str) -> Iterator[dict[str, Any]]:
    """Arguments of valid calls."""
    rows, k = draw(2, 140), 32 * draw(2, 5)
    values = torch.randn(rows, k)
    linear = torch.randint(100, 140, (2, rows, k // 32), dtype=torch.uint8)
    if name.startswith("quantize"):
        yield {"values": values, "saturates": False}
    elif name.startswith("dequantize"):
        packed, scales = getattr(public, name.removeprefix("de"))(values)
        yield {"packed" if name.endswith("4") else "values": packed, "scales": scales}
    elif name == "swizzle_scales":
        yield {"linear": linear}
    elif name == "unswizzle_scales":
        swizzled = public.swizzle_scales(linear)
        yield {"swizzled": swizzled, "rows": rows, "blocks": k // 32}
        yield {"swizzled": swizzled.view(torch.int32), "rows": rows, "blocks": k // 32}
        yield {"swizzled": swizzled[1].flatten(), "rows": rows, "blocks": k // 32}
    elif name == "check_within_bound":
        yield {"actual": values, "reference": values.double(), "bound": values.double().abs(), "what": "it"}
    elif name == "make_moe_inputs":
        yield from ({"case": moe_case(kind), "seed": draw(0, 99)} for kind in EXPERTS)
    elif name == "moe_reference":
        for kind in EXPERTS:
            yield {"inputs": public.make_moe_inputs(moe_case(kind), draw(0, 99)), "accumulation": public.TENSOR_CORE}
    elif name == "make_group_gemm_inputs":
        sizes, dtype = [draw(0, 9), draw(1, 9)], torch.float8_e5m2
        yield {"sizes": sizes, "n": draw(1, 99), "k": k, "seed": 3, "dtype": dtype, "data": "lattice"}
    elif name == "group_gemm_reference":
        call = public.make_group_gemm_inputs([draw(0, 9), draw(1, 9)], 8 * draw(1, 20), k, draw(0, 99))
        yield {**call, "accumulation": public.ANY_ORDER}
    elif name == "make_dense_inputs":
        yield from (
            {"case": dense_case(weights, "bf16"), "seed": draw(0, 99)} for weights in ("mxfp4", "mxfp8", "nvfp4")
        )
    else:
        some = [dense_case(weights, "bf16") for weights in ("mxfp4", "mxfp8", "mxfp6", "mxint8", "nvfp4")]
        if name == "dense_reference":
            some += [dense_case("mxfp4", tokens) for tokens in ("quantize_f16", "mxfp8", "mxfp8_linear", "mxfp4")]
        for case in some:
            inputs = public.make_dense_inputs(case, draw(0, 99))
            norm = public.make_norm_inputs(inputs, draw(0, 99))
            further = {
                "dense_reference": {"accumulation": public.ANY_ORDER},
                "make_norm_inputs": {"seed": draw(0, 99), "adds": True, "eps": 1e-5},
                "normed_dense_reference": {"norm": norm, "total": norm["residual"], "factor_last": True},
            }
            yield {"inputs": inputs, **further[name]}


def wrong(value: Any) -> Iterator[tuple[str, Any]]:
    """Values of another kind in the place of a valid one, each with what is wrong with it."""
    if isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
        yield from (("no tensor", each) for each in ("x", 3, [value]))
        yield "dtype", torch.zeros(shape, dtype=torch.int16)
        yield "device", value.to("meta")
        shapes = {"rank": (1, *shape), "lower rank": shape[:-1]}
        for place, extent in enumerate(shape):
            shapes |= {f"{what} {place}": (*shape[:place], extent + by, *shape[place + 1 :]) for what, by in BY.items()}
        yield from ((what, torch.zeros(other).to(value.dtype)) for what, other in shapes.items())
    elif isinstance(value, bool):
        yield from (("no switch", each) for each in (2, "yes", None))
    elif isinstance(value, int):
        yield from (("no number", each) for each in (1.5, "x", None))
        yield "too large", 1 << 70
    elif isinstance(value, float):
        yield from (("no number", each) for each in (-1.0, "x", None, float("nan")))
    elif isinstance(value, str):
        yield from (("no name", each) for each in (3, None))
        yield "another name", "another"
    elif isinstance(value, torch.dtype):
        yield from (("no such dtype", each) for each in (torch.int16, "bf16"))
    elif isinstance(value, list):
        yield from (("no number", [value[0], each]) for each in (-1, 1.5, None))
    else:
        yield from (("another type", each) for each in (3, "x", None))


BY = {"more": 1, "less": -1}


def changed(value: Any, name: str) -> Iterator[tuple[str, str, Any]]:
    """``value`` with one thing wrong: in it, or in a field or an entry of it; the field's name, and what is wrong."""
    for what, other in wrong(value):
        yield name, what, other
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            for inner, what, other in changed(getattr(value, field.name), field.name):
                # An optional one may be absent; one that is absent has no form.
                if getattr(value, field.name) is not None and not (other is None and "None" in str(field.type)):
                    yield inner, what, dataclasses.replace(value, **{field.name: other})
    elif isinstance(value, dict):
        for key, held in value.items():
            for inner, what, other in changed(held, key):
                if not (other is None and key in ("residual", "bias", "alpha", "x_scale")):
                    yield inner, what, {**value, key: other}
    elif isinstance(value, tuple) and len(value) == 3:  # of DenseInputs
        for place, inner in enumerate(("x", "weight", "weight_scale")):
            for _, what, other in changed(value[place], inner):
                yield inner, what, (*value[:place], other, *value[place + 1 :])


ON_ANY_DEVICE = ("quantize_mxfp4", "quantize_mxfp8", "swizzle_scales", "unswizzle_scales")
FITTED = (
    *("hidden size", "intermediate size", "top_k", "k is", "norm_weight", "bias", "residual", "x_scale", "weight"),
    *("token_selected_experts", "token_final_scales", "input", "swiglu", "fc1", "fc2"),
)
"""What an error may name in place of a tensor whose extents it compares with another's."""
ALSO_VALID = {
    ("dequantize_mxfp4", "packed"): ("less 1",),
    ("dequantize_mxfp8", "values"): ("less 1",),
    ("quantize_mxfp4", "values"): ("rank", "lower rank", "more 0", "less 0"),
    ("quantize_mxfp8", "values"): ("rank", "lower rank", "more 0", "less 0", "more 1", "less 1"),
    ("swizzle_scales", "linear"): ("rank", "lower rank", *(f"{what} {place}" for what in BY for place in range(3))),
    ("unswizzle_scales", "swizzled"): ("rank", "more 0", "less 0"),
    ("group_gemm_reference", "a_scale"): ("more 0",),
    ("check_within_bound", "what"): ("another name",),
    ("dense_reference", "alpha"): ("lower rank",),
    ("make_norm_inputs", "alpha"): ("lower rank",),
    ("normed_dense_reference", "alpha"): ("lower rank",),
    ("normed_dense_reference", "residual"): None,  # `total` is read in its place
}
"""What is no error: a tensor of any shape that a format has, such as a last block that is not whole, and rows of scales
after the last one."""


def test_every_function_is_checked_and_tried() -> None:
    assert len(FUNCTIONS) >= 15, FUNCTIONS.keys()
    for name, function in FUNCTIONS.items():
        (call, *_) = valid(name)
        assert hasattr(function, "__wrapped__"), f"{name} is not one of flashinfer.testing.checked's"
        missing = inspect.signature(function).parameters.keys() - call
        assert missing <= {"device", "accumulation"}, (name, missing)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_argument_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print("seed", SEED)
    random.seed(SEED)
    function: Callable[..., Any] = FUNCTIONS[name]
    tried = set()
    for call in valid(name):
        function(**call)
        for argument, value in call.items():
            for field, what, other in changed(value, argument):
                allowed = ALSO_VALID.get((name, field), ())
                flat = isinstance(value, torch.Tensor) and value.ndim == 1
                if allowed is None or (what in allowed and not flat):
                    continue
                if what == "device" and name in ON_ANY_DEVICE:
                    continue
                tried.add((field, what))
                names = {field, argument}
                if what not in ("no tensor", "dtype"):  # two that do not fit: the error names the other one, it may be
                    names |= {*call, *FITTED}
                try:
                    function(**{**call, argument: other})
                except (TypeError, ValueError) as error:
                    assert any(each in str(error) for each in names), (field, what, str(error))
                    assert re.search(" (is|runs|must be) ", str(error)), str(error)
                except BoundViolation:
                    assert field in ("actual", "reference"), (field, what)
                else:
                    pytest.fail(f"{field}, {what}: no error")
    assert len(tried) >= 2, tried


def test_unswizzled_rows_and_blocks_are_those_of_the_scales() -> None:
    swizzled = public.swizzle_scales(torch.zeros(200, 8, dtype=torch.uint8))
    for rows, blocks in ((257, 8), (128, 8), (200, 9), (200, 4), (128, 16), (512, 4), (-1, 8), (200, 0)):
        with pytest.raises(ValueError, match=r"(swizzled|rows|blocks) is .*; it must be "):
            public.unswizzle_scales(swizzled, rows, blocks)


def test_an_experts_scales_of_another_layer_are_refused() -> None:
    """As many bytes, in another shape; and an expert more, which would never be read."""
    inputs = public.make_moe_inputs(MoECase(3, 256, 128, 2, 1, 2), 0)
    for changes in (
        {"fc1_scales": inputs.fc1_scales.flatten()},
        {"fc1_scales": inputs.fc1_scales.view(2, 512, 4)},
        {"fc2_weights": torch.cat([inputs.fc2_weights, inputs.fc2_weights[:1]])},
        {"swiglu_limit": torch.ones(3)},
        {"fc2_global": torch.ones(2)},
    ):
        with pytest.raises(ValueError, match="must"):
            public.moe_reference(dataclasses.replace(inputs, **changes))


def test_rows_of_experts_add_up() -> None:
    case = MoECase(4, 64, 32, 3, 2, 1, routing=(4, 4, 0))
    public.make_moe_inputs(case, 0)
    for routing in ((4, 4), (4, 4, 0, 0), (4, 3, 0), (5, 3, 0), (8, 0, 0), (4, 4.0, 0)):
        with pytest.raises((TypeError, ValueError), match="routing"):
            public.make_moe_inputs(dataclasses.replace(case, routing=routing), 0)
    for field, value in (("top_k", 4), ("ep_size", 2), ("ep_rank", 1), ("hidden", 48), ("mode", 3), ("weights", "x")):
        with pytest.raises(ValueError, match=rf"{field}.* is .*; it must "):
            public.make_moe_inputs(dataclasses.replace(case, **{field: value}), 0)


def test_ends_of_groups_that_do_not_ascend_are_refused() -> None:
    call = public.make_group_gemm_inputs([3, 2], 8, 32, 0)
    for ends in ([0, 3, 4], [1, 3, 5], [0, 6, 5]):
        with pytest.raises(ValueError, match="m_indptr"):
            public.group_gemm_reference(**call | {"m_indptr": torch.tensor(ends, dtype=torch.int32)})


def test_tokens_of_another_format_than_was_said_are_refused() -> None:
    inputs = public.make_dense_inputs(DenseCase(3, 8, 64, "mxfp4", "quantize_bf16"), 0)
    with pytest.raises(ValueError, match=r"^tokens is 'bf16'; x and x_scale are 'quantize_bf16'$"):
        public.dense_reference(dataclasses.replace(inputs, tokens="bf16"))
