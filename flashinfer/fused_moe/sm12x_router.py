# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts' router with the RMSNorm in front of it: two launches where vLLM's layers take four."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..api_logging import flashinfer_api
from ..sm12x_arguments import (
    describe,
    require_alignment,
    require_computing_device,
    require_int,
    require_tensor,
    require_tensor_type,
)
from ..testing import virtual_device
from ..utils import device_support_pdl
from . import sm12x_dispatch

MAX_EXPERTS = 512
MAX_TOP_K = 32
MAX_K = 16 * 1024  # of router.cuh: a row, its residual and the norm's weights in shared memory
K_STEP = 8


class Routed(NamedTuple):
    """What :func:`router_top_k` gives."""

    topk_weights: torch.Tensor
    """float32 ``[m, top_k]``: softmax over the chosen logits."""
    topk_ids: torch.Tensor
    """int32 ``[m, top_k]``: experts by falling logit, of equal ones the first."""
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
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
) -> Routed:
    """Which experts a token goes to, by a bfloat16 router behind an addition and an RMSNorm.

    ``s = hidden_states + residual``; ``h = s / sqrt(mean(s^2) + eps) * norm_weight``; ``logits = h @ weight.T + bias``; the
    ``top_k`` largest, and the softmax over them, as gpt-oss routes. ``s`` and ``h`` are rounded to bfloat16, sums are
    float32, and logits stay so. Made for the few tokens of a decode step: weights are read once for up to eight
    tokens, fewer where k is long.

    On SM12x (and, with ``FLASHINFER_SM12X_MOE=1``, on compute capability 9.0) these are this fork's kernels; CPU tensors
    are computed on the CPU. Results are the same on every run.

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
        ``[k]`` bfloat16; without it nothing is normed.
    eps : float
        Of the norm.
    constant_weights : bool
        Nothing in front of this call on its stream writes ``weight``, so that it may be read while that still runs.
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
    run = torch.ops.flashinfer.sm12x_router_top_k if torch.compiler.is_compiling() else _run
    topk_weights, topk_ids, logits, normed, total = run(
        hidden_states, weight, top_k, bias, residual, norm_weight, eps, constant_weights, enable_pdl
    )
    if norm_weight is None:
        normed = hidden_states if residual is None else total
    return Routed(topk_weights, topk_ids, logits, normed, None if residual is None else total)


def _validate(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> int:
    """Check a call's metadata; ``top_k`` as an int."""
    for name, tensor in (("hidden_states", hidden_states), ("weight", weight)):
        require_tensor_type(name, tensor)
        if tensor.ndim != 2:
            raise ValueError(f"{name} is {describe(tensor)}; it must be 2-D")
    require_computing_device("hidden_states", hidden_states)
    device, bf16 = hidden_states.device, [torch.bfloat16]
    if not sm12x_dispatch.serves(device):
        raise NotImplementedError(
            f"router_top_k has no kernels for {torch.cuda.get_device_name(device)}: they are for compute capability 12.x "
            "(and 9.0 with FLASHINFER_SM12X_MOE=1)"
        )
    experts, k = weight.shape
    require_int("k", k, K_STEP, MAX_K, f"a multiple of {K_STEP}")
    if k % K_STEP:
        raise ValueError(f"k is {k}; it must be a multiple of {K_STEP}")
    require_int("num_experts", experts, 1, MAX_EXPERTS)
    top_k = require_int("top_k", top_k, 1, min(MAX_TOP_K, experts), "no more than there are experts")
    rows = (hidden_states.shape[0], k)
    require_tensor("hidden_states", hidden_states, [rows], bf16, device, "k as weight's")
    require_tensor("weight", weight, [(experts, k)], bf16, device)
    for name, value, shape in (
        ("bias", bias, (experts,)),
        ("residual", residual, rows),
        ("norm_weight", norm_weight, (k,)),
    ):
        if value is not None:
            require_tensor(name, value, [shape], bf16, device)
    return top_k


def _run(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    constant_weights: bool,
    enable_pdl: bool | None,
) -> list[torch.Tensor]:
    """Outputs as :func:`_outputs` makes them."""
    top_k = _validate(hidden_states, weight, top_k, bias, residual, norm_weight)
    outputs = _outputs(hidden_states, weight, top_k, residual, norm_weight)
    device = hidden_states.device
    virtual = virtual_device.active() if device.type == "cpu" else None
    if device.type == "cpu" and virtual is None:
        _compute_on_cpu(outputs, hidden_states, weight, bias, residual, norm_weight, eps)
        return outputs
    require_alignment(
        {"hidden_states": hidden_states, "weight": weight, "residual": residual, "norm_weight": norm_weight}
    )
    topk_weights, topk_ids, logits, normed, total = outputs
    pdl = enable_pdl is not False if virtual is not None or enable_pdl is not None else device_support_pdl(device)
    arguments = (
        topk_weights,
        topk_ids,
        logits,
        None if norm_weight is None else normed,
        None if residual is None else total,
        hidden_states,
        weight,
        bias,
        residual,
        norm_weight,
        eps,
        constant_weights,
        pdl,
    )
    if virtual is not None:
        from ..testing import virtual_operators

        virtual_operators.run_router(virtual, arguments, [tensor for tensor in outputs if tensor.numel()])
    elif hidden_states.shape[0]:
        with torch.cuda.device(device):
            sm12x_dispatch.router_module().sm12x_router_run(*arguments)
    return outputs


def _outputs(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Weights, ids, logits, normed rows, sums; the last two empty where there are none."""
    m, k = hidden_states.shape
    return [
        hidden_states.new_empty((m, top_k), dtype=torch.float32),
        hidden_states.new_empty((m, top_k), dtype=torch.int32),
        hidden_states.new_empty((m, weight.shape[0]), dtype=torch.float32),
        hidden_states.new_empty((0 if norm_weight is None else m, k)),
        hidden_states.new_empty((0 if residual is None else m, k)),
    ]


_operator = torch.library.custom_op("flashinfer::sm12x_router_top_k", _run, mutates_args=())


@_operator.register_fake
def _operator_fake(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    _bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    *_: Any,
) -> list[torch.Tensor]:
    return _outputs(hidden_states, weight, top_k, residual, norm_weight)


def _compute_on_cpu(
    outputs: list[torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> None:
    topk_weights, topk_ids, logits, normed, total = outputs
    rows = hidden_states.float()
    if residual is not None:
        total.copy_(rows + residual.float())
        rows = total.float()
    if norm_weight is not None:
        normed.copy_(rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * norm_weight.float())
        rows = normed.float()
    torch.mm(rows, weight.float().T, out=logits)
    if bias is not None:
        logits += bias.float()
    order = logits.argsort(dim=1, descending=True, stable=True)[:, : topk_ids.shape[1]]
    topk_ids.copy_(order)
    chosen = logits.gather(1, order)
    shares = torch.where(chosen == chosen[:, :1], 1.0, (chosen - chosen[:, :1]).exp())  # of infinities too
    topk_weights.copy_(shares / shares.sum(1, keepdim=True))
