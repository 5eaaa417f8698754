# SPDX-License-Identifier: Apache-2.0
"""The largest outputs of each row of a dense layer: what greedy decoding wants of an LM head, without reading logits back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..api_logging import flashinfer_api
from ..sm12x_arguments import require_int
from .sm12x_dense import Operands, RowTopK, instance_for, run
from .sm12x_dense_validation import Activation, validate

MAX_TOP_K = 8  # kMaxRowTopK in row_top_k.cuh


class LargestOutputs(NamedTuple):
    """What :func:`dense_mx_top_k` gives."""

    values: torch.Tensor
    """float32 ``[m, top_k]``: the outputs, as ``out_dtype`` holds them, by falling size."""
    indices: torch.Tensor
    """int64 ``[m, top_k]``: their columns plus ``first_index``."""


@flashinfer_api
def dense_mx_top_k(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    top_k: int = 1,
    first_index: int = 0,
    logits: torch.Tensor | None = None,
    activation: Activation = "bf16",
    x_scale: torch.Tensor | None = None,
    swizzled_x_scale: bool = True,
    alpha: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    constant_weights: bool = False,
    enable_pdl: bool | None = None,
    tactic: int | str | None = None,
) -> LargestOutputs:
    """The ``top_k`` largest of each row of :func:`~flashinfer.gemm.dense_mx`, and where they stand.

    An LM head's argmax for greedy decoding. What is compared is each output as ``out_dtype`` holds it, so that the
    result is that of ``dense_mx(...)`` and a search of its rows: of equal outputs the first counts, as in ``torch.argmax``
    of a CPU tensor, and NaN is larger than any number. Results are the same on every run.

    With ``top_k=1`` and few tokens (where ``dense_mx`` is a stream of weights: 16, or 8 with a ``k`` above 3,072) the
    layer compares its outputs itself, and they are not written unless ``logits`` is given. Otherwise they are, to
    ``logits`` or to memory of the call's own, and two small launches read them once more.

    Parameters
    ----------
    x, weight, weight_scale, bias, activation, x_scale, swizzled_x_scale, alpha, residual
        As in ``dense_mx``.
    top_k : int
        Outputs of a row, 1 to 8, no more than ``n``.
    first_index : int
        What the first column counts as, 0 or more: where this rank's part of a vocabulary begins.
        ``values.argmax`` over all ranks' results, in their order, is then the whole vocabulary's.
    logits : torch.Tensor, optional
        ``[m, n]``: gets all outputs; as ``out`` in ``dense_mx``.
    out_dtype : torch.dtype, optional
        bfloat16 (default), float16 or float32; that of ``logits`` if given.
    constant_weights, enable_pdl, tactic
        As in ``dense_mx``.

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
    compute: Any = torch.ops.flashinfer.sm12x_dense_mx_top_k if torch.compiler.is_compiling() else _run
    values, indices = compute(
        x,
        weight,
        weight_scale,
        bias,
        top_k,
        first_index,
        logits,
        activation,
        x_scale,
        swizzled_x_scale,
        alpha,
        residual,
        out_dtype,
        constant_weights,
        enable_pdl,
        None if tactic is None else str(tactic),
    )
    return LargestOutputs(values, indices)


def _outputs(x: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    first_index: int,
    logits: torch.Tensor | None,
    activation: str,
    x_scale: torch.Tensor | None,
    swizzled_x_scale: bool,
    alpha: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    constant_weights: bool,
    enable_pdl: bool | None,
    tactic: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, token_format = validate(
        x,
        weight,
        weight_scale,
        bias,
        activation,
        x_scale,
        swizzled_x_scale,
        alpha,
        residual,
        logits,
        out_dtype,
        "logits",
    )
    m, n = x.shape[0], weight.shape[0]
    top_k = require_int("top_k", top_k, 1, min(MAX_TOP_K, n), "no more than the weight has rows")
    first_index = require_int("first_index", first_index, 0, 2**62)
    values, indices = _outputs(x, top_k)
    operands = Operands(x.new_empty((0, n), dtype=dtype), x, x_scale, weight, weight_scale, alpha, bias, residual)
    row = instance_for(operands, token_format, tactic)
    fused = top_k == 1 and row is not None and row.streamed
    if logits is not None or not fused:
        operands = operands._replace(out=x.new_empty((m, n), dtype=dtype) if logits is None else logits)
    if m != 0:
        run(row, operands, token_format, constant_weights, enable_pdl, RowTopK(values, indices, first_index))
    return values, indices


_operator = torch.library.custom_op("flashinfer::sm12x_dense_mx_top_k", _run, mutates_args=("logits",))


@_operator.register_fake
def _operator_fake(
    x: torch.Tensor, _weight: torch.Tensor, _scale: torch.Tensor, _bias: torch.Tensor | None, top_k: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(x, top_k)
