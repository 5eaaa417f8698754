# SPDX-License-Identifier: Apache-2.0
"""What the doctor asks of the machine, each question in a process of its own, since each may hang or crash.

Run as a file, ``python questions.py QUESTION``. Each fact is one line of JSON, written as soon as it is known, so
that what was found before a crash is not lost. Nothing of FlashInfer is imported but by the questions that are about it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

MARK = "sm12x-fact "
"""What a line with a fact starts with; libraries print lines of their own."""

DISTRIBUTIONS = (
    "flashinfer-python",
    "flashinfer-sm12x",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "vllm",
    "nvidia-cutlass-dsl",
)

VLLM_QUESTIONS = (
    "has_flashinfer_cubin",
    "has_flashinfer",
    "has_flashinfer_moe",
    "has_flashinfer_cutlass_fused_moe",
    "has_flashinfer_trtllm_fused_moe",
    "has_flashinfer_autotune_v2",
    "has_nvidia_artifactory",
)
"""Of ``vllm.utils.flashinfer``; the last one asks a server."""

_PACKAGE = Path(__file__).resolve().parents[1]


def tell(**facts: Any) -> None:
    """Write facts down."""
    for name, value in facts.items():
        print(f"\n{MARK}{json.dumps({name: value}, default=str)}", flush=True)


def ask_path() -> None:
    """Where Python looks, what lies there by the name of flashinfer, and which packages are installed."""
    places = []
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or ".", "flashinfer")
        kind = "fork" if (folder / "_layer.py").is_file() else "plain" if (folder / "__init__.py").is_file() else None
        if kind is None and folder.is_dir():
            kind = "no __init__.py"
        infos = [str(info) for info in Path(entry or ".").glob("flashinfer_sm12x.egg-info")]
        if kind or infos:
            places.append({"entry": entry, "kind": kind, "egg_info": infos})
    tell(places=places)
    spec = importlib.util.find_spec("flashinfer")
    tell(found=None if spec is None else {"file": spec.origin, "folders": list(spec.submodule_search_locations or ())})
    versions: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    tell(versions=versions)
    plugins = {point.name: point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    tell(plugins=plugins)


def ask_import() -> None:
    """What ``import flashinfer`` gives."""
    import flashinfer

    tell(file=flashinfer.__file__, version=getattr(flashinfer, "__version__", None))
    tell(fork_version=getattr(flashinfer, "__fork_version__", None))


def ask_compiler() -> None:
    """The CUDA toolkit that the build takes."""
    toolchain = _by_file("jit/sm12x/toolchain.py")
    tell(pip=toolchain.PIP_COMMAND)
    try:
        toolkit = toolchain.discover()
        tell(nvcc=toolkit.nvcc, origin=toolkit.origin, version=str(toolkit.version))
        tell(libraries=[str(toolkit.find_library("cudart"))])
    except toolchain.ToolchainError as error:
        tell(error=str(error))


def ask_tools() -> None:
    """ninja and the host compiler."""
    for name, program in (("ninja", "ninja"), ("cxx", os.environ.get("CXX", "c++"))):
        path = shutil.which(program)
        tell(**{name: {"program": program, "path": path, "banner": _first_line(path) if path else None}})


def ask_gpus() -> None:
    """The driver's word on the GPUs."""
    program = shutil.which("nvidia-smi")
    tell(nvidia_smi=program)
    if program is None:
        return
    query = [program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True)
    if result.returncode:
        tell(error=(result.stderr + result.stdout).strip().splitlines()[:2])
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines() if line.strip()]
    tell(gpus=[{"name": row[0], "capability": row[1], "driver": row[2]} for row in rows])


def ask_torch() -> None:
    """torch's word on the GPUs, and which CUDA runtime its libraries found."""
    import torch

    tell(torch=torch.__version__, cuda=torch.version.cuda)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    capabilities = [torch.cuda.get_device_capability(index) for index in devices]
    names = [torch.cuda.get_device_name(index) for index in devices]
    tell(gpus=[{"name": name, "capability": f"{a}.{b}"} for name, (a, b) in zip(names, capabilities, strict=True)])
    runtimes, version = {}, ctypes.c_int()
    for library in set(re.findall(r"/.*/libcudart\.so.*", Path("/proc/self/maps").read_text())):
        ctypes.CDLL(library).cudaRuntimeGetVersion(ctypes.byref(version))
        runtimes[library] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    tell(runtimes=runtimes)


def ask_folder() -> None:
    """The cache's folder as the file system has it."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()).absolute()
    folder = base / ".cache" / "flashinfer"
    tell(folder=folder, exists=folder.is_dir())
    there = next(path for path in (folder, *folder.parents) if path.exists())
    tell(nearest=there, owner=there.stat().st_uid, me=os.geteuid(), writable=os.access(there, os.W_OK | os.X_OK))
    tell(free_bytes=shutil.disk_usage(there).free)
    trust = _by_file("jit/sm12x/trust.py")
    try:
        trust.require_trusted(folder)
    except trust.UntrustedCacheError as error:
        tell(untrusted=str(error))


def ask_modules() -> None:
    """What modules are compiled for, and which of the family's are prebuilt, or built and fresh."""
    from flashinfer.jit import core
    from flashinfer.jit import env as jit_env
    from flashinfer.jit.sm12x import build, modules, prebuilt

    tell(workspace=jit_env.FLASHINFER_WORKSPACE_DIR, read_only_cache=getattr(jit_env, "PREBUILT_JIT_DIR", None))
    try:
        tell(
            probed_sum_bits={kind: modules.probed_sum_bits(kind) for kind in modules.MMA_KINDS},
            narrowest_sum=modules.NARROWEST_SUM,
        )
    except ValueError as error:
        tell(probe_error=str(error))
    known = sorted(core.current_compilation_context.TARGET_CUDA_ARCHS)
    tell(architectures=[f"{major}.{minor}" for major, minor in known])
    try:
        specs = modules.gen_operator_modules()
    except (RuntimeError, ValueError) as error:
        tell(error=str(error))
        return
    for spec in specs:
        library, passed_over = prebuilt.find(spec)
        if library is not None:
            what = {"prebuilt": True, "stale": [], "library": library, "bytes": library.stat().st_size}
            tell(**{f"module {spec.name}": what})
            continue
        try:
            plan = spec.plan
        except RuntimeError as error:
            tell(error=str(error))
            return
        built = plan.library.stat() if plan.library.is_file() else None
        why = [reason for reason in [build.why_stale(plan)] if reason]
        what = {"built": built is not None, "stale": why, "library": plan.library, "sources": len(plan.steps)}
        what["passed_over"] = passed_over
        tell(**{f"module {spec.name}": {**what, "bytes": built.st_size if built else 0}})


def ask_memory() -> None:
    """Compilers that a build would run at once."""
    jobs = _by_file("jit/sm12x/jobs.py")
    together, reason = jobs.parallel_jobs()
    tell(available=jobs.available_memory(), reason=reason, jobs=together)


def ask_vllm() -> None:
    """What vLLM finds in FlashInfer."""
    spec = importlib.util.find_spec("vllm")
    tell(found=spec is not None)
    if spec is None:
        return
    from vllm.utils import flashinfer as seen

    path = getattr(seen, "_flashinfer_nvcc_path", None)
    tell(nvcc=path() if path else None, ninja=shutil.which("ninja"))
    for name in VLLM_QUESTIONS:
        question = getattr(seen, name, None)
        tell(**{name: None if question is None else bool(question())})


def _by_file(relative: str) -> Any:
    """A module of this tree that needs nothing else of it, whichever flashinfer is the one that is imported."""
    name = Path(relative).stem
    spec = importlib.util.spec_from_file_location(f"_sm12x_{name}", _PACKAGE / relative)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def _first_line(program: str) -> str:
    result = subprocess.run([program, "--version"], capture_output=True, text=True)
    return next(iter((result.stdout + result.stderr).splitlines()), "")


QUESTIONS = {name.removeprefix("ask_"): value for name, value in list(globals().items()) if name.startswith("ask_")}

if __name__ == "__main__":
    # This file's folder, which Python puts first: no other program has it there.
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        del sys.path[0]
    try:
        if sys.argv[1].startswith("probe-"):
            from flashinfer.sm12x_gpu_probe.parts import PARTS

            PARTS[sys.argv[1].removeprefix("probe-")](tell)
        else:
            QUESTIONS[sys.argv[1]]()
    except Exception as error:
        tell(failed=f"{type(error).__name__}: {error}")
