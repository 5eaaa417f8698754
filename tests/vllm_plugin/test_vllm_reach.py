# SPDX-License-Identifier: Apache-2.0
"""Choices where they do not apply: a gpt-oss in another format than its own, a pooling model, another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint
import pytest
import served
import torch
from safetensors.torch import save_file
from test_vllm_models import TOKENS, attention_in_pytorch, serve, table

__all__ = ["attention_in_pytorch"]

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
GROUP = {
    "targets": ["Linear"],
    "weights": WEIGHTS,
    "input_activations": {**WEIGHTS, "strategy": "token", "dynamic": True},
}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}}
COMPRESSED["ignore"] = ["re:.*attn.*", "lm_head"]
QUARK = {
    "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "scale_format": "e8m0"}
}
QUARK = {**QUARK, "input_tensors": None, "output_tensors": None, "bias": None}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": QUARK,
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": ["re:.*self_attn.*", "re:.*attn.*", "lm_head"],
    "export": {"kv_cache_group": [], "pack_method": "order"},
}
FORMATS = {"bf16": None, "fp8": FP8, "compressed-tensors": COMPRESSED, "quark": QUARK}


def changed(folder: Path, **changes: Any) -> Path:
    """A checkpoint of which only ``config.json`` is read."""
    config = {**checkpoint.CONFIG, "quantization_config": None, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reported(log: list[str]) -> list[str]:
    return [message for message in log if "not apply" in message]


def built(folder: Path, chosen: Any, *words: str) -> Any:
    config = serve(folder, chosen, "--skip-tokenizer-init", *words)
    with served.parallel_groups(config):
        return served.built(config)


@pytest.mark.parametrize("name", FORMATS)
def test_a_choice_reports_where_it_applies_on_a_gpt_oss_of_another_format(tmp_path, log, name):
    model = built(
        changed(tmp_path, quantization_config=FORMATS[name]), {"moe": "mxfp4-a16", "qkv": "mxfp8", "lm_head": "mxfp4"}
    )
    (line,) = reported(log)
    assert f"the checkpoint's layers are {name}, not gpt-oss's own MXFP4, and stay so: " in line
    assert line.endswith("moe=mxfp4-a16, qkv=mxfp8 do not apply; the LM head alone is mxfp4-a16")
    rows = table(log)
    assert list(rows) == ["moe", "qkv", "o", "lm_head", "attention", "decode"]
    for kind, why in (("moe", 'no "moe": "mxfp4-a16" here'), ("qkv", 'no "qkv": "mxfp8" here'), ("o", "default")):
        assert rows[kind][0].startswith("vLLM's "), rows
        assert rows[kind][1:3] == (f"{name}, as the checkpoint", why)
        assert len(rows[kind]) == 3, "nothing there would be faster by a choice"
    assert rows["lm_head"][:3] == ("flashinfer-sm12x", "mxfp4-a16", "chosen")
    assert rows["decode"][2] == "the experts are vLLM's"
    assert type(model.lm_head.quant_method).__name__ == "DenseMethod"


def test_without_a_choice_there_is_the_table_and_no_line(tmp_path, log):
    built(changed(tmp_path), {})
    assert reported(log) == []
    assert table(log)["moe"][1:3] == ("bf16, as the checkpoint", "default")
    assert table(log)["lm_head"][:2] == ("vLLM's (cuBLAS)", "bf16")


def test_gpt_oss_in_its_own_format_gets_no_such_line(checkpoint_folder, log):
    built(checkpoint_folder, "spark")
    assert reported(log) == []


def test_quarks_mxfp4_weights_of_gpt_oss_stay_vllms_as_the_page_says(tmp_path, log):
    """Its experts' activation, with gate and up rows in turn, is none that this fork's class for other models takes."""
    built(changed(tmp_path, quantization_config=FORMATS["quark"]), {})
    assert any("the experts are left to vLLM: kernel does not support" in message for message in log), log
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    assert "| Quark, MXFP4 weights alone (`w_mxfp4`), but gpt-oss | this fork |" in page


def test_another_model_reports_that_the_choices_are_gpt_osss(tmp_path, log, monkeypatch):
    monkeypatch.setattr(torch.ops._C, "silu_and_mul", None, raising=False)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 128}
    config |= {"intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    model = built(tmp_path, "spark,moe=mxfp4-a8")
    line, experts = reported(log)
    assert line.endswith("qkv=mxfp6, o=mxfp6 do not apply to LlamaForCausalLM: these choices are gpt-oss's")
    assert experts.endswith("moe=mxfp4-a8 does not apply to LlamaForCausalLM: it has no MXFP4 experts")
    assert type(model.lm_head.quant_method).__name__ == "UnquantizedEmbeddingMethod"


@pytest.mark.parametrize("convert", ["embed", "classify"])
def test_pooling_models_load_and_answer_with_quantized_layers(tmp_path, log, convert):
    """vLLM takes their head away."""
    checkpoint.write(tmp_path, 3)
    if convert == "classify":
        print("seed", 4)
        score = torch.randn(2, checkpoint.CONFIG["hidden_size"], generator=torch.Generator().manual_seed(4))
        save_file({"score.weight": score.to(torch.bfloat16)}, tmp_path / "score.safetensors", {"format": "pt"})
    config = serve(tmp_path, "spark", "--runner", "pooling", "--convert", convert)
    with served.parallel_groups(config):
        from vllm.forward_context import set_forward_context

        model = served.load_model(config)
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=len(TOKENS)):
            hidden = model(TOKENS, torch.arange(len(TOKENS)))
    assert hidden.isfinite().all()
    assert type(model.model.layers[0].attn.qkv_proj.quant_method).__name__ == "DenseMethod"
    assert table(log)["lm_head"][:3] == ("none", "", "--runner pooling")
    if convert == "classify":
        assert model.score.weight.shape == (2, checkpoint.CONFIG["hidden_size"])
