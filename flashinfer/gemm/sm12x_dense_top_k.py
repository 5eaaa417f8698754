# SPDX-License-Identifier: Apache-2.0
"""The largest outputs of each row of a dense layer: what greedy decoding wants of an LM head, without reading logits
back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..api_logging import flashinfer_api
from ..quantization.block_scaled import WEIGHT_FORMATS, WeightFormat
from ..sm12x.checks import describe, is_traced, require_choice, require_int
from ..sm12x.instances import Format
from ..sm12x.operator import define
from .sm12x_dense import format_of, run, validate
from .sm12x_dense_launch import DenseCall, RowTopK

MAX_TOP_K = 8  # kMaxRowTopK in rows/top_k.cuh


class LargestOutputs(NamedTuple):
    """The results of :func:`dense_block_scaled_top_k`."""

    values: torch.Tensor
    """float32 ``[m, top_k]``: the outputs, as ``out_dtype`` holds them, by falling size."""
    indices: torch.Tensor
    """int64 ``[m, top_k]``: their columns plus ``first_index``."""


@flashinfer_api
def dense_block_scaled_top_k(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_format: WeightFormat,
    top_k: int = 1,
    first_index: int = 0,
    logits: torch.Tensor | None = None,
    activation: Format = "bf16",
    x_scale: torch.Tensor | None = None,
    swizzled_x_scale: bool = True,
    alpha: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
    tactic: int | str | None = None,
) -> LargestOutputs:
    """The ``top_k`` largest of each row of :func:`~flashinfer.gemm.dense_block_scaled`, and their indices.

    Serves as an LM head's argmax for greedy decoding. Outputs are compared after rounding to ``out_dtype``, so the
    result equals a search of the rows of ``dense_block_scaled(...)``: the first of equal outputs counts, as in
    ``torch.argmax`` of a CPU tensor, and NaN is larger than any number. Results are the same on every run.

    With ``top_k=1`` and few tokens (for which the layer is a split-K kernel: 16, or 8 with a ``k`` above 3,072) the
    layer's launch compares the outputs and writes them only if ``logits`` is given. Otherwise they are written, to
    ``logits`` or to memory of the call's own, and two small launches read them again.

    Parameters
    ----------
    x, weight, weight_scale, bias, weight_format, activation, x_scale, swizzled_x_scale, alpha, residual
        The same as in ``dense_block_scaled``.
    top_k : int
        Outputs of a row, 1 to 8, no more than ``n``.
    first_index : int
        The index of the first column, 0 or more: the beginning of this rank's part of a vocabulary.
        ``values.argmax`` over all ranks' results, in their order, then finds the whole vocabulary's largest.
    logits : torch.Tensor, optional
        ``[m, n]``: gets all outputs, like ``out`` in ``dense_block_scaled``.
    out_dtype : torch.dtype, optional
        bfloat16 (default), float16 or float32; that of ``logits`` if given.
    constant_weights, enable_pdl, tactic
        The same as in ``dense_block_scaled``.

    Returns
    -------
    LargestOutputs
        New tensors.

    Raises
    ------
    TypeError, ValueError
        Before any launch, naming the argument, what it was and what it may be.
    NotImplementedError
        The GPU has no kernels of this family.
    """
    require_choice("weight_format", weight_format, WEIGHT_FORMATS)
    forced = None if tactic is None else str(tactic)
    call = DenseCall(
        out=logits,
        x=x,
        x_scale=x_scale,
        weight=weight,
        weight_scale=weight_scale,
        alpha=alpha,
        bias=bias,
        residual=residual,
        out_dtype=out_dtype,
        weight_format=weight_format,
        activation=activation,
        swizzled_x_scale=swizzled_x_scale,
        constant_weights=constant_weights,
        enable_pdl=enable_pdl,
        tactic=forced,
        top_k=top_k,
        first_index=first_index,
        caller="dense_block_scaled_top_k",
    )
    return LargestOutputs(*(_operator(call) if is_traced(call) else _run(call)))


def dense_mx_top_k(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None, **named: Any
) -> LargestOutputs:
    """:func:`dense_block_scaled_top_k` of a weight whose dtype names its format: uint8 is MXFP4, float8_e4m3fn
    MXFP8."""
    found: LargestOutputs = dense_block_scaled_top_k(
        x, weight, weight_scale, bias, weight_format=format_of(weight), **named
    )
    return found


def _outputs(call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (call.x.shape[0], call.top_k), call.x.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int64, device=device)


def _run(call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, token_format = validate(call)
    n = call.weight.shape[0]
    if n == 0:
        raise ValueError(f"weight is {describe(call.weight)}; it must have rows, of whose outputs some are the largest")
    most = min(MAX_TOP_K, n)
    top_k = require_int("top_k", call.top_k, 1, most, "no more than the weight has rows")
    first_index = require_int("first_index", call.first_index, 0, 2**62)
    call = call._replace(top_k=top_k, out_dtype=dtype)
    values, indices = _outputs(call)
    run(call, token_format, RowTopK(values, indices, first_index))
    return values, indices


_operator = define("sm12x_dense_mx_top_k", DenseCall, _run, _outputs, mutates=("out",))
