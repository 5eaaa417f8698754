# SPDX-License-Identifier: Apache-2.0
"""A small language model of random weights, and tokens for it."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_sm12x.quantize import models

VOCABULARY = 160


def llama(seed: int = 0, **changes: Any) -> models.Subject:
    """A small Llama of random weights, head and embedding the same tensor, as SmolLM2 has them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    print("seed", seed)
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
        }
        | changes
    )
    subject = models.Subject(LlamaForCausalLM(config).eval(), lambda text: [ord(c) % VOCABULARY for c in text], "toy")
    subject.check()
    return subject


def some_windows(seed: int = 1, lengths: tuple[int, ...] = (30, 17, 24)) -> list[list[int]]:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
