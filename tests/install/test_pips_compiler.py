# SPDX-License-Identifier: Apache-2.0
"""The compiler that ``pip install vllm==0.33.0`` brings, with and without a whole toolkit, by the real wheels.

torch pins CUDA's runtime, 13.0.96; the newest nvcc comes with it, 13.5.37. One module of this fork and one of
upstream's are preprocessed, by the very commands that a build runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from layer_toys import REPO

from flashinfer_sm12x.build import toolchain

NEWER = "13.5.37"
SYSTEM = "/usr/bin:/bin"
COMPILER = [name for name in toolchain.COMPILER_WHEELS if name != "nvidia-cuda-runtime"]

PREPROCESS = """
import json, shlex, subprocess
from flashinfer.jit import cpp_ext
from flashinfer.jit.sampling import gen_sampling_module
from flashinfer.jit.sm12x import modules

upstreams = cpp_ext._upstream.get_cuda_path.__wrapped__()
print(json.dumps({"nvcc": str(cpp_ext.find_toolkit().nvcc), "upstreams": upstreams}))
for spec in (modules.gen_router_module(), gen_sampling_module()):
    entry = spec.get_compile_commands()[0]
    words, kept = iter(shlex.split(entry["command"])), []
    for word in words:
        if word in ("-o", "-MF"):
            next(words)
        elif word not in ("-c", "-MD", "--generate-dependencies-with-compile", entry["file"]):
            kept.append(word)
    done = subprocess.run([*kept, "-E", entry["file"], "-o", "/dev/null"], capture_output=True, text=True)
    print(json.dumps({"module": spec.name, "status": done.returncode, "said": done.stderr[-500:]}))
"""


class Environment:
    """A copy of this environment without its CUDA compiler; pip installs another one."""

    def __init__(self, root: Path, site_packages: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
        self.python, self.base = root / "bin" / "python", root / "base"
        (self.site,) = root.glob("lib/python*/site-packages")
        compilers = {str(file) for name in COMPILER for file in _files(name)}
        metadata = tuple(f"{name.replace('-', '_')}-" for name in COMPILER)
        for entry in site_packages.iterdir():
            if entry.name == "nvidia":  # many wheels lay files there
                _link(entry, self.site / "nvidia", compilers, site_packages)
            elif entry.suffix != ".pth" and not entry.name.startswith(metadata):
                (self.site / entry.name).symlink_to(entry)

    def pip(self, *words: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, code: str, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """``python -c code`` as a user's shell without any of the tests' variables would run it."""
        kept = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("PYTHON", "FLASHINFER", "CUDA", "NVCC"))
        }
        own = {"FLASHINFER_WORKSPACE_BASE": str(self.base), "FLASHINFER_CUDA_ARCH_LIST": "12.1a", "PATH": SYSTEM}
        environment = {**kept, "PYTHONPATH": str(REPO), **own, **variables}
        done = subprocess.run([self.python, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def preprocess(self, code: str = "", **variables: str) -> tuple[dict[str, str], dict[str, str]]:
        """The places in which this fork and upstream found nvcc; and by module nvcc's output if it failed, else
        empty."""
        where, *modules = map(json.loads, self.run(code + PREPROCESS, **variables).stdout.splitlines())
        return where, {each["module"]: each["said"] if each["status"] else "" for each in modules}


def _files(name: str) -> list[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _link(source: Path, target: Path, left_out: set[str], site: Path) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.is_dir():
            _link(entry, target / entry.name, left_out, site)
        elif str(entry.relative_to(site)) not in left_out:
            (target / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def vllms(tmp_path_factory: pytest.TempPathFactory, site_packages: Path) -> Environment:
    made = Environment(tmp_path_factory.mktemp("vllm") / "env", site_packages)
    made.pip("install", "--no-deps", "--no-compile", *(f"{name}=={NEWER}" for name in COMPILER))
    return made


@pytest.fixture(scope="module")
def whole(nvcc: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The compiler of the environment that the tests run in, laid out as NVIDIA's installers do it."""
    toolkit, root = toolchain.discover(), tmp_path_factory.mktemp("local") / "cuda"
    (root / "bin").mkdir(parents=True)
    for program in nvcc.resolve().parent.iterdir():
        (root / "bin" / program.name).symlink_to(program)  # one by one: nvcc goes up from the folder that it is in
    for name in ("include", "nvvm"):
        (root / name).symlink_to((toolkit.root / name).resolve())
    (root / "lib64").symlink_to(toolkit.find_library("cudart").parent)
    yield root
    shutil.rmtree(root)


DEFAULT = "from flashinfer_sm12x.build import toolchain; toolchain.DEFAULT_ROOT = toolchain.Path({!r})\n"
NO_DEFAULT = """if True:
    import os

    access = os.access
    os.access = lambda path, mode: not str(path).startswith("/usr/local/cuda/") and access(path, mode)
"""
"""The doctor imports this fork's files by other names, so what is changed is Python's."""
BOTH = {"router_sm12x": "", "sampling": ""}


def test_a_whole_toolkit_compiles_both_kinds_of_module(vllms: Environment, whole: Path) -> None:
    """Wherever vLLM and upstream would find it, they and this fork find the same."""
    places = {
        "PATH": {"PATH": f"{whole}/bin:{SYSTEM}"},
        "CUDA_HOME": {"CUDA_HOME": str(whole)},
        "default": {"code": DEFAULT.format(str(whole))},
    }
    for place, how in places.items():
        where, output = vllms.preprocess(**how)
        assert output == BOTH, place
        assert where["nvcc"] == f"{whole}/bin/nvcc", place
        if place != "default":  # upstream's own is a constant
            assert where["upstreams"] == str(whole), place


def test_without_one_a_line_reports_which_two_disagree_and_its_command_fixes_it(vllms: Environment) -> None:
    build = (
        "import runpy, sys; sys.argv[1:] = ['sm12x-build', '--vllm', 'bf16']; runpy.run_module('flashinfer', "
        "run_name='__main__')"
    )
    done = vllms.run(NO_DEFAULT + build, status=1)
    root = vllms.site / "nvidia" / "cu13"
    runtime = importlib.metadata.version("nvidia-cuda-runtime")
    disagree = f"nvidia-cuda-nvcc {NEWER} and nvidia-cuda-runtime {runtime} in {root} disagree"
    # The line of what is to be built, and no module was begun.
    assert re.fullmatch(r"\d+ modules: .* of this fork's, .* of upstream's, .*\n", done.stdout)
    line = done.stderr.splitlines()[-1]
    start, _, command = line.partition(". Install one that can: ")
    assert start == f"Error: no CUDA compiler can be used: {disagree}"
    assert not list(vllms.base.rglob("*.o"))

    question = "import sys; sys.argv[1:] = ['build']; import runpy; runpy.run_path({!r}, run_name='__main__')"
    question = question.format(str(REPO / "flashinfer_sm12x" / "doctor" / "questions.py"))
    output = vllms.run(NO_DEFAULT + question)
    assert disagree in output.stdout

    # The extra's compiler by its pins: pip would also replace what this environment shares with the tests' own.
    assert shlex.split(command) == ["pip", "install", f"{REPO}[cuda]"]
    pins = [
        line for line in (REPO / "requirements-cuda.txt").read_text().split() if line.partition("==")[0] in COMPILER
    ]
    assert len(pins) == len(COMPILER)
    vllms.pip("install", "--no-deps", "--no-compile", *pins)
    try:
        where, modules = vllms.preprocess(NO_DEFAULT)
        assert modules == BOTH
        assert where["nvcc"] == f"{root}/bin/nvcc"
        assert '"error": null' in vllms.run(NO_DEFAULT + question).stdout
    finally:
        vllms.pip("install", "--no-deps", "--no-compile", *(f"{name}=={NEWER}" for name in COMPILER))
