# SPDX-License-Identifier: Apache-2.0
"""The simulation of what a GEMM reads from DRAM."""

from __future__ import annotations

import random

import pytest

from flashinfer.sm12x_gpu_probe.l2 import Gemm, dram_bytes, walk


def gemm(rows: list[int], token_tile: int = 8) -> Gemm:
    return Gemm(rows, row_tiles=5, k_tiles=4, token_tile=token_tile, weight_bytes=100.0, row_bytes=3.0)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_share_all_of_the_work(seed: int) -> None:
    generator = random.Random(seed)
    units, k_tiles, blocks = generator.randint(0, 40), generator.randint(1, 9), generator.randint(1, 12)
    print(f"seed {seed}: {units} units of {k_tiles}, {blocks} blocks")
    steps = [list(walk(units, k_tiles, blocks, block)) for block in range(blocks)]
    together = sorted(step for mine in steps for step in mine)
    assert together == [(unit, k_tile) for unit in range(units) for k_tile in range(k_tiles)]
    lengths = [len(mine) for mine in steps]
    assert max(lengths) - min(lengths) <= 1
    for turn in range(max(units // blocks - 1, 0)):
        first = [mine[turn * k_tiles][0] for mine in steps]
        assert first == list(range(first[0], first[0] + blocks))  # those at work at a time are neighbours


def test_an_l2_that_holds_everything_reads_once() -> None:
    work = gemm([20, 0, 3, 9])
    assert len(work.units()) == 5 * (3 + 1 + 2)
    assert work.once() == 4 * (3 * 5 * 100 + 32 * 3)
    assert dram_bytes(work, 7, 1e9) == pytest.approx(work.once())


def test_without_an_l2_every_tile_is_read_each_time() -> None:
    work = gemm([20, 0, 3, 9])
    # Each row tile reads all rows of its expert, each token tile all weights.
    assert dram_bytes(work, 7, 0.0) == pytest.approx(4 * (5 * 6 * 100 + 5 * 32 * 3))


def test_a_small_l2_lies_between() -> None:
    work = gemm([200, 150, 120])
    sizes = [dram_bytes(work, 6, capacity) for capacity in (0.0, 600.0, 4000.0, 1e9)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2] > 0
    assert sizes[3] == pytest.approx(work.once())
