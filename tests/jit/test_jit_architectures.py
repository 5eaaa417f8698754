# SPDX-License-Identifier: Apache-2.0
"""``FLASHINFER_CUDA_ARCH_LIST``: what is accepted, what it becomes, what is refused and how."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import forked_python
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashinfer.compilation_context as context
from flashinfer.compilation_context import CompilationContext, parse_arch_list
from flashinfer_sm12x import variables


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("12.1a", {(12, "1a")}),
        ("12.1f", {(12, "1f")}),
        ("12.0a", {(12, "0a")}),
        ("12.0f", {(12, "0f")}),
        ("9.0a", {(9, "0a")}),
        ("9.0", {(9, "0a")}),
        ("8.9", {(8, "9")}),
        ("7.5", {(7, "5")}),
        ("10.0a 10.3a", {(10, "0a"), (10, "3a")}),
        ("12.0a 12.1a", {(12, "0a"), (12, "1a")}),
        ("9.0a;12.1a", {(9, "0a"), (12, "1a")}),
        (" 9.0a ;  12.1a; ", {(9, "0a"), (12, "1a")}),
        ("12.1a 12.1a", {(12, "1a")}),
    ],
)
def test_accepted(value: str, expected: set[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", value)
    parsed = CompilationContext().TARGET_CUDA_ARCHS
    assert parsed == expected


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("", "''"),
        ("  ;", "'  ;'"),
        ("12", "'12'"),
        ("12.1b", "'12.1b'"),
        ("abc", "'abc'"),
        ("12.1a,12.0a", "'12.1a,12.0a'"),
        ("12.1a 12", "'12' in '12.1a 12'"),
        ("9.0f", "'9.0f'"),
        ("8.9a", "'8.9a'"),
        ("12.10a", "'12.10a'"),
        ("sm_121a", "'sm_121a'"),
        ("-12.1a", "'-12.1a'"),
    ],
)
def test_refused_with_the_value_and_an_example(value: str, quoted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", value)
    with pytest.raises(ValueError, match="FLASHINFER_CUDA_ARCH_LIST") as caught:
        CompilationContext()
    assert quoted in str(caught.value)
    assert "FLASHINFER_CUDA_ARCH_LIST=12.1a" in str(caught.value)


@given(st.text(alphabet="0123456789. ;afx", max_size=12))
def test_nothing_but_a_set_of_architectures_or_a_value_error(value: str) -> None:
    entries = value.replace(";", " ").split()
    refused = ""
    parsed: set[tuple[int, str]] = set()
    try:
        parsed = parse_arch_list(value)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert not entries or any(repr(entry) in refused for entry in entries)
    else:
        assert 1 <= len(parsed) <= len(entries)
        assert all(minor[0].isdigit() for _, minor in parsed)
        assert all(minor[-1] in "af" for major, minor in parsed if major == 12)


def test_missing_suffix_is_completed_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    context._complete_sm12x.cache_clear()
    with caplog.at_level(logging.WARNING, "flashinfer.compilation_context"):
        assert parse_arch_list("12.1") == {(12, "1a")}
        assert parse_arch_list("9.0a 12.1") == {(9, "0a"), (12, "1a")}
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "12.1 is taken as 12.1a" in message
    assert "Feature 'cvt.e2m1x2...' not supported on .target 'sm_121'" in message


def test_12_0_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: object) -> None:
        raise RuntimeError("no compiler")

    context._complete_sm12x.cache_clear()
    monkeypatch.setattr(CompilationContext, "_normalize_cuda_arch", staticmethod(no_compiler))
    assert parse_arch_list("12.0") == {(12, "0a")}


def _import_flashinfer(home: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "FLASHINFER_CUDA_ARCH_LIST"}
    environment |= {"FLASHINFER_WORKSPACE_BASE": home, "CUDA_VISIBLE_DEVICES": "", **variables}
    code = "import flashinfer.jit.env as e; print(e.FLASHINFER_JIT_DIR)"
    return forked_python.run(["-c", code], env=environment)


def test_cache_path_carries_the_architectures(tmp_path: object) -> None:
    result = _import_flashinfer(str(tmp_path), FLASHINFER_CUDA_ARCH_LIST="12.1a;9.0a")
    assert result.stdout.strip() == f"{tmp_path}/.cache/flashinfer/0.7.2.post1/90a_121a/cached_ops", result.stderr


def test_import_without_gpu_and_without_the_variable(tmp_path: object) -> None:
    result = _import_flashinfer(str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{tmp_path}/.cache/flashinfer/0.7.2.post1/cached_ops"


WITHOUT_A_HOME = """
import os, pwd
os.environ.pop("HOME", None)
def nobody(uid): raise KeyError(uid)
pwd.getpwuid = nobody
if not os.environ["FLASHINFER_WORKSPACE_BASE"]: del os.environ["FLASHINFER_WORKSPACE_BASE"]
import flashinfer
print(flashinfer.jit.env.FLASHINFER_CACHE_DIR)
"""


@pytest.mark.parametrize("named", [True, False])
def test_a_user_without_a_home_needs_the_workspace_alone(named: bool, tmp_path: object) -> None:
    environment = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(tmp_path) if named else ""}
    result = forked_python.run(["-c", WITHOUT_A_HOME], env=environment)
    if named:
        assert result.stdout.strip() == f"{tmp_path}/.cache/flashinfer", result.stderr
    else:
        assert result.stderr.strip().endswith("Set FLASHINFER_WORKSPACE_BASE to a folder that you may write to")


@pytest.mark.parametrize(("named", "meant"), [("~/x", "{}/x"), ("~no-such-user/x", ""), ("/~/x", "/~/x")])
def test_a_tilde_in_the_workspace_is_a_home_folder(named: str, meant: str, tmp_path: Path) -> None:
    read = {"FLASHINFER_WORKSPACE_BASE": named}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        if meant:
            assert variables.read("FLASHINFER_WORKSPACE_BASE", read) == meant.format(tmp_path)
        else:
            with pytest.raises(variables.VariableError, match="~no-such-user/x'; it may be a folder; ~ and ~name are"):
                variables.read("FLASHINFER_WORKSPACE_BASE", read)
    if named == "~/x":
        assert _import_flashinfer("~/x", HOME=str(tmp_path)).stdout.startswith(f"{tmp_path}/x/.cache/flashinfer/")


def test_import_with_an_unwritable_cache_reports_what_to_do(tmp_path: object) -> None:
    path = f"{tmp_path}/file"
    open(path, "w").close()
    result = _import_flashinfer(path, FLASHINFER_CUDA_ARCH_LIST="12.1a")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("NotADirectoryError: [Errno 20] the FlashInfer cache ")
    assert "Set FLASHINFER_WORKSPACE_BASE to a folder that you may write to" in last
