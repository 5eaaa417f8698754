# SPDX-License-Identifier: Apache-2.0
"""The doctor asks these questions of the machine, each in a process of its own, since each may hang or crash.

Run as a file, ``python questions.py QUESTION``. Each fact is one line of JSON, written as soon as it is known, so
that what was found before a crash is not lost. Nothing of FlashInfer is imported but by the questions that are about
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.parse
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder, which Python puts first: other programs do not have it on their path

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def ours(name: str) -> Any:
    """A module of this tree's ``flashinfer_sm12x``, for questions that do not import the flashinfer that is found.

    The tree is on ``sys.path`` only meanwhile, so that the question finds the flashinfer that other programs import.
    """
    sys.path.insert(0, TREE)
    try:
        return importlib.import_module(f"flashinfer_sm12x.{name}")
    finally:
        sys.path.remove(TREE)


MARK = "sm12x-fact "
"""The start of a line with a fact; libraries print lines of their own."""

VLLM_QUESTIONS = (
    "has_flashinfer_cubin",
    "has_flashinfer",
    "has_flashinfer_cutlass_fused_moe",
    "has_flashinfer_autotune_v2",
    "has_nvidia_artifactory",
)
"""Functions of ``vllm.utils.flashinfer``; the last one asks a server, unless the plugin knows better."""

SOURCE = """\
#include <curand_kernel.h>
#if __has_include(<cuda/std/version>)
#include <cuda/std/version>
#endif
__global__ void sm12x_doctor(int* out) { *out = 12; }
extern "C" int sm12x_doctor_loads() { return 12; }
"""
"""A source that includes headers of upstream's modules: cuRAND's, which the sampler needs, and those of CUDA's C++
library, which checks that compiler and headers are of one release."""

SUSPECTS = (
    "CUDA_HOME CUDA_PATH FLASHINFER_NVCC FLASHINFER_NVCC_LAUNCHER CC CXX NVCC_CCBIN NVCC_PREPEND_FLAGS "
    "NVCC_APPEND_FLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH LD_LIBRARY_PATH LD_PRELOAD "
    "FLASHINFER_EXTRA_CUDAFLAGS FLASHINFER_EXTRA_LDFLAGS FLASHINFER_CUDA_ARCH_LIST"
).split()
"""Variables that are removed one at a time to try a failed build again."""


PYTHONS = ("PYTHONOPTIMIZE", "PYTHONWARNINGS", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables that are removed one at a time to try a failed import again: -OO, for example, removes docstrings that
upstream's code edits."""


def tell(**facts: Any) -> None:
    """Write facts down."""
    for name, value in facts.items():
        print(f"\n{MARK}{json.dumps({name: value}, default=str)}", flush=True)


def ask_path() -> None:
    """The flashinfer that Python finds, the reason if it is upstream's package alone, and vLLM's version and
    plugins."""
    spec = importlib.util.find_spec("flashinfer")
    tell(found=None if spec is None else {"file": spec.origin, "folders": list(spec.submodule_search_locations or ())})
    version = ours("versions")
    tell(aside=version.upstream_alone(), wheel=version.tested_wheel() is not None)
    tell(vllm=next((found.version for found in importlib.metadata.distributions(name="vllm")), None))
    tell(plugins=[point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")])


def ask_import() -> None:
    """The versions that ``import flashinfer`` gives; if it fails, the variable that is to blame."""
    try:
        import flashinfer
    except BaseException:
        for name in filter(os.environ.get, PYTHONS):
            without = {other: text for other, text in os.environ.items() if other != name}
            again = [sys.executable, "-c", "import flashinfer"]
            if subprocess.run(again, env=without, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
                tell(blame=name)
                break
        raise
    tell(version=flashinfer.__version__, fork=getattr(flashinfer, "__fork_version__", None))


PROGRAMS = ("apt-get", "dmesg", "grep", "head", "mkdir", "nvidia-smi", "ps", "rm", "sudo")
"""The programs that fixes run, except for pip and uv, which :func:`ask_installer` looks for."""

REPLACED = (
    "vllm",
    "torch",
    "torchaudio",
    "torchvision",
    "triton",
    "xgrammar",
    "compressed-tensors",
    "transformers",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-sm12x",
    "ninja",
)
"""The packages that fixes install, and those of vLLM's requirements that people build themselves."""

PUBLISHED_LABEL = r"cpu|cu\d+|xpu|rocm[\d.]+"
"""Local version labels of wheels that PyTorch and vLLM publish."""


def ask_installer() -> None:
    """The tools that can install packages for this Python, and the packages that no index gave it."""
    found = {name: importlib.util.find_spec(name) is not None for name in ("pip", "ensurepip")}
    own = sys.prefix == sys.base_prefix
    marker = Path(sysconfig.get_path("stdlib", sysconfig.get_default_scheme()), "EXTERNALLY-MANAGED")
    tell(**found, uv=shutil.which("uv"), managed=own and marker.is_file())
    builds = {name: own_build(name) for name in REPLACED}
    tell(builds={name: build for name, build in builds.items() if build is not None})


def own_build(name: str) -> dict[str, str] | None:
    """Version, kind and source of a package if it is a build of the user's (or of an image's maker); None if an index
    gave it, or if it is not installed."""
    found = next(iter(importlib.metadata.distributions(name=name)), None)
    if found is None:
        # A source tree on PYTHONPATH. flashinfer's importer is this fork, so its file tells nothing.
        spec = None if name.startswith("flashinfer") else importlib.util.find_spec(name.replace("-", "_"))
        if spec is None or spec.origin is None:
            return None
        return {"version": "without a version", "kind": "a source tree", "source": os.path.dirname(spec.origin)}
    version, kind, source = found.version, "", ""
    about: Any = {}
    with contextlib.suppress(ValueError):
        about = json.loads(found.read_text("direct_url.json") or "{}")
    if isinstance(about, dict) and about:
        folder = about.get("dir_info")
        editable = isinstance(folder, dict) and folder.get("editable")
        kind = "an editable installation" if editable else "built from source"
        if "archive_info" in about:
            kind = "a wheel that no index gave"
        source = urllib.parse.unquote(str(about.get("url", "")).removeprefix("file://"))
    elif found.read_text("RECORD") is None and found.read_text("SOURCES.txt") is not None:
        kind, source = "a source tree", str(found.locate_file(""))
    elif re.search(r"\.?dev\d*", version.partition("+")[0]):
        kind = "a nightly or development build"
    elif (label := version.partition("+")[2]) and not re.fullmatch(PUBLISHED_LABEL, label):
        kind = "a build with a local version"
    return {"version": version, "kind": kind, "source": source} if kind else None


def ask_system() -> None:
    """The system that the driver belongs to, and the programs that fixes run."""
    tell(guest=guest(), programs=[name for name in PROGRAMS if shutil.which(name) is not None])


def guest(root: Path = Path("/")) -> str | None:
    """``WSL2``, ``container`` or ``VM`` if the driver is another system's; None on a machine of its own.

    systemd's program tells; without it, traces that WSL2 and containers leave. A VM without that program is not
    recognized.
    """
    if (program := shutil.which("systemd-detect-virt")) is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            kind = subprocess.run([program], capture_output=True, text=True, timeout=10).stdout.strip()
            if kind and kind != "none":
                return {"wsl": "WSL2"}.get(kind) or ("container" if kind in CONTAINERS else "VM")
            if kind:
                return None
    with contextlib.suppress(OSError):
        if "microsoft" in (root / "proc/sys/kernel/osrelease").read_text().lower():
            return "WSL2"
    if "container" in os.environ or any((root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return "container"
    return None


CONTAINERS = (
    "docker",
    "podman",
    "lxc",
    "lxc-libvirt",
    "systemd-nspawn",
    "rkt",
    "openvz",
    "proot",
    "pouch",
    "container-other",
)


def ask_build() -> None:
    """Whether a few lines of CUDA can be compiled, linked and loaded as this fork's and upstream's modules are; if not,
    the variable without which they can."""
    error = _try_build()
    tell(error=error)
    if error is None:
        return
    for name in filter(os.environ.get, SUSPECTS):
        text = os.environ.pop(name)
        if _try_build() is None:
            tell(blame=name)
            return
        os.environ[name] = text
    if (program := _silent(error)) is not None:
        tell(silent=program)
        return
    for parent in filter(os.path.isabs, (os.path.expanduser("~"), "/var/tmp", "/tmp")):
        folder = os.path.join(parent, f"flashinfer-{os.geteuid()}")
        made = not os.path.exists(folder)
        os.environ["FLASHINFER_WORKSPACE_BASE"] = folder
        works = _try_build() is None
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        if works:
            tell(elsewhere=folder)
            return


def _try_build() -> str | None:
    """Why it failed, or None."""
    engine = ours("build.engine")
    variables = ours("variables")
    toolchain = ours("build.toolchain")
    toolchain.compiler_banner.cache_clear()
    engine.compiler_identity.cache_clear()
    folder = None
    try:
        folder = _cache() / f"doctor-{os.getpid()}"
        tell(scratch=folder)
        toolkit = toolchain.discover()
        tell(nvcc=toolkit.nvcc, origin=toolkit.origin, version=str(toolkit.version), passed_over=toolkit.passed_over)
        targets = _targets()
        toolchain.require_architectures(toolkit, [(int(major), minor) for major, minor in targets])
        codes = [f"-gencode=arch=compute_{a}{b},code=sm_{a}{b}" for a, b in targets]
        with engine.module_lock(folder / "doctor.lock") as lock:
            source = folder / "doctor.cu"
            engine.write_atomically(source, SOURCE)
            includes = [f"-I{path}" for path in _upstreams_cccl()]
            includes += [word for path in toolkit.include_dirs for word in ("-isystem", str(path))]
            extra = variables.read("FLASHINFER_EXTRA_CUDAFLAGS")
            flags = ["-std=c++17", "--compiler-options=-fPIC", *codes, *includes, *extra]
            step = engine.compile_step("doctor.o", source, toolkit.nvcc, flags)
            runtime = toolkit.find_library("cudart")
            links = ("-shared", str(runtime), f"-Wl,-rpath,{runtime.parent}", "-Wl,-z,now")
            links += variables.read("FLASHINFER_EXTRA_LDFLAGS")
            plan = engine.ModulePlan("doctor", folder, folder / "doctor.lock", (step,), engine.host_compiler(), links)
            engine.build(plan, max_jobs=1, lock=lock)
            if ctypes.CDLL(str(plan.library)).sm12x_doctor_loads() != 12:
                return "the library that was compiled does not do what its source says"
    except (OSError, RuntimeError, ValueError, AttributeError) as error:
        return str(error).partition("\nLog: ")[0]  # which is removed
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return None


def _targets() -> list[tuple[str, str]]:
    """The architectures to compile for: the list's, else those of the GPUs that the driver tells of and that are
    served."""
    listed = re.findall(r"\b(\d+)\.(\d)([af]?)", os.environ.get("FLASHINFER_CUDA_ARCH_LIST", ""))
    if not listed and (program := shutil.which("nvidia-smi")) is not None:
        query = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            output = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=20).stdout
            listed = re.findall(r"\b(12)\.(\d)()", output)
    targets = [(major, minor + (suffix or "a" * (int(major) >= 9))) for major, minor, suffix in listed]
    return list(dict.fromkeys(targets)) or [("12", "0a")]


def _silent(error: str) -> str | None:
    """The program at fault where a build failed without a word: a host compiler, which nvcc runs, that fails so by
    itself, else nvcc."""
    if not re.search(r": exit status \d+$|it ended without a word", error):
        return None
    for name in (os.environ.get("CC") or os.environ.get("NVCC_CCBIN") or "g++", os.environ.get("CXX") or "c++"):
        command = [name, "-x", "c++", "-fsyntax-only", "/dev/null"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
            if done.returncode and not (done.stdout + done.stderr).strip():
                return shutil.which(name) or name
    return str(ours("build.toolchain").discover().nvcc)


def _upstreams_cccl() -> list[Path]:
    """The folder of CUDA's C++ library in upstream's wheel; empty if there is no wheel."""
    wheels = importlib.metadata.distributions(name="flashinfer-python")
    folders = [Path(str(wheel.locate_file("flashinfer/data/cccl/libcudacxx/include"))) for wheel in wheels]
    return [folder for folder in folders if folder.is_dir()][:1]


def _cache() -> Path:
    """The folder in which ``jit/env.py`` keeps the cache.

    Raises:
        ValueError: FLASHINFER_WORKSPACE_BASE has a bad value, or there is neither that nor a home folder.
    """
    variables = ours("variables")
    base = variables.read("FLASHINFER_WORKSPACE_BASE")
    if not base and not os.path.isabs(base := os.path.expanduser("~")):
        raise ValueError("there is neither FLASHINFER_WORKSPACE_BASE nor a home folder")
    return Path(base).absolute() / ".cache" / "flashinfer"


def ask_gpus() -> None:
    """The driver's word on the GPUs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    query = [program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, errors="replace")
    if result.returncode:
        tell(error=" ".join((result.stderr + result.stdout).strip().splitlines()[:2]))
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines() if line.count(",") == 2]
    tell(gpus=[dict(zip(("name", "capability", "driver"), row, strict=True)) for row in rows])


def ask_log() -> None:
    """The driver's complaints in the kernel's log since the machine started."""
    for command in (["dmesg"], ["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"]):
        with contextlib.suppress(OSError):
            result = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if result.returncode == 0 and result.stdout.strip():
                lines = re.findall(r".*NVRM: .*(?:Xid|NV_ERR|Out of memory|rm_init_adapter failed).*", result.stdout)
                tell(lines=[line[-300:] for line in lines[-3:]], count=len(lines))
                return


def ask_torch() -> None:
    """torch's word on the GPUs."""
    import torch

    tell(torch=torch.__version__, cuda=torch.version.cuda)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    capabilities = [torch.cuda.get_device_capability(index) for index in devices]
    names = [torch.cuda.get_device_name(index) for index in devices]
    tell(gpus=[{"name": name, "capability": f"{a}.{b}"} for name, (a, b) in zip(names, capabilities, strict=True)])


def ask_folder() -> None:
    """Room for the cache."""
    folder = _cache()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    tell(free_bytes=shutil.disk_usage(there).free, folder=folder)


def ask_modules() -> None:
    """The architectures that modules are compiled for, and which of the family's modules are prebuilt or built."""
    from flashinfer.jit import core
    from flashinfer.jit import env as jit_env
    from flashinfer.jit.sm12x import modules, prebuilt
    from flashinfer.sm12x.instances import MOE_WEIGHTS
    from flashinfer_sm12x.build import engine

    known = sorted(core.current_compilation_context.TARGET_CUDA_ARCHS)
    tell(workspace=jit_env.FLASHINFER_WORKSPACE_DIR, architectures=[f"{major}.{minor}" for major, minor in known])
    try:
        probed = {kind: modules.probed_sum_bits(kind) for kind in modules.MMA_KINDS}
        tell(probed_sum_bits=probed, narrowest_sum=modules.NARROWEST_SUM)
    except ValueError as error:
        tell(probe_error=str(error))
    try:
        by_default = modules.gen_fused_moe_module(MOE_WEIGHTS[0]).name
        for spec in modules.gen_operator_modules():
            library, passed_over = prebuilt.find(spec)
            built = library is not None or engine.find_library(spec.plan) is not None
            stale = "" if built else "it is not built yet"
            fact = {"prebuilt": library is not None, "stale": stale, "passed_over": passed_over}
            fact["by_default"] = spec.name == by_default  # sm12x-build without options builds it
            tell(**{f"module {spec.name}": fact})
    except (RuntimeError, ValueError) as error:
        tell(error=str(error))


def ask_memory() -> None:
    """Memory of the host: free, and all."""
    available = ours("build.jobs").available_memory()
    tell(available=available, total=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def ask_vllm(additional_config: str = "{}") -> None:
    """The functions of FlashInfer that vLLM finds once it has loaded its plugins, and the plugin's settings."""
    with contextlib.suppress(ModuleNotFoundError):
        from flashinfer_sm12x import files
        from flashinfer_sm12x.vllm import settings

        expected = """an object such as {"sm12x": "spark"}"""
        try:
            given = files.json_object(additional_config, f"--additional-config {additional_config[:200]!r}", expected)
            tell(settings=vars(settings.resolve(given)))
        except ValueError as error:
            tell(settings_error=str(error))
    found = importlib.util.find_spec("vllm") is not None
    tell(found=found)
    if not found:
        return
    from vllm.plugins import load_general_plugins

    try:
        load_general_plugins()
    finally:
        tell(outcome=getattr(sys.modules.get("flashinfer_sm12x.vllm"), "outcome", None))
    from vllm.envs import environment_variables

    tell(unread=sorted(name for name in os.environ if name.startswith("VLLM_") and name not in environment_variables))
    from vllm.utils import flashinfer as seen

    tell(nvcc=seen._flashinfer_nvcc_path(), ninja=shutil.which("ninja"))
    for name in VLLM_QUESTIONS:
        tell(**{name: bool(getattr(seen, name)())})


QUESTIONS = tuple(name.removeprefix("ask_") for name in globals() if name.startswith("ask_"))

if __name__ == "__main__":
    try:
        if sys.argv[1].startswith("probe-"):
            parts = importlib.import_module("flashinfer_sm12x.doctor.probe.parts")
            parts.run(sys.argv[1].removeprefix("probe-"), tell)
        else:
            globals()[f"ask_{sys.argv[1]}"](*sys.argv[2:])
    except Exception as error:
        tell(failed=f"{type(error).__name__}: {error}")
