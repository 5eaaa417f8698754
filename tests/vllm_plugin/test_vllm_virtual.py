# SPDX-License-Identifier: Apache-2.0
"""Decode steps on the virtual SM121, called by vLLM: one layer by its router and experts class, and a model by the
plugin's model class."""

from __future__ import annotations

import checkpoint
import pytest
import served
import torch
from paged import Batch, Paged
from test_vllm_decode import CHANGES, PAGES, PROMPTS, SEED, attention_in_pytorch, folder, loaded, prefill, tokens_of  # noqa: F401
from test_vllm_models import serve
from test_vllm_scripts import SCRIPTS, run


@pytest.mark.parametrize("moe", ["mxfp4-a8", "mxfp4-a16"])
def test_a_decode_step_of_the_experts_runs_the_compiled_kernels(checkpoint_folder, moe):
    from flashinfer.testing.virtual_device import virtual_device

    config = serve(checkpoint_folder, {"moe": moe})
    print("seed", 7)
    hidden = torch.randn(2, 160, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    with served.parallel_groups(config):
        from vllm.forward_context import get_forward_context, set_forward_context

        layer = served.load_model(config).model.layers[1].mlp

        def step() -> torch.Tensor:
            with torch.inference_mode(), set_forward_context(None, config, num_tokens=2):
                # A batch of one, padded to a captured size of two.
                get_forward_context().is_padding = torch.tensor([False, True])
                return layer(hidden.clone()).clone()

        on_the_cpu = step()
        with virtual_device("sm_121a") as device:
            on_the_device = step()
            assert any("fused_moe_kernel" in launch.kernel for launch in device.launches)
            assert all(launch.clean for launch in device.launches)
    assert not on_the_device[1].any()
    # Both keep the reference's bound (tests/moe); here that vLLM's call reaches the kernels with the right arguments.
    error = (on_the_device[0] - on_the_cpu[0]).float().abs().max()
    assert on_the_cpu[0].abs().max() > 0.1
    assert error <= 2 * torch.finfo(torch.bfloat16).eps * on_the_cpu[0].float().abs().max()


def test_verify_gpu_judges_the_compiled_kernels_on_the_virtual_sm121():
    done = run("verify_gpu.py", "--virtual", "--only", "moe", PYTHONPATH=f"{SCRIPTS.parent}:{SCRIPTS}")
    print(done.stdout)
    assert done.stdout.splitlines()[-1].startswith("all 6 agree"), done.stderr
    rows = [line.split("|")[2] for line in done.stdout.splitlines() if line.startswith("| MoE")]
    assert len(rows) == 6
    assert all(0 < float(used) <= 1 for used in rows)


def test_a_decode_step_is_the_executors_on_the_virtual_sm121(loaded, tmp_path):  # noqa: F811
    """Behind prompts: QKV, rope with the cache's write and attention, O, router, experts and LM head, all compiled."""
    from flashinfer.testing.virtual_device import virtual_device
    from flashinfer_sm12x.vllm.model import decode_workspace

    checkpoint.write(tmp_path, SEED, **CHANGES, num_hidden_layers=1)
    config, model = loaded({"moe": "mxfp4-a16", "qkv": "mxfp4", "o": "mxfp8", "lm_head": "mxfp4"}, folder=tmp_path)
    steps = Paged(config, model)
    prefill(steps)
    (cache,) = (layer.kv_cache for layer in steps.layers.values())
    before = cache.clone()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        cache.copy_(before)
        batch = Batch([1, 1], [length + 1 for length in PROMPTS], PAGES)
        # A full graph's rows of padding: a sequence of length 0 and a row without any.
        logits = steps.step([tokens_of(i, length + 1)[-1] for i, length in enumerate(PROMPTS)], batch, 4, 3)
        assert not batch.stock
        return logits[:2].log_softmax(-1), cache.clone()

    on_the_cpu, written = step()
    with virtual_device("sm_121a") as device:
        # The CPU's is empty, and with it the step would be left to vLLM.
        dict(model.named_buffers())["sm12x_workspace"].data = decode_workspace(cache.device)
        on_the_device, written_there = step()
        assert all(launch.clean for launch in device.launches)
        ran = " ".join(launch.kernel for launch in device.launches)
    for kernel in ("dense_layer_kernel", "decode_attention", "router", "fused_moe_kernel"):
        assert kernel in ran, ran
    assert not torch.equal(written, before)
    print("logits", distance := (on_the_device - on_the_cpu).abs().mean())
    # A sum of products in another order: neighbours in bf16.
    torch.testing.assert_close(written_there, written, rtol=2**-7, atol=2**-7)
    assert distance < 0.02
