#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serve a model with vLLM several ways, one after the other, and print one table of what ``vllm bench serve`` measured.

    scripts/compare_vllm.py openai/gpt-oss-20b
    scripts/compare_vllm.py openai/gpt-oss-120b --streams 1,4,16 -- --gpu-memory-utilization 0.85

What stands after ``--`` goes to each server. Needs what vLLM needs, and the standard library.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import vllm_server

# Name: (variables, words of the command line).
WAYS: dict[str, tuple[dict[str, str], list[str]]] = {
    "vLLM alone": ({"FLASHINFER_SM12X_VLLM": "0"}, []),
    "fork, W4A8": ({}, []),
    "fork, W4A16": ({}, ["--additional-config", '{"sm12x": {"moe": "mxfp4-a16"}}']),
    "fork, dense MXFP8": ({}, ["--additional-config", '{"sm12x": {"qkv": "mxfp8", "o": "mxfp8", "lm_head": "mxfp8"}}']),
    "fork, dense MXFP4": ({}, ["--additional-config", '{"sm12x": {"qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp4"}}']),
    "fork, vLLM's decode steps": ({}, ["--additional-config", '{"sm12x": {"decode": "vllm"}}']),
}
MEASURED = {"output_throughput": "tokens/s", "median_tpot_ms": "ms a token", "median_ttft_ms": "ms to the first"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ways", help=f"of {'; '.join(WAYS)}; with ; between")
    parser.add_argument(
        "--streams", type=vllm_server.positives, default="1,2,4,8,16", help="concurrent requests, with commas between"
    )
    parser.add_argument("--input", type=vllm_server.positive, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=vllm_server.positive, default=256, help="tokens of an answer")
    given = vllm_server.parse(parser, "the servers' logs")
    given.ways = vllm_server.chosen(parser, given.ways, WAYS) or list(WAYS)
    return given


def measure(given: argparse.Namespace, streams: int, folder: Path) -> dict[str, float]:
    """One run of vLLM's own benchmark against the server that is up."""
    command = [*vllm_server.VLLM, "bench", "serve", "--model", given.model, "--port", str(given.port)]
    command += ["--dataset-name", "random", "--random-input-len", str(given.input), "--ignore-eos"]
    command += ["--random-output-len", str(given.output), "--max-concurrency", str(streams)]
    command += ["--num-prompts", str(max(4, 4 * streams)), "--seed", "0"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    if status := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"`vllm bench serve` ended with status {status}")
    result = json.loads((folder / "result.json").read_text())
    return {name: result[name] for name in MEASURED}


def main() -> None:
    given = arguments()
    vllm_server.need("vllm")
    folder = vllm_server.folder(given.out, "compare_vllm_")
    print(f"| served by | streams | {' | '.join(MEASURED.values())} |\n|---|---:{'|---:' * len(MEASURED)}|", flush=True)
    for way in given.ways:
        variables, words = WAYS[way]
        log = folder / f"{way.replace(' ', '_').replace(',', '')}.log"
        command = [*vllm_server.VLLM, "serve", given.model, "--port", str(given.port), *words, *given.server]
        url = f"http://127.0.0.1:{given.port}"
        with vllm_server.serving(command, url, log, given.start, variables):
            measure(given, 1, folder)  # warm-up: not reported
            for streams in given.streams:
                found = measure(given, streams, folder)
                cells = " | ".join(f"{value:,.1f}" for value in found.values())
                print(f"| {way} | {streams} | {cells} |", flush=True)
    print(f"logs: {folder}")


if __name__ == "__main__":
    try:
        main()
    except vllm_server.ServerEnded as error:
        sys.exit(str(error))
