# SPDX-License-Identifier: Apache-2.0
"""Upstream's bfloat16 x FP4 GEMM by this fork's kernels, ``backend="sm12x"``: NVFP4 weights, and MXFP4
(``block_size=32``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from ..api_logging import flashinfer_api
from ..sm12x.checks import describe
from . import sm12x_mm

FORMATS = {16: "nvfp4", 32: "mxfp4"}


def _format_of(block_size: Any) -> str:
    if block_size not in tuple(FORMATS):  # compared, not hashed: it may be anything
        raise ValueError(
            f"block_size is {describe(block_size)}; with backend='sm12x' it must be 16 (NVFP4) or 32 (MXFP4)"
        )
    return FORMATS[int(block_size)]


def prepare_bf16_fp4_weights(
    b: torch.Tensor, b_descale: torch.Tensor, alpha: torch.Tensor | None = None, *, backend: str, block_size: int = 16
) -> Any:
    """Upstream's function; ``backend="sm12x"`` needs no preparation and returns the three unchanged.

    Raises
    ------
    TypeError, ValueError
        Upstream's errors; with ``backend="sm12x"`` those that ``mm_bf16_fp4`` would raise for the three.
    """
    if backend == sm12x_mm.BACKEND:
        sm12x_mm.require_weight(b, b_descale, alpha, _format_of(block_size))
        return b, b_descale, alpha
    return _upstream.prepare_bf16_fp4_weights(b, b_descale, alpha, backend=backend, block_size=block_size)


# The signature is upstream's, parameter by parameter.
# fmt: off
@flashinfer_api
def mm_bf16_fp4(
    a: torch.Tensor, b: torch.Tensor, b_descale: torch.Tensor, alpha: torch.Tensor | None = None,
    *,
    backend: str, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None, block_size: int = 16,
    enable_pdl: bool = True, skip_check: bool = False,
) -> torch.Tensor:
    # fmt: on
    """Upstream's function and documentation; ``backend="sm12x"`` also takes CPU tensors and MXFP4 weights.

    For this backend ``b`` is ``[n, k / 2]``, two e2m1 per byte, and ``b_descale`` has the 128x4 layout: E4M3 with
    ``block_size`` 16 (NVFP4, as ``nvfp4_quantize`` makes it), UE8M0 with ``block_size`` 32 (MXFP4). k is a multiple of
    32.

    Raises
    ------
    ValueError
        Upstream's; with ``backend="sm12x"`` another ``block_size``, and as ``dense_block_scaled``.
    """
    if backend == sm12x_mm.BACKEND:
        return sm12x_mm.mm_bf16(a, b, b_descale, alpha, out_dtype, out, enable_pdl, _format_of(block_size))
    return _upstream.mm_bf16_fp4(
        a=a,
        b=b,
        b_descale=b_descale,
        alpha=alpha,
        backend=backend,
        out_dtype=out_dtype,
        out=out,
        block_size=block_size,
        enable_pdl=enable_pdl,
        skip_check=skip_check,
    )


sm12x_mm.answer_for(mm_bf16_fp4, _upstream.mm_bf16_fp4)
