# SPDX-License-Identifier: Apache-2.0
"""Time an MXFP4 or NVFP4 MoE layer from expert ids to output, beside its floor and beside what others have.

    make bench
    make bench BENCH_ARGS="--models gpt-oss-20b --tokens 1,8,64 --modes 0 --tactics all"
    make bench BENCH_ARGS="--models qwen3.6-35b-a3b"   # in NVFP4
    make bench BENCH_ARGS=--upstream                # on SM12x: upstream's module too
    make bench BENCH_ARGS=--host                    # what a call costs the host, in Python and in the launcher
    make bench BENCH_ARGS="--render moe.json"       # table and plot of an earlier run, no GPU needed
    make bench BENCH_ARGS=--predict                 # GB10, predicted; the default on a machine without a GPU

The floor is a plain streaming read of the weights and scales that a batch touches.  Peers are measured where they are
found: Marlin in vLLM, installed or in the folder that --vllm names, triton_kernels where it is installed or in that
vLLM, HUMMING where it is installed (it groups rows by vLLM's library).  All run in this process, on the same routing.

Every number is the median of replays of a CUDA graph, each after a write of 256 MB so that L2 holds nothing of the
layer.  ``FLASHINFER_SM12X_MOE=1`` is set for this process, so that a Hopper runs this family too.  Results are compared
with the float64 reference before they are timed, on up to 32 tokens of a batch: ours against the error bound; peers,
which round in between, against a tolerance.  If one of ours disagrees the exit status is 1; a peer that does is marked
and not drawn, and one that fails is named with the reason.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import emulate
import host_cost
import timing
import torch
import tqdm
from peers import PEERS, TOLERANCE, Layer, Peer, find_peers
from perfmodel.routing import NAMED, UNIFORM, log_popularity
from timing import (
    Entry,
    Row,
    allow,
    layer_parser,
    machine,
    measured,
    names,
    numbers,
    once,
    parse_layers,
    relative_error,
    render,
    report,
    share_of_bound,
)

from flashinfer.fused_moe.sm12x_planner import plan_moe
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.sm12x.devices import require_device_class
from flashinfer.sm12x.instances import INSTANCES, SM12X, tactic
from flashinfer.testing import MoEInputs, moe_reference
from flashinfer.testing.moe_layers import MODE_NAMES, MODELS, MODES_OF, Batch, layer_call, make_layer, route, rows_of
from flashinfer.testing.virtual_device import in_own_process
from flashinfer_sm12x.doctor.probe.mma import accumulation_on
from flashinfer_sm12x.doctor.probe.timing import StreamingRead, time_graph

TITLE = "MXFP4 and NVFP4 MoE layers"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PREDICTED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 2048, 8192)
PREDICTED_MODES = (1, 2)  # mode 0's GEMMs are mode 1's
DEFAULT_MODELS = ("gpt-oss-120b", "gpt-oss-20b")
CHECKED_TOKENS = 32  # rows of a batch that are compared with the float64 reference
SEED = 0


def batches(arguments: argparse.Namespace, device: str) -> Iterator[tuple[str, Batch, Iterator[Batch]]]:
    """For each model its name, its weights, and its batches: the same ones each time they are asked for."""
    for model in arguments.models:
        weights = make_layer(model, max(arguments.tokens), SEED, device)
        progress = tqdm.tqdm(arguments.tokens, desc=model, disable=None)
        routing = NAMED[arguments.routing]
        popularity = None if routing == UNIFORM else log_popularity(MODELS[model].experts, routing)
        yield model, weights, (route(weights, tokens, SEED + tokens, popularity) for tokens in progress)


def measure(arguments: argparse.Namespace, device: str = "cuda") -> list[Row]:
    """Ours and the floor for each model and number of tokens."""
    read = StreamingRead()
    rows = []
    for model, _, of_model in batches(arguments, device):
        for batch in of_model:
            floor, experts, size = read.time(batch.inputs, arguments.repeats)
            what = {"model": model, "tokens": batch.num_tokens, "experts": experts, "MB": size / 1e6}
            modes = [mode for mode in arguments.modes if mode in MODES_OF[batch.inputs.weights]]
            ours = {MODE_NAMES[mode]: measure_ours(arguments, batch.of_mode(mode), mode) for mode in modes}
            rows.append(Row(what, {"read us": floor}, ours))
    return rows


def peer_attempts(
    arguments: argparse.Namespace, peers: Sequence[Peer], rows: list[Row], device: str = "cuda"
) -> Iterator[tuple[Row, str, Callable[[], Entry]]]:
    """Measurements of the peers, on the same batches."""
    remaining, repeats = iter(rows), arguments.repeats
    for _, weights, of_model in batches(arguments, device):
        layers = {peer.name: once(functools.partial(peer.prepare, weights.inputs)) for peer in peers}
        for batch in of_model:
            row = next(remaining)
            assert row.what["tokens"] == batch.num_tokens
            for mode in arguments.modes if arguments.upstream else ():
                inputs = batch.of_mode(mode)
                yield row, f"upstream {MODE_NAMES[mode]}", functools.partial(measure_upstream, inputs, repeats)
            for name, layer in layers.items():
                yield row, name, functools.partial(measure_peer, layer, batch, repeats)


def checked_rows(inputs: MoEInputs) -> torch.Tensor:
    """Indices of the rows that are compared: all of a small batch, else some spread over it."""
    tokens = inputs.input.shape[0]
    count = min(tokens, CHECKED_TOKENS)
    return torch.linspace(0, tokens - 1, count, device=inputs.input.device).round().long()


def measure_ours(arguments: argparse.Namespace, inputs: MoEInputs, mode: int) -> Entry:
    """``cutlass_fused_moe`` with the planner's tactics, and with those of ``--tactics``."""
    rows = checked_rows(inputs)
    expected = moe_reference(rows_of(inputs, rows), accumulation_on(inputs.input.device))
    call = layer_call(inputs)
    entry = measured(call, share_of_bound(call()[rows], *expected), arguments.repeats)
    entry.tactics = "/".join(dict.fromkeys(planned_tactics(inputs, mode)))
    for name in forced_tactics(arguments.tactics, mode, inputs.weights):
        call = layer_call(inputs, [tactic(name)] * 2)
        entry.used = max(entry.used or 0.0, share_of_bound(call()[rows], *expected))
        entry.forced[name] = time_graph(call, arguments.repeats).median
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
    device = require_device_class(inputs.input.device.index)
    sizes = tokens, top_k, experts, hidden, 2 * half
    fc1, fc2 = plan_moe(*sizes, mode, device, weights=inputs.weights)
    return INSTANCES[fc1].name, INSTANCES[fc2].name


def forced_tactics(wanted: str, mode: int, weights: str) -> list[str]:
    """Names in ``--tactics`` that fit ``mode`` and the experts' format; ``all``: of SM12x's table."""
    fitting = (weights, Mode(mode).activation)
    table = SM12X if wanted == "all" else INSTANCES
    names = [row.name for row in table if (row.weights, row.activation) == fitting]
    return names if wanted == "all" else [name for name in wanted.split(",") if name in names]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = layer_parser(__doc__, PEERS)
    parser.add_argument(
        "--models",
        type=names,
        help=f"of {', '.join(MODELS)}, or all. Default: {', '.join(DEFAULT_MODELS)}; of a prediction, the first",
    )
    parser.add_argument("--modes", type=numbers, help="0, 1: W4A8; 2: W4A16. Default: all; of a prediction, 1 and 2")
    parser.add_argument("--tactics", default="", help="time these too (names of sm12x-instances, or all)")
    parser.add_argument("--upstream", action="store_true", help="upstream's module too (SM12x; 40 minutes to build)")
    parser.add_argument(
        "--routing",
        choices=tuple(NAMED),
        default="uniform",
        help="how tokens choose experts: all alike, or by the profile of gpt-oss (perfmodel/routing.py)",
    )
    parser.add_argument("--host", action="store_true", help="only what a call of one token costs the host")
    arguments = parse_layers(parser, argv)
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
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    os.environ.setdefault("FLASHINFER_SM12X_MOE", "1")
    if arguments.render is not None:
        return render(arguments.render, arguments.out / "moe.json", TITLE)
    if arguments.host:
        if not torch.cuda.is_available():
            print("bench: --host needs a GPU", file=sys.stderr)
            return 2
        model = arguments.models[0]
        print(f"host cost of a call, {model}, one token, output and workspace given, {machine()['gpu']}")
        print(host_cost.table(model, arguments.modes, SEED))
        return 0
    if arguments.predict or not torch.cuda.is_available():
        if not arguments.predict:
            print("no GPU here: the prediction for a GB10 instead (--help for what a GPU measures)\n")
        return int(
            in_own_process(
                emulate.predict_moe, arguments.models, arguments.tokens, arguments.modes, NAMED[arguments.routing]
            )
        )
    if arguments.upstream and not require_device_class(torch.cuda.current_device()).mma_kinds:
        print("bench: --upstream needs an SM12x GPU; elsewhere upstream takes other weight layouts", file=sys.stderr)
        return 2
    peers = find_peers(PEERS, arguments.peers, arguments.vllm)
    rows = measure(arguments)
    attempts = peer_attempts(arguments, peers, rows) if peers or arguments.upstream else ()
    return report(rows, attempts, arguments.out / "moe.json", TITLE)


if __name__ == "__main__":
    timing.run(main)
