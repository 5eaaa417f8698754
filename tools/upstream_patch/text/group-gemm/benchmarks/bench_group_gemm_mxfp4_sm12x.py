"""MXFP8 x MXFP4 grouped GEMM on SM120/SM121: backend="sm12x" beside "cutlass".

python benchmarks/bench_group_gemm_mxfp4_sm12x.py
"""

import numpy as np
import torch

import flashinfer
from flashinfer.testing.utils import bench_gpu_time
from flashinfer.utils import get_compute_capability


def bench_group_gemm(groups, m, n, k, backend):
    cum_m = groups * m
    a = torch.randn(cum_m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device="cuda")
    rows = (cum_m + 127 * groups) // 128 * 128
    a_scale = torch.full((rows, k // 32), 127, dtype=torch.uint8, device="cuda")
    b_scale = torch.full((groups, (n + 127) // 128 * 128, k // 32), 127, dtype=torch.uint8, device="cuda")
    m_indptr = torch.arange(groups + 1, dtype=torch.int32, device="cuda") * m
    out = torch.empty(cum_m, n, dtype=torch.bfloat16, device="cuda")
    measured = bench_gpu_time(
        lambda: flashinfer.gemm.group_gemm_mxfp4_nt_groupwise(
            a, b, a_scale, b_scale, m_indptr, out=out, backend=backend
        ),
        dry_run_time_ms=10,
        repeat_time_ms=100,
    )
    ms = np.median(measured)
    weight_bytes = groups * n * (k // 2 + k // 32)
    print(
        f"{backend:>8} groups={groups} m={m} n={n} k={k}: {ms * 1e3:.1f} us, "
        f"{2 * cum_m * n * k * 1e-9 / ms:.2f} TFLOPs/s, "
        f"weights at {weight_bytes * 1e-6 / ms:.0f} GB/s"
    )


if __name__ == "__main__":
    if get_compute_capability(torch.device("cuda"))[0] != 12:
        raise SystemExit("backend='sm12x' is for SM120 and SM121")
    for groups in (8, 32, 128):
        for m in (4, 16, 64, 256):
            for backend in ("cutlass", "sm12x"):
                bench_group_gemm(groups, m, 2880, 2944, backend)
