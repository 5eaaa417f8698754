#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serve under a watch that outlives the server: when it crashes, say at which step and with which inputs.

    scripts/watch_server.py openai/gpt-oss-20b --requests 500 --streams 8
    scripts/watch_server.py openai/gpt-oss-20b --replay crash_1.jsonl

Sends random requests (or those of a file), streamed, and counts every token that arrives. When the server ends or stops
answering, the watch prints how it ended and the errors of its log, and for each request in flight its prompt and its
step: prefill, or the token of the answer and its position. It writes the requests to ``crash_N.jsonl``. It then starts
the server again with CUDA_LAUNCH_BLOCKING=1 and FLASHINFER_SM12X_CHECK=1, so that the failing call itself reports the
error, sends these requests one by one, then all at once, and names those that crash it again. After that it goes on
with the next requests. Exit status: 0 without a crash, 1 with one. Words after ``--`` are passed to ``vllm serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import vllm_server

with contextlib.suppress(ImportError):  # --help does without
    import aiohttp

# With these the failing call itself reports its error, and expert ids are checked before each launch.
SYNCHRONOUS = {"CUDA_LAUNCH_BLOCKING": "1", "FLASHINFER_SM12X_CHECK": "1"}
ERRORS = ("Error", "error:", "Xid", "Segmentation", "Dumping input data", "Dumping scheduler output")


@dataclass
class Request:
    """One request and what came back so far; without the answer it is a line of a file."""

    name: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    answered: list[int] = field(default_factory=list)

    def step(self) -> str:
        """The server's next step for this request."""
        if not self.answered:
            return f"prefill of {len(self.prompt)} tokens"
        return f"token {len(self.answered) + 1} of the answer, position {len(self.prompt) + len(self.answered)}"

    def line(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if name != "answered"})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=vllm_server.positive, default=200)
    parser.add_argument("--streams", type=vllm_server.positive, default=8, help="requests at once")
    parser.add_argument("--input", type=vllm_server.positive, default=2048, help="tokens of a prompt, at most")
    parser.add_argument("--output", type=vllm_server.positive, default=256, help="tokens of an answer, at most")
    parser.add_argument("--vocabulary", type=vllm_server.positive, default=200000, help="prompts are of ids below it")
    parser.add_argument("--replay", type=Path, help="requests of a file, one in a line, in place of random ones")
    parser.add_argument(
        "--silence", type=vllm_server.positive, default=300, help="seconds without a token that count as a crash"
    )
    parser.add_argument("--crashes", type=vllm_server.positive, default=3, help="end after so many")
    parser.add_argument("--seed", type=int, default=0)
    given = vllm_server.parse(parser, "logs and crash_N.jsonl")
    if given.vocabulary < 3:
        parser.error("--vocabulary: prompts are of ids from 2 on, so it must be 3 at least")
    return given


def requests(given: argparse.Namespace) -> list[Request]:
    if given.replay:
        try:
            return [
                Request(**json.loads(line)) for line in given.replay.read_text(encoding="utf-8").splitlines() if line
            ]
        except (OSError, ValueError, TypeError) as error:
            sys.exit(f"--replay: {given.replay} holds no requests, one in a line: {error}")
    generator = random.Random(given.seed)

    def one(name: int) -> Request:
        length = generator.randint(1, given.input)
        prompt = [generator.randrange(2, given.vocabulary) for _ in range(length)]
        return Request(name, prompt, generator.randint(1, given.output), generator.choice([0.0, 1.0]), name)

    return [one(name) for name in range(given.requests)]


class Watch:
    """Runs of requests against servers that are started for them."""

    def __init__(self, given: argparse.Namespace, out: Path) -> None:
        self.given, self.out = given, out
        self.url = f"http://127.0.0.1:{given.port}"
        self.starts = 0

    def run(self, work: list[Request], streams: int, variables: dict[str, str]) -> tuple[list[Request], str]:
        """Work through ``work``; the requests in flight when the server was lost and how it ended, or nothing."""
        self.starts += 1
        log = self.out / f"server_{self.starts}.log"
        command = vllm_server.serve(self.given.model, self.given)
        with vllm_server.serving(command, self.url, log, self.given.start, variables) as server:
            in_flight, error = asyncio.run(self._send(work, streams))
            if not in_flight:
                return [], ""
            # A dying engine takes the HTTP server with it a little later.
            for _ in range(20):
                if how := vllm_server.ended(server):
                    return in_flight, f"the server {how}{errors_in(log)}"
                asyncio.run(asyncio.sleep(0.5))
            return in_flight, f"the server runs and does not serve: {error}{errors_in(log)}"

    async def _send(self, work: list[Request], streams: int) -> tuple[list[Request], str]:
        waiting, in_flight = list(reversed(work)), {}
        errors: list[str] = []
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.given.silence)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with session.get(f"{self.url}/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]

            async def worker() -> None:
                while waiting and not errors:
                    request = waiting.pop()
                    request.answered, in_flight[request.name] = [], request
                    try:
                        await self._stream(session, model, request)
                    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, RuntimeError) as error:
                        errors.append(f"{type(error).__name__}: {error}")
                        return
                    del in_flight[request.name]
                    work.remove(request)

            await asyncio.gather(*(worker() for _ in range(streams)))
        return list(in_flight.values()), errors[0] if errors else ""

    async def _stream(self, session: aiohttp.ClientSession, model: str, request: Request) -> None:
        body: dict[str, Any] = {"model": model, "prompt": request.prompt, "max_tokens": request.max_tokens}
        body |= {"temperature": request.temperature, "seed": request.seed, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        async with session.post(f"{self.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for event in vllm_server.events(answer):
                for choice in event["choices"]:
                    request.answered += choice.get("token_ids") or []
        if len(request.answered) != request.max_tokens:
            raise RuntimeError(f"{len(request.answered)} of {request.max_tokens} tokens came")


def errors_in(log: Path) -> str:
    """The log's last lines that speak of an error, set off as lines of their own."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if any(word in line for word in ERRORS)]
    return "".join(f"\n  log: {line.strip()[:300]}" for line in lines[-5:]) + f"\n  the whole log: {log}"


def reproduce(watch: Watch, lost: list[Request]) -> str:
    """Names the lost requests that crash a server again which launches synchronously."""
    alone = []
    for request in lost:
        step = request.step()
        again, how = watch.run([request], 1, SYNCHRONOUS)
        if again:
            alone.append(f"request {request.name} alone crashes it again in its {request.step()}: {how}")
        print(
            f"  request {request.name} (was in its {step}) alone: {'crashes it' if again else 'is served'}", flush=True
        )
    if alone:
        return "\n".join(alone)
    again, how = watch.run(list(lost), len(lost), SYNCHRONOUS)
    if again:
        return f"all {len(lost)} together crash it again: {how}"
    return "none alone nor all together crash it again with synchronous launches"


def main() -> None:
    given = arguments()
    work = requests(given)
    vllm_server.need("vllm", "aiohttp")
    vllm_server.gpu_bytes()
    out = vllm_server.folder(given.out, "watch_server_")
    total, crashes, watch = len(work), 0, Watch(given, out)
    print(f"seed {given.seed}; logs: {out}", flush=True)
    while work and crashes < given.crashes:
        lost, how = watch.run(work, given.streams, {})
        if not lost:
            break
        crashes += 1
        file = out / f"crash_{crashes}.jsonl"
        file.write_text("".join(request.line() + "\n" for request in lost))
        print(f"crash {crashes}, {total - len(work)} of {total} requests served: {how}")
        for request in lost:
            print(f"  in flight: request {request.name}, in its {request.step()}, temperature {request.temperature}")
        print(f"  inputs: {file} (--replay)", flush=True)
        for request in lost:
            work.remove(request)
        print(reproduce(watch, lost), flush=True)
    if crashes:
        sys.exit(f"{crashes} crashes, {total - len(work)} of {total} requests served or set aside")
    print(f"no crash: {total} requests served")


if __name__ == "__main__":
    vllm_server.run(main)
