# SPDX-License-Identifier: Apache-2.0
"""``flashinfer_sm12x/quantize/gpt_oss.py`` and its example: transformers' gpt-oss with this fork's experts, on CPU
tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_vllm_models import TOKENS, check

from flashinfer_sm12x.quantize import gpt_oss

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize("activations", ["a8", "a16"])
def test_logits_are_transformers_own(checkpoint_folder, activations):
    model = gpt_oss.load(checkpoint_folder, activations)
    with torch.inference_mode():
        check(model(TOKENS[None]).logits[0].float(), checkpoint_folder, activations)


@pytest.mark.parametrize("activations", ["a8", "a16"])
def test_each_layers_experts_are_within_the_references_bound(checkpoint_folder, activations):
    """Each layer's inputs are those of a forward pass of the whole model; outputs are judged element by element."""
    from flashinfer.testing import MoEInputs, check_within_bound, moe_reference

    model = gpt_oss.load(checkpoint_folder, activations)
    used = []

    def judge(experts, given, output):
        hidden, ids, weights = given
        one = experts.one if activations == "a8" else None
        inputs = MoEInputs(
            input=hidden,
            token_selected_experts=ids.to(torch.int32),
            token_final_scales=weights.float(),
            fc1_weights=experts.gate_up_proj_blocks,
            fc1_scales=experts.gate_up_proj_scales,
            fc2_weights=experts.down_proj_blocks,
            fc2_scales=experts.down_proj_scales,
            fc1_global=one,
            fc2_global=one,
            fc1_bias=experts.gate_up_proj_bias,
            fc2_bias=experts.down_proj_bias,
            swiglu_alpha=experts.alpha,
            swiglu_beta=experts.beta,
            swiglu_limit=experts.limit,
        )
        used.append(check_within_bound(output, *moe_reference(inputs)))

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_hook(judge)
    with torch.inference_mode():
        model(TOKENS[None])
    print("used", used)
    assert len(used) == 3


def test_the_example_writes_tokens(checkpoint_folder):
    command = [sys.executable, str(REPO / "examples" / "transformers_gpt_oss.py"), str(checkpoint_folder)]
    command += ["t5 t77 t3", "--tokens", "4"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:3] == ["t5", "t77", "t3"]
    assert 4 <= len(words) <= 7
