# SPDX-License-Identifier: Apache-2.0
"""One contract for all operators: the CPU backend and the kernels refuse the same calls in the same words.

A call runs on the CPU and on the virtual SM121, each in memory of its own. If both take it, their results must agree.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from operator_calls import OPERATORS, SEED, changes, outcome, parameter
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer.quantization.block_scaled import WEIGHT_FORMATS, dequantize_weight, quantize_weight
from flashinfer.testing.virtual_device import virtual_device

KEEPING = (
    "flashinfer.quantization",
    "flashinfer.gemm.sm12x_",
    "flashinfer.fused_moe.sm12x_",
    "flashinfer.sm12x_decode",
    "flashinfer.sm12x.checks",
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


@pytest.mark.parametrize("name", OPERATORS)
def test_both_refuse_the_same_in_the_same_words(name: str) -> None:
    """And before anything is launched. The words are those that ``test_every_argument.py`` asks for."""
    function, make = OPERATORS[name]
    print("seed", SEED)
    tried = list(changes(function, make))
    outcomes = []
    for _, _, change in tried:
        arguments = make()
        change(arguments)
        outcomes.append(outcome(function, arguments))
    differ, launched = [], []
    with virtual_device("sm_121a") as device:
        for (named, what, change), (kind, text, results) in zip(tried, outcomes, strict=True):
            arguments = make()
            change(arguments)
            before = len(device.launches)
            other = outcome(function, arguments)
            if (kind, text) != other[:2] or not _alike(results, other[2]):
                differ.append((named, what, (kind, text), other[:2]))
            if kind and len(device.launches) != before:
                launched.append((named, what, text))
    assert not differ, "\n".join(map(str, differ))
    assert not launched, "\n".join(map(str, launched))


# --- whatever torch is in the middle of -------------------------------------------------------------------------------


@contextlib.contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def forget_everything() -> None:
    """Empty what functions of the fork keep from call to call, but not the modules that they have loaded."""
    cleared = 0
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(KEEPING):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
                    cleared += 1
    assert cleared > 3


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "default device meta": lambda: _default_device("meta"),
}


@pytest.mark.parametrize("virtual", [False, True], ids=["CPU", "virtual"])
@pytest.mark.parametrize("name", OPERATORS)
def test_modes_of_torch_change_nothing(name: str, virtual: bool) -> None:
    function, make = OPERATORS[name]
    print("seed", SEED)
    with virtual_device("sm_121a") if virtual else contextlib.nullcontext():
        expected = outcome(function, make())
        assert expected[0] == "", expected
        for what, mode in MODES.items():
            arguments = make()
            with mode():
                kind, text, results = outcome(function, arguments)
            assert (kind, text) == ("", ""), (what, kind, text)
            for ours, theirs in zip(results, expected[2], strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), what
        arguments = {key: parameter(value) if key in ("x", "weight", "query", "hidden_states", "a")
            and torch.is_tensor(value)
                     and value.is_floating_point() and value.element_size() > 1 else value for key,
                         value in make().items()}  # fmt: skip
        kind, text, results = outcome(function, arguments)
        assert (kind, text) == ("", "")
        for ours, theirs in zip(results, expected[2], strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_first_call_may_come_under_another_default_device(name: str) -> None:
    """On the CPU: what a call keeps for later ones is made as those need it."""
    function, make = OPERATORS[name]
    print("seed", SEED)
    expected, arguments = outcome(function, make()), make()
    forget_everything()
    with _default_device("meta"):
        kind, text, results = outcome(function, arguments)
    again = outcome(function, make())
    assert (kind, text) == again[:2] == ("", "")
    for first, second, theirs in zip(results, again[2], expected[2], strict=True):
        assert torch.equal(first.view(torch.uint8), theirs.view(torch.uint8))
        assert torch.equal(second.view(torch.uint8), theirs.view(torch.uint8))


QUANTIZED: dict[str, Callable[[torch.Tensor], Any]] = {
    "mxfp4_quantize": flashinfer.mxfp4_quantize,
    "mxfp4_quantize, mse": lambda x: flashinfer.mxfp4_quantize(x, scale_rule="mse"),
    "mxfp4_dequantize": lambda x: (flashinfer.mxfp4_dequantize(x.view(torch.uint8)[:, :64], x.view(torch.uint8)[:2]),),
    "mxfp8_quantize": lambda x: flashinfer.mxfp8_quantize(x, alignment=96),
    "mxfp8_quantize, mse": lambda x: flashinfer.mxfp8_quantize(x, scale_rule="mse"),
    "block_scale_interleave": lambda x: (flashinfer.block_scale_interleave(x.view(torch.uint8)),),
    **{
        f"quantize_weight, {form} {rule}": lambda x, form=form, rule=rule: quantize_weight(x, form, rule)
        for form in WEIGHT_FORMATS
        for rule in ("amax", "mse")
    },
    **{
        f"dequantize_weight, {form}": lambda x, form=form: (dequantize_weight(quantize_weight(x, form), form, 64),)
        for form in WEIGHT_FORMATS
    },
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantizers_take_no_default_device(name: str) -> None:
    """The first call, and later ones; their arguments say where they compute."""
    print("seed", SEED)
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(SEED))
    expected = QUANTIZED[name](x)
    forget_everything()
    with _default_device("meta"):
        found = QUANTIZED[name](x)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert theirs is None or torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("virtual", [False, True], ids=["CPU", "virtual"])
@pytest.mark.parametrize("name", OPERATORS)
def test_fake_tensors_give_fake_results_and_leave_nothing_behind(name: str, virtual: bool) -> None:
    function, make = OPERATORS[name]
    print("seed", SEED)
    with virtual_device("sm_121a") if virtual else contextlib.nullcontext():
        expected = outcome(function, make())
        fake = FakeTensorMode()

        def moved(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return fake.from_tensor(value)
            return type(value)(map(moved, value)) if isinstance(value, (list, tuple)) else value

        arguments = {key: moved(value) for key, value in make().items()}
        with fake:
            kind, text, results = outcome(function, arguments)
        assert (kind, text) == ("", "")
        assert [(each.shape, each.dtype) for each in results] == [(each.shape, each.dtype) for each in expected[2]]
        again = outcome(function, make())
        for ours, theirs in zip(again[2], expected[2], strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
