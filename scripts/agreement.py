#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far vLLM's MoE backends and this fork agree on shallow gpt-oss models of random weights, as one table.

    scripts/agreement.py                       # 1, 2 and 4 layers of gpt-oss-20b's sizes; nothing is downloaded
    scripts/agreement.py --layers 1,2 --ways "Marlin;Triton"

Deep models of random weights amplify rounding until any two backends give other tokens; shallow ones do not. Every way
loads the same checkpoint in an engine of its own and answers the same prompts greedily. Two answers are compared token
by token as far as they are the same, so that both engines saw the same input: whether the next token is the same, how
many of the 8 most probable tokens are, and how far apart the log probabilities of the reference's 8 are, on average.

What rounding alone does is the row of two backends that are not this fork's. On Hopper set FLASHINFER_SM12X_MOE=1, and
give --attention FLASHINFER, without which vLLM takes an attention there that leaves no step to the fork's decode path.
It is for the fork's ways alone: on Hopper vLLM's own FLASHINFER refuses gpt-oss's attention sinks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import random_checkpoint
import vllm_server

# Name: (variables, arguments of vllm.LLM). The first is what the others are compared with.
WAYS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "Marlin": ({"FLASHINFER_SM12X_VLLM": "0"}, {"moe_backend": "marlin"}),
    "Triton": ({"FLASHINFER_SM12X_VLLM": "0"}, {"moe_backend": "triton"}),
    "fork, W4A16": ({}, {"additional_config": {"sm12x": {"moe": "mxfp4-a16"}}}),
    "fork, W4A16, vLLM's decode steps": ({}, {"additional_config": {"sm12x": {"moe": "mxfp4-a16", "decode": "vllm"}}}),
    "fork, W4A8": ({}, {"additional_config": {"sm12x": {"moe": "mxfp4-a8"}}}),
    "Marlin, 2 GPUs": ({"FLASHINFER_SM12X_VLLM": "0"}, {"moe_backend": "marlin", "tensor_parallel_size": 2}),
    "fork, 2 GPUs": ({}, {"tensor_parallel_size": 2}),
    "fork, experts on 2 GPUs": ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
}
TOP = 8
# Asked for, so that the reference's 8 are among them; one that is not counts as far as the least of these.
LOGPROBS = 64

# An answer: for each prompt, for each of its tokens, the token and log probabilities by token.
Answers = list[list[tuple[int, dict[int, float]]]]


def answer(model: str, way: str, given: argparse.Namespace) -> Answers:
    """Greedy answers of one engine, in this process."""
    from vllm import LLM, SamplingParams

    generator = random.Random(given.seed)
    prompts: list[Any] = [
        {"prompt_token_ids": [generator.randrange(2, 30000) for _ in range(given.input)]} for _ in range(given.prompts)
    ]
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_flashinfer_autotune=False,
        max_model_len=given.input + given.output,
        max_num_seqs=given.prompts,
        max_logprobs=LOGPROBS,
        gpu_memory_utilization=given.share,
        kv_cache_memory_bytes=1 << 30,
        attention_backend=None if "FLASHINFER_SM12X_VLLM" in WAYS[way][0] else given.attention,
        **WAYS[way][1],
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=given.output, ignore_eos=True, detokenize=False, logprobs=LOGPROBS
    )
    return [
        [
            (token, {other: float(found.logprob) for other, found in logprobs.items()})
            for token, logprobs in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True)
        ]
        for output in engine.generate(prompts, sampling, use_tqdm=False)
    ]


def compare(reference: Answers, other: Answers) -> dict[str, float]:
    """Figures over all positions up to and with the first token that differs."""
    first = positions = same = 0
    overlap, difference = 0, 0.0
    for ours, theirs in zip(reference, other, strict=True):
        for index, ((token, expected), (token_there, found)) in enumerate(zip(ours, theirs, strict=True)):
            best = sorted(expected, key=lambda name: -expected[name])[:TOP]
            least = min(found.values())
            positions += 1
            overlap += len(set(best) & set(sorted(found, key=lambda name: -found[name])[:TOP]))
            difference += sum(abs(expected[name] - found.get(name, least)) for name in best) / TOP
            first += index == 0 and token == token_there
            same += token == token_there
            if token != token_there:
                break
    return {
        "first tokens": first / len(reference),
        "all tokens": same / positions,
        f"of {TOP} best": overlap / positions,
        "mean difference of log probabilities": difference / positions,
        "positions": positions,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=vllm_server.positives, default="1,2,4", help="depths, with commas between")
    parser.add_argument(
        "--ways",
        help=f"of {'; '.join(WAYS)}; with ; between. The first is the reference; all that the GPUs are there for",
    )
    parser.add_argument("--prompts", type=vllm_server.positive, default=32)
    parser.add_argument("--input", type=vllm_server.positive, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=vllm_server.positive, default=16, help="tokens of an answer")
    parser.add_argument("--share", type=float, default=0.15, help="of the GPU's memory, for each engine")
    parser.add_argument("--attention", help="vLLM's attention backend for the fork's ways; else its own choice")
    parser.add_argument("--at-once", type=vllm_server.positive, default=1, help="engines side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a folder for answers and logs; else a temporary one")
    parser.add_argument("--answer", nargs=3, metavar=("MODEL", "WAY", "FILE"), help="one engine alone, to a file")
    given = parser.parse_args()
    given.ways = vllm_server.chosen(parser, given.ways, WAYS)
    return given


def run_engine(given: argparse.Namespace, model: Path, way: str, file: Path) -> str:
    """One engine in a process of its own; why it failed, or an empty text."""
    command = [sys.executable, __file__, "--answer", str(model), way, str(file)]
    for name in ("prompts", "input", "output", "share", "seed"):
        command += [f"--{name}", str(getattr(given, name))]
    if given.attention:
        command += ["--attention", given.attention]
    with file.with_suffix(".log").open("wb") as log:
        code = subprocess.run(
            command, env={**os.environ, **WAYS[way][0]}, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if not code:
        return ""
    said = [line for line in file.with_suffix(".log").read_text(errors="replace").splitlines() if "Error" in line]
    return f"{way} failed: {(said or [f'status {code}'])[-1].strip()[:300]}; log: {file.with_suffix('.log')}"


def main() -> None:
    given = arguments()
    if given.answer:
        model, way, file = given.answer
        Path(file).write_text(json.dumps(answer(model, way, given)))
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU: torch.cuda.is_available() is False, and vLLM's engine needs one")
    gpus = torch.cuda.device_count()
    given.ways = given.ways or [way for way in WAYS if WAYS[way][1].get("tensor_parallel_size", 1) <= gpus]
    out = vllm_server.folder(given.out, "agreement_results_")
    print(f"seed {given.seed}; answers and logs: {out}")
    failed, header = [], False
    for layers in given.layers:
        with tempfile.TemporaryDirectory(prefix="agreement_") as folder, ThreadPoolExecutor(given.at_once) as pool:
            sizes = {"num_hidden_layers": layers, "vocab_size": 32768}
            random_checkpoint.write(Path(folder), given.seed, sizes)
            files = {way: out / f"{layers}_{way.replace(', ', '_')}.json" for way in given.ways}
            errors = list(pool.map(lambda item: run_engine(given, Path(folder), *item), files.items()))
        failed += filter(None, errors)
        answers = {way: read(file) for (way, file), wrong in zip(files.items(), errors, strict=True) if not wrong}
        reference = given.ways[0]
        for way in given.ways[1:]:
            if reference in answers and way in answers:
                row = compare(answers[reference], answers[way])
                if not header:
                    print(f"| layers | pair | {' | '.join(row)} |\n|---:|---|{'---:|' * len(row)}", flush=True)
                    header = True
                cells = " | ".join(f"{value:.4g}" for value in row.values())
                print(f"| {layers} | {reference}; {way} | {cells} |", flush=True)
    if failed:
        sys.exit("\n".join(failed))


def read(file: Path) -> Answers:
    return [
        [(token, {int(name): value for name, value in logprobs.items()}) for token, logprobs in tokens]
        for tokens in json.loads(file.read_text())
    ]


if __name__ == "__main__":
    main()
