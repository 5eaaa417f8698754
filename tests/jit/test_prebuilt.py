# SPDX-License-Identifier: Apache-2.0
"""A library of an installed wheel of kernels is used where a build would make the same; else a line says why not."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jit_fakes import needs_nvcc, no_compiler, small_spec, use_cache
from jit_processes import answer_of, printed_by
from layer_toys import REPO, load_tool

from flashinfer.jit import core, cpp_ext
from flashinfer.jit import env as jit_env
from flashinfer.jit.sm12x import flags, modules, prebuilt
from flashinfer.jit.sm12x import spec as spec_module
from flashinfer.jit.sm12x.spec import JitSpecSm12x
from flashinfer.sm12x.instances import HOPPER, SM12X, is_alone
from flashinfer_sm12x.build.build_hash import hash_file


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("kernels_wheel")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tool: ModuleType) -> Path:
    """A cache in which a module of one kernel is built; ``entry.json`` is what a wheel's manifest says of it.

    It lies in ``kept``, and is used in a folder ``cache`` beside it, where it was built.
    """
    root = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "12.1a")
        use_cache(root / "cache", patch)
        spec = toy()
        spec.build(need_lock=True)
        (root / "cache" / "entry.json").write_text(json.dumps(tool.entry_of(spec)))
    return (root / "cache").rename(root / "kept")


def toy() -> JitSpecSm12x:
    """The spec of the module; its sources lie where generated ones do."""
    return small_spec(jit_env.FLASHINFER_GEN_SRC_DIR)


class Installed:
    """The toy module in a wheel's folder on ``sys.path``, and in the cache; which of them is loaded."""

    def __init__(self, root: Path, built: Path, manifest: dict[str, Any]) -> None:
        self.package = root / "site" / prebuilt.PACKAGE
        self.library = self.package / "small-121a.so"
        cache = built.with_name("cache")
        self.link = cache / "cached_ops" / "small" / "small.so"
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(built, cache, symlinks=True)
        self.package.mkdir(parents=True)
        shutil.copyfile(built / "cached_ops" / "small" / "small.so", self.library)
        entry = json.loads((built / "entry.json").read_text())
        self.manifest = {**manifest, "modules": [{**entry, "library": "small-121a.so"}]}
        self.write()

    @property
    def cached(self) -> Path:
        """The library in the cache that was built last."""
        return self.link.resolve()

    @property
    def entry(self) -> dict[str, Any]:
        (entry,) = self.manifest["modules"]
        return entry

    def write(self, **changes: Any) -> None:
        (self.package / prebuilt.MANIFEST).write_text(json.dumps({**self.manifest, **changes}))

    def load(self) -> tuple[Path, int]:
        """The library from which the module was loaded, and the module's answer."""
        spec, loaded = toy(), []
        real = spec.load
        spec.load = lambda path=None: (loaded.append(path), real(path))[1]  # type: ignore[method-assign]
        answer = spec.build_and_load().answer()
        return loaded[-1], answer


def manifest_here() -> dict[str, Any]:
    about = {"format": prebuilt.FORMAT, "fork": prebuilt.__fork_version__, "tvm_ffi": prebuilt.ffi_series()}
    return {**about, "platform": sysconfig.get_platform()}


@pytest.fixture
def installed(workspace: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    made = Installed(workspace, built, manifest_here())
    use_cache(built.with_name("cache"), monkeypatch)
    monkeypatch.syspath_prepend(str(made.package.parent))
    return made


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings of upstream's logger of the JIT, which does not propagate."""
    core.logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    core.logger.removeHandler(caplog.handler)


@needs_nvcc
def test_it_is_used_without_a_compiler_and_without_a_cache(installed: Installed, monkeypatch, lines) -> None:
    shutil.rmtree(installed.cached.parents[1])
    no_compiler(monkeypatch)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert installed.load() == (installed.library, 41)
    assert not installed.cached.parents[1].exists()
    assert lines() == []


@needs_nvcc
def test_it_comes_before_the_cache(installed: Installed, lines) -> None:
    assert installed.load() == (installed.library, 41)
    assert toy().get_library_path() == installed.library
    assert lines() == []


@needs_nvcc
@pytest.mark.parametrize("left", ["nothing", "folder", "module", "file"])
def test_where_none_is_installed_nothing_is_reported(installed: Installed, left: str, lines) -> None:
    if left == "module":  # a wheel that does not have this one
        installed.write(modules=[{**installed.entry, "name": "other"}])
    else:
        shutil.rmtree(installed.package)
    if left == "folder":  # what an uninstalled package leaves where something else lies in its folder
        installed.package.mkdir()
    if left == "file":  # a module of the package's name
        installed.package.with_suffix(".py").write_text("raise SystemExit('it was imported')")
    assert installed.load() == (installed.cached, 41)
    assert len(lines()) == (left == "folder")


def truncate(i: Installed) -> None:
    with open(i.library, "r+b") as file:
        file.truncate(i.library.stat().st_size // 2)


def alter_a_byte(i: Installed) -> None:
    data = bytearray(i.library.read_bytes())
    data[len(data) // 2] ^= 1
    i.library.write_bytes(data)


def replace_by_no_library(i: Installed) -> None:
    i.library.write_bytes(b"no library")
    i.write(modules=[{**i.entry, "sha256": hash_file(i.library)}])


def write(text: str) -> Callable[[Installed], Any]:
    return lambda i: (i.package / "manifest.json").write_text(text)


def in_manifest(**changes: Any) -> Callable[[Installed], None]:
    return lambda i: i.write(**changes)


def in_entry(**changes: Any) -> Callable[[Installed], None]:
    return lambda i: i.write(modules=[{**i.entry, **changes}])


OTHER_HASH = "it was built from other sources, headers or flags: its build hash"
OTHER_BYTES = "small-121a.so is missing, truncated or altered: its digest is not that of manifest.json"
DAMAGES: dict[str, tuple[Callable[[Installed], Any], str]] = {
    "truncated": (truncate, OTHER_BYTES),
    "altered": (alter_a_byte, OTHER_BYTES),
    "missing": (lambda i: i.library.unlink(), OTHER_BYTES),
    "device": (lambda i: (i.library.unlink(), i.library.symlink_to("/dev/zero")), OTHER_BYTES),
    "missing, no digest": (in_entry(library="none.so", sha256=None), "none.so is missing"),
    "not a library": (replace_by_no_library, "it does not load: "),
    "no manifest": (lambda i: (i.package / "manifest.json").unlink(), "manifest.json is missing or damaged (FileNot"),
    "no JSON": (write("{"), "manifest.json is missing or damaged (JSON"),
    "nested": (write("[" * 100_000), "manifest.json is missing or damaged (Rec"),
    "no object": (write("[]"), "manifest.json is missing or damaged (Ty"),
    "half an entry": (in_manifest(modules=[{"name": "small"}]), "manifest.json is missing or damaged (KeyError"),
    "no key": (lambda i: (i.entry.pop("key"), i.write()), "manifest.json is missing or damaged (KeyError"),
    "older format": (in_manifest(format=0), f"has format 0, this is format {prebuilt.FORMAT}"),
    "older fork": (in_manifest(fork="0.0.9"), f"has fork 0.0.9, this is fork {prebuilt.__fork_version__}"),
    "older TVM-FFI": (in_manifest(tvm_ffi="0.0"), f"has tvm_ffi 0.0, this is tvm_ffi {prebuilt.ffi_series()}"),
    "other platform": (in_manifest(platform="linux-x"), f"linux-x, this is platform {sysconfig.get_platform()}"),
    "other architecture": (in_entry(architectures="12.0f"), "has it for 12.0f, and 12.1a is compiled for"),
    "other key": (in_entry(key="0" * 20), f"{OTHER_HASH} is {'0' * 20}, here it is "),
    "key that is none": (in_entry(key=[]), f"{OTHER_HASH} is [], here it is "),
}


@needs_nvcc
@pytest.mark.parametrize("damage", DAMAGES)
def test_one_that_does_not_fit_is_passed_over_with_a_line(installed: Installed, damage: str, lines) -> None:
    change, reason = DAMAGES[damage]
    change(installed)
    assert installed.load() == (installed.cached, 41)
    (line,) = lines()
    assert line.startswith("the prebuilt small is passed over: ")
    assert reason in line


@needs_nvcc
def test_a_stale_one_is_passed_over_and_the_module_is_built(installed: Installed, lines) -> None:
    header = jit_env.FLASHINFER_GEN_SRC_DIR / "src" / "answer.h"
    header.write_text("#define ANSWER 42\n")
    loaded, _ = installed.load()
    assert loaded == installed.cached
    assert answer_of(loaded) == "42"
    key = installed.entry["key"]
    assert lines() == [f"the prebuilt small is passed over: {OTHER_HASH} is {key}, here it is {toy().build_hash}"]


@needs_nvcc
def test_users_flags_count_and_parallelism_does_not(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_NVCC_THREADS", "4")
    assert prebuilt.find(toy()) == (installed.library, "")
    for variable in ("FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS"):
        monkeypatch.setenv(variable, "-DMINE")
        library, reason = prebuilt.find(toy())
        assert library is None
        assert reason.startswith(OTHER_HASH)
        monkeypatch.delenv(variable)
    source = toy()
    source.sources.append(source.sources[0])
    assert prebuilt.find(source)[0] is None
    other = toy()
    other.extra_cuda_cflags.append("-lineinfo")
    assert prebuilt.find(other)[0] is None


@pytest.mark.parametrize("name", ["FLASHINFER_EXTRA_CFLAGS", "FLASHINFER_EXTRA_CUDAFLAGS"])
def test_users_flags_count_where_a_source_is_compiled_with_them(name: str, workspace: Path, monkeypatch) -> None:
    instance = next(row for row in SM12X if is_alone(row))

    def keys() -> list[str]:
        specs = modules.gen_fused_moe_instance_module(instance), modules.gen_router_module()
        assert [".cpp" in {source.suffix for source in spec.sources} for spec in specs] == [True, False]
        return [spec.build_hash for spec in specs]

    before = keys()
    monkeypatch.setenv(name, "-DMINE")
    changed = [now != then for now, then in zip(keys(), before, strict=True)]
    assert changed == [True, "CUDA" in name]


def install_without_building(site: Path) -> dict[str, Path]:
    """A wheel's folder with what its manifest says of this tree's modules for 12.1a, and libraries of a line."""
    specs = modules.gen_shipped_modules()
    entries, libraries = [], {}
    for spec in specs:
        library = site / prebuilt.PACKAGE / f"{spec.name}-121a.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_text(spec.name)
        libraries[spec.name] = library
        entry = {"name": spec.name, "architectures": "12.1a", "library": library.name}
        entries.append({**entry, "sha256": hash_file(library), "key": spec.build_hash})
    manifest = {**manifest_here(), "modules": entries}
    (site / prebuilt.PACKAGE / prebuilt.MANIFEST).write_text(json.dumps(manifest))
    return libraries


def test_the_modules_are_found_for_their_architecture_without_a_compiler(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, lines
) -> None:
    no_compiler(monkeypatch)
    monkeypatch.setenv("PATH", "")
    libraries = install_without_building(workspace / "site")
    monkeypatch.syspath_prepend(str(workspace / "site"))
    assert {spec.name: spec.prebuilt for spec in modules.gen_shipped_modules()} == libraries
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(12, "0f"), (12, "1a")})
    assert modules.gen_fused_moe_module().prebuilt is None
    (line,) = lines()
    assert line.endswith("has it for 12.1a, and 12.0f 12.1a is compiled for")
    row = next(row for row in HOPPER if row not in SM12X)
    assert modules.gen_fused_moe_instance_module(row).prebuilt is None
    assert len(lines()) == 1


def test_building_reports_what_is_prebuilt(workspace: Path) -> None:
    libraries = install_without_building(workspace / "site")
    environment = {
        **os.environ,
        "FLASHINFER_WORKSPACE_BASE": str(workspace / "other"),
        "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
        "PYTHONPATH": f"{REPO}:{workspace / 'site'}",
    }
    command = [sys.executable, "-m", "flashinfer", "sm12x-build"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == f"fused_moe_120: is prebuilt: {libraries['fused_moe_120']}\n", done.stderr
    assert not list((workspace / "other").rglob("*.o"))


# --- what upstream's wheels have
# ---------------------------------------------------------------------------------------


PROVIDER = """
from types import SimpleNamespace
__version__ = {version!r}
def get_jit_cache_providers():
    return [SimpleNamespace(provider_id="sm", distribution="flashinfer-jit-cache-sm", version=__version__,
            jit_cache_dir={folder!r}, cuda_architectures=[{arch!r}], modules={modules!r})]
"""
"""A package as upstream's wheels of prebuilt modules are."""


@pytest.mark.parametrize("arch", ["12.1a", "12.0f", "12.0a"])
def test_upstreams_prebuilt_modules_are_not_taken_for_ours(arch: str, gxx: str, tmp_path: Path) -> None:
    names = ["fused_moe_120", "gemm_mxfp4_sm12x", "norm"]
    for name in names:
        (tmp_path / "aot" / name).mkdir(parents=True)
        library = tmp_path / "aot" / name / f"{name}.so"
        subprocess.run([gxx, "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", str(library)], check=True)
    from flashinfer.version import __version__ as version

    package = tmp_path / "flashinfer_jit_cache"
    package.mkdir()
    tag = f"sm{arch.replace('.', '')}"
    text = PROVIDER.format(version=version, folder=str(tmp_path / "aot"), arch=tag, modules=names)
    (package / "__init__.py").write_text(text)
    code = (
        "from flashinfer.jit import core, env, fused_moe; from flashinfer.jit.sm12x import modules\n"
        "specs = fused_moe.gen_cutlass_fused_moe_sm120_module(), modules.gen_group_gemm_module()\n"
        "for spec in specs:\n"
        "    print(spec.name, len(env.get_aot_artifacts(spec.name)), spec.is_aot, spec.is_compiled, spec.try_load())\n"
        "print(core.gen_jit_spec('norm', []).is_aot)"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    printed = printed_by(code, tmp_path, str(tmp_path), FLASHINFER_CUDA_ARCH_LIST=arch, PYTHONPATH=path)
    assert printed.splitlines() == [
        "fused_moe_120 1 False False None",  # the package offers one
        "gemm_mxfp4_sm12x 1 False False None",
        "True",  # modules that are upstream's come from there
    ]


# --- making one -------------------------------------------------------------------------------------------------------


@needs_nvcc
def test_the_manifest_names_nothing_of_the_machine_that_made_it(built: Path) -> None:
    entry = json.loads((built / "entry.json").read_text())
    assert entry.pop("library").startswith(str(built.with_name("cache")))
    assert entry == {"name": "small", "architectures": "12.1a", "sha256": entry["sha256"], "key": entry["key"]}


def test_a_key_is_the_same_in_another_place_and_without_a_compiler(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And another one where a header of this tree or of the wheel is another, and not where a test is."""
    hashes = [modules.gen_decode_module().build_hash]
    no_compiler(monkeypatch)
    monkeypatch.setenv("PATH", "")
    use_cache(workspace / "moved", monkeypatch)
    hashes.append(modules.gen_decode_module().build_hash)
    tree, wheel = workspace / "tree", workspace / "wheel"
    for folder in ("include", "csrc"):
        shutil.copytree(REPO / folder, tree / folder)
    for module in (modules, spec_module):
        monkeypatch.setattr(module, "fork_root", lambda: tree)
    hashes.append(modules.gen_decode_module().build_hash)
    (tree / "tests").mkdir()
    (tree / "tests" / "unrelated.h").write_text("int x;")
    hashes.append(modules.gen_decode_module().build_hash)
    assert len(set(hashes)) == 1
    headers = wheel / "data" / "csrc"
    headers.mkdir(parents=True)
    monkeypatch.setattr(spec_module, "wheel_root", lambda: wheel)
    monkeypatch.setattr(jit_env, "FLASHINFER_CSRC_DIR", headers)
    for header in (tree / "include/flashinfer/sm12x/types.h", headers / "tvm_ffi_utils.h"):
        for text in ("int one;\n", "int two;\n"):
            header.write_text(text)
            hashes.append(modules.gen_decode_module().build_hash)
    assert len(set(hashes)) == 5


@needs_nvcc
def test_a_module_that_changed_meanwhile_is_not_taken(tool: ModuleType, installed: Installed) -> None:
    (jit_env.FLASHINFER_GEN_SRC_DIR / "src" / "answer.h").write_text("#define ANSWER 44\n")
    with pytest.raises(tool.WheelError, match=r"small changed while it was built: the library for what is here now is"):
        tool.entry_of(toy())


@needs_nvcc
def test_a_library_for_a_newer_system_is_not_taken(tool: ModuleType, installed: Installed, monkeypatch) -> None:
    newest = tool.needed_versions(installed.library)
    assert set(newest) >= {"GLIBC", "GLIBCXX"}
    for prefix, version in newest.items():  # of this machine's compiler, whichever that is
        monkeypatch.setitem(tool.OLDEST_SYSTEM, prefix, version)
    entry = {**installed.entry, "library": str(installed.cached)}
    tool.take_library(entry, installed.package, "121f")
    assert entry["library"] == "small-121f.so"
    assert (installed.package / "small-121f.so").read_bytes() == installed.library.read_bytes()
    monkeypatch.setitem(tool.OLDEST_SYSTEM, "GLIBC", (2, 0))
    with pytest.raises(tool.WheelError, match=r"small-\w+-\w+\.so needs GLIBC_2\.\d+.*apt-get install g\+\+-12"):
        tool.take_library({**entry, "library": str(installed.cached)}, installed.package, "121f")


@needs_nvcc
def test_the_same_sources_make_the_same_bytes(tool: ModuleType, workspace: Path) -> None:
    made = []
    for _ in range(2):
        spec = dataclasses.replace(small_spec(workspace), for_wheel=True)
        spec.build(need_lock=True)
        made.append(spec.jit_library_path.read_bytes())
        shutil.rmtree(spec.build_dir)
    assert made[0] == made[1]


def test_a_wheel_is_packed_and_pip_installs_it_by_its_hash(tool: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "stage" / prebuilt.PACKAGE
    package.mkdir(parents=True)
    for name in ("small-121a.so", "__init__.py", "manifest.json"):
        (package / name).touch()
    wheels = [tool.pack(package, "0.1.0", processor, tmp_path / "dist") for processor in tool.PROCESSORS]
    assert wheels[1].name == "flashinfer_sm12x_kernels-0.1.0-py3-none-manylinux_2_31_aarch64.whl"
    names = zipfile.ZipFile(wheels[1]).namelist()
    assert [name for name in names if "dist-info" not in name] == [
        f"{prebuilt.PACKAGE}/{name}" for name in ("__init__.py", "manifest.json", "small-121a.so")
    ]
    assert {Path(name).name for name in names} >= {"LICENSE", "NOTICE"}
    again = tool.pack(package, "0.1.0", "aarch64", tmp_path / "again")
    assert again.read_bytes() == wheels[1].read_bytes()
    (tmp_path / "dist" / "kernels.txt").write_text(tool.requirement_of(wheels))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--require-hashes"]
    command += ["--find-links", str(tmp_path / "dist"), "-r", str(tmp_path / "dist" / "kernels.txt"), "--target", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    installed = done.stdout.replace("_", "-")  # pip's versions write the name either way
    assert "Successfully installed flashinfer-sm12x-kernels-0.1.0" in installed, done.stderr
    for wheel in wheels:
        with open(wheel, "ab") as file:
            file.write(b"x")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "DO NOT MATCH THE HASHES" in done.stderr


@needs_nvcc
def test_a_library_for_a_wheel_is_linked_for_other_machines_and_compiled_the_same(workspace: Path) -> None:
    mine = small_spec(workspace)
    wheels = dataclasses.replace(mine, for_wheel=True)
    assert wheels.build_hash == mine.build_hash
    assert [step.flags for step in wheels.plan.steps] == [step.flags for step in mine.plan.steps]
    folders = f"$ORIGIN/../nvidia/cu{cpp_ext.find_toolkit().version.major}/lib:/usr/local/cuda/lib64"
    assert {f"-Wl,-rpath,{folders}", "-Wl,--strip-all"} <= {*wheels.plan.link_flags}
    assert not [flag for flag in mine.plan.link_flags if "$ORIGIN" in flag or "strip" in flag]


@pytest.mark.parametrize("place", ["flags.of_source", "flags.cuda_flags", "core.common_nvcc_flags"])
def test_a_flag_counts_wherever_it_is_added(place: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the library of the cache as for the prebuilt one: both have their flags from one place."""
    before = modules.gen_router_module().build_hash
    owner = core if place.startswith("core") else flags
    name = place.partition(".")[2]
    there = getattr(owner, name)
    monkeypatch.setattr(owner, name, [*there, "-Dmore"] if owner is core else lambda *given: [*there(*given), "-Dmore"])
    assert modules.gen_router_module().build_hash != before


def test_without_the_cross_compiler_it_reports_what_to_install(tool: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tool.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(tool.WheelError, match="apt-get install g\\+\\+-aarch64-linux-gnu"):
        tool.build_environment("aarch64", tmp_path)
    own = tool.build_environment("x86_64", tmp_path)
    assert not {"CC", "CXX"} & own.keys() - os.environ.keys()
    assert [name for name in own if name.startswith("FLASHINFER_")] == ["FLASHINFER_WORKSPACE_BASE"]
    assert "CUDA_HOME" not in own or own["CUDA_HOME"] == os.environ["CUDA_HOME"]


def test_what_is_missing_for_one_processor_is_reported_before_another_is_compiled_for(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(tool, "WORK", tmp_path)
    monkeypatch.setattr(tool, "make_wheel", lambda *_: pytest.fail("it began to compile"))
    monkeypatch.setenv("PATH", "")
    assert tool.main(["--processor", "x86_64", "aarch64"]) == 1
    assert "there is no aarch64-linux-gnu-g++" in capsys.readouterr().err


@pytest.mark.parametrize("user", [{}, {"CXX": "clang++"}], ids=["", "CXX=clang++"])
def test_wheels_are_made_by_an_older_compiler_where_there_is_one(
    tool: ModuleType, tmp_path: Path, monkeypatch, user: dict[str, str]
) -> None:
    """Ubuntu 24.04's own, GCC 13, makes libraries that Debian 12 does not load."""
    monkeypatch.setattr(tool.platform, "machine", lambda: "aarch64")
    for name in ("g++", "g++-12"):
        (tmp_path / name).touch(mode=0o755)
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"PATH": str(tmp_path), **user}.items():
        monkeypatch.setenv(variable, value)
    environment = tool.build_environment("aarch64", tmp_path)
    chosen = {name: environment[name] for name in ("CC", "CXX") if name in environment}
    assert chosen == (user or {"CC": "g++-12", "CXX": "g++-12"})
