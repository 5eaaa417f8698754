# SPDX-License-Identifier: Apache-2.0
"""``make test-compilers``: what ``test_machine_code.py`` asks of the environment's compiler, of every one that pip has.

``COMPILERS`` names those that are tried, as for ``tools/compilers.py``, which installs them.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import machine_code
import pytest
from layer_toys import load_tool

from flashinfer.jit import core, cpp_ext
from flashinfer.jit.sm12x import flags, modules
from flashinfer.sm12x.instances import HOPPER, SM12X, Instance
from flashinfer_sm12x.build import diagnosis, toolchain
from flashinfer_sm12x.build.engine import CompileStep

compilers = load_tool("compilers")
VERSIONS = compilers.chosen(os.environ.get("COMPILERS", "all").split())


def architectures(row: Instance | None) -> list[str]:
    """Those that run a source: SM121; Hopper, but for block-scaled MMAs; and SM120 without fences, of the streams,
    which leave no registers."""
    streamed, hopper = row is not None and row.split_k, row is None or row.compute_dtype == "bf16" or row in HOPPER
    sm12x = row is None or row.layer == "dense" or row in SM12X
    return ["12.1a"] * sm12x + ["12.0a"] * (sm12x and streamed) + ["9.0a"] * hopper


CASES = [(unit, architecture) for unit in machine_code.units() for architecture in architectures(unit.row)]


@pytest.fixture
def toolkit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> toolchain.Toolkit:
    found = toolchain.discover({"CUDA_HOME": str(compilers.toolkit(request.param))})
    assert f"V{request.param}" in toolchain.compiler_banner(found.nvcc)
    monkeypatch.setattr(cpp_ext, "find_toolkit", lambda: found)
    return found


def compiled(step: CompileStep, to: Path) -> tuple[Path, str]:
    """A source's device code, and what the compiler said."""
    command = [word if word != "-c" else "-fatbin" for word in step.command(str(step.source), str(to / "out.fatbin"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return to / "out.fatbin", done.stdout + done.stderr


HOPPERS_SPILLS = {
    "dense_mxfp4_m64_gemm",
    "dense_mxfp8_m32_gemm",
    "dense_mxfp8_m48_gemm",
    "dense_nvfp4_m64_gemm",
    "bf16_m24_k128",
    "bf16_m40_k128",
    "bf16_m64_k128",
    "mxfp8_as_bf16_m24_k128",
    "mxfp8_as_bf16_m40_k128",
    "mxfp8_as_bf16_m64_k128",
    "nvfp4_bf16_m64_k128",
    "stream_mxfp8_as_bf16_m16",
}
"""Instances that spill on compute capability 9.0, where the family is measured and not served: up to 80 bytes with each
of 13.0.48, 13.0.88 and 13.5.37."""
MOST_OF_HOPPER = 80


@pytest.mark.parametrize("toolkit", VERSIONS, indirect=True)
@pytest.mark.parametrize(("unit", "architecture"), CASES, ids=[f"{unit}-{name}" for unit, name in CASES])
def test_machine_code(
    unit: machine_code.Unit,
    architecture: str,
    toolkit: toolchain.Toolkit,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    major, minor = architecture.split(".")
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(int(major), minor)})
    (step,) = (step for step in unit.generate().plan.steps if step.source.stem == unit.stem)
    code, output = compiled(step, tmp_path)
    faults = machine_code.faults(code, unit, f"sm_{major}{minor}")
    if architecture == "9.0a" and unit.row is not None and unit.row.name in HOPPERS_SPILLS:
        assert all(" spills: " in fault for fault in faults)
        assert diagnosis.local_memory(output) <= MOST_OF_HOPPER
        return
    assert not faults
    assert diagnosis.local_memory(output) == 0


@pytest.mark.parametrize("toolkit", VERSIONS, indirect=True)
def test_a_kernel_that_spills_is_reported(toolkit: toolchain.Toolkit, tmp_path: Path) -> None:
    """The compiler's message has the words that the build looks for."""
    source = tmp_path / "spills.cu"
    source.write_text(
        "__global__ void spills(volatile int* p) {\n  int x[64];\n"
        "#pragma unroll\n  for (int i = 0; i < 64; ++i) x[i] = p[i];\n"
        "#pragma unroll\n  for (int i = 0; i < 64; ++i) p[i] = x[63 - i];\n}\n"
    )
    asked = (*flags.cuda_flags([(12, "1a")], False), diagnosis.WARN_OF_LOCAL_MEMORY, "-maxrregcount=32")
    code, output = compiled(CompileStep("spills.o", source, str(toolkit.nvcc), asked), tmp_path)
    unit = machine_code.Unit("none", modules.gen_probe_module, "spills", None)
    assert len(machine_code.faults(code, unit, "sm_121a")) == 1
    assert diagnosis.local_memory(output) > 0


def test_what_the_build_reports_of_versions_is_what_was_tried() -> None:
    first, *_, last = (version.rpartition(".")[0] for version in compilers.RUNTIMES)
    assert (first, last) == diagnosis.COMPILERS_WITHOUT_SPILLS
