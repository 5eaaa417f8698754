# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the JIT tests."""

from __future__ import annotations

import logging
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jit_fakes import FAKE_COMPILER, Project, use_cache

from flashinfer.jit import core, cpp_ext
from flashinfer_sm12x.build import engine, inspect_sass, toolchain
from flashinfer_sm12x.build.diagnosis import JitBuildError


@pytest.fixture(scope="session")
def cuobjdump() -> str:
    """The program that prints machine code; without one a test is skipped."""
    try:
        return inspect_sass.find_tool()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for variable in ("MAX_JOBS", *engine.COMPILER_ENVIRONMENT):
        monkeypatch.delenv(variable, raising=False)
    made = Project(tmp_path)
    made.write("one.h", "int one;\n")
    made.write("two.h", "int two;\n")
    made.write("a.cu", '#include "one.h"\n')
    made.write("b.cu", '#include "one.h"\n#include "two.h"\n')
    made.write("c.cu", "int c;\n")
    made.compiler.parent.mkdir(parents=True)
    made.compiler.write_text(FAKE_COMPILER.replace("{python}", sys.executable))
    made.compiler.chmod(made.compiler.stat().st_mode | stat.S_IXUSR)
    (made.compiler.parent / "banner").write_text("Fake compiler, release 13.0, V13.0.1")
    return made


@pytest.fixture
def jit_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """``caplog`` for the engine's logger, which does not propagate."""
    logger = logging.getLogger("flashinfer.jit.sm12x")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.DEBUG)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)


@pytest.fixture
def upstream_builds_here(tmp_path: Path) -> None:
    """Upstream's own modules can be built in a test's folder; a test is skipped where a build says why not."""
    try:
        cpp_ext._require_plain_paths(tmp_path)
    except JitBuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, compiling for 12.1a."""
    use_cache(tmp_path, monkeypatch)
    for variable in ("JIT_DEBUG", "JIT_VERBOSE", "JIT_LINEINFO", "DISABLE_JIT", "SM12X_EMBED_PTX", "NVCC"):
        monkeypatch.delenv(f"FLASHINFER_{variable}", raising=False)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "12.1a")
    monkeypatch.setattr(core.jit_spec_registry, "_specs", {})
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(12, "1a")})
    return tmp_path
