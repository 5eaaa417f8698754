# SPDX-License-Identifier: Apache-2.0
"""The project's own tools: environment set-up, demo, what CI runs commands with."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_toys import REPO, UPSTREAM, load_tool

from flashinfer import _layer, _version


def create_env(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPO / "tools" / "create_env.py"), *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return subprocess.run(command, capture_output=True, text=True, env=inherited | environment)


def test_pins_agree() -> None:
    """The version stands in two places; a release moves both."""
    assert _version.UPSTREAM_VERSION == UPSTREAM
    requirements = (REPO / "requirements.txt").read_text().splitlines()
    assert f"{_version.UPSTREAM_DISTRIBUTION}=={_version.UPSTREAM_VERSION}" in requirements
    assert _layer.wheel_root().name == "flashinfer"


def test_without_an_active_environment_the_checkouts_own_is_used() -> None:
    assert create_env("--find").stdout.strip() == str(REPO / ".venv")


def test_an_active_environment_of_another_pin_is_not_used(tmp_path: Path) -> None:
    """Complete but for one pinned package of another version."""
    tool = load_tool("create_env")
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    (site,) = env.glob("lib/python*/site-packages")
    wanted = [line for file in tool.REQUIREMENTS for line in (REPO / file).read_text().splitlines()]
    for line in ["torch==2.13.0+cpu", *wanted]:
        if match := re.match(r"([\w.-]+)(?:[=>]=([\w.+]+))?", line):
            info = site / f"{match[1].replace('-', '_')}-{match[2]}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {match[1]}\nVersion: {match[2]}\n")
    assert tool.missing(env) == []
    assert create_env("--find", VIRTUAL_ENV=str(env)).stdout.strip() == str(env)
    (metadata,) = site.glob("flashinfer_python-*/METADATA")
    metadata.write_text(metadata.read_text().replace(UPSTREAM, "0.7.1"))
    assert tool.missing(env) == ["flashinfer-python"]
    assert create_env("--find", VIRTUAL_ENV=str(env)).stdout.strip() == str(REPO / ".venv")


def test_an_unsupported_python_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tool = load_tool("create_env")
    for version in ((3, 9, 18), (3, 14, 0)):
        fake = type("version_info", (tuple,), {})(version)
        monkeypatch.setattr(tool.sys, "version_info", fake)
        assert tool.main() == 1
        assert "Python 3.10 to 3.13 is needed. Name one: make PYTHON=python3.12 ..." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "the disk is full",
        ),
        ("... [Errno -3] Temporary failure in name resolution ...\nERROR: No matching", "Is there a network"),
        ("SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] ...", "ca-certificates"),
        ("/usr/bin/python3: No module named pip\n", "apt-get install python3-venv"),
    ],
)
def test_what_pip_said_becomes_a_line_with_the_remedy(said: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    tool = load_tool("create_env")
    assert tool.fail("pip could not install", said) == 1
    assert re.fullmatch(rf"create_env\.py: pip could not install \(.*\): .*{line}.*\n", capsys.readouterr().err)
    assert tool.fail("pip could not install", "nobody knows\n") == 1
    assert capsys.readouterr().err == "nobody knows\ncreate_env.py: pip could not install\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_line_that_moves_on_a_terminal_alone(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = load_tool("progress")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with progress.Progress("compiling") as line:
        line.note = "3 of 19"
        if terminal:
            time.sleep(0.7)
    out = capsys.readouterr().out
    assert out.count("\n") == 2 - terminal
    assert ("\r" in out) == terminal
    assert re.search(r"compiling, 3 of 19: \d s\n$", out)


def test_the_demos_layer_is_a_call_of_each_mode() -> None:
    from flashinfer.testing import MoECase, make_moe_inputs

    def form(inputs: Any) -> dict[str, Any]:
        values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        return {
            name: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }

    demo = load_tool("demo")
    drawn = make_moe_inputs(MoECase(3, 64, 96, 4, 2, mode=1), 7)
    for mode in demo.MODES:
        assert form(demo.inputs_of(mode, drawn)) == form(make_moe_inputs(MoECase(3, 64, 96, 4, 2, mode=mode), 7))


@pytest.mark.parametrize(
    ("found", "ran"),
    [
        (None, None),
        (("A100", (8, 0)), None),
        (("H200", (9, 0)), {"FLASHINFER_SM12X_MOE": "1"}),
        (("GB10", (12, 1)), {}),
    ],
)
def test_the_demo_runs_on_a_gpu_that_has_kernels(found: Any, ran: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the script."""
    demo, calls = load_tool("demo"), []

    def run(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        calls.append({name: env[name] for name in env if name.startswith("FLASHINFER_SM12X_MOE")})
        assert "FLASHINFER_CUDA_ARCH_LIST" not in env
        assert Path(command[1]).is_file()
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "12.1a")
    monkeypatch.delenv("FLASHINFER_SM12X_MOE", raising=False)
    checks = demo.run_on_gpu(found)
    assert calls == ([] if ran is None else [ran])
    assert checks == ([] if ran is None else [(f"the layer on the {found[0]}", False)])


BLOCK_SCALED = "use the block-scaled FP4 MMA"


@dataclasses.dataclass
class Row:
    """As much of a report's row as the demo's checks read."""

    instance: str = "mxfp8_m8_k128"
    gemm: str = "fc1"
    tensor_instructions: int = 14
    block_scaled_mmas: int = 14
    local_accesses: int = 0


@pytest.mark.parametrize(
    ("rows", "failing"),
    [
        ([Row(), Row(gemm="fc2"), Row(instance="bf16_m8_k128", block_scaled_mmas=0)], []),
        ([Row(), Row(gemm="layer", block_scaled_mmas=0)], []),
        ([], ["0 kernels have matrix instructions", f"0 W4A8 GEMM kernels {BLOCK_SCALED}: 0 QMMA.SF with E2M1 in all"]),
        ([Row(tensor_instructions=0)], ["1 kernels have matrix instructions"]),
        ([Row(), Row(local_accesses=3)], ["no kernel spills or uses local memory (LDL, STL) but mxfp8_m8_k128 fc1: 3"]),
        (
            [Row(), Row(block_scaled_mmas=0)],
            [f"2 W4A8 GEMM kernels {BLOCK_SCALED}: 14 QMMA.SF with E2M1 in all"],
        ),
        ([Row(), Row(instance="bf16_m8_k128")], ["1 other kernels use none"]),
    ],
    ids=["good", "streamed layer in bfloat16", "none", "no MMA", "spills", "W4A8 without", "W4A16 with"],
)
def test_the_demo_sees_what_is_wrong_with_machine_code(rows: list[Row], failing: list[str]) -> None:
    checks = load_tool("demo").machine_code_checks(rows)
    assert [what for what, holds in checks if not holds] == failing


class Launch:
    """As much of a virtual launch as the demo reads."""

    def __init__(self, kernel: str, mmas: int = 24, reports: tuple[str, ...] = (), status: str = "ok") -> None:
        self.kernel, self.reports, self.clean = kernel, reports, status == "ok" and not reports
        self.counters = SimpleNamespace(
            warp_instructions=1200,
            by_class={"mma": mmas} if mmas else {},
            global_distinct_bytes=2_500_000,
            shared_bank_conflicts=7,
        )
        self.predicted = SimpleNamespace(seconds=9.16e-6, bound="dram")
        self.host_seconds = 0.25


PROLOGUE, LAYER = "_ZN3moe8prologueEv", "_Z21streamed_layer_kernelIvEvv"
FC1, FC2 = "_Z19grouped_gemm_kernelILN5sm12x4RoleE0EEvv", "_Z19grouped_gemm_kernelILN5sm12x4RoleE1EEvv"


@pytest.mark.parametrize(
    ("launches", "failing"),
    [
        ([Launch(PROLOGUE, 0), Launch(FC1), Launch(FC2)], []),
        ([Launch(PROLOGUE, 0), Launch(LAYER)], []),
        ([], ["W4A8: FC1 and FC2 ran, with MMAs"]),
        ([Launch(PROLOGUE, 0), Launch(FC1)], ["W4A8: FC1 and FC2 ran, with MMAs"]),
        ([Launch(FC1), Launch(FC2, 0)], ["W4A8: FC1 and FC2 ran, with MMAs"]),
        ([Launch(FC1, reports=("a race",)), Launch(FC2)], ["W4A8: 2 launches, all watchers silent\na race"]),
        ([Launch(FC1, status="deadlock"), Launch(FC2)], ["W4A8: 2 launches, all watchers silent"]),
    ],
    ids=["good", "streamed", "none", "no FC2", "no MMA", "a report", "a deadlock"],
)
def test_the_demo_sees_what_is_wrong_with_launches(launches: list[Launch], failing: list[str]) -> None:
    checks = load_tool("demo").launch_checks("W4A8", launches)
    assert [what for what, holds in checks if not holds] == failing


def test_the_demo_lists_what_a_launch_did() -> None:
    rows = load_tool("demo").launch_rows("W4A8", [Launch(PROLOGUE, 0), Launch(FC2)])
    assert rows == [
        ["W4A8", "prologue", 1200, 0, "2.50", 7, "9.2", "dram", 0, "0.2"],
        ["W4A8", "FC2", 1200, 24, "2.50", 7, "9.2", "dram", 0, "0.2"],
    ]


def test_the_demo_refuses_no_tokens() -> None:
    result = subprocess.run(
        [sys.executable, str(REPO / "tools" / "demo.py"), "--tokens", "0"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "--tokens is 0; it must be at least 1" in result.stderr


BARE = str(REPO / ".ci" / "bare")


def bare(*command: str, path: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "CUDA_HOME": str(path)}
    return subprocess.run([BARE, *command], capture_output=True, text=True, env=environment)


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A folder on PATH with a toolkit's program and another."""
    for name in ("nvcc", "unrelated"):
        (tmp_path / name).write_text("#!/bin/sh\necho $0 ran\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_ci_hides_every_toolkit_and_ignores_interrupts(toolkit: Path) -> None:
    look = "command -v nvcc; echo ${CUDA_HOME-unset}; unrelated; kill -INT $$; echo not interrupted; exit 3"
    result = bare("sh", "-c", look, path=toolkit)
    unset, unrelated, alive = result.stdout.splitlines()
    assert (unset, alive, result.returncode) == ("unset", "not interrupted", 3)
    assert unrelated.endswith("/unrelated ran")
    # Covered folders are empty; where the kernel permits no mount, the command is told which stay.
    where = re.search(r"covered (/.*)", result.stderr)
    assert where or re.search("covered nothing|no mount namespace is permitted", result.stderr)
    for folder in where[1].split(", ") if where else []:
        assert bare("ls", "-A", folder, path=toolkit).stdout == ""


@pytest.mark.skipif(os.getuid() != 0, reason="root can give up privileges, others have none")
def test_ci_gives_up_roots_privileges(toolkit: Path) -> None:
    """A file that may not be read is root's to read, and nobody else's, its owner included."""
    secret = toolkit / "secret"
    secret.write_text("read")
    secret.chmod(0)
    assert bare("cat", str(secret), path=toolkit).stdout == "read"
    result = bare("--user", "cat", str(secret), path=toolkit)
    if "the kernel permits none" in result.stderr:
        pytest.skip(result.stderr)
    assert (result.stdout, result.returncode) == ("", 1)
    assert "Permission denied" in result.stderr
