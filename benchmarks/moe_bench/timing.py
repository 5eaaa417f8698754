# SPDX-License-Identifier: Apache-2.0
"""Times on a GPU: replays of a CUDA graph with a cold L2, and the plain streaming read that is the floor."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from flashinfer.testing import MoEInputs

FLUSH_BYTES = 256 << 20
PIECE_BYTES = 32 << 10


@dataclasses.dataclass
class Sample:
    """Microseconds of one graph, over its replays."""

    median: float
    fastest: float
    slowest: float


def time_graph(run: Callable[[], Any], repeats: int) -> Sample:
    """Replays of ``run`` captured in a CUDA graph, L2 cold."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for i in range(repeats):
        flush.fill_(i % 256)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return Sample(statistics.median(times), min(times), max(times))


class StreamingRead:
    """The floor: reads the weights and scales of the experts that a batch touches."""

    def __init__(self) -> None:
        from flashinfer.jit.core import gen_jit_spec

        source = Path(__file__).parents[1] / "streaming_read.cu"
        self._run = gen_jit_spec("bench_streaming_read", [source]).build_and_load().streaming_read
        self._sink = torch.zeros(4, dtype=torch.int32, device="cuda")

    def time(self, inputs: MoEInputs, repeats: int) -> tuple[Sample, int, int]:
        """The time, the number of experts touched and their bytes."""
        experts = inputs.token_selected_experts.unique().tolist()
        matrices = (inputs.fc1_weights, inputs.fc1_scales, inputs.fc2_weights, inputs.fc2_scales)
        sample, size = self.time_tensors([matrix[expert] for matrix in matrices for expert in experts], repeats)
        return sample, len(experts), size

    def time_tensors(self, tensors: Iterable[torch.Tensor], repeats: int) -> tuple[Sample, int]:
        """The time that contiguous tensors of whole 16 bytes take, and their bytes."""
        addresses, vectors = [], []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            for offset in range(0, size, PIECE_BYTES):
                addresses.append(tensor.data_ptr() + offset)
                vectors.append(min(PIECE_BYTES, size - offset) // 16)
        pieces = torch.tensor(addresses, dtype=torch.int64, device="cuda")
        counts = torch.tensor(vectors, dtype=torch.int32, device="cuda")
        sample = time_graph(lambda: self._run(pieces, counts, self._sink), repeats)
        return sample, 16 * sum(vectors)
