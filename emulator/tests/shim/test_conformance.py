# SPDX-License-Identifier: Apache-2.0
"""The shim answers as a real driver does: one program, whose output on an H200 is the golden file, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
FAULTS = ("null", "freed", "misaligned", "trap")


def golden(name: str) -> list[str]:
    return [line for line in (HERE / "golden" / name).read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="session")
def program(compile_cuda) -> Path:
    return compile_cuda("conformance", HERE / "conformance.cu", HERE / "conformance_tensor_map.cu")


def test_every_call_answers_as_on_an_h200(program, run_on_shim):
    done = run_on_shim(program)
    assert done.stdout.splitlines() == golden("h200_runtime.txt")
    assert done.returncode == 0


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_ends_the_context_as_on_an_h200(program, run_on_shim, kind):
    done = run_on_shim(program, "fault", kind)
    expected = [line for line in golden("h200_faults.txt") if line.startswith(f"{kind}:")]
    assert len(expected) == 12
    assert done.stdout.splitlines() == expected


def test_explanations_name_what_was_given_and_what_is_allowed(program, run_on_shim):
    text = run_on_shim(program, VSM_QUIET="0").stderr
    for part in (
        "block 1025 x 1 x 1; at most 1024 threads",
        "129 threads; its launch bounds allow 128",
        "1024 threads of 168 registers; a block has 65536",
        "49153 bytes of dynamic shared memory; 49152 are granted beside 0 static ones",
        "84993 bytes of dynamic shared memory asked for; 0 to 84992 can be granted beside 16384 static ones",
        "globalStrides[1] is 1099511627776, must be less than 2^40",
        "the driver call cuNoSuchFunction is not modelled",
    ):
        assert part in text, part
