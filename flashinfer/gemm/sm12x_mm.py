# SPDX-License-Identifier: Apache-2.0
"""Upstream's dense GEMMs by their names on :func:`~flashinfer.gemm.dense_block_scaled`: backend ``"sm12x"``.

=======================================  ==========  ==========  ====================================================
call                                     tokens      weights     also taken
=======================================  ==========  ==========  ====================================================
``mm_fp4(use_nvfp4=False)``              MXFP4       MXFP4       CPU tensors; ``cute-dsl`` on SM12x, which upstream
                                                                 refuses there and vLLM asks for; ``auto`` on SM12x
                                                                 where upstream has no backend for the call
``mm_mxfp8``                             MXFP8       MXFP8       CPU tensors; ``auto`` likewise
``mm_bf16_fp4(block_size=32)``           bfloat16    MXFP4
``mm_bf16_fp4(block_size=16)``           bfloat16    NVFP4
``mm_bf16_mxfp8`` (no name of upstream)  bfloat16    MXFP8       every call
=======================================  ==========  ==========  ====================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import torch

from ..sm12x import devices
from ..sm12x.checks import (
    ELEMENT,
    describe,
    has_no_shape,
    is_traced,
    require_computing_device,
    require_memory,
    require_output_dtype,
    require_rank,
    require_tensor_type,
)
from ..utils import BackendSupportedError
from .sm12x_dense import OUTPUT_DTYPES, compute, validate
from .sm12x_dense_launch import DenseCall

BACKEND = "sm12x"
PACKED_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)


def takes_mm_fp4(device: torch.device, backend: str, use_nvfp4: bool) -> bool:
    """Whether this fork computes a call of ``mm_fp4``."""
    if use_nvfp4:
        return False
    if device.type == "cpu" or backend == BACKEND:
        return True
    return backend == "cute-dsl" and device.type == "cuda" and _serves_sm12x(device.index or 0)


def _serves_sm12x(index: int) -> bool:
    """Whether CUDA device ``index`` is an SM12x, and this fork's kernels are not switched off."""
    found = devices.device_class(index)
    return found is not None and bool(found.mma_kinds) and devices.serves_cuda(index)


def automatic(
    device: torch.device, backend: str, upstreams: Callable[[], torch.Tensor], ours: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Upstream's result; with ``backend="auto"`` on SM12x this fork's, where upstream has no backend for the call."""
    try:
        return upstreams()
    except BackendSupportedError:
        if backend != "auto" or device.type != "cuda" or not _serves_sm12x(device.index or 0):
            raise
    return ours()


def answer_for(function: Callable[..., Any], upstreams: Any) -> None:
    """Have ``function`` answer as ``upstreams`` does for its backends and compute capabilities (120 is 12.0), and add
    ours."""

    def is_backend_supported(backend: str, cc: int | None = None) -> bool:
        if backend == BACKEND:
            return cc is None or cc // 10 == 12 or cc == 90
        return bool(upstreams.is_backend_supported(backend, cc))

    attributes = vars(function)
    attributes["is_backend_supported"] = is_backend_supported
    attributes["is_compute_capability_supported"] = upstreams.is_compute_capability_supported


def backends_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The backends that upstream's ``function`` lists, and ours."""
    return (*get_args(get_type_hints(inspect.unwrap(function))["backend"]), BACKEND)


def _rows(name: str, matrix: torch.Tensor) -> torch.Tensor:
    """The rows ``[n, k]`` of a matrix that comes as its transpose."""
    rows = matrix.t()
    if not rows.is_contiguous():
        raise ValueError(f"{name} is {describe(matrix)}; it must be column-major, the transpose of a contiguous matrix")
    return rows


def _straight(scales: Any) -> Any:
    """128x4 scales, which may come as a transposed view."""
    matrix = isinstance(scales, torch.Tensor) and scales.layout is torch.strided and not has_no_shape(scales)
    return scales.t() if matrix and scales.ndim == 2 and not scales.is_contiguous() else scales


def _call(
    a: Any,
    rows: torch.Tensor,
    a_descale: Any,
    b_descale: Any,
    alpha: Any,
    out_dtype: Any,
    out: Any,
    enable_pdl: bool | None,
    weight_format: str,
) -> DenseCall:
    """The call of ``dense_block_scaled`` for these arguments; its errors name the arguments of ``mm_*``."""
    if alpha is not None:
        require_tensor_type("alpha", alpha)
        alpha = alpha.reshape(1) if alpha.layout is torch.strided and alpha.numel() == 1 else alpha
    return DenseCall(
        out=out,
        x=a.contiguous(),
        x_scale=_straight(a_descale),
        weight=rows,
        weight_scale=_straight(b_descale),
        alpha=alpha,
        out_dtype=out_dtype,
        weight_format=weight_format,
        enable_pdl=enable_pdl,
        caller="mm",
    )


def _require_matrix(name: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    allowed = " or ".join(map(str, dtypes))
    require_rank(name, value, 2, f"a matrix of {allowed}")
    if value.dtype not in dtypes or value.layout is not torch.strided:
        raise ValueError(f"{name} is {describe(value)}; it must be a matrix of {allowed}")
    require_computing_device(name, value)
    if not is_traced((value,)):
        require_memory(name, value, ELEMENT)  # a view of what was resized is torch's own error


def require_weight(b: Any, b_descale: Any, alpha: Any, weight_format: str) -> None:
    """Raise, as :func:`mm_bf16` does, unless the three are a weight ``[n, k]`` in MXFP4 or NVFP4.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    """
    _require_matrix("b", b, PACKED_DTYPES)
    rows = b.view(torch.uint8)
    # A call of no tokens has every other argument, which is what is to be checked.
    tokens = torch.empty((0, 2 * rows.shape[1]), dtype=torch.bfloat16, device=b.device)
    if not is_traced((b, b_descale, alpha)):  # traced tensors have no addresses; the call itself is checked
        validate(_call(tokens, rows, None, b_descale, alpha, torch.bfloat16, None, None, weight_format))


def _require_same_k(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"b is {describe(b)}; its first dimension must be {a.shape[1]}, as the second of a")


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
        The same as in ``dense_block_scaled``.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    """
    for name, matrix in (("a", a), ("b", b)):
        _require_matrix(name, matrix, PACKED_DTYPES)
    _require_same_k(a, b)
    require_output_dtype("out_dtype", out_dtype)
    rows = _rows("b", b).view(torch.uint8)
    return compute(_call(a.view(torch.uint8), rows, a_descale, b_descale, alpha, out_dtype, out, enable_pdl, "mxfp4"))


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
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    """
    for name, matrix in (("a", a), ("b", b)):
        _require_matrix(name, matrix, (torch.float8_e4m3fn,))
    _require_same_k(a, b)
    require_output_dtype("out_dtype", out_dtype)
    return compute(_call(a, _rows("b", b), a_descale, b_descale, None, out_dtype, out, None, "mxfp8"))


def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    enable_pdl: bool | None,
    weight_format: str,
) -> torch.Tensor:
    """``alpha * a @ b.T`` of bfloat16 ``[m, k]`` and a weight ``[n, k]`` in MXFP4 or NVFP4 (packed) or MXFP8.

    ``b_descale`` is 128x4; ``alpha`` one float32, NVFP4's global scale; ``out`` of ``out_dtype``, by default ``a``'s.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    """
    _require_matrix("a", a, (torch.bfloat16,))
    _require_matrix("b", b, (*PACKED_DTYPES, torch.float8_e4m3fn))
    rows = b if b.dtype is torch.float8_e4m3fn else b.view(torch.uint8)
    dtype = require_output_dtype("out_dtype", a.dtype if out_dtype is None else out_dtype, OUTPUT_DTYPES)
    return compute(_call(a, rows, None, b_descale, alpha, dtype, out, enable_pdl, weight_format))


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
    TypeError, ValueError
        Naming the argument, what it was and what it may be.
    """
    require_tensor_type("b", b)
    if b.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"b is {describe(b)}; it must be float8_e4m3fn (mm_bf16_fp4 takes packed MXFP4)")
    return mm_bf16(a, b, b_descale, alpha, out_dtype, out, None, "mxfp8")
