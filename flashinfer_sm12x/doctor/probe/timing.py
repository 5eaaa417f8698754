# SPDX-License-Identifier: Apache-2.0
"""Times on a GPU: replays of a CUDA graph with a cold L2, and the plain streaming read that is the floor."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flashinfer.testing import MoEInputs

from .target import Target, find_target

FLUSH_BYTES = 256 << 20
PIECE_BYTES, READ_WARPS = 32 << 10, 16
BULK_READ_WARPS = 8  # kBulkReadWarps


@dataclasses.dataclass
class Sample:
    """Microseconds of one graph, over its replays."""

    median: float
    fastest: float
    slowest: float


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """``run`` as a CUDA graph, after it ran three times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(call: Callable[[], Any]) -> float:
    """The time that ``call`` takes on the stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end)


def time_graph(run: Callable[[], Any], repeats: int) -> Sample:
    """Replays of ``run`` captured in a CUDA graph, L2 cold."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    graph = captured(run)
    times = []
    for i in range(repeats):
        flush.fill_(i % 256)
        times.append(microseconds(graph.replay))
    return Sample(statistics.median(times), min(times), max(times))


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Contiguous tensors of whole 16 bytes, cut for the streaming read: addresses, 16-byte vectors of each, sums."""

    addresses: torch.Tensor
    vectors: torch.Tensor
    sums: torch.Tensor
    num_bytes: int

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor], device: torch.device) -> Pieces:
        addresses, vectors = [], []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            for offset in range(0, size, PIECE_BYTES):
                addresses.append(tensor.data_ptr() + offset)
                vectors.append(min(PIECE_BYTES, size - offset) // 16)
        return cls(
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.tensor(vectors, dtype=torch.int32, device=device),
            torch.zeros((len(vectors), READ_WARPS), dtype=torch.int32, device=device),
            16 * sum(vectors),
        )

    def total(self) -> int:
        """The sum of all 32-bit words that were read, modulo 2^32."""
        return int(self.sums.long().sum()) & 0xFFFFFFFF


class StreamingRead:
    """The floor: a plain kernel of streaming loads (``include/flashinfer/sm12x/probe/streaming_read.cuh``)."""

    def __init__(self, target: Target | None = None) -> None:
        self._target = target or find_target()

    def run(self, pieces: Pieces) -> None:
        """Read them once, and leave the sums."""
        self._target.call("streaming_read", pieces.addresses, pieces.vectors, pieces.sums, writes=(pieces.sums,))

    def time(self, inputs: MoEInputs, repeats: int) -> tuple[Sample, int, int]:
        """The time of the weights and scales of the experts that a batch touches, their number and their bytes."""
        experts = inputs.token_selected_experts.unique().tolist()
        matrices = (inputs.fc1_weights, inputs.fc1_scales, inputs.fc2_weights, inputs.fc2_scales)
        sample, size = self.time_tensors([matrix[expert] for matrix in matrices for expert in experts], repeats)
        return sample, len(experts), size

    def time_tensors(self, tensors: Iterable[torch.Tensor], repeats: int) -> tuple[Sample, int]:
        """The time that contiguous tensors of whole 16 bytes take, and their bytes."""
        pieces = Pieces.of(tensors, self._target.device)
        return time_graph(lambda: self.run(pieces), repeats), pieces.num_bytes


class BulkRead(StreamingRead):
    """The same bytes by the layers' access pattern: bulk copies, three stages, one block an SM
    (``include/flashinfer/sm12x/probe/bulk_read.cuh``)."""

    def run(self, pieces: Pieces) -> None:
        blocks = min(self._target.sm_count, len(pieces.vectors))
        sums = pieces.sums.view(-1)[: blocks * BULK_READ_WARPS].view(blocks, BULK_READ_WARPS)
        self._target.call("bulk_read", pieces.addresses, pieces.vectors, sums, writes=(sums,))


def wrong_read(target: Target, size: int, how: type[StreamingRead] = StreamingRead) -> bool:
    """Whether the kernel's sum of ``size`` random bytes, a multiple of 16, differs from torch's."""
    generator = torch.Generator(target.device).manual_seed(1)
    words = torch.empty(size // 4, dtype=torch.int32, device=target.device)
    data = words.random_(-(2**31), 2**31 - 1, generator=generator)
    pieces = Pieces.of([data], target.device)
    read = how(target)
    if target.virtual is not None:
        # The kernel gets addresses, which the virtual device does not take for arguments.
        target.virtual.call(lambda _: read.run(pieces), data, writes=())
    else:
        read.run(pieces)
    return pieces.total() != int(data.long().sum()) & 0xFFFFFFFF


def sustained_read(target: Target, size: int, repeats: int = 12, how: type[StreamingRead] = StreamingRead) -> float:
    """GB/s of reading ``size`` bytes, many times what L2 holds, the median."""
    data = torch.empty(size, dtype=torch.uint8, device=target.device)
    data.random_()
    sample, num_bytes = how(target).time_tensors([data], repeats)
    return num_bytes / sample.median / 1e3
