# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts' router with the RMSNorm before it: two launches where vLLM's layers take four."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..api_logging import flashinfer_api
from ..jit.sm12x.modules import gen_router_module
from ..sm12x.backend import kernels, plain_torch
from ..sm12x.checks import (
    ELEMENT,
    is_traced,
    require_computing_device,
    require_float,
    require_int,
    require_output_dtype,
    require_rank,
    require_switches,
    require_tensor,
)
from ..sm12x.devices import require_served
from ..sm12x.operator import define
from .sm12x_validation import MAX_ROUTED_EXPERTS, MAX_TOP_K

MAX_K = 16384  # of router.cuh: a row, its residual and the norm's weights in shared memory
K_STEP = 8  # kRouterVector
LOGITS_DTYPES = (torch.float32, torch.bfloat16)
LARGEST_EPS = 3.4e38  # the kernels hold it as float32


class Routed(NamedTuple):
    """The results of :func:`router_top_k`."""

    topk_weights: torch.Tensor
    """float32 ``[m, top_k]``: softmax over the chosen logits."""
    topk_ids: torch.Tensor
    """int32 ``[m, top_k]``: experts by falling logit, of equal ones the first; -1 of padding."""
    logits: torch.Tensor
    """float32 ``[m, num_experts]``."""
    hidden_states: torch.Tensor
    """``[m, k]``: what the experts take; the argument itself where nothing is added or normed."""
    residual: torch.Tensor | None
    """``[m, k]``: ``hidden_states + residual`` in bfloat16; None without ``residual``."""


@flashinfer_api
def router_top_k(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    is_padding: torch.Tensor | None = None,
    logits_dtype: torch.dtype = torch.float32,
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
) -> Routed:
    """Choose each token's experts with a bfloat16 router, after a residual addition and an RMSNorm.

    ``s = hidden_states + residual``; ``h = s / sqrt(mean(s^2) + eps) * norm_weight``; ``logits = h @ weight.T + bias``;
    the ``top_k`` largest, and the softmax over them, as gpt-oss routes. ``s`` and ``h`` are rounded to bfloat16, sums
    are float32, and logits stay float32 unless ``logits_dtype`` says otherwise. Made for the few tokens of a decode
    step: each pass over the weights serves up to eight tokens, fewer if k is long.

    On SM12x (and, with ``FLASHINFER_SM12X_MOE=1``, on compute capability 9.0) these are this fork's kernels; CPU
    tensors are computed on the CPU. Results are the same on every run.

    Parameters
    ----------
    hidden_states : torch.Tensor
        ``[m, k]`` bfloat16; ``k`` a multiple of 8, at most 16,384.
    weight : torch.Tensor
        ``[num_experts, k]`` bfloat16; at most 512 experts.
    top_k : int
        Experts of a token, at most 32.
    bias : torch.Tensor, optional
        ``[num_experts]`` bfloat16.
    residual : torch.Tensor, optional
        ``[m, k]`` bfloat16, added first.
    norm_weight : torch.Tensor, optional
        ``[k]`` bfloat16; None: no norm.
    eps : float
        The norm's epsilon; finite, not negative.
    is_padding : torch.Tensor, optional
        ``[m]`` bool: padding rows, which go to no expert.
    logits_dtype : torch.dtype
        bfloat16 rounds the logits before they are compared, as a router does that is a separate bfloat16 layer.
    constant_weights : bool
        True: no earlier work on the call's stream writes ``weight``, so the kernel may read it while that work still
        runs.
    enable_pdl : bool, optional
        Launch as programmatic dependents; by default where the device can.

    Returns
    -------
    Routed
        New tensors, but for ``hidden_states`` where it is the argument.

    Raises
    ------
    TypeError, ValueError
        Before any launch, naming the argument, what it was and what it may be.
    NotImplementedError
        The GPU has no kernels of this family.
    """
    call = RouterCall(
        hidden_states=hidden_states,
        weight=weight,
        bias=bias,
        residual=residual,
        norm_weight=norm_weight,
        is_padding=is_padding,
        top_k=top_k,
        eps=eps,
        logits_dtype=logits_dtype,
        constant_weights=constant_weights,
        enable_pdl=enable_pdl,
    )
    return Routed(*_called(call))


class RouterLogits(NamedTuple):
    """The results of :func:`router_logits`; its fields are those of :class:`Routed`."""

    logits: torch.Tensor
    hidden_states: torch.Tensor
    residual: torch.Tensor | None


@flashinfer_api
def router_logits(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-5,
    logits_dtype: torch.dtype = torch.float32,
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
) -> RouterLogits:
    """:func:`router_top_k` without its top-k, which whoever takes the logits does (``fused_moe.core.moe_step``): one
    launch.

    Parameters, and what is raised, are as there.

    Returns
    -------
    RouterLogits
        New tensors, but for ``hidden_states`` where it is the argument.
    """
    call = RouterCall(
        hidden_states=hidden_states,
        weight=weight,
        bias=bias,
        residual=residual,
        norm_weight=norm_weight,
        is_padding=None,
        top_k=0,
        eps=eps,
        logits_dtype=logits_dtype,
        constant_weights=constant_weights,
        enable_pdl=enable_pdl,
        chooses=False,
    )
    return RouterLogits(*_called(call)[2:])


def _called(call: RouterCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Weights, ids, logits, what the experts take, and the sum if there is one."""
    weights, ids, logits, normed, total = _operator(call) if is_traced(call) else _run(call)
    if call.norm_weight is None:
        normed = call.hidden_states if call.residual is None else total
    return weights, ids, logits, normed, None if call.residual is None else total


class RouterCall(NamedTuple):
    """The arguments of one call of :func:`router_top_k`."""

    hidden_states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    norm_weight: torch.Tensor | None
    is_padding: torch.Tensor | None
    top_k: int
    eps: float
    logits_dtype: torch.dtype
    constant_weights: bool
    enable_pdl: bool | None
    chooses: bool = True  # top_k experts


def _validate(call: RouterCall) -> RouterCall:
    """Check a call's metadata and addresses; the call with its numbers as Python's."""
    require_rank("hidden_states", call.hidden_states, 2)
    require_rank("weight", call.weight, 2)
    require_computing_device("hidden_states", call.hidden_states)
    device, bf16 = call.hidden_states.device, [torch.bfloat16]
    require_served("router_top_k", device)
    experts, k = call.weight.shape
    require_int("k", k, K_STEP, MAX_K, f"a multiple of {K_STEP}")
    if k % K_STEP:
        raise ValueError(f"k is {k}; it must be a multiple of {K_STEP}")
    require_int("num_experts", experts, 1, MAX_ROUTED_EXPERTS)
    top_k = 0
    if call.chooses:
        top_k = require_int("top_k", call.top_k, 1, min(MAX_TOP_K, experts), "no more than there are experts")
    require_switches(call, "constant_weights")
    eps = require_float("eps", call.eps, 0.0, LARGEST_EPS)
    rows = (call.hidden_states.shape[0], k)
    require_tensor("hidden_states", call.hidden_states, [rows], bf16, device, "k as weight's")
    require_tensor("weight", call.weight, [(experts, k)], bf16, device)
    for name, value, shape, alignment in (
        ("bias", call.bias, (experts,), ELEMENT),
        ("residual", call.residual, rows, 16),
        ("norm_weight", call.norm_weight, (k,), 16),
    ):
        if value is not None:
            require_tensor(name, value, [shape], bf16, device, alignment=alignment)
    if call.is_padding is not None:
        require_tensor("is_padding", call.is_padding, [rows[:1]], [torch.bool], device, alignment=ELEMENT)
    require_output_dtype("logits_dtype", call.logits_dtype, LOGITS_DTYPES)
    return call._replace(top_k=top_k, eps=eps)


def _outputs(call: RouterCall) -> list[torch.Tensor]:
    """Memory for weights, ids, logits, normed rows and sums; the last two are empty if there is no norm or no
    residual."""
    (m, k), experts = call.hidden_states.shape, call.weight.shape[0]
    shapes = (
        ((m, call.top_k), torch.float32),
        ((m, call.top_k), torch.int32),
        ((m, experts), torch.float32),
        ((0 if call.norm_weight is None else m, k), torch.bfloat16),
        ((0 if call.residual is None else m, k), torch.bfloat16),
    )
    return [torch.empty(shape, dtype=dtype, device=call.hidden_states.device) for shape, dtype in shapes]


def _run(call: RouterCall) -> list[torch.Tensor]:
    """Outputs as :func:`_outputs` makes them."""
    call = _validate(call)
    outputs = _outputs(call)
    if call.hidden_states.shape[0] == 0:
        return outputs
    backend = kernels(call.hidden_states.device)
    if backend is None:
        with plain_torch(call.hidden_states.device):
            _compute_on_cpu(outputs, call)
        return outputs
    topk_weights, topk_ids, logits, normed, total = outputs
    backend.call(
        backend.module(gen_router_module).sm12x_router_run,
        topk_weights,
        topk_ids,
        logits,
        None if call.norm_weight is None else normed,
        None if call.residual is None else total,
        call.hidden_states,
        call.weight,
        call.bias,
        call.residual,
        call.norm_weight,
        call.is_padding,
        call.eps,
        call.logits_dtype is torch.bfloat16,
        call.constant_weights,
        backend.pdl(call.enable_pdl),
        writes=[tensor for tensor in outputs if tensor.numel()],
    )
    return outputs


_operator = define("sm12x_router_top_k", RouterCall, _run, _outputs)


def _compute_on_cpu(outputs: list[torch.Tensor], call: RouterCall) -> None:
    topk_weights, topk_ids, logits, normed, total = outputs
    rows = call.hidden_states.float()
    if call.residual is not None:
        total.copy_(rows + call.residual.float())
        rows = total.float()
    if call.norm_weight is not None:
        normed.copy_(rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + call.eps) * call.norm_weight.float())
        rows = normed.float()
    torch.mm(rows, call.weight.float().T, out=logits)
    if call.bias is not None:
        logits += call.bias.float()
    if call.logits_dtype is torch.bfloat16:
        logits.copy_(logits.bfloat16())
    if call.top_k:
        weights, ids = choose_experts(logits, call.top_k, call.is_padding)
        topk_weights.copy_(weights)
        topk_ids.copy_(ids)


def choose_experts(
    logits: torch.Tensor, top_k: int, is_padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights, float32, and ids, int32, ``[m, top_k]``, as :func:`router_top_k` gives them for these logits."""
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    chosen = logits.gather(1, order)
    shares = torch.where(chosen == chosen[:, :1], 1.0, (chosen - chosen[:, :1]).exp())  # of infinities too
    ids = order.int()
    if is_padding is not None:
        ids = ids.masked_fill(is_padding[:, None], -1)
    return shares / shares.sum(1, keepdim=True), ids
