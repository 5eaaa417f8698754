# SPDX-License-Identifier: Apache-2.0
"""Private parts of Python, torch and upstream that save calls time, each behind a probe of how it behaves.

A part that is missing, wants other arguments or does something else than it is used for is left alone; the public way
is slower and gives the same results.

========================================  ==================================  =====================================
private                                   what it saves                       without it
========================================  ==================================  =====================================
``os.environ._data``                      two microseconds a switch           ``os.environ``
``torch._C._dynamo.guards.TensorGuards``  comparing tensors in Python         attributes are compared
``AutoTuner._instance``                   making a tuner that nobody uses     ``AutoTuner.get()``
the tuner's counters and stores           asking it on every call             it is asked
========================================  ==================================  =====================================

Whether upstream's decorator of public functions logs is told by what it returns (:func:`adds_nothing`), and is private
to nobody.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .autotuner import AutoTuner

_PROBE_VARIABLE = "_FLASHINFER_SM12X_PROBE"  # means nothing to anybody


def _behaves(probe: Callable[..., bool], *arguments: Any) -> bool:
    """``probe``'s answer, which is no where it fails: what it asks is private, so that anything may be raised."""
    try:
        return probe(*arguments)
    except Exception:
        return False


# --- the environment --------------------------------------------------------------------------------------------------


def _follows_environment(data: Any, encode: Any) -> bool:
    """Whether ``data`` has a variable under its encoded name as soon as it is set, changed and deleted."""
    key = encode(_PROBE_VARIABLE)
    before = os.environ.pop(_PROBE_VARIABLE, None)
    seen = [data.get(key)]
    try:
        for value in ("1", "2"):
            os.environ[_PROBE_VARIABLE] = value
            seen.append(os.fsdecode(data.get(key)))
    finally:
        os.environ.pop(_PROBE_VARIABLE, None)
        seen.append(data.get(key))
        if before is not None:
            os.environ[_PROBE_VARIABLE] = before
    return seen == [None, "1", "2", None]


def environment() -> tuple[Any, Callable[[str], Any]]:
    """A mapping that holds the environment as it is at any time, and what makes its keys of names.

    ``os.environ`` decodes values, and raises and catches a ``KeyError`` for an absent one, a microsecond each; what it
    keeps underneath is a plain dictionary.
    """
    data, encode = getattr(os.environ, "_data", None), getattr(os.environ, "encodekey", None)
    return (data, encode) if encode is not None and _behaves(_follows_environment, data, encode) else (os.environ, str)


# --- torch's guards ---------------------------------------------------------------------------------------------------


def _tells_tensors_apart(guards: Any) -> bool:
    """Whether ``guards`` takes tensors that look alike, refuses those that differ in anything, and keeps none alive."""

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    remembered = [make(2, 3), make(4, dtype=torch.uint8, device="meta")]
    check = guards(*remembered, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    first, second = make(2, 3), make(4, dtype=torch.uint8, device="meta")
    others = [
        (make(2, 4), second),
        (make(3, 2).T, second),
        (make(2, 6)[:, ::2], second),
        (make(6), second),
        (make(1, 2, 3), second),
        (make(2, 3, dtype=torch.float16), second),
        (make(2, 3, device="meta"), second),
        (None, second),
        (first, make(5, dtype=torch.uint8, device="meta")),
        (first, make(4, dtype=torch.int8, device="meta")),
        (first, make(4, dtype=torch.uint8)),
        (first, 2.5),
        (second, first),
    ]
    alike = check(*remembered) is True and check(first, second) is True
    differ = all(check(*other) is False for other in others)
    kept = weakref.ref(remembered.pop())
    return alike and differ and kept() is None and check(first, second) is True


def tensor_guards() -> Any:
    """What ``torch.compile`` guards its graphs with, or ``None``.

    One call into C++ compares all tensors, in a third of the time that reading their attributes takes.
    """
    guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
    return guards if guards is not None and _behaves(_tells_tensors_apart, guards) else None


# --- upstream's autotuner ---------------------------------------------------------------------------------------------


def _holds_the_tuner(tuner_class: Any) -> bool:
    """Whether ``get()`` answers with what the class keeps as ``_instance``."""
    held = vars(tuner_class)["_instance"]
    kept = object()
    probe: Any = type("Probe", (tuner_class,), {"_instance": kept})
    return (held is None or isinstance(held, tuner_class)) and probe.get() is kept


class _AskedTuner:
    """Says where there is no other way to know that there is a tuner, by making it."""

    @property
    def _instance(self) -> Any:
        return AutoTuner.get()


def tuner_holder() -> Any:
    """Something whose ``_instance`` is the process's tuner, or ``None`` as long as nobody has asked for one."""
    return AutoTuner if _behaves(_holds_the_tuner, AutoTuner) else _AskedTuner()


NOTHING_TUNED = (0, 0, 0, None)


def _read_state(tuner: Any) -> Any:
    if tuner.is_tuning_mode or tuner._active_tuning_contexts or tuner._in_v2_context:
        return None
    return (
        tuner._dirty_seq,
        len(tuner.profiling_cache),
        len(tuner._file_configs),
        tuner._managed_cache,
    )


def _state_tells(tuner_class: Any) -> bool:
    """Whether a tuner of its own shows what is recorded, what a file brings and that all of it is forgotten."""
    tuner = tuner_class()
    states = [_read_state(tuner)]
    tuner.publish_namespaced_records("sm12x", {"probe": 1})
    states.append(_read_state(tuner))
    tuner.clear_cache()
    states.append(_read_state(tuner))
    tuner._file_configs["sm12x"] = ("", -1)
    tuner.profiling_cache["sm12x"] = (-1, None)
    states.append(_read_state(tuner))
    tuner.clear_cache()
    states.append(_read_state(tuner))
    tuner.is_tuning_mode = True
    states.append(_read_state(tuner))
    return states == [NOTHING_TUNED, (1, 0, 0, None), NOTHING_TUNED, (0, 1, 1, None), NOTHING_TUNED, None]


@functools.cache
def _knows_state_of(tuner_class: Any) -> bool:
    # At first use, not at import: making a tuner asks the driver whether computing is confidential.
    return _behaves(_state_tells, tuner_class)


def tuner_state(tuner: Any) -> Any:
    """What the tuner's answers depend on outside a tuning context, or ``None`` where it must be asked."""
    tuner_class: Any = type(tuner)
    return _read_state(tuner) if _knows_state_of(tuner_class) else None


# --- upstream's decorator ---------------------------------------------------------------------------------------------


def adds_nothing(decorator: Callable[..., Any]) -> bool:
    """Whether ``decorator`` leaves a function without a trace as it is, as upstream's does when nothing is logged."""

    def function() -> None: ...

    return _behaves(lambda: decorator(function) is function)


TENSOR_GUARDS = tensor_guards()
TUNER_HOLDER = tuner_holder()
