# SPDX-License-Identifier: Apache-2.0
"""Marlin's grouped GEMM with MXFP4 weights and bf16 activations, from the sglang package: 1, 16 and 64 tokens."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from bf16 import from_bf16, to_bf16

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
EXPERTS, TOP_K, N, K = 8, 4, 512, 384
# By the number of tokens: the routes of a block (upstream takes the smallest number that the average expert does not
# nearly fill), and one of upstream's configurations for it: tile along N, tile along K, threads of a block, blocks per
# SM. For 8 routes it is the one that upstream takes on an SM12x, with the most blocks per SM.
CASES = {1: (8, 128, 64, 128, 3), 16: (16, 128, 128, 256, 1), 64: (48, 256, 64, 256, 1)}
RACE = {"race": ("st.shared.v4.f32",)}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The folder of the package's kernels: of an installed one, else of a wheel that pip downloads."""
    try:
        return Path(str(importlib.metadata.distribution("sglang").locate_file("sglang/kernels/jit")))
    except importlib.metadata.PackageNotFoundError:
        pass
    folder = tmp_path_factory.mktemp("sglang")
    # Any platform's would do: nothing of it is run.
    platform = ("--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_34_x86_64")
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", *platform,
               "-r", HERE / "requirements.txt", "-d", folder)  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("sglang-*.whl"))
    if not wheels:
        pytest.skip(f"sglang is not installed, and pip cannot download its wheel: {done.stderr[-500:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("sglang/kernels/jit/")])
    return folder / "sglang/kernels/jit"


@pytest.fixture(scope="module")
def build(compile_cuda, sources, wheel):
    """A program for a number of tokens: 7 s of nvcc."""
    tvm_ffi = importlib.util.find_spec("tvm_ffi")
    if tvm_ffi is None or tvm_ffi.origin is None:
        pytest.skip("the package's kernels need the headers of apache-tvm-ffi, which is not installed")
    headers = (sources / "include", sources / "csrc", Path(tvm_ffi.origin).parent / "include",
               wheel / "cccl/libcudacxx/include")  # fmt: skip

    def program(tokens: int) -> Path:
        names = ("BLOCK", "N_TILE", "K_TILE", "THREADS", "BLOCKS_PER_SM")
        defines = (f"-D{name}={value}" for name, value in zip(names, CASES[tokens], strict=True))
        flags = ("-std=c++20", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-w", "-DSGL_CUDA_ARCH=1210",
                 "-gencode", "arch=compute_121a,code=compute_121a", *(f"-I{path}" for path in headers))  # fmt: skip
        return compile_cuda(f"marlin_{tokens}", HERE / "marlin_moe.cu", flags=(*flags, *defines))

    return program


def store_elements(codes: np.ndarray) -> np.ndarray:
    """E2M1 codes [expert, n, k] as Marlin has them: for each 16 of k and 64 of n a word of 8 codes for each lane of 4
    warps, in the order in which the lane needs them for its fragments of two n x k = 8 x 16 matrices."""
    lane, warp = np.arange(32)[:, None, None], np.arange(4)[:, None]
    slot = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # 4 of the first matrix, 4 of the second
    column = 16 * warp + lane // 4 + 8 * (slot // 4)
    row = 2 * (lane % 4) + np.array([0, 1, 8, 9])[slot % 4]
    experts, n, k = codes.shape
    picked = codes.reshape(experts, n // 64, 64, k // 16, 16)[:, :, column, :, row]
    words = picked.astype(np.uint32) << (4 * np.arange(8)[:, None, None, None]).astype(np.uint32)
    return np.ascontiguousarray(words.sum(2, dtype=np.uint32).transpose(2, 4, 3, 0, 1))


def store_scales(scales: np.ndarray) -> np.ndarray:
    """E8M0 [expert, k / 32, n]: 8 x 8 columns transposed, then the middle two of each four exchanged."""
    transposed = scales.reshape(*scales.shape[:-1], -1, 8, 8).swapaxes(-1, -2)
    return np.ascontiguousarray(transposed.reshape(-1, 4)[:, [0, 2, 1, 3]])


@pytest.mark.parametrize("tokens", CASES)
def test_grouped_gemm(build, run_checked, tmp_path, tokens):
    """Each route's row times its expert's weights and its own, against float64."""
    block = CASES[tokens][0]
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    activations = to_bf16(rng.standard_normal((tokens, K)))
    codes = rng.integers(0, 16, (EXPERTS, N, K), np.uint8)
    scales = rng.integers(120, 129, (EXPERTS, K // 32, N), np.uint8)
    # Experts that have routes have the same number of them.
    chosen = (rng.integers(EXPERTS) + np.arange(tokens * TOP_K).reshape(tokens, TOP_K)) % EXPERTS
    weights = from_bf16(to_bf16(rng.random((tokens, TOP_K)))).astype(np.float32)
    routes, block_experts = [], []
    for expert in range(EXPERTS):
        mine = np.flatnonzero(chosen.ravel() == expert)
        blocks = -(-len(mine) // block)
        routes.append(np.pad(mine, (0, blocks * block - len(mine)), constant_values=tokens * TOP_K))
        block_experts += [expert] * blocks
    padded = np.concatenate(routes).astype(np.int32)
    arrays = (activations, store_elements(codes), store_scales(scales), padded, np.array(block_experts, np.int32),
              np.array([padded.size], np.int32), weights)  # fmt: skip
    (tmp_path / "in").write_bytes(b"".join(array.tobytes() for array in arrays))
    # What the checkers find, with no effect on what is stored: rows of a block without a route are multiplied as shared
    # memory has them; after the last tile of K each warp loads registers from the stage that would be next, which
    # nothing filled, or where with the smaller tiles another warp puts its partial sums already.
    known = {"uninitialized read": ("ldmatrix.", "ld.shared.")} | (RACE if tokens < 64 else {})
    command = (build(tokens), tokens, TOP_K, EXPERTS, N, K, padded.size, tmp_path / "in", tmp_path / "out")
    _, launches = run_checked(*command, known=known)
    assert launches[0]["counters"]["mma_flops"] >= 2 * tokens * TOP_K * N * K
    got = from_bf16(np.fromfile(tmp_path / "out", np.uint16)).reshape(tokens, TOP_K, N)
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7] * np.exp2(np.repeat(scales.swapaxes(1, 2), 32, 2) - 127.0)
    a = from_bf16(activations)
    worst = 0.0
    for token in range(tokens):
        for route, expert in enumerate(chosen[token]):
            weight = float(weights[token, route])
            expected = weight * (values[expert] @ a[token])
            magnitude = weight * (np.abs(values[expert]) @ np.abs(a[token]))
            # Elements times scales are exact in bf16. The sum is rounded to float32 once for each 16 of K and where
            # partial sums meet (8 of a block, up to 8 blocks), to bf16 before the route's weight and after it (2^-8
            # each).
            bound = 2.0**-7 * (1 + 2.0**-9) * np.abs(expected) + 2.0**-24 * (K // 16 + 16) * magnitude
            share = np.max(np.abs(got[token, route] - expected) / bound)
            assert share <= 1, (token, route, expert)
            worst = max(worst, share)
    print(f"{worst:.2f} of the bound")
