# SPDX-License-Identifier: Apache-2.0
"""gpt-oss-120b's layer: its time, the time of a plain read of the same weights, and the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashinfer.testing.moe_layers import layer_call, make_layer, route

from . import TOKENS
from .target import Target
from .timing import StreamingRead, time_graph

MODEL = "gpt-oss-120b"
MODE = 0  # W4A8 with MXFP8 activations, what vLLM sends
ROUTINGS, REPEATS = 3, 20


def measure(target: Target) -> Iterator[dict[str, Any]]:
    """The layer at each number of tokens, from CUDA graphs with a cold L2; a mean over some random routings.

    Yields ``tokens`` of the batch; ``layer_us`` of the layer; ``read_us`` of the streaming read of the weights and
    scales that it needs, and the ``megabytes`` of these; ``experts`` touched.
    """
    layer = make_layer(MODEL, max(TOKENS), 0, str(target.device))
    read = StreamingRead(target)
    for count in TOKENS:
        lines = []
        for seed in range(ROUTINGS if count < max(TOKENS) else 1):
            inputs = route(layer, count, seed).of_mode(MODE)
            time = time_graph(layer_call(inputs), REPEATS).median
            floor, experts, size = read.time(inputs, REPEATS)
            lines.append({"layer_us": time, "read_us": floor.median, "megabytes": size / 1e6, "experts": experts})
        yield {"tokens": count, **{name: sum(line[name] for line in lines) / len(lines) for name in lines[0]}}
