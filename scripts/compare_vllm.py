#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serve a model with vLLM several ways, one after the other, and print one table of ``vllm bench serve``'s
measurements.

    scripts/compare_vllm.py openai/gpt-oss-20b
    scripts/compare_vllm.py openai/gpt-oss-120b --streams 1,4,16 -- --max-num-batched-tokens 8192
    scripts/compare_vllm.py openai/gpt-oss-120b --url http://127.0.0.1:8000 --streams 1 --input 2048,6144 --output 32

Prompts are random token ids for ``/v1/completions``, and no two measurements have a prompt in common, so that none is
found in the prefix cache. Answers need not make sense: a server with random weights will do. Words after ``--`` are
passed to each server. Servers listen on 127.0.0.1 and, if the GPU has no memory of its own, take this fork's share of
it and not vLLM's. Needs what vLLM needs, and the standard library.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import vllm_server

# Name: (variables, words of the command line).
WAYS: dict[str, tuple[dict[str, str], list[str]]] = {
    "vLLM alone": ({"FLASHINFER_SM12X_VLLM": "0"}, []),
    "fork, W4A8": ({}, ["--additional-config", '{"sm12x": {"moe": "mxfp4-a8"}}']),
    "fork, W4A16": ({}, ["--additional-config", '{"sm12x": {"moe": "mxfp4-a16"}}']),
    "fork, dense MXFP8": ({}, ["--additional-config", '{"sm12x": {"qkv": "mxfp8", "o": "mxfp8", "lm_head": "mxfp8"}}']),
    "fork, dense MXFP4": ({}, ["--additional-config", '{"sm12x": {"qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp4"}}']),
    "fork, vLLM's decode steps": ({}, ["--additional-config", '{"sm12x": {"decode": "vllm"}}']),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--url", help="measure the server that is up there, in place of starting any")
    parser.add_argument("--ways", default=";".join(WAYS), help="some of them, with ; between (default: %(default)s)")
    parser.add_argument(
        "--streams", type=vllm_server.positives, default="1,2,4,8,16", help="concurrent requests, with commas between"
    )
    parser.add_argument(
        "--input", type=vllm_server.positives, default="1024", help="tokens of a prompt, with commas between"
    )
    parser.add_argument("--output", type=vllm_server.positive, default=256, help="tokens of an answer")
    given = vllm_server.parse(parser, "the servers' logs")
    given.ways = [way.strip() for way in given.ways.split(";")]
    if unknown := [way for way in given.ways if way not in WAYS]:
        parser.error(f"--ways: {unknown[0]!r} is none of {'; '.join(WAYS)}")
    return given


def measure(
    given: argparse.Namespace, url: str, streams: int, prompt: int, seed: int, folder: Path
) -> dict[str, float]:
    """One run of vLLM's own benchmark against the server at ``url``; its result stays in ``folder``."""
    command = [*vllm_server.VLLM, "bench", "serve", "--model", given.model, "--base-url", url, "--ignore-eos"]
    command += ["--dataset-name", "random", "--random-input-len", str(prompt), "--seed", str(seed)]
    command += ["--random-output-len", str(given.output), "--max-concurrency", str(streams)]
    command += ["--num-prompts", str(max(5, 4 * streams)), "--save-result"]
    command += ["--result-dir", str(folder), "--result-filename", f"{seed}.json"]
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        command += ["--served-model-name", json.load(answer)["data"][0]["id"]]
    if status := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"`vllm bench serve` ended with status {status}")
    found = json.loads((folder / f"{seed}.json").read_text())
    if found["failed"]:
        sys.exit(f"{found['failed']} of {found['num_prompts']} requests failed; try one by hand: {url}/v1/completions")
    return found


def measure_all(given: argparse.Namespace, way: str, url: str, folder: Path) -> None:
    """A row for each number of streams and size of prompt, after one run that is not reported."""
    folder.mkdir(exist_ok=True)
    seeds = itertools.count(int(time.time()))  # a server at --url may have been measured before
    measure(given, url, 1, given.input[0], next(seeds), folder)
    for streams, prompt in itertools.product(given.streams, given.input):
        found = measure(given, url, streams, prompt, next(seeds), folder)
        token, first = (
            f"{found[f'mean_{name}_ms']:,.2f} ± {found[f'std_{name}_ms']:,.2f}" for name in ("tpot", "ttft")
        )
        # With several streams a prompt's time includes waiting for other prompts, so it gives no rate.
        prefill = f"{1000 * prompt / found['mean_ttft_ms']:,.0f}" if streams == 1 else ""
        cells = (way, streams, f"{prompt:,}", f"{found['output_throughput']:,.1f}", token, first, prefill)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    given = arguments()
    vllm_server.need("vllm")
    if given.url:
        if not vllm_server.healthy(given.url):
            sys.exit(f"no server is ready at {given.url}: {given.url}/health does not answer")
    else:
        vllm_server.gpu_bytes()
        if any("fork" in way for way in given.ways):
            vllm_server.need_fork()
    folder = vllm_server.folder(given.out, "compare_vllm_")
    print("| served by | streams | prompt | tokens/s | ms a token | ms to the first | tokens/s of the prompt |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    if given.url:
        measure_all(given, given.url, given.url, folder / "results")
        return
    for way in given.ways:
        variables, words = WAYS[way]
        name = way.replace(" ", "_").replace(",", "")
        command = vllm_server.serve(given.model, given, *words)
        url = f"http://127.0.0.1:{given.port}"
        with vllm_server.serving(command, url, folder / f"{name}.log", given.start, variables):
            measure_all(given, way, url, folder / name)


if __name__ == "__main__":
    vllm_server.run(main)
