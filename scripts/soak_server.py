#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Load a server for some minutes as real clients do; check that its memory does not grow and its answers do not change.

    scripts/soak_server.py openai/gpt-oss-20b --minutes 10 -- --kv-cache-dtype fp8
    scripts/soak_server.py --layers 4 --minutes 5           # a gpt-oss of random weights, nothing is downloaded

A round mixes completions, streamed completions, streams whose client hangs up after a few tokens, and chats with and
without a tool, ``--streams`` of these at once. After each round the idle server must hold no request and no KV cache,
and one greedy answer must equal that of the first round. Each round prints requests, tokens/s, and memory of the
server's processes and of the GPUs. Memory has grown if its median over the last third of the rounds exceeds that over
the middle third by more than ``--allow-mib``; the first third warms up. Exit status: 0 if all is well, 1 if not, with
the reason in the last line. Words after ``--`` are passed to ``vllm serve``. Needs what vLLM needs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import random_checkpoint
import vllm_server

with contextlib.suppress(ImportError):  # --help does without
    import aiohttp

WORDS = "river seven under green paper from clock quiet along stone".split()
TOOL = {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}
KINDS = ("completions", "streams", "chats", "cancelled")
CHECKED_PROMPT = list(range(100, 112))  # shorter than a block of KV cache: no prefix of it is cached


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model of vLLM's; or --layers")
    parser.add_argument(
        "--layers", type=vllm_server.positive, help="write and serve a random gpt-oss-20b of so many layers"
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--rounds", type=vllm_server.positive, default=12, help="at least so many, however long they take"
    )
    parser.add_argument(
        "--streams", type=vllm_server.positive, default=64, help="requests at once in the last part of a round"
    )
    parser.add_argument("--input", type=vllm_server.positive, default=512, help="tokens of a prompt, at most")
    parser.add_argument("--output", type=vllm_server.positive, default=128, help="tokens of an answer, at most")
    parser.add_argument("--allow-mib", type=float, default=64.0, help="growth that is no growth, host and GPU each")
    parser.add_argument(
        "--idle", type=vllm_server.positive, default=60, help="seconds to let go of requests whose clients left"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = vllm_server.parse(parser, "the results and the server's log")
    if bool(given.model) == bool(given.layers):
        parser.error("give a model, or --layers N")
    return given


class Client:
    """Requests to one server, counted."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, given: argparse.Namespace) -> None:
        self.session, self.url, self.model, self.given = session, url, model, given
        self.random = random.Random(given.seed)
        self.counts: Counter[str] = Counter()

    async def send(self, kind: str) -> None:
        """One request of a kind; what comes back must be as many tokens as were asked for."""
        chat, cancel = kind == "chats", kind == "cancelled"
        length = self.random.randint(1, self.given.input)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": 4 * self.given.output if cancel else self.random.randint(1, self.given.output),
            "temperature": self.random.choice([0.0, 1.0]),  # half of them sampled, half greedy
            "ignore_eos": True,
        }
        if chat:  # gpt-oss's format, half of them with a tool
            body["messages"] = [{"role": "user", "content": " ".join(self.random.choices(WORDS, k=length))}]
            if self.random.random() < 0.5:
                body["tools"] = [{"type": "function", "function": TOOL}]
        else:
            body["prompt"] = [self.random.randrange(2, 1000) for _ in range(length)]
        if kind in ("streams", "cancelled") or (chat and self.random.random() < 0.5):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        wanted = self.random.randint(0, 8) if cancel else -1
        seen, usage = 0, None
        async with self.session.post(f"{self.url}/v1/{'chat/' * chat}completions", json=body) as answer:
            answer.raise_for_status()
            if "stream" not in body:
                usage = (await answer.json())["usage"]
            else:
                async for event in vllm_server.events(answer):
                    usage = event.get("usage") or usage
                    if seen == wanted:
                        answer.close()  # hangs up
                        break
                    seen += 1
        self.counts[kind] += 1
        if cancel:
            return
        tokens = usage["completion_tokens"] if usage else 0
        # A chat may end where it likes.
        if not (0 < tokens <= body["max_tokens"] if chat else tokens == body["max_tokens"]):
            raise RuntimeError(f"{kind}: {tokens} tokens came for max_tokens {body['max_tokens']} with ignore_eos")
        self.counts["tokens"] += tokens

    async def checked(self) -> list[int]:
        """One greedy answer, alone on the server."""
        body = {"model": self.model, "prompt": CHECKED_PROMPT, "max_tokens": 32, "temperature": 0.0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            return (await answer.json())["choices"][0]["token_ids"]

    async def idle(self) -> None:
        """Wait until the server has nothing left; what it still holds after a while was leaked."""
        end = time.monotonic() + self.given.idle
        stale = time.monotonic() + 5
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while True:
            found = await asyncio.to_thread(vllm_server.metrics, self.url)
            held = {name: found[name] for name in names if found[name]}
            if not held:
                return
            if time.monotonic() > end:
                raise RuntimeError(f"{self.given.idle} s after the last client left the server still has {held}")
            if time.monotonic() > stale:
                await self.checked()  # a server may write its gauges only when it has something to do
            await asyncio.sleep(0.5)

    async def round(self) -> None:
        few = max(1, self.given.streams // 16)
        for kind in KINDS:
            await asyncio.gather(*(self.send(kind) for _ in range(few)))
        await asyncio.gather(*(self.send(KINDS[index % len(KINDS)]) for index in range(self.given.streams)))
        await self.idle()


async def soak(url: str, pid: int, given: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Rounds until the time is up; what is wrong, or an empty text. ``rows`` gets a row of figures for each round."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        async with session.get(f"{url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        client = Client(session, url, model, given)
        await client.round()
        first = await client.checked()
        print(f"| minute | {' | '.join(KINDS)} | tokens/s | host MiB | GPU MiB |")
        print("|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
        start = time.monotonic()
        while (minutes := (time.monotonic() - start) / 60) < given.minutes or len(rows) < given.rounds:
            before, began = client.counts.copy(), time.monotonic()
            await client.round()
            done, seconds = client.counts - before, time.monotonic() - began
            if (answer_now := await client.checked()) != first:
                return f"the greedy answer to one prompt was {first} and is {answer_now} after {minutes:.1f} minutes"
            row = {
                "minute": round(minutes, 2),
                **{kind: done[kind] for kind in KINDS},
                "tokens_per_s": round(done["tokens"] / seconds),
                "host_mib": round(vllm_server.host_mib(pid), 1),
                "gpu_mib": vllm_server.gpu_mib(),
            }
            rows.append(row)
            cells = " | ".join("-" if value is None else f"{value:,}" for value in row.values())
            print(f"| {cells} |", flush=True)
    return growth(rows, given.allow_mib)


def growth(rows: list[dict[str, Any]], allowed: float) -> str:
    """The kind of memory that grew between the middle and the last third of the rounds, in words; empty if none did."""
    third = len(rows) // 3
    for name in ("host_mib", "gpu_mib"):
        values = [row[name] for row in rows]
        if None in values or not third:
            continue
        grown = statistics.median(values[-third:]) - statistics.median(values[third : 2 * third])
        if grown > allowed:
            return f"{name} grew by {grown:,.0f} MiB between the middle and the last third of the rounds"
    return ""


def main() -> None:
    given = arguments()
    vllm_server.need("vllm", "aiohttp")
    vllm_server.gpu_bytes()
    rows: list[dict[str, Any]] = []
    out = vllm_server.folder(given.out, "soak_server_results_")
    log = out / "server.log"
    print(f"seed {given.seed}; results and log: {out}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak_server_") as temporary:
        try:
            if given.layers:
                random_checkpoint.write(Path(temporary), given.seed, {"num_hidden_layers": given.layers})
            model, url = given.model or temporary, f"http://127.0.0.1:{given.port}"
            with vllm_server.serving(vllm_server.serve(model, given), url, log, given.start) as server:
                try:
                    wrong = asyncio.run(soak(url, server.pid, given, rows))
                except (aiohttp.ClientError, OSError) as error:
                    how = vllm_server.ended(server) or "runs"
                    wrong = f"{type(error).__name__}: {error}; the server {how}; its log is {log}"
        except (RuntimeError, OSError) as error:
            wrong = f"{type(error).__name__}: {error}"
    (out / "soak.json").write_text(json.dumps({"wrong": wrong, "seed": given.seed, "rounds": rows}, indent=1))
    if wrong:
        sys.exit(f"not well: {wrong}")
    print(f"well: {len(rows)} rounds, no growth, no request left behind, the same greedy answer throughout")


if __name__ == "__main__":
    vllm_server.run(main)
