#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The machine code of this fork's modules through ``basalt-sass``, somebody else's checker of stall counts and scoreboards.

    python3 -m venv /tmp/basalt && /tmp/basalt/bin/pip install basalt-sass
    PATH=/tmp/basalt/bin:$PATH FLASHINFER_CUDA_ARCH_LIST=12.1a python tools/check_hazards.py

Builds what is not built; ``--all`` checks Hopper's own instances, too. Exit status 1 if a hazard is found that the checker
calls an error, 2 if nothing could be checked. docs/evidence.md says what its findings are worth.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tabulate import tabulate

from flashinfer.jit.sm12x import inspect_sass, modules
from flashinfer.jit.sm12x.instances import INSTANCES, MAIN_MODULE

FOUND = re.compile(
    r"(\d+) instructions in \d+ blocks, (\d+) dependencies checked .*: (?:clean|(\d+) errors, (\d+) warnings)"
)
ERROR = re.compile(r"^  \[error\] .*\n.*\n.*", re.MULTILINE)


class Unchecked(Exception):
    """What keeps a file from being checked, in one line."""


def verify(basalt: str, cubin: Path) -> tuple[list[int], list[str]]:
    """Instructions, dependencies, errors and warnings of one cubin, and the errors' text."""
    if b".text." not in cubin.read_bytes():  # a source without a kernel
        return [0, 0, 0, 0], []
    # It wants ptxas and nvdisasm in one folder.
    environment = {"BASALT_CUDA_BIN": str(inspect_sass.find_tool("nvdisasm").parent), **os.environ}
    done = subprocess.run(
        [basalt, "verify", "--limit", "100000", str(cubin)], capture_output=True, text=True, env=environment
    )
    found = FOUND.search(done.stdout)
    if found is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unchecked(f"basalt cannot read {cubin.name}: {said[-1] if said else f'exit status {done.returncode}'}")
    return [int(number or 0) for number in found.groups()], ERROR.findall(done.stdout)


def check(basalt: str, library: Path) -> tuple[list[int], list[str]]:
    """The sums over a module's cubins for SM12x."""
    with tempfile.TemporaryDirectory(prefix="check_hazards_") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        cuobjdump = str(inspect_sass.find_tool())
        subprocess.run([cuobjdump, "-xelf", "sm_12", str(library)], cwd=folder, capture_output=True, check=True)
        found = list(pool.map(lambda cubin: verify(basalt, cubin), sorted(Path(folder).glob("*.cubin"))))
    if not found:
        raise Unchecked(f"{library} holds no machine code for SM12x; set FLASHINFER_CUDA_ARCH_LIST=12.1a")
    return [sum(column) for column in zip(*(numbers for numbers, _ in found), strict=True)], [
        text for _, texts in found for text in texts
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="Hopper's own instances, too")
    everything = parser.parse_args().all
    basalt = shutil.which("basalt")
    if basalt is None:
        print("basalt is not on PATH: pip install basalt-sass, in an environment of its own", file=sys.stderr)
        return 2
    others = [row for row in INSTANCES if row not in MAIN_MODULE] if everything else []
    rows, errors = [], []
    try:
        specs = [generate() for generate in modules.MODULES.values()]
        for spec in [*specs, *(modules.gen_fused_moe_instance_module(row) for row in others)]:
            if spec.prebuilt is None:
                spec.build(need_lock=True)
            numbers, texts = check(basalt, spec.prebuilt or spec.jit_library_path)
            rows.append([spec.name, *numbers])
            errors += [f"{spec.name}\n{text}" for text in texts]
    except (RuntimeError, Unchecked) as error:
        print(error, file=sys.stderr)
        return 2
    rows.append(["all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
    headers = ["module", "instructions", "dependencies", "errors", "warnings"]
    print(tabulate(rows, headers=headers, tablefmt="github", intfmt=","))
    print(*errors, sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
