# SPDX-License-Identifier: Apache-2.0
"""What is remembered between calls: checks of arguments, and what upstream's autotuner said."""

from __future__ import annotations

import gc
import logging
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune, autotuner
from operator_calls import OPERATORS
from recording_backend import recording_tuner

import flashinfer
from flashinfer.fused_moe import sm12x_operator as moe_operator
from flashinfer.gemm import dense_mx, sm12x_dense
from flashinfer.sm12x import operator, tune

Arguments = dict[str, Any]


_layer, _dense = OPERATORS["MoE 0"][1], OPERATORS["dense_mx, MXFP8 tokens"][1]


def _other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """At the same address, with the same shape."""
    other = {1: torch.float8_e5m2, 2: torch.int16, 4: torch.complex32}[tensor.element_size()]
    return tensor.view(other)


def _other_shape(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()[:-1]


def _other_strides(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 0))


def _other_address(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(tensor.numel() * tensor.element_size() + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + tensor.element_size() // 2 + (tensor.element_size() == 1)
    moved = torch.frombuffer(memory.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=start)
    assert moved.data_ptr() % 4
    return moved.view(tensor.shape)


CHANGES = (_other_dtype, _other_shape, _other_strides, _other_address)
LAYER = ("input", "input_sf", "token_selected_experts", "token_final_scales", "fc1_expert_biases", "fc2_expert_biases")
DENSE = ("x", "weight", "weight_scale", "bias", "residual", "out")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("function", "make", "name"),
    [
        *((flashinfer.cutlass_fused_moe, _layer, name) for name in (*LAYER, "output")),
        *((dense_mx, _dense, name) for name in DENSE),
    ],
)
def test_what_is_wrong_after_a_right_call_is_refused(
    function: Callable[..., Any], make: Callable[[], Arguments], name: str, change: Callable[[Any], Any]
) -> None:
    """The same values elsewhere, or elsewhere looked at, are not what was checked."""
    arguments = make()
    function(**arguments)
    changed = change(arguments[name])
    for _ in range(2):  # what is refused is not remembered as right either
        with pytest.raises(ValueError, match=f"^{name}"):
            function(**{**arguments, name: changed})
    function(**arguments)


@pytest.mark.parametrize("change", [_other_shape, _other_strides])
@pytest.mark.parametrize("position", [0, 2])
def test_a_tensor_in_a_list_is_looked_at(position: int, change: Callable[[Any], Any]) -> None:
    arguments = _layer()
    flashinfer.cutlass_fused_moe(**arguments)
    scales = list(arguments["quant_scales"])
    scales[position] = change(scales[position])
    with pytest.raises(ValueError, match=rf"^quant_scales\[{position}\]"):
        flashinfer.cutlass_fused_moe(**{**arguments, "quant_scales": scales})


def test_a_tensor_that_changed_in_place_is_looked_at() -> None:
    """``resize_`` and ``set_`` leave the object what it was."""
    arguments = _layer()
    flashinfer.cutlass_fused_moe(**arguments)
    arguments["output"].resize_(3, 64)
    with pytest.raises(ValueError, match=r"^output"):
        flashinfer.cutlass_fused_moe(**arguments)
    arguments["output"].set_(torch.empty(3, 192, dtype=torch.bfloat16)[:, ::2])
    with pytest.raises(ValueError, match=r"^output"):
        flashinfer.cutlass_fused_moe(**arguments)


@pytest.mark.parametrize("wrong", [1.0, torch.tensor(1.0)], ids=repr)
def test_what_equals_a_right_number_is_none(wrong: Any) -> None:
    arguments = _layer() | {"ep_size": 1}
    flashinfer.cutlass_fused_moe(**arguments)
    with pytest.raises(TypeError, match=r"^ep_size"):
        flashinfer.cutlass_fused_moe(**{**arguments, "ep_size": wrong})


def test_an_index_in_a_tensor_is_read_each_time() -> None:
    seen = []

    def validate(call: tuple[Any, ...]) -> int:
        seen.append(int(call[0]))
        return seen[-1]

    index, known = torch.tensor(3), {}
    assert operator.validated(validate, (index,), known) == 3
    index.fill_(4)
    assert operator.validated(validate, (index,), known) == 4
    assert seen == [3, 4] and not known


def test_the_switch_is_seen_by_a_call_that_was_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _dense()
    dense_mx(**arguments)
    asked = []
    monkeypatch.setattr(sm12x_dense, "require_served", lambda name, device: asked.append((name, device)))
    dense_mx(**arguments)
    assert asked == [("dense_mx", torch.device("cpu"))]


@pytest.mark.parametrize(
    ("owner", "make", "function"),
    [(moe_operator.fused_moe, _layer, flashinfer.cutlass_fused_moe), (sm12x_dense.compute, _dense, dense_mx)],
    ids=["MoE", "dense"],
)
def test_no_tensor_is_kept(
    owner: Any,
    make: Callable[[], Arguments],
    function: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, "known", {})
    arguments = make()
    function(**arguments)
    assert len(owner.known) == 1
    held = [weakref.ref(value) for value in arguments.values() if isinstance(value, torch.Tensor)]
    assert len(held) > 5
    del arguments
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "_MOST_KNOWN", 8)
    known: dict[Any, Any] = {}
    for number in range(100):
        assert operator.validated(lambda call: call[0] + 1, (number,), known) == number + 1
        assert 0 < len(known) <= 8


# ---------------------------------------------------------------------------------- what upstream's autotuner depends on


class _Runner(tune.Runner):
    """One tactic beside the default, and a log of what ran."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # it launches nothing

    def key(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return ()

    def names(self, tokens: int) -> list[str]:
        return ["fast", "slow"]

    def run(self, inputs: list[torch.Tensor], tactic: str | None) -> torch.Tensor:
        return inputs[0]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Upstream's, whose profiler finds ``fast`` fast."""

    def profile(_runner: Any, _inputs: Any, tactic: Any, *_: Any, **__: Any) -> float:
        return 0.5 if tactic == "fast" else 1.0

    monkeypatch.setattr(tune.devices, "gpu_name", lambda device: "stands in")
    with recording_tuner(monkeypatch, time=profile) as made:
        yield made


def _tuned() -> str | None:
    return tune.tuned("flashinfer::test", _Runner(), 8, [torch.empty(4, 2)])


def test_whatever_changes_the_tuners_answer_is_noticed(tuner: Any, tmp_path: pathlib.Path) -> None:
    """Nothing, tuning, records, a file, and nothing again: what was remembered under one is not the others' answer."""
    assert tune.is_idle()
    assert _tuned() is None
    with autotune(True, tuning_buckets=(4,), round_up=True):
        assert not tune.is_idle()
        assert _tuned() == "fast"
    assert not tune.is_idle()
    assert _tuned() == "fast"
    tuner.save_configs(str(tmp_path / "records.json"))
    tuner.clear_cache()
    assert tune.is_idle()
    assert _tuned() is None
    tuner.load_configs(str(tmp_path / "records.json"))
    assert not tune.is_idle()
    assert _tuned() == "fast"


def test_a_shape_that_was_not_tuned_is_no_warning(tuner: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = autotuner.logger
    logger.addHandler(caplog.handler)
    try:
        with autotune(True):
            assert _tuned() == "fast"
        assert _tuned() == "fast"
        for tokens, width in ((4, 6), (4096, 2)):
            inputs = [torch.empty(tokens, width)]
            assert tune.tuned("flashinfer::test", _Runner(), 8, inputs) == ("fast" if width == 2 else None)
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        tuner.choose_one("flashinfer::test", [_Runner()], tune.config(8), [torch.empty(4, 6)])
        assert "No tuned config covers" in caplog.text, "upstream's function warns"
    finally:
        logger.removeHandler(caplog.handler)


def test_it_is_asked_once_while_nothing_changes(tuner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    search = AutoTuner.search_cache
    monkeypatch.setattr(AutoTuner, "search_cache", lambda *given, **named: asked.append(1) or search(*given, **named))
    for _ in range(3):
        _tuned()
    assert len(asked) == 1


@pytest.mark.parametrize("private", ["_dirty_seq", "_file_configs", "_active_tuning_contexts", "_managed_cache"])
def test_a_tuner_of_another_version_is_asked_every_time(
    tuner: Any, monkeypatch: pytest.MonkeyPatch, private: str
) -> None:
    class Other:
        asked = 0

        def __getattr__(self, name: str) -> Any:
            if name == private:
                raise AttributeError(name)
            return getattr(tuner, name)

        def choose_one(self, *given: Any, **named: Any) -> Any:
            self.asked += 1
            return tuner.choose_one(*given, **named)

    other = Other()
    monkeypatch.setattr(tune.AutoTuner, "get", lambda: other)
    assert not tune.is_idle()
    for _ in range(3):
        _tuned()
    assert other.asked == 3
