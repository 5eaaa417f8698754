# SPDX-License-Identifier: Apache-2.0
"""Weights and scales in Marlin's order, against the lane that must find each of them."""

from __future__ import annotations

import pytest
import torch
from moe_bench import peer_marlin


@pytest.mark.parametrize(("rows", "k"), [(64, 16), (128, 64), (192, 96)])
def test_each_nibble_is_where_its_lane_looks(rows: int, k: int) -> None:
    """A lane of an m16n8k16 MMA holds k = 2q, 2q+1, 2q+8, 2q+9 of column l: q, l its number modulo and over 4."""
    generator = torch.Generator().manual_seed(rows + k)
    packed = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    words = peer_marlin.repack(packed)
    assert (words.shape, words.dtype) == ((k // 16, 2 * rows), torch.int32)

    def nibble(n: int, at: int) -> int:
        return int(packed[n, at // 2]) >> (4 * (at % 2)) & 15

    offsets = [(odd + 8 * low, 8 * right) for odd in (0, 1) for right in (0, 1) for low in (0, 1)]
    for tile_k in range(k // 16):
        for tile_n in range(rows // 64):
            for lane in range(32):
                for group in range(4):
                    word = int(words[tile_k, 128 * tile_n + 4 * lane + group]) & 0xFFFFFFFF
                    for position, (down, right) in enumerate(offsets):
                        at = 16 * tile_k + 2 * (lane % 4) + down
                        n = 64 * tile_n + 16 * group + right + lane // 4
                        assert word >> (4 * position) & 15 == nibble(n, at)


def test_scales_and_biases_are_permuted_within_their_groups() -> None:
    scales = torch.arange(2 * 128 * 3).reshape(2, 128, 3).to(torch.int32)
    permuted = peer_marlin.permute_scales(scales)
    assert permuted.shape == (2, 3, 128)
    for column in range(128):
        group, within = divmod(column, 64)
        swap = [0, 2, 1, 3][within % 4]  # the middle two of each four change places
        i, j = divmod(within - within % 4 + swap, 8)
        assert torch.equal(permuted[:, :, column], scales[:, 64 * group + 8 * j + i, :])
    bias = torch.arange(2 * 64).reshape(2, 64)
    permuted = peer_marlin.permute_bias(bias)
    for column in range(64):
        group, within = divmod(column, 32)
        i, rest = divmod(within, 8)
        j, p = divmod(rest, 2)
        assert torch.equal(permuted[:, column], bias[:, 32 * group + 8 * j + 2 * i + p])


def test_padding_keeps_what_was_there() -> None:
    grown = peer_marlin._grown(torch.ones(2, 3, 4), 5, 6)
    assert grown.shape == (2, 5, 6)
    assert float(grown.sum()) == 24
    assert bool((grown[:, :3, :4] == 1).all())
    assert (peer_marlin.pad(2880, 256), peer_marlin.pad(2880, 128), peer_marlin.pad(128, 128)) == (3072, 2944, 128)
