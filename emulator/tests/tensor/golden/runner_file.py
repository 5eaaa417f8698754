# SPDX-License-Identifier: Apache-2.0
"""The case files of ``gpu_runner``: PTX kernels with their launch shape and parameters.

All integers are little-endian; ``u32`` counts precede strings and buffers::

    u32 cases, then per case:
      bytes name, bytes ptx, bytes kernel, u32 grid[3], u32 block[3], u32 dynamic_shared, u32 parameters,
      then per parameter: u32 kind, and
        0 Value:     bytes              passed as they are
        1 Buffer:    bytes              placed in global memory; the kernel gets the address; written back
        2 TensorMap: u32 buffer, type, rank, interleave, swizzle, promotion, fill; u64 dims[5], strides[4];
                     u32 box[5], element_strides[5]; u64 offset   (buffer: index of an earlier Buffer parameter)

The result file is the concatenation of all Buffers, in order, after their kernels ran.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Value:
    """A kernel parameter passed by value."""

    data: bytes


@dataclass
class Buffer:
    """Global memory, with its contents before the launch."""

    data: bytes


@dataclass
class TensorMap:
    """Arguments of ``cuTensorMapEncodeTiled``; enums by the driver's values, lists padded to five dimensions."""

    buffer: int
    type: int
    dims: list[int]
    strides: list[int]
    box: list[int]
    element_strides: list[int] | None = None
    interleave: int = 0
    swizzle: int = 0
    promotion: int = 0
    fill: int = 0
    offset: int = 0

    def pack(self) -> bytes:
        rank = len(self.dims)

        def padded(values: list[int], length: int, value: int) -> list[int]:
            return values + [value] * (length - len(values))

        steps = self.element_strides or [1] * rank
        return (
            struct.pack("<7I", self.buffer, self.type, rank, self.interleave, self.swizzle, self.promotion, self.fill)
            + struct.pack("<9Q", *padded(self.dims, 5, 1), *padded(self.strides, 4, 0))
            + struct.pack("<10I", *padded(self.box, 5, 1), *padded(steps, 5, 1))
            + struct.pack("<Q", self.offset)
        )


@dataclass
class Case:
    """One launch. ``meta`` says, to the tests, what the kernel does; it is not in the file."""

    name: str
    ptx: str
    kernel: str
    parameters: list[Value | Buffer | TensorMap]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    dynamic_shared: int = 0
    meta: dict[str, Any] = field(default_factory=dict)

    def buffers(self) -> list[bytes]:
        return [p.data for p in self.parameters if isinstance(p, Buffer)]


def _counted(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def dump(cases: list[Case]) -> bytes:
    """The case file."""
    parts = [struct.pack("<I", len(cases))]
    for case in cases:
        parts += [_counted(text.encode()) for text in (case.name, case.ptx, case.kernel)]
        parts.append(struct.pack("<8I", *case.grid, *case.block, case.dynamic_shared, len(case.parameters)))
        for parameter in case.parameters:
            if isinstance(parameter, TensorMap):
                parts.append(struct.pack("<I", 2) + parameter.pack())
            else:
                parts.append(struct.pack("<I", isinstance(parameter, Buffer)) + _counted(parameter.data))
    return b"".join(parts)


def split_results(cases: list[Case], results: bytes) -> list[list[bytes]]:
    """The buffers of each case as the kernel left them."""
    out, at = [], 0
    for case in cases:
        buffers = []
        for data in case.buffers():
            buffers.append(results[at : at + len(data)])
            at += len(data)
        out.append(buffers)
    if at != len(results):
        raise ValueError(f"the result file has {len(results)} bytes, the cases make {at}")
    return out
