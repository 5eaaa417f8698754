# SPDX-License-Identifier: Apache-2.0
"""``scripts/``: run as their users run them, against a server that speaks vLLM's HTTP and has chosen faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts"


def run(script: str, *words: str, fault: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, whose server is ``completions_server.py``."""
    program = (
        "import runpy, sys, vllm_server; "
        f"vllm_server.VLLM = (sys.executable, {str(HERE / 'completions_server.py')!r}); "
        f"sys.argv[0] = {script!r}; runpy.run_path({str(SCRIPTS / script)!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "PYTHONPATH": str(SCRIPTS), "FAULT": fault, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def port() -> str:
    from vllm.utils.network_utils import get_open_port

    return str(get_open_port())


SOAK = ("model", "--minutes", "0", "--rounds", "9", "--streams", "16", "--input", "20", "--output", "8")
SOAK += ("--idle", "2", "--allow-mib", "40")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", "well: 9 rounds, no growth, no request left behind, the same greedy answer throughout"),
        ("memory", "not well: host_mib grew by "),
        ("cancelled", "not well: RuntimeError: 2 s after the last client left the server still has "),
        ("answers", "not well: the greedy answer to one prompt was "),
        ("start", "not well: ServerEnded: the server ended with status 2 while it started"),
    ],
)
def test_soak_server_sees_each_fault_and_none_where_there_is_none(tmp_path, fault, said):
    python = ("--unknown",) if fault == "start" else ()
    done = run("soak_server.py", *SOAK, "--port", port(), "--out", str(tmp_path), "--", *python, fault=fault)
    print(done.stdout, done.stderr)
    assert (done.stderr if fault else done.stdout).splitlines()[-1].startswith(said)
    assert done.returncode == (1 if fault else 0)
    result = json.loads((tmp_path / "soak.json").read_text())
    assert bool(result["wrong"]) == bool(fault)
    if not fault:
        assert all(row["cancelled"] >= 5 and row["host_mib"] > 1 for row in result["rounds"])
