# SPDX-License-Identifier: Apache-2.0
"""What a call of :func:`~flashinfer.gemm.dense_mx` and of what is made of it may look like."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from ..fused_moe import sm12x_dispatch
from ..quantization import mx_cpu
from ..quantization.mx_cpu import BLOCK_SIZE
from ..sm12x_arguments import (
    describe,
    require_computing_device,
    require_k_alignment,
    require_tensor,
    require_tensor_type,
)

OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Formats of token rows, as the kernels number them (TokenFormat in grouped_gemm_params.cuh).
BF16, QUANTIZE_BF16, QUANTIZE_F16, MXFP8_SWIZZLED, MXFP8_LINEAR, MXFP4_SWIZZLED = range(6)
QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4 = 6, 7

Activation = Literal["bf16", "mxfp8", "mxfp4"]
_UNQUANTIZED: dict[tuple[str, torch.dtype], int] = {
    ("bf16", torch.bfloat16): BF16,
    ("mxfp8", torch.bfloat16): QUANTIZE_BF16,
    ("mxfp8", torch.float16): QUANTIZE_F16,
    ("mxfp4", torch.bfloat16): QUANTIZE_BF16_TO_MXFP4,
    ("mxfp4", torch.float16): QUANTIZE_F16_TO_MXFP4,
}


def _token_format(x: torch.Tensor, x_scale: Any, activation: Any, swizzled_x_scale: bool) -> int:
    if activation not in get_args(Activation):
        raise ValueError(f"activation is {describe(activation)}; it must be 'bf16', 'mxfp8' or 'mxfp4'")
    if x_scale is None:
        if (activation, x.dtype) in _UNQUANTIZED:
            return _UNQUANTIZED[activation, x.dtype]
        allowed = "bfloat16" if activation == "bf16" else "bfloat16 or float16"
        raise ValueError(f"x is {describe(x)}; with activation={activation!r} and no x_scale it must be {allowed}")
    if x.dtype is torch.float8_e4m3fn:
        return MXFP8_SWIZZLED if swizzled_x_scale else MXFP8_LINEAR
    if x.dtype is torch.uint8 and swizzled_x_scale:
        return MXFP4_SWIZZLED
    raise ValueError(
        f"x is {describe(x)}; with x_scale it must be float8_e4m3fn (MXFP8), or uint8 (MXFP4, with 128x4 scales)"
    )


def require_scales(name: str, scales: Any, rows: int, k: int, device: torch.device, swizzled: bool = True) -> None:
    """Raise unless ``scales`` are the bytes of a matrix ``[rows, k]``, of whatever shape holds as many as the layout has.

    Raises
    ------
    TypeError, ValueError
        Not a tensor; another size, device, or not contiguous bytes.
    """
    blocks = k // BLOCK_SIZE
    needed = mx_cpu.swizzled_size(rows, blocks) if swizzled else rows * blocks
    layout = "128x4" if swizzled else "linear"
    expected = f"{needed} contiguous bytes: {layout} scales of {rows} rows and {blocks} blocks of 32, on {device}"
    require_tensor_type(name, scales, expected)
    fits = scales.element_size() == 1 and scales.numel() == needed and scales.device == device
    if not fits or not scales.is_contiguous():
        raise ValueError(f"{name} is {describe(scales)}; it must be {expected}")


def _require_apart(name_of_out: str, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Raise where an output would be written before what it replaces was read."""

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()

    first, last = span(out)
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor is None or (name == "residual" and span(tensor) == (first, last)):
            continue
        start, end = span(tensor)
        if start < last and first < end:
            raise ValueError(f"{name_of_out} overlaps {name}; it must be memory of its own")


def validate(
    x: Any,
    weight: Any,
    weight_scale: Any,
    bias: Any,
    activation: Any,
    x_scale: Any,
    swizzled_x_scale: bool,
    alpha: Any,
    residual: Any,
    out: Any,
    out_dtype: Any,
    out_name: str = "out",
) -> tuple[torch.dtype, int]:
    """Check a call's metadata; the dtype of its output, and the tokens' format."""
    for name, tensor in (("x", x), ("weight", weight)):
        require_tensor_type(name, tensor)
        if tensor.ndim != 2:
            raise ValueError(f"{name} is {describe(tensor)}; it must be 2-D")
    require_computing_device("x", x)
    device = x.device
    if not sm12x_dispatch.serves(device):
        raise NotImplementedError(
            f"dense_mx has no kernels for {torch.cuda.get_device_name(device)}: they are for compute capability 12.x "
            "(and 9.0 with FLASHINFER_SM12X_MOE=1)"
        )
    token_format = _token_format(x, x_scale, activation, swizzled_x_scale)
    n, packed = weight.shape
    require_tensor("weight", weight, [(n, packed)], [torch.uint8, torch.float8_e4m3fn], device)
    if token_format in (QUANTIZE_BF16_TO_MXFP4, QUANTIZE_F16_TO_MXFP4) and weight.dtype is not torch.uint8:
        raise ValueError(f"weight is {describe(weight)}; with activation='mxfp4' it must be uint8 (MXFP4)")
    k = require_k_alignment("k", packed * (2 if weight.dtype is torch.uint8 else 1))
    m = x.shape[0]
    require_tensor("x", x, [(m, k // 2 if token_format == MXFP4_SWIZZLED else k)], [x.dtype], device, "k as weight's")
    require_scales("weight_scale", weight_scale, n, k, device)
    if x_scale is not None:
        require_scales("x_scale", x_scale, m, k, device, token_format != MXFP8_LINEAR)
    if out_dtype is None:
        out_dtype = out.dtype if isinstance(out, torch.Tensor) else torch.bfloat16
    if out_dtype not in OUTPUT_DTYPES:
        raise ValueError(f"out_dtype is {describe(out_dtype)}; it must be bfloat16, float16 or float32")
    if bias is not None:
        require_tensor("bias", bias, [(n,)], OUTPUT_DTYPES, device)
    if alpha is not None:
        require_tensor("alpha", alpha, [(), (1,)], [torch.float32], device)
    if residual is not None:
        require_tensor("residual", residual, [(m, n)], [out_dtype], device)
    if out is not None:
        require_tensor(out_name, out, [(m, n)], [out_dtype], device)
        _require_apart(out_name, out, x, residual)
    return out_dtype, token_format
