# SPDX-License-Identifier: Apache-2.0
"""vLLM's interface of experts: what the call and the configurations say is computed, refused, or listed as harmless.

By every kind of checkpoint that comes to this fork, through vLLM's own code on CPU tensors, beside float32 references.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import experts_doors as doors
import experts_reference
import interface_of_experts as interface
import pytest
import served
import torch
from test_vllm_models import serve

from flashinfer_sm12x.vllm import settings

ROUNDING = 2.0**-8
"""bfloat16's rounding of the output, and of act in a few places."""


@pytest.fixture(autouse=True)
def tensors_stay(monkeypatch):
    """vLLM's preparation of NVFP4 asks for a GPU's tensors."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


# --- router weights on the experts' input -----------------------------------------------------------------------------


@pytest.mark.parametrize(("door", "moe"), doors.WAYS)
def test_router_weights_on_the_input_count_once(checkpoint_folder, door, moe):
    """Llama 4: one expert a token, whose input is multiplied by the router's weight."""
    config = serve(checkpoint_folder, {"moe": moe})
    given = doors.weights(door, 31)
    hidden, logits = doors.random_tokens(32, 9)
    with served.parallel_groups(config):
        layer = doors.built(door, top_k=1, renormalize=False, apply_router_weight_on_input=True)
        doors.offer(layer, door, given)
        doors.prepare(layer, config)
        assert type(doors.fused_experts(layer)).__name__.startswith("SM12x")
        got = doors.run(layer, config, hidden, logits)
    chances, ids = logits.float().softmax(-1).topk(1)
    rounded, matrices = doors.rounding(moe), doors.matrices(door, given)
    weighted = rounded((hidden * chances.to(torch.bfloat16)).float())
    once = experts_reference.mixture(
        weighted, torch.ones_like(chances), ids, matrices, experts_reference.swiglu, rounded
    )
    twice = experts_reference.mixture(weighted, chances, ids, matrices, experts_reference.swiglu, rounded)
    print(f"error {distance(got, once):.4f}, of weights that count twice {distance(twice, once):.4f}")
    assert distance(got, once) < ROUNDING
    assert distance(twice, once) > 2.0**-4


@pytest.mark.parametrize("chosen", [{}, {"moe": "mxfp4-a8"}, {"moe": "mxfp4-a16"}, {"moe_input": "mxfp8"}], ids=str)
def test_so_they_do_in_gpt_osss_experts(checkpoint_folder, chosen):
    config = serve(checkpoint_folder, chosen)
    print("seed", 33)
    generator = torch.Generator().manual_seed(33)
    with served.parallel_groups(config):
        experts = served.load_model(config).model.layers[0].mlp.experts.routed_experts
        hidden = torch.randn((5, experts.hidden_size), generator=generator).to(torch.bfloat16)
        weights = torch.rand((5, 1), generator=generator)
        ids = torch.randint(0, 8, (5, 1), generator=generator)

        def compute(given: torch.Tensor, weights: torch.Tensor, on_input: bool) -> torch.Tensor:
            with torch.inference_mode():
                return experts.quant_method.moe_kernel.apply(
                    given,
                    experts.w13_weight,
                    experts.w2_weight,
                    topk_weights=weights,
                    topk_ids=ids,
                    activation=experts.activation,
                    global_num_experts=experts.global_num_experts,
                    expert_map=experts.expert_map,
                    apply_router_weight_on_input=on_input,
                )

        got = compute(hidden, weights, True)
        assert torch.equal(got, compute(hidden * weights.to(torch.bfloat16), torch.ones_like(weights), False))
        assert not torch.equal(got, compute(hidden * weights.to(torch.bfloat16), weights, False))


# --- parameters of the activation that stand in two configs -----------------------------------------------------------

FIRST = {"alpha": 1.702, "beta": 1.0, "limit": 2.0}
SECOND = {"alpha": 0.5, "beta": -1.0, "limit": 1.0}
# What each method takes from the layer into the quantization config; vLLM asks that first, then the layer's
# configuration.
TAKEN = {"DeepSeek-V4": ("limit",)} | dict.fromkeys(doors.DOORS[1:], ("alpha", "beta", "limit"))
PLACES = {
    "both": (FIRST, FIRST),
    "the layer alone": (FIRST, {}),
    "its configuration alone": ({}, FIRST),
    "two": (FIRST, SECOND),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", ["swigluoai_uninterleave", "silu", "swiglustep"])
@pytest.mark.parametrize("door", doors.DOORS)
def test_the_activations_parameters_are_vllms_choice(checkpoint_folder, door, activation, place):
    """MiniMax-M3's stand in the layer's configuration, and DeepSeek-V4's method gives the limit alone."""
    of_layer, of_config = PLACES[place]
    config = serve(checkpoint_folder, {})
    given = doors.weights(door, 34)
    hidden, logits = doors.random_tokens(35, 5)
    with served.parallel_groups(config):
        layer = doors.built(door, renormalize=True, activation=activation)
        experts = doors.routed_experts(layer)
        for name in FIRST:
            setattr(experts, f"swiglu_{name}", of_layer.get(name))
            setattr(experts.moe_config, f"swiglu_{name}", of_config.get(name))
        doors.offer(layer, door, given)
        doors.prepare(layer, config)
        made = doors.fused_experts(layer)
        assert type(made).__name__.startswith("SM12x")
        got = doors.run(layer, config, hidden, logits)
    found = {**of_config, **{name: value for name, value in of_layer.items() if name in TAKEN[door]}}
    vllms = made.activation_config
    defaults = {"alpha": 1.0, "beta": 0.0, "limit": None}
    assert (vllms.alpha, vllms.beta, vllms.clamp_limit) == tuple((defaults | found).values())
    formula = experts_reference.swiglu_step if activation == "swiglustep" else experts_reference.swiglu
    if activation != "swigluoai_uninterleave":
        found = {name: value for name, value in found.items() if name == "limit"}
    chances, ids = logits.float().softmax(-1).topk(doors.TOP_K)
    chances = chances / chances.sum(-1, keepdim=True)
    matrices, rounded = doors.matrices(door, given), doors.rounding("auto")

    def expected(**parameters: float) -> torch.Tensor:
        def activate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return formula(gate, up, **parameters)

        return experts_reference.mixture(hidden.float(), chances, ids, matrices, activate, rounded)

    right = expected(**found)
    print(f"error {distance(got, right):.4f}")
    assert distance(got, right) < ROUNDING
    for name in found:  # else a parameter decides nothing
        assert distance(expected(**{each: value for each, value in found.items() if each != name}), right) > 2.0**-6


# --- vLLM's interface, name by name -----------------------------------------------------------------------------------

PLUGIN = Path(settings.__file__).parent
SOURCES = [ast.parse((PLUGIN / name).read_text()) for name in ("moe.py", "nvfp4.py", "model.py", "config.py")]


@pytest.fixture(scope="module")
def vllms() -> dict[str, set[str]]:
    """The names of vLLM's interface, by the part of it."""
    return interface.of_vllm()


@pytest.mark.parametrize("part", interface.TABLE)
def test_every_name_of_vllms_interface_is_listed(vllms, part):
    assert vllms[part] == set(interface.TABLE[part])


@pytest.mark.parametrize("part", interface.TABLE)
def test_what_is_listed_as_taken_is_in_the_code(part):
    names = set()
    for tree in SOURCES:
        for node in ast.walk(tree):
            names |= {node.attr} if isinstance(node, ast.Attribute) else set()
            names |= {node.id} if isinstance(node, ast.Name) else set()
            names |= {node.name} if isinstance(node, ast.FunctionDef) else set()
            names |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
    for name, entry in interface.TABLE[part].items():
        kind, _, text = entry.partition(": ")
        assert kind in ("taken", "refused", "harmless"), (name, entry)
        if kind == "harmless":
            assert len(text) > 10, (name, entry)
        else:
            assert (text or name) in names, (name, entry)


def test_a_call_reads_each_argument_that_is_not_harmless():
    (apply,) = [each for each in ast.walk(SOURCES[0]) if isinstance(each, ast.FunctionDef) and each.name == "apply"]
    read = {node.id for each in apply.body for node in ast.walk(each) if isinstance(node, ast.Name)}
    for name, entry in interface.TABLE["arguments of a call"].items():
        assert (name in read) is not entry.startswith("harmless"), name


def test_no_override_takes_what_it_does_not_name():
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    from flashinfer_sm12x.vllm import moe, nvfp4

    for cls in (moe.SM12xExperts, nvfp4.SM12xNvfp4Experts):
        for name in ("apply", "workspace_shapes"):
            ours, vllms = (inspect.signature(getattr(each, name)) for each in (cls, mk.FusedMoEExpertsModular))
            assert list(ours.parameters) == list(vllms.parameters), (cls, name)
    for tree in SOURCES[:2]:
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for function in (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name != "step"):
                assert function.args.kwarg is None, (cls.name, function.name)
                assert function.args.vararg is None, (cls.name, function.name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "silu"}, "activation is "),
        ({"global_num_experts": 9}, "global_num_experts is 9"),
        ({"expert_map": torch.arange(8)}, "expert_map is not the layer's"),
        ({"a2_scale": torch.ones(1)}, "a2_scale is given"),
        ({"expert_tokens_meta": object()}, "expert_tokens_meta is given"),
        ({"a1q_scale": torch.ones(8, dtype=torch.uint8)}, "takes an unquantized input and no input_sf"),
        ({"post_gemm2_hook": print}, "post_gemm2_hook is set"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_a_call_that_the_layer_was_not_prepared_for_is_refused(checkpoint_folder, change, message):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        layer = doors.built("DeepSeek-V4", activation="swigluoai_uninterleave", swiglu_limit=7.0)
        doors.offer(layer, "DeepSeek-V4", doors.weights("DeepSeek-V4", 36))
        doors.prepare(layer, config)
    experts, held = doors.fused_experts(layer), doors.routed_experts(layer)
    hidden, _ = doors.random_tokens(37, 2)
    call: dict[str, Any] = {
        "output": torch.empty_like(hidden),
        "hidden_states": hidden,
        "w1": held.w13_weight,
        "w2": held.w2_weight,
        "topk_weights": torch.ones(2, 1),
        "topk_ids": torch.zeros(2, 1, dtype=torch.int32),
        "activation": held.activation,
        "global_num_experts": 8,
        **dict.fromkeys(("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta")),
        "apply_router_weight_on_input": False,
    }
    experts.apply(**call)
    experts.post_gemm2_hook = change.get("post_gemm2_hook")
    call |= {name: value for name, value in change.items() if name in call}
    if "activation" in change:
        call["activation"] = MoEActivation.SILU
    with pytest.raises(ValueError, match=message):
        experts.apply(**call)


OTHER_ROWS = {"use_ep": True, "dp_size": 2}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_local_experts": 4}, "4 experts on each of 1 ranks, of 8 that the router chooses from"),
        ({"num_local_experts": 9}, "9 experts on each of 1 ranks"),  # a shared one among them
        ({"swiglu_limit": 0.0}, "a SwiGLU limit of 0.0"),
        ({"swiglu_limit": -7.0}, "a SwiGLU limit of -7.0"),
        ({"swiglu_limit": float("nan")}, "a SwiGLU limit of nan"),
        ({"activation": "situ"}, "kernel does not support"),
        ({"activation": "gelu_tanh"}, "kernel does not support"),
        ({"is_lora_enabled": True}, "LoRA adapters may change them"),
        ({"has_bias": True}, "biases, which vLLM's NVFP4 methods do not load"),
        ({"hidden_dim": 48}, "kernel does not support 48 hidden dim"),
        ({"in_dtype": torch.float16}, "activations of torch.float16"),
        *(
            ({"moe_parallel_config": {**OTHER_ROWS, "all2all_backend": backend}}, "kernel does not support")
            for backend in (
                "deepep_high_throughput",
                "deepep_low_latency",
                "deepep_v2",
                "flashinfer_nvlink_one_sided",
                "flashinfer_nvlink_two_sided",
                "mori_low_latency",
                "moonep",
                "nixl_ep",
            )
        ),
        ({"moe_parallel_config": {"all2all_backend": "passthrough"}}, "kernel does not support"),
        ({"moe_parallel_config": {"enable_eplb": True}}, "expert load balancing (EPLB)"),
        ({}, ""),
        ({"moe_parallel_config": {**OTHER_ROWS, "all2all_backend": "allgather_reducescatter"}}, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", ["mxfp4", "nvfp4"])
def test_a_layer_that_cannot_be_served_right_is_left_to_vllm(checkpoint_folder, weights, changes, reason):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from flashinfer_sm12x.vllm import moe, nvfp4
    from flashinfer_sm12x.vllm.settings import Settings

    if weights == "mxfp4" and set(changes) & {"has_bias", "in_dtype", "hidden_dim"}:
        pytest.skip("MXFP4 experts have biases and float16 tokens, and vLLM pads them")
    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        given = doors.routed_experts(doors.built("DeepSeek-V4")).moe_config
        changed = dataclasses.replace(given)
        for name, value in changes.items():
            if name == "moe_parallel_config":
                value = dataclasses.replace(given.moe_parallel_config, **value)
            setattr(changed, name, MoEActivation(value) if name == "activation" else value)
        if weights == "mxfp4":
            found = moe.reason_against(changed, Settings(), moe.SM12xMxfp4Experts)
        else:
            found = nvfp4.reason_against(changed, None)
    assert found.startswith(reason) if reason else found == ""


def test_a_models_own_configuration_is_left_to_vllm(checkpoint_folder):
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    from flashinfer_sm12x.vllm import moe
    from flashinfer_sm12x.vllm.settings import Settings

    class OtherConfig(FusedMoEConfig):
        pass

    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        given = doors.routed_experts(doors.built("DeepSeek-V4")).moe_config
        given.__class__ = OtherConfig
        assert (
            moe.reason_against(given, Settings(), moe.SM12xMxfp4Experts) == "the model describes them by a OtherConfig"
        )


def test_gathered_scales_are_in_a_layout_that_quantized_input_does_not_have(checkpoint_folder, log):
    from flashinfer_sm12x.vllm import moe
    from flashinfer_sm12x.vllm.settings import Settings

    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        given = next(m.moe_config for m in served.built(config).modules() if hasattr(m, "moe_config"))
        several = dataclasses.replace(given.moe_parallel_config, dp_size=2)
        given = dataclasses.replace(given, moe_parallel_config=several)
        assert type(moe.make_method(given, Settings())).__name__ == "SM12xMoEMethod"
        assert type(moe.make_method(given, Settings(moe_input="mxfp8"))).__name__ == "VllmMoEMethod"
    assert any("the experts are left to vLLM: kernel does not support parallel config" in message for message in log)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_scale_swizzled": False},
        {"is_scale_transposed": True},
        {"mx_alignment": 256},
        {"_w1": {"zp": torch.zeros(1)}},
        {"_w2": {"zp": torch.zeros(1)}},
        {"_a1": {"scale": torch.ones(1)}},
        {"_a2": {"scale": torch.ones(1)}},
        {"_w1": {"alpha_or_gscale": torch.ones(8)}},
        {"_w2": {"alpha_or_gscale": torch.ones(8)}},
    ],
    ids=str,
)
def test_a_quantization_config_with_more_is_refused(checkpoint_folder, changes):
    from flashinfer_sm12x.vllm import moe

    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        layer = doors.built("Quark")
        doors.offer(layer, "Quark", doors.weights("Quark", 38))
        doors.prepare(layer, config)
    experts = doors.fused_experts(layer)
    changed = dataclasses.replace(experts.quant_config)
    for name, value in changes.items():
        value = dataclasses.replace(getattr(changed, name), **value) if isinstance(value, dict) else value
        setattr(changed, name, value)
    moe.SM12xMxfp4Experts(experts.moe_config, experts.quant_config)
    with pytest.raises(ValueError, match=r'of vLLM.s quantization config is .*; \{"sm12x": \{"moe": "vllm"\}\} leaves'):
        moe.SM12xMxfp4Experts(experts.moe_config, changed)
    other = SimpleNamespace(**vars(experts.quant_config))
    with pytest.raises(ValueError, match="describes these experts by a SimpleNamespace"):
        moe.require_known_format(other, moe.SM12xExperts.READ)


@pytest.mark.parametrize("missing", [("w13_bias",), ("w2_bias",), ("w13_bias", "w2_bias")], ids=" and ".join)
def test_biases_of_one_side_alone_end_the_start(checkpoint_folder, monkeypatch, missing):
    from vllm.model_executor.layers.quantization import mxfp4

    make = mxfp4.make_mxfp4_moe_quant_config
    without = {name.replace("w13", "w1"): None for name in missing}
    monkeypatch.setattr(mxfp4, "make_mxfp4_moe_quant_config", lambda **given: make(**{**given, **without}))
    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        layer = doors.built("DeepSeek-V4", has_bias=True)
        doors.offer(layer, "DeepSeek-V4", doors.weights("DeepSeek-V4", 39))
        with pytest.raises(ValueError, match="the model has biases in its experts, and vLLM's method gives"):
            doors.prepare(layer, config)


class Router:
    renormalize, scoring_func = True, "softmax"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"routed_experts.apply_router_weight_on_input": True}, "router weights on the experts' input"),
        ({"routed_experts.renormalize": False}, "router weights that are not renormalized"),
        ({"routed_experts.scoring_func": "sigmoid"}, "router scores by"),
        ({"router.renormalize": False}, "router weights that are not renormalized"),
        ({"router.scoring_func": "sigmoid"}, "router scores by sigmoid"),
        ({"router": Router()}, "a Router"),
        ({"moe_config.router_logits_dtype": torch.float32}, "router logits in torch.float32"),
        ({"routed_scaling_factor": 2.5}, "scaled router weights"),
        ({"routed_experts.routed_scaling_factor": 2.5}, "scaled router weights"),
        ({"_shared_experts": torch.nn.Identity()}, "shared experts"),
        ({"gate": torch.nn.Identity()}, "a gate of vLLM's runner"),
        ({"shared_expert_gate": torch.nn.Identity()}, "a gate of vLLM's runner"),
        ({"routed_input_transform": torch.nn.Identity()}, "tokens transformed for the experts"),
        ({"routed_output_transform": torch.nn.Identity()}, "tokens transformed for the experts"),
    ],
    ids=lambda change: ", ".join(change) if isinstance(change, dict) else "",
)
def test_a_decode_step_chooses_experts_of_gpt_osss_router_alone(checkpoint_folder, changes, reason):
    from flashinfer_sm12x.vllm import moe

    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        runner = served.built(config).model.layers[0].mlp.experts
    for path, value in changes.items():
        *outer, name = path.split(".")
        setattr(getattr(runner, outer[0]) if outer else runner, name, value)
    found = moe.reason_against_a_step(runner)
    assert found.startswith(reason) if reason else found == ""
