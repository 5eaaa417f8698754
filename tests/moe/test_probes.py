# SPDX-License-Identifier: Apache-2.0
"""Private parts of others that are gone or do something else: the public way, the same results."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner, autotune
from moe_recording import RecordingModule, meta_arguments

import flashinfer
from flashinfer import sm12x_probes
from flashinfer.fused_moe import core, sm12x_dispatch, sm12x_operator
from flashinfer.jit.sm12x.instances import INSTANCES

TensorGuards = torch._C._dynamo.guards.TensorGuards


# --- as they are here -------------------------------------------------------------------------------------------------


def test_what_is_private_behaves_here() -> None:
    """Else every call takes the slow way, and nobody would notice."""
    assert sm12x_probes.TENSOR_GUARDS is TensorGuards
    assert sm12x_probes.TUNER_HOLDER is AutoTuner
    assert sm12x_dispatch._environment is os.environ._data
    assert sm12x_probes._knows_state_of(AutoTuner)
    assert core._BARE is (os.environ.get("FLASHINFER_LOGLEVEL", "0") == "0")


# --- the environment --------------------------------------------------------------------------------------------------


class Lagging(dict):
    """Follows ``os.environ`` only until it has been asked three times."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked += 1
        return os.environ._data.get(key, default) if self.asked <= 3 else b"2"


def _one_positional(*, key: str) -> bytes:
    return os.fsencode(key)


STRANGE_ENVIRONMENTS: dict[str, SimpleNamespace] = {
    "absent": SimpleNamespace(),
    "without encodekey": SimpleNamespace(_data=os.environ._data),
    "a copy": SimpleNamespace(_data=dict(os.environ._data), encodekey=os.fsencode),
    "other keys": SimpleNamespace(_data=os.environ._data, encodekey=str.lower),
    "no mapping": SimpleNamespace(_data=[], encodekey=os.fsencode),
    "another signature": SimpleNamespace(_data=os.environ._data, encodekey=_one_positional),
    "not in step": SimpleNamespace(_data=Lagging(), encodekey=os.fsencode),
}


class StrangeEnvironment:
    """``os.environ`` with other private parts."""

    def __init__(self, parts: SimpleNamespace) -> None:
        self.__dict__.update(vars(parts))

    def __getattr__(self, name: str) -> Any:
        if name in ("_data", "encodekey"):
            raise AttributeError(name)
        return getattr(REAL, name)

    def __getitem__(self, name: str) -> str:
        return REAL[name]

    def __setitem__(self, name: str, value: str) -> None:
        REAL[name] = value

    def __delitem__(self, name: str) -> None:
        del REAL[name]


REAL = os.environ


@pytest.mark.parametrize("strange", STRANGE_ENVIRONMENTS)
def test_switches_without_the_private_environment(strange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(REAL)
    monkeypatch.setattr(os, "environ", StrangeEnvironment(STRANGE_ENVIRONMENTS[strange]))
    mapping, encode = sm12x_probes.environment()
    assert mapping is os.environ
    assert dict(REAL) == before
    monkeypatch.setattr(sm12x_dispatch, "_environment", mapping)
    for name, constant in (("MOE", "_MOE"), ("CHECK", "_CHECK")):
        monkeypatch.setattr(sm12x_dispatch, constant, encode(f"FLASHINFER_SM12X_{name}"))
    monkeypatch.setattr(sm12x_dispatch, "_TRACE_DUMP", encode("FLASHINFER_TRACE_DUMP"))
    monkeypatch.setattr(sm12x_dispatch, "_capability", lambda index: (12, 1))
    seen = []
    for value in (None, "0", "1", None):
        for name in ("FLASHINFER_SM12X_CHECK", "FLASHINFER_SM12X_MOE", "FLASHINFER_TRACE_DUMP"):
            if value is None:
                REAL.pop(name, None)
            else:
                monkeypatch.setitem(REAL, name, value)
        seen.append((sm12x_dispatch.checks_values(), sm12x_dispatch.serves_cuda(0), sm12x_dispatch.dumps_traces()))
    assert seen == [(False, True, False), (False, False, False), (True, True, True), (False, True, False)]


def test_the_probe_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sm12x_probes._PROBE_VARIABLE, "somebody's")
    before = dict(os.environ)
    sm12x_probes.environment()
    assert dict(os.environ) == before


# --- torch's guards ---------------------------------------------------------------------------------------------------


def _guards(answer: Callable[..., Any]) -> Any:
    """Guards that answer what ``answer(true guards' answer, tensors remembered, tensors given)`` says."""

    class Guards:
        def __init__(self, *tensors: torch.Tensor, dynamic_dims_sizes: Any, dynamic_dims_strides: Any) -> None:
            true = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            looks = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
            self.check = lambda *given: answer(true.check(*given), looks, given)

    return Guards


class Keeping:
    """Guards that hold on to what they remember."""

    def __init__(self, *tensors: torch.Tensor, dynamic_dims_sizes: Any, dynamic_dims_strides: Any) -> None:
        self.tensors = tensors

    def check(self, *given: torch.Tensor) -> bool:
        guards = TensorGuards(*self.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return guards.check(*given)


class OtherSignature:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


class NoCheck:
    def __init__(self, *tensors: torch.Tensor, dynamic_dims_sizes: Any, dynamic_dims_strides: Any) -> None: ...


STRANGE_GUARDS: dict[str, Any] = {
    "absent": None,
    "another signature": OtherSignature,
    "no check": NoCheck,
    "always true": _guards(lambda true, looks, given: True),
    "always false": _guards(lambda true, looks, given: False),
    "a number": _guards(lambda true, looks, given: int(true)),
    "raises": _guards(lambda true, looks, given: 1 / 0),
    "the first tensor only": _guards(
        lambda true, looks, given: true or looks[0][0] == getattr(given[0], "shape", None)
    ),
    "no strides": _guards(
        lambda true, looks, given: true or looks == [(t.shape, t.dtype, t.device) for t in given if t is not None]
    ),
    "keeps tensors": Keeping,
}  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE_GUARDS)
def test_repeated_calls_without_the_private_guards(
    strange: str, module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", STRANGE_GUARDS[strange])
    assert sm12x_probes.tensor_guards() is None
    monkeypatch.setattr(sm12x_probes, "TENSOR_GUARDS", sm12x_probes.tensor_guards())
    validated: list[int] = []
    validate = sm12x_operator.validate_moe
    monkeypatch.setattr(sm12x_operator, "validate_moe", lambda *a, **k: validated.append(1) or validate(*a, **k))
    arguments = meta_arguments(0)
    for _ in range(3):
        flashinfer.cutlass_fused_moe(**arguments)
    assert len(validated) == 1, "calls are known all the same"
    sparse = torch.sparse_coo_tensor(
        torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (6, 160), device="meta", check_invariants=False
    )
    wide = torch.empty((*arguments["swiglu_beta"].shape, 2), device="meta")[..., 0]
    for name, wrong in (
        ("swiglu_beta", wide), ("fc2_expert_biases", arguments["fc2_expert_biases"].half()), ("input_sf", None),
        ("token_final_scales", torch.empty(6, 3)), ("swiglu_alpha", 2.5), ("output", sparse),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^{name}"):
            flashinfer.cutlass_fused_moe(**{**arguments, name: wrong})
    assert len(module.launches) == 3


# --- upstream's autotuner ---------------------------------------------------------------------------------------------


def _elsewhere(tuner_class: Any) -> Any:
    """A tuner that is kept under another name; ``_instance`` stays ``None``."""

    class Elsewhere(tuner_class):
        _instance = None
        _kept: Any = None

        @classmethod
        def get(cls) -> Any:
            cls._kept = cls._kept or AutoTuner.get()
            return cls._kept

    return Elsewhere


STRANGE_TUNERS: dict[str, Callable[[], Any]] = {
    "absent": lambda: type("Bare", (), {"get": AutoTuner.get}),
    "kept elsewhere": lambda: _elsewhere(AutoTuner),
    "another thing": lambda: type("Other", (AutoTuner,), {"_instance": 7, "get": AutoTuner.get}),
    "per thread": lambda: type("Local", (AutoTuner,), {"_instance": threading.local(), "get": AutoTuner.get}),
    "get wants a name": lambda: type(
        "Named", (AutoTuner,), {"_instance": None, "get": classmethod(lambda cls, name: None)}
    ),
}  # fmt: skip


def _tuned_tactics(module: RecordingModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning is honoured: a layer takes the tactic that was fastest, in and after the context, until told to forget."""
    best = next(row for row in INSTANCES if row.token_tile == 128)

    def time(tuner: Any, runner: Any, inputs: Any, tactic: str, config: Any, **named: Any) -> float:
        return 0.5 if tactic == best.name else 1.0

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", time)
    monkeypatch.setattr(AutoTuner, "_get_l2_cache_size_in_bytes", lambda tuner, device_id=None: 0)
    arguments = meta_arguments(0)
    AutoTuner.get().clear_cache()

    def launched() -> tuple[int, int]:
        flashinfer.cutlass_fused_moe(**arguments, tune_max_num_tokens=8)
        return module.launches[-1]["tactic_fc1"], module.launches[-1]["tactic_fc2"]

    default = launched()
    assert best.index not in default
    with autotune(True):
        assert launched() == (best.index, best.index)
    assert launched() == (best.index, best.index)
    assert launched() == (best.index, best.index)
    AutoTuner.get().clear_cache()
    assert launched() == default


@pytest.mark.parametrize("strange", STRANGE_TUNERS)
def test_tuning_without_the_private_instance(
    strange: str, module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm12x_probes, "AutoTuner", STRANGE_TUNERS[strange]())
    holder = sm12x_probes.tuner_holder()
    monkeypatch.setattr(sm12x_probes, "AutoTuner", AutoTuner)
    assert isinstance(holder, sm12x_probes._AskedTuner)
    assert holder._instance is AutoTuner.get()
    monkeypatch.setattr(sm12x_probes, "TUNER_HOLDER", holder)
    _tuned_tactics(module, monkeypatch)


def _without(name: str) -> Callable[[Any], None]:
    return lambda tuner: delattr(tuner, name)


def _with(name: str, value: Any) -> Callable[[Any], None]:
    return lambda tuner: setattr(tuner, name, value)


STRANGE_STATES: dict[str, Callable[[Any], None]] = {
    "no counter": _without("_dirty_seq"),
    "the counter is text": _with("_dirty_seq", "0"),
    "no files": _without("_file_configs"),
    "files are a list": _with("_file_configs", []),
    "no managed cache": _without("_managed_cache"),
    "another managed cache": _with("_managed_cache", object()),
    "no contexts": _without("_active_tuning_contexts"),
    "winners elsewhere": _with("profiling_cache", SimpleNamespace(clear=lambda: None)),
    "records are not counted": _with("publish_namespaced_records", lambda namespace, records: None),
    "nothing is forgotten": _with("clear_cache", lambda: None),
}


@pytest.mark.parametrize("strange", STRANGE_STATES)
def test_tuning_without_the_private_state(
    strange: str, module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> Any:
        tuner = AutoTuner()
        STRANGE_STATES[strange](tuner)
        return tuner

    assert not sm12x_probes._behaves(sm12x_probes._state_tells, made)
    monkeypatch.setattr(sm12x_probes, "_knows_state_of", lambda tuner_class: False)
    assert sm12x_probes.tuner_state(AutoTuner.get()) is None
    _tuned_tactics(module, monkeypatch)


# --- upstream's decorator ---------------------------------------------------------------------------------------------


def _wrapping(function: Any = None, **named: Any) -> Any:
    if function is None:
        return functools.partial(_wrapping, **named)
    return functools.wraps(function)(lambda *a, **k: function(*a, **k))


def test_a_decorator_that_wraps_stays() -> None:
    assert sm12x_probes.adds_nothing(lambda function: function)
    assert not sm12x_probes.adds_nothing(_wrapping)
    assert not sm12x_probes.adds_nothing(lambda function, trace: function)
    assert not sm12x_probes.adds_nothing(None)  # type: ignore[arg-type]


def test_a_wrapper_is_left_out_only_where_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> None: ...

    wrapped = _wrapping(function)
    wrapped.fi_trace = "a template"
    monkeypatch.setattr(core, "_BARE", False)
    assert core._without_idle_wrapper(wrapped) is wrapped
    monkeypatch.setattr(core, "_BARE", True)
    assert core._without_idle_wrapper(function) is function
    assert core._without_idle_wrapper(wrapped) is function
    assert function.fi_trace == "a template"
