import pytest
import torch

from flashinfer import mm_fp4, mm_mxfp8
from flashinfer.gemm import mm_bf16_fp4, prepare_bf16_fp4_weights
from flashinfer.jit.sm12x.instances import DENSE_INSTANCES
from tests.test_helpers.mx_formats import (
    assert_close,
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_mxfp4,
    quantize_mxfp8,
    skip_unless_sm12x,
    swizzle_scales,
)


def _assert_close(out, x, w, alpha=1.0):
    magnitude = abs(alpha) * (x.abs() @ w.abs().T)
    assert_close(out, alpha * (x @ w.T), (x.shape[1] + 3) * 2.0**-24 * magnitude + 1e-7)


@pytest.mark.parametrize("m", [1, 9, 40, 200])
@pytest.mark.parametrize("n,k", [(128, 128), (200, 288)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_mm_fp4(m, n, k, out_dtype):
    skip_unless_sm12x()
    torch.manual_seed(0)
    a, a_sf = quantize_mxfp4(torch.randn(m, k, device="cuda"))
    b, b_sf = quantize_mxfp4(torch.randn(n, k, device="cuda"))
    alpha = torch.tensor([0.75], device="cuda")
    scales = swizzle_scales(a_sf), swizzle_scales(b_sf).T
    out = mm_fp4(a, b.T, *scales, alpha, out_dtype, block_size=32, backend="sm12x", use_nvfp4=False)
    assert out.dtype == out_dtype
    _assert_close(out, dequantize_mxfp4(a, a_sf), dequantize_mxfp4(b, b_sf), 0.75)


@pytest.mark.parametrize("m", [1, 9, 40, 200])
@pytest.mark.parametrize("n,k", [(128, 128), (200, 288)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_mm_mxfp8(m, n, k, out_dtype):
    skip_unless_sm12x()
    torch.manual_seed(0)
    a, a_sf = quantize_mxfp8(torch.randn(m, k, device="cuda"))
    b, b_sf = quantize_mxfp8(torch.randn(n, k, device="cuda"))
    scales = swizzle_scales(a_sf).flatten(), swizzle_scales(b_sf).flatten()
    out = mm_mxfp8(a, b.T, *scales, out_dtype=out_dtype, backend="sm12x")
    assert out.dtype == out_dtype
    _assert_close(out, dequantize_mxfp8(a, a_sf), dequantize_mxfp8(b, b_sf))


@pytest.mark.parametrize("m", [1, 9, 40, 100])
@pytest.mark.parametrize("n,k", [(128, 128), (200, 288)])
def test_mm_bf16_fp4(m, n, k):
    skip_unless_sm12x()
    torch.manual_seed(0)
    a = torch.randn(m, k, device="cuda").to(torch.bfloat16)
    b, b_sf = quantize_mxfp4(torch.randn(n, k, device="cuda"))
    named = {"backend": "sm12x", "block_size": 32}
    prepared = prepare_bf16_fp4_weights(b, swizzle_scales(b_sf), **named)
    out = mm_bf16_fp4(a, *prepared, **named)
    _assert_close(out, a.double(), dequantize_mxfp4(b, b_sf))


def test_mm_bf16_fp4_trace():
    skip_unless_sm12x()
    torch.manual_seed(0)
    a = torch.randn(9, 288, device="cuda").to(torch.bfloat16)
    b, b_sf = quantize_mxfp4(torch.randn(200, 288, device="cuda"))
    named = {"b_descale": swizzle_scales(b_sf), "block_size": 32}
    definition = mm_bf16_fp4.fi_trace(a=a, b=b, backend="sm12x", **named)
    assert definition["name"] == "mm_bf16_fp4_sm12x_N200_K288_block_size32"
    rendered = {}  # the reference stands alone
    exec(definition["reference"], rendered)
    expected = rendered["_mm_bf16_fp4_sm12x_reference"](a, b, **named)
    out = mm_bf16_fp4(a, b, backend="sm12x", **named)
    torch.testing.assert_close(out, expected, rtol=2.0**-7, atol=1e-5)


def test_what_a_backend_takes_is_checked():
    skip_unless_sm12x()
    a, a_sf = quantize_mxfp4(torch.randn(4, 128, device="cuda"))
    b, b_sf = quantize_mxfp4(torch.randn(128, 128, device="cuda"))
    scales = swizzle_scales(a_sf), swizzle_scales(b_sf).T
    named = {"backend": "sm12x", "block_size": 32, "use_nvfp4": False}
    with pytest.raises(ValueError, match="128x4 scale factor layout"):
        mm_fp4(a, b.T, *scales, use_8x4_sf_layout=True, **named)
    with pytest.raises(ValueError, match="a_descale must be 512 uint8"):
        mm_fp4(a, b.T, scales[0][:64], scales[1], **named)
    with pytest.raises(ValueError, match="block_size must be 16 for FP4, or 32"):
        x = torch.zeros(4, 128, dtype=torch.bfloat16, device="cuda")
        mm_bf16_fp4(x, b, scales[1], backend="sm12x")


@pytest.mark.parametrize("operator", [mm_fp4, mm_mxfp8, mm_bf16_fp4])
def test_compute_capabilities(operator):
    assert operator.is_backend_supported("sm12x", 120)
    assert operator.is_backend_supported("sm12x", 121)
    assert not operator.is_backend_supported("sm12x", 100)


def test_rows_are_numbered_by_their_place():
    assert [row.index for row in DENSE_INSTANCES] == list(range(len(DENSE_INSTANCES)))
