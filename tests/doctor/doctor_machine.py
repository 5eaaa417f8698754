# SPDX-License-Identifier: Apache-2.0
"""A machine that the doctor is asked about: its GPUs, torch, vLLM and nvcc are small fakes; the rest of it is real."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from layer_toys import REPO, UPSTREAM, WHEEL_FILES, write_tree, write_wheel

import flashinfer_sm12x.doctor as doctor
from flashinfer_sm12x.doctor import asking, questions
from flashinfer_sm12x.doctor.asking import Facts

DOCTOR = REPO / "flashinfer_sm12x" / "doctor"
GB10 = "NVIDIA GB10, 12.1, 580.95.05"
PROGRAMS = "bash sh c++ g++ as ld ninja mv rm mkdir chmod env grep head df cat"
IF_THERE = "ps"  # for a command of the doctor's that tests run; images without procps lack it

Result = subprocess.CompletedProcess[str]

NVCC = """
case "$1" in --version) echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit ;; esac
host=${NVCC_CCBIN:-g++}
command -v "$host" > /dev/null || { echo 'nvcc fatal   : Failed to preprocess host compiler properties.'; exit 1; }
for flag in $NVCC_APPEND_FLAGS; do echo "nvcc fatal   : Unknown option '$flag'"; exit 1; done
for word; do
  shift
  case "$before$word" in
    -gencode=*|--compiler-options=*|-ccbin) ;;
    -ccbin*) host=$word ;;
    -c) set -- "$@" -x c++ -c ;;
    *) set -- "$@" "$word" ;;
  esac
  before=
  [ "$word" != -ccbin ] || before=-ccbin
done
exec "$host" -D__global__= -fPIC "$@"
"""

PIP = """
import re, shlex, shutil, sys
from pathlib import Path

verb, *words = sys.argv[1:]
with open(f"{ROOT}/installed", "a") as log:
    log.write("pip " + shlex.join(sys.argv[1:]) + "\\n")
for word in words:
    name = "flashinfer-sm12x[cuda]" if word.endswith("[cuda]") else re.split("[=<>!~]", word)[0]
    brought = Path(ROOT, "packages", name)
    for folder in ("site", "wheel"):
        if verb == "uninstall" or brought.is_dir():
            for old in Path(ROOT, folder).glob(f"{name.replace('-', '_')}-*.dist-info"):
                shutil.rmtree(old)
    if verb == "uninstall":
        shutil.rmtree(Path(ROOT, "site", name.replace("-", "_")), ignore_errors=True)
    elif brought.is_dir():
        shutil.copytree(brought, ROOT, symlinks=True, dirs_exist_ok=True)
"""
COPY = shutil.which("cp") + " -R"

PLUGINS = """
import os
from importlib.metadata import entry_points

def load_general_plugins():
    allowed = os.environ.get("VLLM_PLUGINS")
    for point in entry_points(group="vllm.general_plugins"):
        if allowed is None or point.name in allowed.split(","):
            point.load()()
"""

PLATFORMS = """
import torch

class current_platform:
    is_cuda = staticmethod(lambda: bool(torch.visible()))
    is_device_capability_family = staticmethod(lambda family: any(gpu[1][0] * 10 == family for gpu in torch.visible()))
    is_device_capability = staticmethod(
        lambda whole: any(gpu[1][0] * 10 + gpu[1][1] == whole for gpu in torch.visible())
    )
"""

VLLM_ANSWERS = {
    "has_flashinfer_cubin": "bool([*metadata.distributions(name='flashinfer-cubin')])",
    "has_flashinfer": "bool(_flashinfer_nvcc_path() and shutil.which('ninja'))",
    "has_flashinfer_cutlass_fused_moe": "has_flashinfer()",
    "has_flashinfer_autotune_v2": "has_flashinfer()",
    "has_nvidia_artifactory": "True",
}


@dataclass(frozen=True)
class Parts:
    """Files that machines share: an interpreter whose environment has ``packaging`` only, and a CUDA runtime without a
    symbol."""

    python: Path
    runtime: Path

    @classmethod
    def make(cls, root: Path, gxx: str) -> Parts:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "env")], check=True)
        (site,) = (root / "env").glob("lib/python*/site-packages")
        packaging = find_spec("packaging")
        assert packaging is not None
        assert packaging.origin is not None
        (site / "packaging").symlink_to(Path(packaging.origin).parent)
        runtime = root / "libcudart.so"
        subprocess.run([gxx, "-shared", "-x", "c++", "/dev/null", "-o", str(runtime)], check=True)
        return cls(root / "env" / "bin" / "python", runtime)


class Machine:
    """A healthy DGX Spark with vLLM, until something is planted."""

    def __init__(self, root: Path, parts: Parts) -> None:
        self.root, self.python = root, parts.python
        self.wheel = write_wheel(self.root / "wheel", WHEEL_FILES)
        self.tree = self.root / "tree"
        self.site = self.root / "site"
        self.path = [self.tree, self.wheel, self.site]
        self.variables = {
            "HOME": str(self.root / "home"),
            "PATH": f"{self.root / 'toolkit' / 'bin'}:{self.root / 'bin'}",
            "FLASHINFER_WORKSPACE_BASE": str(self.root / "cache"),
            "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
        }
        for folder in ("cache", "home", "bin", "toolkit/lib64", "tree/flashinfer_sm12x/vllm"):
            (self.root / folder).mkdir(mode=0o755, parents=True)
        headers = {"cuda_runtime.h": "", "cuda_runtime_api.h": "#define CUDART_VERSION 13000\n", "curand_kernel.h": ""}
        write_tree(self.root / "toolkit" / "include", headers)
        (self.root / "toolkit" / "lib64" / "libcudart.so").symlink_to(parts.runtime)
        self.program("toolkit/bin/nvcc", NVCC)
        for name in (*PROGRAMS.split(), IF_THERE):
            found = shutil.which(name)
            assert found or name == IF_THERE, name
            if found:
                (self.root / "bin" / name).symlink_to(found)
        self.program("bin/sudo", 'exec "$@"')
        install = f"""
cd {shlex.quote(str(self.root))}
echo apt-get "$@" >> installed
for package; do [ ! -d "packages/$package" ] || {COPY} "packages/$package/." .; done"""
        self.program("bin/apt-get", install)
        write_tree(self.site, {"pip/__main__.py": f"ROOT = {str(self.root)!r}\n{PIP}"})
        self.program("bin/systemd-detect-virt", "echo none")  # what runs the tests may be a container
        self.program("bin/dmesg", "echo '[    0.0] Booting Linux'")
        self.gpus(GB10)
        self.torch("13.0", [("NVIDIA GB10", (12, 1))])
        self.vllm()
        (self.tree / "flashinfer").symlink_to(REPO / "flashinfer")
        for part in sorted((REPO / "flashinfer_sm12x").iterdir()):
            if part.name not in ("vllm", "__pycache__"):
                (self.tree / "flashinfer_sm12x" / part.name).symlink_to(part)
        for name in ("__init__.py", "settings.py", "devices.py", "fallback.py"):
            shutil.copy(REPO / "flashinfer_sm12x" / "vllm" / name, self.tree / "flashinfer_sm12x" / "vllm")
        for name in ("config", "moe", "nvfp4", "dense", "lm_head", "attention"):
            self.plugin_part(name, "def install(): pass")
        self.plugin_part(
            "api_checks",
            "import collections, importlib\n"
            "MODULES = collections.defaultdict(lambda: ('', 'all of it is'))\n"
            "def why_not(part): return ''\n"
            "def module(part): return importlib.import_module('.' + {'experts': 'moe', 'head': 'lm_head'}.get(part, "
            "part), __package__)",
        )
        self.package("flashinfer-sm12x", "0.1.0", plugin="flashinfer_sm12x = flashinfer_sm12x.vllm:register")
        self.packages(parts)

    def packages(self, parts: Parts) -> None:
        """Fill what pip and apt-get install from: folders that are copied over the machine's."""
        packages = self.root / "packages"
        toolkit = packages / "flashinfer-sm12x[cuda]" / "site" / "nvidia" / "cu13"
        shutil.copytree(self.root / "toolkit", toolkit, symlinks=True)
        (toolkit / "lib64").rename(toolkit / "lib")
        write_tree(packages, {"nvidia-curand/site/nvidia/cu13/include/curand_kernel.h": ""})
        for name in ("torch", "vllm"):  # torch comes with vLLM
            shutil.copytree(self.site / name, packages / "vllm" / "site" / name)
        shutil.copytree(self.site / "vllm-0.33.0.dist-info", packages / "vllm" / "site" / "vllm-0.33.0.dist-info")
        write_wheel(packages / "flashinfer-python" / "wheel", WHEEL_FILES)
        write_tree(packages, {"flashinfer-python/site/tvm_ffi.py": ""})
        info = f"flashinfer-cubin/site/flashinfer_cubin-{UPSTREAM}.dist-info/METADATA"
        write_tree(packages, {info: f"Metadata-Version: 2.1\nName: flashinfer-cubin\nVersion: {UPSTREAM}\n"})
        for package, programs in (("ninja", ("ninja",)), ("g++", ("g++", "c++"))):
            folder = packages / package / "bin"
            folder.mkdir(parents=True)
            for program in programs:
                shutil.copy(self.root / "bin" / program, folder / program, follow_symlinks=False)
        driver = packages / "nvidia-driver-580-open" / "bin"
        driver.mkdir(parents=True)
        shutil.copy(self.root / "bin" / "nvidia-smi", driver)

    def program(self, name: str, script: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def remove(self, *programs: str) -> None:
        for program in programs:
            (self.root / program).unlink()

    def mounting(self, script: str) -> None:
        """Have every process see what ``script`` mounts, in a namespace of its own.

        Raises:
            pytest.skip.Exception: nothing may be mounted here.
        """
        unshare = ["/usr/bin/unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-ec"]
        if subprocess.run([*unshare, script], capture_output=True).returncode:
            pytest.skip("nothing may be mounted here")
        command = shlex.join([*unshare, f'{script}\nexec "$@"', "sh", str(self.python)])
        self.program("mounting/python", f'exec {command} "$@"')
        self.python = self.root / "mounting" / "python"

    def gpus(self, *rows: str) -> None:
        self.program("bin/nvidia-smi", "\n".join(f"echo '{row}'" for row in rows))

    def package(self, name: str, version: str, plugin: str | None = None, url: str = "") -> None:
        """Metadata in site-packages; ``url`` is the text of its direct_url.json."""
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        files = {f"{info}/direct_url.json": url} if url else {}
        files |= {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
        if plugin:
            files[f"{info}/entry_points.txt"] = f"[vllm.general_plugins]\n{plugin}\n"
        write_tree(self.site, files)

    def without_package(self, name: str) -> None:
        for info in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(info)

    def plugin_part(self, name: str, code: str) -> None:
        write_tree(self.tree, {f"flashinfer_sm12x/vllm/{name}.py": code})

    def torch(
        self, cuda: str | None, gpus: list[tuple[str, tuple[int, int]]], at_import: str = "", version: str = "2.14.0"
    ) -> None:
        code = f"""
{at_import}
import os
from types import SimpleNamespace as N
__version__ = {version!r}
version = N(cuda={cuda!r})
def visible(): return [] if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else {gpus!r}
cuda = N(is_available=lambda: bool(visible()), device_count=lambda: len(visible()),
         get_device_name=lambda i: visible()[i][0], get_device_capability=lambda i: visible()[i][1])
"""
        write_tree(self.site, {"torch/__init__.py": code})
        self.without_package("torch")
        self.package("torch", version)

    def vllm(self, version: str = "0.33.0", at_import: str = "", **answers: str) -> None:
        functions = [f"def {name}(): return {answer}" for name, answer in {**VLLM_ANSWERS, **answers}.items()]
        nvcc = (
            "import os, shutil\nfrom importlib import metadata\ndef _flashinfer_nvcc_path():\n"
            "    home = os.environ.get('CUDA_HOME')\n"
        )
        nvcc += "    return shutil.which(f'{home}/bin/nvcc' if home else 'nvcc')"
        code = "\n".join([at_import, nvcc, *functions])
        files = {"__init__.py": "", "plugins.py": PLUGINS, "platforms.py": PLATFORMS, "utils/__init__.py": ""}
        files["envs.py"] = "environment_variables = dict.fromkeys(['VLLM_PLUGINS', 'VLLM_KV_CACHE_LAYOUT'])"
        write_tree(self.site / "vllm", {**files, "utils/flashinfer.py": code})
        self.without_package("vllm")
        self.package("vllm", version)

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": ":".join(map(str, self.path)), **self.variables}

    def doctor(self, *arguments: str, how: tuple[str, ...] = (str(DOCTOR),), cwd: Path | None = None) -> Result:
        return self.run(str(self.python), *how, *arguments, cwd=cwd)

    def run(self, *command: str, cwd: Path | None = None) -> Result:
        """Run a command in the machine's environment."""
        environ, cwd = self.environment(), cwd or self.root
        return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=300)

    def diagnose(self, *arguments: str) -> Diagnosis:
        started = time.monotonic()
        result = self.doctor("--json", *arguments)
        assert not result.stderr, result.stderr
        return Diagnosis(json.loads(result.stdout), result.returncode, time.monotonic() - started)

    def paste(self, commands: list[str]) -> tuple[Diagnosis, dict[str, str], list[int]]:
        """Run commands in one shell, and the doctor after them there: what it says, the variables, the exit
        statuses."""
        root, doctor = shlex.quote(str(self.root)), shlex.join(map(str, (self.python, DOCTOR)))
        lines = ["exec 3>&1 >/dev/null", *(f"{command}\necho $? >> {root}/statuses" for command in commands)]
        lines += [f"env -0 > {root}/variables", f"exec {doctor} --json >&3"]
        (self.root / "statuses").touch()
        result = self.run(str(self.root / "bin" / "bash"), "-c", "\n".join(lines))
        pairs = (self.root / "variables").read_text().split("\0")
        statuses = [int(line) for line in (self.root / "statuses").read_text().split()]
        variables = dict(pair.split("=", 1) for pair in pairs if pair)
        return Diagnosis(json.loads(result.stdout), result.returncode, 0), variables, statuses

    def installed(self) -> str:
        """The lines that apt-get and pip were given; both copy what ``packages`` has."""
        file = self.root / "installed"
        return file.read_text() if file.exists() else ""


@dataclass
class Diagnosis:
    data: dict[str, Any]
    status: int
    seconds: float

    def __getitem__(self, check: str) -> tuple[str, str, str, str]:
        """``(state, found, command, why)``; all empty where the row is left out."""
        rows = [finding for finding in self.data["findings"] if finding["check"] == check]
        return tuple(rows[0][key] for key in ("state", "found", "command", "why")) if rows else ("", "", "", "")

    def states(self) -> dict[str, str]:
        return {finding["check"]: finding["state"] for finding in self.data["findings"]}


def findings(facts: Mapping[str, Facts], environ: Mapping[str, str] | None = None) -> dict[str, doctor.Finding]:
    """The doctor's findings, by check, for facts in the form in which questions tell them."""
    answers = asking.Answers({question: {} for question in questions.QUESTIONS} | facts, environ or {})
    return {finding.check: finding for finding in doctor.diagnose(answers)}


ORDERS = [f"{how} {fenced} fence" for how in ("stores", "copies") for fenced in ("with", "without")]


def healthy() -> dict[str, dict[str, Any]]:
    """The facts that the parts would tell of a GB10 that does as predicted."""
    rates = {"bf16": 1000, "f16": 1000, "mxf8f6f4": 2040, "mxf4": 4080}
    ranges = {"bf16": [862, 1024], "f16": [862, 1024], "mxf8f6f4": [2048, 2048], "mxf4": [4096, 4096]}
    cost = {"host_us": 2.0, "stream_us": 2.5, "graph_us": 1.3}
    overlap = {"first_us": 41.0, "began_before_end_us": 39.5, "released_after_end_us": 1.0}
    layers = {1: (250, 227, [227, 274]), 4: (900, 860, [818, 952]), 64: (6400, 6238, [5867, 6742])}
    layers[2048] = (8800, 7275, [7972, 9154])
    device = {"name": "NVIDIA GB10", "capability": [12, 1], "sm_count": 48}
    return {
        "device": {**device, "virtual": False, "gb10": True, "sm12x": True},
        "build": {"seconds": 20.0},
        "dram": {
            "wrong": False,
            "gigabytes_per_second": 233.4,
            "copies_wrong": False,
            "copies_gigabytes_per_second": 231.2,
            "predicted": [218.0, 250.0],
        },
        "mma": {
            kind: {"wrong": 0, "flops_per_clock": rate, "tflops": 230.0, "gigahertz": 2.41, "predicted": ranges[kind]}
            for kind, rate in rates.items()
        },
        "sums": {"bf16": 21, "f16": 21, "mxf8f6f4": 20, "mxf4": 20, "needed": 20},
        "launch": {
            **{f"{kind} out of order": 0 for kind in ("plain", "dependent", "cooperative")},
            **dict.fromkeys(("plain", "dependent", "cooperative"), cost),
            **dict.fromkeys(("overlap", "overlap_shared", "overlap_graph"), overlap),
            "overlap_plain": overlap | {"began_before_end_us": -0.9},
        },
        "order": {name: {"compared": 1_000_000, "wrong": 0} for name in ORDERS},
        "build-layers": {"seconds": 0.1},
        "tactics": {"count": 113, "used": {"MoE": 0.93, "dense": 0.99}, "wrong": []},
        "layer": {
            f"{tokens} tokens": {"layer_us": time, "read_us": read, "predicted": predicted}
            for tokens, (time, read, predicted) in layers.items()
        },
    }


__all__ = ["DOCTOR", "GB10", "ORDERS", "REPO", "UPSTREAM", "Diagnosis", "Machine", "Parts", "findings", "healthy"]
