# SPDX-License-Identifier: Apache-2.0
"""All of what ``tools/upstream_patch`` exports, on each branch: ``make test-upstream-patch``.

Whole modules are built by upstream's JIT, and every test that a topic brings runs on the virtual SM121.
docs/development.md has the outcome.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.upstream_patch.topics import TOPICS
from tools.upstream_patch.tree import git

REPO = Path(__file__).resolve().parents[2]
PLAIN = ("architectures", "cublas-headers")
# Its module holds all of upstream's grouped GEMMs for SM120, dozens of CUTLASS sources: one instance is compiled below.
SCALES = "group-gemm-scales"
KERNELS = [name for name in TOPICS if name not in (*PLAIN, SCALES)]
# The checkers report this of upstream's kernels with a topic's edits, too: see emulator/README.md.
KNOWN = {"xqa-copies": "undefined behaviour"}

# A checkout for what the wheel has not: see conftest.py.
CHECKOUT = os.environ.get("UPSTREAM_CHECKOUT", "")
needs_checkout = pytest.mark.skipif(
    not CHECKOUT, reason="UPSTREAM_CHECKOUT names no checkout, and the wheel lacks this"
)

# Tests for a GPU: layers of models are too large for an emulator, which has no CUDA graphs either.
ON_A_GPU = "of_models or cuda_graph"

# Programs that compile upstream's headers and run on the virtual GPU.
sys.path += [str(REPO / "emulator/tests"), str(REPO / "emulator/tests/upstream")]
import programs  # noqa: E402
import upstream_programs  # noqa: E402

toolkit, shim, compile_cuda = programs.toolkit, programs.shim, programs.compile_cuda
compile_upstream, run_checked = upstream_programs.compile_upstream, upstream_programs.run_checked


@pytest.fixture(scope="session")
def wheel(upstream_tree: Path) -> Path:
    """The folder in which those programs find upstream's headers: the work tree's."""
    return upstream_tree / "flashinfer" / "data"


def checked_out(folder: Path, topic: str) -> str:
    """Put the work tree at a topic's branch; the commit from which it differs by that topic alone."""
    git(folder, "checkout", "--quiet", "--detach", f"sm12x/{topic}")
    return f"sm12x/{TOPICS[topic].after}" if TOPICS[topic].after else "main"


@pytest.fixture(scope="module", autouse=True)
def _upstreams_afterwards(exported):
    yield
    git(exported[0], "checkout", "--quiet", "main")


@pytest.mark.parametrize("topic", TOPICS)
def test_a_branch_imports_what_it_changes(exported, without_fork, topic):
    folder, _ = exported
    before = checked_out(folder, topic)
    changed = git(folder, "diff", "--name-only", before, "HEAD", "--", "flashinfer").split()
    modules = [path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in changed]
    without_fork(folder, "-c", f"import importlib; [importlib.import_module(n) for n in {['flashinfer', *modules]!r}]")


@pytest.mark.parametrize("topic", PLAIN)
def test_tests_without_a_gpu(exported, without_fork, topic):
    folder, _ = exported
    checked_out(folder, topic)
    options = ("-q", "-W", "ignore", "-p", "no:cacheprovider", "--import-mode=importlib")
    without_fork(folder, "-m", "pytest", *options, *TOPICS[topic].tests)


@pytest.mark.parametrize("topic", KERNELS)
def test_tests_on_the_virtual_gpu(exported, on_the_virtual_gpu, topic):
    folder, _ = exported
    checked_out(folder, topic)
    done = on_the_virtual_gpu(
        folder, *TOPICS[topic].tests, "-k", f"not ({ON_A_GPU})", VIRTUAL_GPU_KNOWN=KNOWN.get(topic, "")
    )
    launches = re.search(r"[1-9]\d* launches on the virtual SM121, of \d+ kernels", done.stdout)
    passed = re.search(r"\d+ passed[^\n]*", done.stdout)
    assert launches is not None
    assert passed is not None
    assert "failed" not in passed[0]
    assert "skipped" not in passed[0]
    print(f"{topic}: {launches[0]}; {passed[0]}", file=sys.stderr)


# Upstream's own tests, of small shapes, with the instances that such shapes choose. They name no backend: the plugin
# makes "sm12x" the default, from outside.
_GROUP_GEMM = "tests/gemm/test_groupwise_scaled_gemm_mxfp4.py::test_mxfp8_mxfp4_groupwise_group_gemm"
UPSTREAMS = {
    "group-gemm": [
        f"{_GROUP_GEMM}[out_dtype{out}-fp8_dtype{rows}-{shape}]"
        for shape in ("1-128-128-4", "2-256-256-4")  # groups, k, n, rows of a group
        for rows in (0, 1)
        for out in (0, 1)
    ],
    "moe": ["tests/moe/test_trtllm_cutlass_fused_moe.py::test_moe_mxfp8_mxfp4"],
}
PASSING = {"group-gemm": 8, "moe": 12}


@needs_checkout
@pytest.mark.parametrize("topic", UPSTREAMS)
def test_upstreams_own_tests(merged, on_the_virtual_gpu, topic):
    """They pass with cublas-headers merged; without it upstream's quantization modules, which they call, do not build
    here."""
    done = on_the_virtual_gpu(
        merged, *UPSTREAMS[topic], VIRTUAL_GPU_BACKEND="sm12x", VIRTUAL_GPU_PTX_ONLY="1",
        VIRTUAL_GPU_INSTANCES="mxfp8_m8_k128 mxfp8_m8_k256 stream_mxfp8_as_bf16_m8",
    )  # fmt: skip
    assert re.search(rf"^{PASSING[topic]} passed in", done.stdout, re.MULTILINE)
    launches = re.search(
        r"\d+ launches on the virtual SM121, of \d+ kernels; [1-9]\d* of flashinfer::sm12x's", done.stdout
    )
    assert launches is not None
    print(f"upstream's test of {topic}: {launches[0]}; {PASSING[topic]} passed", file=sys.stderr)


@needs_checkout
def test_mypy_as_upstream_runs_it(merged, tmp_path):
    settings = tmp_path / "pyproject.toml"
    settings.write_text(git(Path(CHECKOUT), "show", "HEAD:pyproject.toml"), encoding="utf-8")
    changed = git(merged, "diff", "--name-only", "main", "HEAD", "--", "flashinfer/*.py").split()
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), *changed]
    done = subprocess.run(command, cwd=merged, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


_GEMM_ROUTINE = "--m 4 --n 128 --k 256 --num_iters 1 --dry_run_iters 1 --no_cuda_graph --refcheck --backends sm12x"
_MOE_ROUTINE = (
    "--num_tokens 4 --hidden_size 128 --intermediate_size 128 --num_experts 4 --top_k 2 --num_iters 1 "
    "--dry_run_iters 1 --no_cuda_graph --cutlass_variant mxfp4 --cutlass_backend sm12x"
)
ROUTINES = {
    "mm_fp4": f"--use_128x4_sf_layout {_GEMM_ROUTINE}",
    "mm_mxfp8": _GEMM_ROUTINE,
    "mm_bf16_fp4": _GEMM_ROUTINE,
    "cutlass_fused_moe": _MOE_ROUTINE,
    "cutlass_fused_moe --quantized_input": _MOE_ROUTINE,
}


@needs_checkout
@pytest.mark.parametrize("routine", ROUTINES)
def test_routines_of_the_benchmark(merged, on_the_virtual_gpu, routine):
    """The benchmark prints one run that nobody timed; --refcheck compares the GEMMs' results."""
    if "moe" in routine:
        pytest.importorskip("triton", reason="upstream's MoE routines import triton, which this environment lacks")
    arguments = f"--routine {routine} {ROUTINES[routine]}".split()
    program = (
        "import runpy, sys; sys.path.insert(0, 'benchmarks'); "
        "runpy.run_path('benchmarks/flashinfer_benchmark.py', run_name='__main__')"
    )
    chosen = "stream_bf16_m8 stream_mxfp8_as_bf16_m8" if "moe" in routine else ""
    done = on_the_virtual_gpu(
        merged, *arguments, program=program, VIRTUAL_GPU_PTX_ONLY="1", VIRTUAL_GPU_INSTANCES=chosen
    )
    assert re.search(r"\[PERF\] sm12x .*:: median time 1\.000 ms", done.stdout)
    assert "[ERROR]" not in done.stdout


@needs_checkout
def test_the_trace_template_of_mm_bf16_fp4(merged, without_fork, on_the_virtual_gpu, tmp_path):
    """Upstream's tests of templates take the new one, and what is added to its example dumps a definition."""
    options = ("-q", "-W", "ignore", "-p", "no:cacheprovider", "--import-mode=importlib")
    consistency = "tests/trace/test_fi_trace_template_consistency.py"
    done = without_fork(merged, "-m", "pytest", *options, consistency, "-k", "mm_bf16_fp4_sm12x")
    assert re.search(r"[1-9]\d* passed", done.stdout)
    correctness = "tests/trace/test_mm_bf16_fp4_reference_correctness.py"
    done = on_the_virtual_gpu(merged, correctness, "-k", "sm12x", VIRTUAL_GPU_PTX_ONLY="1")
    assert "2 passed" in done.stdout
    added = git(merged, "diff", "--unified=0", "main", "--", "tests/trace/example.py").splitlines()
    example = [line[1:] for line in added[added.index("+try:") :] if line.startswith("+")]
    program = "\n".join(["", "import flashinfer, torch", "device = 'cuda'", *example])
    on_the_virtual_gpu(
        merged, program=program, VIRTUAL_GPU_PTX_ONLY="1", FLASHINFER_TRACE_DUMP="1",
        FLASHINFER_TRACE_DUMP_DIR=str(tmp_path),
    )  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["mm_bf16_fp4_sm12x_N2880_K2880_block_size32.json"]


def test_xqa_is_wrong_without_the_edit(exported, on_the_virtual_gpu):
    folder, done = exported
    checked_out(folder, "xqa-copies")
    edited = next(each.edited for each in done if each.topic.name == "xqa-copies")
    git(folder, "checkout", "--quiet", "main", "--", *edited)
    try:
        with pytest.raises(AssertionError, match="4 failed, 4 passed") as error:
            on_the_virtual_gpu(folder, *TOPICS["xqa-copies"].tests, VIRTUAL_GPU_KNOWN=KNOWN["xqa-copies"])
    finally:
        git(folder, "checkout", "--quiet", "HEAD", "--", *edited)
    for tokens in (65, 77, 96, 128):
        assert f"test_xqa_short_sequences[{tokens}]" in str(error.value)


def test_scales_are_read_behind_their_end_without_the_edit_alone(exported, compile_upstream, run_checked):
    """One instance, of scales that are major along MN; the last group has 40 rows left to the end."""
    folder, _ = exported
    source = REPO / "emulator/tests/upstream/group_gemm_fp8.cu"
    defines = ("-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1", "-DCUTLASS_ENABLE_GDC_FOR_SM100=1")
    flags = (*defines, "-DROWS_PER_SCALE=1", "-DSCALE_MAJOR_K=0")
    git(folder, "checkout", "--quiet", "--detach", "main")
    program = compile_upstream("fp8_before", source, flags=flags)
    with pytest.raises(AssertionError, match="0 bytes behind the end of an allocation of 2016 bytes"):
        run_checked(program, 192, 384, 128, 0, 40)
    checked_out(folder, SCALES)
    program = compile_upstream("fp8_after", source, flags=flags)
    # Rows past a group's end, none of which is stored, are multiplied by scales that nothing wrote.
    known = {"uninitialized read": ("ld.shared",)}
    for rows in ((128, 0, 40), (40, 0, 128), (4,)):
        printed, _ = run_checked(program, 192, 384, *rows, known=known)
        assert printed == f"bad 0 of {sum(rows) * 192}\n"
    printed, _ = run_checked(program, 192, 384, 128, 0, 256)
    assert printed == f"bad 0 of {384 * 192}\n"
