#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare vLLM servers' next-token probabilities on the same text, separately for decode and prefill.

    scripts/compare_answers.py openai/gpt-oss-120b --text notes.txt
    scripts/compare_answers.py openai/gpt-oss-20b --ways "moe=mxfp4-a16;spark,moe=mxfp4-a16;0" --streams 1,16
    scripts/compare_answers.py --urls http://127.0.0.1:8000,http://127.0.0.1:8001 --top 20

The first server is the reference. The servers of --ways are started one after the other: each is a value of
FLASHINFER_SM12X_VLLM (docs/serving.md), and 0 is vLLM without this fork's plugin. Servers at --urls already run. In
decode every server is forced to write the text's tokens, so that each step has one answer to compare: vLLM computes
them in its decode steps, --streams at a time, and reports the tokens that it would have chosen. In prefill it reads the
same text as a prompt.

Servers give the --top most likely tokens. All others count as one, "the rest", so the KL divergence printed is at most
the true one. Perplexity and the first choice are exact. Comparing the reference with itself at another number of
streams shows the effect of the batch size alone. A server at --urls needs: --enable-trace-replay --enable-scale-out
--max-logprobs 64.

Words after ``--`` are passed to each server. Needs what vLLM needs, and the standard library.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import http.client
import itertools
import json
import math
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm_server  # finds the package flashinfer_sm12x without an installation  # isort: skip

from flashinfer_sm12x.quantize.files import UserError, read_text
from flashinfer_sm12x.vllm.settings import VARIABLE, variables  # imports nothing of vLLM

TEXTS = Path(__file__).resolve().parents[1] / "flashinfer_sm12x" / "quantize" / "texts" / "evaluation"
FORCING = ("--enable-trace-replay", "--enable-scale-out")
SEED, RESAMPLES = 0, 1000
LEAST = 1e-6
"""The least value of a probability that is one minus others: float32 sums are no closer."""

Row = Mapping[int, float]
"""Log probabilities by token, of one position."""
Windows = Sequence[Sequence[Row]]
"""Positions of each window of the text."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="what the servers serve; not with --urls")
    parser.add_argument("--urls", help="servers that are up, with commas between, in place of starting any")
    parser.add_argument(
        "--ways",
        default="moe=mxfp4-a16;spark",
        help=f"to serve, values of {VARIABLE} with ; between (default: %(default)s)",
    )
    parser.add_argument("--text", type=Path, help="a file to read; default: the texts of benchmarks/bench_accuracy.py")
    parser.add_argument("--tokens", type=vllm_server.positive, default=2048, help="to compare (default: %(default)s)")
    parser.add_argument("--prompt", type=vllm_server.positive, default=64, help="tokens in front of those of a window")
    parser.add_argument(
        "--decode", type=vllm_server.positive, default=128, help="tokens that a request is made to write"
    )
    parser.add_argument("--streams", type=vllm_server.positives, default="1,4,16", help="requests at once, with commas")
    parser.add_argument(
        "--top", type=vllm_server.positive, default=64, help="tokens of each position that servers tell"
    )
    given = vllm_server.parse(parser, "the servers' logs")
    given.ways = [way.strip() for way in given.ways.split(";")]
    given.urls = [url.rstrip("/") for url in given.urls.split(",")] if given.urls else []
    for way in given.ways:
        try:
            variables.read(VARIABLE, {VARIABLE: way})
        except variables.VariableError as error:
            parser.error(f"--ways: {error}")
    if bool(given.model) == bool(given.urls):
        parser.error("give a model, whose servers are started, or --urls")
    if len(given.urls or given.ways) < 2:
        parser.error("two servers are compared, or more: the first is the reference")
    try:  # before a server is started, which takes minutes
        given.texts = [read_text(path) for path in ([given.text] if given.text else sorted(TEXTS.glob("*.txt")))]
    except UserError as error:
        parser.error(f"--text: {error}")
    if given.decode < 2:
        parser.error("--decode: the first token is the prompt's, so that two are the least")
    return given


class Refused(Exception):
    """A server does not do what it is asked for; the text says what to start it with."""


def post(url: str, path: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        answered = error.read().decode(errors="replace")
        raise Refused(
            f"{url}{path}: {error.code}: {answered[:300]}\nit must be vLLM 0.33.0's, started with "
            f"{' '.join(FORCING)} --max-logprobs {body.get('sampling_params', {}).get('logprobs', 64)}"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise Refused(f"{url} does not answer: {error!r}") from None


@dataclasses.dataclass
class Asked:
    """The tokens that every server reads and writes: a window is a prompt and the tokens that follow it."""

    model: str
    windows: list[list[int]]
    prompt: int
    top: int


def served_model(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise Refused(f"{url} does not answer: {error!r}") from None


def tokenized(given: argparse.Namespace, url: str, model: str) -> list[list[int]]:
    """The texts in tokens, by the server."""
    bodies = ({"model": model, "prompt": text, "add_special_tokens": False} for text in given.texts)
    return [post(url, "/tokenize", body)["tokens"] for body in bodies]


def read(given: argparse.Namespace, model: str, texts: Sequence[list[int]]) -> Asked:
    """The texts cut into windows of equal length.

    Raises
    ------
    Refused
        There are fewer tokens than one window has.
    """
    size = given.prompt + given.decode
    windows = [tokens[at : at + size] for tokens in texts for at in range(0, len(tokens) - size + 1, size)]
    if not windows:
        raise Refused(f"the text has no {size} tokens in a row: shorten --prompt or --decode, or give more --text")
    # The default texts are of several kinds: some of each.
    random.Random(SEED).shuffle(windows)
    return Asked(model, windows[: max(1, given.tokens // (given.decode - 1))], given.prompt, given.top)


def decoded(url: str, asked: Asked, streams: int) -> Windows:
    """Each window's tokens, written by the server one by one, ``streams`` windows at a time."""
    salt = f"{time.time_ns()}"  # what an earlier run left in the prefix cache is not read

    def one(window: list[int]) -> list[Row]:
        forced = window[asked.prompt :]
        parameters = {"trace_decode_token_ids": forced, "max_tokens": len(forced), "temperature": 0.0}
        body = {"model": asked.model, "token_ids": window[: asked.prompt], "cache_salt": salt}
        answer = post(
            url, "/inference/v1/generate", {**body, "sampling_params": {**parameters, "logprobs": asked.top}}
        )["choices"][0]
        if answer["token_ids"] != forced:
            raise Refused(f"{url} wrote other tokens than it was given: it is not vLLM 0.33.0's")
        # The first one is the prompt's.
        return [
            {each["token_id"]: each["logprob"] for each in position["top_logprobs"]}
            for position in answer["logprobs"]["content"][1:]
        ]

    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        return list(pool.map(one, asked.windows))


def prefilled(url: str, asked: Asked) -> Windows:
    """The same positions as in :func:`decoded`, read as a prompt: one request at a time, so that the server holds few
    logits."""
    found = []
    for window in asked.windows:
        parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": asked.top}
        body = {"model": asked.model, "token_ids": window, "sampling_params": parameters}
        rows = post(url, "/inference/v1/generate", body)["prompt_logprobs"][asked.prompt + 1 :]
        found.append([{int(token): each["logprob"] for token, each in row.items()} for row in rows])
    return found


def measured(url: str, asked: Asked, streams: Sequence[int]) -> dict[str, Windows]:
    """A server's answers for each path: decode at each number of streams, and prefill."""
    found = {}
    for count in streams:
        began = time.monotonic()
        found[f"decode, streams: {count}"] = decoded(url, asked, count)
        print(f"  decode, {count} at once: {time.monotonic() - began:,.0f} s", file=sys.stderr, flush=True)
    found["prefill"] = prefilled(url, asked)
    return found


def divergence(p: Row, q: Row) -> float:
    """KL divergence of two distributions by their likeliest tokens; at most the true one.

    Tokens that only one of the two lists belong to the rest. Joining outcomes never makes a divergence larger.
    """
    shared = p.keys() & q.keys()
    total = sum(math.exp(p[token]) * (p[token] - q[token]) for token in shared)
    rests = [max(1.0 - sum(math.exp(row[token]) for token in shared), LEAST) for row in (p, q)]
    return total + rests[0] * math.log(rests[0] / rests[1])


def likeliest(row: Row) -> int:
    return max(row, key=lambda token: (row[token], -token))


@dataclasses.dataclass(frozen=True)
class Compared:
    """A path: mean KL with its 95 % interval, 99th percentile, share of the same first choice, both perplexities, and
    the mean probability that is in the reference's rest."""

    mean: float
    low: float
    high: float
    tail: float
    same: float
    perplexities: tuple[float, float]
    rest: float


def compare(reference: Windows, other: Windows, targets: Sequence[Sequence[int]]) -> Compared:
    """``targets``: the tokens of the text, whose probability both tell."""
    losses = [[divergence(p, q) for p, q in zip(*pair, strict=True)] for pair in zip(reference, other, strict=True)]
    every = sorted(itertools.chain(*losses))
    sums = [(sum(window), len(window)) for window in losses]
    generator = random.Random(SEED)
    drawn = (generator.choices(sums, k=len(sums)) for _ in range(RESAMPLES))
    means = sorted(sum(s for s, _ in each) / sum(n for _, n in each) for each in drawn)
    rows = [list(itertools.chain(*windows)) for windows in (reference, other)]
    answered = list(itertools.chain(*targets))
    return Compared(
        mean=sum(every) / len(every),
        low=means[round(0.025 * (RESAMPLES - 1))],
        high=means[round(0.975 * (RESAMPLES - 1))],
        tail=every[math.ceil(0.99 * len(every)) - 1],
        same=sum(likeliest(p) == likeliest(q) for p, q in zip(*rows, strict=True)) / len(every),
        perplexities=tuple(  # type: ignore[arg-type]
            math.exp(-sum(row[token] for row, token in zip(each, answered, strict=True)) / len(answered))
            for each in rows
        ),
        rest=sum(1.0 - sum(map(math.exp, row.values())) for row in rows[0]) / len(every),
    )


def line(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def show(name: str, path: str, found: Compared) -> None:
    kl = f"{found.mean:.2g} [{found.low:.2g}, {found.high:.2g}]"
    perplexities = " -> ".join(f"{each:.3f}" for each in found.perplexities)
    line((name, path, kl, f"{found.tail:.2g}", f"{found.same:.1%}", perplexities, f"{max(found.rest, 0):.2%}"))


def servers(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """Name and address of each, which is up until the next one is asked for."""
    if given.urls:
        yield from ((url, url) for url in given.urls)
        return
    for at, way in enumerate(given.ways):
        command = vllm_server.serve(given.model, given, *FORCING, "--max-logprobs", str(given.top))
        url, log = f"http://127.0.0.1:{given.port}", folder / f"server_{at}.log"
        with vllm_server.serving(command, url, log, given.start, {VARIABLE: way}):
            yield "vLLM alone" if way == "0" else way, url


def main() -> None:
    given = arguments()
    if not given.urls:
        vllm_server.need("vllm")
        vllm_server.gpu_bytes()
        if any(way != "0" for way in given.ways):
            vllm_server.need_fork()
    folder = vllm_server.folder(given.out, "compare_answers_")
    asked: Asked | None = None
    texts: list[list[int]] = []
    reference: dict[str, Windows] = {}
    for name, url in servers(given, folder):
        model = served_model(url)
        print(f"{name}:", file=sys.stderr, flush=True)
        answered = tokenized(given, url, model)
        first = asked is None
        if asked is None:
            texts, asked = answered, read(given, model, answered)
        elif answered != texts:
            raise Refused(f"{url} serves {model}, which has other tokens for the same text than {asked.model}")
        asked.model = model
        found = measured(url, asked, given.streams)
        targets = [window[asked.prompt + 1 :] for window in asked.windows]
        if first:
            print(f"{model}: {sum(map(len, targets)):,} tokens in {len(targets)} windows, against {name}\n")
            head = ("served by", "path", "KL, at least", "99th percentile", "same first choice", "perplexity")
            line((*head, "outside the top"))
            line(("---", "---", *["---:"] * 5))
            reference, decodes = found, [path for path in found if path != "prefill"]
            for path in decodes[1:]:
                alone = compare(found[decodes[0]], found[path], targets)
                show(f"{name}, itself", f"{decodes[0]} / {path.split()[-1]}", alone)
            continue
        for path, windows in found.items():
            show(name, path, compare(reference[path], windows, targets))


if __name__ == "__main__":
    vllm_server.run(main, Refused, OSError)
