# SPDX-License-Identifier: Apache-2.0
"""The doctor names what is wrong with a machine and what mends it, and ends whatever the machine does."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import REPO, RTX, UPSTREAM, Machine, make_environment
from layer_toys import FORK_FILES, OURS, write_fork, write_tree, write_wheel

from flashinfer import sm12x_doctor as doctor
from flashinfer.jit.sm12x import prebuilt, toolchain
from flashinfer.sm12x_doctor import asking

OPTIONS = "--moe-backend flashinfer_cutlass --quantization-config.moe.activation mxfp8"


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("doctor") / "env")


@pytest.fixture
def machine(tmp_path: Path, interpreter: Path) -> Machine:
    return Machine(tmp_path, interpreter)


# The fakes have no build engine: what its question would find is in test_modules... below and in the run on this machine.
NOT_FAKED = {"modules", "probe"}


def test_a_healthy_machine(machine: Machine) -> None:
    found = machine.diagnose()
    assert {check: state for check, state in found.states().items() if state != "ok"} == dict.fromkeys(
        NOT_FAKED, "unknown"
    )
    assert found.status == 1  # for those
    assert found["vllm-moe"][1] == "this fork's, without any option"


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warn", 0), ("fail", 1), ("unknown", 1)])
def test_exit_status(state: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask_all", lambda limit: {})
    found = [doctor.Finding("import", "ok", ""), doctor.Finding("gpu", state, "", "a remedy")]
    monkeypatch.setattr(doctor, "diagnose", lambda answers: found)
    assert doctor.run(False, 1) == status


# --- planted ----------------------------------------------------------------------------------------------------------

Plant = Callable[[Machine], None]
PLANTED: dict[str, tuple[Plant, str, str, str, str]] = {}
"""Name -> (what plants it, check, state, part of what is found, part of the remedy)."""


def planted(check: str, state: str, found: str, remedy: str) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        PLANTED[plant.__name__] = plant, check, state, found, remedy
        return plant

    return add


@planted("import", "fail", "the plain wheel in", f"export PYTHONPATH={REPO}")
def plain_wheel_first(m: Machine) -> None:
    m.path = [m.wheel, *m.path]


@planted("import", "fail", "empty namespace package", f'"flashinfer-python=={UPSTREAM}"')
def empty_namespace_package(m: Machine) -> None:
    (m.root / "site" / "flashinfer" / "data").mkdir(parents=True)
    m.path = [m.root / "site"]


@planted("import", "fail", "no flashinfer on sys.path", f"export PYTHONPATH={REPO}")
def no_flashinfer(m: Machine) -> None:
    m.path = [m.root / "site"]


@planted(
    "import", "fail", "extends the wheel", f'pip install --force-reinstall --no-deps "flashinfer-python=={UPSTREAM}"'
)
def wheel_of_another_version(m: Machine) -> None:
    shutil.rmtree(m.wheel)
    write_wheel(m.wheel, {"__init__.py": ""}, version="0.6.4")


@planted("wheel", "fail", "flashinfer-python 0.6.4 is installed", f"flashinfer-python=={UPSTREAM}")
def wheel_of_another_version_by_metadata(m: Machine) -> None:
    wheel_of_another_version(m)


@planted("import", "warn", "this doctor is of", f"export PYTHONPATH={REPO}")
def fork_of_another_checkout(m: Machine) -> None:
    m.path = [write_fork(m.root / "other", FORK_FILES), m.wheel, m.root / "site"]


@planted("pythonpath", "warn", "2 forks", "unset PYTHONPATH")
def two_forks(m: Machine) -> None:
    m.path.append(write_fork(m.root / "other", FORK_FILES))


@planted("pythonpath", "warn", "egg-info", "other/flashinfer_sm12x.egg-info")
def egg_info_in_a_checkout(m: Machine) -> None:
    write_tree(m.root / "other", {"flashinfer_sm12x.egg-info/PKG-INFO": "Name: flashinfer-sm12x\nVersion: 0\n"})
    m.path.append(m.root / "other")


@planted("pythonpath", "warn", "flashinfer has no __init__.py", "remove that folder")
def folder_without_init(m: Machine) -> None:
    (m.root / "stray" / "flashinfer").mkdir(parents=True)
    m.path.append(m.root / "stray")


@planted("companions", "warn", "flashinfer-cubin 0.6.4", f'"flashinfer-cubin=={UPSTREAM}"')
def cubins_of_another_version(m: Machine) -> None:
    m.package("flashinfer-cubin", "0.6.4")


@planted("companions", "ok", "its fused_moe_120 is upstream's and is never loaded", "")
def jit_cache(m: Machine) -> None:
    m.package("flashinfer-jit-cache", f"{UPSTREAM}+cu130")


@planted("compiler", "fail", "holds no bin/nvcc", 'install "nvidia-cuda-nvcc==13.0.*"')
def cuda_home_that_points_at_nothing(m: Machine) -> None:
    m.variables["CUDA_HOME"] = str(m.root / "none")


@planted("compiler", "fail", "CUDA 12.4", 'install "nvidia-cuda-nvcc==13.0.*"')
def old_compiler(m: Machine) -> None:
    m.program("toolkit/bin/nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.1'")


@planted("compiler", "fail", "names no CUDA release", 'install "nvidia-cuda-nvcc==13.0.*"')
def compiler_that_is_none(m: Machine) -> None:
    m.program("toolkit/bin/nvcc", "echo hello")


@planted("ninja", "fail", "not on PATH", "pip install ninja")
def no_ninja(m: Machine) -> None:
    (m.root / "bin" / "ninja").unlink()


@planted("cxx", "fail", "there is no clang++-99", "set CXX")
def no_host_compiler(m: Machine) -> None:
    m.variables["CXX"] = "clang++-99"


@planted("gpu", "fail", "couldn't communicate", "--gpus all")
def driver_that_is_not_loaded(m: Machine) -> None:
    m.program("bin/nvidia-smi", 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the driver"; exit 9')
    m.torch("13.0", [])


@planted("gpu", "warn", "no GPU", "--gpus all")
def no_gpu(m: Machine) -> None:
    (m.root / "bin" / "nvidia-smi").unlink()
    m.torch(None, [])


@planted("gpu", "warn", "none is of the SM12x family", "")
def hopper(m: Machine) -> None:
    m.gpus("NVIDIA H200, 9.0, 580.95.05")


@planted("gpu", "ok", "because FLASHINFER_SM12X_MOE=1", "")
def hopper_on_purpose(m: Machine) -> None:
    m.gpus("NVIDIA H200, 9.0, 580.95.05")
    m.variables["FLASHINFER_SM12X_MOE"] = "1"


@planted("driver", "fail", "570.86.10 is older than 580", "install driver 580")
def old_driver(m: Machine) -> None:
    m.gpus("NVIDIA GB10, 12.1, 570.86.10")


@planted("torch", "fail", "without CUDA", "pip install vllm==0.33.0")
def torch_without_cuda(m: Machine) -> None:
    m.torch(None, [])


@planted("torch", "fail", "torch is not installed", "pip install vllm==0.33.0")
def no_torch(m: Machine) -> None:
    shutil.rmtree(m.root / "site" / "torch")


@planted("torch", "fail", "sees no GPU, the driver does", "CUDA_VISIBLE_DEVICES")
def hidden_gpu(m: Machine) -> None:
    m.torch("13.0", [])


@planted("torch", "fail", "is for CUDA 13.9 and found the runtime of CUDA 13.", "from LD_LIBRARY_PATH")
def runtime_of_an_older_release(m: Machine) -> None:
    runtime = toolchain.discover().find_library("cudart").resolve()
    (m.root / "older").mkdir()
    shutil.copy(runtime, m.root / "older" / "libcudart.so.13")
    m.variables["LD_LIBRARY_PATH"] = str(m.root / "older")
    m.torch("13.9", [("NVIDIA GB10", (12, 1))], at_import="import ctypes; ctypes.CDLL('libcudart.so.13')")


@planted("architectures", "warn", "lacks the suffix a", "FLASHINFER_CUDA_ARCH_LIST=12.1a")
def no_suffix(m: Machine) -> None:
    m.variables["FLASHINFER_CUDA_ARCH_LIST"] = "12.1"


@planted("architectures", "warn", "fences that your GPU does not need", "FLASHINFER_CUDA_ARCH_LIST=12.0a")
def fences_on_an_rtx(m: Machine) -> None:
    m.gpus(RTX)
    m.variables["FLASHINFER_CUDA_ARCH_LIST"] = "12.0f"


@planted("architectures", "fail", "does not run on compute capability 12.1", "FLASHINFER_CUDA_ARCH_LIST=12.1a")
def list_of_another_gpu(m: Machine) -> None:
    m.variables["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a 12.0a"


@planted("architectures", "fail", "does not run on compute capability 12.0", "FLASHINFER_CUDA_ARCH_LIST='12.0a 12.1a'")
def list_without_one_of_two_gpus(m: Machine) -> None:
    m.gpus(RTX, "NVIDIA GB10, 12.1, 580.95.05")


@planted("architectures", "ok", "12.0f", "")
def family_list_on_a_spark(m: Machine) -> None:
    m.variables["FLASHINFER_CUDA_ARCH_LIST"] = "12.0f"


@planted("architectures", "fail", "no compute capability", "FLASHINFER_CUDA_ARCH_LIST=12.1a")
def list_that_is_none(m: Machine) -> None:
    m.variables["FLASHINFER_CUDA_ARCH_LIST"] = "sm_121a"


@planted("cache", "fail", "writable by everybody", "chmod -R go-w")
def cache_of_everybody(m: Machine) -> None:
    folder = m.root / "cache" / ".cache" / "flashinfer"
    folder.mkdir(parents=True)
    folder.chmod(0o777)


@planted("cache", "fail", "cannot be made", "FLASHINFER_WORKSPACE_BASE=")
def cache_that_cannot_be_made(m: Machine) -> None:
    (m.root / "file").write_text("")
    m.variables["FLASHINFER_WORKSPACE_BASE"] = str(m.root / "file" / "below")


@planted("cache", "warn", "can only be read", "export FLASHINFER_WORKSPACE_BASE=")
def cache_on_a_file_system_that_can_only_be_read(m: Machine) -> None:
    folder = shlex.quote(str(m.root / "cache"))
    (m.root / "cache" / ".cache" / "flashinfer").mkdir(parents=True)
    m.mounting(f"/bin/mount --bind {folder} {folder}; /bin/mount -o remount,bind,ro {folder}")


@planted("disk", "fail", "0.0 GiB free", "export FLASHINFER_WORKSPACE_BASE=")
def full_disk(m: Machine) -> None:
    m.mounting(f"/bin/mount -t tmpfs -o size=1m tmpfs {shlex.quote(str(m.root / 'cache'))}")


@planted("switches", "warn", "FLASHINFER_SM12X_MOE=0", "unset FLASHINFER_SM12X_MOE")
def switched_off(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_MOE"] = "0"


@planted("switches", "warn", "waits for the GPU", "unset FLASHINFER_SM12X_CHECK")
def checks_left_on(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_CHECK"] = "1"


@planted("vllm", "warn", "vLLM 0.31.0", "pip install vllm==0.33.0")
def another_vllm(m: Machine) -> None:
    m.vllm("0.31.0")


@planted("vllm-flashinfer", "fail", "vLLM finds no nvcc", "export CUDA_HOME=")
def vllm_without_compiler(m: Machine) -> None:
    m.vllm(has_flashinfer=False, has_flashinfer_moe=False, has_flashinfer_cutlass_fused_moe=False)
    (m.root / "toolkit" / "bin" / "nvcc").unlink()


@planted("vllm-flashinfer", "fail", "lacks functions", "see 'import'")
def vllm_with_half_a_flashinfer(m: Machine) -> None:
    m.vllm(has_flashinfer_moe=False, has_flashinfer_cutlass_fused_moe=False)


@planted("vllm-plugin", "warn", "no entry point", f"export PYTHONPATH={REPO}; or pass {OPTIONS}")
def no_plugin(m: Machine) -> None:
    m.without_plugin()


@planted("vllm-plugin", "warn", "VLLM_PLUGINS=other", "unset VLLM_PLUGINS")
def plugin_not_listed(m: Machine) -> None:
    m.variables["VLLM_PLUGINS"] = "other"


@planted("vllm-moe", "warn", "Marlin, unless asked", f"vllm serve ... {OPTIONS}")
def moe_without_plugin(m: Machine) -> None:
    m.without_plugin()


@planted("vllm-attention", "warn", "TRITON_ATTN", f'pip install "flashinfer-cubin=={UPSTREAM}"')
def offline_without_cubins(m: Machine) -> None:
    m.without_plugin()
    m.vllm(has_nvidia_artifactory=False)


@planted("vllm-graphs", "warn", "one of 5 computes 8 tokens", "--cudagraph-capture-sizes 1 2 3 4 5 6 7 8")
def graph_sizes(m: Machine) -> None:
    m.without_plugin()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_misconfiguration_is_named_with_its_remedy(machine: Machine, name: str) -> None:
    plant, check, state, found, remedy = PLANTED[name]
    plant(machine)
    diagnosis = machine.diagnose()
    there = diagnosis[check]
    assert there[0] == state, there
    assert found in there[1]
    assert remedy in there[2]
    assert (there[2] == "") == (state == "ok")
    assert diagnosis.status == int(not {"fail", "unknown"}.isdisjoint(diagnosis.states().values()))


def test_a_fork_that_only_the_working_directory_gives_is_not_what_a_server_imports(machine: Machine) -> None:
    """``python -m`` looks there; ``vllm serve`` does not. And the command runs without upstream's, which toys lack."""
    machine.path.remove(REPO)
    result = machine.doctor("--json", how=("-m", "flashinfer", "sm12x-doctor"), cwd=REPO)
    assert result.returncode == 1, result.stderr
    finding = json.loads(result.stdout)["findings"][0]
    assert (finding["check"], finding["state"]) == ("import", "fail")
    assert finding["found"].startswith(f"the plain wheel in {machine.wheel}")
    assert finding["remedy"].startswith(f"export PYTHONPATH={REPO}")


# --- whatever the machine does ----------------------------------------------------------------------------------------

HOSTILE = {
    "sleeps": "import time; time.sleep(600)",
    "leaves a process behind": (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(40)'], start_new_session=True)\n"
        "time.sleep(600)"
    ),
    "segfaults": "import ctypes; ctypes.string_at(0)",
    "aborts": "import os; os.abort()",
    "exits": "import os; os._exit(0)",
    "raises": "raise SystemError('what is this')",
    "says a lot": "import os\nfor _ in range(3000): os.write(1, b'sm12x-fact {]' * 500 + b'\\xff\\n')\nos._exit(3)",
}
LIMIT = 12


@pytest.mark.parametrize("how", HOSTILE)
def test_a_vllm_that_does_not_import_ends_in_unknown(machine: Machine, how: str) -> None:
    machine.vllm(at_import=HOSTILE[how])
    found = machine.diagnose(timeout=LIMIT)
    asked = ("vllm-flashinfer", "vllm-moe", "vllm-attention")
    assert {found[check][0] for check in asked} == {"unknown"}
    assert found["vllm"][0] == found["vllm-plugin"][0] == found["compiler"][0] == "ok"
    assert found.seconds < 60, "it waited for what sleeps for ten minutes"


def test_programs_that_hang_end_in_unknown(machine: Machine) -> None:
    checks = {"toolkit/bin/nvcc": "compiler", "bin/nvidia-smi": "gpu", "bin/ninja": "ninja"}
    for program in checks:
        machine.program(program, "trap '' TERM; while :; do /bin/sleep 600; done")
    machine.torch("13.0", [])
    found = machine.diagnose(timeout=LIMIT)
    for check in checks.values():
        assert found[check][0] == "unknown"
        assert "no answer within 12 s" in found[check][1]
    assert found["wheel"][0] == "ok"
    assert found.seconds < 60


def test_a_flashinfer_that_hangs_ends_in_unknown(machine: Machine) -> None:
    (machine.wheel / "flashinfer" / "plain.py").write_text("import time; time.sleep(600)")
    found = machine.diagnose(timeout=LIMIT)
    assert found["import"][0] == "unknown"
    assert "-X importtime" in found["import"][2]
    assert found.seconds < 60


def test_what_a_question_found_before_it_crashed_is_kept(machine: Machine) -> None:
    machine.vllm(has_nvidia_artifactory=True)
    file = machine.root / "site" / "vllm" / "utils" / "flashinfer.py"
    file.write_text(file.read_text() + "\ndef has_nvidia_artifactory():\n    import os\n    os.abort()\n")
    machine.without_plugin()
    found = machine.diagnose()
    assert found["vllm-flashinfer"][0] == "ok"
    assert found["vllm-attention"][0] == "unknown"
    assert "SIGABRT" in found["vllm-attention"][1]


# --- what is printed --------------------------------------------------------------------------------------------------


def test_json_keeps_its_form(machine: Machine) -> None:
    data = machine.diagnose().data
    assert list(data) == ["format", "fork", "upstream", "findings", "facts"]
    assert (data["format"], data["upstream"]) == (1, UPSTREAM)
    assert set(data["facts"]) == set(asking.QUESTIONS)
    for finding in data["findings"]:
        assert {key: type(value) for key, value in finding.items()} == dict.fromkeys(
            ["check", "state", "found", "remedy"], str
        )
        assert finding["state"] in doctor.STATES
    assert [finding["check"] for finding in data["findings"]] == list(doctor.CHECKS)
    assert (
        list(doctor.CHECKS)
        == (
            "import wheel companions pythonpath compiler ninja cxx gpu driver torch architectures cache disk modules memory "
            "switches probe vllm vllm-flashinfer vllm-plugin vllm-moe vllm-linear vllm-attention vllm-graphs"
        ).split()
    )


def test_the_page_has_each_check_and_no_other() -> None:
    page = (REPO / "docs" / "doctor.md").read_text(encoding="utf-8")
    outputs = [re.findall(r"^(?:ok|warn|fail|unknown) +([\w-]+)", text, re.MULTILINE) for text in page.split("```text")]
    without_gpu, h200, virtual = filter(None, outputs)
    explained = re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    # Without a GPU there is no driver to tell the version of; the probe is shown on the virtual SM121, without times.
    untimed = [check for check in doctor.PROBE_CHECKS if not check.startswith(("probe-overlap", "probe-layer"))]
    assert without_gpu == [check for check in doctor.CHECKS if check != "driver"]
    assert virtual == untimed
    # A Hopper has no block-scaled MMAs; vLLM was not installed there.
    every = [*doctor.CHECKS, *doctor.PROBE_CHECKS]
    missing = {check for check in every if check.startswith("vllm-")} | {"probe-mma-mxf8f6f4", "probe-mma-mxf4"}
    assert h200 == [check for check in every if check not in missing]
    assert explained == [*doctor.CHECKS, *doctor.PROBE_CHECKS]


def test_the_page_has_what_was_planted_with_the_same_remedies() -> None:
    page = (REPO / "docs" / "doctor.md").read_text(encoding="utf-8").replace("`<", "<").replace(">`", ">")
    rows = re.findall(r"^\| (warn|fail) `([\w-]+)` \| (.*) \| (.*) \|$", page, re.MULTILINE)
    for state, check, found, remedy in rows:
        if check == "modules":  # see test_this_environment_with_kernels_of_an_older_fork
            continue
        fitting = [
            words
            for _, *where, words, mends in PLANTED.values()
            if where == [check, state] and words in found and mends.replace(str(REPO), "~/flashinfer-sm12x") in remedy
        ]
        assert fitting, (check, found, remedy)
    assert len(rows) >= 10


def test_without_vllm_nothing_is_said_of_its_choices(machine: Machine) -> None:
    shutil.rmtree(machine.root / "site" / "vllm")
    machine.without_package("vllm")
    found = machine.diagnose()
    assert [check for check in found.states() if check.startswith("vllm")] == ["vllm"]
    assert found["vllm"][0] == "ok"


def test_the_table_fits_its_width_and_counts(machine: Machine) -> None:
    machine.variables["FLASHINFER_CUDA_ARCH_LIST"] = "12.0a"
    result = machine.doctor()
    lines = result.stdout.splitlines()
    assert result.returncode == 1
    assert [line.split()[:2] for line in lines if line.startswith("fail")] == [["fail", "architectures"]]
    assert any(line.strip() == "-> export FLASHINFER_CUDA_ARCH_LIST=12.1a" for line in lines)
    assert lines[-1].endswith("1 fail, 2 unknown")
    long = [line for line in lines if len(line) > 120 and str(machine.root) not in line]
    assert long == []


# --- checks of facts that fakes do not have ---------------------------------------------------------------------------


def findings(environ: dict[str, str] | None = None, **facts: dict[str, Any]) -> dict[str, doctor.Finding]:
    answers = asking.Answers({question: facts.get(question, {}) for question in asking.QUESTIONS}, environ or {})
    return {finding.check: finding for finding in doctor.diagnose(answers)}


def module(stale: list[str], built: bool = True) -> dict[str, Any]:
    return {
        "module fused_moe_120": {"built": built, "stale": stale, "sources": 18, "bytes": 8 << 20, "library": "x.so"}
    }


def test_modules_fresh_stale_and_forbidden() -> None:
    assert findings(modules=module([]))["modules"].state == "ok"
    stale = findings(modules=module(["a.o: flags or compiler changed"]))["modules"]
    assert (stale.state, "a.o: flags or compiler changed" in stale.found) == ("warn", True)
    assert stale.remedy.endswith("-m flashinfer sm12x-build")
    forbidden = findings({"FLASHINFER_DISABLE_JIT": "1"}, modules=module(["a.o: not built yet"], built=False))[
        "modules"
    ]
    assert (forbidden.state, forbidden.remedy.startswith("unset FLASHINFER_DISABLE_JIT; ")) == ("fail", True)


def test_modules_prebuilt_and_passed_over() -> None:
    ready = {"prebuilt": True, "stale": [], "bytes": 1 << 20, "library": "site/x.so"}
    row = findings(modules={"module fused_moe_120": ready})["modules"]
    assert (row.state, row.found) == ("ok", "fused_moe_120 is prebuilt, 1.0 MiB")
    (facts,) = module([]).values()
    facts["passed_over"] = "x.cuh is not what it was built from"
    row = findings(modules={"module gemm": ready, "module fused_moe_120": facts})["modules"]
    assert row.state == "warn"
    assert (
        "fused_moe_120 is built and fresh, 8.0 MiB; prebuilt kernels are passed over (fused_moe_120: x.cuh" in row.found
    )
    assert "uninstall flashinfer-sm12x-kernels" in row.remedy
    facts["stale"] = ["a.o: not built yet"]
    row = findings(modules={"module gemm": ready, "module fused_moe_120": facts})["modules"]
    assert row.state == "warn"
    assert re.search("uninstall flashinfer-sm12x-kernels, .*; .*sm12x-build$", row.remedy)


def test_no_compiler_is_a_warning_where_all_is_prebuilt() -> None:
    facts = {
        "compiler": {"pip": "pip install x", "error": "CUDA_HOME=/none holds no bin/nvcc. Set it."},
        "tools": {"cxx": {"program": "c++", "path": None}},
    }
    ready = {"prebuilt": True, "stale": [], "bytes": 1 << 20, "library": "site/x.so"}
    old = {"pip": "pip install x", "version": "12.4", "nvcc": "nvcc", "origin": "PATH"}
    for modules, state in (
        ({"module fused_moe_120": ready}, "warn"),
        ({"module gemm": ready, **module([])}, "fail"),
        ({}, "fail"),
    ):
        found = findings(**facts, modules=modules)
        for row in (found["compiler"], found["cxx"], findings(compiler=old, modules=modules)["compiler"]):
            assert row.state == state
            assert ("this fork's modules are prebuilt and need none" in row.found) == (state == "warn")
            assert row.remedy


def test_a_probe_file_that_is_none_and_one_of_few_bits() -> None:
    broken = findings(
        modules={"probe_error": "cache/sm12x_probe.json is not what a probe writes", "workspace": "cache"}
    )
    assert (broken["probe"].state, broken["probe"].remedy) == ("fail", "rm cache/sm12x_probe.json")
    for wide, packed, expected in (
        (
            13,
            25,
            "13 bits (mxf8f6f4), 25 bits (mxf4) of a sum; 20 are needed, so half precision takes the place of mxf8f6f4",
        ),
        (19, 13, "half precision takes the place of mxf8f6f4 and mxf4"),
        (25, 19, "half precision takes the place of mxf4"),
        (21, 20, "block-scaled MMAs keep 21 bits (mxf8f6f4), 20 bits (mxf4) of a sum; 20 are needed"),
        (None, None, "was not probed"),
    ):
        probed = {"mxf8f6f4": wide, "mxf4": packed}
        row = findings(modules={"probed_sum_bits": probed, "narrowest_sum": 20})["probe"]
        assert row.state == "ok"
        assert expected in row.found
        assert ("half" in row.found) == ("half" in expected)


@pytest.mark.parametrize(("free", "state"), [(8 << 30, "ok"), (1 << 29, "warn"), (1 << 20, "fail")])
def test_disk(free: int, state: str) -> None:
    assert findings(folder={"free_bytes": free})["disk"].state == state


def test_little_memory() -> None:
    little = findings(memory={"available": 1 << 30, "jobs": 1, "reason": "2 cores"})["memory"]
    assert (little.state, "MAX_JOBS=1" in little.remedy) == ("warn", True)


def test_a_cache_that_can_only_be_read() -> None:
    facts = {"folder": "cache", "owner": 0, "me": 1000, "writable": False, "exists": True}
    found = findings(folder=facts)["cache"]
    assert (found.state, "chown -R 1000 cache" in found.remedy) == ("warn", True)


def test_a_check_that_fails_is_one_unknown() -> None:
    assert findings(memory={"available": "a lot", "jobs": 1, "reason": ""})["memory"].state == "unknown"


# --- this machine -----------------------------------------------------------------------------------------------------


def of_this_environment(folder: Path, *path: Path) -> dict[str, dict[str, str]]:
    """All questions for real, through the command line; ``folder`` is where the cache is."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER")}
    environment |= {
        "PYTHONPATH": ":".join(map(str, (REPO, *path))),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
    }
    command = [sys.executable, "-m", "flashinfer", "sm12x-doctor", "--json", "--timeout", "300"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    found = {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.returncode == int("fail" in {finding["state"] for finding in found.values()})
    return found


@pytest.mark.slow
@pytest.mark.privileges
def test_this_environment_with_a_broken_file_of_a_probe(tmp_path: Path) -> None:
    probe = tmp_path / ".cache" / "flashinfer" / UPSTREAM / "121a" / "sm12x_probe.json"
    probe.parent.mkdir(parents=True)
    probe.write_text("{}")
    found = of_this_environment(tmp_path)
    assert found["import"]["state"] == "ok"
    assert str(OURS / "__init__.py") in found["import"]["found"]
    assert found["architectures"]["found"].startswith("12.1a ")
    assert (found["probe"]["state"], found["probe"]["remedy"]) == ("fail", f"rm {probe}")


@pytest.mark.slow
def test_this_environment_with_kernels_of_an_older_fork(tmp_path: Path) -> None:
    manifest = {"format": prebuilt.FORMAT, "fork": "0.0.9", "modules": []}
    package = {"__init__.py": "", prebuilt.MANIFEST: json.dumps(manifest)}
    write_tree(tmp_path / "kernels" / prebuilt.PACKAGE, package)
    modules = of_this_environment(tmp_path, tmp_path / "kernels")["modules"]
    assert modules["state"] == "warn"
    assert "fused_moe_120 is not built" in modules["found"]
    assert "has fork 0.0.9, this is fork" in modules["found"]
    assert re.search("uninstall flashinfer-sm12x-kernels, .*; .*sm12x-build$", modules["remedy"])
