# SPDX-License-Identifier: Apache-2.0
"""``sm12x-build --vllm`` makes the modules of upstream's that vLLM's calls load: the calls are upstream's own
functions."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import logging
from pathlib import Path
from typing import Any

import flashinfer.attention._core as attention
import flashinfer.prefill as prefill
import flashinfer.sampling as sampling
import pytest
import torch
from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module
from flashinfer.jit.xqa import gen_xqa_module
from jit_fakes import needs_nvcc
from layer_toys import REPO, Run

import flashinfer.decode as decode
from flashinfer.jit import cpp_ext
from flashinfer.jit import env as jit_env
from flashinfer.jit.sm12x import modules
from flashinfer_sm12x.build import engine
from flashinfer_sm12x.build.diagnosis import JitBuildError

xqa = importlib.import_module("flashinfer.xqa")  # the package has a function of that name
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Asked(Exception):
    """Ends a call of upstream's where it would build; holds the generator's arguments."""


def asked(*arguments: Any, **named: Any) -> None:
    raise Asked(arguments, named)


def contents(spec: Any) -> dict[str, str]:
    """Hashes of a module's generated files, and of the paths of others."""
    files = [*spec.sources, *(file for source in spec.sources for file in Path(source).parent.glob("*.inc"))]
    generated = [file for file in files if Path(file).is_relative_to(jit_env.FLASHINFER_GEN_SRC_DIR)]
    return {str(file): hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in generated}


@pytest.mark.parametrize(
    ("capability", "kv_cache"), [((12, 1), BF16), ((12, 1), FP8), ((12, 0), BF16), ((12, 0), FP8), ((9, 0), BF16)]
)
def test_the_modules_are_those_that_vllms_calls_load(
    capability: tuple[int, int], kv_cache: torch.dtype, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = capability == (9, 0)
    monkeypatch.setattr(
        modules.core.current_compilation_context, "TARGET_CUDA_ARCHS", {(capability[0], f"{capability[1]}a")}
    )
    monkeypatch.setattr(xqa, "_get_xqa_module_cached", asked)
    monkeypatch.setattr(xqa, "get_compute_capability", lambda _device: capability)
    upstreams = inspect.unwrap(decode._upstream.xqa_batch_decode_with_kv_cache)
    monkeypatch.setitem(upstreams.__globals__, "get_device_sm_count", lambda _device: 48)
    monkeypatch.setattr(prefill, "get_customize_batch_prefill_module", asked)
    monkeypatch.setattr(attention, "determine_attention_backend", lambda *_, **__: "fa3" if hopper else "fa2")
    monkeypatch.setattr(sampling, "gen_sampling_module", asked)
    made = {spec.name: spec for spec in modules.gen_vllm_modules(kv_cache)}
    before = {name: contents(spec) for name, spec in made.items()}
    assert len(made) == 5

    # The calls are those of vLLM's FlashInferImpl.forward and FlashInferMetadataBuilder._get_prefill_wrapper.
    pages = torch.zeros(8, 8, 16, 128, dtype=BF16).to(kv_cache)
    for window in (-1, 127):
        found: list[Any] = []
        with pytest.raises(Asked) as raised:
            decode._upstream.xqa_batch_decode_with_kv_cache(
                query=torch.zeros(1, 64, 64, dtype=BF16),
                kv_cache=pages.split(64, -1),
                workspace_buffer=torch.zeros(16 << 20, dtype=torch.uint8),
                block_tables=torch.zeros(1, 8, dtype=torch.int32),
                seq_lens=torch.ones(1, dtype=torch.int32),
                max_seq_len=128,
                bmm1_scale=0.125,
                window_left=window,
                out=torch.zeros(1, 64, 64, dtype=BF16),
                sinks=torch.zeros(64),
                kv_layout="HND",
                enable_pdl=False,
            )
        found.append(lambda raised=raised: gen_xqa_module(*raised.value.args[0], **raised.value.args[1]))
        with pytest.raises(Asked) as raised:
            attention.BatchAttentionWithAttentionSinkWrapper(
                torch.zeros(1 << 20, dtype=torch.uint8),
                "HND",
                backend="auto",
                q_data_type=BF16,
                kv_data_type=kv_cache,
                head_dim_qk=64,
                head_dim_vo=64,
                window_left=window,
            )
        found.append(
            lambda raised=raised: gen_customize_batch_prefill_module(*raised.value.args[0], **raised.value.args[1])
        )
        for generate in found:
            theirs = generate()
            ours = made.pop(theirs.name)
            assert theirs.sources == ours.sources
            assert theirs.extra_cuda_cflags == ours.extra_cuda_cflags
            assert contents(theirs) == before[theirs.name]
    monkeypatch.undo()
    assert list(made) == ["sampling"]


def test_nothing_is_asked_for_where_no_architecture_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "target_architectures", lambda: (_ for _ in ()).throw(RuntimeError("no GPU")))
    with pytest.raises(RuntimeError, match="no GPU"):
        modules.gen_vllm_modules(BF16)


def test_an_fp8_cache_is_refused_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on an H200: "MajorB must be GMMA::Major::K for this config" from FA3's sources."""
    monkeypatch.setattr(modules, "target_architectures", lambda: ((9, "0a"),))
    with pytest.raises(
        RuntimeError, match=r"on 9\.0 upstream's prefill with sinks does not compile for an FP8 KV cache"
    ):
        modules.gen_vllm_modules(FP8)


BUILT_THEN_LOADED = """
import sys
from pathlib import Path
from flashinfer.jit import core, cpp_ext
from flashinfer_sm12x.build import engine
engine._SECONDS_BETWEEN_LINES = 0  # each step is told
folder, specs = Path(sys.argv[1]), []
for name in ("one", "two"):
    (folder / f"{name}.cu").write_text(f"__global__ void {name}(float* x) {{ *x = 1; }}\\n")
    specs.append(core.gen_jit_spec(name, [folder / f"{name}.cu"]))
core.build_jit_specs(specs)
made = {path: path.stat().st_mtime_ns for spec in specs for path in spec.build_dir.glob("*.*o")}
assert len(made) == 4, made  # an object and a library each
for spec in specs:
    spec.build(need_lock=True)  # as a load does
assert made == {path: path.stat().st_mtime_ns for path in made}, "compiled again"
try:
    core.build_jit_specs([type("Spec", (), {"name": "three"})()])
except TypeError as error:
    print(error)
type(specs[0]).aot_path = folder  # an installed wheel brings them
cpp_ext.run_ninja = None
core.build_jit_specs(specs)
core.build_jit_specs([])
"""


@needs_nvcc
@pytest.mark.usefixtures("upstream_builds_here")
def test_what_was_built_beforehand_is_not_compiled_by_the_start(
    run_python: Run, site_packages: Path, tmp_path: Path
) -> None:
    """Two of upstream's specs at once; each load runs ninja again, which must find nothing to do."""
    env = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "FLASHINFER_CUDA_ARCH_LIST": "12.1a"}
    done = run_python("-c", BUILT_THEN_LOADED, str(tmp_path), path=[REPO, site_packages], env=env)
    assert done.stdout == "three is a Spec; build_jit_specs compiles modules by nvcc only\n"
    raised = [line.partition("flashinfer.jit: ")[2] for line in done.stderr.splitlines()]
    assert raised.pop(0).startswith("building 2 modules of upstream's, 4 steps, ")
    assert [line.rpartition(" ")[0] for line in raised] == [
        f"upstream's modules [{step}/4] {line.split('] ')[1].split(':')[0]}:" for step, line in enumerate(raised, 1)
    ]
    files = ["one: one.so", "two: two.so", *(f"{name}: {tmp_path.name}_{name}.cuda.o" for name in ("one", "two"))]
    assert sorted(line.split("] ")[1] for line in raised) == sorted(files)


NINJA_FILE = """
rule make
  command = sh {folder}/nvcc -c $in -o $out
build {folder}/a.cuda.o: make {folder}/a.cu
build {folder}/b.cuda.o: make {folder}/a.cu | {folder}/a.cuda.o
build {folder}/demo.so: make {folder}/a.cuda.o | {folder}/b.cuda.o
"""


def ninja_file(folder: Path, compiler: str) -> Path:
    """Write a file of three steps; the compiler is a shell's script, whose fourth argument is the output."""
    folder.mkdir(parents=True)
    (folder / "a.cu").touch()
    (folder / "nvcc").write_text(compiler)
    path = folder / "build.ninja"
    path.write_text(NINJA_FILE.format(folder=folder))
    return path


@pytest.mark.usefixtures("upstream_builds_here")
def test_a_build_of_upstreams_is_reported_while_it_goes_on(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, jit_log: pytest.LogCaptureFixture
) -> None:
    """vLLM's start may compile one, too."""
    folder = workspace / "cached_ops" / "demo"
    file = ninja_file(folder, 'touch "$4"')
    steps = [(1, 3, "a.cuda.o"), (2, 3, "b.cuda.o"), (3, 3, "demo.so")]
    seen: list[tuple[int, int, str]] = []
    cpp_ext.run_ninja(folder, file, False, tell=lambda *step: seen.append(step))
    assert seen == steps
    for name in ("a.cuda.o", "b.cuda.o", "demo.so"):
        (folder / name).unlink()
    clock = itertools.count(0, 6).__next__  # three steps in 18 s, and a clock that is read once for each
    monkeypatch.setattr(engine.time, "monotonic", clock)
    cpp_ext.run_ninja(folder, file, False)
    raised = [(record.levelno, record.getMessage()) for record in jit_log.records]
    assert [message for _, message in raised] == [f"demo [{done}/{total}] {name}" for done, total, name in steps]
    assert [level for level, _ in raised] == [logging.DEBUG, logging.INFO, logging.DEBUG]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.usefixtures("upstream_builds_here")
def test_a_build_of_upstreams_that_fails_leaves_its_log(
    workspace: Path, capsys: pytest.CaptureFixture[str], verbose: bool
) -> None:
    folder = workspace / "cached_ops" / "demo"
    fails = "echo 'a.cu(3): error: it is wrong'; exit 1"
    with pytest.raises(JitBuildError, match=r"^building demo failed: a\.cu\(3\): error: it is wrong") as caught:
        cpp_ext.run_ninja(folder, ninja_file(folder, fails), verbose)
    assert caught.value.log_path == folder / "build.log"
    assert "a.cu(3): error: it is wrong" in caught.value.log_path.read_text()
    assert ("it is wrong" in capsys.readouterr().out) == verbose
