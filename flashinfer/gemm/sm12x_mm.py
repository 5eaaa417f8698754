# SPDX-License-Identifier: Apache-2.0
"""Upstream's dense GEMMs by their names on :func:`~flashinfer.gemm.sm12x_dense.dense_mx`: backend ``"sm12x"``.

=======================================  ==========  ==========  ====================================================
call                                     tokens      weights     also taken
=======================================  ==========  ==========  ====================================================
``mm_fp4(use_nvfp4=False)``              MXFP4       MXFP4       CPU tensors; ``cute-dsl`` on SM12x, which upstream
                                                                 refuses there and vLLM asks for; ``auto`` on SM12x
                                                                 where upstream has no backend for the call
``mm_mxfp8``                             MXFP8       MXFP8       CPU tensors; ``auto`` likewise
``mm_bf16_fp4(block_size=32)``           bfloat16    MXFP4
``mm_bf16_mxfp8`` (no name of upstream)  bfloat16    MXFP8       every call
=======================================  ==========  ==========  ====================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..fused_moe import sm12x_dispatch
from ..sm12x_arguments import describe
from ..utils import BackendSupportedError
from .sm12x_dense import dense_mx
from .sm12x_dense_validation import require_scales

BACKEND = "sm12x"


def takes_mm_fp4(device: torch.device, backend: str, use_nvfp4: bool) -> bool:
    """Whether a call of ``mm_fp4`` is computed here."""
    if use_nvfp4:
        return False
    if device.type == "cpu" or backend == BACKEND:
        return True
    return backend == "cute-dsl" and device.type == "cuda" and _serves_sm12x(device.index or 0)


def _serves_sm12x(index: int) -> bool:
    """Whether CUDA device ``index`` is an SM12x, and this fork's kernels are not switched off."""
    return sm12x_dispatch.has_block_scaled_mma(index) and sm12x_dispatch.serves_cuda(index)


def automatic(
    device: torch.device, backend: str, upstreams: Callable[[], torch.Tensor], ours: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """What upstream computes; with ``backend="auto"`` on SM12x this fork, where upstream has no backend for the call."""
    try:
        return upstreams()
    except BackendSupportedError:
        if backend != "auto" or device.type != "cuda" or not _serves_sm12x(device.index or 0):
            raise
    return ours()


def with_backend(is_backend_supported: Callable[..., Any]) -> Callable[..., bool]:
    """Upstream's question which backends a function has, and for which compute capabilities (120 for 12.0), with ours."""

    def answer(backend: str, cc: int | None = None) -> bool:
        if backend == BACKEND:
            return cc is None or cc // 10 == 12 or cc == 90
        return bool(is_backend_supported(backend, cc))

    return answer


def _rows(name: str, columns: torch.Tensor) -> torch.Tensor:
    """The rows ``[n, k]`` of a matrix that comes as its transpose."""
    rows = columns.t()
    if not rows.is_contiguous():
        raise ValueError(
            f"{name} is {describe(columns)}; it must be column-major, the transpose of a contiguous matrix"
        )
    return rows


def _straight(scales: torch.Tensor) -> torch.Tensor:
    """The bytes of 128x4 scales, which may come as a transposed view."""
    return (scales if scales.is_contiguous() or scales.ndim != 2 else scales.t()).view(torch.uint8)


def mm_mxfp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """``alpha * a @ b`` of packed MXFP4 matrices.

    Parameters
    ----------
    a, b : torch.Tensor
        Packed e2m1 bytes ``[m, k / 2]`` and, column-major, ``[k / 2, n]``; k a multiple of 32.
    a_descale, b_descale : torch.Tensor
        UE8M0 scales in 128x4 layout of ``[m, k / 32]`` and of ``[n, k / 32]``; they may be transposed views.
    alpha : torch.Tensor, optional
        One float32.
    out_dtype : torch.dtype
        bfloat16 or float16.
    out : torch.Tensor, optional
        ``[m, n]`` of ``out_dtype``.
    enable_pdl : bool, optional
        As in ``dense_mx``.

    Raises
    ------
    ValueError
        k no multiple of 32, scales of another size, an ``out`` of another shape or dtype.
    """
    a, rows, a_scale, b_scale = (
        a.contiguous().view(torch.uint8),
        _rows("b", b),
        _straight(a_descale),
        _straight(b_descale),
    )
    require_scales("a_descale", a_scale, a.shape[0], 2 * a.shape[1], a.device)
    require_scales("b_descale", b_scale, rows.shape[0], 2 * rows.shape[1], a.device)
    return dense_mx(
        a,
        rows.view(torch.uint8),
        b_scale,
        x_scale=a_scale,
        alpha=alpha if alpha is None else alpha.reshape(1),
        out=out,
        out_dtype=out_dtype,
        enable_pdl=enable_pdl,
    )


def mm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``a @ b`` of MXFP8 matrices.

    Parameters
    ----------
    a, b : torch.Tensor
        float8_e4m3fn ``[m, k]`` and, column-major, ``[k, n]``; k a multiple of 32.
    a_descale, b_descale : torch.Tensor
        UE8M0 scales in 128x4 layout of ``[m, k / 32]`` and of ``[n, k / 32]``.
    out : torch.Tensor, optional
        ``[m, n]`` of ``out_dtype``.
    out_dtype : torch.dtype
        bfloat16 or float16.

    Raises
    ------
    ValueError
        Another dtype or layout, scales of another size, an ``out`` of another shape or dtype.
    """
    for name, matrix in (("a", a), ("b", b)):
        if matrix.dtype is not torch.float8_e4m3fn or matrix.ndim != 2:
            raise ValueError(f"{name} is {describe(matrix)}; it must be a float8_e4m3fn matrix")
    a, rows, a_scale, b_scale = a.contiguous(), _rows("b", b), _straight(a_descale), _straight(b_descale)
    require_scales("a_descale", a_scale, a.shape[0], a.shape[1], a.device)
    require_scales("b_descale", b_scale, rows.shape[0], rows.shape[1], a.device)
    return dense_mx(a, rows, b_scale, x_scale=a_scale, out=out, out_dtype=out_dtype)


def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """``alpha * a @ b.T`` of bfloat16 ``[m, k]`` and a weight ``[n, k]`` in MXFP4 (packed) or MXFP8.

    ``b_descale`` is 128x4; ``alpha`` one float32; ``out`` of ``out_dtype``, by default ``a``'s.

    Raises
    ------
    ValueError
        As :func:`~flashinfer.gemm.sm12x_dense.dense_mx`.
    """
    if a.dtype is not torch.bfloat16 or a.ndim != 2:
        raise ValueError(f"a is {describe(a)}; it must be a bfloat16 matrix")
    weight = b if b.dtype is torch.float8_e4m3fn else b.view(torch.uint8)
    b_scale = _straight(b_descale)
    require_scales("b_descale", b_scale, b.shape[0], a.shape[1], a.device)
    factor = alpha if alpha is None else alpha.reshape(1)
    dtype = out_dtype or a.dtype
    return dense_mx(a, weight, b_scale, alpha=factor, out=out, out_dtype=dtype, enable_pdl=enable_pdl)


def mm_bf16_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``alpha * a @ b.T`` with a weight in MXFP8 (W8A16): ``mm_bf16_fp4`` for twice the bits.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]`` bfloat16; k a multiple of 32.
    b : torch.Tensor
        ``[n, k]`` float8_e4m3fn.
    b_descale : torch.Tensor
        UE8M0 scales in 128x4 layout of ``[n, k / 32]``.
    alpha : torch.Tensor, optional
        One float32.
    out_dtype : torch.dtype, optional
        bfloat16 (``a``'s, the default), float16 or float32.
    out : torch.Tensor, optional
        ``[m, n]`` of ``out_dtype``.

    Raises
    ------
    ValueError
        ``b`` of another dtype, and as :func:`~flashinfer.gemm.sm12x_dense.dense_mx`.
    """
    if b.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"b is {describe(b)}; it must be float8_e4m3fn (mm_bf16_fp4 takes packed MXFP4)")
    return mm_bf16(a, b, b_descale, alpha, out_dtype, out)
