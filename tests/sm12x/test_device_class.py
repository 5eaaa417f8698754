# SPDX-License-Identifier: Apache-2.0
"""The class of a GPU, by its compute capability."""

from __future__ import annotations

import pytest

from flashinfer.sm12x.device_class import CARD, CLASSES, GB10, HOPPER, DeviceClass, class_of
from flashinfer.sm12x.instances import INSTANCES


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((12, 1), GB10),
        ((12, 0), CARD),
        ((12, 7), CARD),
        ((9, 0), HOPPER),
        ((9, 1), None),
        ((10, 0), None),
        ((8, 9), None),
    ],
)
def test_the_class_of_a_capability(capability: tuple[int, int], expected: DeviceClass | None) -> None:
    assert class_of(capability) is expected


def test_limits_rise_to_the_end_and_name_tiles_that_there_are() -> None:
    for known in CLASSES:
        tiles = {row.block_n for row in known.table if not row.split_k}
        for limits in (known.two_kernel, known.two_kernel_w4a16, known.gemms):
            assert [limit for limit, _ in limits] == sorted({limit for limit, _ in limits})
            assert limits[-1][0] == float("inf")
            assert {tile for _, tile in limits} <= tiles
        assert {tile for _, tile in known.fused_moe} <= {row.block_n for row in known.table if row.split_k}
        assert set(known.table) <= set(known.tactics) <= set(INSTANCES)
