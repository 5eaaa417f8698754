# SPDX-License-Identifier: Apache-2.0
"""vLLM's Marlin kernels for MXFP8 and MXFP4 weights, in PyTorch: the layout of its own is not made, the product is
the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what needs the GPU of both kernel classes; choosing them stays vLLM's and the plugin's."""
    from vllm.model_executor.kernels.linear import MarlinMxFp4LinearKernel, MarlinMxfp8LinearKernel

    from flashinfer.quantization import mx_cpu

    def apply(kernel: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_fp8 = isinstance(kernel, MarlinMxfp8LinearKernel)
        dequantize = mx_cpu.dequantize_mxfp8_linear if is_fp8 else mx_cpu.dequantize_mxfp4_linear
        weight = dequantize(layer.weight.data, layer.weight_scale.data).to(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    for cls in (MarlinMxfp8LinearKernel, MarlinMxFp4LinearKernel):
        monkeypatch.setattr(cls, "process_weights_after_loading", lambda kernel, layer: None)
        monkeypatch.setattr(cls, "apply_weights", apply)
