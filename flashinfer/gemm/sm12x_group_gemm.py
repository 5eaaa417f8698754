# SPDX-License-Identifier: Apache-2.0
"""The grouped MXFP8 x MXFP4 GEMM on SM12x's kernels and on the CPU: contract, launch, autotuning."""

from __future__ import annotations

import itertools
import operator
from typing import Any, NamedTuple

import torch

from ..jit.sm12x.modules import gen_group_gemm_module
from ..quantization.mx_cpu import dequantize_mxfp4_linear, dequantize_mxfp8_linear, unswizzle_128x4
from ..sm12x import tune
from ..sm12x.backend import Backend, checks_values, kernels, plain_torch, workspace_size
from ..sm12x.checks import (
    BLOCK_SIZE,
    ELEMENT,
    INT32_MAX,
    SCALE_WORD,
    UE8M0_DTYPES,
    describe,
    padded_scales,
    require_activation_bytes,
    require_apart,
    require_int,
    require_k_alignment,
    require_output_dtype,
    require_rank,
    require_tensor,
)
from ..sm12x.instances import GEMM_INSTANCES, MAX_EXPERTS, index_of
from ..sm12x.operator import OutputOperator

OPERATOR = "flashinfer::sm12x_group_gemm_mxfp4"
ROW_ALIGNMENT = 8  # of n: a store of 16 bytes
MOST_TOKENS = 8192  # that are tuned for
_UPSTREAM_TILES = (("mma_sm", (1,)), ("tile_m", (128,)), ("tile_n", (32, 64, 128)), ("tile_k", (128,)))


class GroupGemmCall(NamedTuple):
    """The arguments of one call, named as in ``group_gemm_mxfp8_mxfp4_nt_groupwise``; ``tiles`` are mma_sm, tile_m, _n,
    _k."""

    out: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    m_indptr: torch.Tensor
    out_dtype: torch.dtype | None
    tiles: list[int]
    swap_ab: bool
    tactic: int | None = None


def scale_rows(cum_m: int, num_groups: int) -> int:
    """Rows of ``a_scale`` that hold every split of ``cum_m`` rows into ``num_groups`` groups."""
    return (cum_m + 127 * num_groups) // 128 * 128


def _require_tiles(call: GroupGemmCall) -> None:
    for (name, allowed), value in zip(
        (*_UPSTREAM_TILES, ("swap_ab", (0, 1))), (*call.tiles, call.swap_ab), strict=True
    ):
        try:
            fits = operator.index(value) in allowed
        except TypeError:
            fits = False
        if not fits:
            listed = "True or False" if name == "swap_ab" else " or ".join(map(str, allowed))
            raise ValueError(f"{name} is {describe(value)}; it must be {listed}")


def validate(call: GroupGemmCall) -> torch.dtype:
    """Check the metadata and addresses of a call, and return its output's dtype; looks at no element.

    Raises
    ------
    TypeError, ValueError
        Naming the first argument that does not fit, what it was and what it may be.
    """
    _require_tiles(call)
    a, b, a_scale, out, out_dtype = call.a, call.b, call.a_scale, call.out, call.out_dtype
    for name, tensor, rank in (("a", a, 2), ("b", b, 3), ("m_indptr", call.m_indptr, 1), ("a_scale", a_scale, 2)):
        require_rank(name, tensor, rank)
    device = a.device
    groups, n, half = b.shape
    cum_m, k = a.shape[0], 2 * half
    if not 1 <= groups <= MAX_EXPERTS:
        raise ValueError(f"b is {describe(b)}; it must hold 1 to {MAX_EXPERTS} groups")
    require_k_alignment("k (b.shape[2] * 2)", k)
    # The last group's scales start less than 128 rows after each group's end.
    require_int("cum_m (a.shape[0])", cum_m, 0, INT32_MAX - 127 * groups, "since rows of scales count in int32")
    require_activation_bytes("cum_m (a.shape[0])", cum_m, k)
    if n <= 0 or n % ROW_ALIGNMENT or n > INT32_MAX:
        raise ValueError(f"n (b.shape[1]) is {n}; it must be a positive multiple of {ROW_ALIGNMENT} below 2**31")
    require_tensor("a", a, [(cum_m, k)], [torch.float8_e4m3fn, torch.float8_e5m2], device)
    require_tensor("b", b, [(groups, n, half)], [torch.uint8], device)
    require_tensor("m_indptr", call.m_indptr, [(groups + 1,)], [torch.int32], device, alignment=ELEMENT)
    (padded_n, blocks), needed = padded_scales(n, k // BLOCK_SIZE), scale_rows(cum_m, groups)
    if a_scale.shape[0] < needed:
        raise ValueError(
            f"a_scale is {describe(a_scale)}; it must have at least (cum_m + 127 * groups) // 128 * 128 = {needed} rows"
        )
    require_tensor("a_scale", a_scale, [(a_scale.shape[0], blocks)], UE8M0_DTYPES, device, alignment=SCALE_WORD)
    require_tensor("b_scale", call.b_scale, [(groups, padded_n, blocks)], UE8M0_DTYPES, device)
    if out_dtype is None:
        out_dtype = out.dtype if isinstance(out, torch.Tensor) else torch.bfloat16
    out_dtype = require_output_dtype("out_dtype", out_dtype)
    if out is not None:
        require_tensor("out", out, [(cum_m, n)], [out_dtype], device)
    if call.tactic is not None and call.tactic not in (allowed := [row.index for row in GEMM_INSTANCES]):
        raise ValueError(f"tactic is {call.tactic}; it must be one of {allowed}")
    require_apart(call, {"out": ()})
    return out_dtype


def check_group_ends(m_indptr: torch.Tensor, cum_m: int) -> None:
    """Raise ``ValueError`` unless ``m_indptr`` ascends from 0 to ``cum_m``; reads the values, so it synchronizes."""
    ends = m_indptr.tolist()
    if ends[0] != 0 or ends[-1] != cum_m:
        raise ValueError(f"m_indptr runs from {ends[0]} to {ends[-1]}; it must run from 0 to {cum_m}, the rows of a")
    for group, (first, last) in enumerate(itertools.pairwise(ends)):
        if last < first:
            raise ValueError(f"m_indptr[{group + 1}] is {last}, below m_indptr[{group}] = {first}; it must not descend")


def planned_tactic(backend: Backend, call: GroupGemmCall) -> int:
    """The planner's choice."""
    from ..fused_moe.sm12x_planner import plan_group_gemm

    rows, groups = call.a.shape[0], call.b.shape[0]
    return plan_group_gemm(rows, groups, backend.device_class)


def launch(backend: Backend, call: GroupGemmCall, tactic: int) -> None:
    """Run a valid call of at least one row that has its output."""
    module, out = backend.module(gen_group_gemm_module), call.out
    assert out is not None
    size = workspace_size(backend, module, "sm12x_group_gemm_workspace_size")
    workspace = backend.empty(size)
    backend.call(
        module.sm12x_group_gemm_run,
        out,
        call.a,
        call.a_scale.view(torch.uint8),
        call.b,
        call.b_scale.view(torch.uint8),
        call.m_indptr,
        workspace,
        tactic,
        backend.pdl(None),
        writes=(out, workspace),
    )


def group_gemm_cpu(call: GroupGemmCall) -> None:
    """Write the result of a valid call on CPU tensors: float32 products of exact values, float32 sums."""
    n, k = call.b.shape[1], 2 * call.b.shape[2]
    blocks = k // BLOCK_SIZE
    assert call.out is not None
    for group, (first, last) in enumerate(itertools.pairwise(call.m_indptr.tolist())):
        rows = last - first
        if rows == 0:
            continue
        offset = scale_rows(first, group)
        scales = unswizzle_128x4(call.a_scale[offset : offset + padded_scales(rows, blocks)[0]], rows, blocks)
        x = dequantize_mxfp8_linear(call.a[first:last], scales)
        w = dequantize_mxfp4_linear(call.b[group], unswizzle_128x4(call.b_scale[group], n, blocks))
        call.out[first:last] = x @ w.T


def _compute(call: GroupGemmCall, out_dtype: torch.dtype) -> None:
    """Compute a valid call that has its output."""
    device, rows = call.a.device, call.a.shape[0]
    if checks_values(device):
        check_group_ends(call.m_indptr, rows)
    if rows == 0:
        return
    backend = kernels(device)
    if backend is None:
        with plain_torch(device):
            group_gemm_cpu(call)
        return
    tactic = call.tactic
    if tactic is None:
        tactic = planned_tactic(backend, call)
        if backend.is_cuda and not tune.is_idle():
            runner = SM12xGroupGemmRunner(backend, call.b.shape[0], out_dtype)
            name = tune.tuned(OPERATOR, runner, MOST_TOKENS, [call.a, call.b])
            tactic = tactic if name is None else index_of(name)
    launch(backend, call, tactic)


def _new_output(call: GroupGemmCall) -> torch.Tensor:
    shape, dtype = (call.a.shape[0], call.b.shape[1]), call.out_dtype or torch.bfloat16
    return torch.empty(shape, dtype=dtype, device=call.a.device)


group_gemm = OutputOperator("sm12x_group_gemm_mxfp4", GroupGemmCall, validate, _compute, _new_output, ("out",))


class SM12xGroupGemmRunner(tune.Runner):
    """Times the grouped GEMM with each instance; ``inputs`` are ``a`` and ``b``, rows are split evenly over the
    groups."""

    def __init__(self, backend: Backend, num_groups: int, out_dtype: torch.dtype) -> None:
        super().__init__(backend)
        self.num_groups = num_groups
        self.out_dtype = out_dtype

    def key(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """Types and number of groups."""
        return str(inputs[0].dtype), str(self.out_dtype), self.num_groups

    def names(self, tokens: int) -> list[str]:
        """Names of the instances."""
        return [row.name for row in GEMM_INSTANCES]

    def make_profile(self, inputs: list[torch.Tensor]) -> GroupGemmCall:
        """A call of as many rows."""
        a, b = inputs
        (cum_m, k), n, device = a.shape, b.shape[1], a.device
        padded_n, blocks = padded_scales(n, k // BLOCK_SIZE)
        steps = torch.arange(self.num_groups + 1, device=device)
        return GroupGemmCall(
            out=torch.empty((cum_m, n), dtype=self.out_dtype, device=device),
            a=a,
            b=b,
            a_scale=tune.unit_scales(scale_rows(cum_m, self.num_groups), blocks, device=device),
            b_scale=tune.unit_scales(self.num_groups, padded_n, blocks, device=device),
            m_indptr=(steps * cum_m // self.num_groups).to(torch.int32),
            out_dtype=self.out_dtype,
            tiles=[],
            swap_ab=True,
        )

    def run(self, inputs: list[torch.Tensor], tactic: str | None) -> torch.Tensor:
        """The GEMM once."""
        a, b = inputs
        call = self.profile(inputs)._replace(a=a, b=b)
        launch(self.backend, call, planned_tactic(self.backend, call) if tactic is None else index_of(tactic))
        out: torch.Tensor = call.out
        return out
