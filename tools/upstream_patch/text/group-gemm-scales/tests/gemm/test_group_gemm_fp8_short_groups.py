import pytest
import torch

from flashinfer.gemm import group_gemm_fp8_nt_groupwise
from flashinfer.utils import get_compute_capability

BLOCK = 128


# Fewer rows than a tile are left to the end of a_scale where the last group begins.
@pytest.mark.parametrize("rows", [[128, 0, 40], [4], [256, 12]])
@pytest.mark.parametrize("scale_major_mode", ["MN", "K"])
def test_group_gemm_fp8_short_groups(rows, scale_major_mode):
    if get_compute_capability(torch.device("cuda"))[0] != 12:
        pytest.skip("the SM120 kernels")
    torch.manual_seed(0)
    groups, cum_m, n, k = len(rows), sum(rows), 256, 384

    def fp8(*shape):
        return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)

    def scales(*shape):
        return torch.rand(*shape, device="cuda") + 0.5

    a, b = fp8(cum_m, k), fp8(groups, n, k)
    a_scale = scales(cum_m, k // BLOCK)
    b_scale = scales(groups, n // BLOCK, k // BLOCK)
    ends = torch.tensor([0, *rows]).cumsum(0)
    x = a.double() * a_scale.double().repeat_interleave(BLOCK, dim=1)
    w = b.double() * b_scale.double().repeat_interleave(BLOCK, dim=1).repeat_interleave(BLOCK, dim=2)
    if scale_major_mode == "MN":
        a_scale, b_scale = a_scale.T.contiguous(), b_scale.mT.contiguous()
    out = group_gemm_fp8_nt_groupwise(
        a,
        b,
        a_scale,
        b_scale,
        ends.to(device="cuda", dtype=torch.int32),
        scale_granularity_mnk=(1, BLOCK, BLOCK),
        scale_major_mode=scale_major_mode,
        out_dtype=torch.bfloat16,
    )
    for group in range(groups):
        part = slice(int(ends[group]), int(ends[group + 1]))
        expected = x[part] @ w[group].T
        magnitude = x[part].abs() @ w[group].abs().T
        bound = 2.0**-8 * expected.abs() + (k + 8) * 2.0**-24 * magnitude
        assert ((out[part].double() - expected).abs() <= bound).all()
