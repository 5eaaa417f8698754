# SPDX-License-Identifier: Apache-2.0
"""Upstream's FP4 quantization; MXFP4 and the 128x4 scale layout take CPU tensors too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from ..api_logging import flashinfer_api
from ..sm12x import devices
from ..sm12x.checks import (
    UE8M0_DTYPES,
    describe,
    require_computing_device,
    require_storage,
    require_tensor,
)
from ..tllm_enums import SfLayout
from ..trace.templates.quantize import mxfp4_quantize_trace
from . import mx_cpu


def _only_upstream_has(layout: Any) -> bool:
    """Upstream takes CPU tensors with 8x4 scales too, through a CUDA device."""
    return layout == SfLayout.layout_8x4 and torch.cuda.is_available()


@flashinfer_api(trace=mxfp4_quantize_trace)
def mxfp4_quantize(
    a: torch.Tensor,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    *,
    scale_rule: mx_cpu.ScaleRule = "amax",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to MXFP4: packed e2m1 values with one UE8M0 scale per 32 of them along the last dimension.

    CUDA tensors are upstream's; a CPU tensor is quantized on the CPU and the result stays there.  The scale is
    ``amax / 6`` rounded up to a power of two (byte 0 for a block of zeros), values round to nearest even and saturate
    at 6, also infinity.  e2m1 has no NaN: a block that holds one gets the NaN scale, 255.

    With ``scale_rule="mse"``, which is meant for weights, the scale is that one or half of it, whichever leaves the
    smaller squared error in the block; torch's operations compute it on any device.

    Parameters
    ----------
    a : torch.Tensor
        ``[..., K]`` float16 or bfloat16, on the CPU also float32; K a multiple of 32.
    backend, enable_pdl
        Upstream's; they mean nothing on the CPU.
    sfLayout : SfLayout
        Layout of the scales; on the CPU ``layout_128x4`` or ``layout_linear`` (``layout_8x4`` is upstream's and needs
        CUDA).
    scale_rule : str
        ``"amax"`` or ``"mse"``; the latter with the CPU's layouts.

    Returns
    -------
    packed : torch.Tensor
        uint8 ``[..., K / 2]``, the even element in the low nibble.
    scales : torch.Tensor
        uint8 ``[pad128(rows), pad4(K / 32)]`` with zeros as padding, or ``[rows, K / 32]``.

    Raises
    ------
    TypeError, ValueError
        No tensor, or neither on a CUDA device nor on the CPU; an unknown rule.  On the CPU, and with ``"mse"``: another
        dtype, K no multiple of 32, or a layout that the CPU does not make.
    """
    require_computing_device("a", a)
    upstreams = a.device.type != "cpu" or _only_upstream_has(sfLayout)
    if mx_cpu.check_scale_rule(scale_rule) == "amax" and upstreams:
        return _upstream.mxfp4_quantize(a, backend, enable_pdl, sfLayout)
    mx_cpu.check_float_input("a", a)
    layout = mx_cpu.check_layout("sfLayout", sfLayout)
    packed, scales = mx_cpu.quantize_mxfp4_linear(a.detach(), scale_rule)
    return packed, mx_cpu.arrange_scales(scales, layout)


@flashinfer_api
def mxfp4_dequantize(
    a_fp4: torch.Tensor,
    a_sf: torch.Tensor,
    sfLayout: SfLayout = SfLayout.layout_128x4,
) -> torch.Tensor:
    """Values of an MXFP4 matrix as float32.

    CUDA tensors are upstream's; CPU tensors are computed on the CPU and need no compiled module.

    Parameters
    ----------
    a_fp4 : torch.Tensor
        uint8 ``[M, K / 2]``, the even element in the low nibble; K a multiple of 32.
    a_sf : torch.Tensor
        UE8M0 scales, uint8 or float8_e8m0fnu, of any shape with as many bytes as the layout has.
    sfLayout : SfLayout
        Layout of the scales; on the CPU ``layout_128x4`` or ``layout_linear`` (``layout_8x4`` is upstream's and needs
        CUDA).

    Returns
    -------
    torch.Tensor
        float32 ``[M, K]``; NaN where a scale is 255.

    Raises
    ------
    TypeError, ValueError
        No tensor, or neither on a CUDA device nor on the CPU.  On the CPU: another dtype, rank or K, scales of another
        size, or a layout that the CPU does not read.
    """
    require_computing_device("a_fp4", a_fp4)
    require_computing_device("a_sf", a_sf)
    if a_fp4.device.type != "cpu" or a_sf.device.type != "cpu" or _only_upstream_has(sfLayout):
        return _upstream.mxfp4_dequantize(a_fp4, a_sf, sfLayout)
    layout = mx_cpu.check_layout("sfLayout", sfLayout)
    matrix = a_fp4.ndim == 2 and a_fp4.layout is torch.strided
    if not matrix or a_fp4.dtype != torch.uint8 or a_fp4.shape[1] % 16:
        raise ValueError(f"a_fp4 is {describe(a_fp4)}; it must be torch.uint8 [M, K / 2], K a multiple of 32")
    if a_sf.layout is not torch.strided or a_sf.dtype not in UE8M0_DTYPES:
        raise ValueError(f"a_sf is {describe(a_sf)}; it must be dense, {' or '.join(map(str, UE8M0_DTYPES))}")
    require_storage("a_fp4", a_fp4)
    require_storage("a_sf", a_sf)
    rows, blocks = a_fp4.shape[0], a_fp4.shape[1] // 16
    swizzled = layout is SfLayout.layout_128x4
    needed = mx_cpu.swizzled_size(rows, blocks) if swizzled else rows * blocks
    scales = a_sf.contiguous().view(torch.uint8)
    if scales.numel() != needed:
        raise ValueError(
            f"a_sf holds {scales.numel()} bytes; {layout.name} scales of a {rows} x {blocks * 32} matrix have {needed}"
        )
    linear = mx_cpu.unswizzle_128x4(scales, rows, blocks) if swizzled else scales.view(rows, blocks)
    return mx_cpu.dequantize_mxfp4_linear(a_fp4.contiguous(), linear)


@flashinfer_api
def block_scale_interleave(unswizzled_sf: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Linear block scales to the 128x4 layout, flat.

    On the CPU and on devices that this fork serves (SM12x) torch's own operations rearrange them, because this happens
    only when weights are loaded and upstream's module for it needs ``cublasLt.h`` to build. Other devices use
    upstream's module.

    Parameters
    ----------
    unswizzled_sf : torch.Tensor
        ``[rows, blocks]`` or ``[experts, rows, blocks]``, uint8 or bfloat16.
    out : torch.Tensor, optional
        Flat, contiguous, of the same dtype and device.

    Returns
    -------
    torch.Tensor
        Flat: ``pad128(rows) * pad4(blocks)`` elements an expert, zeros as padding.

    Raises
    ------
    TypeError, ValueError
        No tensor, or neither on a CUDA device nor on the CPU.  Where it is not upstream's: another dtype or rank, or an
        ``out`` that does not fit.
    """
    require_computing_device("unswizzled_sf", unswizzled_sf)
    if unswizzled_sf.device.type != "cpu" and not devices.serves(unswizzled_sf.device):
        given = {} if out is None else {"out": out}  # 0.7.2 has no such argument
        return _upstream.block_scale_interleave(unswizzled_sf, **given)
    dense = unswizzled_sf.layout is torch.strided
    if not dense or unswizzled_sf.ndim not in (2, 3) or unswizzled_sf.dtype not in (torch.uint8, torch.bfloat16):
        raise ValueError(
            f"unswizzled_sf is {describe(unswizzled_sf)}; it must be torch.uint8 or torch.bfloat16, 2-D or 3-D"
        )
    require_storage("unswizzled_sf", unswizzled_sf)
    swizzled = mx_cpu.swizzle_128x4(unswizzled_sf).flatten()
    if out is None:
        return swizzled
    require_tensor("out", out, [swizzled.shape], [swizzled.dtype], swizzled.device)
    return out.copy_(swizzled)


nvfp4_block_scale_interleave = block_scale_interleave
