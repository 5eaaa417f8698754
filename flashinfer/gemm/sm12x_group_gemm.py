# SPDX-License-Identifier: Apache-2.0
"""The grouped MXFP8 x MXFP4 GEMM on SM12x's kernels and on the CPU: checks, plans, launch, autotuning."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from typing import Any

import torch

from .. import sm12x_probes
from ..autotuner import DynamicTensorSpec, TunableRunner, TuningConfig
from ..jit.sm12x.instances import GEMM_INSTANCES, MAX_EXPERTS, index_of
from ..quantization.mx_cpu import (
    BLOCK_SIZE,
    dequantize_mxfp4_linear,
    dequantize_mxfp8_linear,
    unswizzle_128x4,
)
from ..sm12x_arguments import (
    INT32_MAX,
    SCALE_WORD,
    describe,
    is_dense,
    require_alignment,
    require_int,
    require_k_alignment,
    require_output_dtype,
    require_tensor,
    require_tensor_type,
    round_up,
)
from ..sm12x_probes import NOTHING_TUNED, tuner_state
from ..testing import virtual_device, virtual_operators
from ..utils import device_support_pdl

OPERATOR = "flashinfer::sm12x_group_gemm_mxfp4"
ROW_ALIGNMENT = 8  # of n: a store of 16 bytes
_MAX_PLANS = 4096
_UPSTREAM_TILES = (
    ("mma_sm", (1,)),
    ("tile_m", (128,)),
    ("tile_n", (32, 64, 128)),
    ("tile_k", (128,)),
    ("swap_ab", (True, False)),
)


@dataclasses.dataclass(frozen=True)
class GroupGemmProblem:
    """Sizes of a validated call."""

    cum_m: int
    num_groups: int
    n: int
    k: int
    out_dtype: torch.dtype


@dataclasses.dataclass(eq=False)
class Plan:
    """What is known of a call once its shapes are."""

    problem: GroupGemmProblem
    workspace_bytes: int = 0
    tactic: int = -1
    tuned: tuple[Any, int] | None = None


_plans: dict[Any, Plan] = {}


@functools.cache
def _dispatch() -> Any:
    # fused_moe imports gemm while the package is being imported, so this import waits for the first call.
    from ..fused_moe import sm12x_dispatch

    return sm12x_dispatch


def serves(device: torch.device) -> bool:
    """Whether this module computes calls on ``device``; upstream does otherwise."""
    return bool(_dispatch().serves(device))


def scale_rows(cum_m: int, num_groups: int) -> int:
    """Rows of ``a_scale`` that hold every split of ``cum_m`` rows into ``num_groups`` groups."""
    return (cum_m + 127 * num_groups) // 128 * 128


def validate(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    m_indptr: Any,
    tiles: tuple[Any, ...],
    out: Any,
    out_dtype: torch.dtype | None,
) -> GroupGemmProblem:
    """Check the metadata of a call and return its sizes; looks at no element.

    Raises
    ------
    TypeError, ValueError
        Naming the first argument that does not fit, what it was and what it may be.
    """
    for (name, allowed), value in zip(_UPSTREAM_TILES, tiles, strict=True):
        try:
            fits = operator.index(value) in allowed
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"{name} is {describe(value)}; it must be {' or '.join(map(str, allowed))}")
    for name, tensor, rank in (
        ("a", a, 2),
        ("b", b, 3),
        ("m_indptr", m_indptr, 1),
        ("a_scale", a_scale, 2),
    ):
        require_tensor_type(name, tensor, "a tensor")
        if tensor.ndim != rank:
            raise ValueError(f"{name} is {describe(tensor)}; it must be {rank}-D")
    device = a.device
    groups, n, half = b.shape
    cum_m, k = a.shape[0], 2 * half
    if not 1 <= groups <= MAX_EXPERTS:
        raise ValueError(f"b is {describe(b)}; it must hold 1 to {MAX_EXPERTS} groups")
    require_k_alignment("k (b.shape[2] * 2)", k)
    # The last group's scales start less than 128 rows behind each group's end.
    require_int("cum_m (a.shape[0])", cum_m, 0, INT32_MAX - 127 * groups, "since rows of scales count in int32")
    if n <= 0 or n % ROW_ALIGNMENT or n > INT32_MAX:
        raise ValueError(f"n (b.shape[1]) is {n}; it must be a positive multiple of {ROW_ALIGNMENT} below 2**31")
    require_tensor("a", a, [(cum_m, k)], [torch.float8_e4m3fn, torch.float8_e5m2], device)
    require_tensor("b", b, [(groups, n, half)], [torch.uint8], device)
    require_tensor("m_indptr", m_indptr, [(groups + 1,)], [torch.int32], device)
    blocks, needed = round_up(k // BLOCK_SIZE, 4), scale_rows(cum_m, groups)
    if a_scale.shape[0] < needed:
        raise ValueError(
            f"a_scale is {describe(a_scale)}; it must have at least (cum_m + 127 * groups) // 128 * 128 = {needed} rows"
        )
    require_tensor("a_scale", a_scale, [(a_scale.shape[0], blocks)], [torch.uint8], device)
    require_tensor("b_scale", b_scale, [(groups, round_up(n, 128), blocks)], [torch.uint8], device)
    if out_dtype is None:
        out_dtype = out.dtype if isinstance(out, torch.Tensor) else torch.bfloat16
    out_dtype = require_output_dtype("out_dtype", out_dtype)
    if out is not None:
        require_tensor("out", out, [(cum_m, n)], [out_dtype], device)
    return GroupGemmProblem(cum_m, groups, n, k, out_dtype)


def check_group_ends(m_indptr: torch.Tensor, cum_m: int) -> None:
    """Raise ``ValueError`` unless ``m_indptr`` ascends from 0 to ``cum_m``; reads the values, so it synchronizes."""
    ends = m_indptr.tolist()
    if ends[0] != 0 or ends[-1] != cum_m:
        raise ValueError(f"m_indptr runs from {ends[0]} to {ends[-1]}; it must run from 0 to {cum_m}, the rows of a")
    for group, (first, last) in enumerate(itertools.pairwise(ends)):
        if last < first:
            raise ValueError(f"m_indptr[{group + 1}] is {last}, below m_indptr[{group}] = {first}; it must not descend")


def _make_plan(problem: GroupGemmProblem, device: torch.device) -> Plan:
    if device.type == "cpu" or problem.cum_m == 0:
        return Plan(problem)
    from ..fused_moe.sm12x_planner import plan_group_gemm

    block_scaled = _dispatch().has_block_scaled_mma(device.index)
    tactic = plan_group_gemm(problem.cum_m, problem.num_groups, block_scaled)
    with torch.cuda.device(device):
        size = _dispatch().group_gemm_module().sm12x_group_gemm_workspace_size()
    return Plan(problem, int(size), int(tactic))


def launch(
    plan: Plan,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    tactic: int,
) -> None:
    """Call the kernel module on the device of ``a``."""
    device = a.device
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            launch(plan, out, a, b, a_scale, b_scale, m_indptr, tactic)
        return
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    _dispatch().group_gemm_module().sm12x_group_gemm_run(
        out,
        a,
        a_scale,
        b,
        b_scale,
        m_indptr,
        workspace,
        tactic,
        device_support_pdl(device),
    )


def group_gemm_cpu(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
) -> None:
    """Write the result of validated CPU tensors into ``out``: float32 products of exact values, float32 sums."""
    n, k = b.shape[1], 2 * b.shape[2]
    blocks = k // BLOCK_SIZE
    ends = m_indptr.tolist()
    for group, (first, last) in enumerate(itertools.pairwise(ends)):
        rows = last - first
        if rows == 0:
            continue
        offset = scale_rows(first, group)
        padded = -(-rows // 128) * 128
        scales = unswizzle_128x4(a_scale[offset : offset + padded], rows, blocks)
        x = dequantize_mxfp8_linear(a[first:last], scales)
        w = dequantize_mxfp4_linear(b[group], unswizzle_128x4(b_scale[group], n, blocks))
        out[first:last] = x @ w.T


def group_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    tiles: tuple[Any, ...],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    tactic: int | None = None,
) -> torch.Tensor:
    """Validate, plan, launch; ``tactic`` forces an instance of the table, as the tests do."""
    if torch.compiler.is_compiling():
        if out is None:
            out = torch.empty(
                (a.shape[0], b.shape[1]),
                dtype=out_dtype or torch.bfloat16,
                device=a.device,
            )
        torch.ops.flashinfer.sm12x_group_gemm_mxfp4(
            out, a, b, a_scale, b_scale, m_indptr, list(tiles[:4]), tiles[4], tactic
        )
        return out
    tensors = (a, b, a_scale, b_scale, m_indptr, out)
    key: Any
    try:
        signature = tuple([None if t is None else (t.shape, t.dtype, t.device, is_dense(t)) for t in tensors])
        key = (out_dtype, tiles, signature)
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # something is no tensor: validation says what
        key = plan = None
    if plan is None:
        problem = validate(a, b, a_scale, b_scale, m_indptr, tiles, out, out_dtype)
        plan = _make_plan(problem, a.device)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        if key is not None:
            _plans[key] = plan
    problem = plan.problem
    on_cpu = a.device.type == "cpu"
    if on_cpu or (_dispatch().checks_values() and not torch.cuda.is_current_stream_capturing()):
        check_group_ends(m_indptr, problem.cum_m)
    allowed = [row.index for row in GEMM_INSTANCES]
    if tactic is not None and tactic not in allowed:
        raise ValueError(f"tactic is {tactic}; it must be one of {allowed}")
    if out is None:
        out = torch.empty((problem.cum_m, problem.n), dtype=problem.out_dtype, device=a.device)
    if problem.cum_m == 0:
        return out
    virtual = virtual_device.active() if on_cpu else None
    if on_cpu and virtual is None:
        group_gemm_cpu(out, a, b, a_scale, b_scale, m_indptr)
        return out
    require_alignment({"a": a, "b": b, "b_scale": b_scale, "out": out})
    require_alignment({"a_scale": a_scale, "m_indptr": m_indptr}, SCALE_WORD)
    if virtual is not None:
        virtual_operators.run_group_gemm(virtual, problem, out, a, b, a_scale, b_scale, m_indptr, tactic)
        return out
    if tactic is None:
        tactic = plan.tactic
        tuner = sm12x_probes.TUNER_HOLDER._instance
        if tuner is not None:
            tactic = _tuned_tactic(tuner, plan, out, a, b, a_scale, b_scale, m_indptr)
    launch(plan, out, a, b, a_scale, b_scale, m_indptr, tactic)
    return out


@torch.library.custom_op(OPERATOR, mutates_args=("out",))
def _operator(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    tile: list[int],
    swap_ab: bool,
    tactic: int | None,
) -> None:
    tiles = (*tile, swap_ab)
    group_gemm(a, b, a_scale, b_scale, m_indptr, tiles, out, out.dtype, tactic)


@_operator.register_fake
def _operator_fake(*_arguments: Any, **_named: Any) -> None:
    """Nothing is returned: ``out`` is an argument, so its shape is known to whoever traces."""


class SM12xGroupGemmRunner(TunableRunner):
    """Times the grouped GEMM with each instance; rows are split evenly over the groups."""

    def __init__(self, num_groups: int, out_dtype: torch.dtype) -> None:
        self.num_groups = num_groups
        self.out_dtype = out_dtype
        self._profile_cache: dict[int, tuple[Plan, tuple[torch.Tensor, ...]]] = {}

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        """What besides the shapes tells saved tactics apart."""
        name = _dispatch().gpu_name(inputs[0].device)
        return (str(inputs[0].dtype), str(self.out_dtype), self.num_groups, name)

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[str]:
        """Names of the instances."""
        return [row.name for row in GEMM_INSTANCES]

    def validate_tactic(self, inputs: list[torch.Tensor], tactic: Any) -> bool:
        """Whether a tactic from a cache file is an instance of the grouped GEMM."""
        return tactic == -1 or tactic in self.get_valid_tactics(inputs, None)

    def forward(
        self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Run the GEMM once on ``inputs``, which are ``a`` and ``b``."""
        a, b = inputs
        cum_m, device = a.shape[0], a.device
        held = self._profile_cache.get(cum_m)
        if held is None:
            n, k = b.shape[1], a.shape[1]
            plan = _make_plan(GroupGemmProblem(cum_m, self.num_groups, n, k, self.out_dtype), device)
            blocks = -(-k // 128) * 4
            steps = torch.arange(self.num_groups + 1, device=device)
            ends = (steps * cum_m // self.num_groups).to(torch.int32)
            unit = functools.partial(torch.full, fill_value=0x7F, dtype=torch.uint8, device=device)
            out = torch.empty((cum_m, n), dtype=self.out_dtype, device=device)
            held = self._profile_cache[cum_m] = (
                plan,
                (
                    out,
                    unit((scale_rows(cum_m, self.num_groups), blocks)),
                    unit((self.num_groups, -(-n // 128) * 128, blocks)),
                    ends,
                ),
            )
        plan, (out, a_scale, b_scale, ends) = held
        launch(
            plan,
            out,
            a,
            b,
            a_scale,
            b_scale,
            ends,
            plan.tactic if tactic == -1 else index_of(tactic),
        )
        return out


@functools.cache
def _tuning_config() -> TuningConfig:
    from ..fused_moe.utils import (
        get_hybrid_num_tokens_buckets,
        make_hybrid_bucket_mapper,
    )

    largest = 8192
    return TuningConfig(
        dynamic_tensor_specs=(
            DynamicTensorSpec(
                (0,),
                (0,),
                get_hybrid_num_tokens_buckets(largest),
                make_hybrid_bucket_mapper(largest),
            ),
        )
    )


def _tuned_tactic(
    tuner: Any,
    plan: Plan,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
) -> int:
    state = tuner_state(tuner)
    if state == NOTHING_TUNED:
        return plan.tactic
    if state is not None and plan.tuned is not None and plan.tuned[0] == state:
        return plan.tuned[1]
    from ..fused_moe.sm12x_autotuner import refuse_numbers

    refuse_numbers(tuner, OPERATOR)
    runner = SM12xGroupGemmRunner(plan.problem.num_groups, plan.problem.out_dtype)
    _, tactic = tuner.choose_one(OPERATOR, [runner], _tuning_config(), [a, b])
    tactic = plan.tactic if tactic == -1 else index_of(tactic)
    if state is not None:
        plan.tuned = (state, tactic)
    return tactic
