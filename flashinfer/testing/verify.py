# SPDX-License-Identifier: Apache-2.0
"""Operators of this fork against their float64 references, one result a call: on a GPU, or on the virtual SM121."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..fused_moe import cutlass_fused_moe
from ..fused_moe.sm12x_validation import Mode
from ..gemm import group_gemm_mxfp4_nt_groupwise
from ..gemm.sm12x_dense import dense_block_scaled
from ..sm12x.instances import DENSE_INSTANCES, INSTANCES, MAIN_MODULE
from .dense_reference import TOKENS_OF, DenseCase, dense_reference, make_dense_inputs
from .error_bounds import Accumulation, BoundViolation, check_within_bound
from .gemm_reference import group_gemm_reference
from .moe_inputs import MoECase, make_group_gemm_inputs, make_moe_inputs
from .moe_reference import moe_reference

TOP_K = 4
MODES = ("W4A8, MXFP8 input", "W4A8, bf16 input", "W4A16")


@dataclass
class Result:
    """The result for one operator and size.

    Attributes:
        what: The operator and size, in words.
        used: The largest error as a share of its bound; infinite if it exceeds the bound.
        milliseconds: Time of a call on a GPU, everything in cache.
        wrong: The failure, in words; empty if there was none.
    """

    what: str
    used: float
    milliseconds: float | None = None
    wrong: str = ""


def timed(call: Callable[[], torch.Tensor]) -> float:
    """Milliseconds of a call on the GPU, the median of a few."""
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def judged(what: str, call: Callable[[], torch.Tensor], reference: torch.Tensor, bound: torch.Tensor) -> Result:
    """One operator: within its bound, the same bits twice, and the same from a CUDA graph."""
    first = call().clone()
    try:
        used = check_within_bound(first, reference, bound, what)
    except BoundViolation as error:
        return Result(what, float("inf"), wrong=str(error))
    if not torch.equal(first.view(torch.int16), call().view(torch.int16)):
        return Result(what, used, wrong="a second call gave other bits")
    if first.is_cuda:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = call()
        captured.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(first.view(torch.int16), captured.view(torch.int16)):
            return Result(what, used, wrong="a CUDA graph gave other bits")
    # Ask the tensor, not torch.cuda: torch for CUDA takes the virtual GPU for a real one, but its tensors are the
    # CPU's.
    return Result(what, used, timed(call) if first.is_cuda else None)


def tactics_of(mode: Mode, num_tokens: int, hidden: int, inter: int) -> list[int]:
    """The tactics of ``fused_moe_120`` that compute such a layer; a Hopper runs them too."""
    sizes = num_tokens * TOP_K, hidden, inter
    return [row.index for row in MAIN_MODULE if row.activation == mode.activation and row.takes(*sizes)]


def moe_results(
    sizes: Iterable[tuple[int, int, int]],
    tokens: Sequence[int],
    seed: int,
    device: torch.device,
    accumulation: Accumulation,
    every_tactic: bool = False,
    modes: Sequence[int] = (0, 1, 2),
) -> Iterator[Result]:
    """``cutlass_fused_moe`` with MXFP4 weights, four experts a token.

    Args:
        sizes: Hidden size, intermediate size, experts.
        tokens: Batches.
        seed: Seed of the inputs.
        device: Device of the inputs.
        accumulation: The way the device adds up products.
        every_tactic: Run each default tactic, for both GEMMs; else only the planner's choice.
        modes: Values of ``flashinfer.fused_moe.sm12x_validation.Mode``.
    """
    for hidden, inter, experts in sizes:
        for mode in modes:
            for count in tokens:
                case = MoECase(count, hidden, inter, experts, TOP_K, mode)
                inputs = make_moe_inputs(case, seed, device)
                reference, bound = moe_reference(inputs, accumulation)
                words = inputs.arguments()
                what = f"MoE {experts} experts {hidden} x {inter}, {MODES[mode]}, {count} tokens"
                if not every_tactic:
                    yield judged(what, functools.partial(cutlass_fused_moe, **words), reference, bound)
                    continue
                for tactic in tactics_of(Mode(mode), count, hidden, inter):
                    call = functools.partial(cutlass_fused_moe, **words, profile_ids=[INSTANCES[tactic].profile_id] * 2)
                    yield judged(f"{what}, {INSTANCES[tactic].name}", call, reference, bound)


def gemm_results(
    shapes: Iterable[tuple[Sequence[int], int, int]], seed: int, device: torch.device, accumulation: Accumulation
) -> Iterator[Result]:
    """``group_gemm_mxfp4_nt_groupwise``: ``shapes`` are rows of each group, n and k."""
    for rows, n, k in shapes:
        inputs = make_group_gemm_inputs(rows, n, k, seed, device)
        reference, bound = group_gemm_reference(**inputs, accumulation=accumulation)
        what = f"grouped GEMM, groups of {', '.join(map(str, rows))}, {n} x {k}"
        yield judged(what, functools.partial(group_gemm_mxfp4_nt_groupwise, **inputs), reference, bound)


def dense_results(
    shapes: Iterable[tuple[int, int]], seed: int, device: torch.device, accumulation: Accumulation
) -> Iterator[Result]:
    """``dense_block_scaled`` by each of its tactics, of ``(n, k)`` weights, with more tokens than a tile has."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    for n, k in shapes:
        for row in DENSE_INSTANCES:
            if row.longest_k < k:
                continue
            case = DenseCase(row.block_n + 3, n, k, row.weights, TOKENS_OF[row.compute_dtype], bias=torch.bfloat16)
            inputs = make_dense_inputs(case, seed)
            reference, bound = (moved(value) for value in dense_reference(inputs, accumulation))
            named = {name: moved(value) for name, value in inputs.named.items()}
            call = functools.partial(dense_block_scaled, *map(moved, inputs.arguments), **named, tactic=row.name)
            yield judged(f"dense {n} x {k}, {case.num_tokens} tokens, {row.name}", call, reference, bound)
