# SPDX-License-Identifier: Apache-2.0
"""The simulation of what a GEMM reads from DRAM."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
from pathlib import Path

import pytest
from perfmodel.l2 import Gemm, dram_bytes, walk

ROOT = Path(__file__).parents[2]

SCHEDULER = r"""
#define __device__
#define __forceinline__ inline
#include <algorithm>
#include <cstdio>
using std::max;
using std::min;
struct { int x; } blockIdx;
#include "flashinfer/sm12x/tile/scheduler.cuh"
using namespace flashinfer::sm12x;

int main() {
  int experts, m_tiles, k_tiles, blocks, offsets[64] = {}, prefix[64] = {};
  while (std::scanf("%d %d %d %d", &experts, &m_tiles, &k_tiles, &blocks) == 4) {
    for (int e = 0, rows; e < experts && std::scanf("%d", &rows) == 1; ++e) {
      offsets[e + 1] = offsets[e] + rows;
      prefix[e + 1] = prefix[e] + (rows + TILE - 1) / TILE;
    }
    const WorkTileMap<TILE> work_tiles = {offsets, prefix, experts, m_tiles};
    const WorkSplit work(work_tiles.num_work_tiles(), k_tiles, blocks);
    for (blockIdx.x = 0; blockIdx.x < work.blocks; ++blockIdx.x) {
      TileScheduler scheduler(work);
      for (KRange range = scheduler.next(); range.tiles > 0; range = scheduler.next()) {
        const WorkTile tile = work_tiles.locate(range.work_tile);
        for (int k = range.first; k < range.first + range.tiles; ++k) {
          std::printf("%d %d %d %d %d\n", blockIdx.x, tile.expert, tile.m_tile,
                      (tile.first_token - offsets[tile.expert]) / TILE, k);
        }
      }
    }
    std::puts("end");
  }
}
"""


@pytest.mark.parametrize("block_n", [8, 48, 128])
def test_it_is_the_kernels_order(tmp_path: Path, block_n: int) -> None:
    """The kernels' own header, compiled for the host, against what is simulated: each block's tiles, in its order."""
    source, program = tmp_path / "order.cpp", tmp_path / "order"
    source.write_text(SCHEDULER)
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", f"-DTILE={block_n}", f"-I{ROOT / 'include'}"]
    subprocess.run([*compiler, str(source), "-o", str(program)], check=True)
    seed = random.randrange(2**31)
    print("seed", seed)
    generator = random.Random(seed)
    cases = []
    for _ in range(30):
        rows = [
            generator.choice((0, 1, 7, 600, 1100, generator.randint(1, 3000))) for _ in range(generator.randint(1, 9))
        ]
        cases.append((rows, generator.randint(1, 7), generator.randint(1, 5), generator.randint(1, 50)))
    text = "\n".join(
        f"{len(rows)} {m_tiles} {k_tiles} {blocks} {' '.join(map(str, rows))}"
        for rows, m_tiles, k_tiles, blocks in cases
    )
    printed = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True).stdout
    found = [[tuple(map(int, line.split())) for line in part.splitlines()] for part in printed.split("end\n")[:-1]]
    for (rows, m_tiles, k_tiles, blocks), kernels in zip(cases, found, strict=True):
        work = Gemm(rows, m_tiles, k_tiles, block_n, 1.0, 1.0)
        units = work.units()
        expected = [
            (block, *units[unit], block_k)
            for block in range(blocks)
            for unit, block_k in walk(len(units), k_tiles, blocks, block)
        ]
        assert kernels == expected


def test_panels_keep_a_long_prompt_in_l2() -> None:
    """QKV of gpt-oss-120b in MXFP8, 8,192 tokens, what a GB10's L2 is taken to hold."""
    work = Gemm([8192], m_tiles=40, k_tiles=23, block_n=128, weight_bytes=132.0 * 128, row_bytes=132.0)
    assert dram_bytes(work, 48, 19.2e6) < 1.3 * work.once()


def test_what_l2_holds_is_read_once() -> None:
    work = Gemm([20, 0, 3, 9], m_tiles=5, k_tiles=4, block_n=8, weight_bytes=100.0, row_bytes=3.0)
    assert len(work.units()) == 5 * (3 + 1 + 2)
    assert work.once() == 4 * (3 * 5 * 100 + 32 * 3)
    assert dram_bytes(work, 7, 1e9) == pytest.approx(work.once())
    # If there is no L2, each M tile reads all rows of its expert, and each N tile all weights.
    assert dram_bytes(work, 7, 0.0) == pytest.approx(4 * (5 * 6 * 100 + 5 * 32 * 3))
    work = dataclasses.replace(work, rows=[200, 150, 120])
    sizes = [dram_bytes(work, 6, capacity) for capacity in (0.0, 600.0, 4000.0, 1e9)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2] > 0
    assert sizes[3] == pytest.approx(work.once())
