# SPDX-License-Identifier: Apache-2.0
"""A machine that the doctor is asked about: its programs, packages and GPUs are small fakes, its Python is real."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from layer_toys import REPO, UPSTREAM, WHEEL_FILES, write_tree, write_wheel

DOCTOR = REPO / "flashinfer" / "sm12x_doctor"
GB10 = "NVIDIA GB10, 12.1, 580.95.05"
RTX = "NVIDIA GeForce RTX 5090, 12.0, 580.95.05"

Result = subprocess.CompletedProcess[str]

VLLM_ANSWERS = {
    "has_flashinfer_cubin": False,
    "has_flashinfer": True,
    "has_flashinfer_moe": True,
    "has_flashinfer_cutlass_fused_moe": True,
    "has_flashinfer_trtllm_fused_moe": True,
    "has_flashinfer_autotune_v2": True,
    "has_nvidia_artifactory": True,
}


def make_environment(root: Path) -> Path:
    """A virtual environment with nothing but what finding a compiler needs; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (site,) = root.glob("lib/python*/site-packages")
    packaging = find_spec("packaging")
    assert packaging is not None
    assert packaging.origin is not None
    (site / "packaging").symlink_to(Path(packaging.origin).parent)
    return root / "bin" / "python"


@dataclass
class Machine:
    """A healthy DGX Spark with vLLM, until something is planted."""

    root: Path
    python: Path
    path: list[Path] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wheel = write_wheel(self.root / "wheel", WHEEL_FILES)
        self.path = [REPO, self.wheel, self.root / "site"]
        self.variables = {
            "PATH": f"{self.root / 'toolkit' / 'bin'}:{self.root / 'bin'}",
            "FLASHINFER_WORKSPACE_BASE": str(self.root / "cache"),
            "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
        }
        (self.root / "cache").mkdir(mode=0o755)
        write_tree(self.root / "toolkit", {"include/cuda_runtime.h": "", "lib64/libcudart.so": ""})
        self.program("toolkit/bin/nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
        self.program("bin/ninja", "echo 1.13.0")
        self.program("bin/c++", "echo 'c++ (Debian) 12.2.0'")
        self.gpus(GB10)
        self.torch("13.0", [("NVIDIA GB10", (12, 1))])
        self.vllm()
        self.package("flashinfer-sm12x", "0.1.0", plugin="flashinfer_sm12x = flashinfer_sm12x_vllm:register")

    def program(self, name: str, script: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

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

    def package(self, name: str, version: str, plugin: str | None = None) -> None:
        """Metadata in site-packages."""
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        files = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
        if plugin:
            files[f"{info}/entry_points.txt"] = f"[vllm.general_plugins]\n{plugin}\n"
        write_tree(self.root / "site", files)

    def without_package(self, name: str) -> None:
        for info in (self.root / "site").glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(info)

    def without_plugin(self) -> None:
        """Neither installed nor, as in a checkout, beside the fork's package."""
        self.without_package("flashinfer-sm12x")
        bare = self.root / "bare"
        bare.mkdir()
        (bare / "flashinfer").symlink_to(REPO / "flashinfer")
        self.path[0] = bare

    def torch(self, cuda: str | None, gpus: list[tuple[str, tuple[int, int]]], at_import: str = "") -> None:
        code = f"""
{at_import}
from types import SimpleNamespace as N
__version__ = "2.13.0"
version = N(cuda={cuda!r})
GPUS = {gpus!r}
cuda = N(is_available=lambda: bool(GPUS), device_count=lambda: len(GPUS),
         get_device_name=lambda i: GPUS[i][0], get_device_capability=lambda i: GPUS[i][1])
"""
        write_tree(self.root / "site", {"torch/__init__.py": code})

    def vllm(self, version: str = "0.33.0", at_import: str = "", **answers: bool) -> None:
        functions = [f"def {name}(): return {answer}" for name, answer in {**VLLM_ANSWERS, **answers}.items()]
        nvcc = "import shutil\ndef _flashinfer_nvcc_path(): return shutil.which('nvcc')"
        code = "\n".join([at_import, nvcc, *functions])
        write_tree(self.root / "site", {"vllm/__init__.py": "", "vllm/utils/__init__.py": ""})
        write_tree(self.root / "site", {"vllm/utils/flashinfer.py": code})
        self.without_package("vllm")
        self.package("vllm", version)

    def doctor(self, *arguments: str, how: tuple[str, ...] = (str(DOCTOR),), cwd: Path | None = None) -> Result:
        environment = {**self.variables, "PYTHONPATH": ":".join(map(str, self.path))}
        command = [str(self.python), *how, *arguments]
        return subprocess.run(
            command, env=environment, cwd=cwd or self.root, capture_output=True, text=True, timeout=300
        )

    def diagnose(self, timeout: float = 60) -> Diagnosis:
        started = time.monotonic()
        result = self.doctor("--json", "--timeout", str(timeout))
        seconds = time.monotonic() - started
        assert not result.stderr, result.stderr
        return Diagnosis(json.loads(result.stdout), result.returncode, seconds)


@dataclass
class Diagnosis:
    data: dict[str, Any]
    status: int
    seconds: float

    def __getitem__(self, check: str) -> tuple[str, str, str]:
        """``(state, found, remedy)``."""
        (finding,) = (finding for finding in self.data["findings"] if finding["check"] == check)
        return finding["state"], finding["found"], finding["remedy"]

    def states(self) -> dict[str, str]:
        return {finding["check"]: finding["state"] for finding in self.data["findings"]}


__all__ = ["DOCTOR", "GB10", "RTX", "REPO", "UPSTREAM", "Diagnosis", "Machine", "make_environment"]
