# SPDX-License-Identifier: Apache-2.0
"""The default instance for a shape, and the reason; ``python -m flashinfer sm12x-plan`` prints both.

The choice follows the number of token rows that an expert can expect, since that is the N side of its GEMMs: the
narrowest N tile that holds them wastes least of an MMA, and a wider one reads the weights fewer times.  Thresholds
are those of the device's class (``flashinfer.sm12x.device_class``): they come from the tactic sweep on an H200 in
``docs/log.md``; those of SM12x, where the MMA is block-scaled and wide tiles cost no scale arithmetic, are predictions
until somebody has measured them on a GB10.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ..sm12x import models
from ..sm12x.checks import describe, require_k_alignment
from ..sm12x.device_class import CLASSES, GB10, DeviceClass
from ..sm12x.instances import FUSED_MOE_ROUTED_ROWS, GEMM_INSTANCES, INSTANCES, MAX_EXPERTS, Format, Instance
from .sm12x_validation import Mode, MoEProblem


@dataclasses.dataclass(frozen=True)
class Choice:
    """An instance and the reason for it, for people."""

    instance: Instance
    reason: str


AS_FAST = 1.03
"""W4A16 (weight-only) is preferred if it takes at most this many times W4A8's time. The device classes' limits
(``w4a16_rows``) follow from it; a test holds them to the performance model."""


def expected_rows(num_rows: int, num_experts: int) -> float:
    """Rows of a busy expert when ``num_rows`` rows fall on ``num_experts`` experts at random: the mean over the experts
    that are hit."""
    hit = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** num_rows)
    return num_rows / hit if hit else 0.0


def plan_mode(mode: Mode, num_tokens: int, top_k: int, num_experts: int, device: DeviceClass = GB10) -> Mode:
    """Resolve :attr:`Mode.AUTO` by the number of tokens: W4A16 where it is as fast, else W4A8. Other modes stay."""
    if mode is not Mode.AUTO:
        return mode
    rows = expected_rows(num_tokens * top_k, num_experts)
    return Mode.W4A16 if rows <= device.w4a16_rows else Mode.BF16_INPUT


def most_exact_tokens(top_k: int, num_experts: int, device: DeviceClass = GB10) -> float:
    """The most tokens for which :attr:`Mode.AUTO` chooses W4A16; infinite if it always does."""
    most = 1 << 20
    if plan_mode(Mode.AUTO, most, top_k, num_experts, device) is Mode.W4A16:
        return math.inf

    def rounded(tokens: int) -> bool:
        return plan_mode(Mode.AUTO, tokens, top_k, num_experts, device) is not Mode.W4A16

    return bisect.bisect(range(most), False, key=rounded) - 1


def choose(
    activation: Format,
    num_rows: int,
    num_experts: int,
    device: DeviceClass,
    layer: tuple[int, int] | None = None,
    all_sms: bool = True,
    weights: str = "mxfp4",
) -> Choice:
    """The default instance for ``num_rows`` token rows (tokens x top_k) on ``num_experts`` experts.

    ``layer``: hidden and intermediate size of an MoE layer; None chooses among the grouped GEMM's instances.
    ``all_sms``: False chooses among two-kernel tactics only, because blocks of a fused MoE kernel wait for each other.
    """
    rows = expected_rows(num_rows, num_experts)
    busy = f"{rows:.1f} rows for an expert that is hit"
    fitting = GEMM_INSTANCES
    if layer is not None:
        rows_that_take_it = device.candidates(num_rows, *layer, weights)
        fitting = tuple(row for row in rows_that_take_it if row.activation == activation)
    tile = next((tile for limit, tile in device.fused_moe if rows <= limit), 0)
    for row in fitting if all_sms else ():
        if row.split_k and row.block_n == tile:
            return Choice(row, f"{busy}: the layer in one fused MoE kernel, BLOCK_N {tile}")
    pairs = device.two_kernel_w4a16 if activation == "bf16" else device.two_kernel
    wanted = next(tile for limit, tile in (device.gemms if layer is None else pairs) if rows <= limit)
    gemms = [row for row in fitting if not row.split_k]
    tiles = sorted({row.block_n for row in gemms})
    tile = next((tile for tile in tiles if tile >= wanted), tiles[-1])
    # Among equal N tiles take the longest BLOCK_K: it reads whole 128-byte pieces of a weight row.
    best = max((row for row in gemms if row.block_n == tile), key=lambda row: row.block_k)
    kept = ", activations dequantized to bfloat16" if best.compute == "mxfp8_as_bf16" else ""
    return Choice(best, f"{busy}: BLOCK_N {tile}, BLOCK_K {best.block_k}{kept}")


def plan_moe(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inter: int,
    mode: int,
    device: DeviceClass = GB10,
    all_sms: bool = True,
    weights: str = "mxfp4",
) -> tuple[int, int]:
    """Default tactics of FC1 and FC2: one that computes the whole layer, twice, or a pair.

    Shares of work are cut to the number of SMs inside the kernels (``tile/scheduler.cuh``,
    ``split_k/moe_scheduler.cuh``), so that it does not change the choice, unless the layer may not use all of them.
    """
    rows = num_tokens * top_k
    planned = plan_mode(Mode(mode), num_tokens, top_k, num_experts, device)
    choice = choose(planned.activation, rows, num_experts, device, (hidden, inter), all_sms, weights)
    return choice.instance.index, choice.instance.index


def plan_group_gemm(cum_m: int, num_groups: int, device: DeviceClass = GB10) -> int:
    """Default tactic of the grouped GEMM."""
    return choose("mxfp8", cum_m, num_groups, device).instance.index


# --- pairs of tactics: FC1's and FC2's, as places in INSTANCES --------------------------------------------------------


def computes_layer(tactic: int) -> bool:
    """Whether ``tactic`` computes FC1 and FC2 in one launch; it then stands in both places of a pair."""
    return INSTANCES[tactic].split_k


def go_together(fc1: int, fc2: int) -> bool:
    """Whether two tactics make a layer: one that computes all of it, or two that multiply in the same type."""
    if computes_layer(fc1) or computes_layer(fc2):
        return fc1 == fc2
    return INSTANCES[fc1].compute == INSTANCES[fc2].compute


def resolved_pair(wanted: Sequence[int], default: tuple[int, int]) -> tuple[int, int]:
    """FC1's and FC2's tactics from ``wanted``, in which -1 leaves the choice to ``default``.

    If the two cannot form a layer (:func:`go_together`), one of them serves both GEMMs: the one that was given, or the
    first if both were.
    """
    fc1, fc2 = (int(own) if given == -1 else int(given) for own, given in zip(default, wanted, strict=True))
    if go_together(fc1, fc2):
        return fc1, fc2
    only_second = wanted[0] == -1 and wanted[1] != -1
    return (fc2, fc2) if only_second else (fc1, fc1)


def wanted_tactics(
    profile_ids: Sequence[int], problem: MoEProblem, rows: Sequence[Instance] = INSTANCES
) -> tuple[int, int]:
    """The tactics whose numbers are ``profile_ids``; -1 stays.  ``rows`` are those that the device may run.

    Raises
    ------
    TypeError, ValueError
        Unless it is a pair of -1 or tactics that take ``problem`` and make a layer.
    """
    try:
        profile_ids = list(profile_ids)
    except TypeError:
        raise TypeError(f"profile_ids is {describe(profile_ids)}; it must be [fc1_tactic, fc2_tactic]") from None
    mode = problem.mode
    allowed = [row for row in rows if row.activation == mode.activation and row.weights == problem.weights]
    numbers = [row.profile_id for row in allowed]
    if len(profile_ids) != 2 or any(number != -1 and number not in numbers for number in profile_ids):
        named = ", ".join(f"{row.profile_id} ({row.name})" for row in allowed)
        raise ValueError(
            f"profile_ids is {profile_ids}; it must be [fc1_tactic, fc2_tactic], each -1 (the default) or, in mode "
            f"{mode.name}, one of {named}"
        )
    named_rows = [None if number == -1 else allowed[numbers.index(number)] for number in profile_ids]
    routed_rows = problem.num_tokens * problem.top_k
    for row in named_rows:
        if row is not None and not row.takes(routed_rows, problem.hidden, problem.inter):
            raise ValueError(
                f"profile_ids is {profile_ids}; {row.name} takes at most {FUSED_MOE_ROUTED_ROWS} routed rows "
                f"(tokens x top_k), and hidden and intermediate sizes up to {row.longest_k}, but this call has "
                f"{routed_rows} routed rows and the sizes {problem.hidden} and {problem.inter}: pass other "
                "tactics, or -1"
            )
    fc1, fc2 = (-1 if row is None else row.index for row in named_rows)
    if fc2 != -1 and computes_layer(fc2) and fc1 != fc2:
        raise ValueError(
            f"profile_ids is {profile_ids}; {INSTANCES[fc2].name} computes FC1 and FC2 in one launch, so that it "
            f"cannot be FC2's alone: pass [{profile_ids[1]}, {profile_ids[1]}]"
        )
    if -1 not in (fc1, fc2) and not computes_layer(fc1) and not go_together(fc1, fc2):
        raise ValueError(
            f"profile_ids is {profile_ids}; FC1 and FC2 must keep activations in the same type, but these are "
            f"{INSTANCES[fc1].name} and {INSTANCES[fc2].name}: pass two that do alike, or -1 for one of them"
        )
    return fc1, fc2


# --- for people: python -m flashinfer sm12x-plan --------------------------------------------------------------------

MODES = {"auto": Mode.AUTO, "w4a8": Mode.MXFP8_INPUT, "w4a8-bf16": Mode.BF16_INPUT, "w4a16": Mode.W4A16}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a layer on one rank."""

    hidden: int
    inter: int
    experts: int
    top_k: int

    def check(self) -> None:
        """Raise ``ValueError`` unless the kernels take such a layer."""
        require_k_alignment("hidden", self.hidden)
        require_k_alignment("inter", self.inter)
        if not 1 <= self.experts <= MAX_EXPERTS:
            raise ValueError(f"experts is {self.experts}; it must be in [1, {MAX_EXPERTS}]")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k is {self.top_k}; it must be in [1, {self.experts}], the number of experts")


MODELS = {name: Layer(*layer[:4]) for name, layer in models.MOE_LAYERS.items()}
DEVICES = {each.key: each for each in CLASSES}


@dataclasses.dataclass(frozen=True)
class Explained:
    """The tactics of one number of tokens.

    Attributes
    ----------
    tokens : int
        Tokens of the batch.
    rows_per_expert : float
        Expected rows of an expert that gets any.
    fc1, fc2 : int
        The tactics, and the names of their instances.
    reason : str
        The planner's reason for them.
    """

    tokens: int
    rows_per_expert: float
    fc1: int
    fc1_instance: str
    fc2: int
    fc2_instance: str
    reason: str


def explain(layer: Layer, mode: Mode, tokens: Sequence[int], device: DeviceClass) -> list[Explained]:
    """The default tactics of ``layer`` for each number of ``tokens``.

    Raises
    ------
    ValueError
        A size that the kernels do not take.
    """
    layer.check()
    if device.sm_count < 1:
        raise ValueError(f"sm_count is {device.sm_count}; it must be at least 1")
    explained = []
    for count in tokens:
        if count < 1:
            raise ValueError(f"tokens is {count}; it must be at least 1")
        rows = count * layer.top_k
        activation = plan_mode(mode, count, layer.top_k, layer.experts, device).activation
        choice = choose(activation, rows, layer.experts, device, (layer.hidden, layer.inter))
        gemm = choice.instance.profile_id, choice.instance.name
        explained.append(Explained(count, expected_rows(rows, layer.experts), *gemm, *gemm, choice.reason))
    return explained


def as_table(rows: Sequence[Explained]) -> tuple[list[str], list[list[Any]]]:
    """Titles and cells for ``tabulate``."""
    headers = ["tokens", "rows/expert", "FC1", "FC1's instance", "FC2", "FC2's instance", "why"]
    cells = [
        [row.tokens, f"{row.rows_per_expert:.1f}", row.fc1, row.fc1_instance, row.fc2, row.fc2_instance, row.reason]
        for row in rows
    ]
    return headers, cells
