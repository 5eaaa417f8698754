# SPDX-License-Identifier: Apache-2.0
"""``router_top_k`` against float64, step by step: each of its results is checked with the ones before it as inputs."""

from __future__ import annotations

from typing import Any

import torch

from .error_bounds import FLOAT32_ROUNDOFF, TENSOR_CORE, Accumulation, check_within_bound, dot_error
from .mxfp_formats import Operand


def make_router_inputs(
    m: int, k: int, experts: int, top_k: int, seed: int, adds: bool = False, norms: bool = False, bias: bool = False
) -> dict[str, Any]:
    """Random arguments of ``router_top_k``, CPU tensors."""
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
    return arguments


def check_routed(routed: Any, arguments: dict[str, Any], accumulation: Accumulation = TENSOR_CORE) -> None:
    """Assert that ``routed`` is what its arithmetic may give for ``arguments``; ``accumulation`` is that of the logits.

    Raises
    ------
    AssertionError
        It is not; the message says which result.
    """
    unit, eps = FLOAT32_ROUNDOFF, arguments.get("eps", 1e-5)
    rows = arguments["hidden_states"].double()
    k = rows.shape[1]
    if (residual := arguments.get("residual")) is not None:
        total = rows + residual.double()
        check_within_bound(routed.residual, total, unit * total.abs(), "hidden_states + residual")
        rows = routed.residual.double()
    if (scale := arguments.get("norm_weight")) is not None:
        normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * scale.double()
        # Of the mean (k + 2) roundings, halved by the root; rsqrt's two units in the last place; two products.
        check_within_bound(routed.hidden_states, normed, (k / 2 + 9) * unit * normed.abs(), "the norm")
        rows = routed.hidden_states.double()
    weight = arguments["weight"].double()
    logits = rows @ weight.T
    operands = Operand.of_bf16(rows), Operand.of_bf16(weight)
    bound = dot_error(*operands, accumulation, along_k=False)  # warps take turns along K
    if (bias := arguments.get("bias")) is not None:
        logits = logits + bias.double()
        bound = bound + unit * (logits.abs() + bound)
    check_within_bound(routed.logits, logits, bound, "logits")

    top_k = arguments["top_k"]
    order = routed.logits.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    assert torch.equal(routed.topk_ids.long(), order), "ids are not those of the largest logits"
    chosen = routed.logits.gather(1, order).double()
    distance = chosen[:, :1] - chosen
    shares = chosen.softmax(1)
    # Of a term: its argument's rounding, expf's two units in the last place; of their sum: a rounding each; the quotient.
    bound = (2 * distance.amax(1, keepdim=True) + 4 + 4 + top_k + 1) * unit * shares + torch.finfo(torch.float32).tiny
    check_within_bound(routed.topk_weights, shares, bound, "weights")
