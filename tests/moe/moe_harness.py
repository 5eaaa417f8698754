# SPDX-License-Identifier: Apache-2.0
"""Runs one MoE case against the float64 reference: poisoned memory, bitwise repeats, graph replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.sm12x.instances import SM12X, Instance
from flashinfer.testing import Accumulation, MoECase, MoEInputs, check_within_bound, make_moe_inputs, moe_reference
from flashinfer_sm12x.doctor.probe.mma import accumulation_on
from flashinfer_sm12x.doctor.probe.timing import captured


@dataclasses.dataclass
class Outcome:
    """The result of a case: the share of its bound that was used, and which checks ran."""

    used: float
    checks: tuple[str, ...]


def tactics_to_force(case: MoECase, device: torch.device, table: Iterable[Instance] = SM12X) -> list[list[int] | None]:
    """``profile_ids`` for :func:`check_case`: the default and, on a GPU, each instance of ``table`` that takes the
    case, for both GEMMs."""
    if device.type == "cpu":
        return [None]
    sizes = case.num_tokens * case.top_k, case.hidden, case.inter
    kind = (Mode(case.mode).activation, case.weights)
    rows = [row for row in table if (row.activation, row.weights) == kind and row.takes(*sizes)]
    return [None, *([row.profile_id] * 2 for row in rows)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors hold the same bits, NaN included."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def workspace_bytes(inputs: MoEInputs, device: torch.device) -> int:
    """The bytes that ``cutlass_fused_moe_workspace_size`` asks for ``inputs``."""
    tokens, top_k = inputs.token_selected_experts.shape
    experts, hidden, half = inputs.fc2_weights.shape
    if tokens == 0:
        return 0
    return cutlass_fused_moe_workspace_size(
        tokens,
        hidden,
        2 * half,
        experts * inputs.ep_size,
        top_k,
        x_dtype=inputs.input.dtype,
        weight_dtype=inputs.fc1_weights.dtype,
        output_dtype=inputs.output_dtype,
        ep_size=inputs.ep_size,
        ep_rank=inputs.ep_rank,
        use_w4_group_scaling=inputs.w4a16,
        use_mxfp8_act_scaling=not inputs.w4a16,
        device=device,
    )


# compute-sanitizer's initcheck takes poison for initialization: it wants the memory left alone.
POISON = True


def poisoned(inputs: MoEInputs, device: torch.device, byte: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An output of NaN and a workspace of ``byte``, so that nothing that is read before it is written looks like 0."""
    tokens, hidden = inputs.input.shape[0], inputs.fc2_weights.shape[1]
    size = workspace_bytes(inputs, device)
    if not POISON:
        output = torch.empty((tokens, hidden), dtype=inputs.output_dtype, device=device)
        return output, torch.empty(size, dtype=torch.uint8, device=device)
    output = torch.full((tokens, hidden), torch.nan, dtype=inputs.output_dtype, device=device)
    return output, torch.full((size,), byte, dtype=torch.uint8, device=device)


def run(inputs: MoEInputs, device: torch.device, byte: int, profile_ids: list[int] | None) -> torch.Tensor:
    """One call into poisoned memory."""
    output, workspace = poisoned(inputs, device, byte)
    result = cutlass_fused_moe(**inputs.arguments(), output=output, workspace_buffer=workspace, profile_ids=profile_ids)
    assert result.data_ptr() == output.data_ptr()
    return output


def replayed(inputs: MoEInputs, device: torch.device, profile_ids: list[int] | None) -> torch.Tensor:
    """The output after capturing the call in a CUDA graph, poisoning all it writes, and replaying it twice."""
    output, workspace = poisoned(inputs, device, 0x5A)
    arguments = {**inputs.arguments(), "output": output, "workspace_buffer": workspace, "profile_ids": profile_ids}
    graph = captured(lambda: cutlass_fused_moe(**arguments))
    for byte in (0xFF, 0x00):
        output.fill_(torch.nan)
        workspace.fill_(byte)
        graph.replay()
    torch.cuda.synchronize()
    return output


def reference_of(inputs: MoEInputs, accumulation: Accumulation, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference and bound, computed on the inputs' device or (``where="cpu"``) on copies on the host."""
    device = inputs.input.device
    if where == "cpu":
        moved = {
            field.name: value.cpu() if isinstance(value := getattr(inputs, field.name), torch.Tensor) else value
            for field in dataclasses.fields(inputs)
        }
        inputs = MoEInputs(**moved)
    reference, bound = moe_reference(inputs, accumulation)
    return reference.to(device), bound.to(device)


def check_case(
    case: MoECase, seed: int, device: torch.device, tactics: list[list[int] | None] | None = None, where: str = "device"
) -> list[Outcome]:
    """Assert a case for each pair of ``tactics`` (``None``: the default) and return what was seen.

    ``where`` is ``"device"``, ``"cpu"`` or ``"none"`` (no reference: only repeats are compared).
    """
    inputs = make_moe_inputs(case, seed, device)
    reference = bound = None
    if where != "none":
        reference, bound = reference_of(inputs, accumulation_on(device), where)
    outcomes = []
    for profile_ids in tactics or [None]:
        label = f"{case}, seed {seed}, profile_ids {profile_ids}"
        first = run(inputs, device, 0xFF, profile_ids)
        used = float("nan")
        checks = ["bound"] if reference is not None else []
        if reference is not None and bound is not None:
            used = check_within_bound(first, reference, bound, label)
        again = run(inputs, device, 0x00, profile_ids)
        assert same_bits(first, again), f"{label}: a second run differs"
        checks.append("repeat")
        if device.type == "cuda" and case.num_tokens:
            assert same_bits(first, replayed(inputs, device, profile_ids)), f"{label}: a graph replay differs"
            checks.append("graph")
        outcomes.append(Outcome(used, tuple(checks)))
    return outcomes
