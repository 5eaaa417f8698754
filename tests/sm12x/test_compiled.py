# SPDX-License-Identifier: Apache-2.0
"""Operators in ``torch.compile(fullgraph=True)``, with and without an output that is given."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from operator_calls import OPERATORS, WRITTEN, Arguments, on

from flashinfer.fused_moe.sm12x_validation import ACTIVATIONS, Mode, select_mode
from flashinfer.sm12x import devices

TOKENS = ("input", "a", "x", "query", "hidden_states")


@pytest.mark.parametrize("gives", [False, True], ids=["", "out"])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_compiled_call_gives_and_writes_the_same_bits(name: str, gives: bool, device: torch.device) -> None:
    function, make = OPERATORS[name]
    if name in ("mm_fp4", "mm_mxfp8"):  # by name: Dynamo does not trace how upstream chooses among its own
        function = functools.partial(function, backend="sm12x")

    def layer(tokens: str, arguments: Arguments) -> list[Any]:
        found = function(**{**arguments, tokens: arguments[tokens].clone()})
        return [each + 0 for each in (found if isinstance(found, tuple) else (found,))]

    def outcome(call: Any) -> list[torch.Tensor]:
        arguments = {key: v for key, v in on(device, make()).items() if gives or key not in WRITTEN}
        results = call(next(key for key in TOKENS if key in arguments), arguments)
        return results + [arguments[key] for key in (*WRITTEN, "kv_cache") if key in arguments]

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor")
    for ours, expected in zip(outcome(compiled), outcome(layer), strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("switch", "serves"), [(None, False), ("1", True), ("0", False)])
def test_a_compiled_call_asks_which_gpus_are_served(
    switch: str | None, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call on a CUDA tensor reads a variable, for which Dynamo has no trace if C's ``getenv`` is asked."""
    monkeypatch.setattr(devices, "_capability", lambda _: (9, 0))
    monkeypatch.delenv("FLASHINFER_SM12X_MOE", raising=False)
    if switch is not None:
        monkeypatch.setenv("FLASHINFER_SM12X_MOE", switch)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + devices.serves_cuda(0), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == serves


def test_choosing_a_mode_hashes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo of torch 2.11 ends at an enum whose ``__hash__`` is its own."""

    def refuse(self: Mode) -> int:
        raise AssertionError(f"{self!r} is hashed")

    monkeypatch.setattr(Mode, "__hash__", refuse)
    found = []
    for dtype, *flags in itertools.product((torch.bfloat16, torch.float16, torch.float8_e4m3fn), *[(False, True)] * 2):
        found.append(select_mode(dtype, torch.uint8, *flags, False, False, False, next(iter(ACTIVATIONS))))
    assert [mode for mode in Mode if mode not in found] == []
