# SPDX-License-Identifier: Apache-2.0
"""Whether arrivals at mbarriers keep their order (``include/flashinfer/sm12x/probe/arrival_order.cuh``)."""

from __future__ import annotations

import torch

from .target import Target

PAIRS, SOURCE_ROUNDS, STAGE_WORDS = 8, 64, 128
ROUNDS = 1 << 20
BLOCKS_PER_SM = 2


def source_words() -> torch.Tensor:
    """Int32 ``[64, 128]``: a stage's contents in each round."""
    rounds = torch.arange(SOURCE_ROUNDS, dtype=torch.int64)[:, None] * 0x9E3779B1
    words = torch.arange(STAGE_WORDS, dtype=torch.int64) * 0x85EBCA6B
    return ((rounds + words) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def hand_over(target: Target, fenced: bool, copies: bool, rounds: int = ROUNDS, blocks: int = 0) -> dict[str, int]:
    """Hand stages over between pairs of warps; count the words that were compared, and those that were of another
    round.

    Args:
        target: The device.
        fenced: Place a block-level fence before every arrival.
        copies: Fill stages by bulk copies; else by stores.
        rounds: Stages that each pair hands over.
        blocks: Blocks of eight pairs each; two on every SM, when omitted.
    """
    counts = torch.zeros((blocks or BLOCKS_PER_SM * target.sm_count, PAIRS, 2), dtype=torch.int32, device=target.device)
    source = source_words().to(target.device)
    target.call("arrival_order", source, counts, rounds, fenced, copies, writes=(counts,))
    target.synchronize()
    compared, wrong = (counts.cpu().long() & 0xFFFFFFFF).sum((0, 1)).tolist()
    return {"compared": compared, "wrong": wrong}
