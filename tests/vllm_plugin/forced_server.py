# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server, with a model that vLLM loaded and the plugin quantized, on CPU tensors and without vLLM's engine.

Run as a program, in place of ``vllm serve``, for ``scripts/compare_answers.py``. Parser, routes, checks of requests,
the model's layers and weights, and the handling of log probabilities are vLLM's. The engine core, which needs a GPU, is
replaced: each request's tokens go through the model at once, as forced decode steps or as a prompt. FAULT: ``tokens``
writes other tokens than it was given.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any
from unittest import mock

import chat_server
import reference_attention
import served
import torch
from vllm.entrypoints.cli import main
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.outputs import LogprobsTensors

FAULT = os.environ.get("FAULT", "")
kept = contextlib.ExitStack()  # vLLM's process groups, for as long as the program runs


def logprobs_of(logits: torch.Tensor, tokens: list[int], top: int | None) -> LogprobsTensors | None:
    """The log probabilities of each token and of the likeliest ones, and its rank, as the sampler hands them on."""
    if top is None:
        return None
    every = logits.log_softmax(-1)
    own = torch.tensor(tokens)[:, None]
    value = every.gather(1, own)
    best, ids = every.topk(top, dim=-1)
    return LogprobsTensors(torch.cat([own, ids], 1).int(), torch.cat([value, best], 1), (every >= value).sum(-1))


class Engine(chat_server.Engine):
    """An engine core whose requests are computed when they come."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from vllm.model_executor.layers.attention import Attention

        Attention.forward = reference_attention.forward
        self.config = config
        kept.enter_context(served.parallel_groups(config))
        self.model = served.load_model(config)

    async def answer(self, request: Any) -> None:
        name, prompt, asked = request.request_id, request.prompt_token_ids, request.sampling_params
        forced = list(asked.trace_decode_token_ids or [])
        logits = served.logits(self.config, self.model, torch.tensor([*prompt, *forced[:-1]]))
        written = forced or [int(logits[-1].argmax())]
        if FAULT == "tokens":
            written = [token + 1 for token in written]
        outputs = logits[len(prompt) - 1 :]
        read = logprobs_of(logits[: len(prompt) - 1], prompt[1:], asked.prompt_logprobs)
        del self.answers[name]
        for at, token in enumerate(written):
            ends = at + 1 == len(written)
            chosen = logprobs_of(outputs[at : at + 1], [token], asked.logprobs)
            self.say(
                [
                    EngineCoreOutput(
                        name,
                        [token],
                        new_logprobs=chosen and chosen.tolists(),
                        new_prompt_logprobs_tensors=None if at else read,
                        finish_reason=FinishReason.LENGTH if ends else None,
                    )
                ]
            )


def engine(vllm_config: Any, **_: Any) -> Engine:
    vllm_config.cache_config.num_gpu_blocks = 1  # for a line of the log
    return Engine(vllm_config)


if __name__ == "__main__":
    sys.argv[0] = "vllm"
    with mock.patch.object(EngineCoreClient, "make_async_mp_client", engine):
        main.main()
