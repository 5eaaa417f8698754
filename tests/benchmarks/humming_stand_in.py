# SPDX-License-Identifier: Apache-2.0
"""What the driver uses of HUMMING, in torch: the package's signatures, and what its functions do as their names say."""

from __future__ import annotations

import dataclasses
import json
import re
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from flashinfer.testing.mxfp_formats import dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp8

SMS = 3
E4M3_MAX = 448.0
TOKENS_OF_MAJOR = {9: "dynamic_token", 12: "dynamic_group"}  # Hopper's kernels refuse E8M0 scales of tokens


@dataclasses.dataclass(kw_only=True)
class HummingWeightSchema:
    quant_method: str = "humming"
    b_dtype: Any
    bs_dtype: Any = None
    weight_scale_group_size: int = 0
    weight_scale_group_size_n: int = 0
    weight_scale_type: Any = None
    weight_scale_2_type: Any = None
    has_zero_point: bool = False
    is_fp_zero_point: bool = False
    hadamard_block_size: int = 0


@dataclasses.dataclass(kw_only=True)
class HummingInputSchema:
    quant_method: str = "humming"
    a_dtype: Any = None
    input_scale_group_size: int = 0
    input_scale_dtype: Any = None
    input_quant_mode: Any = None


def prepare_and_transform_humming_tensors(
    tensors: dict[str, torch.Tensor],
    shape_n: int,
    shape_k: int,
    weight_schema: HummingWeightSchema,
    input_schema: HummingInputSchema | None = None,
    num_experts: int | None = None,
    pad_n_to_multiple: int = 1,
    pad_k_to_multiple: int = 1,
    has_bias: bool = False,
    torch_dtype: torch.dtype | None = None,
    device: int | torch.device | None = None,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The matrix in float64 stands for its rearranged words; what was given is overwritten."""
    assert input_schema is not None
    assert (weight_schema.bs_dtype, weight_schema.weight_scale_group_size) == ("float8e8m0", 32)
    assert (has_bias, torch_dtype) == (True, torch.bfloat16)
    assert input_schema.input_quant_mode in ("none", TOKENS_OF_MAJOR[torch.cuda.get_device_properties(device).major])
    bits = {"float4e2m1": 4, "float8e4m3": 8}[weight_schema.b_dtype]
    lead = () if num_experts is None else (num_experts,)
    weight, scale, bias = tensors["weight"], tensors["weight_scale"], tensors["bias"]
    assert (weight.shape, weight.dtype) == ((*lead, shape_n, shape_k * bits // 32), torch.int32)
    assert (scale.shape, scale.dtype) == ((*lead, shape_n, shape_k // 32), torch.float8_e8m0fnu)
    assert (bias.shape, bias.dtype) == ((*lead, shape_n), torch.bfloat16)
    raw, exponents = weight.view(torch.uint8), scale.view(torch.uint8)
    matrix = (
        dequantize_mxfp4(raw, exponents) if bits == 4 else dequantize_mxfp8(raw.view(torch.float8_e4m3fn), exponents)
    )
    weight.zero_()
    scale.view(torch.uint8).zero_()
    config = SimpleNamespace(
        shape_n=shape_n + -shape_n % pad_n_to_multiple, shape_k=shape_k + -shape_k % pad_k_to_multiple,
        n=shape_n, k=shape_k, input=input_schema, experts=num_experts,
    )  # fmt: skip
    return config, {"weight": matrix, "weight_scale": scale, "bias": bias}


def get_heuristics_config(
    layer_config: Any,
    shape_m: int | None = None,
    use_f16_accum: bool = False,
    use_batch_invariant: bool = False,
    use_m_major_input_scale: bool = False,
    gemm_type: Any = "dense",
    device: int | torch.device | None = None,
) -> list[list[Any]]:
    """Blocks of 8, 16 and 32 rows by the number of rows; the middle ones where K is padded to more than 128."""
    assert shape_m is None
    assert gemm_type == ("dense" if layer_config.experts is None else "indexed")
    middle = 16 if layer_config.shape_k > 128 else 8
    return [
        [low, high, {"block_shape": (m, 128, 64)}] for low, high, m in ((0, 4, 8), (4, 24, middle), (24, 2**30, 32))
    ]


def _quantized(config: Any, inputs: torch.Tensor) -> torch.Tensor:
    mode = config.input.input_quant_mode
    if mode == "none":
        return inputs.double()
    assert config.input.a_dtype == "float8e4m3"
    if mode == "dynamic_group":
        assert (config.input.input_scale_group_size, config.input.input_scale_dtype) == (32, "float8e8m0")
        return dequantize_mxfp8(*quantize_mxfp8(inputs.float()))
    assert (mode, config.input.input_scale_group_size) == ("dynamic_token", 0)
    scale = inputs.double().abs().amax(dim=1, keepdim=True) / E4M3_MAX
    return (inputs.double() / scale).to(torch.float8_e4m3fn).double() * scale


def humming_forward(
    config: Any,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    weight_scale_2: torch.Tensor | None = None,
    outputs: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    input_scale_2: torch.Tensor | None = None,
    sorted_ids: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    num_tokens_padded: torch.Tensor | None = None,
    expert_layout: torch.Tensor | None = None,
    locks: torch.Tensor | None = None,
    top_k: int = 1,
    valid_shape_m: int = 0,
    compute_config: Any = None,
    tuning_config: Any = None,
    hadamard_block_size: int | None = None,
    use_pdl: bool | None = None,
) -> torch.Tensor:
    assert outputs is not None
    assert locks is not None
    assert bias is not None
    assert (locks.dtype, len(locks), bool(locks.any())) == (torch.int32, 8 * SMS, False)
    assert inputs.shape[1] == config.k
    assert (outputs.shape[1], outputs.dtype) == (config.n, torch.bfloat16)
    assert outputs.is_contiguous()
    assert valid_shape_m == len(outputs) == len(inputs) * top_k
    kind = json.loads(compute_config)["gemm_type"]
    (schedule,) = [each for low, high, each in json.loads(tuning_config) if low < valid_shape_m <= high]
    assert any(low < 1 <= high for low, high, _ in json.loads(tuning_config)), "the launcher looks for one row's too"
    block = schedule["block_shape"][0]
    tokens = _quantized(config, inputs)
    outputs.fill_(torch.nan)
    if kind == "dense":
        assert sorted_ids is None
        outputs.copy_(tokens @ weight.T + bias.double())
        return outputs
    assert sorted_ids is not None
    assert expert_ids is not None
    assert num_tokens_padded is not None
    for first in range(0, int(num_tokens_padded), block):
        expert = int(expert_ids[first // block])
        rows = sorted_ids[first : first + block]
        rows = rows[rows < len(outputs)].long()
        outputs[rows] = (tokens[rows // top_k] @ weight[expert].T + bias[expert].double()).to(outputs.dtype)
    return outputs


def may_process_input(
    config: Any,
    inputs: torch.Tensor,
    *,
    outputs: torch.Tensor | None = None,
    group_scales: torch.Tensor | None = None,
    token_scales: torch.Tensor | None = None,
    activation_type: str = "none",
    activation_impl: str | None = None,
    hadamard_block_size: int | None = None,
    layout: str = "normal",
    expert_tokens: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
    num_valid_tokens: torch.Tensor | None = None,
    zero_invalid: bool = False,
    m_major_scale: bool = False,
    use_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The expression is C++ of the two halves of a row, float both: here it is read as Python."""
    assert outputs is not None
    assert activation_impl is not None
    assert activation_type == "binary_split"
    a, b = inputs.float().chunk(2, dim=1)
    names = {
        "a": a, "b": b, "expf": torch.exp,
        "fminf": lambda value, bound: value.clamp(max=bound), "fmaxf": lambda value, bound: value.clamp(min=bound),
    }  # fmt: skip
    python, constants = re.subn(r"\b(\d+\.\d*)f\b", r"\1", activation_impl)
    assert constants == len(re.findall(r"\d+\.", activation_impl)), "a constant of C++ is a double without its f"
    outputs.copy_(eval(python, {"__builtins__": {}}, names))
    return outputs, None, None


def modules() -> dict[str, ModuleType]:
    """By name, what is to be put into ``sys.modules``."""
    of_module = {
        "humming": (),
        "humming.forward": (humming_forward, may_process_input),
        "humming.schema": (HummingInputSchema, HummingWeightSchema),
        "humming.transform": (prepare_and_transform_humming_tensors,),
        "humming.tune": (get_heuristics_config,),
    }
    made = {name: ModuleType(name) for name in of_module}
    for name, members in of_module.items():
        for member in members:
            setattr(made[name], member.__name__, member)
    return made
