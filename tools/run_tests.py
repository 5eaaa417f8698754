# SPDX-License-Identifier: Apache-2.0
"""Run the tests: ``make test``, ``make test-slow`` and ``make test-all``. Needs an environment that is complete.

    python tools/run_tests.py --jobs 2 [--upstream] [-m "not slow"] [PYTEST'S ARGUMENTS, AND TESTS BY PATH OR NODE ID]
    python tools/run_tests.py --jobs 2 --quick [PYTEST'S ARGUMENTS, AND TESTS]    QUICK; with arguments, what is not
    slow

In three processes, because a process has one CUDA runtime: tests that load a real one, tests that bring the virtual
GPU's, and the emulator's own. Each takes of the tests that are named those that are its own; without any, all. The exit
status is 1 if a process failed, whatever the others did, and 5 if none had a test to run.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VIRTUAL = "tests/*/test_virtual_*.py"
EMULATOR = "emulator/tests"
NO_TESTS = 5  # pytest's exit status

QUICK = (
    # Contracts of the operators, on CPU tensors.
    *("tests/moe", "tests/gemm", "tests/router", "tests/attention", "tests/quantization"),
    *(f"tests/sm12x/test_{name}.py" for name in ("bad_calls", "overlaps", "device_class", "bindings")),
    "tests/testing/test_mxfp_formats.py",
    # The layer over the wheel, the build engine without a compiler, the doctor, the pages.
    *(f"tests/layer/test_{name}.py" for name in ("extend", "pinned_wheel")),
    *(f"tests/jit/test_{name}.py" for name in ("jit_toolchain", "jit_diagnosis", "jit_jobs", "jit_architectures")),
    *("tests/doctor/test_doctor.py", "tests/doctor/test_doctor_checks.py"),
    *("tests/project/test_glossary.py", "tests/project/test_imports.py"),
    # Each operator's kernels on the virtual SM121, in instances of tests/few_instances.py.
    *(
        f"tests/moe/test_virtual_{name}"
        for name in (
            "instances.py::test_a_fused_moe_layer[stream_bf16_m8 bf16-(64, 192)]",
            "instances.py::test_a_fused_moe_layer[stream_mxfp8_as_bf16_m8 MXFP8-(320, 64)]",
            "instances.py::test_a_fused_moe_layer[nvfp4_stream_bf16_m8 bf16-(64, 192)]",
            "instances.py::test_an_instance_with_8_bit_activations[MXFP8 linear-mxfp8_m8_k128]",
            "instances.py::test_a_grouped_gemm_instance[mxfp8_m8_k128-e4m3]",
            "step.py::test_one_launch_chooses_and_computes[W4A8-3-500-10]",
        )
    ),
    "tests/gemm/test_virtual_dense.py::test_an_instance[dense_mxfp4_m8_w2]",
    "tests/gemm/test_virtual_dense.py::test_an_instance[dense_mxfp4_m64_gemm_mxfp8]",
    "tests/gemm/test_virtual_dense_norm.py::test_shapes[mxfp4-3-300-160]",
    "tests/gemm/test_virtual_dense_top_k.py::test_a_stream_compares_its_outputs[1-m8_w2-808]",
    "tests/router/test_virtual_router.py::test_parts[True-False-True]",
    "tests/attention/test_virtual_decode.py::test_lengths[[300, 0, 31]-bf16]",
)
"""Tests of ``make test``, as few as show each operator to a newcomer: on CPU tensors those that are not slow, by the
kernels the named ones. All others run in ``make test-all`` and in CI."""

QUICK_CORE_MINUTES = 6
"""Minutes of :data:`QUICK` times cores: two cores that have compiled nothing took 2:54, and 251 CPU seconds
(2026-11-28)."""

TAKE_A_VALUE = (
    *"-k -m -n -p -c -o -r -W".split(),
    *"--ignore --ignore-glob --deselect --maxfail --tb --durations --junitxml --basetemp --rootdir".split(),
)
"""Options of pytest that take a word, which is then no test even if a file has that name."""


@dataclass
class Part:
    """The tests of one process.

    Attributes:
        tests: Files, folders and node ids.
        options: Options of pytest's.
        preload: Whether the emulator's runtime must be loaded before torch's, if torch brings one.
    """

    tests: list[str]
    options: list[str] = field(default_factory=list)
    preload: bool = False


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="test processes beside each other (1)")
    parser.add_argument("--quick", action="store_true", help="the tests of make test")
    parser.add_argument("--upstream", action="store_true", help="kernels that others wrote on the emulator, too")
    parser.add_argument(
        "--among", nargs="+", default=[], metavar="FOLDER", help="in place of all, where no test is named"
    )
    parser.add_argument(
        "-m", dest="marks", default="", metavar="MARKS", help="as pytest's; one among its arguments wins"
    )
    parser.add_argument(
        "--rotate",
        type=int,
        default=1,
        metavar="DAYS",
        help="of the slow tests those of today, each on one day of so many",
    )
    options, rest = parser.parse_known_args(arguments)
    if options.rotate < 1:
        parser.error(f"--rotate is {options.rotate}; it must be at least 1")
    named, given = split(rest)
    quick = options.quick and not rest
    if options.quick and rest:
        options.marks = options.marks or "not slow"
    if options.marks:
        given = ["-m", options.marks, *given]
    if quick:
        named = list(QUICK)
        announce(options.jobs)
    if not named:
        # Only those tests of the emulator that run kernels written by others are slow.
        some = [f"{EMULATOR}/upstream"] * options.upstream if options.marks == "slow" else [EMULATOR]
        named = options.among or ["tests", *some]
    chosen = parts(named, options.jobs, options.upstream)
    if quick:
        for part in chosen:
            # A virtual test is quick by its name in the list; what else is in its file is not run.
            part.options += ["-p", "few_instances"] if part.preload else ["-m", "not slow"]
            part.tests = [test for test in part.tests if not part.preload or "::" in test]
    if options.rotate > 1:  # told here, for a run may last beyond midnight
        share = f"{datetime.date.today().toordinal() % options.rotate}/{options.rotate}"
        for part in chosen:
            if not part.tests[0].startswith("emulator/"):  # whose tests have no conftest of ours
                part.options.append(f"--slow-share={share}")
    statuses = [run(part, options.jobs, given) for part in chosen]
    if all(status == NO_TESTS for status in statuses):
        return NO_TESTS
    # Arguments may leave a process without tests; in a run of all tests each process has some.
    allowed = (0, NO_TESTS) if rest else (0,)
    return int(any(status not in allowed for status in statuses))


def announce(jobs: int) -> None:
    minutes = max(2, round(QUICK_CORE_MINUTES / min(jobs, len(os.sched_getaffinity(0)))))
    print(
        f"The quick tests take about {minutes} minutes here the first time, less once their kernels are compiled. "
        "make test-all runs all tests, docs/evidence.md says in what time.",
        flush=True,
    )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments that name tests, and the others."""
    named: list[str] = []
    others: list[str] = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        is_test = not word.startswith("-") and before not in TAKE_A_VALUE and Path(word.split("::")[0]).exists()
        (named if is_test else others).append(word)
    return named, others


def parts(named: Sequence[str], jobs: int, upstream: bool) -> list[Part]:
    """The processes that have one of these tests to run."""
    virtual = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(VIRTUAL))
    # Upstream's kernel on the virtual GPU comes first: one compiler for minutes, beside which the other process goes
    # on.
    virtual.sort(key=lambda path: not path.endswith("_upstream.py"))
    left_out = [f"--ignore={path}" for path in virtual]
    # A process that is done takes tests of the other's, but of the emulator's none: their files compile programs for
    # themselves. Tests that load a real runtime often wait for processes that they start.
    host = Part([], [*left_out, "-n", str(jobs + 1), "--dist", "worksteal"])
    device = Part([], ["-n", str(jobs), "--dist", "worksteal"], preload=True)
    emulator = Part([], ["-n", str(jobs), "--dist", "loadfile"])
    if not upstream:
        emulator.options.append(f"--ignore={EMULATOR}/upstream")
    for test in named:
        file, *names = test.split("::")
        path = os.path.relpath(Path(file).resolve(), ROOT)
        test = "::".join([path, *names])
        if path.split("/")[0] == "emulator":
            emulator.tests.append(test)
        elif fnmatch.fnmatch(path, VIRTUAL):
            device.tests.append(test)
        elif path == ".":
            return parts(["tests", EMULATOR], jobs, upstream)
        else:
            host.tests.append(test)
            device.tests += [each for each in virtual if each.startswith(f"{path}/")]
    return [part for part in (host, device, emulator) if part.tests]


def run(part: Part, jobs: int, given: Sequence[str]) -> int:
    """One process; its exit status."""
    # With more threads than its share of the cores, torch takes ten times as long for the references' small operations.
    share = max(1, len(os.sched_getaffinity(0)) // jobs)
    environment = {"OMP_NUM_THREADS": str(share), **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    if part.preload:
        asked = {**os.environ, "PYTHONPATH": str(ROOT / "emulator" / "python")}
        environment["LD_PRELOAD"] = subprocess.check_output(
            [sys.executable, "-m", "vsm.preload"], env=asked, text=True
        ).strip()
    command = [sys.executable, "-m", "pytest", *part.options, *given, *dict.fromkeys(part.tests)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
