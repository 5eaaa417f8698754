# SPDX-License-Identifier: Apache-2.0
"""Make wheels of this fork's compiled modules: ``flashinfer_sm12x_kernels-<version>-py3-none-<platform>.whl``.

Each holds the modules of ``modules.gen_shipped_modules``, for each architecture a library of its own,
and the manifest by which ``flashinfer.jit.sm12x.prebuilt`` knows whether they are what a build would make. For another
processor than this machine's, nvcc's host compiler is the system's cross compiler (Debian, Ubuntu: ``apt-get install
g++-aarch64-linux-gnu``) and CUDA's runtime, to link against, comes from PyPI.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "kernels"
PROCESSORS = ("x86_64", "aarch64")
ARCHITECTURES = ("12.0f", "12.1a")
OLDEST_SYSTEM = {"GLIBC": (2, 31), "GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12)}
"""Symbol versions of glibc 2.31 and GCC 9.3 (Debian 11, Ubuntu 20.04): what the wheels' platform tag promises."""

MADE = 315532800
"""The time that all files of a wheel bear, the first that a zip file can: the same kernels make the same bytes."""

HOST_COMPILERS = ("g++-12", "g++-11", "g++")
"""In this order: what GCC 13 makes of C++'s <iostream>, which TVM-FFI includes, needs the libstdc++ of GCC 13."""

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "flashinfer-sm12x-kernels"
version = "{version}"
description = "Compiled kernels of flashinfer-sm12x, which loads them instead of compiling"
license = "Apache-2.0"
license-files = ["LICENSE", "NOTICE"]

[tool.setuptools]
packages = ["{package}"]
package-data.{package} = ["manifest.json", "*.so"]
"""

COMPILE = "--compile"


class WheelError(RuntimeError):
    """A wheel cannot be made; the text says what is missing."""


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == [COMPILE]:
        print(json.dumps(compile_modules(virtual=arguments[1:] == ["virtual"])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processor", nargs="+", choices=PROCESSORS, default=PROCESSORS)
    parser.add_argument("--architecture", nargs="+", default=ARCHITECTURES, metavar="12.1a")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="Folder for the wheels (dist)")
    parser.add_argument(
        "--virtual", action="store_true", help="Add fused_moe_120 for 12.1a with its PTX, for the virtual SM121"
    )
    options = parser.parse_args(arguments)
    try:
        # All environments come first: what one lacks is told before another has been compiled for minutes.
        environments = {each: build_environment(each, WORK / each) for each in options.processor}
        wheels = [
            make_wheel(processor, environment, options.architecture, options.output, options.virtual)
            for processor, environment in environments.items()
        ]
    except WheelError as error:
        print(f"kernels_wheel.py: {error}", file=sys.stderr)
        return 1
    requirement = requirement_of(wheels)
    (options.output / "kernels.txt").write_text(requirement, encoding="utf-8")
    print(requirement, end="")
    return 0


def requirement_of(wheels: Sequence[Path]) -> str:
    """A line for pip's ``--require-hashes -r``: the wheels' distribution, and the hash of each."""
    name, version = wheels[0].name.split("-")[:2]
    hashes = [f"--hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" for wheel in wheels]
    return f"{name}=={version} {' '.join(hashes)}\n"


def make_wheel(
    processor: str, environment: Mapping[str, str], architectures: Sequence[str], output: Path, virtual: bool
) -> Path:
    """Compile in :func:`build_environment`'s variables, and write the wheel for a processor into ``output``."""
    started = time.monotonic()
    work = WORK / processor
    package = work / "stage" / "flashinfer_sm12x_kernels"
    shutil.rmtree(package.parent, ignore_errors=True)
    package.mkdir(parents=True)
    manifest: dict[str, Any] = {}
    for architecture in architectures:
        command = [sys.executable, __file__, COMPILE, *(["virtual"] if virtual and architecture == "12.1a" else [])]
        variables = {**environment, "FLASHINFER_CUDA_ARCH_LIST": architecture}
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise WheelError(f"the modules for {architecture} on {processor} do not build")
        about = json.loads(done.stdout.splitlines()[-1])
        for module in about["modules"]:
            take_library(module, package, architecture.replace(".", ""))
        modules = manifest.get("modules", []) + about["modules"]
        manifest = {**about, "platform": f"linux-{processor}", "modules": modules}
    (package / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    about = (
        f'"""Compiled kernels of flashinfer-sm12x {manifest["fork"]}; its flashinfer.jit.sm12x.prebuilt loads them."""'
    )
    (package / "__init__.py").write_text(f"# SPDX-License-Identifier: Apache-2.0\n{about}\n", encoding="utf-8")
    wheel = pack(package, manifest["fork"], processor, output)
    size = wheel.stat().st_size / (1 << 20)
    print(f"{wheel}: {len(manifest['modules'])} libraries, {size:.1f} MiB, {time.monotonic() - started:.0f} s")
    return wheel


def compile_modules(virtual: bool) -> dict[str, Any]:
    """Build the modules for the architecture that the environment names.

    Returns:
        The manifest, with each library's path on this machine.
    """
    from flashinfer.jit import cpp_ext
    from flashinfer.jit.sm12x import modules, prebuilt
    from flashinfer_sm12x.versions import __fork_version__

    cuda = cpp_ext.find_toolkit().version
    specs = modules.gen_shipped_modules()
    if virtual:
        os.environ[modules.EMBED_PTX_VARIABLE] = "1"
        specs.append(modules.gen_fused_moe_module())
    for spec in specs:
        spec.for_wheel = True
        report = spec.build(need_lock=True)
        print(f"{spec.name}: {len(report.compiled)} compiled, {report.cpu_seconds:.0f} s of CPU", file=sys.stderr)
    about = {"format": prebuilt.FORMAT, "fork": __fork_version__, "tvm_ffi": prebuilt.ffi_series(), "cuda": str(cuda)}
    return {**about, "modules": [entry_of(spec) for spec in specs]}


def entry_of(spec: Any) -> dict[str, Any]:
    """The manifest's entry of a module that has been built; ``library`` is where it lies on this machine."""
    from flashinfer.jit.sm12x import prebuilt
    from flashinfer_sm12x.build import build_hash, engine

    library = engine.find_library(spec.plan)
    if library is None:
        raise WheelError(f"{spec.name} changed while it was built: the library for what is here now is not there")
    return {
        "name": spec.name,
        "architectures": prebuilt.architecture_list(spec.architectures),
        "library": str(library),
        "sha256": build_hash.hash_file(library),
        "key": spec.build_hash,
    }


def take_library(module: dict[str, Any], package: Path, architecture: str) -> None:
    """Copy a library into the package, after a look at what it needs of a system."""
    library = Path(module["library"])
    for prefix, version in needed_versions(library).items():
        if version > OLDEST_SYSTEM[prefix]:
            needed = ".".join(map(str, version))
            raise WheelError(
                f"{library} needs {prefix}_{needed}, newer than the wheel's tag says: use an older g++. Debian, "
                "Ubuntu: apt-get install g++-12, for another processor g++-12-aarch64-linux-gnu"
            )
    module["library"] = f"{module['name']}-{architecture}.so"
    shutil.copyfile(library, package / module["library"])


def needed_versions(library: Path) -> dict[str, tuple[int, ...]]:
    """The newest symbol version of each of :data:`OLDEST_SYSTEM`'s kinds that a library asks for."""
    listing = subprocess.run(
        ["readelf", "--version-info", "--wide", library], capture_output=True, text=True, check=True
    )
    newest: dict[str, tuple[int, ...]] = {}
    for prefix, number in re.findall(rf"Name: ({'|'.join(OLDEST_SYSTEM)})_([\d.]+)", listing.stdout):
        version = tuple(map(int, number.split(".")))
        newest[prefix] = max(version, newest.get(prefix, version))
    return newest


def build_environment(processor: str, work: Path) -> Mapping[str, str]:
    """Variables under which modules are built for a processor, none of the user's for FlashInfer among them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_")}
    environment |= {"PYTHONPATH": str(ROOT), "FLASHINFER_WORKSPACE_BASE": str(work)}
    native = processor == platform.machine()
    if native and {"CC", "CXX"} & environment.keys():
        return environment
    triple = f"{processor.replace('_', '-')}-linux-gnu"
    compiler = next(filter(shutil.which, (name if native else f"{triple}-{name}" for name in HOST_COMPILERS)), None)
    if compiler is not None:
        environment |= {"CC": compiler, "CXX": compiler}
    elif not native:
        raise WheelError(
            f"there is no {triple}-g++, which compiles the host's part for {processor}. Debian, Ubuntu: apt-get "
            f"install g++-{triple}; or leave that processor out with --processor"
        )
    return environment if native else environment | {"CUDA_HOME": str(cross_toolkit(processor, work))}


def cross_toolkit(processor: str, work: Path) -> Path:
    """This machine's CUDA compiler with another processor's runtime, laid out as nvcc looks for it."""
    sys.path.insert(0, str(ROOT))
    from flashinfer_sm12x.build import toolchain

    toolkit = toolchain.discover()
    if toolkit.version.major < 13:
        raise WheelError(
            f"{toolkit.nvcc} is CUDA {toolkit.version}; the runtime for {processor} is taken for 13 and later"
        )
    root = work / "toolkit"
    shutil.rmtree(root, ignore_errors=True)
    target = root / "targets" / f"{processor}-linux"
    for folder in (root / "bin", root / "lib", target):
        folder.mkdir(parents=True)
    for program in toolkit.nvcc.resolve().parent.iterdir():
        (root / "bin" / program.name).symlink_to(program)  # one by one: nvcc goes up from the folder that it is in
    for name in ("include", "nvvm"):
        (root / name).symlink_to((toolkit.root / name).resolve())
    for name in ("include", "lib"):
        (target / name).symlink_to(root / name)
    with zipfile.ZipFile(download(f"nvidia-cuda-runtime=={toolkit.version}.*", processor, work / "runtime")) as wheel:
        for name in wheel.namelist():
            if re.search(r"/lib/libcud[^/]*$", name):
                (root / "lib" / Path(name).name).write_bytes(wheel.read(name))
    return root


def download(requirement: str, processor: str, folder: Path) -> Path:
    """A wheel from PyPI for another processor; kept in ``folder``."""
    if not list(folder.glob("*.whl")):
        options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--platform=manylinux2014_{processor}"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
        if subprocess.run(command).returncode:
            raise WheelError(f"pip cannot download {requirement} for {processor}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def pack(package: Path, version: str, processor: str, output: Path) -> Path:
    """The folder as a wheel in ``output``."""
    stage = package.parent
    tag = f"manylinux_{'_'.join(map(str, OLDEST_SYSTEM['GLIBC']))}_{processor}"
    for name in ("LICENSE", "NOTICE"):
        shutil.copyfile(ROOT / name, stage / name)
    (stage / "pyproject.toml").write_text(PROJECT.format(package=package.name, version=version), encoding="utf-8")
    (stage / "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = {tag}\npython_tag = py3\n", encoding="utf-8")
    options = ["--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={output}"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(MADE)}
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(stage)], check=True, env=environment)
    return output / f"{package.name}-{version}-py3-none-{tag}.whl"


if __name__ == "__main__":
    print = functools.partial(print, flush=True)  # between the lines of the processes that compile
    sys.exit(main(sys.argv[1:]))
