# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server with an engine that decodes nothing, to test chat clients against.

Run as a program, in place of ``vllm serve``. All but the engine is vLLM's: parser, routes, Harmony, detokenizer,
metrics. The engine gives answers like gpt-oss's: an analysis and an answer, or a call of the first function that it was
offered, whose result it then repeats. PREFILL and DECODE are the seconds that it takes for a token.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

from openai_harmony import HarmonyEncodingName, load_harmony_encoding
from vllm.entrypoints.cli import main
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import SchedulerStats

PREFILL, DECODE = (float(os.environ.get(name, default)) for name, default in (("PREFILL", "0"), ("DECODE", "0.001")))
harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
START = harmony.encode("<|start|>", allowed_special="all")


def spoken(prompt: str) -> tuple[str, bool]:
    """The text that gpt-oss might say to a conversation, and whether it comes to an end."""
    turns = prompt.split("<|start|>")[1:]
    offered = re.search(r"^type (\w+) = ", prompt, re.MULTILINE)
    result = turns[-2].startswith("functions.")
    if offered and not result:
        call = f"<|start|>assistant<|channel|>commentary to=functions.{offered[1]} <|constrain|>json<|message|>"
        return f'<|channel|>analysis<|message|>I look it up.<|end|>{call}{{"city": "Paris"}}<|call|>', True
    if "capital of France" not in prompt and not result:
        return "<|channel|>final<|message|>" + " and so on" * 500, False
    answer = turns[-2].partition("<|message|>")[2].partition("<|")[0] if result else "Paris"
    return (
        f"<|channel|>analysis<|message|>An easy one.<|end|><|start|>assistant<|channel|>final<|message|>{answer}"
        "<|return|>",
        True,
    )


class Engine:
    """The parts of an engine core that ``AsyncLLM`` asks for."""

    engine_ranks_managed = (0,)
    resources = types.SimpleNamespace(engine_dead=False)
    dp_engines_running = staticmethod(lambda: False)

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.answers: dict[str, asyncio.Task[None]] = {}

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs.get()

    async def reset_mm_cache_async(self) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None: ...

    async def add_request_async(self, request: Any) -> None:
        self.answers[request.request_id] = asyncio.create_task(self.answer(request))

    async def abort_requests_async(self, names: list[str]) -> None:
        for name in names:
            if name in self.answers:
                self.answers.pop(name).cancel()
        self.say([])

    def tokens(self, request: Any) -> Iterator[tuple[int, bool]]:
        """Ids, and which of them ends the answer."""
        prompt, ignore_eos = request.prompt_token_ids, request.sampling_params.ignore_eos
        if prompt[: len(START)] == START:
            turns, ends = spoken(harmony.decode(prompt))
            ids = harmony.encode(turns, allowed_special="all")
            yield from ((token, ends and not ignore_eos and at == len(ids)) for at, token in enumerate(ids, 1))
        yield from ((token, False) for token in itertools.count(sum(prompt) % 1000))

    async def answer(self, request: Any) -> None:
        name, prompt, last = request.request_id, request.prompt_token_ids, request.sampling_params.max_tokens
        await asyncio.sleep(PREFILL * len(prompt))
        for index, (token, ends) in enumerate(self.tokens(request), 1):
            reason = FinishReason.STOP if ends else FinishReason.LENGTH if index == last else None
            if reason is not None:
                del self.answers[name]
            self.say([EngineCoreOutput(name, [token], finish_reason=reason)])
            if reason is not None:
                return
            await asyncio.sleep(DECODE)

    def say(self, outputs: list[EngineCoreOutput]) -> None:
        stats = SchedulerStats(num_running_reqs=len(self.answers))
        self.outputs.put_nowait(EngineCoreOutputs(outputs=outputs, scheduler_stats=stats))


def engine(vllm_config: Any, **_: Any) -> Engine:
    vllm_config.cache_config.num_gpu_blocks = 1  # for a line of the log
    return Engine()


if __name__ == "__main__":
    sys.argv[0] = "vllm"
    with mock.patch.object(EngineCoreClient, "make_async_mp_client", engine):
        main.main()
