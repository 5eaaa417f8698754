# SPDX-License-Identifier: Apache-2.0
"""The layer benchmark's ``--routing``: tokens choose experts as the predictor's profile of gpt-oss has it."""

from __future__ import annotations

import pytest
import torch
from perfmodel.routing import NAMED, log_popularity, routed

from flashinfer.sm12x.models import MODELS
from flashinfer.testing import MoECase, make_moe_inputs
from flashinfer.testing.moe_layers import Batch, route

LAYER = MODELS["gpt-oss-120b"].moe


def test_the_layer_benchmarks_routing_is_the_profiles() -> None:
    """By weights, without replacement: as many distinct experts as the predictor's draw, and uniform when omitted."""
    layer = Batch(make_moe_inputs(MoECase(16, 64, 64, 128, 4, 2), 0, "cpu"), torch.empty(0))
    for name, routing in NAMED.items():
        popularity = None if name == "uniform" else log_popularity(128, routing)
        batches = [route(layer, 16, seed, popularity) for seed in range(64)]
        ids = [batch.inputs.token_selected_experts for batch in batches]
        assert all(len(set(token.tolist())) == 4 for each in ids for token in each)
        drawn = sum(len(each.unique()) for each in ids) / 64
        wanted = sum(len(routed(LAYER, 16, 1, seed, routing).unique()) for seed in range(64)) / 64
        assert drawn == pytest.approx(wanted, rel=0.04), name
        popular = torch.bincount(torch.cat(ids).flatten(), minlength=128)
        assert name == "uniform" or popular[:32].sum() > 4 * popular[64:].sum()  # the first are the popular ones
