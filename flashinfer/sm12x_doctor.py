# SPDX-License-Identifier: Apache-2.0
"""``python -m flashinfer sm12x-doctor``: what stands between this machine and the SM12x kernels, and what mends it.

Every check reads facts that :mod:`.sm12x_questions` found, each question in a process of its own with a time limit; the
doctor itself imports neither torch nor vLLM and nothing of FlashInfer. So it also runs as a file, with whatever Python
and whatever ``PYTHONPATH`` the server has: ``python <checkout>/flashinfer/sm12x_doctor.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Of the JSON; another number means that a key went or changed its meaning."""

STATES = ("ok", "warn", "fail", "unknown")
VLLM_VERSION = "0.33.0"
GIB = 1 << 30
DISK_NEEDED = GIB
"""A build of all default modules, objects and compilers' temporary files included, takes less."""

CUDA_13_DRIVER = 580
VLLM_OPTIONS = "--moe-backend flashinfer_cutlass --quantization-config.moe.activation mxfp8"
GRAPH_SIZES = "--cudagraph-capture-sizes 1 2 3 4 5 6 7 8 10 12 14 16 20 24 28 32"

_HERE = Path(__file__).resolve().parent
TREE = _HERE.parent
_MARK = "sm12x-fact "
_PYTHON = shlex.quote(sys.executable)
_PIP = f"{_PYTHON} -m pip"
_CLI = f"{_PYTHON} -m flashinfer"

QUESTIONS = ("path", "import", "compiler", "tools", "gpus", "torch", "folder", "modules", "memory", "vllm")

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: Its name, a key of :data:`CHECKS`.
        state: One of :data:`STATES`; ``unknown`` where the question ended without an answer.
        found: What there is, and what it means.
        remedy: What to do, empty where there is nothing to do.
    """

    check: str
    state: str
    found: str
    remedy: str = ""


# --- asking -----------------------------------------------------------------------------------------------------------


def ask(question: str, limit: float) -> dict[str, Any]:
    """The facts that a question finds within ``limit`` seconds; ``failed`` among them says why there are no more.

    The process and all that it started are killed then. Their output goes to a file: whoever holds a pipe open could
    make its reader wait.
    """
    command = [sys.executable, str(_HERE / "sm12x_questions.py"), question]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        failed = ""
        try:
            status = child.wait(limit)
            if status < 0:
                failed = f"it was killed by {_signal_name(-status)}"
            elif status:
                failed = f"it ended with exit status {status}"
        except subprocess.TimeoutExpired:
            failed = f"no answer within {limit:g} s"
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)  # one that waits for a dead file server does not even die
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - (1 << 20)))
        text = output.read().decode(errors="replace")
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(_MARK):
            with contextlib.suppress(ValueError):
                facts.update(json.loads(line.removeprefix(_MARK)))
    if failed:
        facts["failed"] = failed
    return facts


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ask_all(limit: float) -> dict[str, dict[str, Any]]:
    """The answers to all questions, asked at once."""
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = {question: pool.submit(ask, question, limit) for question in QUESTIONS}
        return {question: answer.result() for question, answer in answers.items()}


# --- checking ---------------------------------------------------------------------------------------------------------


class Unanswered(Exception):
    """A check lacks a fact; its text says why."""


@dataclass(frozen=True)
class Answers:
    """All facts, and the environment that they were found in."""

    facts: Mapping[str, Facts]
    environ: Mapping[str, str]

    def __call__(self, question: str, fact: str) -> Any:
        """One fact.

        Raises:
            Unanswered: the question ended before it.
        """
        answers = self.facts[question]
        if fact not in answers:
            raise Unanswered(f"the question '{question}' ended without an answer: {answers.get('failed', fact)}")
        return answers[fact]

    def get(self, question: str, fact: str) -> Any:
        return self.facts[question].get(fact)

    def versions(self) -> Mapping[str, str]:
        return self("path", "versions")

    def gpus(self) -> list[tuple[str, str]]:
        """``(name, compute capability)`` by the driver or, in containers without its tool, by torch."""
        for question in ("gpus", "torch"):
            if self.get(question, "gpus"):
                return [(gpu["name"], gpu["capability"]) for gpu in self.get(question, "gpus")]
        return []

    def serves(self) -> bool:
        """Whether vLLM and a GPU of the SM12x family, or no GPU at all, are here."""
        return all(capability.startswith("12.") for _, capability in self.gpus())

    def plugin(self) -> bool:
        """Whether vLLM would load the fork's plugin and the plugin would act."""
        listed = self.environ.get("VLLM_PLUGINS")
        return (
            PLUGIN in self("path", "plugins")
            and (listed is None or PLUGIN in listed.split(","))
            and self.environ.get("FLASHINFER_SM12X_VLLM") != "0"
            and self.environ.get("FLASHINFER_SM12X_MOE") != "0"
        )


PLUGIN = "flashinfer_sm12x"
Outcome = tuple[str, str] | tuple[str, str, str] | None


def check_import(a: Answers) -> Outcome:
    """Which flashinfer Python imports."""
    put_first = f"export PYTHONPATH={TREE}, where the server is started too; or: {_PIP} install {TREE}"
    found = a("path", "found")
    if found is None:
        return "fail", "there is no flashinfer on sys.path", put_first
    if found["file"] is None:
        wheel = f'{_PIP} install --force-reinstall --no-deps "flashinfer-python=={_versions()[1]}"'
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
            remedy = f"{_PYTHON} -X importtime -c 'import flashinfer' shows where it stays"
            return "unknown", f"importing {found['file']}: {why}", remedy
        command = re.search(r"Install it with:\s+(.*)", why)
        return "fail", f"importing {found['file']}: {why}", command[1] if command else "mend what the error names"
    version, fork = a("import", "version"), a("import", "fork_version")
    if Path(found["file"]).parent != _HERE:
        return (
            "warn",
            f"the fork {fork} in {Path(found['file']).parent} is imported; this doctor is of {_HERE}",
            put_first,
        )
    return "ok", f"the fork {fork} over flashinfer {version}, {found['file']}"


def check_wheel(a: Answers) -> Outcome:
    """The version of the wheel that is extended."""
    _, pinned = _versions()
    version = a.versions().get("flashinfer-python")
    if version == pinned:
        return "ok", f"flashinfer-python {version}"
    have = f"flashinfer-python {version} is installed" if version else "flashinfer-python is not installed"
    remedy = f'{_PIP} install --force-reinstall --no-deps "flashinfer-python=={pinned}"'
    return "fail", f"{have}; this fork extends {pinned}", remedy


def check_companions(a: Answers) -> Outcome:
    """Packages of upstream's prebuilt kernels."""
    _, pinned = _versions()
    installed = {name: a.versions().get(name) for name in ("flashinfer-cubin", "flashinfer-jit-cache")}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in installed.items())
    wrong = [name for name, version in installed.items() if version and version.split("+")[0] != pinned]
    if wrong:
        remedy = " ".join([f"{_PIP} install", *(f'"{name}=={pinned}"' for name in wrong)])
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
        remedies.append(f"unset PYTHONPATH, or leave {TREE} in it only; {_PIP} uninstall flashinfer-sm12x")
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
    if error := a.get("compiler", "error"):
        return "fail", error, f"{_PIP} install -r {TREE / 'requirements-cuda.txt'}"
    version, nvcc, origin = (a("compiler", fact) for fact in ("version", "nvcc", "origin"))
    text = f"CUDA {version}, {nvcc}, found through {origin}"
    if _numbers(version) < (12, 9):
        return "fail", f"{text}: 12.1a and 12.0f need 12.9", f"{_PIP} install -r {TREE / 'requirements-cuda.txt'}"
    return "ok", text


def check_ninja(a: Answers) -> Outcome:
    """ninja: upstream's modules need it, and vLLM asks for it."""
    found = a("tools", "ninja")
    if found["path"] is None:
        return (
            "fail",
            "ninja is not on PATH: upstream's modules do not build, and vLLM does without FlashInfer",
            f'{_PIP} install ninja; export PATH="{Path(sys.prefix, "bin")}:$PATH"',
        )
    return "ok", f"{found['banner']}, {found['path']}"


def check_cxx(a: Answers) -> Outcome:
    """The host compiler."""
    found = a("tools", "cxx")
    if found["path"] is None:
        return "fail", f"there is no {found['program']}: nothing can be linked", "apt-get install g++, or set CXX"
    return "ok", f"{found['banner']}, {found['path']}"


def check_gpu(a: Answers) -> Outcome:
    """The GPUs."""
    gpus = a.gpus()
    if not gpus:
        failed = a.get("gpus", "failed") or a.get("torch", "failed")
        if failed:
            return "unknown", f"the driver was asked: {failed}", "nvidia-smi; where it hangs too: restart the machine"
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
    return "warn", f"{text}: none is of the SM12x family, so upstream's kernels run", "nothing, if that is meant"


def check_driver(a: Answers) -> Outcome:
    """The driver's version against the toolkit's."""
    gpus = a.get("gpus", "gpus")
    if not gpus:
        return ("unknown", "no driver answers", "see the check 'gpu'") if a.gpus() else None
    driver = gpus[0]["driver"]
    cuda = a.get("compiler", "version") or a.get("torch", "cuda") or ""
    if cuda.startswith("13.") and _numbers(driver)[:1] < (CUDA_13_DRIVER,):
        return (
            "fail",
            f"driver {driver} is older than {CUDA_13_DRIVER}, which CUDA {cuda} needs",
            f"install driver {CUDA_13_DRIVER} or newer",
        )
    return "ok", f"driver {driver}"


def check_torch(a: Answers) -> Outcome:
    """torch, and whether it sees the GPUs that the driver sees."""
    torch, cuda = a("torch", "torch"), a("torch", "cuda")
    if cuda is None and a.get("gpus", "gpus"):
        remedy = f"{_PIP} uninstall --yes torch; {_PIP} install vllm=={VLLM_VERSION}, which brings its own"
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
    here = " ".join(f"{capability}a" for capability in capabilities if _numbers(capability) >= (9,))
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
            return (
                "warn",
                f"{folder} (of user {owner}) can only be read: what is fresh in it is loaded, the rest is built "
                "among temporary files",
                f"sudo chown -R {me} {folder}; or {elsewhere}",
            )
        return "fail", f"{folder} cannot be made: {a('folder', 'nearest')} cannot be written", elsewhere
    return "ok", f"{folder}, " + (f"of user {owner}" if a("folder", "exists") else "not made yet")


def check_disk(a: Answers) -> Outcome:
    """Room for the cache."""
    free = a("folder", "free_bytes")
    text = f"{free / GIB:.1f} GiB free where the cache is"
    if free < DISK_NEEDED:
        remedy = f"{_CLI} sm12x-cache list; export FLASHINFER_WORKSPACE_BASE=<a folder on another disk>"
        return "fail" if free < DISK_NEEDED // 4 else "warn", text, remedy
    return "ok", text


def check_modules(a: Answers) -> Outcome:
    """What is built, and whether it is fresh."""
    build = f"{_CLI} sm12x-build"
    found = {
        name.removeprefix("module "): fact for name, fact in a.facts["modules"].items() if name.startswith("module ")
    }
    if not found:
        if error := a.get("modules", "error"):
            return "warn", f"it cannot be told whether they are fresh: {error}", "see 'compiler' and 'architectures'"
        return "unknown", f"not told: {a('modules', 'failed')}", build
    words, state = [], "ok"
    for name, fact in found.items():
        stale = fact["stale"]
        if not stale:
            words.append(f"{name} is built and fresh, {fact['bytes'] / (1 << 20):.1f} MiB")
            continue
        first = f"{len(stale)} of {fact['sources']} sources to compile, {stale[0]}"
        words.append(f"{name} is {'stale' if fact['built'] else 'not built'} ({first})")
        if name.startswith("fused_moe_120"):  # the grouped GEMM is a public function that vLLM does not call
            state = "fail" if a.environ.get("FLASHINFER_DISABLE_JIT") else "warn"
    if state == "fail":
        words.append("FLASHINFER_DISABLE_JIT forbids building")
        build = f"unset FLASHINFER_DISABLE_JIT; {build}"
    return state, "; ".join(words), build if state != "ok" else ""


def check_memory(a: Answers) -> Outcome:
    """Memory, and the compilers that it allows at once."""
    available, jobs, reason = (a("memory", fact) for fact in ("available", "jobs", "reason"))
    text = f"{available / GIB:.1f} GiB free: {jobs} compiler{'s' * (jobs != 1)} at once ({reason})"
    if available < 2 * GIB:
        return "warn", text, f"{_CLI} sm12x-build before the model is loaded; MAX_JOBS=1"
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
    """What a probe of the GPU left, which decides how MXFP8 is multiplied."""
    if error := a.get("modules", "probe_error"):
        return "fail", error, f"rm {a('modules', 'workspace')}/sm12x_probe.json"
    bits = a("modules", "probed_sum_bits")
    if bits is None:
        return "ok", "this GPU's block-scaled MMA was not probed: it is taken to add up as float32 does"
    if bits >= 23:
        return "ok", f"the block-scaled MMA adds up in {bits} bits"
    return "ok", f"the block-scaled MMA adds up in {bits} bits, so MXFP8 is multiplied in half precision, exactly"


# --- vLLM; all of this is absent where it is not installed ------------------------------------------------------------


def check_vllm(a: Answers) -> Outcome:
    """Whether the vLLM that this fork is made for is here."""
    version = a.versions().get("vllm")
    there = version is not None or a("vllm", "found")
    if not there:
        return "ok", f"not installed here; the fork is made for {VLLM_VERSION}"
    if version != VLLM_VERSION:
        text = (
            f"vLLM {version or 'of an unknown version'}; the fork is made for {VLLM_VERSION}, what follows may differ"
        )
        return "warn", text, f"{_PIP} install vllm=={VLLM_VERSION}"
    return "ok", f"vLLM {version}"


def _with_vllm(check: Callable[[Answers], Outcome]) -> Callable[[Answers], Outcome]:
    def checked(a: Answers) -> Outcome:
        # Found by its metadata or by import; a question that hung counts as there.
        absent = a.versions().get("vllm") is None and a.get("vllm", "found") is False
        return None if absent else check(a)

    checked.__doc__ = check.__doc__
    return checked


@_with_vllm
def check_vllm_flashinfer(a: Answers) -> Outcome:
    """What vLLM finds in FlashInfer."""
    sees = a("vllm", "has_flashinfer_cutlass_fused_moe")
    names = ("has_flashinfer", "has_flashinfer_cutlass_fused_moe", "has_flashinfer_autotune_v2")
    text = ", ".join(f"{name}: {'yes' if a.get('vllm', name) else 'no'}" for name in names)
    if sees:
        return "ok", text
    if not a("vllm", "has_flashinfer"):
        lacks = [what for what in ("nvcc", "ninja") if not a("vllm", what)]
        toolkit = a.get("compiler", "nvcc")
        home = Path(toolkit).parent.parent if toolkit else "<the toolkit>"
        why = f"vLLM finds no {' and no '.join(lacks)}, and no flashinfer-cubin" if lacks else "flashinfer is not found"
        remedy = (
            f'export CUDA_HOME={home} PATH="{Path(sys.prefix, "bin")}:$PATH"' if lacks else "see the check 'import'"
        )
        return "fail", f"{text}: {why}, and does without FlashInfer", remedy
    return "fail", f"{text}: the flashinfer that it imports lacks functions", "see 'import' and 'pythonpath'"


@_with_vllm
def check_vllm_plugin(a: Answers) -> Outcome:
    """The fork's plugin."""
    if PLUGIN not in a("path", "plugins"):
        return (
            "warn",
            f"no entry point {PLUGIN} in vllm.general_plugins: vLLM takes its own choices",
            f"{_PIP} install {TREE}; or pass {VLLM_OPTIONS}",
        )
    if not a.plugin():
        names = ("VLLM_PLUGINS", "FLASHINFER_SM12X_VLLM", "FLASHINFER_SM12X_MOE")
        on = [name for name in names if name in a.environ]
        text = ", ".join(f"{name}={a.environ[name]}" for name in on)
        return "warn", f"the plugin is installed and switched off: {text}", f"unset {' '.join(on)}"
    return "ok", f"{PLUGIN} = {a('path', 'plugins')[PLUGIN]}"


@_with_vllm
def check_vllm_moe(a: Answers) -> Outcome:
    """Which kernels gpt-oss's experts get."""
    if not a.serves():
        return "ok", "the GPU is not of the SM12x family: vLLM's own choice"
    if not a("vllm", "has_flashinfer_cutlass_fused_moe"):
        return "fail", "Marlin: vLLM does without FlashInfer", "see the check 'vllm-flashinfer'"
    if a.environ.get("FLASHINFER_SM12X_MOE") == "0":
        return "warn", "upstream's kernels: FLASHINFER_SM12X_MOE=0", "unset FLASHINFER_SM12X_MOE"
    if a.plugin():
        return "ok", "this fork's, without any option"
    return (
        "warn",
        "Marlin, unless asked: FLASHINFER_CUTLASS_MXFP4_MXFP8 is this fork's",
        f"vllm serve ... {VLLM_OPTIONS}",
    )


@_with_vllm
def check_vllm_linear(a: Answers) -> Outcome:
    """Which kernels the dense layers get."""
    text = "bf16 by cuBLAS: QKV, O and the LM head are 62 % of what a token of gpt-oss-120b reads"
    if a.plugin():
        return "ok", f"""{text}; faster: --additional-config '{{"sm12x": {{"qkv": "mxfp8", "o": "mxfp8"}}}}'"""
    asked = '{"linear": "mxfp8", "moe": {"activation": "mxfp8"}}'
    return "ok", f"{text}; faster for QKV and O: --quantization-config '{asked}'"


@_with_vllm
def check_vllm_attention(a: Answers) -> Outcome:
    """Which backend attention with sinks gets."""
    if not a.serves():
        return "ok", "the GPU is not of the SM12x family: vLLM's own choice"
    if not a("vllm", "has_flashinfer"):
        return "fail", "TRITON_ATTN: vLLM does without FlashInfer", "see the check 'vllm-flashinfer'"
    compiles = bool(a("vllm", "nvcc") and a("vllm", "ninja"))
    if a("vllm", "has_flashinfer_cubin"):
        return "ok", "FLASHINFER (flashinfer-cubin is installed)"
    if a.plugin() and compiles:
        return "ok", "FLASHINFER (XQA and FA2 are compiled here)"
    if a("vllm", "has_nvidia_artifactory"):
        return "ok", "FLASHINFER, as long as NVIDIA's server of cubins answers within 5 s at each start"
    return (
        "warn",
        "TRITON_ATTN: there is no flashinfer-cubin, and NVIDIA's server of cubins does not answer",
        f'{_PIP} install "flashinfer-cubin=={_versions()[1]}"',
    )


@_with_vllm
def check_vllm_graphs(a: Answers) -> Outcome:
    """Sizes of captured CUDA graphs."""
    if a.plugin():
        return "ok", "the plugin has vLLM capture each batch size up to 8, and 10, 12, 14, 16, 20 ... 256"
    text = "vLLM captures batches of 1, 2, 4, 8, 16 ...: one of 5 computes 8 tokens in every layer but the experts"
    return "warn", text, f"vllm serve ... {GRAPH_SIZES}"


CHECKS: Mapping[str, Callable[[Answers], Outcome]] = {
    name.removeprefix("check_").replace("_", "-"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}
"""In the order of the table."""


def diagnose(answers: Answers) -> list[Finding]:
    """What the checks find; those that do not apply are left out."""
    findings = []
    for name, check in CHECKS.items():
        try:
            outcome = check(answers)
        except Unanswered as error:
            outcome = "unknown", str(error), "run it once more with a longer --timeout"
        except Exception as error:  # a fact of a form that nobody foresaw: the other checks still count
            outcome = "unknown", f"the check itself failed: {error!r}", "report this, with the output of --json"
        if outcome is not None:
            findings.append(Finding(name, *outcome))
    return findings


def _versions() -> tuple[str, str]:
    """The fork's version and that of the wheel it extends."""
    names: dict[str, Any] = {}
    exec((_HERE / "_version.py").read_text(encoding="utf-8"), names)
    return names["__fork_version__"], names["UPSTREAM_VERSION"]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


# --- saying -----------------------------------------------------------------------------------------------------------


def as_text(findings: Sequence[Finding], width: int = 120) -> str:
    """A table: state, check, what was found, and below it what to do."""
    names = max(len(finding.check) for finding in findings)
    margin = " " * (9 + names + 2)
    lines = []
    for finding in findings:
        head = f"{finding.state:9}{finding.check:{names}}  "
        lines += _wrapped(finding.found, head, margin, width)
        if finding.remedy:
            lines += _wrapped(finding.remedy, f"{margin}-> ", f"{margin}   ", width)
    counts = [f"{sum(finding.state == state for finding in findings)} {state}" for state in STATES]
    return "\n".join([*lines, "", ", ".join(counts)])


def _wrapped(text: str, first: str, others: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def as_json(findings: Sequence[Finding], facts: Mapping[str, Facts]) -> str:
    """``{"format", "fork", "upstream", "findings": [Finding], "facts": {question: {fact: value}}}``."""
    fork, upstream = _versions()
    about = {"format": FORMAT, "fork": fork, "upstream": upstream}
    return json.dumps({**about, "findings": [asdict(finding) for finding in findings], "facts": facts}, indent=1)


def run(json_output: bool, timeout: float) -> int:
    """Ask, check, print.

    Args:
        json_output: Print JSON instead of the table.
        timeout: Seconds that each question may take; they are asked at once.

    Returns:
        The exit status: 1 if a check failed, else 0.
    """
    facts = ask_all(timeout)
    findings = diagnose(Answers(facts, os.environ))
    print(as_json(findings, facts) if json_output else as_text(findings))
    return int(any(finding.state == "fail" for finding in findings))


def main(arguments: Sequence[str]) -> int:
    """The command line, where click may be missing."""
    parser = argparse.ArgumentParser(prog="sm12x-doctor", description="Find what keeps the SM12x kernels from running")
    parser.add_argument("--json", action="store_true", help="Emit JSON instead of a table")
    parser.add_argument("--timeout", type=float, default=60, help="Seconds that each question may take (60)")
    options = parser.parse_args(arguments)
    return run(options.json, options.timeout)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
