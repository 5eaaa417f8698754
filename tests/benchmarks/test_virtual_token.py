# SPDX-License-Identifier: Apache-2.0
"""The kernels' times that the predicted token is made of are those of the kernels as they are."""

from __future__ import annotations

import emulate
import pytest
from perfmodel import step

from flashinfer.testing.virtual_device import virtual_device


@pytest.mark.parametrize("kind", ["O", "router", "attention, full", "attention, window"])
def test_the_times_that_are_kept_are_those_of_the_kernels(kind: str) -> None:
    """Else the kernels changed and the file did not: the smallest dense layer, which one of two ranks has, and small calls."""
    with virtual_device("sm_121a", strict=False) as device:
        if kind == "O":
            seen = emulate.dense_kernel(device, 2, kind, "mxfp4", 1, "bf16")
        elif kind == "router":
            seen = emulate.router_kernel(device, step.LAYER_MODEL, 4)
        else:
            seen = emulate.attention_kernel(device, 1, "bf16", 1, 1024 if kind == "attention, full" else 0)
    about = {name: value for name, value in vars(seen).items() if not isinstance(value, float) and name != "bound"}
    assert seen is not None and seen.kind == kind
    (line,) = [each for each in step.kept().values() if about.items() <= vars(each).items()]
    for name, value in vars(line).items():
        told = getattr(seen, name)
        assert told == (pytest.approx(value, rel=0.03) if isinstance(value, float) else value), (
            f"{name}: {told}, kept {value}: bench_token.py --emulate writes the file anew"
        )
