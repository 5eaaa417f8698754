# SPDX-License-Identifier: Apache-2.0
"""The project's own tools: environment set-up, demo, what CI runs commands with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from layer_toys import REPO, UPSTREAM, load_tool

from flashinfer import _layer
from flashinfer_sm12x import versions


def create_env(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPO / "tools" / "create_env.py"), *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return subprocess.run(command, capture_output=True, text=True, env=inherited | environment)


def test_pins_agree() -> None:
    """The versions that a release moves stand in ``versions.py``, in ``requirements.txt`` (``test_bases.py`` compares)
    and here."""
    assert versions.TESTED_VERSIONS[0] == versions.UPSTREAM_VERSION == UPSTREAM
    assert _layer.wheel_root().name == "flashinfer"


def test_git_ignores_no_folder_of_the_source() -> None:
    """A new file there would be left out of commits and of what ruff checks, in silence."""
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, stdout=subprocess.PIPE, text=True, check=True).stdout
    folders = {Path(file).parent for file in tracked.splitlines() if file.startswith(("flashinfer", "csrc", "include"))}
    asked = "".join(f"{folder}/a_new_file.py\n" for folder in folders)
    ignored = subprocess.run(
        ["git", "check-ignore", "--stdin"], cwd=REPO, input=asked, stdout=subprocess.PIPE, text=True
    )
    assert len(folders) > 30
    assert ignored.stdout == ""


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
        if match := re.match(r"([\w.-]+)(?:(?:>=[\w.]+,<=|==|>=)([\w.+]+))?", line):
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
    ("output", "line"),
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
def test_what_pip_printed_becomes_a_line_with_the_fix(
    output: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = load_tool("create_env")
    assert tool.fail("pip could not install", output) == 1
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


def test_the_demo_runs() -> None:
    """All of it, as ``make demo`` does once the emulator is there; what it compiles the virtual device's tests
    share."""
    result = subprocess.run([sys.executable, str(REPO / "tools" / "demo.py")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    titles = re.findall(r"^([1-5])\. ", result.stdout, re.MULTILINE)
    assert titles[:4] == ["1", "2", "3", "4"]
    holding, checked = map(int, re.findall(r"^(\d+) of (\d+) checks hold$", result.stdout, re.MULTILINE)[0])
    assert holding == checked == result.stdout.count("\nok   ") > 10


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({}, []),
        ({"local_accesses": 3}, ["spills"]),
        ({"block_scaled_mmas": 0}, ["W4A8"]),
        ({"tensor_instructions": 0}, ["have matrix"]),
        ({"instance": "bf16_m8_k128"}, ["W4A8", "other kernels"]),
    ],
)
def test_the_demo_sees_what_is_wrong_with_machine_code(changed: dict[str, Any], failing: list[str]) -> None:
    good = {
        "instance": "mxfp8_m8_k128",
        "gemm": "fc1",
        "tensor_instructions": 14,
        "block_scaled_mmas": 14,
        "local_accesses": 0,
    }
    checks = load_tool("demo").machine_code_checks([SimpleNamespace(**good | changed)])
    failed = [what for what, holds in checks if not holds]
    assert len(failed) == len(failing)
    assert all(words in what for words, what in zip(failing, failed, strict=True))


@pytest.mark.parametrize(("clean", "mmas"), [(True, 24), (False, 24), (True, 0)], ids=["good", "a report", "no MMA"])
def test_the_demo_sees_what_is_wrong_with_launches(clean: bool, mmas: int) -> None:
    counters = SimpleNamespace(by_class={"mma": mmas} if mmas else {})
    launch = SimpleNamespace(kernel="_Z16fused_moe_kernelIvEvv", clean=clean, counters=counters, reports=())
    checks = load_tool("demo").launch_checks("W4A8", [launch])
    assert [holds for _, holds in checks] == [mmas > 0, clean]


def test_the_demo_fails_where_there_is_nothing_to_check() -> None:
    demo = load_tool("demo")
    assert [holds for _, holds in demo.machine_code_checks([])] == [False, True, False, True]
    assert [holds for _, holds in demo.launch_checks("W4A8", [])] == [False, True]
    assert demo.run_on_gpu(None) == demo.run_on_gpu(("A100", (8, 0))) == []


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


def test_ci_hides_pips_compiler_where_it_is_asked_to(toolkit: Path) -> None:
    """In the environment of the Python on PATH, and nothing else of it."""
    environment = toolkit / "environment"
    packages = environment / "lib" / "python3.11" / "site-packages" / "nvidia"
    for name in ("cu13/bin/nvcc", "cu13/nvvm/bin/cicc", "cu13/include/cuda.h", "other/bin/program"):
        (packages / name).parent.mkdir(parents=True)
        (packages / name).touch()
    (toolkit / "python").write_text(f"#!/bin/sh\necho {environment}\n")
    (toolkit / "python").chmod(0o755)
    look = ("find", str(packages), "-type", "f", "-printf", "%P ")
    seen = bare("--no-compiler", *look, path=toolkit)
    if "the kernel permits none" in seen.stderr:
        assert seen.returncode == 2
        pytest.skip(seen.stderr)
    assert set(seen.stdout.split()) == {"cu13/include/cuda.h", "other/bin/program"}
    assert len(bare(*look, path=toolkit).stdout.split()) == 4
    refused = bare("--no-compilers", *look, path=toolkit)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "usage: .ci/bare [--user] [--no-compiler] COMMAND..." in refused.stderr
