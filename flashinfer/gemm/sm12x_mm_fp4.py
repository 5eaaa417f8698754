# SPDX-License-Identifier: Apache-2.0
"""``mm_fp4`` with MXFP4 operands where upstream has no kernel: dequantized, multiplied in float32. Correct, and
slow."""

from __future__ import annotations

import functools
import logging

import torch

from ..fused_moe import sm12x_dispatch
from ..quantization import mx_cpu

# Rows of ``b`` dequantized at once: 64 MB of float32 for k = 4096.
CHUNK_ROWS = 4096

_logger = logging.getLogger("flashinfer.sm12x")


def takes(device: torch.device, backend: str, use_nvfp4: bool) -> bool:
    """Whether a call is computed here: MXFP4 on the CPU, and on SM12x what upstream's ``cute-dsl`` refuses there."""
    if use_nvfp4:
        return False
    if device.type == "cpu":
        return True
    return backend == "cute-dsl" and device.type == "cuda" and sm12x_dispatch.has_block_scaled_mma(device.index or 0)


@functools.cache
def warn_once() -> None:
    """Say what serves the call, on CUDA, once a process."""
    _logger.warning(
        "mm_fp4(backend='cute-dsl', use_nvfp4=False) has no kernel on SM12x: operands are dequantized and multiplied in "
        "float32, which is correct and slow. backend='cudnn' or 'b12x' are upstream's kernels for it; in vLLM, "
        "--linear-backend marlin"
    )


def _require_scales(name: str, scales: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The bytes of 128x4 scales; ``b``'s come transposed."""
    straight = scales if scales.is_contiguous() else scales.t()
    needed = mx_cpu.swizzled_size(rows, blocks)
    if not straight.is_contiguous() or straight.numel() != needed:
        raise ValueError(
            f"{name} is {scales.dtype} {tuple(scales.shape)}, strides {tuple(scales.stride())}; it must hold the {needed} "
            f"bytes of 128x4 scales of {rows} rows and {blocks} blocks of 32"
        )
    return straight.view(torch.uint8)


def mm_mxfp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """``alpha * a @ b`` of packed MXFP4 matrices.

    Parameters
    ----------
    a, b : torch.Tensor
        Packed e2m1 bytes ``[m, k / 2]`` and, column-major, ``[k / 2, n]``; k a multiple of 32.
    a_descale, b_descale : torch.Tensor
        UE8M0 scales in 128x4 layout of ``[m, k / 32]`` and of ``[n, k / 32]``; ``b``'s may be a transposed view.
    alpha : torch.Tensor, optional
        One float32.
    out_dtype : torch.dtype
        bfloat16 or float16.
    out : torch.Tensor, optional
        ``[m, n]`` of ``out_dtype``.

    Raises
    ------
    ValueError
        k no multiple of 32, scales of another size, an ``out`` of another shape or dtype.
    """
    (m, packed), n = a.shape, b.shape[1]
    if packed % 16:
        raise ValueError(f"a holds k = {2 * packed}; it must be a multiple of 32, the size of a block")
    blocks = packed // 16
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if tuple(out.shape) != (m, n) or out.dtype != out_dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; it must be {out_dtype} ({m}, {n})")
    a_scales = mx_cpu.unswizzle_128x4(_require_scales("a_descale", a_descale, m, blocks), m, blocks)
    b_scales = mx_cpu.unswizzle_128x4(_require_scales("b_descale", b_descale, n, blocks), n, blocks)
    if a.is_cuda:
        warn_once()
    left = _values(a.contiguous(), a_scales)
    if alpha is not None:
        left = left * alpha
    rows = b.t().contiguous()
    for start in range(0, n, CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        out[:, part] = left @ _values(rows[part], b_scales[part]).t()
    return out


def _values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    # By way of bf16, which holds them exactly: that path asks the device nothing, so a graph can capture it.
    return mx_cpu.dequantize_mxfp4_linear(packed.view(torch.uint8), scales, torch.bfloat16).float()
