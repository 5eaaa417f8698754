# SPDX-License-Identifier: Apache-2.0
"""SGLang's way to gpt-oss's experts on SM120, by its own code: weights after loading, then the call, on CPU tensors.

SGLang cannot be imported without the libraries of a GPU. So its two functions are compiled from their source in its
wheel, as they stand there; what they name of SGLang's besides (a context manager of its allocator, settings, two data
classes) is given here.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing import MoEInputs, check_within_bound, moe_reference, swizzle_scales

SPEC = importlib.util.find_spec("sglang")
pytestmark = pytest.mark.skipif(SPEC is None, reason="SGLang's wheel is not installed")
EXPERTS, TOP_K, HIDDEN, INTER, TOKENS = 8, 4, 160, 96, 5


def sglangs(file: str, name: str, names: dict[str, Any]) -> Any:
    """The function ``name`` of a file in SGLang's wheel, with ``names`` as its globals."""
    assert SPEC is not None
    source = (Path((SPEC.submodule_search_locations or [])[0]) / file).read_text()
    node = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list = []
    program = ast.Module([node], [])
    exec(compile(program, file, "exec", annotations.compiler_flag, dont_inherit=True), names)
    return names[name]


@pytest.fixture
def sglang_modules(monkeypatch):
    """What the call imports inside."""
    for module, name, value in (
        ("sglang.srt.layers.moe.token_dispatcher.standard", "StandardCombineInput", types.SimpleNamespace),
        (
            "sglang.srt.layers.moe.topk",
            "TopKOutputChecker",
            types.SimpleNamespace(format_is_bypassed=lambda output: False),
        ),
    ):
        made = types.ModuleType(module)
        setattr(made, name, value)
        monkeypatch.setitem(sys.modules, module, made)
    # The parents, so that Python does not look for them in the wheel.
    for module in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.moe"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setitem(
        sys.modules,
        "sglang.srt.layers.moe.token_dispatcher",
        types.ModuleType("sglang.srt.layers.moe.token_dispatcher"),
    )


def test_sglangs_experts_are_within_the_references_bound(sglang_modules):
    print("seed", 11)
    generator = torch.Generator().manual_seed(11)

    def scales(rows: int, k: int) -> torch.Tensor:
        return torch.randint(121, 124, (EXPERTS, rows, k // 32), generator=generator, dtype=torch.uint8)

    def packed(rows: int, k: int) -> torch.Tensor:
        return torch.randint(0, 256, (EXPERTS, rows, k // 2), generator=generator, dtype=torch.uint8)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    # As the checkpoint has them: gate and up rows in turn.
    layer = types.SimpleNamespace(
        num_local_experts=EXPERTS,
        w13_weight=packed(2 * INTER, HIDDEN),
        w13_weight_scale=scales(2 * INTER, HIDDEN),
        w13_weight_bias=normal(EXPERTS, 2 * INTER),
        w2_weight=packed(HIDDEN, INTER),
        w2_weight_scale=scales(HIDDEN, INTER),
        w2_weight_bias=normal(EXPERTS, HIDDEN),
    )
    hidden = normal(TOKENS, HIDDEN)
    ids = torch.rand((TOKENS, EXPERTS), generator=generator).topk(TOP_K).indices
    weights = torch.rand((TOKENS, TOP_K), generator=generator)

    def up_over_gate(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[:, 1::2], rows[:, 0::2]], 1)

    ones = torch.ones(EXPERTS)
    reference, bound = moe_reference(
        MoEInputs(
            input=hidden,
            token_selected_experts=ids.to(torch.int32),
            token_final_scales=weights,
            fc1_weights=up_over_gate(layer.w13_weight),
            fc1_scales=swizzle_scales(up_over_gate(layer.w13_weight_scale)),
            fc2_weights=layer.w2_weight,
            fc2_scales=swizzle_scales(layer.w2_weight_scale),
            fc1_global=ones,
            fc2_global=ones,
            fc1_bias=up_over_gate(layer.w13_weight_bias[..., None])[..., 0],
            fc2_bias=layer.w2_weight_bias,
            swiglu_alpha=1.702 * ones,
            swiglu_beta=ones,
            swiglu_limit=7 * ones,
        )
    )

    def parameter(data: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        assert not requires_grad
        return torch.nn.Parameter(data, requires_grad=False)

    process = sglangs(
        "srt/layers/quantization/mxfp4.py",
        "_process_weights_for_sm120_cutlass",
        {"torch": torch, "Parameter": parameter},
    )
    # Both sizes rounded up to 128.
    process(types.SimpleNamespace(_padded_hidden=256, _padded_intermediate=128), layer)
    assert layer.w13_weight.shape == (EXPERTS, 2 * 128, 256 // 2)

    calls = []

    def recorded(**words: Any) -> torch.Tensor:
        calls.append(words)
        return flashinfer.fused_moe.cutlass_fused_moe(**words)

    run = sglangs(
        "srt/layers/moe/moe_runner/flashinfer_cutlass.py",
        "_fused_experts_flashinfer_mxfp4_cutlass",
        {
            "torch": torch,
            "_flashinfer_cutlass_fused_moe": lambda: (recorded, flashinfer.fused_moe.core.ActivationType),
            "use_symmetric_memory": lambda *_, **__: contextlib.nullcontext(),
            "get_parallel": lambda: types.SimpleNamespace(tp_group=None),
            "is_allocation_symmetric": lambda: False,
            "_cutlass_moe_tune_max_num_tokens": lambda tokens: 8192,
            "envs": types.SimpleNamespace(SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=types.SimpleNamespace(get=lambda: True)),
        },
    )
    # As _apply_sm120_cutlass fills it; what it leaves out is None there.
    left_out = ("w13_humming_residual_scale", "w2_humming_residual_scale", "humming_fc2_act_scale")
    quant_info = types.SimpleNamespace(
        w13_weight=layer.w13_weight,
        w2_weight=layer.w2_weight,
        w13_weight_scale=layer.w13_weight_scale,
        w2_weight_scale=layer.w2_weight_scale,
        mxfp4_weight_global_scale=layer.mxfp4_weight_global_scale,
        w13_bias=layer.w13_weight_bias,
        w2_bias=layer.w2_weight_bias,
        swiglu_alpha=layer.swiglu_alpha,
        swiglu_beta=layer.swiglu_beta,
        swiglu_limit=layer.swiglu_limit,
        padded_hidden=256,
        use_swiglu_step=False,
        **dict.fromkeys(left_out),
    )
    ranks = types.SimpleNamespace(moe_tp_size=1, moe_tp_rank=0, moe_ep_size=1, moe_ep_rank=0)
    routed = types.SimpleNamespace(topk_ids=ids, topk_weights=weights)
    output = run(types.SimpleNamespace(hidden_states=hidden, topk_output=routed), quant_info, ranks).hidden_states
    (words,) = calls
    assert words["input"].dtype == torch.float8_e4m3fn  # W4A8 with MXFP8 input, as vLLM's own path
    assert words["use_mxfp8_act_scaling"]
    print("used", check_within_bound(output, reference, bound))
