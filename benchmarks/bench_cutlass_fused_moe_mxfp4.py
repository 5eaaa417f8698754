# SPDX-License-Identifier: Apache-2.0
"""Time an MXFP4 MoE layer from expert ids to output, beside its floor and beside what others have.

    make bench
    make bench BENCH_ARGS="--models gpt-oss-20b --tokens 1,8,64 --modes 0 --tactics all"
    make bench BENCH_ARGS=--upstream                # on SM12x: upstream's module too
    make bench BENCH_ARGS=--host                    # what a call costs the host, in Python and in the launcher
    make bench BENCH_ARGS="--render moe.json"       # table and plot of an earlier run, no GPU needed
    make bench BENCH_ARGS=--predict                 # GB10, predicted; the default on a machine without a GPU

The floor is a plain streaming read of the weights and scales that a batch touches.  Peers are measured where they are
found: Marlin in vLLM, installed or in the folder that --vllm names, triton_kernels where it is installed or in that vLLM,
HUMMING where it is installed (it groups rows by vLLM's library), upstream's cuTile kernels where cuda-tile is.  All run
in this process, on the same routing.

Every number is the median of replays of a CUDA graph, each after a write of 256 MB so that L2 holds nothing of the
layer.  ``FLASHINFER_SM12X_MOE=1`` is set for this process, so that a Hopper runs this family too.  Results are compared
with the float64 reference before they are timed, on up to 32 tokens of a batch: ours against the error bound; peers,
which round in between, against a tolerance.  If one of ours disagrees the exit status is 1; a peer that does is marked
and not drawn, and one that fails is named with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import emulate
import host_cost
import torch
import tqdm
from peers import PEERS, TOLERANCE, Layer, Peer, find_peers
from timing import (
    Entry,
    Row,
    add_peers,
    allow,
    load,
    machine,
    measured,
    names,
    numbers,
    once,
    publish,
    relative_error,
    share_of_bound,
    wrong,
)

from flashinfer.fused_moe.sm12x_planner import plan_moe
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.jit.sm12x.instances import INSTANCES, SM12X, tactic
from flashinfer.sm12x.devices import has_block_scaled_mma
from flashinfer.sm12x.probe.mma import accumulation_on
from flashinfer.sm12x.probe.timing import StreamingRead, time_graph
from flashinfer.testing import MoEInputs, moe_reference
from flashinfer.testing.moe_layers import MODE_NAMES, MODELS, Batch, layer_call, make_layer, route, rows_of
from flashinfer.testing.virtual_device import in_own_process

TITLE = "MXFP4 MoE layer"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PREDICTED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 2048, 8192)
PREDICTED_MODES = (1, 2)  # mode 0's GEMMs are mode 1's
DEFAULT_MODELS = ("gpt-oss-120b", "gpt-oss-20b")
CHECKED_TOKENS = 32  # rows of a batch that are compared with the float64 reference
SEED = 0


@dataclasses.dataclass
class Plan:
    """What is to be measured."""

    models: list[str]
    tokens: list[int]
    modes: list[int]
    tactics: str = ""
    upstream: bool = False
    repeats: int = 30
    peers: list[Peer] = dataclasses.field(default_factory=list)
    device: str = "cuda"


def batches(plan: Plan) -> Iterator[tuple[str, Batch, Iterator[Batch]]]:
    """For each model its name, its weights, and its batches: the same ones each time they are asked for."""
    for model in plan.models:
        weights = make_layer(model, max(plan.tokens), SEED, plan.device)
        progress = tqdm.tqdm(plan.tokens, desc=model, disable=None)
        yield model, weights, (route(weights, tokens, SEED + tokens) for tokens in progress)


def measure(plan: Plan) -> list[Row]:
    """Ours and the floor for each model and number of tokens."""
    read = StreamingRead()
    rows = []
    for model, _, of_model in batches(plan):
        for batch in of_model:
            floor, experts, size = read.time(batch.inputs, plan.repeats)
            what = {"model": model, "tokens": batch.num_tokens, "experts": experts, "MB": size / 1e6}
            ours = {MODE_NAMES[mode]: measure_ours(plan, batch.of_mode(mode), mode) for mode in plan.modes}
            rows.append(Row(what, {"read us": floor}, ours))
    return rows


def peer_attempts(plan: Plan, rows: list[Row]) -> Iterator[tuple[Row, str, Callable[[], Entry]]]:
    """Measurements of the peers, on the same batches."""
    remaining = iter(rows)
    for _, weights, of_model in batches(plan):
        layers = {peer.name: once(functools.partial(peer.prepare, weights.inputs)) for peer in plan.peers}
        for batch in of_model:
            row = next(remaining)
            assert row.what["tokens"] == batch.num_tokens
            for mode in plan.modes if plan.upstream else ():
                inputs = batch.of_mode(mode)
                yield row, f"upstream {MODE_NAMES[mode]}", functools.partial(measure_upstream, inputs, plan.repeats)
            for name, layer in layers.items():
                yield row, name, functools.partial(measure_peer, layer, batch, plan.repeats)


def checked_rows(inputs: MoEInputs) -> torch.Tensor:
    """Indices of the rows that are compared: all of a small batch, else some spread over it."""
    tokens = inputs.input.shape[0]
    count = min(tokens, CHECKED_TOKENS)
    return torch.linspace(0, tokens - 1, count, device=inputs.input.device).round().long()


def measure_ours(plan: Plan, inputs: MoEInputs, mode: int) -> Entry:
    """``cutlass_fused_moe`` with the planner's tactics, and with those of ``--tactics``."""
    rows = checked_rows(inputs)
    expected = moe_reference(rows_of(inputs, rows), accumulation_on(inputs.input.device))
    call = layer_call(inputs)
    entry = measured(call, share_of_bound(call()[rows], *expected), plan.repeats)
    entry.tactics = "/".join(dict.fromkeys(planned_tactics(inputs, mode)))
    for name in forced_tactics(plan.tactics, mode):
        call = layer_call(inputs, [tactic(name)] * 2)
        entry.used = max(entry.used or 0.0, share_of_bound(call()[rows], *expected))
        entry.forced[name] = time_graph(call, plan.repeats).median
    return entry


def checked_peer(call: Callable[[], torch.Tensor], inputs: MoEInputs, repeats: int) -> Entry:
    """The time of ``call`` and how far its result is from the reference of ``inputs``."""
    rows = checked_rows(inputs)
    reference, _ = moe_reference(rows_of(inputs, rows))
    return measured(call, relative_error(call()[rows], reference) / TOLERANCE, repeats)


def measure_upstream(inputs: MoEInputs, repeats: int) -> Entry:
    """The same call through upstream's module, which SM12x falls back to under ``FLASHINFER_SM12X_MOE=0``."""
    before = os.environ["FLASHINFER_SM12X_MOE"]
    os.environ["FLASHINFER_SM12X_MOE"] = "0"
    try:
        return checked_peer(layer_call(inputs), inputs, repeats)
    finally:
        os.environ["FLASHINFER_SM12X_MOE"] = before


def measure_peer(layer: Callable[[], Layer], batch: Batch, repeats: int) -> Entry:
    """A peer on the W4A16 layer."""
    return checked_peer(layer().bind(batch), batch.inputs, repeats)


def planned_tactics(inputs: MoEInputs, mode: int) -> tuple[str, str]:
    """Names of what the planner gives the call."""
    tokens, top_k = inputs.token_selected_experts.shape
    experts, hidden, half = inputs.fc2_weights.shape
    block_scaled = has_block_scaled_mma(inputs.input.device.index)
    fc1, fc2 = plan_moe(tokens, top_k, experts, hidden, 2 * half, mode, block_scaled)
    return INSTANCES[fc1].name, INSTANCES[fc2].name


def forced_tactics(wanted: str, mode: int) -> list[str]:
    """Names in ``--tactics`` that fit ``mode``; ``all``: of SM12x's table."""
    names = [row.name for row in (SM12X if wanted == "all" else INSTANCES) if row.activation == Mode(mode).activation]
    return names if wanted == "all" else [name for name in wanted.split(",") if name in names]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--models",
        type=names,
        help=f"of {', '.join(MODELS)}, or all. Default: {', '.join(DEFAULT_MODELS)}; of a prediction, the first",
    )
    parser.add_argument("--tokens", type=numbers, help="default: 1 to 8192; of a prediction, 1 to 64, 2048 and 8192")
    parser.add_argument("--modes", type=numbers, help="0, 1: W4A8; 2: W4A16. Default: all; of a prediction, 1 and 2")
    parser.add_argument("--tactics", default="", help="time these too (names of sm12x-instances, or all)")
    parser.add_argument(
        "--peers", type=names, help=f"these must be there; default: those of {', '.join(PEERS)} that are"
    )
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's package, where it is not installed")
    parser.add_argument("--upstream", action="store_true", help="upstream's module too (SM12x; 40 minutes to build)")
    parser.add_argument("--host", action="store_true", help="only what a call of one token costs the host")
    parser.add_argument("--predict", action="store_true", help="measure nothing: the predicted GB10 table")
    parser.add_argument("--render", type=Path, help="measure nothing: table and plot of this JSON")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "out", help="folder of the JSON and the plot"
    )
    arguments = parser.parse_args(argv)
    predicts = not arguments.host and (arguments.predict or not torch.cuda.is_available())
    if arguments.models is None:
        arguments.models = list(DEFAULT_MODELS[:1] if predicts else DEFAULT_MODELS)
    if arguments.models == ["all"]:
        arguments.models = list(MODELS)
    if arguments.tokens is None:
        arguments.tokens = list(PREDICTED_TOKENS if predicts else TOKENS)
    if arguments.modes is None:
        arguments.modes = list(PREDICTED_MODES if predicts else MODE_NAMES)
    allow(parser, arguments, models=MODELS, modes=MODE_NAMES, peers=PEERS)
    if min(arguments.tokens) < 1:
        parser.error(f"--tokens: {min(arguments.tokens)} is less than 1")
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1")
    return arguments


def report_host_cost(arguments: argparse.Namespace) -> int:
    model = arguments.models[0]
    if torch.cuda.is_available():
        print(f"host cost of a call, {model}, one token, output and workspace given, {machine()['gpu']}")
        print(host_cost.as_table(host_cost.on_gpu(model, arguments.modes, SEED)))
    else:
        print(f"host cost of a call, {model}, one token: no GPU, so Python only, with a module that does nothing")
        print(host_cost.as_table(host_cost.with_stub(model, arguments.modes)))
    return 0


def run_on_gpu(arguments: argparse.Namespace) -> int:
    chosen = arguments.peers is not None
    peers = find_peers(arguments.peers if chosen else list(PEERS), arguments.vllm, chosen)
    plan = Plan(
        arguments.models,
        arguments.tokens,
        arguments.modes,
        arguments.tactics,
        arguments.upstream,
        arguments.repeats,
        peers,
    )
    about, path = machine(), arguments.out / "moe.json"
    rows = measure(plan)
    if peers or arguments.upstream:
        publish(about, rows, path, TITLE)  # in case a peer takes the process down
        add_peers(peer_attempts(plan, rows))
    publish(about, rows, path, TITLE)
    return wrong(rows)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    os.environ.setdefault("FLASHINFER_SM12X_MOE", "1")
    if arguments.render is not None:
        publish(*load(arguments.render), arguments.out / "moe.json", TITLE)
        return 0
    if arguments.host:
        return report_host_cost(arguments)
    if arguments.predict or not torch.cuda.is_available():
        if not arguments.predict:
            print("no GPU here: the prediction for a GB10 instead (--help for what a GPU measures)\n")
        return int(in_own_process(emulate.predict_moe, arguments.models, arguments.tokens, arguments.modes))
    if arguments.upstream and not has_block_scaled_mma(torch.cuda.current_device()):
        print("bench: --upstream needs an SM12x GPU; elsewhere upstream takes other weight layouts", file=sys.stderr)
        return 2
    return run_on_gpu(arguments)


if __name__ == "__main__":
    sys.exit(main())
