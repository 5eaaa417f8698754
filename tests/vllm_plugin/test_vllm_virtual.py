# SPDX-License-Identifier: Apache-2.0
"""One decode step of one gpt-oss layer on the virtual SM121, called by vLLM: its runner, its router, its experts
class."""

from __future__ import annotations

import pytest
import served
import torch
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
            assert any("streamed_layer_kernel" in launch.kernel for launch in device.launches)
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
