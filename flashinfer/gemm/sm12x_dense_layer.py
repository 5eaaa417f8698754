# SPDX-License-Identifier: Apache-2.0
"""A dense layer as an object: its weight is checked when it is made, a call checks its tokens."""

from __future__ import annotations

from typing import Any

import torch

from ..api_logging import flashinfer_api
from ..quantization.block_scaled import WEIGHT_FORMATS, WeightFormat
from ..sm12x.checks import (
    CallCache,
    Unchanged,
    bounds_of,
    is_traced,
    require_choice,
    require_computing_device,
    require_output_dtype,
    require_rank,
    require_switches,
    span,
)
from ..sm12x.devices import require_served
from ..sm12x.instances import Format
from .sm12x_dense import (
    ACTIVATIONS,
    OUTPUT_DTYPES,
    compute,
    require_options,
    require_token_format,
    require_tokens,
    require_weight,
    run_served,
)
from .sm12x_dense_launch import DenseCall
from .sm12x_dense_norm import NormedCall, NormedDense, behind_norm, compute_normed, require_norm, traced_normed

_OF_NO_TOP_K = 0, 0, "dense_block_scaled"
_AS_HERE: dict[str, str] = {}  # arguments have the names that errors give them


class DenseLayer:
    """A layer of :func:`~flashinfer.gemm.dense_block_scaled`, made once from its weight.

    The weight, its scales, bias and alpha are checked here, and again by the first call after one of them changed: the
    layer keeps the tensors, so that ``weight.data = other``, vLLM's sleep levels and a reload of weights are seen. A
    call checks its own tensors. Results and errors are those of the functions.

    Parameters
    ----------
    weight, weight_scale, bias, weight_format, activation, swizzled_x_scale, alpha, constant_weights
        The same as in ``dense_block_scaled``.
    out_dtype : torch.dtype
        The dtype of all outputs: bfloat16, float16 or float32.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    NotImplementedError
        The weight is on a GPU that has no kernels of this family.
    """

    @flashinfer_api
    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        weight_format: WeightFormat,
        activation: Format = "bf16",
        swizzled_x_scale: bool = True,
        alpha: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        constant_weights: bool = False,
    ) -> None:
        require_choice("weight_format", weight_format, WEIGHT_FORMATS)
        require_choice("activation", activation, ACTIVATIONS)
        require_rank("weight", weight, 2)
        self._operands = weight, weight_scale, alpha, bias  # as DenseCall and its likes have them
        self._options: Any = out_dtype, weight_format, activation, swizzled_x_scale
        self._constant_weights = constant_weights
        require_output_dtype("out_dtype", out_dtype, OUTPUT_DTYPES)
        require_options(self._call(weight))
        # Traced tensors have no addresses that could be checked; traced calls go to the operator, which checks when it
        # runs.
        self._checks = not is_traced(self._operands)
        if self._checks:
            self._require_weight()

    def _call(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        next_weights: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        tactic: int | str | None = None,
    ) -> DenseCall:
        named = None if tactic is None else str(tactic)
        own = next_weights, self._constant_weights, enable_pdl, named
        fields = (out, x, x_scale, *self._operands, residual, *self._options, *own, *_OF_NO_TOP_K)
        return DenseCall._make(fields)

    def _require_weight(self) -> None:
        weight = self._operands[0]
        require_rank("weight", weight, 2)
        require_computing_device("weight", weight)
        require_served("DenseLayer", weight.device)
        k = require_weight(self._call(weight), weight.device, _AS_HERE)
        bounds = bounds_of([span(each) for each in self._operands if each is not None])
        unchanged, calls = Unchanged(*self._operands), CallCache(weight.device, bounds, written=1)  # the output
        # Last of all that the weight is known: what ends this before, or another thread meanwhile, checks again.
        self._k, self._device, self._calls, self._weights = k, weight.device, calls, unchanged

    @flashinfer_api
    def run(
        self,
        x: torch.Tensor,
        *,
        x_scale: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        next_weights: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        tactic: int | str | None = None,
    ) -> torch.Tensor:
        """``alpha * x @ weight.T + bias + residual``; parameters, result and errors are ``dense_block_scaled``'s."""
        if not self._checks or is_traced((x, x_scale, residual, out, next_weights)):
            return compute(self._call(x, out, x_scale, residual, next_weights, enable_pdl, tactic))
        token_format = self._require_tokens(x, out, x_scale, residual, next_weights, enable_pdl)
        if out is None:
            # The extents as arguments of their own: in a tuple they take 0.7 us longer.
            out = torch.empty(x.shape[0], self._operands[0].shape[0], dtype=self._options[0], device=self._device)
        run_served(self._call(x, out, x_scale, residual, next_weights, enable_pdl, tactic), token_format)
        return out

    @flashinfer_api
    def run_behind_norm(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        eps: float = 1e-5,
        next_weights: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        tactic: int | str | None = None,
    ) -> NormedDense:
        """:meth:`run` of an RMSNorm of ``x + residual``, and that sum, for layers of ``activation="bf16"``; parameters,
        result and errors are ``rmsnorm_dense_block_scaled``'s."""
        if self._options[2] != "bf16":
            raise ValueError(f"activation is {self._options[2]!r}; a layer behind a norm must have 'bf16'")
        named = None if tactic is None else str(tactic)
        (out_dtype, weight_format, *_), own = self._options, (self._constant_weights, enable_pdl, named)
        call = NormedCall(x, norm_weight, residual, eps, *self._operands, next_weights, out_dtype, weight_format, *own)
        if not self._checks or is_traced((x, norm_weight, residual, next_weights)):
            return behind_norm(call, traced_normed(call))
        dense = call.dense()
        token_format = self._require_tokens(x, next_weights=next_weights, enable_pdl=enable_pdl)
        eps = require_norm(call)
        computed = compute_normed(call if eps is call.eps else call._replace(eps=eps), dense, token_format)
        return behind_norm(call, computed)

    def _require_tokens(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        next_weights: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> int:
        """Check a call, and the weight where it changed; the format of the call's tokens."""
        if not self._weights.holds(*self._operands):
            self._require_weight()
        tensors = out, x, x_scale, residual, next_weights
        token_format: int | None = self._calls.find(tensors, enable_pdl)
        if token_format is None:
            call = self._call(x, out, x_scale, residual, next_weights, enable_pdl)
            require_rank("x", call.x, 2)
            token_format = require_token_format(call, "x")
            if call.enable_pdl is not None:
                require_switches(call)
            require_tokens(call, self._k, self._device, self._options[0], token_format, _AS_HERE)
            self._calls.add(token_format, tensors, enable_pdl)
        return token_format
