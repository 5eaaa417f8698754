# SPDX-License-Identifier: Apache-2.0
"""HUMMING's own preparation of weights, on the CPU, of what the driver hands over: a process of its own runs it.

What it runs on a GPU is replaced: the last rearrangement of words by none, and the correction of fp8's weights, which
changes none of those here, by a check of that. The rest is the package's: the sizes and dtypes that it demands, padding,
the permutation of scales, and the split of an exponent into a scale and a second one.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # looks for triton, so it goes before what stands for that
import torch.utils.cpp_extension

SM, SMS = 90, 132


def _without_gpu() -> Any:
    """The package's functions that look at the GPU find a Hopper."""
    sys.modules.setdefault("triton", ModuleType("triton"))
    import humming.device
    import humming.transform

    fields = {
        "index": 0,
        "name": "NVIDIA H200",
        "is_ppu": False,
        "sm_count": SMS,
        "sm_version": SM,
        "sm_major": SM // 10,
    }
    gpu: Any = SimpleNamespace(**fields, max_smem_size=227 << 10)
    humming.device.current_device._value = gpu
    first = object.__new__(humming.device.DeviceInfo)
    first._index, first._value = 0, gpu
    humming.device.DeviceInfo._instances[0] = first
    humming.transform.DeviceInfo = lambda device: gpu
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=SMS, major=SM // 10)

    def repack(inputs: torch.Tensor, **_: Any) -> torch.Tensor:
        assert (inputs.dtype, inputs.is_contiguous()) == (torch.int32, True)
        return inputs

    def correct(weight: torch.Tensor, offsets: torch.Tensor, inplace: bool) -> torch.Tensor:
        assert not offsets.any(), "scales of this tensor are further apart than fp8's weights can hold"
        return weight

    humming.transform.ops.repack_weight = repack
    humming.transform.ops.process_mxfp4_w4a8_weight = correct
    return humming.transform


def _columns(transform: Any, n: int, groups: int) -> torch.Tensor:
    """Where the package puts each scale: its own function on numbers."""
    numbers = torch.arange(n * groups, dtype=torch.int32).view(n, groups)
    return torch.as_tensor(transform.transform_humming_weight_scale(numbers).flatten())


def main() -> None:
    transform = _without_gpu()
    from humming.schema import Mxfp4WeightSchema
    from humming.schema.modelopt import ModeloptMxfp8WeightSchema
    from moe_bench import peer_humming

    from flashinfer.quantization import mx_cpu
    from flashinfer.testing.mxfp_formats import decode_scales, dequantize_mxfp4, dequantize_mxfp8

    handed: dict[str, torch.Tensor] = {}
    prepare = peer_humming.prepare_and_transform_humming_tensors

    def remember(**given: Any) -> Any:
        handed.update({name: tensor.clone() for name, tensor in given["tensors"].items()})
        return prepare(**given)

    peer_humming.prepare_and_transform_humming_tensors = remember
    seed, agreed = 11, 0
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    for mxfp4, experts, activation in (
        (True, None, "bf16"),
        (True, 3, "bf16"),
        (False, None, "bf16"),
        (True, None, "fp8"),
    ):
        n, k = 320, 160  # padded to 512 and 256
        wide = torch.randn(*([] if experts is None else [experts]), n, k, generator=generator).bfloat16()
        quantize = mx_cpu.quantize_mxfp4_linear if mxfp4 else mx_cpu.quantize_mxfp8_linear
        values, scales = (each.view(*wide.shape[:-1], -1) for each in quantize(wide.view(-1, k)))
        bias = torch.randn(wide.shape[:-1], generator=generator).bfloat16()
        expected = (dequantize_mxfp4 if mxfp4 else dequantize_mxfp8)(values, scales)
        gemm = peer_humming.Gemm(values, scales, bias, activation, [1, 64])
        # What the package itself makes of a checkpoint of that format.
        schema: Any = (Mxfp4WeightSchema if mxfp4 else ModeloptMxfp8WeightSchema)()
        own, theirs = schema.convert_humming(
            tensors={"weight": values, "weight_scale": scales.view(torch.uint8), "bias": bias},
            shape_n_stacks=[n], shape_k_stacks=[k], param_dtype=torch.bfloat16, num_experts=experts,
        )  # fmt: skip
        assert (str(own.b_dtype), own.weight_scale_group_size) == (str(gemm.config.b_dtype), 32)
        for name, tensor in theirs.items():
            assert tensor.dtype is handed[name].dtype
            assert torch.equal(tensor.view(torch.uint8), handed[name].view(torch.uint8)), name
        # What it laid out, read back: padded with zeros, scales where its function puts them.
        n_padded, k_padded = gemm.config.shape_n, gemm.config.shape_k
        assert (n_padded, k_padded) == (512, 256)
        raw = gemm.tensors["weight"].view(torch.uint8).view(experts or 1, n_padded, -1)
        exponents = gemm.tensors["weight_scale"].view(torch.uint8).view(experts or 1, -1)
        linear = torch.empty_like(exponents)
        linear[:, _columns(transform, n_padded, k_padded // 32).long()] = exponents
        linear = linear.view(experts or 1, n_padded, -1)
        if activation == "fp8":
            # Small exponents of two, without a bias, and one factor of float32 for all.
            factor = gemm.tensors["weight_scale_2"].double()
            assert factor.shape == (1,)
            assert gemm.config.use_fused_e8m0_scale
            linear = (linear.int() + 127).to(torch.uint8)
        else:
            factor = torch.ones(1, dtype=torch.float64)
        assert bool((decode_scales(linear) > 0).all())
        matrix = factor * (
            dequantize_mxfp4(raw, linear) if mxfp4 else dequantize_mxfp8(raw.view(torch.float8_e4m3fn), linear)
        )
        assert torch.equal(matrix[:, :n, :k], expected.view(experts or 1, n, k))
        assert not matrix[:, n:].any()
        assert not matrix[..., k:].any()
        assert gemm.schedules
        agreed += 1
    print(f"{agreed} layouts agree")


if __name__ == "__main__":
    main()
