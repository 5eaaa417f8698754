# SPDX-License-Identifier: Apache-2.0
"""The wheels of prebuilt kernels, whole: made, compared, installed where there is no compiler, run, and run on aarch64.

``make test-kernels``; not part of ``make test``, since compiling for two processors and two architectures takes a
quarter of an hour of two cores the first time. Needs what docs/evidence.md lists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi

from flashinfer_sm12x.build import inspect_sass
from flashinfer_sm12x.versions import __fork_version__

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
WORK = REPO / "build" / "kernels"
PACKAGE = "flashinfer_sm12x_kernels"
SYSROOT = Path("/usr/aarch64-linux-gnu")
PROCESSORS = ("x86_64", "aarch64")
VLLM_TVM_FFI = "0.1.11"
"""The version that vLLM 0.33.0 pins: older than the one whose headers the libraries may have been compiled with."""

SHIPPED = [
    (folder, name)
    for folder in ("120f", "121a")
    for name in (
        "decode_sm12x",
        *(f"dense_{form}_sm12x" for form in ("mxfp4", "mxfp8", "mxint8", "mxfp6", "nvfp4")),
        "fused_moe_120",
        "fused_moe_120_stream_bf16_m8_w3",
        "fused_moe_120_stream_mxfp8_as_bf16_m8_w3",
        "gemm_mxfp4_sm12x",
        "router_sm12x",
    )
]


def run(*command: Any, **options: Any) -> subprocess.CompletedProcess:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done


def say(text: str) -> None:
    print(text, flush=True)


@pytest.fixture(scope="session")
def wheels() -> dict[str, Path]:
    """Processor -> wheel, with the module that the virtual SM121 runs."""
    output = WORK / "wheels"
    done = subprocess.run(
        [sys.executable, str(REPO / "tools" / "kernels_wheel.py"), "--virtual", "--output", str(output)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    say(done.stdout.strip())
    found = {name: list(output.glob(f"{PACKAGE}-{__fork_version__}-py3-none-*_{name}.whl")) for name in PROCESSORS}
    return {name: paths[0] for name, paths in found.items()}


@pytest.fixture(scope="session")
def unpacked(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for processor, wheel in wheels.items():
        folder = tmp_path_factory.mktemp(processor)
        zipfile.ZipFile(wheel).extractall(folder)
        folders[processor] = folder / PACKAGE
    return folders


def test_both_hold_the_same_modules(wheels: dict[str, Path], unpacked: dict[str, Path]) -> None:
    made_from = []
    for processor, package in unpacked.items():
        manifest = json.loads((package / "manifest.json").read_text())
        assert manifest["platform"] == f"linux-{processor}"
        # Wheels for two processors differ only in the libraries' machine code.
        made_from.append([{**module, "sha256": ""} for module in manifest["modules"]])
        libraries = {tuple(path.stem.rsplit("-", 1)[::-1]): path for path in package.glob("*.so")}
        assert sorted(libraries) == sorted([*SHIPPED, ("121a", "fused_moe_120_ptx")])
        shipped = sum(libraries[each].stat().st_size for each in SHIPPED) / (1 << 20)
        say(
            f"{processor}: wheel {wheels[processor].stat().st_size / (1 << 20):.1f} MiB, shipped libraries "
            f"{shipped:.1f} MiB"
        )
        for library in libraries.values():
            header = run("readelf", "--file-header", library).stdout
            assert {"x86_64": "X86-64", "aarch64": "AArch64"}[processor] in header
            dynamic = run("readelf", "--dynamic", library).stdout
            assert re.findall(r"RUNPATH.*\[(.*)\]", dynamic) == ["$ORIGIN/../nvidia/cu13/lib:/usr/local/cuda/lib64"]
    assert made_from[0] == made_from[1]


def test_the_same_wheels_are_made_again(wheels: dict[str, Path]) -> None:
    before = {wheel: wheel.read_bytes() for wheel in wheels.values()}
    options = ["--virtual", "--output", str(WORK / "wheels")]
    for processor in PROCESSORS:
        shutil.rmtree(WORK / processor / ".cache")  # so that all is compiled again
    run(sys.executable, REPO / "tools" / "kernels_wheel.py", *options)
    for wheel, content in before.items():
        assert wheel.read_bytes() == content


@pytest.fixture(scope="session")
def layer(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one layer's call and output, by the x86-64 module in an environment that can compile nothing."""
    folder, started = tmp_path_factory.mktemp("layer"), time.monotonic()
    env = folder / "env"
    run(sys.executable, "-m", "venv", env)
    wanted = os.environ.get("TORCH", f"torch=={torch.__version__}")
    packages = [wanted, f"apache-tvm-ffi=={VLLM_TVM_FFI}", "-r", REPO / "requirements.txt", wheels["x86_64"]]
    run(env / "bin" / "python", "-m", "pip", "install", "--quiet", *packages)
    say(f"environment: {time.monotonic() - started:.0f} s")
    (site,) = env.glob("lib/python*/site-packages")
    variables = {
        "PATH": "/usr/bin:/bin",  # the emulator, which is built, asks make whether it is
        "PYTHONPATH": f"{REPO}:{REPO / 'tests'}",
        "CUDA_HOME": "/nonexistent",
        "FLASHINFER_DISABLE_JIT": "1",
        "FLASHINFER_WORKSPACE_BASE": str(folder / "cache"),
    }
    done = run(env / "bin" / "python", HERE / "one_layer.py", folder, site, env=variables)
    say(done.stdout.strip())
    return folder


def test_a_layer_runs_where_nothing_can_be_compiled(layer: Path) -> None:
    assert len(json.loads((layer / "launches.json").read_text())) >= 3


def test_uninstalling_leaves_nothing(layer: Path) -> None:
    (site,) = layer.glob("env/lib/python*/site-packages")
    assert list(site.glob(f"{PACKAGE}*"))
    run(layer / "env" / "bin" / "python", "-m", "pip", "uninstall", "--yes", "flashinfer-sm12x-kernels")
    assert list(site.glob(f"{PACKAGE}*")) == []


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``emulated(arguments, library folders)``: replay.cpp on an emulated aarch64 processor."""
    missing = [name for name in ("aarch64-linux-gnu-g++", "qemu-aarch64") if shutil.which(name) is None]
    if missing:
        pytest.fail(f"there is no {' and no '.join(missing)}: apt-get install g++-aarch64-linux-gnu qemu-user")
    folder = tmp_path_factory.mktemp("aarch64")
    include = Path(tvm_ffi.__file__).parent / "include"
    includes = ["-I", include, "-I", REPO / "emulator" / "src" / "shim"]
    run("aarch64-linux-gnu-g++", "-std=c++17", "-O1", *includes, HERE / "replay.cpp", "-o", folder / "replay")
    tag = f"{sys.version_info.major}{sys.version_info.minor}"
    platforms = ["--platform=manylinux_2_28_aarch64", "--platform=manylinux2014_aarch64", f"--python-version={tag}"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms]
    run(*pip, "--dest", folder, f"apache-tvm-ffi=={VLLM_TVM_FFI}")
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "site")
    tvm_library = folder / "site" / "tvm_ffi" / "lib" / "libtvm_ffi.so"

    def run_there(*arguments: Any, libraries: Path) -> str:
        machine = ["qemu-aarch64", "-L", SYSROOT, "-E", f"LD_LIBRARY_PATH={libraries}"]
        return run(*machine, folder / "replay", tvm_library, *arguments).stdout

    return run_there


@pytest.mark.parametrize(("folder", "name"), SHIPPED)
def test_it_loads_on_aarch64(unpacked: dict[str, Path], emulated: Any, folder: str, name: str) -> None:
    """It loads with the CUDA runtime that it was linked against, and without a driver."""
    library = unpacked["aarch64"] / f"{name}-{folder}.so"
    assert emulated(library, libraries=WORK / "aarch64" / "toolkit" / "lib") == f"loaded {library}\n"


def test_the_layer_is_the_same_on_aarch64(
    unpacked: dict[str, Path], emulated: Any, layer: Path, tmp_path: Path
) -> None:
    """The aarch64 launcher, over an emulator of the GPU that is compiled for aarch64, on an emulator of that."""
    build = REPO / "emulator" / "build" / "aarch64"
    run("make", "-C", REPO / "emulator", "CXX=aarch64-linux-gnu-g++", "BUILD=build/aarch64", "-j2")
    module = unpacked["aarch64"] / "fused_moe_120_ptx-121a.so"
    started = time.monotonic()
    lines = emulated(module, layer / "call", tmp_path / "output", libraries=f"{build / 'shim'}:{build}").splitlines()
    launches = json.loads(lines[-1])
    assert [[each["kernel"], each["counters"]["warp_instructions"]] for each in launches] == json.loads(
        (layer / "launches.json").read_text()
    )
    assert (tmp_path / "output").read_bytes() == (layer / "output").read_bytes()
    say(f"the layer on aarch64: {len(launches)} launches, bitwise as on x86-64, {time.monotonic() - started:.0f} s")


@pytest.mark.parametrize(("folder", "name"), SHIPPED)
def test_the_device_code_is_the_same(unpacked: dict[str, Path], folder: str, name: str, tmp_path: Path) -> None:
    cubins, exported = [], []
    for processor, package in unpacked.items():
        library = package / f"{name}-{folder}.so"
        cubins.append(extracted_cubins(library, tmp_path / processor))
        symbols = run("readelf", "--dyn-syms", "--wide", library).stdout
        exported.append(sorted(re.findall(r"__tvm_ffi_(\w+)", symbols)))
    assert exported[0] == exported[1] != []
    assert cubins[0] == cubins[1] != []
    kernels = inspect_sass.inspect(unpacked["aarch64"] / f"{name}-{folder}.so")
    assert {kernel.architecture for kernel in kernels} == {f"sm_{folder}"}
    say(
        f"{folder}/{name}: {len(cubins[0])} cubins, equal byte by byte; {len(kernels)} kernels, "
        f"{sum(kernel.block_scaled_mmas for kernel in kernels)} block-scaled MMAs; exports {', '.join(exported[0])}"
    )


def extracted_cubins(library: Path, folder: Path) -> list[bytes]:
    """The cubins of a library, in their order."""
    folder.mkdir()
    tool = inspect_sass.find_tool()
    run(tool, "--extract-elf", "all", library, cwd=folder)
    paths = sorted(folder.glob("*.cubin"), key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])
    return [path.read_bytes() for path in paths]
