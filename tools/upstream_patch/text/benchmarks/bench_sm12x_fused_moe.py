"""MoE layers with MXFP4 weights on SM120/SM121: cutlass_fused_moe(backend="sm12x").

python benchmarks/bench_sm12x_fused_moe.py --model gpt-oss-120b --tokens 1 8 64 2048
"""

import argparse

import numpy as np
import torch

from flashinfer.autotuner import autotune
from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size
from flashinfer.testing.utils import bench_gpu_time
from flashinfer.utils import get_compute_capability

# Hidden size, intermediate size, experts, top_k.
MODELS = {"gpt-oss-120b": (2880, 2880, 128, 4), "gpt-oss-20b": (2880, 2880, 32, 4)}


def _scales(experts, rows, k):
    shape = (experts, (rows + 127) // 128 * 128, (k // 32 + 3) // 4 * 4)
    return torch.full(shape, 120, dtype=torch.uint8, device="cuda")


def _bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def bench_layer(model, tokens, mode, tune):
    hidden, inter, experts, top_k = MODELS[model]
    fc1 = _bytes(experts, 2 * inter, hidden // 2)
    fc2 = _bytes(experts, hidden, inter // 2)
    scales = [_scales(experts, 2 * inter, hidden), _scales(experts, hidden, inter)]
    w4a8 = mode == "w4a8"
    if w4a8:
        ones = torch.ones(experts, device="cuda")
        scales = [scales[0], ones, scales[1], ones]
    x = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    flags = {"use_mxfp8_act_scaling": w4a8, "use_w4_group_scaling": not w4a8}
    size = cutlass_fused_moe_workspace_size(
        tokens,
        hidden,
        inter,
        experts,
        top_k,
        x_dtype=x.dtype,
        weight_dtype=fc1.dtype,
        backend="sm12x",
        **flags,
    )
    arguments = (
        x,
        ids.to(torch.int32),
        torch.full((tokens, top_k), 1 / top_k, device="cuda"),
        fc1,
        fc2,
        torch.bfloat16,
        scales,
    )
    named = {
        "output": torch.empty_like(x),
        "workspace_buffer": torch.empty(size, dtype=torch.uint8, device="cuda"),
        "backend": "sm12x",
        **flags,
    }
    with autotune(tune):
        cutlass_fused_moe(*arguments, **named)
    measured = bench_gpu_time(
        lambda: cutlass_fused_moe(*arguments, **named),
        dry_run_time_ms=10,
        repeat_time_ms=100,
    )
    ms = np.median(measured)
    hit = ids.unique().numel()
    gigabytes = hit * 3 * inter * hidden * (0.5 + 1 / 32) * 1e-9
    print(
        f"{model} {mode} tokens={tokens}: {ms * 1e3:.1f} us, "
        f"{hit} experts' weights at {gigabytes / ms * 1e3:.0f} GB/s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt-oss-120b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 2048])
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if get_compute_capability(torch.device("cuda"))[0] != 12:
        raise SystemExit("backend='sm12x' is for SM120 and SM121")
    for mode in ("w4a8", "w4a16"):
        for tokens in args.tokens:
            bench_layer(args.model, tokens, mode, args.tune)
