# SPDX-License-Identifier: Apache-2.0
"""The pinned wheel as a tree of upstream's, a branch for each topic, and processes that see nothing of this fork."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from tools.upstream_patch import export, tree  # noqa: E402

Run = Callable[..., subprocess.CompletedProcess]
# A git checkout of upstream's, or a bare one, for what the wheel has not; optional.
CHECKOUT = os.environ.get("UPSTREAM_CHECKOUT", "")


def bring_from_checkout(folder: Path, checkout: str) -> None:
    """Commit the tests, benchmarks and documentation of ``checkout``'s ``HEAD`` beside the wheel's files."""
    archive = subprocess.run(
        ["git", "-C", checkout, "archive", "HEAD", "tests", "benchmarks", "docs"], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    tree.git(folder, "add", "--all")
    tree.commit(folder, "Tests, benchmarks and documentation")


@pytest.fixture(scope="session")
def upstream_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned wheel as a repository of upstream's."""
    folder = tmp_path_factory.mktemp("upstream") / "flashinfer"
    tree.lay_out_wheel(folder)
    if CHECKOUT:
        bring_from_checkout(folder, CHECKOUT)
    return folder


@pytest.fixture(scope="session")
def exported(upstream_tree: Path) -> tuple[Path, list[export.Exported]]:
    """The repository, and what was made of each topic; its work tree is upstream's."""
    return upstream_tree, export.export(upstream_tree)


@pytest.fixture(scope="session")
def merged(exported: tuple[Path, list[export.Exported]]) -> Iterator[Path]:
    """The work tree with all topics: the last of the kernels' branches, and the others merged into it."""
    folder, done = exported
    tree.git(folder, "checkout", "--quiet", "--detach", done[-1].branch)
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for each in done:
        if not each.topic.after and each.topic.name != "lean-module":
            tree.git(folder, *identity, "merge", "--quiet", "--no-edit", each.branch)
    yield folder
    tree.git(folder, "checkout", "--quiet", "main")


@pytest.fixture(scope="session")
def jit_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which upstream's JIT builds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def without_fork(jit_cache: Path) -> Run:
    """Run Python in an exported tree: of this fork nothing is on its path but what a test puts there.

    ``kernels``: compile with upstream's JIT for 12.1a, with PTX that the virtual GPU reads; without machine code where
    the environment has ``VIRTUAL_GPU_PTX_ONLY``, which is half of the time.
    """
    from flashinfer.jit import cpp_ext
    from flashinfer_sm12x.build import inspect_sass

    compiler = cpp_ext.find_toolkit().nvcc
    nvcc = jit_cache / "nvcc"
    # Upstream compresses device code; the virtual GPU reads it as it is. The last --compress-mode would not win.
    nvcc.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "ptx_only = os.environ.get('VIRTUAL_GPU_PTX_ONLY')\n"
        "arguments = [a for a in sys.argv[1:] if a not in ('-Xfatbin=-compress-all', '--compress-mode=size')]\n"
        "arguments = [a for a in arguments if not (ptx_only and ',code=sm_' in a)]\n"
        f"os.execv({str(compiler)!r}, [{str(compiler)!r}, '--compress-mode=none', *arguments])\n"
    )
    nvcc.chmod(0o755)

    def run(
        folder: Path, *arguments: str, path: tuple[Path, ...] = (), environment: Mapping[str, str] | None = None,
        kernels: bool = False, check: bool = True,
    ) -> subprocess.CompletedProcess:  # fmt: skip
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("FLASHINFER", "PYTEST"))}
        settings = {
            "PYTHONPATH": os.pathsep.join(map(str, (folder, *path))),
            "FLASHINFER_WORKSPACE_BASE": str(jit_cache),
            "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
            "CUDA_HOME": str(cpp_ext.find_toolkit().root),
            "FLASHINFER_EXTRA_LDFLAGS": shlex.join(cpp_ext.toolkit_link_flags()),
            "MAX_JOBS": "2",
        }
        if kernels:
            settings |= {
                # cuobjdump, where a toolkit from PyPI has it.
                "PATH": os.pathsep.join((os.environ["PATH"], str(inspect_sass.find_tool().parent))),
                # Headers that the compiler's own toolkit lacks: upstream's quantization kernels include cuRAND's.
                "CPATH": os.pathsep.join(map(str, cpp_ext.find_toolkit().include_dirs[1:])),
                "FLASHINFER_NVCC": str(nvcc),
                "FLASHINFER_EXTRA_CUDAFLAGS": "-gencode=arch=compute_121a,code=compute_121a",
            }
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False,
            env={**inherited, **settings, **(environment or {})},
        )  # fmt: skip
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
        assert done.returncode == 0 or not check, done.stdout[-4000:] + done.stderr[-4000:]
        return done

    return run


@pytest.fixture(scope="session")
def on_the_virtual_gpu(without_fork: Run) -> Run:
    """Run pytest on files of an exported tree, or a program, whose ``"cuda"`` is the virtual SM121."""

    def run(folder: Path, *arguments: str, program: str = "", **named: str) -> subprocess.CompletedProcess:
        plugin = (Path(__file__).parent, REPO / "emulator" / "python")
        options = ("-q", "-W", "ignore", "-p", "virtual_gpu", "-p", "no:cacheprovider", "--import-mode=importlib")
        start = ("-c", f"import virtual_gpu; {program}") if program else ("-m", "pytest", *options)
        # A torch that brings CUDA would load its runtime before the plugin loads the virtual GPU's.
        found = without_fork(folder, "-m", "vsm.preload", path=plugin).stdout.strip()
        return without_fork(
            folder, *start, *arguments, path=plugin, kernels=True, environment={"LD_PRELOAD": found, **named}
        )

    return run
