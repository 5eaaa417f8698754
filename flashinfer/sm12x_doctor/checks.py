# SPDX-License-Identifier: Apache-2.0
"""The checks of Python's path, compilers, GPUs, cache and environment.

Each takes the answers and returns ``(state, found)`` or ``(state, found, remedy)``; None where it does not apply.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from .asking import CLI, PACKAGE, PIP, PYTHON, TREE, Answers, numbers, versions

VLLM_VERSION = "0.33.0"
GIB = 1 << 30
DISK_NEEDED = GIB
"""A build of all default modules, objects and compilers' temporary files included, takes less."""

CUDA_13_DRIVER = 580

Outcome = tuple[str, str] | tuple[str, str, str] | None


def check_import(a: Answers) -> Outcome:
    """Which flashinfer Python imports."""
    put_first = f"export PYTHONPATH={shlex.quote(str(TREE))}, where the server is started too"
    found = a("path", "found")
    if found is None:
        return "fail", "there is no flashinfer on sys.path", put_first
    if found["file"] is None:
        wheel = f'{PIP} install --force-reinstall --no-deps "flashinfer-python=={versions()[1]}"'
        return (
            "fail",
            f"flashinfer is an empty namespace package: {', '.join(found['folders'])} has no __init__.py. vLLM takes "
            "it for FlashInfer without its functions",
            f"remove that folder; {wheel}; {put_first}",
        )
    if not (Path(found["file"]).parent / "_layer.py").is_file():
        return "fail", f"the plain wheel in {Path(found['file']).parent} is imported, not the fork", put_first
    if a.get("import", "failed") and a.get("import", "fork_version") is None:
        why = a("import", "failed")
        if "no answer" in why or "killed" in why:
            remedy = f"{PYTHON} -X importtime -c 'import flashinfer' shows where it stays"
            return "unknown", f"importing {found['file']}: {why}", remedy
        command = re.search(r"Install it with:\s+(.*)", why)
        return "fail", f"importing {found['file']}: {why}", command[1] if command else "mend what the error names"
    version, fork = a("import", "version"), a("import", "fork_version")
    if Path(found["file"]).parent != PACKAGE:
        return (
            "warn",
            f"the fork {fork} in {Path(found['file']).parent} is imported; this doctor is of {PACKAGE}",
            put_first,
        )
    return "ok", f"the fork {fork} over flashinfer {version}, {found['file']}"


def check_wheel(a: Answers) -> Outcome:
    """The version of the wheel that is extended."""
    _, pinned = versions()
    version = a.versions().get("flashinfer-python")
    if version == pinned:
        return "ok", f"flashinfer-python {version}"
    have = f"flashinfer-python {version} is installed" if version else "flashinfer-python is not installed"
    remedy = f'{PIP} install --force-reinstall --no-deps "flashinfer-python=={pinned}"'
    return "fail", f"{have}; this fork extends {pinned}", remedy


def check_companions(a: Answers) -> Outcome:
    """Packages of upstream's prebuilt kernels."""
    _, pinned = versions()
    installed = {name: a.versions().get(name) for name in ("flashinfer-cubin", "flashinfer-jit-cache")}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in installed.items())
    wrong = [name for name, version in installed.items() if version and version.split("+")[0] != pinned]
    if wrong:
        remedy = " ".join([f"{PIP} install", *(f'"{name}=={pinned}"' for name in wrong)])
        return "warn", f"{text}: FlashInfer {pinned} ignores another version's kernels", remedy
    if installed["flashinfer-jit-cache"]:
        text += "; its fused_moe_120 is upstream's and is never loaded for this fork's"
    return "ok", text


def check_pythonpath(a: Answers) -> Outcome:
    """What else by the name of flashinfer lies where Python looks."""
    places = a("path", "places")
    trouble, remedies = [], []
    forks = [place["entry"] for place in places if place["kind"] == "fork"]
    if len(forks) > 1:
        trouble.append(f"{len(forks)} forks: {', '.join(forks)}; the first is imported")
        remedies.append(f"unset PYTHONPATH, or leave {TREE} in it only; {PIP} uninstall flashinfer-sm12x")
    for place in places:
        if place["kind"] == "no __init__.py":
            trouble.append(f"{place['entry'] or '.'}/flashinfer has no __init__.py")
            remedies.append(f"take {place['entry'] or '.'} from PYTHONPATH, or remove that folder")
        for info in place["egg_info"]:
            trouble.append(f"{info}: pip takes it for the installation and uninstalls nothing")
            remedies.append(f"rm -r {info}")
    if trouble:
        return "warn", "; ".join(trouble), "; ".join(remedies)
    return "ok", f"flashinfer lies in {', '.join(place['entry'] for place in places) or 'no folder of sys.path'}"


def check_compiler(a: Answers) -> Outcome:
    """The CUDA compiler."""
    install = a("compiler", "pip").replace("pip", PIP, 1)
    state, why = without_a_compiler(a)
    if error := a.get("compiler", "error"):
        return state, f"{error.partition('. ')[0]}{why}", f"unset CUDA_HOME CUDA_PATH; {install}"
    version, nvcc, origin = (a("compiler", fact) for fact in ("version", "nvcc", "origin"))
    text = f"CUDA {version}, {nvcc}, found through {origin}"
    needed = (12, 8) if a.environ.get("FLASHINFER_CUDA_ARCH_LIST") == "12.0a" else (12, 9)
    if numbers(version) < needed:
        return state, f"{text}: 12.0a needs 12.8, 12.1a and 12.0f need 12.9{why}", install
    return "ok", text


def without_a_compiler(a: Answers) -> tuple[str, str]:
    """What it means that nothing can be compiled: less where the fork's modules need not be."""
    modules = [fact for name, fact in a.facts["modules"].items() if name.startswith("module ")]
    if modules and all(fact.get("prebuilt") for fact in modules):
        return "warn", "; this fork's modules are prebuilt and need none, upstream's (vLLM's attention) do"
    return "fail", ""


def check_ninja(a: Answers) -> Outcome:
    """ninja: upstream's modules need it, and vLLM asks for it."""
    found = a("tools", "ninja")
    if found["path"] is None:
        return (
            "fail",
            "ninja is not on PATH: upstream's modules do not build, and vLLM does without FlashInfer",
            f'{PIP} install ninja; export PATH="{Path(sys.prefix, "bin")}:$PATH"',
        )
    return "ok", f"{found['banner']}, {found['path']}"


def check_cxx(a: Answers) -> Outcome:
    """The host compiler."""
    found = a("tools", "cxx")
    if found["path"] is None:
        state, why = without_a_compiler(a)
        return state, f"there is no {found['program']}: nothing can be linked{why}", "apt-get install g++, or set CXX"
    return "ok", f"{found['banner']}, {found['path']}"


def check_gpu(a: Answers) -> Outcome:
    """The GPUs."""
    gpus = a.gpus()
    if not gpus:
        if failed := a.get("gpus", "failed"):
            return "unknown", f"nvidia-smi: {failed}", "nvidia-smi; where it hangs too: restart the machine"
        if error := a.get("gpus", "error"):
            return "fail", f"nvidia-smi: {' '.join(error)}", "load or install the driver; in a container: --gpus all"
        return (
            "warn",
            "no GPU: CPU tensors and the virtual SM121 work, kernels do not run",
            "on a machine with one: install its driver; in a container: --gpus all",
        )
    text = ", ".join(f"{name} ({capability})" for name, capability in gpus)
    if any(capability.startswith("12.") for _, capability in gpus):
        return "ok", text
    if a.environ.get("FLASHINFER_SM12X_MOE") == "1" and any(capability == "9.0" for _, capability in gpus):
        return (
            "ok",
            f"{text}: runs this fork's kernels because FLASHINFER_SM12X_MOE=1 (Hopper's MMAs, slower than wgmma)",
        )
    return "warn", f"{text}: none is of the SM12x family, so upstream's kernels run", "nothing, if that is meant"


def check_driver(a: Answers) -> Outcome:
    """The driver's version against the toolkit's."""
    gpus = a.get("gpus", "gpus")
    if not gpus:
        return ("unknown", "no driver answers", "see the check 'gpu'") if a.gpus() else None
    driver = gpus[0]["driver"]
    cuda = a.get("compiler", "version") or a.get("torch", "cuda") or ""
    if cuda.startswith("13.") and numbers(driver)[:1] < (CUDA_13_DRIVER,):
        return (
            "fail",
            f"driver {driver} is older than {CUDA_13_DRIVER}, which CUDA {cuda} needs",
            f"install driver {CUDA_13_DRIVER} or newer",
        )
    return "ok", f"driver {driver}"


def check_torch(a: Answers) -> Outcome:
    """torch, and whether it sees the GPUs that the driver sees."""
    if "No module named 'torch'" in (a.get("torch", "failed") or ""):
        return "fail", "torch is not installed", f"{PIP} install vllm=={VLLM_VERSION}, which brings its own"
    torch, cuda = a("torch", "torch"), a("torch", "cuda")
    for library, version in (a.get("torch", "runtimes") or {}).items():
        # One of another major release is loaded under another name and serves somebody else.
        if cuda and version.split(".")[0] == cuda.split(".")[0] and numbers(version) < numbers(cuda):
            return (
                "fail",
                f"torch {torch} is for CUDA {cuda} and found the runtime of CUDA {version}, {library}",
                f"take {Path(library).parent} from LD_LIBRARY_PATH and LD_PRELOAD",
            )
    if cuda is None and a.get("gpus", "gpus"):
        remedy = f"{PIP} uninstall --yes torch; {PIP} install vllm=={VLLM_VERSION}, which brings its own"
        return "fail", f"torch {torch} is a build without CUDA: it does not see the GPU", remedy
    if cuda is not None and a.get("gpus", "gpus") and not a("torch", "gpus"):
        return (
            "fail",
            f"torch {torch} (CUDA {cuda}) sees no GPU, the driver does",
            "look at CUDA_VISIBLE_DEVICES; a driver older than torch's CUDA gives this too",
        )
    return "ok", f"torch {torch}, " + (f"CUDA {cuda}" if cuda else "a build without CUDA")


_ENTRY = re.compile(r"(\d+)\.(\d)([af]?)")


def check_architectures(a: Answers) -> Outcome:
    """What is compiled for, against the GPUs that are here."""
    capabilities = sorted({capability for _, capability in a.gpus()})
    here = " ".join(f"{capability}a" for capability in capabilities if numbers(capability) >= (9,))
    advice = f"export FLASHINFER_CUDA_ARCH_LIST={shlex.quote(here) if here else '12.1a'}" + (
        "" if here else " (DGX Spark), or 12.0a (RTX 50, RTX PRO)"
    )
    value = a.environ.get("FLASHINFER_CUDA_ARCH_LIST")
    source = "of the GPUs that are here" if value is None else f"FLASHINFER_CUDA_ARCH_LIST={value}"
    written = re.split(r"[\s;]+", (value or "").strip())
    if value is not None and not all(map(_ENTRY.fullmatch, written)):
        return "fail", f"{source} has an entry that is no compute capability", advice
    listed = a.get("modules", "architectures")
    if listed is None:
        listed = written if value is not None else a("modules", "architectures")
    if not listed:
        return "warn", "no GPU and no FLASHINFER_CUDA_ARCH_LIST: nothing is compiled until it is set", advice
    entries = [match for match in map(_ENTRY.fullmatch, listed) if match]
    missing = [gpu for gpu in capabilities if not any(_runs_on(entry, gpu) for entry in entries)]
    if missing:
        return "fail", f"{', '.join(listed)} ({source}) does not run on compute capability {', '.join(missing)}", advice
    if any(re.fullmatch(r"12\.\d", entry) for entry in written):
        return (
            "warn",
            f"{source} lacks the suffix a: this fork adds it, other projects compile without FP4 and block-scaled MMA",
            advice,
        )
    if "12.0f" in listed and set(capabilities) == {"12.0"}:
        return (
            "warn",
            f"12.0f ({source}): a GB10 takes such builds too, so they have fences that your GPU does not need",
            advice,
        )
    return "ok", f"{', '.join(listed)} ({source})"


def _runs_on(entry: re.Match[str], capability: str) -> bool:
    major, minor = (int(part) for part in capability.split("."))
    if int(entry[1]) != major:
        return False
    # Code for an architecture with the suffix a runs on that one only, other code on later ones of the family too.
    return int(entry[2]) == minor or (entry[3] != "a" and int(entry[2]) < minor)


def check_cache(a: Answers) -> Outcome:
    """The cache's folder: whose, and whether it can be written."""
    folder, owner, me = (a("folder", fact) for fact in ("folder", "owner", "me"))
    elsewhere = "export FLASHINFER_WORKSPACE_BASE=<a folder of your own>"
    if untrusted := a.get("folder", "untrusted"):
        return "fail", untrusted, f"chmod -R go-w {folder}; or {elsewhere}"
    if not a("folder", "writable"):
        if a("folder", "exists"):
            mine = f"sudo chown -R {me} {folder}; or " if owner != me else ""  # no help where nothing can be written
            return (
                "warn",
                f"{folder} (of user {owner}) can only be read: what is fresh in it is loaded, the rest is built "
                "among temporary files",
                f"{mine}{elsewhere}",
            )
        return "fail", f"{folder} cannot be made: {a('folder', 'nearest')} cannot be written", elsewhere
    return "ok", f"{folder}, " + (f"of user {owner}" if a("folder", "exists") else "not made yet")


def check_disk(a: Answers) -> Outcome:
    """Room for the cache."""
    free = a("folder", "free_bytes")
    text = f"{free / GIB:.1f} GiB free where the cache is"
    if free < DISK_NEEDED:
        remedy = f"{CLI} sm12x-cache list; export FLASHINFER_WORKSPACE_BASE=<a folder on another disk>"
        return "fail" if free < DISK_NEEDED // 4 else "warn", text, remedy
    return "ok", text


def check_modules(a: Answers) -> Outcome:
    """What is prebuilt or built, and whether it is fresh."""
    build = f"{CLI} sm12x-build"
    found = {
        name.removeprefix("module "): fact for name, fact in a.facts["modules"].items() if name.startswith("module ")
    }
    if not found:
        if error := a.get("modules", "error"):
            return "warn", f"it cannot be told whether they are fresh: {error}", "see 'compiler' and 'architectures'"
        return "unknown", f"not told: {a('modules', 'failed')}", build
    words, state = [], "ok"
    for name, fact in found.items():
        if not fact["stale"]:
            how = "prebuilt" if fact.get("prebuilt") else "built and fresh"
            words.append(f"{name} is {how}, {fact['bytes'] / (1 << 20):.1f} MiB")
            continue
        stale, sources = fact["stale"], fact["sources"]
        words.append(f"{name} is {f'stale: {stale[0]}' if fact['built'] else f'not built, {sources} sources'}")
        if name.startswith("fused_moe_120"):  # the grouped GEMM is a public function that vLLM does not call
            state = "fail" if a.environ.get("FLASHINFER_DISABLE_JIT") else "warn"
    remedies = [build] if state != "ok" else []
    passed_over = [f"{name}: {fact['passed_over']}" for name, fact in found.items() if fact.get("passed_over")]
    if passed_over:
        words.append(f"prebuilt kernels are passed over ({passed_over[0]})")
        remedies.insert(0, f"{PIP} uninstall flashinfer-sm12x-kernels, or install the wheel of this fork")
        state = "warn" if state == "ok" else state
    if state == "fail":
        words.append("FLASHINFER_DISABLE_JIT forbids building")
        remedies.insert(0, "unset FLASHINFER_DISABLE_JIT")
    return state, "; ".join(words), "; ".join(remedies)


def check_memory(a: Answers) -> Outcome:
    """Memory, and the compilers that it allows at once."""
    available, jobs, reason = (a("memory", fact) for fact in ("available", "jobs", "reason"))
    text = f"{available / GIB:.1f} GiB free: {jobs} compiler{'s' * (jobs != 1)} at once ({reason})"
    if available < 2 * GIB:
        return "warn", text, f"{CLI} sm12x-build before the model is loaded; MAX_JOBS=1"
    return "ok", text


SWITCHES: Mapping[str, tuple[str, str]] = {
    "FLASHINFER_SM12X_MOE": ("0", "upstream's kernels run in place of this fork's"),
    "FLASHINFER_SM12X_CHECK": ("1", "every layer waits for the GPU"),
    "FLASHINFER_JIT_DEBUG": ("1", "kernels are compiled without optimization"),
    "FLASHINFER_DISABLE_JIT": ("", "what is not built, upstream's modules too, is an error"),
    "FLASHINFER_ALLOW_SHARED_CACHE": ("1", "whoever can write to the cache chooses what code runs here"),
    "FLASHINFER_DISABLE_VERSION_CHECK": ("", "kernels of other versions of FlashInfer are loaded"),
    "FLASHINFER_SM12X_EMBED_PTX": ("1", "modules of another name, with PTX, are built and used"),
}
"""Variable -> the value that counts, any if empty, and what it does. Each is for a while and forgotten."""


def check_switches(a: Answers) -> Outcome:
    """Environment variables that were meant for a while."""
    on = {
        name: effect
        for name, (value, effect) in SWITCHES.items()
        if (a.environ.get(name) == value if value else a.environ.get(name))
    }
    if not on:
        return "ok", "none of the variables for debugging and comparing is set"
    text = "; ".join(f"{name}={a.environ[name]}: {effect}" for name, effect in on.items())
    return "warn", text, f"unset {' '.join(on)}"


def check_probe(a: Answers) -> Outcome:
    """What a probe of the GPU left, which decides how MXFP8 and MXFP4 tokens are multiplied."""
    if error := a.get("modules", "probe_error"):
        return "fail", error, f"rm {a('modules', 'workspace')}/sm12x_probe.json"
    bits = a("modules", "probed_sum_bits")
    if None in bits.values():
        return "ok", "the width of MMAs' sums was not probed (--probe does): block-scaled MMAs are used"
    text = f"block-scaled MMAs keep {', '.join(f'{count} bits ({kind})' for kind, count in bits.items())} of a sum"
    needed = a("modules", "narrowest_sum")
    narrow = [kind for kind, count in bits.items() if count < needed]
    if not narrow:
        return "ok", f"{text}; {needed} are needed"
    return "ok", f"{text}; {needed} are needed, so half precision takes the place of {' and '.join(narrow)}"
