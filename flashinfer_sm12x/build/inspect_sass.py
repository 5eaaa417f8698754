# SPDX-License-Identifier: Apache-2.0
"""Read the machine code of a built module: registers, shared memory, spills, tensor instructions.

It is read with ``cuobjdump``, which comes with the toolkit or from PyPI (``nvidia-cuda-cuobjdump``, and
``nvidia-cuda-nvdisasm`` for its disassembler).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import toolchain

BLOCK_SCALED_MMA = re.compile(r"QMMA\.SF\.\S*E2M1\S*")
"""The block-scaled tensor instruction of SM12x with packed FP4 on either side."""


@dataclass(frozen=True)
class KernelCode:
    """One kernel's machine code for one architecture.

    Attributes:
        name: Its name, demangled where ``c++filt`` is there.
        architecture: For example ``sm_121a``.
        registers: Registers per thread.
        stack: Bytes of local memory per thread that hold a frame; 0 without spills and local arrays.
        static_shared: Bytes of shared memory per block that the launch does not choose.
        instructions: Opcode with its modifiers -> how many there are.
    """

    name: str
    architecture: str
    registers: int
    stack: int
    static_shared: int
    instructions: Counter[str]

    def count(self, pattern: str | re.Pattern[str]) -> int:
        """The number of instructions whose opcode begins with a match of the pattern."""
        return sum(number for opcode, number in self.instructions.items() if re.match(pattern, opcode))

    @property
    def block_scaled_mmas(self) -> int:
        """Instructions ``QMMA.SF`` with an E2M1 operand."""
        return self.count(BLOCK_SCALED_MMA)

    @property
    def tensor_instructions(self) -> int:
        """All matrix instructions: QMMA, OMMA, HMMA, and Hopper's."""
        return self.count(r"[QHOIB]G?MMA\b|WARPGROUP\.MMA\b")

    @property
    def local_accesses(self) -> int:
        """Loads and stores of local memory: spills and arrays that registers do not hold."""
        return self.count(r"(?:LDL|STL)\b")


def find_tool(name: str = "cuobjdump") -> Path:
    """A binary utility of CUDA: in the toolkit, on PATH, or from PyPI.

    Raises:
        ToolchainError: there is none; the message gives the command that installs it.
    """
    try:
        candidates = [toolchain.discover().root / "bin" / name]
    except toolchain.ToolchainError:
        candidates = []
    on_path = shutil.which(name)
    if on_path is not None:
        candidates.append(Path(on_path))
    for folder in toolchain.wheel_folders():
        candidates += sorted(folder.glob(f"*/bin/{name}"), reverse=True)
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise toolchain.ToolchainError(
        f"{name} not found in the CUDA toolkit, on PATH, or among installed wheels. Install it with: "
        "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    )


def inspect(path: Path) -> list[KernelCode]:
    """All kernels in an object file or library, in the order of their architectures and names.

    Args:
        path: An object, library or cubin with machine code.

    Raises:
        ToolchainError: there is no ``cuobjdump``, or it cannot read the file.
    """
    tool = find_tool()
    return kernels_of(_run(tool, ["--dump-resource-usage", str(path)]), _run(tool, ["--dump-sass", str(path)]))


def kernels_of(resource_usage: str, sass: str) -> list[KernelCode]:
    """The same, of what ``cuobjdump`` printed with ``--dump-resource-usage`` and with ``--dump-sass``."""
    usage, code = _resource_usage(resource_usage), _instruction_counts(sass)
    names = _demangle(sorted({name for _, name in usage}))
    kernels = [KernelCode(names[at[1]], at[0], *used, code.get(at, Counter())) for at, used in usage.items()]
    return sorted(kernels, key=lambda kernel: (kernel.architecture, kernel.name))


def _run(tool: Path, arguments: Sequence[str]) -> str:
    # cuobjdump looks for nvdisasm on PATH; in the wheels it lies beside it.
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    result = subprocess.run([str(tool), *arguments], capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        message = (result.stderr or result.stdout).strip().splitlines()
        raise toolchain.ToolchainError(
            f"{tool} cannot read {arguments[-1]}: {message[-1] if message else result.returncode}"
        )
    return result.stdout


def _resource_usage(text: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    usage: dict[tuple[str, str], tuple[int, int, int]] = {}
    architecture = name = ""
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            architecture = match.group(1)
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match.group(1)
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            registers, stack, shared = map(int, match.groups())
            usage[architecture, name] = (registers, stack, shared)
    return usage


def _instruction_counts(text: str) -> dict[tuple[str, str], Counter[str]]:
    counts: dict[tuple[str, str], Counter[str]] = {}
    architecture = ""
    current: Counter[str] = Counter()
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            architecture = match.group(1)
        elif match := re.match(r"\s*Function : (\S+)", line):
            current = counts.setdefault((architecture, match.group(1)), Counter())
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            current[match.group(1)] += 1
    return counts


def _demangle(names: Iterable[str]) -> dict[str, str]:
    mangled = list(names)
    tool = shutil.which("c++filt")
    if tool is None or not mangled:
        return {name: name for name in mangled}
    result = subprocess.run([tool], input="\n".join(mangled), capture_output=True, text=True)
    readable = result.stdout.splitlines()
    return dict(zip(mangled, readable, strict=True)) if len(readable) == len(mangled) else {n: n for n in mangled}
