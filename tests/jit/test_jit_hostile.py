# SPDX-License-Identifier: Apache-2.0
"""Bad days: full disks, odd cache paths, and prebuilt modules of upstream's under our names."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from jit_fakes import Project, needs_nvcc
from jit_processes import run_python


def _can_mount() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.privileges
@pytest.mark.skipif(not _can_mount(), reason="a disk that is full takes the right to mount one")
def test_disk_that_fills_while_linking(project: Project) -> None:
    """What the linker says of it must not need the same disk."""
    fills = (
        'if source is None and "-o" in args:\n'
        "    try:\n"
        '        open(output, "wb").write(bytes(1 << 22))\n'
        "    except OSError as error:\n"
        '        print("/usr/bin/ld: final link failed: " + error.strerror)\n'
        "        sys.exit(1)\n"
    )
    project.change_compiler("if source is None:", fills)
    small = project.root / "small"
    small.mkdir()
    script = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'
    built = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(small), *project.command(small / "cache")],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 1
    assert "JitBuildError: building demo failed: " in built.stderr
    assert "No space left on device" in built.stderr
    assert " is full. Make room, or set FLASHINFER_WORKSPACE_BASE" in built.stderr


def _python(code: str, folder: Path, base: str, **variables: str) -> str:
    """What ``code`` prints, run in ``folder``."""
    result = run_python(["-c", code], base, cwd=folder, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_relative_cache_is_the_same_folder_for_child_processes(tmp_path: Path) -> None:
    code = "from flashinfer.jit import env; import os; print(env.FLASHINFER_JIT_DIR, os.environ[{!r}], sep='\\n')"
    jit_dir, base = _python(code.format("FLASHINFER_WORKSPACE_BASE"), tmp_path, "rel").splitlines()
    assert Path(jit_dir).is_relative_to(tmp_path / "rel")
    assert base == str(tmp_path / "rel")


@needs_nvcc
@pytest.mark.parametrize("base", ["rel", "$HOME a"])
def test_cache_paths_that_nvcc_would_have_a_shell_read(base: str, tmp_path: Path) -> None:
    """A relative one, and one with a ``$``; the source is a generated one, which lies in the cache."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "import jit_fakes; from flashinfer.jit import env;"
        "spec = jit_fakes.small_spec(env.FLASHINFER_GEN_SRC_DIR); spec.build(need_lock=True);"
        "print(spec.try_load().answer(), spec.plan.library)"
    )
    answer, library = _python(code, tmp_path, base).strip().split(" ", 1)
    assert answer == "41"
    assert Path(library).is_relative_to(tmp_path / base)


PROVIDER = """
from types import SimpleNamespace
__version__ = {version!r}
def get_jit_cache_providers():
    return [SimpleNamespace(provider_id="sm", distribution="flashinfer-jit-cache-sm", version=__version__,
            jit_cache_dir={folder!r}, cuda_architectures=[{arch!r}], modules={modules!r})]
"""
"""A package as upstream's wheels of prebuilt modules are."""


@pytest.mark.parametrize("arch", ["12.1a", "12.0f", "12.0a"])
def test_upstreams_prebuilt_modules_are_not_taken_for_ours(arch: str, tmp_path: Path) -> None:
    names = ["fused_moe_120", "gemm_mxfp4_sm12x", "norm"]
    for name in names:
        (tmp_path / "aot" / name).mkdir(parents=True)
        library = tmp_path / "aot" / name / f"{name}.so"
        subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", str(library)], check=True)
    from flashinfer.version import __version__ as version

    package = tmp_path / "flashinfer_jit_cache"
    package.mkdir()
    tag = f"sm{arch.replace('.', '')}"
    text = PROVIDER.format(version=version, folder=str(tmp_path / "aot"), arch=tag, modules=names)
    (package / "__init__.py").write_text(text)
    code = (
        "from flashinfer.jit import core, env, fused_moe; from flashinfer.jit.sm12x import modules\n"
        "specs = fused_moe.gen_cutlass_fused_moe_sm120_module(), modules.gen_group_gemm_module()\n"
        "for spec in specs:\n"
        "    print(spec.name, len(env.get_aot_artifacts(spec.name)), spec.is_aot, spec.is_compiled, spec.try_load())\n"
        "print(core.gen_jit_spec('norm', []).is_aot)"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    printed = _python(code, tmp_path, str(tmp_path), FLASHINFER_CUDA_ARCH_LIST=arch, PYTHONPATH=path)
    assert printed.splitlines() == [
        "fused_moe_120 1 False False None",  # the package offers one
        "gemm_mxfp4_sm12x 1 False False None",
        "True",  # modules that are upstream's come from there
    ]
