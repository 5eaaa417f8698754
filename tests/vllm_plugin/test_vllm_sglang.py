# SPDX-License-Identifier: Apache-2.0
"""SGLang's ways to gpt-oss's and DeepSeek-V4's experts on SM120, by its own code: from weights to the call, on CPU
tensors.

SGLang cannot be imported without the libraries of a GPU. So its functions are compiled from their source in its wheel,
as they stand there; what they name of SGLang's besides (a context manager of its allocator, settings, platform, parents
of classes) is given here.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from experts_reference import random_mxfp4

import flashinfer
from flashinfer.testing import MoEInputs, check_within_bound, moe_reference, swizzle_scales
from flashinfer.testing.error_bounds import BoundViolation

SPEC = importlib.util.find_spec("sglang")
pytestmark = pytest.mark.skipif(SPEC is None, reason="SGLang's wheel is not installed")
EXPERTS, TOP_K, HIDDEN, INTER, TOKENS = 8, 4, 160, 96, 5
Named = types.SimpleNamespace


@functools.cache
def _parsed(file: str) -> ast.Module:
    """A file of SGLang's wheel."""
    assert SPEC is not None
    return ast.parse((Path((SPEC.submodule_search_locations or [])[0]) / file).read_text())


def sglangs(file: str, name: str, names: dict[str, Any]) -> Any:
    """The function or class ``name`` (``Class.method``) of a file in SGLang's wheel, with ``names`` as its globals."""
    node: Any = _parsed(file)
    for part in name.split("."):
        kinds = ast.FunctionDef, ast.ClassDef
        node = next(n for n in ast.walk(node) if isinstance(n, kinds) and n.name == part)
    if isinstance(node, ast.FunctionDef):
        node.decorator_list = []
    program = ast.Module([node], [])
    exec(compile(program, file, "exec", annotations.compiler_flag, dont_inherit=True), names)
    return names[node.name]


@pytest.fixture
def give_modules(monkeypatch) -> Callable[[dict[str, dict[str, Any]]], None]:
    """Puts modules below ``sglang.srt.layers``, with what is imported from them, in the place of the wheel's."""

    def give(modules: dict[str, dict[str, Any]]) -> None:
        for path, contents in modules.items():
            parts = f"sglang.srt.layers.{path}".split(".")
            # The parents too, so that Python does not look for them in the wheel.
            for length in range(1, len(parts) + 1):
                module = ".".join(parts[:length])
                if not isinstance(sys.modules.get(module), _Given):
                    monkeypatch.setitem(sys.modules, module, _Given(module))
            vars(sys.modules[module]).update(contents)

    return give


class _Given(types.ModuleType):
    """A module that is not SGLang's."""


@pytest.fixture
def sglang_modules(give_modules):
    """The modules that the call imports inside."""
    standard = Named(format_is_bypassed=lambda output: False)
    give_modules(
        {
            "moe.token_dispatcher.standard": {"StandardCombineInput": Named},
            "moe.topk": {"TopKOutputChecker": standard},
        }
    )


def experts_call() -> tuple[Callable[..., Any], list[dict[str, Any]]]:
    """SGLang's call of ``cutlass_fused_moe``, and a list that gets the arguments of each."""
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
            "get_parallel": lambda: Named(tp_group=None),
            "is_allocation_symmetric": lambda: False,
            "_cutlass_moe_tune_max_num_tokens": lambda tokens: 8192,
            "envs": Named(SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=Named(get=lambda: True)),
        },
    )
    return run, calls


def test_sglangs_experts_are_within_the_references_bound(sglang_modules):
    print("seed", 11)
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    w13, w13_scale = random_mxfp4(generator, EXPERTS, 2 * INTER, HIDDEN)
    w2, w2_scale = random_mxfp4(generator, EXPERTS, HIDDEN, INTER)
    # As the checkpoint has them: gate and up rows in turn.
    layer = Named(
        num_local_experts=EXPERTS,
        w13_weight=w13,
        w13_weight_scale=w13_scale,
        w13_weight_bias=normal(EXPERTS, 2 * INTER),
        w2_weight=w2,
        w2_weight_scale=w2_scale,
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
    process(Named(_padded_hidden=256, _padded_intermediate=128), layer)
    assert layer.w13_weight.shape == (EXPERTS, 2 * 128, 256 // 2)

    run, calls = experts_call()
    # _apply_sm120_cutlass fills these fields; those that it leaves out are None.
    left_out = ("w13_humming_residual_scale", "w2_humming_residual_scale", "humming_fc2_act_scale")
    quant_info = Named(
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
    ranks = Named(moe_tp_size=1, moe_tp_rank=0, moe_ep_size=1, moe_ep_rank=0)
    routed = Named(topk_ids=ids, topk_weights=weights)
    output = run(Named(hidden_states=hidden, topk_output=routed), quant_info, ranks).hidden_states
    (words,) = calls
    assert words["input"].dtype == torch.float8_e4m3fn  # W4A8 with MXFP8 input, as vLLM's own path
    assert words["use_mxfp8_act_scaling"]
    print("used", check_within_bound(output, reference, bound))


class DeepSeekV4:
    """SGLang's method for DeepSeek-V4's experts on a GPU of 12.x, chosen as its server chooses it.

    Parameters
    ----------
    give_modules : callable
        The fixture.
    run : callable
        The function that ``MoeRunner.run`` calls.
    """

    def __init__(self, give_modules: Callable[[dict[str, dict[str, Any]]], None], run: Callable[..., Any]) -> None:
        class Runner:
            def __init__(self, backend: str, config: Any) -> None:
                assert backend == "flashinfer_mxfp4"
                self.run = lambda dispatched, quant_info: run(dispatched, quant_info, config)

        class Layer(torch.nn.Module):
            pass

        platform = Named(is_sm90=False, is_sm100=False, is_sm120=True, is_hip=False)
        no_dequantization = Named(SGLANG_DSV4_FP4_DEQUANT=Named(get=lambda: False))
        common = {"get_platform": lambda: platform, "is_flashinfer_available": lambda: True, "torch": torch}
        method = sglangs(
            "srt/layers/quantization/mxfp4_flashinfer_cutlass_moe.py",
            "Mxfp4FlashinferCutlassMoEMethod",
            {
                **common,
                "get_exec": lambda: Named(moe=Named(flashinfer_mxfp4_moe_precision="default")),
                "Parameter": torch.nn.Parameter,
                "log_info_on_rank0": lambda *_: None,
                "logger": None,
            },
        )
        quant_info = sglangs(
            "srt/layers/moe/moe_runner/flashinfer_cutlass.py",
            "FlashInferCutlassMxfp4MoeQuantInfo",
            {"torch": torch, "dataclass": dataclasses.dataclass, "MoeQuantInfo": object, "Optional": Optional},
        )
        give_modules(
            {
                "linear": {"LinearBase": type("LinearBase", (), {})},
                "radix_attention": {"RadixAttention": type("RadixAttention", (), {})},
                "moe.fused_moe_triton": {
                    "FusedMoE": Layer,
                    "FusedMoeWeightScaleSupported": Named(BLOCK=Named(value="block")),
                },
                "moe.utils": {"MoeRunnerBackend": Named(FLASHINFER_MXFP4="flashinfer_mxfp4")},
                "moe.moe_runner.runner": {"MoeRunner": Runner},
                "moe.moe_runner.flashinfer_cutlass": {"FlashInferCutlassMxfp4MoeQuantInfo": quant_info},
                "deep_gemm_wrapper": {"DEEPGEMM_SCALE_UE8M0": False},
                "quantization.mxfp4_flashinfer_cutlass_moe": {"Mxfp4FlashinferCutlassMoEMethod": method},
            }
        )
        overrides = sglangs(
            "srt/arg_groups/model_overrides/deepseek_v4.py",
            "_deepseek_v4_overrides",
            {
                **common,
                "resolving_view": lambda arguments: arguments,
                "model_config_of": lambda _: Named(nvfp4_moe_meta=None, is_fp4_experts=True),
                "envs": no_dequantization,
                "logger": logging.getLogger(__name__),
            },
        )
        arguments = Named(device="cuda", swa_full_tokens_ratio=1, moe_runner_backend="auto", moe_a2a_backend="none")
        chosen = overrides(arguments, Named(architectures=["DeepseekV4ForCausalLM"]))["moe_runner_backend"]
        backends = "auto", "marlin", "humming", "flashinfer_mxfp4"
        self.backend = Named(**{f"is_{name}": lambda name=name: name == chosen for name in backends})
        select = sglangs(
            "srt/layers/quantization/fp8.py",
            "Fp8Config.get_quant_method",
            {
                **common,
                "is_layer_skipped": lambda *_, **__: False,
                "is_npu": lambda: False,
                "is_npu_arch35": lambda: False,
                "get_moe_runner_backend": lambda: self.backend,
                "Fp8MoEMethod": lambda config: Named(
                    create_weights=self._create_weights, process_weights_after_loading=self._process
                ),
            },
        )
        config = Named(ignored_layers=[], packed_modules_mapping={}, is_fp4_experts=True, dequant_fp4_to_fp8=False)
        config.use_mxfp8 = False
        self.layer = Layer()
        self.method = select(config, self.layer, "model.layers.0.mlp.experts")
        assert type(self.method) is method

    def _create_weights(self, layer: Any, experts: int, hidden: int, inter: int, dtype: Any, **attributes: Any) -> None:
        create = sglangs(
            "srt/layers/quantization/fp8.py",
            "Fp8MoEMethod.create_fp8_moe_weight_",
            {
                "torch": torch,
                "get_moe_weight_sizes": lambda inter, **_: (2 * inter, inter, False),
                "get_moe_padding_size": lambda aiter: 0,
                "set_weight_attrs": lambda parameter, attributes: None,
                "is_xpu": lambda: False,
                **dict.fromkeys(("_use_aiter", "_use_hip_int4", "_is_hip"), False),
            },
        )
        quant_config = Named(
            weight_block_size=[128, 128], is_checkpoint_fp8_serialized=True, activation_scheme="dynamic"
        )
        create(
            layer, experts, hidden, inter, block_quant=True, quant_config=quant_config, use_mxfp8=False,
            is_checkpoint_fp8_serialized=True, is_fp4_expert=True, params_dtype=dtype, **attributes,
        )  # fmt: skip

    def _process(self, layer: Any) -> None:
        """Process as SGLang's FP8 method, which this one borrows, does after loading."""
        process = sglangs(
            "srt/layers/quantization/fp8.py",
            "Fp8MoEMethod.process_weights_after_loading_block_quant",
            {
                "torch": torch,
                "get_moe_runner_backend": lambda: self.backend,
                "get_moe_a2a_backend": lambda: Named(is_megamoe=lambda: False, is_flashinfer_megamoe=lambda: False),
                **dict.fromkeys(("_use_aiter", "_is_fp8_fnuz", "_is_cpu", "_is_npu"), False),
            },
        )
        methods = Named(
            get_moe_runner_backend=lambda layer: None,
            is_deepgemm_moe_runner_backend_enabled=lambda: False,
            is_fp4_expert=True,
            **dict.fromkeys(("dequant_fp4_to_fp8", "convert_mxfp8_to_block", "use_mxfp8"), False),
        )
        process(methods, layer)

    def load(self, checkpoint: dict[str, torch.Tensor], limit: float, rank: int, ranks: int) -> None:
        """The experts of ``checkpoint``, one by one, as rank ``rank`` of ``ranks`` in tensor parallel."""
        layer, method = self.layer, self.method
        experts, inter, half = checkpoint["w1"].shape
        layer.quant_method, layer.num_local_experts, layer.quant_config = method, experts, None
        layer.moe_tp_size, layer.moe_tp_rank, layer.moe_ep_size, layer.moe_ep_rank = ranks, rank, 1, 0
        layer.moe_runner_config = Named(
            is_gated=True, layer=layer, swiglu_limit=limit, gemm1_clamp_limit=None, gemm1_alpha=None,
            moe_tp_size=ranks, moe_tp_rank=rank, moe_ep_size=1, moe_ep_rank=0,
        )  # fmt: skip
        layer.use_padded_loading = layer.use_presharded_weights = layer.use_triton_kernels = False
        method.create_weights(layer, experts, 2 * half, inter // ranks, torch.bfloat16)
        method.create_moe_runner(layer, layer.moe_runner_config)
        names = {"_maybe_copy_weight_view_before_h2d": lambda weight: weight, "torch": torch, "_is_cpu": False}
        names["_weight_layout_method"] = lambda layer: layer.quant_method
        file = "srt/layers/moe/fused_moe_triton/layer.py"
        load_w13, load_w2 = (sglangs(file, f"FusedMoE._load_{name}", dict(names)) for name in ("w13", "w2"))
        for expert in range(experts):
            for name in ("w1", "w2", "w3"):
                load, fused, dimension = (load_w2, "w2", 1) if name == "w2" else (load_w13, "w13", 0)
                for suffix in ("_weight", "_weight_scale_inv"):
                    loaded = checkpoint[name + ("" if suffix == "_weight" else "_scale")][expert]
                    load(
                        layer, shard_id=name, shard_dim=dimension, loaded_weight=loaded,
                        expert_data=getattr(layer, fused + suffix).data[expert],
                    )  # fmt: skip
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepseek_v4s_experts_are_within_the_references_bound(sglang_modules, give_modules, ranks: int):
    """Clamp alone, which decides: without it, or with another limit, the output is outside the bound."""
    experts, top_k, hidden, inter, limit, tokens = 16, 6, 256, 128 * ranks, 10.0, 5
    print("seed", 23)
    generator = torch.Generator().manual_seed(23)

    # As the checkpoint has them: w1 is the gate, w3 the linear half.
    checkpoint = {}
    for name, rows, k, low in (("w1", inter, hidden, 124), ("w2", hidden, inter, 121), ("w3", inter, hidden, 124)):
        values, scales = random_mxfp4(generator, experts, rows, k, low)
        checkpoint |= {name: values.view(torch.int8), f"{name}_scale": scales.view(torch.float8_e8m0fnu)}
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    ids = torch.rand((tokens, experts), generator=generator).topk(top_k).indices.to(torch.int32)
    weights = 1.5 * torch.rand((tokens, top_k), generator=generator)  # its factor of routed experts is in them

    call, calls = experts_call()
    for rank in range(ranks):
        door = DeepSeekV4(give_modules, call)
        door.load(checkpoint, limit, rank, ranks)
        routed = Named(topk_ids=ids, topk_weights=weights)
        output = door.method.apply(door.layer, Named(hidden_states=x, topk_output=routed)).hidden_states

        rows = slice(128 * rank, 128 * (rank + 1))
        columns, blocks = slice(64 * rank, 64 * (rank + 1)), slice(4 * rank, 4 * (rank + 1))
        ones = torch.ones(experts)

        def up_over_gate(name: str, rows: slice = rows) -> torch.Tensor:
            return torch.cat([checkpoint[half + name].view(torch.uint8)[:, rows] for half in ("w3", "w1")], 1)

        inputs = MoEInputs(
            input=x,
            token_selected_experts=ids,
            token_final_scales=weights,
            fc1_weights=up_over_gate(""),
            fc1_scales=swizzle_scales(up_over_gate("_scale")),
            fc2_weights=checkpoint["w2"].view(torch.uint8)[..., columns].contiguous(),
            fc2_scales=swizzle_scales(checkpoint["w2_scale"].view(torch.uint8)[..., blocks].contiguous()),
            fc1_global=ones,
            fc2_global=ones,
            swiglu_limit=limit * ones,
        )
        print("rank", rank, "used", check_within_bound(output, *moe_reference(inputs)))
        for other in (None, 9 * ones, 11 * ones):
            with pytest.raises(BoundViolation):
                check_within_bound(output, *moe_reference(dataclasses.replace(inputs, swiglu_limit=other)))

    assert len(calls) == ranks
    for rank, words in enumerate(calls):
        assert words["input"].dtype == torch.float8_e4m3fn
        assert words["use_mxfp8_act_scaling"]
        assert not words["use_w4_group_scaling"]
        assert (words["tp_size"], words["tp_rank"], words["ep_size"]) == (ranks, rank, 1)
        assert words["activation_type"] == flashinfer.fused_moe.core.ActivationType.Swiglu
        assert words["swiglu_limit"].tolist() == experts * [limit]
        for name in ("swiglu_alpha", "swiglu_beta", "fc1_expert_biases", "fc2_expert_biases"):
            assert words[name] is None
