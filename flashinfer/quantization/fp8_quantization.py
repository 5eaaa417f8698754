# SPDX-License-Identifier: Apache-2.0
"""Upstream's FP8 quantization; ``mxfp8_quantize`` takes CPU tensors too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from ..api_logging import flashinfer_api
from ..sm12x.checks import (
    BLOCK_SIZE,
    require_choice,
    require_computing_device,
    require_int,
    round_up,
)
from ..tllm_enums import SfLayout
from ..trace.templates.quantize import mxfp8_quantize_trace
from . import mx_cpu

Backend = Literal["cuda", "cute-dsl"]


@flashinfer_api(trace=mxfp8_quantize_trace)
def mxfp8_quantize(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: Backend = "cuda",
    sf_swizzle_layout: SfLayout | None = None,
    *,
    scale_rule: mx_cpu.ScaleRule = "amax",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to MXFP8: e4m3 values with one UE8M0 scale per 32 of them along the last dimension.

    CUDA tensors are upstream's; a CPU tensor is quantized on the CPU to the same format.  The scale is ``amax / 448``
    rounded up to a power of two (byte 0 for a block of zeros), values round to nearest even and saturate at 448, also
    infinity; NaN stays NaN and takes no part in ``amax``.

    With ``scale_rule="mse"`` the scale is that one or half of it, whichever leaves the smaller squared error in the
    block; torch's operations compute it on any device. For e4m3, unlike for e2m1, it gains next to nothing.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., K]`` float16 or bfloat16, on the CPU also float32; K a multiple of 32.
    is_sf_swizzled_layout : bool
        128x4 scales, else linear ones.
    alignment : int
        Rows of the result are padded with zeros to ``padded_K``, the next multiple of it; itself a multiple of 32.
    enable_pdl, backend
        Upstream's; they mean nothing on the CPU.
    sf_swizzle_layout : SfLayout, optional
        Overrides ``is_sf_swizzled_layout``; on the CPU ``layout_128x4`` or ``layout_linear``.
    scale_rule : str
        ``"amax"`` or ``"mse"``; the latter with the CPU's layouts.

    Returns
    -------
    values : torch.Tensor
        float8_e4m3fn ``[..., padded_K]``, zeros from K on.
    scales : torch.Tensor
        uint8, flat, of the padded rows: ``pad128(rows) * pad4(padded_K / 32)`` bytes in 128x4 layout, or
        ``rows * padded_K / 32`` linear ones.  Whatever belongs to no block of the input is 0: blocks from K on, and in
        128x4 layout the rows and columns that fill its tiles.

    Raises
    ------
    TypeError, ValueError
        ``input`` is no tensor, or neither on a CUDA device nor on the CPU; an unknown rule.  On the CPU, and with
        ``"mse"``: another dtype, K or ``alignment`` no multiple of 32, or a layout that the CPU does not make.
    """
    require_computing_device("input", input)
    if mx_cpu.check_scale_rule(scale_rule) == "amax" and input.device.type != "cpu":
        return _upstream.mxfp8_quantize(input, is_sf_swizzled_layout, alignment, enable_pdl, backend, sf_swizzle_layout)
    require_choice("backend", backend, get_args(Backend))
    require_int("is_sf_swizzled_layout", is_sf_swizzled_layout, 0, 1, "True or False")
    if sf_swizzle_layout is None:
        sf_swizzle_layout = SfLayout.layout_128x4 if is_sf_swizzled_layout else SfLayout.layout_linear
    mx_cpu.check_float_input("input", input)
    sf_swizzle_layout = mx_cpu.check_layout("sf_swizzle_layout", sf_swizzle_layout)
    alignment = require_int("alignment", alignment, 1)
    if alignment % BLOCK_SIZE:
        raise ValueError(f"alignment is {alignment}; it must be a positive multiple of {BLOCK_SIZE}")
    padding = round_up(input.shape[-1], alignment) - input.shape[-1]
    padded = torch.nn.functional.pad(input.detach(), (0, padding))
    values, scales = mx_cpu.quantize_mxfp8_linear(padded, scale_rule)
    return values, mx_cpu.arrange_scales(scales, sf_swizzle_layout).reshape(-1)
