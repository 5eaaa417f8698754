# SPDX-License-Identifier: Apache-2.0
"""``mm_fp4`` with MXFP4 operands where upstream has no kernel."""

from __future__ import annotations

import inspect

import pytest
import torch

import flashinfer
from flashinfer.fused_moe import sm12x_dispatch
from flashinfer.gemm import gemm_base, sm12x_mm_fp4
from flashinfer.quantization import mx_cpu


def operands(m: int, n: int, k: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Packed values and 128x4 scales of ``a`` and of ``b`` (column-major, as vLLM passes them), and both in float64."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    matrices = [torch.randn(rows, k, generator=generator).to(torch.bfloat16) for rows in (m, n)]
    (a, a_scales), (b, b_scales) = (mx_cpu.quantize_mxfp4_linear(x) for x in matrices)
    exact = [mx_cpu.dequantize_mxfp4_linear(x, s).double() for x, s in ((a, a_scales), (b, b_scales))]
    return a, b.t(), mx_cpu.swizzle_128x4(a_scales), mx_cpu.swizzle_128x4(b_scales).t(), *exact


@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 32), (3, 130, 160), (130, 4200, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_tensors_are_multiplied_to_the_outputs_precision(m, n, k, dtype):
    a, b, a_scales, b_scales, left, right = operands(m, n, k, seed=5)
    alpha = torch.tensor([0.75])
    got = flashinfer.mm_fp4(a, b, a_scales, b_scales, alpha, dtype, block_size=32, backend="cute-dsl", use_nvfp4=False)
    exact = 0.75 * left @ right.t()
    # float32 sums of k products, each of them exact; then one rounding to the output.
    accumulation = k * torch.finfo(torch.float32).eps * (0.75 * left.abs() @ right.abs().t())
    rounding = torch.finfo(dtype).eps / 2 * (exact.abs() + accumulation) + torch.finfo(dtype).tiny
    assert ((got.double() - exact).abs() <= accumulation + rounding).all()


def test_the_signature_is_upstreams():
    def described(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.name != "skip_check"]

    assert described(gemm_base.mm_fp4) == described(gemm_base._upstream.mm_fp4)


@pytest.mark.parametrize(
    ("backend", "nvfp4", "sm12x", "ours"),
    [
        ("cute-dsl", False, True, True),
        ("cute-dsl", True, True, False),
        ("cudnn", False, True, False),
        ("auto", False, True, False),
        ("cute-dsl", False, False, False),
    ],
)
def test_only_what_upstream_refuses_on_sm12x_is_taken_from_it(monkeypatch, backend, nvfp4, sm12x, ours):
    monkeypatch.setattr(sm12x_dispatch, "has_block_scaled_mma", lambda index: sm12x)
    assert sm12x_mm_fp4.takes(torch.device("cuda", 0), backend, nvfp4) is ours


def test_out_is_written_and_checked():
    a, b, a_scales, b_scales, *_ = operands(2, 8, 64, seed=6)
    given = {"block_size": 32, "backend": "cute-dsl", "use_nvfp4": False}
    out = torch.empty(2, 8, dtype=torch.bfloat16)
    assert flashinfer.mm_fp4(a, b, a_scales, b_scales, out=out, **given) is out
    with pytest.raises(ValueError, match=r"out is torch.bfloat16 \(8, 2\); it must be torch.bfloat16 \(2, 8\)"):
        flashinfer.mm_fp4(a, b, a_scales, b_scales, out=out.t().contiguous(), **given)
    with pytest.raises(ValueError, match=r"b_descale is .* it must hold the 512 bytes of 128x4 scales of 8 rows"):
        flashinfer.mm_fp4(a, b, a_scales, b_scales[:, :64], **given)
    with pytest.raises(ValueError, match="takes 128x4 scales"):
        flashinfer.mm_fp4(a, b, a_scales, b_scales, use_8x4_sf_layout=True, **given)
