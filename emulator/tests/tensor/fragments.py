# SPDX-License-Identifier: Apache-2.0
"""The places in the matrices of the elements of a warp's registers, by the ISA's formulas (9.7.14.5.7 to .11).

Kept apart from the implementation's single formula on purpose: each shape has its own, with the ISA's conditions on
the element index ``i``.
"""

from __future__ import annotations

from collections.abc import Callable

Place = Callable[[int, int], tuple[int, int]]  # (lane, element) -> (row, column)


def a_place(k: int, bits: int) -> Place:
    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        if bits == 16 and k == 8:
            return (group if i in (0, 1) else group + 8), thread * 2 + (i & 1)
        if bits == 16 and k == 16:
            row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
            return row, thread * 2 + (i & 1) + (0 if i < 4 else 8)
        if bits == 32 and k == 4:
            return (group if i == 0 else group + 8), thread
        if bits == 32 and k == 8:
            return (group if i in (0, 2) else group + 8), (thread if i in (0, 1) else thread + 4)
        if bits == 8 and k == 16:
            return (group if i < 4 else group + 8), thread * 4 + (i & 3)
        if bits == 8 and k == 32:
            row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
            return row, thread * 4 + (i & 3) + (0 if i < 8 else 16)
        if bits == 4 and k == 32:
            return (group if i < 8 else group + 8), thread * 8 + (i & 7)
        if bits == 4 and k == 64:
            row = group if 0 <= i < 8 or 16 <= i < 24 else group + 8
            return row, thread * 8 + (i & 7) + (0 if i < 16 else 32)
        raise KeyError((k, bits))

    return place


def b_place(k: int, bits: int) -> Place:
    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        if bits == 16 and k == 8:
            return thread * 2 + i, group
        if bits == 16 and k == 16:
            return thread * 2 + (i & 1) + (0 if i < 2 else 8), group
        if bits == 32 and k == 4:
            return thread, group
        if bits == 32 and k == 8:
            return (thread if i == 0 else thread + 4), group
        if bits == 8 and k == 16:
            return thread * 4 + i, group
        if bits == 8 and k == 32:
            return thread * 4 + (i & 3) + (0 if i < 4 else 16), group
        if bits == 4 and k == 32:
            return thread * 8 + (i & 7), group
        if bits == 4 and k == 64:
            return thread * 8 + (i & 7) + (0 if i < 8 else 32), group
        raise KeyError((k, bits))

    return place


def c_place(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def scale_a_lane(row: int, thread_id: int) -> int:
    """The lane of the thread pair `thread_id` of the row's quad that holds the row's scale (figure 43)."""
    quad, upper = row % 8, row // 8
    return 4 * quad + (0, 2)[thread_id] + upper


def scale_b_lane(column: int, thread_id: int) -> int:
    """Lane % 4 == thread_id in the column's quad (figure 44)."""
    return 4 * column + thread_id
