# SPDX-License-Identifier: Apache-2.0
"""Dense layers and the LM head under sleep mode: CUDA graphs read nothing that vLLM gives away and does not load
anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import served
import torch
from test_vllm_models import TOKENS, attention_in_pytorch, serve

__all__ = ["attention_in_pytorch"]

KINDS = [
    {"qkv": "nvfp4", "o": "mxfp6", "lm_head": "mxint8"},
    {"qkv": "mxfp4-a8", "o": "nvfp4", "lm_head": "nvfp4"},
]


def layers_of(model: Any) -> list[Any]:
    layers = [part for layer in model.model.layers for part in (layer.attn.qkv_proj, layer.attn.o_proj)]
    return [*layers, model.lm_head]


def tensors(held: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors that an object holds, by its attributes, in tuples, lists and dictionaries."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, (tuple, list, set)):
        for each in held:
            yield from tensors(each, seen)
    elif isinstance(held, dict):
        yield from tensors(list(held.values()), seen)
    elif not isinstance(held, (torch.nn.Module, type)) and hasattr(held, "__dict__"):
        yield from tensors(vars(held), seen)


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: ",".join(kinds.values()))
def test_layers_loaded_anew_after_sleep_answer_the_same_from_the_same_addresses(checkpoint_folder, kinds):
    """Level 2 takes all that a load has allocated but buffers; a reload writes parameters at their old addresses. So a
    step's kernels, once they have run, may hold parameters and buffers alone."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    made = serve(checkpoint_folder, {"moe": "mxfp4-a16", **kinds})
    with served.parallel_groups(made):
        model = served.load_model(made)
        before = served.logits(made, model, TOKENS)
        registered = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
        for layer in layers_of(model):
            held = list(tensors(layer.quant_method.kernel, set()))
            assert len(held) >= 2, "the call has left no object of the layer"
            assert [each.shape for each in held if each.numel() and each.data_ptr() not in registered] == []
        first = {name: each.data_ptr() for name, each in model.named_parameters()}
        assert sum("weight_global_scale" in name for name in first) == sum(
            getattr(layer, "weight_global_scale", None) is not None for layer in layers_of(model)
        )
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.inference_mode():
            for each in (*model.parameters(), *model.buffers()):
                each.data.fill_(77)
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        reload_weights(made, model, None, None, is_checkpoint_format=True)
        assert {name: each.data_ptr() for name, each in model.named_parameters()} == first
        assert torch.equal(served.logits(made, model, TOKENS), before)
