# SPDX-License-Identifier: Apache-2.0
"""The kernels' times that the predicted token is made of are those of the kernels as they are."""

from __future__ import annotations

import pytest

from flashinfer._layer import fork_root
from flashinfer.testing.virtual_device import virtual_device


def test_the_times_that_are_kept_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kernels changed and the file did not: the smallest dense layer, which one of two ranks has."""
    monkeypatch.syspath_prepend(str(fork_root() / "benchmarks"))
    from moe_bench import predict_dense
    from token_bench.emulate import MODEL, kept, times
    from token_bench.sizes import SIZES

    (line,) = [each for each in kept() if (each.kind, each.ranks, each.tokens, each.weights) == ("O", 2, 1, "mxfp4")]
    shape = SIZES[MODEL].split(2).matrices["O"]
    with virtual_device("sm_121a", strict=False) as device:
        seen = predict_dense.predict_layer(device, "O", 1, "mxfp4", "bf16", shape)
    assert seen is not None
    for name, value in times(line).items():
        told = getattr(seen, name)
        assert told == (value if isinstance(value, str) else pytest.approx(value, rel=0.03)), (
            f"{name}: {told}, kept {value}: bench_token.py --emulate writes the file anew"
        )
