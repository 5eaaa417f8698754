# SPDX-License-Identifier: Apache-2.0
"""``scripts/``: run as their users run them, against a server that speaks vLLM's HTTP and has chosen faults."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts"


def run(
    script: str, *words: str, fault: str = "", gpu: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, whose server is ``completions_server.py``; ``gpu``: it asks for none."""
    program = (
        "import runpy, sys, vllm_server; "
        f"vllm_server.VLLM = (sys.executable, {str(HERE / 'completions_server.py')!r}); "
        f"{'' if gpu else '#'}vllm_server.gpu_bytes = lambda: 1 << 36\n"
        f"sys.argv[0] = {script!r}; runpy.run_path({str(SCRIPTS / script)!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}", "FAULT": fault, **variables},
        capture_output=True,
        text=True,
        timeout=1800,  # a first run compiles
    )


def port() -> str:
    from vllm.utils.network_utils import get_open_port

    return str(get_open_port())


SOAK = ("model", "--minutes", "0", "--rounds", "9", "--streams", "16", "--input", "20", "--output", "8")
SOAK += ("--idle", "2", "--allow-mib", "40")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", "well: 9 rounds, no growth, no request left behind, the same greedy answer throughout"),
        ("memory", "not well: host_mib grew by "),
        ("cancelled", "not well: RuntimeError: 2 s after the last client left the server still has "),
        ("answers", "not well: the greedy answer to one prompt was "),
        ("start", "not well: ServerEnded: the server ended with status 2 while it started"),
    ],
)
def test_soak_server_sees_each_fault_and_none_where_there_is_none(tmp_path, fault, message):
    python = ("--unknown",) if fault == "start" else ()
    done = run("soak_server.py", *SOAK, "--port", port(), "--out", str(tmp_path), "--", *python, fault=fault)
    print(done.stdout, done.stderr)
    assert (done.stderr if fault else done.stdout).splitlines()[-1].startswith(message)
    assert done.returncode == (1 if fault else 0)
    result = json.loads((tmp_path / "soak.json").read_text())
    assert bool(result["wrong"]) == bool(fault)
    if not fault:
        assert all(row["cancelled"] >= 5 and row["chats"] >= 5 and row["host_mib"] > 1 for row in result["rounds"])


LINE = re.compile(r"^ *scripts/(\w+)\.py(.*?)(?:\s+#.*)?$", re.MULTILINE)
PAGES = [*sorted(SCRIPTS.glob("*.py")), *sorted((SCRIPTS.parent / "docs").glob("*.md")), SCRIPTS.parent / "README.md"]


@pytest.mark.parametrize(("name", "words"), [line for page in PAGES for line in LINE.findall(page.read_text())])
def test_documented_lines_are_what_the_scripts_take(monkeypatch, tmp_path, name, words):
    (tmp_path / "notes.txt").write_text("The text of a user.")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(words.partition("&&")[0])])
    given = module.arguments()
    print(given)
    if " -- " in words:
        assert given.server == shlex.split(words.partition(" -- ")[2])


WATCH = ("model", "--requests", "12", "--streams", "4", "--input", "20", "--output", "9", "--vocabulary", "600")


def test_watch_server_serves_all_without_a_crash(tmp_path):
    done = run("watch_server.py", *WATCH, "--port", port(), "--out", str(tmp_path))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "no crash: 12 requests served"), done.stderr


def test_watch_server_names_step_and_inputs_of_a_crash(tmp_path):
    """Two requests hold the token that kills the server: one is the culprit of the first crash, one of the second."""
    prompts = [[5, 6, 7], [5, 666], [1] * 8, [9], [2, 3], [666, 4, 4], [8]]
    requests = tmp_path / "requests.jsonl"
    fields = {"max_tokens": 40, "temperature": 0.0, "seed": 0}
    lines = [json.dumps({"name": name, "prompt": prompt, **fields}) for name, prompt in enumerate(prompts)]
    requests.write_text("\n".join(lines))
    words = ("model", "--replay", str(requests), "--streams", "3", "--port", port(), "--out", str(tmp_path))
    done = run("watch_server.py", *words, fault="crash")
    print(done.stdout, done.stderr)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "2 crashes, 7 of 7 requests served or set aside"
    assert done.stdout.count("the server ended by SIGSEGV\n  log: CUDA error: an illegal memory access") == 4
    # Its third token, after a prompt of two.
    assert "in flight: request 1, in its token 3 of the answer, position 4, temperature 0.0" in done.stdout
    assert "request 1 alone crashes it again in its token 3 of the answer, position 4" in done.stdout
    assert "request 5 alone crashes it again in its token 3 of the answer, position 5" in done.stdout
    assert re.search(r"request 0 \(was in its .*\) alone: is served", done.stdout)
    crashed = [json.loads(line)["name"] for line in (tmp_path / "crash_1.jsonl").read_text().splitlines()]
    assert sorted(crashed) == [0, 1, 2]


def test_compare_vllm_takes_words_for_its_servers_after_two_dashes():
    """argparse itself refuses them behind an option, which is how the script's own example is written."""
    done = run("compare_vllm.py", "model", "--streams", "1", "--ways", "none", "--", "--gpu-memory-utilization", "0.8")
    assert "--ways: 'none' is none of vLLM alone; " in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "profile_decode.py --layers 1",
        "compare_vllm.py model",
        "soak_server.py --layers 1",
        "watch_server.py model",
        "verify_gpu.py --quick",
    ],
)
def test_scripts_say_in_a_line_that_there_is_no_gpu(line):
    done = run(*line.split(), gpu=False, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("no GPU: torch.cuda.is_available() is False")


def test_verify_gpus_attention_reference_is_the_models():
    """The reference of ``tests/vllm_plugin``, with which it is compared, was written independently from the model's
    definition."""
    import types

    import reference_attention
    import torch
    import verify_gpu

    print("seed", 3)
    generator = torch.Generator().manual_seed(3)
    tokens, heads, kv_heads, head = 21, 6, 2, 8
    query, key, value = (torch.randn(tokens, n, head, generator=generator) for n in (heads, kv_heads, kv_heads))
    sinks = torch.randn(heads, generator=generator)
    for window in (0, 5):
        impl = types.SimpleNamespace(scale=head**-0.5, sinks=sinks)
        layer = types.SimpleNamespace(
            num_heads=heads, num_kv_heads=kv_heads, head_size=head, sliding_window=window, impl=impl
        )
        whole = reference_attention.forward(layer, query.flatten(1), key.flatten(1), value.flatten(1))
        for last in (1, tokens):
            got = verify_gpu.attention_reference(query[-last:], key, value, sinks, window)
            torch.testing.assert_close(got.float().flatten(1), whole[-last:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_verify_gpus_pages_hold_the_sequence(kv):
    import torch
    import verify_gpu

    print("seed", 4)
    stored = getattr(torch, verify_gpu.KV[kv])
    pages = verify_gpu.Pages(37, torch.Generator().manual_seed(4), stored)
    assert pages.cache.dtype == stored
    for index, tokens in enumerate((pages.key, pages.value)):
        for token in (0, 15, 16, 36):
            page = pages.order[token // verify_gpu.PAGE]
            assert torch.equal(pages.cache[page, index, :, token % verify_gpu.PAGE].bfloat16(), tokens[token])


def test_profile_decode_counts_a_step():
    """Three products and a negation more in each step, counted by torch's profiler on the CPU."""
    import profile_decode
    import torch

    a = torch.randn(64, 64)

    def steps(count: int) -> None:
        a.exp()
        for _ in range(count):
            (a @ a @ a @ a).neg()

    activity = torch.profiler.ProfilerActivity.CPU
    long, short = (profile_decode.profiled(lambda count=count: steps(count), activity) for count in (9, 1))
    found = profile_decode.step(long, short, 8)
    assert (found.launches["aten::mm"], found.launches["aten::neg"], found.launches["aten::exp"]) == (3, 1, 0)
    assert 0 < found.busy <= sum(found.microseconds.values())
    assert any(line.startswith("| aten::mm | 3.0 | ") for line in profile_decode.tables(found, 20).splitlines())


def test_kinds_of_kernels():
    """Those of this fork, every one by its name in the headers, and what else a step runs."""
    import profile_decode

    family = SCRIPTS.parent / "include/flashinfer/sm12x"
    headers = [header for header in family.rglob("*.cuh") if header.parent.name != "probe"]
    defined = {name for header in headers for name in re.findall(r"\b(\w+_kernel)\(const", header.read_text())}
    ours = {
        "fused_moe_kernel": "MoE",
        "moe_prologue_kernel": "MoE",
        "moe_pack_kernel": "MoE",
        "grouped_gemm_kernel": "MoE",
        "dense_layer_kernel": "dense, this fork",
        "pack_rows_kernel": "dense, this fork",
        "dequantize_rows_kernel": "dense, this fork",
        "row_top_k_kernel": "dense, this fork",
        "rescore_kernel": "dense, this fork",
        "chunk_top_k_kernel": "dense, this fork",
        "router_logits_kernel": "routing",
        "router_top_k_kernel": "routing",
        "decode_attention_kernel": "attention",
    }
    assert set(ours) == defined
    names = {f"void flashinfer::sm12x::{name}<Foo>(flashinfer::sm12x::Params)": kind for name, kind in ours.items()}
    names |= {
        "void flashinfer::sm12x::grouped_gemm_kernel<flashinfer::sm12x::GemmConfig<(flashinfer::sm12x::Role)2, "
        "Foo> >": ("dense, this fork"),
        "triton_red_fused__to_copy_add_mean_moe_forward_mul_pow_rsqrt_0": "norms and the like",
        "kernel_mha": "attention",
        "nvjet_tst_128x8_64x12_2x1_v_bz_TNT": "GEMM",
        "void marlin::Marlin<...>": "Marlin",
        "void vllm::moe::topkGating<8, 32>": "routing",
        "Memcpy DtoD": "copies",
        "unheard of": "other",
    }
    assert {name: profile_decode.kind_of(name) for name in names} == names


def rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """The cells of a script's table, without its head."""
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    return [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]


def test_compare_vllm_prints_what_vllms_benchmark_measured(checkpoint_folder, tmp_path):
    """vLLM's own ``vllm bench serve``, against the server of the other tests; every way is one of its servers."""
    words = (str(checkpoint_folder), "--streams", "1,2", "--input", "8", "--output", "4", "--out", str(tmp_path))
    table = rows(run("compare_vllm.py", *words, "--ways", "fork, W4A16", "--port", port()))
    assert [row[:3] for row in table] == [["fork, W4A16", n, "8"] for n in "12"]
    for row, file in zip(table, sorted((tmp_path / "fork_W4A16").iterdir())[1:], strict=True):
        found = json.loads(file.read_text())
        assert found["total_input_tokens"] == found["completed"] * int(row[2])
        assert row[3] == f"{found['output_throughput']:,.1f}"
        assert row[4] == f"{found['mean_tpot_ms']:,.2f} ± {found['std_tpot_ms']:,.2f}"
        assert float(row[5].partition(" ")[0]) > 0
        assert (len(row) == 7 and float(row[6].replace(",", "")) > 0) == (row[1] == "1")
