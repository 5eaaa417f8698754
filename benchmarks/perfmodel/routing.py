# SPDX-License-Identifier: Apache-2.0
"""Which experts tokens choose: uniformly, or as published routing has it.

No published routing is of gpt-oss. Popularity: Qwen3-30B-A3B (128 experts, top-8) has a normalized entropy of 0.889 over
mixed prompts, that of a Zipf distribution of exponent 0.9; Gemma 4 26B-A4B (128, top-8) a Gini coefficient of 0.76, that of
exponent 1.5, which also gives its 44 % of experts in common between neighbours. Neighbouring tokens of one sequence share
26 % (GLM-4.7-Flash, 64 experts, top-4), 34 % (GLM-5.2), 38 % (Cohere) and 44 % (Gemma 4) of their experts. The sources'
addresses are in ``benchmarks/token_bench/published.csv``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashinfer.sm12x.models import MoELayer


class Routing(NamedTuple):
    """``zipf``: the exponent of the experts' popularity; ``shared``: the share of a token's experts that the next one of its
    sequence keeps."""

    zipf: float = 0.0
    shared: float = 0.0


UNIFORM = Routing()
PUBLISHED = Routing(zipf=1.5), Routing(zipf=0.9)
"""Independent streams: few and many experts, which are fast and slow."""


def routed(layer: MoELayer, sequences: int, new: int, seed: int, routing: Routing = UNIFORM) -> torch.Tensor:
    """Expert ids ``[sequences * new, top_k]``, the ``new`` tokens of a sequence together.

    A token's experts are drawn without replacement, weighted by popularity.
    """
    scores = torch.rand((sequences * new, layer.experts), generator=torch.Generator().manual_seed(seed))
    if routing.zipf:
        # The largest of u^(1/w) are such a draw (Efraimidis and Spirakis, 2006).
        scores = scores.double().log() * torch.arange(1, layer.experts + 1, dtype=torch.float64) ** routing.zipf
    ids = scores.topk(layer.top_k).indices
    if not routing.shared:
        return ids
    keeps = (
        torch.rand((sequences * new, layer.top_k), generator=torch.Generator().manual_seed(seed + 1)) < routing.shared
    )
    for token in range(sequences * new):
        if token % new:
            kept = ids[token - 1][keeps[token]]
            ids[token] = scores[token].index_fill(0, kept, float("inf")).topk(layer.top_k).indices
    return ids
