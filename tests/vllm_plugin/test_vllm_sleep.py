# SPDX-License-Identifier: Apache-2.0
"""Sleep mode's levels and weights loaded anew, of experts whose calls stand in captured CUDA graphs.

A captured call is simulated by its arguments: a graph launches the operator with the addresses that it saw. Memory that
vLLM gives away is overwritten: at level 2 all that the load allocated, after a reload all that nothing holds any more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import experts_doors as doors
import experts_reference
import pytest
import served
import torch
from test_vllm_models import TOKENS, serve

POISON = 119
OPTIONS: dict[str, Any] = {
    "activation": "swigluoai_uninterleave",
    "swiglu_limit": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_beta": 1.0,
}


@pytest.fixture(autouse=True)
def tensors_stay(monkeypatch):
    """vLLM's preparation of NVFP4 asks for a GPU's tensors."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)


class Graph:
    """The calls of the experts' operator while it is being captured, and what they read."""

    def __init__(self, monkeypatch: Any) -> None:
        from flashinfer.fused_moe import sm12x_operator

        self.calls: list[Any] = []
        self.captures, self.compute = False, sm12x_operator.moe_cpu
        monkeypatch.setattr(sm12x_operator, "moe_cpu", self._capture)

    def _capture(self, problem: Any, call: Any) -> None:
        self.compute(problem, call)
        if self.captures:
            fields = {name: value for name, value in call._asdict().items() if isinstance(value, torch.Tensor)}
            fields = {name: value.detach() for name, value in fields.items()}  # other objects, the same addresses
            tokens = ("input", "input_sf", "token_selected_experts", "token_final_scales")
            fields |= {name: fields[name].clone() for name in tokens if name in fields}
            scales = [each.detach() for each in call.quant_scales]
            self.calls.append((problem, call._replace(**fields, quant_scales=scales)))

    def read(self) -> list[torch.Tensor]:
        """The tensors that the calls read and that belong to layers."""
        from flashinfer.fused_moe.sm12x_validation import expert_tensors

        return [each for _, call in self.calls for each in expert_tensors(call) if each is not None]

    def replay(self) -> list[torch.Tensor]:
        outputs = []
        for problem, call in self.calls:
            outputs.append(torch.full_like(call.output, torch.nan))
            with torch.inference_mode():
                self.compute(problem, call._replace(output=outputs[-1]))
        return outputs


@pytest.fixture
def graph(monkeypatch):
    return Graph(monkeypatch)


def held(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def poison(tensors: list[torch.Tensor], but: list[torch.Tensor] = ()) -> None:
    kept = {tensor.untyped_storage().data_ptr() for tensor in but}
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() not in kept:
            tensor.untyped_storage().fill_(POISON)


def sleep_and_wake(model: Any, graph: Graph, level: int) -> None:
    """All memory of the load is given away and comes back at its addresses: at level 1 with its content, at level 2
    with that of buffers."""
    of_the_load = [*held(model), *graph.read()]
    saved = list(model.buffers()) if level == 2 else of_the_load
    contents = [(tensor, tensor.detach().clone()) for tensor in saved]
    poison(of_the_load)
    with torch.inference_mode():
        for tensor, content in contents:
            tensor.data.copy_(content)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def reload(layer: Any, config: Any, door: str, given: Any) -> None:
    """As vLLM loads a model's weights anew, of one layer."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(layer)
    doors.offer(layer, door, given)
    layerwise.finalize_layerwise_reload(layer, config.model_config)


def loaded(door: str, config: Any, given: Any) -> Any:
    from vllm.model_executor.model_loader.reload import layerwise

    layer = doors.built(door, renormalize=True, **OPTIONS)
    layerwise.record_metadata_for_reloading(layer)
    doors.offer(layer, door, given)
    doors.prepare(layer, config)
    assert type(doors.fused_experts(layer)).__name__.startswith("SM12x")
    return layer


def reference(door: str, given: Any, hidden: torch.Tensor, logits: torch.Tensor, moe: str) -> torch.Tensor:
    """float32, of the weights that were loaded last: a graph and the layer may be wrong alike."""
    chances, ids = logits.float().softmax(-1).topk(doors.TOP_K)
    rounded = doors.rounding(moe)

    def activate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return experts_reference.swiglu(
            gate, up, OPTIONS["swiglu_alpha"], OPTIONS["swiglu_beta"], OPTIONS["swiglu_limit"]
        )

    chances = chances / chances.sum(-1, keepdim=True)
    matrices = doors.matrices(door, given)
    return experts_reference.mixture(rounded(hidden.float()), chances, ids, matrices, activate, rounded)


def sleep_reload_and_replay(door: str, config: Any, graph: Graph, moe: str = "auto") -> None:
    first, second = doors.weights(door, 51), doors.weights(door, 52)
    hidden, logits = doors.random_tokens(53, 5)
    layer = loaded(door, config, first)
    graph.captures = True
    before = doors.run(layer, config, hidden, logits)
    graph.captures = False
    captured = graph.replay()
    assert torch.equal(captured[0].float(), before)
    for level, given in ((1, None), (2, first), (2, second), (0, first)):
        if level:
            sleep_and_wake(layer, graph, level)
        if given is not None:
            reload(layer, config, door, given)
            poison(graph.read(), but=held(layer))  # what nothing holds is another's memory by now
        now, replayed = doors.run(layer, config, hidden, logits), graph.replay()
        right = reference(door, given or first, hidden, logits, moe)
        print(f"level {level}: {distance(now, right):.4f}, of the graph {distance(replayed[0].float(), right):.4f}")
        assert torch.equal(replayed[0].float(), now), level
        assert distance(now, right) < 2.0**-8, level  # bfloat16's rounding of the output
        assert torch.equal(now, before) is (given is not second), level
    kernel = doors.routed_experts(layer).quant_method.moe_kernel
    storages = {tensor.untyped_storage().data_ptr() for tensor in held(layer)}
    for name in kernel.fused_experts.READ:  # else scales are in memory twice
        tensor = getattr(kernel.fused_experts, name)
        assert tensor is None or tensor.untyped_storage().data_ptr() in storages, name


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("door", "moe"), doors.WAYS)
def test_a_graph_is_right_after_sleep_and_weights_loaded_anew(checkpoint_folder, graph, door, moe):
    config = serve(checkpoint_folder, {"moe": moe})
    with served.parallel_groups(config):
        sleep_reload_and_replay(door, config, graph, moe)


@pytest.mark.parametrize(
    ("door", "module", "desc", "field"),
    [
        ("modelopt W4A4", "modelopt", "_w1", "alpha_or_gscale"),
        ("modelopt W4A4", "modelopt", "_w2", "scale"),
        ("DeepSeek-V4", "mxfp4", "_w1", "scale"),
    ],
    ids=["product of scales", "NVFP4's scales", "MXFP4's scales"],
)
def test_so_it_is_of_tensors_that_vllms_method_does_not_register(
    checkpoint_folder, monkeypatch, graph, door, module, desc, field
):
    """A tensor that a method computes from weights and leaves in its quantization config alone."""
    import importlib

    methods = importlib.import_module(f"vllm.model_executor.layers.quantization.{module}")
    name = "make_nvfp4_moe_quant_config" if module == "modelopt" else "make_mxfp4_moe_quant_config"
    make = getattr(methods, name)

    def computed(**given: Any) -> Any:
        config = make(**given)
        part = getattr(config, desc)
        changed = dataclasses.replace(part, **{field: getattr(part, field).detach().clone()})
        return dataclasses.replace(config, **{desc: changed})

    monkeypatch.setattr(methods, name, computed)
    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        sleep_reload_and_replay(door, config, graph)


@pytest.mark.parametrize(
    "chosen",
    [{}, {"moe": "mxfp4-a8"}, {"moe_input": "mxfp8", "qkv": "mxfp8", "o": "mxfp4", "lm_head": "mxfp8"}],
    ids=str,
)
def test_so_it_is_of_gpt_osss(checkpoint_folder, graph, chosen):
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    config = serve(checkpoint_folder, chosen)
    with served.parallel_groups(config):
        model = served.load_model(config)
        graph.captures = True
        before = served.logits(config, model, TOKENS)
        graph.captures = False
        captured = graph.replay()
        for level in (1, 2, 2):
            sleep_and_wake(model, graph, level)
            if level == 2:
                reload_weights(config, model, None, None, is_checkpoint_format=True)
                poison(graph.read(), but=held(model))
            assert same(graph.replay(), captured)
            assert torch.equal(served.logits(config, model, TOKENS), before)
