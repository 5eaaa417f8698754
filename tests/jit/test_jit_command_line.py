# SPDX-License-Identifier: Apache-2.0
"""``python -m flashinfer``: building and inspecting, and what works without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from jit_fakes import needs_nvcc, small_spec

from flashinfer.jit.sm12x import inspect_sass, modules
from flashinfer.jit.sm12x.toolchain import ToolchainError


def _cli(workspace: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(workspace), "FLASHINFER_CUDA_ARCH_LIST": "12.1a"}
    command = [sys.executable, "-m", "flashinfer", *arguments]
    return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True)


def _invoke(*arguments: str) -> Result:
    from flashinfer.__main__ import cli

    return CliRunner().invoke(cli, list(arguments))


@needs_nvcc
def test_modules_are_listed(tmp_path: Path) -> None:
    listed = _cli(tmp_path, "list-modules").stdout
    for name in ("fused_moe_120", "fused_moe_120_upstream", "gemm_mxfp4_sm12x"):
        assert f"  {name} - Not Compiled" in listed


EACH_IN_A_CHILD = """
import json, os, runpy, sys
import flashinfer.jit
for number, argument in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv[1:] = [argument]
        runpy.run_module("flashinfer", run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""``python -m flashinfer`` with each of some arguments, in processes that share the imports, which take seconds."""


def test_only_what_compiles_needs_a_compiler(tmp_path: Path) -> None:
    """The rest says in a line what is missing."""
    none = str(tmp_path / "none")
    said = {
        "--help": "sm12x-build",
        "sm12x-plan": "stream_mxfp8_as_bf16_m8",
        "collect-env": "torch.version.cuda",
        "list-modules": "fused_moe_120 - Not Compiled",
        "clear-cache": "Cache cleared",
    }
    refused = ["sm12x-build", "sm12x-instances", "export-compile-commands"]
    environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(tmp_path), "FLASHINFER_CUDA_ARCH_LIST": "12.1a"}
    command = [sys.executable, "-c", EACH_IN_A_CHILD, json.dumps([*said, *refused])]
    result = subprocess.run(
        command, cwd=tmp_path, env={**environment, "CUDA_HOME": none}, capture_output=True, text=True
    )
    assert result.stdout.split() == ["0"] * len(said) + ["1"] * len(refused), result.stderr
    for number, text in enumerate(said.values()):
        assert text in (tmp_path / f"{number}.out").read_text()
        assert "Traceback" not in (tmp_path / f"{number}.err").read_text()
    for number in range(len(said), len(said) + len(refused)):
        (line,) = (tmp_path / f"{number}.err").read_text().splitlines()
        assert line.startswith(f"Error: CUDA_HOME={none} holds no bin/nvcc. ")


@needs_nvcc
def test_report_says_that_the_module_is_not_built(workspace: Path) -> None:
    for arguments in ([], ["--all"]):
        shown = _invoke("sm12x-instances", *arguments)
        assert shown.exit_code == 1
        assert "fused_moe_120 is not built" in shown.output
        command = " ".join(["sm12x-build", *arguments])
        assert f"'python -m flashinfer {command}' builds it" in shown.output


@needs_nvcc
def test_build_needs_only_the_compiler(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found(*_: object) -> Path:
        raise ToolchainError("cuobjdump not found")

    monkeypatch.setattr(inspect_sass, "find_tool", none_found)
    monkeypatch.setattr(modules, "gen_fused_moe_module", lambda: small_spec(workspace))
    library = workspace / "cached_ops" / "small" / "small.so"
    shown = _invoke("sm12x-build")
    assert shown.exit_code == 0, shown.output
    line = shown.output.splitlines()[-1]
    assert line.startswith("small: 1 of 1 sources compiled, ")
    assert line.endswith(f" s: {library}")
    assert library.is_file()
    assert "small: was up to date, " in _invoke("sm12x-build").output


def test_all_that_can_be_built_has_the_other_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def reached() -> None:
        raise Reached

    monkeypatch.setattr("flashinfer.__main__._sm12x_specs", lambda everything: [])
    monkeypatch.setattr(modules, "gen_operator_modules", reached)
    for option in (["--all"], ["--vllm", "bf16"], ["--vllm", "fp8"]):
        assert isinstance(_invoke("sm12x-build", *option).exception, Reached)
    assert _invoke("sm12x-build").exit_code == 0


def test_what_vllm_starts_with_is_built_by_upstreams_builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Spec:
        name = "attention"

        def get_library_path(self) -> Path:
            return tmp_path / "attention.so"

    built: list[object] = []
    monkeypatch.setattr("flashinfer.__main__._sm12x_specs", lambda everything: [])
    monkeypatch.setattr(modules, "gen_operator_modules", lambda: [None])
    monkeypatch.setattr(modules, "gen_vllm_modules", lambda kv_cache: built.append(kv_cache) or [Spec()])
    monkeypatch.setattr("flashinfer.jit.core.build_jit_specs", lambda specs, verbose: built.append(verbose))
    shown = _invoke("sm12x-build", "--vllm", "fp8", "--verbose")
    assert built == [torch.float8_e4m3fn, True]
    assert shown.output.splitlines()[0] == f"attention: is built: {tmp_path / 'attention.so'}"
    assert shown.output.splitlines()[1].startswith("upstream's 1 modules: ")
    assert _invoke("sm12x-build", "--vllm", "int8").exit_code == 2


def test_interrupted_command_says_what_stays(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        prebuilt = None

        def build(self, **_: object) -> None:
            raise KeyboardInterrupt("building small was interrupted: 3 of 5 objects are built and stay")

    monkeypatch.setattr(modules, "gen_fused_moe_module", Interrupted)
    shown = _invoke("sm12x-build")
    assert shown.exit_code == 1
    assert shown.output.splitlines() == ["Error: building small was interrupted: 3 of 5 objects are built and stay"]
