# SPDX-License-Identifier: Apache-2.0
"""Which experts tokens choose: uniformly, or by one profile of gpt-oss.

The profile: the experts' popularity in a layer is log-normal, by quantiles, with one parameter, the standard deviation
of its logarithm. It is calibrated on the streams of one Spark that kubis.ai published (``published.csv``, role
*routing*: 4, 8, 16 and 32 streams, random passages of one book, so no prompt is shared). Their times a step, less that
of one stream and the streams' KV, divided by gptoss-spark's 62 us an expert and layer, say how many distinct experts a
layer touched (:func:`distinct`): 12.7, 19.3, 28.4 and 39.9. Each fits a spread of its own, 1.53 to 1.97, which is the
range. Those rows are not counted as rows. Zipf's weights fit these counts with exponents of 1.0 to 1.4, and weights
that fall by a factor at each rank fit them as well but leave a long prompt half of the experts. For comparison: Gemma 4
26B-A4B (128 experts, top-8) has a Gini coefficient of 0.76, a spread of 2.0.

Neighbouring tokens of one sequence share 26 % (GLM-4.7-Flash, 64 experts, top-4), 34 % (GLM-5.2), 38 % (Cohere) and 44
% (Gemma 4) of their experts. gpt-oss-120b: 15.57 ms of experts in a pass of two tokens (gptoss-spark) are 7.0 experts a
layer at 62 us, which is 25 %. The sources' addresses are in ``benchmarks/token_bench/published.csv``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashinfer.sm12x.models import MoELayer


class Routing(NamedTuple):
    """``spread``: the standard deviation of the logarithm of the experts' popularity, 0: all alike; ``shared``: the
    share of a token's experts that the next one of its sequence keeps."""

    spread: float = 0.0
    shared: float = 0.0


UNIFORM = Routing()
PROFILE = Routing(spread=2.0), Routing(spread=1.5)
"""gpt-oss, independent streams: few and many experts, which are fast and slow."""
GPT_OSS = Routing(spread=1.75)
"""The middle of the profile, for a measurement, which has one routing."""
NAMED = {"uniform": UNIFORM, "gpt-oss": GPT_OSS}
WINDOW = Routing(shared=0.3), Routing(shared=0.2)
"""gpt-oss, tokens of one sequence: many and few in common, 25 % as derived."""
US_AN_EXPERT, LAYERS, KV_US = 62.0, 36, 96.0
"""gptoss-spark's marginal time of an expert, its layers, and the time of one stream's 22 MB of fp8 KV at 233 GB/s."""


def distinct(streams: int, rate: float, alone: float, top_k: int = 4) -> float:
    """Distinct experts a layer that a step of ``streams`` touched, by its tokens/s and those of one stream."""
    more = 1e6 * (streams / rate - 1 / alone) - (streams - 1) * KV_US
    return top_k + more / (LAYERS * US_AN_EXPERT)


def log_popularity(experts: int, routing: Routing) -> torch.Tensor:
    """Logarithms of the weights with which the experts are drawn, the most popular one first."""
    quantiles = (torch.arange(experts, dtype=torch.float64) + 0.5) / experts
    return -routing.spread * torch.special.ndtri(quantiles)


def routed(layer: MoELayer, sequences: int, new: int, seed: int, routing: Routing = UNIFORM) -> torch.Tensor:
    """Expert ids ``[sequences * new, top_k]``, the ``new`` tokens of a sequence together.

    A token's experts are drawn without replacement, weighted by popularity.
    """
    scores = torch.rand((sequences * new, layer.experts), generator=torch.Generator().manual_seed(seed))
    if routing.spread:
        # The largest of u^(1/w) are such a draw (Efraimidis and Spirakis, 2006).
        scores = scores.double().log() * (-log_popularity(layer.experts, routing)).exp()
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
