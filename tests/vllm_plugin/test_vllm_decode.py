# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's model class of the plugin, by vLLM's own code on CPU tensors: prefill, then decode through the paged cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint
import paged
import pytest
import served
import torch
from paged import Batch, Paged
from test_vllm_models import ON_THE_CPU, table

SEED = 3
# Heads as decode_attention takes them, and a window that the prompts reach beyond.
CHANGES = {"num_attention_heads": 16, "num_key_value_heads": 2}
PROMPTS, NEW = (29, 5), 4
PAGES = [[3, 7, 2], [5, 1, 9]]


@pytest.fixture(autouse=True)
def attention_in_pytorch(monkeypatch):
    from vllm.model_executor.layers.attention import Attention

    monkeypatch.setattr(Attention, "forward", paged.forward)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decode")
    checkpoint.write(folder, SEED, **CHANGES)
    return folder


@pytest.fixture
def loaded(folder) -> Iterator[Any]:
    """``loaded(chosen, *words)``: the settings' model with its configuration."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def load(chosen: dict[str, str], *words: str, folder: Any = folder) -> Any:
            config = engine(folder, chosen, *words)
            stack.enter_context(served.parallel_groups(config))
            return config, served.load_model(config)

        yield load


def engine(folder: Any, chosen: dict[str, str], *words: str) -> Any:
    words = (*ON_THE_CPU, "--attention-backend", "FLASHINFER", *words)
    return served.engine_config(str(folder), *words, "--additional-config", json.dumps({"sm12x": chosen}))


def tokens_of(sequence: int, count: int) -> list[int]:
    return ((torch.arange(count) + 100 * sequence) * 2654435761 % checkpoint.CONFIG["vocab_size"]).tolist()


def answers(steps: Paged, rows: int = 0, sequences: int = 0, **context: Any) -> tuple[torch.Tensor, list[Batch]]:
    """float32 logits of both sequences' decode steps, behind their prompts: ``[steps, sequence, vocabulary]``."""
    for sequence, length in enumerate(PROMPTS):
        steps.step(tokens_of(sequence, length), Batch([length], [length], [PAGES[sequence]]))
    found, batches = [], []
    for step in range(NEW):
        lengths = [length + step + 1 for length in PROMPTS]
        batch = Batch([1, 1], lengths, PAGES)
        new = [tokens_of(sequence, length)[-1] for sequence, length in enumerate(lengths)]
        found.append(steps.step(new, batch, rows, sequences, **context)[:2])
        batches.append(batch)
    return torch.stack(found), batches


DENSE = [
    {},
    {"qkv": "mxfp8", "o": "mxfp4", "lm_head": "mxfp8"},
    {"qkv": "mxfp4-a8", "o": "mxfp8-a8", "lm_head": "mxfp4"},
]


@pytest.mark.parametrize("kinds", DENSE, ids=lambda kinds: ",".join(kinds.values()) or "bf16")
@pytest.mark.parametrize("moe", ["mxfp4-a8", "mxfp4-a16"])
def test_decode_steps_are_the_executors_and_as_near_as_vllms(loaded, log, moe, kinds):
    """Window and full layers; within what bf16 arithmetic may differ by, of what vLLM's layers compute on the same cache."""
    config, model = loaded({"moe": moe, **kinds})
    steps = Paged(config, model)
    got, batches = answers(steps)
    assert [batch.stock for batch in batches] == [[]] * NEW
    assert table(log)["decode"][:3] == ("flashinfer-sm12x", "up to 64 tokens", "default")
    executor, model.decode_steps = model.decode_steps, None
    vllms, batches = answers(steps)
    assert all(batch.stock == list(steps.layers) for batch in batches)
    assert executor is not None
    distance = (got.log_softmax(-1) - vllms.log_softmax(-1)).abs().mean()
    print("seed", SEED, "mean difference of log probabilities", float(distance))
    assert 0 < distance < 0.1
