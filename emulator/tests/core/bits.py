# SPDX-License-Identifier: Apache-2.0
"""Bit patterns of numbers, and what every PTX module begins with."""

from __future__ import annotations

import struct

HEADER = ".version 9.0\n.target sm_121a\n.address_size 64\n"
INF32, NAN32 = 0x7F800000, 0x7FFFFFFF  # NAN32: PTX's canonical NaN


def f32(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def f64(value: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def f16(value: float) -> int:
    return int(struct.unpack("<H", struct.pack("<e", value))[0])


def bf16(value: float) -> int:
    """Exact values only."""
    bits = f32(value)
    assert bits & 0xFFFF == 0
    return bits >> 16


def to_f32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def u(value: int, bits: int = 32) -> int:
    return value & ((1 << bits) - 1)
