"""Rules for the module's machine code, read back from its library with the toolkit's ``cuobjdump``.

No kernel spills, the blocks of a row fit an SM as planned, GEMMs have the tensor
instructions that they are written for, and arrivals have their fences: a GB10 does not
reliably honour the release ordering of ``mbarrier.arrive`` (``sm12x/ptx/sync.cuh``).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from flashinfer.jit.cpp_ext import get_cuda_path
from flashinfer.jit.sm12x.instances import INSTANCES, Instance
from flashinfer.jit.sm12x.moe import gen_sm12x_moe_module
from tests.test_helpers.mx_formats import sm12x_device

device = pytest.fixture(sm12x_device, name="device", autouse=True)

# take tests/jit/machine_code.py: INSTRUCTION ARRIVAL FENCE BETWEEN REGISTERS arrivals grid_counters


class Kernel(NamedTuple):
    """One kernel as it was compiled: registers of a thread, bytes of its stack, and its code."""

    registers: int
    stack: int
    sass: str

    @property
    def opcodes(self) -> list[str]:
        lines = map(INSTRUCTION.match, self.sass.splitlines())
        return [match[1] for match in lines if match is not None]


def _dumped(what: str) -> str:
    tool = Path(get_cuda_path()) / "bin" / "cuobjdump"
    found = str(tool) if tool.is_file() else shutil.which("cuobjdump")
    if found is None:
        pytest.skip("cuobjdump is neither in the CUDA toolkit nor on PATH")
    # It looks for nvdisasm on PATH.
    path = f"{Path(found).parent}{os.pathsep}{os.environ['PATH']}"
    command = [found, f"--dump-{what}", str(gen_sm12x_moe_module().get_library_path())]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def kernels() -> dict[str, Kernel]:
    """The kernels of the module that is built here, by their mangled names and architectures."""
    gen_sm12x_moe_module().build_and_load()
    usage, codes, architecture = {}, {}, ""
    name = ""
    for line in _dumped("resource-usage").splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = f"{match[1]} {architecture}"
        elif match := re.search(r"REG:(\d+) STACK:(\d+)", line):
            usage[name] = int(match[1]), int(match[2])
    for section in re.split(r"(?=^\s*arch = )", _dumped("sass"), flags=re.MULTILINE):
        if match := re.match(r"\s*arch = (\S+)", section):
            architecture = match[1]
        parts = re.split(r"^\s*Function : (\S+)$", section, flags=re.MULTILINE)
        codes.update({f"{name} {architecture}": sass for name, sass in zip(parts[1::2], parts[2::2], strict=True)})
    assert usage.keys() == codes.keys()
    return {name: Kernel(*usage[name], codes[name]) for name in usage}


_PAIRS = [row for row in INSTANCES if not row.split_k]
EVERY_PAIR = pytest.mark.parametrize("row", _PAIRS, ids=lambda row: row.name)
# Numbers of elements in types.h, and what the tensor instructions of a row multiply.
ELEMENTS = {"mxfp8": 0, "bf16": 2, "mxfp4": 3, "nvfp4": 6}
TENSOR_INSTRUCTIONS = {
    "mxfp8": r"QMMA\.SF\.16832\.F32\.E2M1\.E4M3\.E8",
    "bf16": r"HMMA\.16816\.F32\.BF16",
}


def gemms_of(row: Instance) -> dict[str, Kernel]:
    """FC1 and FC2 of a row for each architecture, found by the template arguments in their names."""
    formats = [ELEMENTS[each] for each in (row.activation, row.compute_dtype, row.weights)]
    sizes = [row.block_n, row.block_k, row.stages, row.blocks_per_sm]
    sizes_in_name = "".join(f"Li{size}E" for size in sizes)
    elements = r"ElementE{}ELS\w*_{}E".format(*formats) + sizes_in_name + rf"LS\w*_{formats[2]}E"
    found = {
        name: each for name, each in kernels().items() if "grouped_gemm_kernel" in name and re.search(elements, name)
    }
    architectures = {name.split()[-1] for name in found}
    assert len(found) == 2 * len(architectures) > 0, (row.name, sorted(found))
    return found


def test_no_kernel_spills():
    assert len(kernels()) > 2 * len(_PAIRS)
    wrong = {
        name: (each.stack, [opcode for opcode in each.opcodes if opcode.startswith(("LDL", "STL"))])
        for name, each in kernels().items()
    }
    assert not {name: found for name, found in wrong.items() if found != (0, [])}


@EVERY_PAIR
def test_blocks_of_a_row_fit_an_sm(row):
    """By their registers. By their shared memory they do: the rendered source asserts that."""
    threads = 288 if row.block_n == 128 else 160
    for name, each in gemms_of(row).items():
        in_eights = -(-each.registers // 8) * 8  # as an SM gives them
        assert in_eights * threads * row.blocks_per_sm <= REGISTERS, (name, each.registers)


@EVERY_PAIR
def test_gemms_have_the_tensor_instructions_of_their_row(row):
    for name, each in gemms_of(row).items():
        used = {opcode for opcode in each.opcodes if re.match(r"[A-Z]*MMA\b", opcode)}
        assert used, name
        assert {
            opcode for opcode in used if not re.fullmatch(TENSOR_INSTRUCTIONS[row.compute_dtype], opcode)
        } == set(), name


@EVERY_PAIR
def test_arrivals_have_their_fences(row):
    """Those at barriers of a block where a GB10 may run the code, those at counters of the grid everywhere."""
    for name, each in gemms_of(row).items():
        found, fenced = arrivals(each.sass)
        assert found >= 2, (name, found)
        if name.split()[-1] != "sm_120a":
            assert fenced == found, (name, found, fenced)
        counters, with_fence = grid_counters(each.sass)
        assert counters == with_fence > 0, (name, counters, with_fence)
