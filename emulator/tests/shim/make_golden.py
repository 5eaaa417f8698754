# SPDX-License-Identifier: Apache-2.0
"""Make golden/h200_*.txt: run the conformance program on a real GPU. Usage: make_golden.py PROGRAM, where PROGRAM is
conformance.cu and conformance_tensor_map.cu built with nvcc for the GPU at hand and linked against libcudart.so.13."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
FAULTS = ("null", "freed", "misaligned", "trap")


def gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return f"{name} (driver {driver})"


def output(*command: str) -> str:
    # A launch's error must come from the launch itself, and not from a later call.
    blocking = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=blocking).stdout


def main() -> None:
    program = sys.argv[1]
    head = f"# Made on an {gpu()} by conformance.cu with CUDA_LAUNCH_BLOCKING=1: make_golden.py\n"
    (FOLDER / "h200_runtime.txt").write_text(head + output(program))
    (FOLDER / "h200_faults.txt").write_text(head + "".join(output(program, "fault", kind) for kind in FAULTS))


if __name__ == "__main__":
    main()
