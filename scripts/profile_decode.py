#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print each kernel's share of a decode step's time in vLLM's engine, from torch's profiler.

    scripts/profile_decode.py openai/gpt-oss-20b --batch 1
    scripts/profile_decode.py --layers 4 --batch 8 --context 8192     # random weights, nothing is downloaded
    scripts/profile_decode.py --layers 4 --set moe=mxfp4-a16,qkv=mxfp8

The engine runs in this process, with CUDA graphs and a KV cache in HND order (pages whose tokens of one head lie
together, as for docs/performance.md's times of decode attention). It profiles an answer of N + 1 tokens and one of 1
token; a step is their difference divided by N. *busy* is the time in which the GPU ran a kernel; the rest of a step is
host or launch time. On Hopper set FLASHINFER_SM12X_MOE=1. Exit status 1 with a line that says what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_server

with contextlib.suppress(ImportError):  # --help does without
    import torch

# Kinds of work by what their kernels' names hold, looked through from the top.
KINDS: dict[str, tuple[str, ...]] = {
    "copies": ("Memcpy", "Memset"),
    # Inductor names a kernel after all that it fused, and what it only passes on.
    "norms and the like": ("triton_", "rms_norm", "rotary", "elementwise"),
    "dense, this fork": (
        "dense_layer",
        "Role)2",
        "dequantize_rows",
        "pack_rows",
        "row_top_k",
        "chunk_top_k",
        "rescore",
    ),
    "routing": ("router_", "topk", "routing"),
    "MoE": (
        "fused_moe_kernel",
        "grouped_gemm",
        "moe",
        "Moe",
        "MoE",
        "matmul_ogs",
        "humming",
        "swiglu",
        "act_and_mul",
        "bitmatrix",
    ),
    "attention": ("xqa", "mha", "FlashAttn", "flash", "BatchPrefill", "attention", "reshape_and_cache", "mergeState"),
    "Marlin": ("marlin", "Marlin"),
    "GEMM": ("nvjet", "cublas", "gemm", "gemv", "splitK", "cutlass"),
    "sampling": ("gumbel", "argmax", "ArgMax", "sample", "softmax"),
}


@dataclass
class Profile:
    """Launches and microseconds by name, and the time in which any of them ran."""

    launches: Counter = field(default_factory=Counter)
    microseconds: Counter = field(default_factory=Counter)
    busy: float = 0.0


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def profiled(call: Callable[[], Any], activity: Any) -> Profile:
    """Profile what ``call`` runs on one kind of device."""
    with torch.profiler.profile(activities=[activity]) as profiler:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    found, spans = Profile(), []
    device = "CUDA" if activity == torch.profiler.ProfilerActivity.CUDA else "CPU"
    for event in profiler.profiler.kineto_results.events():
        if str(event.device_type()).endswith(device):
            found.launches[event.name()] += 1
            found.microseconds[event.name()] += event.duration_ns() / 1e3
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    end = 0
    for start, stop in sorted(spans):
        found.busy += max(0, stop - max(start, end)) / 1e3
        end = max(end, stop)
    return found


def step(long: Profile, short: Profile, steps: int) -> Profile:
    """One of ``steps`` that ``long`` has more than ``short``."""
    found = Profile(busy=(long.busy - short.busy) / steps)
    for name in long.launches:
        found.launches[name] = (long.launches[name] - short.launches[name]) / steps
        found.microseconds[name] = (long.microseconds[name] - short.microseconds[name]) / steps
    return found


def tables(found: Profile, top: int) -> str:
    """Kinds of work, then the ``top`` kernels, by share of the kernels' time."""
    total = sum(found.microseconds.values())

    def rows(launches: Counter, microseconds: Counter, heading: str) -> list[str]:
        lines = [f"| {heading} | launches | us | share |", "|---|---:|---:|---:|"]
        for name, spent in microseconds.most_common(top):
            lines.append(f"| {name[:100]} | {launches[name]:.1f} | {spent:,.1f} | {spent / total:.1%} |")
        return lines

    launches, microseconds = Counter(), Counter()
    for name, spent in found.microseconds.items():
        launches[kind_of(name)] += found.launches[name]
        microseconds[kind_of(name)] += spent
    return "\n".join([*rows(launches, microseconds, "work"), "", *rows(found.launches, found.microseconds, "kernel")])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model of vLLM's, or --layers")
    parser.add_argument("--layers", type=vllm_server.positive, help="profile a random gpt-oss-20b of so many layers")
    parser.add_argument("--batch", type=vllm_server.positive, default=1)
    parser.add_argument("--context", type=vllm_server.positive, default=1024, help="tokens of a prompt")
    parser.add_argument("--steps", type=vllm_server.positive, default=32, help="decode steps that are profiled")
    parser.add_argument("--top", type=vllm_server.positive, default=20, help="kernels in the table")
    parser.add_argument("--set", default="", help="settings of the plugin as key=value pairs with commas between")
    parser.add_argument("--moe-backend", default="auto")
    parser.add_argument(
        "--share", type=float, help="of the GPU's memory, for the engine (default: 0.92, on a Spark 0.7)"
    )
    given = parser.parse_args()
    if bool(given.model) == bool(given.layers):
        parser.error("give a model, or --layers N")
    return given


def main() -> None:
    given = arguments()
    vllm_server.need("torch", "vllm")
    share = given.share or vllm_server.share(vllm_server.gpu_bytes())
    if given.set:
        vllm_server.need_fork()
    # The engine's worker has to be this process, for the profiler to see it.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_KV_CACHE_LAYOUT": "HND"}
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        sys.exit(f"vLLM cannot be imported: {error}")
    import random_checkpoint

    with tempfile.TemporaryDirectory(prefix="profile_decode_") as folder:
        if given.layers:
            random_checkpoint.write(Path(folder), 0, {"num_hidden_layers": given.layers})
        engine = LLM(
            model=given.model or folder,
            skip_tokenizer_init=True,
            max_model_len=given.context + given.steps + 8,
            max_num_seqs=given.batch,
            enable_prefix_caching=False,
            gpu_memory_utilization=share,
            moe_backend=given.moe_backend,
            additional_config={"sm12x": dict(pair.split("=", 1) for pair in given.set.split(",") if pair)},
        )
    generator = random.Random(0)
    prompts: list[Any] = [
        {"prompt_token_ids": [generator.randrange(2, 200000) for _ in range(given.context)]} for _ in range(given.batch)
    ]

    def generate(tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.generate(prompts, sampling, use_tqdm=False)

    generate(given.steps + 1)
    activity = torch.profiler.ProfilerActivity.CUDA
    long, short = (profiled(lambda tokens=tokens: generate(tokens), activity) for tokens in (given.steps + 1, 1))
    found = step(long, short, given.steps)
    print(f"{torch.cuda.get_device_name()}, batch {given.batch} after {given.context} tokens, {given.steps} steps")
    print(f"a step: busy {found.busy:,.0f} us, kernels {sum(found.microseconds.values()):,.0f} us\n")
    print(tables(found, given.top))


if __name__ == "__main__":
    vllm_server.run(main)
