# SPDX-License-Identifier: Apache-2.0
"""Masks over the vocabulary, as constrained decoding and samplers set them: what a head loses where its largest logits
are not allowed."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable

import torch

from flashinfer_sm12x.quantize.measure import Mask

RANDOM, LIKELIEST = 100, 1000
DIGITS, QUOTES = string.digits, "\"'`"


def single_tokens(encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens that are a number of up to three digits or one to three quotes, a space before them or not."""
    texts = [
        "".join(characters)
        for alphabet in (DIGITS, QUOTES)
        for length in (1, 2, 3)
        for characters in itertools.product(alphabet, repeat=length)
    ]
    found = (encode(f"{space}{text}") for text in texts for space in ("", " "))
    return sorted({ids[0] for ids in found if len(ids) == 1})


def grammar(tokens: list[int]) -> Mask:
    """A grammar that leaves these tokens everywhere."""

    def mask(logits: torch.Tensor, first: int) -> torch.Tensor:
        return torch.tensor(tokens, device=logits.device).expand(len(logits), -1)

    return mask


def random_tokens(logits: torch.Tensor, first: int) -> torch.Tensor:
    """:data:`RANDOM` tokens, others at each position of the text; the same in each run."""
    tokens, vocabulary = logits.shape
    rows = (torch.rand(vocabulary, generator=torch.Generator().manual_seed(first + row)) for row in range(tokens))
    return torch.stack([row.topk(min(RANDOM, vocabulary)).indices for row in rows]).to(logits.device)


def unlikely(logits: torch.Tensor, first: int) -> torch.Tensor:
    """All but the reference's :data:`LIKELIEST` likeliest tokens."""
    likeliest = logits.topk(min(LIKELIEST, logits.shape[1] - 1)).indices
    left = torch.ones_like(logits, dtype=torch.bool).scatter_(1, likeliest, False)
    return left.nonzero()[:, 1].view(len(logits), -1)


def masks(encode: Callable[[str], list[int]]) -> dict[str, Mask]:
    """By the words of a table's heading."""
    kept = single_tokens(encode)
    found: dict[str, Mask] = {f"{len(kept)} tokens of digits and quotes left": grammar(kept)} if kept else {}
    return found | {
        f"{RANDOM} random tokens left": random_tokens,
        f"the {LIKELIEST:,} likeliest removed": unlikely,
    }
