# SPDX-License-Identifier: Apache-2.0
"""Tests that need processes of their own: GPUs that the plugin does not serve, and several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_models import check

HERE = Path(__file__).parent
REPO = HERE.parents[1]


def start(program: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, [REPO, HERE, HERE / "platform", REPO / "scripts"]))
    return subprocess.Popen(
        [sys.executable, str(HERE / program), *words],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def two_ranks(kind: str, folder: Path, target: Path, chosen: dict[str, str], *words: str) -> tuple[Any, list[str]]:
    """The result that rank 0 of ``rank.py`` saved, and the output of both ranks."""
    from vllm.utils.network_utils import get_open_port

    port = str(get_open_port())
    words = ("--tensor-parallel-size", "2", "--additional-config", json.dumps({"sm12x": chosen}), *words)
    ranks = [
        start("rank.py", kind, str(rank), port, str(folder), str(target), *words, VIRTUAL_GPU_COUNT="2")
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
    return torch.load(target), outputs


@pytest.mark.parametrize(
    ("capability", "switches"),
    [("9.0", {}), ("10.0", {}), ("12.1", {"FLASHINFER_SM12X_VLLM": "0"}), ("12.1", {"FLASHINFER_SM12X_MOE": "0"})],
    ids=["Hopper", "data-centre Blackwell", "switched off", "fork switched off"],
)
def test_elsewhere_vllms_choices_are_what_they_were(checkpoint_folder, capability, switches):
    # VLLM_PLUGINS is empty: no plugin is loaded but by the program itself.
    process = start(
        "choices_elsewhere.py",
        str(checkpoint_folder),
        VIRTUAL_GPU_CAPABILITY=capability,
        VLLM_PLUGINS="virtual_gpu",
        **switches,
    )
    output = process.communicate()[0]
    assert process.returncode == 0, output
    result = json.loads(output.rpartition("RESULT")[2])
    print(result["before"])
    assert result["after"] == result["before"]
    assert result["before"]["quantization"] == "GptOssMxfp4Config"
    assert set(result["imported"]) <= {"flashinfer_sm12x.vllm.settings", "flashinfer_sm12x.vllm.devices"}
    assert result["seconds"] < 0.1  # of CPU, in every process that vLLM starts


def test_a_start_comes_as_far_as_it_can_without_a_gpu(tmp_path):
    """``scripts/bare_machine.sh ubuntu-vllm`` runs this; without a compiler it ends with the plugin's line."""
    process = start("start_up.py")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert {"plugin: installed", "has_flashinfer: True"} <= set(output.splitlines())
    process = start("start_up.py", CUDA_HOME=str(tmp_path))
    output = process.communicate()[0]
    assert process.returncode == 1, output
    assert (
        f"qkv, o, lm_head are to be quantized, and their kernel cannot be compiled here: CUDA_HOME={tmp_path}" in output
    )


DENSE = {"qkv": "mxfp8", "o": "mxfp8", "lm_head": "mxfp8"}


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), {}),
        # A rank has half of the experts and gets half of the rows: "auto" is W4A16 here as with tensor parallel ranks.
        (("--enable-expert-parallel",), {}),
        # vLLM's emulation in PyTorch of the kernels; each rank quantizes its shard.
        (("--linear-backend", "emulation"), DENSE),
    ],
    ids=["tensor parallel", "expert parallel", "dense layers quantized"],
)
def test_two_ranks_agree_with_transformers(checkpoint_folder, tmp_path, words, kinds):
    """A rank's shard of the experts has 48 of 96 columns, no whole number of blocks: vLLM's loader splits 64 and 32."""
    logits, outputs = two_ranks("prefill", checkpoint_folder, tmp_path / "logits.pt", kinds, *words)
    assert all("SM12xAutoExperts" in output for output in outputs)
    assert all(("EmulationMxfp8LinearKernel" in output) == bool(kinds) for output in outputs)
    check(logits, checkpoint_folder, "a16", kinds)
