# SPDX-License-Identifier: Apache-2.0
"""What a call of known shapes needs beyond its tensors: tactics, workspace size; and the launch itself.

Tactics are places in ``INSTANCES`` here, as the kernel module has them; :func:`wanted_tactics` finds those of the numbers
that ``profile_ids`` has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..jit.sm12x.instances import INSTANCES, SM12X
from ..sm12x_arguments import describe
from . import sm12x_dispatch as dispatch
from .sm12x_planner import plan_moe
from .sm12x_validation import Mode, MoEProblem


@dataclasses.dataclass(eq=False)
class Plan:
    """What is known of a call once its shapes are."""

    problem: MoEProblem
    workspace_bytes: int = 0
    tactics: tuple[int, int] = (-1, -1)
    tuned: tuple[Any, tuple[int, int]] | None = None  # autotuner state and what it chose then
    pair: tuple[int, int] | None = None  # tactics for a stream that has fewer SMs than the device


@functools.lru_cache(maxsize=8)
def allowed_tactics(mode: Mode, block_scaled_mma: bool = False) -> tuple[int, ...]:
    """Tactics that fit ``mode`` on a device: SM12x, whose MMA takes block scales, runs its own table, others all rows."""
    rows = SM12X if block_scaled_mma else INSTANCES
    return tuple(row.index for row in rows if row.activation == mode.activation)


def computes_layer(tactic: int) -> bool:
    """Whether ``tactic`` computes FC1 and FC2 in one launch; it then stands in both places of a pair."""
    return INSTANCES[tactic].streamed


def go_together(fc1: int, fc2: int) -> bool:
    """Whether two tactics make a layer: one that computes all of it, or two that multiply in the same type."""
    if computes_layer(fc1) or computes_layer(fc2):
        return fc1 == fc2
    return INSTANCES[fc1].multiplies == INSTANCES[fc2].multiplies


def resolved_pair(wanted: Sequence[int], default: tuple[int, int]) -> tuple[int, int]:
    """FC1's and FC2's tactics from ``wanted``, in which -1 leaves the choice to ``default``.

    Where the two do not :func:`go_together`, the one that was wanted serves both; of two that were, the first.
    """
    fc1, fc2 = (int(own) if given == -1 else int(given) for own, given in zip(default, wanted, strict=True))
    if go_together(fc1, fc2):
        return fc1, fc2
    only_second = wanted[0] == -1 and wanted[1] != -1
    return (fc2, fc2) if only_second else (fc1, fc1)


def wanted_tactics(profile_ids: Sequence[int], mode: Mode, block_scaled_mma: bool = False) -> tuple[int, int]:
    """The tactics whose numbers are ``profile_ids``; -1 stays.

    ``block_scaled_mma`` as in :func:`allowed_tactics`.

    Raises
    ------
    TypeError, ValueError
        Unless it is a pair of -1 or tactics that fit ``mode`` and make a layer.
    """
    try:
        profile_ids = list(profile_ids)
    except TypeError:
        raise TypeError(f"profile_ids is {describe(profile_ids)}; it must be [fc1_tactic, fc2_tactic]") from None
    allowed = allowed_tactics(mode, block_scaled_mma)
    numbers = [INSTANCES[tactic].number for tactic in allowed]
    if len(profile_ids) != 2 or any(number != -1 and number not in numbers for number in profile_ids):
        named = ", ".join(f"{INSTANCES[tactic].number} ({INSTANCES[tactic].name})" for tactic in allowed)
        raise ValueError(
            f"profile_ids is {profile_ids}; it must be [fc1_tactic, fc2_tactic], each -1 (the default) or, in mode "
            f"{mode.name}, one of {named}"
        )
    fc1, fc2 = (-1 if number == -1 else allowed[numbers.index(number)] for number in profile_ids)
    if fc2 != -1 and computes_layer(fc2) and fc1 != fc2:
        raise ValueError(
            f"profile_ids is {profile_ids}; {INSTANCES[fc2].name} computes FC1 and FC2 in one launch, so that it cannot be "
            f"FC2's alone: pass [{profile_ids[1]}, {profile_ids[1]}]"
        )
    if -1 not in (fc1, fc2) and not computes_layer(fc1) and not go_together(fc1, fc2):
        raise ValueError(
            f"profile_ids is {profile_ids}; FC1 and FC2 must keep activations in the same type, but these are "
            f"{INSTANCES[fc1].name} and {INSTANCES[fc2].name}: pass two that do alike, or -1 for one of them"
        )
    return fc1, fc2


def forced_tactics(wanted: tuple[int, int], default: tuple[int, int]) -> tuple[int, int]:
    """``wanted`` with -1 replaced by ``default``; builds what is not built yet."""
    fc1, fc2 = resolved_pair(wanted, default)
    dispatch.ensure_instance(fc1)
    dispatch.ensure_instance(fc2)
    return fc1, fc2


def make_plan(problem: MoEProblem, device: torch.device) -> Plan:
    """Default tactics and workspace size of ``problem`` on ``device``."""
    if device.type == "cpu" or problem.num_tokens == 0:
        return Plan(problem)
    tactics = _default_tactics(problem, device)
    with torch.cuda.device(device):
        size = dispatch.moe_module().sm12x_moe_workspace_size(
            problem.num_tokens,
            problem.hidden,
            problem.inter,
            problem.num_local_experts,
            problem.top_k,
            int(problem.mode),
            not dispatch.has_block_scaled_mma(device.index),
        )
    return Plan(problem, int(size), tactics)


def _default_tactics(problem: MoEProblem, device: torch.device, all_sms: bool = True) -> tuple[int, int]:
    """The planner's choice, ready to run."""
    sizes = (problem.num_tokens, problem.top_k, problem.num_local_experts, problem.hidden, problem.inter)
    fc1, fc2 = plan_moe(*sizes, int(problem.mode), dispatch.has_block_scaled_mma(device.index), all_sms)
    for tactic in (fc1, fc2):
        dispatch.ensure_instance(tactic)
    return int(fc1), int(fc2)


def pair_tactics(plan: Plan, device: torch.device) -> tuple[int, int]:
    """Tactics for a stream that has fewer SMs than ``device``: a pair of GEMMs, whose blocks do not wait for each other."""
    if plan.pair is None:
        plan.pair = _default_tactics(plan.problem, device, all_sms=False)
    return plan.pair


def launch(
    problem: MoEProblem,
    arguments: tuple[Any, ...],
    workspace: torch.Tensor,
    swizzled_input_sf: bool,
    tactics: tuple[int, int],
    enable_pdl: bool,
) -> bool:
    """Call the kernel module on the device of ``arguments``, in the order its binding declares.

    Returns ``False``, and has launched nothing, where ``tactics`` need all SMs of the device and the current stream has
    fewer (a green context, or MPS with a limited share).
    """
    device = workspace.device
    if not dispatch.one_device() and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return launch(problem, arguments, workspace, swizzled_input_sf, tactics, enable_pdl)
    launched: bool = dispatch.moe_module().sm12x_moe_run(
        *arguments,
        workspace,
        int(problem.mode),
        swizzled_input_sf,
        problem.first_expert,
        problem.num_experts_total,
        tactics[0],
        tactics[1],
        enable_pdl,
    )
    return launched
