# SPDX-License-Identifier: Apache-2.0
"""Time an MXFP4 MoE layer from expert ids to output, beside its floor and beside what others have.

    make bench
    make bench BENCH_ARGS="--models gpt-oss-20b --tokens 1,8,64 --modes 0 --tactics all"
    make bench BENCH_ARGS=--upstream                # on SM12x: upstream's module too
    make bench BENCH_ARGS=--host                    # what a call costs the host, in Python and in the launcher
    make bench BENCH_ARGS="--render bench.json"     # table and plot of an earlier run, no GPU needed
    make bench BENCH_ARGS=--predict                 # GB10, predicted; the default on a machine without a GPU

The floor is a plain streaming read of the weights and scales that a batch touches.  Peers are measured where they are
found: Marlin in an installed vLLM or in the library that --marlin names, triton_kernels where it is installed, in vLLM,
or in the folder that --triton-kernels names, HUMMING where it is installed or in the folder that --humming names (it
groups rows by Marlin's library), llama.cpp in the folder that --llama-cpp names.  All run in this process, on the same
routing.

Every number is the median of replays of a CUDA graph, each after a write of 256 MB so that L2 holds nothing of the
layer.  ``FLASHINFER_SM12X_MOE=1`` is set for this process, so that a Hopper runs this family too.  Results are compared
with the float64 reference before they are timed, on up to 32 tokens of a batch: ours against the error bound; peers,
which round in between, against a tolerance.  If one of ours disagrees the exit status is 1; a peer that does is marked
and not drawn, and one that fails is named with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path

import torch
from moe_bench import host_cost, measure, predict, results

import flashinfer
from flashinfer.fused_moe import sm12x_dispatch
from flashinfer.testing.moe_layers import MODE_NAMES, MODELS
from flashinfer.testing.virtual_device import in_own_process

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PEERS = ("marlin", "triton_kernels", "humming", "llama_cpp")
DEFAULT_MODELS = ("gpt-oss-120b", "gpt-oss-20b")


def machine() -> dict[str, str]:
    """What the numbers were taken on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "flashinfer": f"{flashinfer.__version__} + {flashinfer.__fork_version__}",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(item) for item in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        help=f"of {', '.join(MODELS)}. Default: {', '.join(DEFAULT_MODELS)}; of a prediction, the first",
    )
    parser.add_argument("--tokens", type=numbers, help="default: 1 to 8192; of a prediction, 1 to 64, 2048 and 8192")
    parser.add_argument("--modes", type=numbers, help="0, 1: W4A8; 2: W4A16. Default: all; of a prediction, 1 and 2")
    parser.add_argument("--tactics", default="", help="time these too (names of sm12x-instances, or all)")
    parser.add_argument("--peers", default=",".join(PEERS), help="which of the peers to look for; '' for none")
    parser.add_argument("--marlin", type=Path, help="vLLM's _moe_C_stable_libtorch.abi3.so")
    parser.add_argument("--triton-kernels", type=Path, help="folder of the package triton_kernels")
    parser.add_argument("--humming", type=Path, help="folder of the package humming (humming-kernels)")
    parser.add_argument("--llama-cpp", type=Path, help="folder of ggml's libraries (scripts/build_llama_cpp.py)")
    parser.add_argument("--upstream", action="store_true", help="upstream's module too (SM12x; 40 minutes to build)")
    parser.add_argument("--host", action="store_true", help="only what a call of one token costs the host")
    parser.add_argument("--predict", action="store_true", help="measure nothing: the predicted GB10 table")
    parser.add_argument("--render", type=Path, help="measure nothing: table and plot of this JSON")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "out", help="folder of the JSON and the plot"
    )
    arguments = parser.parse_args(argv)
    predicts = not arguments.host and (arguments.predict or not torch.cuda.is_available())
    if arguments.models is None:
        arguments.models = list(DEFAULT_MODELS[:1] if predicts else DEFAULT_MODELS)
    if arguments.tokens is None:
        arguments.tokens = list(predict.TOKENS if predicts else TOKENS)
    if arguments.modes is None:
        arguments.modes = list(predict.DEFAULT_MODES if predicts else MODE_NAMES)
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"--models: {sorted(unknown)} are not among {sorted(MODELS)}")
    if unknown_modes := set(arguments.modes) - set(MODE_NAMES):
        parser.error(f"--modes: {sorted(unknown_modes)} are not among {sorted(MODE_NAMES)}")
    if min(arguments.tokens) < 1:
        parser.error(f"--tokens: {min(arguments.tokens)} is less than 1")
    if unknown_peers := set(filter(None, arguments.peers.split(","))) - set(PEERS):
        parser.error(f"--peers: {sorted(unknown_peers)} are not among {sorted(PEERS)}")
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1")
    return arguments


def report_host_cost(arguments: argparse.Namespace) -> int:
    model = arguments.models[0]
    if torch.cuda.is_available():
        print(f"host cost of a call, {model}, one token, output and workspace given, {machine()['gpu']}")
        print(host_cost.as_table(host_cost.on_gpu(model, arguments.modes, arguments.seed)))
    else:
        print(f"host cost of a call, {model}, one token: no GPU, so Python only, with a module that does nothing")
        print(host_cost.as_table(host_cost.with_stub(model, arguments.modes)))
    return 0


def run_on_gpu(arguments: argparse.Namespace) -> int:
    given = (arguments.marlin, arguments.triton_kernels, arguments.humming, arguments.llama_cpp)
    peers = measure.find_peers(arguments.peers, *given)
    plan = measure.Plan(
        arguments.models,
        arguments.tokens,
        arguments.modes,
        arguments.tactics,
        arguments.upstream,
        arguments.repeats,
        arguments.seed,
        peers,
    )
    about = machine()
    rows = measure.measure(plan)
    if peers or arguments.upstream:
        results.publish(about, rows, arguments.out)  # in case a peer takes the process down
        measure.measure_peers(plan, rows)
    results.publish(about, rows, arguments.out)
    wrong = [(row, name) for row in rows for name, entry in row.ours.items() if entry.disagrees]
    for row, name in wrong:
        print(f"bench: {row.model}, {row.tokens} tokens, {name} disagrees with the reference", file=sys.stderr)
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    os.environ.setdefault("FLASHINFER_SM12X_MOE", "1")
    if arguments.render is not None:
        results.publish(*results.load(arguments.render), arguments.out)
        return 0
    if arguments.host:
        return report_host_cost(arguments)
    if arguments.predict or not torch.cuda.is_available():
        if not arguments.predict:
            print("no GPU here: the prediction for a GB10 instead (--help for what a GPU measures)\n")
        given = arguments.models, arguments.tokens, arguments.modes, arguments.out
        return int(in_own_process(predict.main, *given))
    if arguments.upstream and not sm12x_dispatch.has_block_scaled_mma(torch.cuda.current_device()):
        print("bench: --upstream needs an SM12x GPU; elsewhere upstream takes other weight layouts", file=sys.stderr)
        return 2
    return run_on_gpu(arguments)


if __name__ == "__main__":
    sys.exit(main())
