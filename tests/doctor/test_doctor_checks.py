# SPDX-License-Identifier: Apache-2.0
"""Checks of facts that the fakes of ``doctor_machine`` do not have."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import findings, healthy
from layer_toys import write_tree

from flashinfer_sm12x.doctor import checks, questions
from flashinfer_sm12x.doctor.asking import CLI

SPARK = {"gpus": [{"name": "GB10", "capability": "12.1", "driver": "580.95.05"}]}
MOE, CHANGED = "module fused_moe_120", "x.cuh changed"


def module(stale: str = "", prebuilt: bool = False, passed_over: str = "", by_default: bool = True) -> dict[str, Any]:
    return {"prebuilt": prebuilt, "stale": stale, "passed_over": passed_over, "by_default": by_default}


def build_of(*modules: dict[str, Any]) -> dict[str, Any]:
    """No compiler, which matters only where something has to be built."""
    error = {"error": "no CUDA compiler found. Install one with: pip install x"}
    return {"build": error, "modules": {f"module {number}": fact for number, fact in enumerate(modules)}}


def probed(mxf8f6f4: int | None, mxf4: int | None) -> dict[str, Any]:
    return {"modules": {"probed_sum_bits": {"mxf8f6f4": mxf8f6f4, "mxf4": mxf4}, "narrowest_sum": 20}}


def memory(gib: float) -> dict[str, Any]:
    return {"gpus": SPARK, "memory": {"available": int(gib * checks.GIB), "total": 100 * checks.GIB}}


def gpus(*capabilities: str) -> dict[str, Any]:
    return {"gpus": [{"name": "GPU", "capability": each, "driver": "580.95.05"} for each in capabilities]}


def seen(*capabilities: str) -> dict[str, Any]:
    """Facts of a torch that sees these GPUs."""
    return {"torch": "2", "cuda": "13.0", **gpus(*capabilities)}


NO_TORCH = {"torch": {"failed": "ModuleNotFoundError: No module named 'torch'"}}

# check, facts, state, a part of what is found, the end of the command, a part of the reason; and the environment
# fmt: off
GIVEN: list[tuple[Any, ...]] = [
    ("modules", {"modules": {MOE: module(), "module fused_moe_120_nvfp4": module("it is not built yet",
        by_default=False)}}, "ok", "built and fresh", "", ""),
    ("modules", {"modules": {MOE: module(CHANGED)}}, "warn", "fused_moe_120: x.cuh changed",
        "-m flashinfer sm12x-build", ""),
    ("modules", {"modules": {MOE: module(CHANGED)}}, "fail", CHANGED, "-m flashinfer sm12x-build", "forbids",
     {"FLASHINFER_DISABLE_JIT": "1"}),
    ("modules", {"modules": {MOE: module(prebuilt=True)}}, "ok", "fused_moe_120: prebuilt", "", ""),
    ("modules", {"modules": {MOE: module("it is not built yet", passed_over="x.cuh is another")}}, "warn",
     "(fused_moe_120: x.cuh is another)", f"uninstall --yes flashinfer-sm12x-kernels && {CLI} sm12x-build", ""),
    ("build", build_of(module()), "warn", "no CUDA compiler", "-m pip install x", "need none"),
    ("build", build_of(module(), module("changed")), "fail", "no CUDA compiler", "-m pip install x", ""),
    ("build", build_of(), "fail", "no CUDA compiler", "-m pip install x", ""),
    ("headroom", memory(78.5), "ok", "", "", ""),
    ("headroom", memory(78.0), "ok", "8 GiB beside a --gpu-memory-utilization of 0.7", "", ""),
    ("headroom", memory(77.9), "warn", "leaves the host less than 8 GiB", "| head",
        "--gpu-memory-utilization 0.69 or less"),
    ("headroom", memory(1), "warn", "", "| head", "--gpu-memory-utilization 0.00"),
    ("modules", {"modules": {"error": "/c/build.ninja is no file and no folder. Remove it: rm '/c d/build.ninja'"}},
        "fail",
     "is no file and no folder", f"rm '/c d/build.ninja' && {CLI} sm12x-build", ""),
    ("torch", NO_TORCH | {"installer": {"pip": False, "ensurepip": True}}, "fail", "not installed",
     "-m pip install vllm==0.33.0", ""),
    ("torch", NO_TORCH | {"installer": {"pip": False}}, "fail", "not installed", "",
     "has neither pip nor uv: with the program that made its environment, pip install vllm==0.33.0"),
    ("torch", NO_TORCH | {"installer": {"pip": True, "uv": "/u/uv", "managed": True, "ensurepip": True}}, "fail",
     "not installed", "", "make an environment, python3 -m venv ~/venv, install there, pip install vllm==0.33.0"),
    ("torch", NO_TORCH | {"installer": {"pip": True, "managed": True, "ensurepip": False}}, "fail", "not installed",
        "", "apt-get install python3-venv"),
    ("build", {"build": {"error": "apt-get install g++"}, "system": {"programs": []}}, "fail", "g++", "",
        "has no apt-get"),
    ("architectures", {"modules": {"architectures": ["12.1a"]}, "gpus": gpus("12.1", "8.9", "6.1")}, "ok", "12.1a", "",
        ""),
    ("architectures", {"modules": {"architectures": ["12.0a"]}, "gpus": gpus("12.1", "8.9")}, "fail", "not run on",
        " }12.1a\"", ""),
    ("architectures", {"modules": {"architectures": ["8.9"]}, "gpus": gpus("8.9")}, "ok", "8.9", "", ""),
    ("torch", {"torch": seen("12.0"), "gpus": gpus("12.1")}, "warn",
        "torch says compute capability 12.0, the driver 12.1",
     'export FLASHINFER_CUDA_ARCH_LIST="12.1a"', "the driver knows better"),
    ("torch", {"torch": seen("12.0"), "gpus": gpus("12.1")}, "ok", "torch 2", "", "",
        {"FLASHINFER_CUDA_ARCH_LIST": "12.1a"}),
    ("torch", {"torch": seen("12.0"), "gpus": gpus("12.1")}, "warn", "the driver 12.1", '"12.1a"', "",
        {"FLASHINFER_CUDA_ARCH_LIST": "12.0a 9.0"}),
    ("torch", {"torch": seen("12.1"), "gpus": gpus("12.0", "12.1")}, "ok", "torch 2", "", ""),
    ("torch", {"torch": seen("12.1"), "gpus": gpus("12.0")}, "warn", "the driver 12.0", '"12.0a"', "",
        {"FLASHINFER_CUDA_ARCH_LIST": "much"}),
    ("torch", {"torch": seen("12.1"), "gpus": gpus("12.1", "8.9")}, "ok", "torch 2", "", ""),  # CUDA_VISIBLE_DEVICES
    ("vllm", {"path": {"vllm": "0.33.0+cu130.d20261101"}}, "ok", "0.33.0+cu130", "", ""),
    ("vllm", {"path": {"vllm": "0.33.0rc1+cu130"}}, "warn", "0.33.0rc1", "install vllm==0.33.0", ""),
    ("vllm", {"path": {"vllm": "10.33.0"}}, "warn", "10.33.0", "install vllm==0.33.0", ""),
    ("probe", probed(None, None), "ok", "was not probed", "", ""),
    ("probe", probed(13, 25), "ok", "20 are needed, so half precision takes the place of mxf8f6f4", "", ""),
    ("probe", probed(19, 13), "ok", "half precision takes the place of mxf8f6f4 and mxf4", "", ""),
    ("probe", probed(21, 20), "ok", "keep 21 bits (mxf8f6f4), 20 bits (mxf4) of a sum; 20 are needed", "", ""),
    ("disk", {"folder": {"free_bytes": 8 << 30, "folder": "cache"}}, "ok", "", "", ""),
    ("disk", {"folder": {"free_bytes": 1 << 29, "folder": "cache"}}, "warn", "", "sm12x-cache list", "make room"),
    ("disk", {"folder": {"free_bytes": 1 << 20, "folder": "cache"}}, "fail", "", "sm12x-cache list", "make room"),
    # A check that fails itself is one unknown.
    ("disk", {"folder": {"free_bytes": "a lot", "folder": "cache"}}, "unknown", "the check itself failed", "--json",
        ""),
]
# fmt: on


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: f"{given[0]}-{given[2]}")
def test_facts_get_their_row(given: tuple[Any, ...]) -> None:
    check, facts, state, found, command, why, *environ = given
    row = findings(facts, *environ)[check]
    assert (row.state, found in row.found, row.command.endswith(command), why in row.why) == (
        state,
        True,
        True,
        True,
    ), row
    assert bool(row.command) == bool(command)
    assert "half" not in row.found or "half" in found
    assert row.command.startswith("unset FLASHINFER_DISABLE_JIT && ") == ("forbids" in why)
    assert check != "build" or ("need none" in row.why) == (state == "warn")


def test_rows_that_do_not_apply_are_left_out() -> None:
    rtx = {"gpus": [{"name": "RTX", "capability": "12.0", "driver": "580"}]}
    assert "headroom" not in findings({"gpus": rtx, "memory": {"available": 1, "total": 2}})
    assert "architectures" not in findings({"gpus": SPARK})


def test_a_managed_python_takes_pip_where_the_user_chose_it() -> None:
    facts = NO_TORCH | {"installer": {"pip": True, "managed": True}}
    assert findings(facts, {"PIP_BREAK_SYSTEM_PACKAGES": "1"})["torch"].command.endswith("-m pip install vllm==0.33.0")


def test_the_row_of_a_probe_is_left_to_the_probe_that_ran() -> None:
    """An earlier question would say that nothing was probed, or would have its new file removed."""
    for before in (
        {"probed_sum_bits": {"mxf4": None}, "narrowest_sum": 20},
        {"probe_error": "none", "workspace": "/c"},
    ):
        measured = {f"probe-{part}": facts for part, facts in healthy().items()}
        assert "probe" not in findings({"modules": before, **measured})
        assert "probe" in findings(
            {"modules": before, **measured, "probe-sums": {"failed": "it was killed by SIGSEGV"}}
        )


@pytest.mark.parametrize(
    ("left", "variables", "guest"),
    [
        ({"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2"}, {}, "WSL2"),
        ({"proc/sys/kernel/osrelease": "6.11.0-1016-nvidia", ".dockerenv": ""}, {}, "container"),
        ({"run/.containerenv": ""}, {}, "container"),
        ({}, {"container": "oci"}, "container"),
        ({"proc/sys/kernel/osrelease": "6.11.0-1016-nvidia"}, {}, None),
    ],
)
def test_a_guest_is_recognized_by_what_it_leaves(
    left: dict[str, str], variables: dict[str, str], guest: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without systemd's program, which container images lack."""
    write_tree(tmp_path, left)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("container", raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert questions.guest(tmp_path) == guest


@pytest.mark.parametrize(
    ("kind", "guest"),
    [
        ("none", None),
        ("wsl", "WSL2"),
        ("docker", "container"),
        ("podman", "container"),
        ("kvm", "VM"),
        ("vmware", "VM"),
    ],
)
def test_a_guest_is_recognized_by_systemd(
    kind: str, guest: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "systemd-detect-virt"
    program.write_text(f"#!/bin/sh\necho {kind}\n[ {kind} != none ]\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    write_tree(tmp_path, {".dockerenv": ""})
    assert questions.guest(tmp_path) == guest


@pytest.mark.parametrize("own", [True, False])
def test_a_python_of_the_systems_is_managed_and_an_environment_of_it_is_not(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mark is Debian's (PEP 668)."""
    write_tree(tmp_path, {"EXTERNALLY-MANAGED": "[externally-managed]"})
    monkeypatch.setattr(
        questions.sysconfig, "get_path", lambda name, _scheme: str(tmp_path) if name == "stdlib" else ""
    )
    monkeypatch.setattr(questions.sys, "prefix", questions.sys.base_prefix if own else "/venv")
    questions.ask_installer()
    assert f'"managed": {str(own).lower()}' in capsys.readouterr().out


def test_the_file_of_a_probe_that_is_none() -> None:
    row = findings({"modules": {"probe_error": "it is not what a probe writes", "workspace": "the cache"}})["probe"]
    assert (row.state, shlex.split(row.command)) == ("fail", ["rm", "the cache/sm12x_probe.json"])


@pytest.mark.parametrize(
    ("listed", "state"),
    [("12.1a", "ok"), ("12.0f", "ok"), ("12.1f", "ok"), ("12.0a", "fail"), ("9.0a 12.0a", "fail"), ("", "warn")],
)
def test_architectures_against_the_gpus(listed: str, state: str) -> None:
    row = findings({"modules": {"architectures": listed.split()}, "gpus": SPARK})["architectures"]
    assert row.state == state
    if state != "ok":
        command = f'{row.command}; printf %s "$FLASHINFER_CUDA_ARCH_LIST"'
        environment = {"FLASHINFER_CUDA_ARCH_LIST": listed} if listed else {}
        done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [*listed.split(), "12.1a"]
