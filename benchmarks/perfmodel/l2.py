# SPDX-License-Identifier: Apache-2.0
"""DRAM bytes of the two-kernel path, given the size of L2: a simulation of the order in which blocks read tiles.

Every k-tile of a unit reads a tile of weights and a tile of token rows. Blocks walk their units in the order of
``include/flashinfer/sm12x/tile/scheduler.cuh``, all at the same pace; L2 evicts the least recently used tile. Checked
with the DRAM counter of an H200 (50 MB) on gpt-oss-120b, with an earlier order of units (contiguous shares of
everything): FC1 at 512 tokens 1.57 GB computed and 1.57 measured, at 8,192 tokens 14.2 and 15.0; FC2, its writes
included, 0.82 and 0.81, 6.7 and 8.2.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

PANEL_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One GEMM of a layer.

    Attributes
    ----------
    rows : sequence of int
        Token rows of each expert.
    m_tiles, k_tiles, block_n : int
        Tiles of 128 weight rows, tiles along K, and token rows of a tile.
    weight_bytes, row_bytes : float
        Bytes that one k-tile reads: a row tile's weights and scales; one token row with its scales.
    """

    rows: Sequence[int]
    m_tiles: int
    k_tiles: int
    block_n: int
    weight_bytes: float
    row_bytes: float

    def units(self) -> list[tuple[int, int, int]]:
        """(expert, row tile, token tile) in the kernels' order."""
        tiles = [-(-rows // self.block_n) for rows in self.rows]
        panel = PANEL_TOKENS // self.block_n
        return [
            (expert, block_m, block_n)
            for expert, last in enumerate(tiles)
            for first in range(0, last, panel)
            for block_m in range(self.m_tiles)
            for block_n in range(first, min(first + panel, last))
        ]

    def once(self) -> float:
        """Bytes if each were read once."""
        experts = sum(rows > 0 for rows in self.rows)
        return self.k_tiles * (experts * self.m_tiles * self.weight_bytes + sum(self.rows) * self.row_bytes)


def walk(units: int, k_tiles: int, blocks: int, block: int) -> Iterator[tuple[int, int]]:
    """The (unit, k-tile) pairs of one block: whole units in turn, then an equal share of the rest."""
    turns = max(units // blocks - 1, 0)
    for turn in range(turns):
        for block_k in range(k_tiles):
            yield turn * blocks + block, block_k
    rest = (units - turns * blocks) * k_tiles
    length, longer = divmod(rest, min(rest, blocks)) if rest else (0, 0)
    if rest and block >= min(rest, blocks):
        return
    begin = block * length + min(block, longer)
    for tile in range(begin, begin + length + (block < longer)):
        unit, block_k = divmod(tile, k_tiles)
        yield turns * blocks + unit, block_k


def dram_bytes(gemm: Gemm, blocks: int, capacity: float) -> float:
    """Bytes that miss an L2 of ``capacity`` bytes."""
    k_tiles, most = gemm.k_tiles, max(gemm.rows, default=0)
    weight_tiles = len(gemm.rows) * gemm.m_tiles
    # Each unit has the numbers of its first tiles of weights and of tokens, and the bytes of a tile of tokens.
    units = [
        (
            (expert * gemm.m_tiles + block_m) * k_tiles,
            (weight_tiles + expert * most + block_n) * k_tiles,
            min(gemm.block_n, gemm.rows[expert] - block_n * gemm.block_n) * gemm.row_bytes,
        )
        for expert, block_m, block_n in gemm.units()
    ]
    held: OrderedDict[int, float] = OrderedDict()
    filled = missed = 0.0
    for steps in itertools.zip_longest(*(walk(len(units), k_tiles, blocks, block) for block in range(blocks))):
        for unit, block_k in filter(None, steps):
            weights, tokens, token_bytes = units[unit]
            for tile, size in ((weights + block_k, gemm.weight_bytes), (tokens + block_k, token_bytes)):
                if tile in held:
                    held.move_to_end(tile)
                    continue
                held[tile] = size
                missed += size
                filled += size
                while filled > capacity and len(held) > 1:
                    filled -= held.popitem(last=False)[1]
    return missed
