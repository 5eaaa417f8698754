# SPDX-License-Identifier: Apache-2.0
"""The measure of ``scripts/compare_answers.py``: never more than the true divergence, and the true one where all is
told."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "scripts"))

import compare_answers  # noqa: E402

VOCABULARY = 40


def reported(log_probabilities: torch.Tensor, top: int, token: int) -> Mapping[int, float]:
    """The likeliest tokens and that of the text, in float32, as a server tells them."""
    ids = {*log_probabilities.topk(top).indices.tolist(), token}
    return {each: float(log_probabilities[each].float()) for each in ids}


@given(
    seed=st.integers(0, 2**32),
    top=st.integers(1, VOCABULARY),
    apart=st.sampled_from([1e-3, 0.1, 1.0, 5.0]),
    token=st.integers(0, VOCABULARY - 1),
)
def test_a_divergence_of_the_likeliest_is_at_most_the_true_one(seed: int, top: int, apart: float, token: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(VOCABULARY, generator=generator).double()
    p = logits.log_softmax(-1)
    q = (logits + apart * torch.randn(VOCABULARY, generator=generator).double()).log_softmax(-1)
    true = float((p.exp() * (p - q)).sum())
    found = compare_answers.divergence(reported(p, top, token), reported(q, top, token))
    # float32 log probabilities of up to some 30, and a rest that is taken to be LEAST at the least.
    slack = 30 * 2.0**-24 * 4 + compare_answers.LEAST * 15
    assert -slack <= found <= true + slack
    if top == VOCABULARY:
        assert found == pytest.approx(true, abs=slack)


def test_tokens_that_one_server_alone_tells_are_in_the_rest() -> None:
    p = {0: math.log(0.5), 1: math.log(0.3)}
    q = {0: math.log(0.25), 2: math.log(0.6)}
    assert compare_answers.divergence(p, q) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))


def test_a_token_that_one_server_excludes_counts() -> None:
    p, q = {0: math.log(0.5), 1: math.log(0.5)}, {0: 0.0, 1: -9999.0}
    assert compare_answers.divergence(p, q) > 1000


def test_perplexity_first_choice_and_percentile() -> None:
    half, tenth = math.log(0.5), math.log(0.1)
    p = [[{0: half, 1: tenth}] * 99 + [{0: half, 1: half}]]
    q = [[{0: tenth, 1: half}] * 99 + [{0: half, 1: half}]]
    found = compare_answers.compare(p, q, [[0] * 100])
    assert found.perplexities == (pytest.approx(2.0), pytest.approx(math.exp(-(99 * tenth + half) / 100)))
    assert found.same == 0.01
    each = compare_answers.divergence(p[0][0], q[0][0])
    assert found.mean == pytest.approx(0.99 * each, rel=1e-6)
    assert found.tail == each
    assert found.low == found.mean == found.high  # of one window
    assert found.rest == pytest.approx(0.99 * 0.4)


def test_an_interval_is_of_windows() -> None:
    p = [[{0: 0.0}] * 5, [{0: math.log(0.5)}] * 5]
    q = [[{0: 0.0}] * 5, [{0: math.log(0.25)}] * 5]
    found = compare_answers.compare(p, q, [[0] * 5] * 2)
    assert (found.low, found.high) == (pytest.approx(0, abs=1e-9), pytest.approx(2 * found.mean))
