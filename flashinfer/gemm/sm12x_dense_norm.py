# SPDX-License-Identifier: Apache-2.0
"""A dense layer with the RMSNorm before it: one launch of a decode step where vLLM's layers take two."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..api_logging import flashinfer_api
from ..quantization.block_scaled import WEIGHT_FORMATS, WeightFormat
from ..sm12x.backend import kernels, plain_torch
from ..sm12x.checks import is_traced, require_choice, require_float, require_tensor
from ..sm12x.devices import require_served
from ..sm12x.instances import DENSE_INSTANCES, Instance
from ..sm12x.operator import define
from .sm12x_dense import instance_for, run_served, validate
from .sm12x_dense_launch import DenseCall, dense_module

MOST_TOKENS = 8  # kNarrowTokens: beside more the kernels have no registers for a norm
LARGEST_EPS = 3.4e38  # the kernels hold it as float32


class NormedDense(NamedTuple):
    """The results of :func:`rmsnorm_dense_block_scaled`."""

    output: torch.Tensor
    """``[m, n]`` of ``out_dtype``."""
    residual: torch.Tensor
    """bfloat16 ``[m, k]``: ``x + residual``, or ``x`` itself without ``residual``."""


@flashinfer_api
def rmsnorm_dense_block_scaled(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_format: WeightFormat,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    next_weights: torch.Tensor | None = None,
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
    tactic: int | str | None = None,
) -> NormedDense:
    """:func:`~flashinfer.gemm.dense_block_scaled` after an addition and an RMSNorm, such as a layer's QKV projection.

    ``s = x + residual``, rounded to bfloat16; ``h = s / sqrt(mean(s^2) + eps) * norm_weight``; ``alpha * h @ weight.T +
    bias``. ``h`` is rounded to bfloat16 once. Up to eight tokens that take a split-K kernel (``k`` up to 4,608) need
    one launch, which rounds ``s * norm_weight`` and multiplies the sums by the factor ``1 / sqrt(mean(s^2) + eps)``.
    For more tokens, and on the CPU, torch computes the norm before the layer.

    Parameters
    ----------
    x : torch.Tensor
        ``[m, k]`` bfloat16.
    norm_weight : torch.Tensor
        ``[k]`` bfloat16.
    weight, weight_scale, bias, weight_format, alpha, next_weights, constant_weights, enable_pdl, tactic
        The same as in ``dense_block_scaled``.
    residual : torch.Tensor, optional
        ``[m, k]`` bfloat16, added first.
    eps : float
        The norm's epsilon; finite, not negative.
    out_dtype : torch.dtype, optional
        bfloat16 (default), float16 or float32.

    Returns
    -------
    NormedDense
        New tensors; only ``residual`` may be ``x`` itself.

    Raises
    ------
    TypeError, ValueError
        Before any launch, naming the argument, what it was and what it may be.
    NotImplementedError
        The GPU has no kernels of this family.
    """
    require_choice("weight_format", weight_format, WEIGHT_FORMATS)
    call = NormedCall(
        x=x,
        norm_weight=norm_weight,
        residual=residual,
        eps=eps,
        weight=weight,
        weight_scale=weight_scale,
        alpha=alpha,
        bias=bias,
        next_weights=next_weights,
        out_dtype=out_dtype,
        weight_format=weight_format,
        constant_weights=constant_weights,
        enable_pdl=enable_pdl,
        tactic=None if tactic is None else str(tactic),
    )
    return behind_norm(call, traced_normed(call) if is_traced(call) else _run(call))


class NormedCall(NamedTuple):
    """The arguments of one call of :func:`rmsnorm_dense_block_scaled`."""

    x: torch.Tensor
    norm_weight: torch.Tensor
    residual: torch.Tensor | None
    eps: float
    weight: torch.Tensor
    weight_scale: torch.Tensor
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    next_weights: torch.Tensor | None
    out_dtype: torch.dtype | None
    weight_format: str
    constant_weights: bool
    enable_pdl: bool | None
    tactic: str | None

    def dense(self) -> DenseCall:
        """The dense layer's call, with the tokens as they are before the norm."""
        return DenseCall(
            out=None,
            x=self.x,
            x_scale=None,
            weight=self.weight,
            weight_scale=self.weight_scale,
            alpha=self.alpha,
            bias=self.bias,
            residual=None,
            out_dtype=self.out_dtype,
            weight_format=self.weight_format,
            activation="bf16",
            swizzled_x_scale=True,
            next_weights=self.next_weights,
            constant_weights=self.constant_weights,
            enable_pdl=self.enable_pdl,
            tactic=self.tactic,
            caller="rmsnorm_dense_block_scaled",
        )


def norms(row: Instance) -> bool:
    """Whether an instance's launch computes the norm."""
    return row.split_k and row.block_n == MOST_TOKENS


def most_tokens(weight_format: str, k: int) -> int:
    """The most tokens that one launch norms and multiplies, for rows of ``k``; 0: no instance does."""
    rows = (row for row in DENSE_INSTANCES if row.weights == weight_format and row.longest_k >= k)
    return MOST_TOKENS if any(map(norms, rows)) else 0


def _outputs(call: NormedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the layer's outputs and for ``x + residual``; the latter is empty if there is no residual."""
    (m, k), n = call.x.shape, call.weight.shape[0]
    rows = 0 if call.residual is None else m
    return (
        torch.empty((m, n), dtype=call.out_dtype or torch.bfloat16, device=call.x.device),
        torch.empty((rows, k), dtype=torch.bfloat16, device=call.x.device),
    )


def behind_norm(call: NormedCall, computed: tuple[torch.Tensor, torch.Tensor]) -> NormedDense:
    """What a call returns: ``x`` itself is the residual where nothing was added."""
    return NormedDense(computed[0], call.x if call.residual is None else computed[1])


def _run(call: NormedCall) -> tuple[torch.Tensor, torch.Tensor]:
    dense = call.dense()
    dtype, token_format = validate(dense)
    eps = require_norm(call)
    require_served("rmsnorm_dense_block_scaled", call.x.device)
    return compute_normed(call._replace(eps=eps, out_dtype=dtype), dense, token_format)


def require_norm(call: NormedCall) -> float:
    """Check what a call has beside its :meth:`~NormedCall.dense` layer, whose ``x`` is checked; eps."""
    device, (m, k) = call.x.device, call.x.shape
    eps = require_float("eps", call.eps, 0.0, LARGEST_EPS)
    require_tensor("norm_weight", call.norm_weight, [(k,)], [torch.bfloat16], device, "k as weight's")
    if call.residual is not None:
        require_tensor("residual", call.residual, [(m, k)], [torch.bfloat16], device)
    return eps


def compute_normed(call: NormedCall, dense: DenseCall, token_format: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a valid call whose layer is ``dense``, where this fork serves the device."""
    device, m = call.x.device, call.x.shape[0]
    output, total = _outputs(call)
    if m == 0:
        return output, total
    backend = kernels(device)
    row = instance_for(backend, dense, token_format)
    if backend is not None and row is not None and norms(row) and m <= MOST_TOKENS and len(call.weight):
        backend.call(
            dense_module(backend, call.weight_format).sm12x_dense_normed_run,
            None if call.residual is None else total,
            call.residual,
            call.norm_weight,
            call.eps,
            output,
            call.x,
            call.weight,
            call.weight_scale,
            call.alpha,
            call.bias,
            row.index,
            call.next_weights,
            call.constant_weights,
            backend.pdl(call.enable_pdl),
            writes=[output] if call.residual is None else [output, total],
        )
        return output, total
    with plain_torch(device):
        rows = call.x.float()
        if call.residual is not None:
            rows = total.copy_(rows + call.residual.float()).float()
        factors = torch.rsqrt(rows.square().mean(-1, keepdim=True) + call.eps)
        normed = (rows * factors * call.norm_weight.float()).bfloat16()
    run_served(dense._replace(out=output, x=normed, out_dtype=output.dtype), token_format)
    return output, total


traced_normed = define("sm12x_rmsnorm_dense", NormedCall, _run, _outputs)
