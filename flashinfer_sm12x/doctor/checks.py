# SPDX-License-Identifier: Apache-2.0
"""All checks except a probe's.

Each takes the answers and returns ``(state, found)``, ``(state, found, command)`` or ``(state, found, command, why)``;
None if it does not apply.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import variables
from ..counted import counted
from ..host_memory import GIB, HEADROOM, SHARE
from ..versions import SWITCH, needed
from .asking import (
    CLI,
    INTERPRETER,
    PACKAGE,
    PLUGIN,
    PYTHON,
    TREE,
    Answers,
    Unanswered,
    fork_is_first,
    numbers,
    public_version,
    versions,
)
from .fixes import FIRST, SERVER, as_root, driver_package, has, has_ninja, named_in, pip, prepend, where

VLLM_VERSION = "0.33.0"
INSTALL_VLLM = f"install vllm=={VLLM_VERSION}"
BUILD = f"{CLI} sm12x-build"
DISK_NEEDED = GIB
"""A build of all default modules, objects and compilers' temporary files included, takes less."""

CUDA_13_DRIVER = 580

BLOCK_SCALED = ("mxf8f6f4", "mxf4")
"""Kinds of MMA that only SM12x has; half-precision ones can replace them."""

Outcome = tuple[str, ...] | None


def upstreams(a: Answers, package: str, options: str = "") -> tuple[str, str]:
    """The command that installs a package of upstream's in the version that this fork extends."""
    return pip(a, f'install {options}"{package}=={versions()["upstream"]}"')


def _fork_first(a: Answers) -> tuple[str, str]:
    """The command that puts this fork first, and installs the wheel that it extends if there is none."""
    if a.get("path", "wheel") is not False:
        return FIRST, SERVER
    command, why = pip(a, f'install "{needed()}"')
    return (f"{FIRST} && {command}", SERVER) if command else ("", f"{why}; then put {TREE} first on PYTHONPATH")


def check_import(a: Answers) -> Outcome:
    """The flashinfer that Python imports."""
    try:
        os.getcwd()
    except OSError:
        text = "the working directory is gone; torch, which FlashInfer imports, cannot be loaded from there"
        return "fail", text, "cd"
    found = a("path", "found")
    if found is None:
        return "fail", "there is no flashinfer on sys.path", *_fork_first(a)
    if found["file"] is None:
        text = f"flashinfer is an empty namespace package: {', '.join(found['folders'])} has no __init__.py"
        text += ". vLLM takes it for FlashInfer without its functions; that folder can be removed"
        return "fail", text, *_fork_first(a)
    folder = os.path.dirname(found["file"])
    if not fork_is_first(a):
        return "fail", f"the plain wheel in {folder} is imported, not the fork", *_fork_first(a)
    if aside := a.get("path", "aside"):
        text = f"upstream's package is imported without this fork: {aside}"
        if aside.startswith(SWITCH):
            return "warn", text, f"unset {SWITCH}", SERVER
        why = "unless other packages need the one that is there: then a newer flashinfer-sm12x may serve it"
        reinstall, how = pip(a, f'install --force-reinstall --no-deps "{needed()}"')
        return "fail", text, reinstall, f"{how}; {why}" if how else why
    if (why := a.get("import", "failed")) and a.get("import", "fork") is None:
        text = f"importing {found['file']}: {why}"
        if "no answer" in why or "killed" in why:
            return "unknown", text, f"{PYTHON} -X importtime -c 'import flashinfer'"
        if blame := a.get("import", "blame"):
            return "fail", text, f"unset {blame}", f"without {blame}={a.environ.get(blame)} it works; {SERVER}"
        if command := re.search(r"Install it with:\s+(.*)", why):
            words = re.search(r"-m pip (install .*)", command[1])
            return "fail", text, *(pip(a, words[1]) if words else (command[1],))
        if other := re.search(r"([\w-]+) version \(.*does not match", why):
            return "fail", text, *upstreams(a, other[1])
        if "FLASHINFER_" in why:
            return "fail", text, "", "see 'variables' and what the error names"
        options = "" if "No module named" in why else "--force-reinstall --no-deps "
        return "fail", text, *upstreams(a, "flashinfer-python", options)
    if os.path.realpath(folder) != os.path.realpath(PACKAGE):
        return "warn", f"the fork in {folder} is imported; this doctor is of {PACKAGE}", FIRST, SERVER
    return "ok", f"the fork {a('import', 'fork')} over flashinfer {a('import', 'version')}, {found['file']}"


def check_variables(a: Answers) -> Outcome:
    """Misspelled names, bad values, and debugging switches left on."""
    texts, commands, state = [], [], "warn"
    for name, text, meant in variables.problems(a.environ):
        texts.append(text)
        rename = meant and meant not in a.environ
        commands.append(f'export {meant}="${name}"; unset {name}' if rename else f"unset {name}")
        if not meant and name in variables.TABLE:
            state = "fail"
    for name, text in variables.forgotten(a.environ):
        texts.append(text)
        commands.append(f"unset {name}")
    if not texts:
        return "ok", "no name is misspelled, no value bad, none for debugging or comparing is set"
    return state, "; ".join(texts), "; ".join(commands), SERVER


def check_build(a: Answers) -> Outcome:
    """A few lines of CUDA: compiled, linked and loaded where modules are."""
    error = a("build", "error")
    if error is None:
        version, nvcc, origin = (a("build", fact) for fact in ("version", "nvcc", "origin"))
        text = f"CUDA {version} {nvcc}, found through {origin}, compiles, links and loads"
        return "ok", "; passed over: ".join([text, *a("build", "passed_over")])
    state, why = "fail", ""
    if a.modules() and not any(fact["stale"] for fact in a.modules().values()):
        state, why = "warn", "this fork's modules need none, upstream's (vLLM's attention) may"
    if (blame := a.get("build", "blame")) is not None:
        command, why = f"unset {blame}", f"without {blame}={a.environ.get(blame)} it works"
    elif (elsewhere := a.get("build", "elsewhere")) is not None:
        folder = shlex.quote(elsewhere)
        command = f"mkdir -p -m 755 {folder} && export FLASHINFER_WORKSPACE_BASE={folder}"
        why = f"there it works; {SERVER}"
    elif (fix := named_in(a, error)) is not None:
        command, why = fix[0], "; ".join(filter(None, (fix[1], why)))
    elif (silent := a.get("build", "silent")) is not None:
        error += f"; {silent} ends so by itself, without a word"
        command, why = "", "install that program anew, or name another: nvcc by CUDA_HOME, the host's by CC and CXX"
    else:
        command, why = "", why or "fix what the error names"
    return state, " ".join(error.split()), command, why


def check_gpu(a: Answers) -> Outcome:
    """The GPUs."""
    gpus = a.gpus()
    if not gpus:
        if failed := a.get("gpus", "failed"):
            return "unknown", f"nvidia-smi: {failed}", "nvidia-smi", "where it hangs, too: restart the machine"
        if error := a.get("gpus", "error"):
            return "fail", f"nvidia-smi: {error}", "", _driver_words(a, "load or install the driver")
        text = "no GPU: CPU tensors and the virtual SM121 work, kernels do not run"
        return "warn", text, "", _driver_words(a, "on a machine with one: install its driver")
    text = ", ".join(f"{name} ({capability})" for name, capability in gpus)
    if any(capability.startswith("12.") for _, capability in gpus):
        return "ok", text
    if a.environ.get("FLASHINFER_SM12X_MOE") == "1" and any(capability == "9.0" for _, capability in gpus):
        why = "because FLASHINFER_SM12X_MOE=1 (Hopper's MMAs, slower than wgmma)"
        return "ok", f"{text}: runs this fork's kernels {why}"
    return "warn", f"{text}: none is of the SM12x family, so upstream's kernels run", "", "nothing, if that is meant"


def _driver_words(a: Answers, words: str) -> str:
    """The advice ``words`` about a driver, unless the driver is another system's."""
    guest = a.facts.get("system", {}).get("guest")
    return driver_package(a, "")[1] if guest else f"{words}; in a container: --gpus all"


def _unified(a: Answers) -> bool:
    return any(capability == "12.1" for _, capability in a.gpus())


def check_driver(a: Answers) -> Outcome:
    """The driver's version, against the toolkit's."""
    gpus = a.get("gpus", "gpus")
    if not gpus and not a.gpus():
        return None
    if not gpus and not has(a, "nvidia-smi"):
        text = "its version is not known: nvidia-smi is not on PATH, though torch sees the GPU"
        return "warn", text, "", where(a, "nvidia-smi")
    if not gpus:
        return "unknown", "no driver answers", "nvidia-smi"
    driver = gpus[0]["driver"]
    cuda = a.get("build", "version") or a.get("torch", "cuda") or ""
    if cuda.startswith("13.") and numbers(driver)[:1] < (CUDA_13_DRIVER,):
        text = f"driver {driver} is older than {CUDA_13_DRIVER}, which CUDA {cuda} needs"
        return "fail", text, *driver_package(a, f"nvidia-driver-{CUDA_13_DRIVER}-open")
    return "ok", f"driver {driver}"


def check_kernel_log(a: Answers) -> Outcome:
    """The driver's complaints since the machine started."""
    if not a.gpus():
        return None
    lines = a.get("log", "lines")
    if lines is None:
        text = f"not read: {a.get('log', 'failed') or 'this user may not'}"
        if os.geteuid() == 0 and not a.get("log", "failed"):
            return "warn", text, "", "root may not, either: it is the host's, look there for lines with NVRM"
        command, why = as_root(a, "dmesg | grep -E 'NVRM: .*(Xid|NV_ERR|Out of memory)'")
        return "warn", text, command, why or "look for such lines yourself"
    if not lines:
        return "ok", "the driver complained of nothing since the machine started"
    text = f"{counted(a('log', 'count'), 'complaint')} of the driver, the last: {lines[-1].strip()}"
    if "NV_ERR_NO_MEMORY" in lines[-1]:
        return "warn", text, "", "memory ran out, after which hosts hang: see 'headroom', and restart the machine"
    return "warn", text, "nvidia-smi -q", "Xid numbers are explained in NVIDIA's XID Errors; restart the machine"


def check_torch(a: Answers) -> Outcome:
    """torch, and whether it sees the GPUs that the driver sees."""
    if "No module named 'torch'" in (a.get("torch", "failed") or ""):
        command, why = pip(a, INSTALL_VLLM)
        return "fail", "torch is not installed", command, why or "vLLM brings its own"
    torch, cuda = a("torch", "torch"), a("torch", "cuda")
    there = a.get("gpus", "gpus")
    if cuda is None and there:
        commands = [pip(a, words) for words in ("uninstall --yes torch", INSTALL_VLLM)]
        why = next((why for _, why in commands if why), "vLLM brings its own")
        command = " && ".join(command for command, _ in commands if command)
        return "fail", f"torch {torch} is a build without CUDA: it does not see the GPU", command, why
    if cuda is not None and there and not a("torch", "gpus"):
        text = f"torch {torch} (CUDA {cuda}) sees no GPU, the driver does"
        if "CUDA_VISIBLE_DEVICES" in a.environ:
            return "fail", text, "unset CUDA_VISIBLE_DEVICES", SERVER
        return "fail", text, "", "the driver may be older than that CUDA"
    if there and (gpus := a.get("torch", "gpus")):
        reported, driven = ({gpu["capability"] for gpu in each} for each in (gpus, there))
        served = sorted(gpu for gpu in driven if gpu.startswith("12."))
        listed = re.findall(r"\b\d+\.\d+[af]?", a.environ.get("FLASHINFER_CUDA_ARCH_LIST", ""))
        named = all(any(_runs_on(entry, gpu) for entry in listed) for gpu in served)
        if not reported <= driven and not (served and named):
            text = (
                f"torch says compute capability {_list(reported)}, the driver {_list(driven)}: kernels are "
                "compiled for torch's"
            )
            command = f'export FLASHINFER_CUDA_ARCH_LIST="{" ".join(f"{gpu}a" for gpu in served)}"' if served else ""
            return "warn", text, command, f"the driver knows better; a torch for its CUDA says the same; {SERVER}"
    return "ok", f"torch {torch}, " + (f"CUDA {cuda}" if cuda else "a build without CUDA")


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def check_architectures(a: Answers) -> Outcome:
    """The architectures that are compiled for, against the GPUs that are here."""
    listed = a.get("modules", "architectures")
    if listed is None:
        return None  # nothing is imported: 'import' says why
    name = "FLASHINFER_CUDA_ARCH_LIST"
    capabilities = sorted({capability for _, capability in a.gpus() if _served(a, capability)})
    missing = [gpu for gpu in capabilities if not any(_runs_on(entry, gpu) for entry in listed)]
    if not listed:
        text = f"no GPU and no {name}: it is not known what to compile for"
        why = "where kernels for another machine are to be built: 12.1a is a DGX Spark, 12.0a RTX 50 and RTX PRO"
        return "warn", text, f"export {name}=12.1a", why
    command = f'export {name}="${{{name}:+${name} }}{" ".join(f"{gpu}a" for gpu in missing)}"'
    if missing:
        return "fail", f"{', '.join(listed)} does not run on compute capability {', '.join(missing)}", command, SERVER
    return "ok", ", ".join(listed)


def _served(a: Answers, capability: str) -> bool:
    """Whether this fork's kernels run on a GPU. Others, such as a display's, need nothing compiled for them."""
    return capability.startswith("12.") or (capability == "9.0" and a.environ.get("FLASHINFER_SM12X_MOE") == "1")


def _runs_on(entry: str, capability: str) -> bool:
    (major, minor, *_), (gpu_major, gpu_minor) = numbers(entry), numbers(capability)
    # Code for an architecture with the suffix a runs on that one only; other code also runs on later ones of the
    # family.
    return major == gpu_major and (minor == gpu_minor or (not entry.endswith("a") and minor < gpu_minor))


def check_disk(a: Answers) -> Outcome:
    """Room for the cache."""
    free, folder = a("folder", "free_bytes"), a("folder", "folder")
    text = f"{free / GIB:.1f} GiB free for {folder}"
    if free < DISK_NEEDED:
        why = "make room, or have FLASHINFER_WORKSPACE_BASE name a folder on another disk"
        return "fail" if free < DISK_NEEDED // 4 else "warn", text, f"{CLI} sm12x-cache list", why
    return "ok", text


def check_modules(a: Answers) -> Outcome:
    """The modules that are prebuilt or built, and whether they are fresh."""
    found = a.modules()
    if not found:
        if a.get("import", "failed") or a.get("path", "aside"):
            return None
        if error := a.get("modules", "error"):
            if fix := re.search(r"Remove it: (rm .*)", error):
                return "fail", error, f"{fix[1]} && {BUILD}"
            return "warn", f"it cannot be told whether they are fresh: {error}", "", "the rows above say what to do"
        raise Unanswered(f"the question 'modules' told of none: {a('modules', 'failed')}")
    words = [
        f"{name}: {'prebuilt' if fact['prebuilt'] else fact['stale'] or 'built and fresh'}"
        for name, fact in found.items()
    ]
    text = "; ".join(words)
    passed_over = [f"{name}: {fact['passed_over']}" for name, fact in found.items() if fact["passed_over"]]
    if passed_over:
        text = f"prebuilt kernels are passed over ({passed_over[0]}); {text}"
        command, why = pip(a, "uninstall --yes flashinfer-sm12x-kernels")
        return "warn", text, command and f"{command} && {BUILD}", why or "or install the wheel that this fork makes"
    if not any(fact["stale"] for fact in found.values() if fact["by_default"]):
        return "ok", text  # what sm12x-build builds without options; the others are built when first used
    if a.environ.get("FLASHINFER_DISABLE_JIT"):
        return "fail", text, f"unset FLASHINFER_DISABLE_JIT && {BUILD}", "it forbids building"
    return "warn", text, BUILD, "or the first request builds it"


def check_headroom(a: Answers) -> Outcome:
    """Host memory on a GPU that has none of its own: beside vLLM's share, the host's."""
    if not _unified(a):
        return None
    available, total = a("memory", "available"), a("memory", "total")
    left = available - SHARE * total
    text = f"unified memory: {available / GIB:.0f} of {total / GIB:.0f} GiB are free"
    if left >= HEADROOM:
        return "ok", f"{text}, {left / GIB:.0f} GiB beside a --gpu-memory-utilization of {SHARE}"
    share = max(0.0, (available - HEADROOM) / total)
    why = f"stop what holds memory, or pass --gpu-memory-utilization {int(share * 100) / 100:.2f} or less to vllm serve"
    text += (
        f": a --gpu-memory-utilization of {SHARE} leaves the host less than {HEADROOM // GIB} GiB, and without memory "
    )
    return "warn", f"{text}it hangs", "ps -eo rss,pid,args --sort=-rss | head", why


def check_probe(a: Answers) -> Outcome:
    """The result that a probe of the GPU left; it decides how MXFP8 and MXFP4 tokens are multiplied."""
    if "needed" in a.facts.get("probe-sums", {}):
        return None  # measured just now, after this question: 'probe-sums' has it
    if error := a.get("modules", "probe_error"):
        return "fail", error, f"rm {shlex.quote(a('modules', 'workspace'))}/sm12x_probe.json"
    bits = a.get("modules", "probed_sum_bits")
    if bits is None:
        return None  # 'import' or 'modules' says why
    if None in bits.values():
        return "ok", "the width of MMAs' sums was not probed (--probe does): block-scaled MMAs are used"
    return "ok", sums_text(bits, a("modules", "narrowest_sum"))


def sums_text(bits: Mapping[str, int], needed: int) -> str:
    """The width in which each kind of MMA adds up, and what takes the place of those that are too narrow."""
    text = (
        f"MMAs keep {', '.join(f'{count} bits ({kind})' for kind, count in bits.items())} of a sum; {needed} are needed"
    )
    narrow = [kind for kind in BLOCK_SCALED if bits.get(kind, needed) < needed]
    return f"{text}, so half precision takes the place of {' and '.join(narrow)}" if narrow else text


def check_vllm(a: Answers) -> Outcome:
    """Whether vLLM has the version that this fork is made for, and reads the variables that are set for it."""
    version = a("path", "vllm")
    if version is None and a.get("vllm", "found") is False:
        return "ok", f"not installed here; the fork is made for {VLLM_VERSION}"
    if version is None or public_version(version) != VLLM_VERSION:
        text = f"vLLM {version or 'of an unknown version'}; the fork is made for {VLLM_VERSION}"
        return "warn", f"{text}, what follows may differ", *pip(a, INSTALL_VLLM)
    if unread := a.get("vllm", "unread"):
        why = "where an older recipe set them: docs/troubleshooting.md has what took their place"
        return "warn", f"vLLM {version} does not read {', '.join(unread)}", "", why
    return "ok", f"vLLM {version}"


def check_vllm_plugin(a: Answers) -> Outcome:
    """Whether vLLM loads the fork's plugin and accepts its settings."""
    if error := a.get("vllm", "settings_error"):
        name = error.split(":")[0]
        text = f"vLLM does not start: {error}"
        if name in variables.TABLE:
            return "fail", text, f"unset {name}", SERVER
        return "fail", text, "", "fix the choice where it is made: --additional-config, or FLASHINFER_SM12X_VLLM"
    if a.get("vllm", "found") is False:
        return None
    if PLUGIN not in a("path", "plugins"):
        return "warn", f"no entry point {PLUGIN} in vllm.general_plugins: vLLM takes its own choices", FIRST, SERVER
    outcome = a("vllm", "outcome") or "vLLM could not load it"
    if outcome == "installed":
        chosen = ", ".join(f"{key} {value}" for key, value in a("vllm", "settings").items() if value)
        return "ok", f"installed: gpt-oss's experts are this fork's ({chosen})"
    if outcome.startswith("installed"):
        command, why = pip(a, INSTALL_VLLM)
        words = "those parts are vLLM's own; its log names what moved"
        return "warn", outcome, command, "; ".join(filter(None, (why, words)))
    listed = a.environ.get("VLLM_PLUGINS")
    if listed is not None and PLUGIN not in listed.split(","):
        command = 'export VLLM_PLUGINS="${VLLM_PLUGINS:+$VLLM_PLUGINS,}' + f'{PLUGIN}"'
        return "warn", f"VLLM_PLUGINS={listed} leaves the plugin out: vLLM takes its own choices", command, SERVER
    off = [name for name in (variables.PLUGIN, "FLASHINFER_SM12X_MOE") if a.environ.get(name, "").strip() == "0"]
    if off:
        return "warn", f"the plugin is switched off: {', '.join(f'{name}=0' for name in off)}", f"unset {' '.join(off)}"
    if a.get("path", "aside"):
        return "fail", f"{outcome}: vLLM's own choices", "", "see 'import'"
    if outcome.startswith("no GPU"):
        state = "fail" if any(capability.startswith("12.") for _, capability in a.gpus()) else "ok"
        return state, f"{outcome}: vLLM's own choices", *(("", "see 'gpu' and 'torch'") if state == "fail" else ())
    return "fail", f"it could not be installed: {outcome}", "", "this fork is not whole, or made for another vLLM"


def check_vllm_flashinfer(a: Answers) -> Outcome:
    """The functions of FlashInfer that vLLM finds, and the attention with sinks that it therefore takes."""
    if a.get("vllm", "found") is False:
        return None
    names = ("has_flashinfer", "has_flashinfer_cutlass_fused_moe", "has_flashinfer_autotune_v2")
    text = ", ".join(f"{name}: {'yes' if a('vllm', name) else 'no'}" for name in names)
    if a("vllm", "has_flashinfer_cutlass_fused_moe"):
        if a("vllm", "has_flashinfer_cubin") or a("vllm", "has_nvidia_artifactory"):
            return "ok", f"{text}; attention by FLASHINFER"
        why = "there is no flashinfer-cubin, and NVIDIA's server of cubins does not answer"
        return "warn", f"{text}; attention by TRITON_ATTN: {why}", *upstreams(a, "flashinfer-cubin")
    lacks = [what for what in ("nvcc", "ninja") if not a("vllm", what)]
    if a("vllm", "has_flashinfer") or not lacks:
        return "fail", f"{text}: the flashinfer that vLLM imports lacks functions", FIRST, SERVER
    text += f": vLLM finds no {' and no '.join(lacks)}, and no flashinfer-cubin, and does without FlashInfer"
    nvcc, why = a.get("build", "nvcc"), ""
    if "nvcc" in lacks and nvcc is None:
        return "fail", text, "", "see 'build'"
    commands = [f"export CUDA_HOME={shlex.quote(str(Path(nvcc).parents[1]))}"] if "nvcc" in lacks else []
    if "ninja" in lacks:
        command, why = ("", "") if has_ninja() else pip(a, "install ninja")
        commands += [each for each in (command, prepend("PATH", Path(INTERPRETER).parent)) if each and not why]
    return "fail", text, " && ".join(commands), "; ".join(filter(None, (why, SERVER)))
