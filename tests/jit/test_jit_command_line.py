# SPDX-License-Identifier: Apache-2.0
"""``python -m flashinfer``: building and inspecting, and what works without a compiler."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from jit_fakes import needs_nvcc, small_spec
from jit_processes import run_python
from layer_toys import REPO

from flashinfer import __main__ as command_line
from flashinfer.jit.sm12x import cache, modules
from flashinfer_sm12x.build import inspect_sass
from flashinfer_sm12x.build.toolchain import ToolchainError
from flashinfer_sm12x.doctor import questions


def _invoke(*arguments: str) -> Result:
    from flashinfer.__main__ import cli

    return CliRunner().invoke(cli, list(arguments))


@needs_nvcc
def test_modules_are_listed(tmp_path: Path) -> None:
    listed = run_python(["-m", "flashinfer", "list-modules"], tmp_path).stdout
    for name in ("fused_moe_120", "fused_moe_120_upstream", "gemm_mxfp4_sm12x"):
        assert f"  {name} - Not Compiled" in listed


def test_only_what_compiles_needs_a_compiler(tmp_path: Path) -> None:
    """The rest says in a line what is missing."""
    none = str(tmp_path / "none")
    message = {
        "--help": "sm12x-build",
        "sm12x-plan": "stream_bf16_m8",
        "collect-env": "torch.version.cuda",
        "list-modules": "fused_moe_120 - Not Compiled",
        "clear-cache": "Cache cleared",
    }
    for argument, text in message.items():
        done = run_python(["-m", "flashinfer", argument], tmp_path, CUDA_HOME=none)
        assert (done.returncode, text in done.stdout, "Traceback" in done.stderr) == (0, True, False), done
    for argument in ("sm12x-build", "sm12x-instances", "export-compile-commands"):
        done = run_python(["-m", "flashinfer", argument], tmp_path, CUDA_HOME=none)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 1
        assert line.startswith(f"Error: CUDA_HOME={none} holds no bin/nvcc. ")


@needs_nvcc
def test_report_reports_that_the_module_is_not_built(workspace: Path) -> None:
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
    monkeypatch.setattr(modules, "gen_fused_moe_module", lambda _weights: small_spec(workspace))
    link = workspace / "cached_ops" / "small" / "small.so"
    shown = _invoke("sm12x-build")
    assert shown.exit_code == 0, shown.output
    line = shown.output.splitlines()[-1]
    assert line.startswith("small: 1 of 1 source compiled, ")
    assert line.endswith(f" s: {link.resolve()}")
    assert link.is_file()
    assert "small: was up to date, " in _invoke("sm12x-build").output


@needs_nvcc
def test_the_doctor_wants_what_sm12x_build_builds(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {}
    monkeypatch.setattr(questions, "tell", lambda **facts: answers.update(facts))
    questions.ask_modules()
    wanted = [name for name, fact in answers.items() if name.startswith("module ") and fact["by_default"]]
    assert wanted == [f"module {spec.name}" for spec in command_line._sm12x_specs(False)]
    assert len([name for name in answers if name.startswith("module ")]) == len(modules.gen_operator_modules())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("command", ["sm12x-build", "sm12x-instances", "sm12x-cache list", "sm12x-cache clear"])
def test_a_signal_ends_a_command_in_a_line(
    command: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, plain_signals: None
) -> None:
    def ended(*_: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr(command_line, "_sm12x_specs", ended)
    monkeypatch.setattr(cache, "cached_modules" if command.endswith("list") else "remove", ended)
    module = cache.CachedModule("small", "x", Path("/nowhere"), 1, 0.0, True)
    monkeypatch.setattr(cache, "chosen", lambda *_: [module])
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    shown = _invoke(*command.split())
    text = f"Error: interrupted by {number.name}: what is done stays, and the same command resumes from there"
    assert (shown.exit_code, shown.output.splitlines()) == (128 + number, [text])
    assert {each: signal.getsignal(each) for each in before} == before


def test_an_error_of_the_system_ends_a_command_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_everything: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/x")

    monkeypatch.setattr(command_line, "_sm12x_specs", full)
    shown = _invoke("sm12x-build")
    assert (shown.exit_code, shown.output) == (1, "Error: [Errno 28] No space left on device: '/cache/x'\n")


@pytest.mark.parametrize("where", ["while it runs", "at the end"])
def test_output_that_cannot_be_written_is_a_line(where: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """As on a full disk; and Python says no more at its end."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(command_line.os, "dup2", lambda _from, to: os.close(_from) or to)
        monkeypatch.setattr(command_line, "_group", lambda: print("x", flush=where == "while it runs"))
        with pytest.raises(SystemExit) as ended:
            command_line._main()
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    assert ended.value.code == 1
    message = capfd.readouterr().err.splitlines()
    assert set(message) == {"Error: the output cannot be written: No space left on device"}


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
    assert shown.output.splitlines()[1].startswith("upstream's 1 module: ")
    assert _invoke("sm12x-build", "--vllm", "int8").exit_code == 2


def test_interrupted_command_reports_what_stays(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        prebuilt = None

        def __init__(self, _weights: str) -> None:
            pass

        def build(self, **_: object) -> None:
            raise KeyboardInterrupt("building small was interrupted: 3 of 5 objects are built and stay")

    monkeypatch.setattr(modules, "gen_fused_moe_module", Interrupted)
    shown = _invoke("sm12x-build")
    assert shown.exit_code == 130
    text = "Error: interrupted by SIGINT: building small was interrupted: 3 of 5 objects are built and stay"
    assert shown.output.splitlines() == [text]


@pytest.mark.parametrize(
    ("there", "in_checkout", "on_path", "answers"),
    [
        ("another", True, False, True),
        ("another", False, False, False),
        ("another", True, True, False),
        ("this one", True, False, False),
        ("removed", True, False, False),
        ("", True, False, False),
    ],
)
def test_a_build_in_a_checkout_beside_an_installation_reports_whose_modules_it_makes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str, in_checkout: bool, on_path: bool, answers: bool
) -> None:
    """Python finds the checkout in the working directory, vLLM finds what is installed."""
    from flashinfer import __main__ as command

    (tmp_path / "another").mkdir()
    tree = REPO if there == "this one" else tmp_path / there
    monkeypatch.setitem(sys.modules, "_flashinfer_sm12x", SimpleNamespace(_TREE=str(tree)) if there else None)  # type: ignore[arg-type]
    rest = [each for each in sys.path if each not in ("", str(REPO))] + [str(REPO)] * on_path
    monkeypatch.setattr(sys, "path", [str(REPO if in_checkout else tmp_path), *rest])
    monkeypatch.setattr(command, "_sm12x_specs", lambda everything: [])
    done = _invoke("sm12x-build")
    assert done.exit_code == 0, done.output
    message = f"this builds the modules of {REPO}, which Python found in the working directory; {tree} is installed"
    assert (message in done.output) == answers
