# SPDX-License-Identifier: Apache-2.0
"""The modules' specs: what they are made of, how they fit upstream's lifecycle, and one real build."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_python
import pytest
from jit_fakes import needs_nvcc, no_compiler, small_spec
from jit_processes import answer_of, named_barriers, printed_by

from flashinfer.jit import core, cpp_ext, fused_moe
from flashinfer.jit import env as jit_env
from flashinfer.jit.core import MissingJITCacheError
from flashinfer.jit.sm12x import modules
from flashinfer.jit.sm12x.report import as_table, instance_rows
from flashinfer.jit.sm12x.spec import JitSpecSm12x
from flashinfer.sm12x.instances import INSTANCES, MAIN_MODULE, NVFP4, Instance, index_of, is_alone
from flashinfer_sm12x.build import diagnosis, inspect_sass, toolchain
from flashinfer_sm12x.build.diagnosis import JitBuildError

pytestmark = pytest.mark.usefixtures("workspace")


def _set_archs(monkeypatch: pytest.MonkeyPatch, *archs: tuple[int, str]) -> None:
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", set(archs))


@pytest.mark.parametrize(
    ("name", "generate", "rows"),
    [
        ("fused_moe_120", fused_moe.gen_cutlass_fused_moe_sm120_module, MAIN_MODULE),
        ("fused_moe_120_nvfp4", fused_moe.gen_cutlass_fused_moe_sm120_nvfp4_module, NVFP4),
    ],
    ids=["mxfp4", "nvfp4"],
)
def test_a_moe_module_is_lean(workspace: Path, name: str, generate: Any, rows: tuple[Instance, ...]) -> None:
    spec = generate()
    assert isinstance(spec, core.JitSpecNvcc)
    assert spec.name == name
    assert len(spec.sources) <= 24
    rendered = [source for source in spec.sources if source.parent == workspace / "generated" / name]
    assert [source.stem for source in rendered] == [row.name for row in rows]
    for source, row in zip(rendered, rows, strict=True):
        assert row.name in source.read_text()
    assert all(source.is_file() for source in spec.sources)
    assert len({source.name for source in spec.sources}) == len(spec.sources)
    assert spec.jit_library_path == workspace / "cached_ops" / name / f"{name}.so"


@pytest.mark.parametrize("row", [row for row in INSTANCES if is_alone(row)], ids=lambda row: row.name)
def test_other_instances_are_modules_of_their_own(row: Any) -> None:
    spec = fused_moe.gen_cutlass_fused_moe_sm120_instance_module(row.index)
    assert spec.name == f"fused_moe_120_{row.name}"
    assert [source.name for source in spec.sources] == ["flashinfer_sm12x_instance_binding.cpp", f"{row.name}.cu"]


def test_instance_modules_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=rf"instance {len(INSTANCES)} does not exist"):
        fused_moe.gen_cutlass_fused_moe_sm120_instance_module(len(INSTANCES))
    with pytest.raises(ValueError, match=r"^mxfp8_m8_k128 is part of fused_moe_120 and has no module of its own"):
        fused_moe.gen_cutlass_fused_moe_sm120_instance_module(0)


@needs_nvcc
def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_archs(monkeypatch, (12, "1a"), (9, "0a"), (10, "0a"))
    for step in modules.gen_fused_moe_module().plan.steps:
        assert not {"-use_fast_math", "--use_fast_math"} & set(step.flags)
        assert {"-O3", "-std=c++17", "--expt-relaxed-constexpr", "-DNDEBUG"} <= set(step.flags)
        gencode = [flag for flag in step.flags if flag.startswith("-gencode")]
        assert gencode == [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("90a", "121a")]


@needs_nvcc
def test_this_tree_comes_before_the_wheel() -> None:
    plan = modules.gen_fused_moe_module().plan
    flags = plan.steps[0].flags
    folders = [
        word.removeprefix("-I") for flag, word in zip(flags, flags[1:], strict=False) if flag in ("-I", "-isystem")
    ]
    folders = [flag[2:] for flag in flags if flag.startswith("-I") and flag != "-I"] + folders
    tree = str(modules.fork_root())
    ours = [folder for folder in folders if folder.startswith(tree) and "site-packages" not in folder]
    assert ours[:3] == [f"{tree}/include", f"{tree}/csrc", f"{tree}/csrc/nv_internal"]
    assert folders[: len(ours)] == ours
    wheel = str(modules.wheel_root() / "data")
    for part in ("include", "csrc", "cutlass/include"):
        assert f"{wheel}/{part}" in folders


def test_3rdparty_cutlass_comes_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_env, "fork_root", lambda: tmp_path)
    assert jit_env._fork_cutlass_include_dirs() == []
    (tmp_path / "3rdparty/cutlass/include").mkdir(parents=True)
    assert jit_env._fork_cutlass_include_dirs() == [tmp_path / "3rdparty/cutlass/include"]


@needs_nvcc
def test_debug_build_and_embedded_ptx_which_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_JIT_DEBUG", "1")
    monkeypatch.setenv("FLASHINFER_SM12X_EMBED_PTX", "1")
    spec = modules.gen_fused_moe_module()
    assert spec.name == "fused_moe_120_ptx"
    flags = spec.plan.steps[0].flags
    assert {"-O0", "-g", "--device-debug"} <= set(flags)
    assert "-O3" not in flags
    assert "-gencode=arch=compute_121a,code=compute_121a" in flags
    assert "--compress-mode=none" in flags


@pytest.mark.parametrize("kind", modules.MMA_KINDS)
def test_widths_of_sums_at_their_edges(kind: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest that loses less than bfloat16's rounding, by the formula, and the narrowest and widest there
    are."""
    monkeypatch.setattr(jit_env, "FLASHINFER_WORKSPACE_DIR", workspace)
    monkeypatch.delenv(modules.HALF_MMA_VARIABLE, raising=False)
    narrowest = modules.NARROWEST_SUM
    assert modules.drift(narrowest) < 2.0**-9 <= modules.drift(narrowest - 1)
    probed = workspace / modules.PROBE_FILE
    for bits, in_half in ((1, True), (narrowest - 1, True), (narrowest, False), (64, False), (None, False)):
        probed.write_text(json.dumps({"mma_sum_bits": {kind: bits}}))
        assert modules.computes_in_fp16(kind) == in_half, bits
    for bits in (0, 65, -1, 20.0, "20"):
        probed.write_text(json.dumps({"mma_sum_bits": {kind: bits}}))
        with pytest.raises(ValueError, match="it must be an integer from 1 to 64"):
            modules.computes_in_fp16(kind)


def test_no_architecture_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    _set_archs(monkeypatch)
    with pytest.raises(RuntimeError, match=r"no GPU is visible .* Set FLASHINFER_CUDA_ARCH_LIST=12\.1a"):
        modules.gen_fused_moe_module()


def test_architecture_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_archs(monkeypatch, (10, "0a"), (8, "9"))
    with pytest.raises(RuntimeError, match=r"modules are compiled for 8\.9, 10\.0a\. Set FLASHINFER_CUDA_ARCH_LIST"):
        modules.gen_fused_moe_module()


def test_upstreams_module_has_a_name_and_folders_of_its_own(workspace: Path) -> None:
    upstream = fused_moe.gen_cutlass_fused_moe_sm120_upstream_module()
    ours = fused_moe.gen_cutlass_fused_moe_sm120_module()
    assert upstream.name == "fused_moe_120_upstream"
    assert len(upstream.sources) > 50
    assert upstream.job_memory == 6 << 30
    assert core.jit_spec_registry.get_all_specs()["fused_moe_120_upstream"] is upstream
    assert "-DENABLE_FP4" in upstream.extra_cuda_cflags
    assert not {source.parent for source in ours.sources} & {source.parent for source in upstream.sources}
    assert upstream.build_dir != ours.build_dir
    assert set(core.jit_spec_registry.get_all_specs()) == {"fused_moe_120", "fused_moe_120_upstream"}


def test_other_upstream_modules_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_archs(monkeypatch, (10, "0a"))
    assert fused_moe.gen_cutlass_fused_moe_sm100_module().name == "fused_moe_100"


@needs_nvcc
@pytest.mark.usefixtures("upstream_builds_here")
def test_upstreams_module_has_upstreams_flags(workspace: Path) -> None:
    """The commands of the engine are those of upstream's build file, but for their order and their outputs."""
    spec = fused_moe.gen_cutlass_fused_moe_sm120_upstream_module()
    spec.write_ninja()
    text = spec.ninja_path.read_text().replace("$\n", "").replace("$cuda_home", cpp_ext.get_cuda_path())
    variables = dict(re.findall(r"^(\w+) = (.*)$", text, re.MULTILINE))
    for suffix, name in ((".cu", "cuda_cflags"), (".cpp", "cflags")):
        step = next(step for step in spec.plan.steps if step.source.suffix == suffix)
        upstreams = variables[name].replace("$common_cflags", variables["common_cflags"]).split()
        assert sorted(set(upstreams)) == sorted(set(step.flags))
    assert {"-lcudart", "-lcuda", "-lnvrtc"} <= set(spec.plan.link_flags)


def test_adopting_what_the_engine_cannot_build(workspace: Path) -> None:
    spec = core.gen_jit_spec("special", [workspace / "x.cu"], needs_device_linking=True)
    with pytest.raises(ValueError, match="special needs steps that the engine does not have"):
        JitSpecSm12x.adopt(spec, [(12, "1a")], 1)


@needs_nvcc
def test_adopted_module_is_built_and_links_the_driver(workspace: Path) -> None:
    source = workspace / "driver.cpp"
    source.write_text('#include <cuda.h>\nextern "C" int v() { int n = 0; cuDriverGetVersion(&n); return n; }\n')
    spec = JitSpecSm12x.adopt(core.gen_jit_spec("driver", [source]), [(12, "1a")], 1 << 30)
    spec.build(need_lock=True)
    needed = subprocess.run(["readelf", "-d", str(spec.jit_library_path)], capture_output=True, text=True).stdout
    assert "[libcuda.so.1]" in needed
    assert core.jit_spec_registry.get_all_specs()["driver"] is spec


@needs_nvcc
@pytest.mark.usefixtures("upstream_builds_here")
def test_upstreams_ninja_file_links_against_this_toolkit(workspace: Path) -> None:
    spec = core.gen_jit_spec("plain", [workspace / "plain.cpp"])
    spec.write_ninja()
    text = spec.ninja_path.read_text()
    link_dirs = [Path(word[2:]) for word in text.split() if word.startswith("-L/")]
    assert any((folder / "libcudart.so").exists() for folder in link_dirs)
    assert any((folder / "libcuda.so").exists() for folder in [*link_dirs, *(f / "stubs" for f in link_dirs)])


def test_headers_without_a_compiler_are_a_cuda_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    monkeypatch.setattr(toolchain, "DEFAULT_ROOT", tmp_path / "none")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    path_of = cpp_ext.get_cuda_path.__wrapped__
    with pytest.raises(toolchain.ToolchainError, match="no CUDA compiler found"):
        path_of()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    assert path_of() == str(tmp_path)


@needs_nvcc
@pytest.mark.usefixtures("upstream_builds_here")
def test_upstreams_failed_build_is_as_short(workspace: Path) -> None:
    source = workspace / "broken.cpp"
    source.write_text("#include <cublasLt.h>\n#include <none.h>\nint x = y;\n")
    spec = core.gen_jit_spec("broken", [source])
    with pytest.raises(JitBuildError) as caught:
        spec.build(need_lock=True)
    lines = str(caught.value).splitlines()
    assert "fatal error: " in lines[0]
    assert lines[0].endswith(".h: No such file or directory")
    assert lines[-1] == f"Log: {workspace}/cached_ops/broken/build.log"
    assert len(lines) == 3
    assert "FAILED: " in (workspace / "cached_ops" / "broken" / "build.log").read_text()


@pytest.mark.parametrize("odd", [" ", "$"])
@pytest.mark.parametrize(
    ("what", "fix"),
    [
        ("the cache path", "set FLASHINFER_WORKSPACE_BASE to a folder without one"),
        ("FlashInfer's path", "install FlashInfer in an environment without one"),
        ("the CUDA toolkit's path", "set CUDA_HOME to a link without one"),
    ],
)
def test_upstreams_build_reports_which_path_it_does_not_quote(
    what: str, fix: str, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before ninja is started, in whose words it would be a file that is not there."""
    paths = {"the cache path": "/c", "FlashInfer's path": "/f", "the CUDA toolkit's path": "/t"}
    paths[what] += f"{odd}d"
    monkeypatch.setattr(jit_env, "FLASHINFER_INCLUDE_DIR", Path(paths["FlashInfer's path"]))
    monkeypatch.setattr(cpp_ext, "find_toolkit", lambda: SimpleNamespace(root=Path(paths["the CUDA toolkit's path"])))
    monkeypatch.setattr(cpp_ext, "_ninja", lambda *_: pytest.fail("it was started"))
    folder = Path(paths["the cache path"]) / "cached_ops" / "demo"
    character = {" ": "space"}.get(odd, odd)
    path = folder if what == "the cache path" else paths[what]
    with pytest.raises(JitBuildError) as caught:
        cpp_ext.run_ninja(folder, folder / "build.ninja", False)
    message = f"building demo failed: {what} holds a {character}, which upstream's build files do not quote: {path}"
    assert str(caught.value) == f"{message}\nHint: {fix}"


@needs_nvcc
def test_compile_commands() -> None:
    spec = modules.gen_fused_moe_module()
    entries = spec.get_compile_commands()
    assert [entry["file"] for entry in entries] == [str(source.resolve()) for source in spec.sources]
    assert all("compute_121a" in entry["command"] for entry in entries)


@needs_nvcc
def test_architecture_need_not_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "-gencode=arch=compute_121a,code=sm_121a" in modules.gen_fused_moe_module().plan.steps[0].flags


@needs_nvcc
def test_real_build_loads_without_a_driver_and_follows_its_headers(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = small_spec(workspace).build_and_load()
    assert module.answer() == 41
    assert module.launch(0) != 0 or _gpu_visible()  # an error, not a crash
    spec = small_spec(workspace)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert spec.try_load().answer() == 41
    (workspace / "src" / "answer.h").write_text("#define ANSWER 42\n")
    stale = small_spec(workspace)
    assert stale.try_load() is None
    with pytest.raises(MissingJITCacheError, match="small is not built, or no longer fresh") as caught:
        stale.build_and_load()
    assert caught.value.spec is stale
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    stale.build(need_lock=True)
    assert answer_of(stale.jit_library_path) == "42"
    needed = subprocess.run(["readelf", "-d", str(stale.jit_library_path)], capture_output=True, text=True).stdout
    assert "libcudart.so" in needed
    assert "libcuda.so" not in needed


def _gpu_visible() -> bool:
    import torch

    return torch.cuda.is_available()


@needs_nvcc
def test_real_missing_suffix_gives_the_hint(workspace: Path) -> None:
    spec = small_spec(workspace)
    spec.sources[0].write_text(
        "#include <cuda_fp4.h>\n"
        "__global__ void k(unsigned short* o, float a, float b) {\n"
        '  asm volatile("{ .reg .b8 x; cvt.rn.satfinite.e2m1x2.f32 x, %1, %2; cvt.u16.u8 %0, x; }"'
        ' : "=h"(*o) : "f"(a), "f"(b));\n}\n'
    )
    spec.extra_cuda_cflags = ["-std=c++17", "-gencode=arch=compute_121,code=sm_121"]
    with pytest.raises(Exception, match=r"not supported on \.target 'sm_121'") as caught:
        spec.build(need_lock=True)
    assert "Set FLASHINFER_CUDA_ARCH_LIST=12.1a" in str(caught.value)
    assert str(caught.value).splitlines()[-1] == f"Log: {spec.build_dir / 'build.log'}"


def test_pip_toolkit_alone_is_enough(gxx: str, workspace: Path) -> None:
    """A process with neither nvcc on PATH nor CUDA_HOME nor a toolkit in the default place plans with the toolkit from
    PyPI, which comes after all of them."""
    if not any((folder / "cu13" / "bin" / "nvcc").exists() for folder in toolchain.wheel_folders()):
        pytest.skip("nvidia-cuda-nvcc is not installed")
    others = ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC")
    environment = {key: value for key, value in os.environ.items() if key not in others}
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if not (Path(f) / "nvcc").exists()]
    environment |= {"PATH": os.pathsep.join(folders), "FLASHINFER_WORKSPACE_BASE": str(workspace)}
    code = (
        "from pathlib import Path; from flashinfer.jit.sm12x import modules; from flashinfer_sm12x.build import "
        f"toolchain;toolchain.DEFAULT_ROOT = Path({str(workspace / 'no default')!r});plan = "
        "modules.gen_fused_moe_module().plan;print(plan.description); print(plan.steps[0].compiler); "
        "print(*plan.link_flags)"
    )
    out = forked_python.run(["-c", code], env=environment)
    assert out.returncode == 0, out.stderr
    description, compiler, link = out.stdout.strip().splitlines()[-3:]
    assert description.endswith("(found through pip)"), out.stderr
    assert compiler.endswith("nvidia/cu13/bin/nvcc")
    assert "libcudart.so.13" in link


def test_aot_lists_the_modules_for_these_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer import aot

    others = [type("Spec", (), {"name": name})() for name in ("norm", "fused_moe_120")]

    def upstream(  # the signature of upstream's, by the names that matter here
        f16_dtype_: Any, sm_capabilities: dict, add_moe: bool
    ) -> list[Any]:
        return others

    monkeypatch.setattr(aot._upstream, "gen_all_modules", upstream)
    names = [spec.name for spec in aot.gen_all_modules([], sm_capabilities={"sm121": True}, add_moe=True)]
    assert names == [
        "fused_moe_120",
        "fused_moe_120_nvfp4",
        "gemm_mxfp4_sm12x",
        *(f"dense_{form}_sm12x" for form in ("mxfp4", "mxfp8", "mxint8", "mxfp6", "nvfp4")),
        "router_sm12x",
        "decode_sm12x",
        "fused_moe_120_stream_mxfp8_as_bf16_m8_w3",
        "fused_moe_120_stream_bf16_m8_w3",
        "fused_moe_120_upstream",
        "norm",
    ]
    assert aot.gen_all_modules([], sm_capabilities={"sm121": True}, add_moe=False) == others
    assert aot.gen_all_modules([], sm_capabilities={"sm90": True}, add_moe=True) == others


@needs_nvcc
@pytest.mark.usefixtures("upstream_builds_here")
def test_aot_builds_and_packages(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours through the engine, one of upstream's through ninja, both from the wheel's sources, into one folder."""
    from flashinfer import aot

    theirs = workspace / "theirs.cu"
    theirs.write_text(
        '#include <cuda.h>\nextern "C" int driver_version() { int v = 0; cuDriverGetVersion(&v); return v; }\n'
    )
    names = ("CSRC_DIR", "INCLUDE_DIR")
    for name in (*(f"FLASHINFER_{name}" for name in names), "CUTLASS_INCLUDE_DIRS", "SPDLOG_INCLUDE_DIR"):
        monkeypatch.setattr(jit_env, name, getattr(jit_env, name))
    made = [small_spec(workspace, "ours"), core.gen_jit_spec("theirs", [theirs])]
    monkeypatch.setattr(aot, "gen_all_modules", lambda *_: made)
    out = workspace / "out"
    aot.compile_and_package_modules(out, workspace / "build", Path(aot.__file__).parents[1], skip_prebuilt=False)
    assert sorted(path.name for path in out.rglob("*.so")) == ["ours.so", "theirs.so"]
    assert (workspace / "build" / "upstream" / "csrc" / "quantization.cu").is_file()


@pytest.mark.parametrize("name", modules.MODULES)
def test_compilers_are_asked_to_tell_of_spills_where_there_must_be_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> bool:
        return diagnosis.WARN_OF_LOCAL_MEMORY in modules.MODULES[name]().extra_cuda_cflags

    assert asked()
    _set_archs(monkeypatch, (12, "0f"), (12, "1a"))
    assert asked()
    _set_archs(monkeypatch, (9, "0a"), (12, "1a"))
    assert not asked()
    _set_archs(monkeypatch, (12, "1a"))
    monkeypatch.setenv("FLASHINFER_SM12X_HALF_MMA", "1")
    # Those that have block-scaled MMAs multiply in half precision then, and may spill.
    alike = (modules.ROUTER, modules.DECODE, modules.PROBE, "dense_mxint8_sm12x", "dense_nvfp4_sm12x")
    alike += (modules.FUSED_MOE_NVFP4,)
    assert asked() == (name in alike)
    monkeypatch.delenv("FLASHINFER_SM12X_HALF_MMA")
    monkeypatch.setenv("FLASHINFER_JIT_DEBUG", "1")
    assert not asked()


@needs_nvcc
@pytest.mark.usefixtures("cuobjdump")
def test_machine_code_is_read(workspace: Path, jit_log: pytest.LogCaptureFixture) -> None:
    spec = small_spec(workspace)
    spec.extra_cuda_cflags.append(diagnosis.WARN_OF_LOCAL_MEMORY)
    spec.sources[0].write_text(
        "#include <mma.h>\nusing namespace nvcuda::wmma;\n"
        "__global__ void with_mma(const half* a, const half* b, float* c) {\n"
        "  fragment<matrix_a, 16, 16, 16, half, row_major> x; fragment<matrix_b, 16, 16, 16, half, col_major> y;\n"
        "  fragment<accumulator, 16, 16, 16, float> z; fill_fragment(z, 0.f);\n"
        "  load_matrix_sync(x, a, 16); load_matrix_sync(y, b, 16); mma_sync(z, x, y, z);\n"
        "  store_matrix_sync(c, z, 16, mem_row_major);\n"
        '  asm volatile("bar.sync 4, 32;");\n}\n'
        "__global__ void with_spills(int* p, int n) {\n"
        "  volatile int local[64];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) local[i * n & 63] = p[i];\n"
        "  p[0] = local[n & 63];\n}\n"
    )
    spec.build(need_lock=True)
    kernels = {kernel.name.split("(")[0]: kernel for kernel in inspect_sass.inspect(spec.jit_library_path)}
    assert set(kernels) == {"with_mma", "with_spills"}
    mma, spills = kernels["with_mma"], kernels["with_spills"]
    assert mma.architecture == spills.architecture == "sm_121a"
    assert (mma.tensor_instructions, mma.local_accesses, mma.block_scaled_mmas) == (2, 0, 0)  # two m16n8k16
    assert named_barriers(spec.jit_library_path) == [5]
    assert spills.local_accesses >= 65
    assert spills.stack >= 256
    assert 8 <= mma.registers <= 255
    (message,) = (record.getMessage() for record in jit_log.records if record.levelno == logging.WARNING)
    assert f"src_small.o ({spills.stack} bytes a thread)" in message
    assert shutil.which("c++filt") is None or "half const*" in mma.name or "__half const*" in mma.name


@needs_nvcc
@pytest.mark.usefixtures("cuobjdump")
def test_table_of_instances_as_built(workspace: Path) -> None:
    """One instance of the real module: its rows hold what its machine code does."""
    row = MAIN_MODULE[0]
    whole = modules.gen_fused_moe_module()
    source = next(source for source in whole.sources if source.stem == row.name)
    spec = dataclasses.replace(whole, name="one_instance", sources=[source])
    with pytest.raises(RuntimeError, match=r"one_instance is not built .*; build it first"):
        instance_rows(spec)
    spec.build(need_lock=True)
    rows = instance_rows(spec)
    assert {built.gemm for built in rows} == {"fc1", "fc2"}
    for built in rows:
        assert (built.tactic, built.instance, built.architecture) == (row.profile_id, row.name, "sm_121a")
        assert built.block_scaled_mmas == built.tensor_instructions > 0
        assert built.local_accesses == 0
        assert 32 <= built.registers <= 65536 // (row.blocks_per_sm * built.threads)
        assert row.shared_bytes <= built.shared_bytes <= 101376
    headers, cells = as_table(rows)
    assert all(len(cell) == len(headers) for cell in cells)


@needs_nvcc
@pytest.mark.parametrize("name", ["bf16_m8_k128", "stream_bf16_m8", "nvfp4_stream_bf16_m8"])
@pytest.mark.parametrize("change", [{"shared_bytes": 16}, {"stages": -1}], ids=str)
def test_a_row_that_differs_from_the_layout_of_shared_memory_does_not_compile(
    name: str, change: dict[str, int]
) -> None:
    row = INSTANCES[index_of(name)]
    wrong = dataclasses.replace(row, **{column: getattr(row, column) + more for column, more in change.items()})
    spec = modules._spec("wrong_row", [], modules._MOE_TEMPLATE, [wrong])
    with pytest.raises(RuntimeError, match=r"instances\.py says otherwise"):
        spec.build(need_lock=True)


@needs_nvcc
@pytest.mark.parametrize("base", ["rel", "$HOME a"])
def test_cache_paths_that_nvcc_would_have_a_shell_read(base: str, tmp_path: Path) -> None:
    """A relative one, and one with a ``$``; the source is a generated one, which lies in the cache."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "import jit_fakes; from flashinfer.jit import env;"
        "spec = jit_fakes.small_spec(env.FLASHINFER_GEN_SRC_DIR); spec.build(need_lock=True);"
        "print(spec.try_load().answer(), spec.plan.library)"
    )
    answer, library = printed_by(code, tmp_path, base).strip().split(" ", 1)
    assert answer == "41"
    assert Path(library).is_relative_to(tmp_path / base)
