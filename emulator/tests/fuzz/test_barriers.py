# SPDX-License-Identifier: Apache-2.0
"""Divergence against barriers: random legal programs leave what a model of independent threads says, no checker speaks.

``python test_barriers.py SEED`` prints one program; ``python test_barriers.py FIRST LAST`` runs all in between.
"""

from __future__ import annotations

import secrets
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from barrier_programs import Program
from vsm.device import Device, Watch, pack

HEADER = ".version 9.0\n.target sm_121a\n.address_size 64\n"


def check(device: Device, seed: int) -> None:
    program = Program(seed)
    expected = program.model(seed)
    assert expected == program.model(seed + 1), f"seed {seed}: the program has more than one result"
    module = device.load(HEADER + program.source, f"seed {seed}")
    out, table = device.upload(bytes(4 * program.threads)), device.upload(program.table)
    try:
        launch = module.kernel("k").launch(
            1, program.threads, pack(out, table), watch=Watch.ALL, max_warp_instructions=2_000_000
        )
        assert launch.clean, f"seed {seed}: {launch}\n{program.source}"
        got = list(struct.unpack(f"{program.threads}I", device.download(out, 4 * program.threads)))
        wrong = [t for t in range(program.threads) if got[t] != expected[t]]
        assert not wrong, f"seed {seed}: threads {wrong} have another result\n{program.source}"
    finally:
        device.release(out)
        device.release(table)
        module.unload()


def test_a_few_seconds():
    """Fixed seeds, one of them with two barriers under way at once, then new ones for 3 seconds."""
    first = secrets.randbelow(2**31)
    print("first seed", first)
    with Device("sm_121a", threads=1) as device:
        for seed in (*range(100), 350492400):
            check(device, seed)
        end = time.monotonic() + 3
        seed = first
        while time.monotonic() < end:
            check(device, seed)
            seed += 1
    print("last seed", seed - 1)


def main() -> None:
    if len(sys.argv) == 2:
        print(HEADER + Program(int(sys.argv[1])).source)
        return
    with Device("sm_121a", threads=1) as device:
        for seed in range(int(sys.argv[1]), int(sys.argv[2])):
            check(device, seed)


if __name__ == "__main__":
    main()
