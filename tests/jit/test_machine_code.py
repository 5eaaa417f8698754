# SPDX-License-Identifier: Apache-2.0
"""Tests of kernels' machine code, read back from the modules as the environment's compiler builds them, and of fences
on each architecture. ``check_compilers.py`` asks the same of other compilers.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import machine_code
import pytest

from flashinfer._layer import fork_root
from flashinfer.jit import core
from flashinfer.jit.sm12x import modules
from flashinfer.jit.sm12x.spec import JitSpecSm12x
from flashinfer.sm12x.instances import INSTANCES, MOE_MODULES, is_alone
from flashinfer_sm12x.build import engine, toolchain

pytestmark = pytest.mark.usefixtures("nvcc", "cuobjdump")

# The system counts a program's memory from what started it: so it is asked below a process that has imported nothing.
NINJA = """#!{python} -IS
import resource, subprocess, sys
status = subprocess.run([{ninja!r}, *sys.argv[1:]], close_fds=False).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=open({largest!r}, "a"))
sys.exit(status)
"""


def embedding_ptx(generate: Callable[[], JitSpecSm12x], monkeypatch: pytest.MonkeyPatch, folder: Path) -> JitSpecSm12x:
    """A module as the virtual SM121 takes it, built, so that tests that run it find it; no compiler takes more memory
    than is said to need."""
    monkeypatch.setenv(modules.EMBED_PTX_VARIABLE, "1")
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(12, "1a")})
    ninja, largest = folder / "ninja", folder / "largest"
    ninja.write_text(NINJA.format(python=sys.executable, ninja=toolchain.find_ninja(), largest=str(largest)))
    ninja.chmod(0o755)
    monkeypatch.setattr(engine, "find_ninja", lambda: str(ninja))
    spec = generate()
    report = spec.build(need_lock=True)
    if report.compiled:
        mib = max(map(int, largest.read_text().split())) / 1024
        print(
            f"{spec.name}: {len(report.compiled)} sources, {report.cpu_seconds:.0f} s of CPU, at most {mib:.0f} MiB "
            "a job"
        )
        assert mib <= (512 if spec.name.startswith(modules.FUSED_MOE) else spec.job_memory >> 20)
    return spec


class Compiled:
    """A fused MoE kernel, and the narrowest two-kernel path with MXFP8 activations, compiled as their module is."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.rows = [next(row for row in INSTANCES if row.split_k == streamed) for streamed in (True, False)]

    @property
    def names(self) -> set[str]:
        return {row.name for row in self.rows}

    def machine_code(self, minor: str) -> dict[str, str]:
        """SASS for compute capability 12.``minor``, by instance."""
        self.patch.setattr(modules.jit_env, "FLASHINFER_GEN_SRC_DIR", self.folder / "generated")
        self.patch.setitem(
            MOE_MODULES, "mxfp4", tuple(self.rows)
        )  # also where a plugin has taken them out of the module
        self.patch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(12, minor)})
        steps = [step for step in modules.gen_fused_moe_module().plan.steps if step.source.stem in self.names]
        code = {}
        for step in steps:
            built = self.folder / f"{step.source.stem}.{minor}.o"
            done = subprocess.run(step.command(str(step.source), str(built)), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            code[step.source.stem] = machine_code.dumped("sass", built)
        return code

    def machine_code_as_built(self) -> dict[str, str]:
        """The same for 12.1a, of the modules that other tests run."""
        code = {}
        for row in self.rows:
            inside = not is_alone(row)  # not where a plugin makes every instance a module of its own
            generate = modules.gen_fused_moe_module if inside else partial(modules.gen_fused_moe_instance_module, row)
            spec = embedding_ptx(generate, self.patch, self.folder)
            (step,) = (step for step in spec.plan.steps if step.source.stem == row.name)
            code[row.name] = machine_code.dumped("sass", spec.plan.object_path(step))
        return code


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    return Compiled(tmp_path, monkeypatch)


@pytest.mark.parametrize(("minor", "runs_on_gb10"), [("1a", True), ("1f", True), ("0f", True), ("0a", False)])
def test_arrivals_have_fences_wherever_a_gb10_may_run_them(minor: str, runs_on_gb10: bool, compiled: Compiled) -> None:
    """Code for the family (``12.0f``) runs on SM121 as well, though ``__CUDA_ARCH__`` is 1200 there."""
    code = compiled.machine_code(minor) if minor != "1a" else compiled.machine_code_as_built()
    assert set(code) == compiled.names
    for name, sass in code.items():
        found, fenced = machine_code.arrivals(sass)
        assert found >= 6, (name, found)  # of both kernels of a pair, or of the fused MoE kernel
        assert fenced == (found if runs_on_gb10 else 0), (name, found, fenced)
        if runs_on_gb10:
            counters, with_fence = machine_code.grid_counters(sass)
            assert counters == with_fence > 0, (name, counters, with_fence)


def test_arrivals_without_their_fence_are_found(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", "-DFLASHINFER_SM12X_FENCE_ARRIVALS=0")
    del compiled.rows[1:]
    (sass,) = compiled.machine_code("1a").values()
    found, fenced = machine_code.arrivals(sass)
    assert found > fenced


def test_fences_stand_in_one_place() -> None:
    """Every ``mbarrier.arrive`` of the family is one of ``ptx/sync.cuh``, and has the fence before it."""
    for path in sorted((fork_root() / "include" / "flashinfer").rglob("*.cuh")):
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        if path.name != "sync.cuh":
            assert not re.search(r"mbarrier\.arrive|atomicAdd|\b(red|atom)\.", text), path
    text = (fork_root() / "include/flashinfer/sm12x/ptx/sync.cuh").read_text(encoding="utf-8")
    functions = re.findall(r"\{\n(.*?)\n\}\n", re.sub(r"//.*", "", text), flags=re.DOTALL)
    arriving = [body for body in functions if "mbarrier.arrive" in body]
    assert len(arriving) == 3
    assert all(body.lstrip().startswith("fence_before_arrival();") for body in arriving)


@pytest.mark.parametrize("module", [*modules.MODULES, *(row.name for row in INSTANCES if is_alone(row))])
def test_machine_code_as_built(module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = [unit for unit in machine_code.units() if module in (unit.module, unit.stem)]
    of_module = [unit for unit in named if unit.generate is named[0].generate]  # others have modules of their own
    spec = embedding_ptx(of_module[0].generate, monkeypatch, tmp_path)
    objects = {step.source.stem: spec.plan.object_path(step) for step in spec.plan.steps}
    wrong = {str(unit): machine_code.faults(objects[unit.stem], unit, "sm_121a") for unit in of_module}
    assert not {unit: faults for unit, faults in wrong.items() if faults}
