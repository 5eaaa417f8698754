# SPDX-License-Identifier: Apache-2.0
"""Faults that a machine may have, each with the row that tells it and what its command does."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from doctor_machine import NVCC, REPO, UPSTREAM, Machine
from layer_toys import FORK_FILES, write_fork, write_tree, write_wheel

from flashinfer_sm12x.build.toolchain import DEFAULT_ROOT


@dataclass(frozen=True)
class Planted:
    """A fault, the row that reports it, and the effect of its command.

    Attributes:
        check, state, found: The row's fields; of ``found`` a part.
        command: A part of the command; empty if there is none.
        variables: Environment variables to set; ``{root}`` is the machine's folder.
        mounts: A shell script that mounts file systems for every process.
        plant: Any other change to the machine.
        fixes: Whether the finding is gone after the command. False: the command only shows more, or there is none.
        then: The row's state after a command that fixes it.
        loses: Entries of the user's variables that the command removes.
        why: A part of the row's reason.
    """

    check: str
    state: str
    found: str
    command: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    mounts: str = ""
    plant: Callable[[Machine], object] = id
    fixes: bool = False
    then: str = "ok"
    loses: tuple[str, ...] = ()
    why: str = ""

    def into(self, machine: Machine) -> None:
        self.plant(machine)
        machine.variables |= {name: text.format(root=machine.root) for name, text in self.variables.items()}
        if self.mounts:
            machine.mounting(self.mounts.format(root=machine.root))


def _empty_namespace_package(m: Machine) -> None:
    (m.site / "flashinfer" / "data").mkdir(parents=True)
    _no_flashinfer(m)


def _no_flashinfer(m: Machine) -> None:
    shutil.rmtree(m.wheel)
    m.path = [m.wheel, m.site]


def _wheel_of_another_version(m: Machine) -> None:
    shutil.rmtree(m.wheel)
    write_wheel(m.wheel, {"__init__.py": ""}, version="0.6.4")


def _untested_wheel_first(m: Machine) -> None:
    _wheel_of_another_version(m)
    m.path.insert(0, m.wheel)


def _other_fork(m: Machine) -> Path:
    return write_fork(m.root / "other", FORK_FILES)


def _cache_of_everybody(m: Machine) -> None:
    folder = m.root / "cache" / ".cache" / "flashinfer"
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def _driver_that_is_not_loaded(m: Machine) -> None:
    m.program("bin/nvidia-smi", 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the driver"; exit 9')
    m.torch("13.0", [])


def _no_gpu(m: Machine) -> None:
    m.remove("bin/nvidia-smi")
    m.torch(None, [])


def _toolkit_of_pips(m: Machine) -> None:
    wheels = m.site / "nvidia" / "cu13"
    shutil.move(m.root / "toolkit", wheels)
    (wheels / "lib64").rename(wheels / "lib")


def _of_two_releases(folder: str) -> Callable[[Machine], object]:
    """The toolkit, or a copy of it, with headers of a later release than its compiler."""

    def plant(m: Machine) -> None:
        if not (m.root / folder).exists():
            shutil.copytree(m.root / "toolkit", m.root / folder)
        write_tree(m.root / folder, {"include/cuda_runtime_api.h": "#define CUDART_VERSION 13050\n"})

    return plant


def _guest(kind: str, *gpus: str) -> Callable[[Machine], object]:
    """Plant a guest that systemd calls ``kind``, with these GPUs."""

    def plant(m: Machine) -> None:
        m.program("bin/systemd-detect-virt", f"echo {kind}")
        if gpus:
            m.gpus(*gpus)

    return plant


def _uv(m: Machine) -> None:
    shutil.rmtree(m.site / "pip")
    m.program("bin/uv", f'echo uv "$@" >> {shlex.quote(str(m.root))}/installed')


def _uv_without_torch(m: Machine) -> None:
    _uv(m)
    shutil.rmtree(m.site / "torch")


def _uv_with_torch_without_cuda(m: Machine) -> None:
    _uv(m)
    m.torch(None, [])


def _no_gpu_in_wsl(m: Machine) -> None:
    _no_gpu(m)
    m.program("bin/systemd-detect-virt", "echo wsl")


def _editable_vllm(m: Machine) -> None:
    m.vllm("0.34.0")
    m.package("vllm", "0.34.0", url='{"dir_info": {"editable": true}, "url": "file:///home/u/vllm"}')


def _vllm_from_a_commit(m: Machine) -> None:
    m.vllm("0.32.0")
    m.package("vllm", "0.32.0", url='{"url": "https://a.b/vllm", "vcs_info": {"vcs": "git", "commit_id": "0"}}')


def _torch_of_the_users_beside_an_old_vllm(m: Machine) -> None:
    m.torch("13.0", [("NVIDIA GB10", (12, 1))], version="2.15.0a0+gitabc")
    m.vllm("0.31.0")


def _flashinfer_of_the_users(m: Machine) -> None:
    shutil.rmtree(m.wheel)
    write_wheel(m.wheel, {"__init__.py": ""}, version="0.8.0")
    url = '{"dir_info": {"editable": true}, "url": "file:///home/u/flashinfer"}'
    write_tree(m.wheel, {"flashinfer_python-0.8.0.dist-info/direct_url.json": url})


def _cubins_of_another_version(m: Machine) -> None:
    m.package("flashinfer-cubin", "0.6.4")
    text = f"""
from importlib import metadata
if metadata.version("flashinfer-cubin") != {UPSTREAM!r}:
    raise RuntimeError({CUBINS!r})
"""
    write_tree(m.wheel / "flashinfer", {"plain.py": text})


def _capabilities_disagree(m: Machine) -> None:
    m.torch("13.0", [("NVIDIA GB10", (12, 0))])
    del m.variables["FLASHINFER_CUDA_ARCH_LIST"]


def _without_nvidia_smi_in(kind: str) -> Callable[[Machine], object]:
    """Plant a guest in which torch sees the GPU without the driver's tool."""

    def plant(m: Machine) -> None:
        m.program("bin/systemd-detect-virt", f"echo {kind}")
        m.remove("bin/nvidia-smi")

    return plant


def _complaint_without_nvidia_smi(m: Machine) -> None:
    _without_nvidia_smi_in("docker")(m)
    m.program("bin/dmesg", f"echo '{XID}'")


def _old_driver_without_apt_get(m: Machine) -> None:
    m.remove("bin/apt-get")
    m.gpus("NVIDIA GB10, 12.1, 570.86.10")


def _plain(text: str) -> Callable[[Machine], object]:
    """A module of the wheel's that its import imports."""
    return lambda m: write_tree(m.wheel / "flashinfer", {"plain.py": text})


def _program(text: str, *names: str) -> Callable[[Machine], object]:
    return lambda m: [m.program(name, text) for name in names]


FIRST = f"export PYTHONPATH={REPO}${{PYTHONPATH:+:$PYTHONPATH}}"
ELSEWHERE = "&& export FLASHINFER_WORKSPACE_BASE="
WHEEL = f'"flashinfer-python=={UPSTREAM}"'
CUBINS = f"flashinfer-cubin version (0.6.4) does not match flashinfer version ({UPSTREAM})"
THE_TOOLKIT = {"CUDA_HOME": "{root}/toolkit"}  # named: else one of the machine that runs the tests may be taken
TOOLKIT = f"pip install {REPO}[cuda]"  # the test removes a command's quotes
HIDDEN = f"/bin/mount -t tmpfs tmpfs {DEFAULT_ROOT.resolve()}" if DEFAULT_ROOT.exists() else ""
"""Hides a toolkit in NVIDIA's place, which would be taken before pip's."""
OLD_NVCC = """[ $1 != --version ] && echo "nvcc fatal   : Unsupported gpu architecture 'compute_121a'" && exit 1
echo 'release 12.4, V12.4.1'"""
SILENT_NVCC = "case $1 in --version) echo 'release 13.0, V13.0.88' ;; *) exit 1 ;; esac"
NVCC_OF_121 = f"""case "$*" in *compute_12[2-9]*)
echo "nvcc fatal   : Unsupported gpu architecture 'compute_122a'"; exit 1 ;; esac
{NVCC}"""
XID = "[ 7.1] NVRM: Xid (PCI:0000:01:00): 79"

# fmt: off
PLANTED = {
    "plain_wheel_first": Planted("import", "fail", "the plain wheel in", FIRST, fixes=True,
        plant=lambda m: m.path.insert(0, m.wheel)),
    "empty_namespace_package": Planted("import", "fail", "empty namespace package", FIRST, fixes=True,
        plant=_empty_namespace_package),
    "untested_wheel_first": Planted("import", "fail", "the plain wheel in", f"-m pip install {WHEEL}", fixes=True,
        plant=_untested_wheel_first),
    "no_flashinfer": Planted("import", "fail", "no flashinfer on sys.path", FIRST, fixes=True, plant=_no_flashinfer),
    "wheel_of_another_version": Planted("import", "fail", "is none that flashinfer-sm12x",
        f"pip install --force-reinstall --no-deps {WHEEL}", fixes=True, plant=_wheel_of_another_version),
    "wheel_of_which_a_part_is_cut_off": Planted("import", "fail", "SyntaxError: '(' was never closed",
        f"--no-deps {WHEEL}", fixes=True, plant=_plain("print(")),
    "package_that_the_wheel_needs": Planted("import", "fail", "No module named 'tvm_ffi'", f"pip install {WHEEL}",
        fixes=True, plant=_plain("import tvm_ffi")),
    "cubins_of_another_version": Planted("import", "fail", "flashinfer-cubin version (0.6.4) does not match",
        f'install "flashinfer-cubin=={UPSTREAM}"', fixes=True, plant=_cubins_of_another_version),
    "import_that_needs_its_docstrings": Planted("import", "fail", "TypeError: unsupported operand",
        "unset PYTHONOPTIMIZE",
        {"PYTHONOPTIMIZE": "2"}, fixes=True, plant=_plain("def f():\n    'x'\nf.__doc__ += 'y'\n")),
    "path_without_the_scripts_folder": Planted("import", "ok", "the fork 0.1.0 over",
        variables={"PYTHONSAFEPATH": "1"}),
    "fork_of_another_checkout": Planted("import", "warn", "this doctor is of", FIRST, fixes=True, loses=("/other",),
        plant=lambda m: m.path.insert(0, _other_fork(m))),

    "fork_switched_off": Planted("import", "warn", "imported without this fork: FLASHINFER_SM12X_MOE=0",
        "unset FLASHINFER_SM12X_MOE", {"FLASHINFER_SM12X_MOE": "0"}, fixes=True),

    "misspelled_name": Planted("variables", "warn",
        "FLASHINFER_SM12X_CHEKC is no variable of this project; FLASHINFER_SM12X_CHECK is",
        'export FLASHINFER_SM12X_CHECK="$FLASHINFER_SM12X_CHEKC"', fixes=True,
        variables={"FLASHINFER_SM12X_CHEKC": "1"}, then="warn"),  # of a switch for debugging, now by its right name
    "name_in_small_letters_beside_the_right_one": Planted("variables", "warn", "flashinfer_jit_verbose is no variable",
        "unset flashinfer_jit_verbose", fixes=True,
        variables={"flashinfer_jit_verbose": "1", "FLASHINFER_JIT_VERBOSE": "0"}),
    "name_that_never_was": Planted("variables", "warn", "FLASHINFER_SM12X_FASTER is no variable",
        "unset FLASHINFER_SM12X_FASTER", {"FLASHINFER_SM12X_FASTER": "1"}, fixes=True),
    "bad_value": Planted("variables", "fail", "FLASHINFER_SM12X_MOE is 'off'; it may be 0, 1 or unset", "unset",
        {"FLASHINFER_SM12X_MOE": "off"}, fixes=True),
    "plugin_off_in_a_word": Planted("vllm-plugin", "fail",
        "vLLM does not start: FLASHINFER_SM12X_VLLM: 'off' is no key=value", "unset", {"FLASHINFER_SM12X_VLLM": "off"},
        fixes=True),
    "plugin_with_a_bad_choice": Planted("variables", "fail", "qkv is 'int4'; it may be bf16",
        "unset FLASHINFER_SM12X_VLLM", {"FLASHINFER_SM12X_VLLM": "qkv=int4"}, fixes=True),
    "switched_off": Planted("variables", "warn", "upstream's kernels run in place of", "unset FLASHINFER_SM12X_MOE",
        {"FLASHINFER_SM12X_MOE": "0"}, fixes=True),

    "cuda_home_that_points_at_nothing": Planted("build", "fail", "holds no bin/nvcc", "unset CUDA_HOME",
        {"CUDA_HOME": "{root}/none"}, fixes=True),
    "old_compiler": Planted("build", "fail", "is of CUDA 12.4, but 12.9 or later is needed",
        TOOLKIT, THE_TOOLKIT, HIDDEN, fixes=True, plant=_program(OLD_NVCC, "toolkit/bin/nvcc")),
    "headers_of_another_release": Planted("build", "fail", "toolkit/include/cuda_runtime_api.h of 13.5",
        TOOLKIT, THE_TOOLKIT, HIDDEN, fixes=True, plant=_of_two_releases("toolkit")),
    "headers_that_are_gone": Planted("build", "fail", "has no headers:", TOOLKIT, THE_TOOLKIT, HIDDEN, fixes=True,
        plant=lambda m: m.remove("toolkit/include/cuda_runtime_api.h")),
    "headers_that_upstreams_sampler_needs": Planted("build", "fail", "curand_kernel.h is not part of this CUDA toolkit",
        "install nvidia-curand", fixes=True, plant=lambda m: m.remove("toolkit/include/curand_kernel.h")),
    "cuda_home_of_two_releases": Planted("build", "fail", "is of CUDA 13.0, but", "unset CUDA_HOME",
        {"CUDA_HOME": "{root}/mixed"}, fixes=True, plant=_of_two_releases("mixed")),
    "compiler_that_is_none": Planted("build", "fail", "names no CUDA release", TOOLKIT,
        THE_TOOLKIT, HIDDEN, fixes=True, plant=_program("echo hello", "toolkit/bin/nvcc")),
    "toolkit_without_a_runtime": Planted("build", "fail", "libcudart.so", TOOLKIT, fixes=True,
        plant=lambda m: m.remove("toolkit/lib64/libcudart.so")),
    "no_ninja": Planted("build", "fail", "ninja, which runs the compilers, is not installed", "pip install ninja",
        fixes=True, plant=lambda m: m.remove("bin/ninja")),
    "ninja_that_does_nothing": Planted("build", "fail", "building doctor failed: ninja made no doctor.so",
        plant=_program("exit 0", "bin/ninja")),
    "no_host_compiler": Planted("build", "fail", "the host C++ compiler is missing", "apt-get install --yes g++",
        fixes=True, plant=lambda m: m.remove("bin/c++", "bin/g++")),
    "host_compiler_that_crashes": Planted("build", "fail", "SIGSEGV",
        plant=_program("kill -SEGV $$", "bin/c++", "bin/g++")),
    "nvcc_ccbin": Planted("build", "fail", "Failed to preprocess host compiler", "unset NVCC_CCBIN",
        {"NVCC_CCBIN": "no-such-g++"}, fixes=True),
    "cxx": Planted("build", "fail", "clang++-99", "unset CXX", {"CXX": "clang++-99"}, fixes=True),
    "flags_that_nvcc_does_not_know": Planted("build", "fail", "--bogus", "unset NVCC_APPEND_FLAGS",
        {"NVCC_APPEND_FLAGS": "--bogus"}, fixes=True),
    "flags_whose_quotes_do_not_close": Planted("variables", "fail",
        "FLASHINFER_EXTRA_CUDAFLAGS is '-D\"x'; it may be flags",
        "unset FLASHINFER_EXTRA_CUDAFLAGS", {"FLASHINFER_EXTRA_CUDAFLAGS": '-D"x'}, fixes=True),
    "flags_of_this_projects_that_nvcc_does_not_know": Planted("build", "fail", "--bogus",
        "unset FLASHINFER_EXTRA_CUDAFLAGS",
        {"FLASHINFER_EXTRA_CUDAFLAGS": "--bogus"}, fixes=True),
    "flags_that_the_linker_does_not_know": Planted("build", "fail", "--bogus", "unset FLASHINFER_EXTRA_LDFLAGS",
        {"FLASHINFER_EXTRA_LDFLAGS": "-Wl,--bogus"}, fixes=True),
    "workspace_of_nobody": Planted("variables", "fail", "FLASHINFER_WORKSPACE_BASE is '~no-such-user/x'",
        "unset FLASHINFER_WORKSPACE_BASE", {"FLASHINFER_WORKSPACE_BASE": "~no-such-user/x"}, fixes=True),
    "launcher_that_is_gone": Planted("build", "fail", "no-ccache", "unset FLASHINFER_NVCC_LAUNCHER",
        {"FLASHINFER_NVCC_LAUNCHER": "no-ccache"}, fixes=True),

    "compiler_that_ends_without_a_word": Planted("build", "fail", "toolkit/bin/nvcc ends so by itself, without a word",
        variables=THE_TOOLKIT, plant=_program(SILENT_NVCC, "toolkit/bin/nvcc")),
    "host_compiler_that_ends_without_a_word": Planted("build", "fail", "bin/g++ ends so by itself, without a word",
        plant=_program("exit 1", "bin/c++", "bin/g++")),
    "architecture_that_no_gpu_has": Planted("build", "fail", "no GPU of this family is that",
        "unset FLASHINFER_CUDA_ARCH_LIST", THE_TOOLKIT | {"FLASHINFER_CUDA_ARCH_LIST": "12.2a"}, fixes=True,
        plant=_program(NVCC_OF_121, "toolkit/bin/nvcc")),

    "cache_of_everybody": Planted("build", "fail", "writable by everybody", ELSEWHERE, fixes=True, loses=("/cache",),
        plant=_cache_of_everybody),
    "cache_that_cannot_be_made": Planted("build", "fail", "the cache cannot be written", ELSEWHERE, fixes=True,
        loses=("/below",), plant=lambda m: write_tree(m.root, {"file": ""}),
        variables={"FLASHINFER_WORKSPACE_BASE": "{root}/file/below"}),
    "cache_from_which_nothing_may_run": Planted("build", "fail", "failed to map segment", ELSEWHERE, fixes=True,
        loses=("/cache",), mounts="/bin/mount -t tmpfs -o noexec,mode=755 tmpfs {root}/cache"),
    "cache_on_a_file_system_that_can_only_be_read": Planted("build", "fail", "Read-only file system", ELSEWHERE,
        fixes=True, loses=("/cache",),
        mounts="/bin/mount --bind {root}/cache {root}/cache; /bin/mount -o remount,bind,ro {root}/cache"),
    "full_disk": Planted("build", "fail", "No space left", ELSEWHERE, fixes=True, loses=("/cache",),
        mounts="/bin/mount -t tmpfs -o size=8k,mode=755 tmpfs {root}/cache"),

    "driver_that_is_not_loaded": Planted("gpu", "fail", "couldn't communicate", plant=_driver_that_is_not_loaded),
    "no_gpu": Planted("gpu", "warn", "no GPU", plant=_no_gpu),
    "hopper": Planted("gpu", "warn", "none is of the SM12x family",
        plant=lambda m: m.gpus("NVIDIA H200, 9.0, 580.95.05")),
    "hopper_on_purpose": Planted("gpu", "ok", "because FLASHINFER_SM12X_MOE=1", variables={"FLASHINFER_SM12X_MOE": "1"},
        plant=lambda m: m.gpus("NVIDIA H200, 9.0, 580.95.05")),
    "old_driver": Planted("driver", "fail", "570.86.10 is older than 580",
        "apt-get install --yes nvidia-driver-580-open", fixes=True,
        plant=lambda m: m.gpus("NVIDIA GB10, 12.1, 570.86.10")),
    "old_driver_in_wsl": Planted("driver", "fail", "570.86.10 is older than 580", why="whose driver is Windows's",
        plant=_guest("wsl", "NVIDIA GB10, 12.1, 570.86.10")),
    "old_driver_in_a_container": Planted("driver", "fail", "570.86.10 is older than 580",
        why="whose driver is the host's",
        plant=_guest("docker", "NVIDIA GB10, 12.1, 570.86.10")),
    "old_driver_in_a_virtual_machine": Planted("driver", "fail", "570.86.10 is older than 580", why="a virtual machine",
        plant=_guest("kvm", "NVIDIA GB10, 12.1, 570.86.10")),
    "old_driver_without_apt_get": Planted("driver", "fail", "570.86.10 is older than 580",
        why="this system has no apt-get",
        plant=_old_driver_without_apt_get),
    "no_nvidia_smi": Planted("driver", "warn", "nvidia-smi is not on PATH, though torch sees the GPU",
        why="install it first",
        plant=lambda m: m.remove("bin/nvidia-smi")),
    "no_nvidia_smi_in_wsl": Planted("driver", "warn", "nvidia-smi is not on PATH, though torch", why="/usr/lib/wsl/lib",
        plant=_without_nvidia_smi_in("wsl")),
    "no_nvidia_smi_in_a_container": Planted("driver", "warn", "nvidia-smi is not on PATH, though torch",
        why="name utility",
        plant=_without_nvidia_smi_in("docker")),
    "complaint_without_nvidia_smi": Planted("kernel-log", "warn", "1 complaint of the driver",
        why="nvidia-smi is not on PATH (the container was started without it: ", plant=_complaint_without_nvidia_smi),
    "no_gpu_in_wsl": Planted("gpu", "warn", "no GPU", why="whose driver is Windows's",
        plant=_no_gpu_in_wsl),
    "complaint_in_the_kernels_log": Planted("kernel-log", "warn", f"1 complaint of the driver, the last: {XID}",
        "nvidia-smi -q", plant=_program(f"echo '[ 7.0] NVRM: loading'; echo '{XID}, GPU has fallen off'", "bin/dmesg")),
    "memory_that_ran_out": Planted("kernel-log", "warn", "NV_ERR_NO_MEMORY",
        plant=_program("echo '[ 7.1] NVRM: Out of memory [NV_ERR_NO_MEMORY] returned from _memdescAlloc'",
        "bin/dmesg")),
    "kernels_log_that_may_not_be_read": Planted("kernel-log", "warn", "this user may not", "sudo dmesg" if os.geteuid()
        else "",
        plant=_program("exit 1", "bin/dmesg")),

    "torch_without_cuda": Planted("torch", "fail", "without CUDA", "pip install vllm==0.33.0",
        fixes=True, plant=lambda m: m.torch(None, [])),
    "no_torch": Planted("torch", "fail", "torch is not installed", "pip install vllm==0.33.0",
        fixes=True, plant=lambda m: shutil.rmtree(m.site / "torch")),
    "no_torch_in_an_environment_of_uvs": Planted("torch", "fail", "torch is not installed",
        "bin/uv pip install --python", plant=_uv_without_torch),
    "torch_without_cuda_in_an_environment_of_uvs": Planted("torch", "fail", "without CUDA",
        "bin/uv pip uninstall --python",
        plant=_uv_with_torch_without_cuda),
    "capability_of_which_torch_and_driver_disagree": Planted("torch", "warn",
        "torch says compute capability 12.0, the driver 12.1",
        'export FLASHINFER_CUDA_ARCH_LIST="12.1a"', fixes=True, why="the driver knows better",
        plant=_capabilities_disagree),
    "hidden_gpu": Planted("torch", "fail", "sees no GPU, the driver does", "unset CUDA_VISIBLE_DEVICES",
        {"CUDA_VISIBLE_DEVICES": ""}, fixes=True),

    "another_vllm": Planted("vllm", "warn", "vLLM 0.31.0", "pip install vllm==0.33.0",
        fixes=True, plant=lambda m: m.vllm("0.31.0")),
    "vllm_with_a_builders_label": Planted("vllm", "ok", "vLLM 0.33.0+cu130", plant=lambda m: m.vllm("0.33.0+cu130")),
    "nightly_vllm_with_a_label": Planted("vllm", "warn", "vLLM 0.33.1.dev12+g0123abc.cu130",
        why="vllm 0.33.1.dev12+g0123abc.cu130 is a build of your own (a nightly or development build): pip install "
            "vllm",
        plant=lambda m: m.vllm("0.33.1.dev12+g0123abc.cu130")),
    "vllm_that_is_editable": Planted("vllm", "warn", "vLLM 0.34.0; the fork is made for 0.33.0",
        why="vllm 0.34.0 is a build of your own (an editable installation, /home/u/vllm)", plant=_editable_vllm),
    "vllm_from_a_commit": Planted("vllm", "warn", "vLLM 0.32.0", why="(built from source, https://a.b/vllm)",
        plant=_vllm_from_a_commit),
    "vllm_of_an_images_maker": Planted("vllm", "warn", "vLLM 0.31.0+nv26.10", why="(a build with a local version): pip",
        plant=lambda m: m.vllm("0.31.0+nv26.10")),
    "vllm_on_the_path": Planted("vllm", "warn", "vLLM of an unknown version", why="(a source tree, ",
        plant=lambda m: m.without_package("vllm")),
    "vllm_of_an_index_beside_a_torch_of_the_users": Planted("vllm", "warn", "vLLM 0.31.0",
        why="torch 2.15.0a0+gitabc is a build of your own (a build with a local version): pip install vllm==0.33.0",
        plant=_torch_of_the_users_beside_an_old_vllm),
    "torch_of_the_users_without_cuda": Planted("torch", "fail", "torch 2.15.0.dev20261101 is a build without CUDA",
        why="(a nightly or development build): pip uninstall --yes torch would remove it",
        plant=lambda m: m.torch(None, [], version="2.15.0.dev20261101")),
    "flashinfer_of_the_users": Planted("import", "fail", "is none that flashinfer-sm12x",
        why="flashinfer-python 0.8.0 is a build of your own (an editable installation, /home/u/flashinfer)",
        plant=_flashinfer_of_the_users),
    "variable_of_an_older_vllm": Planted("vllm", "warn", "vLLM 0.33.0 does not read VLLM_ATTENTION_BACKEND",
        variables={"VLLM_ATTENTION_BACKEND": "FLASHINFER", "VLLM_KV_CACHE_LAYOUT": "HND"}),
    "vllm_without_ninja": Planted("vllm-flashinfer", "fail", "vLLM finds no ninja", "export PATH=", fixes=True,
        plant=lambda m: m.remove("bin/ninja")),
    "vllm_without_nvcc": Planted("vllm-flashinfer", "fail", "vLLM finds no nvcc", "export CUDA_HOME=", fixes=True,
        plant=_toolkit_of_pips),
    "vllm_with_half_a_flashinfer": Planted("vllm-flashinfer", "fail", "lacks functions", FIRST,
        plant=lambda m: m.vllm(has_flashinfer_cutlass_fused_moe="False")),
    "offline_without_cubins": Planted("vllm-flashinfer", "warn", "TRITON_ATTN",
        f'pip install "flashinfer-cubin=={UPSTREAM}"', fixes=True,
        plant=lambda m: m.vllm(has_nvidia_artifactory="False")),
    "no_plugin": Planted("vllm-plugin", "warn", "no entry point", FIRST, fixes=True,
        then="fail",  # this vLLM lacks most
        plant=lambda m: m.without_package("flashinfer-sm12x")),
    "plugin_not_listed": Planted("vllm-plugin", "warn", "VLLM_PLUGINS=other", "export VLLM_PLUGINS=",
        {"VLLM_PLUGINS": "other"}, fixes=True),
    "plugin_switched_off": Planted("vllm-plugin", "warn", "switched off: FLASHINFER_SM12X_VLLM=0",
        "unset FLASHINFER_SM12X_VLLM", {"FLASHINFER_SM12X_VLLM": "0"}, fixes=True),
    "plugin_of_which_a_part_is_gone": Planted("vllm-plugin", "fail",
        "could not be installed: ImportError: cannot import name 'config'",
        plant=lambda m: m.remove("tree/flashinfer_sm12x/vllm/config.py")),
    "plugin_for_another_vllm": Planted("vllm-plugin", "fail",
        "could not be installed: AttributeError: vLLM has moved this",
        plant=lambda m: m.plugin_part("config", "def install(): raise AttributeError('vLLM has moved this')")),
}
# fmt: on
