# SPDX-License-Identifier: Apache-2.0
"""Experts of others: grouped GEMMs counted on the virtual SM121, in the sizes and with the tiles that vLLM gives them.

- ``CUTLASS``: upstream's SM120 MXFP4 grouped GEMM, MXFP8 tokens, 128 rows of weights a tile. vLLM rounds both sizes up
  to
  128. Below 64 tokens the published builds take tiles of 64 token rows, else of 128 (flashinfer, branch mxfp4_v2).
- ``Marlin``: bf16 tokens, weights dequantized. vLLM rounds the hidden size up to 256 and the intermediate one to 128,
  and takes the smallest block of routes that an expert's mean share does not nearly fill.

Counts are functions of the work, as this fork's are (:class:`.moe.Fit`): :data:`FITS` was emulated in full sizes on 2
to 4 experts, each row a token of its own. Within an expert tokens and weights fit in L2 and come from DRAM once.
Marlin's blocks take tiles of whole experts in turn once there are more tiles than blocks: then each tile reads its
weights again, unless two of an expert happen to keep pace. The fast end has them do, the slow end not.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from flashinfer.sm12x.models import SCALE_BLOCK, MoELayer

from .gb10 import Counts, Launch
from .moe import Work, fits_in, mean_work
from .routing import UNIFORM, Routing

FITS = Path(__file__).with_name("gb10_peers.csv")
"""``benchmarks/emulate_peers.py`` writes it: FC1 and FC2 of each kernel, size and tile."""
MARLIN_BLOCKS, MARLIN_FILL = (8, 16, 32, 48, 64), 0.9


@dataclasses.dataclass(frozen=True)
class Peer:
    """A layer of others.

    ``operand`` is what its MMAs multiply, ``hidden`` and ``inter`` are what sizes are rounded up to. Its small launches
    read or write, for each route, ``of_hidden`` and ``of_inter`` bytes times the sizes: tokens gathered by expert and
    outputs; FC1's output and activations. ``support_us``: microseconds of its small launches where a GB10's were
    published; None: by their number.
    """

    name: str
    operand: str
    hidden: int
    inter: int
    of_hidden: tuple[float, ...]
    of_inter: tuple[float, ...]
    support_us: tuple[float, float] | None = None

    def padded(self, layer: MoELayer) -> tuple[int, int]:
        """Hidden and intermediate size as its kernels have them."""
        return -(-layer.hidden // self.hidden) * self.hidden, -(-layer.inter // self.inter) * self.inter

    def tile(self, layer: MoELayer, tokens: int) -> int:
        """Token rows of a tile."""
        if self.name == "CUTLASS":
            return 64 if tokens < 64 else 128
        share = tokens * layer.top_k / layer.experts
        return next((block for block in MARLIN_BLOCKS if share < MARLIN_FILL * block), MARLIN_BLOCKS[-1])

    def handed(self, layer: MoELayer, tokens: int, l2_bytes: float) -> float:
        """DRAM bytes of its small launches: tensors that L2 cannot hold. The GEMMs' own are among their counts."""
        hidden, inter = self.padded(layer)
        tensors = [*(each * hidden for each in self.of_hidden), *(each * inter for each in self.of_inter)]
        rows = tokens * layer.top_k
        return sum(rows * each for each in tensors if rows * each > l2_bytes)

    def work(self, layer: MoELayer, tokens: int, routing: Routing = UNIFORM, new: int = 1) -> Work:
        """The mean work of a batch by its routing, each ``new`` tokens of one sequence."""
        return mean_work(layer, tokens, self.tile(layer, tokens), routing, new)

    def launches(self, layer: MoELayer, tokens: int, work: Work | None = None, keep_pace: bool = True) -> list[Launch]:
        """FC1 and FC2 of ``work``, by uniform routing when omitted; ``keep_pace``: tiles of an expert read its weights
        together.

        Raises
        ------
        ValueError
            They were not emulated so.
        """
        (hidden, inter), tile = self.padded(layer), self.tile(layer, tokens)
        fits = fits_in(FITS, kernel=self.name, hidden=hidden, inter=inter, tile=tile)
        if not fits:
            raise ValueError(
                f"{self.name}'s experts of {hidden} x {inter} with tiles of {tile} tokens were not emulated: "
                "benchmarks/emulate_peers.py says which were"
            )
        work, found = work or self.work(layer, tokens), []
        for fit in fits:
            alone = self.name == "Marlin" and work.tiles > fit.blocks and not keep_pace
            again = work.tiles - work.experts if alone else 0.0
            found.append(Launch(fit.at(work) + Counts(bytes=again * fit.per_tile.bytes), fit.warps))
        return found


MXFP8, BF16 = 1 + 1 / SCALE_BLOCK, 2.0
SUPPORT_US = 20.06 + 18.66 + 8.53 + 6.30 + 2.30
"""Small launches of the CUTLASS layer on a GB10, by nsys (gptoss-spark, page KERNELS, 2026-08-30): activation, rows
gathered by expert, strides, sum, expert maps. The first two loop over 16,384 padding slots."""
ONCE_FIXED_US = 15.0, 12.0
"""What the layer saves, fast and slow, once those loops are fixed."""
PEERS = {
    "CUTLASS": Peer("CUTLASS", "mxfp8", 128, 128, (MXFP8, BF16), (2 * BF16, MXFP8), (SUPPORT_US, SUPPORT_US)),
    "CUTLASS 0.2": Peer(
        "CUTLASS",
        "mxfp8",
        128,
        128,
        (MXFP8, BF16),
        (2 * BF16, MXFP8),
        (SUPPORT_US - ONCE_FIXED_US[0], SUPPORT_US - ONCE_FIXED_US[1]),
    ),
    "Marlin": Peer("Marlin", "bf16", 256, 128, (BF16,), (2 * BF16, BF16)),
}
