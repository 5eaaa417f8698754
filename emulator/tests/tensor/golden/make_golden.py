# SPDX-License-Identifier: Apache-2.0
"""Makes ``golden.npz``: what a GPU of compute capability 9.0 does with the kernels of this folder.

python make_golden.py cases cases.bin            # write the case file
./gpu_runner cases.bin results.bin               # on the GPU
python make_golden.py pack results.bin "NVIDIA H200, driver ..."   # write golden.npz
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from ptx_cases import cvt_cases, matrix_cases, mma_cases
from runner_file import Case, dump, split_results
from scalar_cases import operands, scalar_cases
from tma_cases import load_cases, store_cases

GOLDEN = Path(__file__).with_name("golden.npz")
GOLDEN_SCALAR = Path(__file__).with_name("golden_scalar.npz")


def all_cases() -> list[Case]:
    return cvt_cases() + mma_cases() + matrix_cases() + load_cases() + store_cases()


def pack(results: bytes, device: str) -> None:
    """Keeps, per case ``i`` and buffer ``j``, ``i.j.in`` and (where the kernel changed it) ``i.j.out``.

    Conversions keep only the digest of all results and every 16th result; their inputs need not be kept.
    """
    cases = all_cases()
    arrays: dict[str, np.ndarray] = {}
    index = []
    for number, (case, after) in enumerate(zip(cases, split_results(cases, results))):
        entry = {"name": case.name, **case.meta}
        if case.meta["op"] == "cvt":
            answers = np.frombuffer(after[2], np.uint32)
            keep = (
                ~np.isnan(np.frombuffer(after[0], np.float32)) if "rna" in case.name else slice(None)
            )  # see test_golden.py
            entry["sha256"] = hashlib.sha256(answers[keep].tobytes()).hexdigest()
            arrays[f"{number}.sample"] = answers[::16].astype(np.uint16 if case.meta["bits"] == 16 else np.uint32)
        else:
            for i, (old, new) in enumerate(zip(case.buffers(), after)):
                arrays[f"{number}.{i}.in"] = np.frombuffer(old, np.uint8)
                if new != old:
                    arrays[f"{number}.{i}.out"] = np.frombuffer(new, np.uint8)
        index.append(entry)
    arrays["index"] = np.frombuffer(json.dumps({"device": device, "cases": index}).encode(), np.uint8)
    np.savez_compressed(GOLDEN, **arrays)


def pack_scalar(results: bytes, device: str) -> None:
    """Keeps the operands of each class once, and the results of each instruction by its text."""
    cases = scalar_cases()
    arrays = {f"operands.{kind}": operands(kind) for kind in sorted({case.meta["kind"] for case in cases})}
    for case, after in zip(cases, split_results(cases, results)):
        arrays[case.name] = np.frombuffer(after[0], np.uint32 if case.meta["bits"] == 32 else np.uint64)
    names = [case.name for case in cases]
    packed = {f"{i}": arrays[name] for i, name in enumerate(names)}
    packed.update({key: value for key, value in arrays.items() if key.startswith("operands.")})
    packed["index"] = np.frombuffer(json.dumps({"device": device, "cases": names}).encode(), np.uint8)
    np.savez_compressed(GOLDEN_SCALAR, **packed)


def main(arguments: list[str]) -> None:
    if len(arguments) == 2 and arguments[0] == "cases":
        Path(arguments[1]).write_bytes(dump(all_cases()))
    elif len(arguments) == 3 and arguments[0] == "pack":
        pack(Path(arguments[1]).read_bytes(), arguments[2])
    elif len(arguments) == 2 and arguments[0] == "scalar-cases":
        Path(arguments[1]).write_bytes(dump(scalar_cases()))
    elif len(arguments) == 3 and arguments[0] == "scalar-pack":
        pack_scalar(Path(arguments[1]).read_bytes(), arguments[2])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
