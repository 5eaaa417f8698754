# SPDX-License-Identifier: Apache-2.0
"""Measures: ours in each mode, the peers and the streaming read on the same routing, each checked before it is timed."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import tqdm

from flashinfer.fused_moe import sm12x_dispatch
from flashinfer.fused_moe.sm12x_launch import allowed_tactics
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.jit.sm12x.instances import INSTANCES, tactic
from flashinfer.sm12x_gpu_probe.mma import accumulation_on
from flashinfer.sm12x_gpu_probe.timing import StreamingRead, time_graph
from flashinfer.testing import BoundViolation, MoEInputs, check_within_bound, moe_reference
from flashinfer.testing.moe_layers import MODE_NAMES, Batch, layer_call, make_layer, route, rows_of

from . import peers as peer_module
from .peers import TOLERANCE, Layer, Peer, relative_error
from .results import Entry, Row

CHECKED_TOKENS = 32  # rows of a batch that are compared with the float64 reference


@dataclasses.dataclass
class Plan:
    """What is to be measured."""

    models: list[str]
    tokens: list[int]
    modes: list[int]
    tactics: str
    upstream: bool
    repeats: int
    seed: int
    peers: list[Peer]
    device: str = "cuda"


def find_peers(
    wanted: str,
    marlin: Path | None,
    triton_kernels: Path | None,
    humming: Path | None,
    llama_cpp: Path | None = None,
) -> list[Peer]:
    """The peers among ``wanted`` that are there; says of each where it was found or why it was not.

    Raises
    ------
    SystemExit
        One that was named by its path cannot be used: a table without it is not what was asked for.
    """
    found = []
    for name, find, given in (
        ("marlin", peer_module.marlin, marlin),
        ("triton_kernels", peer_module.triton_kernels, triton_kernels),
        ("humming", lambda folder: peer_module.humming(folder, marlin), humming),
        ("llama_cpp", peer_module.llama_cpp, llama_cpp),
    ):
        if name not in wanted.split(","):
            continue
        peer, told = find(given)
        if peer is None and given is not None:
            raise SystemExit(f"{name} cannot be measured: {told}")
        print(f"{name}: {'' if peer else 'not measured: '}{told}")
        if peer is not None:
            found.append(peer)
    return found


def batches(plan: Plan) -> Iterator[tuple[str, Batch, Iterator[Batch]]]:
    """For each model its name, its weights, and its batches: the same ones each time they are asked for."""
    for model in plan.models:
        weights = make_layer(model, max(plan.tokens), plan.seed, plan.device)
        progress = tqdm.tqdm(plan.tokens, desc=model, disable=None)
        yield model, weights, (route(weights, tokens, plan.seed + tokens) for tokens in progress)


def measure(plan: Plan) -> list[Row]:
    """Ours and the floor for each model and number of tokens."""
    read = StreamingRead()
    rows = []
    for model, _, of_model in batches(plan):
        for batch in of_model:
            floor, experts, size = read.time(batch.inputs, plan.repeats)
            row = Row(model, batch.num_tokens, experts, size / 1e6, floor, {}, {})
            for mode in plan.modes:
                row.ours[MODE_NAMES[mode]] = measure_ours(plan, batch.of_mode(mode), mode)
            rows.append(row)
    return rows


def measure_peers(plan: Plan, rows: list[Row]) -> None:
    """Add the peers to ``rows``, on the same batches.

    It comes after all of ours: a peer that breaks the CUDA context ends it for everybody.
    """
    if not (plan.peers or plan.upstream):
        return
    remaining = iter(rows)
    for model, weights, of_model in batches(plan):
        layers: dict[str, Layer | Entry] = {}
        for peer in plan.peers:
            try:
                layers[peer.name] = peer.prepare(weights.inputs)
            except Exception as error:  # the others go on; the row says why
                layers[peer.name] = failed(error)
        for batch in of_model:
            row = next(remaining)
            assert (row.model, row.tokens) == (model, batch.num_tokens)
            for mode in plan.modes if plan.upstream else ():
                row.peers[f"upstream {MODE_NAMES[mode]}"] = measure_upstream(plan, batch.of_mode(mode))
            for name, layer in layers.items():
                row.peers[name] = layer if isinstance(layer, Entry) else measure_peer(plan, layer, batch)
            if (broken := context_error()) is not None:
                print(f"no peer is measured from here on, the CUDA context is lost: {broken}", file=sys.stderr)
                return


def context_error() -> str | None:
    """What the CUDA context says of itself, where it is lost."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def failed(error: Exception) -> Entry:
    """An entry that says why there is none."""
    text = str(error).strip().splitlines()
    return Entry(note=f"{type(error).__name__}: {text[0] if text else ''}")


def checked_rows(inputs: MoEInputs) -> torch.Tensor:
    """Indices of the rows that are compared: all of a small batch, else some spread over it."""
    tokens = inputs.input.shape[0]
    count = min(tokens, CHECKED_TOKENS)
    return torch.linspace(0, tokens - 1, count, device=inputs.input.device).round().long()


def share_of_bound(inputs: MoEInputs, output: torch.Tensor) -> float:
    """The largest share of its error bound that a compared element used; above 1 the result disagrees."""
    rows = checked_rows(inputs)
    reference, bound = moe_reference(rows_of(inputs, rows), accumulation_on(output.device))
    try:
        return check_within_bound(output[rows], reference, bound, "")
    except BoundViolation as error:
        print(f"a result disagrees with the reference: {error}", file=sys.stderr)
        return float("inf")


def measure_ours(plan: Plan, inputs: MoEInputs, mode: int) -> Entry:
    """``cutlass_fused_moe`` with the planner's tactics, and with those of ``--tactics``."""
    call = layer_call(inputs)
    entry = Entry(used=share_of_bound(inputs, call()), tactics=planned_tactics(inputs, mode))
    entry.sample = time_graph(call, plan.repeats)
    for name in forced_tactics(plan.tactics, mode):
        call = layer_call(inputs, [tactic(name)] * 2)
        used = share_of_bound(inputs, call())
        entry.used = max(entry.used or 0.0, used)
        entry.forced[name] = time_graph(call, plan.repeats).median
    return entry


def checked_peer(
    plan: Plan, call: Callable[[], torch.Tensor], inputs: MoEInputs, tolerance: float = TOLERANCE
) -> Entry:
    """The time of ``call`` and how far its result is from the reference of ``inputs``."""
    rows = checked_rows(inputs)
    reference, _ = moe_reference(rows_of(inputs, rows))
    used = relative_error(call()[rows], reference) / tolerance
    return Entry(time_graph(call, plan.repeats), used)


def measure_upstream(plan: Plan, inputs: MoEInputs) -> Entry:
    """The same call through upstream's module, which SM12x falls back to under ``FLASHINFER_SM12X_MOE=0``."""
    before = os.environ["FLASHINFER_SM12X_MOE"]
    os.environ["FLASHINFER_SM12X_MOE"] = "0"
    try:
        return checked_peer(plan, layer_call(inputs), inputs)
    except Exception as error:
        return failed(error)
    finally:
        os.environ["FLASHINFER_SM12X_MOE"] = before


def measure_peer(plan: Plan, layer: Layer, batch: Batch) -> Entry:
    """A peer on the W4A16 layer, or why it failed."""
    try:
        return checked_peer(plan, layer.bind(batch), batch.inputs, getattr(layer, "tolerance", TOLERANCE))
    except Exception as error:
        return failed(error)


def planned_tactics(inputs: MoEInputs, mode: int) -> tuple[str, str]:
    """Names of what the planner gives the call."""
    from flashinfer.fused_moe.sm12x_planner import plan_moe

    tokens, top_k = inputs.token_selected_experts.shape
    experts, hidden, half = inputs.fc2_weights.shape
    index = inputs.input.device.index
    block_scaled = sm12x_dispatch.has_block_scaled_mma(index)
    fc1, fc2 = plan_moe(tokens, top_k, experts, hidden, 2 * half, mode, block_scaled)
    return INSTANCES[fc1].name, INSTANCES[fc2].name


def forced_tactics(wanted: str, mode: int) -> list[str]:
    """Names in ``--tactics`` that fit ``mode``; ``all``: of SM12x's table."""
    names = [INSTANCES[each].name for each in allowed_tactics(Mode(mode), block_scaled_mma=wanted == "all")]
    return names if wanted == "all" else [name for name in wanted.split(",") if name in names]
