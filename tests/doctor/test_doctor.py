# SPDX-License-Identifier: Apache-2.0
"""The doctor names what is wrong with a machine, its commands mend it, and it ends whatever the machine does."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import DOCTOR, REPO, UPSTREAM, Machine, Parts
from layer_toys import FORK_FILES, OURS, write_fork, write_tree, write_wheel

from flashinfer.jit.sm12x import prebuilt, toolchain
from flashinfer.sm12x import doctor
from flashinfer.sm12x.doctor import asking, checks, questions

PAGE = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.fixture
def machine(tmp_path: Path, parts: Parts) -> Machine:
    return Machine(tmp_path, parts)


# The toy wheel has nothing to build, and memory is that of the machine that the test runs on.
NOT_FAKED = {"modules", "headroom", "memory"}


def test_a_healthy_machine(machine: Machine) -> None:
    found = machine.diagnose()
    assert set(found.states()) == set(doctor.CHECKS) - {"architectures", "probe"}  # of modules, which see
    assert {found.states()[check] for check in set(found.states()) - NOT_FAKED} == {"ok"}
    assert found["modules"][0] == "unknown"
    assert found.status == 1  # for that
    assert "experts are this fork's (moe mxfp4, qkv bf16" in found["vllm-plugin"][1]


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warn", 0), ("fail", 1), ("unknown", 1)])
def test_exit_status(state: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask", lambda *_: {})
    found = [doctor.Finding("import", "ok", ""), doctor.Finding("gpu", state, "", "a remedy")]
    monkeypatch.setattr(doctor, "diagnose", lambda *_: found)
    assert doctor.main([]) == status


# --- planted ----------------------------------------------------------------------------------------------------------

Plant = Callable[[Machine], None]


@dataclass(frozen=True)
class Planted:
    """What is planted, the row that tells it, and what its command does.

    Attributes:
        command: A part of it; empty where there is none.
        mends: Whether the finding is gone when the command has run; else it installs, shows more, or there is none.
        loses: Entries of the user's variables that it takes away.
    """

    plant: Plant
    check: str
    state: str
    found: str
    command: str
    mends: bool
    loses: tuple[str, ...]


PLANTED: dict[str, Planted] = {}


def planted(
    check: str, state: str, found: str, command: str = "", mends: bool = False, loses: tuple[str, ...] = ()
) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        PLANTED[plant.__name__] = Planted(plant, check, state, found, command, mends, loses)
        return plant

    return add


FIRST = f"export PYTHONPATH={REPO}${{PYTHONPATH:+:$PYTHONPATH}}"


@planted("import", "fail", "the plain wheel in", FIRST, mends=True)
def plain_wheel_first(m: Machine) -> None:
    m.path = [m.wheel, *m.path]


@planted("import", "fail", "empty namespace package", FIRST, mends=True)
def empty_namespace_package(m: Machine) -> None:
    (m.site / "flashinfer" / "data").mkdir(parents=True)
    m.path = [m.site]


@planted("import", "fail", "no flashinfer on sys.path", FIRST, mends=True)
def no_flashinfer(m: Machine) -> None:
    m.path = [m.site]


@planted(
    "import", "fail", "extends the wheel", f'pip install --force-reinstall --no-deps "flashinfer-python=={UPSTREAM}"'
)
def wheel_of_another_version(m: Machine) -> None:
    shutil.rmtree(m.wheel)
    write_wheel(m.wheel, {"__init__.py": ""}, version="0.6.4")


@planted("import", "fail", "SyntaxError: '(' was never closed", f'--no-deps "flashinfer-python=={UPSTREAM}"')
def wheel_of_which_a_part_is_cut_off(m: Machine) -> None:
    (m.wheel / "flashinfer" / "plain.py").write_text("print(")


@planted("import", "fail", "No module named 'tvm_ffi'", f'pip install "flashinfer-python=={UPSTREAM}"')
def package_that_the_wheel_needs(m: Machine) -> None:
    (m.wheel / "flashinfer" / "plain.py").write_text("import tvm_ffi")


@planted("import", "warn", "this doctor is of", FIRST, mends=True, loses=("/other",))
def fork_of_another_checkout(m: Machine) -> None:
    m.path = [write_fork(m.root / "other", FORK_FILES), *m.path]


@planted("pythonpath", "warn", "2 forks", "export PYTHONPATH=", mends=True, loses=("/other",))
def two_forks(m: Machine) -> None:
    m.path.append(write_fork(m.root / "other", FORK_FILES))


@planted("pythonpath", "warn", "2 forks", "pip uninstall --yes flashinfer-sm12x")
def installed_fork_behind_a_checkout(m: Machine) -> None:
    fork = write_fork(m.root / "other", FORK_FILES)
    write_tree(m.site, {"sitecustomize.py": f"import sys\nsys.path.append({str(fork)!r})\n"})


@planted("import", "fail", "flashinfer-cubin version (0.6.4) does not match", f'install "flashinfer-cubin=={UPSTREAM}"')
def cubins_of_another_version(m: Machine) -> None:
    said = f"flashinfer-cubin version (0.6.4) does not match flashinfer version ({UPSTREAM})"
    (m.wheel / "flashinfer" / "plain.py").write_text(f"raise RuntimeError({said!r})")


@planted(
    "variables", "warn", "FLASHINFER_SM12X_CHEKC is no variable of this project; FLASHINFER_SM12X_CHECK is",
    'export FLASHINFER_SM12X_CHECK="$FLASHINFER_SM12X_CHEKC"', mends=True,
)  # fmt: skip
def misspelled_name(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_CHEKC"] = "1"


@planted("variables", "warn", "flashinfer_jit_verbose is no variable", "unset flashinfer_jit_verbose", mends=True)
def name_in_small_letters_beside_the_right_one(m: Machine) -> None:
    m.variables |= {"flashinfer_jit_verbose": "1", "FLASHINFER_JIT_VERBOSE": "0"}


@planted("variables", "warn", "FLASHINFER_SM12X_FASTER is no variable", "unset FLASHINFER_SM12X_FASTER", mends=True)
def name_that_never_was(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_FASTER"] = "1"


@planted("variables", "fail", "FLASHINFER_SM12X_MOE is 'off'; it may be 0, 1 or unset", "unset", mends=True)
def bad_value(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_MOE"] = "off"


@planted(
    "vllm-plugin", "fail", "vLLM does not start: FLASHINFER_SM12X_VLLM: 'off' is no key=value", "unset", mends=True
)
def plugin_off_in_a_word(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_VLLM"] = "off"


@planted("variables", "fail", "qkv is 'int4'; it may be bf16", "unset FLASHINFER_SM12X_VLLM", mends=True)
def plugin_with_a_bad_choice(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_VLLM"] = "qkv=int4"


@planted("variables", "warn", "upstream's kernels run in place of", "unset FLASHINFER_SM12X_MOE", mends=True)
def switched_off(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_MOE"] = "0"


@planted("variables", "warn", "waits for the GPU", "unset FLASHINFER_SM12X_CHECK", mends=True)
def checks_left_on(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_CHECK"] = "1"


@planted("build", "fail", "holds no bin/nvcc", "unset CUDA_HOME", mends=True)
def cuda_home_that_points_at_nothing(m: Machine) -> None:
    m.variables["CUDA_HOME"] = str(m.root / "none")


@planted("build", "fail", "does not know compute_121a", 'install "nvidia-cuda-nvcc==13.0.*"')
def old_compiler(m: Machine) -> None:
    said = "nvcc fatal   : Unsupported gpu architecture 'compute_121a'"
    m.program("toolkit/bin/nvcc", f"[ $1 != --version ] && echo \"{said}\" && exit 1\necho 'release 12.4, V12.4.1'")


@planted("build", "fail", "names no CUDA release", "")
def compiler_that_is_none(m: Machine) -> None:
    m.program("toolkit/bin/nvcc", "echo hello")


@planted("build", "fail", "libcudart.so", 'install "nvidia-cuda-nvcc==13.0.*"')
def toolkit_without_a_runtime(m: Machine) -> None:
    m.remove("toolkit/lib64/libcudart.so")


@planted("build", "fail", "ninja, which runs the compilers, is not installed", "pip install ninja")
def no_ninja(m: Machine) -> None:
    m.remove("bin/ninja")


@planted("build", "fail", "doctor.so: cannot open shared object file")
def ninja_that_does_nothing(m: Machine) -> None:
    m.program("bin/ninja", "exit 0")


@planted("build", "fail", "the host C++ compiler is missing", "apt-get install --yes g++")
def no_host_compiler(m: Machine) -> None:
    m.remove("bin/c++", "bin/g++")


@planted("build", "fail", "SIGSEGV", "")
def host_compiler_that_crashes(m: Machine) -> None:
    m.program("bin/c++", "kill -SEGV $$")
    m.program("bin/g++", "kill -SEGV $$")


@planted("build", "fail", "Failed to preprocess host compiler", "unset NVCC_CCBIN", mends=True)
def nvcc_ccbin(m: Machine) -> None:
    m.variables["NVCC_CCBIN"] = "no-such-g++"


@planted("build", "fail", "clang++-99", "unset CXX", mends=True)
def cxx(m: Machine) -> None:
    m.variables["CXX"] = "clang++-99"


@planted("build", "fail", "--bogus", "unset NVCC_APPEND_FLAGS", mends=True)
def flags_that_nvcc_does_not_know(m: Machine) -> None:
    m.variables["NVCC_APPEND_FLAGS"] = "--bogus"


@planted("build", "fail", "no-ccache", "unset FLASHINFER_NVCC_LAUNCHER", mends=True)
def launcher_that_is_gone(m: Machine) -> None:
    m.variables["FLASHINFER_NVCC_LAUNCHER"] = "no-ccache"


ELSEWHERE = "&& export FLASHINFER_WORKSPACE_BASE="


@planted("build", "fail", "writable by everybody", ELSEWHERE, mends=True, loses=("/cache",))
def cache_of_everybody(m: Machine) -> None:
    folder = m.root / "cache" / ".cache" / "flashinfer"
    folder.mkdir(parents=True)
    folder.chmod(0o777)


@planted("build", "fail", "the cache cannot be written", ELSEWHERE, mends=True, loses=("/below",))
def cache_that_cannot_be_made(m: Machine) -> None:
    (m.root / "file").write_text("")
    m.variables["FLASHINFER_WORKSPACE_BASE"] = str(m.root / "file" / "below")


@planted("build", "fail", "failed to map segment", ELSEWHERE, mends=True, loses=("/cache",))
def cache_from_which_nothing_may_run(m: Machine) -> None:
    m.mounting(f"/bin/mount -t tmpfs -o noexec,mode=755 tmpfs {m.root / 'cache'}")


@planted("build", "fail", "Read-only file system", ELSEWHERE, mends=True, loses=("/cache",))
def cache_on_a_file_system_that_can_only_be_read(m: Machine) -> None:
    folder = m.root / "cache"
    m.mounting(f"/bin/mount --bind {folder} {folder}; /bin/mount -o remount,bind,ro {folder}")


@planted("build", "fail", "No space left", ELSEWHERE, mends=True, loses=("/cache",))
def full_disk(m: Machine) -> None:
    m.mounting(f"/bin/mount -t tmpfs -o size=8k,mode=755 tmpfs {m.root / 'cache'}")


@planted("disk", "warn", "where temporary files go", "unset TMPDIR", mends=True)
def full_folder_of_temporary_files(m: Machine) -> None:
    (m.root / "tmp").mkdir()
    m.variables["TMPDIR"] = str(m.root / "tmp")
    m.mounting(f"/bin/mount -t tmpfs -o size=8k tmpfs {m.root / 'tmp'}")


@planted("gpu", "fail", "couldn't communicate")
def driver_that_is_not_loaded(m: Machine) -> None:
    m.program("bin/nvidia-smi", 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the driver"; exit 9')
    m.torch("13.0", [])


@planted("gpu", "warn", "no GPU")
def no_gpu(m: Machine) -> None:
    m.remove("bin/nvidia-smi")
    m.torch(None, [])


@planted("gpu", "warn", "none is of the SM12x family")
def hopper(m: Machine) -> None:
    m.gpus("NVIDIA H200, 9.0, 580.95.05")


@planted("gpu", "ok", "because FLASHINFER_SM12X_MOE=1")
def hopper_on_purpose(m: Machine) -> None:
    m.gpus("NVIDIA H200, 9.0, 580.95.05")
    m.variables["FLASHINFER_SM12X_MOE"] = "1"


@planted("driver", "fail", "570.86.10 is older than 580", "apt-get install --yes nvidia-driver-580-open")
def old_driver(m: Machine) -> None:
    m.gpus("NVIDIA GB10, 12.1, 570.86.10")


@planted("driver", "warn", "driver 595.84: GB10s were reported to hang")
def driver_with_which_hosts_wedge(m: Machine) -> None:
    m.gpus("NVIDIA GB10, 12.1, 595.84")


@planted(
    "kernel-log", "warn", "1 complaints of the driver, the last: [ 7.1] NVRM: Xid (PCI:0000:01:00): 79", "nvidia-smi -q"
)
def complaint_in_the_kernels_log(m: Machine) -> None:
    m.program(
        "bin/dmesg", "echo '[ 7.0] NVRM: loading'; echo '[ 7.1] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off'"
    )


@planted("kernel-log", "warn", "NV_ERR_NO_MEMORY")
def memory_that_ran_out(m: Machine) -> None:
    m.program("bin/dmesg", "echo '[ 7.1] NVRM: Out of memory [NV_ERR_NO_MEMORY] returned from _memdescAllocInternal'")


@planted("kernel-log", "warn", "this user may not", "sudo dmesg")
def kernels_log_that_may_not_be_read(m: Machine) -> None:
    m.program("bin/dmesg", "exit 1")


@planted("torch", "fail", "without CUDA", "pip install vllm==0.33.0")
def torch_without_cuda(m: Machine) -> None:
    m.torch(None, [])


@planted("torch", "fail", "torch is not installed", "pip install vllm==0.33.0")
def no_torch(m: Machine) -> None:
    shutil.rmtree(m.site / "torch")


@planted("torch", "fail", "sees no GPU, the driver does", "unset CUDA_VISIBLE_DEVICES", mends=True)
def hidden_gpu(m: Machine) -> None:
    m.variables["CUDA_VISIBLE_DEVICES"] = ""


@planted(
    "torch", "fail", "is for CUDA 13.9 and found the runtime of CUDA 13.", "export LD_LIBRARY_PATH=", mends=True,
    loses=("/older",),
)  # fmt: skip
def runtime_of_an_older_release(m: Machine) -> None:
    runtime = toolchain.discover().find_library("cudart").resolve()
    (m.root / "older").mkdir()
    shutil.copy(runtime, m.root / "older" / "libcudart.so.13")
    m.variables["LD_LIBRARY_PATH"] = f"/users/own:{m.root / 'older'}"
    code = "import ctypes, os\nif 'older' in os.environ['LD_LIBRARY_PATH']: ctypes.CDLL('libcudart.so.13')"
    m.torch("13.9", [("NVIDIA GB10", (12, 1))], at_import=code)


@planted("vllm", "warn", "vLLM 0.31.0", "pip install vllm==0.33.0")
def another_vllm(m: Machine) -> None:
    m.vllm("0.31.0")


@planted("vllm-flashinfer", "fail", "vLLM finds no ninja", "export PATH=")
def vllm_without_ninja(m: Machine) -> None:
    m.remove("bin/ninja")


@planted("vllm-flashinfer", "fail", "vLLM finds no nvcc", "export CUDA_HOME=", mends=True)
def vllm_without_nvcc(m: Machine) -> None:
    wheels = m.site / "nvidia" / "cu13"
    shutil.move(m.root / "toolkit", wheels)
    (wheels / "lib64").rename(wheels / "lib")


@planted("vllm-flashinfer", "fail", "lacks functions", FIRST)
def vllm_with_half_a_flashinfer(m: Machine) -> None:
    m.vllm(has_flashinfer_cutlass_fused_moe="False")


@planted("vllm-flashinfer", "warn", "TRITON_ATTN", f'pip install "flashinfer-cubin=={UPSTREAM}"')
def offline_without_cubins(m: Machine) -> None:
    m.vllm(has_nvidia_artifactory="False")


@planted("vllm", "warn", "does not read VLLM_ATTENTION_BACKEND: --attention-backend chooses", "unset VLLM_", mends=True)
def variable_of_an_older_vllm(m: Machine) -> None:
    m.variables |= {"VLLM_ATTENTION_BACKEND": "FLASHINFER", "VLLM_KV_CACHE_LAYOUT": "HND", "VLLM_OF_ONES_OWN": "1"}


@planted(
    "vllm", "warn", "this fork; VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS: the plugin", "unset VLLM_", mends=True
)
def variables_of_older_recipes(m: Machine) -> None:
    m.variables |= {"VLLM_FLASHINFER_MOE_BACKEND": "latency", "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": "1"}


@planted("vllm-plugin", "warn", "no entry point", FIRST, mends=True)
def no_plugin(m: Machine) -> None:
    m.without_package("flashinfer-sm12x")


@planted("vllm-plugin", "warn", "VLLM_PLUGINS=other", "export VLLM_PLUGINS=", mends=True)
def plugin_not_listed(m: Machine) -> None:
    m.variables["VLLM_PLUGINS"] = "other"


@planted("vllm-plugin", "warn", "switched off: FLASHINFER_SM12X_VLLM=0", "unset FLASHINFER_SM12X_VLLM", mends=True)
def plugin_switched_off(m: Machine) -> None:
    m.variables["FLASHINFER_SM12X_VLLM"] = "0"


@planted("vllm-plugin", "fail", "could not be installed: ImportError: cannot import name 'config'")
def plugin_of_which_a_part_is_gone(m: Machine) -> None:
    m.remove("tree/flashinfer_sm12x_vllm/config.py")


@planted("vllm-plugin", "fail", "could not be installed: AttributeError: vLLM has moved this")
def plugin_for_another_vllm(m: Machine) -> None:
    m.plugin_part("config", "def install(): raise AttributeError('vLLM has moved this')")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_state_is_named_and_its_command_mends_it(machine: Machine, name: str) -> None:
    """All commands are pasted into one shell, in which the doctor runs again."""
    expected = PLANTED[name]
    machine.variables |= {"USERS_OWN": "1"}
    machine.path.append(machine.root / "users-own")
    expected.plant(machine)
    before = machine.diagnose()
    state, found, command, why = before[expected.check]
    assert (state, expected.found in found) == (expected.state, True), (state, found)
    assert expected.command in command
    assert bool(command) == bool(expected.command)
    assert bool(command or why) == (state != "ok")
    assert before.status == int(not {"fail", "unknown"}.isdisjoint(before.states().values()))
    commands = [finding["command"] for finding in before.data["findings"] if finding["command"]]
    after, variables, statuses = machine.paste(commands)
    assert not {2, 127}.intersection(statuses), "a command that no shell takes"
    assert (expected.found in after[expected.check][1]) != expected.mends, after[expected.check]
    wanted = re.search(r"(?:pip|apt-get) (?:un)?install (.*)", command)
    if wanted:
        assert all(word in machine.installed() for word in shlex.split(wanted[1].split("&&")[0]))
    assert commands or not machine.installed()
    unset = " ".join(re.findall(r"unset (\w+)", " ".join(commands)))
    for variable, text in machine.environment().items():
        kept = re.split("[:, ]", variables.get(variable, ""))
        lost = [
            item
            for item in re.split("[:, ]", text)
            if item not in kept and not item.endswith(expected.loses or ("\0",))
        ]
        assert not lost or variable in unset, (variable, text, kept)


def test_forty_states_are_planted_and_what_cannot_be_found_is_told() -> None:
    assert len(PLANTED) >= 40
    assert re.search(r"^## What it cannot find$", PAGE, re.MULTILINE)


def test_a_fork_that_only_the_working_directory_gives_is_not_what_a_server_imports(machine: Machine) -> None:
    """``python -m`` looks there; ``vllm serve`` does not. And the command runs without upstream's, which toys lack."""
    machine.path.remove(machine.tree)
    for how in (("-m", "flashinfer", "sm12x-doctor"), ("-Bmflashinfer", "sm12x-doctor")):
        result = machine.doctor("--json", how=how, cwd=REPO)
        assert result.returncode == 1, result.stderr
        finding = json.loads(result.stdout)["findings"][0]
        assert (finding["check"], finding["state"]) == ("import", "fail")
        assert finding["found"].startswith(f"the plain wheel in {machine.wheel}")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"SM12X": {"qkv": "mxfp8"}}', "'SM12X' is no key that a plugin reads; 'sm12x' is"),
        ('{"qkv": "mxfp8"}', "'qkv' stands at the top; it is a key of 'sm12x'"),
        ('{"sm12x": {"qkv": "int4"}}', "qkv is 'int4'; it may be bf16"),
        ("{", "Expecting property name"),
    ],
)
def test_additional_config_is_checked_as_vllm_will_have_it(machine: Machine, config: str, words: str) -> None:
    state, found, _, _ = machine.diagnose("--additional-config", config)["vllm-plugin"]
    assert (state, words in found) == ("fail", True), found
    assert machine.diagnose("--additional-config", '{"other": {"qkv": 1}}')["vllm-plugin"][0] == "ok"


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
    "says no end of a line": "import os\nfor _ in range(300): os.write(1, b'x' * 65536)\nos._exit(3)",
}
LIMIT = "5"


@pytest.mark.parametrize("how", HOSTILE)
def test_a_vllm_that_does_not_import_ends_in_unknown(machine: Machine, how: str) -> None:
    machine.vllm(at_import=HOSTILE[how])
    found = machine.diagnose("--timeout", LIMIT)
    assert found["vllm-flashinfer"][0] == "unknown"
    assert found["vllm"][0] == found["vllm-plugin"][0] == found["build"][0] == "ok"
    assert found.seconds < 40, "it waited for what sleeps for ten minutes"


def test_programs_that_hang_end_in_unknown(machine: Machine) -> None:
    rows = {"toolkit/bin/nvcc": "build", "bin/nvidia-smi": "gpu"}
    for program in rows:
        machine.program(program, f"echo $$ >> {machine.root}/hang; trap '' TERM; while :; do /bin/sleep 600; done")
    machine.torch("13.0", [])
    found = machine.diagnose("--timeout", LIMIT)
    for check in rows.values():
        assert found[check][0] == "unknown"
        assert "no answer within 5 s" in found[check][1]
    assert found["build"][2].endswith("sm12x-doctor --timeout 20")
    for pid in (machine.root / "hang").read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z", "what the question started outlives it"
    assert found["pythonpath"][0] == "ok"
    assert found.seconds < 40


def test_a_flashinfer_that_hangs_ends_in_unknown(machine: Machine) -> None:
    (machine.wheel / "flashinfer" / "plain.py").write_text("import time; time.sleep(600)")
    found = machine.diagnose("--timeout", "4")
    assert found["import"][0] == "unknown"
    assert "-X importtime" in found["import"][2]
    assert found.seconds < 40


def test_what_a_question_found_before_it_crashed_is_kept(machine: Machine) -> None:
    machine.vllm(has_nvidia_artifactory="__import__('os').abort()")
    found = machine.diagnose()
    assert found["vllm-plugin"][0] == "ok"
    assert found["vllm-flashinfer"][0] == "unknown"
    assert "SIGABRT" in found["vllm-flashinfer"][1]


def test_an_answer_may_be_longer_than_a_pipe_holds(machine: Machine) -> None:
    machine.program("bin/nvidia-smi", "printf '%0200000d' 0; exit 9")
    machine.torch("13.0", [])
    assert len(machine.diagnose()["gpu"][1]) > 200_000


# What each takes away from the process itself, by a shell that then starts it.
DEPRIVED = {
    "no standard output": 'exec "$@" >&-',
    "no descriptors": 'exec "$@" <&- >&- 2>&-',
    "a full standard output": 'exec "$@" > /dev/full',
    "a reader who leaves": '{ "$@"; echo $? > status; } | :; exit $(cat status)',
    "a working directory that is gone": 'mkdir gone; cd gone; rm -r ../gone; exec "$@"',
    "few descriptors": 'ulimit -n 12; exec "$@"',
    "no processes": 'ulimit -u 1; exec "$@"',
    "no variables": 'exec env -i "$@"',
}


@pytest.mark.parametrize("how", DEPRIVED)
def test_it_ends_without_a_traceback_whatever_it_lacks(machine: Machine, how: str) -> None:
    machine.program("bin/rmdir", "")
    command = ["/bin/sh", "-c", DEPRIVED[how], "sh", str(machine.python), str(DOCTOR)]
    done = subprocess.run(command, env=machine.environment(), cwd=machine.root, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == 1
    if how not in ("no standard output", "no descriptors", "a full standard output", "a reader who leaves"):
        assert re.search(r"\d+ ok, \d+ warn, \d+ fail, \d+ unknown$", done.stdout.strip()), done.stdout


def test_a_working_directory_that_is_gone_is_named_and_left(machine: Machine) -> None:
    """torch cannot be loaded from there; the command is a shell's own."""
    machine.variables["HOME"] = str(machine.root)
    doctor = f"{machine.python} {DOCTOR} --json"
    script = f"mkdir gone; cd gone; rm -r ../gone; {doctor} > {machine.root}/before; cd; exec {doctor}"
    done = subprocess.run(
        ["/bin/sh", "-c", script], env=machine.environment(), cwd=machine.root, capture_output=True, text=True
    )
    rows = [
        {finding["check"]: finding for finding in json.loads(text)["findings"]}
        for text in ((machine.root / "before").read_text(), done.stdout)
    ]
    assert rows[0]["import"]["state"] == "fail"
    assert rows[0]["import"]["found"].startswith("the working directory is gone")
    assert rows[0]["import"]["command"] == "cd"
    assert rows[1]["import"]["state"] == "ok"


def test_modules_of_pythons_names_on_the_path_do_not_stop_it(machine: Machine) -> None:
    names = ("json", "argparse", "textwrap", "subprocess", "dataclasses", "signal", "shlex", "pathlib", "probe")
    write_tree(machine.root / "shadows", {f"{name}.py": "raise SystemExit('shadow')" for name in names})
    machine.path.insert(0, machine.root / "shadows")
    result = machine.doctor()
    assert result.stdout.splitlines()[-1].endswith("unknown"), result.stderr
    assert "shadow" not in result.stderr


def test_a_copy_of_which_a_part_is_cut_off_says_so_in_a_line(machine: Machine) -> None:
    copy = machine.root / "copy" / "flashinfer" / "sm12x"
    copy.mkdir(parents=True)
    shutil.copytree(DOCTOR, copy / "doctor")
    result = machine.doctor(how=(str(copy / "doctor"),))
    assert result.returncode == 1
    assert result.stderr.startswith("sm12x-doctor: this copy of the fork is not whole: ")
    assert len(result.stderr.splitlines()) == 1
    machine.path = [write_fork(machine.root / "bare", {})]
    result = machine.doctor(how=("-m", "flashinfer", "sm12x-doctor"))
    assert result.returncode == 1
    assert result.stderr.startswith("python -m flashinfer: this copy of the fork is not whole: ")
    assert len(result.stderr.splitlines()) == 1


# --- what is printed --------------------------------------------------------------------------------------------------


def test_json_keeps_its_form(machine: Machine) -> None:
    data = machine.diagnose().data
    assert list(data) == ["format", "fork", "upstream", "findings", "facts"]
    assert (data["format"], data["upstream"]) == (2, UPSTREAM)
    assert set(data["facts"]) == set(questions.QUESTIONS)
    for finding in data["findings"]:
        assert {key: type(value) for key, value in finding.items()} == dict.fromkeys(
            ["check", "state", "found", "command", "why"], str
        )
        assert finding["state"] in doctor.STATES
    listed = [finding["check"] for finding in data["findings"]]
    assert listed == [check for check in doctor.CHECKS if check in listed]
    assert (
        list(doctor.CHECKS)
        == (
            "import pythonpath variables build gpu driver kernel-log torch architectures disk modules memory "
            "headroom probe vllm vllm-plugin vllm-flashinfer"
        ).split()
    )


def test_the_page_has_each_check_and_no_other() -> None:
    outputs = [re.findall(r"^(?:ok|warn|fail|unknown) +([\w-]+)", text, re.MULTILINE) for text in PAGE.split("```text")]
    explained = re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`[a-z].*?) \|", PAGE, re.MULTILINE)))
    (shown,) = filter(None, outputs)
    assert shown == [check for check in doctor.CHECKS if check in shown]
    assert explained == [*doctor.CHECKS, *doctor.PROBE_CHECKS]


def test_the_table_has_commands_alone_and_counts(machine: Machine) -> None:
    machine.variables["CUDA_HOME"] = "/none"
    result = machine.doctor()
    lines = result.stdout.splitlines()
    assert result.returncode == 1
    failed = [line.split()[1] for line in lines if line.startswith("fail")]
    assert failed == ["build", "vllm-flashinfer"]
    assert any(line.strip() == "$ unset CUDA_HOME" for line in lines)
    assert re.fullmatch(r"\d+ ok, \d+ warn, 2 fail, 1 unknown", lines[-1])
    assert [line for line in lines if len(line) > 120 and "$ " not in line and str(machine.root) not in line] == []


# --- checks of facts that fakes do not have ---------------------------------------------------------------------------


def findings(environ: dict[str, str] | None = None, **facts: dict[str, Any]) -> dict[str, doctor.Finding]:
    answers = asking.Answers({question: facts.get(question, {}) for question in questions.QUESTIONS}, environ or {})
    return {finding.check: finding for finding in doctor.diagnose(answers)}


def module(stale: str = "", prebuilt: bool = False, passed_over: str = "") -> dict[str, Any]:
    return {"prebuilt": prebuilt, "stale": stale, "passed_over": passed_over}


def test_modules_fresh_stale_prebuilt_and_passed_over() -> None:
    moe = "module fused_moe_120"
    fresh = findings(modules={moe: module(), "module gemm": module("it is not built yet")})["modules"]
    assert (fresh.state, fresh.command) == ("ok", "")
    stale = findings(modules={moe: module("x.cuh changed")})["modules"]
    assert (stale.state, "fused_moe_120: x.cuh changed" in stale.found) == ("warn", True)
    assert stale.command.endswith("-m flashinfer sm12x-build")
    forbidden = findings({"FLASHINFER_DISABLE_JIT": "1"}, modules={moe: module("x.cuh changed")})["modules"]
    assert (forbidden.state, forbidden.command.startswith("unset FLASHINFER_DISABLE_JIT && ")) == ("fail", True)
    assert findings(modules={moe: module(prebuilt=True)})["modules"].found == "fused_moe_120: prebuilt"
    passed = findings(modules={moe: module("it is not built yet", passed_over="x.cuh is another")})["modules"]
    assert (passed.state, "uninstall --yes flashinfer-sm12x-kernels" in passed.command) == ("warn", True)
    assert "(fused_moe_120: x.cuh is another)" in passed.found


@pytest.mark.parametrize(
    ("modules", "state"), [([module()], "warn"), ([module(), module("changed")], "fail"), ([], "fail")]
)
def test_no_compiler_is_a_warning_where_nothing_has_to_be_built(modules: list[dict[str, Any]], state: str) -> None:
    facts = {f"module {number}": fact for number, fact in enumerate(modules)}
    row = findings(build={"error": "no CUDA compiler found. Install one with: pip install x"}, modules=facts)["build"]
    assert (row.state, row.command.endswith("-m pip install x")) == (state, True)
    assert ("need none" in row.why) == (state == "warn")


SPARK = {"gpus": [{"name": "GB10", "capability": "12.1", "driver": "580.95.05"}]}


@pytest.mark.parametrize(
    ("listed", "state"),
    [
        (["12.1a"], "ok"),
        (["12.0f"], "ok"),
        (["12.1f"], "ok"),
        (["12.0a"], "fail"),
        (["9.0a", "12.0a"], "fail"),
        ([], "warn"),
    ],
)
def test_architectures_against_the_gpus(listed: list[str], state: str) -> None:
    row = findings(modules={"architectures": listed}, gpus=SPARK)["architectures"]
    assert row.state == state
    if state != "ok":
        command = f'{row.command}; printf %s "$FLASHINFER_CUDA_ARCH_LIST"'
        environment = {"FLASHINFER_CUDA_ARCH_LIST": " ".join(listed)} if listed else {}
        done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [*listed, "12.1a"]
    assert "architectures" not in findings(gpus=SPARK)


def test_headroom_is_of_unified_memory_and_beside_vllms_share() -> None:
    def row(available: float) -> doctor.Finding:
        return findings(gpus=SPARK, memory={"available": int(available * checks.GIB), "total": 100 * checks.GIB})[
            "headroom"
        ]

    assert row(100.5).state == "ok"
    assert row(100.0).state == "ok"
    little = row(99.9)
    assert (little.state, "--gpu-memory-utilization 0.91 or less" in little.why) == ("warn", True)
    assert "--gpu-memory-utilization 0.00" in row(1).why
    rtx = {"gpus": [{"name": "RTX", "capability": "12.0", "driver": "580"}]}
    assert "headroom" not in findings(gpus=rtx, memory={"available": 1, "total": 2})


def test_a_driver_is_told_to_wedge_on_unified_memory_only() -> None:
    rtx = {"gpus": [{"name": "RTX", "capability": "12.0", "driver": checks.WEDGED[0]}]}
    assert findings(gpus=rtx)["driver"].state == "ok"


def test_a_probe_file_that_is_none_and_one_of_few_bits() -> None:
    broken = findings(modules={"probe_error": "it is not what a probe writes", "workspace": "the cache"})["probe"]
    assert (broken.state, shlex.split(broken.command)) == ("fail", ["rm", "the cache/sm12x_probe.json"])
    for wide, packed, expected in (
        (13, 25, "20 are needed, so half precision takes the place of mxf8f6f4"),
        (19, 13, "half precision takes the place of mxf8f6f4 and mxf4"),
        (21, 20, "block-scaled MMAs keep 21 bits (mxf8f6f4), 20 bits (mxf4) of a sum; 20 are needed"),
        (None, None, "was not probed"),
    ):
        row = findings(modules={"probed_sum_bits": {"mxf8f6f4": wide, "mxf4": packed}, "narrowest_sum": 20})["probe"]
        assert row.state == "ok"
        assert row.found.endswith(expected) or "was not probed" in expected
        assert ("half" in row.found) == ("half" in expected)


@pytest.mark.parametrize(("free", "state"), [(8 << 30, "ok"), (1 << 29, "warn"), (1 << 20, "fail")])
def test_disk(free: int, state: str) -> None:
    assert findings(folder={"free_bytes": free, "folder": "cache"})["disk"].state == state


def test_little_memory() -> None:
    little = findings(memory={"available": 1 << 30, "jobs": 1, "reason": "2 cores"})["memory"]
    assert (little.state, little.command.startswith("MAX_JOBS=1 ")) == ("warn", True)


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


@pytest.mark.privileges
def test_this_environment_with_a_broken_file_of_a_probe(tmp_path: Path) -> None:
    probe = tmp_path / ".cache" / "flashinfer" / UPSTREAM / "121a" / "sm12x_probe.json"
    probe.parent.mkdir(parents=True)
    probe.write_text("{}")
    found = of_this_environment(tmp_path)
    assert found["import"]["state"] == found["build"]["state"] == "ok"
    assert str(OURS / "__init__.py") in found["import"]["found"]
    assert found["architectures"]["found"] == "12.1a"
    assert (found["probe"]["state"], found["probe"]["command"]) == ("fail", f"rm {probe}")


def test_this_environment_with_kernels_of_an_older_fork(tmp_path: Path) -> None:
    manifest = {"format": prebuilt.FORMAT, "fork": "0.0.9", "modules": []}
    package = {"__init__.py": "", prebuilt.MANIFEST: json.dumps(manifest)}
    write_tree(tmp_path / "kernels" / prebuilt.PACKAGE, package)
    modules = of_this_environment(tmp_path, tmp_path / "kernels")["modules"]
    assert modules["state"] == "warn"
    assert "fused_moe_120: it is not built yet" in modules["found"]
    assert "has fork 0.0.9, this is fork" in modules["found"]
    assert modules["command"].endswith("uninstall --yes flashinfer-sm12x-kernels")
