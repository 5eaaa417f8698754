# SPDX-License-Identifier: Apache-2.0
"""``router_top_k`` against float64, step by step: each of its results is checked with the ones before it as inputs."""

from __future__ import annotations

from typing import Any

import torch

from .error_bounds import FLOAT32_ROUNDOFF, TENSOR_CORE, Accumulation, check_within_bound, dot_error
from .mxfp_formats import Operand


def make_router_inputs(
    m: int,
    k: int,
    experts: int,
    top_k: int,
    seed: int,
    adds: bool = False,
    norms: bool = False,
    bias: bool = False,
    as_vllm: bool = False,
) -> dict[str, Any]:
    """Random arguments of ``router_top_k``, CPU tensors; ``as_vllm``: some rows are padding, and logits are rounded."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    arguments: dict[str, Any] = {
        "hidden_states": normal(m, k),
        "weight": normal(experts, k, scale=k**-0.5),
        "top_k": top_k,
    }
    if adds:
        arguments["residual"] = normal(m, k, scale=4.0)
    if norms:
        arguments["norm_weight"] = normal(k)
    if bias:
        arguments["bias"] = normal(experts)
    if as_vllm:
        padding = torch.rand(m, generator=generator) < 0.5
        arguments |= {"is_padding": padding, "logits_dtype": torch.bfloat16}
    return arguments


def with_small_rows(arguments: dict[str, Any], eps: float) -> dict[str, Any]:
    """The last rows with mean squares of about ``eps``, and of ever less: to what bfloat16 can just hold."""
    scales = torch.ones(arguments["hidden_states"].shape[0], 1, dtype=torch.float64)
    small = torch.tensor([1.0, 2.0**-3, 2.0**-8, 2.0**-60, 2.0**-120]).double()[:, None] * eps**0.5
    scales[-len(small) :] = small
    rows = {name: arguments[name] for name in ("hidden_states", "residual") if name in arguments}
    return arguments | {name: (row * scales).bfloat16() for name, row in rows.items()} | {"eps": eps}


OPERANDS = ("hidden_states", "residual", "norm_weight", "weight", "bias")


def with_one_element(arguments: dict[str, Any], operand: str, value: float) -> dict[str, Any]:
    """One element of an operand is ``value``: of the last token but one, of expert 3, or of all tokens' norm."""
    changed: torch.Tensor = arguments[operand].clone()
    row = {"weight": 3, "bias": 3, "norm_weight": 5}.get(operand, -2)
    changed[row if changed.ndim == 1 else (row, 5)] = value
    return arguments | {operand: changed}


def check_one_element(before: Any, after: Any, operand: str) -> None:
    """Assert that what :func:`with_one_element` changed is in no other token's results, nor other experts' logits."""
    tokens = torch.arange(len(before.logits)) != len(before.logits) - 2
    if operand in ("weight", "bias"):
        experts = torch.arange(before.logits.shape[1]) != 3
        pairs = [(before.logits[:, experts], after.logits[:, experts]), (before.hidden_states, after.hidden_states)]
    elif operand == "norm_weight":
        columns = torch.arange(before.hidden_states.shape[1]) != 5
        pairs = [(before.hidden_states[:, columns], after.hidden_states[:, columns])]
    else:
        pairs = [(one[tokens], other[tokens]) for one, other in zip(before, after, strict=True) if one is not None]
    assert all(torch.equal(one, other) for one, other in pairs), f"{operand} reached what does not depend on it"


def check_routed(routed: Any, arguments: dict[str, Any], accumulation: Accumulation = TENSOR_CORE) -> None:
    """Assert that ``routed`` is a result that the router's arithmetic may give for ``arguments``.

    ``accumulation``: the way the implementation sums the logits. If a float64 result is not finite, ``routed`` must
    have the same.

    Raises
    ------
    AssertionError
        A result is wrong; the message says which.
    """
    unit, eps = FLOAT32_ROUNDOFF, arguments.get("eps", 1e-5)
    rows = arguments["hidden_states"].double()
    k = rows.shape[1]
    if (residual := arguments.get("residual")) is not None:
        total = rows + residual.double()
        _check(routed.residual, total, unit * total.abs(), "hidden_states + residual")
        rows = routed.residual.double()
    if (scale := arguments.get("norm_weight")) is not None:
        normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * scale.double()
        # The mean has (k + 2) roundings, halved by the root; rsqrt has two units in the last place; then come two
        # products.
        bound = (k / 2 + 9) * unit * normed.abs() + 2.0**-149
        _check(routed.hidden_states, normed, bound, "the norm")
        rows = routed.hidden_states.double()
    weight = arguments["weight"].double()
    logits = rows @ weight.T
    operands = Operand.of_bf16(rows), Operand.of_bf16(weight)
    # Warps take turns along K. Neither MMAs nor a BLAS need keep subnormals.
    bound = dot_error(*operands, accumulation, along_k=False) + k * torch.finfo(torch.float32).tiny
    if (bias := arguments.get("bias")) is not None:
        logits = logits + bias.double()
        bound = bound + unit * (logits.abs() + bound)
    if arguments.get("logits_dtype") is torch.bfloat16:
        bound = bound + 2.0**-8 * (logits.abs() + bound)
        same = routed.logits.bfloat16().float()
        assert torch.equal(same.nan_to_num(7.0), routed.logits.nan_to_num(7.0)), "logits are no bfloat16 numbers"
    _check(routed.logits, logits, bound, "logits")

    top_k = arguments["top_k"]
    order = routed.logits.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    ids = order if (padding := arguments.get("is_padding")) is None else order.masked_fill(padding[:, None], -1)
    assert torch.equal(routed.topk_ids.long(), ids), "ids are not those of the largest logits"
    chosen = routed.logits.gather(1, order).double()
    distance = torch.where(chosen == chosen[:, :1], 0.0, chosen[:, :1] - chosen)  # of infinities too
    shares = (-distance).softmax(1)
    longest = torch.where(distance.isfinite(), distance, 0.0).amax(1, keepdim=True)
    # A term has its argument's rounding and expf's two units in the last place; their sum has a rounding each; then the
    # quotient.
    bound = (2 * longest + 4 + 4 + top_k + 1) * unit * shares + torch.finfo(torch.float32).tiny
    _check(routed.topk_weights, shares, bound, "weights")


def _check(actual: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    check_within_bound(actual, reference, torch.where(reference.isfinite(), bound, 0.0), what)
