import itertools
from collections.abc import Sequence

import pytest
import torch

from flashinfer.gemm import group_gemm_mxfp4_nt_groupwise
from flashinfer.jit.sm12x.heuristics import choose_group_gemm
from tests.test_helpers.mx_formats import (
    assert_close,
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_mxfp4,
    quantize_mxfp8,
    skip_unless_sm12x,
    swizzle_scales,
)


# take flashinfer/testing/gemm_reference.py: padded_group_offsets
# take flashinfer/testing/moe_inputs.py: _scales_of_groups


def _make_groups(rows, n, k, fp8_dtype=torch.float8_e4m3fn):
    torch.manual_seed(0)
    a, a_sf = quantize_mxfp8(torch.randn(sum(rows), k, device="cuda"))
    if fp8_dtype == torch.float8_e5m2:
        a = a.float().to(fp8_dtype)
    b, b_sf = quantize_mxfp4(torch.randn(len(rows), n, k, device="cuda"))
    groups = list(zip(dequantize_mxfp8(a, a_sf).split(rows), dequantize_mxfp4(b, b_sf), strict=True))
    expected = torch.cat([x @ w.T for x, w in groups])
    magnitude = torch.cat([x.abs() @ w.abs().T for x, w in groups])
    ends = [0, *itertools.accumulate(rows)]
    m_indptr = torch.tensor(ends, dtype=torch.int32, device="cuda")
    return a, b, _scales_of_groups(a_sf, ends), swizzle_scales(b_sf), m_indptr, expected, magnitude


def _assert_close(out, expected, magnitude, k):
    assert_close(out, expected, (k + 2) * 2.0**-24 * magnitude + 1e-7)  # float32 sums in any order


@pytest.mark.parametrize("rows", [[5, 3], [40, 0, 23], [130], [300, 1, 0, 19]])
@pytest.mark.parametrize("n,k", [(128, 128), (264, 384)])
@pytest.mark.parametrize("fp8_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_group_gemm_mxfp4_sm12x(rows, n, k, fp8_dtype, out_dtype):
    skip_unless_sm12x()
    *operands, expected, magnitude = _make_groups(rows, n, k, fp8_dtype)
    out = group_gemm_mxfp4_nt_groupwise(*operands, out_dtype=out_dtype, backend="sm12x")
    assert out.dtype == out_dtype
    _assert_close(out, expected, magnitude, k)


def test_out_is_written_and_repeats():
    skip_unless_sm12x()
    *operands, expected, magnitude = _make_groups([70, 0, 9], 128, 256)
    out = torch.empty(79, 128, dtype=torch.bfloat16, device="cuda")
    again = group_gemm_mxfp4_nt_groupwise(*operands, out=out, backend="sm12x")
    assert again is out
    _assert_close(out, expected, magnitude, 256)
    assert torch.equal(out, group_gemm_mxfp4_nt_groupwise(*operands, backend="sm12x"))


def test_errors_come_before_a_launch():
    skip_unless_sm12x()
    a, b, a_scale, b_scale, m_indptr, _, _ = _make_groups([8, 8], 128, 128)
    with pytest.raises(ValueError, match="a_scale must have shape"):
        group_gemm_mxfp4_nt_groupwise(a, b, a_scale[:128], b_scale, m_indptr, backend="sm12x")
    with pytest.raises(ValueError, match="b_scale must have shape"):
        group_gemm_mxfp4_nt_groupwise(a, b, a_scale, b_scale[:1], m_indptr, backend="sm12x")
    out = torch.empty(128, 16, dtype=torch.bfloat16, device="cuda").T
    with pytest.raises(ValueError, match="out must be contiguous"):
        group_gemm_mxfp4_nt_groupwise(a, b, a_scale, b_scale, m_indptr, out=out, backend="sm12x")


@pytest.mark.parametrize("cum_m,groups,tile", [(4, 4, 8), (128, 1, 128), (60, 2, 32)])
def test_the_tile_follows_the_rows_of_a_group(cum_m, groups, tile):
    assert choose_group_gemm(cum_m, groups).token_tile >= min(cum_m // groups, tile)


def test_compute_capabilities():
    supported = group_gemm_mxfp4_nt_groupwise.is_backend_supported
    assert supported("sm12x", 120) and supported("sm12x", 121)
    assert not supported("sm12x", 100) and supported("cutlass", 100)
