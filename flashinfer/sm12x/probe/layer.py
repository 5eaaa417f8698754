# SPDX-License-Identifier: Apache-2.0
"""gpt-oss-120b's layer: its time beside that of a plain read of the same weights, and beside what was predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ...testing.moe_layers import layer_call, make_layer, route
from .target import Target
from .timing import StreamingRead, time_graph

MODEL = "gpt-oss-120b"
TOKENS = (1, 4, 64, 2048)
MODE = 0  # W4A8 with MXFP8 activations, what vLLM sends
ROUTINGS = 3


@dataclasses.dataclass(frozen=True)
class Line:
    """One size; microseconds.

    Attributes:
        tokens: Of the batch.
        layer_us: Of the layer, the median over replays and over some random routings.
        read_us: Of the streaming read of the weights and scales that it needs.
        megabytes: Of these.
        experts: Touched.
    """

    tokens: int
    layer_us: float
    read_us: float
    megabytes: float
    experts: float


def measure(target: Target, model: str = MODEL, tokens: Sequence[int] = TOKENS, repeats: int = 20) -> Iterator[Line]:
    """The layer at each number of tokens, from CUDA graphs with a cold L2."""
    layer = make_layer(model, max(tokens), 0, str(target.device))
    read = StreamingRead(target)
    for count in tokens:
        times, reads, sizes, touched = [], [], [], []
        for seed in range(ROUTINGS if count < max(tokens) else 1):
            inputs = route(layer, count, seed).of_mode(MODE)
            times.append(time_graph(layer_call(inputs), repeats).median)
            floor, experts, size = read.time(inputs, repeats)
            reads.append(floor.median)
            sizes.append(size / 1e6)
            touched.append(experts)
        yield Line(count, *(sum(values) / len(values) for values in (times, reads, sizes, touched)))
