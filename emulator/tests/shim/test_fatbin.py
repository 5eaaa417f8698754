# SPDX-License-Identifier: Apache-2.0
"""Fat binaries and cubins: what is read from them is what the toolkit's own tools say, and damage is refused."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tool(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("fatbin") / "fatbin_tool"
    sources = HERE.parents[1] / "src"
    sanitize = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    files = (HERE / "fatbin_tool.cpp", sources / "fatbin" / "fatbin.cpp")
    run("g++", "-std=c++17", "-O1", "-g", *sanitize, f"-I{sources}", *files, "-o", target)
    return target


@pytest.fixture(scope="module")
def fatbin(toolkit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fatbins")

    def build(name: str, *flags: str) -> Path:
        target = folder / f"{name}.fatbin"
        run(toolkit / "bin" / "nvcc", "-std=c++17", "-O1", "-fatbin", *flags, HERE / "programs.cu", "-o", target)
        return target

    return build


BOTH = ("-gencode", "arch=compute_121a,code=[sm_121a,compute_121a]")


def test_resources_are_those_that_cuobjdump_shows(toolkit, tool, fatbin):
    file = fatbin("both", "-no-compress", *BOTH)
    shown = run(toolkit / "bin" / "cuobjdump", "--dump-resource-usage", file)
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)"
    expected = {name: (int(reg), int(stack), int(shared)) for name, reg, stack, shared in re.findall(pattern, shown)}
    assert len(expected) >= 7
    lines = run(tool, "dump", file)
    ours = re.findall(r"  (\S+) registers (\d+) stack (\d+) shared (\d+)", lines)
    # The driver reads these records; a kernel without a barrier has none.
    held = run(toolkit / "bin" / "cuobjdump", "--dump-elf", file)
    pattern = r"^\.nv\.info\.(\S+)$|EIATTR_NUM_BARRIERS\s+Format:\s+EIFMT_BVAL\s+Value:\s+0x(\w+)"
    barriers, kernel = dict.fromkeys(expected, 0), ""
    for name, number in re.findall(pattern, held, flags=re.MULTILINE):
        kernel = name or kernel
        if number:
            barriers[kernel] = int(number, 16)
    assert {name: int(number) for name, number in re.findall(r"  (\S+) .* barriers (\d+)", lines)} == barriers
    assert set(barriers.values()) >= {0, 1}
    # cuobjdump counts the kilobyte that the system keeps of a block's shared memory.
    assert {name: (int(reg), int(stack), int(shared) + 1024) for name, reg, stack, shared in ours} == expected
    assert "cubin 121 plain" in lines
    assert "ptx 121 plain" in lines
    assert ".target sm_121a" in lines


def test_compression_is_reported(tool, fatbin):
    lines = run(tool, "dump", fatbin("small", "--compress-mode=size", *BOTH))
    assert "ptx 121 compressed" in lines


def test_several_architectures_are_distinguished(tool, fatbin):
    file = fatbin("several", "-no-compress", *BOTH, "-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]")
    heads = [" ".join(line.split()[:3]) for line in run(tool, "dump", file).splitlines() if not line.startswith(" ")]
    assert sorted(heads) == ["cubin 121 plain", "cubin 90 plain", "ptx 121 plain", "ptx 90 plain"]


def test_damage_is_refused_and_never_read_past_the_end(tool, fatbin):
    seed = 20261121
    print("seed", seed)
    print(run(tool, "fuzz", fatbin("fuzzed", "-no-compress", *BOTH), str(seed), "20000"))
