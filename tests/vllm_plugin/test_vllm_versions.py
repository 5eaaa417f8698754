# SPDX-License-Identifier: Apache-2.0
"""README's "To switch it off", and FlashInfer's wheel of another version, in processes of vLLM's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from other_wheels import UNTESTED, environment_with

HERE = Path(__file__).parent
REPO = HERE.parents[1]
MOE, PLUGIN = "FLASHINFER_SM12X_MOE", "FLASHINFER_SM12X_VLLM"


@pytest.fixture(scope="module")
def relabelled(site_packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment's Python that finds vLLM, and FlashInfer's wheel as another version."""
    return environment_with(site_packages, tmp_path_factory.mktemp("relabelled") / "environment", UNTESTED)


def run(python: Path | str, folder: Path, **variables: str) -> tuple[dict[str, Any], str]:
    """The program's result, and all that it printed."""
    path = os.pathsep.join(map(str, [REPO, HERE, HERE / "platform", REPO / "scripts"]))
    environment = {"PYTHONPATH": path, "VIRTUAL_GPU_CAPABILITY": "12.1", **variables}
    command = [str(python), str(HERE / "over_a_wheel.py"), str(folder)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.rpartition("RESULT")[2]), done.stderr + done.stdout


@pytest.mark.parametrize(
    ("python", "variables", "fork_is_imported", "outcome"),
    [
        ("relabelled", {}, False, f"it steps aside: flashinfer-python {UNTESTED} in "),
        ("relabelled", {PLUGIN: "0"}, False, f"{PLUGIN}=0 switches it off"),
        ("relabelled", {MOE: "0"}, False, f"{MOE}=0 switches it off"),
        ("tested", {PLUGIN: "0"}, True, f"{PLUGIN}=0 switches it off"),
        ("tested", {MOE: "0"}, False, f"{MOE}=0 switches it off"),
    ],
    ids=["another version", "another, plugin off", "another, fork off", "plugin off", "fork off"],
)
def test_vllm_is_as_without_the_fork(request, checkpoint_folder, python, variables, fork_is_imported, outcome):
    interpreter = request.getfixturevalue(python) if python == "relabelled" else sys.executable
    found, printed = run(interpreter, checkpoint_folder, **variables)
    assert found["outcome"].startswith(outcome)
    file, has_fork = found["flashinfer"]
    assert has_fork == fork_is_imported
    assert Path(file).is_relative_to(REPO / "flashinfer") == fork_is_imported
    assert found["asked"] == [True, True, True]
    assert (found["quantization"], found["class"], found["head"]) == (
        "GptOssMxfp4Config",
        "GptOssForCausalLM",
        "ParallelLMHead",
    )
    assert "SM12x" not in found["kernels"]["moe"]
    reason = outcome.removeprefix("it steps aside: ")
    assert any(reason in line for line in found["log"])
    warned = "steps aside, and 'import flashinfer' is upstream's package alone" in printed
    assert warned == (python == "relabelled" and MOE not in variables)
