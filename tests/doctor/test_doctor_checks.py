# SPDX-License-Identifier: Apache-2.0
"""Checks of facts that the fakes of ``doctor_machine`` do not have."""

from __future__ import annotations

import shlex
import subprocess
from typing import Any

import pytest
from doctor_machine import findings

from flashinfer.sm12x.doctor import checks

SPARK = {"gpus": [{"name": "GB10", "capability": "12.1", "driver": "580.95.05"}]}
MOE, CHANGED = "module fused_moe_120", "x.cuh changed"


def module(stale: str = "", prebuilt: bool = False, passed_over: str = "") -> dict[str, Any]:
    return {"prebuilt": prebuilt, "stale": stale, "passed_over": passed_over}


def build_of(*modules: dict[str, Any]) -> dict[str, Any]:
    """No compiler, which matters only where something has to be built."""
    error = {"error": "no CUDA compiler found. Install one with: pip install x"}
    return {"build": error, "modules": {f"module {number}": fact for number, fact in enumerate(modules)}}


def probed(mxf8f6f4: int | None, mxf4: int | None) -> dict[str, Any]:
    return {"modules": {"probed_sum_bits": {"mxf8f6f4": mxf8f6f4, "mxf4": mxf4}, "narrowest_sum": 20}}


def memory(gib: float) -> dict[str, Any]:
    return {"gpus": SPARK, "memory": {"available": int(gib * checks.GIB), "total": 100 * checks.GIB}}


# check, facts, state, a part of what is found, the end of the command, a part of the reason; and the environment
# fmt: off
GIVEN: list[tuple[Any, ...]] = [
    ("modules", {"modules": {MOE: module(), "module gemm": module("it is not built yet")}}, "ok", "built and fresh", "", ""),
    ("modules", {"modules": {MOE: module(CHANGED)}}, "warn", "fused_moe_120: x.cuh changed", "-m flashinfer sm12x-build", ""),
    ("modules", {"modules": {MOE: module(CHANGED)}}, "fail", CHANGED, "-m flashinfer sm12x-build", "forbids",
     {"FLASHINFER_DISABLE_JIT": "1"}),
    ("modules", {"modules": {MOE: module(prebuilt=True)}}, "ok", "fused_moe_120: prebuilt", "", ""),
    ("modules", {"modules": {MOE: module("it is not built yet", passed_over="x.cuh is another")}}, "warn",
     "(fused_moe_120: x.cuh is another)", "uninstall --yes flashinfer-sm12x-kernels", ""),
    ("build", build_of(module()), "warn", "no CUDA compiler", "-m pip install x", "need none"),
    ("build", build_of(module(), module("changed")), "fail", "no CUDA compiler", "-m pip install x", ""),
    ("build", build_of(), "fail", "no CUDA compiler", "-m pip install x", ""),
    ("headroom", memory(78.5), "ok", "", "", ""),
    ("headroom", memory(78.0), "ok", "8 GiB beside a --gpu-memory-utilization of 0.7", "", ""),
    ("headroom", memory(77.9), "warn", "leaves the host less than 8 GiB", "| head", "--gpu-memory-utilization 0.69 or less"),
    ("headroom", memory(1), "warn", "", "| head", "--gpu-memory-utilization 0.00"),
    ("probe", probed(None, None), "ok", "was not probed", "", ""),
    ("probe", probed(13, 25), "ok", "20 are needed, so half precision takes the place of mxf8f6f4", "", ""),
    ("probe", probed(19, 13), "ok", "half precision takes the place of mxf8f6f4 and mxf4", "", ""),
    ("probe", probed(21, 20), "ok", "keep 21 bits (mxf8f6f4), 20 bits (mxf4) of a sum; 20 are needed", "", ""),
    ("disk", {"folder": {"free_bytes": 8 << 30, "folder": "cache"}}, "ok", "", "", ""),
    ("disk", {"folder": {"free_bytes": 1 << 29, "folder": "cache"}}, "warn", "", "sm12x-cache list", "make room"),
    ("disk", {"folder": {"free_bytes": 1 << 20, "folder": "cache"}}, "fail", "", "sm12x-cache list", "make room"),
    # A check that fails itself is one unknown.
    ("disk", {"folder": {"free_bytes": "a lot", "folder": "cache"}}, "unknown", "the check itself failed", "--json", ""),
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
    assert row.command.startswith("unset FLASHINFER_DISABLE_JIT && ") == bool(environ)
    assert check != "build" or ("need none" in row.why) == (state == "warn")


def test_rows_that_do_not_apply_are_left_out() -> None:
    rtx = {"gpus": [{"name": "RTX", "capability": "12.0", "driver": "580"}]}
    assert "headroom" not in findings({"gpus": rtx, "memory": {"available": 1, "total": 2}})
    assert "architectures" not in findings({"gpus": SPARK})


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
